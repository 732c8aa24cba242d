"""Text to ids and back: `load_tokenizer("data/stdlib").encode("def f():", add_eos=True)`.

Three kinds, one class each: sentencepiece's `.model`, Hugging Face's `tokenizer.json`, tiktoken's ranks.
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
from interdomain.folders import write_whole

CONFIG_FILE = "tokenizer_config.json"
SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token")
SPECIALS_KEY = "interdomain_special_tokens"
SPACE = "\u2581"  # sentencepiece's visible space
LONGEST = 4192  # bytes of a line that sentencepiece trains on
PIECE = re.compile(rf".{{1,{LONGEST // 4}}}(?=\s|$)|.{{1,{LONGEST // 4}}}", re.DOTALL)
# sentencepiece's types of pieces.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
BYTE = 6
TIKTOKEN_NAMED = "tiktoken:"
TIKTOKEN_FORMAT = "interdomain-tiktoken-1"
TIKTOKEN_FIELDS = ("pattern", "special_tokens", "bos_token", "eos_token")


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Make a ValueError that begins with `what` of any error of a tokenizer's library."""
    try:
        yield
    except MemoryError:  # says nothing of the text
        raise
    except BaseException as e:
        # A panic of Rust is no Exception, and each library has a class of its own for it, which cannot be imported.
        is_panic = (type(e).__module__, type(e).__name__) == ("pyo3_runtime", "PanicException")
        if not isinstance(e, Exception) and not is_panic:
            raise
        raise ValueError(f"{what} ({type(e).__name__}: {str(e).strip()})") from e


