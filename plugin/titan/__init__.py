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

if "torchtitan" in sys.modules:  # by `job.custom_config_module` or `experimental.custom_import`
    from .schema import JobConfig  # noqa: F401
    from . import spec  # noqa: F401
