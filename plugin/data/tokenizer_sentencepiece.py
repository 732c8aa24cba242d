"""sentencepiece's models."""

from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from interdomain.data.tokenizer_base import Tokenizer


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece `.model` file: Llama 2's, or one of `interdomain.tools.train_tokenizer`.

    With byte fallback and identity normalisation decode(encode(text)) == text, whitespace included, but for U+2581, which
    sentencepiece takes for a space.

    Raises: FileNotFoundError; ValueError if the file is no sentencepiece model.
    """

    file = "tokenizer.model"

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"There is no tokenizer file {path}; give a sentencepiece .model file, or train one with "
                "`python -m interdomain.tools.train_tokenizer`."
            )
        super().__init__(path, path.read_bytes())
        self._sp = sentencepiece.SentencePieceProcessor()
        try:
            # load_from_serialized_proto takes an empty file for a model.
            if not self.data or not self._sp.LoadFromSerializedProto(self.data):
                raise RuntimeError("empty")
        except RuntimeError as e:
            raise ValueError(
                f"{path} ({len(self.data):,} bytes) is not a sentencepiece model; expected a file that sentencepiece "
                "wrote, like Llama 2's tokenizer.model (Llama 3's is tiktoken's: name it .tiktoken). Copy it again, or "
                "train one with `python -m interdomain.tools.train_tokenizer`."
            ) from e
        self.vocab_size = self._sp.vocab_size()
        ids = (self._sp.bos_id(), self._sp.eos_id(), self._sp.pad_id(), self._sp.unk_id())
        self.bos_id, self.eos_id, self.pad_id, self.unk_id = (i if i >= 0 else None for i in ids)

    def _encode(self, texts: list[str], num_threads: int) -> list[list[int]]:
        return self._sp.encode(texts, num_threads=num_threads)

    def decode(self, ids: Sequence[int]) -> str:
        return self._sp.decode([int(i) for i in ids])
