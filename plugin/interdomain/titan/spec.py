"""The model for TorchTitan 0.2.2's own trainer, `python -m torchtitan.train`.

    [job]
    custom_config_module = "interdomain.titan"     # adds the settings of `settings.schema`
    [experimental]
    custom_import = "interdomain.titan"            # registers the model
    [model]
    name = "interdomain"

`get_train_spec` has the functions that TorchTitan's trainer calls to build a run. In this module,
`config` is TorchTitan's configuration and `job` this plugin's. The first function that is called
checks the configuration (`resolve`).
"""

import operator
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from interdomain.data import check_vocab
from interdomain.model import SIZES, Execution, ModelConfig, build_config, count_parameters
from interdomain.model.config import MODEL_SETTINGS
from interdomain.model.flops import train_flops_per_token
from interdomain.removed import removal_of

from .data.dataloader import open_data
from .data.folders import data_record, open_dataset, open_tokenizer
from .data.torchtitan_text import as_trained, check_tokenizer_folder, text_record
from .errors import user_errors
from .host import (
    BaseModelArgs,
    MetricsProcessor,
    TrainSpec,
    build_cross_entropy_loss,
    build_hf_tokenizer,
    build_text_dataloader,
    build_validator,
    logger,
    pipeline_llm,
    register_train_spec,
)
from .host.patches import use_cpu_if_alone, validator_of_windows
from .plan.device import device_here
from .plan.run_plan import RunPlan, in_steps, make_plan_for_torchtitan
from .settings.job_config import (
    TORCHTITAN_DEFAULTS,
    apply_step_overrides,
    is_off,
    job_config_of_values,
    names_of,
)
from .settings.problems import Problems
from .settings.rules import check_combinations, check_device, check_for_torchtitan
from .settings.schema import (
    ALIASES,
    HONOURED_BY_TORCHTITAN,
    INSTEAD,
    NO_EFFECT,
    OF_TORCHTITANS_DATA,
    SETTINGS,
    JobConfig,
)
from .step.optimizer import GroupedOptimizers, GroupedSchedulers
from .variant import (
    ExportedNames,
    FixedWindows,
    TitanTransformer,
    VariantMetricsBase,
    parallelize_variant,
    record_run,
    warn_of_last_checkpoint,
)

# Settings whose resolved values TorchTitan's trainer reads: the batch, lengths in steps, and
# expanded paths.
RESOLVED = (
    "training.local_batch_size",
    "training.steps",
    "training.tokens",
    "lr_scheduler.warmup_steps",
    "lr_scheduler.warmup_tokens",
    "lr_scheduler.min_lr",
    "job.dump_folder",
    "checkpoint.folder",
    "metrics.save_tb_folder",
    "model.flavor",
)


class Resolved(NamedTuple):
    """What a configuration of TorchTitan's means for this model.

    Attributes:
        job: The same settings as this plugin's configuration, with all lengths in steps.
        plan: The plan of the run.
    """

    job: JobConfig
    plan: RunPlan


@user_errors
def resolve(config: Any) -> Resolved:
    """Checks a configuration, and makes the plan of the run, at the first call.

    Args:
        config: TorchTitan's configuration, with the sections [mixer] and [data]. The result is kept
            in it, and values that TorchTitan's trainer reads are set.

    Raises:
        SystemExit: The configuration cannot run. All reasons are printed.
    """
    if "resolved" in vars(config):
        return config.resolved
    if not hasattr(config, "mixer"):
        raise ValueError(
            'the settings of [mixer] and [data] are missing. Set job.custom_config_module = "interdomain.titan" in the '
            "TOML file, or pass --job.custom_config_module interdomain.titan."
        )
    job = job_config_from(config)
    # A script may make its process group later, or none.
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if dist.is_initialized():
        ranks = dist.get_world_size()
    plan = make_plan_for_torchtitan(
        job,
        ranks,
        config.parallelism.pipeline_parallel_microbatch_size,
    )
    job = in_steps(job, plan)
    config.resolved = Resolved(job, plan)
    warn_of_last_checkpoint(config.checkpoint)

    # Values that follow from the plan, and that TorchTitan's trainer reads from its configuration.
    for setting in RESOLVED:
        section, _, name = setting.partition(".")
        setattr(getattr(config, section), name, job[setting])
    # TorchTitan means "not set" by None, and takes 0 for a number of steps.
    config.lr_scheduler.total_steps = job.lr_scheduler.total_steps or None
    config.lr_scheduler.min_lr_factor = 0.0
    # A scan passes its state from rank to rank: each rank needs contiguous tokens.
    config.parallelism.context_parallel_load_balancer = None
    return config.resolved


def job_config_from(config: Any) -> JobConfig:
    """Converts TorchTitan's configuration into this plugin's, and checks it.

    Args:
        config: TorchTitan's configuration, with the sections [mixer] and [data].

    Raises:
        ValueError: The configuration cannot run. The message has all reasons.
    """
    problems = Problems()

    def value_of(setting: str) -> Any:
        return operator.attrgetter(setting)(config)

    # Settings that only TorchTitan has.
    for setting, default in TORCHTITAN_DEFAULTS.items():
        value = value_of(setting)
        if setting not in SETTINGS and value != default and not is_off(setting, value_of):
            problems += _unread_setting(setting, value, has_corpus=bool(config.data.corpus))

    # This plugin's settings. Those of a feature that is off get their default.
    defaults = JobConfig()
    values = {}
    for setting in SETTINGS:
        values[setting] = value_of(setting)
        if is_off(setting, value_of):
            values[setting] = defaults[setting]

    # Two settings that TorchTitan expresses in another way.
    if values["lr_scheduler.total_steps"] is None:
        values["lr_scheduler.total_steps"] = 0
    factor = config.lr_scheduler.min_lr_factor
    if factor:
        if values["lr_scheduler.min_lr"]:
            problems.append(
                "lr_scheduler.min_lr and lr_scheduler.min_lr_factor say the same. Leave one of the two out."
            )
        values["lr_scheduler.min_lr"] = factor * values["optimizer.lr"]
    values = apply_step_overrides(values, names_of(sys.argv[1:]))

    # Rules about single settings, and about several together.
    job = job_config_of_values(values, problems)
    if not job.data.corpus:
        for setting in SETTINGS:
            if setting.startswith("data.") and job[setting] != defaults[setting]:
                problems.append(
                    f"{setting} = {job[setting]} has no effect without data.corpus. Leave one of the two out."
                )
    for check in (check_combinations, check_device, check_for_torchtitan):
        with problems.collect():
            check(job)
    if config.profiling.enable_memory_snapshot and device_here().type == "cpu":
        problems.append(
            "profiling.enable_memory_snapshot needs a GPU, and this machine has none. Turn it off."
        )
    problems.raise_all()
    return job


def _unread_setting(setting: str, value: Any, has_corpus: bool) -> Iterator[str]:
    """Yields a problem if nothing reads a setting that only TorchTitan has.

    Args:
        setting: Its name.
        value: Its value, which is not the default.
        has_corpus: True if the run reads data.corpus, not TorchTitan's data.
    """
    removal = removal_of(setting)
    if removal:
        yield removal
    elif OF_TORCHTITANS_DATA.match(setting):
        if has_corpus:
            yield f"{setting} = {value} has no effect beside data.corpus. Leave one of the two out."
    elif setting not in HONOURED_BY_TORCHTITAN and (setting in INSTEAD or NO_EFFECT.match(setting)):
        problem = f"{setting} = {value} has no effect in this run."
        if setting in INSTEAD:
            problem += f" {INSTEAD[setting]}"
        yield f"{problem} Leave it out."


