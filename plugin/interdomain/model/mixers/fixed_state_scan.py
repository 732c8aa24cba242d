"""The recurrence of the fixed-state baselines in plain PyTorch.

    S_t = A_t S_{t-1} + k_t u_t^T,   o_t = S_t^T q_t,   A_t = diag(exp(log_decay_t))
    u_t = v_t                                    gated linear attention (Yang et al., 2024, eq. 3)
                                                 and Mamba-2
    u_t = beta_t (v_t - (A_t S_{t-1})^T k_t)     the delta rules (Yang et al., 2024, eq. 5; 2025,
                                                 eq. 10)

Logs of decays are only ever added, never subtracted. No exponent is above 0 then, however strong
the gates are, and a decay of -inf at a document's first token is an exact reset.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from interdomain.scan.plain import in_order, is_exporting
from interdomain.scan.tables import CHUNK

# Shapes: B batch, T tokens, H heads, G heads of queries and keys (H, or 1 for all), K key width,
#         V value width, L tokens of a chunk, N chunks, D = K for a decay per channel, 1 per head.


def plain_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the recurrence above for all tokens, in float32 (float64). It is differentiable.

    Args:
        q: Queries, [B, T, G, K].
        k: Keys, [B, T, G, K].
        v: Values, [B, T, H, V].
        log_decay: At most 0, per head [B, T, H] or per channel of the keys [B, T, H, K]. None means
            no decay.
        beta: Step size of the delta rule, [B, T, H]. None means u = v.
        initial_state: S before the first token, [B, H, K, V], float32 or float64. None means zeros.
        documents: Each token's document, [B, T] integers that never fall along T. A state stops at
            the end of its document. Document 0 continues from `initial_state`.
    Returns:
        o [B, T, H, V] in v's dtype, and S after the last token.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    B, T, H, V = v.shape
    S = initial_state
    if S is None:
        S = v.new_zeros(B, H, k.shape[3], V, dtype=dtype)
    with torch.autocast(v.device.type, enabled=False):
        # One form for every kind of decay: per token, head and channel, where a single head or
        # channel stands for all. Without decay the logs are 0.
        decay = v.new_zeros(B, T, 1, dtype=dtype)
        if log_decay is not None:
            decay = log_decay.to(dtype)
        if decay.ndim == 3:
            decay = decay[..., None]  # [B, T, H or 1, D]
        # exp(-inf) = 0: the first token of a document reads nothing of the documents before it.
        if documents is not None:
            decay = decay.masked_fill(first_tokens(documents)[..., None, None], -torch.inf)
        if beta is not None:
            beta = beta.to(dtype)[..., None]  # [B, T, H, 1]
        compute = _one_token if T == 1 else _by_chunks
        o, S = compute(
            q.to(dtype),
            k.to(dtype),
            v.to(dtype),
            decay,
            beta,
            S,
        )
        return o.to(v.dtype), S


def l2_normed(x: Tensor) -> Tensor:
    """Returns x / sqrt(sum x^2 + 1e-6) over the last dimension, as flash-linear-attention does it.

    The delta rules normalise queries and keys so.
    """
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def first_tokens(documents: Tensor) -> Tensor:
    """Returns the mask of each document's first token, [B, T] bool; document 0 began earlier."""
    return documents != F.pad(documents, (1, 0))[:, :-1]


def _one_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    S: Tensor,
) -> tuple[Tensor, Tensor]:
    """Computes a single token, T = 1, as the recurrence is written.

    Args:
        q: [B, 1, G, K].
        k: [B, 1, G, K].
        v: [B, 1, H, V].
        decay: log A, [B, 1, H or 1, D].
        beta: [B, 1, H, 1]. None means u = v.
        S: The state before the token, [B, H, K, V].
    Returns:
        o [B, 1, H, V], and the state after the token.
    """
    S = decay[:, 0, :, :, None].exp() * S
    k = k[:, 0, :, :, None]  # [B, G, K, 1]
    u = v[:, 0]  # [B, H, V]
    if beta is not None:
        read = (k * S).sum(-2)
        u = beta[:, 0] * (u - read)
    S = S + k * u[:, :, None]
    o = q[:, 0, :, None] @ S  # [B, H, 1, V]
    return o.transpose(1, 2), S


