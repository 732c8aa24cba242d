"""Perplexity against context length, for `evaluate`: how well text is predicted after 1, 2, ... up to L tokens of context.

The protocol:

1. A document is its tokens and the end-of-text token behind them, as in training. `packed` joins all documents of a corpus into
   one, in order, which is what training reads; it is for corpora whose documents are shorter than the lengths.
2. A span is as many consecutive tokens as the longest length has. Spans tile each document from its start; what is left of it,
   and documents shorter than one span, are not used. Where documents are joined, all that the spans hold is one.
3. For a length L each span is cut into windows of L tokens, without overlap. A window is read after an end-of-text token and
   from an empty state, as a document in training. All its L tokens are scored, token p with p tokens of the window before it;
   the state is carried over pieces of `chunk` tokens. What remains of a span that L does not divide is not scored: nothing
   where each length divides the longest; less than one window of a joined corpus; of documents apart, with the paper's
   lengths, the last seventh of every span at 4 K and its last three at 8 K, so that there lengths differ in text as well.
4. Perplexity is exp of the negative log-likelihood (NLL) in nats per scored token, of a corpus as a whole; bits per byte is
   its NLL / ln 2 per byte of the scored tokens' text. Means over corpora are arithmetic means of perplexities.

The paper gives perplexities at L = 4 K, 8 K and 14 K (here 4,096, 8,192 and 14,336) per corpus and as the arithmetic mean over
five. It does not say how documents were cut or joined or how many tokens were scored, so figures of ours stand beside each
other, and beside the paper's only in their shape.
"""

import glob
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from interdomain.data import StreamDecoder, TokenCorpus
from interdomain.data.corpus import MANIFEST, read_manifest
from interdomain.data.readers import find_inputs, list_spans, read_documents

from ._bench import say

# Shapes: B windows at once, L tokens of a window, N spans, S tokens of a span.

BUCKETS = 32  # equal parts of a length, for perplexity by position


@dataclass(frozen=True)
class Spans:
    """A corpus as one tokenizer has it. ids, sizes: tokens and the bytes of text that each completes, int32 [N, S]."""

    ids: np.ndarray
    sizes: np.ndarray
    documents: int  # that were read
    skipped: int  # of them shorter than a span


def is_prepared(corpus: str) -> bool:
    """Whether `corpus` holds tokens: a folder of prepare_data's, or .bin/.idx shards by prefix, file or glob."""
    found = [*glob.glob(corpus), *glob.glob(f"{corpus}.idx")]
    return (Path(corpus) / MANIFEST).is_file() or any(name.endswith((".bin", ".idx")) for name in found)


def check_corpus(corpus: str, text_field: str) -> None:
    """Raises FileNotFoundError, ValueError for what cannot be read, as far as that shows without reading it."""
    if not is_prepared(corpus):
        list(list_spans(find_inputs([corpus]).files, text_field))


def read_corpus(corpus: str, tokenizer, text_field: str) -> Iterator[np.ndarray]:
    """The documents of a corpus, each with its end-of-text token. Raises ValueError if another tokenizer made its tokens."""
    if not is_prepared(corpus):
        for text in read_documents([corpus], text_field):
            yield np.array(tokenizer.encode(text, add_eos=True))
        return
    if (Path(corpus) / MANIFEST).is_file():
        manifest = read_manifest(corpus)
        if manifest["tokenizer"]["sha256"] != tokenizer.sha256:
            raise ValueError(
                f"{corpus} was prepared with another tokenizer than the model's. Give the text itself, or prepare it with "
                f"{tokenizer.path}."
            )
        # No run trains on the validation split; a corpus prepared to be measured on may have none.
        split = "validation" if manifest["splits"].get("validation") else "train"
        say(f"{corpus}: its {split} split")
        tokens = TokenCorpus(corpus, split)
    else:
        tokens = TokenCorpus(corpus, vocab_size=tokenizer.vocab_size)
    starts = tokens.document_starts(0, tokens.num_tokens).tolist()
    for begin, end in pairwise([*starts, tokens.num_tokens]):
        yield tokens.read(begin, end)


