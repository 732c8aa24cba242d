"""The Triton kernels of the input features as `torch.library` ops.

torch.compile sees one node for each, and activation checkpointing one name.

    torch.ops.interdomain.features.default
    torch.ops.interdomain.features_backward.default
    torch.ops.interdomain.features_step.default       one token, without gradients

Only the inputs are saved. The ops trust them; `interdomain.features` checks them. Triton is
imported when it runs: a machine without a GPU has none.

Shapes: B batch, T time, H heads, R head_dim, E = H R channels, W convolution width,
K rows of sums (W + 1 for a convolution, and 2 for a norm).
"""

from typing import Any

import torch
from torch import Tensor

from interdomain.scan.library import no_second_derivative, tag_caches


@torch.library.custom_op("interdomain::features", mutates_args=())
def features(
    x: Tensor, head_dim: int, weight: Tensor | None, bias: Tensor | None, past: Tensor | None,
    documents: Tensor | None, cos: Tensor | None, sin: Tensor | None, silu: bool, scale: Tensor | None,
    shift: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """Applies the input features to whole sequences, as `input_features` does.

    Args:
        x: A projection's output, [B, T, E] with E = H R channels.
        head_dim: R, the channels of a head.
        weight: The convolution's weight, [E, W], or None for no convolution.
        bias: Its bias, [E]; None without a convolution.
        past: The W - 1 inputs before x, [B, W - 1, E], or None for zeros.
        documents: The id of each token's document, [B, T], or None for one document.
        cos: The rotary cosines, [T, 1, R/2] or [B, T, 1, R/2], or None.
        sin: The rotary sines, likewise.
        silu: True for SiLU and the l2 norm.
        scale: The RMSNorm's scale, [R], or None for no norm.
        shift: The RMSNorm's shift, [H, R], or None.
        eps: The eps of the RMSNorm.

    Returns:
        [B, T, H, R] in x's dtype.
    """
    # Imported only if it runs: a machine without a GPU has no Triton.
    from . import triton_launch

    return triton_launch.forward(
        x, head_dim, weight, bias, past, documents, cos, sin, silu, scale, shift, eps
    )


@features.register_fake
def _(x, head_dim, weight, bias, past, documents, cos, sin, silu, scale, shift, eps):
    """Makes results of `features` for tracing: only shapes and dtypes count.

    Its arguments are those of `features`.
    """
    B, T, E = x.shape
    return x.new_empty(B, T, E // head_dim, head_dim)


@torch.library.custom_op("interdomain::features_backward", mutates_args=())
def features_backward(
    dy: Tensor, x: Tensor, head_dim: int, weight: Tensor | None, bias: Tensor | None, past: Tensor | None,
    documents: Tensor | None, cos: Tensor | None, sin: Tensor | None, silu: bool, scale: Tensor | None, eps: float,
    need_past: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the gradients of `features`, from its inputs and the gradient of its result.

    Args:
        dy: The gradient of the result, [B, T, H, R].
        x: A projection's output, [B, T, E] with E = H R channels.
        head_dim: R, the channels of a head.
        weight: The convolution's weight, [E, W], or None for no convolution.
        bias: Its bias, [E]; None without a convolution.
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
        sums: The gradients of the parameters that are there, [H, K, R] fp32, in K rows: W rows for
            the weight and one for the bias, then one for the RMSNorm's scale (by head: not yet
            summed over the heads, which share one scale) and one for its shift [H, R], which is no
            argument because no gradient depends on it.
        dpast: The gradient of past, [B, W - 1, E], or an empty tensor if it is not wanted.
    """
    # Imported only if it runs: a machine without a GPU has no Triton.
    from . import triton_launch

    return triton_launch.backward(
        dy, x, head_dim, weight, bias, past, documents, cos, sin, silu, scale, eps, need_past
    )


@features_backward.register_fake
def _(dy, x, head_dim, weight, bias, past, documents, cos, sin, silu, scale, eps, need_past):
    """Makes results of `features_backward` for tracing: only shapes and dtypes count.

    Its arguments are those of `features_backward`.
    """
    B, _, E = x.shape
    # K rows of sums: those of W taps and the bias, then those of scale and shift.
    W = 0
    K = 0
    if weight is not None:
        W = weight.shape[-1]
        K = W + 1
    if scale is not None:
        K += 2
    sums = x.new_empty(E // head_dim, K, head_dim, dtype=torch.float32)
    dpast = x.new_empty(0)
    if need_past:
        dpast = x.new_empty(B, W - 1, E)
    return x.new_empty(x.shape), sums, dpast


def _save_for_backward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    """Saves what the backward of `features` needs: its inputs. PyTorch calls it after the op.

    Args:
        ctx: PyTorch's context, which `_gradients` gets.
        inputs: The arguments of `features`, in order.
        output: Its result, which the backward does not need.
    """
    # Of the shift only the dtype is needed, that of its gradient.
    x, head_dim, weight, bias, past, documents, cos, sin, silu, scale, shift, eps = inputs
    ctx.head_dim = head_dim
    ctx.silu = silu
    ctx.eps = eps
    ctx.save_for_backward(x, weight, bias, past, documents, cos, sin, scale, shift)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Returns the gradients of the arguments of `features`, None for those without one.

    Args:
        ctx: PyTorch's context, from `_save_for_backward`.
        dy: The gradient of the result, [B, T, H, R].
    """
    x, weight, bias, past, documents, cos, sin, scale, shift = ctx.saved_tensors
    # The gradient of `past`, argument 4 of `features`, costs memory: only if autograd wants it.
    need_past = past is not None and ctx.needs_input_grad[4]
    dx, sums, dpast = features_backward(
        dy,
        x,
        ctx.head_dim,
        weight,
        bias,
        past,
        documents,
        cos,
        sin,
        ctx.silu,
        scale,
        ctx.eps,
        need_past,
    )

    # `sums` [H, K, R] has the gradients of the parameters in its K rows: W taps of the weight and
    # the bias, then scale (of each head, which all share one scale) and shift.
    d_weight = None
    d_bias = None
    d_scale = None
    d_shift = None
    if weight is not None:
        W = weight.shape[-1]
        # [H, W, R] -> [E, W], and [H, R] -> [E]
        d_weight = sums[:, :W].transpose(1, 2).reshape(weight.shape).to(weight.dtype)
        d_bias = sums[:, W].reshape(bias.shape).to(bias.dtype)
    if scale is not None:
        # [H, R] -> [R], and [H, R]
        d_scale = sums[:, -2].sum(0).to(scale.dtype)
        d_shift = sums[:, -1].to(shift.dtype)
    if past is not None and need_past:
        dpast = dpast.to(past.dtype)
    else:
        dpast = None
    # In the order of the arguments. head_dim, documents, cos, sin, silu and eps have no gradient.
    return dx, None, d_weight, d_bias, dpast, None, None, None, None, d_scale, d_shift, None


features.register_autograd(_gradients, setup_context=_save_for_backward)
no_second_derivative(features_backward)


@torch.library.custom_op("interdomain::features_step", mutates_args=("past",))
def features_step(
    x: Tensor, head_dim: int, weight: Tensor | None, bias: Tensor | None, past: Tensor | None, cos: Tensor | None,
    sin: Tensor | None, rotated: int, silu: int, scale: Tensor | None, shift: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """Applies the input features to one token, as `input_features_step` does.

    Args:
        x: The projections' outputs one after the other, [B, E] with E = H R.
        head_dim: R, the channels of a head.
        weight: The weight of the convolution of the first C channels, [W, C], or None.
        bias: Its bias, [C]; None without a convolution.
        past: Its W - 1 inputs before x, [B, W - 1, C], overwritten with the last ones; or None.
        cos: The rotary cosines, [1, 1, R/2] or [B, 1, 1, R/2], or None.
        sin: The rotary sines, likewise.
        rotated: Number of the first heads that RoPE rotates.
        silu: Number of the first heads with SiLU and the l2 norm.
        scale: The RMSNorm's scale, [N, R], of the last N heads, or None.
        shift: The RMSNorm's shift, likewise.
        eps: The eps of the RMSNorm.

    Returns:
        [B, H, R] in x's dtype.
    """
    # Imported only if it runs: a machine without a GPU has no Triton.
    from . import triton_step

    return triton_step.step(
        x, head_dim, weight, bias, past, cos, sin, rotated, silu, scale, shift, eps
    )


@features_step.register_fake
def _(x, head_dim, weight, bias, past, cos, sin, rotated, silu, scale, shift, eps):
    """Makes results of `features_step` for tracing: only shapes and dtypes count.

    Its arguments are those of `features_step`.
    """
    return x.new_empty(x.shape[0], x.shape[1] // head_dim, head_dim)


tag_caches(__name__)
