"""FFT convolution, forward and backward written out (derivation in kernels/README.md): the paper's FFT path.

Shapes: B batch, T time, N points of a transform, F = N / 2 + 1 frequencies, H state heads, G query heads per state head,
R key features, D value width, P = R + D channels, M basis functions, m those of one block.

Every state is a causal convolution with Lambda^tau. In pairs (Re, Im) these are 2M real kernels and all transforms are real:
    _states    X = kernel * z                         forward and backward
    _contract  a = X^k q             c = X^v do       forward, backward
    _expand    o = b~ X^v            dq = e~ X^k      b~ = J W a, e~ = (J W)^T c: inner products of pairs
    _adjoint   u = b~ do or e~ q, the cotangent of X; dv or dk is its correlation with the kernels, summed over them
    _lags      the cotangent of Lambda^tau: u correlated with z, summed over batch and channels
The linear readout has one kernel per head for all channels, Re(w^T Lambda^tau), and forms no state but the last.

One head at a time, and of its basis functions a block at a time (`_blocks`). What survives the forward is its inputs.
torch.fft does the transforms (cuFFT on CUDA), so there is no kernel here. Tables of powers, products with W and the states
at both ends are fp64: small beside the transforms, and out of reach of PyTorch's TF32 switch.
Conjugates are physical, for the reason that chunkwise.py gives.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, conj_physical
from torch.fft import irfft, rfft

from ..tables import powers
from .by_document import backward_by_document, forward_by_document


@forward_by_document
def scan_forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor, initial_state: Tensor | None,
    chunk_size: int | None, *, need_final: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """-> (o [B, T, Hq, D] in v's dtype, final_state [B, H, M, P, 2] or None). There are no chunks: chunk_size is not read."""
    (B, T, H, R), D, M, N = k.shape, v.shape[3], log_decay.shape[1], _transform_length(k.shape[1])
    o = torch.empty(B, T, q.shape[2], D, dtype=v.dtype, device=v.device)
    final = torch.empty(B, H, M, R + D, 2, dtype=log_decay.dtype, device=v.device) if need_final else None
    for h in range(H):
        rows, keys, values = (_load(x, h, H, log_decay.dtype) for x in (q, k, v))
        z = torch.cat((keys, values), dim=2)[:, 0]
        Z = rfft(z, N)
        a = torch.empty(*rows.shape[:2], 2, M, T, dtype=rows.dtype, device=rows.device)
        for block in _blocks(log_decay, initial_state, h, T):
            a[:, :, :, block.modes] = _contract(_states(Z, block, slice(0, R), T), rows)
            if final is not None:
                final[:, h, block.modes] = _last_state(z, block.table, block.X0)
        b = _mix(_bilinear(mixing[h]), a)
        out = rows.new_zeros(*rows.shape[:2], D, T)
        for block in _blocks(log_decay, initial_state, h, T):
            _expand(out, _states(Z, block, slice(R, None), T), b[:, :, :, block.modes])
        _store(o, out, h, H)
    return o, final


@backward_by_document
def scan_backward(
    d_o: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor,
    initial_state: Tensor | None, chunk_size: int | None, need_decay: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """-> gradients of (q, k, v, log_decay or None, mixing, initial_state or None)."""
    (_, T, H, R), M, N = k.shape, log_decay.shape[1], _transform_length(k.shape[1])
    dq, dk, dv, d_mixing = (_empty_like(x) for x in (q, k, v, mixing))
    d_log_decay = _empty_like(log_decay) if need_decay else None
    d_initial = _empty_like(initial_state) if initial_state is not None else None
    keys, values = slice(0, R), slice(R, None)
    for h in range(H):
        rows, d_rows, kT, vT = (_load(x, h, H, log_decay.dtype) for x in (q, d_o, k, v))
        Z = rfft(torch.cat((kT, vT), dim=2)[:, 0], N)
        Z_conj, dZ = conj_physical(Z), torch.zeros_like(Z)

        a, c = (torch.empty(*x.shape[:2], 2, M, T, dtype=x.dtype, device=x.device) for x in (rows, d_rows))
        for block in _blocks(log_decay, initial_state, h, T):
            a[:, :, :, block.modes] = _contract(_states(Z, block, keys, T), rows)
            c[:, :, :, block.modes] = _contract(_states(Z, block, values, T), d_rows)
        weights = _bilinear(mixing[h])
        b, e = _mix(weights, a), _mix(weights.mT, c)
        d_mixing[h] = _bilinear(_outer(c, a))
        del a, c

        out = torch.zeros_like(rows)
        for block in _blocks(log_decay, initial_state, h, T):
            modes, spectrum_conj = block.modes, conj_physical(block.spectrum)[:, :, None]
            d_table = torch.zeros_like(block.table)
            _expand(out, _states(Z, block, keys, T), e[:, :, :, modes])
            for channels, weight, row in ((keys, e, rows), (values, b, d_rows)):
                u = _adjoint(weight[:, :, :, modes], row)
                if d_final is not None:  # the last token's state is the final one
                    u[..., -1] += d_final[:, h, modes, channels].movedim(-1, 1)
                U = rfft(u, N)
                dZ[:, channels] += (U * spectrum_conj).sum((1, 2))
                if need_decay:
                    d_table[:, :T] += _lags((U * Z_conj[:, None, None, channels]).sum((0, 3)), T)
                if d_initial is not None and block.X0 is not None:
                    u = torch.complex(*u.unbind(1))  # [B, m, P, T]
                    d_X0 = (u * conj_physical(block.table[:, None, 1:]).to(u.dtype)).sum(3)
                    d_initial[:, h, modes, channels] = torch.view_as_real(d_X0)
                    d_table[:, 1:] += (u * conj_physical(block.X0[:, :, channels, None]).to(u.dtype)).sum((0, 2))
            if d_log_decay is not None:
                d_log_decay[h, modes] = _through_powers(d_table, block.table)
        _store(dq, out, h, H)
        dz = irfft(dZ, N)[:, None, :, :T]
        _store(dk, dz[:, :, keys], h, H)
        _store(dv, dz[:, :, values], h, H)
    return dq, dk, dv, d_log_decay, d_mixing, d_initial


@forward_by_document
def linear_forward(
    z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Tensor | None, chunk_size: int | None, *,
    need_final: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """-> (y [B, T, H, P] in z's dtype, final_state [B, H, M, P, 2] or None)."""
    B, T, H, P = z.shape
    y = _empty_like(z)
    shape = B, H, log_decay.shape[1], P, 2
    final = torch.empty(shape, dtype=log_decay.dtype, device=z.device) if need_final else None
    for h in range(H):
        columns = _load(z, h, H, log_decay.dtype)
        table, X0 = _table(log_decay[h], T), _state(initial_state, h)
        weighted = _complex(readout[h])[:, None] * table
        Z = rfft(columns, _transform_length(T))
        out = irfft(Z * _response(weighted, Z))[..., :T]
        if X0 is not None:
            out += (X0.mT @ weighted[:, 1:]).real[:, None]
        _store(y, out, h, H)
        if final is not None:
            final[:, h] = _last_state(columns[:, 0], table, X0)
    return y, final


@backward_by_document
def linear_backward(
    d_y: Tensor, d_final: Tensor | None, z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Tensor | None,
    chunk_size: int | None, need_decay: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """-> gradients of (z, log_decay or None, readout, initial_state or None)."""
    T, H = z.shape[1:3]
    dz, d_readout = _empty_like(z), _empty_like(readout)
    d_log_decay = _empty_like(log_decay) if need_decay else None
    d_initial = _empty_like(initial_state) if initial_state is not None else None
    for h in range(H):
        columns, d_columns = (_load(x, h, H, log_decay.dtype) for x in (z, d_y))
        table, w = _table(log_decay[h], T), _complex(readout[h])[:, None]
        weighted, X0, G = w * table, _state(initial_state, h), _state(d_final, h)
        Z, dY = (rfft(x, _transform_length(T)) for x in (columns, d_columns))
        out = irfft(dY * conj_physical(_response(weighted, Z)))[..., :T]

        # Cotangents of w Lambda^tau and of Lambda^tau beside it, tau = 0 .. T, and of X0.
        d_weighted, d_table = torch.zeros_like(table), torch.zeros_like(table)
        d_weighted[:, :T] = _lags((dY * conj_physical(Z)).sum((0, 1, 2)), T)
        if G is not None:
            backwards = table[:, :T].flip(1)
            out += (conj_physical(G).mT @ backwards).real[:, None]
            d_table[:, :T] += (G @ columns[:, 0].to(table.dtype).flip(-1)).sum(0)
        if X0 is not None and d_initial is not None:
            dy = d_columns[:, 0].to(table.dtype)
            d_weighted[:, 1:] += (conj_physical(X0) @ dy).sum(0)
            d_X0 = conj_physical(weighted[:, 1:]) @ dy.mT
            if G is not None:
                d_table[:, T] += (G * conj_physical(X0)).sum((0, 2))
                d_X0 = d_X0 + conj_physical(table[:, T, None]) * G
            d_initial[:, h] = torch.view_as_real(d_X0)
        _store(dz, out, h, H)
        d_w = (d_weighted * conj_physical(table)).sum(1)
        d_readout[h] = torch.cat((d_w.real, d_w.imag))
        if d_log_decay is not None:
            d_log_decay[h] = _through_powers(d_table + conj_physical(w) * d_weighted, table)
    return dz, d_log_decay, d_readout, d_initial


# The query readout's parts. States X and their cotangents u are [B, 2, m, P, T], pairs first; rows [B, G, d, T];
# coefficients a, b~, c, e~ [B, G, 2, m, T], so that (2, M) is W's axis.


def _states(Z: Tensor, block: "_Block", channels: slice, T: int) -> Tensor:
    """Every state of a block, for the channels of keys or of values."""
    X = irfft(Z[:, None, None, channels] * block.spectrum[:, :, None])[..., :T]
    if block.X0 is not None:
        carried = block.table[:, None, 1:].to(Z.dtype) * block.X0[:, :, channels, None].to(Z.dtype)
        X[:, 0] += carried.real
        X[:, 1] += carried.imag
    return X


def _contract(X: Tensor, rows: Tensor) -> Tensor:
    """a_t = X_t q_t."""
    return torch.stack([(X * row[:, None, None]).sum(3) for row in rows.unbind(1)], dim=1)


def _expand(out: Tensor, X: Tensor, b: Tensor) -> None:
    """out_t += b~_t^T X_t, over the block."""
    for g in range(out.shape[1]):
        out[:, g] += (X * b[:, g, :, :, None]).sum((1, 2))


def _adjoint(b: Tensor, rows: Tensor) -> Tensor:
    """u_t = b~_t do_t^T, over the query heads that read this state."""
    u = b[:, 0, :, :, None] * rows[:, 0, None, None]
    for g in range(1, rows.shape[1]):
        u += b[:, g, :, :, None] * rows[:, g, None, None]
    return u


def _mix(weights: Tensor, a: Tensor) -> Tensor:
    """[2M, 2M] fp64 times [B, G, 2, M, T]."""
    return (weights @ a.flatten(2, 3).double()).to(a.dtype).view_as(a)


def _outer(c: Tensor, a: Tensor) -> Tensor:
    """sum_t c_t a_t^T, [2M, 2M] fp64."""
    return (c.flatten(2, 3).double() @ a.flatten(2, 3).double().mT).sum((0, 1))


def _bilinear(mixing: Tensor) -> Tensor:
    """J W, and J its own inverse: the gradient of W from that of J W. [2M, 2M] fp64."""
    upper, lower = mixing.double().chunk(2)
    return torch.cat((upper, -lower))


# Powers of Lambda and what goes through them.


class _Block(NamedTuple):
    modes: slice
    table: Tensor  # Lambda^tau, [m, T + 1] complex128
    spectrum: Tensor  # of (Re, Im) Lambda^tau for tau < T, [2, m, F]
    X0: Tensor | None  # [B, m, P] complex128


def _blocks(log_decay: Tensor, initial_state: Tensor | None, h: int, T: int) -> Iterator[_Block]:
    """The basis functions of head h: H at a time, which takes what one of every head would, and never all of them."""
    H, M, _ = log_decay.shape
    size = max(1, min(H, M // 4))
    for start in range(0, M, size):
        modes = slice(start, min(start + size, M))
        table = _table(log_decay[h, modes], T)
        pairs = torch.stack((table[:, :T].real, table[:, :T].imag))
        spectrum = rfft(pairs, _transform_length(T)).to(log_decay.dtype.to_complex())
        X0 = _state(initial_state, h)
        yield _Block(modes, table, spectrum, X0 if X0 is None else X0[:, modes])


def _table(log_decay: Tensor, T: int) -> Tensor:
    """Lambda^tau for tau = 0 .. T, [M, T + 1] complex128 of [M, 2]."""
    exponents = torch.arange(T + 1, device=log_decay.device)
    return torch.view_as_complex(powers(log_decay[None].double(), exponents))[0].mT.contiguous()


def _response(weighted: Tensor, Z: Tensor) -> Tensor:
    """Spectrum of the linear readout's kernel Re(w^T Lambda^tau), tau < T: transformed in fp64."""
    return rfft(weighted[:, :-1].real.sum(0), _transform_length(weighted.shape[1] - 1)).to(Z.dtype)


def _lags(spectrum: Tensor, T: int) -> Tensor:
    """Correlation at the lags 0 .. T - 1, transformed in fp64: of pairs [2, m, F] complex, of [F] real."""
    lags = irfft(spectrum.to(torch.complex128))[..., :T]
    return torch.complex(*lags) if lags.ndim == 3 else lags


def _through_powers(d_table: Tensor, table: Tensor) -> Tensor:
    """d Lambda^tau = tau Lambda^tau d theta: [m, T + 1] -> [m, 2]."""
    tau = torch.arange(table.shape[1], dtype=torch.float64, device=table.device)
    return torch.view_as_real((tau * conj_physical(table) * d_table).sum(1))


def _last_state(z: Tensor, table: Tensor, X0: Tensor | None) -> Tensor:
    """sum_t Lambda^(T-1-t) z_t + Lambda^T X0 as a plain sum, [B, m, P, 2]: what is handed on has no part in the
    rounding of the transforms, which spreads the largest value of the sequence over all of it.
    """
    backwards = torch.view_as_real(table[:, :-1].flip(1))  # [m, T, 2]
    last = torch.einsum("bpt,mtc->bmpc", z.double(), backwards)
    return last if X0 is None else last + torch.view_as_real(table[:, -1:] * X0)


def _transform_length(T: int) -> int:
    """At least 2 T, so that nothing wraps around, of small prime factors, even."""
    return 2 * min(odd << (-(-T // odd) - 1).bit_length() for odd in (1, 3, 5, 9, 15, 25, 27, 45))


# Layouts.


def _load(x: Tensor, h: int, H: int, dtype: torch.dtype) -> Tensor:
    """[B, T, H G, d] -> head h of H, [B, G, d, T]."""
    return x.unflatten(2, (H, -1))[:, :, h].permute(0, 2, 3, 1).to(dtype).contiguous()


def _store(out: Tensor, rows: Tensor, h: int, H: int) -> None:
    out.unflatten(2, (H, -1))[:, :, h].copy_(rows.permute(0, 3, 1, 2))


def _state(state: Tensor | None, h: int) -> Tensor | None:
    """[B, H, M, P, 2] -> head h, [B, M, P] complex128."""
    return None if state is None else torch.view_as_complex(state[:, h].double().contiguous())


def _complex(readout: Tensor) -> Tensor:
    """[2M] as (Re | Im) -> [M] complex128."""
    return torch.complex(*readout.double().chunk(2))


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