class Tokenizer:
    """Base of every kind of tokenizer; made by `load_tokenizer`. A kind sets the fields, `_encode` and `decode`.

    Text that names control tokens is plain text: only add_eos makes one. Control tokens have no text.

    Attributes:
        vocab_size: ids are below it.
        bos_id: id of the token that begins a text; None if there is none, as in the next three.
        eos_id: of the token that ends a document.
        pad_id: of the padding token.
        unk_id: of the token for unknown text.
        sha256: of the file, by which corpora, checkpoints and exported folders know the tokenizer.
        documents: how documents begin and end in the data of the model that the tokenizer was loaded with; without a model
            as `prepare-data` writes them.
    """

    file: str  # the name that it has in folders, one of TOKENIZER_FILES
    library: str  # the package that encodes
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None = None
    unk_id: int | None = None
    _documents: Documents | None = None

    def __init__(self, path: Path | str, data: bytes) -> None:
        """data: the complete tokenizer, as its file in folders holds it."""
        self.path = Path(path)
        self.data = data
        self.sha256 = hashlib.sha256(data).hexdigest()

    def _encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; control tokens have none."""
        raise NotImplementedError

    def converted(self) -> Any:
        """The same as a tokenizers.Tokenizer, not yet compared. Raises NotImplementedError if there is no exact counterpart."""
        raise NotImplementedError

    @property
    def documents(self) -> Documents:
        return self._documents or prepared_documents(self)

    @documents.setter
    def documents(self, documents: Documents) -> None:
        self._documents = documents

    def encode(self, text: str, add_eos: bool = False) -> list[int]:
        """Ids of a text.

        Raises:
            ValueError: the library cannot encode the text, or `add_eos` where the tokenizer has no such token.
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
        """Write the tokenizer's one file into a folder, completely or not at all. Returns: the path of the file."""
        path = Path(folder) / self.file
        write_whole(path, self.data)
        return path


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece `.model` file: Llama 2's, or one that `interdomain prepare-data --vocab-size` trained.

    With byte fallback and identity normalisation decode(encode(text)) == text, whitespace included, but for U+2581, which
    sentencepiece takes for a space.
    """

    file = "tokenizer.model"
    library = "sentencepiece"

    def __init__(self, path: Path | str) -> None:
        super().__init__(path, Path(path).read_bytes())
        self._sp = sentencepiece.SentencePieceProcessor()
        # load_from_serialized_proto takes an empty file for a model.
        if not self.data or not self._sp.LoadFromSerializedProto(self.data):
            raise ValueError("the file is empty")
        self.vocab_size = self._sp.vocab_size()
        ids = (self._sp.bos_id(), self._sp.eos_id(), self._sp.pad_id(), self._sp.unk_id())
        self.bos_id, self.eos_id, self.pad_id, self.unk_id = (i if i >= 0 else None for i in ids)

    def _encode(self, text: str) -> list[int]:
        return self._sp.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._sp.decode([int(i) for i in ids])

    def converted(self) -> Any:
        import tokenizers
        from sentencepiece import sentencepiece_model_pb2
        from tokenizers import decoders, normalizers

        model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
        model.ParseFromString(self.data)
        is_bpe = model.trainer_spec.model_type == model.trainer_spec.BPE
        special = {UNKNOWN, CONTROL}
        changed = model.normalizer_spec.precompiled_charsmap
        # What else may differ (white space, unknown characters) shows in the comparison.
        if (
            not is_bpe
            or changed
            or {piece.type for piece in model.pieces} - {NORMAL, BYTE} - special
        ):
            raise NotImplementedError(
                "only sentencepiece BPE models of unchanged text and without pieces defined by hand have an exact counterpart"
            )
        vocab = {piece.piece: i for i, piece in enumerate(model.pieces)}
        normal = {piece.piece for piece in model.pieces if piece.type == NORMAL}
        # sentencepiece joins any two neighbours whose join is a piece, the best score first: every split of every piece is
        # a merge, in that order.
        merges = []
        for piece in sorted(model.pieces, key=lambda piece: -piece.score):
            if piece.piece not in normal:
                continue
            splits = []
            for n in range(1, len(piece.piece)):
                split = (piece.piece[:n], piece.piece[n:])
                if normal.issuperset(split):
                    splits.append(split)
            merges += sorted(splits, key=lambda split: (vocab[split[0]], vocab[split[1]]))
        unknown = None if self.unk_id is None else model.pieces[self.unk_id].piece
        made = tokenizers.Tokenizer(
            tokenizers.models.BPE(
                vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
            )
        )
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
        made.add_special_tokens(_added(p.piece for p in model.pieces if p.type in special))
        return made


def train_sentencepiece(documents: Iterable[str], vocab_size: int) -> bytes:
    """A BPE model file in Llama 2's style, trained on the documents: a function of these and of vocab_size alone.

    Bytes stand in for what the vocabulary lacks, digits stand alone, text is not normalised, whitespace survives exactly.
    The trainer puts a space before each line; in running text only a document's first line has one. Without one space of its
    indentation a line comes out as it stands in running text. A line of more than 4,192 bytes is cut before spaces.

    Raises: ValueError if the text does not fit the vocabulary size; what `documents` raises.
    """
    model = io.BytesIO()
    raised = []

    def lines() -> Iterator[str]:
        try:
            for text in documents:
                for line in text.splitlines():
                    pieces = [line]
                    if (
                        len(line.encode()) > LONGEST
                    ):  # the trainer would leave it out without a word
                        pieces = PIECE.findall(line)
                    for piece in pieces:
                        yield piece.removeprefix(" ")
        except BaseException as e:  # the library makes a RuntimeError of it
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
        if raised:
            raise raised[0] from None
        why = str(e).rpartition("] ")[
            2
        ]  # "Vocabulary size too high (5000). Please set it to a value <= 1234."
        # "Vocabulary size is smaller than required_chars. 100 vs 356. Increase ... --character_coverage option."
        if smaller := re.match(r"(.*required_chars)\. \d+ vs (\d+)\.", why):
            why = f"{smaller[1]}: the bytes and characters are {smaller[2]}. Give --vocab-size {smaller[2]} or more."
        raise ValueError(
            f"A vocabulary of {vocab_size} cannot be trained on this text: {why or 'it is empty.'}"
        ) from e
    return model.getvalue()


def _id_of(name: str, token: str | None, vocabulary: dict[str, int]) -> int | None:
    """Id of a control token; None for a token that is not named. Raises ValueError if the vocabulary lacks it."""
    if token is None:
        return None
    if token not in vocabulary:
        raise ValueError(
            f"its {name} is {token!r}, which is no token of its vocabulary; name one that is, or none"
        )
    return vocabulary[token]


class JsonTokenizer(Tokenizer):
    """Hugging Face's `tokenizer.json`. Which tokens are BOS and EOS stands in the `tokenizer_config.json` beside it, and is
    kept inside the file that goes into corpora and checkpoints, `hf_tokenizer.json` (the same and one key more).

    The file's post-processor, which adds BOS in many files, is not applied.
    """

    file = "hf_tokenizer.json"
    library = "tokenizers"

    def __init__(self, path: Path | str) -> None:
        import tokenizers

        data = Path(path).read_bytes()
        self.described = json.loads(data)
        # Taken out for the library, which refuses keys that it does not know.
        specials = self.described.pop(SPECIALS_KEY, None)
        if specials is None:
            config = Path(path).with_name(CONFIG_FILE)
            named = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
            specials = {}
            for name in SPECIALS:
                token = named.get(name)
                specials[name] = token["content"] if isinstance(token, dict) else token
            data = json.dumps(
                {**self.described, SPECIALS_KEY: specials}, ensure_ascii=False, indent=1
            ).encode()
        super().__init__(path, data)
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(self.described))
        self._tokenizer.encode_special_tokens = True  # text that names control tokens is text
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        ids = [_id_of(name, specials.get(name), vocabulary) for name in SPECIALS]
        self.bos_id, self.eos_id, self.pad_id, self.unk_id = ids

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def converted(self) -> Any:
        import tokenizers

        # The post-processor adds BOS in many files.
        described = self.described | {"truncation": None, "padding": None, "post_processor": None}
        return tokenizers.Tokenizer.from_str(json.dumps(described))


class TiktokenTokenizer(Tokenizer):
    """One of tiktoken's encodings: ranks from a local file, or one that tiktoken knows by name.

    A rank file (`X.tiktoken`: a token in base64 and its rank in each line) says nothing of the pattern that splits text, nor
    of control tokens. These stand in `X.json` beside it:

        {"pattern": "...", "special_tokens": {"<|endoftext|>": 100257}, "eos_token": "<|endoftext|>", "bos_token": null}

    Corpora and checkpoints keep both in one file, `tiktoken.json`: the same, with the rank file's text under "ranks".
    """

    file = "tiktoken.json"
    library = "tiktoken"

    def __init__(self, path: Path | str) -> None:
        import tiktoken

        super().__init__(path, self._bundle(path))
        described = json.loads(self.data)
        self.pattern, self.specials, bos, eos = (described[name] for name in TIKTOKEN_FIELDS)
        self.ranks = {}
        lines = [line for line in described["ranks"].splitlines() if line.strip()]
        for line in lines:
            token, _, rank = line.rpartition(" ")
            # Whisper's files have an empty token, written `=`, which holds an id free.
            token = token.strip().removeprefix("=")
            self.ranks[base64.b64decode(token, validate=True)] = int(rank)
        self._tokens = {rank: token for token, rank in self.ranks.items()}
        # To tiktoken, holes are a panic of Rust.
        every_byte = {bytes([b]) for b in range(256)}
        if len(self._tokens) != len(lines) or not every_byte <= self.ranks.keys():
            raise ValueError("the ranks must hold all 256 bytes, and each token and rank once")
        self._encoding = tiktoken.Encoding(
            "local", pat_str=self.pattern, mergeable_ranks=self.ranks, special_tokens=self.specials
        )
        self.bos_id = _id_of("bos_token", bos, self.specials)
        self.eos_id = _id_of("eos_token", eos, self.specials)
        self.vocab_size = self._encoding.n_vocab

    @staticmethod
    def _bundle(path: Path | str) -> bytes:
        """Contents of `tiktoken.json` for the encoding at `path`."""
        if str(path).startswith(TIKTOKEN_NAMED):
            import tiktoken

            # From tiktoken's cache (TIKTOKEN_CACHE_DIR) or its network.
            encoding = tiktoken.get_encoding(str(path).removeprefix(TIKTOKEN_NAMED))
            ordered = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
            ranks = "".join(
                f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ordered
            )
            eos = "<|endoftext|>" if "<|endoftext|>" in encoding._special_tokens else None
            fields = (encoding._pat_str, encoding._special_tokens, None, eos)
        elif Path(path).suffix == ".tiktoken":
            ranks = Path(path).read_text(encoding="ascii")
            described = json.loads(Path(path).with_suffix(".json").read_text(encoding="utf-8"))
            fields = tuple(described.get(name) for name in TIKTOKEN_FIELDS)
        else:
            return Path(path).read_bytes()
        bundle = {
            "format": TIKTOKEN_FORMAT,
            "ranks": ranks,
            **dict(zip(TIKTOKEN_FIELDS, fields, strict=True)),
        }
        return json.dumps(bundle, ensure_ascii=False, indent=1).encode()

    def _encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Ids that no token has are left out, as control tokens are. Bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self._tokens.get(int(i), b"") for i in ids).decode("utf-8", "replace")

    def converted(self) -> Any:
        import tokenizers
        from tokenizers import decoders, pre_tokenizers

        # The character that stands for each byte in byte-level vocabularies: itself where it can be seen, else from 256 on.
        character = {}
        unseen = 256
        for b in range(256):
            if 33 <= b < 127 or 161 <= b < 173 or b >= 174:
                character[b] = chr(b)
            else:
                character[b] = chr(unseen)
                unseen += 1
        ranks = self.ranks
        name = {}
        for token in ranks:
            name[token] = "".join(character[b] for b in token)
        merges = []
        for token, rank in ranks.items():
            for n in range(1, len(token)):
                left = token[:n]
                right = token[n:]
                if left in ranks and right in ranks:
                    merges.append((rank, ranks[left], ranks[right], name[left], name[right]))
        # Control tokens too: to those that are not in this table the library gives ids from its size on, taken or not.
        vocab = self.specials | {name[token]: rank for token, rank in ranks.items()}
        pairs = [(a, b) for *_, a, b in sorted(merges)]
        made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, pairs, ignore_merges=True))
        # Another engine reads the pattern there: to it X{1,3}+ is (X{1,3})+ and not possessive. Elsewhere + is as here.
        pattern = tokenizers.Regex(re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", self.pattern))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(pattern, "isolated"), byte_level]
        )
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens(_added(sorted(self.specials, key=lambda text: self.specials[text])))
        return made


def _added(contents: Iterable[str]) -> list:
    """Control tokens for the tokenizers library."""
    import tokenizers

    return [tokenizers.AddedToken(text, normalized=False, special=True) for text in contents]


# The one file that a folder keeps of its tokenizer, by kind; last, what Hugging Face's folders hold. An exported folder
# has that one too, for others to read, beside the own one, which counts.
TOKENIZER_FILES = (
    SentencePieceTokenizer.file,
    TiktokenTokenizer.file,
    JsonTokenizer.file,
    "tokenizer.json",
)


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer at `path`.

    Args:
        path: a sentencepiece `.model` file; a Hugging Face `tokenizer.json`; tiktoken's ranks `X.tiktoken` with `X.json`
            beside them, or `tiktoken:NAME` for an encoding that tiktoken knows by name; or a folder that holds one of
            the files in TOKENIZER_FILES (a corpus, a checkpoint, a model).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a tokenizer of one of these kinds.
    """
    if Path(path).is_dir():
        path = next(
            (Path(path) / name for name in TOKENIZER_FILES if (Path(path) / name).is_file()),
            Path(path),
        )
    named = str(path).startswith(TIKTOKEN_NAMED)
    if not named and not Path(path).is_file():
        raise FileNotFoundError(
            f"There is no tokenizer at {path}; give a prepared corpus or another folder that holds one of "
            f"{', '.join(TOKENIZER_FILES)}, or the tokenizer file itself."
        )
    kind = SentencePieceTokenizer
    if named or Path(path).suffix == ".tiktoken":
        kind = TiktokenTokenizer
    elif Path(path).suffix == ".json":
        is_tiktoken = TIKTOKEN_FORMAT.encode() in Path(path).read_bytes()[:100]
        kind = TiktokenTokenizer if is_tiktoken else JsonTokenizer
    try:
        with library_errors("it cannot be read"):
            return kind(path)
    except ValueError as e:
        if isinstance(e.__cause__, ImportError):
            raise e.__cause__ from None
        raise ValueError(
            f"{path} is not a tokenizer: {e}. Give a sentencepiece .model, a Hugging "
            f"Face tokenizer.json with its {CONFIG_FILE}, tiktoken's X.tiktoken with X.json beside it "
            f"({', '.join(TIKTOKEN_FIELDS)}), or {TIKTOKEN_NAMED}NAME, which needs a network or TIKTOKEN_CACHE_DIR."
        ) from e


