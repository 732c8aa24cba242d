"""TorchTitan 0.3.0 (PyTorch 2.14 or later), with the names and signatures of `titan_0_2` for the other modules."""

# ruff: noqa: F401 (names for the other modules)

import dataclasses
from types import SimpleNamespace
from typing import Any

from torch import nn
from torchtitan.components import checkpointer, loss, metrics, optimizer
from torchtitan.components import dataloader as titan_dataloader
from torchtitan.components import tokenizer as titan_tokenizer
from torchtitan.components import validate as titan_validate
from torchtitan.components.checkpointer.base import (
    DATALOADER,
    LR_SCHEDULER,
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
TORCHTITAN_SETTINGS: dict[str, Any] = {}  # its settings are not those of TOML files
SAVED_OPS = activation_checkpoint._get_default_save_ops()
# Modules that hold the device by name.
DEVICE_COPIES = (utils, dist_utils, parallel_dims, metrics, profiler, token_dispatcher)


class CheckpointManager(checkpointer.CheckpointManager):
    def __init__(self, *, checkpoint_config: Any, **parts: Any) -> None:
        super().__init__(checkpoint_config, **parts)

    def _async_wait(self) -> None:
        if self.enable and self.save_future is not None:
            super()._wait_for_saving()

    def _wait_for_saving(self) -> None:
        self._async_wait()


class OptimizersContainer(optimizer.OptimizersContainer):
    def _post_init(self, parameters: list[nn.Parameter], kwargs: Any = None) -> None:
        names = {
            id(p): canonical_fqn(name)
            for model in self.model_parts
            for name, p in model.named_parameters()
        }
        for one in self.optimizers:
            for group in one.param_groups:
                group["param_names"] = [names[id(p)] for p in group["params"]]
        super()._post_init(parameters)


class MetricsProcessor(metrics.MetricsProcessor):
    def __init__(self, job_config: Any, parallel_dims: ParallelDims) -> None:
        super().__init__(job_config.metrics, parallel_dims=parallel_dims)


def generate_llm_fqn_per_model_part(*numbers: int) -> list[list[str]]:
    stages = _generate_llm_fqn_per_model_part(*numbers)
    return [["output" if name == "lm_head" else name for name in stage] for stage in stages]


def apply_ac(model: nn.Module, settings: Any, *, op_sac_save_list: set, **options: Any) -> None:
    class Selective(activation_checkpoint.SelectiveAC):
        def get_save_ops(self) -> set:
            return op_sac_save_list

    if settings.mode == "full":
        activation_checkpoint.FullAC(activation_checkpoint.FullAC.Config()).apply(model)
    else:
        Selective(activation_checkpoint.SelectiveAC.Config()).apply(model)


def apply_compile(model: nn.Module, settings: Any) -> None:
    compiled = CompileConfig(
        enable=True, components=list(settings.components), backend=settings.backend
    )
    no_tensor_axis: Any = SimpleNamespace(tp_enabled=False)  # it would be for fused matrix products
    titan_compile.apply_compile(model, compile_config=compiled, parallel_dims=no_tensor_axis)


def tokenizer_settings(tokenizer: Any) -> dict[str, Any]:
    """What tokenizer_config.json says of TorchTitan's tokenizer; nothing if there is no such file."""
    return tokenizer._hf_config or {}


SECTIONS = {  # with TorchTitan's names and values of ours where both have a setting
    "training": TrainingConfig,
    "parallelism": ParallelismConfig,
    "compile": CompileConfig,
    "comm": CommConfig,
    "debug": DebugConfig,
    "metrics": metrics.MetricsProcessor.Config,
    "checkpoint": checkpointer.CheckpointManager.Config,
    "profiler": profiler.Profiler.Config,
}
CHANGED = {  # what is not TorchTitan's default
    "training": {"disable_cuda_graphs": True},  # logged steps read the device
    "debug": {"enable_structured_logging": False},
    "checkpoint": {"last_save_model_only": False},
}


def section_of(job: Any, name: str, theirs: dict[str, Any] | None = None) -> Any:
    """TorchTitan's section of this name, with our values where both have a setting.

    theirs: values of settings that only TorchTitan has.
    """
    kind = SECTIONS[name]
    names = {f.name for f in dataclasses.fields(kind)}
    ours = vars(job.profiling if name == "profiler" else getattr(job, name))
    values = {n: value for n, value in ours.items() if n in names}
    return kind(**values | CHANGED.get(name, {}) | (theirs or {}))


def translate(job: Any) -> Any:
    """A copy of our configuration for TorchTitan's classes, with TorchTitan's settings where ours has no field, and its
    names of sections beside ours."""
    config = SimpleNamespace(
        to_dict=job.to_dict, dump_folder=job.job.dump_folder, profiler=section_of(job, "profiler")
    )
    for name, ours in vars(job).items():
        theirs = section_of(job, name) if name in SECTIONS else ours
        fields = {f.name: getattr(theirs, f.name) for f in dataclasses.fields(theirs)}
        setattr(config, name, SimpleNamespace(**fields | vars(ours)))
    config.validator = config.validation
    return config
