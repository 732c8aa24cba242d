"""All settings of a run, with TorchTitan's names and defaults where TorchTitan has the setting.

A setting is declared once, as a field of its section's dataclass. The field says

- the setting's name, type and default, and the values that it may have (`Bound`);
- its help text: the comment above it (`#:`) or beside it (`#`), which `./launch.sh --flags` prints;
- whether it is a path (`PATH`), in which `~` and `$NAME` are expanded;
- what a resume does if the setting has changed (`Resume`, of the setting or of its whole section);
- whether only our trainer supports it, and what TorchTitan's trainer does instead (`OnlyOurs`).

The list `SETTINGS` is derived from these fields. Most settings of [mixer] are declared, with their
help texts, in `MixerConfig` and `Execution` of interdomain.model. Tables of TorchTitan's settings
that are not ours stand at the end.

`job_config` reads a file and flags into a `JobConfig`. `rules` checks settings that depend on one
another.
"""

import math
import re
from collections.abc import Collection, Mapping
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

    FREE = "It goes on without a warning: the setting changes no bit of the weights."
    ROUNDING = "It goes on without a warning: the same sums are taken in another order."
    CONTENT = "It compares the fingerprint of the text, and not the path."
    WARNED = "It goes on, and a warning names the change."
    REFUSED = "It ends: the model would compute something else."


class OnlyOurs(NamedTuple):
    """Marks a setting that only our trainer supports.

    Attributes:
        torchtitan: What TorchTitan's trainer does instead. It begins with a verb.
    """

    torchtitan: str


PATH = "path"  # marks a setting that is a path

# TorchTitan's names of sizes, and ours.
ALIASES = {"debugmodel": "debug"}
# Parts of a checkpoint besides the weights.
PARTS = ("optimizer", "lr_scheduler", "dataloader", "train_state")


def _several_of(names: Collection[str]) -> Bound:
    return Bound(f"of {', '.join(names)}", lambda chosen: all(name in names for name in chosen))


def _is_compile_backend(name: str) -> bool:
    # PyTorch's list takes a second to import.
    return name == "inductor" or name in torch.compiler.list_backends(())


_AT_LEAST_0 = Bound("at least 0", lambda x: 0 <= x < math.inf)
_COMPILE_BACKEND = Bound(
    "one that torch.compiler.list_backends(()) names, such as inductor, aot_eager or eager",
    _is_compile_backend,
)
_BLOCKS = Bound(
    "op, or a number of blocks from 1",
    lambda x: x == "op" or bool(re.fullmatch("[1-9][0-9]*", x)),
)
_LAYERS = Bound("at least 1", lambda x: x is None or x >= 1)
_KEPT = Bound("2 or more, or 0 to keep all", lambda x: x >= 2 or x == 0)
_SEED = Bound("a number of 64 bits, from -2^63 to 2^63 - 1", lambda x: -(2**63) <= x < 2**63)
_SUMS = one_of(("step", "micro-batch"))
_STEPS = Bound("of steps from 1", lambda steps: all(step >= 1 for step in steps))

# Types of settings.
Count = Annotated[int, Bound("at least 1", lambda x: x >= 1)]
CountOr0 = Annotated[int, _AT_LEAST_0]
CountOrAll = Annotated[int, Bound("at least 1, or -1 for one pass", lambda x: x >= 1 or x == -1)]
Positive = Annotated[float, Bound("positive and finite", lambda x: 0 < x < math.inf)]
PositiveOrInf = Annotated[float, Bound("positive", lambda x: x > 0)]
NotNegative = Annotated[float, _AT_LEAST_0]
Fraction = Annotated[float, Bound("from 0 to 1", lambda x: 0 <= x <= 1)]
Decay = Annotated[float, Bound("at least 0 and below 1", lambda x: 0 <= x < 1)]
Folder = Annotated[str, PATH]
Size = Annotated[str, one_of([*SIZES, *ALIASES])]
Condition = Annotated[str, one_of(CONDITIONS)]
Conditions = Annotated[list[str], _several_of(CONDITIONS)]
Schedule = Annotated[str, one_of(("1F1B", "GPipe", "Interleaved1F1B"))]

