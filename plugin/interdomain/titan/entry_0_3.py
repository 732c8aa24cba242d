"""TOML files for TorchTitan 0.3.0's entry, with TorchTitan's own trainer or with ours.

    python -m torchtitan.train --module interdomain.titan --config FILE.toml
    python -m torchtitan.train --module interdomain.titan.trainer --config FILE.toml

The file is read as `./launch.sh` reads it. With TorchTitan's trainer it may also have settings that
only TorchTitan has. Flags are TorchTitan's own, and those of [model], [mixer] and [data]. They win
over the file.
"""

import dataclasses
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, get_type_hints

from .data.dataloader import PackedLoader, open_data
from .data.folders import data_record, open_tokenizer
from .errors import user_errors
from .host import (
    SECTIONS,
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
    read_toml,
)
from .settings.problems import Problems
from .settings.rules import check_for_torchtitan, reads_n_basis
from .settings.schema import (
    HONOURED_BY_TORCHTITAN,
    SETTINGS,
    Data,
    JobConfig,
    Mixer,
    Model,
    setting_of,
)
from .spec_0_3 import (
    CHECKPOINTING,
    OUR_SECTION_NAMES,
    TitanModelConfig,
    built_by,
    make_plan_of,
    settings_of,
    spec_of,
    values_of_sections,
)
from .step.optimizer import GroupedOptimizers, GroupedSchedulers
from .variant import FixedWindows, record_run

# Sections with flags, besides SECTIONS.
FURTHER_SECTIONS = ("model", "mixer", "data", "validator", "optimizer", "lr_scheduler")
# TorchTitan's flags of [lr_scheduler] that are also settings of this plugin.
SCHEDULE = ("warmup_steps", "total_steps", "decay_ratio", "decay_type")


@dataclass(kw_only=True, slots=True)
class AllSections(Trainer.Config):
    """TorchTitan's sections, and this plugin's, so that their settings are flags."""

    model: Model = dataclasses.field(default_factory=Model)
    mixer: Mixer = dataclasses.field(default_factory=Mixer)
    data: Data = dataclasses.field(default_factory=Data)


class VariantTrainer(Trainer):
    """TorchTitan's trainer. It checks the configuration before it builds anything."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllSections):
        pass

    def __init__(self, config: Any) -> None:
        prepare(config, config.model_spec.model)
        super().__init__(config)


@dataclass(kw_only=True, slots=True)
class WindowsConfig(titan_dataloader.BaseDataLoader.Config):
    infinite: bool = False  # TorchTitan's validator sets it


@user_errors
def configuration(file: str, config_class: type[AllSections] = VariantTrainer.Config) -> Any:
    """Returns the configuration of a TOML file for TorchTitan's entry.

    Args:
        file: Path of the file.
        config_class: The class of the result. TorchTitan builds the trainer that it belongs to.

    Raises:
        SystemExit: The file cannot be read, or a value is not allowed. The reasons are printed.
    """
    use_cpu_if_alone()
    job, titan_values = read_file(file)
    spec = spec_of(job)
    model = spec.model

    # This plugin's components. TorchTitan builds them when `prepare` has made the plan.
    def make_tokenizer(**_: Any) -> Any:
        return open_tokenizer(model.job)

    def make_loader(
        *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any
    ) -> PackedLoader:
        job = with_positions(model.job).changed({"training.local_batch_size": local_batch_size})
        tokenizer, loader = open_data(job, model.plan, dp_rank, dp_world_size)
        record_run(model.job, model.plan, data_record(job, loader.dataset, tokenizer), tokenizer)
        return loader

    def make_windows(
        *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any
    ) -> FixedWindows:
        job = with_positions(model.job)
        # TorchTitan gives the size of a training batch. Only a pipeline validates with it.
        size = job.validation.local_batch_size
        if job.parallelism.pipeline_parallel_degree > 1:
            size = local_batch_size
        return FixedWindows(job, dp_rank, dp_world_size, size)

    def make_optimizers(*, model_parts: list[Any]) -> GroupedOptimizers:
        return GroupedOptimizers(model_parts, model.job.optimizer)

    def make_schedulers(*, optimizers: Any, training_steps: int) -> GroupedSchedulers:
        return GroupedSchedulers(optimizers, model.job.lr_scheduler, training_steps)

    sections = {}
    for name in SECTIONS:
        sections[name] = section_of(job, name, titan_values.get(name, {}))
    schedule = {name: getattr(job.lr_scheduler, name) for name in SCHEDULE}
    return config_class(
        model_spec=spec,
        model=job.model,
        mixer=job.mixer,
        data=job.data,
        dump_folder=job.job.dump_folder,
        loss=loss.CrossEntropyLoss.Config(),
        tokenizer=built_by(titan_tokenizer.BaseTokenizer.Config, make_tokenizer),
        dataloader=built_by(titan_dataloader.BaseDataLoader.Config, make_loader),
        optimizer=built_by(
            optimizer.OptimizersContainer.Config,
            make_optimizers,
            implementation=job.optimizer.implementation,
        ),
        lr_scheduler=built_by(optimizer.LRSchedulersContainer.Config, make_schedulers, **schedule),
        validator=titan_validate.Validator.Config(
            enable=job.validation.enable,
            freq=job.validation.freq,
            dataloader=built_by(WindowsConfig, make_windows),
        ),
        activation_checkpoint=CHECKPOINTING[job.activation_checkpoint.mode](),
        **sections,
    )


def configuration_of_ours(file: str, trainer_class: type) -> Any:
    """Returns the configuration of a TOML file with which TorchTitan's entry builds our trainer.

    Args:
        file: Path of the file.
        trainer_class: `InterdomainTrainer`, whose module imports this one.

    Raises:
        SystemExit: The file cannot be read, or a value is not allowed. The reasons are printed.
    """

    class EnteredTrainer(trainer_class):
        """Our trainer, built from TorchTitan's configuration."""

        @dataclass(kw_only=True, slots=True)
        class Config(AllSections):
            pass

        def __init__(self, config: Any) -> None:
            super().__init__(job_for_our_trainer(config))

    return configuration(file, EnteredTrainer.Config)


