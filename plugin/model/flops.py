"""FLOPs per token and memory per device, by condition. A multiply-add counts as two FLOPs.

Each mixer counts its own (`interface.Mixer`); here they are summed with what all conditions share.
"""

from .config import ModelConfig
from .loss import piece_tokens
from .transformer import mixer_class


def forward_flops_per_token(config: ModelConfig, seq_len: int) -> dict[str, int]:
    """FLOPs of one forward pass per token, by part: linear layers, output head, convolutions, mixer core.

    Embedding look-ups, norms and activations are not counted (memory-bound, below 1 %).
    """
    macs = mixer_class(config).macs(config, seq_len)
    return {
        "linear": 2 * config.n_layers * (macs["linear"] + 3 * config.dim * config.ffn_hidden),
        "head": 2 * config.dim * config.vocab_size,
        "conv": 2 * config.n_layers * macs["conv"],
        "mixer": 2 * config.n_layers * macs["mixer"],
    }


def train_flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """FLOPs of forward and backward per token: three times the forward. Recomputation is not counted (model FLOPs)."""
    return 3 * sum(forward_flops_per_token(config, seq_len).values())


def state_size(config: ModelConfig) -> int:
    """Numbers of one layer's state per sequence, a complex one as two (the paper's state budget); of softmax, per token too."""
    return mixer_class(config).state_size(config)


def memory_estimate(
    config: ModelConfig,
    n_params: int,
    *,
    shards: int,
    local_batch: int,
    seq_len: int,
    context: int = 1,
    checkpointing: str,
    precision: str,
    replicated: int = 0,
    accumulated: bool = False,
    compiled: bool = False,
    recompute: bool = True,
) -> dict[str, int]:
    """Bytes per device, by part, of a training step under FSDP2: an estimate to choose a batch size by.

    context: ranks that share the tokens of a sequence.
    parameters, gradients, optimizer: float32, sharded but for `replicated` of them; AdamW has two moments. Gradients that are
        `accumulated` over micro-batches are whole until the last.
    gathered: the whole parameters of head and two blocks, and a block's gradients, also as they are reduced.
    activations: what autograd keeps per token and layer. `none`: the inputs of norms, products, features, scan and activation
        (compiled: without the activation's output). `selective`: the block's input, the scan and every second product, as
        TorchTitan chooses (q, v, the gate, the last). `full`: the block's input; and once, the rest of a block, computed again.
        Without `recompute` also the scan's scores. Of bf16-products without checkpointing, also the weights in bf16.
    loss: the head's input before and after its norm, the gradients that the loss has computed (`summed_cross_entropy`), and the
        logits of a piece: as the product gives them, in float32, and their softmax; the head's weight as the products read it.
    """
    dim, ffn, V = config.dim, config.ffn_hidden, config.vocab_size
    kept = mixer_class(config).kept(config)
    tokens = local_batch * seq_len // context
    block = (n_params - 2 * V * dim) // config.n_layers
    stored, width = (2 if precision == "bf16" else 4), (4 if precision == "float32" else 2)

    features = 2 * dim + kept["token"] + 3 * ffn
    everything = 2 * dim * stored + width * (features + ffn)
    if compiled:
        everything = dim * stored + width * (features + dim)
    chosen = dim * stored + width * (3 * dim + config.n_kv_heads * config.head_dim + ffn)
    per_layer = {"none": everything, "selective": chosen, "memory_budget": chosen, "full": dim * stored}[checkpointing]
    if not recompute and checkpointing != "full":
        per_layer += width * kept["scores"]
    activations = tokens * config.n_layers * per_layer
    piece = min(tokens, piece_tokens(V)) * V * (8 if width == 4 else 2 + 4 + 4)
    if checkpointing == "full":  # at the head's end and in the first block's backward, not at once
        activations += max(0, tokens * (everything - per_layer) - piece)
    activations += 4 * config.n_layers * kept["tables"]
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
