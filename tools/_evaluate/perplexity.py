"""Perplexity against context length, for `evaluate`: how well text is predicted after 1, 2, ... up to L tokens of context.

The protocol:

1. A document is its tokens and those that end it, as in training (`Documents`). `packed` joins all documents of a corpus into
   one, in order and with the tokens that begin them between, which is what training reads; it is for corpora whose documents
   are shorter than the lengths.
2. A span is as many consecutive tokens as the longest length has. Spans tile each document from its start; what is left of it,
   and documents shorter than one span, are not used. Where documents are joined, all that the spans hold is one.
3. For a length L each span is cut into windows of L tokens, without overlap. A window is read after the tokens that begin a
   document (or, if nothing does, those that end the one before) and from an empty state, as a document in training. All its L
   tokens are scored, token p with p tokens of the window before it; the state is carried over pieces of 2,048 tokens. What
   remains of a span that L does not divide is not scored: with the paper's lengths, less than one window of a joined corpus;
   of documents apart, the last seventh of every span at 4 K and its last three at 8 K, so that there lengths differ in text
   as well.
4. Perplexity is exp of the negative log-likelihood (NLL) in nats per scored token, of a corpus as a whole; bits per byte is
   its NLL / ln 2 per byte of the scored tokens' text, in the corpus: what the tokenizer loses of it (unknown characters, white
   space) counts. Means over corpora are arithmetic means of perplexities.

The paper gives perplexities at 4 K, 8 K and 14 K (here 4,096, 8,192 and 14,336) per corpus and as the mean over five. It does
not say how documents were cut or joined, so figures of ours stand beside the paper's only in their shape.
"""

import math
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


def text_sizes(tokenizer, text: str, ids: list[int]) -> np.ndarray:
    """UTF-8 bytes of a document that each of its tokens completes, int64: in all, the bytes of `text`.

    Tokens are decoded, and what decoding adds or loses is shared out over the document in proportion.
    """
    decoder = StreamDecoder(tokenizer)
    decoded = np.array([len(decoder.push(token).encode()) for token in ids], np.int64)
    if not decoded.any():
        decoded[:] = 1
    ends = decoded.cumsum()
    ends = ends * len(text.encode()) // ends[-1]
    return np.diff(ends, prepend=0)


def read_spans(
    corpus: str, tokenizer, size: int, *, text_field="text", packed=False, limit=None
) -> np.ndarray:
    """Cuts a corpus into spans of `size` tokens (see above), at most `limit` of them.

    Returns:
        Tokens and the bytes of text that each completes, int32 [2, N, S]. If packed, one span of all tokens.
    Raises:
        ValueError: There is no span.
    """
    begin = tokenizer.documents.begin
    end = tokenizer.documents.end

    def encode(document: str) -> tuple[str, list[int]]:
        return document, [*tokenizer.encode(document), *end]

    spans = []
    longest = 0
    rest = np.empty((2, 0), np.int32)
    documents = read_documents([corpus], text_field, convert=encode)
    for document, ids in tqdm(documents, desc=Path(corpus).name, unit=" documents", disable=None):
        longest = max(longest, len(ids))
        if not ids or (not packed and len(ids) < size):
            continue
        text = np.array([ids, text_sizes(tokenizer, document, ids)], np.int32)
        if not packed:
            rest = text
        elif spans or rest.size:
            # Before the first document stands what every window is read after.
            between = np.array([begin, [0] * len(begin)], np.int32)
            rest = np.concatenate([rest, between, text], axis=1)
        else:
            rest = text
        while rest.shape[1] >= size and len(spans) != limit:
            spans.append(rest[:, :size])
            rest = rest[:, size:]
        if len(spans) == limit:
            break
    if not spans:
        lengths = f"its longest document has {longest:,}"
        advice = "--packed, which joins documents"
        if packed:
            lengths = f"all documents have {rest.shape[1]:,}"
            advice = "more text"
        raise ValueError(
            f"{corpus} is too short for {size:,} tokens: {lengths}. Give shorter --lengths or {advice}."
        )
    text = np.stack(spans, axis=1)
    return text.reshape(2, 1, -1) if packed else text


@torch.inference_mode()
def window_losses(model, windows: Tensor, start: list[int]) -> Tensor:
    """NLL of every token of windows [B, L] after the tokens `start`, float32 [B, L]; a piece's logits at a time."""
    *before, last = start
    inputs = F.pad(windows[:, :-1], (1, 0), value=last)
    state = model.init_state(windows.shape[0], len(before) + windows.shape[1])
    if before:
        model(torch.tensor([before], device=windows.device).expand(len(windows), -1), state)
    losses = []
    for tokens, targets in zip(
        inputs.split(PREFILL_CHUNK, 1), windows.split(PREFILL_CHUNK, 1), strict=True
    ):
        logits = model(tokens, state)
        # Row by row: the float32 logits of all rows at once would be the largest thing in memory.
        rows = [
            F.cross_entropy(x.float(), y, reduction="none")
            for x, y in zip(logits, targets, strict=True)
        ]
        losses.append(torch.stack(rows))
    return torch.cat(losses, dim=1)


def measure(
    model, spans: np.ndarray, length: int, start: list[int], *, batch: int, name: str = ""
) -> dict:
    """One model on one corpus at one length: a row of the results, see the protocol. spans: [2, N, S] of `read_spans`."""
    device = model.tok_embeddings.weight.device
    used = spans[:, :, : spans.shape[2] // length * length]
    windows = torch.from_numpy(used[0].reshape(-1, length).astype(np.int64))
    text = int(used[1].sum())
    total = 0.0
    with tqdm(
        total=windows.numel(),
        desc=f"{name} {length:,}",
        unit=" tokens",
        unit_scale=True,
        disable=None,
    ) as bar:
        for part in windows.split(batch):
            total += window_losses(model, part.to(device), start).double().sum().item()
            bar.update(part.numel())
    nll = total / windows.numel()
    return {
        "length": length,
        "windows": len(windows),
        "tokens": windows.numel(),
        "bytes": text,
        "nll": nll,
        "perplexity": float(np.exp(nll)),
        "bits per byte": total / math.log(2) / text if text else None,
    }
