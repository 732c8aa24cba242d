"""The model as a variant of TorchTitan: what its own entry, `python -m torchtitan.train`, builds a run from.

    [job]
    custom_config_module = "interdomain.titan"     # adds the settings of `schema`
    [experimental]
    custom_import = "interdomain.titan"            # registers the variant
    [model]
    name = "interdomain"

`InterdomainTrainer` takes the same parts, and adds what docs/torchtitan.md lists.
"""

import operator
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from interdomain.model import SIZES, Execution, ModelConfig, build_config, count_parameters
from interdomain.model.config import MODEL_SETTINGS
from interdomain.model.flops import train_flops_per_token
from interdomain.removed import removal_of

from .data.dataloader import open_data
from .data.folders import data_record, open_dataset, open_tokenizer
from .data.torchtitan_text import as_trained, text_record
from .errors import user_errors
from .host import (
    DATASETS,
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
    expand_setting,
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
    TORCHTITAN_PATHS,
    JobConfig,
)
from .step.optimizer import GroupedOptimizers, GroupedSchedulers
from .variant import (
    FixedWindows,
    FolderNames,
    TitanTransformer,
    VariantCurves,
    parallelize_variant,
    record_run,
)

# Lengths that TorchTitan's trainer reads in steps.
IN_STEPS = (
    "training.steps",
    "training.tokens",
    "lr_scheduler.warmup_steps",
    "lr_scheduler.warmup_tokens",
    "lr_scheduler.min_lr",
)


class Resolved(NamedTuple):
    """What a configuration of TorchTitan's says about this model's run.

    `job` has the same settings as TorchTitan's configuration, and its lengths are in steps.
    """

    job: JobConfig
    plan: RunPlan


@user_errors
def resolve(config: Any) -> Resolved:
    """Checks TorchTitan's configuration at the first call, and makes the run's plan.

    TorchTitan's own trainer reads a few values from its configuration that follow from the plan: they are set there.

    Args:
        config: TorchTitan's `JobConfig` with the sections [mixer] and [data].

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
    config.resolved = resolved = _resolve(config)
    for setting in (
        *IN_STEPS,
        "job.dump_folder",
        "checkpoint.folder",
        "metrics.save_tb_folder",
        "model.flavor",
    ):
        _set(config, setting, resolved.job[setting])
    config.lr_scheduler.total_steps = (
        resolved.job.lr_scheduler.total_steps or None
    )  # TorchTitan's 0 would be no step
    config.lr_scheduler.min_lr_factor = 0.0
    # The scan passes a state from rank to rank: pieces of a sequence must be contiguous.
    config.parallelism.context_parallel_load_balancer = None
    return resolved


def _resolve(config: Any) -> Resolved:
    """Raises: ValueError with every reason for which the configuration cannot run."""
    problems = Problems()

    def value_of(setting: str) -> Any:
        return operator.attrgetter(setting)(config)

    # TorchTitan's own settings: paths, and those that nothing would read.
    for setting in TORCHTITAN_PATHS:
        with problems.collect():
            _set(config, setting, expand_setting(setting, value_of(setting)))
    defaults = JobConfig()
    for setting, default in TORCHTITAN_DEFAULTS.items():
        if (
            setting not in SETTINGS
            and value_of(setting) != default
            and not is_off(setting, value_of)
        ):
            with problems.collect():
                _check_read(setting, value_of(setting), has_corpus=bool(config.data.corpus))

    # Ours. Those of a feature that is off are planned as if they were not set.
    values = {}
    for setting in SETTINGS:
        values[setting] = defaults[setting] if is_off(setting, value_of) else value_of(setting)
    if values["lr_scheduler.total_steps"] is None:
        values["lr_scheduler.total_steps"] = 0
    if factor := config.lr_scheduler.min_lr_factor:
        if values["lr_scheduler.min_lr"]:
            problems.append(
                "lr_scheduler.min_lr and lr_scheduler.min_lr_factor say the same. Leave one of the two out."
            )
        values["lr_scheduler.min_lr"] = factor * values["optimizer.lr"]
    values = apply_step_overrides(values, names_of(sys.argv[1:]))
    job = job_config_of_values(values, problems)
    if not job.data.corpus:
        for setting in SETTINGS:
            if setting.startswith("data.") and job[setting] != defaults[setting]:
                problems.append(
                    f"{setting} = {job[setting]} has no effect without data.corpus. Leave one of the two out."
                )

    # Rules about several settings.
    for check in (check_combinations, check_device, check_for_torchtitan):
        with problems.collect():
            check(job)
    if config.profiling.enable_memory_snapshot and device_here().type == "cpu":
        problems.append(
            "profiling.enable_memory_snapshot needs a GPU, and this machine has none. Turn it off."
        )
    problems.raise_all()
    micro_batch = config.parallelism.pipeline_parallel_microbatch_size
    plan = make_plan_for_torchtitan(job, world_size(), micro_batch)
    return Resolved(in_steps(job, plan), plan)


def _check_read(setting: str, value: Any, has_corpus: bool) -> None:
    """Raises: ValueError for a setting of TorchTitan's that is not at its default and that nothing would read."""
    if removal := removal_of(setting):
        raise ValueError(removal)
    if OF_TORCHTITANS_DATA.match(setting):
        if has_corpus:
            raise ValueError(
                f"{setting} = {value} has no effect beside data.corpus. Leave one of the two out."
            )
    elif setting in INSTEAD and setting not in HONOURED_BY_TORCHTITAN:
        raise ValueError(
            f"{setting} = {value} has no effect in this run. {INSTEAD[setting]} Leave it out."
        )
    elif NO_EFFECT.match(setting):
        raise ValueError(f"{setting} = {value} has no effect in this run. Leave it out.")


