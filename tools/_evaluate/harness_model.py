"""lm-evaluation-harness's Hugging Face model class with a folder's own tokenizer, for `harness`.

The harness would load the tokenizer by AutoTokenizer, which refuses a folder whose tokenizer has no exact counterpart in
transformers. And texts begin as documents did in training, also where the harness would score nothing or hand over nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lm_eval.models import huggingface

from interdomain.data import Tokenizer
from interdomain.data.tokenizer_export import padding_id

HFLM: Any = huggingface.HFLM  # its decorator hides the type


class HarnessTokenizer:
    """What the harness uses of a tokenizer of transformers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.name_or_path = str(tokenizer.path)
        self.vocab_size = tokenizer.vocab_size
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = tokenizer.documents.stop
        # Padding is masked: without a token for it, any will do.
        self.pad_token_id = padding_id(tokenizer) or 0

    def encode(self, text: str, **_: Any) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, tokens: Iterable[int], **_: Any) -> str:
        """The text before the token that ends it; padding may follow that."""
        ids = [int(token) for token in tokens]
        if self.eos_token_id in ids:
            ids = ids[: ids.index(self.eos_token_id)]
        return self.tokenizer.decode(ids)

    def batch_decode(self, rows: Iterable[Iterable[int]], **_: Any) -> list[str]:
        return [self.decode(row) for row in rows]


class FolderModel(HFLM):
    """An exported folder's model. tokenizer: a `HarnessTokenizer`."""

    tokenizer: HarnessTokenizer

    def _create_tokenizer(self, pretrained: Any, tokenizer: HarnessTokenizer, **_: Any) -> None:
        self.tokenizer = tokenizer

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context; the last of several, as the harness takes one.

        Raises: ValueError if nothing stood before a text in training.
        """
        start = self.tokenizer.tokenizer.documents.start
        if not start:
            raise ValueError(
                "in the model's training nothing stood before a text, so an empty context has no tokens"
            )
        return start[-1]

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **_: Any,
    ) -> list[int]:
        ids = self.tokenizer.encode(string)
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def tok_batch_encode(
        self,
        strings: Sequence[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and mask [B, T] of prompts."""
        rows = []
        for string in strings:
            ids = self.tok_encode(string, left_truncate_len=left_truncate_len)
            rows.append(torch.tensor(ids or [self.prefix_token_id]))
        masks = [torch.ones_like(row) for row in rows]
        options: Any = dict(batch_first=True, padding_side=padding_side)
        tokens = torch.nn.utils.rnn.pad_sequence(
            rows, padding_value=self.tokenizer.pad_token_id, **options
        )
        return tokens, torch.nn.utils.rnn.pad_sequence(masks, padding_value=0, **options)

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> str | None:
        """Text of tokens. None for the end-of-text token alone, by which the harness asks for its name: it has no text, and
        generation stops at it by itself."""
        return None if isinstance(tokens, int) or tokens is None else self.tokenizer.decode(tokens)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of both. A context without tokens, such as one of spaces, is a text without context."""
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        return context_ids or [self.prefix_token_id], continuation_ids
