"""Context parallelism: every rank of a group has one piece of each sequence, and the pieces follow one another."""

from typing import Any

from megatron.core import parallel_state

OF_TOKENS = ("tokens", "labels", "loss_mask", "position_ids")


def contiguous(batch: dict[str, Any], *_: Any, cp_group: Any = None, **__: Any) -> dict[str, Any]:
    """This rank's piece of a batch [B, S], each [B, S / ranks]; takes the place of Megatron's `get_batch_on_this_cp_rank`.

    Megatron's own gives a rank two pieces, the n-th from either end, because softmax works more on later tokens.
    A state is handed from piece to piece, and each token costs the same. Packed documents may begin and end anywhere.

    Raises: ValueError for a length that the ranks do not divide.
    """
    group: Any = cp_group or parallel_state.get_context_parallel_group()
    pieces = {name: x for name in OF_TOKENS if (x := batch.get(name)) is not None}
    for name, x in pieces.items():
        if x.shape[1] % group.size():
            raise ValueError(
                f"{x.shape[1]} tokens cannot be cut into {group.size()} equal pieces. Set a sequence length that the "
                "context-parallel ranks divide."
            )
        batch[name] = x.chunk(group.size(), dim=1)[group.rank()].contiguous()
    return batch
