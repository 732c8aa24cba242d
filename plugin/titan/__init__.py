"""Interdomain Attention trained with TorchTitan: `torchrun ... -m interdomain.titan.entry --job.config_file FILE.toml`.

`host` is the only part that imports TorchTitan. `plan.py` refuses what cannot run before anything is built, and `trainer.py`
builds the run and holds its training step.
"""

import sys

from .errors import stop

if getattr(sys.modules["__main__"].__spec__, "name", "") == "torchtitan.train":
    stop(
        "TorchTitan's own entry point cannot train this model: start torchrun with -m interdomain.titan.entry, same flags."
    )
