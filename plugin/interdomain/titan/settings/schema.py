"""All settings of a run, with TorchTitan's names and defaults where TorchTitan has the setting.

This is the one place that says of a setting:

- its name, type and default, and the values that it may have (`Bound`);
- its text in `./launch.sh --flags`: the comment above it (`#:`) or beside it (`#`);
- whether it is a path (`PATH`), in which `~` and `$NAME` are expanded;
- what a resume does if the setting has changed (`Resume`, of the setting or of its whole section);
- whether only our trainer honours it, and what TorchTitan's does instead (`OnlyOurs`).

`SETTINGS` is the list that follows from it. The settings of TorchTitan that are not ours stand at the end, with what to use
instead. Most settings of [mixer] are those of `MixerConfig` and `Execution`, with their text.

`job_config` reads a file and flags into a `JobConfig`. `rules` checks settings that depend on one another.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from enum import Enum
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
import tyro

from interdomain.model.config import CONDITIONS, EXECUTION_SETTINGS, MIXER_SETTINGS, SIZES
from interdomain.model.settings import Bound, one_of


class Resume(Enum):
    """What a resume does if a setting differs from the checkpoint's."""

    FREE = "It goes on in silence: the setting changes no bit of the weights."
    ROUNDING = "It goes on in silence: the same sums are taken in another order."
    CONTENT = "It compares the text, by its fingerprint, and not the path."
    WARNED = "It goes on, and a warning names the change."
    REFUSED = "It ends: the model would compute something else."


class OnlyOurs(NamedTuple):
    """A setting that only our trainer honours."""

    torchtitan: str  # what TorchTitan's trainer does instead, with a verb: "sends no notes"


PATH = "path"


_AT_LEAST_0 = Bound("at least 0", lambda x: 0 <= x < math.inf)
Count = Annotated[int, Bound("at least 1", lambda x: x >= 1)]
CountOr0 = Annotated[int, _AT_LEAST_0]
Positive = Annotated[float, Bound("positive and finite", lambda x: 0 < x < math.inf)]
NotNegative = Annotated[float, _AT_LEAST_0]
Fraction = Annotated[float, Bound("from 0 to 1", lambda x: 0 <= x <= 1)]
Decay = Annotated[float, Bound("at least 0 and below 1", lambda x: 0 <= x < 1)]
ALIASES = {"debugmodel": "debug"}  # TorchTitan's name for its smallest models -> the size
Size = Annotated[str, one_of([*SIZES, *ALIASES])]
Condition = Annotated[str, one_of(CONDITIONS)]
Conditions = Annotated[
    list[str], Bound(f"of {', '.join(CONDITIONS)}", lambda names: set(names) <= CONDITIONS.keys())
]
Folder = Annotated[str, PATH]
Section = TypeVar("Section", bound=type)
PARTS = ("optimizer", "lr_scheduler", "dataloader", "train_state")
Parts = Annotated[
    list[str], Bound(f"of {', '.join(PARTS)}", lambda names: set(names) <= set(PARTS))
]
Steps = Annotated[
    list[int], Bound("of steps from 1", lambda steps: all(step >= 1 for step in steps))
]
CompileBackend = Annotated[
    str,
    Bound(
        "one that torch.compiler.list_backends(()) names, such as inductor, aot_eager or eager",
        lambda x: (
            x == "inductor" or x in torch.compiler.list_backends(())
        ),  # the list takes a second to import
    ),
]
Schedule = Annotated[str, one_of(("1F1B", "GPipe", "Interleaved1F1B"))]
_KEEPS_THE_LATEST = OnlyOurs("removes all but the latest checkpoints")


