"""The TOML's sections and fields, with TorchTitan's names and defaults where TorchTitan has the field.

The comment at a field is the help text of its flag (`#:` above it, or `#` beside it). Its annotation says what can be checked
of it alone: its type and its `Bound`. `settings.py` reads a file and flags into a `JobConfig` and checks each field in one
loop; `plan.py` checks what several settings mean together.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from interdomain import features, scan
from interdomain.model import CONDITIONS, SIZES


class Bound(NamedTuple):
    """Which values a setting may have."""

    words: str
    allows: Callable[[Any], bool]


def _one_of(names: Iterable[str]) -> Bound:
    return Bound(f"one of {', '.join(names)}", frozenset(names).__contains__)


_AT_LEAST_0 = Bound("at least 0", lambda x: 0 <= x < math.inf)
Count = Annotated[int, Bound("at least 1", lambda x: x >= 1)]
CountOr0 = Annotated[int, _AT_LEAST_0]
Positive = Annotated[float, Bound("positive", lambda x: x > 0)]
NotNegative = Annotated[float, _AT_LEAST_0]
Fraction = Annotated[float, Bound("from 0 to 1", lambda x: 0 <= x <= 1)]
Decay = Annotated[float, Bound("at least 0 and below 1", lambda x: 0 <= x < 1)]
Size = Annotated[str, _one_of(SIZES)]
Condition = Annotated[str, _one_of(CONDITIONS)]
Conditions = Annotated[list[str], Bound(f"of {', '.join(CONDITIONS)}", lambda names: set(names) <= CONDITIONS.keys())]
ScanBackend = Annotated[str, _one_of(scan.BACKENDS)]
FeaturesBackend = Annotated[str, _one_of(features.BACKENDS)]
SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B")
Schedule = Annotated[
    str,
    Bound(
        f"one of {', '.join(SCHEDULES)} (schedules that split the backward pass, such as zero-bubble and DualPipe, go through "
        "the graph of the dynamics twice, which is one for all layers of a stage)",
        SCHEDULES.__contains__,
    ),
]


@dataclass
class Job:
    """[job]: where a run writes, and what it says of itself."""

    config_file: str | None = None  # The TOML file to read.
    dump_folder: str = "./outputs"  # Folder of everything that the run writes.
    description: str = "default job"  # What this run is, in your words; printed at the start.


@dataclass
class Profiling:
    """[profiling]: traces by torch.profiler."""

    enable_profiling: bool = False  # Write traces.
    save_traces_folder: str = "profile_traces"  # Folder of the traces, in the dump folder.
    profile_freq: Count = 10  # Steps from one trace to the next.
    profiler_active: Count = 1  # Steps that a trace shows.
    profiler_warmup: CountOr0 = 3  # Steps that the profiler warms up for before them.


@dataclass
class Metrics:
    """[metrics]: what is logged, and what TensorBoard shows of the mixer."""

    log_freq: Count = 10  # Steps from one logged step to the next.
    enable_tensorboard: bool = False  # Write TensorBoard events.
    disable_color_printing: bool = False  # Log without colours.
    save_tb_folder: str = "tb"  # Folder of the TensorBoard events, in the dump folder.
    enable_wandb: bool = False  # Log to Weights & Biases as well.
    #: Steps between the mixer's scalars by layer (timescales, 1 - |Lambda|, Delta), from one logged step (log_freq) to
    #: another; 0: none.
    mixer_freq: CountOr0 = 100


@dataclass
class Model:
    """[model]: the size. `flavor` names a row of the table of sizes; every number can be set on top of it."""

    name: Literal["interdomain"] = "interdomain"  # The model that this plugin trains.
    flavor: Size = "debug"  # debug, 125M, 350M, 760M, 1.3B, 7B or 70B.
    #: Rows of the embedding and the head; 0: as the size says (32,000; debug 2,048). May be larger than the tokenizer's.
    vocab_size: CountOr0 = 0
    dim: CountOr0 = 0  # Width; 0: as the size says. A head is dim / n_heads wide.
    n_layers: CountOr0 = 0  # Blocks; 0: as the size says.
    n_heads: CountOr0 = 0  # Query heads; 0: as the size says.


@dataclass
class Mixer:
    """[mixer]: which cell of the study. `condition` names a row of the table; every switch can be set on top of it."""

    #: softmax, interdomain, interdomain-norope, single-query, single-query-norope, dual-linear, dual-linear-norope,
    #: s4d or s4d-rope; gla, mamba2, deltanet or gated-deltanet.
    condition: Condition = "interdomain"
    #: Key features and values as the input (true) or two generic projections (false). Unset: as the condition says.
    dual_input: bool | None = None
    query_readout: bool | None = None  # Query-conditioned readout (true) or learned linear contraction (false).
    rope: bool | None = None  # Rotary embedding on the query and key inputs.
    n_basis: int | None = None  # M, basis functions per head. Unset: as the size says (64).
    readout: str | None = None  # complex, real or hermitian: how complex U and Gamma become real.
    c_form: str | None = None  # full, diagonal or identity.
    feature_map: str | None = None  # silu, rff, or the positive elu, softplus and favor (docs/kernel-view.md).
    #: Divide by the Nadaraya-Watson denominator (eta); favor needs it.
    normalize: bool | None = None
    output_gate: bool | None = None  # o <- sigmoid(Wg x) * o.
    n_kv_heads: int | None = None  # Heads of keys, values and state; query heads share them in groups.
    #: Of gla, mamba2, deltanet and gated-deltanet: heads of the state. Unset: those with which it is as large as interdomain
    #: attention's, 4 n_basis dim numbers.
    state_heads: int | None = None
    #: A hybrid: of every so many layers the last is softmax, the others are the condition's. The settings here are those of all
    #: layers that have them.
    softmax_every: int | None = None
    #: A hybrid: conditions of the layers in order, instead of `condition`; repeated where they are fewer than the layers.
    layers: Conditions = field(default_factory=list)
    window: int | None = (
        None  # Tokens that a token attends to in softmax layers, itself among them. Unset: all before it.
    )
    #: C at the start: root mean square of |C_mn|; 1 is S4D's complex N(0, 1). Unset: sqrt(2)/M, or sqrt(2/M) if diagonal.
    c_scale: float | None = None
    linear_scale: float | None = None  # Initial standard deviation of the linear readout's c. Unset: 1/sqrt(M).
    dt_min: float | None = None  # Delta starts log-uniform between dt_min and dt_max. Unset: 0.001.
    dt_max: float | None = None  # Unset: 0.1.
    a_init: str | None = None  # How A starts: s4d-inv, s4d-lin or s4d-real. Unset: s4d-inv.
    #: How the scan is computed: auto, chunkwise, chunkwise-torch, sequential, parallel, fft or reference (docs/kernels.md).
    #: All compute the same function.
    backend: ScanBackend = "auto"
    #: Compute the scan's scores again in the backward pass (true), or keep them for a shorter one (false): 4 bytes per token,
    #: layer, query head and basis function in bf16, but for full activation checkpointing; chunkwise and parallel, on CUDA.
    #: The bits are the same.
    recompute: Literal[True, False] = True  # not bool, whose flag would be --mixer.no-recompute: like the switches
    #: How convolution, RoPE, feature map and input norm are computed: auto, triton (one kernel, CUDA) or torch. All compute
    #: the same function.
    features: FeaturesBackend = "auto"


@dataclass
class Data:
    """[data]: a prepared corpus (python -m interdomain.tools.prepare_data)."""

    #: Folder of a prepared corpus, or a prefix or glob of Megatron .bin/.idx shards; or a list of these, mixed
    #: by weight (in TOML a list; on the command line with commas).
    corpus: str | list[str] = ""
    #: Of the corpora in a mixture, in samples; they need not sum to 1.
    weights: list[float] = field(default_factory=list)
    #: Prefix or glob of validation shards, where `corpus` is bare shards. Empty: the prepared corpora's own split.
    validation_corpus: str = ""
    #: A tokenizer file (sentencepiece .model, tokenizer.json, X.tiktoken). Empty: the prepared corpus's own tokenizer.
    tokenizer: str = ""
    prefetch: CountOr0 = 4  # Micro-batches that a thread reads ahead of training; 0: none.
    #: Nothing is carried from one packed document into the next: state, short convolution, positions, and what softmax
    #: attends to. The paper packs documents and speaks of no reset.
    reset_state_at_documents: bool = False


@dataclass
class Optimizer:
    """[optimizer]: the SSM parameters (input norms, Delta, A, C, c) form a group of their own."""

    name: Literal["AdamW", "Adam"] = "AdamW"  # AdamW or Adam.
    lr: Positive = 8e-4  # Peak learning rate.
    beta1: Decay = 0.9  # Of the mean of the gradients.
    beta2: Decay = 0.95  # Of the mean of their squares.
    eps: NotNegative = 1e-8  # Added to the root of that mean.
    weight_decay: NotNegative = 0.1  # Weight decay of all parameters but the SSM's.
    ssm_lr: Positive = 1e-3  # Peak learning rate of the SSM group is min(lr, ssm_lr).
    ssm_weight_decay: NotNegative = 0.0  # Weight decay of the SSM group.
    #: PyTorch's implementation of the optimizer: fused is the fastest.
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"


@dataclass
class LRScheduler:
    """[lr_scheduler]: warmup, a constant rate, and a decay to a floor."""

    warmup_steps: CountOr0 = 200  # Linear warmup over this many steps, where warmup_tokens is 0.
    warmup_tokens: CountOr0 = 0  # Linear warmup over this many tokens, rounded to steps; 0: use warmup_steps.
    #: The step with which the decay ends; 0: the run's last step. After it the rate stays at the floor: set it to the
    #: length of a finished run to train on at that rate.
    total_steps: CountOr0 = 0
    #: Share of total_steps that the decay takes, at the end; before it the rate is constant (warmup, stable, decay; such a
    #: run can be extended from a checkpoint before the decay). 0: constant, no decay. 1: decay right after the warmup.
    decay_ratio: Fraction = 1.0
    #: Shape of the decay; sqrt: 1 - the root of the share of the decay that is done.
    decay_type: Literal["linear", "sqrt", "cosine"] = "cosine"
    min_lr: NotNegative = 0.0  # Learning rate at the end of the decay, the same for every group.
    #: Continue a checkpoint although this schedule gives its step another learning rate, by more than a factor of two.
    allow_jump: bool = False


@dataclass
class Training:
    """[training]: batch, length, precision, and when to give up on a run."""

    local_batch_size: Count = 8  # Sequences per rank and pass.
    #: Sequences per step; what ranks do not hold at once is accumulated. -1: one pass of every rank.
    global_batch_size: Annotated[int, Bound("at least 1, or -1 for one pass", lambda x: x >= 1 or x == -1)] = -1
    seq_len: Count = 2048  # Tokens per sequence.
    max_norm: Positive = 1.0  # Gradients are scaled down to this norm.
    steps: Count = 10_000  # Train for this many steps, where tokens is 0.
    tokens: CountOr0 = 0  # Train on this many tokens, rounded up to whole steps; 0: use steps.
    #: Stop the run when so many steps in a row had a loss or gradient norm that is not finite. Such a step changes neither
    #: weights nor optimizer state; looked at every metrics.log_freq steps.
    max_skipped_steps: Count = 10
    enable_cpu_offload: bool = False  # Keep parameters, gradients and optimizer state in the machine's memory (FSDP2).
    #: bf16: parameters as they are used, residual stream, norms and products. bf16-products: products only, over float32
    #: parameters, residual stream, embeddings and norms, as the paper's autocast has it. float32: everything. The optimizer's
    #: parameters, the dynamics and the loss are float32 in each.
    precision: Literal["bf16", "bf16-products", "float32"] = "bf16"
    gc_freq: Count = 50  # Steps between Python's garbage collections.


@dataclass
class Parallelism:
    """[parallelism]: replicas x shards x context x tensor x pipeline = ranks."""

    data_parallel_replicate_degree: int = 1  # Replicas of the weights.
    data_parallel_shard_degree: int = -1  # Shards of a replica. -1: as many as there are ranks left.
    #: Every sequence over so many ranks, a contiguous piece each: for sequences beyond the memory of one device.
    context_parallel_degree: Count = 1
    #: Heads, feed-forward and vocabulary over so many ranks, and between the mixers the tokens: ranks of one machine.
    tensor_parallel_degree: Count = 1
    #: Layers over so many ranks. The micro-batches of a step go through them one after the other.
    pipeline_parallel_degree: Count = 1
    pipeline_parallel_schedule: Schedule = "1F1B"  # 1F1B, GPipe or Interleaved1F1B (several stages per rank).
    #: Layers of a stage; the embedding and the head count as many as the next two settings say. Unset: one stage per rank,
    #: with Interleaved1F1B two.
    pipeline_parallel_layers_per_stage: Annotated[int | None, Bound("at least 1", lambda x: x is None or x >= 1)] = None
    pipeline_parallel_first_stage_less_layers: CountOr0 = 1  # Layers that the first stage has less, for its embedding.
    pipeline_parallel_last_stage_less_layers: CountOr0 = 1  # Layers that the last has less, for its norm and head.
    #: Free gathered weights after the forward pass of a block. default: of all but the last; with a pipeline never.
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"


@dataclass
class Checkpoint:
    """[checkpoint]: the last one can be continued from, as every other; a damaged one is skipped."""

    enable: bool = False  # Save checkpoints, and continue from the last.
    folder: str = "checkpoint"  # Folder of the checkpoints, in the dump folder.
    interval: Count = 500  # Steps from one checkpoint to the next.
    #: A checkpoint (a folder step-N) to begin with, where the run has none of its own.
    initial_load_path: str | None = None
    #: Take the weights of initial_load_path, and neither optimizer state, schedule, data position nor step.
    initial_load_model_only: bool = True
    #: async: train on while a thread writes a checkpoint.
    async_mode: Literal["disabled", "async"] = "disabled"
    #: Checkpoints that are kept; 0: all.
    keep_latest_k: Annotated[int, Bound("2 or more, or 0 to keep all", lambda x: x >= 2 or x == 0)] = 10
    load_step: int = -1  # Go back to the checkpoint of this step. -1: continue from the latest.
    #: Parts of initial_load_path that are begun anew, where it is not taken for its weights alone.
    exclude_from_loading: list[Literal["optimizer", "lr_scheduler", "dataloader", "train_state"]] = field(
        default_factory=list
    )


@dataclass
class ActivationCheckpoint:
    """[activation_checkpoint]: what is computed again in the backward pass; by operation, the scan is saved."""

    mode: Literal["selective", "full", "none"] = "selective"  # full: every block; selective: see selective_ac_option.
    #: op: matrix products and the scan's output are saved; a number n: every n-th block is computed again.
    selective_ac_option: str = "op"


@dataclass
class Compile:
    """[compile]: torch.compile of every block."""

    enable: bool = False  # Compile.
    #: What is compiled.
    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    backend: str = "inductor"  # Backend of torch.compile.


@dataclass
class Comm:
    """[comm]: collectives between ranks."""

    init_timeout_seconds: Count = 300  # Of collectives until the first step is done.
    train_timeout_seconds: Count = 100  # Of collectives after it.
    trace_buf_size: CountOr0 = 20000  # Collectives that NCCL's flight recorder remembers; 0: none.
    #: fake_backend simulates as many ranks as the variable NGPU says in one process, to try a configuration.
    mode: Literal["default", "fake_backend"] = "default"


@dataclass
class Validation:
    """[validation]: the same fixed tokens every time, on every topology."""

    enable: bool = False  # Validate.
    #: Validate on the first so many tokens of the validation split, rounded up to whole windows; 0: all of it.
    tokens: CountOr0 = 0
    local_batch_size: Count = 8  # Sequences per rank and pass.
    seq_len: Count = 2048  # Tokens per sequence.
    freq: Count = 10  # Steps from one validation to the next.


@dataclass
class Debug:
    """[debug]: seeds and determinism."""

    seed: int = 42  # Of initial values and the order of the data.
    deterministic: bool = False  # Use deterministic algorithms only; slower.


@dataclass
class JobConfig:
    """Everything that a run is told. Built by `settings.read_job_config`."""

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
