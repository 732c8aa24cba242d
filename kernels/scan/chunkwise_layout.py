"""Tables, masks, layouts and complex pairs of the chunkwise form in plain PyTorch.

Shapes: B batch, T time, N chunks, L chunk length, H state heads, G query heads per state head, M
basis functions, P channels of a state, d width of a token's vector.

Rows are [H, B, N, G L, d]: the tokens of a chunk, one query head after the other. States are
[H, B, P, M] complex inside, and [B, H, M, P, 2] outside.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .tables import CHUNK, powers


class Tables(NamedTuple):
    """Powers of Lambda for chunks of L tokens, with r = L // 2 in the middle of the chunk.

    i and j are positions in the chunk, from 0 to L - 1. The state X before a chunk is used as S =
    Lambda^(r+1) X (the frame S).

    Attributes:
        E: Lambda^(i-r), [H, L, M] complex.
        T: Lambda^(r-j), [H, L, M] complex.
        enter: Lambda^(r+1), [H, 1, 1, M]: from the state X to the frame S.
        carry: Lambda^L, [H, 1, 1, M].
        leave: Lambda^-(r+1), [H, 1, 1, M]: from the frame S to the state X.
        lag: i - j, [L, L].
        position: i + 1, [L].
    """

    E: Tensor
    T: Tensor
    enter: Tensor
    carry: Tensor
    leave: Tensor
    lag: Tensor
    position: Tensor


class Segment(NamedTuple):
    """Chunks of one length that follow each other.

    Attributes:
        start: The first token.
        chunks: N, the number of chunks.
        length: L, the tokens of a chunk.
    """

    start: int
    chunks: int
    length: int

    def by_chunk(self, x: Tensor) -> Tensor:
        """Returns the segment's tokens by chunk: [B, T, ...] -> [B, N, L, ...] for N chunks."""
        stop = self.start + self.chunks * self.length
        return x[:, self.start : stop].unflatten(1, (self.chunks, self.length))


