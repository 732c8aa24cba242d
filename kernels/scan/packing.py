"""Documents packed into one sequence: a state stops at the end of its document.

Shapes: B batch, T time, N chunks, L chunk length, H state heads, G query heads per state head, R key features, D value
width, P = R + D channels, M basis functions. `documents` is [B, T] int32: numbers that do not fall along T, 0 for the
tokens that continue the initial state.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

ALLOWED = "documents must number the tokens of each sequence from 0 to 2^31 - 1, never falling along T"


def checked_documents(documents: Tensor | None, tokens: Tensor, check_numbers: bool = True) -> Tensor | None:
    """documents [B, T] of tokens [B, T, ...] as contiguous int32; None for None.

    Raises: ValueError with what was got. Wrong numbers raise on a CPU; elsewhere, and where torch.compile traces, they fail an
    asynchronous assertion: the host waits for nothing, and CUDA ends the process with the message at the next synchronisation
    (a RuntimeError on a compiled CPU). check_numbers False: they are not looked at.
    """
    if documents is None:
        return None
    if documents.shape != tokens.shape[:2] or documents.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"documents is {documents.dtype} of shape {tuple(documents.shape)}; expected int32 or int64 of shape "
            f"[B, T] = {tuple(tokens.shape[:2])}: the number of each token's document"
        )
    if documents.device != tokens.device:
        raise ValueError(f"documents is on {documents.device} and k (or z, x) on {tokens.device}; move one of them")
    if check_numbers:
        _check_numbers(documents)
    return documents.to(torch.int32).contiguous()


def _check_numbers(documents: Tensor) -> None:
    before = F.pad(documents, (1, 0))[:, :-1]  # 0 before the first: it must not be negative
    wrong = documents < before
    if documents.dtype == torch.int64:
        wrong = wrong | (documents >= 2**31)
    right = ~wrong.any()
    if torch.compiler.is_compiling() or type(documents) is not Tensor or documents.device.type != "cpu":
        torch._assert_async(right, ALLOWED)  # pyright: ignore[reportPrivateImportUsage]
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
