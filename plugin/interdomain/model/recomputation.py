"""Passes that activation checkpointing computes again, during the backward pass: a state must not be advanced in them."""

import torch


def backward_pass() -> int:
    """Number of the backward pass that this thread is in; -1 for none."""
    return -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()


def check_not_recomputed(made_in: int) -> None:
    """Raises ValueError for a state that was made before this backward pass, which computes a forward pass again: only
    activation checkpointing does so, and the first pass has advanced the state already.

    Args:
        made_in: `backward_pass` when the state was made.
    """
    if backward_pass() not in (-1, made_in):
        raise ValueError(
            "Activation checkpointing computes this layer again in the backward pass, and the layer's state has moved on "
            "since: the gradients would be wrong. Leave out the state (cache), give the layer a copy of it within the "
            "checkpointed function (copy.copy), or do not checkpoint the pass that reads it."
        )