@dataclass
class ModelArgs(BaseModelArgs):
    """The arguments of a model. A size is complete without a configuration of a run.

    The fields of `ModelConfig` (dim, n_layers, n_heads, vocab_size and others) are attributes, too,
    as in the arguments of TorchTitan's own models.

    Attributes:
        config: The architecture.
        execution: How it is computed.
        seed: Seed of the initial values.
    """

    config: ModelConfig = field(default_factory=lambda: build_config("debug"))
    execution: Execution = field(default_factory=Execution)
    seed: int = JobConfig().debug.seed

    def __getattr__(self, name: str) -> Any:
        if name in MODEL_SETTINGS:
            return getattr(self.config, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def update_from_config(self, job_config: Any, **kwargs: Any) -> None:
        """Takes the model of a run. TorchTitan calls this with its own configuration.

        Args:
            job_config: TorchTitan's configuration.
            kwargs: Other arguments of TorchTitan's, which are ignored.
        """
        plan = resolve(job_config).plan
        self.config = plan.config
        self.execution = plan.execution
        self.seed = plan.seed

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Returns the number of parameters, and the FLOPs of a training step per token."""
        return count_parameters(model), train_flops_per_token(self.config, seq_len)


def parallelize_model(model: TitanTransformer, parallel_dims: Any, config: Any) -> TitanTransformer:
    """Parallelizes the model, or a stage of a pipeline, on the meta device.

    Args:
        model: The model or the stage.
        parallel_dims: TorchTitan's degrees of parallelism.
        config: TorchTitan's configuration.
    """
    return parallelize_variant(model, parallel_dims, resolve(config).job, config)


def pipeline_model(
    model: nn.Module,
    parallel_dims: Any,
    config: Any,
    device: Any,
    args: Any,
    parallelize_fn: Any,
    loss_fn: Any,
) -> Any:
    """Builds TorchTitan's stages and schedule, with the gradient of the mean loss.

    TorchTitan 0.2.2 divides the loss of a step by its labels, but not with a pipeline. The
    arguments are those of TorchTitan's `pipeline_llm`.

    Args:
        model: The whole model, on the meta device.
        parallel_dims: TorchTitan's degrees of parallelism.
        config: TorchTitan's configuration.
        device: Where the stages compute.
        args: The arguments of the model.
        parallelize_fn: Parallelizes a stage.
        loss_fn: Computes the summed loss of a micro-batch from logits and labels.
    """
    job, plan = resolve(config)
    # The number of labels of a step. A sequence of a corpus with answers has fewer labels than
    # tokens.
    targets = plan.global_batch * plan.seq_len
    if job.data.corpus:
        targets = plan.global_batch * open_dataset(job, "train").targets

    def sum_with_gradient_of_mean(logits: Tensor, labels: Tensor) -> Tensor:
        # The value is the sum, which TorchTitan logs. Only `share` has a gradient.
        loss = loss_fn(logits, labels)
        share = loss / targets
        return share + (loss - share).detach()

    return pipeline_llm(
        model, parallel_dims, config, device, args, parallelize_fn, sum_with_gradient_of_mean
    )


@user_errors
def build_tokenizer(config: Any) -> Any:
    """Opens the corpus's tokenizer, or TorchTitan's own.

    Args:
        config: TorchTitan's configuration.

    Raises:
        SystemExit: The configuration cannot run, or the tokenizer does not fit. The reason is
            printed.
    """
    # With a corpus the result is this package's `Tokenizer`, otherwise TorchTitan's.
    job, plan = resolve(config)
    if job.data.corpus:
        return open_tokenizer(job)
    check_tokenizer_folder("model.hf_assets_path", config.model.hf_assets_path)
    tokenizer = build_hf_tokenizer(config)
    check_vocab(tokenizer.get_vocab_size(), plan.config.vocab_size)
    return tokenizer


@user_errors
def build_dataloader(dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> Any:
    """Opens data.corpus, or TorchTitan's training.dataset, and writes the run's record.

    Rank 0 writes the record, if checkpoints are saved.

    Args:
        dp_world_size: Number of data-parallel ranks.
        dp_rank: This rank's number among them.
        tokenizer: What `build_tokenizer` returned. With data.corpus it is opened again.
        job_config: TorchTitan's configuration.

    Raises:
        SystemExit: The configuration or the data cannot be used. The reason is printed.
    """
    job, plan = resolve(job_config)
    if job.data.corpus:
        tokenizer, loader = open_data(job, plan, dp_rank, dp_world_size)
        data = data_record(job, loader.dataset, tokenizer)
    else:
        loader = build_text_dataloader(dp_world_size, dp_rank, tokenizer, job_config)
        data = text_record(job_config.training.dataset.lower(), tokenizer)
        tokenizer = as_trained(tokenizer)
    record_run(job, plan, data, tokenizer)
    return loader


@user_errors
def build_variant_validator(*, dp_world_size: int, dp_rank: int, **parts: Any) -> Any:
    """Builds TorchTitan's validator, over `FixedWindows` if there is a corpus.

    Args:
        dp_world_size: Number of data-parallel ranks.
        dp_rank: This rank's number among them.
        **parts: The other arguments of TorchTitan's validator, with its configuration.

    Raises:
        SystemExit: Context parallelism with a corpus with answers. The reason is printed.
    """
    config = parts["job_config"]
    job = resolve(config).job
    if not job.data.corpus:
        return build_validator(dp_world_size=dp_world_size, dp_rank=dp_rank, **parts)
    windows = FixedWindows(job, dp_rank, dp_world_size, job.validation.local_batch_size)
    if parts["parallel_dims"].cp_enabled and windows.dataset.targets < windows.dataset.seq_len:
        raise ValueError(
            "validation.enable with parallelism.context_parallel_degree above 1, for a corpus with answers: TorchTitan's "
            "validator takes all pieces of a sequence to have the same number of labels. Start with ./launch.sh, or turn "
            "validation off."
        )
    config.validation.steps = len(windows.batches)
    return validator_of_windows(parts, windows)


class VariantMetrics(VariantMetricsBase, MetricsProcessor):
    """TorchTitan's metrics with those of this model."""

    # TorchTitan also passes the arguments of the model.
    def __init__(self, config: Any, parallel_dims: Any, model_args: Any = None) -> None:
        super().__init__(config, parallel_dims)
        self.job, self.plan = resolve(config)

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Logs a validation. TorchTitan calls this.

        Args:
            loss: Mean loss per token, too large by the factor of context parallelism.
            step: The step after which the model was validated.
            extra_metrics: Further scalars by tag.
        """
        # TorchTitan divides the loss of a whole sequence by the labels of this rank's piece of it.
        super().log_validation(loss / self.parallel_dims.cp, step, extra_metrics)


def build_optimizers(model_parts: list[nn.Module], settings: Any, *_: Any) -> GroupedOptimizers:
    """Makes the optimizers.

    Args:
        model_parts: This rank's stages of the pipeline; without one, the model.
        settings: TorchTitan's section [optimizer].
        *_: TorchTitan's degrees of parallelism, which the optimizers do not need.
    """
    return GroupedOptimizers(model_parts, settings)


def get_train_spec() -> TrainSpec:
    """Returns the functions that build a run, as each of TorchTitan's own models has them."""
    models = {}
    for size in SIZES:
        models[size] = ModelArgs(config=build_config(size))
    for alias, size in ALIASES.items():
        models[alias] = ModelArgs(config=build_config(size))
    return TrainSpec(
        model_cls=TitanTransformer,  # pyright: ignore[reportArgumentType] (a module, with ModelProtocol's methods)
        model_args=models,
        parallelize_fn=parallelize_model,
        pipelining_fn=pipeline_model,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=GroupedSchedulers,
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=build_tokenizer,
        build_loss_fn=build_cross_entropy_loss,
        build_validator_fn=build_variant_validator,
        build_metrics_processor_fn=VariantMetrics,
        state_dict_adapter=ExportedNames,
    )


# At import: TorchTitan imports this module when it reads a configuration.
use_cpu_if_alone()
register_train_spec("interdomain", get_train_spec())
logger.info("interdomain is registered as a model of TorchTitan")
