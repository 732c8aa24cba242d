"""Packed documents for a backend that has no masks: every document by itself, in as many calls as there are documents."""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def forward_by_document(run: Callable) -> Callable:
    """Give `run(*tokens, log_decay, table, initial_state, chunk_size, need_final=True)` the keyword `documents`, [B, T].

    run -> (output [B, T, ...], final state or None) of sequences that are one document each; tokens [B, T, ...].
    """

    @functools.wraps(run)
    def forward(*args, documents: Tensor | None = None, need_final: bool = True) -> tuple[Tensor, Tensor | None]:
        if documents is None:
            return run(*args, need_final=need_final)
        *tokens, log_decay, table, initial_state, chunk_size = args
        outputs, finals = [], []
        for b, pieces in enumerate(_pieces(documents)):
            row, final = [], None
            for start, stop, number in pieces:
                state = None if initial_state is None or number else initial_state[b : b + 1]
                piece = (x[b : b + 1, start:stop] for x in tokens)
                out, final = run(*piece, log_decay, table, state, chunk_size, need_final=need_final)
                row.append(out)
            outputs.append(torch.cat(row, dim=1))
            finals.append(final)
        return torch.cat(outputs), torch.cat(finals) if need_final else None

    return forward


def backward_by_document(run: Callable) -> Callable:
    """The same for `run(d_out, d_final, *tokens, log_decay, table, initial_state, chunk_size, need_decay)` -> gradients of
    tokens, log_decay, table and initial state."""

    @functools.wraps(run)
    def backward(d_out, d_final, *args, documents: Tensor | None = None) -> tuple[Tensor | None, ...]:
        *tokens, log_decay, table, initial_state, chunk_size, need_decay = args
        if documents is None:
            return run(d_out, d_final, *args)
        n = len(tokens)
        rows, sums = [], [None, None]
        d_initial = None if initial_state is None else torch.zeros_like(initial_state)
        for b, pieces in enumerate(_pieces(documents)):
            parts = []
            for start, stop, number in pieces:
                state = None if initial_state is None or number else initial_state[b : b + 1]
                d_state = d_final[b : b + 1] if d_final is not None and stop == documents.shape[1] else None
                piece = (x[b : b + 1, start:stop] for x in tokens)
                tables = log_decay, table, state, chunk_size, need_decay
                grads = run(d_out[b : b + 1, start:stop], d_state, *piece, *tables)
                parts.append(grads[:n])
                sums = [y if x is None or y is None else x + y for x, y in zip(sums, grads[n:-1], strict=True)]
                if d_initial is not None and state is not None:
                    d_initial[b] = grads[-1][0]
            rows.append([torch.cat(x, dim=1) for x in zip(*parts, strict=True)])
        return *(torch.cat(x) for x in zip(*rows, strict=True)), *sums, d_initial

    return backward


def _pieces(documents: Tensor) -> Iterator[list[tuple[int, int, int]]]:
    """Per sequence (first token, one past the last, number) of every document."""
    for row in documents.cpu():
        numbers, lengths = torch.unique_consecutive(row, return_counts=True)
        stops = lengths.cumsum(0)
        yield list(zip((stops - lengths).tolist(), stops.tolist(), numbers.tolist(), strict=True))
