"""The model for TorchTitan 0.3.0's own trainer, in a `Trainer.Config` that a user writes.

`model_spec` returns TorchTitan's `ModelSpec`. `entry_0_3` makes configurations of TOML files from
the same parts. In both modules, `config` is TorchTitan's configuration and `job` this plugin's.
"""

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from torch import nn

from interdomain.data import check_vocab

from .data.torchtitan_text import as_trained, check_tokenizer_folder, text_record
from .host import (
    SECTIONS,
    BaseModel,
    ModelSpec,
    activation_checkpoint,
    logger,
    loss,
    metrics,
    pipeline_llm,
    titan_tokenizer,
)
from .host.patches import use_cpu_if_alone
from .plan.device import device_here
from .plan.run_plan import RunPlan, in_steps, make_plan_for_torchtitan
from .settings.job_config import job_config_of, job_config_of_values
from .settings.problems import Problems
from .settings.schema import HONOURED_BY_TORCHTITAN, INSTEAD, SETTINGS, JobConfig, Model
from .variant import (
    ExportedNames,
    TitanTransformer,
    VariantMetricsBase,
    parallelize_variant,
    record_run,
    warn_of_last_checkpoint,
)

# TorchTitan's sections whose names differ, and this plugin's.
OUR_SECTION_NAMES = {"validator": "validation", "profiler": "profiling", "dataloader": "data"}
# Modes of activation checkpointing, and TorchTitan's classes for them.
CHECKPOINTING = {
    "selective": activation_checkpoint.SelectiveAC.Config,
    "full": activation_checkpoint.FullAC.Config,
    "none": type(None),
}
PRECISIONS = {"bfloat16": "bf16", "float32": "float32"}  # TorchTitan's names, and this plugin's


@dataclass(kw_only=True, slots=True)
class TitanModelConfig(BaseModel.Config):
    """TorchTitan's configuration of the model.

    Attributes:
        job: This plugin's configuration. When the plan is made, it takes TorchTitan's values.
        precision: training.precision. Empty: that of training.mixed_precision_param.
        plan: The `RunPlan`. None until TorchTitan's configuration is known.
    """

    job: Annotated[JobConfig, tyro.conf.Suppress]
    precision: Annotated[str, tyro.conf.Suppress] = ""
    plan: Annotated[Any, tyro.conf.Suppress] = None

    @property
    def layers(self) -> tuple[Any, ...]:
        """The layers, which TorchTitan counts to divide them among the stages of a pipeline."""
        return self.plan.config.layers

    def update_from_config(self, *, config: Any, **_: Any) -> None:
        """Takes TorchTitan's configuration. TorchTitan calls this before it builds the model.

        With a configuration that a user wrote in Python, it is the first call of this plugin.
        """
        if self.plan is None:
            prepare_for_user(config, self)

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Returns the number of parameters, and the FLOPs of a training step per token."""
        return self.plan.n_params, self.plan.flops_per_token

    def build(self, **_: Any) -> TitanTransformer:
        """Builds the model. TorchTitan calls this, with arguments that are not needed here."""
        model = TitanTransformer(self.plan)
        # TorchTitan's loss takes each tensor-parallel rank's columns of the logits.
        model.whole_logits = False
        return model

    def to_dict(self) -> dict[str, Any]:
        return self.job.to_dict()


def built_by(base: type, make: Callable[..., Any], **values: Any) -> Any:
    """Makes a configuration of TorchTitan's whose component comes from a function.

    TorchTitan calls the configuration's method `build` when it needs the component.

    Args:
        base: TorchTitan's class of the configuration.
        make: Returns the component, from the arguments that the trainer passes to `build`.
        **values: Values of the configuration's fields.
    """

    @dataclass(kw_only=True, slots=True)
    class Built(base):
        def build(self, **arguments: Any) -> Any:
            return make(**arguments)

    return Built(**values)


class VariantMetrics(VariantMetricsBase, metrics.MetricsProcessor):
    """TorchTitan's metrics with those of this model."""

    def __init__(self, settings: Any, job: JobConfig, plan: RunPlan, **parts: Any) -> None:
        super().__init__(settings, **parts)
        self.job = job
        self.plan = plan


