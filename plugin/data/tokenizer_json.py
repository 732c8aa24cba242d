"""Hugging Face's `tokenizer.json`, through the tokenizers library."""

import json
from pathlib import Path

from interdomain.data.streams import WindowStream
from interdomain.data.tokenizer import TokenizerFile

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


class JsonTokenizer(TokenizerFile):
    """A `tokenizer.json`. Which tokens are BOS and EOS stands in the `tokenizer_config.json` beside it, and is kept inside
    the file that goes into corpora and checkpoints, `hf_tokenizer.json` (the same and one key more).

    The file's post-processor is not applied: BOS and EOS come where they are asked for.

    Raises: FileNotFoundError; ValueError if the file is no tokenizer.
    """

    file = "hf_tokenizer.json"

    @classmethod
    def reads(cls, path):
        return True

    def __init__(self, path):
        try:
            import tokenizers
        except ImportError as e:
            raise ValueError(f"{path} is read by the tokenizers library: pip install tokenizers.") from e
        path = Path(path)
        data = path.read_bytes()
        try:
            described = json.loads(data)
            # Taken out for the library, which refuses keys that it does not know.
            specials = described.pop(SPECIALS_KEY, None)
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(described))
        # A file that the library cannot read is an Exception of no further kind.
        except Exception as e:
            raise ValueError(
                f"{path} is not a tokenizer that the tokenizers library reads ({type(e).__name__}: {e}); give a "
                "tokenizer.json as Hugging Face's tokenizers write it, or copy it again."
            ) from e
        if specials is None:
            specials = self._specials(path)
            data = json.dumps({**described, SPECIALS_KEY: specials}, ensure_ascii=False, indent=1).encode()
        super().__init__(path, data)
        self.specials = specials
        self._tokenizer.encode_special_tokens = True  # text that names control tokens is text
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        ids = {name: self._id(specials.get(name)) for name in SPECIALS}
        self.bos_id, self.eos_id, self.pad_id, self.unk_id = (ids[name] for name in SPECIALS)

    def _id(self, token):
        if token is None:
            return None
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"{CONFIG_FILE} names the token {token!r}, which is not in the tokenizer beside it.")
        return found

    def _specials(self, path):
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

    def encode(self, text, add_bos=False, add_eos=False):
        self._check_specials(add_bos, add_eos)
        return self._with_specials(self._tokenizer.encode(text, add_special_tokens=False).ids, add_bos, add_eos)

    def encode_batch(self, texts, add_bos=False, add_eos=False, num_threads=-1):
        """As `encode` of each. num_threads=1 encodes in this thread, anything else as the library likes."""
        self._check_specials(add_bos, add_eos)
        if num_threads == 1:
            return [self.encode(text, add_bos, add_eos) for text in texts]
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._with_specials(encoding.ids, add_bos, add_eos) for encoding in encoded]

    def decode(self, ids):
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def stream(self):
        return WindowStream(self.decode)

    def described(self):
        """The tokenizer.json as an object, without what is ours."""
        described = json.loads(self.data)
        described.pop(SPECIALS_KEY)
        return described
