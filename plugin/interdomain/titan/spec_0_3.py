"""The model for TorchTitan 0.3.0: `model_spec` makes a `ModelSpec` for a `Trainer.Config` that somebody else writes.

`entry_0_3` has the configurations of TOML files.
"""

import dataclasses
import difflib
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from torch import nn

from .data.torchtitan_text import as_trained, text_record
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
from .plan.run_plan import RunPlan, make_plan_for_torchtitan
from .settings.job_config import job_config_of, job_config_of_values
from .settings.problems import Problems
from .settings.schema import HONOURED_BY_TORCHTITAN, INSTEAD, SETTINGS, JobConfig, Mixer, Model
from .variant import (
    FolderNames,
    TitanTransformer,
    VariantCurves,
    parallelize_variant,
    record_run,
)

# TorchTitan's sections -> ours, where the names differ.
OTHER_NAMES = {"validator": "validation", "profiler": "profiling", "dataloader": "data"}
CHECKPOINTING = {
    "selective": activation_checkpoint.SelectiveAC.Config,
    "full": activation_checkpoint.FullAC.Config,
    "none": type(None),
}


@dataclass(kw_only=True, slots=True)
class ModelConfig(BaseModel.Config):
    """The settings of a model. A run's plan is made of them and of TorchTitan's configuration.

    Attributes:
        job: Our configuration. `prepare` replaces it by one that has TorchTitan's sections, too.
        plan: None until `prepare`.
        precision: As training.precision. Empty: as training.mixed_precision_param says.
        trainer_config: TorchTitan's configuration, if a user wrote it in Python.
    """

    job: Annotated[JobConfig, tyro.conf.Suppress]
    precision: Annotated[str, tyro.conf.Suppress] = ""
    plan: Annotated[RunPlan | None, tyro.conf.Suppress] = None
    trainer_config: Annotated[Any, tyro.conf.Suppress] = None

    @property
    def layers(self) -> tuple[Any, ...]:
        """TorchTitan counts them for its pipeline."""
        assert self.plan is not None
        return self.plan.config.layers

    def update_from_config(self, *, config: Any, **_: Any) -> None:
        """TorchTitan's hook before it builds a model. In a `Trainer.Config` of the user's own, this is the first one."""
        if self.plan is None:
            self.trainer_config = config
            prepare_for_user(config, self)

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        assert self.plan is not None
        return self.plan.n_params, self.plan.flops_per_token

    def build(self, **_: Any) -> TitanTransformer:
        model = TitanTransformer(self.plan)
        # TorchTitan's loss takes each rank's columns of the logits.
        model.whole_logits = False
        return model

    def to_dict(self) -> dict[str, Any]:
        return self.job.to_dict()

    def traverse(
        self, config_cls: type, *, recurse: bool = False, _prefix: str = ""
    ) -> Iterator[tuple[Any, ...]]:
        """TorchTitan's overrides look for their component here: the model has none of TorchTitan's.

        Going through the fields would lead to `trainer_config`, and from there back to this model.
        """
        if isinstance(self, config_cls):
            yield _prefix, self, None, None


def built_by(base: type, make: Callable[..., Any], **values: Any) -> Any:
    """A configuration of TorchTitan's class `base` whose component is what `make` returns for the trainer's arguments."""

    @dataclass(kw_only=True, slots=True)
    class Built(base):
        def build(self, **arguments: Any) -> Any:
            return make(**arguments)

    return Built(**values)


class VariantMetrics(VariantCurves, metrics.MetricsProcessor):
    """TorchTitan's metrics for this model."""

    def __init__(self, settings: Any, job: JobConfig, plan: RunPlan, **parts: Any) -> None:
        super().__init__(settings, **parts)
        self.job, self.plan = job, plan


class RecordedNames(FolderNames):
    """Names of tensors, and the run's record, for a configuration that a user wrote in Python.

    TorchTitan builds it between the data and the checkpoints, and nothing else of the `ModelSpec` after the tokenizer.

    Raises:
        ValueError: TorchTitan's tokenizer has more tokens than the model.
    """

    def __init__(self, model_config: ModelConfig, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        config, plan = model_config.trainer_config, model_config.plan
        assert plan is not None
        tokenizer = config.tokenizer.build(tokenizer_path=hf_assets_path)
        size = tokenizer.get_vocab_size()
        if size > plan.config.vocab_size:
            raise ValueError(
                f"the tokenizer in {hf_assets_path} has {size} tokens and the model {plan.config.vocab_size}: pass "
                f"model_spec(..., vocab_size={size}) or more."
            )
        if not isinstance(tokenizer, titan_tokenizer.HuggingFaceTokenizer):
            kind = type(tokenizer).__name__
            logger.warning(
                "the run is not recorded, so `interdomain convert` cannot read it: %s", kind
            )
            return
        dataset = getattr(config.dataloader, "dataset", type(config.dataloader).__qualname__)
        data = text_record(dataset, tokenizer)
        record_run(
            model_config.job,
            plan,
            data,
            as_trained(tokenizer),
            ("optimizer", "lr_scheduler", "validation"),
        )


def spec_of(job: JobConfig) -> ModelSpec:
    """The model of our configuration for TorchTitan."""
    model = ModelConfig(job=job)

    def parallelize(part: TitanTransformer, *, parallel_dims: Any, **_: Any) -> TitanTransformer:
        return parallelize_variant(part, parallel_dims, model.job, model.job)

    def pipeline(whole: TitanTransformer, *, parallelism: Any, **parts: Any) -> Any:
        """TorchTitan's stages and schedule, with the names of our modules."""
        assert model.plan is not None
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
        state_dict_adapter=FolderNames,
    )


