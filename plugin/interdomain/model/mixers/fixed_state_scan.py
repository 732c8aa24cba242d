"""The recurrence of the fixed-state baselines in plain PyTorch: a matrix state that decays, is corrected, and is added to.

    S_t = A_t S_{t-1} + k_t u_t^T,   o_t = S_t^T q_t,   A_t = diag(exp(log_decay_t))
    u_t = v_t                                           gated linear attention (Yang et al., 2024, eq. 3), Mamba-2
    u_t = beta_t (v_t - (A_t S_{t-1})^T k_t)            the delta rules (Yang et al., 2024, eq. 5; 2025, eq. 10)

Logs of decays are only ever added, never subtracted: no exponent is above 0 however strong the gates are, and -inf at a
document's first token is an exact reset.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from interdomain.scan.plain import in_order, is_exporting
from interdomain.scan.tables import CHUNK

# Shapes: B batch, T time, H heads, G heads of queries and keys (H, or 1 for all), K key width, V value width, L chunk length,
#         N chunks, D 1 or K.


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
    """All tokens of the recurrence above, chunk by chunk.

    Args:
        q, k: [B, T, G, K]; v: [B, T, H, V].
        log_decay: at most 0, [B, T, H] or per channel of the keys [B, T, H, K]; None for none.
        beta: of the delta rule, [B, T, H]; None for u = v.
        initial_state: [B, H, K, V], float32 or float64; None for zeros.
        documents: [B, T] integers, never falling along T: a state stops at the end of its document. 0 continues initial_state.
    Returns: (o [B, T, H, V] in v's dtype, S after the last token), computed in float32 (float64). Differentiable.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    B, T, H, V = v.shape
    if initial_state is None:
        initial_state = v.new_zeros(B, H, k.shape[3], V, dtype=dtype)
    with torch.autocast(v.device.type, enabled=False):
        decay = v.new_zeros(B, T, 1, dtype=dtype) if log_decay is None else log_decay.to(dtype)
        decay = decay[..., None] if decay.ndim == 3 else decay
        if documents is not None:
            decay = decay.masked_fill(first_tokens(documents)[..., None, None], -torch.inf)
        beta = None if beta is None else beta.to(dtype)[..., None]
        run = _one_token if T == 1 else _by_chunks
        o, state = run(q.to(dtype), k.to(dtype), v.to(dtype), decay, beta, initial_state)
        return o.to(v.dtype), state


def l2_normed(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension, as flash-linear-attention has queries and keys of the delta rules."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def first_tokens(documents: Tensor) -> Tensor:
    """Mask of the tokens that are the first of their document, [B, T] bool; what came before the first token is of
    document 0."""
    return documents != F.pad(documents, (1, 0))[:, :-1]


def _one_token(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, S: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: as the recurrence is written."""
    S = decay[:, 0, :, :, None].exp() * S
    k = k[:, 0, :, :, None]
    u = v[:, 0]
    if beta is not None:
        u = beta[:, 0] * (u - (k * S).sum(-2))
    S = S + k * u[:, :, None]
    return (q[:, 0, :, None] @ S).transpose(1, 2), S


def _by_chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, S: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence by chunks (Yang et al., 2024, section 4.1; the delta rule in its WY form, Yang et al., 2024, section 3.2).

    decay: [B, T, 1 or H, D]; beta: [B, T, H, 1].
    """
    B, T, H, V = v.shape
    # An exported graph goes token by token: ONNX has no triangular solve, and T is a symbol there.
    L = 1 if is_exporting() else min(CHUNK, 1 << (T - 1).bit_length())

    def chunked(x: Tensor) -> Tensor:  # [B, T, H, D] -> [N, B, H, L, D]; padding changes no state
        return (
            F.pad(x, (0, 0, 0, 0, 0, -T % L))
            .unflatten(1, (-1, L))
            .permute(1, 0, 3, 2, 4)
            .contiguous()
        )

    q = chunked(q)
    k = chunked(k)
    v = chunked(v)
    decay = chunked(decay)
    from_start = decay.cumsum(-2)  # of the chunk to each token, which is included
    to_end = (
        F.pad(decay[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)
    )  # from each token, which is not
    kept = from_start[..., -1, :, None].exp()
    seen = q * from_start.exp()
    written = (k * to_end.exp()).mT
    scores = _decayed_scores(q, k, decay)
    erased = []  # of the delta rule: what a chunk reads of its first state
    if beta is not None:
        # u_i + beta_i sum_{j<i} (k_i . k_j decayed) u_j = beta_i (v_i - what k_i reads of the chunk's first state)
        beta = chunked(beta)
        right = torch.cat([v, (k * from_start.exp()).expand(*v.shape[:-1], -1)], dim=-1)
        solved = beta * right
        if L > 1:
            system = beta * _decayed_scores(k, k, decay).tril(-1)
            solved = torch.linalg.solve_triangular(system, solved, upper=False, unitriangular=True)
        v, *erased = solved.split([V, k.shape[-1]], dim=-1)

    def chunk(S: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        seen, scores, kept, written, u, *erased = inputs
        u = u - erased[0] @ S if erased else u
        return kept * S + written @ u, seen @ S + scores @ u

    S, o = in_order(chunk, S, [seen, scores, kept, written, v, *erased])  # o: [N, B, H, L, V]
    return o.permute(1, 0, 3, 2, 4).reshape(B, -1, H, V)[:, :T], S


def _decayed_scores(q: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """q_i . k_j, each channel decayed over the tokens j + 1 to i, and 0 for j > i: [..., L, L] of [..., L, K].

    One decay for all channels is a factor of the product. With one per channel, blocks of a token are joined in pairs until
    they are the chunk: the later block's queries and the earlier one's keys are both decayed towards the border between them.
    """
    if decay.shape[-1] == 1:
        between = decay.expand(*decay.shape[:-1], decay.shape[-2]).tril(-1).cumsum(-2)
        return (q @ k.mT) * between.exp().tril()
    scores = (q * k).sum(-1)[..., None, None]
    before = decay
    after = torch.zeros_like(decay)
    h = 1  # tokens of a block
    while h < q.shape[-2]:
        later = q.unflatten(-2, (-1, 2, h))[..., 1, :, :]
        earlier = k.unflatten(-2, (-1, 2, h))[..., 0, :, :]
        b1, b2 = before.unflatten(-2, (-1, 2, h)).unbind(-3)
        a1, a2 = after.unflatten(-2, (-1, 2, h)).unbind(-3)
        first, second = scores.unflatten(-3, (-1, 2)).unbind(-3)
        across = (later * b2.exp()) @ (earlier * a1.exp()).mT
        above = torch.cat([first, torch.zeros_like(first)], dim=-1)
        scores = torch.cat([above, torch.cat([across, second], dim=-1)], dim=-2)
        before = torch.cat([b1, b2 + b1[..., -1:, :]], dim=-2).flatten(-3, -2)
        after = torch.cat([a1 + b2[..., -1:, :], a2], dim=-2).flatten(-3, -2)
        h *= 2
    return scores.squeeze(-3)
