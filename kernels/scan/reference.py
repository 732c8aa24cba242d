"""The reference: loops over time as in the paper, and the same loops in the backends' form.

Shapes: B batch, T time, H state heads, G query heads per state head, Hq = G H query heads, R key
features, D value width, P channels of a state (R + D, or the width of z in the linear readout), M
basis functions.

It is slow, and differentiable, also in fp64. It shares no helper with the backends that tests
compare with it, and is tested itself against its T x T matrix form (tests/scan/test_reference.py).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

# With `normalize`, the mean absolute value of a token's output is at most this many times that of
# its values v_t. The paper has no bound: near a zero of the denominator its output grows without
# limit.
MAX_GAIN = 16


def paper_scan(
    q: Tensor, k: Tensor, v: Tensor, dt: Tensor, A: Tensor, C: Tensor, *,
    readout: str = "complex", normalize: bool = False, initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes the mixer's core as the paper writes it: U and Gamma are formed at every step.

    The recurrence is eq. 11 of the paper and the readout its eq. 13, or eqs. 8 and 9 if `normalize`
    is set. One step is not the paper's: with `normalize`, an output whose mean absolute value is
    more than MAX_GAIN times that of the token's values v_t is scaled down to that bound.

    Args:
        q: Query features, [B, T, Hq, R], real.
        k: Key features, [B, T, H, R], real.
        v: Values, [B, T, H, D], real.
        dt: Delta, the step size, [H].
        A: Diagonal of the state matrix, [H, M] complex.
        C: Projection onto the basis, [H, M, M] complex.
        readout: `complex`, `hermitian` or `real`: how the complex U and Gamma become a real output.
        normalize: True to divide by q^T U^T eta (Nadaraya-Watson); eta is a ones channel appended
            to v.
        initial_state: The state before the first token without its input gain, as real pairs, [B,
            H, M, P, 2] with P = R + D channels, or R + D + 1 if `normalize` is set. None means
            zeros.

    Returns:
        o [B, T, Hq, D], and the final state in the form of initial_state.
    """
    R, D = q.shape[-1], v.shape[-1]
    # Query heads that read one state head.
    group = q.shape[2] // k.shape[2]

    # 1. Discretise by zero-order hold.
    Lambda = torch.exp(dt[:, None] * A)  # [H, M]
    beta = (Lambda - 1) / A

    # 2. The input is keys beside values, [B, T, H, P]. With normalisation there is one more
    # channel, of ones, which becomes eta.
    inputs = [k, v]
    if normalize:
        inputs.append(torch.ones_like(v[..., :1]))
    z = torch.cat(inputs, dim=-1)

    # 3. The state x, [B, H, M, P], has the input gain in it. Callers give and take X with unit
    # gain: x = beta X.
    B = k.shape[0]
    x = torch.zeros(B, *A.shape, z.shape[-1], dtype=A.dtype, device=A.device)
    if initial_state is not None:
        x = beta[:, :, None] * torch.view_as_complex(initial_state.contiguous())

    outputs = []
    for t in range(q.shape[1]):
        # 4. x_t = Lambda x_{t-1} + beta z_t^T
        x = Lambda[:, :, None] * x + beta[:, :, None] * z[:, t, :, None, :]

        # 5. U_t = (C x_t)[:, :R], Gamma_t = (C x_t)[:, R:]; eta is Gamma's last column.
        projected = torch.einsum("hmn,bhnp->bhmp", C, x)
        U = projected[..., :R].repeat_interleave(group, dim=1)
        Gamma = projected[..., R:].repeat_interleave(group, dim=1)

        # 6. o_t = Re(q_t^T U_t^T Gamma_t). U_t is transposed without conjugation, except for
        # `hermitian`; `real` takes the real parts of U_t and Gamma_t.
        qU = torch.einsum("bhr,bhmr->bhm", q[:, t].to(U.dtype), U)
        if readout == "complex":
            o = torch.einsum("bhm,bhmd->bhd", qU, Gamma).real
        elif readout == "hermitian":
            o = torch.einsum("bhm,bhmd->bhd", qU.conj(), Gamma).real
        else:
            o = torch.einsum("bhm,bhmd->bhd", qU.real, Gamma.real)

        # 7. Nadaraya-Watson: divide by q_t^T U_t^T eta_t, the last channel of o. If the mean
        # absolute value of the output is more than MAX_GAIN times that of v_t, scale it down to
        # that bound.
        if normalize:
            o = o[..., :D] / o[..., D:]
            largest = MAX_GAIN * v[:, t].abs().mean(-1, keepdim=True).repeat_interleave(
                group, dim=1
            )
            o = o * (largest / o.abs().mean(-1, keepdim=True)).clamp_max(1)
        outputs.append(o)

    return torch.stack(outputs, dim=1), torch.view_as_real(x / beta[:, :, None])


