"""One tokenizer of each kind for all data tests, trained on a part of the standard library."""

import base64
import json
from pathlib import Path

import pytest
import tokenizers

from interdomain.data.readers import read_documents
from interdomain.data.tokenizer import train_sentencepiece

PATTERN = (  # cl100k's
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+|"""
    r""" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)


def byte_level(path: Path, specials: tuple = ("<s>", "<|endoftext|>")) -> Path:
    """A byte-level BPE of 600 tokens in a tokenizer.json."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 600, "initial_alphabet": alphabet, "show_progress": False}
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=list(specials), **options)
    made.train_from_iterator(read_documents(["stdlib"], max_bytes=200_000), trainer)
    # A post-processor that adds BOS, as many files have: it must not be applied.
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(path))
    return path


def rank_file(path: Path) -> Path:
    """The same merges in tiktoken's files."""
    made = json.loads(byte_level(path.with_name("trained.json"), specials=()).read_text())
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's character for every byte
    rest = [b for b in range(256) if b not in plain]
    to_byte = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}
    tokens = [bytes(to_byte[c] for c in text) for text, _ in sorted(made["model"]["vocab"].items(), key=lambda t: t[1])]
    tokens = [*(bytes([b]) for b in range(256)), *(token for token in tokens if len(token) > 1)]
    path.write_text("".join(f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens)))
    control = {"<s>": 600, "<|endoftext|>": 601}
    described = {"pattern": PATTERN, "special_tokens": control, "bos_token": None, "eos_token": "<|endoftext|>"}
    path.with_suffix(".json").write_text(json.dumps(described))
    return path


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """The tokenizer file of each kind."""
    folder = tmp_path_factory.mktemp("kinds")
    (folder / "tokenizer.model").write_bytes(train_sentencepiece(read_documents(["stdlib"], max_bytes=500_000), 600))
    (folder / "hub").mkdir()
    config = {"bos_token": {"content": "<s>"}, "eos_token": "<|endoftext|>"}
    (folder / "hub" / "tokenizer_config.json").write_text(json.dumps(config))
    tiktoken, hub = rank_file(folder / "ranks.tiktoken"), byte_level(folder / "hub" / "tokenizer.json")
    return {"sentencepiece": folder / "tokenizer.model", "tiktoken": tiktoken, "json": hub}
