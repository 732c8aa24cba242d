"""Training with TorchTitan: the model for TorchTitan's own trainer, and our trainer.

    spec, spec_0_3, variant    the model for the trainers of TorchTitan 0.2.2 and 0.3.0
    entry_0_3                  TOML files for the entry of 0.3.0
    trainer, entry             our trainer: torchrun ... -m interdomain.titan.entry FILE.toml

    parallelize                shards and compiles a model, for all trainers

    settings                   settings, rules about several of them, TOML files and flags
    plan                       what is computed and checked before anything is built
    data                       batches
    step                       process groups, passes, gradients, optimizer and step guard of a step
    resume                     checkpoints, resuming, the lock of a run's folder, preemption
    watch                      metrics, curves, validation
    host                       TorchTitan, which only this package imports

This package imports interdomain.model, data, checkpoint, scan and features. Only `tools` imports
it.
"""

import sys
from typing import Any


def __getattr__(name: str) -> Any:
    """Imports what TorchTitan or a user asks this package for.

    TorchTitan 0.2.2 asks for `JobConfig` (job.custom_config_module). Its scripts use
    `get_train_spec`, which all of its own models have. TorchTitan 0.3.0 asks for FILE.toml
    (--config). A user's own `Trainer.Config` of 0.3.0 uses `model_spec`.
    """
    if name in ("JobConfig", "get_train_spec"):
        from . import spec

        return getattr(spec, name)
    if name == "model_spec":
        from .spec_0_3 import model_spec

        return model_spec
    if name.endswith(".toml"):
        from .entry_0_3 import configuration

        return lambda: configuration(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# TorchTitan 0.2.2 imports this package by experimental.custom_import, to register the model.
if "torchtitan.protocols.train_spec" in sys.modules:
    from . import spec  # noqa: F401
