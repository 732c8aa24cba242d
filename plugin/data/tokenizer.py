"""Text to ids and back: `load_tokenizer("data/stdlib").encode("def f():", add_eos=True)`.

The rule for vocabularies: every id of the tokenizer needs a row in the model, so the tokenizer's vocabulary is at most
the model's; the model's may be larger (padded to a round number), its spare rows are never fed. `check_vocab` says so.
"""

import hashlib
from pathlib import Path
from typing import ClassVar, Protocol

import sentencepiece

from interdomain.data.streams import SentencePieceStream
from interdomain.folders import write_whole

TOKENIZER_FILE = "tokenizer.model"
# The one file that a folder keeps of its tokenizer, by kind; last, what Hugging Face's folders hold. An exported folder
# has that one too, for others to read, beside the own one, which counts.
TOKENIZER_FILES = (TOKENIZER_FILE, "tiktoken.json", "hf_tokenizer.json", "tokenizer.json")
TIKTOKEN_NAME = "tiktoken:"
SPACE = "\u2581"  # sentencepiece's visible space


class Tokenizer(Protocol):
    """What the rest of the code asks of a tokenizer, of whatever library. Ids that do not exist are None."""

    file: ClassVar[str]  # the name that it has in folders, one of TOKENIZER_FILES
    path: Path
    data: bytes  # the whole tokenizer, as that file holds it
    sha256: str  # of data
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    unk_id: int | None

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Text that names control tokens is plain text: only add_bos and add_eos make them."""
        ...

    def encode_batch(
        self, texts: list[str], add_bos: bool = False, add_eos: bool = False, num_threads: int = -1
    ) -> list[list[int]]: ...

    def decode(self, ids: list[int]) -> str:
        """Control tokens have no text."""
        ...

    def stream(self):
        """A decoder with push(id) -> str and flush() -> str, of which StreamDecoder says what they do."""
        ...


class TokenizerFile:
    """What every kind shares."""

    def __init__(self, path, data):
        self.path, self.data, self.sha256 = Path(path), data, hashlib.sha256(data).hexdigest()

    def write(self, folder):
        """Writes the tokenizer's one file into a folder, whole or not at all. Returns its path."""
        write_whole(Path(folder) / self.file, self.data)
        return Path(folder) / self.file

    def _check_specials(self, add_bos, add_eos):
        for wanted, token_id, name in ((add_bos, self.bos_id, "BOS"), (add_eos, self.eos_id, "EOS")):
            if wanted and token_id is None:
                raise ValueError(
                    f"{self.path} has no {name} token; encode without it, or take a tokenizer that has one."
                )

    def _with_specials(self, ids, add_bos, add_eos):
        return [*([self.bos_id] if add_bos else []), *ids, *([self.eos_id] if add_eos else [])]


class StreamDecoder:
    """Text as tokens arrive: for any ids, `"".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)`.

    `push` holds back nothing but what the next token may change: the bytes of a character that is not complete yet.
    Bytes that are no UTF-8 become U+FFFD as the tokenizer's library has it. (A tokenizer.json may hold decoders that
    change a run of broken bytes as a whole; there the equality is that of text.)

    Args:
        after: ids that came before (a prompt): the text continues theirs, which is not given out again.
    """

    def __init__(self, tokenizer, after=()):
        self._stream = tokenizer.stream()
        for token_id in after:
            self.push(token_id)

    def push(self, token_id):
        """The text that this token completes, often one word, sometimes nothing."""
        return self._stream.push(int(token_id))

    def flush(self):
        """What is left at the end of the tokens: U+FFFD for the bytes of a character that never became complete."""
        return self._stream.flush()