def model_spec(
    flavor: str = "debug",
    *,
    precision: str = "",
    reset_state_at_documents: bool = False,
    **settings: Any,
) -> ModelSpec:
    """The model for a `Trainer.Config` of your own: `Trainer.Config(model_spec=model_spec("125M"), ...)`.

    Args:
        flavor: A size: debug, 125M, 350M, 760M, 1.3B, 7B or 70B.
        precision: As training.precision of a TOML file. Empty: bf16 or float32, as training.mixed_precision_param says.
        reset_state_at_documents: Keep packed documents apart, by the positions that the data loader gives.
        **settings: Settings of [model] and [mixer], such as `vocab_size=32_000` or `condition="s4d"`.

    Raises:
        ValueError: There is no such setting, or it cannot have this value.
    """
    use_cpu_if_alone()
    table: dict[str, Any] = {"model": {"flavor": flavor}, "mixer": {}}
    known = {}
    for section, kind in (("mixer", Mixer), ("model", Model)):
        known |= {field.name: section for field in dataclasses.fields(kind)}
    for name, value in settings.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            raise ValueError(
                f"model_spec has no setting {name}. Near to it: {', '.join(near) or 'none'}."
            )
        table[known[name]][name] = value
    table["data"] = {"reset_state_at_documents": reset_state_at_documents}
    if precision:
        table["training"] = {"precision": precision}
    spec = spec_of(job_config_of(table))
    spec.state_dict_adapter = RecordedNames
    spec.model.precision = precision
    return spec


def prepare_for_user(config: Any, model: ModelConfig) -> None:
    """Check a configuration that a user wrote in Python, and make the run's plan.

    Raises:
        ValueError: the configuration cannot run with this model.
    """
    if config.debug.seed is None:
        config.debug.seed = model.job.debug.seed
    precision = (
        model.precision
        or {"bfloat16": "bf16", "float32": "float32"}[config.training.mixed_precision_param]
    )
    if not isinstance(config.loss, loss.CrossEntropyLoss.Config):
        raise ValueError(
            f"loss = {type(config.loss).__qualname__}: this model needs torchtitan.components.loss.CrossEntropyLoss.Config(). "
            "ChunkedLossWrapper would call a module lm_head on pieces of the hidden states."
        )
    values = values_of_sections(config, (*HONOURED_BY_TORCHTITAN, "training.mixed_precision_param"))
    values |= {"job.dump_folder": config.dump_folder, "training.precision": precision}
    problems = Problems()
    model.job = job_config_of_values(values, problems, model.job)
    problems.raise_all()
    make_plan_of(config, model)


def values_of_sections(
    config: Any, honoured: Collection[str] = HONOURED_BY_TORCHTITAN
) -> dict[str, Any]:
    """The values of our settings in TorchTitan's sections.

    Args:
        honoured: Settings that are not ours, and that have an effect.

    Raises:
        ValueError: A setting has no effect.
    """
    values: dict[str, Any] = {}
    problems = Problems()
    for ours, field, value in settings_of(config, SECTIONS):
        if ours in SETTINGS:
            values[ours] = value
        elif ours in INSTEAD and ours not in honoured and value not in (None, field.default):
            problems.append(
                f"{ours} = {value} has no effect with this model. {INSTEAD[ours]} Leave it out."
            )
    if config.profiler.enable_memory_snapshot and device_here().type == "cpu":
        problems.append(
            "profiler.enable_memory_snapshot needs a GPU, and this machine has none. Turn it off."
        )
    if not config.training.disable_cuda_graphs:
        problems.append(
            "training.disable_cuda_graphs must stay on: the model's step was never captured in a CUDA graph."
        )
    chosen = config.activation_checkpoint
    for mode, kind in CHECKPOINTING.items():
        if chosen == kind():
            values["activation_checkpoint.mode"] = mode
    if "activation_checkpoint.mode" not in values:
        problems.append(
            f"activation_checkpoint = {chosen} is not possible with this model: allowed are selective, full and none, without "
            "further settings."
        )
    problems.raise_all()
    return values


def settings_of(
    config: Any, sections: Iterable[str]
) -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """The settings in sections of TorchTitan's configuration: our name, TorchTitan's field and the value of each."""
    for section in sections:
        theirs = getattr(config, section)
        for field in dataclasses.fields(theirs):
            yield (
                f"{OTHER_NAMES.get(section, section)}.{field.name}",
                field,
                getattr(theirs, field.name),
            )


def make_plan_of(config: Any, model: ModelConfig) -> None:
    """Make the run's plan, and set what follows from it in TorchTitan's configuration.

    Raises: ValueError: the configuration cannot run.
    """
    job, parallel = model.job, config.parallelism
    context, tensor = parallel.context_parallel_degree, parallel.tensor_parallel_degree
    divisor = tensor * 2 * context if context > 1 else tensor
    if job.training.seq_len % divisor:
        raise ValueError(
            f"training.seq_len = {job.training.seq_len} with context_parallel_degree = {context} and tensor_parallel_degree = "
            f"{tensor}: TorchTitan's trainer wants a multiple of {divisor}. Set one, or start with --module "
            "interdomain.titan.trainer."
        )
    ranks = int(os.environ["WORLD_SIZE"])
    micro_batch = parallel.pipeline_parallel_microbatch_size
    plan = model.plan = make_plan_for_torchtitan(job, ranks, micro_batch)
    parallel.context_parallel_load_balancer = None  # the scan needs contiguous pieces
    config.loss.global_vocab_size = plan.config.vocab_size
    # A user's own class of metrics stays.
    if type(config.metrics) is metrics.MetricsProcessor.Config:
        settings = config.metrics
        values = {
            field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)
        }
        config.metrics = built_by(
            type(settings), lambda **parts: VariantMetrics(settings, job, plan, **parts), **values
        )