def text_sizes(tokenizer, ids: np.ndarray) -> list[int]:
    """UTF-8 bytes of text that each token of a document completes."""
    decoder = StreamDecoder(tokenizer)
    return [len(decoder.push(token).encode()) for token in ids]


def read_spans(corpus: str, tokenizer, size: int, *, text_field="text", packed=False, limit=None) -> Spans:
    """Cut a corpus into spans of `size` tokens (see above), at most `limit` of them; packed: one span of as many tokens.

    Raises: ValueError if there is none.
    """
    spans, read, skipped, longest, rest = [], 0, 0, 0, np.empty((2, 0), np.int32)
    documents = read_corpus(corpus, tokenizer, text_field)
    for ids in tqdm(documents, desc=Path(corpus).name, unit=" documents", disable=None):
        read += 1
        if packed or len(ids) >= size:
            text = np.array([ids, text_sizes(tokenizer, ids)], np.int32)  # [2, T]
            rest = np.concatenate([rest, text], axis=1) if packed else text
            whole = rest.shape[1] // size
            spans += np.hsplit(rest[:, : whole * size], whole) if whole else []
            longest, rest = max(longest, rest.shape[1]), rest[:, whole * size :]
        else:
            longest, skipped = max(longest, len(ids)), skipped + 1
        if limit is not None and len(spans) >= limit:
            break
    if not spans:
        what = "it has" if packed else f"the longest of its {read:,} documents has"
        advice = "shorter --lengths or more text" if packed else "shorter --lengths, or --packed to join documents"
        raise ValueError(f"{corpus} is too short for a length of {size:,} tokens: {what} {longest:,}. Give {advice}.")
    ids, sizes = np.stack(spans[:limit], axis=1)
    if packed:
        ids, sizes = ids.reshape(1, -1), sizes.reshape(1, -1)
    return Spans(ids, sizes, read, skipped)


@torch.inference_mode()
def window_losses(model, windows: Tensor, start: int, chunk: int) -> Tensor:
    """NLL of every token of windows [B, L] after the token `start`, float32 [B, L]; the logits of `chunk` tokens at a time."""
    inputs = F.pad(windows[:, :-1], (1, 0), value=start)
    state = model.init_state(windows.shape[0], windows.shape[1])
    losses = []
    for tokens, targets in zip(inputs.split(chunk, dim=1), windows.split(chunk, dim=1), strict=True):
        logits = model(tokens, state)
        # Row by row: the float32 logits of all rows at once would be the largest thing in memory.
        rows = [F.cross_entropy(x.float(), y, reduction="none") for x, y in zip(logits, targets, strict=True)]
        losses.append(torch.stack(rows))
    return torch.cat(losses, dim=1)


def measure(model, spans: Spans, length: int, start: int, *, batch: int, chunk: int, name: str = "") -> dict:
    """One model on one corpus at one length: a row of the results, see the protocol. `positions`: NLL by position."""
    used = spans.ids.shape[1] // length * length
    windows = torch.from_numpy(spans.ids[:, :used].reshape(-1, length).astype(np.int64))
    device = model.tok_embeddings.weight.device
    by_position = torch.zeros(length, dtype=torch.float64)
    with tqdm(total=windows.numel(), desc=f"{name} {length:,}", unit=" tokens", unit_scale=True, disable=None) as bar:
        for part in windows.split(batch):
            by_position += window_losses(model, part.to(device), start, chunk).double().sum(0).cpu()
            bar.update(part.numel())
    total, text = by_position.sum().item(), int(spans.sizes[:, :used].sum())
    edges = np.linspace(0, length, min(BUCKETS, length) + 1).round().astype(int)
    return {
        "length": length,
        "windows": len(windows),
        "tokens": windows.numel(),
        "bytes": text,
        "nll": total / windows.numel(),
        "perplexity": perplexity(total / windows.numel()),
        "bits per byte": total / math.log(2) / text if text else None,
        "positions": [
            {"from": int(a), "to": int(b), "nll": by_position[a:b].sum().item() / (int(b - a) * len(windows))}
            for a, b in pairwise(edges)
        ],
    }


def perplexity(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf
