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


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """The tokenizer file of each kind, of 600 ids."""
    folder = tmp_path_factory.mktemp("kinds")
    texts = list(read_documents(["stdlib"], max_bytes=200_000))
    (folder / "tokenizer.model").write_bytes(train_sentencepiece(texts, 600))

    hub = tokenizers.Tokenizer(tokenizers.models.BPE())
    hub.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hub.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    hub.train_from_iterator(texts, trainer)
    # A post-processor that adds BOS, as many files have: it must not be applied.
    hub.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    hub.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))

    # tiktoken's tokens are all bytes and the most common pairs of bytes. The last ids have no token.
    pairs = Counter(itertools.pairwise("".join(texts).encode()))
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes(pair) for pair, _ in pairs.most_common(342)]
    with open(folder / "ranks.tiktoken", "w") as file:
        for rank, token in enumerate(tokens):
            file.write(f"{base64.b64encode(token).decode()} {rank}\n")
        file.write("= 598\n\n")  # an empty token, as in the ranks of Whisper
    description = {
        "pattern": PATTERN,
        "special_tokens": {"<s>": 600, "<|endoftext|>": 601},
        "bos_token": None,
        "eos_token": "<|endoftext|>",
    }
    (folder / "ranks.json").write_text(json.dumps(description))
    return {
        "sentencepiece": folder / "tokenizer.model",
        "tiktoken": folder / "ranks.tiktoken",
        "json": folder / "tokenizer.json",
    }
