"""backend="sequential": the recurrence token by token in plain PyTorch, on every device; the paper's scan.

One step (step.py) per token, recorded by autograd: O(T) small operations, and O(T M P) memory for the backward. It runs at the
speed of a reference: for short sequences and comparisons.

Shapes: B batch, T time, H state heads, G query heads per state head, Hq = G H, R key features, D value width, P = R + D
channels, M basis functions.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .step import decay_factor, linear_one_step, scan_step


def scan_sequential(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor, initial_state: Tensor | None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> (o [B, T, Hq, D] in v's dtype, final state [B, H, M, P, 2])."""
    return _loop(scan_step, (q, k, v), k.shape[3] + v.shape[3], log_decay, mixing, initial_state, documents)


def linear_sequential(
    z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Tensor | None, documents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """-> (y [B, T, H, P] in z's dtype, final state [B, H, M, P, 2])."""
    return _loop(linear_one_step, (z,), z.shape[3], log_decay, readout, initial_state, documents)


def _loop(
    step: Callable, tokens: tuple[Tensor, ...], P: int, log_decay: Tensor, table: Tensor, state: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (B, T), (H, M, _) = tokens[0].shape[:2], log_decay.shape
    decay = decay_factor(log_decay)
    state = decay.new_zeros(B, H, M, P, 2) if state is None else state
    outputs = []
    for t in range(T):
        if documents is not None:  # the initial state is that of document 0
            goes_on = documents[:, t] == (documents[:, t - 1] if t else 0)
            state = torch.where(goes_on[:, None, None, None, None], state, 0)
        out, state = step(*(x[:, t] for x in tokens), decay, table, state)
        outputs.append(out)
    return torch.stack(outputs, dim=1), state