_KEEPS_THE_LATEST = OnlyOurs("removes all but the latest checkpoints")
Section = TypeVar("Section", bound=type)


def _with_settings_of_the_model(section: Section) -> Section:
    """Adds the fields of MixerConfig and Execution to a section.

    Those of MixerConfig are None unless a run sets them.
    """

    def add(f: Field, kind: Any, default: Any) -> None:
        section.__annotations__[f.name] = Annotated[kind, tyro.conf.arg(help=f.metadata["text"])]
        setattr(section, f.name, default)

    for name, f in MIXER_SETTINGS.items():
        # The condition sets the kind.
        if name != "kind":
            kind: Any = f.type
            add(f, kind | None, None)
    for f in EXECUTION_SETTINGS.values():
        if f.type is bool:
            # The flag of a plain bool would be --mixer.no-recompute, unlike that of a `bool |
            # None`.
            add(f, Annotated[Literal[True, False], Resume.FREE], f.default)
        else:
            add(f, Annotated[f.type, one_of(f.metadata["choices"])], f.default)
    return section


@dataclass(frozen=True)
class Job:
    """[job]: the folder and the name of a run."""

    RESUME: ClassVar[Resume] = Resume.FREE
    config_file: Annotated[str | None, PATH] = None  # The TOML file to read.
    dump_folder: Folder = "./outputs"  # The run's folder, which receives everything that it writes.
    description: str = "default job"  # A description of the run, which is printed at the start.


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
    enable_wandb: bool = False  # Log to Weights & Biases as well. This needs the package wandb.
    #: Steps between two records of each layer's timescales, 1 - |Lambda| and Delta, in logged steps
    #: only. 0: never.
    mixer_freq: CountOr0 = 100


@dataclass(frozen=True)
class Model:
    """[model]: the size. `flavor` chooses one; the other settings change it."""

    name: Literal["interdomain"] = "interdomain"  # The model that this plugin trains.
    #: The size: debug (TorchTitan's own files call it debugmodel), 125M, 350M, 760M, 1.3B, 7B or
    #: 70B.
    flavor: Size = "debug"
    #: Size of the vocabulary, at least that of the tokenizer. 0: the default of the size (32,000;
    #: debug 2,048).
    vocab_size: CountOr0 = 0
    #: Width of the model. 0: the default of the size. The width of a head is dim / n_heads.
    dim: CountOr0 = 0
    n_layers: CountOr0 = 0  # Number of layers. 0: the default of the size.
    n_heads: CountOr0 = 0  # Number of query heads. 0: the default of the size.


@dataclass(frozen=True)
@_with_settings_of_the_model
class Mixer:
    """[mixer]: the token mixer. `condition` chooses one; the other settings change it."""

    #: The mixer: softmax, interdomain, interdomain-norope, interdomain-paired, single-query,
    #: single-query-norope, dual-linear, dual-linear-norope, s4d, s4d-rope, gla, mamba2, deltanet or
    #: gated-deltanet.
    condition: Condition = "interdomain"
    #: Makes a hybrid: every n-th layer is softmax, and `condition` chooses the others. The other
    #: settings of this section hold for every layer that has them.
    softmax_every: int | None = None
    #: Makes a hybrid: the conditions of the layers in order, in place of `condition`. A shorter
    #: list is repeated.
    layers: Conditions = field(default_factory=list)


