"""FLOPs per token and memory per device, by condition. A multiply-add counts as two FLOPs.

Each mixer counts its core, its state and what it keeps (`mixers.base.Mixer`); here they are summed with what all conditions
share.
"""

import functools
from collections import Counter

import torch

from ..config import ModelConfig
from ..layers import Linear, ShortConv
from ..loss import piece_tokens
from ..transformer import TransformerBlock, mixer_class
from .traffic import Held


def forward_flops_per_token(config: ModelConfig, seq_len: int) -> dict[str, int]:
    """FLOPs of one forward pass per token, by part: linear layers, output head, convolutions, mixer core.

    Embedding look-ups, norms and activations are not counted (memory-bound, below 1 %).
    """
    blocks = [_block_macs(layer, seq_len) for layer in config.layers]
    linear, conv, mixer = (2 * sum(block[part] for block in blocks) for part in ("linear", "conv", "mixer"))
    return {"linear": linear, "head": 2 * config.dim * config.vocab_size, "conv": conv, "mixer": mixer}


@functools.cache
def _block_macs(layer: ModelConfig, seq_len: int) -> Counter[str]:
    """Multiply-adds per token of a block: a weight makes one."""
    with torch.device("meta"):
        modules = [*TransformerBlock(layer, None).modules()]
    linear = sum(module.weight.numel() for module in modules if isinstance(module, Linear))
    conv = sum(module.weight.numel() for module in modules if isinstance(module, ShortConv))
    return Counter(linear=linear, conv=conv) + Counter(mixer_class(layer.mixer).macs(layer, seq_len))


def train_flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """FLOPs of forward and backward per token: three times the forward. Recomputation is not counted (model FLOPs)."""
    return 3 * sum(forward_flops_per_token(config, seq_len).values())


def state_size(layer: ModelConfig) -> int:
    """Numbers of a layer's state per sequence, a complex one as two (the paper's state budget); of softmax without a window,
    per token too."""
    return mixer_class(layer.mixer).state_size(layer)


