"""Passes that activation checkpointing computes again, during the backward pass: a state must not be advanced in them."""

import torch


def backward_pass() -> int | None:
    """Number of the backward pass that this thread is in; -1 for none. None while torch.compile traces a function."""
    return None if torch.compiler.is_compiling() else torch._C._current_graph_task_id()


def check_not_recomputed(made_in: int | None) -> None:
    """Raises ValueError for a state that was made before this backward pass, which computes a forward pass again: only
    activation checkpointing does so, and the first pass has advanced the state already.

    Args:
        made_in: `backward_pass` when the state was made; None for a state that a compiled function makes for itself.
    """
    if made_in is None or torch.compiler.is_exporting():
        return
    # A compiled function may be checkpointed, too: with gradients its graph breaks here. A decode step has none.
    if torch.compiler.is_compiling() and not torch.is_grad_enabled():
        return
    if torch._C._current_graph_task_id() not in (-1, made_in):
        raise ValueError(
            "Activation checkpointing computes this layer again in the backward pass, and the layer's state has moved on "
            "since: the gradients would be wrong. Leave out the state (cache), give the layer a copy of it within the "
            "checkpointed function (copy.copy), or do not checkpoint the pass that reads it."
        )
