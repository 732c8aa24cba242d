"""Sections and fields that the plugin adds to TorchTitan's job configuration (`job.custom_config_module` points here), and
other defaults for a few of TorchTitan's own.

TorchTitan merges these classes into its own by name and reads the annotations as types: no postponed annotations here, and no
methods (merged sections lose them). Checks stand in `plan.py`.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Mixer:
    """[mixer]: which cell of the study. `condition` names a row of the table; every switch can be set on top of it."""

    condition: str = "interdomain"
    """softmax, interdomain, interdomain-norope, single-query, single-query-norope, dual-linear, dual-linear-norope,
    s4d or s4d-rope."""

    dual_input: bool | None = None
    """Key features and values as the input (true) or two generic projections (false). Unset: as the condition says."""

    query_readout: bool | None = None
    """Query-conditioned readout (true) or learned linear contraction (false)."""

    rope: bool | None = None
    """Rotary embedding on the query and key inputs."""

    n_basis: int | None = None
    """M, basis functions per head. Unset: as the size says (64)."""

    readout: str | None = None
    """complex, real or hermitian: how complex U and Gamma become real."""

    c_form: str | None = None
    """full, diagonal or identity."""

    feature_map: str | None = None
    """silu or rff."""

    normalize: bool | None = None
    """Divide by the Nadaraya-Watson denominator (eta)."""

    output_gate: bool | None = None
    """o <- sigmoid(Wg x) * o."""

    n_kv_heads: int | None = None
    """Heads of keys, values and state; query heads share them in groups."""

    c_scale: float | None = None
    """C at the start: root mean square of |C_mn|; 1 is S4D's complex N(0, 1). Unset: sqrt(2)/M, or sqrt(2/M) if diagonal."""

    linear_scale: float | None = None
    """Initial standard deviation of the linear readout's c. Unset: 1/sqrt(M)."""

    dt_min: float | None = None
    """Delta starts log-uniform between dt_min and dt_max. Unset: 0.001."""

    dt_max: float | None = None
    """Unset: 0.1."""

    a_init: str | None = None
    """How A starts: s4d-inv, s4d-lin or s4d-real. Unset: s4d-inv."""

    backend: str = "auto"
    """How the scan is computed: auto, chunkwise, chunkwise-torch, sequential, parallel, fft or reference (kernels/README.md).
    All compute the same function."""

    recompute: Literal["auto", True, False] = "auto"
    """Compute the scan's scores again in the backward pass (true), or keep them for a shorter one (false): 4 bytes per token,
    layer, query head and basis function in bf16, but for full activation checkpointing; chunkwise and parallel, on CUDA.
    auto: kept where the run then needs at most 80 % of a GPU's memory, as a dry run estimates it. The bits are the same."""

    features: str = "auto"
    """How convolution, RoPE, feature map and input norm are computed: auto, triton (one kernel, CUDA) or torch. All compute
    the same function."""


@dataclass
class Model:
    """[model]: the vocabulary can differ from the size's."""

    vocab_size: int = 0
    """Rows of the embedding and the head; 0: as the size says (32,000; debug 2,048). May be larger than the tokenizer's."""

    hf_assets_path: str = "."
    """Not read: the tokenizer is the corpus's."""


@dataclass
class Data:
    """[data]: a prepared corpus (python -m interdomain.tools.prepare_data)."""

    corpus: str | list[str] = ""
    """Folder of a prepared corpus, or a prefix or glob of Megatron .bin/.idx shards; or a list of these, mixed
    by weight (in TOML a list; on the command line with commas)."""

    stream: str = ""
    """Instead of a corpus, for a first look: a Hugging Face dataset (fineweb-edu; NAME[@REVISION][:CONFIG[:SPLIT]]; a local
    folder), tokenised on the way by data.tokenizer. Continues only on the same number of ranks."""

    weights: list[float] = field(default_factory=list)
    """Of the corpora in a mixture, in samples; they need not sum to 1."""

    validation_corpus: str = ""
    """Prefix or glob of validation shards, where `corpus` is bare shards. Empty: the prepared corpora's own split."""

    tokenizer: str = ""
    """A tokenizer file (sentencepiece .model, tokenizer.json, X.tiktoken). Empty: the prepared corpus's own tokenizer."""

    prefetch: int = 4
    """Micro-batches that a thread reads ahead of training; 0: none."""

    reset_state_at_documents: bool = False
    """Nothing is carried from one packed document into the next: state, short convolution, positions, and what softmax
    attends to. The paper packs documents and speaks of no reset."""


@dataclass
class Optimizer:
    """[optimizer]: the SSM parameters (input norms, Delta, A, C, c) form a group of their own."""

    ssm_lr: float = 1e-3
    """Peak learning rate of the SSM group is min(lr, ssm_lr)."""

    ssm_weight_decay: float = 0.0


@dataclass
class LRScheduler:
    """[lr_scheduler]: warmup in tokens, floor as a learning rate."""

    warmup_steps: int | None = None
    """Linear warmup over this many steps, where warmup_tokens is 0. Unset: 200."""

    warmup_tokens: int = 0
    """Linear warmup over this many tokens, rounded to steps; 0: use warmup_steps."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "cosine"

    min_lr: float = 0.0
    """Learning rate at the end of the decay, the same for every group; 0: use min_lr_factor."""


@dataclass
class Training:
    """[training]: the run's length in tokens, its precision, and when to give up on it."""

    steps: int | None = None
    """Train for this many steps, where tokens is 0. Unset: 10,000."""

    tokens: int = 0
    """Train on this many tokens, rounded up to whole steps; 0: use steps."""

    precision: Literal["", "bf16", "bf16-products", "float32"] = ""
    """bf16: parameters as they are used, residual stream, norms and products. bf16-products: products only, over float32
    parameters, residual stream, embeddings and norms, as the paper's autocast has it. float32: everything. The optimizer's
    parameters, the dynamics and the loss are float32 in each. Unset: as mixed_precision_param says, bf16 or float32."""

    max_skipped_steps: int = 10
    """Stop the run when so many steps in a row had a loss or gradient norm that is not finite. Such a step changes neither
    weights nor optimizer state; looked at every metrics.log_freq steps."""


@dataclass
class Validation:
    """[validation]: the same fixed tokens every time, on every topology."""

    tokens: int = 0
    """Validate on the first so many tokens of the validation split, rounded up to whole windows; 0: all of it."""


@dataclass
class ActivationCheckpoint:
    """[activation_checkpoint]: by operation, so that the scan is saved and not recomputed."""

    selective_ac_option: str = "op"


@dataclass
class Checkpoint:
    """[checkpoint]: the last one can be continued from, as every other; one that does not read back whole is skipped."""

    last_save_model_only: bool = False

    checksums: bool = True
    """Compare every byte of a checkpoint with its checksum before it is loaded (each rank reads its share once more). false:
    only its index and the lengths of its files."""


@dataclass
class Metrics:
    """[metrics]: what TensorBoard shows of the mixer."""

    mixer_freq: int = 100
    """Steps between the mixer's scalars by layer (timescales, 1 - |Lambda|, Delta), from one logged step (log_freq) to
    another; also written at every validation. 0: at validation only."""

    histogram_freq: int = 1000
    """Steps between histograms of the mixer's timescales and Delta, from one logged step to another; 0: none."""


@dataclass
class JobConfig:
    model: Model = field(default_factory=Model)
    mixer: Mixer = field(default_factory=Mixer)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    validation: Validation = field(default_factory=Validation)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
