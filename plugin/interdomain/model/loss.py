"""The output head and the training loss, computed for one piece of the tokens after the other.

The logits of all tokens never exist at once: with a large vocabulary they would be the largest
tensor of a training step. A name `by_x` is the gradient of the loss by x.

Shapes: B sequences, T tokens of a sequence, N = B T tokens, n tokens of a piece, E width of the
model, V vocabulary (of this rank, in tensor parallelism).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .layers import Linear, autocast_dtype
from .parallel import GroupRank

# The type of `piece_loss` and of its compiled form.
PieceLoss = Callable[[Tensor, Tensor, bool, GroupRank | None], tuple[Tensor, Tensor | None]]

IGNORE_INDEX = -100  # the label of a token that is not predicted; PyTorch's
ELSEWHERE = -1  # the label of a token whose label is in another rank's part of the vocabulary
PIECE_BYTES = 2**29  # size of the float32 logits of a piece
# The fewest tokens of a piece. With fewer, adding up the weight's gradient takes longer than the
# matrix products.
LEAST_TOKENS = 1024


class Head(Linear):
    """The output head: hidden [..., E] -> logits [..., V], or the summed loss of labels [...].

    With tensor parallelism: from this rank's part of the tokens, [B, T / size, E], to its part of
    the logits, [B, T, V]; with all T labels, to the loss of those that are in its part of the
    vocabulary. The sums over the ranks are the loss and the gradients.

    FSDP2 gathers the weight around calls of this module, so the loss must be computed inside of
    one.

    Attributes:
        tp_rank: This rank's place in tensor parallelism. None: the head has the whole vocabulary.
        scores: A list to which each call with labels appends `token_scores`, [2, tokens], while no
            gradients are recorded. None: they are not computed.
        piece_loss: The function `piece_loss`, or its compiled form.
    """

    tp_rank: GroupRank | None = None
    scores: list[Tensor] | None = None

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size)
        self.piece_loss: PieceLoss = piece_loss

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Returns the logits of hidden states, or their loss if there are labels.

        Args:
            hidden: [..., E]; in tensor parallelism this rank's tokens, [B, T / size, E].
            labels: [...] integers, one per token: the next token, or IGNORE_INDEX. None: return
                logits.
        """
        if self.tp_rank is not None:
            hidden = self.tp_rank.gather_tokens(hidden)
        if labels is None:
            return super().forward(hidden)
        return summed_cross_entropy(
            hidden, self.local(), labels, self.piece_loss, self.tp_rank, self.scores
        )

    def compile_loss(self, backend: str) -> None:
        """Compiles `piece_loss`, all that is computed between the matrix products.

        Args:
            backend: A backend of torch.compile, such as "inductor".
        """
        self.piece_loss = torch.compile(piece_loss, backend=backend)


