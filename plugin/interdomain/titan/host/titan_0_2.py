"""TorchTitan 0.2.2: every name of it that this plugin uses, and its configuration."""

# ruff: noqa: F401 (names for the other modules)

import copy
from dataclasses import fields
from typing import Any

from torchtitan.components import metrics
from torchtitan.components.checkpoint import (
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
    CheckpointManager,
)
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX, build_cross_entropy_loss
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.metrics import BaseLogger, LoggerContainer, MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.tokenizer import build_hf_tokenizer
from torchtitan.components.validate import Validator, build_validator
from torchtitan.config import JobConfig
from torchtitan.distributed import parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part, pipeline_llm
from torchtitan.distributed.utils import set_determinism, set_pg_timeouts
from torchtitan.hf_datasets.text_datasets import build_text_dataloader
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list as SAVED_OPS
from torchtitan.models.llama3.infra.parallelize import apply_compile, disable_fsdp_gradient_division
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
from torchtitan.tools import profiling, utils
from torchtitan.tools.logging import init_logger, logger
from torchtitan.tools.utils import GarbageCollection
from torchtitan.train import Trainer

# TorchTitan's settings and their defaults, by section.
TORCHTITAN_SETTINGS = JobConfig().to_dict()
# Modules that have a copy of the device.
DEVICE_COPIES = (utils, dist_utils, parallel_dims, metrics, profiling)


def tokenizer_settings(tokenizer: Any) -> dict[str, Any]:
    """Returns what tokenizer_config.json says of TorchTitan's tokenizer, if there is that file."""
    return tokenizer.config or {}


def translate(job: Any) -> Any:
    """Returns a configuration for TorchTitan's classes, with the values of this plugin's.

    TorchTitan's defaults hold for settings that only TorchTitan has.

    Args:
        job: This plugin's `JobConfig`.
    """
    config: Any = JobConfig()
    config.to_dict = job.to_dict  # a run's record has only this plugin's settings
    # The last checkpoint can be continued from, like every other.
    config.checkpoint.last_save_model_only = False
    for section in fields(job):
        values = getattr(job, section.name)
        if hasattr(config, section.name):
            vars(getattr(config, section.name)).update(vars(values))
        else:
            setattr(config, section.name, copy.copy(values))
    return config