@user_errors
def job_for_our_trainer(config: Any) -> JobConfig:
    """Returns the settings of our trainer in TorchTitan's configuration.

    Args:
        config: TorchTitan's configuration, with the values of flags.

    Raises:
        SystemExit: A value is not allowed, or only TorchTitan's trainer reads it. The reasons are
            printed.
    """
    job = config.model_spec.model.job
    problems = Problems()
    advice = "has no effect in our trainer. Leave it out, or start with --module interdomain.titan."
    if config.override.imports:
        problems.append(f"override.imports = {config.override.imports} {advice}")
    for section in SECTIONS:
        without_flags = section_of(job, section)
        for setting, field, value in settings_of(config, [section]):
            if setting not in SETTINGS and value != getattr(without_flags, field.name):
                problems.append(f"{section}.{field.name} = {value} {advice}")
    problems.raise_all()
    return with_flags(config, job, honoured=())


def read_file(file: str) -> tuple[JobConfig, dict[str, dict[str, Any]]]:
    """Reads a TOML file.

    Args:
        file: Path of the file.

    Returns:
        This plugin's configuration, and the values of settings that only TorchTitan has, by
        TorchTitan's names of section and setting.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not valid, or a value is not allowed.
    """
    table = read_toml(file)
    titan_values: dict[str, dict[str, Any]] = {}
    for section, section_class in SECTIONS.items():
        our_section = OUR_SECTION_NAMES.get(section, section)
        values = table.get(our_section, {})
        for name, annotation in get_type_hints(section_class, include_extras=True).items():
            if name in values and f"{our_section}.{name}" not in SETTINGS:
                value = values.pop(name)
                check_value(f"{section}.{name}", value, setting_of(annotation))
                titan_values.setdefault(section, {})[name] = value
    job = job_config_of(table).changed({"job.config_file": file})
    return job, titan_values


def with_positions(job: JobConfig) -> JobConfig:
    """Returns a configuration whose batches have positions if context parallelism slices them."""
    if job.parallelism.context_parallel_degree > 1:
        return job.changed({"data.reset_state_at_documents": True})
    return job


@user_errors
def prepare(config: Any, model: TitanModelConfig) -> None:
    """Takes the values of flags, checks the configuration, and makes the plan of the run.

    Args:
        config: TorchTitan's configuration, with the values of flags. Values that follow from the
            plan are set in it.
        model: The model in it, with the configuration of the file. It gets job and plan.

    Raises:
        SystemExit: The configuration cannot run, or a flag has no effect. The reasons are printed.
    """
    honoured = {*HONOURED_BY_TORCHTITAN} - {"lr_scheduler.min_lr_factor"}
    model.job = with_flags(config, model.job, honoured)
    check_for_torchtitan(model.job)
    make_plan_of(config, model)
    model.job = in_steps(model.job, model.plan)
    config.training.steps = model.plan.steps


def with_flags(config: Any, job: JobConfig, honoured: Collection[str]) -> JobConfig:
    """Returns this plugin's configuration with the values of TorchTitan's, which has the flags.

    Args:
        config: TorchTitan's configuration. Its paths are expanded.
        job: The configuration of the file.
        honoured: Settings that only TorchTitan has and that take effect.

    Raises:
        ValueError: A value is not allowed, or has no effect.
    """
    # The values of flags, and of the file where there is no flag.
    flags = names_of(sys.argv[1:])
    problems = Problems()
    values = values_of_sections(config, (*SECTIONS, *FURTHER_SECTIONS), honoured, problems)
    if config.hf_assets_path != Trainer.Config().hf_assets_path:
        problems.append(
            "hf_assets_path has no effect: the tokenizer is that of data.corpus. Leave it out."
        )
    # `n_basis` of the file belongs to the mixer of the file.
    if mixer_is_chosen(flags) and not reads_n_basis(vars(config.mixer)):
        values["mixer.n_basis"] = None
    values = apply_step_overrides(values, flags)
    job = job_config_of_values(values, problems, job)
    problems.raise_all()

    # TorchTitan reads paths from its own configuration: expand them there, too.
    config.dump_folder = job.job.dump_folder
    for section in SECTIONS:
        for setting, field, _ in settings_of(config, [section]):
            if setting in SETTINGS and SETTINGS[setting].is_path:
                setattr(getattr(config, section), field.name, job[setting])
    return job
