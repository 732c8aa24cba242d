"""Turns text into token ids and back.

    load_tokenizer("data/stdlib").encode("def f():", add_eos=True)

There are three kinds of tokenizers, one class each: sentencepiece's `.model`, Hugging Face's
`tokenizer.json` and tiktoken's rank files. A corpus, a checkpoint and an exported model keep the
complete tokenizer in one file.
"""

import base64
import contextlib
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from interdomain.data.documents import Documents, prepared_documents
from interdomain.folders import write_atomically

CONFIG_FILE = "tokenizer_config.json"  # transformers' settings beside a tokenizer.json
SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token")  # names in that file
SPECIALS_KEY = "interdomain_special_tokens"  # the same settings inside hf_tokenizer.json

SPACE = "\u2581"  # sentencepiece's visible space
LONGEST_LINE = 4192  # bytes; sentencepiece's trainer leaves longer lines out
# Pieces of a long line: up to LONGEST_LINE bytes (a character has at most 4), cut before a space
# where there is one.
LINE_PIECE = re.compile(
    rf".{{1,{LONGEST_LINE // 4}}}(?=\s|$)|.{{1,{LONGEST_LINE // 4}}}", re.DOTALL
)
# sentencepiece's types of vocabulary pieces.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
BYTE = 6

TIKTOKEN_PREFIX = "tiktoken:"  # before the name of an encoding, in place of a path
TIKTOKEN_FORMAT = "interdomain-tiktoken-1"
TIKTOKEN_FIELDS = ("pattern", "special_tokens", "bos_token", "eos_token")


@contextlib.contextmanager
def library_errors(message: str) -> Iterator[None]:
    """Turns any error of a tokenizer's library into a ValueError that begins with `message`."""
    try:
        yield
    except (MemoryError, ImportError):  # says nothing about the text or the file
        raise
    except BaseException as e:
        # A panic of Rust code is not an Exception. Each library has a class of its own for it,
        # which cannot be imported.
        is_panic = type(e).__name__ == "PanicException"
        if not isinstance(e, Exception) and not is_panic:
            raise
        raise ValueError(f"{message} ({type(e).__name__}: {str(e).strip()})") from e


