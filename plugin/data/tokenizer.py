"""Text to ids and back: `load_tokenizer("data/stdlib").encode("def f():", add_eos=True)`.

The rule for vocabularies: every id of the tokenizer needs a row in the model, so the tokenizer's vocabulary is at most
the model's; the model's may be larger (padded to a round number), its spare rows are never fed. `check_vocab` says so.
"""

from pathlib import Path

from interdomain.data.tokenizer_base import Tokenizer
from interdomain.data.tokenizer_json import JsonTokenizer
from interdomain.data.tokenizer_sentencepiece import SentencePieceTokenizer
from interdomain.data.tokenizer_tiktoken import FORMAT, NAMED, TiktokenTokenizer

# The one file that a folder keeps of its tokenizer, by kind; last, what Hugging Face's folders hold. An exported folder
# has that one too, for others to read, beside the own one, which counts.
TOKENIZER_FILES = (SentencePieceTokenizer.file, TiktokenTokenizer.file, JsonTokenizer.file, "tokenizer.json")


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer at `path`.

    Args:
        path: a sentencepiece `.model` file; a Hugging Face `tokenizer.json`; tiktoken's ranks `X.tiktoken` with `X.json`
            beside them, or `tiktoken:NAME` for an encoding that tiktoken knows by name; or a folder that holds one of
            the files in TOKENIZER_FILES (a corpus, a checkpoint, a model).
    Raises: FileNotFoundError, ValueError.
    """
    if str(path).startswith(NAMED):
        return TiktokenTokenizer.from_name(str(path).removeprefix(NAMED))
    path = Path(path)
    if path.is_dir():
        found = [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
        if not found:
            raise FileNotFoundError(
                f"The folder {path} has no {TOKENIZER_FILES[0]} (nor {' or '.join(TOKENIZER_FILES[1:])}); give a prepared "
                "corpus or another folder that holds one, or the tokenizer file itself."
            )
        path = found[0]
    if path.suffix == ".tiktoken":
        return TiktokenTokenizer.from_ranks(path)
    if path.suffix == ".json" and path.is_file():
        data = path.read_bytes()
        return TiktokenTokenizer(path, data) if FORMAT.encode() in data[:100] else JsonTokenizer(path)
    if path.exists() and path.suffix != ".model":
        raise ValueError(
            f"{path} is not a tokenizer that can be read: give a sentencepiece .model file, a Hugging Face "
            "tokenizer.json, tiktoken's .tiktoken file, or a folder with one."
        )
    return SentencePieceTokenizer(path)


def check_vocab(tokenizer_vocab: int, model_vocab: int) -> None:
    """Raises ValueError unless every id of the tokenizer has a row in the model."""
    if tokenizer_vocab > model_vocab:
        raise ValueError(
            f"The tokenizer has {tokenizer_vocab:,} ids, the model's vocab_size is {model_vocab:,}: ids from "
            f"{model_vocab:,} on would have no embedding. Set the model's vocab_size to {tokenizer_vocab:,} or more "
            "(padding is allowed), or take a smaller tokenizer."
        )
