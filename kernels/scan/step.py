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
    """Computes Lambda = exp(log_decay), the decay of one token, for the functions of one token.

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

    The state X has R channels of keys, X^k, and D channels of values, X^v. Lambda is the decay of a
    token:
        X = Lambda X + [k; v]^T
        a = X^k q
        b = W a
        o = Re(b^T X^v)

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
    # X = Lambda X + [k; v]^T, [B, H, M, P] complex.
    X = _advance_state(torch.cat((k, v), dim=-1), decay, state)

    # a = X^k q for the G query heads that share a state: [B, H, G, M] complex, and then stacked as
    # (Re | Im), [B, H, G, 2M].
    a = q.to(X.dtype).unflatten(1, (H, -1)) @ X[..., :R].mT
    a = torch.cat((a.real, a.imag), dim=-1)

    # b = W a. Of W = [[V, -Y], [Y, V]] the upper half [V, -Y] is enough: applied to a it gives the
    # real part of b, and applied to -i a = (Im | -Re) its imaginary part. [B, H, G, 2, 2M]
    if mixing.shape[1] == M:
        a = torch.stack((a, torch.cat((a[..., M:], -a[..., :M]), dim=-1)), dim=-2)
    # One product for all sequences, so that W is read once: [H, B G, 2M], or [H, 2 B G, M] with the
    # upper half. In both, b has real and imaginary parts one after the other.
    b = a.transpose(0, 1).reshape(H, -1, 2 * M) @ mixing.mT
    b = torch.complex(*b.view(H, B, -1, 2, M).transpose(0, 1).unbind(-2))  # [B, H, G, M]

    # o = Re(b^T X^v), [B, H, G, D] -> [B, Hq, D].
    return (b @ X[..., R:]).real.flatten(1, 2).to(v.dtype)


def linear_one_step(z: Tensor, decay: Tensor, readout: Tensor, state: Tensor) -> Tensor:
    """Computes one token with the linear readout, and overwrites the state with the new one.

    With the decay Lambda of a token and fixed weights w: X = Lambda X + z^T, y = Re(w^T X).

    Args:
        z: The token's inputs, [B, H, P].
        decay: Lambda as real pairs, [H, M, 2].
        readout: w as (Re w | Im w), [H, 2M].
        state: X before the token, [B, H, M, P, 2], contiguous; overwritten.

    Returns:
        y, [B, H, P] in z's dtype.
    """
    # w as complex numbers: (Re | Im) [H, 2M] -> [H, 1, M].
    w = torch.complex(*readout.unflatten(1, (2, 1, -1)).unbind(1))
    X = _advance_state(z, decay, state)
    return (w @ X).real.squeeze(2).to(z.dtype)


def _advance_state(z: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """Updates the state in place: X = Lambda X + z^T, the same z for all M basis functions.

    Args:
        z: The token's inputs, [B, H, P].
        decay: Lambda as real pairs, [H, M, 2].
        state: X before the token, [B, H, M, P, 2], contiguous.

    Returns:
        The new X, a view of the state as [B, H, M, P] complex.
    """
    X = torch.view_as_complex(state)
    return X.mul_(torch.view_as_complex(decay)[:, :, None]).add_(z.to(X.dtype)[:, :, None])
