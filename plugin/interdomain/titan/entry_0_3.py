"""TOML files for TorchTitan 0.3.0's own entry: `-m torchtitan.train --module interdomain.titan --config FILE.toml`.

The TOML file is read as `./launch.sh` reads it. Beside our settings it may have those that only TorchTitan has. Flags are
TorchTitan's own and those of [model], [mixer] and [data]; they win over the file.
"""

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
from .plan.run_plan import in_steps
from .settings.job_config import (
    apply_step_overrides,
    check_value,
    job_config_of,
    job_config_of_values,
    mixer_is_chosen,
    names_of,
    read_job_config,
    read_toml,
)
from .settings.problems import Problems
from .settings.rules import check_for_torchtitan, reads_n_basis
from .settings.schema import SETTINGS, Data, JobConfig, Mixer, Model, setting_of
from .spec_0_3 import (
    CHECKPOINTING,
    OTHER_NAMES,
    ModelConfig,
    built_by,
    make_plan_of,
    settings_of,
    spec_of,
    values_of_sections,
)
from .step.optimizer import GroupedOptimizers, GroupedSchedulers
from .variant import FixedWindows, record_run

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

    def loader(
        *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any
    ) -> PackedLoader:
        job, plan = spec.model.job, spec.model.plan
        tokenizer, packed = open_data(
            loader_settings(job, local_batch_size), plan, dp_rank, dp_world_size
        )
        record_run(job, plan, data_record(job, packed.dataset, tokenizer), tokenizer)
        return packed

    def windows(
        *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any
    ) -> FixedWindows:
        job = spec.model.job
        settings = loader_settings(job, job.training.local_batch_size)
        # Without a pipeline a batch of validation has a size of its own.
        size = (
            local_batch_size
            if job.parallelism.pipeline_parallel_degree > 1
            else job.validation.local_batch_size
        )
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
    kind: type,
    job: JobConfig,
    theirs: dict[str, dict[str, Any]],
    spec: ModelSpec,
    loader: Any,
    windows: Any,
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
        tokenizer=built_by(
            titan_tokenizer.BaseTokenizer.Config, lambda **_: open_tokenizer(spec.model.job)
        ),
        dataloader=built_by(titan_dataloader.BaseDataLoader.Config, loader),
        optimizer=built_by(
            optimizer.OptimizersContainer.Config,
            lambda *, model_parts: GroupedOptimizers(model_parts, spec.model.job.optimizer),
            implementation=job.optimizer.implementation,
        ),
        lr_scheduler=built_by(
            optimizer.LRSchedulersContainer.Config,
            lambda *, optimizers, training_steps: GroupedSchedulers(
                optimizers, spec.model.job.lr_scheduler, training_steps
            ),
            **schedule,
        ),
        validator=titan_validate.Validator.Config(
            enable=job.validation.enable,
            freq=job.validation.freq,
            dataloader=built_by(WindowsConfig, windows),
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
            user_errors(check_theirs)(config, job)
            super().__init__(user_errors(with_flags)(config, job))

    return trainer_config(
        EnteredTrainer.Config, job, {}, spec_of(job), lambda **_: None, lambda **_: None
    )


def check_theirs(config: Any, job: JobConfig) -> None:
    """Checks that no flag was given that only TorchTitan's trainer has.

    Args:
        config: TorchTitan's configuration, with the flags.

    Raises:
        ValueError: There is one.
    """
    if config.override.imports:
        raise ValueError(
            f"override.imports = {config.override.imports} has no effect in our trainer. Leave it out, or start with --module "
            "interdomain.titan."
        )
    for section in SECTIONS:
        before = section_of(job, section)
        for ours, field, value in settings_of(config, [section]):
            if ours not in SETTINGS and value != getattr(before, field.name):
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
        for name, annotation in get_type_hints(kind, include_extras=True).items():
            if name in ours and f"{OTHER_NAMES.get(section, section)}.{name}" not in SETTINGS:
                value = ours.pop(name)
                check_value(f"{section}.{name}", value, setting_of(annotation))
                theirs.setdefault(section, {})[name] = value
    return job_config_of(table).changed({"job.config_file": file}), theirs


def loader_settings(job: JobConfig, local_batch_size: int) -> JobConfig:
    """Our configuration for a loader: batches of this size, and positions where context parallelism slices them."""
    changed: dict[str, Any] = {"training.local_batch_size": local_batch_size}
    if job.parallelism.context_parallel_degree > 1:
        changed["data.reset_state_at_documents"] = True
    return job.changed(changed)


@user_errors
def prepare(config: Any, model: ModelConfig) -> None:
    """Carry the flags over into our configuration, check it, and make its plan.

    Raises:
        SystemExit: The configuration cannot run. The reasons are printed.
    """
    model.job = with_flags(config, model.job)
    check_for_torchtitan(model.job)
    make_plan_of(config, model)
    assert model.plan is not None
    model.job = in_steps(model.job, model.plan)
    config.training.steps = model.plan.steps


def with_flags(config: Any, job: JobConfig) -> JobConfig:
    """Our configuration with the values of our entry's: those of flags.

    Paths are expanded in TorchTitan's configuration, too.

    Raises:
        ValueError: A flag has no effect, or a value that is not allowed.
    """
    flags = names_of(sys.argv[1:])
    values: dict[str, Any] = {"job.dump_folder": config.dump_folder}
    for setting, _, value in settings_of(config, ("model", "mixer", "data")):
        values[setting] = value
    if mixer_is_chosen(flags) and not reads_n_basis(vars(config.mixer)):
        values["mixer.n_basis"] = None
    problems = Problems()
    if config.hf_assets_path != Trainer.Config().hf_assets_path:
        problems.append(
            "hf_assets_path has no effect: the tokenizer is that of data.corpus. Leave it out."
        )
    for section in (*OUR_COMPONENTS, "validator"):
        for ours, field, value in settings_of(config, [section]):
            if ours in SETTINGS:
                values[ours] = value
            elif section in OUR_COMPONENTS and field.default not in (dataclasses.MISSING, value):
                problems.append(
                    f"{section}.{field.name} = {value} has no effect with this model. Leave it out."
                )
    with problems.collect():
        values |= values_of_sections(config)
    job = job_config_of_values(apply_step_overrides(values, flags), problems, job)
    problems.raise_all()

    config.dump_folder = job.job.dump_folder
    for section in SECTIONS:
        for ours, field, _ in settings_of(config, [section]):
            if ours in SETTINGS and SETTINGS[ours].is_path:
                setattr(getattr(config, section), field.name, job[ours])
    return job
