"""Launches of the kernels of the input features: tiles, tokens per program, partial sums.

Shapes as in triton_kernels.py: B batch, T time, H heads, R head_dim, E = H R channels, W
convolution width, K rows of sums. A launcher allocates the tensors that it returns, and partial
sums.
"""
# Triton kernels are called with launch options, and with plain numbers for constexprs.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
from torch import Tensor

from .triton_kernels import backward_kernel, forward_kernel

# The most elements of a tile, which holds half the channels of its rows: 4 in each of 128 threads.
# 8 would need more than 255 registers.
MAX_TILE = 512
# Constants of the kernels' loops over tokens. AHEAD: tokens that are loaded before they are needed.
# UNROLL: tokens in one iteration of the compiled loop. At W = 4, an iteration of four tokens moves
# the last inputs on without copies of registers. These are the largest values that registers allow,
# found by compilation: the forward takes 148 registers, the backward 255, and larger values would
# spill.
FORWARD_LOOP = dict(AHEAD=2, UNROLL=4)
# The first is without documents, the second with them.
BACKWARD_LOOPS = dict(AHEAD=1, UNROLL=2), dict(AHEAD=1, UNROLL=1)


def forward(
    x: Tensor, head_dim: int, weight: Tensor | None, bias: Tensor | None, past: Tensor | None,
    documents: Tensor | None, cos: Tensor | None, sin: Tensor | None, silu: bool, scale: Tensor | None,
    shift: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """Applies the input features.

    Args:
        x: A projection's output, [B, T, E] with E = H R channels.
        head_dim: R, the channels of a head.
        weight: The convolution's weight, [E, W], or None for no convolution.
        bias: Its bias, [E], or None.
        past: The W - 1 inputs before x, [B, W - 1, E], or None for zeros.
        documents: The id of each token's document, [B, T], or None for one document.
        cos: The rotary cosines, [T, 1, R/2] or [B, T, 1, R/2], or None.
        sin: The rotary sines, likewise.
        silu: True for SiLU and the l2 norm.
        scale: The RMSNorm's scale, [R], or None for no norm.
        shift: The RMSNorm's shift, [H, R], or None.
        eps: The eps of the RMSNorm.

    Returns:
        y, [B, T, H, R], contiguous.
    """
    B, T, E = x.shape
    R = head_dim
    H = E // R
    y = torch.empty(B, T, H, R, dtype=x.dtype, device=x.device)
    tensors, strides, constants = _shared_arguments(
        x, R, weight, bias, past, documents, cos, sin, silu, scale, eps
    )
    if shift is not None:
        shift = shift.contiguous()
    # A program computes BN rows (heads of sequences) over BT tokens; there are `blocks` blocks of
    # rows.
    blocks = triton.cdiv(B * H, constants["BN"])
    BT = _tokens_per_program(T, blocks, programs=1024)
    with torch.cuda.device_of(x):
        forward_kernel[(triton.cdiv(T, BT) * blocks,)](
            *tensors,
            shift,
            y,
            T,
            H,
            B * H,
            BT,
            *strides,
            **constants,
            **FORWARD_LOOP,
        )
    return y


def backward(
    dy: Tensor, x: Tensor, head_dim: int, weight: Tensor | None, bias: Tensor | None, past: Tensor | None,
    documents: Tensor | None, cos: Tensor | None, sin: Tensor | None, silu: bool, scale: Tensor | None, eps: float,
    need_past: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the gradients of the input features.

    Args:
        dy: The gradient of y, [B, T, H, R].
        x: A projection's output, [B, T, E] with E = H R channels.
        head_dim: R, the channels of a head.
        weight: The convolution's weight, [E, W], or None for no convolution.
        bias: Its bias, [E], or None.
        past: The W - 1 inputs before x, [B, W - 1, E], or None for zeros.
        documents: The id of each token's document, [B, T], or None for one document.
        cos: The rotary cosines, [T, 1, R/2] or [B, T, 1, R/2], or None.
        sin: The rotary sines, likewise.
        silu: True for SiLU and the l2 norm.
        scale: The RMSNorm's scale, [R], or None for no norm.
        eps: The eps of the RMSNorm.
        need_past: True if the gradient of `past` is wanted.

    Returns:
        dx: The gradient of x, [B, T, E].
        sums: Gradients as the K rows of [H, K, R] in fp32: weight[:, 0] to weight[:, W-1], bias,
            scale by head and shift, if they are there.
        dpast: The gradient of past, [B, W - 1, E], or empty.
    """
    B, T, E = x.shape
    R = head_dim
    H = E // R
    if dy.stride(-1) != 1:
        dy = dy.contiguous()
    tensors, strides, constants = _shared_arguments(
        x, R, weight, bias, past, documents, cos, sin, silu, scale, eps
    )
    W = constants["W"]
    # K, the number of gradients of parameters for each channel: W taps and a bias, scale and shift.
    K = 0
    if weight is not None:
        K += W + 1
    if scale is not None:
        K += 2
    # A program computes BN rows (heads of sequences) over BT tokens. Each of NT stretches of time
    # has sums of its own; they are added here, in a fixed order.
    blocks = triton.cdiv(B * H, constants["BN"])
    BT = _tokens_per_program(T, blocks, programs=512)
    NT = triton.cdiv(T, BT)
    dx = torch.empty(B, T, E, dtype=x.dtype, device=x.device)
    dpast = None
    if need_past:
        dpast = torch.empty(B, W - 1, E, dtype=x.dtype, device=x.device)
    sums = torch.empty(NT, B, H, K, R, dtype=torch.float32, device=x.device)
    # Documents matter to the convolution only.
    with_documents = documents is not None and weight is not None
    with torch.cuda.device_of(x):
        backward_kernel[(NT * blocks,)](
            dy, *tensors, dx, dpast, sums, T, H, B * H, BT,
            *_leading_strides(dy), *strides, **constants, **BACKWARD_LOOPS[with_documents],
        )  # fmt: skip
    if dpast is None:
        dpast = x.new_empty(0)
    return dx, sums.sum((0, 1)), dpast


def _shared_arguments(
    x: Tensor, R: int, weight: Tensor | None, bias: Tensor | None, past: Tensor | None, documents: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, silu: bool, scale: Tensor | None, eps: float,
) -> tuple[tuple, tuple, dict]:  # fmt: skip
    """Makes the arguments that the forward and the backward kernel share.

    Args:
        x: A projection's output, [B, T, E] with E = H R channels.
        R: Channels of a head.
        weight: The convolution's weight, [E, W], or None.
        bias: Its bias, [E], or None.
        past: The W - 1 inputs before x, [B, W - 1, E], or None.
        documents: The id of each token's document, [B, T], or None.
        cos: The rotary cosines, [T, 1, R/2] or [B, T, 1, R/2], or None.
        sin: The rotary sines, likewise.
        silu: True for SiLU and the l2 norm.
        scale: The RMSNorm's scale, [R], or None.
        eps: The eps of the RMSNorm.

    Returns:
        The tensors in the order of the kernels, from x to scale (None for those that are not
        there); the strides of x, past and the rotary tables; and the constants and launch options.
    """
    # The kernels need a dense last dimension of x and past, and contiguous tables.
    if x.stride(-1) != 1:
        x = x.contiguous()
    past_strides = (0, 0)
    if past is not None:
        if past.stride(-1) != 1:
            past = past.contiguous()
        past_strides = _leading_strides(past)
    # Documents matter to the convolution only.
    if weight is None:
        documents = None
    if documents is not None:
        documents = documents.to(torch.int32)
    # float64 tables would make the tiles of the loop float64.
    cos, sin = (None if t is None else t.float() for t in (cos, sin))
    tables = (
        None if t is None else t.contiguous() for t in (documents, weight, bias, cos, sin, scale)
    )

    # Each sequence has rotary angles of its own only if the tables have a row for each.
    rope_stride = 0
    if cos is not None and cos.ndim == 4 and cos.shape[0] > 1:
        rope_stride = cos[0].numel()

    W = 0
    if weight is not None:
        W = weight.shape[-1]
    # A tile has half the channels of a head, and as many rows as fit.
    BH = max(16, triton.next_power_of_2(R // 2))
    constants = dict(R=R, W=W, BN=max(1, MAX_TILE // BH), BH=BH, SILU=silu, EPS=eps, num_warps=4)
    return (x, past, *tables), (*_leading_strides(x), *past_strides, rope_stride), constants


def _tokens_per_program(T: int, blocks: int, programs: int) -> int:
    """Returns the tokens of a program, from 16 to 128.

    It is the largest number that leaves at least `programs` programs. It depends on the shape only,
    so that sums are the same on every GPU.

    Args:
        T: Tokens of a sequence.
        blocks: Programs for one stretch of time.
        programs: The number of programs of this kernel that fills a GPU.
    """
    BT = 128
    while BT > 16 and triton.cdiv(T, BT) * blocks < programs:
        BT //= 2
    return BT


def _leading_strides(x: Tensor) -> tuple[int, ...]:
    """Returns the strides of x without the last one, which is 1.

    The stride of a dimension of size one has no effect. It is passed as 0, because another value
    might let Triton compile the kernel again.
    """
    return tuple(s if n > 1 else 0 for s, n in zip(x.stride()[:-1], x.shape, strict=False))
