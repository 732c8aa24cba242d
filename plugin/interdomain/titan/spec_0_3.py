"""The model for TorchTitan 0.3.0's own entry: `-m torchtitan.train --module interdomain.titan --config FILE.toml`.

The TOML file is read as `./launch.sh` reads it. Flags are TorchTitan's own, and win over the file. The settings of [model],
[mixer], [data] and [activation_checkpoint] stand in the file alone.
"""

import dataclasses
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from torch import nn

from .data.dataloader import PackedLoader, open_data
from .data.folders import data_record, open_tokenizer
from .errors import user_errors
from .host import (
    SECTIONS,
    BaseModel,
    ModelSpec,
    Trainer,
    loss,
    optimizer,
    section_of,
    titan_dataloader,
    titan_tokenizer,
    titan_validate,
)
from .plan.device import use_cpu_if_alone
from .plan.run_plan import RunPlan, make_plan
from .settings.job_config import PATHS, expand_paths, let_steps_win, read_job_config, value_of
from .settings.schema import JobConfig
from .step.optimizer import GroupedOptimizers, GroupedSchedulers
from .variant import (
    OURS_ALONE,
    FixedWindows,
    FolderNames,
    TitanTransformer,
    parallelize_variant,
    record_run,
    refuse_checkpoints_outside,
)

OTHER_NAMES = {"validator": "validation", "profiler": "profiling", "dataloader": "data"}  # of our sections
OURS = ("optimizer", "lr_scheduler", "dataloader")  # in which a setting that only TorchTitan has has no effect
SCHEDULE = (
    "warmup_steps",
    "total_steps",
    "decay_ratio",
    "decay_type",
)  # TorchTitan's flags of [lr_scheduler] that we have


@dataclass(kw_only=True, slots=True)
class ModelConfig(BaseModel.Config):
    plan: Annotated[RunPlan | None, tyro.conf.Suppress] = None

    def update_from_config(self, **_: Any) -> None:
        """Nothing: the plan has all."""

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        assert self.plan is not None
        return self.plan.n_params, self.plan.flops_per_token

    def build(self, **_: Any) -> TitanTransformer:
        return TitanTransformer(self.plan)


def built_by(base: type, make: Callable[..., Any], **values: Any) -> Any:
    """A configuration of TorchTitan's class `base` whose component is what `make` returns for the trainer's arguments."""

    @dataclass(kw_only=True, slots=True)
    class Built(base):
        def build(self, **arguments: Any) -> Any:
            return make(**arguments)

    return Built(**values)


@dataclass(kw_only=True, slots=True)
class WindowsConfig(titan_dataloader.BaseDataLoader.Config):
    infinite: bool = False  # TorchTitan's validator sets it


def configuration(file: str) -> Any:
    """The configuration of a TOML file, for TorchTitan's entry. Raises: SystemExit: the file cannot be read; why is printed."""
    use_cpu_if_alone()
    job = user_errors(read_job_config)(["--job.config_file", file])

    def loader(*, dp_world_size: int, dp_rank: int, **_: Any) -> PackedLoader:
        tokenizer, packed = open_data(job, spec.model.plan, dp_rank, dp_world_size)
        record_run(job, spec.model.plan, data_record(job, packed.stages[0].dataset, tokenizer), tokenizer)
        return packed

    spec = ModelSpec(
        name="interdomain",
        flavor=job.model.flavor,
        model=ModelConfig(),
        parallelize_fn=lambda model, *, parallel_dims, **_: parallelize_variant(model, parallel_dims, job),
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=FolderNames,
    )
    windows = built_by(WindowsConfig, lambda *, dp_rank, dp_world_size, **_: FixedWindows(job, dp_rank, dp_world_size))
    base = titan_validate.Validator.Config

    class VariantTrainer(Trainer):
        """TorchTitan's trainer; before it builds anything, the run's plan is checked."""

        @dataclass(kw_only=True, slots=True)
        class Config(Trainer.Config):
            pass

        def __init__(self, config: Any) -> None:
            prepare(config, job, spec)
            super().__init__(config)

    return VariantTrainer.Config(
        model_spec=spec,
        dump_folder=job.job.dump_folder,
        loss=loss.CrossEntropyLoss.Config(),
        tokenizer=built_by(titan_tokenizer.BaseTokenizer.Config, lambda **_: open_tokenizer(job)),
        dataloader=built_by(titan_dataloader.BaseDataLoader.Config, loader),
        optimizer=built_by(
            optimizer.OptimizersContainer.Config,
            lambda *, model_parts: GroupedOptimizers(model_parts, job.optimizer),
            implementation=job.optimizer.implementation,
        ),
        lr_scheduler=built_by(
            optimizer.LRSchedulersContainer.Config,
            lambda *, optimizers, training_steps: GroupedSchedulers(optimizers, job.lr_scheduler, training_steps),
            **{name: getattr(job.lr_scheduler, name) for name in SCHEDULE},
        ),
        validator=base(enable=job.validation.enable, freq=job.validation.freq, dataloader=windows),
        activation_checkpoint=None,
        **{name: section_of(job, name) for name in SECTIONS},
    )


@user_errors
def prepare(config: Any, job: JobConfig, spec: Any) -> None:
    """Carry the flags over into our configuration, check it, and make its plan.

    Raises: SystemExit: the configuration cannot run; the reason is printed.
    """
    job.job.dump_folder = config.dump_folder
    let_steps_win(job, sys.argv[1:])
    for section in (*SECTIONS, *OURS, "validator"):
        theirs, mine = getattr(config, section), getattr(job, OTHER_NAMES.get(section, section))
        for field in dataclasses.fields(theirs):
            value, default = getattr(theirs, field.name), field.default
            if hasattr(mine, field.name):
                setattr(mine, field.name, value)
            elif section in OURS and default is not dataclasses.MISSING and value != default:
                raise ValueError(f"{section}.{field.name} = {value} has no effect with this model. Leave it out.")
    expand_paths(job)
    refuse_checkpoints_outside(job)
    config.dump_folder = job.job.dump_folder
    for section in SECTIONS:
        theirs = getattr(config, section)
        for setting in PATHS:
            ours, _, name = setting.partition(".")
            if ours == OTHER_NAMES.get(section, section) and hasattr(theirs, name):
                setattr(theirs, name, value_of(job, setting))
    for axis in ("context", "tensor", "pipeline"):
        if (degree := getattr(job.parallelism, f"{axis}_parallel_degree")) > 1:
            raise ValueError(
                f"parallelism.{axis}_parallel_degree = {degree}: TorchTitan 0.3.0's own trainer hands typed tensors over on "
                "this axis, which the model does not take. Start with -m interdomain.titan.entry FILE.toml, or use 0.2.2."
            )
    if config.activation_checkpoint is not None:
        raise ValueError("activation_checkpoint has no effect as a flag with this model: set it in the TOML file.")
    if not config.training.disable_cuda_graphs:
        raise ValueError(
            "training.disable_cuda_graphs must stay on: the model's step was never captured in a CUDA graph."
        )
    for setting, does in OURS_ALONE.items():
        if value_of(job, setting) != value_of(JobConfig(), setting):
            raise ValueError(
                f"{setting} has no effect in TorchTitan's own trainer, which {does}. Leave it out, or start with "
                "-m interdomain.titan.entry FILE.toml."
            )
    plan = spec.model.plan = config.model_spec.model.plan = make_plan(job, int(os.environ["WORLD_SIZE"]))
    config.training.steps = job.training.steps = plan.steps
    job.lr_scheduler.warmup_steps = plan.warmup_steps