@dataclass(frozen=True)
class Data:
    """[data]: the text (docs/data.md)."""

    #: Folder of a prepared corpus, or a prefix or glob of Megatron .bin/.idx shards. Several
    #: corpora are mixed by weight: write a list in TOML, and commas on the command line.
    corpus: Annotated[str | list[str], PATH, Resume.CONTENT] = ""
    #: Weights of the corpora in a mixture, in samples. They need not sum to 1.
    weights: list[float] = field(default_factory=list)
    #: Another corpus to validate on, or validation shards if `corpus` is shards without a manifest.
    #: Empty: the validation split of the corpora.
    validation_corpus: Annotated[Folder, Resume.CONTENT] = ""
    #: Tokenizer file (sentencepiece .model, tokenizer.json, X.tiktoken). Empty: the tokenizer of
    #: the prepared corpus.
    tokenizer: Folder = ""
    #: Micro-batches that a thread reads ahead. 0: none.
    prefetch: Annotated[CountOr0, Resume.FREE] = 4
    #: Keep packed documents apart: state, short convolution, positions and softmax attention start
    #: anew at each document. The paper packs documents and mentions no reset.
    reset_state_at_documents: Annotated[bool, Resume.REFUSED] = False


@dataclass(frozen=True)
class Optimizer:
    """[optimizer]: AdamW or Muon. SSM parameters have their own rate and weight decay."""

    #: The optimizer. Muon updates the matrices of attention and feed-forward, and AdamW all other
    #: parameters. Muon's updates are scaled to the size of AdamW's, so that lr and weight_decay
    #: hold for both.
    name: Literal["AdamW", "Adam", "Muon"] = "AdamW"
    lr: Positive = 8e-4  # Peak learning rate.
    beta1: Decay = 0.9  # Decay of the running mean of the gradients.
    beta2: Decay = 0.95  # Decay of the running mean of the squared gradients.
    eps: NotNegative = 1e-8  # Added to the root of the mean of squares.
    momentum: Decay = 0.95  # Decay of Muon's running mean of the gradients. AdamW does not use it.
    weight_decay: NotNegative = 0.1  # Weight decay of all parameters but the SSM parameters.
    #: The peak learning rate of the SSM parameters (input norms, Delta, A, C, c) is min(lr,
    #: ssm_lr).
    ssm_lr: Positive = 1e-3
    ssm_weight_decay: NotNegative = 0.0  # Weight decay of the SSM parameters.
    #: PyTorch's implementation of the optimizer. fused is the fastest.
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"


@dataclass(frozen=True)
class LRScheduler:
    """[lr_scheduler]: warmup, then a constant rate, then a decay."""

    warmup_steps: CountOr0 = 200  # Length of the linear warmup in steps, if warmup_tokens is 0.
    #: Length of the warmup in tokens, rounded to steps. 0: use warmup_steps.
    warmup_tokens: CountOr0 = 0
    #: Step at which the decay ends. 0: the run's last step. After it the rate stays at min_lr. To
    #: train a finished run further at that rate, set it to the length of the finished run.
    total_steps: CountOr0 = 0
    #: Fraction of total_steps that the decay takes, at the end. 1: the decay begins right after the
    #: warmup. 0: no decay. With a fraction between, the rate is constant before the decay, and a
    #: checkpoint before the decay can be trained longer.
    decay_ratio: Fraction = 1.0
    #: Shape of the decay. sqrt: 1 - sqrt(fraction of the decay that is done).
    decay_type: Literal["linear", "sqrt", "cosine"] = "cosine"
    min_lr: NotNegative = 0.0  # Learning rate of all parameters at the end of the decay.