def _by_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    S: Tensor,
) -> tuple[Tensor, Tensor]:
    """Computes all tokens chunk by chunk (Yang et al., 2024, section 4.1).

    The delta rule has its WY form (Yang et al., 2024, DeltaNet, section 3.2).

    Args:
        q: [B, T, G, K].
        k: [B, T, G, K].
        v: [B, T, H, V].
        decay: log A_t, [B, T, H or 1, D].
        beta: [B, T, H, 1]. None means u = v.
        S: The state before the first token, [B, H, K, V].
    Returns:
        o [B, T, H, V], and the state after the last token.
    """
    B, T, H, V = v.shape
    # An exported graph goes token by token: ONNX has no triangular solve, and T is a symbol there.
    L = 1 if is_exporting() else min(CHUNK, 1 << (T - 1).bit_length())

    def chunked(x: Tensor) -> Tensor:  # [B, T, H, D] -> [N, B, H, L, D]
        x = F.pad(x, (0, 0, 0, 0, 0, -T % L))  # tokens of zeros change no state
        return x.unflatten(1, (-1, L)).permute(1, 0, 3, 2, 4).contiguous()

    q = chunked(q)
    k = chunked(k)
    v = chunked(v)
    decay = chunked(decay)

    # Decays from the chunk's start up to each token, and from after each token to the chunk's end.
    from_start = decay.cumsum(-2)
    after = F.pad(decay[..., 1:, :], (0, 0, 0, 1))
    to_end = after.flip(-2).cumsum(-2).flip(-2)
    through = from_start[..., -1, :, None].exp()  # the whole chunk's, [N, B, H, D, 1]

    # What a token reads of the chunk's first state, what it leaves in the chunk's last state, and
    # what it reads of the chunk's tokens up to itself.
    read = q * from_start.exp()
    written = (k * to_end.exp()).mT
    scores = _decayed_scores(q, k, decay)

    # The delta rule's u depends on the u of the tokens before it in the chunk:
    #   u_i + beta_i sum_{j<i} (k_i . k_j, decayed) u_j = beta_i (v_i - what k_i reads of the state)
    # Solved once for v and for what is read; the state itself is known chunk by chunk.
    erased = []
    if beta is not None:
        beta = chunked(beta)
        read_by_keys = (k * from_start.exp()).expand(*v.shape[:-1], -1)
        solved = beta * torch.cat([v, read_by_keys], dim=-1)
        if L > 1:
            system = beta * _decayed_scores(k, k, decay).tril(-1)
            solved = torch.linalg.solve_triangular(system, solved, upper=False, unitriangular=True)
        v, *erased = solved.split([V, k.shape[-1]], dim=-1)

    def one_chunk(S: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        read, scores, through, written, u, *erased = inputs
        if erased:
            u = u - erased[0] @ S
        return through * S + written @ u, read @ S + scores @ u

    S, o = in_order(one_chunk, S, [read, scores, through, written, v, *erased])
    o = o.permute(1, 0, 3, 2, 4).reshape(B, -1, H, V)  # [N, B, H, L, V] -> [B, N L, H, V]
    return o[:, :T], S


def _decayed_scores(
    q: Tensor,
    k: Tensor,
    decay: Tensor,
) -> Tensor:
    """Returns q_i . k_j with each channel decayed over the tokens j + 1 to i, and 0 for j > i.

    A decay for all channels is a factor of the product. With a decay per channel, blocks of one
    token are joined in pairs until they are the chunk. The later block's queries and the earlier
    block's keys are both decayed towards the border between them.

    Args:
        q: [..., L, K].
        k: [..., L, K].
        decay: [..., L, D].
    Returns:
        [..., L, L].
    """
    if decay.shape[-1] == 1:
        # Entry (i, j) of the square matrix becomes the sum of the log-decays of tokens j + 1 to i.
        square = decay.expand(*decay.shape[:-1], decay.shape[-2])
        between = square.tril(-1).cumsum(-2)
        return (q @ k.mT) * between.exp().tril()

    # Blocks of h tokens: scores within each, [..., L / h, h, h], and each token's decay from the
    # block's start up to it (to_token) and from after it to the block's end (to_end), [..., L, K].
    h = 1
    scores = (q * k).sum(-1)[..., None, None]
    to_token = decay
    to_end = torch.zeros_like(decay)
    while h < q.shape[-2]:
        # Split into pairs of blocks, [..., L / 2h, h, K] each.
        later_q = q.unflatten(-2, (-1, 2, h))[..., 1, :, :]
        earlier_k = k.unflatten(-2, (-1, 2, h))[..., 0, :, :]
        earlier_to_token, later_to_token = to_token.unflatten(-2, (-1, 2, h)).unbind(-3)
        earlier_to_end, later_to_end = to_end.unflatten(-2, (-1, 2, h)).unbind(-3)
        earlier_scores, later_scores = scores.unflatten(-3, (-1, 2)).unbind(-3)

        # Scores of the joined block: [[earlier, 0], [across, later]].
        queries_at_border = later_q * later_to_token.exp()
        keys_at_border = earlier_k * earlier_to_end.exp()
        across = queries_at_border @ keys_at_border.mT
        upper = torch.cat([earlier_scores, torch.zeros_like(earlier_scores)], dim=-1)
        lower = torch.cat([across, later_scores], dim=-1)
        scores = torch.cat([upper, lower], dim=-2)

        # Decays of the joined block: the later tokens' begin earlier, the earlier tokens' end
        # later.
        later_end = later_to_token[..., -1:, :]
        later_to_token = later_to_token + earlier_to_token[..., -1:, :]
        earlier_to_end = earlier_to_end + later_end
        to_token = torch.cat([earlier_to_token, later_to_token], dim=-2).flatten(-3, -2)
        to_end = torch.cat([earlier_to_end, later_to_end], dim=-2).flatten(-3, -2)
        h *= 2
    return scores.squeeze(-3)
