"""The model as a variant of TorchTitan: what its own entry, `python -m torchtitan.train`, builds a run from.

    [job]
    custom_config_module = "interdomain.titan"     # adds the settings of `schema`
    [experimental]
    custom_import = "interdomain.titan"            # registers the variant
    [model]
    name = "interdomain"

`InterdomainTrainer` takes the same parts, and adds what docs/torchtitan.md lists.
"""

import copy
import functools
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from .plan.device import device_here, refuse_for_device
from .plan.run_plan import RunPlan, make_plan
from .plan.topology import plan_of_local_batches, refuse_for_micro_batches, refuse_for_pipelined_validation
from .settings.job_config import (
    TORCHTITAN_DEFAULTS,
    expand_paths,
    is_off,
    let_steps_win,
    noting,
    pairs,
    refuse,
    refuse_unsupported,
    refuse_wrong_values,
    replace_aliases,
    set_value,
    value_of,
    wrong_values,
)
from .settings.schema import ALIASES, JobConfig
from .step.optimizer import GroupedOptimizers, GroupedSchedulers
from .variant import (
    OURS_ALONE,
    FixedWindows,
    FolderNames,
    TitanTransformer,
    VariantCurves,
    parallelize_variant,
    record_run,
    refuse_checkpoints_outside,
)

# Settings that this model or TorchTitan's trainer would not honour, and what to do instead.
NOT_HONOURED = {
    **{setting: f"TorchTitan's trainer {does}: start with ./launch.sh." for setting, does in OURS_ALONE.items()},
    "training.dtype": "Parameters are float32; set training.precision for the arithmetic.",
    "training.mixed_precision_param": "Set training.precision: bf16, bf16-products or float32.",
    "optimizer.early_step_in_backward": "Leave it out: the optimizer has two groups and one step.",
    "parallelism.pipeline_parallel_schedule_csv": "Leave it out: set parallelism.pipeline_parallel_schedule.",
    "parallelism.context_parallel_load_balancer": "Leave it out: the scan needs contiguous pieces.",
    "model.converters": "Leave it out: converters replace layers that this model's parallelism needs.",
    "memory_estimation.enable": "./launch.sh FILE.toml --dry-run estimates the memory.",
}

# TorchTitan's settings that are paths, beside ours (schema.PATH).
TORCHTITAN_PATHS = (
    *("training.dataset_path", "validation.dataset_path", "model.hf_assets_path"),
    "profiling.save_memory_snapshot_folder",
)

# Settings that this model and its data pass over.
NO_EFFECT = re.compile(
    r"quantize\.|fault_tolerance\.|memory_estimation\.|debug\.moe_|checkpoint\.enable_ft_"
    r"|activation_checkpoint\.(memory_budget|visualize)"
    r"|parallelism\.(expert_|disable_loss_parallel|context_parallel_rotate|pipeline_parallel_expert)"
)
OF_OTHER_DATA = re.compile(r"(training|validation)\.data|validation\.steps|model\.hf_assets_path")
OF_A_CORPUS = re.compile(r"data\.")


@user_errors
def plan_of(job_config: Any) -> RunPlan:
    """The plan of a configuration, checked at the first call, which also puts lengths in steps where it had tokens.

    Raises: SystemExit: the configuration cannot run; all reasons are printed.
    """
    if "plan" not in vars(job_config):
        if not hasattr(job_config, "mixer"):
            raise ValueError(
                'the settings of [mixer] and [data] are missing. Set job.custom_config_module = "interdomain.titan" in the '
                "TOML file, or pass --job.custom_config_module interdomain.titan."
            )
        job_config.plan = _checked_plan(job_config)
        # The scan passes a state from rank to rank: pieces must be contiguous.
        job_config.parallelism.context_parallel_load_balancer = None
    return job_config.plan


def _checked_plan(job_config: Any) -> RunPlan:
    """Raises: ValueError with every reason for which the configuration cannot run."""
    problems: list[str] = []
    replace_aliases(job_config)
    let_steps_win(job_config, sys.argv[1:])
    with noting(problems):
        _take_min_lr_factor(job_config)
    with noting(problems):
        expand_paths(job_config, TORCHTITAN_PATHS)

    # Settings of a feature that is off are checked, and planned, as if they were not set.
    planned = copy.deepcopy(job_config)
    defaults = TORCHTITAN_DEFAULTS | dict(pairs(JobConfig().to_dict()))
    for setting, default in defaults.items():
        if is_off(setting, functools.partial(value_of, job_config)):
            set_value(planned, setting, default)
    problems += _unread(planned, defaults)
    with noting(problems):
        refuse_wrong_values(planned)
    if problems:
        # What is checked next reads these settings. With a default in the place of a wrong value the other problems show.
        for setting in wrong_values(planned):
            set_value(planned, setting, defaults[setting])
    for check in (refuse_unsupported, refuse_for_device, refuse_checkpoints_outside, _refuse_for_trainer):
        with noting(problems):
            check(planned)
    refuse(problems)

    ranks = world_size()
    planned.checkpoint.exclude_from_loading = []  # TorchTitan's has no conditions
    if planned.parallelism.pipeline_parallel_degree == 1:
        planned.training.reduce_gradients = "micro-batch"  # what TorchTitan's trainer does
    if planned.parallelism.pipeline_parallel_degree > 1:  # its micro-batches are parts of a local batch
        planned = plan_of_local_batches(planned, planned.parallelism.pipeline_parallel_microbatch_size, ranks)
    plan = make_plan(planned, ranks)
    job_config.training.steps, job_config.training.tokens = plan.steps, 0
    job_config.lr_scheduler.warmup_steps, job_config.lr_scheduler.warmup_tokens = plan.warmup_steps, 0
    job_config.lr_scheduler.total_steps = job_config.lr_scheduler.total_steps or None  # TorchTitan's 0 would be no step
    return plan


def _take_min_lr_factor(job_config: Any) -> None:
    """Make the rate itself of TorchTitan's multiple of the peak. Raises: ValueError for both."""
    schedule = job_config.lr_scheduler
    if not schedule.min_lr_factor:
        return
    if schedule.min_lr:
        raise ValueError("lr_scheduler.min_lr and lr_scheduler.min_lr_factor say the same. Leave one of the two out.")
    schedule.min_lr = schedule.min_lr_factor * job_config.optimizer.lr
    schedule.min_lr_factor = 0.0


def world_size() -> int:
    """The ranks of the run. A script may ask before it makes a process group, or make none."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def _unread(job_config: Any, defaults: dict[str, Any]) -> Iterator[str]:
    """The problems of settings that are not at their defaults and that nothing would read."""
    unread, beside = (OF_OTHER_DATA, "beside") if job_config.data.corpus else (OF_A_CORPUS, "without")
    for setting, default in defaults.items():
        value = value_of(job_config, setting)
        if value == default:
            continue
        if removal := removal_of(setting):
            yield removal
        elif setting in NOT_HONOURED:
            yield f"{setting} = {value} has no effect in this run. {NOT_HONOURED[setting]}"
        elif NO_EFFECT.match(setting):
            yield f"{setting} = {value} has no effect in this run. Leave it out."
        elif unread.match(setting):
            yield f"{setting} = {value} has no effect {beside} data.corpus. Leave one of the two out."


def _refuse_for_trainer(job_config: Any) -> None:
    """Raises: ValueError for combinations that TorchTitan's trainer hands on otherwise than the model needs."""
    problems: list[str] = []
    parallel = job_config.parallelism
    pipeline, context = parallel.pipeline_parallel_degree > 1, parallel.context_parallel_degree > 1
    if job_config.data.reset_state_at_documents and (pipeline or context):
        problems.append(
            "data.reset_state_at_documents with pipeline_parallel_degree or context_parallel_degree above 1: TorchTitan's "
            "trainer gives positions to the first stage alone, and its own to context parallelism. Start with ./launch.sh."
        )
    if pipeline:
        with noting(problems):
            refuse_for_micro_batches(job_config, parallel.pipeline_parallel_microbatch_size)
        with noting(problems):
            refuse_for_pipelined_validation(job_config)
    if job_config.profiling.enable_memory_snapshot and device_here().type == "cpu":
        problems.append("profiling.enable_memory_snapshot needs a GPU, and this machine has none. Turn it off.")
    refuse(problems)


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
        plan = plan_of(job_config)
        self.config = plan.config
        self.execution = plan.execution
        self.seed = plan.seed

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        return count_parameters(model), train_flops_per_token(self.config, seq_len)


def pipeline_variant(
    model: nn.Module, parallel_dims: Any, job_config: Any, device: Any, args: Any, parallelize_fn: Any, loss_fn: Any
) -> Any:
    """TorchTitan's stages and schedules. Its trainer goes backward from the sum of the loss; here the gradient is that of the
    mean."""
    targets = plan_of(job_config).global_batch * job_config.training.seq_len
    if job_config.data.corpus:
        targets = plan_of(job_config).global_batch * open_dataset(job_config, "train").targets

    def loss_of_step(logits: Tensor, labels: Tensor) -> Tensor:
        loss = loss_fn(logits, labels)
        share = loss / targets
        return share + (loss - share).detach()  # the sum, which the trainer logs, with the gradient of the mean

    return pipeline_llm(model, parallel_dims, job_config, device, args, parallelize_fn, loss_of_step)


