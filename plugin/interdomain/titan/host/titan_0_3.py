"""TorchTitan 0.3.0 (PyTorch 2.14 or later), with the names and signatures of `titan_0_2`.

Classes and functions below wrap those of 0.3.0 whose arguments differ from 0.2.2's.
"""

# ruff: noqa: F401 (names for the other modules)

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn
from torchtitan.components import checkpointer, loss, metrics, optimizer
from torchtitan.components import dataloader as titan_dataloader
from torchtitan.components import tokenizer as titan_tokenizer
from torchtitan.components import validate as titan_validate
from torchtitan.components.checkpointer.base import (
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
)
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.metrics import BaseLogger, LoggerContainer
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import CommConfig, DebugConfig
from torchtitan.distributed import activation_checkpoint, parallel_dims
from torchtitan.distributed import compile as titan_compile
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part, pipeline_llm
from torchtitan.distributed.utils import set_determinism, set_pg_timeouts
from torchtitan.models.common import token_dispatcher
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.tools import profiler, utils
from torchtitan.tools.logging import init_logger, logger
from torchtitan.tools.utils import GarbageCollection
from torchtitan.trainer import Trainer

IGNORE_INDEX = loss.IGNORE_INDEX
BaseDataLoader = titan_dataloader.BaseDataLoader
# Only 0.2.2 has TOML files: there are no settings of TorchTitan's to recognise in one.
TORCHTITAN_SETTINGS: dict[str, Any] = {}
SAVED_OPS = activation_checkpoint._get_default_save_ops()
# Modules that have a copy of the device.
DEVICE_COPIES = (utils, dist_utils, parallel_dims, metrics, profiler, token_dispatcher)


class CheckpointManager(checkpointer.CheckpointManager):
    """0.3.0's manager of checkpoints, with 0.2.2's names of an argument and a method."""

    def __init__(self, *, checkpoint_config: Any, **parts: Any) -> None:
        super().__init__(checkpoint_config, **parts)

    # 0.2.2's name of this method, which `resume.checkpoint` overrides.
    def _async_wait(self) -> None:
        if self.enable and self.save_future is not None:
            super()._wait_for_saving()

    def _wait_for_saving(self) -> None:
        self._async_wait()


class OptimizersContainer(optimizer.OptimizersContainer):
    """0.3.0's optimizers, for subclasses that do not name their parameters."""

    def _post_init(self, parameters: list[nn.Parameter], kwargs: Any = None) -> None:
        """Gives each parameter group the names of its parameters, by which 0.3.0 saves the state.

        Args:
            parameters: All parameters that the optimizers train.
            kwargs: Options of the optimizers, which only 0.2.2 takes. Ignored.
        """
        names = {}
        for model in self.model_parts:
            for name, p in model.named_parameters():
                names[id(p)] = canonical_fqn(name)
        for each in self.optimizers:
            for group in each.param_groups:
                group["param_names"] = [names[id(p)] for p in group["params"]]
        super()._post_init(parameters)


class MetricsProcessor(metrics.MetricsProcessor):
    """0.3.0's metrics, built from a whole configuration."""

    def __init__(self, job_config: Any, parallel_dims: ParallelDims) -> None:
        super().__init__(job_config.metrics, parallel_dims=parallel_dims)


def generate_llm_fqn_per_model_part(*numbers: int) -> list[list[str]]:
    """Returns the modules of each stage of a pipeline, with this model's name of the head.

    Args:
        numbers: Stages, layers, and the layers that the embedding and the head count as, as in
            0.2.2.
    """
    stages = []
    for stage in _generate_llm_fqn_per_model_part(*numbers):
        stages.append(["output" if name == "lm_head" else name for name in stage])
    return stages


def apply_ac(model: nn.Module, settings: Any, *, op_sac_save_list: set, **_: Any) -> None:
    """Applies activation checkpointing, by the section [activation_checkpoint] of this plugin.

    Args:
        model: The model or a stage of a pipeline.
        settings: The section.
        op_sac_save_list: Ops whose outputs selective checkpointing saves.
        **_: Arguments that only 0.2.2 has.
    """

    class Selective(activation_checkpoint.SelectiveAC):
        def get_save_ops(self) -> set:
            return op_sac_save_list

    if settings.mode == "full":
        activation_checkpoint.FullAC(activation_checkpoint.FullAC.Config()).apply(model)
    else:
        Selective(activation_checkpoint.SelectiveAC.Config()).apply(model)


def apply_compile(model: nn.Module, settings: Any) -> None:
    """Compiles the blocks of a model, by the section [compile] of this plugin.

    Args:
        model: The model or a stage of a pipeline.
        settings: The section.
    """
    compiled = CompileConfig(
        enable=True, components=list(settings.components), backend=settings.backend
    )
    # 0.3.0 would fuse matrix products with collectives, which needs DTensors.
    no_tensor_axis: Any = SimpleNamespace(tp_enabled=False)
    titan_compile.apply_compile(model, compile_config=compiled, parallel_dims=no_tensor_axis)


def tokenizer_settings(tokenizer: Any) -> dict[str, Any]:
    """Returns what tokenizer_config.json says of TorchTitan's tokenizer, if there is that file."""
    return tokenizer._hf_config or {}


# TorchTitan's sections that share settings with this plugin's.
SECTIONS = {
    "training": TrainingConfig,
    "parallelism": ParallelismConfig,
    "compile": CompileConfig,
    "comm": CommConfig,
    "debug": DebugConfig,
    "metrics": metrics.MetricsProcessor.Config,
    "checkpoint": checkpointer.CheckpointManager.Config,
    "profiler": profiler.Profiler.Config,
}
# Settings that only TorchTitan has and whose defaults this plugin changes.
CHANGED_DEFAULTS = {
    "training": {"disable_cuda_graphs": True},  # logged steps read the device
    "debug": {"enable_structured_logging": False},
    "checkpoint": {"last_save_model_only": False},
}


def section_of(job: Any, name: str, titan_values: Mapping[str, Any] | None = None) -> Any:
    """Returns a section of TorchTitan's configuration, with the values of this plugin's settings.

    Settings that only TorchTitan has keep TorchTitan's defaults, or have those of CHANGED_DEFAULTS.

    Args:
        job: This plugin's `JobConfig`.
        name: TorchTitan's name of the section.
        titan_values: Values of settings that only TorchTitan has.
    """
    section_class = SECTIONS[name]
    our_name = "profiling" if name == "profiler" else name
    settings = getattr(job, our_name)
    values: dict[str, Any] = dict(CHANGED_DEFAULTS.get(name, {}))
    for field in dataclasses.fields(section_class):
        if hasattr(settings, field.name):
            values[field.name] = getattr(settings, field.name)
    values.update(titan_values or {})
    return section_class(**values)


def translate(job: Any) -> Any:
    """Returns a configuration for TorchTitan's classes, with the values of this plugin's.

    A section has this plugin's settings, and TorchTitan's defaults of settings that only TorchTitan
    has. Sections with other names in TorchTitan stand there under both.

    Args:
        job: This plugin's `JobConfig`.
    """
    config = SimpleNamespace(to_dict=job.to_dict, dump_folder=job.job.dump_folder)
    for name, settings in vars(job).items():
        values = dict(vars(settings))
        if name in SECTIONS:
            section = section_of(job, name)
            for field in dataclasses.fields(section):
                values.setdefault(field.name, getattr(section, field.name))
        setattr(config, name, SimpleNamespace(**values))
    config.profiler = section_of(job, "profiler")
    config.validator = config.validation
    return config
