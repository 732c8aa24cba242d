"""FFT backend: every (basis function, channel) pair is convolved with its kernel Lambda^tau, the paper's FFT path.

Shapes: B batch, T time, H state heads, G query heads per state head, R key features, D value width, P = R + D channels,
M basis functions. Work O(T log T M P), memory O(T M P) per head and sequence, since every state is formed: for short T
and for checks, not for training. Autograd records it. Complex inside: torch.compile runs it, inductor does not fuse it.
"""

import torch
from torch import Tensor

from .tables import powers


def scan_fft(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    dtype = log_decay.dtype
    X, final = all_states(torch.cat((k.to(dtype), v.to(dtype)), dim=-1), log_decay, initial_state)
    return query_readout(X, q.to(dtype), mixing).to(v.dtype), final


def linear_fft(z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    X, final = all_states(z.to(log_decay.dtype), log_decay, initial_state)
    return linear_readout(X, readout).to(z.dtype), final


def all_states(z: Tensor, log_decay: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """z [B, T, H, P] -> every state [B, T, H, M, P] (complex), and the last one as real pairs [B, H, M, P, 2]."""
    T = z.shape[1]
    table = torch.view_as_complex(powers(log_decay, torch.arange(T + 1, device=z.device)))  # [H, T + 1, M]
    # Padding to 2 T turns the circular convolution into the causal one.
    spectrum = torch.fft.fft(table[:, :T].transpose(0, 1), n=2 * T, dim=0)  # [2 T, H, M]
    product = torch.fft.fft(z, n=2 * T, dim=1)[:, :, :, None, :] * spectrum[..., None]
    X = torch.fft.ifft(product, dim=1)[:, :T]
    if initial_state is not None:
        carried = table[:, 1:].transpose(0, 1)[..., None]  # Lambda^{t + 1}, [T, H, M, 1]
        X = X + carried * torch.view_as_complex(initial_state.contiguous())[:, None]
    return X, torch.view_as_real(X[:, -1]).contiguous()


def query_readout(X: Tensor, q: Tensor, mixing: Tensor) -> Tensor:
    """o_t = Re(b_t^T X^v_t) with b_t = W [Re a_t; Im a_t] and a_t = X^k_t q_t, on states that all exist."""
    M, R, H = X.shape[3], q.shape[-1], X.shape[2]
    q = q.unflatten(2, (H, -1))  # [B, T, H, G, R]
    keys, values = X[..., :R], X[..., R:]
    a = torch.cat([torch.einsum("bthmr,bthgr->bthgm", part, q) for part in (keys.real, keys.imag)], dim=-1)
    b_re, b_im = torch.einsum("hnm,bthgm->bthgn", mixing, a).split(M, dim=-1)
    o = torch.einsum("bthgm,bthmd->bthgd", b_re, values.real) - torch.einsum("bthgm,bthmd->bthgd", b_im, values.imag)
    return o.flatten(2, 3)


def linear_readout(X: Tensor, readout: Tensor) -> Tensor:
    """y_t = Re(sum_m w_m X_t[m]) on states that all exist."""
    w_re, w_im = readout.split(X.shape[3], dim=-1)
    return torch.einsum("hm,bthmp->bthp", w_re, X.real) - torch.einsum("hm,bthmp->bthp", w_im, X.imag)