@user_errors
def build_tokenizer(job_config: Any) -> Any:
    """The corpus's tokenizer, or TorchTitan's own. TorchTitan's first hook with a configuration: the checks are here."""
    plan = plan_of(job_config)
    if job_config.data.corpus:
        return open_tokenizer(job_config)
    tokenizer = build_hf_tokenizer(job_config)
    if (size := tokenizer.get_vocab_size()) > plan.config.vocab_size:
        raise ValueError(
            f"the tokenizer of model.hf_assets_path has {size} tokens and the model {plan.config.vocab_size}: set "
            f"model.vocab_size = {size} or more."
        )
    return tokenizer


@user_errors
def build_dataloader(dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> Any:
    """Read data.corpus; without one, TorchTitan's training.dataset. Rank 0 writes the run's record beside its checkpoints."""
    if job_config.data.corpus:
        tokenizer, loader = open_data(job_config, plan_of(job_config), dp_rank, dp_world_size)
        data = data_record(job_config, loader.dataset, tokenizer)
    else:
        loader = build_text_dataloader(dp_world_size, dp_rank, tokenizer, job_config)
        data = text_record(job_config.training.dataset, tokenizer)
        tokenizer = as_trained(tokenizer)
        data["corpora"] = [dataset_record(job_config.training)]
    record_run(job_config, plan_of(job_config), data, tokenizer)
    return loader


def dataset_record(training: Any) -> dict[str, Any]:
    """Facts of TorchTitan's data set, for the run's record: a folder of the user's is not named."""
    name = training.dataset.lower()  # as TorchTitan takes it
    words = f"TorchTitan's data set {name}"
    path = DATASETS[name].path
    on_the_hub = not training.dataset_path and re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not Path(path).exists()
    if training.dataset_path:
        words = f"texts of a folder, read as {words}"
    elif on_the_hub:
        words += f", {path}"
    hub = [path] if on_the_hub else []
    return {"name": name, "share": "1", "tokens": None, "sources": [words], "datasets": hub}


@user_errors
def build_variant_validator(*, dp_world_size: int, dp_rank: int, **parts: Any) -> Any:
    """TorchTitan's validator, over `FixedWindows` of data.corpus."""
    job_config = parts["job_config"]
    if not job_config.data.corpus:
        return build_validator(dp_world_size=dp_world_size, dp_rank=dp_rank, **parts)
    windows = FixedWindows(job_config, dp_rank, dp_world_size, job_config.validation.local_batch_size)
    if parts["parallel_dims"].cp_enabled and windows.dataset.targets < windows.dataset.seq_len:
        raise ValueError(
            "validation.enable with parallelism.context_parallel_degree above 1, for a corpus with answers: TorchTitan's "
            "validator takes all pieces of a sequence to have the same number of labels. Start with ./launch.sh, or turn "
            "validation off."
        )
    job_config.validation.steps = len(windows.batches)
    return validator_of_windows(parts, windows)


class VariantMetrics(VariantCurves, MetricsProcessor):
    """TorchTitan's metrics for this model."""

    def __init__(self, job_config: Any, parallel_dims: Any) -> None:
        super().__init__(job_config, parallel_dims)
        self.plan = plan_of(job_config)

    def log_validation(self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None) -> None:
        # TorchTitan's validator divides by the labels of a rank's own piece of the sequences.
        super().log_validation(loss / self.parallel_dims.cp, step, extra_metrics)


def get_train_spec() -> TrainSpec:
    """The parts of a run, as each of TorchTitan's own model folders has them."""
    models = {size: ModelArgs(config=build_config(size)) for size in SIZES}
    models |= {alias: ModelArgs(config=build_config(size)) for alias, size in ALIASES.items()}
    return TrainSpec(
        model_cls=TitanTransformer,  # pyright: ignore[reportArgumentType] (a module, with ModelProtocol's methods)
        model_args=models,
        parallelize_fn=parallelize_variant,
        pipelining_fn=pipeline_variant,
        build_optimizers_fn=lambda parts, settings, *_: GroupedOptimizers(parts, settings),
        build_lr_schedulers_fn=GroupedSchedulers,
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=build_tokenizer,
        build_loss_fn=build_cross_entropy_loss,
        build_validator_fn=build_variant_validator,
        build_metrics_processor_fn=lambda job_config, dims, _: VariantMetrics(job_config, dims),
        state_dict_adapter=FolderNames,
    )


use_cpu_if_alone()
register_train_spec("interdomain", get_train_spec())
logger.info("interdomain is registered as a model of TorchTitan")
