"""The output head and the training loss, computed by pieces of the tokens: the logits of all tokens never exist at once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .layers import Linear, autocast_dtype
from .shard import Part

PieceLoss = Callable[
    [Tensor, Tensor, bool, Part | None], tuple[Tensor, Tensor | None]
]  # `piece_loss`, or it compiled

# Shapes: N tokens, n tokens of a piece, E dim, V vocabulary.
IGNORE_INDEX = -100  # the label of a token that is not predicted; PyTorch's
ELSEWHERE = -1  # the label of a token whose label is of another rank's part of the vocabulary
PIECE_BYTES = 2**29  # of a piece's float32 logits
LEAST_TOKENS = (
    1024  # of a piece: with fewer, adding up the weight's gradient takes longer than its products
)


class Head(Linear):
    """hidden [..., E] -> logits [..., V]; with labels [...], the summed cross-entropy instead.

    With `heads`: from its part of the tokens, [B, T / size, E], to its part of the logits, [B, T, V / size]; with all T labels,
    to the loss of those that are of its part of the vocabulary. Sums over the ranks are the loss and the gradients.

    FSDP2 gathers the weight around calls of this module, so the loss must be computed inside of one.

    Attributes:
        scores: a list to which each call with labels appends `token_scores`, [2, tokens], where no gradients are recorded;
            None: not computed.
    """

    heads: Part | None = None
    scores: list[Tensor] | None = None

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size)
        self.piece_loss: PieceLoss = piece_loss

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = hidden if self.heads is None else self.heads.gather_tokens(hidden)
        if labels is None:
            return super().forward(hidden)
        return summed_cross_entropy(
            hidden, self.local(), labels, self.piece_loss, self.heads, self.scores
        )

    def compile_loss(self, backend: str) -> None:
        """Compile all between the matrix products as one function."""
        self.piece_loss = torch.compile(piece_loss, backend=backend)


def piece_tokens(vocab_size: int) -> int:
    """n: of what `summed_cross_entropy` computes at once. A multiple of 128."""
    return max(LEAST_TOKENS, PIECE_BYTES // (4 * vocab_size) // 128 * 128)


def piece_loss(
    logits: Tensor, labels: Tensor, gradient: bool, vocabulary: Part | None = None
) -> tuple[Tensor, Tensor | None]:
    """(summed cross-entropy, its gradient by the logits in their dtype) of logits [n, V]; float32 inside, or float64.

    vocabulary: which part of it the logits are. Labels are counted from its first row, or ELSEWHERE, or IGNORE_INDEX: so the
    ranks compile the same function, and one may load what another has compiled.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if vocabulary is None:
        log_p, here = F.log_softmax(wide, dim=1), labels
    else:
        by_part = vocabulary.gather(wide.logsumexp(dim=1))
        log_p, here = (
            wide - by_part.logsumexp(dim=0)[:, None],
            labels.masked_fill(labels == ELSEWHERE, IGNORE_INDEX),
        )
    loss = F.nll_loss(log_p, here, reduction="sum", ignore_index=IGNORE_INDEX)
    if not gradient:
        return loss, None
    target, ignored = labels[:, None], (labels == IGNORE_INDEX)[:, None]
    by_logits = log_p.exp_().scatter_add_(1, target.clamp_min(0), -(target >= 0).to(log_p.dtype))
    return loss, by_logits.masked_fill_(ignored, 0).to(logits.dtype)


