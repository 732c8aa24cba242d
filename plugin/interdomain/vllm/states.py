"""Requests of one step of vLLM's engine, in batches that the mixers take."""

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

NULL_PAGE = 0  # of vLLM: no request has it


class Batch(NamedTuple):
    """Requests that are computed together, of T tokens each.

    tokens: where they stand in the step, [B, T]; pages: of the requests' states, [B]; fresh: [B], true where a request begins
    and its page holds the state of another, None where none does. padding: [B, T], true before the tokens of a shorter
    request, None where all have T.
    """

    tokens: Tensor
    pages: Tensor
    fresh: Tensor | None
    padding: Tensor | None = None


@dataclass
class Metadata(BaseMambaAttentionMetadata):
    @cached_property
    def batches(self) -> list[Batch]:
        """All requests that generate, in one batch. Then pieces of prompts: of those that begin, lengths up to a power of two
        and more than its half in one; of those that go on from a state, equal lengths."""
        batches, n = [], self.num_decode_tokens
        if self.state_indices_tensor_d is not None and n:
            pages = self.state_indices_tensor_d[:n, 0].long()
            batches.append(
                Batch(
                    torch.arange(n, device=pages.device)[:, None], pages.clamp_min(NULL_PAGE), None
                )
            )
        if self.num_prefills:
            start: Any = self.query_start_loc_p
            pages_of_prefills: Any = self.state_indices_tensor_p
            continued: Any = self.has_initial_states_p
            lengths, fresh = start.diff(), ~continued.bool()
            rounded = lengths.log2().ceil().exp2().long()
            groups = torch.where(fresh, -rounded, lengths)
            for group in groups.unique().tolist():
                rows = (groups == group).nonzero()[:, 0]
                own = lengths[rows, None]
                order = torch.arange(int(own.max()), device=rows.device) - (own.max() - own)
                tokens = n + start[rows].long()[:, None] + order.clamp_min(0)
                padding = order < 0 if (own != own.max()).any() else None
                batches.append(Batch(tokens, pages_of_prefills[rows].long(), fresh[rows], padding))
        return batches


class Builder(BaseMambaAttentionMetadataBuilder[Metadata]):
    metadata_cls = Metadata
    needs_causal_conv1d_metadata = False


class Backend(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "INTERDOMAIN"

    @staticmethod
    def get_builder_cls() -> type:
        return Builder

    @classmethod
    def is_ssm(cls) -> bool:
        return True
