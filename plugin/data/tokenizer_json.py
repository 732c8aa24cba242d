"""Hugging Face's `tokenizer.json`, through the tokenizers library."""

import json
from collections.abc import Sequence
from pathlib import Path

from interdomain.data.tokenizer_base import Tokenizer

CONFIG_FILE = "tokenizer_config.json"
SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token")
SPECIALS_KEY = "interdomain_special_tokens"
# What a file without a configuration beside it means, if it has exactly one of them.
USUAL = {
    "bos_token": ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]"),
    "eos_token": ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>", "[EOS]"),
    "pad_token": ("<pad>", "<|pad|>", "[PAD]"),
    "unk_token": ("<unk>", "[UNK]"),
}


class JsonTokenizer(Tokenizer):
    """A `tokenizer.json`. Which tokens are BOS and EOS stands in the `tokenizer_config.json` beside it, and is kept inside
    the file that goes into corpora and checkpoints, `hf_tokenizer.json` (the same and one key more).

    The file's post-processor is not applied: BOS and EOS come where they are asked for.

    Raises: FileNotFoundError; ValueError if the file is no tokenizer.
    """

    file = "hf_tokenizer.json"

    def __init__(self, path: Path | str) -> None:
        try:
            import tokenizers
        except ImportError as e:
            raise ValueError(f"{path} is read by the tokenizers library: pip install tokenizers.") from e
        path = Path(path)
        data = path.read_bytes()
        try:
            self.described = json.loads(data)
            # Taken out for the library, which refuses keys that it does not know.
            specials = self.described.pop(SPECIALS_KEY, None)
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(self.described))
        # A file that the library cannot read is an Exception of no further kind.
        except Exception as e:
            raise ValueError(
                f"{path} is not a tokenizer that the tokenizers library reads ({type(e).__name__}: {e}); give a "
                "tokenizer.json as Hugging Face's tokenizers write it, or copy it again."
            ) from e
        if specials is None:
            specials = self._specials(path)
            data = json.dumps({**self.described, SPECIALS_KEY: specials}, ensure_ascii=False, indent=1).encode()
        super().__init__(path, data)
        self._tokenizer.encode_special_tokens = True  # text that names control tokens is text
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id, self.eos_id, self.pad_id, self.unk_id = (self._id(specials.get(name)) for name in SPECIALS)

    def _id(self, token: str | None) -> int | None:
        found = None if token is None else self._tokenizer.token_to_id(token)
        if token is not None and found is None:
            raise ValueError(f"{CONFIG_FILE} names the token {token!r}, which is not in the tokenizer beside it.")
        return found

    def _specials(self, path: Path) -> dict[str, str | None]:
        config = path.with_name(CONFIG_FILE)
        if config.is_file():
            try:
                named = json.loads(config.read_text(encoding="utf-8"))
                tokens = {name: named.get(name) for name in SPECIALS}
            except (ValueError, AttributeError) as e:
                raise ValueError(f"{config} is damaged ({e}); copy it again.") from e
            return {name: t["content"] if isinstance(t, dict) else t for name, t in tokens.items()}
        held = {token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special}
        found = {name: [token for token in usual if token in held] for name, usual in USUAL.items()}
        return {name: tokens[0] if len(tokens) == 1 else None for name, tokens in found.items()}

    def _encode(self, texts: list[str], num_threads: int) -> list[list[int]]:
        if num_threads == 1:
            return [self._tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)