@dataclass(frozen=True)
class Training:
    """[training]: batch, length, precision."""

    #: Sequences per rank in one forward pass (a micro-batch), at most. A rank whose share of a step
    #: is smaller reads its share.
    local_batch_size: Annotated[Count, Resume.ROUNDING] = 8
    #: Sequences per step. If one pass of all ranks has fewer, gradients are accumulated. -1: one
    #: pass of all ranks.
    global_batch_size: CountOrAll = -1
    seq_len: Count = 2048  # Tokens per sequence.
    max_norm: PositiveOrInf = 1.0  # Clip gradients to this norm. inf: never.
    steps: Count = 10_000  # Length of the run in steps, if tokens is 0.
    tokens: CountOr0 = 0  # Length of the run in tokens, rounded up to whole steps. 0: use steps.
    #: Stop the run after this many steps in a row that were skipped because the loss or the
    #: gradient norm was not finite. Skipped steps change nothing. The number is checked every
    #: metrics.log_freq steps.
    max_skipped_steps: Annotated[
        Count, OnlyOurs("takes steps that are not finite, or ends at one")
    ] = 10
    #: Keep weights, gradients and optimizer state in CPU memory.
    enable_cpu_offload: Annotated[bool, Resume.ROUNDING] = False
    #: bf16: the forward and backward pass in bf16. bf16-products: matrix products in bf16, the rest
    #: in float32, as in the paper. float32: everything in float32. The optimizer's parameters, the
    #: SSM parameters and the loss are always float32.
    precision: Literal["bf16", "bf16-products", "float32"] = "bf16"
    #: When the gradients of a step with several micro-batches are summed over the ranks. step:
    #: once, and every rank holds whole gradients until then. micro-batch: after each micro-batch,
    #: which needs less memory and more network, and is not possible with a pipeline.
    reduce_gradients: Annotated[str, _SUMS, Resume.ROUNDING] = "step"
    #: Precision in which gradients are summed over the ranks. bf16 halves the bytes. With several
    #: micro-batches, which are added up in float32, bf16 needs reduce_gradients = micro-batch.
    mixed_precision_reduce: Literal["float32", "bf16"] = "float32"
    #: Steps between two garbage collections of Python.
    gc_freq: Annotated[Count, Resume.FREE] = 50


@dataclass(frozen=True)
class Parallelism:
    """[parallelism]: five degrees, whose product is the number of ranks (docs/parallelism.md)."""

    RESUME: ClassVar[Resume] = Resume.ROUNDING
    data_parallel_replicate_degree: Count = 1  # Copies of the model.
    #: Ranks over which FSDP2 shards a copy of the model. -1: all ranks that the other degrees
    #: leave.
    data_parallel_shard_degree: int = -1
    #: Ranks that share every sequence, a contiguous piece each: for sequences that do not fit on
    #: one device.
    context_parallel_degree: Count = 1
    #: Ranks that share heads, feed-forward layers and vocabulary, and the tokens between the
    #: mixers. Best on one machine.
    tensor_parallel_degree: Count = 1
    #: Ranks that share the layers. The micro-batches of a step pass through them one after the
    #: other.
    pipeline_parallel_degree: Count = 1
    #: 1F1B, GPipe, or Interleaved1F1B, in which a rank has several stages and waits less.
    pipeline_parallel_schedule: Schedule = "1F1B"
    #: Layers of a stage. The next two settings say how embedding and head count. Unset: one stage
    #: per rank with 1F1B and GPipe, and two with Interleaved1F1B.
    pipeline_parallel_layers_per_stage: Annotated[int | None, _LAYERS] = None
    #: Number of layers that the first stage has less than others, because it has the embedding.
    pipeline_parallel_first_stage_less_layers: CountOr0 = 1
    #: Number of layers that the last stage has less than others, because it has the head.
    pipeline_parallel_last_stage_less_layers: CountOr0 = 1
    #: Free a block's gathered weights after its forward pass. default: in all blocks but the last,
    #: and in none with a pipeline.
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"


