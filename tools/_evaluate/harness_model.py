"""Gives lm-evaluation-harness's Hugging Face model class an exported model's own tokenizer.

The harness would load the tokenizer by AutoTokenizer, which refuses a tokenizer that has no exact
counterpart in transformers. And here texts begin as documents did in training, which the harness
does not do for an empty prompt.

The names and arguments of the methods are those that the harness calls.

Shapes: B prompts of a batch, T tokens of the longest one.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lm_eval.models import huggingface
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from interdomain.data import Tokenizer
from interdomain.data.tokenizer_export import padding_id

HFLM: Any = huggingface.HFLM  # a decorator hides its type


class HarnessTokenizer:
    """Has the part of the interface of transformers' tokenizers that the harness uses.

    Args:
        tokenizer: The exported model's tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.name_or_path = str(tokenizer.path)
        self.vocab_size = tokenizer.vocab_size
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = tokenizer.documents.stop
        # Padding is masked. If there is no token for it, any token will do.
        self.pad_token_id = padding_id(tokenizer) or 0

    def encode(self, text: str, **_: Any) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, tokens: Iterable[int], **_: Any) -> str:
        """Returns the text before the end-of-text token. Padding may follow that token.

        Args:
            tokens: Token ids of one text.
        """
        ids = []
        for token in tokens:
            if token == self.eos_token_id:
                break
            ids.append(int(token))
        return self.tokenizer.decode(ids)

    def batch_decode(self, rows: Iterable[Iterable[int]], **_: Any) -> list[str]:
        return [self.decode(row) for row in rows]


class FolderModel(HFLM):
    """An exported model, as the harness calls it.

    Attributes:
        tokenizer: The exported model's tokenizer.
        context_length: The number of tokens that the model sees at most. It is set for each task.
    """

    tokenizer: HarnessTokenizer
    context_length: int

    def _create_tokenizer(self, pretrained: Any, tokenizer: HarnessTokenizer, **_: Any) -> None:
        """Keeps the tokenizer that was given, instead of loading one by name."""
        self.tokenizer = tokenizer

    @property
    def max_length(self) -> int:
        return self.context_length

    @property
    def prefix_token_id(self) -> int:
        """Returns the token before a text without context.

        If documents began with several tokens in training, it is the last: the harness takes one.

        Raises:
            ValueError: No token stood before a text in training.
        """
        start = self.tokenizer.tokenizer.documents.start
        if not start:
            raise ValueError(
                "in the model's training no token stood before a text, so an empty context has no tokens"
            )
        return start[-1]

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **_: Any,
    ) -> list[int]:
        """Returns the tokens of a text, without special tokens.

        Args:
            string: The text.
            add_special_tokens: Ignored.
            left_truncate_len: The number of last tokens that are kept. None keeps all.
        """
        ids = self.tokenizer.encode(string)
        if left_truncate_len:
            return ids[-left_truncate_len:]
        return ids

    def tok_batch_encode(
        self,
        strings: Sequence[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Returns the tokens and the attention mask of prompts, int64 [B, T] each.

        An empty prompt becomes the token that begins a text.

        Args:
            strings: The B prompts.
            padding_side: "left" or "right", where shorter prompts are filled up.
            left_truncate_len: The number of last tokens of a prompt that are kept. None keeps all.
            truncation: Ignored: only `left_truncate_len` cuts.
        """
        rows = []
        masks = []
        for string in strings:
            ids = self.tok_encode(string, left_truncate_len=left_truncate_len)
            row = torch.tensor(ids or [self.prefix_token_id])
            rows.append(row)
            masks.append(torch.ones_like(row))
        pad_token = self.tokenizer.pad_token_id
        tokens = pad_sequence(rows, True, pad_token, padding_side)
        return tokens, pad_sequence(masks, True, 0, padding_side)

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> str | None:
        """Returns the text of tokens.

        The harness also asks for the name of the end-of-text token, as an int. The answer is None:
        the token has no text, and generation stops at it without a name.

        Args:
            tokens: Token ids, or a single id.
            skip_special_tokens: Ignored: the end-of-text token is never part of the text.
        """
        if isinstance(tokens, int) or tokens is None:
            return None
        return self.tokenizer.decode(tokens)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Returns the tokens of a context and of its continuation.

        A context without tokens, such as spaces, is treated as an empty one.
        """
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        return context_ids or [self.prefix_token_id], continuation_ids
