"""One tokenizer of each kind for all data tests, trained on a part of the standard library."""

import base64
import itertools
import json
from collections import Counter

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from interdomain.data.readers import read_documents
from interdomain.data.tokenizer import train_sentencepiece

PATTERN = (  # cl100k's
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+|"""
    r""" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
SPECIALS = ["<s>", "<|endoftext|>"]


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """The tokenizer file of each kind, of 600 ids.

    tiktoken's tokens are bytes and common pairs of bytes; two ids have no token.
    """
    folder = tmp_path_factory.mktemp("kinds")
    model = folder / "tokenizer.model"
    ranks = folder / "ranks.tiktoken"
    hub = folder / "tokenizer.json"
    model.write_bytes(train_sentencepiece(read_documents(["stdlib"], max_bytes=500_000), 600))
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIALS, **options)
    made.train_from_iterator(read_documents(["stdlib"], max_bytes=200_000), trainer)
    # A post-processor that adds BOS, as many files have: it must not be applied.
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    made.save(str(hub))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "<|endoftext|>"}
    hub.with_name("tokenizer_config.json").write_text(json.dumps(config))
    data = "".join(read_documents(["stdlib"], max_bytes=200_000)).encode()
    tokens = [bytes([b]) for b in range(256)]
    tokens += [bytes(pair) for pair, _ in Counter(itertools.pairwise(data)).most_common(342)]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    ranks.write_text("".join(lines))
    described = {
        "pattern": PATTERN,
        "special_tokens": {"<s>": 600, "<|endoftext|>": 601},
        "bos_token": None,
    }
    ranks.with_suffix(".json").write_text(json.dumps(described | {"eos_token": "<|endoftext|>"}))
    return {"sentencepiece": model, "tiktoken": ranks, "json": hub}
