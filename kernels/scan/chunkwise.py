"""Chunkwise form in plain PyTorch, forward and backward written out.

Derivation: docs/kernels.md.

Shapes: B batch, T time, N chunks, L chunk length, H state heads, G query heads per state head,
Hq = G H, R key features, D value width, P channels of a state (R + D, or the width of z in the
linear readout), M basis functions.

The three passes are those that a kernel for an accelerator runs. Each serves forward and backward:
    pass 1 (`_contract`)  a = pass1(q, k)   c = pass1(do, v)   reads a state of keys: M numbers
    pass 2 (`_expand`)    o = pass2(b, v)   dq = pass2(e, k)   reads it back with M weights
    pass 3 (`_adjoint`)   dv = pass3(b, do) dk = pass3(e, q)   is pass 2, transposed in time

Inside a chunk, Lambda^(i-j) = E_i T_j with E_i = Lambda^(i-r), T_j = Lambda^(r-j), and r = L // 2
in the middle of the chunk. The state X before a chunk is used as S = Lambda^(r+1) X (the frame S),
so that E applies once to the sum of S and the tokens of the chunk.

Layout: heads come first, [H, B, N, ...], so that a product with a per-head table or with W is one
batched matmul over heads. Complex numbers are interleaved (re, im), so that 2M real columns feed a
real matmul and, viewed as M complex ones, take E in a single multiplication.

If documents are packed, a state stops at the end of its document (`Masks`). The backward computes
everything again: only the inputs are saved.

Context parallelism: the tokens may be one rank's part of longer sequences. initial_state may then
be a function that waits for the state before them; it is called after everything that needs no
state. In the backward, `exchange` takes the gradient of the state before the tokens by their own
outputs, and returns a function that waits for that of the state after them, instead of d_final.

Conjugates are physical: below the dispatcher's Conjugate key, where AOTAutograd runs an op, a lazy
conjugate is silently dropped.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, conj_physical

from .chunkwise_layout import (
    Masks,
    Segment,
    Tables,
    complex_like,
    complex_readout,
    conjugated_mixing,
    conjugated_mixing_gradient,
    load_rows,
    load_state,
    make_tables,
    multiply_by_power,
    real_pairs,
    segments,
    store_rows,
    store_state,
)

# The state before the tokens, [B, H, M, P, 2], or a function that waits for it; None means zeros.
Start = Tensor | Callable[[], Tensor] | None
# Starts to send a gradient [B, H, M, P, 2] to other ranks, and returns a function that waits for
# another gradient, of the same shape, from them.
Exchange = Callable[[Tensor], Callable[[], Tensor]]


class Chunks(NamedTuple):
    """The chunks of a segment, with everything that needs no state of earlier tokens.

    Attributes:
        segment: The tokens of the chunks.
        tables: Powers of Lambda for the length of the chunks.
        masks: Masks for packed documents, or None.
        z: The inputs of the state as rows, [H, B, N, L, P]: keys beside values, or z.
        carried: Lambda^(L+r-j) of each token, with r in the middle of the chunk, as pairs (re, im),
            [H, B, N, L, 2M]: the share of the token in the S after the chunk. With documents,
            tokens that are not in it have zeros.
    """

    segment: Segment
    tables: Tables
    masks: Masks | None
    z: Tensor
    carried: Tensor


class _QueryReadout(NamedTuple):
    """A segment in `scan_backward`, from pass 1 to the gradients of its states.

    b = W a are the weights of a query for a = X^k q, and e is the gradient of a. E is the power of
    the decay that belongs to a token's place in its chunk (`Tables`).

    Attributes:
        chunks: The chunks.
        S: States before the chunks, [H, B, N, P, M] complex, in the frame of `_states`.
        rows: q as rows, [H, B, N, G L, R].
        d_rows: The gradient of o as rows, [H, B, N, G L, D].
        e: conj(E e) as interleaved pairs (re, im), [H, B N G L, 2M], zeros for rows that do not
            read the state before the chunk.
        kernel_b: The scores of b, [H, B, N, G L, L], as in `_output_scores`.
        kernel_e: The scores of e, likewise.
        d_theta: The gradient of log_decay by what the tokens of the chunks read, [H, M].
        added: What each chunk adds to the gradient of the state before it, [H, B, N, P, M] complex.
    """

    chunks: Chunks
    S: Tensor
    rows: Tensor
    d_rows: Tensor
    e: Tensor
    kernel_b: Tensor
    kernel_e: Tensor
    d_theta: Tensor
    added: Tensor


class _LinearReadout(NamedTuple):
    """A segment in `linear_backward`, before the gradients of its states are known.

    E_i = Lambda^(i-r) is the power of the decay for position i of a chunk, with r in its middle, w
    are the weights of the readout, and dy is the gradient of y.

    Attributes:
        chunks: The chunks.
        S: States before the chunks, [H, B, N, P, M] complex, in the frame of `_states`.
        d_rows: The gradient of y as rows, [H, B, N, L, P].
        reading: The same for tokens that read the state before the chunk, else zeros.
        E_conj: conj(E) as interleaved pairs (re, im), [H, 1, 1, L, 2M].
        sums: sum_i conj(E_i) dy_i of each chunk, [H, B, N, P, M] complex.
        added: What each chunk adds to the gradient of the state before it: conj(w) times `sums`.
    """

    chunks: Chunks
    S: Tensor
    d_rows: Tensor
    reading: Tensor
    E_conj: Tensor
    sums: Tensor
    added: Tensor


def scan_forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor, initial_state: Start, *,
    documents: Tensor | None = None, need_final: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Computes the scan with the query readout (paper eqs. 11 and 13).

    With the key channels X^k and the value channels X^v of a token's state, its output is o =
    Re(b^T X^v), where b = W a and a = X^k q.

    Args:
        q: Query features, [B, T, Hq, R].
        k: Key features, [B, T, H, R].
        v: Values, [B, T, H, D].
        log_decay: theta = log Lambda as real pairs, [H, M, 2].
        mixing: W, [H, 2M, 2M].
        initial_state: The state before the tokens, [B, H, M, P, 2] with P = R + D channels, or a
            function that waits for it. None means zeros.
        documents: The id of each token's document, [B, T] int32, or None for one document.
        need_final: False if no final state is wanted.

    Returns:
        o: The outputs, [B, T, Hq, D] in v's dtype.
        final_state: The state after the tokens, [B, H, M, P, 2], or None.
        initial_state: The state before the tokens, or None.
    """
    B, T, H, R = k.shape
    D = v.shape[3]
    # W with the sign of its imaginary half changed, so that its product with a is conj(b).
    weights = conjugated_mixing(mixing)
    o = torch.empty(B, T, q.shape[2], D, dtype=v.dtype, device=v.device)

    # First everything that needs no state, so that an exchange with other ranks can go on
    # meanwhile: the part of pass 1 within the chunks.
    loaded = []
    for chunks, local in _load_segments((k, v), log_decay, documents):
        # q as rows, [H, B, N, G L, R]; z has the keys in its first R channels.
        rows = load_rows((q,), H, chunks.segment, log_decay.dtype)
        a = _part_within_chunks(_scores(rows, chunks.z[..., :R], chunks.masks), chunks.tables)
        loaded.append((chunks, local, rows, a))

    # Then the states before the chunks, and with them a (pass 1), b = W a, and o (pass 2).
    if callable(initial_state):
        initial_state = initial_state()
    X = load_state(initial_state, B, R + D, log_decay)
    for chunks, local, rows, a in loaded:
        segment, tables, masks, z, _ = chunks
        # The first R channels of a state are the keys', the others the values'.
        S, X = _states(local, X, tables, masks)
        a = _contract(a, _from_states(rows, S[..., :R, :], masks), tables)
        # b is stored as conj(E b), with the power E of a token's place in its chunk.
        b = multiply_by_power(a @ weights.mT, conj_physical(tables.E))
        out = _expand(
            _output_scores(b, tables, rows.shape, masks), _zero_unless_reading(b, rows, masks),
            z[..., R:], S[..., R:, :],
        )  # fmt: skip
        store_rows(o, out, segment)
    final_state = None
    if need_final:
        final_state = store_state(X)
    return o, final_state, initial_state


def scan_backward(
    d_o: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, mixing: Tensor,
    initial_state: Tensor | None, *,
    documents: Tensor | None = None, exchange: Exchange | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Computes the gradients of the scan with the query readout.

    The forward is a = X^k q, b = W a and o = Re(b^T X^v) for each token. The gradient of b is c =
    X^v do (dL = Re(c^T db)), and that of a is e = J W^T J c, likewise, where J = diag(I, -I)
    conjugates stacked [Re; Im].

    Args:
        d_o: The gradient of o, [B, T, Hq, D].
        d_final: The gradient of the final state, [B, H, M, P, 2], or None for zeros. With an
            exchange it is not used: the exchanged gradient contains it.
        q: Query features, [B, T, Hq, R].
        k: Key features, [B, T, H, R].
        v: Values, [B, T, H, D].
        log_decay: theta = log Lambda as real pairs, [H, M, 2].
        mixing: W, [H, 2M, 2M].
        initial_state: The state before the tokens, [B, H, M, P, 2] with P = R + D channels, or None
            for zeros. With context parallelism, the state that came from the ranks before.
        documents: The id of each token's document, [B, T] int32, or None for one document.
        exchange: Exchanges gradients of states with other ranks, or None for a single rank.

    Returns:
        The gradients of q, k, v, log_decay, mixing and initial_state; None for a state that is not
        there.
    """
    H, R = k.shape[2:]
    dtype = log_decay.dtype
    # J W: its product with a is conj(b), and transposed with c it is conj(e).
    weights = conjugated_mixing(mixing)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    d_weights = torch.zeros_like(weights)
    d_theta = log_decay.new_zeros(log_decay.shape[:2], dtype=dtype.to_complex())

    # Compute the states before all chunks once more. Then go through the segments in reverse, and
    # do first everything that needs no gradient of a state.
    forward = [*_segments_with_states((k, v), log_decay, initial_state, documents)]
    parts = []
    for chunks, S, _ in reversed(forward):
        segment, tables, masks, z, _ = chunks
        keys = z[..., :R]
        values = z[..., R:]

        # Pass 1 of (q, k) and of (do, v): a = X^k q and c = X^v do for each token.
        rows, d_rows = (load_rows((x,), H, segment, dtype) for x in (q, d_o))
        scores_k = _scores(rows, keys, masks)
        scores_v = _scores(d_rows, values, masks)
        from_k = _from_states(rows, S[..., :R, :], masks)
        from_v = _from_states(d_rows, S[..., R:, :], masks)
        a = _contract(_part_within_chunks(scores_k, tables), from_k, tables)
        c = _contract(_part_within_chunks(scores_v, tables), from_v, tables)

        # conj(b) = J W a and conj(e) = (J W)^T c, stored as conj(E b) and conj(E e) with the power
        # E of a token's place in its chunk; and the gradient of J W, the matrix that gives both.
        b = multiply_by_power(a @ weights.mT, conj_physical(tables.E))
        e = multiply_by_power(c @ weights, conj_physical(tables.E))
        d_weights.baddbmm_(c.mT, a)
        del a, c

        # The gradient of log_decay by what the tokens read of their chunk, and of the states before
        # it.
        within = _decay_gradient_scores(scores_k, e, tables) + _decay_gradient_scores(scores_v, b, tables)  # fmt: skip
        across = _decay_gradient_reads(from_k, e, tables) + _decay_gradient_reads(from_v, b, tables)
        del from_k, from_v

        # Scores of pass 3, and what the chunks add to the gradient of the state before them.
        kernel_b = _output_scores(b, tables, d_rows.shape, masks)
        kernel_e = _output_scores(e, tables, rows.shape, masks)
        b = _zero_unless_reading(b, d_rows, masks)
        e = _zero_unless_reading(e, rows, masks)
        added = _added_by_chunks(rows, e, d_rows, b)
        parts.append(_QueryReadout(chunks, S, rows, d_rows, e, kernel_b, kernel_e, within + across, added))  # fmt: skip

    # dq needs no gradient of a state: it is computed while other ranks' gradients are on their way.
    wait = _start_exchange(d_final, log_decay, [(part.chunks, part.added) for part in parts], exchange)  # fmt: skip
    for part in parts:
        keys = part.chunks.z[..., :R]
        store_rows(dq, _expand(part.kernel_e, part.e, keys, part.S[..., :R, :]), part.chunks.segment)  # fmt: skip

    # dk and dv (pass 3) from the gradients of the states, and the gradient of log_decay across
    # chunks.
    d_X = wait()
    for part in parts:
        segment, tables, masks, _, carried = part.chunks
        Z, d_X = _costates(part.added, d_X, tables, masks)
        store_rows(dk, _adjoint(part.kernel_e, part.rows, Z[..., :R, :], carried), segment)
        store_rows(dv, _adjoint(part.kernel_b, part.d_rows, Z[..., R:, :], carried), segment)
        d_theta += part.d_theta + _decay_gradient_states(part.chunks, part.S, Z)
    d_initial = None
    if initial_state is not None:
        d_initial = store_state(d_X)
    return (
        dq, dk, dv, torch.view_as_real(d_theta), conjugated_mixing_gradient(d_weights), d_initial,
    )  # fmt: skip


def linear_forward(
    z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Start, *,
    documents: Tensor | None = None, need_final: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Computes the linear scan, y = Re(w^T X_t): pass 2 with the same weights for every token.

    Args:
        z: Inputs, [B, T, H, P].
        log_decay: theta = log Lambda as real pairs, [H, M, 2].
        readout: w as (Re w | Im w), [H, 2M].
        initial_state: The state before the tokens, [B, H, M, P, 2], or a function that waits for
            it. None means zeros.
        documents: The id of each token's document, [B, T] int32, or None for one document.
        need_final: False if no final state is wanted.

    Returns:
        y: The outputs, [B, T, H, P] in z's dtype.
        final_state: The state after the tokens, [B, H, M, P, 2], or None.
        initial_state: The state before the tokens, or None.
    """
    # First the part within the chunks, which needs no state: a product with the scores D_ij =
    # Re(w^T Lambda^(i-j)) of tokens j <= i.
    y = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    loaded = []
    for chunks, local in _load_segments((z,), log_decay, documents):
        w, kernel = _linear_kernel(readout, chunks.tables, chunks.masks)
        loaded.append((chunks, local, w, kernel @ chunks.z))

    # Then the part that reads the states before the chunks.
    if callable(initial_state):
        initial_state = initial_state()
    X = load_state(initial_state, z.shape[0], z.shape[3], log_decay)
    for chunks, local, w, out in loaded:
        S, X = _states(local, X, chunks.tables, chunks.masks)
        # Re((E w)^T S), as the inner product of pairs. `w` holds conj(E w).
        weights = real_pairs(w)[:, None, None]
        if chunks.masks is not None:
            weights = weights * chunks.masks.reads
        out += weights @ real_pairs(S).mT
        store_rows(y, out, chunks.segment)
    final_state = None
    if need_final:
        final_state = store_state(X)
    return y, final_state, initial_state


def linear_backward(
    d_y: Tensor, d_final: Tensor | None, z: Tensor, log_decay: Tensor, readout: Tensor, initial_state: Tensor | None,
    *, documents: Tensor | None = None, exchange: Exchange | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Computes the gradients of the linear scan, y = Re(w^T X_t) for the state X_t of each token.

    Args:
        d_y: The gradient of y, [B, T, H, P].
        d_final: The gradient of the final state, [B, H, M, P, 2], or None for zeros. With an
            exchange it is not used: the exchanged gradient contains it.
        z: Inputs, [B, T, H, P].
        log_decay: theta = log Lambda as real pairs, [H, M, 2].
        readout: w as (Re w | Im w), [H, 2M].
        initial_state: The state before the tokens, [B, H, M, P, 2], or None for zeros. With context
            parallelism, the state that came from the ranks before.
        documents: The id of each token's document, [B, T] int32, or None for one document.
        exchange: Exchanges gradients of states with other ranks, or None for a single rank.

    Returns:
        The gradients of z, log_decay, readout and initial_state; None for a state that is not
        there.
    """
    dtype = log_decay.dtype
    dz = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    d_theta, d_w = (log_decay.new_zeros(log_decay.shape[:2], dtype=dtype.to_complex()) for _ in range(2))  # fmt: skip
    w_conj = conj_physical(complex_readout(readout))[:, None, None, None]  # [H, 1, 1, 1, M]

    # Compute the states before all chunks once more. Then go through the segments in reverse, and
    # do first everything that needs no gradient of a state.
    forward = [*_segments_with_states((z,), log_decay, initial_state, documents)]
    parts = []
    for chunks, S, _ in reversed(forward):
        # `reading` is the gradient of the tokens that read the state before the chunk.
        d_rows = load_rows((d_y,), z.shape[2], chunks.segment, dtype)
        reading = d_rows
        if chunks.masks is not None:
            reading = chunks.masks.reads * d_rows
        # What the chunk adds to the gradient of the state before it: conj(w) sum_i conj(E_i) dy_i.
        E_conj = real_pairs(conj_physical(chunks.tables.E))[:, None, None]
        sums = complex_like(reading.mT @ E_conj, S)
        parts.append(_LinearReadout(chunks, S, d_rows, reading, E_conj, sums, w_conj * sums))

    # Then everything that needs the gradients of the states: dz, and those of readout and
    # log_decay.
    wait = _start_exchange(d_final, log_decay, [(part.chunks, part.added) for part in parts], exchange)  # fmt: skip
    d_X = wait()
    for part in parts:
        segment, tables, masks, rows, carried = part.chunks
        S = part.S
        w, kernel = _linear_kernel(readout, tables, masks)
        Z, d_X = _costates(part.added, d_X, tables, masks)

        # dz within the chunk and from later chunks.
        store_rows(dz, _adjoint(kernel.expand(*rows.shape[:4], -1), part.d_rows, Z, carried), segment)  # fmt: skip

        # The scores dy_i . z_j are multiplied only by tables of the head, so they are summed over
        # batch and chunks first: [H, L, L].
        scores = part.d_rows @ rows.mT
        if masks is not None:
            scores *= masks.same
        scores = scores.sum((1, 2)).tril_()

        # The gradient of the readout: within the chunk, and from the states before it.
        c = torch.view_as_complex((scores @ real_pairs(tables.T)).unflatten(-1, (-1, 2)))
        d_w += conj_physical(tables.E * c).sum(1) + (part.sums * conj_physical(S)).sum((1, 2, 3))

        # The gradient of log_decay: by the states before the chunks, within the chunk, and by the
        # states after.
        weighted_E = tables.position[:, None] * part.E_conj
        weighted = w_conj * complex_like(part.reading.mT @ weighted_E, S)
        d_theta += (weighted * conj_physical(S)).sum((1, 2, 3))
        lag = tables.position[:, None] - tables.position
        c = torch.view_as_complex((scores * lag @ real_pairs(tables.T)).unflatten(-1, (-1, 2)))
        d_theta += (w * conj_physical(c)).sum(1) + _decay_gradient_states(part.chunks, S, Z)
    d_initial = None
    if initial_state is not None:
        d_initial = store_state(d_X)
    return dz, torch.view_as_real(d_theta), torch.cat((d_w.real, d_w.imag), dim=-1), d_initial


def final_state(
    parts: tuple[Tensor, ...], log_decay: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Computes the state that these tokens leave when they start from zero.

    Args:
        parts: k and v, or the inputs z of the linear readout, each [B, T, H, width].
        log_decay: theta = log Lambda as real pairs, [H, M, 2].
        documents: The id of each token's document, [B, T] int32, or None for one document.

    Returns:
        The state, [B, H, M, P, 2], and None: the form in Triton also returns the states of its
        segments.
    """
    # The state after the last segment.
    *_, (_, _, X) = _segments_with_states(parts, log_decay, None, documents)
    return store_state(X), None


# The passes. a, b, c and e are [H, B N G L, 2M] in interleaved pairs. b and e are stored as
# conj(E b) and conj(E e): Re(b^T x) is then the real inner product of two rows of pairs.


def _scores(rows: Tensor, keys: Tensor, masks: Masks | None) -> Tensor:
    """Computes tril(q k^T) of each chunk, [H, B, N, G L, L], between tokens of one document.

    Args:
        rows: q, [H, B, N, G L, R]: L tokens of a chunk, for each of G heads that share the keys.
        keys: k, [H, B, N, L, R].
        masks: Masks for packed documents, or None.
    """
    return _causal(rows @ keys.mT, masks)


def _output_scores(
    b: Tensor, tables: Tables, rows_shape: torch.Size, masks: Masks | None
) -> Tensor:
    """Computes D_ij = tril(Re(b_i^T Lambda^(i-j))) of each chunk, [H, B, N, G L, L].

    It is the share of token j's value in the output of token i, which has the weights b_i. With E_i
    = Lambda^(i-r) and T_j = Lambda^(r-j) for r in the middle of the chunk it is Re((E b)_i^T T_j),
    the inner product of the pairs of conj(E b) and T.

    Args:
        b: conj(E b) as interleaved pairs (re, im), [H, B N G L, 2M]: a row for each of the L tokens
            of N chunks, and for each of the G query heads of a state head.
        tables: Powers of Lambda.
        rows_shape: The shape of rows of the same tokens, [H, B, N, G L, any width].
        masks: Masks for packed documents, or None.
    """
    return _causal((b @ real_pairs(tables.T).mT).view(*rows_shape[:4], -1), masks)


def _causal(scores: Tensor, masks: Masks | None) -> Tensor:
    """Writes zeros above the diagonal and between documents, in place.

    Args:
        scores: Scores of the tokens of each chunk, [H, B, N, G L, L], for each of G query heads.
        masks: Masks for packed documents, or None.

    Returns:
        scores.
    """
    # Above the diagonal there may be positive powers of 1 / Lambda (`_output_scores`), huge or
    # infinite. tril_ overwrites them with zeros instead of multiplying by zeros. [..., G L, L]
    # becomes [..., G, L, L].
    per_head = scores.unflatten(-2, (-1, scores.shape[-1])).tril_()
    if masks is not None:
        per_head.mul_(masks.same[:, :, :, None])
    return scores


def _zero_unless_reading(b: Tensor, rows: Tensor, masks: Masks | None) -> Tensor:
    """Returns b with zeros for the tokens that do not read the state before their chunk.

    A token reads that state only if its document began before the chunk. Without masks the result
    is b itself, else a new tensor.

    Args:
        b: The weights with which tokens read a state, times a power E of the decay, as interleaved
            pairs (re, im) of conj(E b), [H, B N G L, 2M]: N chunks of L tokens, for G query heads
            of a state head.
        rows: Rows of the same tokens, [H, B, N, G L, any width]; only their shape is used.
        masks: Masks for packed documents, or None.
    """
    if masks is None:
        return b
    return (b.view(*rows.shape[:4], -1) * masks.reads_by_row(rows)).view(b.shape)


def _part_within_chunks(scores: Tensor, tables: Tables) -> Tensor:
    """Computes sum_j tril(q k^T)_ij T_j: the part of a = X^k q that comes from the own chunk.

    T_j = Lambda^(r-j) is the power of the decay for position j of a chunk, with r in its middle.

    Args:
        scores: tril(q k^T), [H, B, N, G L, L].
        tables: Powers of Lambda.

    Returns:
        That part as interleaved pairs (re, im), [H, B N G L, 2M], still without the factor E_i =
        Lambda^(i-r) of the token that reads.
    """
    return scores.flatten(1, 3) @ real_pairs(tables.T)


def _from_states(rows: Tensor, S: Tensor, masks: Masks | None) -> Tensor:
    """Computes S q_i: the part of a = X^k q that comes from the state before the chunk.

    Args:
        rows: q, [H, B, N, G L, R], of G query heads for each head of the state; or do with D for R.
        S: Key channels of the states before the chunks, [H, B, N, R, M]; or value channels.
        masks: Masks for packed documents, or None. With them, S counts only for rows that read it.

    Returns:
        That part as interleaved pairs (re, im), [H, B N G L, 2M], still without the factor E_i of
        `_contract`.
    """
    if masks is not None:
        rows = rows * masks.reads_by_row(rows)
    # For each head and chunk: [G L, R] @ [R, 2M].
    return (rows @ real_pairs(S)).flatten(1, 3)


def _contract(a: Tensor, from_states: Tensor, tables: Tables) -> Tensor:
    """Completes pass 1 in place: a_i = X^k_i q_i = E_i (sum_j tril(q k^T)_ij T_j + S q_i).

    E_i = Lambda^(i-r) and T_j = Lambda^(r-j) are powers of the decay, with r in the middle of the
    chunk. X^k_i are the key channels of the state after token i, and S = Lambda^(r+1) X are those
    of the state X before the chunk. With do and the value channels in place of q and the key
    channels, it completes c_i = X^v_i do_i.

    Args:
        a: The result of `_part_within_chunks`, [H, B N G L, 2M]. It is overwritten.
        from_states: The result of `_from_states`, likewise.
        tables: Powers of Lambda.

    Returns:
        a.
    """
    return multiply_by_power(a.add_(from_states), tables.E)


def _expand(kernel: Tensor, b: Tensor, values: Tensor, S: Tensor) -> Tensor:
    """Computes pass 2: o_i = Re(b_i^T X^v_i) = sum_j D_ij v_j + Re((E b)_i^T S).

    The first part comes from the tokens of the chunk, the second one from the state S before it.
    b_i are the weights with which token i reads the value channels X^v of its state, and E is the
    power of the decay that belongs to its place in the chunk.

    Args:
        kernel: The scores D from `_output_scores`, [H, B, N, G L, L].
        b: conj(E b) with the zeros of `_zero_unless_reading`, [H, B N G L, 2M].
        values: v, [H, B, N, L, D].
        S: Value channels of the states before the chunks, [H, B, N, D, M], as in `_states`.

    Returns:
        o as rows, [H, B, N, G L, D].
    """
    # One product for each head and chunk: [H B N, G L, L] @ [H B N, L, D].
    out = kernel.flatten(0, 2) @ values.flatten(0, 2)
    out.baddbmm_(b.view(out.shape[0], -1, b.shape[-1]), real_pairs(S).flatten(0, 2).mT)
    return out.view(*kernel.shape[:-1], -1)


def _adjoint(kernel: Tensor, rows: Tensor, Z: Tensor, carried: Tensor) -> Tensor:
    """Computes pass 3: dv_j = sum_(i >= j) D_ij do_i + Re(Lambda^(L+r-j)^T conj(Z)).

    The first part comes from outputs of the chunk, the second one from later chunks, which token j
    reaches through the state after the chunk.

    Args:
        kernel: The scores D from `_output_scores`, [H, B, N, G L, L].
        rows: do, the gradient of the outputs, [H, B, N, G L, D].
        Z: Value channels of the gradients of the states after the chunks, [H, B, N, D, M], as in
            `_costates`.
        carried: The shares of the tokens in those states, [H, B, N, L, 2M], as in `Chunks`.

    Returns:
        dv as rows, [H, B, N, L, D].
    """
    # One product for each head and chunk: [H B N, L, G L] @ [H B N, G L, D].
    out = kernel.mT.flatten(0, 2) @ rows.flatten(0, 2)
    out.baddbmm_(carried.flatten(0, 2), real_pairs(Z).flatten(0, 2).mT)
    return out.view(*carried.shape[:4], -1)


def _added_by_chunks(rows: Tensor, e: Tensor, d_rows: Tensor, b: Tensor) -> Tensor:
    """Computes what each chunk adds to the gradient of the state before it.

    Its tokens have read that state twice: the key channels by q, a = X^k q (the gradient of a comes
    back as e), and the value channels by the weights b, o = Re(b^T X^v) (the gradient of o comes
    back as do). E is the power of the decay that belongs to a token's place in the chunk.

    Args:
        rows: q, [H, B, N, G L, R].
        e: conj(E e) as interleaved pairs (re, im), [H, B N G L, 2M].
        d_rows: do, [H, B, N, G L, D].
        b: conj(E b), [H, B N G L, 2M].

    Returns:
        sum_i q_i conj(E e)_i^T for the key channels, and sum_i do_i conj(E b)_i^T for the value
        channels, [H, B, N, P, M] complex.
    """
    keys = rows.mT @ e.view(*rows.shape[:4], -1)
    values = d_rows.mT @ b.view(*d_rows.shape[:4], -1)
    return torch.view_as_complex(torch.cat((keys, values), dim=-2).unflatten(-1, (-1, 2)))


# The states between the chunks.


def _load_segments(
    parts: tuple[Tensor, ...], log_decay: Tensor, documents: Tensor | None,
) -> Iterator[tuple[Chunks, Tensor]]:  # fmt: skip
    """Yields the segments in order, with everything of them that needs no state.

    Args:
        parts: k and v, or the inputs z of the linear scan, each [B, T, H, width].
        log_decay: theta = log Lambda, [H, M, 2].
        documents: The id of each token's document, [B, T] int32, or None for one document.

    Yields:
        The chunks of a segment, and sum_j Lambda^(L+r-j) z_j over the inputs z_j of each chunk,
        with r in its middle, [H, B, N, P, M] complex.
    """
    _, T, H, _ = parts[0].shape
    for segment in segments(T):
        tables = make_tables(log_decay, segment.length)
        z = load_rows(parts, H, segment, log_decay.dtype)
        masks = Masks.build(documents, segment, log_decay.dtype)
        # With documents, only tokens of the chunk's last document are in the sum.
        carried = real_pairs(tables.carry[:, 0] * tables.T)[:, None, None]
        if masks is not None:
            carried = carried * masks.writes
        local = (z.mT @ carried).unflatten(-1, (-1, 2))
        carried = carried.expand(*z.shape[:4], -1)
        yield Chunks(segment, tables, masks, z, carried), torch.view_as_complex(local)


def _segments_with_states(
    parts: tuple[Tensor, ...], log_decay: Tensor, initial_state: Tensor | None, documents: Tensor | None,
) -> Iterator[tuple[Chunks, Tensor, Tensor]]:  # fmt: skip
    """Yields the segments in order, with their states.

    Args:
        parts: k and v, or the inputs z of the linear scan, each [B, T, H, width].
        log_decay: theta = log Lambda, [H, M, 2].
        initial_state: The state before the tokens, [B, H, M, P, 2], or None.
        documents: The id of each token's document, [B, T] int32, or None for one document.

    Yields:
        The chunks of a segment, the states before them as in `_states`, and the state after the
        segment, [H, B, P, M] complex.
    """
    X = load_state(initial_state, parts[0].shape[0], sum(x.shape[3] for x in parts), log_decay)
    for chunks, local in _load_segments(parts, log_decay, documents):
        S, X = _states(local, X, chunks.tables, chunks.masks)
        yield chunks, S, X


def _start_exchange(
    d_final: Tensor | None,
    log_decay: Tensor,
    parts: list[tuple[Chunks, Tensor]],
    exchange: Exchange | None,
) -> Callable[[], Tensor]:
    """Starts the exchange of the gradients of states with other ranks.

    Args:
        d_final: The gradient of the final state, [B, H, M, P, 2], or None for zeros. With an
            exchange it is not used: the exchanged gradient contains it.
        log_decay: theta, [H, M, 2].
        parts: For each segment from the last to the first: its chunks, and what they add to the
            gradient of the state before them.
        exchange: The exchange, or None for a single rank.

    Returns:
        A function that waits, and returns the gradient g of the state after the last token,
        [H, B, P, M] complex: dL = Re(conj(g) dX).
    """
    _, B, _, P, _ = parts[0][1].shape
    wait = None
    if exchange is not None:
        # The other ranks need the gradient of the state before these tokens by their own outputs.
        d_X = load_state(None, B, P, log_decay)
        for chunks, added in parts:
            _, d_X = _costates(added, d_X, chunks.tables, chunks.masks)
        wait = exchange(store_state(d_X))

    def finish() -> Tensor:
        d_state = d_final
        if wait is not None:
            d_state = wait()
        return load_state(d_state, B, P, log_decay)

    return finish


def _states(local: Tensor, X: Tensor, tables: Tables, masks: Masks | None) -> tuple[Tensor, Tensor]:
    """Computes the states before every chunk, and the state after the last one.

    A chunk of L tokens uses the state X before it as S = Lambda^(r+1) X, with r in the middle of
    the chunk. The next S is Lambda^L S + local.

    Args:
        local: sum_j Lambda^(L+r-j) z_j over the inputs z_j of each chunk, [H, B, N, P, M] complex.
        X: The state before the first chunk, [H, B, P, M] complex.
        tables: Powers of Lambda.
        masks: Masks for packed documents, or None.

    Returns:
        The states before the chunks in the frame S = Lambda^(r+1) X, [H, B, N, P, M], and X after
        the last chunk.
    """
    S, last = _recurrence(local, tables.enter * X, tables.carry, masks, 1)
    return S, tables.leave * last


def _costates(
    added: Tensor, d_X: Tensor, tables: Tables, masks: Masks | None
) -> tuple[Tensor, Tensor]:
    """Computes the gradients of the states after every chunk: `_states` in reverse, on conjugates.

    They are used as the gradient Z of the S after the chunk. The Z of the chunk before is
    conj(Lambda^L) Z + added.

    Args:
        added: What each chunk adds to the gradient of the S before it, [H, B, N, P, M] complex.
        d_X: The gradient of the state X after the last chunk, [H, B, P, M] complex.
        tables: Powers of Lambda.
        masks: Masks for packed documents, or None.

    Returns:
        The gradients Z of the S after the chunks, [H, B, N, P, M], and the gradient of the state X
        before the first chunk.
    """
    # In reverse, `enter` and `leave` of the forward change places.
    enter, carry, leave = map(conj_physical, (tables.leave, tables.carry, tables.enter))
    Z, last = _recurrence(added, enter * d_X, carry, masks, -1)
    return Z, leave * last


def _recurrence(
    added: Tensor, first: Tensor, carry: Tensor, masks: Masks | None, step: int
) -> tuple[Tensor, Tensor]:
    """Computes x_next = carry x + added over chunks.

    Args:
        added: What each chunk adds, [H, B, N, P, M] complex.
        first: x before the first chunk that it passes through, [H, B, P, M] complex.
        carry: Lambda^L for chunks of L tokens, or its conjugate, [H, 1, 1, M].
        masks: Masks for packed documents, or None. A state stops at the end of its document.
        step: 1 if x passes through the chunks in order, -1 in reverse.

    Returns:
        x before the chunk was added, [H, B, N, P, M], and x after the last one.
    """
    # The places of x before each chunk, and after the last one.
    out = torch.empty_like(added)
    places = [*out.unbind(2)[::step], torch.empty_like(first)]
    places[0].copy_(first)
    factors = carry[:, :, None].expand(-1, -1, added.shape[2], -1, -1)
    if masks is not None:
        factors = factors * masks.keeps
    chunks = zip(added.unbind(2)[::step], factors.unbind(2)[::step], strict=True)
    for n, (term, factor) in enumerate(chunks):
        torch.addcmul(term, factor, places[n], out=places[n + 1])
    return out, places[-1]


# The gradient of log_decay.


def _decay_gradient_scores(scores: Tensor, b: Tensor, tables: Tables) -> Tensor:
    """Computes the gradient of theta by pairs of tokens of the same chunk. Overwrites the scores.

    Token i reads token j with Lambda^(i-j), whose derivative by theta = log Lambda has the factor i
    - j. The gradient is the conjugate of sum_j T_j sum_i (i - j) tril(do v^T)_ij (E b)_i, where E_i
    T_j = Lambda^(i-j), do is the gradient of the outputs, and b are the weights of the readout. In
    the part of the keys, q, k and e, the gradient of X^k q, take the places of do, v and b.

    Args:
        scores: tril(do v^T) or tril(q k^T), [H, B, N, G L, L].
        b: conj(E b), or conj(E e), as interleaved pairs (re, im), [H, B N G L, 2M].
        tables: Powers of Lambda.

    Returns:
        [H, M] complex.
    """
    scores.unflatten(-2, (-1, tables.lag.shape[-1])).mul_(tables.lag)
    # Sums over batch and chunks for each token j of a chunk, [H, L, M].
    sums = torch.view_as_complex((scores.flatten(1, 3).mT @ b).unflatten(-1, (-1, 2)))
    return (conj_physical(tables.T) * sums).sum(1)


def _decay_gradient_reads(from_states: Tensor, b: Tensor, tables: Tables) -> Tensor:
    """Computes the gradient of theta by what tokens read of the states before their chunks.

    Token i reads the state X before the chunk with Lambda^(i+1), whose derivative by theta = log
    Lambda has the factor i + 1. The gradient is the conjugate of sum_i (i + 1) (E b)_i (S do_i); in
    the part of the keys, q and e take the places of do and b.

    Args:
        from_states: S do_i or S q_i from `_from_states`, [H, B N G L, 2M]. It is overwritten.
        b: conj(E b), or conj(E e), as interleaved pairs (re, im), [H, B N G L, 2M].
        tables: Powers of Lambda.

    Returns:
        [H, M] complex.
    """
    products = torch.view_as_complex(from_states.unflatten(-1, (-1, 2))).conj_physical_()
    products *= torch.view_as_complex(b.unflatten(-1, (-1, 2)))
    by_position = products.unflatten(1, (-1, len(tables.position))).sum(1)  # [H, L, M]
    return (tables.position[:, None] * by_position).sum(1)


def _decay_gradient_states(chunks: Chunks, S: Tensor, Z: Tensor) -> Tensor:
    """Computes the gradient of theta by what goes on into the states after the chunks.

    A power Lambda^n has the derivative n Lambda^n by theta = log Lambda. The S after a chunk has the
    gradient Z, and it is Lambda^L (S + sum_j T_j z_j) for inputs z_j. On their way to the end of the
    chunk, S has passed L tokens and z_j L - 1 - j. So the gradient is the conjugate of conj(Z)
    Lambda^L (L S + sum_j (L - 1 - j) T_j z_j). No weight exceeds L, however many tokens there are.

    Args:
        chunks: The chunks.
        S: States before the chunks, as in `_states`. They are overwritten.
        Z: Gradients of the states after the chunks, as in `_costates`.

    Returns:
        [H, M] complex.
    """
    segment, tables, masks, z, _ = chunks
    L = segment.length
    # `position` is j + 1. With documents, some tokens and S may be absent.
    weights = real_pairs((L - tables.position)[:, None] * tables.T)[:, None, None]
    if masks is not None:
        weights = weights * masks.writes
        S *= masks.keeps
    weights = weights.expand(*z.shape[:4], -1)
    real_pairs(S).flatten(0, 2).baddbmm_(z.mT.flatten(0, 2), weights.flatten(0, 2), beta=L)
    # With fast decays S is large and so is Z: Lambda^L comes first, so that no product overflows.
    S *= tables.carry[:, None]
    return S.conj_physical_().mul_(Z).sum((1, 2, 3))


# Weights of the readouts.


def _linear_kernel(readout: Tensor, tables: Tables, masks: Masks | None) -> tuple[Tensor, Tensor]:
    """Computes the linear readout's weights of a chunk.

    Args:
        readout: w as (Re w | Im w), [H, 2M].
        tables: Powers of Lambda; r is the middle of the chunk. With E_i = Lambda^(i-r) token i reads
            S = Lambda^(r+1) X, where X is the state before the chunk. With T_j = Lambda^(r-j) it
            reads the input of token j.
        masks: Masks for packed documents, or None.

    Returns:
        conj(E w), [H, L, M] complex, and D_ij = tril(Re(w^T Lambda^(i-j))), [H, 1, 1, L, L], the
        same for every chunk, or with documents [H, B, N, L, L].
    """
    w = conj_physical(tables.E * complex_readout(readout)[:, None])
    # The product of the real pairs of conj(x) and y is Re(x y).
    kernel = (real_pairs(w) @ real_pairs(tables.T).mT).tril_()[:, None, None]
    if masks is not None:
        kernel = kernel * masks.same
    return w, kernel