@dataclass(frozen=True)
class Checkpoint:
    """[checkpoint]: saving and continuing a run. A damaged checkpoint is skipped."""

    RESUME: ClassVar[Resume] = Resume.FREE
    enable: bool = False  # Save checkpoints, and continue from the latest.
    folder: Folder = "checkpoint"  # Folder of the checkpoints, in job.dump_folder.
    interval: Count = 500  # Steps between two checkpoints.
    #: Checkpoint (a folder step-N, or a run's folder for its latest) to start from, if the run has
    #: none of its own.
    initial_load_path: Annotated[str | None, PATH] = None
    #: Load only the weights of initial_load_path: no optimizer state, schedule, data position or
    #: step.
    initial_load_model_only: bool = True
    #: async: a thread writes the checkpoint while training goes on.
    async_mode: Literal["disabled", "async"] = "disabled"
    #: Number of checkpoints to keep in addition to the milestones, at least 2. 0: all.
    keep_latest_k: Annotated[int, _KEPT] = 10
    #: Steps between two milestones: checkpoints that are never removed, and are saved even if
    #: `interval` does not divide their step. 0: only keep_steps and the last step of the run are
    #: milestones.
    keep_every: Annotated[CountOr0, _KEEPS_THE_LATEST] = 0
    #: Tokens between two milestones, rounded to steps. 0: use keep_every.
    keep_every_tokens: Annotated[CountOr0, _KEEPS_THE_LATEST] = 0
    #: Further milestones, such as the last step before the decay.
    keep_steps: Annotated[list[int], _STEPS, _KEEPS_THE_LATEST] = field(default_factory=list)
    load_step: int = -1  # Continue from the checkpoint of this step. -1: from the latest.
    #: Parts of initial_load_path that are not loaded, if initial_load_model_only is off.
    exclude_from_loading: Annotated[list[str], _several_of(PARTS)] = field(default_factory=list)


@dataclass(frozen=True)
class ActivationCheckpoint:
    """[activation_checkpoint]: what the backward pass recomputes, to save memory."""

    RESUME: ClassVar[Resume] = Resume.ROUNDING
    #: What is recomputed: every block (full), a part (selective), or nothing (none).
    mode: Literal["selective", "full", "none"] = "selective"
    #: With selective: op recomputes all but matrix products and the scan; a number n recomputes
    #: every n-th block.
    selective_ac_option: Annotated[str, _BLOCKS] = "op"


@dataclass(frozen=True)
class Compile:
    """[compile]: torch.compile of every block and the loss."""

    enable: bool = False  # Use torch.compile.
    #: What to compile.
    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    backend: Annotated[str, _COMPILE_BACKEND] = "inductor"  # Backend of torch.compile.


@dataclass(frozen=True)
class Comm:
    """[comm]: communication between ranks."""

    RESUME: ClassVar[Resume] = Resume.FREE
    #: Timeout of a collective until the first step is done, in seconds.
    init_timeout_seconds: Count = 300
    train_timeout_seconds: Count = 100  # Timeout of a collective after the first step, in seconds.
    trace_buf_size: CountOr0 = 20000  # Collectives that NCCL's flight recorder keeps. 0: none.
    #: fake_backend: simulate NGPU ranks (an environment variable) in one process, to try a
    #: configuration.
    mode: Literal["default", "fake_backend"] = "default"


@dataclass(frozen=True)
class Validation:
    """[validation]: loss on the same tokens every time, on any number of ranks."""

    enable: bool = False  # Validate during training.
    #: Tokens of the validation split to use, in whole sequences that lie evenly over it. 0: all.
    tokens: CountOr0 = 0
    #: Sequences per rank in one forward pass (a micro-batch).
    local_batch_size: Annotated[Count, Resume.FREE] = 8
    seq_len: Count = 2048  # Tokens per sequence.
    freq: Count = 10  # Steps between two validations.


@dataclass(frozen=True)
class Debug:
    """[debug]: seed and determinism."""

    seed: Annotated[int, _SEED] = 42  # Seed of the initial weights and of the data's order.
    deterministic: bool = False  # Use only deterministic algorithms; this is slower.


