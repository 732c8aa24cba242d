"""tiktoken's encodings: ranks from a local file, or one that tiktoken knows by name.

A rank file (`X.tiktoken`: a token in base64 and its rank in each line) says nothing of the pattern that splits text, nor
of control tokens. These stand in `X.json` beside it:

    {"pattern": "...", "special_tokens": {"<|endoftext|>": 100257}, "eos_token": "<|endoftext|>", "bos_token": null}

Corpora and checkpoints keep both in one file, `tiktoken.json`: the same, with the rank file's text under "ranks".
"""

import base64
import contextlib
import itertools
import json
import re
from pathlib import Path

from interdomain.data.streams import ByteStream
from interdomain.data.tokenizer import TIKTOKEN_NAME, TokenizerFile

FORMAT = "interdomain-tiktoken-1"
FIELDS = ("pattern", "special_tokens", "bos_token", "eos_token")


class TiktokenTokenizer(TokenizerFile):
    """A `tiktoken.json`. Raises: FileNotFoundError; ValueError if it is damaged or not an encoding."""

    file = "tiktoken.json"

    @classmethod
    def reads(cls, path):
        with open(path, "rb") as f:
            return FORMAT.encode() in f.read(100)

    def __init__(self, path, data=None):
        tiktoken = _library(path)
        data = Path(path).read_bytes() if data is None else data
        super().__init__(path, data)
        try:
            described = json.loads(data)
            self.pattern, self.specials, bos, eos = (described[name] for name in FIELDS)
            self.ranks = _parse(described["ranks"])
            self._encoding = tiktoken.Encoding(
                "local", pat_str=self.pattern, mergeable_ranks=self.ranks, special_tokens=self.specials
            )
            self.bos_token, self.eos_token = bos, eos
            self.bos_id, self.eos_id = (None if t is None else self.specials[t] for t in (bos, eos))
        # tiktoken gives a pattern that does not compile as a ValueError, a table of ranks with holes as a panic of Rust.
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ValueError(
                f"{path} is not a tiktoken encoding that can be read ({type(e).__name__}: {e}); a rank file X.tiktoken "
                f"needs X.json beside it with {', '.join(FIELDS)}."
            ) from e
        self.pad_id = self.unk_id = None
        self.vocab_size = self._encoding.n_vocab
        self._control = set(self.specials.values())

    @classmethod
    def from_ranks(cls, path):
        """The encoding of a local rank file and the description beside it."""
        path = Path(path)
        beside = path.with_suffix(".json")
        for file, what in ((path, "a file of tiktoken's ranks"), (beside, f"what describes {path.name}")):
            if not file.is_file():
                raise FileNotFoundError(
                    f"There is no {file}, {what}: a rank file X.tiktoken needs X.json beside it, with "
                    f"{', '.join(FIELDS)}."
                )
        try:
            described = json.loads(beside.read_text(encoding="utf-8"))
            ranks = path.read_text(encoding="ascii")
            described = {name: described.get(name) for name in FIELDS}
        except (ValueError, AttributeError) as e:
            raise ValueError(f"{path} and {beside.name} are not ranks and their description ({e}).") from e
        return cls(path, _bundle(ranks=ranks, **described))

    @classmethod
    def from_name(cls, name):
        """An encoding by tiktoken's name, from its cache or its network."""
        tiktoken = _library(TIKTOKEN_NAME + name)
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
        described = dict(zip(FIELDS, (encoding._pat_str, encoding._special_tokens, None, eos), strict=True))
        return cls(TIKTOKEN_NAME + name, _bundle(ranks=text, **described))

    def encode(self, text, add_bos=False, add_eos=False):
        self._check_specials(add_bos, add_eos)
        with _no_panic([text]):
            ids = self._encoding.encode_ordinary(text)
        return self._with_specials(ids, add_bos, add_eos)

    def encode_batch(self, texts, add_bos=False, add_eos=False, num_threads=-1):
        """As `encode` of each; num_threads=-1 takes eight, the result is the same."""
        if num_threads == 1:
            return [self.encode(text, add_bos, add_eos) for text in texts]
        self._check_specials(add_bos, add_eos)
        threads = 8 if num_threads < 1 else num_threads
        with _no_panic(texts):
            encoded = self._encoding.encode_ordinary_batch(list(texts), num_threads=threads)
        return [self._with_specials(ids, add_bos, add_eos) for ids in encoded]

    def decode(self, ids):
        runs = itertools.groupby((self.token_bytes(int(i)) for i in ids), key=lambda data: data is None)
        return "".join(b"".join(run).decode("utf-8", "replace") for control, run in runs if not control)

    def stream(self):
        return ByteStream(self)

    def token_bytes(self, token_id):
        """UTF-8 of one token, perhaps a part of a character; None: a control token, or an id that no token has."""
        if token_id in self._control:
            return None
        try:
            return self._encoding.decode_single_token_bytes(token_id)
        except KeyError:
            return None


def _library(name):
    try:
        import tiktoken
    except ImportError as e:
        raise ValueError(f"{name} is read by the tiktoken library: pip install tiktoken.") from e
    return tiktoken


@contextlib.contextmanager
def _no_panic(texts):
    """tiktoken panics where splitting a text needs more memory than its regular expressions are given."""
    try:
        yield
    # A panic of Rust: no Exception, in no module that could be imported, and no other process could be told of it.
    except BaseException as e:
        if type(e).__name__ != "PanicException":
            raise
        length, text = max((max(map(len, re.findall(r"\s+", text)), default=0), text) for text in texts)
        raise ValueError(
            f"tiktoken cannot split a text ({e}): the longest run of spaces and newlines has {length:,} characters, it takes "
            f"a little less than a million. The text begins with {text.strip()[:60]!r}; shorten the run, or leave the text out."
        ) from None


def _bundle(**described):
    return json.dumps({"format": FORMAT, **described}, ensure_ascii=False, indent=1).encode()


def _parse(text):
    ranks = {}
    for number, line in enumerate(text.splitlines(), 1):
        token, _, rank = line.partition(" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as e:
            raise ValueError(f"line {number} of the ranks is {line[:40]!r}, no token in base64 with its rank") from e
    missing = [b for b in range(256) if bytes([b]) not in ranks]
    if missing or len(set(ranks.values())) != len(ranks):
        raise ValueError("the ranks must hold all 256 bytes, and each rank once")
    return ranks
