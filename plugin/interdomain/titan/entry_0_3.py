"""TOML files for TorchTitan 0.3.0's own entry: `-m torchtitan.train --module interdomain.titan --config FILE.toml`.

The TOML file is read as `./launch.sh` reads it. Beside our settings it may have those that only TorchTitan has. Flags are
TorchTitan's own and those of [model], [mixer] and [data]; they win over the file.
"""

import copy
import dataclasses
import sys
from dataclasses import dataclass
from typing import Any, get_type_hints

from .data.dataloader import PackedLoader, open_data
from .data.folders import data_record, open_tokenizer
from .errors import user_errors
from .host import (
    SECTIONS,
    ModelSpec,
    Trainer,
    loss,
    optimizer,
    section_of,
    titan_dataloader,
    titan_tokenizer,
    titan_validate,
)
from .host.patches import use_cpu_if_alone
from .settings.job_config import (
    PATHS,
    drop_unread_n_basis,
    expand_paths,
    job_config_of,
    let_steps_win,
    read_job_config,
    read_toml,
    refuse_wrong_value,
    value_of,
)
from .settings.schema import Data, JobConfig, Mixer, Model
from .spec_0_3 import (
    CHECKPOINTING,
    OTHER_NAMES,
    ModelConfig,
    built_by,
    make_plan_of,
    spec_of,
    take_sections,
)
from .step.optimizer import GroupedOptimizers, GroupedSchedulers
from .variant import (
    OURS_ALONE,
    FixedWindows,
    record_run,
    refuse_checkpoints_outside,
)

# Sections whose component is ours: a setting that only TorchTitan has would have no effect.
OUR_COMPONENTS = ("optimizer", "lr_scheduler", "dataloader")
# TorchTitan's flags of [lr_scheduler] that we have.
SCHEDULE = ("warmup_steps", "total_steps", "decay_ratio", "decay_type")


@dataclass(kw_only=True, slots=True)
class WindowsConfig(titan_dataloader.BaseDataLoader.Config):
    infinite: bool = False  # TorchTitan's validator sets it


@dataclass(kw_only=True, slots=True)
class OurSections(Trainer.Config):
    """TorchTitan's sections, and those that only we have: their settings are flags, too."""

    model: Model = dataclasses.field(default_factory=Model)
    mixer: Mixer = dataclasses.field(default_factory=Mixer)
    data: Data = dataclasses.field(default_factory=Data)


