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
Count = Annotated[int, Bound("at least 1", lambda x: 1 <= x < math.inf)]
CountOr0 = Annotated[int, _AT_LEAST_0]
Positive = Annotated[float, Bound("positive", lambda x: x > 0)]
NotNegative = Annotated[float, _AT_LEAST_0]
Fraction = Annotated[float, Bound("from 0 to 1", lambda x: 0 <= x <= 1)]
Decay = Annotated[float, Bound("at least 0 and below 1", lambda x: 0 <= x < 1)]
Size = Annotated[str, _one_of(SIZES)]
Condition = Annotated[str, _one_of(CONDITIONS)]
ScanBackend = Annotated[str, _one_of(scan.BACKENDS)]
FeaturesBackend = Annotated[str, _one_of(features.BACKENDS)]

# Settings of TorchTitan's that this plugin does not read: a pattern of their names, and what to do instead. Only TorchTitan's
# default is accepted, for it changes nothing.
UNUSED = {
    r"parallelism\.(tensor|pipeline|context|disable_loss|enable_async|module_fqns)": "The plugin shards with FSDP2, HSDP and "
    "replication only (1.3B fits one device): use the data_parallel degrees",
    r"parallelism\.expert|debug\.moe_": "There are no experts in this model",
    r"training\.dataset": "Set data.corpus",
    r"validation\.dataset": "Set data.validation_corpus, or use the prepared corpus's own split",
    r"validation\.steps": "Set validation.tokens: the same tokens every time, on every topology",
    r"(training|validation)\.dataloader": "Batches are read from memory maps, without workers",
    r"training\.dtype": "Parameters are float32: use training.precision = bf16 or bf16-products",
    r"model\.(hf_assets_path|tokenizer_path)": "The tokenizer is the prepared corpus's own, or data.tokenizer",
    r"model\.(converters|print_after_conversion)|quantize\.": "Quantised training is not supported",
    r"optimizer\.early_step_in_backward": "It steps before the gradients are clipped and knows no parameter groups",
    r"lr_scheduler\.min_lr_factor": "Set lr_scheduler.min_lr, the learning rate at the end of the decay",
    r"metrics\.save_for_all_ranks": "Rank 0 writes the events, of all ranks together",
    r"checkpoint\.create_seed_checkpoint": "Initial values are a function of the seed, the same on every number of ranks",
    r"checkpoint\.export_dtype": "Checkpoints are float32: python -m interdomain.tools.convert --dtype bfloat16 exports",
    r"checkpoint\.(initial_load|last_save)_in_hf": "Convert by python -m interdomain.tools.convert, from a checkpoint to a "
    "Hugging Face folder and back",
    r"fault_tolerance\.|checkpoint\.enable_ft_": "TorchFT is not supported",
    r"memory_estimation\.": "Estimate it by ./launch.sh FILE.toml --dry-run",
    r"job\.custom_config_module|experimental\.": "This entry imports the plugin by itself",
}


@dataclass
class Job:
    """[job]: where a run writes, and what it says of itself."""

    config_file: str | None = None  # The TOML file to read.
    dump_folder: str = "./outputs"  # Folder of everything that the run writes.
    description: str = "default job"  # What this run is, in your words; printed at the start.
    print_config: bool = False  # Print the configuration at the start.
    save_config_file: str | None = None  # Write the configuration as JSON into this file of the dump folder.


@dataclass
class Profiling:
    """[profiling]: traces by torch.profiler, and CUDA memory snapshots."""

    enable_profiling: bool = False  # Write traces.
    save_traces_folder: str = "profile_traces"  # Folder of the traces, in the dump folder.
    profile_freq: Count = 10  # Steps from one trace to the next.
    profiler_active: Count = 1  # Steps that a trace shows.
    profiler_warmup: CountOr0 = 3  # Steps that the profiler warms up for before them.
    enable_memory_snapshot: bool = False  # Write snapshots of the CUDA allocator.
    save_memory_snapshot_folder: str = "memory_snapshot"  # Folder of the snapshots, in the dump folder.


@dataclass
class Metrics:
    """[metrics]: what is logged, and what TensorBoard shows of the mixer."""

    log_freq: Count = 10  # Steps from one logged step to the next.
    enable_tensorboard: bool = False  # Write TensorBoard events.
    disable_color_printing: bool = False  # Log without colours.
    save_tb_folder: str = "tb"  # Folder of the TensorBoard events, in the dump folder.
    enable_wandb: bool = False  # Log to Weights & Biases as well.
    #: Steps between the mixer's scalars by layer (timescales, 1 - |Lambda|, Delta), from one logged step (log_freq) to
    #: another; also written at every validation. 0: at validation only.
    mixer_freq: CountOr0 = 100
    #: Steps between histograms of the mixer's timescales and Delta, from one logged step to another; 0: none.
    histogram_freq: CountOr0 = 1000