def _with_settings_of_the_mixer(section: Section) -> Section:
    """Adds the fields of MixerConfig, None where a run does not set them, and those of Execution, with their defaults."""

    def add(f: Field, kind: Any, default: Any) -> None:
        section.__annotations__[f.name] = Annotated[kind, tyro.conf.arg(help=f.metadata["text"])]
        setattr(section, f.name, default)

    for name, f in MIXER_SETTINGS.items():
        kind: Any = f.type
        if name != "kind":  # the condition says it
            add(f, kind | None, None)
    for f in EXECUTION_SETTINGS.values():
        if f.type is bool:
            # As a plain bool its flag would be --mixer.no-recompute, unlike that of a `bool | None`.
            kind = Annotated[Literal[True, False], Resume.FREE]
        else:
            kind = Annotated[f.type, one_of(f.metadata["choices"])]
        add(f, kind, f.default)
    return section


@dataclass(frozen=True)
class Job:
    """[job]: the folder and the name of a run."""

    RESUME: ClassVar[Resume] = Resume.FREE
    config_file: Annotated[str | None, PATH] = None  # The TOML file to read.
    dump_folder: Folder = "./outputs"  # Folder that the run writes everything to.
    description: str = "default job"  # A description of the run; printed at the start.


@dataclass(frozen=True)
class Profiling:
    """[profiling]: traces of torch.profiler."""

    RESUME: ClassVar[Resume] = Resume.FREE
    enable_profiling: bool = False  # Write traces of torch.profiler.
    save_traces_folder: Folder = "profile_traces"  # Folder of the traces, in job.dump_folder.
    profile_freq: Count = 10  # Steps between two traces.
    profiler_active: Count = 1  # Steps in a trace.
    profiler_warmup: CountOr0 = 3  # Warmup steps of the profiler before each trace.


@dataclass(frozen=True)
class Metrics:
    """[metrics]: the log and TensorBoard."""

    RESUME: ClassVar[Resume] = Resume.FREE
    log_freq: Count = 10  # Steps between two logged steps.
    enable_tensorboard: bool = False  # Write TensorBoard events.
    disable_color_printing: bool = False  # Log without colours.
    save_tb_folder: Folder = "tb"  # Folder of the TensorBoard events, in job.dump_folder.
    enable_wandb: bool = False  # Log to Weights & Biases as well (needs the package wandb).
    #: Steps between two records of each layer's timescales, 1 - |Lambda| and Delta, at logged steps only; 0: never.
    mixer_freq: CountOr0 = 100


@dataclass(frozen=True)
class Model:
    """[model]: the size. `flavor` chooses one; the other settings change it."""

    name: Literal["interdomain"] = "interdomain"  # The model that this plugin trains.
    #: The size: debug (also debugmodel, as in TorchTitan's own files), 125M, 350M, 760M, 1.3B, 7B or 70B.
    flavor: Size = "debug"
    #: Tokens of the vocabulary, at least as many as the tokenizer has; 0: as the size has it (32,000; debug 2,048).
    vocab_size: CountOr0 = 0
    dim: CountOr0 = 0  # Model width; 0: as the size has it. The head width is dim / n_heads.
    n_layers: CountOr0 = 0  # Layers; 0: as the size has it.
    n_heads: CountOr0 = 0  # Query heads; 0: as the size has it.


@dataclass(frozen=True)
@_with_settings_of_the_mixer
class Mixer:
    """[mixer]: the token mixer. `condition` chooses one; the other settings change it."""

    #: The mixer: softmax, interdomain, interdomain-norope, interdomain-paired, single-query, single-query-norope,
    #: dual-linear, dual-linear-norope, s4d, s4d-rope, gla, mamba2, deltanet or gated-deltanet.
    condition: Condition = "interdomain"
    #: A hybrid: every n-th layer is softmax, the others are as `condition` says. Settings of this section hold for every
    #: layer that has them.
    softmax_every: int | None = None
    #: A hybrid: the conditions of the layers in order, instead of `condition`. A shorter list is repeated.
    layers: Conditions = field(default_factory=list)


