"""backend="fft": FFT convolution in plain PyTorch, on every device (the paper's FFT path).

Shapes: B batch, T time, N points of a transform, H state heads, G query heads per state head,
R key features, D value width, P = R + D channels, M basis functions. Derivation: docs/kernels.md.

Every state is a causal convolution with Lambda^tau: in pairs (Re, Im) there are 2M real kernels,
and all transforms are real. a = X^k q and o = b~ X^v with b~ = J W a are then inner products of
pairs. The linear readout has one kernel per head for all channels, Re(w^T Lambda^tau), and forms no
state but the last one.

Autograd differentiates it, one head at a time: the backward computes a head's states again
(torch.utils.checkpoint). Tables of powers, products with W and the last state are in fp64: small
beside the transforms, and out of reach of PyTorch's TF32 switch.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fft import irfft, rfft
from torch.utils.checkpoint import checkpoint

from .tables import powers


def scan_fft(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor, initial_state: Tensor | None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes `interdomain_scan`.

    Args:
        q: [B, T, Hq, R].
        k: [B, T, H, R].
        v: [B, T, H, D].
        log_decay: theta, [H, M, 2].
        mixing: W, [H, 2M, 2M].
        initial_state: [B, H, M, P, 2], or None for zeros.
        documents: The document of each token, [B, T], or None.

    Returns:
        o [B, T, Hq, D] in v's dtype, and the final state.
    """
    return _by_document(_query_head, (q, k, v), log_decay, mixing, initial_state, documents)