class SentencePieceTokenizer(TokenizerFile):
    """A sentencepiece `.model` file: Llama 2's, or one of `interdomain.tools.train_tokenizer`.

    Text that names control tokens ("<s>") is plain text: no input encodes to BOS or EOS. With byte fallback and
    identity normalisation decode(encode(text)) == text, whitespace included, but for U+2581, which sentencepiece takes
    for a space.

    Raises: FileNotFoundError; ValueError if the file is no sentencepiece model.
    """

    file = TOKENIZER_FILE

    @classmethod
    def reads(cls, path):
        return path.suffix == ".model"

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
                "wrote, like Llama 2's tokenizer.model (Llama 3's is tiktoken's: name it .tiktoken). Copy it again, or "
                "train one with `python -m interdomain.tools.train_tokenizer`."
            ) from e
        super().__init__(path, data)
        self.vocab_size = self._sp.vocab_size()
        ids = (self._sp.bos_id(), self._sp.eos_id(), self._sp.pad_id(), self._sp.unk_id())
        self.bos_id, self.eos_id, self.pad_id, self.unk_id = (i if i >= 0 else None for i in ids)
        # The model's own setting, read off its behaviour: with a dummy prefix a leading space is not part of the text.
        # Two pieces of the space alone: a longer one may not be in the vocabulary, and unknown pieces keep theirs.
        self._strips_leading_space = self._sp.DecodePieces([SPACE, SPACE]) == " "

    def encode(self, text, add_bos=False, add_eos=False):
        self._check_specials(add_bos, add_eos)
        return self._sp.encode(text, add_bos=add_bos, add_eos=add_eos)

    def encode_batch(self, texts, add_bos=False, add_eos=False, num_threads=-1):
        """As `encode` of each; num_threads=-1 takes every core, the result is the same."""
        self._check_specials(add_bos, add_eos)
        return self._sp.encode(list(texts), add_bos=add_bos, add_eos=add_eos, num_threads=num_threads)

    def decode(self, ids):
        return self._sp.decode([int(i) for i in ids])

    def stream(self):
        return SentencePieceStream(self)

    def token_bytes(self, token_id, at_start=False):
        """UTF-8 of one token, perhaps a part of a character; None: a control token. `at_start`: no text came before."""
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


def load_tokenizer(path):
    """The tokenizer at `path`.

    Args:
        path: a sentencepiece `.model` file; a Hugging Face `tokenizer.json`; tiktoken's ranks `X.tiktoken` with `X.json`
            beside them, or `tiktoken:NAME` for an encoding that tiktoken knows by name; or a folder that holds one of
            the files in TOKENIZER_FILES (a corpus, a checkpoint, a model).
    Raises: FileNotFoundError, ValueError.
    """
    if str(path).startswith(TIKTOKEN_NAME):
        return _kinds()[1].from_name(str(path).removeprefix(TIKTOKEN_NAME))
    path = Path(path)
    if path.is_dir():
        found = [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
        if not found:
            raise FileNotFoundError(
                f"The folder {path} has no {TOKENIZER_FILE} (nor {' or '.join(TOKENIZER_FILES[1:])}); give a prepared "
                "corpus or another folder that holds one, or the tokenizer file itself."
            )
        path = found[0]
    if path.suffix == ".tiktoken":
        return _kinds()[1].from_ranks(path)
    if path.suffix == ".json" and path.is_file():
        return next(kind for kind in _kinds() if kind.reads(path))(path)
    if path.exists() and path.suffix != ".model":
        raise ValueError(
            f"{path} is not a tokenizer that can be read: give a sentencepiece .model file, a Hugging Face "
            "tokenizer.json, tiktoken's .tiktoken file, or a folder with one."
        )
    return SentencePieceTokenizer(path)


def _kinds():
    from interdomain.data import tokenizer_json, tokenizer_tiktoken

    # The last one reads every .json file, or says why not.
    return SentencePieceTokenizer, tokenizer_tiktoken.TiktokenTokenizer, tokenizer_json.JsonTokenizer


def check_vocab(tokenizer_vocab, model_vocab):
    """Raises ValueError unless every id of the tokenizer has a row in the model."""
    if tokenizer_vocab > model_vocab:
        raise ValueError(
            f"The tokenizer has {tokenizer_vocab:,} ids, the model's vocab_size is {model_vocab:,}: ids from "
            f"{model_vocab:,} on would have no embedding. Set the model's vocab_size to {tokenizer_vocab:,} or more "
            "(padding is allowed), or take a smaller tokenizer."
        )
