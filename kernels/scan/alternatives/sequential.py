"""backend="sequential": the recurrence over time in Triton, forward and backward; the paper's scan.

Shapes: B batch, T time, H state heads, G query heads per state head, Hq = G H, R key features, D value width,
P = R + D channels, M basis functions.

    forward     a = contract(q, k)      b = W a             o = expand(b, v)
    backward    a and c = contract(do, v), with checkpoints of the state; b = W a, e = J W^T J c, dW = sum_t (J c) a^T;
                dq, dk, dtheta = reverse(e, q, k) and dv, dtheta = reverse(b, do, v)
    linear      y = expand(w, z); dz, dw, dtheta = reverse(w, dy, z)

The products with W are batched matrix products in PyTorch, in fp32. There are no atomics: what programs share (dtheta,
dw, and dk, dv and the gradient of the state with grouped heads) is written apart and summed in PyTorch, so results
repeat bit for bit. What survives the forward is its inputs.

The states of the past. The paper recovers X_(t-1) = (X_t - z_t) / Lambda, walking back from a checkpoint. A division
multiplies the rounding error of X_t by e^|Re theta|, and |Re theta| may reach MAX_DECAY_PER_TOKEN = 1: 15 divisions,
a segment of 16 tokens, turn the 6e-8 of fp32 into 0.2. The rule here: every ANCHOR = 4 tokens a state that was computed
forwards, hence at most three divisions in a row, e^3 = 20 times the rounding. Checkpoints in memory lie SEGMENT = 16
tokens apart; from each, the reverse kernel runs its segment forward once more and keeps the states after 4, 8 and 12
tokens in registers.

Memory of one backward, bytes per token: M P / 2 per state head for the checkpoints (4,096 at M = R = D = 64, fp32) and
24 M per query head for three of a, b, c, e at a time (1,536).
"""
# Triton kernels are called with launch options, and with plain numbers for constexprs.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
from torch import Tensor

from ..tables import powers
from .by_document import backward_by_document, forward_by_document
from .sequential_kernels import contract_scan_kernel, expand_scan_kernel, reverse_scan_kernel

ANCHOR = 4
SEGMENT = 4 * ANCHOR  # three anchors in registers, written out in reverse_scan_kernel
BLOCK = 8  # basis functions per program of contract, channels per program of the others


@forward_by_document
def scan_forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor, initial_state: Tensor | None,
    chunk_size: int | None, *, need_final: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """-> (o [B, T, Hq, D] in v's dtype, final_state [B, H, M, P, 2] or None). chunk_size is not used: there are no chunks."""
    B, T, H, R = k.shape
    D, M = v.shape[3], log_decay.shape[1]
    decay = _decay_table(log_decay)
    before = _contiguous(initial_state)
    after = decay.new_empty(B, H, M, R + D, 2) if need_final else None
    o = torch.empty(B, T, q.shape[2], D, dtype=v.dtype, device=v.device)
    a = _contract(q, k, decay, _from(before, 0), _from(after, 0))
    _expand(_mix(a, mixing.mT), v, decay, _from(before, R), o, _from(after, R))
    return o, after