class Tokenizer:
    """Base class of all kinds of tokenizers. Use `load_tokenizer` to make one.

    A subclass sets the attributes and implements `_encode` and `decode`. Text that names control
    tokens, such as `</s>`, is encoded as plain text; only `add_eos` adds a control token. Control
    tokens decode to nothing.

    Args:
        path: Where the tokenizer was read. For messages, and for other processes that load it.
        data: Contents of the tokenizer's file: everything that defines it.

    Attributes:
        file: Name of the tokenizer's file in a corpus, a checkpoint or an exported model; one of
            TOKENIZER_FILES.
        library: Package that encodes. Its version decides whether a preparation may continue.
        vocab_size: All ids are below it.
        bos_id: Id of the token that begins a text. None if there is none; the same for the next
            three.
        eos_id: Id of the token that ends a document.
        pad_id: Id of the padding token.
        unk_id: Id of the token for unknown text.
        sha256: SHA-256 of `data`, by which corpora, checkpoints and exported models recognise the
            tokenizer.
        documents: The tokens around a document in the data of the model that the tokenizer was
            loaded with. Without a model, the tokens that `prepare-data` writes.
    """

    file: str
    library: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None = None
    unk_id: int | None = None
    documents: Documents

    def __init__(self, path: Path | str, data: bytes) -> None:
        self.path = Path(path)
        self.data = data
        self.sha256 = hashlib.sha256(data).hexdigest()

    def _encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids. Control tokens have none."""
        raise NotImplementedError

    def converted(self) -> Any:
        """Returns a `tokenizers.Tokenizer` that should do the same; the caller compares the two.

        Raises:
            NotImplementedError: This tokenizer has no exact counterpart.
        """
        raise NotImplementedError(
            f"{self.file} is not converted; the same tokenizer as a tokenizer.json of Hugging Face is"
        )

    def encode(self, text: str, add_eos: bool = False) -> list[int]:
        """Returns the ids of a text.

        Raises:
            ValueError: The library cannot encode the text, or there is no EOS token to add.
        """
        with library_errors("the tokenizer cannot encode this text"):
            ids = self._encode(text)
        if not add_eos:
            return ids
        if self.eos_id is None:
            raise ValueError(
                f"The tokenizer {self.path} has no EOS token, or does not say which it is: name it as eos_token (in "
                f"{CONFIG_FILE} beside tokenizer.json, in X.json beside X.tiktoken), or take a tokenizer that has it."
            )
        return [*ids, self.eos_id]

    def write(self, folder: Path | str) -> Path:
        """Writes the tokenizer's file into a folder. Returns the file's path."""
        path = Path(folder) / self.file
        write_atomically(path, self.data)
        return path


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece `.model` file: Llama 2's, or one that `interdomain prepare-data` trained.

    With byte fallback and identity normalisation, decode(encode(text)) == text, white space
    included. The only exception is U+2581, which sentencepiece takes for a space.
    """

    file = "tokenizer.model"
    library = "sentencepiece"

    def __init__(self, path: Path | str) -> None:
        """Loads the model file `path`. An empty or damaged one raises an error."""
        super().__init__(path, Path(path).read_bytes())
        # sentencepiece returns negative ids for tokens that do not exist.
        self._processor = sentencepiece.SentencePieceProcessor()
        # The library takes an empty file for a model.
        if not self.data or not self._processor.LoadFromSerializedProto(self.data):
            raise ValueError("the file is empty")
        self.vocab_size = self._processor.vocab_size()
        self.bos_id = _id_or_none(self._processor.bos_id())
        self.eos_id = _id_or_none(self._processor.eos_id())
        self.pad_id = _id_or_none(self._processor.pad_id())
        self.unk_id = _id_or_none(self._processor.unk_id())

    def _encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([int(i) for i in ids])

    def converted(self) -> Any:
        """Returns a BPE tokenizer of the `tokenizers` library with the same pieces and merges."""
        import tokenizers
        from sentencepiece import sentencepiece_model_pb2
        from tokenizers import decoders, normalizers

        # The model file is a message of protocol buffers.
        model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
        model.ParseFromString(self.data)
        types = {piece.type for piece in model.pieces}
        # The comparison shows other differences (white space, unknown characters).
        if (
            model.trainer_spec.model_type != model.trainer_spec.BPE
            or model.normalizer_spec.precompiled_charsmap
            or not types <= {NORMAL, UNKNOWN, CONTROL, BYTE}
        ):
            raise NotImplementedError(
                "only sentencepiece BPE models of unchanged text and without pieces defined by hand have an exact counterpart"
            )

        # sentencepiece joins two neighbours if the result is a piece, the best score first. So
        # every split of a piece into two pieces is a merge, and the merges are sorted by the score
        # of the result.
        vocab = {piece.piece: i for i, piece in enumerate(model.pieces)}
        normal = {piece.piece for piece in model.pieces if piece.type == NORMAL}
        keyed_merges = []
        for i, piece in enumerate(model.pieces):
            if piece.piece not in normal:
                continue
            for n in range(1, len(piece.piece)):
                left = piece.piece[:n]
                right = piece.piece[n:]
                if left in normal and right in normal:
                    key = (-piece.score, i, vocab[left], vocab[right])
                    keyed_merges.append((key, (left, right)))
        merges = [merge for _, merge in sorted(keyed_merges)]

        unknown = None
        if self.unk_id is not None:
            unknown = model.pieces[self.unk_id].piece
        bpe = tokenizers.models.BPE(
            vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
        made = tokenizers.Tokenizer(bpe)
        # A text begins with a space that the tokenizer adds, and spaces are visible characters
        # inside pieces.
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
        made.decoder = decoders.Sequence(
            [
                decoders.Replace(SPACE, " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        for piece in model.pieces:
            if piece.type in (UNKNOWN, CONTROL):
                token = tokenizers.AddedToken(piece.piece, normalized=False, special=True)
                made.add_special_tokens([token])
        return made


def _id_or_none(token_id: int) -> int | None:
    """An id as sentencepiece returns it, which is negative for a token that does not exist.

    Args:
        token_id: The id of a control token, such as BOS.
    """
    if token_id < 0:
        return None
    return token_id


def train_sentencepiece(documents: Iterable[str], vocab_size: int) -> bytes:
    """Trains a BPE model in Llama 2's style. The result depends only on the arguments.

    Text is not normalised, white space survives exactly, digits are separate tokens, and bytes
    stand in for characters that the vocabulary lacks.

    Args:
        documents: Texts to train on.
        vocab_size: Number of tokens, bytes and control tokens included.

    Returns:
        The contents of a `.model` file.

    Raises:
        ValueError: The text does not suffice for this vocabulary size, or the vocabulary for this
            text.
    """
    model = io.BytesIO()
    raised = []

    def lines() -> Iterator[str]:
        try:
            for text in documents:
                for line in text.splitlines():
                    pieces = [line]
                    if len(line.encode()) > LONGEST_LINE:
                        pieces = LINE_PIECE.findall(line)
                    # The trainer puts a space before each line. In running text only a document's
                    # first line has one, so one space of an indentation is taken away here.
                    for piece in pieces:
                        yield piece.removeprefix(" ")
        except BaseException as e:
            raised.append(e)
            raise

    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=lines(),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=0.99995,
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            normalization_rule_name="identity",
            add_dummy_prefix=True,
            remove_extra_whitespaces=False,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=2,  # fixed: the file records it
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as e:
        # The library turns an error of `documents` into a RuntimeError of its own.
        if raised:
            raise raised[0] from None
        reason = str(e).rpartition("] ")[2] or "it is empty."  # without the library's file and line
        raise ValueError(
            f"A vocabulary of {vocab_size} cannot be trained on this text: {reason}"
        ) from e
    return model.getvalue()


def _id_of(name: str, settings: dict[str, Any], vocabulary: dict[str, int]) -> int | None:
    """Id of a control token, or None if the settings do not name it.

    Args:
        name: The setting, such as `eos_token`.
        settings: Tokens by setting.
        vocabulary: Ids by token.
    """
    token = settings.get(name)
    if token is None:
        return None
    if token not in vocabulary:
        raise ValueError(
            f"its {name} is {token!r}, which is no token of its vocabulary; name one that is, or none"
        )
    return vocabulary[token]


class JsonTokenizer(Tokenizer):
    """Hugging Face's `tokenizer.json`.

    The `tokenizer_config.json` beside it says which tokens are BOS and EOS. Corpora and checkpoints
    keep both in one file, `hf_tokenizer.json`: the tokenizer.json with one more key. Its
    post-processor, which adds BOS in many files, is not applied.
    """

    file = "hf_tokenizer.json"
    library = "tokenizers"

    def __init__(self, path: Path | str) -> None:
        """Loads a tokenizer.json, or an `hf_tokenizer.json`, which has the control tokens, too."""
        import tokenizers

        data = Path(path).read_bytes()
        self._description = json.loads(data)
        # The library refuses keys that it does not know, so our own key is taken out. A file of
        # Hugging Face does not have it.
        specials = self._description.pop(SPECIALS_KEY, None)
        if specials is None:
            specials = self._named_specials(Path(path).with_name(CONFIG_FILE))
            complete = {**self._description, SPECIALS_KEY: specials}
            data = json.dumps(complete, ensure_ascii=False, indent=1).encode()
        super().__init__(path, data)
        # Switch off everything that changes the ids of plain text.
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(self._description))
        self._tokenizer.encode_special_tokens = True  # text that names control tokens is text
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.bos_id = _id_of("bos_token", specials, vocabulary)
        self.eos_id = _id_of("eos_token", specials, vocabulary)
        self.pad_id = _id_of("pad_token", specials, vocabulary)
        self.unk_id = _id_of("unk_token", specials, vocabulary)

    @staticmethod
    def _named_specials(config_file: Path) -> dict[str, str | None]:
        """The control tokens that a tokenizer_config.json names, by SPECIALS.

        Args:
            config_file: The file, beside the tokenizer's. It may be missing: all values are then
                None.
        """
        config = {}
        if config_file.is_file():
            config = json.loads(config_file.read_text(encoding="utf-8"))
        specials = {}
        for name in SPECIALS:
            token = config.get(name)
            if isinstance(token, dict):
                token = token["content"]
            specials[name] = token
        return specials

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def converted(self) -> Any:
        """Returns the same tokenizer without truncation, padding and post-processor."""
        import tokenizers

        without = {"truncation": None, "padding": None, "post_processor": None}
        return tokenizers.Tokenizer.from_str(json.dumps(self._description | without))


class TiktokenTokenizer(Tokenizer):
    """One of tiktoken's encodings, from a local rank file or by the name that tiktoken knows.

    A rank file (`X.tiktoken`) has a token in base64 and its rank in each line. It has no pattern
    that splits text, and no control tokens. The `X.json` beside it has these:

        {"pattern": "...", "special_tokens": {"<|endoftext|>": 100257}, "eos_token": "<|endoftext|>", "bos_token": null}

    Corpora and checkpoints keep both in one file, `tiktoken.json`: the same fields, and the rank
    file's text under "ranks".
    """

    file = "tiktoken.json"
    library = "tiktoken"

    def __init__(self, path: Path | str) -> None:
        """Loads an encoding from a file, or `tiktoken:NAME`."""
        import tiktoken

        super().__init__(path, self._read(path))
        described = json.loads(self.data)
        specials = described["special_tokens"]
        # Whisper's files have an empty token, written `=`, which keeps an id free. It decodes to
        # b"".
        ranks = {}
        for line in described["ranks"].splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token)] = int(rank)
        self._encoding = tiktoken.Encoding(
            "local",
            pat_str=described["pattern"],
            mergeable_ranks=ranks,
            special_tokens=specials,
        )
        self._token_bytes = {rank: token for token, rank in ranks.items()}
        self.vocab_size = self._encoding.n_vocab
        self.bos_id = _id_of("bos_token", described, specials)
        self.eos_id = _id_of("eos_token", described, specials)

    @staticmethod
    def _read(path: Path | str) -> bytes:
        """Returns the contents of `tiktoken.json` for an encoding.

        Args:
            path: `tiktoken:NAME`, a rank file, or a `tiktoken.json` itself.
        """
        if str(path).startswith(TIKTOKEN_PREFIX):
            import tiktoken

            # From tiktoken's cache (TIKTOKEN_CACHE_DIR) or the network.
            encoding = tiktoken.get_encoding(str(path).removeprefix(TIKTOKEN_PREFIX))
            ranks = encoding._mergeable_ranks
            lines = []
            for token in sorted(ranks, key=ranks.__getitem__):
                encoded = base64.b64encode(token).decode()
                lines.append(f"{encoded} {ranks[token]}\n")
            eos_token = "<|endoftext|>"
            if eos_token not in encoding._special_tokens:
                eos_token = None
            bundle = {
                "format": TIKTOKEN_FORMAT,
                "ranks": "".join(lines),
                "pattern": encoding._pat_str,
                "special_tokens": encoding._special_tokens,
                "bos_token": None,
                "eos_token": eos_token,
            }
        elif Path(path).suffix == ".tiktoken":
            json_file = Path(path).with_suffix(".json")
            described = json.loads(json_file.read_text(encoding="utf-8"))
            bundle = {"format": TIKTOKEN_FORMAT, "ranks": Path(path).read_text(encoding="ascii")}
            for name in TIKTOKEN_FIELDS:
                bundle[name] = described.get(name)
        else:
            return Path(path).read_bytes()
        return json.dumps(bundle, ensure_ascii=False, indent=1).encode()

    def _encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids.

        Ids without a token are left out. Bytes that are not UTF-8 become U+FFFD.
        """
        data = b"".join(self._token_bytes.get(int(i), b"") for i in ids)
        return data.decode("utf-8", "replace")


# Names of the one tokenizer file in a folder, and at the end the name in Hugging Face's folders. An
# exported model has a tokenizer.json for other programs in addition to its own file, which comes
# first here.
TOKENIZER_FILES = (
    SentencePieceTokenizer.file,
    TiktokenTokenizer.file,
    JsonTokenizer.file,
    "tokenizer.json",
)


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Loads a tokenizer.

    Args:
        path: A sentencepiece `.model` file; a Hugging Face `tokenizer.json`; tiktoken's ranks
            `X.tiktoken` with `X.json` beside them, or `tiktoken:NAME` for an encoding that tiktoken
            knows by name; or a folder that holds one of TOKENIZER_FILES (a corpus, a checkpoint, a
            model).

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not a tokenizer of one of these kinds.
    """
    # In a folder, take the first file that is there.
    for name in TOKENIZER_FILES:
        if (Path(path) / name).is_file():
            path = Path(path) / name
            break
    by_name = str(path).startswith(TIKTOKEN_PREFIX)
    if not by_name and not Path(path).is_file():
        raise FileNotFoundError(
            f"There is no tokenizer at {path}; give a prepared corpus or another folder that holds one of "
            f"{', '.join(TOKENIZER_FILES)}, or the tokenizer file itself."
        )

    # The name decides the kind; only .json files of two kinds must be told apart by their contents.
    kind = SentencePieceTokenizer
    if by_name or Path(path).suffix == ".tiktoken":
        kind = TiktokenTokenizer
    elif Path(path).suffix == ".json":
        kind = JsonTokenizer
        # A tiktoken.json begins with its format's name.
        if TIKTOKEN_FORMAT.encode() in Path(path).read_bytes()[:100]:
            kind = TiktokenTokenizer
    message = (
        f"{path} is not a tokenizer: a sentencepiece .model, a Hugging Face tokenizer.json with its {CONFIG_FILE}, or "
        f"tiktoken's X.tiktoken with X.json beside it ({', '.join(TIKTOKEN_FIELDS)})"
    )
    if by_name:
        message = (
            f"{path} cannot be opened. tiktoken must know the name, and have the encoding's file: it downloads it, or finds "
            "it in the folder that the variable TIKTOKEN_CACHE_DIR names (docs/data.md, Tokenizers)"
        )
    with library_errors(message):
        tokenizer = kind(path)
    tokenizer.documents = prepared_documents(tokenizer)
    return tokenizer


def check_vocab(tokenizer_vocab: int, model_vocab: int) -> None:
    """Checks that every id of a tokenizer has a row in a model, which may have spare rows.

    Args:
        tokenizer_vocab: Vocabulary size of the tokenizer.
        model_vocab: Rows of the model's embedding.

    Raises:
        ValueError: The model has fewer rows.
    """
    if tokenizer_vocab > model_vocab:
        raise ValueError(
            f"The tokenizer has {tokenizer_vocab:,} ids, the model's vocab_size is {model_vocab:,}. Set that to "
            f"{tokenizer_vocab:,} or more (padding is allowed), or take a smaller tokenizer."
        )


class StreamDecoder:
    """Decodes tokens one by one.

    The texts are those of `decode`:
    `"".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)`.

    With each new token the last few ids are decoded again, which works with every library. Text
    that ends in U+FFFD is held back, because more bytes may turn it into a character.

    Libraries differ in how many U+FFFD they write for a run of broken bytes. If such a run is
    longer than LONGEST ids, or the decoder of a tokenizer.json changes it as a whole, only the rest
    of the text is equal.

    Args:
        tokenizer: A tokenizer from `load_tokenizer`.
        after: Ids that came before (a prompt). The text continues theirs, which is not returned
            again.
    """

    LONGEST = 64  # ids that are held back at most: more without a complete character are not text

    def __init__(self, tokenizer: Tokenizer, after: Iterable[int] = ()) -> None:
        """Begins a text after the ids `after`, whose text is not returned."""
        self._decode = tokenizer.decode
        self._context: list[int] = []  # the last ids whose text was returned
        self._pending: list[int] = []  # ids after these, whose text was not returned yet
        for token_id in after:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes: often a word, sometimes nothing.

        Args:
            token_id: The next id of the text.
        """
        self._pending.append(int(token_id))
        text = self._pending_text()
        if text.endswith("\ufffd") and len(self._pending) < self.LONGEST:
            return ""
        if not text:
            return text
        # Some libraries drop the spaces at the start of what they decode. So the context must hold
        # a token with more than space, or all tokens of the text so far. Control tokens have no
        # text, and are no context either.
        if self._decode(self._pending).strip():
            self._context = self._pending
        elif not self._decode(self._context).strip():
            self._context = (self._context + self._pending)[: self.LONGEST]
        self._pending = []
        return text

    def flush(self) -> str:
        """Returns the rest of the text: U+FFFD for a character that never became complete."""
        return self._pending_text()

    def _pending_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]