def _set(config: Any, setting: str, value: Any) -> None:
    section, _, name = setting.partition(".")
    setattr(getattr(config, section), name, value)


def world_size() -> int:
    """The ranks of the run. A script may ask before it makes a process group, or make none."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


@dataclass
class ModelArgs(BaseModelArgs):
    """A model, complete without a job configuration. `update_from_config` makes it the model of a run.

    Its numbers (dim, n_layers, n_heads, vocab_size, max_seq_len and the others of `ModelConfig`) can be read from it as from
    the arguments of TorchTitan's own models.
    """

    config: ModelConfig = field(default_factory=lambda: build_config("debug"))
    execution: Execution = field(default_factory=Execution)
    seed: int = JobConfig().debug.seed

    def __getattr__(self, name: str) -> Any:
        if name in MODEL_SETTINGS:
            return getattr(self.config, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def update_from_config(self, job_config: Any, **kwargs: Any) -> None:
        """TorchTitan's hook, with TorchTitan's configuration, which it names so."""
        plan = resolve(job_config).plan
        self.config = plan.config
        self.execution = plan.execution
        self.seed = plan.seed

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        return count_parameters(model), train_flops_per_token(self.config, seq_len)


def parallelize_with(model: TitanTransformer, parallel_dims: Any, config: Any) -> TitanTransformer:
    """TorchTitan's hook, with TorchTitan's configuration."""
    return parallelize_variant(model, parallel_dims, resolve(config).job, config)


def pipeline_variant(
    model: nn.Module,
    parallel_dims: Any,
    config: Any,
    device: Any,
    args: Any,
    parallelize_fn: Any,
    loss_fn: Any,
) -> Any:
    """TorchTitan's stages and schedules, from TorchTitan's configuration.

    Its trainer goes backward from the sum of the loss; here the gradient is that of the mean.
    """
    job, plan = resolve(config)
    targets = plan.global_batch * plan.seq_len
    if job.data.corpus:
        targets = plan.global_batch * open_dataset(job, "train").targets

    def loss_of_step(logits: Tensor, labels: Tensor) -> Tensor:
        loss = loss_fn(logits, labels)
        share = loss / targets
        return (
            share + (loss - share).detach()
        )  # the sum, which the trainer logs, with the gradient of the mean

    return pipeline_llm(model, parallel_dims, config, device, args, parallelize_fn, loss_of_step)


@user_errors
def build_tokenizer(config: Any) -> Any:
    """The corpus's tokenizer, or TorchTitan's own. TorchTitan's first hook with its configuration: the checks are here."""
    job, plan = resolve(config)
    if job.data.corpus:
        return open_tokenizer(job)
    tokenizer = build_hf_tokenizer(config)
    size = tokenizer.get_vocab_size()
    if size > plan.config.vocab_size:
        raise ValueError(
            f"the tokenizer of model.hf_assets_path has {size} tokens and the model {plan.config.vocab_size}: set "
            f"model.vocab_size = {size} or more."
        )
    return tokenizer


