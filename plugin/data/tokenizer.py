"""Text to ids and back: `load_tokenizer("data/stdlib").encode("def f():", add_eos=True)`.

The rule for vocabularies: every id of the tokenizer needs a row in the model, so the tokenizer's vocabulary is at most
the model's; the model's may be larger (padded to a round number), its spare rows are never fed. `check_vocab` says so.
"""

from pathlib import Path
from typing import Protocol

import sentencepiece

from interdomain.data.indexed import file_sha256

TOKENIZER_FILE = "tokenizer.model"
SPACE = "\u2581"  # sentencepiece's visible space


class Tokenizer(Protocol):
    """What the rest of the code asks of a tokenizer, of whatever library. Ids that do not exist are None."""

    path: Path
    sha256: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    unk_id: int | None

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]: ...

    def encode_batch(self, texts: list[str], add_bos: bool = False, add_eos: bool = False) -> list[list[int]]: ...

    def decode(self, ids: list[int]) -> str: ...

    def token_bytes(self, token_id: int, at_start: bool = False) -> bytes | None:
        """UTF-8 of one token, perhaps a part of a character; None: a control token. `at_start`: no text came before."""
        ...


class SentencePieceTokenizer:
    """A sentencepiece `.model` file: Llama 2's, or one of `interdomain.tools.train_tokenizer`.

    Text that names control tokens ("<s>") is plain text: no input encodes to BOS or EOS. With byte fallback and
    identity normalisation decode(encode(text)) == text, whitespace included, but for U+2581, which sentencepiece takes
    for a space.

    Raises: FileNotFoundError; ValueError if the file is no sentencepiece model.
    """

    def __init__(self, path):
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(
                f"There is no tokenizer file {self.path}; give a sentencepiece .model file, or train one with "
                "`python -m interdomain.tools.train_tokenizer`."
            )
        self._sp = sentencepiece.SentencePieceProcessor()
        data = self.path.read_bytes()
        try:
            # load_from_serialized_proto takes an empty file for a model.
            if not data or not self._sp.LoadFromSerializedProto(data):
                raise RuntimeError("empty")
        except RuntimeError as e:
            raise ValueError(
                f"{self.path} ({len(data):,} bytes) is not a sentencepiece model; expected a file that sentencepiece "
                "wrote, like Llama 2's tokenizer.model. Copy it again, or train one with `python -m "
                "interdomain.tools.train_tokenizer`."
            ) from e
        self.sha256 = file_sha256(self.path)
        self.vocab_size = self._sp.vocab_size()
        ids = (self._sp.bos_id(), self._sp.eos_id(), self._sp.pad_id(), self._sp.unk_id())
        self.bos_id, self.eos_id, self.pad_id, self.unk_id = (i if i >= 0 else None for i in ids)
        # The model's own setting, read off its behaviour: with a dummy prefix a leading space is not part of the text.
        first = SPACE + "a"
        self._strips_leading_space = self._sp.DecodePieces([first]) == "a"

    def _check_specials(self, add_bos, add_eos):
        for wanted, token_id, name in ((add_bos, self.bos_id, "BOS"), (add_eos, self.eos_id, "EOS")):
            if wanted and token_id is None:
                raise ValueError(
                    f"{self.path} has no {name} token; encode without it, or take a tokenizer that has one."
                )

    def encode(self, text, add_bos=False, add_eos=False):
        self._check_specials(add_bos, add_eos)
        return self._sp.encode(text, add_bos=add_bos, add_eos=add_eos)

    def encode_batch(self, texts, add_bos=False, add_eos=False, num_threads=-1):
        """As `encode` of each; num_threads=-1 takes every core, the result is the same."""
        self._check_specials(add_bos, add_eos)
        return self._sp.encode(list(texts), add_bos=add_bos, add_eos=add_eos, num_threads=num_threads)

    def decode(self, ids):
        return self._sp.decode([int(i) for i in ids])

    def token_bytes(self, token_id, at_start=False):
        if self._sp.IsControl(token_id):
            return None
        if self._sp.IsUnknown(token_id):
            return self._sp.decode([token_id]).encode()
        piece = self._sp.IdToPiece(token_id)
        if self._sp.IsByte(token_id):
            return bytes([int(piece[3:5], 16)])
        if at_start and self._strips_leading_space:
            piece = piece.removeprefix(SPACE)
        return piece.replace(SPACE, " ").encode()


class StreamDecoder:
    """Text as tokens arrive: for any ids, `"".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)`.

    `push` holds back nothing but the bytes of a character that is not complete yet. Bytes that are no UTF-8 become
    U+FFFD each, as sentencepiece has it.

    Args:
        after: ids that came before (a prompt): the text continues theirs, which is not given out again.
    """

    def __init__(self, tokenizer, after=()):
        self._tokenizer, self._pending, self._at_start = tokenizer, b"", True
        for token_id in after:
            self.push(token_id)

    def push(self, token_id):
        """The text that this token completes, often one word, sometimes nothing."""
        data = self._tokenizer.token_bytes(int(token_id), at_start=self._at_start)
        if data is None:
            return self.flush()  # a control token ends a run of bytes
        self._at_start = False
        self._pending += data
        return self._take(final=False)

    def flush(self):
        """What is left at the end of the tokens: U+FFFD for each byte of a character that never became complete."""
        return self._take(final=True)

    def _take(self, final):
        out, data, i = [], self._pending, 0
        while i < len(data):
            lead = data[i]
            size = 1 if lead < 0x80 else 2 if 0xC2 <= lead < 0xE0 else 3 if 0xE0 <= lead < 0xF0 else 4
            part = data[i : i + size]
            # Not complete, and nothing so far speaks against it: the next token may bring the rest.
            if not final and len(part) < size and 0xC2 <= lead < 0xF5 and all(b & 0xC0 == 0x80 for b in part[1:]):
                break
            try:
                out.append(part.decode())
                i += size
            except UnicodeDecodeError:
                out.append("\ufffd")
                i += 1
        self._pending = data[i:]
        return "".join(out)


def load_tokenizer(path):
    """The tokenizer at `path`: a `.model` file, or a folder that holds `tokenizer.model` (a corpus, a model)."""
    path = Path(path)
    if path.is_dir():
        if not (path / TOKENIZER_FILE).is_file():
            raise FileNotFoundError(
                f"The folder {path} has no {TOKENIZER_FILE}; give a prepared corpus or another folder that holds one, "
                "or the sentencepiece .model file itself."
            )
        path = path / TOKENIZER_FILE
    elif path.exists() and path.suffix != ".model":
        raise ValueError(
            f"{path} is not a tokenizer that can be read: give a sentencepiece .model file or a folder with one."
        )
    return SentencePieceTokenizer(path)


def check_vocab(tokenizer_vocab, model_vocab):
    """Raises ValueError unless every id of the tokenizer has a row in the model."""
    if tokenizer_vocab > model_vocab:
        raise ValueError(
            f"The tokenizer has {tokenizer_vocab:,} ids, the model's vocab_size is {model_vocab:,}: ids from "
            f"{model_vocab:,} on would have no embedding. Set the model's vocab_size to {tokenizer_vocab:,} or more "
            "(padding is allowed), or take a smaller tokenizer."
        )
