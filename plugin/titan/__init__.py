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

from .errors import stop

if getattr(sys.modules["__main__"].__spec__, "name", "") == "torchtitan.train":
    stop(
        "TorchTitan's own entry point cannot train this model: start torchrun with -m interdomain.titan.entry, same flags."
    )
