"""Interdomain Attention trained with TorchTitan: `torchrun ... -m interdomain.titan.entry FILE.toml`.

    schema, settings           read the settings
    plan                       refuses settings that cannot run, before anything is built
    trainer                    builds the run and has the training step
    parallelize, gradients, optimizer, dataloader, validate, metrics     its parts
    checkpoint, resume_from, lock, preemption, guard                     saving and resuming
    host                       the only module that imports TorchTitan

Imports interdomain.model, data, scan and features; only `tools` imports this package.
"""

import sys
from typing import Any


def __getattr__(name: str) -> Any:
    """`JobConfig`, which job.custom_config_module asks for: TorchTitan is in this process, and gets the model."""
    if name != "JobConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .spec import JobConfig

    return JobConfig


if "torchtitan" in sys.modules:  # experimental.custom_import
    from . import spec  # noqa: F401