def memory_estimate(
    config: ModelConfig,
    local: Held,
    *,
    shards: int,
    local_batch: int,
    seq_len: int,
    context: int = 1,
    tensor: int = 1,
    in_flight: tuple[int, ...] = (1,),
    checkpointing: str,
    precision: str,
    accumulated: bool = False,
    stay_gathered: bool = False,
    compiled: bool = False,
    recompute: bool = True,
    documents: bool = False,
) -> dict[str, int]:
    """Bytes per device, by part, of a training step under FSDP2: an estimate to choose a batch size by.

    local: what the device has of the model, before FSDP2 shards it.
    context: ranks that share the tokens of a sequence; tensor: ranks that share heads, feed-forward, vocabulary, and between
        the mixers the tokens.
    documents: packed ones are kept apart, softmax's by a mask.
    in_flight: of each of the device's stages, micro-batches whose activations it holds at once.
    parameters, gradients, optimizer: float32, sharded but for the dynamics; AdamW has two moments. Gradients that are
        `accumulated` over micro-batches are whole until the last.
    gathered: the whole parameters of head and two blocks, or of all that `stay_gathered`, and a block's gradients, also as they
        are reduced.
    activations: what autograd keeps (`_kept_per_token`); what a shard of a sequence keeps of the others, and once more of one
        layer, as it is gathered; masks, one for all layers of a kind, and under bf16-products a bf16 copy in each layer.
    loss: the head's input before and after its norm, the gradients that the loss has computed (`summed_cross_entropy`), and the
        logits of a piece: as the product gives them, in float32, and their softmax; the head's weight as the products read it.
    """
    dim, V, n_params = config.dim, config.vocab_size // tensor, local.parameters
    tokens = local_batch * seq_len // context
    block = (n_params - (local.embedding + local.head) * V * dim) // max(1, sum(map(len, local.layers)))
    stored, width = (2 if precision == "bf16" else 4), (4 if precision == "float32" else 2)
    rounded = 2 if precision == "bf16-products" else 0  # bytes of a weight's copy

    options = tensor, checkpointing, precision, compiled, recompute
    held: Counter[ModelConfig] = Counter()  # layers, as often as their activations are held
    for n, stage in zip(in_flight, local.layers, strict=True):
        for layer, times in config.count_kinds(stage):
            held[layer] += n * times
    per_token = {layer: _kept_per_token(layer, *options) for layer in held}
    kept = {layer: mixer_class(layer.mixer).kept(layer) for layer in held}
    activations = tokens * sum(n * per_token[layer][0] for layer, n in held.items())
    piece = min(tokens, piece_tokens(V)) * V * (8 if width == 4 else 2 + 4 + 4) * local.head
    if checkpointing == "full":  # at the head's end and in the first block's backward, not at once
        again = max((everything - per_layer for per_layer, everything in per_token.values()), default=0)
        activations += max(0, tokens * again - piece)
    activations += 4 * sum(n * kept[layer]["tables"] for layer, n in held.items()) // tensor
    if checkpointing == "none":
        activations += rounded * held.total() * block
    if context > 1:
        received = {layer: Counter(mixer_class(layer.mixer).received(layer, context, tensor)) for layer in held}
        activations += 4 * local_batch * sum(n * received[layer]["state"] for layer, n in held.items())
        gathered_keys = [received[layer]["token"] * (n if checkpointing == "none" else 1) for layer, n in held.items()]
        at_once = sum(gathered_keys) if checkpointing == "none" else max(gathered_keys, default=0)
        # A second copy of one layer's, this rank's among them.
        again = max((layer["token"] for layer in received.values()), default=0) * context // (context - 1)
        activations += (at_once + again) * tokens * width
    if documents:
        keys = {layer: kept[layer].get("mask", 0) for layer in held}
        of_stages = [(n, config.count_kinds(stage)) for n, stage in zip(in_flight, local.layers, strict=True)]
        activations += tokens * stored * sum(n * keys[layer] for n, kinds in of_stages for layer, _ in kinds)
        copies = held if checkpointing == "none" else dict.fromkeys(held, 1)
        activations += tokens * rounded * sum(n * keys[layer] for layer, n in copies.items())
    passed_on = sum(in_flight) - local.head * in_flight[-1]  # outputs of stages that are not the last
    activations += passed_on * tokens * dim * stored // tensor
    sharded = 4 * ((n_params - local.dynamics) // shards + local.dynamics)
    gathered = n_params if stay_gathered else (local.embedding or local.head) * V * dim + 2 * block
    head = tokens * dim * stored // tensor + tokens * dim * 2 * width + 4 * V * dim
    return {
        "parameters": sharded,
        "gradients": sharded + 4 * n_params * (accumulated and shards > 1),
        "optimizer": 2 * sharded,
        "gathered": stored * (gathered + block) + 4 * block,
        "activations": activations,
        "loss": local.head * (in_flight[-1] * head + rounded * V * dim + piece),
    }


def _kept_per_token(
    config: ModelConfig, tensor: int, checkpointing: str, precision: str, compiled: bool, recompute: bool
) -> tuple[int, int]:
    """Bytes that autograd keeps per token of a layer, with this checkpointing and without any.

    `none`: the inputs of norms, products, features, scan and activation (compiled: without the activation's output).
    `selective`: the block's input, the scan and every second product, as TorchTitan chooses (q, v, the gate, the last). `full`:
    the block's input; and once, the rest of a block, computed again. Without `recompute` also the scan's scores. Of
    bf16-products without checkpointing, also the weights in bf16.
    Ranks that share the heads keep all tokens of the products' inputs and of the last product, 1 / tensor of all else.
    """
    dim, ffn, kept = config.dim, config.ffn_hidden, mixer_class(config.mixer).kept(config)
    stored, width = (2 if precision == "bf16" else 4), (4 if precision == "float32" else 2)
    features = kept["token"] + 3 * ffn
    everything = (2 * dim * stored + width * (features + ffn)) // tensor
    if compiled:
        everything = (dim * stored + width * (features + dim)) // tensor
    everything += width * 2 * dim
    chosen = (dim * stored + width * (2 * dim + config.n_kv_heads * config.head_dim + ffn)) // tensor + width * dim
    block_input = dim * stored // tensor
    kept_per_layer = {"none": everything, "selective": chosen, "full": block_input}[checkpointing]
    if not recompute and checkpointing != "full":
        kept_per_layer += width * kept["scores"] // tensor
    return kept_per_layer, everything