@dataclass(frozen=True)
class JobConfig:
    """All settings of a run. Built by `settings.read_job_config`."""

    job: Job = Job()
    model: Model = Model()
    mixer: Mixer = Mixer()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    training: Training = Training()
    parallelism: Parallelism = Parallelism()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    debug: Debug = Debug()
    comm: Comm = Comm()

    def to_dict(self) -> dict[str, Any]:
        """Returns the values by section and name."""
        return asdict(self)

    def __getitem__(self, setting: str) -> Any:
        """Returns the value of a setting by its name, such as "training.steps"."""
        section, _, name = setting.partition(".")
        return getattr(getattr(self, section), name)

    def changed(self, values: Mapping[str, Any]) -> "JobConfig":
        """Returns a copy with other values of some settings. No value is checked."""
        sections: dict[str, Any] = {}
        for setting, value in values.items():
            section, _, name = setting.partition(".")
            before = sections.get(section, getattr(self, section))
            sections[section] = replace(before, **{name: value})
        return replace(self, **sections)


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting.

    Attributes:
        kind: Its type, without the annotations.
        bound: The values that it may have. None: all of the type.
        is_path: Whether `~` and `$NAME` are expanded.
        resume: What a resume does if it has changed.
        torchtitan: What TorchTitan's trainer does instead, if only our trainer supports the
            setting.
    """

    kind: Any
    bound: Bound | None
    is_path: bool
    resume: Resume
    torchtitan: str | None


def setting_of(annotation: Any, resume: Resume = Resume.WARNED) -> Setting:
    """Returns the declaration that a field's annotation gives.

    Args:
        annotation: A type, or Annotated with the marks that the module docstring lists.
        resume: The default of the field's section.
    """
    kind = annotation
    bound = None
    is_path = False
    torchtitan = None
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
    """Returns every setting by its name, from the fields of the sections."""
    settings = {}
    for section, table in get_type_hints(JobConfig).items():
        annotations = get_type_hints(table, include_extras=True)
        resume = getattr(table, "RESUME", Resume.WARNED)
        for f in fields(table):
            settings[f"{section}.{f.name}"] = setting_of(annotations[f.name], resume)
    return settings


# Every setting by its name, such as "training.steps".
SETTINGS = _settings()
# Help texts of the settings of [mixer] that the model declares, by name.
MIXER_HELP = {
    name: f.metadata["text"]
    for name, f in (MIXER_SETTINGS | EXECUTION_SETTINGS).items()
    if "text" in f.metadata
}

# Settings of TorchTitan that our trainer does not have, and what to do instead.
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
    "parallelism.module_fqns_per_model_part": (
        "Set parallelism.pipeline_parallel_layers_per_stage and the layers less of the first and last stage instead."
    ),
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
# Those of them that TorchTitan's own trainer reads.
HONOURED_BY_TORCHTITAN = (
    *("lr_scheduler.min_lr_factor", "parallelism.pipeline_parallel_microbatch_size"),
    *("training.dataset", "training.dataset_path", "validation.dataset", "validation.dataset_path"),
    *("validation.steps", "model.hf_assets_path"),
)
# Those of them that choose TorchTitan's own data, which data.corpus replaces.
OF_TORCHTITANS_DATA = re.compile(
    r"(training|validation)\.data|validation\.steps|model\.hf_assets_path"
)
# Settings of TorchTitan that have no effect on this model, even under TorchTitan's own trainer.
NO_EFFECT = re.compile(
    r"quantize\.|fault_tolerance\.|memory_estimation\.|debug\.moe_|checkpoint\.enable_ft_"
    r"|activation_checkpoint\.(memory_budget|visualize)"
    r"|parallelism\.(expert_|disable_loss_parallel|context_parallel_rotate|pipeline_parallel_expert)"
)
# Settings of TorchTitan's own entry point that may stand in a file. They change nothing.
IGNORED = ("job.custom_config_module", "experimental.custom_import")
# Values of TorchTitan's settings that describe what our trainer does, unless it is TorchTitan's
# default.
AS_OURS = {"checkpoint.last_save_model_only": False}

# Settings of a feature that is off are ignored: TorchTitan's own files have many of them. Each row
# has the switch of a feature, the value of the switch that means off, and a pattern of the settings
# that are read only while the feature is on.
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

# Lengths in steps, and the same lengths in tokens. In a file tokens win. Steps on the command line
# win over a file's tokens.
IN_TOKENS = {
    "training.steps": "training.tokens",
    "lr_scheduler.warmup_steps": "lr_scheduler.warmup_tokens",
    "checkpoint.keep_every": "checkpoint.keep_every_tokens",
}