def record_user_run(config: Any, model: TitanModelConfig) -> None:
    """Writes the record of a run that a user configured in Python.

    Without a Hugging Face tokenizer there is no record, and a warning says so.

    Args:
        config: TorchTitan's configuration.
        model: The model in it.

    Raises:
        ValueError: The tokenizer has more tokens than the model.
    """
    tokenizer = config.tokenizer.build(tokenizer_path=config.hf_assets_path)
    check_vocab(tokenizer.get_vocab_size(), model.plan.config.vocab_size)
    if not isinstance(tokenizer, titan_tokenizer.HuggingFaceTokenizer):
        kind = type(tokenizer).__name__
        logger.warning("the run is not recorded, so `interdomain convert` cannot read it: %s", kind)
        return
    dataset = getattr(config.dataloader, "dataset", type(config.dataloader).__qualname__)
    data = text_record(dataset, tokenizer)
    # TorchTitan's own optimizer, schedule and validator have settings of their own.
    left_out = ("optimizer", "lr_scheduler", "validation")
    record_run(model.job, model.plan, data, as_trained(tokenizer), left_out)


def spec_of(job: JobConfig) -> ModelSpec:
    """Returns TorchTitan's `ModelSpec` of the model in this plugin's configuration."""
    model = TitanModelConfig(job=job)

    def parallelize(part: TitanTransformer, *, parallel_dims: Any, **_: Any) -> TitanTransformer:
        return parallelize_variant(part, parallel_dims, model.job, model.job)

    def pipeline(whole: TitanTransformer, *, parallelism: Any, **parts: Any) -> Any:
        # TorchTitan builds the stages and the schedule. The plan says which modules a stage has.
        names = [list(stage) for stage in model.plan.stages]
        named = dataclasses.replace(parallelism, module_fqns_per_model_part=names)
        return pipeline_llm(whole, parallelism=named, **parts)

    return ModelSpec(
        name="interdomain",
        flavor=job.model.flavor,
        model=model,
        parallelize_fn=parallelize,
        pipelining_fn=pipeline,
        post_optimizer_build_fn=None,
        state_dict_adapter=ExportedNames,
    )


def model_spec(
    flavor: str = "debug",
    *,
    precision: str = "",
    reset_state_at_documents: bool = False,
    **settings: Any,
) -> ModelSpec:
    """Returns the model for a `Trainer.Config` of your own.

    Example:
        Trainer.Config(model_spec=model_spec("125M"), ...)

    Args:
        flavor: A size: debug, 125M, 350M, 760M, 1.3B, 7B or 70B.
        precision: As training.precision of a TOML file. Empty: bf16 or float32, as
            training.mixed_precision_param says.
        reset_state_at_documents: Keep packed documents apart, by the positions that the data loader
            gives.
        **settings: Settings of [model] and [mixer], such as `vocab_size=32_000` or
            `condition="s4d"`.

    Raises:
        ValueError: There is no such setting, or it cannot have this value.
    """
    use_cpu_if_alone()
    table: dict[str, Any] = {
        "model": {"flavor": flavor},
        "mixer": {},
        "data": {"reset_state_at_documents": reset_state_at_documents},
        "training": {},
    }
    settings_of_model = {f.name for f in dataclasses.fields(Model)}
    for name, value in settings.items():
        section = "mixer"
        if name in settings_of_model:
            section = "model"
        table[section][name] = value
    if precision:
        table["training"]["precision"] = precision
    spec = spec_of(job_config_of(table))
    spec.model.precision = precision
    return spec


def prepare_for_user(config: Any, model: TitanModelConfig) -> None:
    """Checks a configuration that a user wrote in Python, and makes the plan of the run.

    Args:
        config: TorchTitan's configuration. Values that follow from the plan are set in it.
        model: The model in it, which gets job and plan.

    Raises:
        ValueError: The configuration cannot run with this model.
    """
    if config.debug.seed is None:
        config.debug.seed = model.job.debug.seed
    if not isinstance(config.loss, loss.CrossEntropyLoss.Config):
        raise ValueError(
            f"loss = {type(config.loss).__qualname__}: this model needs torchtitan.components.loss.CrossEntropyLoss.Config(). "
            "ChunkedLossWrapper would call a module lm_head on pieces of the hidden states."
        )
    problems = Problems()
    honoured = (*HONOURED_BY_TORCHTITAN, "training.mixed_precision_param")
    values = values_of_sections(config, SECTIONS, honoured, problems)
    values["training.precision"] = (
        model.precision or PRECISIONS[config.training.mixed_precision_param]
    )
    model.job = job_config_of_values(values, problems, model.job)
    problems.raise_all()
    make_plan_of(config, model)
    if isinstance(config.tokenizer, titan_tokenizer.HuggingFaceTokenizer.Config):
        check_tokenizer_folder("hf_assets_path", config.hf_assets_path)

    # TorchTitan builds the adapter between data and checkpoints. It is time for the record.
    def adapter_and_record(model_config: TitanModelConfig, path: str | None) -> ExportedNames:
        record_user_run(config, model_config)
        return ExportedNames(model_config, path)

    config.model_spec.state_dict_adapter = adapter_and_record


