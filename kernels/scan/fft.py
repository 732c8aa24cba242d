"""backend="fft": FFT convolution in plain PyTorch, on every device (the paper's FFT path).

Shapes: B batch, T time, N points of a transform, F its frequencies, H state heads, G query heads
per state head, R key features, D value width, P = R + D channels of a state, M basis functions.
Derivation: docs/kernels.md, "The FFT form".

Every state is a causal convolution of the inputs with Lambda^tau. As pairs (Re, Im) these are 2M
real kernels, and all transforms are real. a = X^k q and o = b~ X^v with b~ = J W a are then inner
products of pairs, where J = diag(I, -I) conjugates. The linear readout has one kernel per head for
all channels, Re(w^T Lambda^tau), and forms no state but the last one.

Autograd differentiates it, one head at a time: the backward computes a head's states again
(torch.utils.checkpoint). Tables of powers, products with W and the last state are in fp64, because
they are small beside the transforms, and PyTorch's TF32 switch does not apply to fp64.
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
    """Computes `interdomain_scan` by Fourier transforms over time.

    Args:
        q: Query features, [B, T, Hq, R].
        k: Key features, [B, T, H, R].
        v: Values, [B, T, H, D].
        log_decay: theta = log Lambda, as (Re, Im) pairs, [H, M, 2].
        mixing: W, [H, 2M, 2M].
        initial_state: The state before the first token, [B, H, M, P, 2] with P = R + D channels, or
            None for zeros.
        documents: The id of each token's document, [B, T], or None for one document.

    Returns:
        o [B, T, Hq, D] in v's dtype, and the final state in the form of initial_state.
    """
    return _by_document(_query_head, (q, k, v), log_decay, mixing, initial_state, documents)


def linear_fft(
    z: Tensor,
    log_decay: Tensor,
    readout: Tensor,
    initial_state: Tensor | None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes `linear_scan` by Fourier transforms over time.

    Args:
        z: Inputs, [B, T, H, P].
        log_decay: theta = log Lambda, as (Re, Im) pairs, [H, M, 2].
        readout: w, [H, 2M] as (Re w | Im w).
        initial_state: The state before the first token, [B, H, M, P, 2], or None for zeros.
        documents: The id of each token's document, [B, T], or None for one document.

    Returns:
        y [B, T, H, P] in z's dtype, and the final state in the form of initial_state.
    """
    return _by_document(_linear_head, (z,), log_decay, readout, initial_state, documents)