def token_scores(logits: Tensor, labels: Tensor, vocabulary: Part | None = None) -> Tensor:
    """Cross-entropy of each token, and 1 where its label is not the argmax, else 0: [2, n] float32 of logits [n, V].

    Tokens without a label have zeros. Labels and vocabulary as in `piece_loss`; a token's scores are on the rank that has its
    label, zeros on the others. Of several largest logits the first is the argmax.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    first = 0 if vocabulary is None else vocabulary.rank * logits.shape[1]
    largest = wide.argmax(dim=1, keepdim=True)
    best = torch.stack(
        [
            wide.logsumexp(dim=1),
            wide.gather(1, largest)[:, 0],
            (largest[:, 0] + first).to(wide.dtype),
        ]
    )
    if vocabulary is not None:
        log_z, value, index = vocabulary.gather(best).unbind(dim=1)  # each [size, n]
        winner = value.argmax(dim=0, keepdim=True)
        best = torch.stack(
            [log_z.logsumexp(dim=0), value.gather(0, winner)[0], index.gather(0, winner)[0]]
        )
    loss, wrong = (
        best[0] - wide.gather(1, labels.clamp_min(0)[:, None])[:, 0],
        best[2] != labels + first,
    )
    return torch.stack([loss, wrong.to(loss.dtype)]).masked_fill(labels < 0, 0)


def summed_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    piece_loss: PieceLoss = piece_loss,
    vocabulary: Part | None = None,
    scores: list[Tensor] | None = None,
) -> Tensor:
    """Sum over all tokens of -log softmax(hidden weight^T)[label]: a float32 scalar, float64 for float64.

    Where gradients are recorded, the forward pass computes those by hidden and weight as well, piece by piece, while a piece's
    logits exist; the backward pass only multiplies them by the gradient it gets. So nothing is computed twice. The products
    are of hidden's dtype, or of autocast's. The gradient by the weight is added up in float32 and rounded once, as one product
    over all tokens would be; the gradient by hidden is rounded before that multiplication, which is exact where it is by a
    power of two, such as 1 / 524,288 tokens.

    Args:
        hidden: [..., E]; weight: [V, E]; labels: [...] integers below V, or IGNORE_INDEX: those tokens add nothing.
        piece_loss: the function of that name, or a compiled one.
        vocabulary: which part of it weight is, [V / size, E], where several ranks have the parts: the sum is over the tokens
            whose label is of this part. The gradients are this part's of the whole sum.
        scores: a list that gets `token_scores` of all tokens, [2, N], where no gradients are recorded.
    Raises: ValueError for labels of another shape.
    """
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels are {list(labels.shape)}: expected one per position, {list(hidden.shape[:-1])}."
        )
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    if vocabulary is not None:
        local = labels - vocabulary.rank * len(weight)
        local = local.masked_fill((local < 0) | (local >= len(weight)), ELSEWHERE)
        labels = local.masked_fill(labels == IGNORE_INDEX, IGNORE_INDEX)
    arguments = hidden, weight, labels, piece_loss, vocabulary
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _SummedCrossEntropy.apply(*arguments)
    return _by_pieces(*arguments, (False, False), scores)[0]


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        piece_loss: PieceLoss,
        vocabulary: Part | None,
    ) -> Tensor:
        ctx.dtype = weight.dtype
        loss, *gradients = _by_pieces(
            hidden, weight, labels, piece_loss, vocabulary, ctx.needs_input_grad[:2]
        )
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, by_loss: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        by_hidden, by_weight = ctx.saved_tensors
        by_hidden = None if by_hidden is None else by_hidden * by_loss
        by_weight = None if by_weight is None else (by_weight * by_loss).to(ctx.dtype)
        return by_hidden, by_weight, None, None, None


def _by_pieces(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    piece_loss: PieceLoss,
    vocabulary: Part | None,
    needed: tuple[bool, bool],
    scores: list[Tensor] | None = None,
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
        logits = x @ W.t()
        if scores is not None:
            scores.append(token_scores(logits, labels[piece], vocabulary))
        piece_sum, by_logits = piece_loss(logits, labels[piece], any(needed), vocabulary)
        loss = loss + piece_sum
        if by_hidden is not None and by_logits is not None:
            by_hidden[piece] = by_logits @ W
        if by_weight is not None and by_logits is not None:
            by_weight += by_logits.t() @ x
        del logits, by_logits  # the next piece needs the room
    return loss, by_hidden, by_weight
