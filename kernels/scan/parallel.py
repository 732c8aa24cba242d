"""Associative-scan backend in plain PyTorch: O(log T) steps by doubling. On CUDA triton_chunkwise.py runs `parallel`.

Shapes: B batch, T time, H state heads, R key features, D value width, P = R + D channels, M basis functions.
The decay does not depend on the data, so a scan element is a state alone and each step is one shifted, scaled addition:
X <- X + Lambda^s shift(X, s) for s = 1, 2, 4, ... Memory O(T M P) forward and O(T log T M P) for the backward, which
autograd records: shortest critical path, for short T and for checks.
"""

import torch
from torch import Tensor

from .tables import powers


def scan_parallel(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor, initial_state: Tensor | None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o_t = Re(b_t^T X^v_t) with b_t = W [Re a_t; Im a_t] and a_t = X^k_t q_t, on states that all exist."""
    dtype, M, R, H = log_decay.dtype, log_decay.shape[1], q.shape[-1], k.shape[2]
    X, final = all_states(torch.cat((k.to(dtype), v.to(dtype)), dim=-1), log_decay, initial_state, documents)
    q = q.to(dtype).unflatten(2, (H, -1))  # [B, T, H, G, R]
    keys, values = X[..., :R], X[..., R:]
    a = torch.cat([torch.einsum("bthmr,bthgr->bthgm", part, q) for part in (keys.real, keys.imag)], dim=-1)
    b_re, b_im = torch.einsum("hnm,bthgm->bthgn", mixing, a).split(M, dim=-1)
    o = torch.einsum("bthgm,bthmd->bthgd", b_re, values.real) - torch.einsum("bthgm,bthmd->bthgd", b_im, values.imag)
    return o.flatten(2, 3).to(v.dtype), final


def linear_parallel(
    z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Tensor | None, documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y_t = Re(sum_m w_m X_t[m])."""
    X, final = all_states(z.to(log_decay.dtype), log_decay, initial_state, documents)
    w_re, w_im = readout.chunk(2, dim=-1)
    y = torch.einsum("hm,bthmp->bthp", w_re, X.real) - torch.einsum("hm,bthmp->bthp", w_im, X.imag)
    return y.to(z.dtype), final


def all_states(
    z: Tensor, log_decay: Tensor, initial_state: Tensor | None, documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """z [B, T, H, P] -> every state [B, T, H, M, P] (complex), and the last one as real pairs [B, H, M, P, 2]."""
    T, M = z.shape[1], log_decay.shape[1]
    shifts = [1 << s for s in range(max(T - 1, 1).bit_length())]  # 1 is always there: the initial state uses it
    table = torch.view_as_complex(powers(log_decay, torch.tensor(shifts, device=z.device)))
    table = table.movedim(1, 0)[..., None]  # [shifts, H, M, 1]
    X = torch.complex(z, torch.zeros_like(z))[:, :, :, None, :].expand(-1, -1, -1, M, -1)
    if initial_state is not None:
        # The state before the first token enters through that token: X_0 = z_0 + Lambda X_init.
        carried = table[0] * torch.view_as_complex(initial_state.contiguous())[:, None]
        if documents is not None:
            carried = carried * (documents[:, :1] == 0)[..., None, None, None]
        X = torch.cat((X[:, :1] + carried, X[:, 1:]), dim=1)
    for shift, power in zip(shifts, table, strict=True):
        if shift < T:
            earlier = power * X[:, :-shift]
            if documents is not None:  # nothing crosses from one document into another
                earlier = earlier * (documents[:, shift:] == documents[:, :-shift])[..., None, None, None]
            X = torch.cat((X[:, :shift], X[:, shift:] + earlier), dim=1)
    return X, torch.view_as_real(X[:, -1]).contiguous()
