"""Reading the job configuration, and refusing by name what of TorchTitan's settings this plugin cannot honour."""

import math
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from types import UnionType
from typing import Literal, Union, get_args, get_origin

from torch._dynamo import list_backends

from .host import ConfigManager, JobConfig

NAME, CONFIG_MODULE = "interdomain", "interdomain.titan.job_config"

# Settings that nothing here reads, and what to use instead. A value other than TorchTitan's default is refused.
UNUSED = {
    "training.dataset": "Set data.corpus",
    "training.dataset_path": "Set data.corpus",
    "training.dataloader": "Batches are read from memory maps, without workers",
    "validation.dataset": "Set data.validation_corpus, or use the prepared corpus's own split",
    "validation.dataset_path": "Set data.validation_corpus, or use the prepared corpus's own split",
    "validation.dataloader": "Batches are read from memory maps, without workers",
    "model.tokenizer_path": "Set data.tokenizer",
    "model.converters": "Quantised training is not supported: leave it empty",
    "optimizer.early_step_in_backward": "It steps before the gradients are clipped and knows no parameter groups",
    "quantize.linear": "Quantised training is not supported",
    "quantize.grouped_mm": "Quantised training is not supported",
    "fault_tolerance.enable": "torchft is not supported",
    "fault_tolerance.semi_sync_method": "torchft is not supported",
    "memory_estimation.enable": "./launch.sh FILE.toml --dry-run estimates the memory",
    "training.dtype": "Parameters are float32: use training.mixed_precision_param = bfloat16",
    "checkpoint.export_dtype": "Checkpoints are float32: python -m interdomain.tools.convert --dtype bfloat16 exports",
}
POSITIVE = (
    "training.local_batch_size",
    "training.seq_len",
    "training.gc_freq",
    "training.max_skipped_steps",
    "metrics.log_freq",
    "checkpoint.interval",
    "comm.init_timeout_seconds",
    "comm.train_timeout_seconds",
    "profiling.profile_freq",
    "profiling.profiler_active",
)
POSITIVE_IN_VALIDATION = ("validation.seq_len", "validation.local_batch_size", "validation.freq")
NOT_NEGATIVE = (
    "training.tokens",
    "validation.tokens",
    "metrics.mixer_freq",
    "metrics.histogram_freq",
    "model.vocab_size",
    "lr_scheduler.warmup_steps",
    "lr_scheduler.warmup_tokens",
    "lr_scheduler.min_lr",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.ssm_weight_decay",
    "checkpoint.keep_latest_k",
    "data.prefetch",
    "profiling.profiler_warmup",
)
FRACTIONS = ("lr_scheduler.decay_ratio", "lr_scheduler.min_lr_factor", "activation_checkpoint.memory_budget")
CHOICES = {
    "model.name": (NAME,),
    "optimizer.name": ("AdamW", "Adam"),
    "activation_checkpoint.determinism_check": ("default", "none"),
}
# Settings of [checkpoint] that ask for something where it is on, and TorchTitan passes over where it is off.
WITH_CHECKPOINTS = {
    "initial_load_path": None,
    "load_step": -1,
    "load_only": False,
    "exclude_from_loading": [],
    "create_seed_checkpoint": False,
}
PARTS = ("optimizer", "lr_scheduler", "dataloader", "train_state")  # of a checkpoint, beside the model


def read_job_config(arguments: list[str]):
    """The job configuration from command-line arguments (--job.config_file F ...), with the plugin's sections.

    Raises: ValueError for a TOML key that does not exist, or a file that does not name the plugin; SystemExit, after saying
        why, for a flag that does not exist.
    """
    try:
        job_config = ConfigManager().parse_args(arguments)
    except AssertionError as e:  # one of TorchTitan's own checks
        raise ValueError(f"{e}.") from e
    except ValueError as e:
        if "Invalid field names" not in str(e):
            raise
        raise ValueError(
            f"{str(e).splitlines()[0]} ./launch.sh --flags lists all that there are; the plugin's own need "
            f'job.custom_config_module = "{CONFIG_MODULE}" in the file.'
        ) from e
    if not hasattr(job_config, "mixer") or not job_config.experimental.custom_import:
        raise ValueError(
            f'the configuration does not name the plugin: job.custom_config_module = "{CONFIG_MODULE}" and '
            'experimental.custom_import = "interdomain.titan" must stand in it, as in train_configs/debug.toml.'
        )
    return job_config


