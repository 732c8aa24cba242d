"""How the Gluon kernels are launched: the alternatives of `Plan.one_forward` and `Plan.one_reverse`, for Hopper.

Imported where a plan asks for them: `TRITON_INTERPRET` has no Gluon.
"""

import torch
from torch import Tensor

from .gluon_forward import forward_kernel
from .gluon_reverse import reverse_kernel
from .gluon_tiles import WARPS
from .triton_launch import _or_dummy, _strides, dense

SIZE = 64  # M, the width of a head and the tokens of a chunk


def fits(plan, tab, span, *tokens: Tensor) -> bool:
    """Whether the kernels run this: M, chunks and heads of 64, bf16, a query head for each state head, no documents."""
    if len({x.shape[2] for x in tokens}) > 1 or span.documents is not None:
        return False
    sizes = {plan.chunk, tab.E.shape[2] // 2, *(x.shape[3] for x in tokens)}
    return sizes == {SIZE} and all(x.dtype == torch.bfloat16 for x in tokens)


def forward(tab, span, q, k, v, mixing, state, out, final, save: bool) -> Tensor | None:
    """o into `out` and the last state into `final`, if there is one to fill; -> a [B, H, T, 2M] for the backward, if `save`.

    mixing: W [H, 2M, 2M] fp32. state: before every segment, [B, H, S, M, 2 SIZE, 2], or None.
    """
    B, T, H, _ = q.shape
    a = torch.empty(B, H, T, 2 * SIZE, dtype=torch.bfloat16, device=q.device) if save else None
    forward_kernel[(B * H * span.segments,)](
        q, k, v, tab.t_conj_T, tab.E, tab.step, dense(mixing), _or_dummy(state, tab), out, q if a is None else a,
        _or_dummy(final, tab), T, span.segments, span.chunks, H, *_strides(q), *_strides(k), *_strides(v), *_strides(out),
        HAS_STATE=state is not None, STORE_STATE=final is not None, STORE_A=save, EVEN=T % SIZE == 0, num_warps=WARPS,
    )  # fmt: skip
    return a


def reverse(tab, span, b, d_o, v, state, costate, channels, out, initial) -> Tensor:
    """Pass 3 into `out` and `initial`; -> parts of the decay's gradient, [B, H, S, 2M] fp32 as (Re g | Im g), to be summed.

    Arguments as in `triton_launch.adjoint_decay`.
    """
    B, T, H, _ = d_o.shape
    g = tab.E.new_empty(B, H, span.segments, 2 * SIZE)
    reverse_kernel[(B * H * span.segments,)](
        b, d_o, v, tab.t_conj, tab.t_conj_T, tab.E, tab.step, _or_dummy(state, tab), _or_dummy(costate, tab),
        out, _or_dummy(initial, tab), g, T, span.segments, span.chunks, H, channels[1], channels[0],
        *_strides(d_o), *_strides(v), *_strides(out),
        HAS_STATE=state is not None, HAS_COSTATE=costate is not None, STORE_STATE=initial is not None,
        EVEN=T % SIZE == 0, num_warps=WARPS,
    )  # fmt: skip
    return g
