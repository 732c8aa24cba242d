"""Perplexity against context length, for `evaluate`: how well text is predicted after 1, 2, ... up to L tokens of context.

The protocol:

1. A document is its tokens and the end-of-text token behind them, as in training. `packed` joins all documents of a corpus into
   one, in order, which is what training reads; it is for corpora whose documents are shorter than the lengths.
2. A span is as many consecutive tokens as the longest length has. Spans tile each document from its start; what is left of it,
   and documents shorter than one span, are not used. Where documents are joined, all that the spans hold is one.
3. For a length L each span is cut into windows of L tokens, without overlap. A window is read after an end-of-text token and
   from an empty state, as a document in training. All its L tokens are scored, token p with p tokens of the window before it;
   the state is carried over pieces of 2,048 tokens. What remains of a span that L does not divide is not scored: with the
   paper's lengths, less than one window of a joined corpus; of documents apart, the last seventh of every span at 4 K and its
   last three at 8 K, so that there lengths differ in text as well.
4. Perplexity is exp of the negative log-likelihood (NLL) in nats per scored token, of a corpus as a whole; bits per byte is
   its NLL / ln 2 per byte of the scored tokens' text. Means over corpora are arithmetic means of perplexities.

The paper gives perplexities at L = 4 K, 8 K and 14 K (here 4,096, 8,192 and 14,336) per corpus and as the arithmetic mean over
five. It does not say how documents were cut or joined or how many tokens were scored, so figures of ours stand beside each
other, and beside the paper's only in their shape.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from interdomain.data import StreamDecoder
from interdomain.data.readers import read_documents
from interdomain.model.generation import PREFILL_CHUNK

# Shapes: B windows at once, L tokens of a window, N spans, S tokens of a span.

BUCKETS = 32  # equal parts of a length, for perplexity by position


@dataclass(frozen=True)
class Spans:
    """A corpus as one tokenizer has it. ids, sizes: tokens and the bytes of text that each completes, int32 [N, S]."""

    ids: np.ndarray
    sizes: np.ndarray
    documents: int  # that were read
    skipped: int  # of them shorter than a span


def text_sizes(tokenizer, ids: np.ndarray) -> list[int]:
    """UTF-8 bytes of text that each token of a document completes."""
    decoder = StreamDecoder(tokenizer)
    return [len(decoder.push(token).encode()) for token in ids]


def read_spans(corpus: str, tokenizer, size: int, *, text_field="text", packed=False, limit=None) -> Spans:
    """Cut a corpus into spans of `size` tokens (see above), at most `limit` of them; packed: one span of as many tokens.

    Raises: ValueError if there is none.
    """
    spans, read, skipped, longest, rest = [], 0, 0, 0, np.empty((2, 0), np.int32)
    documents = read_documents([corpus], text_field)
    for document in tqdm(documents, desc=Path(corpus).name, unit=" documents", disable=None):
        ids = np.array(tokenizer.encode(document.text, add_eos=True))
        read, longest = read + 1, max(longest, len(ids))
        if not packed and len(ids) < size:
            skipped += 1
            continue
        text = np.array([ids, text_sizes(tokenizer, ids)], np.int32)  # [2, T]
        rest = np.concatenate([rest, text], axis=1) if packed else text
        count = rest.shape[1] // size
        spans += np.split(rest[:, : count * size], count, axis=1) if count else []
        rest = rest[:, count * size :]
        if limit is not None and len(spans) >= limit:
            break
    if not spans:
        what = f"all {read:,} documents have {rest.shape[1]:,}" if packed else f"its longest document has {longest:,}"
        advice = "more text" if packed else "--packed, which joins documents"
        raise ValueError(f"{corpus} is too short for {size:,} tokens: {what}. Give shorter --lengths or {advice}.")
    ids, sizes = np.stack(spans[:limit], axis=1)
    if packed:
        ids, sizes = ids.reshape(1, -1), sizes.reshape(1, -1)
    return Spans(ids, sizes, read, skipped)


@torch.inference_mode()
def window_losses(model, windows: Tensor, start: int) -> Tensor:
    """NLL of every token of windows [B, L] after the token `start`, float32 [B, L]; a piece's logits at a time."""
    inputs = F.pad(windows[:, :-1], (1, 0), value=start)
    state = model.init_state(windows.shape[0], windows.shape[1])
    losses = []
    for tokens, targets in zip(inputs.split(PREFILL_CHUNK, 1), windows.split(PREFILL_CHUNK, 1), strict=True):
        logits = model(tokens, state)
        # Row by row: the float32 logits of all rows at once would be the largest thing in memory.
        rows = [F.cross_entropy(x.float(), y, reduction="none") for x, y in zip(logits, targets, strict=True)]
        losses.append(torch.stack(rows))
    return torch.cat(losses, dim=1)


def measure(model, spans: Spans, length: int, start: int, *, batch: int, name: str = "") -> dict:
    """One model on one corpus at one length: a row of the results, see the protocol. `positions`: by place in the window."""
    used = spans.ids.shape[1] // length * length
    windows = torch.from_numpy(spans.ids[:, :used].reshape(-1, length).astype(np.int64))
    device = model.tok_embeddings.weight.device
    by_position = torch.zeros(length, dtype=torch.float64)
    with tqdm(total=windows.numel(), desc=f"{name} {length:,}", unit=" tokens", unit_scale=True, disable=None) as bar:
        for part in windows.split(batch):
            by_position += window_losses(model, part.to(device), start).double().sum(0).cpu()
            bar.update(part.numel())
    by_position /= len(windows)
    nll, text = by_position.mean().item(), int(spans.sizes[:, :used].sum())
    parts = by_position.tensor_split(min(BUCKETS, length))
    starts = np.cumsum([0, *map(len, parts[:-1])])
    return {
        "length": length,
        "documents": spans.documents,
        "too short": spans.skipped,
        "windows": len(windows),
        "tokens": windows.numel(),
        "bytes": text,
        "nll": nll,
        "perplexity": perplexity(nll),
        "bits per byte": nll * windows.numel() / math.log(2) / text if text else None,
        "positions": [float(start + len(part) / 2) for start, part in zip(starts, parts, strict=True)],
        "perplexity by position": [perplexity(part.mean().item()) for part in parts],
    }


def perplexity(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf
