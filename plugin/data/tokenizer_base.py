"""What the rest of the code asks of a tokenizer, of whatever library, and text that arrives token by token."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from interdomain.folders import write_whole


class Tokenizer:
    """What every kind shares. A kind sets the fields, `_encode` and `decode`; ids that do not exist are None.

    Text that names control tokens is plain text: only add_bos and add_eos make them. Control tokens have no text.
    """

    file: str  # the name that it has in folders, one of TOKENIZER_FILES
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None = None
    unk_id: int | None = None

    def __init__(self, path: Path | str, data: bytes) -> None:
        """data: the complete tokenizer, as its file in folders holds it."""
        self.path, self.data, self.sha256 = Path(path), data, hashlib.sha256(data).hexdigest()

    def _encode(self, texts: list[str], num_threads: int) -> list[list[int]]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        raise NotImplementedError

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return self.encode_batch([text], add_bos, add_eos, num_threads=1)[0]

    def encode_batch(
        self, texts: Iterable[str], add_bos: bool = False, add_eos: bool = False, num_threads: int = -1
    ) -> list[list[int]]:
        """As `encode` of each; num_threads = -1 takes as many as the library likes, the result is the same."""
        for wanted, token_id, name in ((add_bos, self.bos_id, "BOS"), (add_eos, self.eos_id, "EOS")):
            if wanted and token_id is None:
                raise ValueError(
                    f"{self.path} has no {name} token; encode without it, or take a tokenizer that has one."
                )
        rows = self._encode(list(texts), num_threads)
        before, after = [self.bos_id] * add_bos, [self.eos_id] * add_eos
        return [[*before, *ids, *after] for ids in rows] if before or after else rows  # type: ignore[list-item]

    def write(self, folder: Path | str) -> Path:
        """Writes the tokenizer's one file into a folder, completely or not at all. Returns its path."""
        write_whole(Path(folder) / self.file, self.data)
        return Path(folder) / self.file


class StreamDecoder:
    """Text as tokens arrive: `"".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)`.

    Decodes the last few ids again with each new one, whatever the library. Text is held back as long as it ends in
    U+FFFD, which more bytes may turn into a character. (Libraries differ in how many U+FFFD a run of broken bytes is; where
    that run is longer than LONGEST ids, or a tokenizer.json's decoder changes it as one, the equality is that of text.)

    Args:
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
        # A token without text (a control token) gives the next one no context: keep what came before it.
        if text:
            self._context, self._new = self._new, []
        return text

    def flush(self) -> str:
        """What is left at the end of the tokens: U+FFFD for the bytes of a character that never became complete."""
        text, self._context, self._new = self._text(), [*self._context, *self._new], []
        return text

    def _text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._new)[len(before) :]