def refuse_unsupported(job_config) -> None:
    """Raises: ValueError with the setting, what was got, and what is allowed."""
    _refuse_types(job_config)
    _refuse_choices(job_config)
    _refuse_unused(job_config)
    _refuse_numbers(job_config)
    _refuse_parallelism(job_config.parallelism)
    _refuse_checkpointing(job_config)
    ac, compiled = job_config.activation_checkpoint, _compiled(job_config)
    option = ac.selective_ac_option
    if ac.mode == "selective" and option != "op" and (not option.isdigit() or int(option) < 1):
        raise ValueError(
            f"activation_checkpoint.selective_ac_option = {option!r} is unknown; allowed: 'op' (saves matrix "
            "products and the scan's output) or a number n (checkpoint every n-th block)."
        )
    if ac.mode == "selective" and option == "op" and ac.debug:
        raise ValueError(
            "activation_checkpoint.debug cannot trace checkpointing by operation: turn it off, or choose another mode or "
            "selective_ac_option."
        )
    if ac.mode == "memory_budget" and not compiled:
        raise ValueError(
            "activation_checkpoint.mode = 'memory_budget' is a setting of the compiler: add compile.enable = true, or "
            "choose none, selective or full."
        )
    unknown = [name for name in job_config.compile.components if name not in ("model", "loss")]
    if unknown:
        raise ValueError(f"compile.components = {unknown} is unknown; allowed: model, loss.")
    backend = job_config.compile.backend
    if job_config.compile.enable and backend not in list_backends(exclude_tags=()):
        raise ValueError(f"compile.backend = {backend!r} is unknown; allowed: {', '.join(list_backends())}.")
    if job_config.metrics.enable_wandb and not find_spec("wandb"):  # TorchTitan would train on without curves
        raise ValueError("metrics.enable_wandb needs wandb, not installed here: pip install wandb, or leave it out.")
    if job_config.validation.enable and job_config.validation.steps != -1:
        raise ValueError(
            f"validation.steps = {job_config.validation.steps} would read other tokens on other topologies. Set "
            "validation.tokens (the same fixed tokens every time) and leave validation.steps at -1."
        )


def value_of(job_config, setting: str):
    section, name = setting.split(".")
    return getattr(getattr(job_config, section), name)


def _compiled(job_config) -> bool:
    return job_config.compile.enable and "model" in job_config.compile.components


def _refuse_types(job_config) -> None:
    # TorchTitan checks these on the command line, and not in a TOML file, where "false" is a string and true.
    for section in fields(job_config):
        values = getattr(job_config, section.name)
        for f in fields(values) if is_dataclass(values) else ():
            value = getattr(values, f.name)
            if get_origin(f.type) is Literal:
                _refuse_other(f"{section.name}.{f.name}", value, get_args(f.type))
            elif not _fits(value, f.type):
                kind = f.type.__name__ if isinstance(f.type, type) else f.type
                raise ValueError(f"{section.name}.{f.name} must be {kind}: got {value!r}.")


