"""One token at a time in plain PyTorch: O(M (R + D) + M^2) work per head.

It is the recurrence (paper eq. 11) and the readout (paper eq. 13) of one token. No function takes a
position, because the recurrence is the same at all positions.

Shapes: B batch, H state heads, G query heads per state head, Hq = G H query heads, R key features,
D value width, P channels of a state (R + D, or the width of z in the linear readout), M basis
functions.

The functions are differentiable, and overwrite the state. The fused kernels are in triton_step.py.
"""

import torch
from torch import Tensor

from .tables import powers


def decay_factor(log_decay: Tensor) -> Tensor:
    """Computes Lambda = exp(log_decay) per token, for `interdomain_step` and `linear_step`.

    Args:
        log_decay: theta = log Lambda as real pairs, [H, M, 2].

    Returns:
        Lambda as real pairs, [H, M, 2].
    """
    # The exponent is created on the device: a copy from the host would break CUDA graph capture.
    one = torch.ones(1, device=log_decay.device)
    return powers(log_decay, one)[:, 0]


def scan_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, mixing: Tensor, state: Tensor
) -> Tensor:
    """Computes one token with the query readout, and overwrites the state with the new one.

    Args:
        q: Query features of the token, [B, Hq, R].
        k: Its key features, [B, H, R].
        v: Its values, [B, H, D].
        decay: Lambda as real pairs, [H, M, 2].
        mixing: W on (Re | Im), [H, 2M, 2M], or its upper half, [H, M, 2M] = [V | -Y], if W is
            [[V, -Y], [Y, V]].
        state: X before the token, [B, H, M, P, 2] with P = R + D, contiguous; overwritten.

    Returns:
        o, [B, Hq, D] in v's dtype.
    """
    B, H, M, _, _ = state.shape
    R = q.shape[-1]
    X = _advance_state(torch.cat((k, v), dim=-1), decay, state)

    # a = X^k q, [B, H, G, M], stacked as (Re | Im). The first R channels of X are X^k, the others
    # X^v.
    a = q.to(X.dtype).unflatten(1, (H, -1)) @ X[..., :R].mT
    a = torch.cat((a.real, a.imag), dim=-1)

    # b = W a. The upper half of W = [[V, -Y], [Y, V]] is enough: applied to a and to -i a, it gives
    # the real and the imaginary part of b.
    if mixing.shape[1] == M:
        a = torch.stack((a, torch.cat((a[..., M:], -a[..., :M]), dim=-1)), dim=-2)
    # One product for all sequences, so that W is read once.
    b = a.transpose(0, 1).reshape(H, -1, 2 * M) @ mixing.mT
    b = torch.complex(*b.view(H, B, -1, 2, M).transpose(0, 1).unbind(-2))

    # o = Re(b^T X^v).
    return (b @ X[..., R:]).real.flatten(1, 2).to(v.dtype)


def linear_one_step(z: Tensor, decay: Tensor, readout: Tensor, state: Tensor) -> Tensor:
    """Computes one token with the linear readout, and overwrites the state with the new one.

    Args:
        z: The token's inputs, [B, H, P].
        decay: Lambda as real pairs, [H, M, 2].
        readout: w as (Re w | Im w), [H, 2M].
        state: X before the token, [B, H, M, P, 2], contiguous; overwritten.

    Returns:
        y, [B, H, P] in z's dtype.
    """
    # y = Re(w^T X).
    w = torch.complex(*readout.unflatten(1, (2, 1, -1)).unbind(1))  # [H, 1, M]
    X = _advance_state(z, decay, state)
    return (w @ X).real.squeeze(2).to(z.dtype)


def _advance_state(z: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """Updates the state in place: X = Lambda X + z^T.

    Args:
        z: The token's inputs, [B, H, P].
        decay: Lambda as real pairs, [H, M, 2].
        state: X before the token, [B, H, M, P, 2], contiguous.

    Returns:
        The new X, a view of the state as [B, H, M, P] complex.
    """
    X = torch.view_as_complex(state)
    return X.mul_(torch.view_as_complex(decay)[:, :, None]).add_(z.to(X.dtype)[:, :, None])