class Masks(NamedTuple):
    """Masks of zeros and ones for packed documents (docs/kernels.md, "Packed documents").

    d is a token's document, p the document of the token before the chunk (0 before the first chunk,
    as that of the initial state), l the document of the chunk's last token.

    Attributes:
        same: d_i == d_j, [1, B, N, L, L]: token i sees token j.
        reads: d_i == p, [1, B, N, L, 1]: token i reads the state before the chunk.
        writes: d_j == l, [1, B, N, L, 1]: token j is in the state after the chunk.
        keeps: p == l, [1, B, N, 1, 1]: the state before is in the state after.
    """

    same: Tensor
    reads: Tensor
    writes: Tensor
    keeps: Tensor

    @classmethod
    def build(
        cls, documents: Tensor | None, segment: Segment, dtype: torch.dtype
    ) -> "Masks | None":
        """Makes the masks of a segment.

        Args:
            documents: The id of each token's document, [B, T], or None for one document.
            segment: The segment.
            dtype: The dtype of the masks.

        Returns:
            The masks; None without documents.
        """
        if documents is None:
            return None
        # d, the document of each token, [B, N, L]; `last` (l), that of each chunk's last token, and
        # p, that of the token before each chunk, [B, N].
        d = segment.by_chunk(documents)
        if segment.start:
            before = documents[:, segment.start - 1 : segment.start]
        else:
            before = torch.zeros_like(d[:, :1, 0])
        last = d[:, :, -1]
        p = torch.cat((before, last[:, :-1]), dim=1)

        # Compare them, with axes of one for the places that do not matter. A leading axis of one
        # stands for the heads.
        same = d[..., None] == d[:, :, None]
        reads = (d == p[..., None])[..., None]
        writes = (d == last[..., None])[..., None]
        keeps = (p == last)[..., None, None]
        return cls(
            same=same[None].to(dtype),
            reads=reads[None].to(dtype),
            writes=writes[None].to(dtype),
            keeps=keeps[None].to(dtype),
        )

    def reads_by_row(self, rows: Tensor) -> Tensor:
        """Returns the mask `reads` once for each of G query heads: [1, B, N, G L, 1].

        Args:
            rows: Rows of the same tokens, [H, B, N, G L, any width]; only their shape is used.
        """
        return self.reads.repeat(1, 1, 1, rows.shape[3] // self.reads.shape[3], 1)


def segments(T: int) -> list[Segment]:
    """Cuts T tokens into all full chunks at once, and the ragged tail as one shorter chunk."""
    full = T // CHUNK
    tail = T % CHUNK
    result = []
    if full:
        result.append(Segment(0, full, CHUNK))
    if tail:
        result.append(Segment(T - tail, 1, tail))
    return result


def make_tables(log_decay: Tensor, L: int) -> Tables:
    """Computes the powers of Lambda that chunks of L tokens need.

    Args:
        log_decay: theta = log Lambda as real pairs, [H, M, 2].
        L: Tokens of a chunk.
    """
    # All powers from Lambda^-(r+1) to Lambda^(r+1), so that Lambda^n is at n + r + 1; and Lambda^L.
    r = L // 2
    exponents = torch.tensor([*range(-r - 1, r + 2), L], device=log_decay.device)
    table = torch.view_as_complex(powers(log_decay, exponents))  # [H, 2 r + 4, M]
    position = torch.arange(1, L + 1, dtype=log_decay.dtype, device=log_decay.device)
    return Tables(
        E=table[:, 1 : L + 1].contiguous(),
        T=table[:, 2 * r + 2 - L : 2 * r + 2].flip(1),
        enter=table[:, None, None, 2 * r + 2],
        carry=table[:, None, None, -1],
        leave=table[:, None, None, 0],
        lag=position[:, None] - position,
        position=position,
    )


def real_pairs(x: Tensor) -> Tensor:
    """Views complex numbers as interleaved pairs: [..., M] complex -> [..., 2M]."""
    return torch.view_as_real(x).flatten(-2)


def load_rows(parts: tuple[Tensor, ...], H: int, segment: Segment, dtype: torch.dtype) -> Tensor:
    """Copies the tokens of a segment into rows: [B, T, H G, d] each -> [H, B, N, G L, sum of d].

    The rows of a state head are the L tokens of a chunk, once for each of its G query heads.

    Args:
        parts: Vectors of d numbers for each token and each of H G heads: one tensor, or k and v. A
            row is one token's vectors of all parts, one after the other.
        H: Number of state heads.
        segment: Which tokens are copied: N chunks of L tokens that follow each other. Nothing is
            padded: the tail of a sequence is a segment of its own, one chunk with a smaller L.
        dtype: The dtype of the rows.
    """
    # Views of the parts, [H, B, N, G, L, d].
    views = [segment.by_chunk(x).unflatten(3, (H, -1)).permute(3, 0, 1, 4, 2, 5) for x in parts]
    widths = [x.shape[-1] for x in views]
    # Copy each to its columns of the result, which also changes the dtype.
    out = torch.empty(*views[0].shape[:-1], sum(widths), dtype=dtype, device=views[0].device)
    for target, x in zip(out.split(widths, dim=-1), views, strict=True):
        target.copy_(x)
    return out.flatten(3, 4)


def store_rows(out: Tensor, rows: Tensor, segment: Segment) -> None:
    """Writes rows [H, B, N, G L, d] to their tokens in `out` [B, T, H G, d].

    It is the reverse of `load_rows` of one part, for G query heads of each of the H heads of the
    state. The segment says which tokens they are: N chunks of L tokens.
    """
    # Put the axes in the order of `out`, and copy into a view of it, [B, N, L, H G, d].
    rows = rows.unflatten(3, (-1, segment.length)).permute(1, 2, 4, 0, 3, 5)  # [B, N, L, H, G, d]
    segment.by_chunk(out).unflatten(3, rows.shape[3:5]).copy_(rows)


def load_state(state: Tensor | None, B: int, P: int, log_decay: Tensor) -> Tensor:
    """Views a state in the layout of this module: [B, H, M, P, 2] -> [H, B, P, M] complex.

    Args:
        state: The state, or None for zeros.
        B: Number of sequences.
        P: Channels of a state.
        log_decay: theta = log Lambda, [H, M, 2]. Only its sizes and its dtype count.
    """
    H, M, _ = log_decay.shape
    if state is None:
        return log_decay.new_zeros(H, B, P, M, dtype=log_decay.dtype.to_complex())
    return torch.view_as_complex(state.contiguous()).permute(1, 0, 3, 2)


def store_state(X: Tensor) -> Tensor:
    """Copies a state: [H, B, P, M] complex -> [B, H, M, P, 2]."""
    H, B, P, M = X.shape
    out = torch.empty(B, H, M, P, 2, dtype=X.dtype.to_real(), device=X.device)
    return out.copy_(torch.view_as_real(X).permute(1, 0, 3, 2, 4))


def conjugated_mixing(mixing: Tensor) -> Tensor:
    """Returns J W for interleaved pairs (re, im), [H, 2M, 2M]; J = diag(I, -I) conjugates [Re; Im].

    One matrix serves forward and backward. The forward is a = X^k q, b = W a and o = Re(b^T X^v)
    for each token, with the key channels X^k and the value channels X^v of its state: conj(b) =
    (J W) a. In the backward, c = X^v do is the gradient of b (dL = Re(c^T db)), and e = J W^T J c
    that of a: conj(e) = (J W)^T c.

    Args:
        mixing: W on stacked [Re; Im], [H, 2M, 2M].
    """
    H = mixing.shape[0]
    M = mixing.shape[1] // 2
    # J changes the sign of the lower half. Then rows and columns (2, M) become (M, 2).
    w = torch.cat((mixing[:, :M], -mixing[:, M:]), dim=1).view(H, 2, M, 2, M)
    return w.permute(0, 2, 1, 4, 3).reshape(H, 2 * M, 2 * M)


def conjugated_mixing_gradient(d_weights: Tensor) -> Tensor:
    """Returns the gradient of W, [H, 2M, 2M], from the gradient of `conjugated_mixing`."""
    H = d_weights.shape[0]
    M = d_weights.shape[1] // 2
    # Rows and columns (M, 2) become (2, M) again, and the lower half changes its sign.
    upper, lower = d_weights.view(H, M, 2, M, 2).permute(2, 0, 1, 4, 3).reshape(2, H, M, 2 * M)
    return torch.cat((upper, -lower), dim=1)


def complex_readout(readout: Tensor) -> Tensor:
    """Returns the linear readout's w, (Re w | Im w) [H, 2M], as complex numbers, [H, M]."""
    return torch.complex(*readout.unflatten(1, (2, -1)).unbind(1))


def complex_like(pairs: Tensor, states: Tensor) -> Tensor:
    """Views interleaved pairs (re, im) as complex numbers in the shape of `states`.

    Args:
        pairs: The pairs, [H, B N P, 2M]: P channels of N chunks in each of B sequences.
        states: A tensor [H, B, N, P, M]; only the shape is used.
    """
    return torch.view_as_complex(pairs.view(*states.shape, 2))


def multiply_by_power(a: Tensor, E: Tensor) -> Tensor:
    """Multiplies every row of a, [H, B N G L, 2M] in pairs, by E of its position, in place.

    Args:
        a: The rows, the L tokens of a chunk one after the other.
        E: A complex factor for each position in a chunk, [H, L, M].

    Returns:
        a.
    """
    H, L, M = E.shape
    torch.view_as_complex(a.view(H, -1, L, M, 2)).mul_(E[:, None])
    return a
