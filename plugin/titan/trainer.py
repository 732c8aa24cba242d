"""What the plugin changes in TorchTitan's trainer, where it has no hook for it. Everything else goes through TrainSpec.

The configuration is checked and the run's folder taken before the process group exists, so that nothing is built for a run
that cannot be; the checkpoint manager is ours; between steps the run leaves if it was asked to; the optimizer sees the loss and
the gradient norm, which TorchTitan's step does not hand it (`guard`); and precision is FSDP2's policy on every topology (see
`parallelize`), so the autocast that the trainer would put around a single rank is left out.
"""

import contextlib
import functools
import logging
import os
import sys

import torch
import torchtitan.train
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import init_logger, logger

from .checkpoint import SelfDescribingCheckpoints
from .errors import one_paragraph
from .guard import seeing_loss, seeing_norm
from .lock import hold_folder, require_shared
from .plan import make_plan
from .preemption import Preemption
from .schedule import refuse_jump


def install(model_name: str) -> None:
    """Change the trainer, whichever way `torchtitan.train` was started: with -m it is `__main__` as well."""
    for module in {torchtitan.train, sys.modules["__main__"]}:
        if getattr(module, "CheckpointManager", None) is CheckpointManager:
            module.CheckpointManager = SelfDescribingCheckpoints
            module.Trainer.init_distributed = _checked_first(module.Trainer.init_distributed, model_name)
            module.Trainer.should_continue_training = _unless_asked(module.Trainer.should_continue_training, model_name)
            module.Trainer.forward_backward_step = seeing_loss(module.Trainer.forward_backward_step)
    if os.environ.get("GROUP_RANK", "0") != "0":  # torchrun's number of this node: one of many speaks for all
        logger.setLevel(logging.WARNING)
    dist_utils.clip_grad_norm_ = seeing_norm(dist_utils.clip_grad_norm_)
    dist_utils.maybe_enable_amp = lambda *_, **__: contextlib.nullcontext()


def _checked_first(init_distributed, model_name: str):
    @functools.wraps(init_distributed)
    def checked(trainer):
        config = trainer.job_config
        if config.model.name != model_name:
            return init_distributed(trainer)
        check(config)
        trainer.preemption = Preemption()
        if SelfDescribingCheckpoints.lock:  # of an earlier run of this process
            SelfDescribingCheckpoints.lock.release()
        alone = config.comm.mode != "default"  # TorchTitan's fake modes
        lock = SelfDescribingCheckpoints.lock = None if alone else hold_folder(config)
        dims = init_distributed(trainer)
        if not alone:
            require_shared(config, lock)
        return dims

    return checked


def _unless_asked(should_continue_training, model_name: str):
    """TorchTitan asks this between any two steps, after what it saves there."""

    @functools.wraps(should_continue_training)
    def should_continue(trainer):
        config = trainer.job_config
        # Its fake modes have one process and no other to agree with.
        if config.model.name == model_name and config.comm.mode == "default":
            # The first boundary, before any step: from here on there is something to save.
            if trainer.preemption.votes is None:
                trainer.preemption.listen(config.comm)
                if config.validation.enable:
                    trainer.validator.make_up(trainer)
            if not should_continue_training(trainer):
                trainer.preemption.settle()  # asked or not, the run is at its end
                return False
            trainer.checkpointer.require_folder()
            if trainer.preemption.agreed():
                trainer.preemption.leave(trainer)
        return should_continue_training(trainer)

    return should_continue


@one_paragraph
def check(job_config) -> None:
    """End the process with a paragraph unless this configuration can run on the ranks that were started."""
    if job_config.comm.mode == "default":
        ranks = os.environ["WORLD_SIZE"]
    elif (ranks := os.environ.get("NGPU", "")) == "":  # TorchTitan's fake modes start one process
        raise ValueError(
            f"comm.mode = {job_config.comm.mode!r} simulates ranks in one process: set NGPU to their number."
        )
    plan = make_plan(job_config, int(ranks))
    refuse_jump(job_config, plan.steps, plan.warmup_steps)


def run(job_config) -> None:
    """Build, train and close, as `torchtitan.train.main` does."""
    init_logger()
    trainer = torchtitan.train.Trainer(job_config)
    try:
        if job_config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
        elif job_config.comm.mode != "local_tensor":
            trainer.train()
    finally:
        trainer.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
