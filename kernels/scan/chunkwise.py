"""Chunkwise form in plain PyTorch, forward and backward written out (derivation in docs/kernels.md).

Shapes: B batch, T time, N chunks, L chunk length, H state heads, G query heads per state head, Hq = G H,
R key features, D value width, P = R + D channels, M basis functions.

The three passes are the ones that a kernel for an accelerator would run, and each serves forward and backward:
    pass 1 (`_contract`)  a = pass1(q, k)    c = pass1(do, v)     read a state of keys: M numbers per row
    pass 2 (`_expand`)    o = pass2(b, v)    dq = pass2(e, k)     read it back with M weights per row
    pass 3 (`_adjoint`)   dv = pass3(b, do)  dk = pass3(e, q)     pass 2 transposed in time
Inside a chunk Lambda^(i-j) is split as E_i T_j with E_i = Lambda^(i-r), T_j = Lambda^(r-j) and r mid-chunk; the state
before a chunk is kept in the frame S = Lambda^(r+1) X, so that E applies once to the sum of both parts.

Layout: heads first, [H, B, N, ...], so that a product with a per-head table or with W is one batched matmul over heads;
keys and values transposed to [P, L]; complex numbers interleaved (re, im), so that 2M real columns feed a real matmul
and, viewed as M complex ones, take E in a single multiplication.
Where documents are packed (`Masks`), a state stops at the end of its document: four masks of zeros and ones say which
scores count, which rows read the state before the chunk, which tokens reach the one after it, and whether it passes on.
The backward recomputes everything: only the inputs survive the forward.
Where the tokens are a shard of longer sequences, `final_state` is what they alone leave, and initial_state may be a function
that waits for the state before them: it is called after what needs no state. `leave` takes the gradient of that state by their
outputs alone, and returns a function that waits for the gradient of the state after them, which stands for d_final.
Conjugates are physical: below the dispatcher's Conjugate key, where AOTAutograd runs an op, a lazy one is silently dropped.
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

Start = Tensor | Callable[[], Tensor] | None  # [B, H, M, P, 2]
Exchange = Callable[[Tensor], Callable[[], Tensor]]  # likewise, both ways


def scan_forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor, initial_state: Start, *,
    documents: Tensor | None = None, need_final: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Returns (o [B, T, Hq, D] in v's dtype, final_state [B, H, M, P, 2] or None, the initial state, likewise).
    documents: [B, T] int32, as in `interdomain_scan`."""
    B, T, H, R = k.shape
    weights = _bilinear(mixing)
    o = torch.empty(B, T, q.shape[2], v.shape[3], dtype=v.dtype, device=v.device)
    loaded = []
    for segment, tab, docs, z, local in _loaded((k, v), log_decay, documents):
        rows = load_rows(q, H, segment, log_decay.dtype)
        loaded.append(
            (segment, tab, docs, z, local, rows, _within(_scores(rows, z[..., :R, :], docs), tab))
        )
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
    """Gradients of (q, k, v, log_decay, mixing, initial_state), None for a state that is not there.
    With `leave`, initial_state is the state that entered the shard."""
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
    ) in read:  # while other ranks' gradients are on their way
        store_rows(dq, _expand(kernel_e, e, z[..., :R, :], S[..., :R, :]), segment)
    G = G()
    for sums, tab, docs, segment, z, S, rows, d_rows, b, e, kernel_b, kernel_e, inside in read:
        Z, G = _costates(sums, G, tab, docs)
        store_columns(dk, _adjoint(kernel_e, rows, Z[..., :R, :], tab, docs), segment)
        store_columns(dv, _adjoint(kernel_b, d_rows, Z[..., R:, :], tab, docs), segment)
        position = tab.position.repeat(rows.shape[3] // segment.length)[
            :, None
        ]  # 1 .. L for each of the G heads
        weighted = _outer(position * rows, e, position * d_rows, b)
        d_theta += inside + _decay_gradient_states(z, S, Z, weighted, tab, docs)
    d_initial = None if initial_state is None else store_state(G)
    return dq, dk, dv, torch.view_as_real(d_theta), _bilinear_gradient(d_weights), d_initial


def linear_forward(
    z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Start, *,
    documents: Tensor | None = None, need_final: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Pass 2 with the same weights for every token. Returns (y [B, T, H, P] in z's dtype, both states as above)."""
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
    """Gradients of (z, log_decay, readout, initial_state), None as above."""
    dtype = log_decay.dtype
    dz = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    d_theta, d_w = (
        log_decay.new_zeros(log_decay.shape[:2], dtype=dtype.to_complex()) for _ in range(2)
    )
    w_conj = conj_physical(_complex(readout))[:, None, None, None]  # [H, 1, 1, 1, M]

    def per_chunk(x, like):
        return torch.view_as_complex(x.view(*like.shape, 2))

    read = []
    for segment, tab, docs, zT, S, _ in reversed(
        [*_forward((z,), log_decay, initial_state, documents)]
    ):
        dyT = load_columns((d_y,), segment, dtype)
        read_dy = (dyT if docs is None else docs.reads * dyT).flatten(1, 3)
        E_conj = real_pairs(conj_physical(tab.E))  # [H, L, 2M]
        sums = per_chunk(read_dy @ E_conj, S)
        read.append((w_conj * sums, tab, docs, segment, zT, S, dyT, read_dy, E_conj, sums))

    G = _left(d_final, log_decay, read, leave)()
    for added, tab, docs, segment, zT, S, dyT, read_dy, E_conj, sums in read:
        w, kernel = _linear_kernel(readout, tab)
        flat_z, flat_dy = zT.flatten(1, 3), dyT.flatten(1, 3)  # [H, B N P, L]
        Z, G = _costates(added, G, tab, docs)
        # Scores meet only per-head weights here, so they are summed over batch and chunks before anything else.
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


# The passes. Rows are [H, B, N, G L, d], columns [H, B, N, P, L], a, b, c, e [H, B N G L, 2M], states [H, B, N, P, M].
# b and e arrive as conj(E b) and conj(E e): then Re(b^T x) is a real inner product of interleaved pairs.


def _scores(rows: Tensor, columns: Tensor, docs: Masks | None) -> Tensor:
    """tril(q k^T) per chunk, [H, B, N, G L, L]."""
    return _causal(rows @ columns, docs)


def _kernel(b: Tensor, tab: Tables, rows: torch.Size, docs: Masks | None) -> Tensor:
    """D_ij = tril(Re(b_i^T Lambda^(i-j))), [H, B, N, G L, L]."""
    return _causal((b @ real_pairs(tab.T).mT).view(*rows[:4], -1), docs)


def _causal(scores: Tensor, docs: Masks | None) -> Tensor:
    """Zeros above the diagonal and between documents, in place."""
    # tril_ writes zeros over what is above the diagonal: those of D hold positive powers of 1 / Lambda.
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
    """sum_j tril(q k^T)_ij T_j, what the tokens of a chunk add to a."""
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
    """sum_i q_i conj(E e)_i^T and below it sum_i do_i conj(E b)_i^T, per chunk, [H, B, N, P, M] complex."""
    sums = [x.mT @ y.view(*x.shape[:4], -1) for x, y in ((rows, e), (d_rows, b))]
    return torch.view_as_complex(torch.cat(sums, dim=-2).unflatten(-1, (-1, 2)))


def _loaded(
    parts: tuple[Tensor, ...], log_decay: Tensor, documents: Tensor | None,
) -> Iterator[tuple[Segment, Tables, Masks | None, Tensor, Tensor]]:  # fmt: skip
    """Segments in order, each with its tables, masks, columns of `parts`, and sum_j T_j z_j of its chunks."""
    for segment in segments(parts[0].shape[1]):
        tab = make_tables(log_decay, segment.length)
        z = load_columns(parts, segment, log_decay.dtype)
        docs = Masks.of(documents, segment, log_decay.dtype)
        local = (z if docs is None else z * docs.writes).flatten(1, 3) @ real_pairs(tab.T)
        yield segment, tab, docs, z, torch.view_as_complex(local.view(*z.shape[:4], -1, 2))


def _forward(
    parts: tuple[Tensor, ...], log_decay: Tensor, initial_state: Tensor | None, documents: Tensor | None,
) -> Iterator[tuple[Segment, Tables, Masks | None, Tensor, Tensor, Tensor]]:  # fmt: skip
    """Segments in order, each with its tables, masks, columns of `parts`, states before its chunks and the state after it."""
    X = load_state(initial_state, parts[0].shape[0], sum(x.shape[3] for x in parts), log_decay)
    for segment, tab, docs, z, local in _loaded(parts, log_decay, documents):
        S, X = _states(local, X, tab, docs)
        yield segment, tab, docs, z, S, X


def final_state(
    parts: tuple[Tensor, ...], log_decay: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The state that these tokens alone leave, [B, H, M, P, 2], of (k, v) or (z,); the form in Triton also returns the states
    of its segments."""
    *_, (*_, X) = _forward(parts, log_decay, None, documents)
    return store_state(X), None


def _left(
    d_final: Tensor | None, log_decay: Tensor, read: list[tuple], leave: Exchange | None
) -> Callable[[], Tensor]:
    """Starts the exchange. The returned function waits, and gives the conjugate G of the costate after the last token, dL =
    Re(conj(G) dX). read: (sums, tables, masks, ..) by segment."""
    (_, B, _, P, _), wait = read[0][0].shape, lambda: d_final
    if leave is not None:
        costate = load_state(None, B, P, log_decay)  # of this shard alone
        for sums, tab, docs, *_ in read:
            _, costate = _costates(sums, costate, tab, docs)
        wait = leave(store_state(costate))
    return lambda: load_state(wait(), B, P, log_decay)


def _states(local: Tensor, X: Tensor, tab: Tables, docs: Masks | None) -> tuple[Tensor, Tensor]:
    """States before every chunk in the frame S = Lambda^(r+1) X, and the state after the last one, X itself.

    S' = Lambda^L (S + local), local = sum_j T_j z_j, and X' = Lambda^(L-1-r) of the same sum.
    """
    S = torch.empty_like(local)
    current = tab.enter * X
    for n in range(local.shape[2]):
        S[:, :, n] = current
        total = (current if docs is None else docs.keeps[:, :, n] * current) + local[:, :, n]
        current = tab.carry * total
    return S, tab.leave * total


def _costates(sums: Tensor, G: Tensor, tab: Tables, docs: Masks | None) -> tuple[Tensor, Tensor]:
    """`_states` in reverse, on conjugates: Z = conj(Lambda^(L-1-r)) G at the end, Z' = conj(Lambda^L) (Z + sums)."""
    Z = torch.empty_like(sums)
    enter, carry, leave = (conj_physical(x) for x in (tab.leave, tab.carry, tab.enter))
    current = enter * G
    for n in reversed(range(sums.shape[2])):
        Z[:, :, n] = current
        total = (current if docs is None else docs.keeps[:, :, n] * current) + sums[:, :, n]
        current = carry * total
    return Z, leave * total


def _decay_gradient_scores(scores: Tensor, b: Tensor, tab: Tables) -> Tensor:
    """Within chunks: sum_j T_j sum_i (i - j) tril(q k^T)_ij (E b)_i, conjugated. Overwrites scores."""
    scores.unflatten(-2, (-1, tab.lag.shape[-1])).mul_(tab.lag)
    return _sum_over_tokens(tab.T, scores.flatten(1, 3).mT @ b)


def _decay_gradient_states(
    z: Tensor, S: Tensor, Z: Tensor, weighted: Tensor, tab: Tables, docs: Masks | None
) -> Tensor:
    """Across chunks, conjugated: reading the state, sum_i (i + 1) (E b)_i (S do_i), and carrying it over the chunk,
    Z (L S + sum_j (L - 1 - j) T_j z_j). No weight exceeds L, whatever T is.
    """
    L = z.shape[-1]
    z, kept = (z, L) if docs is None else (z * docs.writes, L * docs.keeps)
    written = _sum_over_tokens(
        (L - tab.position)[:, None] * tab.T, z.flatten(1, 3).mT @ real_pairs(Z).flatten(1, 3)
    )
    return ((weighted + kept * Z) * conj_physical(S)).sum((1, 2, 3)) + written


def _sum_over_tokens(T: Tensor, sums: Tensor) -> Tensor:
    """sum_j conj(T_j) x_j for pairs [H, L, 2M] of numbers that are summed over all else: [H, M]."""
    return (conj_physical(T) * torch.view_as_complex(sums.unflatten(-1, (-1, 2)))).sum(1)


def _linear_kernel(readout: Tensor, tab: Tables) -> tuple[Tensor, Tensor]:
    """conj(E w) [H, L, M] complex, and D_ij = tril(Re(w^T Lambda^(i-j))) [H, L, L]."""
    w = conj_physical(tab.E * _complex(readout)[:, None])
    return w, (real_pairs(w) @ real_pairs(tab.T).mT).tril_()


def _bilinear(mixing: Tensor) -> Tensor:
    """J W on interleaved pairs, J = diag(1, -1): conj(b) = J W a, conj(e) = (J W)^T c, one matrix for both ways."""
    H, M = mixing.shape[0], mixing.shape[1] // 2
    w = torch.cat((mixing[:, :M], -mixing[:, M:]), dim=1).view(H, 2, M, 2, M)
    return w.permute(0, 2, 1, 4, 3).reshape(H, 2 * M, 2 * M)


def _bilinear_gradient(d_weights: Tensor) -> Tensor:
    H, M = d_weights.shape[0], d_weights.shape[1] // 2
    upper, lower = d_weights.view(H, M, 2, M, 2).permute(2, 0, 1, 4, 3).reshape(2, H, M, 2 * M)
    return torch.cat((upper, -lower), dim=1)


def _complex(readout: Tensor) -> Tensor:
    """[H, 2M] as (Re | Im) -> [H, M] complex."""
    return torch.complex(*readout.unflatten(1, (2, -1)).unbind(1))


def _scale(a: Tensor, E: Tensor) -> Tensor:
    """Multiplies every row of [H, B N G L, 2M] by its E, in place."""
    H, L, M = E.shape
    torch.view_as_complex(a.view(H, -1, L, M, 2)).mul_(E[:, None])
    return a
