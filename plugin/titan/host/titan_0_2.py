"""TorchTitan 0.2.2: every name of it that the plugin uses, what must be replaced in it, and its configuration.

A method that is overridden under a name which TorchTitan no longer calls would be silently without effect. So `HOOKED` lists
what is overridden or called, and this module refuses to be imported where one of these is missing.
"""

# ruff: noqa: F401 (names for the other modules)

import copy
import math
import os
from dataclasses import fields, is_dataclass
from typing import Any

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
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.metrics import BaseLogger, LoggerContainer, MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.validate import BaseValidator
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed import parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.utils import dist_max, dist_sum, set_determinism
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list as SAVED_OPS
from torchtitan.models.llama3.infra.parallelize import apply_compile, disable_fsdp_gradient_division
from torchtitan.tools import profiling, utils
from torchtitan.tools.logging import init_logger, logger
from torchtitan.tools.utils import GarbageCollection
from torchtitan.train import Trainer

HOOKED = {
    Trainer: "init_distributed train train_step should_continue_training state_dict load_state_dict close",
    CheckpointManager: "load save close dcp_save _states_to_load _async_wait _save_last_step _purge_stale_checkpoints "
    "_create_checkpoint_id",
    OptimizersContainer: "step zero_grad state_dict load_state_dict _validate_length _post_init",
    LRSchedulersContainer: "step state_dict load_state_dict",
    MetricsProcessor: "should_log log log_validation close",
    LoggerContainer: "add_logger log close",
    BaseLogger: "log close",
    BaseValidator: "should_validate validate",
    ParallelDims: "get_mesh get_optional_mesh fsdp_enabled dp_replicate_enabled",
}

missing = [f"{owner.__name__}.{name}" for owner in HOOKED for name in HOOKED[owner].split() if not hasattr(owner, name)]
if missing:
    raise ValueError(
        f"this TorchTitan has no {', '.join(missing)}, which the plugin overrides or calls: has it been changed since release "
        "0.2.2? Install the release: pip install --force-reinstall torchtitan==0.2.2."
    )


def replace_device(device_type: str, device_module: Any) -> None:
    """Make TorchTitan compute on a device that it does not know: all that is replaced in it.

    TorchTitan assumes an accelerator, and several of its modules hold copies of these two names.
    """
    for module in (utils, dist_utils, parallel_dims, metrics, profiling):
        vars(module).update(device_type=device_type, device_module=device_module)
    # TorchTitan would take the device for an A100. There is no figure to compare with: the utilisation shown is 0.
    utils.get_peak_flops = lambda device_name: math.inf


def local_device() -> torch.device:
    """This rank's device, made the current one."""
    device = torch.device(f"{utils.device_type}:{os.environ['LOCAL_RANK']}")
    utils.device_module.set_device(device)
    return device


class Configuration(JobConfig):
    """TorchTitan's configuration with the plugin's sections and fields set on it."""

    def to_dict(self) -> dict[str, Any]:
        return _plain(self)


def translate(job: Any) -> Any:
    """What TorchTitan's classes read: a copy of our configuration, with TorchTitan's defaults where ours has no field."""
    config = Configuration()
    for section in fields(job):
        ours = getattr(job, section.name)
        if hasattr(config, section.name):
            vars(getattr(config, section.name)).update(vars(ours))
        else:
            setattr(config, section.name, copy.copy(ours))
    return config


def torchtitan_default(setting: str) -> Any:
    """TorchTitan's own value of SECTION.FIELD; None for what it does not have."""
    value = JobConfig()
    for name in setting.split("."):
        value = getattr(value, name, None)
    return value


def _plain(value: Any) -> Any:
    return {name: _plain(part) for name, part in vars(value).items()} if is_dataclass(value) else value