@dataclass(frozen=True)
class Data:
    """[data]: the text (docs/data.md)."""

    #: Folder of a prepared corpus, or a prefix or glob of Megatron .bin/.idx shards. Several are mixed by weight: a list in
    #: TOML, commas on the command line.
    corpus: Annotated[str | list[str], PATH, Resume.CONTENT] = ""
    #: Weights of the corpora in a mixture, in samples. They need not sum to 1.
    weights: list[float] = field(default_factory=list)
    #: Another corpus to validate on, or validation shards if `corpus` is shards without a manifest. Empty: the corpora's own
    #: split.
    validation_corpus: Annotated[Folder, Resume.CONTENT] = ""
    #: Tokenizer file (sentencepiece .model, tokenizer.json, X.tiktoken). Empty: the prepared corpus's own.
    tokenizer: Folder = ""
    prefetch: Annotated[CountOr0, Resume.FREE] = (
        4  # Micro-batches that a thread reads ahead; 0: none.
    )
    #: Keep packed documents apart: state, short convolution, positions and softmax attention start anew at each document.
    #: The paper packs documents and mentions no reset.
    reset_state_at_documents: Annotated[bool, Resume.REFUSED] = False


@dataclass(frozen=True)
class Optimizer:
    """[optimizer]: AdamW or Muon. The SSM parameters (input norms, Delta, A, C, c) have their own rate and weight decay."""

    #: The optimizer. Muon: for the matrices of attention and feed-forward; AdamW for all others. Its changes are scaled to the
    #: size of AdamW's, so that lr and weight_decay hold for both.
    name: Literal["AdamW", "Adam", "Muon"] = "AdamW"
    lr: Positive = 8e-4  # Peak learning rate.
    beta1: Decay = 0.9  # Decay of the running mean of the gradients.
    beta2: Decay = 0.95  # Decay of the running mean of their squares.
    eps: NotNegative = 1e-8  # Added to the root of the mean of squares.
    momentum: Decay = 0.95  # Of Muon: decay of the running mean of the gradients.
    weight_decay: NotNegative = 0.1  # Weight decay of all parameters but the SSM's.
    ssm_lr: Positive = 1e-3  # The SSM parameters' peak learning rate is min(lr, ssm_lr).
    ssm_weight_decay: NotNegative = 0.0  # Weight decay of the SSM parameters.
    #: PyTorch's implementation of the optimizer; fused is the fastest.
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"


@dataclass(frozen=True)
class LRScheduler:
    """[lr_scheduler]: warmup, then a constant rate, then a decay."""

    warmup_steps: CountOr0 = 200  # Length of the linear warmup in steps, if warmup_tokens is 0.
    warmup_tokens: CountOr0 = 0  # The same in tokens, rounded to steps; 0: use warmup_steps.
    #: Step at which the decay ends; 0: the run's last step. After it the rate stays at min_lr. To train a finished run
    #: further at that rate, set it to the run's length.
    total_steps: CountOr0 = 0
    #: Share of total_steps that the decay takes, at the end. 1: decay right after the warmup. 0: no decay. Between, the
    #: rate is constant before the decay, and the run can be extended from a checkpoint before it.
    decay_ratio: Fraction = 1.0
    #: Shape of the decay; sqrt: 1 - sqrt(share of the decay that is done).
    decay_type: Literal["linear", "sqrt", "cosine"] = "cosine"
    min_lr: NotNegative = 0.0  # Learning rate at the end of the decay, of all parameters.
    #: Continue a checkpoint even if this schedule changes the learning rate at its step by more than a factor of two.
    allow_jump: Annotated[bool, Resume.FREE, OnlyOurs("does not compare rates at a resume")] = False