def _by_document(
    head: Callable, tokens: tuple[Tensor, ...], log_decay: Tensor, table: Tensor, initial_state: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes every packed document by itself. The initial state is that of document 0.

    Args:
        head: `_query_head` or `_linear_head`, the function that computes one head.
        tokens: q, k and v, or z.
        log_decay: theta, [H, M, 2].
        table: The readout's table: W [H, 2M, 2M] with q, or w [H, 2M] with z.
        initial_state: The state before the first token, [B, H, M, P, 2], or None for zeros.
        documents: The id of each token's document, [B, T], or None.

    Returns:
        The outputs and the final states of all sequences, as in `scan_fft`.
    """
    if documents is None:
        return _by_head(head, tokens, log_decay, table, initial_state)
    # One sequence after the other, and in it one document after the other. Their ids never fall, so
    # equal ids are neighbours.
    sequences = []
    finals = []
    for b, document_of_token in enumerate(documents.cpu()):
        outputs = []
        start = 0
        final = None
        ids, lengths = document_of_token.unique_consecutive(return_counts=True)
        for document, length in zip(ids.tolist(), lengths.tolist(), strict=True):
            # Only document 0 goes on from the initial state; the others start from zeros.
            state = None
            if initial_state is not None:
                state = initial_state[b : b + 1] * (document == 0)
            inputs = tuple(x[b : b + 1, start : start + length] for x in tokens)
            out, final = _by_head(head, inputs, log_decay, table, state)
            outputs.append(out)
            start += length
        # The final state of a sequence is that of its last document.
        sequences.append(torch.cat(outputs, dim=1))
        finals.append(final)
    return torch.cat(sequences), torch.cat(finals)


def _by_head(
    head: Callable,
    tokens: tuple[Tensor, ...],
    log_decay: Tensor,
    table: Tensor,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Computes every state head by itself, and computes it again in the backward.

    Args:
        head: `_query_head` or `_linear_head`. It is called with each of the tokens as [B, G, width,
            T] (G query heads per state head, or 1), and with log_decay [M, 2], table, and X before
            the first token, [B, M, P] complex128, of the head.
        tokens: q, k and v, or z.
        log_decay: theta, [H, M, 2].
        table: The readout's table of all heads: W [H, 2M, 2M] with q, or w [H, 2M] with z.
        initial_state: The state before the first token, [B, H, M, P, 2], or None for zeros.

    Returns:
        The outputs and the final states of all heads, as in `scan_fft`.
    """
    H = log_decay.shape[0]
    outputs = []
    finals = []
    for h in range(H):
        # Each of the tokens of this state head: [B, T, H G, width] -> [B, G, width, T].
        rows = [
            x.unflatten(2, (H, -1))[:, :, h].permute(0, 2, 3, 1).to(log_decay.dtype) for x in tokens
        ]
        X0 = None
        if initial_state is not None:
            X0 = torch.view_as_complex(initial_state[:, h].double().contiguous())
        # The backward computes the states of the head again: they are too large to be saved.
        out, final = checkpoint(head, *rows, log_decay[h], table[h], X0, use_reentrant=False)
        outputs.append(out.permute(0, 3, 1, 2))  # [B, G, d, T] -> [B, T, G, d]
        finals.append(final)
    # The heads side by side.
    out = torch.cat(outputs, dim=2).to(tokens[-1].dtype)
    final = torch.stack(finals, dim=1).to(log_decay.dtype)
    return out, final


def _query_head(
    q: Tensor, k: Tensor, v: Tensor, theta: Tensor, mixing: Tensor, X0: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes one state head with the query readout: a = X^k q, b = W a, o = Re(b^T X^v).

    X is the state after each token, with R channels of keys, X^k, and D of values, X^v.

    Args:
        q: Query features of the G query heads that share the state, [B, G, R, T].
        k: Key features, [B, 1, R, T].
        v: Values, [B, 1, D, T].
        theta: log Lambda of the head as real pairs, [M, 2].
        mixing: W of the head, [2M, 2M].
        X0: The state before the first token, [B, M, P] complex128, or None.

    Returns:
        o [B, G, D, T], and the last state [B, M, P, 2].
    """
    M = theta.shape[0]
    R, T = k.shape[2:]
    # Without the axis of heads: [B, R, T] and [B, D, T].
    k = k[:, 0]
    v = v[:, 0]
    X0_keys = None
    X0_values = None
    if X0 is not None:
        X0_keys = X0[:, :, :R]
        X0_values = X0[:, :, R:]

    # The spectrum of the 2M kernels Re and Im of Lambda^tau for the lags tau.
    table = _powers_of_lags(theta, T)
    spectrum = rfft(torch.stack((table[:, :T].real, table[:, :T].imag)), _transform_length(T))

    # a = X^k q as pairs, [B, G, 2, M, T], one query head after the other; and conj(b) = J W a,
    # likewise, where J changes the sign of the imaginary half. `row` is one query head.
    X = _states(k, spectrum, table, X0_keys)
    a = torch.stack([(X * row[:, None, None]).sum(3) for row in q.unbind(1)], dim=1)
    weights = torch.cat((mixing[:M], -mixing[M:])).double()
    b = (weights @ a.flatten(2, 3).double()).to(a.dtype).view_as(a)

    # o = Re(b^T X^v), the inner product of the pairs of conj(b) and X^v, [B, G, D, T].
    X = _states(v, spectrum, table, X0_values)
    out = torch.stack([(X * row[:, :, :, None]).sum((1, 2)) for row in b.unbind(1)], dim=1)
    return out, _last_state(torch.cat((k, v), dim=1), table, X0)


def _states(z: Tensor, spectrum: Tensor, table: Tensor, X0: Tensor | None) -> Tensor:
    """Computes the state after every token as pairs (Re, Im), [B, 2, M, d, T].

    It is the causal convolution X_t = sum_tau Lambda^tau z_(t - tau), plus Lambda^(t+1) X0. A
    convolution is a product of transforms.

    Args:
        z: The inputs in d channels, [B, d, T].
        spectrum: The transform of (Re, Im) Lambda^tau over the lags tau, [2, M, F] for F
            frequencies.
        table: Lambda^tau for tau = 0 to T, [M, T + 1] complex128.
        X0: The state before the first token, [B, M, d] complex128, or None for zeros.
    """
    T = z.shape[-1]
    N = _transform_length(T)
    X = irfft(rfft(z, N)[:, None, None] * _in_precision_of(spectrum, z)[:, :, None])[..., :T]
    # The initial state decays: Lambda^(t+1) X0.
    if X0 is not None:
        carried = _in_precision_of(table[:, None, 1:], z) * _in_precision_of(X0[..., None], z)
        X = X + torch.stack((carried.real, carried.imag), dim=1)
    return X


def _linear_head(
    z: Tensor, theta: Tensor, readout: Tensor, X0: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes one head with the linear readout: y_t = Re(w^T X_t).

    Without an initial state this is the convolution of z with the numbers Re(w^T Lambda^tau).

    Args:
        z: Inputs, [B, 1, P, T].
        theta: log Lambda of the head as real pairs, [M, 2].
        readout: w of the head as (Re w | Im w), [2M].
        X0: The state before the first token, [B, M, P] complex128, or None.

    Returns:
        y [B, 1, P, T], and the last state [B, M, P, 2].
    """
    T = z.shape[-1]
    N = _transform_length(T)
    table = _powers_of_lags(theta, T)
    # w Lambda^tau, [M, T + 1]. The real part, summed over basis functions, is the one kernel of all
    # channels.
    weighted = torch.complex(*readout.double().chunk(2))[:, None] * table
    response = _in_precision_of(rfft(weighted[:, :T].real.sum(0), N), z)
    y = irfft(rfft(z, N) * response)[..., :T]
    # The initial state: Re(w^T Lambda^(t+1) X0).
    if X0 is not None:
        y = y + (X0.mT @ weighted[:, 1:]).real[:, None].to(y.dtype)
    return y, _last_state(z[:, 0], table, X0)


def _last_state(z: Tensor, table: Tensor, X0: Tensor | None) -> Tensor:
    """Computes sum_t Lambda^(T-1-t) z_t + Lambda^T X0 as a plain sum, [B, M, P, 2].

    Transforms spread the rounding error of the largest value over the whole sequence. The state
    that goes on to later tokens shall not have that error.

    Args:
        z: The inputs, [B, P, T].
        table: Lambda^tau for tau = 0 to T, [M, T + 1] complex128.
        X0: The state before the first token, [B, M, P] complex128, or None.
    """
    last = torch.einsum("bpt,mtc->bmpc", z.double(), torch.view_as_real(table[:, :-1].flip(1)))
    if X0 is None:
        return last
    return last + torch.view_as_real(table[:, -1:] * X0)


def _powers_of_lags(theta: Tensor, T: int) -> Tensor:
    """Computes Lambda^tau for tau = 0 to T, [M, T + 1] complex128, from theta = log Lambda [M, 2]."""
    exponents = torch.arange(T + 1, device=theta.device)
    return torch.view_as_complex(powers(theta[None].double(), exponents))[0].mT


def _in_precision_of(x: Tensor, like: Tensor) -> Tensor:
    """Returns complex x in the precision of `like`, which is real."""
    return torch.view_as_complex(torch.view_as_real(x).to(like.dtype))


def _transform_length(T: int) -> int:
    """Returns an even length with prime factors 2, 3 and 5, at least 2 T so that nothing wraps."""
    # It is twice the smallest number odd * 2^n that is at least T. For each odd factor, 2^n is T /
    # odd (rounded up), rounded up to a power of two: 1 << (x - 1).bit_length() for x.
    return 2 * min(odd << (-(-T // odd) - 1).bit_length() for odd in (1, 3, 5, 9, 15, 25, 27, 45))
