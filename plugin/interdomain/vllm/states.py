"""The requests of one step of vLLM's engine, in batches that the mixers take.

Shapes: B requests of a batch, T tokens of each.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.mamba_attn import (
    BaseMambaAttentionMetadata,
    BaseMambaAttentionMetadataBuilder,
)

NULL_PAGE = 0  # vLLM gives this page to no request


class Batch(NamedTuple):
    """Requests that are computed together, T tokens of each.

    Attributes:
        tokens: The place of each token among the tokens of the step, [B, T].
        pages: The page of each request's state, [B].
        fresh: [B], True for a request that begins: its page has the state of another. None: none
            begins.
        padding: [B, T], True before the tokens of a shorter request. None: all requests have T
            tokens.
    """

    tokens: Tensor
    pages: Tensor
    fresh: Tensor | None
    padding: Tensor | None = None


@dataclass
class Metadata(BaseMambaAttentionMetadata):
    """vLLM's description of a step, with its requests in batches."""

    @cached_property
    def batches(self) -> list[Batch]:
        """All requests of the step, in batches. A batch has T tokens of each of its requests.

        Requests that generate are one batch. Of other requests the step has a piece of the prompt.
        Pieces that begin a prompt are together in a batch if their lengths have the same next power
        of two; pieces that continue a prompt, if their lengths are equal.
        """
        # The attributes that are read here are vLLM's, which ends the names of those for requests
        # that generate in _d (decode), and for pieces of prompts in _p (prefill).
        batches = []
        # Requests that generate come first in the step, one token of each.
        n = self.num_decode_tokens
        if self.state_indices_tensor_d is not None and n:
            # Requests with which vLLM fills up a batch have no page, perhaps a negative number.
            # They take the page that no request has.
            pages = self.state_indices_tensor_d[:n, 0].long()
            tokens = torch.arange(n, device=pages.device)[:, None]
            batches.append(Batch(tokens, pages.clamp_min(NULL_PAGE), None))
        if self.num_prefills:
            # The first token of each piece and the end of the last one, the pages of the states, and
            # which pieces continue a prompt.
            start: Any = self.query_start_loc_p
            pages_of_prefills: Any = self.state_indices_tensor_p
            continued: Any = self.has_initial_states_p
            lengths = start.diff()
            fresh = ~continued.bool()
            # The group of a piece: minus the power of two if it begins a prompt, else its length.
            rounded = lengths.log2().ceil().exp2().long()
            groups = torch.where(fresh, -rounded, lengths)
            for group in groups.unique().tolist():
                rows = (groups == group).nonzero()[:, 0]
                lengths_in_batch = lengths[rows, None]
                longest = lengths_in_batch.max()
                # The place of each token in its piece, [B, T]. Shorter pieces have padding before
                # them, with negative places. It reads the piece's first token, which `padding` then
                # masks.
                order = torch.arange(int(longest), device=rows.device) - (
                    longest - lengths_in_batch
                )
                tokens = n + start[rows].long()[:, None] + order.clamp_min(0)
                padding = order < 0 if (lengths_in_batch != longest).any() else None
                batches.append(Batch(tokens, pages_of_prefills[rows].long(), fresh[rows], padding))
        return batches


class Builder(BaseMambaAttentionMetadataBuilder[Metadata]):
    """vLLM's builder of a step's description, with this project's class."""

    metadata_cls = Metadata
    # vLLM's own kernel for convolutions is not called.
    needs_causal_conv1d_metadata = False


class Backend(AttentionBackend):
    """The interface by which vLLM finds the builder. vLLM names its methods."""

    @staticmethod
    def get_name() -> str:
        return "INTERDOMAIN"

    @staticmethod
    def get_builder_cls() -> type:
        return Builder

    @classmethod
    def is_ssm(cls) -> bool:
        return True