@user_errors
def build_dataloader(config: Any, dp_world_size: int, dp_rank: int, tokenizer: Any) -> Any:
    """Opens data.corpus; without one, TorchTitan's training.dataset. Rank 0 writes the run's record beside its checkpoints.

    Args:
        config: TorchTitan's configuration.
    """
    job, plan = resolve(config)
    if job.data.corpus:
        tokenizer, loader = open_data(job, plan, dp_rank, dp_world_size)
        data = data_record(job, loader.dataset, tokenizer)
    else:
        loader = build_text_dataloader(dp_world_size, dp_rank, tokenizer, config)
        data = text_record(config.training.dataset, tokenizer)
        tokenizer = as_trained(tokenizer)
        data["corpora"] = [dataset_record(config.training)]
    record_run(job, plan, data, tokenizer)
    return loader


def dataset_record(training: Any) -> dict[str, Any]:
    """Facts of TorchTitan's data set, for the run's record. A folder of the user's is not named.

    Args:
        training: TorchTitan's section [training].
    """
    name = training.dataset.lower()  # as TorchTitan takes it
    path = DATASETS[name].path
    source = f"TorchTitan's data set {name}"
    on_the_hub = []
    if training.dataset_path:
        source = f"texts of a folder, read as {source}"
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not Path(path).exists():
        source += f", {path}"
        on_the_hub = [path]
    return {"name": name, "share": "1", "tokens": None, "sources": [source], "datasets": on_the_hub}


@user_errors
def build_variant_validator(*, dp_world_size: int, dp_rank: int, **parts: Any) -> Any:
    """TorchTitan's validator, over `FixedWindows` of data.corpus."""
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


class VariantMetrics(VariantCurves, MetricsProcessor):
    """TorchTitan's metrics for this model."""

    def __init__(self, config: Any, parallel_dims: Any) -> None:
        super().__init__(config, parallel_dims)
        self.job, self.plan = resolve(config)

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        # TorchTitan's validator divides by the labels of a rank's own piece of the sequences.
        super().log_validation(loss / self.parallel_dims.cp, step, extra_metrics)


def get_train_spec() -> TrainSpec:
    """The parts of a run, as each of TorchTitan's own model folders has them."""
    models = {size: ModelArgs(config=build_config(size)) for size in SIZES}
    models |= {alias: ModelArgs(config=build_config(size)) for alias, size in ALIASES.items()}
    return TrainSpec(
        model_cls=TitanTransformer,  # pyright: ignore[reportArgumentType] (a module, with ModelProtocol's methods)
        model_args=models,
        parallelize_fn=parallelize_with,
        pipelining_fn=pipeline_variant,
        build_optimizers_fn=lambda parts, settings, *_: GroupedOptimizers(parts, settings),
        build_lr_schedulers_fn=GroupedSchedulers,
        build_dataloader_fn=lambda *, job_config, **parts: build_dataloader(job_config, **parts),
        build_tokenizer_fn=build_tokenizer,
        build_loss_fn=build_cross_entropy_loss,
        build_validator_fn=build_variant_validator,
        build_metrics_processor_fn=lambda config, parallel_dims, _: VariantMetrics(
            config, parallel_dims
        ),
        state_dict_adapter=FolderNames,
    )


use_cpu_if_alone()
register_train_spec("interdomain", get_train_spec())
logger.info("interdomain is registered as a model of TorchTitan")