@dataclass(frozen=True)
class Training:
    """[training]: batch, length, precision."""

    #: Sequences per rank in one forward pass (a micro-batch).
    local_batch_size: Annotated[Count, Resume.ROUNDING] = 8
    #: Sequences per step. If one pass of all ranks has fewer, gradients are accumulated. -1: one pass of all ranks.
    global_batch_size: Annotated[
        int, Bound("at least 1, or -1 for one pass", lambda x: x >= 1 or x == -1)
    ] = -1
    seq_len: Count = 2048  # Tokens per sequence.
    #: Clip gradients to this norm; inf: never.
    max_norm: Annotated[float, Bound("positive", lambda x: x > 0)] = 1.0
    steps: Count = 10_000  # Length of the run in steps, if tokens is 0.
    tokens: CountOr0 = 0  # Length in tokens, rounded up to whole steps; 0: use steps.
    #: Stop the run after this many steps in a row that were skipped because the loss or the gradient norm was not finite. Such
    #: steps change nothing. Checked every metrics.log_freq steps.
    max_skipped_steps: Annotated[
        Count, OnlyOurs("takes steps that are not finite, or ends at one")
    ] = 10
    #: Keep weights, gradients and optimizer state in CPU memory.
    enable_cpu_offload: Annotated[bool, Resume.ROUNDING] = False
    #: bf16: the forward and backward pass in bf16. bf16-products: matrix products in bf16, the rest in float32, as in the
    #: paper. float32: everything in float32. The optimizer's parameters, the dynamics and the loss are always float32.
    precision: Literal["bf16", "bf16-products", "float32"] = "bf16"
    #: When the gradients of a step with several micro-batches are summed over the shards and replicas. step: once, and every
    #: rank holds whole gradients until then. micro-batch: after each one, which needs less memory and more network, and which
    #: a pipeline cannot.
    reduce_gradients: Annotated[Literal["step", "micro-batch"], Resume.ROUNDING] = "step"
    #: Precision in which they are summed over the ranks. bf16 halves the bytes; with several micro-batches it needs
    #: reduce_gradients = micro-batch, because these are added up in float32.
    mixed_precision_reduce: Literal["float32", "bf16"] = "float32"
    gc_freq: Annotated[Count, Resume.FREE] = 50  # Steps between two garbage collections of Python.


@dataclass(frozen=True)
class Parallelism:
    """[parallelism]: the product of the five degrees is the number of ranks (docs/parallelism.md)."""

    RESUME: ClassVar[Resume] = Resume.ROUNDING
    data_parallel_replicate_degree: int = 1  # Replicas of the model.
    data_parallel_shard_degree: int = (
        -1
    )  # Shards of a replica (FSDP2). -1: all ranks that are left.
    #: Ranks that share every sequence, a contiguous piece each: for sequences that do not fit on one device.
    context_parallel_degree: Count = 1
    #: Ranks that share heads, feed-forward layers and vocabulary, and the tokens between the mixers. Best on one machine.
    tensor_parallel_degree: Count = 1
    #: Ranks that share the layers. The micro-batches of a step pass through them one after the other.
    pipeline_parallel_degree: Count = 1
    #: 1F1B, GPipe; or Interleaved1F1B, in which a rank has several stages and waits less.
    pipeline_parallel_schedule: Schedule = "1F1B"
    #: Layers of a stage. The embedding and the head count as the next two settings say. Unset: one stage per rank with 1F1B
    #: and GPipe, two with Interleaved1F1B.
    pipeline_parallel_layers_per_stage: Annotated[
        int | None, Bound("at least 1", lambda x: x is None or x >= 1)
    ] = None
    pipeline_parallel_first_stage_less_layers: CountOr0 = (
        1  # The first stage has so many layers less (embedding).
    )
    pipeline_parallel_last_stage_less_layers: CountOr0 = (
        1  # The last stage has so many layers less (head).
    )
    #: Free a block's gathered weights after its forward pass. default: all blocks but the last; none with a pipeline.
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"


