"""Interdomain Attention trained with TorchTitan: `torchrun ... -m interdomain.titan.entry FILE.toml`.

`schema` and `settings` read a configuration, `plan` refuses what cannot run before anything is built, and `trainer` builds the
run and holds its training step. `parallelize`, `gradients`, `optimizer`, `dataloader`, `validate`, `metrics` are its parts;
`checkpoint`, `resume_from`, `lock`, `preemption` and `guard` keep it from being lost. `host` alone imports
TorchTitan. This package imports interdomain.model, .data, .scan and .features; only `tools` imports it.
"""

import sys

from .errors import stop

if getattr(sys.modules["__main__"].__spec__, "name", "") == "torchtitan.train":
    stop(
        "TorchTitan's own entry point cannot train this model: start torchrun with -m interdomain.titan.entry, same flags."
    )