@dataclass
class Model:
    """[model]: the size. `flavor` names a row of the table of sizes; every number can be set on top of it."""

    name: Literal["interdomain"] = "interdomain"  # The model that this plugin trains.
    flavor: Size = "debug"  # debug, 125M, 350M, 760M or 1.3B.
    #: Rows of the embedding and the head; 0: as the size says (32,000; debug 2,048). May be larger than the tokenizer's.
    vocab_size: CountOr0 = 0
    dim: Count | None = None  # Width. Unset: as the size says. A head is dim / n_heads wide.
    n_layers: Count | None = None  # Blocks. Unset: as the size says.
    n_heads: Count | None = None  # Query heads. Unset: as the size says.


@dataclass
class Mixer:
    """[mixer]: which cell of the study. `condition` names a row of the table; every switch can be set on top of it."""

    #: softmax, interdomain, interdomain-norope, single-query, single-query-norope, dual-linear, dual-linear-norope,
    #: s4d or s4d-rope.
    condition: Condition = "interdomain"
    #: Key features and values as the input (true) or two generic projections (false). Unset: as the condition says.
    dual_input: bool | None = None
    query_readout: bool | None = None  # Query-conditioned readout (true) or learned linear contraction (false).
    rope: bool | None = None  # Rotary embedding on the query and key inputs.
    n_basis: int | None = None  # M, basis functions per head. Unset: as the size says (64).
    readout: str | None = None  # complex, real or hermitian: how complex U and Gamma become real.
    c_form: str | None = None  # full, diagonal or identity.
    feature_map: str | None = None  # silu or rff.
    normalize: bool | None = None  # Divide by the Nadaraya-Watson denominator (eta).
    output_gate: bool | None = None  # o <- sigmoid(Wg x) * o.
    n_kv_heads: int | None = None  # Heads of keys, values and state; query heads share them in groups.
    #: C at the start: root mean square of |C_mn|; 1 is S4D's complex N(0, 1). Unset: sqrt(2)/M, or sqrt(2/M) if diagonal.
    c_scale: float | None = None
    linear_scale: float | None = None  # Initial standard deviation of the linear readout's c. Unset: 1/sqrt(M).
    dt_min: float | None = None  # Delta starts log-uniform between dt_min and dt_max. Unset: 0.001.
    dt_max: float | None = None  # Unset: 0.1.
    a_init: str | None = None  # How A starts: s4d-inv, s4d-lin or s4d-real. Unset: s4d-inv.
    #: How the scan is computed: auto, chunkwise, chunkwise-torch, sequential, parallel, fft or reference (kernels/README.md).
    #: All compute the same function.
    backend: ScanBackend = "auto"
    #: Compute the scan's scores again in the backward pass (true), or keep them for a shorter one (false): 4 bytes per token,
    #: layer, query head and basis function in bf16, but for full activation checkpointing; chunkwise and parallel, on CUDA.
    #: auto: kept where the run then needs at most 80 % of a GPU's memory, as a dry run estimates it. The bits are the same.
    recompute: Literal["auto", True, False] = "auto"
    #: How convolution, RoPE, feature map and input norm are computed: auto, triton (one kernel, CUDA) or torch. All compute
    #: the same function.
    features: FeaturesBackend = "auto"


@dataclass
class Data:
    """[data]: a prepared corpus (python -m interdomain.tools.prepare_data)."""

    #: Folder of a prepared corpus, or a prefix or glob of Megatron .bin/.idx shards; or a list of these, mixed
    #: by weight (in TOML a list; on the command line with commas).
    corpus: str | list[str] = ""
    #: Instead of a corpus, for a first look: a Hugging Face dataset (fineweb-edu; NAME[@REVISION][:CONFIG[:SPLIT]]; a local
    #: folder), tokenised on the way by data.tokenizer. Continues only on the same number of ranks.
    stream: str = ""
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

    warmup_steps: CountOr0 | None = None  # Linear warmup over this many steps, where warmup_tokens is 0. Unset: 200.
    warmup_tokens: CountOr0 = 0  # Linear warmup over this many tokens, rounded to steps; 0: use warmup_steps.
    #: The step with which the decay ends. Unset: the run's last step. After it the rate stays at the floor: set it to the
    #: length of a finished run to train on at that rate.
    total_steps: Count | None = None
    #: Share of total_steps that the decay takes, at the end; before it the rate is constant (warmup, stable, decay; such a
    #: run can be extended from a checkpoint before the decay). 0: constant, no decay. Unset: decay right after the warmup.
    decay_ratio: Fraction | None = None
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
    global_batch_size: Annotated[
        int, Bound("at least 1, or -1 for one micro-batch of every rank", lambda x: x >= 1 or x == -1)
    ] = -1
    seq_len: Count = 2048  # Tokens per sequence.
    max_norm: Positive = 1.0  # Gradients are scaled down to this norm.
    steps: Count | None = None  # Train for this many steps, where tokens is 0. Unset: 10,000.
    tokens: CountOr0 = 0  # Train on this many tokens, rounded up to whole steps; 0: use steps.
    #: Stop the run when so many steps in a row had a loss or gradient norm that is not finite. Such a step changes neither
    #: weights nor optimizer state; looked at every metrics.log_freq steps.
    max_skipped_steps: Count = 10
    enable_cpu_offload: bool = False  # Keep parameters, gradients and optimizer state in the machine's memory (FSDP2).
    #: What an unset `precision` means: bf16 or float32.
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    #: bf16: parameters as they are used, residual stream, norms and products. bf16-products: products only, over float32
    #: parameters, residual stream, embeddings and norms, as the paper's autocast has it. float32: everything. The optimizer's
    #: parameters, the dynamics and the loss are float32 in each. Unset: as mixed_precision_param says.
    precision: Literal["", "bf16", "bf16-products", "float32"] = ""
    mixed_precision_reduce: Literal["float32"] = "float32"  # Precision in which gradients are summed over ranks.
    gc_freq: Count = 50  # Steps between Python's garbage collections.
    gc_debug: bool = False  # Look for reference cycles that hold CUDA tensors, at every step.


