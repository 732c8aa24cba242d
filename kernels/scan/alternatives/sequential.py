"""backend="sequential": a step for every token in plain PyTorch, on every device; the paper's sequential scan.

Autograd records it: O(T) small operations, and O(T M P) memory for the backward. It has the speed of a reference: for short
sequences and comparisons. Shapes as in step.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..step import decay_factor, linear_one_step, scan_step


def scan_sequential(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor, initial_state: Tensor | None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-> (o [B, T, Hq, D] in v's dtype, final state [B, H, M, P, 2]); tokens as in `interdomain_scan`."""
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
    now = decay.new_zeros(B, H, M, P, 2) if state is None else state
    outputs = []
    for t in range(T):
        if documents is not None:  # the initial state is that of document 0
            goes_on = documents[:, t] == (documents[:, t - 1] if t else 0)
            now = torch.where(goes_on[:, None, None, None, None], now, 0)
        out, now = step(*(x[:, t] for x in tokens), decay, table, now)
        outputs.append(out)
    return torch.stack(outputs, dim=1), now
