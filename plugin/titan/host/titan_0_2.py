"""TorchTitan 0.2.2: every name of it that the plugin uses, what must be replaced in it, and its configuration.

A method that is overridden under a name which TorchTitan no longer calls would be silently without effect. So `HOOKED` lists
all that are overridden or called, and `require_hooks` refuses to start where one is missing.
"""

# ruff: noqa: F401 (names for the other modules)

import copy
import math
import os
from dataclasses import is_dataclass

import torch
from torchtitan.components import metrics
from torchtitan.components.checkpoint import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
    CheckpointManager,
)
from torchtitan.components.dataloader import BaseDataLoader, DataloaderExhaustedError
from torchtitan.components.loss import IGNORE_INDEX, build_cross_entropy_loss
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.metrics import BaseLogger, LoggerContainer, MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.validate import BaseValidator
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_, dist_max, dist_sum, set_determinism
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list as SAVED_OPS
from torchtitan.models.llama3.infra.parallelize import apply_compile, disable_fsdp_gradient_division
from torchtitan.tools import profiling, utils
from torchtitan.tools.logging import init_logger, logger
from torchtitan.tools.utils import GarbageCollection
from torchtitan.train import Trainer

HOOKED = {
    Trainer: "init_distributed batch_generator train train_step should_continue_training state_dict load_state_dict close",
    CheckpointManager: "load save close dcp_load dcp_save maybe_wait_for_staging _async_wait _save_last_step "
    "_purge_stale_checkpoints _find_load_step _create_checkpoint_id",
    OptimizersContainer: "step zero_grad state_dict load_state_dict _validate_length _post_init",
    LRSchedulersContainer: "step state_dict load_state_dict",
    MetricsProcessor: "should_log log log_validation close",
    LoggerContainer: "add_logger log close",
    BaseLogger: "log close",
    BaseValidator: "should_validate validate",
    ParallelDims: "get_mesh get_optional_mesh fsdp_enabled dp_replicate_enabled",
    HuggingFaceTextDataset: "state_dict load_state_dict",
    GarbageCollection: "run",
}


def require_hooks() -> None:
    """Raises: ValueError that names what the plugin overrides or calls and TorchTitan does not have."""
    missing = [
        f"{owner.__name__}.{name}" for owner in HOOKED for name in HOOKED[owner].split() if not hasattr(owner, name)
    ]
    if missing:
        raise ValueError(
            f"this TorchTitan has no {', '.join(missing)}, which the plugin overrides or calls: has it been changed since "
            "release 0.2.2? The run would go on without locks, checkpoints or guards that depend on it. Install the release: "
            "pip install --force-reinstall torchtitan==0.2.2."
        )


def replace_device(device_type: str, device_module) -> None:
    """Make TorchTitan compute on a device that it does not know: all that is replaced in it.

    TorchTitan assumes an accelerator, and several of its modules hold copies of these two names.
    """
    for module in (utils, dist_utils, parallel_dims, metrics, profiling):
        module.device_type, module.device_module = device_type, device_module
    # TorchTitan would take the device for an A100. There is no figure to compare with: the utilisation shown is 0.
    utils.get_peak_flops = lambda device_name: math.inf


def local_device() -> torch.device:
    """This rank's device, made the current one."""
    device = torch.device(f"{utils.device_type}:{os.environ['LOCAL_RANK']}")
    utils.device_module.set_device(device)
    return device


class Configuration(JobConfig):
    """TorchTitan's configuration with the plugin's sections and fields set on it."""

    def to_dict(self) -> dict:
        return _plain(self)


def translate(job) -> Configuration:
    """What TorchTitan's classes read: a copy of our configuration, with TorchTitan's defaults where ours has no field."""
    config = Configuration()
    for name, section in vars(job).items():
        if hasattr(config, name):
            vars(getattr(config, name)).update(vars(section))
        else:
            setattr(config, name, copy.copy(section))
    return config


def _plain(value):
    return {name: _plain(part) for name, part in vars(value).items()} if is_dataclass(value) else value
