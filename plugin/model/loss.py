"""The output head and the training loss, computed by pieces of the tokens: the logits of all tokens never exist at once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .layers import Linear, autocast_dtype

PieceLoss = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]  # `piece_loss`, or it compiled

# Shapes: N tokens, n tokens of a piece, E dim, V vocabulary.
IGNORE_INDEX = -100  # the label of a token that is not predicted; PyTorch's
PIECE_BYTES = 2**29  # of a piece's float32 logits
LEAST_TOKENS = 1024  # of a piece: with fewer, adding up the weight's gradient takes longer than its products


class Head(Linear):
    """hidden [..., E] -> logits [..., V]; with labels [...], the summed cross-entropy instead.

    FSDP2 gathers the weight around calls of this module, so the loss must be computed inside of one.
    """

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size)
        self.piece_loss: PieceLoss = piece_loss

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            return super().forward(hidden)
        return summed_cross_entropy(hidden, self.weight, labels, self.piece_loss)

    def compile_loss(self, backend: str) -> None:
        """Everything between the matrix products as one compiled function."""
        self.piece_loss = torch.compile(piece_loss, backend=backend)


def piece_tokens(vocab_size: int) -> int:
    """n: of what `summed_cross_entropy` computes at once. A multiple of 128."""
    return max(LEAST_TOKENS, PIECE_BYTES // (4 * vocab_size) // 128 * 128)


def piece_loss(logits: Tensor, labels: Tensor, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """(summed cross-entropy, its gradient by the logits in their dtype) of logits [n, V]; float32 inside, or float64."""
    log_p = F.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=1)
    loss = F.nll_loss(log_p, labels, reduction="sum", ignore_index=IGNORE_INDEX)
    if not gradient:
        return loss, None
    ignored = (labels == IGNORE_INDEX)[:, None]
    target = labels[:, None].masked_fill(ignored, 0)
    by_logits = log_p.exp_().scatter_add_(1, target, torch.full_like(target, -1, dtype=log_p.dtype))
    return loss, by_logits.masked_fill_(ignored, 0).to(logits.dtype)


def summed_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, piece_loss: PieceLoss = piece_loss) -> Tensor:
    """Sum over all tokens of -log softmax(hidden weight^T)[label]: a float32 scalar, float64 for float64.

    Where gradients are recorded, the forward pass computes those by hidden and weight as well, piece by piece, while a piece's
    logits exist; the backward pass only multiplies them by the gradient it gets. So nothing is computed twice. The products
    are of hidden's dtype, or of autocast's. The gradient by the weight is added up in float32 and rounded once, as one product
    over all tokens would be; the gradient by hidden is rounded before that multiplication, which is exact where it is by a
    power of two, such as 1 / 524,288 tokens.

    Args:
        hidden: [..., E]; weight: [V, E]; labels: [...] integers below V, or IGNORE_INDEX: those tokens add nothing.
        piece_loss: the function of that name, or a compiled one.
    Raises: ValueError for labels of another shape.
    """
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels are {list(labels.shape)}: expected one per position, {list(hidden.shape[:-1])}.")
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _SummedCrossEntropy.apply(hidden, weight, labels, piece_loss)
    return _by_pieces(hidden, weight, labels, piece_loss, (False, False))[0]


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, piece_loss: PieceLoss) -> Tensor:
        ctx.dtype = weight.dtype
        loss, *gradients = _by_pieces(hidden, weight, labels, piece_loss, ctx.needs_input_grad[:2])
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        by_hidden, by_weight = ctx.saved_tensors
        by_hidden = None if by_hidden is None else by_hidden * by_loss
        by_weight = None if by_weight is None else (by_weight * by_loss).to(ctx.dtype)
        return by_hidden, by_weight, None, None


def _by_pieces(
    hidden: Tensor, weight: Tensor, labels: Tensor, piece_loss: PieceLoss, needed: tuple[bool, bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(loss, its gradients by hidden [N, E] and by weight [V, E] where `needed`)."""
    dtype = autocast_dtype(hidden) or hidden.dtype
    W, wide = weight.to(dtype), torch.promote_types(dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    by_hidden = torch.empty_like(hidden) if needed[0] else None
    by_weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
    n = piece_tokens(len(weight))
    for begin in range(0, len(hidden), n):
        piece = slice(begin, begin + n)
        x = hidden[piece].to(dtype)
        piece_sum, by_logits = piece_loss(x @ W.t(), labels[piece], any(needed))
        loss = loss + piece_sum
        if by_hidden is not None and by_logits is not None:
            by_hidden[piece] = by_logits @ W
        if by_weight is not None and by_logits is not None:
            by_weight += by_logits.t() @ x
        del by_logits  # the next piece needs the room
    return loss, by_hidden, by_weight