@dataclass
class Parallelism:
    """[parallelism]: replicas x shards = ranks."""

    data_parallel_replicate_degree: int = 1  # Replicas of the weights.
    data_parallel_shard_degree: int = -1  # Shards of a replica. -1: as many as there are ranks left.
    #: Free gathered weights after the forward pass of a block. default: of all but the last.
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
    #: Must be false: the last checkpoint can be continued from, too.
    last_save_model_only: Annotated[
        bool, Bound("false, for a last checkpoint that can be continued from; tools.convert exports", lambda x: not x)
    ] = False
    #: async: train on while a thread writes a checkpoint.
    async_mode: Literal["disabled", "async"] = "disabled"
    #: Checkpoints that are kept; 0: all.
    keep_latest_k: Annotated[int, Bound("2 or more, or 0 to keep all", lambda x: x >= 2 or x == 0)] = 10
    load_step: int = -1  # Go back to the checkpoint of this step. -1: continue from the latest.
    #: Parts of initial_load_path that are begun anew (optimizer, lr_scheduler, dataloader, train_state), where it is not taken
    #: for its weights alone.
    exclude_from_loading: list[str] = field(default_factory=list)
    enable_first_step_checkpoint: bool = False  # Save after the first step as well.


@dataclass
class ActivationCheckpoint:
    """[activation_checkpoint]: what is computed again in the backward pass; by operation, the scan is saved."""

    #: none; selective (see selective_ac_option); full: every block; memory_budget: as torch.compile chooses.
    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    #: op: matrix products and the scan's output are saved; a number n: every n-th block is computed again.
    selective_ac_option: str = "op"
    #: With selective and op: products of the shapes of these linear layers are computed again all the same.
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[str] = field(default_factory=lambda: ["moe.router.gate"])
    early_stop: bool = False  # Stop computing again when everything needed is there.
    memory_budget: Fraction = 0.5  # With memory_budget: 0 as full, 1 as none.
    #: With memory_budget: write a picture of time against memory into the dump folder.
    visualize_memory_budget_pareto: bool = False
    preserve_rng_state: bool = True  # Draw the same random numbers again. The models draw none.
    #: Compare what is computed again with the first pass (default), or do not (none).
    determinism_check: Literal["default", "none"] = "default"
    debug: bool = False  # Trace what is computed again; slow.


@dataclass
class Compile:
    """[compile]: torch.compile of every block."""

    enable: bool = False  # Compile.
    components: list[str] = field(default_factory=lambda: ["model", "loss"])  # What is compiled: model, loss.
    backend: str = "inductor"  # Backend of torch.compile.


@dataclass
class Comm:
    """[comm]: collectives between ranks."""

    init_timeout_seconds: Count = 300  # Of collectives until the first step is done.
    train_timeout_seconds: Count = 100  # Of collectives after it.
    trace_buf_size: CountOr0 = 20000  # Collectives that NCCL's flight recorder remembers; 0: none.
    save_traces_folder: str = "comm_traces"  # Folder of the flight recorder's files, in the dump folder.
    save_traces_file_prefix: str = "rank_"  # What their names begin with.
    #: fake_backend simulates as many ranks as NGPU says in one process, to try a configuration.
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

    seed: int | None = None  # Of initial values and the order of the data. Unset: 42.
    deterministic: bool = False  # Use deterministic algorithms only; slower.
    deterministic_warn_only: bool = False  # Warn where there is none, instead of an error.


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

    def __post_init__(self) -> None:
        self.given: frozenset[str] = frozenset()  # settings that the command line named
        self.unused: dict[str, Any] = {}  # settings of `UNUSED` that the file or the command line named

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
