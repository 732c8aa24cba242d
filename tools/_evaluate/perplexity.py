"""Measures perplexity against context length, for `evaluate`.

It shows how well text is predicted after 1, 2, ... up to L tokens of context. The protocol:

1. A document is its tokens and the tokens that end it, as in training (`Documents`). `packed` joins
   all documents of a corpus into one, in order, with the tokens that begin a document between them.
   Training reads such text. It is for corpora whose documents are shorter than the lengths.
2. A span has as many consecutive tokens as the longest length. Spans tile each document from its
   start. The rest of a document, and documents that are shorter than a span, are not used. Joined
   documents give one span, which holds a whole number of the longest lengths.
3. For a length L each span is cut into windows of L tokens, without overlap. The model reads a
   window as it read a document in training: from an empty state, after the tokens that begin a
   document (or, if there are none, after those that end one). All L tokens of the window are
   scored. Token p has p tokens of the window before it. The state is carried over pieces of 2,048
   tokens. The rest of a span that L does not divide is not scored. With the paper's lengths that is
   less than one window of a joined corpus. Of separate documents it is the last seventh of every
   span at 4 K and its last three sevenths at 8 K, so the lengths differ in text, too.
4. Perplexity is exp of the mean negative log-likelihood (NLL) in nats per scored token of a corpus.
   Bits per byte is NLL / ln 2 per byte of the scored tokens' text in the corpus: text that the
   tokenizer loses (unknown characters, white space) counts. Means over corpora are arithmetic means
   of perplexities.

The paper gives perplexities at 4 K, 8 K and 14 K (here 4,096, 8,192 and 14,336) per corpus and as
the mean over five. It does not say how documents were cut or joined, so only the shape of our
figures can be compared with the paper's.

Shapes: B windows of a batch, L tokens of a window, N spans, S tokens of a span.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from interdomain.data import StreamDecoder, Tokenizer
from interdomain.data.readers import read_documents
from interdomain.model import Transformer
from interdomain.model.generation import PREFILL_CHUNK
from interdomain.tools._progress import progress_bar


def text_sizes(tokenizer: Tokenizer, text: str, ids: list[int]) -> np.ndarray:
    """Returns the UTF-8 bytes of a document that each of its tokens completes.

    Tokens are decoded one after the other. Bytes that decoding adds or loses are shared out over
    the document in proportion.

    Args:
        tokenizer: The tokenizer that made `ids`.
        text: The document.
        ids: The tokens of `text`, and those that end it.

    Returns:
        int64 [len(ids)]. The sum is the size of `text`.
    """
    # A character of several tokens counts for its last one.
    decoder = StreamDecoder(tokenizer)
    decoded = np.array([len(decoder.push(token).encode()) for token in ids], np.int64)
    # If the tokenizer knows nothing of the text, all tokens count the same.
    if not decoded.any():
        decoded[:] = 1
    # Scale the end of each token to the size of the document. The last one is exact.
    ends = decoded.cumsum()
    ends = ends * len(text.encode()) // ends[-1]
    return np.diff(ends, prepend=0)


def read_spans(
    corpus: str,
    tokenizer: Tokenizer,
    size: int,
    *,
    text_field: str = "text",
    packed: bool = False,
    limit: int | None = None,
) -> np.ndarray:
    """Cuts a corpus into spans (steps 1 and 2 of the protocol above).

    Args:
        corpus: A file, a folder or a glob.
        tokenizer: The tokenizer of the models that read the spans.
        size: The number of tokens of a span, S.
        text_field: The column or JSON field with the text.
        packed: True joins the documents. The spans then stand one after the other in a single one.
        limit: The largest number of spans of `size` tokens. None reads the whole corpus.

    Returns:
        The tokens and the bytes of text that each completes, int32 [2, N, S]; if packed, [2, 1, N *
        S].

    Raises:
        ValueError: The corpus is too short for one span.
    """
    begin = tokenizer.documents.begin
    end = tokenizer.documents.end

    def encode(document: str) -> tuple[str, list[int]]:
        return document, [*tokenizer.encode(document), *end]

    spans = []
    longest = 0
    rest = np.empty((2, 0), np.int32)  # tokens and bytes that are not in a span yet
    documents = read_documents([corpus], text_field, convert=encode)
    for document, ids in progress_bar(documents, desc=Path(corpus).name, unit=" documents"):
        longest = max(longest, len(ids))
        if not ids or (not packed and len(ids) < size):
            continue
        text = np.array([ids, text_sizes(tokenizer, document, ids)], np.int32)
        is_first = not spans and not rest.size
        if packed and not is_first:
            # The tokens that begin a document. Those of the first one are read before every window.
            between = np.array([begin, [0] * len(begin)], np.int32)
            text = np.concatenate([rest, between, text], axis=1)
        rest = text
        # Cut spans from the front. In a packed corpus the rest is continued by the next document.
        while rest.shape[1] >= size and len(spans) != limit:
            spans.append(rest[:, :size])
            rest = rest[:, size:]
        if len(spans) == limit:
            break
    if not spans:
        tokens = f"its longest document has {longest:,}"
        if packed:
            tokens = f"all documents have {rest.shape[1]:,}"
        raise ValueError(
            f"{corpus} is too short for {size:,} tokens: {tokens}. Give shorter --lengths, more text, or --packed, which "
            "joins documents."
        )
    text = np.stack(spans, axis=1)
    if packed:
        return text.reshape(2, 1, -1)
    return text


@torch.inference_mode()
def window_losses(model: Transformer, windows: Tensor, start: list[int]) -> Tensor:
    """Returns the NLL of every token of windows that are read after some tokens.

    Args:
        model: The model, in inference mode.
        windows: int64 [B, L].
        start: The tokens that begin a document; at least one.

    Returns:
        float32 [B, L], in nats.
    """
    # Each token is predicted from the one before it, the first from the last of `start`.
    *before, last = start
    inputs = F.pad(windows[:, :-1], (1, 0), value=last)
    state = model.init_state(windows.shape[0], len(before) + windows.shape[1])
    if before:
        model(torch.tensor([before], device=windows.device).expand(len(windows), -1), state)
    losses = []
    pieces = zip(inputs.split(PREFILL_CHUNK, 1), windows.split(PREFILL_CHUNK, 1), strict=True)
    for tokens, targets in pieces:
        logits = model(tokens, state)
        # Row by row: the float32 logits of all rows at once would be the largest tensor in memory.
        rows = []
        for row_logits, row_targets in zip(logits, targets, strict=True):
            rows.append(F.cross_entropy(row_logits.float(), row_targets, reduction="none"))
        losses.append(torch.stack(rows))
    return torch.cat(losses, dim=1)


def measure(
    model: Transformer,
    spans: np.ndarray,
    length: int,
    start: list[int],
    *,
    batch: int,
    name: str = "",
) -> dict[str, Any]:
    """Measures one model on one corpus at one length.

    Args:
        model: The model.
        spans: [2, N, S] of `read_spans`.
        length: The number of tokens of a window, L.
        start: The tokens that begin a document, which are read before every window.
        batch: The number of windows at once, B.
        name: The text before the progress bar.

    Returns:
        A row of the results: numbers of windows, tokens and bytes, "nll" in nats per token,
        "perplexity" and "bits per byte".
    """
    device = model.tok_embeddings.weight.device
    # Cut the spans into windows. The last tokens of a span that make no window are left out.
    used = spans[:, :, : spans.shape[2] // length * length]
    windows = torch.from_numpy(used[0].reshape(-1, length).astype(np.int64))
    text_bytes = int(used[1].sum())
    # Sum the losses in double precision.
    total = 0.0
    title = f"{name} {length:,}"
    with progress_bar(total=windows.numel(), desc=title, unit=" tokens", unit_scale=True) as bar:
        for part in windows.split(batch):
            total += window_losses(model, part.to(device), start).double().sum().item()
            bar.update(part.numel())
    nll = total / windows.numel()
    return {
        "length": length,
        "windows": len(windows),
        "tokens": windows.numel(),
        "bytes": text_bytes,
        "nll": nll,
        "perplexity": math.exp(nll),
        "bits per byte": total / math.log(2) / text_bytes,
    }