def _fits(value, kind) -> bool:
    """Whether a TOML value is of an annotated type. A bool is an int to Python, but `steps = true` is no number."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is list:
        return isinstance(value, list) and all(_fits(one, *arguments) for one in value)
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind)


def _refuse_choices(job_config) -> None:
    for setting, allowed in CHOICES.items():
        _refuse_other(setting, value_of(job_config, setting), allowed)


def _refuse_other(setting: str, value, allowed) -> None:
    if value not in allowed:
        raise ValueError(f"{setting} = {value!r} is unknown; allowed: {', '.join(map(str, allowed))}.")


def _refuse_unused(job_config) -> None:
    default = JobConfig()
    for setting, instead in UNUSED.items():
        value = value_of(job_config, setting)
        if value != value_of(default, setting):
            raise ValueError(f"{setting} = {value!r} is not used by this plugin. {instead}, and leave this one out.")


def _refuse_numbers(job_config) -> None:
    positive = POSITIVE + (POSITIVE_IN_VALIDATION if job_config.validation.enable else ())
    for names, least in ((positive, 1), (NOT_NEGATIVE, 0)):
        for setting in names:
            value = value_of(job_config, setting)
            if value is not None and not least <= value < math.inf:
                raise ValueError(f"{setting} must be at least {least}: got {value}.")
    for setting in ("optimizer.lr", "optimizer.ssm_lr", "training.max_norm"):
        value = value_of(job_config, setting)
        if not value > 0:
            raise ValueError(f"{setting} must be positive: got {value}.")
    for setting in FRACTIONS:
        value = value_of(job_config, setting)
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"{setting} must be from 0 to 1: got {value}.")
    for setting in ("optimizer.beta1", "optimizer.beta2"):
        value = value_of(job_config, setting)
        if not 0 <= value < 1:
            raise ValueError(f"{setting} must be at least 0 and below 1: got {value}.")
    sequences = job_config.training.global_batch_size
    if sequences < 1 and sequences != -1:
        raise ValueError(
            f"training.global_batch_size must be at least 1, or -1 for one micro-batch of every rank: got {sequences}."
        )
    profiling = job_config.profiling
    if profiling.enable_profiling and profiling.profile_freq < profiling.profiler_warmup + profiling.profiler_active:
        raise ValueError(
            f"profiling.profile_freq = {profiling.profile_freq} must be at least profiling.profiler_warmup + "
            f"profiling.profiler_active = {profiling.profiler_warmup} + {profiling.profiler_active}."
        )


def _refuse_parallelism(parallel) -> None:
    for name in ("tensor", "pipeline", "context", "expert"):
        degree = getattr(parallel, f"{name}_parallel_degree")
        if degree != 1:
            raise ValueError(
                f"parallelism.{name}_parallel_degree = {degree}: the plugin shards with FSDP2, HSDP and replication "
                f"only (1.3B fits one device). Leave {name}_parallel_degree at 1 and use the data_parallel degrees."
            )


def _refuse_checkpointing(job_config) -> None:
    checkpoint = job_config.checkpoint
    for name, unset in WITH_CHECKPOINTS.items():
        value = getattr(checkpoint, name)
        if value != unset and not checkpoint.enable:
            raise ValueError(
                f"checkpoint.{name} = {value!r} does nothing where checkpoint.enable is off: nothing is loaded and nothing "
                f"saved. Turn it on (--checkpoint.enable), or leave checkpoint.{name} out."
            )
    if checkpoint.last_save_in_hf or checkpoint.initial_load_in_hf:
        raise ValueError(
            "checkpoint.last_save_in_hf and initial_load_in_hf are not supported: use python -m "
            "interdomain.tools.convert, which keeps the SSM parameters float32 and writes a complete folder."
        )
    if checkpoint.enable and checkpoint.last_save_model_only:
        raise ValueError(
            "checkpoint.last_save_model_only = true leaves a last checkpoint that no run can continue from. Set it "
            "to false; python -m interdomain.tools.convert extracts the model from a full checkpoint."
        )
    if checkpoint.keep_latest_k == 1:
        raise ValueError(
            "checkpoint.keep_latest_k = 1 would leave no whole checkpoint while the next is being saved; allowed: 2 or "
            "more, or 0 to keep all."
        )
    unknown = [name for name in checkpoint.exclude_from_loading if name not in PARTS]
    if unknown:
        raise ValueError(f"checkpoint.exclude_from_loading = {unknown} is unknown; allowed: {', '.join(PARTS)}.")