def paper_linear(
    z: Tensor, dt: Tensor, A: Tensor, C: Tensor, c: Tensor, *, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes the linear readout y_t = Re(sum_m c_m (C x_t)_m) as the paper writes it.

    Args:
        z: Inputs, [B, T, H, P].
        dt: Delta, the step size, [H].
        A: Diagonal of the state matrix, [H, M] complex.
        C: Projection onto the basis, [H, M, M] complex.
        c: Weights of the basis functions, [H, M] real.
        initial_state: The state before the first token without its input gain, as real pairs, [B,
            H, M, P, 2]. None means zeros.

    Returns:
        y [B, T, H, P], and the final state in the form of initial_state.
    """
    # 1. Discretise by zero-order hold. The state x has the input gain in it; callers give and take
    # X with unit gain: x = beta X.
    Lambda = torch.exp(dt[:, None] * A)
    beta = (Lambda - 1) / A
    B = z.shape[0]
    x = torch.zeros(B, *A.shape, z.shape[-1], dtype=A.dtype, device=A.device)
    if initial_state is not None:
        x = beta[:, :, None] * torch.view_as_complex(initial_state.contiguous())

    # 2. The recurrence x_t = Lambda x_{t-1} + beta z_t^T, its projection by C, and the readout by
    # c.
    outputs = []
    for t in range(z.shape[1]):
        x = Lambda[:, :, None] * x + beta[:, :, None] * z[:, t, :, None, :]
        projected = torch.einsum("hmn,bhnp->bhmp", C, x)
        outputs.append(torch.einsum("hm,bhmp->bhp", c.to(A.dtype), projected).real)
    return torch.stack(outputs, dim=1), torch.view_as_real(x / beta[:, :, None])


def scan_reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor, initial_state: Tensor | None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes `interdomain_scan` token by token, with one state and no chunk.

    Args:
        q: Query features, [B, T, Hq, R].
        k: Key features, [B, T, H, R].
        v: Values, [B, T, H, D].
        log_decay: theta = log Lambda as real pairs, [H, M, 2].
        mixing: W on stacked (Re | Im), [H, 2M, 2M].
        initial_state: The state before the first token, [B, H, M, P, 2] with P = R + D channels, or
            None for zeros.
        documents: The id of each token's document, [B, T], or None for one document.

    Returns:
        o [B, T, Hq, D] in v's dtype, and the final state in the form of initial_state.
    """
    dtype = log_decay.dtype
    R = q.shape[-1]
    M = log_decay.shape[1]
    q_grouped = q.to(dtype).unflatten(2, (k.shape[2], -1))  # [B, T, H, G, R]
    z = torch.cat((k.to(dtype), v.to(dtype)), dim=-1)

    # Per token: a = X^k q [B, H, G, M], b = W a on stacked (Re | Im), and o = Re(b^T X^v)
    # [B, H, G, D]. The first R channels of X are X^k, the others X^v.
    outputs = []
    for t, X in enumerate(_states(z, log_decay, initial_state, documents)):
        a = torch.einsum("bhmr,bhgr->bhgm", X[..., :R], q_grouped[:, t].to(X.dtype))
        b = torch.einsum("hnm,bhgm->bhgn", mixing, torch.cat((a.real, a.imag), dim=-1))
        b = torch.complex(b[..., :M], b[..., M:])
        outputs.append(torch.einsum("bhgm,bhmd->bhgd", b, X[..., R:]).real)
    return torch.stack(outputs, dim=1).flatten(2, 3).to(v.dtype), torch.view_as_real(X)


def linear_reference(
    z: Tensor,
    log_decay: Tensor,
    readout: Tensor,
    initial_state: Tensor | None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes `linear_scan` token by token.

    Args:
        z: Inputs, [B, T, H, P].
        log_decay: theta = log Lambda as real pairs, [H, M, 2].
        readout: w, [H, 2M] as (Re w | Im w).
        initial_state: The state before the first token, [B, H, M, P, 2], or None for zeros.
        documents: The id of each token's document, [B, T], or None for one document.

    Returns:
        y [B, T, H, P] in z's dtype, and the final state in the form of initial_state.
    """
    # y = Re(w^T X) per token.
    M = log_decay.shape[1]
    w = torch.complex(readout[:, :M], readout[:, M:])
    outputs = []
    for X in _states(z.to(log_decay.dtype), log_decay, initial_state, documents):
        outputs.append(torch.einsum("hm,bhmp->bhp", w, X).real)
    return torch.stack(outputs, dim=1).to(z.dtype), torch.view_as_real(X)


def _states(
    z: Tensor, log_decay: Tensor, initial_state: Tensor | None, documents: Tensor | None
) -> Iterator[Tensor]:
    """Yields the state after each token, X_t = Lambda X_(t-1) + z_t^T, [B, H, M, P] complex.

    Args:
        z: Inputs, [B, T, H, P], in log_decay's dtype.
        log_decay: theta = log Lambda as real pairs, [H, M, 2].
        initial_state: The state before the first token, [B, H, M, P, 2], or None for zeros.
        documents: The id of each token's document, [B, T], or None.
    """
    # Lambda, [H, M, 1], is computed in fp64 and rounded only once, because the loop multiplies this
    # rounding error T times.
    Lambda = torch.exp(torch.view_as_complex(log_decay.double().contiguous()))
    Lambda = torch.view_as_complex(torch.view_as_real(Lambda).to(log_decay.dtype))[:, :, None]
    if initial_state is None:
        X = torch.zeros_like(Lambda)
    else:
        X = torch.view_as_complex(initial_state.contiguous())
    for t in range(z.shape[1]):
        # A token that begins a document starts from a state of zero. The initial state belongs to
        # document 0.
        if documents is not None:
            before = documents[:, t - 1] if t else 0
            same = documents[:, t] == before
            X = same[:, None, None, None] * X
        X = Lambda * X + z[:, t, :, None, :]
        yield X
