"""Documents packed into one sequence: a state stops at the end of its own.

Shapes: B batch, T time, N chunks, L chunk length, H state heads, G query heads per state head, R key features, D value
width, P = R + D channels, M basis functions. `documents` is [B, T] int32: numbers that do not fall along T, 0 for the
tokens that continue the initial state.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

ALLOWED = "documents must number the tokens of each sequence from 0 to 2^31 - 1, never falling along T"


def check_numbers(documents: Tensor) -> None:
    """Check numbers [B, T], int32 or int64. Raises ValueError on a CPU, with what was got.

    Elsewhere, and where torch.compile traces, an asynchronous assertion: the host waits for nothing, and CUDA ends the process
    with its message at the next synchronisation (a RuntimeError on a compiled CPU).
    """
    before = F.pad(documents, (1, 0))[:, :-1]  # 0 before the first: it must not be negative
    wrong = documents < before
    if documents.dtype == torch.int64:
        wrong = wrong | (documents >= 2**31)
    right = ~wrong.any()
    if torch.compiler.is_compiling() or type(documents) is not Tensor or documents.device.type != "cpu":
        torch._assert_async(right, ALLOWED)
    elif not right:
        b, t = wrong.nonzero()[0].tolist()
        number, last = documents[b, t].item(), before[b, t].item()
        got = f"{number} at the first token" if t == 0 else f"{number} after {last} at token {t}"
        raise ValueError(f"{ALLOWED}: got {got} of sequence {b}. Sort the documents, or number them in their order.")


class Masks(NamedTuple):
    """Which parts of a chunk belong together, as zeros and ones. d is a token's document, p that of the token before the
    chunk (0 before the first: the initial state's), l that of its last token; numbers do not fall, so that equal is one."""

    same: Tensor  # d_i == d_j, [1, B, N, L, L]
    reads: Tensor  # d_i == p, [1, B, N, 1, L]: token i reads the state before the chunk
    writes: Tensor  # d_j == l, [1, B, N, 1, L]: token j is in the state after it
    keeps: Tensor  # p == l, [1, B, N, 1, 1]: the state before is in the state after

    @classmethod
    def of(cls, documents: Tensor | None, segment, dtype: torch.dtype) -> "Masks | None":
        if documents is None:
            return None
        d = segment.of(documents)
        before = documents[:, segment.start - 1 : segment.start] if segment.start else torch.zeros_like(d[:, :1, 0])
        last = d[:, :, -1]
        p = torch.cat((before, last[:, :-1]), dim=1)
        masks = d[..., None] == d[:, :, None], (d == p[..., None])[:, :, None], (d == last[..., None])[:, :, None]
        return cls(*(m[None].to(dtype) for m in (*masks, (p == last)[..., None, None])))

    def of_rows(self, rows: Tensor) -> Tensor:
        """`reads` for rows [H, B, N, G L, d], G heads one after the other."""
        return self.reads.mT.repeat(1, 1, 1, rows.shape[3] // self.reads.shape[-1], 1)


# For an implementation that has no masks: every document by itself, on as many calls as there are documents.


def forward_by_document(
    run: Callable,
    tokens: tuple[Tensor, ...],
    tables: tuple[Tensor, ...],
    initial_state: Tensor | None,
    chunk_size: int,
    documents: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """`run(*tokens, *tables, initial_state, chunk_size)` -> (output [B, T, ...], final state or None) of whole sequences."""
    outputs, finals = [], []
    for b, pieces in enumerate(_pieces(documents)):
        row = []
        for start, stop, number in pieces:
            state = None if initial_state is None or number else initial_state[b : b + 1]
            out, final = run(*(x[b : b + 1, start:stop] for x in tokens), *tables, state, chunk_size)
            row.append(out)
        outputs.append(torch.cat(row, dim=1))
        finals.append(final)
    return torch.cat(outputs), None if finals[0] is None else torch.cat(finals)


def backward_by_document(
    run: Callable,
    d_out: Tensor,
    d_final: Tensor | None,
    tokens: tuple[Tensor, ...],
    tables: tuple[Tensor, ...],
    initial_state: Tensor | None,
    chunk_size: int,
    need_decay: bool,
    documents: Tensor,
) -> tuple[Tensor | None, ...]:
    """-> gradients of tokens, of tables (the first is log_decay's) and of the initial state, as `run` gives them."""
    n = len(tokens)
    rows, sums = [], [None] * len(tables)
    d_initial = None if initial_state is None else torch.zeros_like(initial_state)
    for b, pieces in enumerate(_pieces(documents)):
        parts = []
        for start, stop, number in pieces:
            state = None if initial_state is None or number else initial_state[b : b + 1]
            d_state = d_final[b : b + 1] if d_final is not None and stop == documents.shape[1] else None
            piece = (x[b : b + 1, start:stop] for x in tokens)
            grads = run(d_out[b : b + 1, start:stop], d_state, *piece, *tables, state, chunk_size, need_decay)
            parts.append(grads[:n])
            sums = [y if x is None or y is None else x + y for x, y in zip(sums, grads[n:-1], strict=True)]
            if state is not None:
                d_initial[b] = grads[-1][0]
        rows.append([torch.cat(x, dim=1) for x in zip(*parts, strict=True)])
    return *(torch.cat(x) for x in zip(*rows, strict=True)), *sums, d_initial


def _pieces(documents: Tensor) -> Iterator[list[tuple[int, int, int]]]:
    """Per sequence (first token, one past the last, number) of every document."""
    for row in documents.cpu():
        numbers, lengths = torch.unique_consecutive(row, return_counts=True)
        stops = lengths.cumsum(0)
        yield list(zip((stops - lengths).tolist(), stops.tolist(), numbers.tolist(), strict=True))