def configuration(file: str) -> Any:
    """The configuration of a TOML file, for TorchTitan's entry. Raises: SystemExit: it cannot be read; why is printed."""
    use_cpu_if_alone()
    job, theirs = user_errors(read_file)(file)
    spec = spec_of(job)

    def loader(*, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> PackedLoader:
        settings = loader_settings(job, local_batch_size)
        tokenizer, packed = open_data(settings, spec.model.plan, dp_rank, dp_world_size)
        record_run(job, spec.model.plan, data_record(job, packed.dataset, tokenizer), tokenizer)
        return packed

    def windows(*, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> FixedWindows:
        settings = loader_settings(job, job.training.local_batch_size)
        # Without a pipeline a batch of validation has a size of its own.
        size = local_batch_size if job.parallelism.pipeline_parallel_degree > 1 else job.validation.local_batch_size
        return FixedWindows(settings, dp_rank, dp_world_size, size)

    class VariantTrainer(Trainer):
        """TorchTitan's trainer; before it builds anything, the run's plan is checked."""

        @dataclass(kw_only=True, slots=True)
        class Config(OurSections):
            pass

        def __init__(self, config: Any) -> None:
            prepare(config, spec.model)
            super().__init__(config)

    return user_errors(trainer_config)(VariantTrainer.Config, job, theirs, spec, loader, windows)


def trainer_config(
    kind: type, job: JobConfig, theirs: dict[str, dict[str, Any]], spec: ModelSpec, loader: Any, windows: Any
) -> Any:
    """A configuration of the class `kind` with the values of a file. theirs: of settings that only TorchTitan has."""
    sections = {name: section_of(job, name, theirs.get(name, {})) for name in SECTIONS}
    schedule = {name: getattr(job.lr_scheduler, name) for name in SCHEDULE}
    return kind(
        model_spec=spec,
        model=job.model,
        mixer=job.mixer,
        data=job.data,
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
            **schedule,
        ),
        validator=titan_validate.Validator.Config(
            enable=job.validation.enable, freq=job.validation.freq, dataloader=built_by(WindowsConfig, windows)
        ),
        activation_checkpoint=CHECKPOINTING[job.activation_checkpoint.mode](),
        **sections,
    )


def configuration_of_ours(file: str, trainer: Any) -> Any:
    """The same for our trainer: `-m torchtitan.train --module interdomain.titan.trainer --config FILE.toml`.

    trainer: the class `InterdomainTrainer`, whose module imports this one.
    """
    use_cpu_if_alone()
    job = user_errors(read_job_config)(["--job.config_file", file])

    class EnteredTrainer(trainer):
        """Our trainer, built from TorchTitan's configuration."""

        @dataclass(kw_only=True, slots=True)
        class Config(OurSections):
            pass

        def __init__(self, config: Any) -> None:
            user_errors(refuse_theirs)(config, job)
            user_errors(take_flags)(config, job)
            super().__init__(job)

    return trainer_config(EnteredTrainer.Config, job, {}, spec_of(job), lambda **_: None, lambda **_: None)


def refuse_theirs(config: Any, job: JobConfig) -> None:
    """Raises: ValueError for a flag that only TorchTitan's trainer has."""
    if config.override.imports:
        raise ValueError(
            f"override.imports = {config.override.imports} has no effect in our trainer. Leave it out, or start with --module "
            "interdomain.titan."
        )
    for section in SECTIONS:
        ours = getattr(job, OTHER_NAMES.get(section, section))
        before, after = section_of(job, section), getattr(config, section)
        for field in dataclasses.fields(before):
            value = getattr(after, field.name)
            if not hasattr(ours, field.name) and value != getattr(before, field.name):
                raise ValueError(
                    f"{section}.{field.name} = {value} has no effect in our trainer. Leave it out, or start with --module "
                    "interdomain.titan."
                )


def read_file(file: str) -> tuple[JobConfig, dict[str, dict[str, Any]]]:
    """A TOML file's configuration, and its values of settings that only TorchTitan has, by TorchTitan's section.

    Raises: ValueError, FileNotFoundError.
    """
    table = read_toml(file)
    theirs: dict[str, dict[str, Any]] = {}
    for section, kind in SECTIONS.items():
        ours = table.get(OTHER_NAMES.get(section, section), {})
        known = {
            field.name for field in dataclasses.fields(type(value_of(JobConfig(), OTHER_NAMES.get(section, section))))
        }
        for name, annotation in get_type_hints(kind, include_extras=True).items():
            if name in ours and name not in known:
                value = ours.pop(name)
                refuse_wrong_value(f"{section}.{name}", value, annotation)
                theirs.setdefault(section, {})[name] = value
    job = job_config_of(table)
    job.job.config_file = file
    return job, theirs


def loader_settings(job: JobConfig, local_batch_size: int) -> JobConfig:
    """Our configuration for a loader: batches of this size, and positions where context parallelism slices them."""
    settings = copy.deepcopy(job)
    settings.training.local_batch_size = local_batch_size
    if job.parallelism.context_parallel_degree > 1:
        settings.data.reset_state_at_documents = True
    return settings


@user_errors
def prepare(config: Any, model: ModelConfig) -> None:
    """Carry the flags over into our configuration, check it, and make its plan.

    Raises: SystemExit: the configuration cannot run; the reason is printed.
    """
    job = model.job
    take_flags(config, job)
    if config.training.mixed_precision_param != "bfloat16":
        raise ValueError(
            "training.mixed_precision_param has no effect beside training.precision: set that in the TOML file."
        )
    for setting, does in OURS_ALONE.items():
        if value_of(job, setting) != value_of(JobConfig(), setting):
            raise ValueError(
                f"{setting} has no effect in TorchTitan's own trainer, which {does}. Leave it out, or start with "
                "--module interdomain.titan.trainer."
            )
    make_plan_of(config, model)
    config.training.steps = job.training.steps = model.plan.steps
    job.lr_scheduler.warmup_steps = model.plan.warmup_steps


def take_flags(config: Any, job: JobConfig) -> None:
    """Carry the values of our entry's configuration over into ours. Raises: ValueError for one without effect."""
    if config.hf_assets_path != Trainer.Config().hf_assets_path:
        raise ValueError("hf_assets_path has no effect: the tokenizer is that of data.corpus. Leave it out.")
    job.job.dump_folder = config.dump_folder
    job.model, job.mixer, job.data = config.model, config.mixer, config.data
    let_steps_win(job, sys.argv[1:])
    drop_unread_n_basis(job, sys.argv[1:])
    for section in (*OUR_COMPONENTS, "validator"):
        theirs = getattr(config, section)
        ours = getattr(job, OTHER_NAMES.get(section, section))
        for field in dataclasses.fields(theirs):
            value, default = getattr(theirs, field.name), field.default
            if hasattr(ours, field.name):
                setattr(ours, field.name, value)
            elif section in OUR_COMPONENTS and default is not dataclasses.MISSING and value != default:
                raise ValueError(f"{section}.{field.name} = {value} has no effect with this model. Leave it out.")
    take_sections(config, job)
    expand_paths(job)
    refuse_checkpoints_outside(job)
    config.dump_folder = job.job.dump_folder
    for section in SECTIONS:
        theirs = getattr(config, section)
        for setting in PATHS:
            ours, _, name = setting.partition(".")
            if ours == OTHER_NAMES.get(section, section) and hasattr(theirs, name):
                setattr(theirs, name, value_of(job, setting))
