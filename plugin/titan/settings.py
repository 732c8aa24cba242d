"""Reading the job configuration, and refusing by name what of TorchTitan's settings this plugin cannot honour."""

from dataclasses import fields, is_dataclass
from typing import Literal, get_args, get_origin

from torchtitan.config import ConfigManager, JobConfig

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
    "fault_tolerance.enable": "torchft is not supported",
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
    "optimizer.weight_decay",
    "optimizer.ssm_weight_decay",
    "checkpoint.keep_latest_k",
)
PARTS = ("optimizer", "lr_scheduler", "dataloader", "train_state")  # of a checkpoint, beside the model


def read_job_config(arguments: list[str]):
    """The job configuration from command-line arguments (--job.config_file F ...), with the plugin's sections.

    Raises: ValueError for a TOML key that does not exist; SystemExit, after saying why, for a flag that does not.
    """
    return ConfigManager().parse_args(arguments)


def refuse_unsupported(job_config) -> None:
    """Raises: ValueError with the setting, what was got, and what is allowed."""
    _refuse_unknown_choices(job_config)
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
    if ac.mode == "memory_budget" and not compiled:
        raise ValueError(
            "activation_checkpoint.mode = 'memory_budget' is a setting of the compiler: add compile.enable = true, or "
            "choose none, selective or full."
        )
    unknown = [name for name in job_config.compile.components if name not in ("model", "loss")]
    if unknown:
        raise ValueError(f"compile.components = {unknown} is unknown; allowed: model, loss.")
    if job_config.optimizer.name not in ("AdamW", "Adam"):
        raise ValueError(f"optimizer.name = {job_config.optimizer.name!r} is unknown; allowed: AdamW, Adam.")
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


def _refuse_unknown_choices(job_config) -> None:
    # TorchTitan checks these on the command line, and not in a TOML file.
    for section in fields(job_config):
        values = getattr(job_config, section.name)
        for f in fields(values) if is_dataclass(values) else ():
            if get_origin(f.type) is Literal and getattr(values, f.name) not in get_args(f.type):
                raise ValueError(
                    f"{section.name}.{f.name} = {getattr(values, f.name)!r} is unknown; allowed: "
                    f"{', '.join(map(str, get_args(f.type)))}."
                )


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
            if value is not None and value < least:
                raise ValueError(f"{setting} must be at least {least}: got {value}.")
    for setting in ("optimizer.lr", "optimizer.ssm_lr", "training.max_norm"):
        value = value_of(job_config, setting)
        if not value > 0:
            raise ValueError(f"{setting} must be positive: got {value}.")


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