@dataclass(frozen=True)
class Checkpoint:
    """[checkpoint]: saving and continuing a run. A damaged checkpoint is skipped."""

    RESUME: ClassVar[Resume] = Resume.FREE
    enable: bool = False  # Save checkpoints, and continue from the latest.
    folder: Folder = "checkpoint"  # Folder of the checkpoints, in job.dump_folder.
    interval: Count = 500  # Steps between two checkpoints.
    #: Checkpoint (a folder step-N, or a run's folder for its latest) to start from, if the run has none of its own.
    initial_load_path: Annotated[str | None, PATH] = None
    #: Of initial_load_path, load the weights only: no optimizer state, schedule, data position or step.
    initial_load_model_only: bool = True
    #: async: a thread writes the checkpoint while training goes on.
    async_mode: Literal["disabled", "async"] = "disabled"
    #: Checkpoints to keep beside the milestones, at least 2; 0: all.
    keep_latest_k: Annotated[
        int, Bound("2 or more, or 0 to keep all", lambda x: x >= 2 or x == 0)
    ] = 10
    #: Steps between two milestones: checkpoints that are never removed, saved even where they are no multiple of interval.
    #: 0: none but keep_steps and the last step of the run.
    keep_every: Annotated[CountOr0, _KEEPS_THE_LATEST] = 0
    #: The same in tokens, rounded to steps; 0: use keep_every.
    keep_every_tokens: Annotated[CountOr0, _KEEPS_THE_LATEST] = 0
    #: Further milestones, such as the last step before the decay.
    keep_steps: Annotated[Steps, _KEEPS_THE_LATEST] = field(default_factory=list)
    load_step: int = -1  # Continue from the checkpoint of this step. -1: from the latest.
    #: Parts of initial_load_path that are not loaded, if initial_load_model_only is off.
    exclude_from_loading: Parts = field(default_factory=list)


@dataclass(frozen=True)
class ActivationCheckpoint:
    """[activation_checkpoint]: what the backward pass recomputes, to save memory."""

    RESUME: ClassVar[Resume] = Resume.ROUNDING
    mode: Literal["selective", "full", "none"] = (
        "selective"  # What is recomputed: every block, a part, or nothing.
    )
    #: With selective: op recomputes all but matrix products and the scan; a number n every n-th block.
    selective_ac_option: Annotated[
        str,
        Bound(
            "op, or a number of blocks from 1",
            lambda x: x == "op" or bool(re.fullmatch("[1-9][0-9]*", x)),
        ),
    ] = "op"


@dataclass(frozen=True)
class Compile:
    """[compile]: torch.compile of every block and the loss."""

    enable: bool = False  # Use torch.compile.
    #: What to compile.
    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    backend: CompileBackend = "inductor"  # Backend of torch.compile.


@dataclass(frozen=True)
class Comm:
    """[comm]: communication between ranks."""

    RESUME: ClassVar[Resume] = Resume.FREE
    init_timeout_seconds: Count = (
        300  # Timeout of a collective until the first step is done, in seconds.
    )
    train_timeout_seconds: Count = 100  # Timeout of a collective after it, in seconds.
    trace_buf_size: CountOr0 = 20000  # Collectives that NCCL's flight recorder keeps; 0: none.
    #: fake_backend: simulate NGPU ranks (an environment variable) in one process, to try a configuration.
    mode: Literal["default", "fake_backend"] = "default"


@dataclass(frozen=True)
class Validation:
    """[validation]: loss on the same tokens every time, on any number of ranks."""

    enable: bool = False  # Validate during training.
    #: Tokens of the validation split to use, in whole sequences that lie evenly over it; 0: all.
    tokens: CountOr0 = 0
    #: Sequences per rank in one forward pass (a micro-batch).
    local_batch_size: Annotated[Count, Resume.FREE] = 8
    seq_len: Count = 2048  # Tokens per sequence.
    freq: Count = 10  # Steps between two validations.