def linear_fft(
    z: Tensor,
    log_decay: Tensor,
    readout: Tensor,
    initial_state: Tensor | None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes `linear_scan`.

    Args:
        z: [B, T, H, P].
        log_decay: theta, [H, M, 2].
        readout: w, [H, 2M] as (Re w | Im w).
        initial_state: [B, H, M, P, 2], or None for zeros.
        documents: The document of each token, [B, T], or None.

    Returns:
        y [B, T, H, P] in z's dtype, and the final state.
    """
    return _by_document(_linear_head, (z,), log_decay, readout, initial_state, documents)


def _by_document(
    head: Callable, tokens: tuple[Tensor, ...], log_decay: Tensor, table: Tensor, initial_state: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes every packed document by itself. The initial state is that of document 0.

    Args:
        head: `_query_head` or `_linear_head`.
        tokens: q, k and v, or z.
        log_decay: theta, [H, M, 2].
        table: W or w.
        initial_state: [B, H, M, P, 2], or None.
        documents: The document of each token, [B, T], or None.
    """
    if documents is None:
        return _by_head(head, tokens, log_decay, table, initial_state)
    rows, finals = [], []
    for b, numbers in enumerate(documents.cpu()):
        outputs, start, final = [], 0, None
        for number, length in zip(
            *(x.tolist() for x in numbers.unique_consecutive(return_counts=True)), strict=True
        ):
            state = None if initial_state is None else initial_state[b : b + 1] * (number == 0)
            piece = tuple(x[b : b + 1, start : start + length] for x in tokens)
            out, final = _by_head(head, piece, log_decay, table, state)
            outputs.append(out)
            start += length
        rows.append(torch.cat(outputs, dim=1))
        finals.append(final)
    return torch.cat(rows), torch.cat(finals)


def _by_head(
    head: Callable,
    tokens: tuple[Tensor, ...],
    log_decay: Tensor,
    table: Tensor,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Computes every head by itself.

    It calls `head` with rows [B, G, d, T], log_decay [M, 2], the head's table, and X before the
    first token, [B, M, P] complex128.
    """
    H, outputs, finals = log_decay.shape[0], [], []
    for h in range(H):
        rows = [
            x.unflatten(2, (H, -1))[:, :, h].permute(0, 2, 3, 1).to(log_decay.dtype) for x in tokens
        ]
        X0 = (
            None
            if initial_state is None
            else torch.view_as_complex(initial_state[:, h].double().contiguous())
        )
        out, final = checkpoint(head, *rows, log_decay[h], table[h], X0, use_reentrant=False)
        outputs.append(out.permute(0, 3, 1, 2))  # [B, T, G, d]
        finals.append(final)
    return torch.cat(outputs, dim=2).to(tokens[-1].dtype), torch.stack(finals, dim=1).to(
        log_decay.dtype
    )


def _query_head(
    q: Tensor, k: Tensor, v: Tensor, theta: Tensor, mixing: Tensor, X0: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes one head with the query readout.

    Args:
        q: [B, G, R, T].
        k: [B, 1, R, T].
        v: [B, 1, D, T].
        theta: [M, 2].
        mixing: [2M, 2M].
        X0: The state before the first token, [B, M, P] complex128, or None.

    Returns:
        o [B, G, D, T], and the last state [B, M, P, 2].
    """
    (M, _), R, T = theta.shape, k.shape[2], k.shape[3]
    table, k, v = _table(theta, T), k[:, 0], v[:, 0]
    spectrum = rfft(torch.stack((table[:, :T].real, table[:, :T].imag)), _transform_length(T))
    X = _states(k, spectrum, table, X0 if X0 is None else X0[:, :, :R])
    a = torch.stack(
        [(X * row[:, None, None]).sum(3) for row in q.unbind(1)], dim=1
    )  # X q, [B, G, 2, M, T]
    weights = torch.cat((mixing[:M], -mixing[M:])).double()  # J W
    b = (weights @ a.flatten(2, 3).double()).to(a.dtype).view_as(a)
    X = _states(v, spectrum, table, X0 if X0 is None else X0[:, :, R:])
    out = torch.stack([(X * row[:, :, :, None]).sum((1, 2)) for row in b.unbind(1)], dim=1)
    return out, _last_state(torch.cat((k, v), dim=1), table, X0)


def _states(z: Tensor, spectrum: Tensor, table: Tensor, X0: Tensor | None) -> Tensor:
    """Computes every state as pairs, [B, 2, M, d, T].

    Args:
        z: [B, d, T].
        spectrum: The transform of (Re, Im) Lambda^tau, [2, M, F].
        table: Lambda^tau, [M, T + 1].
        X0: The state before the first token, or None.
    """
    T = z.shape[-1]
    X = irfft(rfft(z, _transform_length(T))[:, None, None] * _rounded(spectrum, z)[:, :, None])[
        ..., :T
    ]
    if X0 is not None:
        carried = _rounded(table[:, None, 1:], z) * _rounded(X0[..., None], z)
        X = X + torch.stack((carried.real, carried.imag), dim=1)
    return X


def _linear_head(
    z: Tensor, theta: Tensor, readout: Tensor, X0: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes one head with the linear readout.

    Args:
        z: [B, 1, P, T].
        theta: [M, 2].
        readout: [2M].
        X0: As in `_query_head`.

    Returns:
        y [B, 1, P, T], and the last state [B, M, P, 2].
    """
    T, N = z.shape[-1], _transform_length(z.shape[-1])
    table = _table(theta, T)
    weighted = torch.complex(*readout.double().chunk(2))[:, None] * table
    response = _rounded(rfft(weighted[:, :T].real.sum(0), N), z)
    y = irfft(rfft(z, N) * response)[..., :T]
    if X0 is not None:
        y = y + (X0.mT @ weighted[:, 1:]).real[:, None].to(y.dtype)
    return y, _last_state(z[:, 0], table, X0)


def _last_state(z: Tensor, table: Tensor, X0: Tensor | None) -> Tensor:
    """Computes sum_t Lambda^(T-1-t) z_t + Lambda^T X0 as a plain sum, [B, M, P, 2].

    The rounding of the transforms spreads the largest value of the sequence over all of it. The
    state that is handed on has no part in that.
    """
    last = torch.einsum("bpt,mtc->bmpc", z.double(), torch.view_as_real(table[:, :-1].flip(1)))
    return last if X0 is None else last + torch.view_as_real(table[:, -1:] * X0)


def _table(theta: Tensor, T: int) -> Tensor:
    """Computes Lambda^tau for tau = 0 .. T: [M, 2] -> [M, T + 1] complex128."""
    exponents = torch.arange(T + 1, device=theta.device)
    return torch.view_as_complex(powers(theta[None].double(), exponents))[0].mT


def _rounded(x: Tensor, like: Tensor) -> Tensor:
    """Returns complex x in the precision of `like`, which is real."""
    return torch.view_as_complex(torch.view_as_real(x).to(like.dtype))


def _transform_length(T: int) -> int:
    """Returns an even length of small prime factors, at least 2 T so that nothing wraps around."""
    return 2 * min(odd << (-(-T // odd) - 1).bit_length() for odd in (1, 3, 5, 9, 15, 25, 27, 45))
