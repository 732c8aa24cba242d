"""Chunkwise form in plain PyTorch, forward and backward written out.

Derivation: docs/kernels.md.

Shapes: B batch, T time, N chunks, L chunk length, H state heads, G query heads per state head,
Hq = G H, R key features, D value width, P = R + D channels, M basis functions.

The three passes are those that a kernel for an accelerator runs. Each serves forward and backward:
    pass 1 (`_contract`)  a = pass1(q, k)   c = pass1(do, v)   reads a state of keys: M numbers
    pass 2 (`_expand`)    o = pass2(b, v)   dq = pass2(e, k)   reads it back with M weights
    pass 3 (`_adjoint`)   dv = pass3(b, do) dk = pass3(e, q)   is pass 2, transposed in time

Inside a chunk Lambda^(i-j) is split as E_i T_j with E_i = Lambda^(i-r), T_j = Lambda^(r-j) and r
mid-chunk. The state before a chunk is kept in the frame S = Lambda^(r+1) X, so that E applies once
to the sum of both parts.

Layout: heads come first, [H, B, N, ...], so that a product with a per-head table or with W is one
batched matmul over heads. Keys and values are transposed to [P, L]. Complex numbers are interleaved
(re, im), so that 2M real columns feed a real matmul and, viewed as M complex ones, take E in a
single multiplication.

If documents are packed (`Masks`), a state stops at the end of its document. Four masks of zeros and
ones say which scores count, which rows read the state before the chunk, which tokens reach the
state after it, and whether the state passes on.

The backward recomputes everything: only the inputs survive the forward.

If the tokens are a shard of longer sequences, `final_state` is the state that they alone leave, and
initial_state may be a function that waits for the state before them. It is called after everything
that needs no state. `leave` takes the gradient of that state by their outputs alone, and returns a
function that waits for the gradient of the state after them, which takes the place of d_final.

Conjugates are physical: below the dispatcher's Conjugate key, where AOTAutograd runs an op, a lazy
conjugate is silently dropped.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, conj_physical

from .chunkwise_layout import (
    Masks,
    Segment,
    Tables,
    load_columns,
    load_rows,
    load_state,
    make_tables,
    real_pairs,
    segments,
    store_columns,
    store_rows,
    store_state,
)

# The state before the tokens, [B, H, M, P, 2], or a function that waits for it; None means zeros.
Start = Tensor | Callable[[], Tensor] | None
# Sends a gradient [B, H, M, P, 2], and returns a function that waits for another one.
Exchange = Callable[[Tensor], Callable[[], Tensor]]


def scan_forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor, initial_state: Start, *,
    documents: Tensor | None = None, need_final: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Computes the scan.

    Args:
        q: [B, T, Hq, R].
        k: [B, T, H, R].
        v: [B, T, H, D].
        log_decay: theta, [H, M, 2].
        mixing: W, [H, 2M, 2M].
        initial_state: The state before the tokens, or a function that waits for it.
        documents: The document of each token, [B, T] int32, as in `interdomain_scan`, or None.
        need_final: False if no final state is wanted.

    Returns:
        o: [B, T, Hq, D] in v's dtype.
        final_state: [B, H, M, P, 2], or None.
        initial_state: The state before the tokens, or None.
    """
    B, T, H, R = k.shape
    # Everything that needs no state, so that an exchange with other ranks can go on meanwhile.
    weights = _bilinear(mixing)
    o = torch.empty(B, T, q.shape[2], v.shape[3], dtype=v.dtype, device=v.device)
    loaded = []
    for segment, tab, docs, z, local in _loaded((k, v), log_decay, documents):
        rows = load_rows(q, H, segment, log_decay.dtype)
        loaded.append(
            (segment, tab, docs, z, local, rows, _within(_scores(rows, z[..., :R, :], docs), tab))
        )

    # The states before the chunks, and the three factors of the output: pass 1, W, pass 2.
    initial_state = initial_state() if callable(initial_state) else initial_state
    X = load_state(initial_state, B, R + v.shape[3], log_decay)
    for segment, tab, docs, z, local, rows, a in loaded:
        S, X = _states(local, X, tab, docs)
        b = _scale(_contract(a, rows, S[..., :R, :], tab, docs) @ weights.mT, conj_physical(tab.E))
        out = _expand(
            _kernel(b, tab, rows.shape, docs), _reading(b, rows, docs), z[..., R:, :], S[..., R:, :]
        )
        store_rows(o, out, segment)
    return o, store_state(X) if need_final else None, initial_state