def values_of_sections(
    config: Any, sections: Iterable[str], honoured: Collection[str], problems: Problems
) -> dict[str, Any]:
    """Returns the values of this plugin's settings in TorchTitan's configuration.

    Args:
        config: TorchTitan's configuration.
        sections: The sections to read, by TorchTitan's names.
        honoured: Settings that only TorchTitan has and that take effect.
        problems: Gets the settings that have no effect, or are not possible with this model.
    """
    values: dict[str, Any] = {"job.dump_folder": config.dump_folder}
    for setting, field, value in settings_of(config, sections):
        if setting in SETTINGS:
            values[setting] = value
        elif setting in INSTEAD and setting not in honoured and value not in (None, field.default):
            problems.append(
                f"{setting} = {value} has no effect with this model. {INSTEAD[setting]} Leave it out."
            )
    if config.profiler.enable_memory_snapshot and device_here().type == "cpu":
        problems.append(
            "profiler.enable_memory_snapshot needs a GPU, and this machine has none. Turn it off."
        )
    if not config.training.disable_cuda_graphs:
        problems.append(
            "training.disable_cuda_graphs must stay on: the model's step was never captured in a CUDA graph."
        )

    # TorchTitan has an object in place of the mode of activation checkpointing. It must have the
    # class of a mode, and only default values.
    chosen = config.activation_checkpoint
    for mode, kind in CHECKPOINTING.items():
        if chosen == kind():
            values["activation_checkpoint.mode"] = mode
    if "activation_checkpoint.mode" not in values:
        problems.append(
            f"activation_checkpoint = {chosen} is not possible with this model: allowed are selective, full and none, without "
            "further settings."
        )
    return values


def settings_of(
    config: Any, sections: Iterable[str]
) -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Yields the settings in sections of TorchTitan's configuration.

    Args:
        config: TorchTitan's configuration.
        sections: TorchTitan's names of sections.

    Yields:
        The name that this plugin gives the setting or would give it, TorchTitan's field, and its
        value. Settings that only TorchTitan has are not in SETTINGS.
    """
    for section in sections:
        our_section = OUR_SECTION_NAMES.get(section, section)
        values = getattr(config, section)
        for field in dataclasses.fields(values):
            yield f"{our_section}.{field.name}", field, getattr(values, field.name)


def make_plan_of(config: Any, model: TitanModelConfig) -> None:
    """Makes the plan of the run.

    Args:
        config: TorchTitan's configuration. Values that follow from the plan are set in it.
        model: The model in it. `job` has TorchTitan's values already.

    Raises:
        ValueError: The configuration cannot run.
    """
    job = model.job
    parallelism = config.parallelism
    plan = make_plan_for_torchtitan(
        job,
        int(os.environ["WORLD_SIZE"]),
        parallelism.pipeline_parallel_microbatch_size,
    )
    model.plan = plan
    warn_of_last_checkpoint(config.checkpoint)
    config.training.local_batch_size = in_steps(job, plan).training.local_batch_size
    # A scan passes its state from rank to rank: each rank needs contiguous tokens.
    parallelism.context_parallel_load_balancer = None
    config.loss.global_vocab_size = plan.config.vocab_size

    # The metrics become this plugin's, unless the user has a class of their own.
    settings = config.metrics
    if type(settings) is metrics.MetricsProcessor.Config:

        def make_metrics(**parts: Any) -> VariantMetrics:
            return VariantMetrics(settings, job, plan, **parts)

        values = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
        config.metrics = built_by(type(settings), make_metrics, **values)