def piece_tokens(vocab_size: int) -> int:
    """Returns n, the number of tokens that `summed_cross_entropy` computes at once.

    It is a multiple of 128.

    Args:
        vocab_size: V, the rows of this rank's head.
    """
    return max(LEAST_TOKENS, PIECE_BYTES // (4 * vocab_size) // 128 * 128)


def piece_loss(
    logits: Tensor, labels: Tensor, gradient: bool, vocabulary: GroupRank | None = None
) -> tuple[Tensor, Tensor | None]:
    """Computes the loss of a piece, in float32, or in float64 for float64 logits.

    Args:
        logits: [n, V].
        labels: [n] integers, counted from the first row of this rank's vocabulary; or ELSEWHERE, or
            IGNORE_INDEX. All ranks then compile the same function, and one can load what another
            has compiled.
        gradient: Compute the gradient, too.
        vocabulary: This rank's place among those that have parts of the vocabulary. None: the
            logits are of all of it.
    Returns:
        The summed cross-entropy, and its gradient by the logits, [n, V] in their dtype; None
        without `gradient`.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if vocabulary is None:
        log_p = F.log_softmax(wide, dim=1)
        own_labels = labels
    else:
        log_z_by_rank = vocabulary.gather(wide.logsumexp(dim=1))
        log_p = wide - log_z_by_rank.logsumexp(dim=0)[:, None]
        own_labels = labels.masked_fill(labels == ELSEWHERE, IGNORE_INDEX)
    loss = F.nll_loss(log_p, own_labels, reduction="sum", ignore_index=IGNORE_INDEX)
    if not gradient:
        return loss, None

    # The gradient is p - 1 at the label and p elsewhere, zeros for tokens that are not predicted.
    # A label that is negative (ELSEWHERE, IGNORE_INDEX) adds 0 at row 0, which changes nothing.
    target = labels[:, None]
    ignored = (labels == IGNORE_INDEX)[:, None]
    by_logits = log_p.exp_().scatter_add_(1, target.clamp_min(0), -(target >= 0).to(log_p.dtype))
    return loss, by_logits.masked_fill_(ignored, 0).to(logits.dtype)


def token_scores(logits: Tensor, labels: Tensor, vocabulary: GroupRank | None = None) -> Tensor:
    """Scores each token: its cross-entropy, and whether its label is not the most probable token.

    Args:
        logits: [n, V].
        labels: [n] integers, counted from the first row of this rank's vocabulary; or ELSEWHERE, or
            IGNORE_INDEX.
        vocabulary: This rank's place among those that have parts of the vocabulary. None: the
            logits are of all of it.
    Returns:
        [2, n] float32: the cross-entropy, and 1 if the label is not the argmax, else 0. Of several
        largest logits the first is the argmax. Tokens without a label have zeros, as do those whose
        label is in another rank's vocabulary.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    first = 0 if vocabulary is None else vocabulary.rank * logits.shape[1]
    largest = wide.argmax(dim=1, keepdim=True)
    log_z = wide.logsumexp(dim=1)
    value = wide.gather(1, largest)[:, 0]
    index = (largest[:, 0] + first).to(wide.dtype)
    if vocabulary is not None:
        # One collective for the three of all ranks, [size, 3, n]. The rank with the largest logit
        # has the argmax.
        by_rank = vocabulary.gather(torch.stack([log_z, value, index]))
        log_z_by_rank, values, indices = by_rank.unbind(dim=1)
        winner = values.argmax(dim=0, keepdim=True)
        log_z = log_z_by_rank.logsumexp(dim=0)
        index = indices.gather(0, winner)[0]
    loss = log_z - wide.gather(1, labels.clamp_min(0)[:, None])[:, 0]
    wrong = index != labels + first
    return torch.stack([loss, wrong.to(loss.dtype)]).masked_fill(labels < 0, 0)


def summed_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    piece_loss: PieceLoss = piece_loss,
    vocabulary: GroupRank | None = None,
    scores: list[Tensor] | None = None,
) -> Tensor:
    """Returns the sum over all tokens of -log softmax(hidden weight^T)[label].

    While gradients are recorded, the forward pass also computes those by hidden and weight, piece
    by piece, while a piece's logits exist; the backward pass only multiplies them by the gradient
    that it gets. So nothing is computed twice.

    The matrix products are in hidden's dtype, or in autocast's. The gradient by the weight is added
    up in float32 and rounded once, as a single product over all tokens would be. The gradient by
    hidden is rounded before that multiplication, which is exact if the factor is a power of two,
    such as 1 / 524,288 tokens.

    Args:
        hidden: [..., E].
        weight: [V, E].
        labels: [...] integers below the size of the whole vocabulary; or IGNORE_INDEX, which adds
            nothing to the sum.
        piece_loss: The function of that name, or its compiled form.
        vocabulary: This rank's place among those that have parts of the vocabulary. The result is
            then the sum over the tokens whose label is in this part, and the gradients are this
            part's of the whole sum. None: weight is all of it.
        scores: A list that gets `token_scores` of all tokens, [2, N], while no gradients are
            recorded.
    Returns:
        A float32 scalar; float64 for float64 inputs.
    Raises:
        ValueError: The labels have another shape.
    """
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels are {list(labels.shape)}: expected one per position, "
            f"{list(hidden.shape[:-1])}."
        )
    hidden = hidden.flatten(0, -2)
    labels = labels.flatten()
    if vocabulary is not None:
        # Count labels from the first row of this rank's part.
        local = labels - vocabulary.rank * len(weight)
        local = local.masked_fill((local < 0) | (local >= len(weight)), ELSEWHERE)
        labels = local.masked_fill(labels == IGNORE_INDEX, IGNORE_INDEX)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _SummedCrossEntropy.apply(hidden, weight, labels, piece_loss, vocabulary)
    loss, _, _ = _by_pieces(hidden, weight, labels, piece_loss, vocabulary, (False, False), scores)
    return loss


class _SummedCrossEntropy(torch.autograd.Function):
    """The loss, whose forward pass computes the gradients by hidden and weight, too.

    The backward pass multiplies them by the gradient by the loss, a scalar.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        piece_loss: PieceLoss,
        vocabulary: GroupRank | None,
    ) -> Tensor:
        """Computes the loss and the needed gradients by `_by_pieces`, whose arguments it has."""
        ctx.weight_dtype = weight.dtype
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
        """Multiplies the gradients by `by_loss`, the scalar gradient by the loss."""
        by_hidden, by_weight = ctx.saved_tensors
        if by_hidden is not None:
            by_hidden = by_hidden * by_loss
        if by_weight is not None:
            by_weight = (by_weight * by_loss).to(ctx.weight_dtype)
        return by_hidden, by_weight, None, None, None


def _by_pieces(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    piece_loss: PieceLoss,
    vocabulary: GroupRank | None,
    needed: tuple[bool, bool],
    scores: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Computes the loss and its gradients by pieces of the tokens.

    Args:
        hidden: [N, E].
        weight: [V, E], this rank's rows of the head.
        labels: [N] integers, counted from the first of these rows; or ELSEWHERE, or IGNORE_INDEX.
        piece_loss: The function of that name, or its compiled form.
        vocabulary: This rank's place among those that have parts of the vocabulary. None: one rank
            has all of it.
        needed: Which gradients to compute: by hidden, by weight.
        scores: A list that gets `token_scores` of each piece, [2, n]. None: they are not computed.
    Returns:
        The loss, its gradient by hidden, [N, E], and by the weight, [V, E] in float32 or float64.
        None if not needed.
    """
    dtype = autocast_dtype(hidden) or hidden.dtype
    wide = torch.promote_types(dtype, torch.float32)
    W = weight.to(dtype)
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
        # The next piece needs their memory.
        del logits, by_logits
    return loss, by_hidden, by_weight
