"""Interdomain Attention trained with TorchTitan: a model variant for its own trainer, and a trainer of ours.

    spec, spec_0_3, variant    the variant, on TorchTitan 0.2.2 and 0.3.0; entry_0_3: TOML files for 0.3.0's entry
    trainer, entry             our trainer: torchrun ... -m interdomain.titan.entry FILE.toml

    parallelize                shards and compiles a model, for both trainers

    settings                   the schema of the settings, the rules about several of them, reading TOML and flags
    plan                       everything that is computed and refused before anything is built
    data                       batches
    step                       meshes, passes, gradients, optimizer and step guard of one step
    resume                     checkpoints, the way back, the folder's lock, preemption
    watch                      metrics, curves, validation
    host                       the only package that imports TorchTitan: a module for each version

Imports interdomain.model, data, scan and features; only `tools` imports this package.
"""

import sys
from typing import Any


def __getattr__(name: str) -> Any:
    """TorchTitan asks for `JobConfig` (0.2.2, job.custom_config_module), or for a file's configuration (0.3.0, --config).

    `get_train_spec` is what each of TorchTitan 0.2.2's own model folders has; `model_spec` (0.3.0) is for a `Trainer.Config` of
    the user's own.
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


if "torchtitan.protocols.train_spec" in sys.modules:  # 0.2.2: experimental.custom_import
    from . import spec  # noqa: F401
