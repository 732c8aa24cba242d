"""tiktoken's encodings: ranks from a local file, or one that tiktoken knows by name.

A rank file (`X.tiktoken`: a token in base64 and its rank in each line) says nothing of the pattern that splits text, nor
of control tokens. These stand in `X.json` beside it:

    {"pattern": "...", "special_tokens": {"<|endoftext|>": 100257}, "eos_token": "<|endoftext|>", "bos_token": null}

Corpora and checkpoints keep both in one file, `tiktoken.json`: the same, with the rank file's text under "ranks".
"""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interdomain.data.tokenizer_base import Tokenizer

NAMED = "tiktoken:"
FORMAT = "interdomain-tiktoken-1"
FIELDS = ("pattern", "special_tokens", "bos_token", "eos_token")


class TiktokenTokenizer(Tokenizer):
    """A `tiktoken.json`, whose bytes are `data`. Raises: ValueError if it is damaged or not an encoding."""

    file = "tiktoken.json"

    def __init__(self, path: Path | str, data: bytes) -> None:
        super().__init__(path, data)
        try:
            described = json.loads(data)
            self.pattern, self.specials, bos, eos = (described[name] for name in FIELDS)
            lines = [line.split(" ") for line in described["ranks"].splitlines()]
            self.ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
            self._tokens = {rank: token for token, rank in self.ranks.items()}
            # To tiktoken, holes are a panic of Rust.
            if len(self._tokens) != len(lines) or any(bytes([b]) not in self.ranks for b in range(256)):
                raise ValueError("the ranks must hold all 256 bytes, and each token and rank once")
            self._encoding = _library(path).Encoding(
                "local", pat_str=self.pattern, mergeable_ranks=self.ranks, special_tokens=self.specials
            )
            self.bos_id, self.eos_id = (None if token is None else self.specials[token] for token in (bos, eos))
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ValueError(
                f"{path} is not a tiktoken encoding that can be read ({type(e).__name__}: {e}); a rank file X.tiktoken "
                f"needs X.json beside it with {', '.join(FIELDS)}."
            ) from e
        self.vocab_size = self._encoding.n_vocab

    @classmethod
    def from_ranks(cls, path: Path) -> "TiktokenTokenizer":
        """The encoding of a local rank file and the description beside it. Raises: FileNotFoundError, ValueError."""
        beside = path.with_suffix(".json")
        for file in (path, beside):
            if not file.is_file():
                raise FileNotFoundError(
                    f"There is no {file}: a rank file X.tiktoken needs X.json beside it, with {', '.join(FIELDS)}."
                )
        try:
            described = json.loads(beside.read_text(encoding="utf-8"))
            return cls(path, _bundle(path.read_text(encoding="ascii"), *(described.get(name) for name in FIELDS)))
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as e:
            raise ValueError(f"{path} and {beside.name} are not ranks and their description ({e}).") from e

    @classmethod
    def from_name(cls, name: str) -> "TiktokenTokenizer":
        """An encoding by tiktoken's name, from its cache or its network. Raises: ValueError."""
        tiktoken = _library(NAMED + name)
        if name not in tiktoken.list_encoding_names():
            raise ValueError(
                f"tiktoken knows no encoding {name!r}, it has {', '.join(sorted(tiktoken.list_encoding_names()))}."
            )
        try:
            encoding = tiktoken.get_encoding(name)
        # The HTTP library has exceptions of its own; a cached file that is damaged raises yet another.
        except Exception as e:
            raise ValueError(
                f"tiktoken cannot load {name} ({type(e).__name__}): it downloads an encoding once, and there is neither "
                "a network nor a copy in TIKTOKEN_CACHE_DIR. Give a local .tiktoken file with its .json."
            ) from e
        ranks = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
        text = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks)
        eos = "<|endoftext|>" if "<|endoftext|>" in encoding._special_tokens else None
        return cls(NAMED + name, _bundle(text, encoding._pat_str, encoding._special_tokens, None, eos))

    def _encode(self, texts: list[str], num_threads: int) -> list[list[int]]:
        try:
            if num_threads == 1:
                return [self._encoding.encode_ordinary(text) for text in texts]
            return self._encoding.encode_ordinary_batch(texts, num_threads=8 if num_threads < 1 else num_threads)
        # A panic of Rust where splitting a text takes too much memory: no Exception, in no module that could be imported,
        # and no other process could be told of it.
        except BaseException as e:
            if type(e).__name__ != "PanicException":
                raise
            raise ValueError(
                f"tiktoken cannot split a text ({e}), which happens at about a million spaces or newlines in a row. The text "
                f"is one of those that begin with {[text.strip()[:40] for text in texts][:64]}; shorten it or leave it out."
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Ids that no token has are left out, as control tokens are. Bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self._tokens.get(int(i), b"") for i in ids).decode("utf-8", "replace")


def _library(name: Path | str) -> Any:
    try:
        import tiktoken
    except ImportError as e:
        raise ValueError(f"{name} is read by the tiktoken library: pip install tiktoken.") from e
    return tiktoken


def _bundle(ranks: str, *fields: object) -> bytes:
    described = {"format": FORMAT, "ranks": ranks, **dict(zip(FIELDS, fields, strict=True))}
    return json.dumps(described, ensure_ascii=False, indent=1).encode()
