"""The parameters that one rank holds of a model, and the bytes that it receives from other ranks in a training step, by axis.

Bytes are counted as received, as a ring moves them: (P - 1) / P of what a gather gives or a reduce-scatter is given on P ranks,
twice that for an all-reduce. Not counted: sums of a few numbers (loss, norms), validation, logging, checkpoints.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ..config import ModelConfig
from ..shard import split_dimension
from ..transformer import Transformer, mixer_class


@dataclass(frozen=True, eq=False)  # a key by identity
class Held:
    """Parameters that one rank has of a model: all, or stages of a pipeline, and of SHARDED ones its part for tensor
    parallelism.

    groups: its parameters but the dynamics, as FSDP2 gathers them together: rows, numbers of a row, and whether it is a part.
    dynamics: their parameters, which FSDP2 does not shard. layers: their numbers, of each stage.
    """

    groups: list[list[tuple[int, int, bool]]]
    dynamics: int
    layers: tuple[tuple[int, ...], ...]
    embedding: bool
    head: bool

    @functools.cached_property
    def parameters(self) -> int:
        return self.dynamics + sum(rows * numbers for group in self.groups for rows, numbers, _ in group)


@functools.lru_cache(maxsize=16)  # a plan asks for every rank of a pipeline, the search of topologies for many plans
def _by_module(model: Transformer, tensor: int) -> tuple[dict[str, list[tuple[int, int, bool]]], dict[str, int]]:
    """(FSDP2's groups, numbers of the dynamics) by module."""
    of_module: dict[str, list[tuple[int, int, bool]]] = {}
    dynamics: dict[str, int] = {}
    for name, p in model.named_parameters():
        path = name.split(".")
        module = ".".join(path[:2]) if path[0] == "layers" else path[0]
        if ".ssm." in name:
            dynamics[module] = dynamics.get(module, 0) + p.numel()
            continue
        dim = split_dimension(model, name.rpartition(".")[0])
        rows, numbers = len(p) // (tensor if dim == 0 else 1), p[0].numel() // (tensor if dim == 1 else 1)
        of_module.setdefault(module, []).append((rows, numbers, dim is not None))
    of_module["output"] += of_module.pop("norm")  # one group of FSDP2's
    return of_module, dynamics


def held(model: Transformer, stages: Iterable[Iterable[str]], tensor: int = 1) -> Held:
    """stages: the names of their modules (layers.0, output), of this rank's stages; tensor: ranks that share heads."""
    of_module, dynamics = _by_module(model, tensor)
    stages = [list(names) for names in stages]
    names = [name for stage in stages for name in stage]
    return Held(
        [of_module[name] for name in names if name in of_module],
        sum(dynamics.get(name, 0) for name in names),
        tuple(tuple(int(name[7:]) for name in stage if name.startswith("layers.")) for stage in stages),
        "tok_embeddings" in names,
        "output" in names,
    )


def traffic(
    config: ModelConfig,
    local: Held,
    *,
    replicas: int,
    shards: int,
    context: int,
    tensor: int,
    local_batch: int,
    seq_len: int,
    micro_batches: int,
    precision: str,
    checkpointing: str,
    gathers: int,
    head_gathers: int,
    turn: bool = False,
    reductions: int = 1,
    reduced: int = 4,
) -> dict[str, int]:
    """Bytes that a rank receives in one step, by axis; an axis of one rank receives none.

    shards: parameters gathered in the precision of the pass, gradients scattered, over shards x context.
    replicas: the scattered gradients' sum. context: by mixer (`Mixer.received`). tensor: the hidden states, gathered and
    scattered at embedding, mixers, feed-forwards and head; the loss's normalisers; what mixers add up (`Mixer.summed`); the sum
    of the gradients of whole parameters. pipeline: hidden states and their gradients. dynamics: the sum of their gradients over
    all ranks of the stage.

    Args:
        shards: of the data, and so without context.
        gathers: how often parameters are gathered in a step; head_gathers: those of the head.
        turn: whether one of the rank's stages follows another, so that they exchange no messages.
        reductions: how often gradients are summed in a step, in numbers of `reduced` bytes.
    """
    parts, stored, width = shards * context, (2 if precision == "bf16" else 4), (4 if precision == "float32" else 2)
    tokens, layers = local_batch * seq_len // context, [i for stage in local.layers for i in stage]

    def summed(numbers: int, ranks: int) -> int:
        return 2 * 4 * numbers * (ranks - 1) // ranks

    per_group, whole = _sharded(local, parts)
    times = [head_gathers if local.head and i == len(per_group) - 1 else gathers for i in range(len(per_group))]
    gathered = sum(n * stored * k for n, k in zip(per_group, times, strict=True))

    # Gather and scatter around mixer and feed-forward, and the adjoints. Recomputed by block: the first four; by operation: the
    # gathers.
    hidden, again = tokens * config.dim // tensor, {"none": 0, "full": 4}.get(checkpointing, 2)
    by_tensor = micro_batches * hidden * (width * (8 + again) * len(layers) + 2 * stored * local.embedding)
    by_tensor += micro_batches * local.head * (2 * hidden * width + 4 * tokens)
    summed_by_mixers = sum(mixer_class(config.layers[i].mixer).summed for i in layers)
    by_tensor += micro_batches * tokens * 4 * summed_by_mixers * (2 + (checkpointing != "none"))
    return {
        "shards": (parts - 1) * (gathered + reductions * reduced * sum(per_group)),
        "replicas": reductions * sum(summed(n, replicas) for n in per_group) * reduced // 4,
        "context": micro_batches
        * context_bytes(config, layers, context, tensor, local_batch, tokens, width, checkpointing),
        "tensor": (tensor - 1) * by_tensor + summed(whole, tensor),
        "pipeline": micro_batches * hidden * stored * (2 * (len(local.layers) - turn) - local.embedding - local.head),
        "dynamics": summed(local.dynamics, replicas * parts * tensor),
    }


@functools.lru_cache(maxsize=4096)
def _sharded(local: Held, parts: int) -> tuple[list[int], int]:
    """Numbers that each of so many shards has, padded: by group; and of parameters that ranks with other heads have whole."""
    sizes = [[(math.ceil(rows / parts) * n, part) for rows, n, part in group] for group in local.groups]
    return [sum(n for n, _ in group) for group in sizes], sum(n for group in sizes for n, part in group if not part)


def context_bytes(
    config: ModelConfig,
    layers: list[int],
    context: int,
    tensor: int,
    local_batch: int,
    tokens: int,
    width: int,
    checkpointing: str,
) -> int:
    """Bytes that a rank receives of the others that share its sequences, in these layers' forward and backward pass.

    tokens: of a micro-batch on this rank; width: bytes of an activation's number.
    """
    total = 0
    for layer, n in config.count_kinds(layers if context > 1 else ()):
        received = Counter(mixer_class(layer.mixer).received(layer, context, tensor))
        # Recomputed by block: all. By operation: what is gathered alone, for the rest is saved.
        exchanged = local_batch * (4 * received["state"] + width * received["tail"])
        total += n * exchanged * (2 + (checkpointing == "full"))
        total += n * tokens * width * received["token"] * (2 + (checkpointing != "none"))
    return total