@backward_by_document
def scan_backward(
    d_o: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor,
    initial_state: Tensor | None, chunk_size: int | None, need_decay: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """-> gradients of (q, k, v, log_decay, mixing, initial_state); None for a log_decay or state that needs none."""
    B, _, H, R = k.shape
    P, M, Hq = R + v.shape[3], log_decay.shape[1], q.shape[2]
    decay = _decay_table(log_decay)
    before, d_after = _contiguous(initial_state), _contiguous(d_final)
    d_before = None if before is None else decay.new_empty(B, Hq, M, P, 2)
    checkpoints_k = _checkpoints(k, decay)
    checkpoints_v = _checkpoints(v, decay) if need_decay else None
    a = _contract(q, k, decay, _from(before, 0), None, checkpoints_k)
    c = _contract(d_o, v, decay, _from(before, R), None, checkpoints_v)
    sign = torch.cat((a.new_ones(M), -a.new_ones(M)))  # J
    d_mixing = sign[:, None] * (c.view(H, -1, 2 * M).mT @ a.view(H, -1, 2 * M))
    e = _mix(c, sign[:, None] * mixing * sign)
    del c
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    decay_k, decay_v = (decay.new_empty(B, Hq, triton.cdiv(C, BLOCK), 2, M) if need_decay else None for C in (R, P - R))
    dk = _reverse(e, q, k, decay, checkpoints_k, _from(d_after, 0), _from(d_before, 0), dq, decay_k)
    del e, checkpoints_k
    b = _mix(a, mixing.mT)
    del a
    dv = _reverse(b, d_o, v, decay, checkpoints_v, _from(d_after, R), _from(d_before, R), None, decay_v)
    d_log_decay = None
    if decay_k is not None and decay_v is not None:
        d_log_decay = _decay_gradient(decay_k, H) + _decay_gradient(decay_v, H)
    return dq, dk, dv, d_log_decay, d_mixing, None if d_before is None else _sum_heads(d_before, H, 1)


@forward_by_document
def linear_forward(
    z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Tensor | None, chunk_size: int | None, *,
    need_final: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """-> (y [B, T, H, P] in z's dtype, final_state [B, H, M, P, 2] or None)."""
    B, _, H, P = z.shape
    decay = _decay_table(log_decay)
    after = decay.new_empty(B, H, log_decay.shape[1], P, 2) if need_final else None
    y = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    _expand(_constant(readout), z, decay, _contiguous(initial_state), y, after)
    return y, after


@backward_by_document
def linear_backward(
    d_y: Tensor, d_final: Tensor | None, z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Tensor | None,
    chunk_size: int | None, need_decay: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """-> gradients of (z, log_decay, readout, initial_state); None as in `scan_backward`."""
    (B, _, H, P), M = z.shape, log_decay.shape[1]
    decay = _decay_table(log_decay)
    before = _contiguous(initial_state)
    d_before = None if before is None else torch.empty_like(before)
    checkpoints = _checkpoints(z, decay)
    _expand(None, z, decay, before, None, None, checkpoints)
    d_w = decay.new_empty(B, H, triton.cdiv(P, BLOCK), 2, M)
    d_theta = torch.empty_like(d_w) if need_decay else None
    dz = _reverse(_constant(readout), d_y, z, decay, checkpoints, _contiguous(d_final), d_before, None, d_theta, d_w)
    d_log_decay = None if d_theta is None else _decay_gradient(d_theta, H)
    return dz, d_log_decay, d_w.sum((0, 2)).flatten(1), d_before


# The launches. States are [B, H, M, P, 2], cut at the side's first channel (`_from`) but never copied.


def _contract(q, k, decay, before, after, checkpoints=None) -> Tensor:
    """X_t q_t for every token, [Hq, B, T, 2M]."""
    (B, T, H, C), Hq, M = k.shape, q.shape[2], decay.shape[2]
    q, k = _rows(q), _rows(k)
    a = decay.new_empty(Hq, B, T, 2 * M)
    width = triton.next_power_of_2(C)
    with torch.cuda.device_of(q):
        contract_scan_kernel[(B * Hq * triton.cdiv(M, BLOCK),)](
            q, k, decay, before, a, after, checkpoints, T, Hq, Hq // H, _channels(before, after),
            *q.stride()[:3], *k.stride()[:3], a.stride(1), a.stride(0),
            C=C, M=M, BC=width, BM=BLOCK, K=SEGMENT, num_warps=forward_warps(width),
        )  # fmt: skip
    return a


def _expand(b, v, decay, before, o, after, checkpoints=None) -> None:
    """Re(b_t^T X_t) for every token into o; or, with checkpoints, the states alone."""
    (B, T, H, C), M = v.shape, decay.shape[2]
    v = _rows(v)
    Hq = H if o is None else o.shape[2]
    width = triton.next_power_of_2(M)
    with torch.cuda.device_of(v):
        expand_scan_kernel[(B * Hq * triton.cdiv(C, BLOCK),)](
            b, v, decay, before, o, after, checkpoints, T, Hq, Hq // H, _channels(before, after),
            *_weight_strides(b), *v.stride()[:3], *((0, 0, 0) if o is None else o.stride()[:3]),
            C=C, M=M, BC=BLOCK, BM=width, K=SEGMENT, num_warps=forward_warps(width),
        )  # fmt: skip


def _reverse(e, q, k, decay, checkpoints, d_after, d_before, dq, d_theta, d_w=None) -> Tensor:
    """-> dk. Fills dq, and with one slice per query head d_before, d_theta and d_w [B, Hq, blocks, 2, M], where not None."""
    (B, T, H, C), Hq, M = k.shape, q.shape[2], decay.shape[2]
    q, k = _rows(q), _rows(k)
    width = triton.next_power_of_2(M)
    # Summed over the query heads of a group before it is rounded.
    dk = torch.empty(B, T, Hq, C, dtype=k.dtype if Hq == H else decay.dtype, device=k.device)
    with torch.cuda.device_of(q):
        reverse_scan_kernel[(B * Hq * triton.cdiv(C, BLOCK),)](
            e, q, k, decay, checkpoints, d_after, dq, dk, d_before, d_theta, d_w,
            T, triton.cdiv(T, SEGMENT), Hq, Hq // H, _channels(d_after, d_before),
            *_weight_strides(e), *q.stride()[:3], *k.stride()[:3],
            C=C, M=M, BC=BLOCK, BM=width, K=SEGMENT, ANCHOR=ANCHOR, num_warps=reverse_warps(width),
        )  # fmt: skip
    return _sum_heads(dk, H, 2).to(k.dtype)


def _decay_gradient(parts: Tensor, H: int) -> Tensor:
    """[B, Hq, blocks, 2, M] -> [H, M, 2]"""
    B, _, _, _, M = parts.shape
    return parts.view(B, H, -1, 2, M).sum((0, 2)).mT.contiguous()


def forward_warps(width: int) -> int:
    """16 complex numbers of the state per thread; `width` by BLOCK of them in a program of contract or expand."""
    return max(1, width // 64)


def reverse_warps(width: int) -> int:
    """8 per thread: state, costate, three anchors and the decay's gradient are each that large."""
    return max(1, width // 32)


def _mix(a: Tensor, weights: Tensor) -> Tensor:
    """Rows of a [Hq, B, T, 2M] times the matrix of their state head, [H, 2M, 2M]."""
    return (a.view(weights.shape[0], -1, a.shape[-1]) @ weights).view(a.shape)


def _decay_table(log_decay: Tensor) -> Tensor:
    """Lambda and 1 / Lambda, [H, 4, M]."""
    one = torch.arange(1, -2, -2, device=log_decay.device)  # made on the device: CUDA graphs cannot capture a copy
    return powers(log_decay, one).mT.reshape(log_decay.shape[0], 4, -1).contiguous()


def _checkpoints(k: Tensor, decay: Tensor) -> Tensor:
    B, T, H, C = k.shape
    return decay.new_empty(B, H, triton.cdiv(T, SEGMENT), 2, decay.shape[2], C)


def _constant(readout: Tensor) -> Tensor:
    """w [H, 2M] as weights of every token, [H, 1, 1, 2M] with strides of 0."""
    return readout.contiguous()[:, None, None].expand(-1, 2, 2, -1)


def _weight_strides(b: Tensor | None) -> tuple[int, int, int]:
    """(batch, token, head) of [Hq, B, T, 2M]."""
    return (0, 0, 0) if b is None else (b.stride(1), b.stride(2), b.stride(0))


def _sum_heads(x: Tensor, H: int, dim: int) -> Tensor:
    return x if x.shape[dim] == H else x.unflatten(dim, (H, -1)).sum(dim + 1)


def _from(state: Tensor | None, first: int) -> Tensor | None:
    return None if state is None else state[..., first:, :]


def _channels(*states: Tensor | None) -> int:
    """P, from the strides of whichever state there is."""
    return next((x.stride(2) // 2 for x in states if x is not None), 0)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