def scan_backward(
    d_o: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor,
    initial_state: Tensor | None, *,
    documents: Tensor | None = None, leave: Exchange | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Computes the gradients of the scan.

    Args:
        d_o: The gradient of o, [B, T, Hq, D].
        d_final: The gradient of the final state, or None.
        q: [B, T, Hq, R].
        k: [B, T, H, R].
        v: [B, T, H, D].
        log_decay: theta, [H, M, 2].
        mixing: W, [H, 2M, 2M].
        initial_state: The state before the tokens, or None. With `leave`, the state that entered
            the shard.
        documents: As in `scan_forward`.
        leave: The exchange with other ranks, or None.

    Returns:
        The gradients of q, k, v, log_decay, mixing and initial_state; None for a state that is not
        there.
    """
    (H, R), dtype = k.shape[2:], log_decay.dtype
    weights = _bilinear(mixing)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    d_weights = torch.zeros_like(weights)
    d_theta = log_decay.new_zeros(log_decay.shape[:2], dtype=dtype.to_complex())

    # The states before each segment, then the segments in reverse: first all that needs no costate.
    read = []
    for segment, tab, docs, z, S, _ in reversed(
        [*_forward((k, v), log_decay, initial_state, documents)]
    ):
        kT, vT, Sk, Sv = z[..., :R, :], z[..., R:, :], S[..., :R, :], S[..., R:, :]
        rows, d_rows = (load_rows(x, H, segment, dtype) for x in (q, d_o))
        scores_k, scores_v = _scores(rows, kT, docs), _scores(d_rows, vT, docs)
        a = _contract(_within(scores_k, tab), rows, Sk, tab, docs)
        c = _contract(_within(scores_v, tab), d_rows, Sv, tab, docs)
        b, e = (
            _scale(a @ weights.mT, conj_physical(tab.E)),
            _scale(c @ weights, conj_physical(tab.E)),
        )
        d_weights.baddbmm_(c.mT, a)
        del a, c

        kernel_b, kernel_e = _kernel(b, tab, d_rows.shape, docs), _kernel(e, tab, rows.shape, docs)
        inside = _decay_gradient_scores(scores_k, e, tab) + _decay_gradient_scores(scores_v, b, tab)
        b, e = _reading(b, d_rows, docs), _reading(e, rows, docs)
        sums = _outer(rows, e, d_rows, b)  # what the chunk adds to the costate
        read.append(
            (sums, tab, docs, segment, z, S, rows, d_rows, b, e, kernel_b, kernel_e, inside)
        )

    # Queries, while other ranks' gradients are on their way.
    G = _left(d_final, log_decay, read, leave)
    for (
        *_,
        segment,
        z,
        S,
        _,
        _,
        _,
        e,
        _,
        kernel_e,
        _,
    ) in read:
        store_rows(dq, _expand(kernel_e, e, z[..., :R, :], S[..., :R, :]), segment)

    # Keys and values, from the costates, and the decay.
    G = G()
    for sums, tab, docs, segment, z, S, rows, d_rows, b, e, kernel_b, kernel_e, inside in read:
        Z, G = _costates(sums, G, tab, docs)
        store_columns(dk, _adjoint(kernel_e, rows, Z[..., :R, :], tab, docs), segment)
        store_columns(dv, _adjoint(kernel_b, d_rows, Z[..., R:, :], tab, docs), segment)
        # 1 .. L for each of the G heads.
        position = tab.position.repeat(rows.shape[3] // segment.length)[:, None]
        weighted = _outer(position * rows, e, position * d_rows, b)
        d_theta += inside + _decay_gradient_states(z, S, Z, weighted, tab, docs)
    d_initial = None if initial_state is None else store_state(G)
    return dq, dk, dv, torch.view_as_real(d_theta), _bilinear_gradient(d_weights), d_initial


def linear_forward(
    z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Start, *,
    documents: Tensor | None = None, need_final: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Computes the linear scan: pass 2 with the same weights for every token.

    Args:
        z: [B, T, H, P].
        log_decay: theta, [H, M, 2].
        readout: w, [H, 2M].
        initial_state: As in `scan_forward`.
        documents: As in `scan_forward`.
        need_final: As in `scan_forward`.

    Returns:
        y: [B, T, H, P] in z's dtype.
        final_state: As in `scan_forward`.
        initial_state: As in `scan_forward`.
    """
    # Within chunks: a product by the kernel D.
    y = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    loaded = []
    for segment, tab, docs, zT, local in _loaded((z,), log_decay, documents):
        w, kernel = _linear_kernel(readout, tab)
        out = (
            zT.flatten(1, 3) @ kernel.mT
            if docs is None
            else zT @ (kernel[:, None, None] * docs.same).mT
        )
        loaded.append((segment, tab, docs, local, w, out))

    # From the states before the chunks.
    initial_state = initial_state() if callable(initial_state) else initial_state
    X = load_state(initial_state, z.shape[0], z.shape[3], log_decay)
    for segment, tab, docs, local, w, out in loaded:
        S, X = _states(local, X, tab, docs)
        if docs is None:
            out.baddbmm_(real_pairs(S).flatten(1, 3), real_pairs(w).mT)
        else:
            out += docs.reads * (real_pairs(S).flatten(1, 3) @ real_pairs(w).mT).view(out.shape)
        store_columns(y, out.view(*S.shape[:4], -1), segment)
    return y, store_state(X) if need_final else None, initial_state


def linear_backward(
    d_y: Tensor, d_final: Tensor | None, z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Tensor | None,
    *, documents: Tensor | None = None, leave: Exchange | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Computes the gradients of the linear scan.

    Args:
        d_y: The gradient of y, [B, T, H, P].
        d_final: The gradient of the final state, or None.
        z: [B, T, H, P].
        log_decay: theta, [H, M, 2].
        readout: w, [H, 2M].
        initial_state: As in `scan_backward`.
        documents: As in `scan_forward`.
        leave: As in `scan_backward`.

    Returns:
        The gradients of z, log_decay, readout and initial_state; None for a state that is not
        there.
    """
    dtype = log_decay.dtype
    dz = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    d_theta, d_w = (
        log_decay.new_zeros(log_decay.shape[:2], dtype=dtype.to_complex()) for _ in range(2)
    )
    w_conj = conj_physical(_complex(readout))[:, None, None, None]  # [H, 1, 1, 1, M]

    def per_chunk(x, like):
        return torch.view_as_complex(x.view(*like.shape, 2))

    # The states before each segment, then the segments in reverse: first all that needs no costate.
    read = []
    for segment, tab, docs, zT, S, _ in reversed(
        [*_forward((z,), log_decay, initial_state, documents)]
    ):
        dyT = load_columns((d_y,), segment, dtype)
        read_dy = (dyT if docs is None else docs.reads * dyT).flatten(1, 3)
        E_conj = real_pairs(conj_physical(tab.E))  # [H, L, 2M]
        sums = per_chunk(read_dy @ E_conj, S)
        read.append((w_conj * sums, tab, docs, segment, zT, S, dyT, read_dy, E_conj, sums))

    # What needs the costates: the inputs, the readout and the decay.
    G = _left(d_final, log_decay, read, leave)()
    for added, tab, docs, segment, zT, S, dyT, read_dy, E_conj, sums in read:
        w, kernel = _linear_kernel(readout, tab)
        flat_z, flat_dy = zT.flatten(1, 3), dyT.flatten(1, 3)  # [H, B N P, L]
        Z, G = _costates(added, G, tab, docs)
        # Scores meet only per-head weights here, so they are summed over batch and chunks before
        # anything else.
        if docs is None:
            out = (flat_dy @ kernel).baddbmm_(real_pairs(Z).flatten(1, 3), real_pairs(tab.T).mT)
            scores = (flat_dy.mT @ flat_z).tril_()  # [H, L, L]
        else:
            out = dyT @ (kernel[:, None, None] * docs.same)
            out += docs.writes * (real_pairs(Z).flatten(1, 3) @ real_pairs(tab.T).mT).view(zT.shape)
            scores = (docs.same * (dyT.mT @ zT)).sum((1, 2)).tril_()
        store_columns(dz, out.view(zT.shape), segment)
        c = torch.view_as_complex((scores @ real_pairs(tab.T)).unflatten(-1, (-1, 2)))
        d_w += conj_physical(tab.E * c).sum(1) + (sums * conj_physical(S)).sum((1, 2, 3))
        weighted = w_conj * per_chunk(read_dy @ (tab.position[:, None] * E_conj), S)
        d_theta += _decay_gradient_states(zT, S, Z, weighted, tab, docs)
        c = torch.view_as_complex((scores * tab.lag @ real_pairs(tab.T)).unflatten(-1, (-1, 2)))
        d_theta += (w * conj_physical(c)).sum(1)
    d_initial = None if initial_state is None else store_state(G)
    return dz, torch.view_as_real(d_theta), torch.cat((d_w.real, d_w.imag), dim=-1), d_initial


# The passes. Rows are [H, B, N, G L, d], columns [H, B, N, P, L], a, b, c, e [H, B N G L, 2M],
# states [H, B, N, P, M]. b and e arrive as conj(E b) and conj(E e): then Re(b^T x) is a real inner
# product of interleaved pairs.


def _scores(rows: Tensor, columns: Tensor, docs: Masks | None) -> Tensor:
    """tril(q k^T) per chunk, [H, B, N, G L, L]."""
    return _causal(rows @ columns, docs)


def _kernel(b: Tensor, tab: Tables, rows: torch.Size, docs: Masks | None) -> Tensor:
    """D_ij = tril(Re(b_i^T Lambda^(i-j))), [H, B, N, G L, L]."""
    return _causal((b @ real_pairs(tab.T).mT).view(*rows[:4], -1), docs)


def _causal(scores: Tensor, docs: Masks | None) -> Tensor:
    """Writes zeros above the diagonal and between documents, in place."""
    # tril_ writes zeros over what is above the diagonal: those of D hold positive powers of 1 /
    # Lambda.
    per_head = scores.unflatten(-2, (-1, scores.shape[-1])).tril_()
    if docs is not None:
        per_head.mul_(docs.same[:, :, :, None])
    return scores


def _reading(b: Tensor, rows: Tensor, docs: Masks | None) -> Tensor:
    """Rows of b [H, B N G L, 2M], zeros where they do not read the state before their chunk."""
    if docs is None:
        return b
    return (b.view(*rows.shape[:4], -1) * docs.of_rows(rows)).view(b.shape)


def _within(scores: Tensor, tab: Tables) -> Tensor:
    """Computes sum_j tril(q k^T)_ij T_j, which the tokens of a chunk add to a."""
    return scores.flatten(1, 3) @ real_pairs(tab.T)


def _contract(a: Tensor, rows: Tensor, S: Tensor, tab: Tables, docs: Masks | None) -> Tensor:
    """Pass 1: a_i = X^k_i q_i = E_i (`_within` + S q_i), in place."""
    rows = rows if docs is None else rows * docs.of_rows(rows)
    a.view(-1, *rows.shape[-2:-1], a.shape[-1]).baddbmm_(
        rows.flatten(0, 2), real_pairs(S).flatten(0, 2)
    )
    return _scale(a, tab.E)


def _expand(kernel: Tensor, b: Tensor, columns: Tensor, S: Tensor) -> Tensor:
    """Pass 2: o_i = Re(b_i^T X^v_i) = sum_j D_ij v_j + Re((E b)_i^T S)."""
    out = kernel.flatten(0, 2) @ columns.mT.flatten(0, 2)
    out.baddbmm_(b.view(out.shape[0], -1, b.shape[-1]), real_pairs(S).flatten(0, 2).mT)
    return out.view(*kernel.shape[:-1], -1)


def _adjoint(kernel: Tensor, rows: Tensor, Z: Tensor, tab: Tables, docs: Masks | None) -> Tensor:
    """Pass 3: dv_j = sum_(i >= j) D_ij do_i + Re(T_j^T Z), as columns [H, B, N, D, L]."""
    out = real_pairs(Z).flatten(1, 3) @ real_pairs(tab.T).mT
    if docs is not None:
        out = out.view(*Z.shape[:4], -1) * docs.writes
    out = out.view(-1, rows.shape[-1], kernel.shape[-1])
    return out.baddbmm_(rows.flatten(0, 2).mT, kernel.flatten(0, 2)).view(
        *rows.shape[:3], *out.shape[1:]
    )


def _outer(rows: Tensor, e: Tensor, d_rows: Tensor, b: Tensor) -> Tensor:
    """Computes sum_i q_i conj(E e)_i^T and below it sum_i do_i conj(E b)_i^T, per chunk.

    The result is [H, B, N, P, M] complex.
    """
    sums = [x.mT @ y.view(*x.shape[:4], -1) for x, y in ((rows, e), (d_rows, b))]
    return torch.view_as_complex(torch.cat(sums, dim=-2).unflatten(-1, (-1, 2)))


def _loaded(
    parts: tuple[Tensor, ...], log_decay: Tensor, documents: Tensor | None,
) -> Iterator[tuple[Segment, Tables, Masks | None, Tensor, Tensor]]:  # fmt: skip
    """Yields the segments in order, with everything of them that needs no state.

    Args:
        parts: k and v, or z.
        log_decay: theta, [H, M, 2].
        documents: As in `scan_forward`.

    Returns:
        For each segment: the segment, its tables, its masks, the columns of `parts`, and sum_j T_j
        z_j of its chunks.
    """
    for segment in segments(parts[0].shape[1]):
        tab = make_tables(log_decay, segment.length)
        z = load_columns(parts, segment, log_decay.dtype)
        docs = Masks.of(documents, segment, log_decay.dtype)
        local = (z if docs is None else z * docs.writes).flatten(1, 3) @ real_pairs(tab.T)
        yield segment, tab, docs, z, torch.view_as_complex(local.view(*z.shape[:4], -1, 2))


def _forward(
    parts: tuple[Tensor, ...], log_decay: Tensor, initial_state: Tensor | None, documents: Tensor | None,
) -> Iterator[tuple[Segment, Tables, Masks | None, Tensor, Tensor, Tensor]]:  # fmt: skip
    """Yields the segments in order, with their states.

    Args:
        parts: k and v, or z.
        log_decay: theta, [H, M, 2].
        initial_state: The state before the tokens, or None.
        documents: As in `scan_forward`.

    Returns:
        For each segment: the segment, its tables, its masks, the columns of `parts`, the states
        before its chunks, and the state after it.
    """
    X = load_state(initial_state, parts[0].shape[0], sum(x.shape[3] for x in parts), log_decay)
    for segment, tab, docs, z, local in _loaded(parts, log_decay, documents):
        S, X = _states(local, X, tab, docs)
        yield segment, tab, docs, z, S, X


def final_state(
    parts: tuple[Tensor, ...], log_decay: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Computes the state that these tokens alone leave.

    Args:
        parts: k and v, or z.
        log_decay: theta, [H, M, 2].
        documents: As in `scan_forward`.

    Returns:
        The state, [B, H, M, P, 2], and None: the form in Triton also returns the states of its
        segments.
    """
    *_, (*_, X) = _forward(parts, log_decay, None, documents)
    return store_state(X), None


def _left(
    d_final: Tensor | None, log_decay: Tensor, read: list[tuple], leave: Exchange | None
) -> Callable[[], Tensor]:
    """Starts the exchange of gradients.

    Args:
        d_final: The gradient of the final state, or None.
        log_decay: theta, [H, M, 2].
        read: For each segment from the last to the first: the sums that its chunks add to the
            costate, its tables, its masks, and more.
        leave: The exchange, or None.

    Returns:
        A function that waits, and gives the conjugate G of the costate after the last token: dL =
        Re(conj(G) dX).
    """
    (_, B, _, P, _), wait = read[0][0].shape, lambda: d_final
    if leave is not None:
        costate = load_state(None, B, P, log_decay)  # of this shard alone
        for sums, tab, docs, *_ in read:
            _, costate = _costates(sums, costate, tab, docs)
        wait = leave(store_state(costate))
    return lambda: load_state(wait(), B, P, log_decay)


def _states(local: Tensor, X: Tensor, tab: Tables, docs: Masks | None) -> tuple[Tensor, Tensor]:
    """Computes the states before every chunk, and the state after the last one.

    S' = Lambda^L (S + local) with local = sum_j T_j z_j, and X' = Lambda^(L-1-r) of the same sum.

    Args:
        local: sum_j T_j z_j of each chunk, [H, B, N, P, M].
        X: The state before the first chunk.
        tab: Tables.
        docs: Masks, or None.

    Returns:
        The states in the frame S = Lambda^(r+1) X, and X itself after the last chunk.
    """
    S = torch.empty_like(local)
    current = tab.enter * X
    for n in range(local.shape[2]):
        S[:, :, n] = current
        total = (current if docs is None else docs.keeps[:, :, n] * current) + local[:, :, n]
        current = tab.carry * total
    return S, tab.leave * total


def _costates(sums: Tensor, G: Tensor, tab: Tables, docs: Masks | None) -> tuple[Tensor, Tensor]:
    """Computes `_states` in reverse, on conjugates.

    Z = conj(Lambda^(L-1-r)) G at the end, and Z' = conj(Lambda^L) (Z + sums).

    Args:
        sums: What each chunk adds to the costate, [H, B, N, P, M].
        G: The conjugate of the costate after the last chunk.
        tab: Tables.
        docs: Masks, or None.

    Returns:
        The costates after every chunk in the frame Z, and G before the first chunk.
    """
    Z = torch.empty_like(sums)
    enter, carry, leave = (conj_physical(x) for x in (tab.leave, tab.carry, tab.enter))
    current = enter * G
    for n in reversed(range(sums.shape[2])):
        Z[:, :, n] = current
        total = (current if docs is None else docs.keeps[:, :, n] * current) + sums[:, :, n]
        current = carry * total
    return Z, leave * total


def _decay_gradient_scores(scores: Tensor, b: Tensor, tab: Tables) -> Tensor:
    """Computes the gradient of theta within chunks, conjugated. Overwrites scores.

    It is sum_j T_j sum_i (i - j) tril(q k^T)_ij (E b)_i.
    """
    scores.unflatten(-2, (-1, tab.lag.shape[-1])).mul_(tab.lag)
    return _sum_over_tokens(tab.T, scores.flatten(1, 3).mT @ b)


def _decay_gradient_states(
    z: Tensor, S: Tensor, Z: Tensor, weighted: Tensor, tab: Tables, docs: Masks | None
) -> Tensor:
    """Computes the gradient of theta across chunks, conjugated.

    One part reads the state, sum_i (i + 1) (E b)_i (S do_i). The other part carries it over the
    chunk, Z (L S + sum_j (L - 1 - j) T_j z_j). No weight exceeds L, whatever T is.
    """
    L = z.shape[-1]
    z, kept = (z, L) if docs is None else (z * docs.writes, L * docs.keeps)
    written = _sum_over_tokens(
        (L - tab.position)[:, None] * tab.T, z.flatten(1, 3).mT @ real_pairs(Z).flatten(1, 3)
    )
    return ((weighted + kept * Z) * conj_physical(S)).sum((1, 2, 3)) + written


def _sum_over_tokens(T: Tensor, sums: Tensor) -> Tensor:
    """Computes sum_j conj(T_j) x_j, [H, M].

    The pairs x, [H, L, 2M], are summed over everything else.
    """
    return (conj_physical(T) * torch.view_as_complex(sums.unflatten(-1, (-1, 2)))).sum(1)


def _linear_kernel(readout: Tensor, tab: Tables) -> tuple[Tensor, Tensor]:
    """conj(E w) [H, L, M] complex, and D_ij = tril(Re(w^T Lambda^(i-j))) [H, L, L]."""
    w = conj_physical(tab.E * _complex(readout)[:, None])
    return w, (real_pairs(w) @ real_pairs(tab.T).mT).tril_()


def _bilinear(mixing: Tensor) -> Tensor:
    """Returns J W on interleaved pairs, J = diag(1, -1).

    conj(b) = J W a and conj(e) = (J W)^T c: one matrix for both ways.
    """
    H, M = mixing.shape[0], mixing.shape[1] // 2
    w = torch.cat((mixing[:, :M], -mixing[:, M:]), dim=1).view(H, 2, M, 2, M)
    return w.permute(0, 2, 1, 4, 3).reshape(H, 2 * M, 2 * M)


def _bilinear_gradient(d_weights: Tensor) -> Tensor:
    """Returns the gradient of W, [H, 2M, 2M], from that of `_bilinear`."""
    H, M = d_weights.shape[0], d_weights.shape[1] // 2
    upper, lower = d_weights.view(H, M, 2, M, 2).permute(2, 0, 1, 4, 3).reshape(2, H, M, 2 * M)
    return torch.cat((upper, -lower), dim=1)


def _complex(readout: Tensor) -> Tensor:
    """Returns [H, 2M] as (Re | Im) as complex numbers, [H, M]."""
    return torch.complex(*readout.unflatten(1, (2, -1)).unbind(1))


def _scale(a: Tensor, E: Tensor) -> Tensor:
    """Multiplies every row of [H, B N G L, 2M] by its E, in place."""
    H, L, M = E.shape
    torch.view_as_complex(a.view(H, -1, L, M, 2)).mul_(E[:, None])
    return a