def check_vocab(tokenizer_vocab: int, model_vocab: int) -> None:
    """Raises ValueError unless every id of the tokenizer has a row in the model, which may have spare rows."""
    if tokenizer_vocab > model_vocab:
        raise ValueError(
            f"The tokenizer has {tokenizer_vocab:,} ids, the model's vocab_size is {model_vocab:,}. Set that to "
            f"{tokenizer_vocab:,} or more (padding is allowed), or take a smaller tokenizer."
        )


class StreamDecoder:
    """Text as tokens arrive: `"".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)`.

    Decodes the last few ids again with each new one, whatever the library. Text is held back as long as it ends in
    U+FFFD, which more bytes may turn into a character. Libraries differ in how many U+FFFD a run of broken bytes is. Where
    that run is longer than LONGEST ids, or a tokenizer.json's decoder changes it as one, the equality is that of text.

    Args:
        tokenizer: from `load_tokenizer`.
        after: ids that came before (a prompt): the text continues theirs, which is not given out again.
    """

    LONGEST = 64  # ids; so many without a complete character are no text, and are not decoded again and again

    def __init__(self, tokenizer: Tokenizer, after: Iterable[int] = ()) -> None:
        self._decode = tokenizer.decode
        self._context: list[int] = []  # ids whose text was given out
        self._new: list[int] = []
        for token_id in after:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """The text that this token completes, often one word, sometimes nothing."""
        self._new.append(int(token_id))
        text = self._text()
        if text.endswith("\ufffd") and len(self._new) < self.LONGEST:
            return ""
        if not text:
            return text
        # Some libraries drop the spaces at the start of what they decode: the context has a token that is more than space, or
        # all of the text's first tokens. A control token has no text, and is no context either.
        if self._decode(self._new).strip():
            self._context = self._new
        elif not self._decode(self._context).strip():
            self._context = (self._context + self._new)[: self.LONGEST]
        self._new = []
        return text

    def flush(self) -> str:
        """Text that is left at the end of the tokens: U+FFFD for the bytes of a character that never became complete."""
        return self._text()

    def _text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._new)[len(before) :]
