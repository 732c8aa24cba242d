"""Honest FLOPs per token and memory per device, by condition. A multiply-add counts as two FLOPs.

Nothing is borrowed from softmax: each mixer core is counted by its own algebra.
"""

from .config import ModelConfig
from .loss import piece_tokens

CHUNK = 64  # chunk length at which the chunkwise algebra is counted (the kernels' default)


def forward_flops_per_token(config: ModelConfig, seq_len: int) -> dict[str, int]:
    """FLOPs of one forward pass per token, by part: linear layers, output head, convolutions, mixer core.

    Embedding look-ups, norms and activations are not counted (memory-bound, below 1 %).
    """
    m = config.mixer
    kv_dim = config.n_kv_heads * config.head_dim
    softmax = m.kind == "softmax"
    has_query = softmax or m.query_readout
    out_dim = config.dim if has_query else 2 * config.dim
    linear = config.dim * (has_query * config.dim + 2 * kv_dim + out_dim * (1 + m.output_gate))
    linear += 3 * config.dim * config.ffn_hidden
    if m.feature_map == "rff":  # R / 2 frequencies of width R, per head of query and key features
        heads = config.n_heads * m.query_readout + config.n_kv_heads * m.dual_input
        linear += heads * config.head_dim * config.head_dim // 2
    conv = 0
    if not softmax:
        conv = m.conv_width * (has_query * config.dim + kv_dim * (1 if m.dual_input else 2))
    return {
        "linear": 2 * config.n_layers * linear,
        "head": 2 * config.dim * config.vocab_size,
        "conv": 2 * config.n_layers * conv,
        "mixer": 2 * config.n_layers * _mixer_macs(config, seq_len),
    }


def _mixer_macs(config: ModelConfig, seq_len: int) -> int:
    """Multiply-adds of one layer's mixer core per token, all heads (passes as in kernels/README.md)."""
    m = config.mixer
    H, G, R = config.n_heads, config.n_kv_heads, config.head_dim
    if m.kind == "softmax":
        # Scores and values over the causal half of the context; full-matrix conventions would double this.
        return H * 2 * R * (seq_len + 1) // 2
    D, M2, L = R + m.normalize, 2 * m.n_basis, min(CHUNK, seq_len)
    if not m.query_readout:
        P = 2 * R
        return H * (L * P + 2 * M2 * P)  # Toeplitz product within the chunk; state update and readout across chunks
    pass1 = H * (L * R + L * M2 + R * M2) + G * R * M2  # scores, times the table; state read; state update
    mix = H * M2 * M2
    pass2 = H * (L * M2 + L * D + D * M2) + G * D * M2
    return pass1 + mix + pass2


def train_flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """FLOPs of forward and backward per token: three times the forward. Recomputation is not counted (model FLOPs)."""
    return 3 * sum(forward_flops_per_token(config, seq_len).values())


def state_size(config: ModelConfig) -> int:
    """Numbers of one layer's state per sequence, a complex one as two (the paper's state budget); of softmax, per token too.

    Without the convolutions' last inputs.
    """
    m = config.mixer
    if m.kind == "softmax":
        return 2 * config.n_kv_heads * config.head_dim
    return config.n_kv_heads * m.n_basis * (2 * config.head_dim + m.normalize) * 2


def memory_estimate(
    config: ModelConfig,
    n_params: int,
    *,
    shards: int,
    local_batch: int,
    seq_len: int,
    checkpointing: str,
    precision: str,
    replicated: int = 0,
    accumulated: bool = False,
    compiled: bool = False,
    recompute: bool = True,
) -> dict[str, int]:
    """Bytes per device, by part, of a training step under FSDP2: an estimate to choose a batch size by.

    parameters, gradients, optimizer: float32, sharded but for `replicated` of them; AdamW has two moments. Gradients that are
        `accumulated` over micro-batches are whole until the last.
    gathered: the whole parameters of head and two blocks, and a block's gradients, also as they are reduced.
    activations: what autograd keeps per token and layer. `none`: the inputs of norms, products, features, scan and activation
        (compiled: without the activation's output). `selective`: the block's input, the scan and every second product, as
        TorchTitan chooses (q, v, the gate, the last). `full`: the block's input; and once, the rest of a block, computed again.
        Without `recompute` a scan with a query readout also keeps a, 2M numbers per query head. Of bf16-products without
        checkpointing, also the weights in bf16.
    loss: the head's input before and after its norm, the gradients that the loss has computed (`summed_cross_entropy`), and the
        logits of a piece: as the product gives them, in float32, and their softmax; the head's weight as the products read it.
    `tools.count_memory --training` counts activations and loss in the real step.
    """
    m, dim, ffn, V = config.mixer, config.dim, config.ffn_hidden, config.vocab_size
    tokens = local_batch * seq_len
    kv = config.n_kv_heads * config.head_dim
    softmax = m.kind == "softmax"
    block = (n_params - 2 * V * dim) // config.n_layers
    stored, width = (2 if precision == "bf16" else 4), (4 if precision == "float32" else 2)

    query = 3 if softmax or m.query_readout else 2  # widths of dim: q before and after its features, and o; or o alone
    features = (2 + query) * dim + (3 if softmax else 4) * kv + 3 * ffn
    everything = 2 * dim * stored + width * (features + ffn)
    if compiled:
        everything = dim * stored + width * (features + dim)
    chosen = dim * stored + width * (3 * dim + kv + ffn)
    per_layer = {"none": everything, "selective": chosen, "memory_budget": chosen, "full": dim * stored}[checkpointing]
    if not recompute and not softmax and m.query_readout and checkpointing != "full":
        per_layer += width * config.n_heads * 2 * m.n_basis
    activations = tokens * config.n_layers * per_layer
    piece = min(tokens, piece_tokens(V)) * V * (8 if width == 4 else 2 + 4 + 4)
    if checkpointing == "full":  # at the head's end and in the first block's backward, not at once
        activations += max(0, tokens * (everything - per_layer) - piece)
    if not softmax and m.query_readout:
        activations += 4 * config.n_layers * config.n_kv_heads * 14 * m.n_basis**2  # W, and what it was made of
    rounded = 2 if precision == "bf16-products" else 0  # bytes of a weight's copy
    if checkpointing == "none":
        activations += rounded * config.n_layers * block
    sharded = 4 * ((n_params - replicated) // shards + replicated)
    return {
        "parameters": sharded,
        "gradients": sharded + 4 * n_params * (accumulated and shards > 1),
        "optimizer": 2 * sharded,
        "gathered": stored * (V * dim + 3 * block) + 4 * block,
        "activations": activations,
        "loss": tokens * dim * (stored + 2 * width) + (4 + rounded) * V * dim + piece,
    }