@dataclass(frozen=True)
class Debug:
    """[debug]: seed and determinism."""

    #: Seed of the initial weights and of the data's order.
    seed: Annotated[
        int, Bound("a number of 64 bits, from -2^63 to 2^63 - 1", lambda x: -(2**63) <= x < 2**63)
    ] = 42
    deterministic: bool = False  # Use deterministic algorithms only; this is slower.


@dataclass(frozen=True)
class JobConfig:
    """All settings of a run. Built by `settings.read_job_config`."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    mixer: Mixer = field(default_factory=Mixer)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    validation: Validation = field(default_factory=Validation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)
    debug: Debug = field(default_factory=Debug)
    comm: Comm = field(default_factory=Comm)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __getitem__(self, setting: str) -> Any:
        """The value of a setting by its name, such as "training.steps"."""
        section, _, name = setting.partition(".")
        return getattr(getattr(self, section), name)

    def changed(self, values: Mapping[str, Any]) -> "JobConfig":
        """A copy with other values of some settings. No value is checked."""
        sections: dict[str, Any] = {}
        for setting, value in values.items():
            section, _, name = setting.partition(".")
            sections[section] = replace(
                sections.get(section, getattr(self, section)), **{name: value}
            )
        return replace(self, **sections)


@dataclass(frozen=True)
class Setting:
    """What the schema says of a setting."""

    kind: Any  # its type, without the annotations
    bound: Bound | None
    is_path: bool
    resume: Resume
    torchtitan: str | None  # what TorchTitan's trainer does instead, if only ours honours it


def setting_of(annotation: Any, resume: Resume = Resume.WARNED) -> Setting:
    """What an annotation says of a setting. resume: that of the section."""
    kind, bound, is_path, torchtitan = annotation, None, False, None
    if get_origin(annotation) is Annotated:
        kind, *marks = get_args(annotation)
        for mark in marks:
            if isinstance(mark, Bound):
                bound = mark
            elif isinstance(mark, Resume):
                resume = mark
            elif isinstance(mark, OnlyOurs):
                torchtitan = mark.torchtitan
            elif mark == PATH:
                is_path = True
    return Setting(kind, bound, is_path, resume, torchtitan)


def _settings() -> dict[str, Setting]:
    settings = {}
    for section, table in get_type_hints(JobConfig).items():
        annotations = get_type_hints(table, include_extras=True)
        resume = getattr(table, "RESUME", Resume.WARNED)
        for f in fields(table):
            settings[f"{section}.{f.name}"] = setting_of(annotations[f.name], resume)
    return settings


SETTINGS = _settings()  # by name, such as "training.steps"
# The texts of the settings of [mixer] that come from the model.
MIXER_HELP = {
    name: f.metadata["text"]
    for name, f in (MIXER_SETTINGS | EXECUTION_SETTINGS).items()
    if "text" in f.metadata
}

# Settings of TorchTitan that are not ours, and what to do instead. `HONOURED_BY_TORCHTITAN` has those that mean something to
# TorchTitan's own trainer.
INSTEAD = {
    "training.dataset": "Set data.corpus instead.",
    "training.dataset_path": "Set data.corpus instead.",
    "training.mixed_precision_param": "Set training.precision instead: bf16, bf16-products or float32.",
    "training.dtype": "Parameters are float32; training.precision says what is computed in bf16.",
    "validation.dataset": "Set data.validation_corpus instead.",
    "validation.dataset_path": "Set data.validation_corpus instead.",
    "validation.steps": "Set validation.tokens instead.",
    "model.hf_assets_path": "Set data.tokenizer instead.",
    "model.converters": "Converters replace layers that this model's parallelism needs.",
    "lr_scheduler.min_lr_factor": "Set lr_scheduler.min_lr instead.",
    "optimizer.early_step_in_backward": "The optimizer has two groups of parameters and one step.",
    "memory_estimation.enable": "./launch.sh FILE.toml --dry-run estimates the memory.",
    "parallelism.pipeline_parallel_microbatch_size": "Set training.local_batch_size instead.",
    "parallelism.pipeline_parallel_schedule_csv": "Set parallelism.pipeline_parallel_schedule instead.",
    "parallelism.context_parallel_load_balancer": "The scan needs contiguous pieces of a sequence.",
    "parallelism.context_parallel_ptrr_mask_key": "The scan needs contiguous pieces of a sequence.",
    "parallelism.expert_parallel_degree": "The model has no experts.",
    "parallelism.spmd_backend": "The logits are plain tensors, which only the loss of spmd_types takes.",
    "parallelism.enable_sequence_parallel": "Tensor parallelism always shares the tokens between the mixers.",
    "parallelism.enable_fsdp_symm_mem": "It was never run with this model.",
    "compile.enable_async_tensor_parallel": "It needs DTensors in the model's products.",
    "debug.spmd_typechecking": "The model has no types to check.",
    "debug.moe_force_load_balance": "The model has no experts.",
}
HONOURED_BY_TORCHTITAN = (
    *("lr_scheduler.min_lr_factor", "parallelism.pipeline_parallel_microbatch_size"),
    *("training.dataset", "training.dataset_path", "validation.dataset", "validation.dataset_path"),
    *("validation.steps", "model.hf_assets_path"),
)
# Those of its data, which data.corpus replaces.
OF_TORCHTITANS_DATA = re.compile(
    r"(training|validation)\.data|validation\.steps|model\.hf_assets_path"
)
TORCHTITAN_PATHS = (
    *("training.dataset_path", "validation.dataset_path", "model.hf_assets_path"),
    "profiling.save_memory_snapshot_folder",
)
# Settings of TorchTitan that this model passes over.
NO_EFFECT = re.compile(
    r"quantize\.|fault_tolerance\.|memory_estimation\.|debug\.moe_|checkpoint\.enable_ft_"
    r"|activation_checkpoint\.(memory_budget|visualize)"
    r"|parallelism\.(expert_|disable_loss_parallel|context_parallel_rotate|pipeline_parallel_expert)"
)
# Old files name these for TorchTitan's own entry point. They change nothing.
IGNORED = ("job.custom_config_module", "experimental.custom_import")
# Settings that only TorchTitan has, at the value that our trainer amounts to. Others amount to TorchTitan's default.
AS_OURS = {"checkpoint.last_save_model_only": False}

# Settings of a feature that is off change nothing, and TorchTitan's own files are full of them: the feature's switch, the value
# of it that means off, and TorchTitan's settings that are read only while it is on.
OFF = (
    ("model.converters", [], r"quantize\."),
    ("fault_tolerance.enable", False, r"fault_tolerance\.|checkpoint\.enable_ft_"),
    ("memory_estimation.enable", False, r"memory_estimation\."),
    ("validation.enable", False, r"validation\."),
    ("checkpoint.enable", False, r"checkpoint\."),
    ("compile.enable", False, r"compile\."),
    ("profiling.enable_profiling", False, r"profiling\.(save_traces|profile)"),
    ("activation_checkpoint.mode", "none", r"activation_checkpoint\."),
    ("parallelism.pipeline_parallel_degree", 1, r"parallelism\.(pipeline_parallel_|module_fqns)"),
    ("parallelism.context_parallel_degree", 1, r"parallelism\.context_parallel_"),
    (
        "parallelism.tensor_parallel_degree",
        1,
        r"parallelism\.(disable_loss_parallel|enable_async_tensor)",
    ),
    ("parallelism.expert_parallel_degree", 1, r"parallelism\.expert_"),
)

# These count in tokens or in steps. Tokens win in a file; steps on the command line win over a file's tokens.
IN_TOKENS = {
    "training.steps": "training.tokens",
    "lr_scheduler.warmup_steps": "lr_scheduler.warmup_tokens",
    "checkpoint.keep_every": "checkpoint.keep_every_tokens",
}
