"""The baseline mixer: causal multi-head softmax attention with RoPE, through scaled_dot_product_attention; over all tokens
before, or a sliding window."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import Execution, ModelConfig
from ..layers import Linear
from ..settings import MixerConfig
from ..shard import Part
from ..state import KVCache, ModelState, WindowCache
from .base import Mixer
from .kernels import input_features

# Shapes: B batch, T time, S slots of the cache, H query heads, G heads of keys and values, W tokens of a sliding window,
#         N blocks of so many tokens after the first.


class Attended(NamedTuple):
    """What the queries of a piece attend to: the same in all layers.

    Attributes:
        mask: Added to the scores, [B, 1, T, S] or [T, S]: 0, and -inf where a query does not attend; or a causal bias of
            PyTorch's. None: all keys up to the query's own.
        token: Where the tokens are in their rows, [B, T], for a cache.
        before: Slots or tokens of the cache before the piece (see `KVCache.append`).
        blocks: For a sliding window and T > W. The mask is then that of the first W queries, and this one, [B * N, 1, W, 2W] or
            [W, 2W], that of the others, W at a time, over the keys of their block and of the block before.
    """

    mask: Any = None
    token: Any = None
    before: int = 0
    blocks: Tensor | None = None

    @classmethod
    def after(
        cls,
        begin: int,
        tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        token: Tensor | None = None,
    ) -> "Attended":
        """Attention of queries after `begin` keys: to those keys, and to the queries' own keys up to each query."""
        if not begin or tokens == 1:
            return cls(None, token, begin)
        if device.type == "cuda":  # whose kernels know this one without a mask
            from torch.nn.attention.bias import (
                causal_lower_right,
            )  # takes as long to import as torch

            return cls(causal_lower_right(tokens, begin + tokens), token, begin)
        keys = torch.arange(begin + tokens, device=device)
        return cls(_mask(keys[begin:], keys, dtype), token, begin)

    @classmethod
    def within(
        cls,
        window: int,
        before: int,
        first: Tensor | None,
        order: Tensor,
        dtype: torch.dtype,
        token: Tensor | None = None,
    ) -> "Attended":
        """Attention of queries to `window` tokens, the query's own the last.

        before: how many keys come before the queries' own, at most W; order: of the queries, 0 to T - 1; first: [B, T], the key
        with which each query's document begins, None for the first of all.
        """
        T = len(order)
        W = window
        mask = None
        blocks = None
        if before or first is not None:
            key = torch.arange(before + min(T, W), device=order.device)
            mask = _mask(before + order[:W], key, dtype, None if first is None else first[:, :W], W)
        if T > W:
            if first is not None:
                n = math.ceil(T / W) - 1
                first = F.pad(first[:, W:] - before, (0, (n + 1) * W - T)).unflatten(1, (n, W))
                first = first - W * (1 + order[:n, None])
            blocks = _mask(order[:W], torch.arange(2 * W, device=order.device) - W, dtype, first, W)
        return cls(mask, token, before, blocks)


class SoftmaxMixer(Mixer):
    def __init__(self, config: ModelConfig, execution: "Execution | None" = None) -> None:
        super().__init__()
        self.execution = execution
        self.head_dim = config.head_dim
        self.n_kv_heads = config.n_kv_heads
        self.window = config.mixer.window
        kv_dim = config.n_kv_heads * config.head_dim
        self.wq = Linear(config.dim, config.dim)
        self.wk = Linear(config.dim, kv_dim)
        self.wv = Linear(config.dim, kv_dim)
        self.wo = Linear(config.dim, config.dim)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        dynamics: tuple[()] = (),
        state: KVCache | None = None,
        packing: Attended | None = None,
    ) -> Tensor:
        """x [B, T, dim] -> [B, T, dim]; with a state, attends to its keys as well and adds its own."""
        q = input_features(
            self.wq(x), self.head_dim, rope=rope, execution=self.execution
        ).transpose(1, 2)
        k = input_features(
            self.wk(x), self.head_dim, rope=rope, execution=self.execution
        ).transpose(1, 2)
        v = self.wv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        mask, token, before, blocks = packing or Attended()
        if state is not None:
            k, v = state.append(k, v, token, before)
        elif self.shard is not None:
            k, v = self._up_to_here(k, v)
        k = k.to(q.dtype)
        v = v.to(q.dtype)
        if blocks is None or self.window is None:
            o = self.call_core(_attention, q, k, v, mask)
        else:
            o = self.call_core(_in_blocks, q, k, v, mask, blocks, self.window)
        return self.wo(o.transpose(1, 2).flatten(2))

    def _up_to_here(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of all shards up to this one: each [B, H, T, R] -> [B, H, (rank + 1) T, R]; with a window of those
        before this one the last W."""
        assert self.shard is not None
        everyone = self.shard.gather(torch.cat([k, v], dim=-1))
        here = torch.cat(everyone.unbind()[: self.shard.rank + 1], dim=2)
        if self.window is not None:
            here = here[:, :, -(self.window + k.shape[2]) :]
        return here.chunk(2, dim=-1)

    def init_state(
        self,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        dynamics: tuple[()] = (),
    ) -> KVCache:
        slots = capacity if self.window is None else self.window
        k = torch.zeros(batch, self.n_kv_heads, slots, self.head_dim, dtype=dtype, device=device)
        v = torch.zeros_like(k)
        return KVCache(k, v) if self.window is None else WindowCache(k, v)

    @staticmethod
    def packing(
        mixer: MixerConfig,
        order: Tensor,
        positions: Tensor | None,
        dtype: torch.dtype,
        shard: "Part | None",
    ) -> Attended | None:
        T = len(order)
        before = 0 if shard is None else shard.rank * T
        first = None if positions is None else order - positions  # of each token's document
        if mixer.window is not None:
            near = min(before, mixer.window)  # as `_up_to_here` leaves them
            first = None if first is None else first - (before - near)
            return Attended.within(mixer.window, near, first, order - before, dtype)
        if first is None:
            return Attended.after(before, T, order.device, dtype) if before else None
        return Attended(_mask(order, torch.arange(before + T, device=order.device), dtype, first))

    @staticmethod
    def continuing(
        mixer: MixerConfig, state: "ModelState", tokens: int, dtype: torch.dtype
    ) -> Attended:
        """All keys so far, or those of the window."""
        order = torch.arange(tokens, device=state.position.device)
        token = state.position[:, None] + order
        known = not (state.ragged or state.captured)  # by the host: how long each row is
        window = mixer.window
        if window is None:
            if known:
                return Attended.after(state.length, tokens, order.device, dtype, token)
            before = (state.capacity or 0) - tokens if state.captured else state.length
            slots = torch.arange(before + tokens, device=order.device)
            return Attended(
                additive_mask((slots <= token[..., None])[:, None], dtype), token, before
            )
        if tokens > 1:
            before = min(state.length, window)
            first = None if known else (before - state.position)[:, None].expand(-1, tokens)
            return Attended.within(window, before, first, order, dtype, token)
        if known and state.length + 1 >= window:
            return Attended(None, token)
        slots = torch.arange(window, device=order.device)
        in_slot = token - (token - slots) % window  # negative: none yet
        return Attended(additive_mask((in_slot >= 0)[:, None, None], dtype), token)

    @staticmethod
    def macs(config: ModelConfig, seq_len: int) -> dict[str, int]:
        """Scores and values over the causal half of the context, or a window: full-matrix conventions would double them."""
        window = min(config.mixer.window or seq_len, seq_len)
        attended = (
            window * (window + 1) // 2 + (seq_len - window) * window
        )  # by all tokens of a sequence
        return {"mixer": config.dim * 2 * attended // seq_len}

    @staticmethod
    def state_size(config: ModelConfig) -> int:
        return 2 * config.n_kv_heads * config.head_dim * (config.mixer.window or 1)

    @staticmethod
    def state_grows(config: ModelConfig) -> bool:
        return config.mixer.window is None

    @staticmethod
    def kept(config: ModelConfig) -> tuple[int, int]:
        """Queries before and after RoPE, and the output; in blocks, keys and values of all heads twice."""
        blocks = config.mixer.window is not None and config.mixer.window < config.max_seq_len
        shared = config.n_kv_heads * config.head_dim
        return 3 * config.dim + (shared + 4 * config.dim if blocks else 3 * shared), 0

    @staticmethod
    def received(config: ModelConfig, context: int, tensor: int) -> tuple[int, int]:
        return 0, (context - 1) * 2 * config.n_kv_heads * config.head_dim // tensor


def _mask(
    query: Tensor,
    key: Tensor,
    dtype: torch.dtype,
    first: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Mask of queries [T] and keys [S] by their places, [T, S]. first: [B, T] or [B, N, T], the place where each query's
    document begins; then the mask is [B, 1, T, S] or [B * N, 1, T, S]."""
    attended = key <= query[:, None]
    if window is not None:
        attended = attended & (key > query[:, None] - window)
    if first is not None:
        attended = (attended & (key >= first[..., None])).flatten(0, -3)[:, None]
    return additive_mask(attended, dtype)


def additive_mask(attended: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers that are added to the scores. scaled_dot_product_attention would make the same of a bool, in every layer anew."""
    return torch.zeros_like(attended, dtype=dtype).masked_fill_(~attended, -math.inf)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """q [B, H, T, R]; k, v [B, G, S, R] -> [B, H, T, R]."""
    if isinstance(mask, Tensor) and not hasattr(
        mask, "variant"
    ):  # a causal bias has one, and no numbers
        mask = mask.to(q.dtype)
    causal = mask is None and bool(q.shape[2] > 1)  # torch.export's T is no number
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped
    )


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Any, blocks: Tensor, window: int) -> Tensor:
    """The same for T > W and S <= T + W, by masks as in `Attended`: scores are T x 2W numbers and not T x S."""
    W = window
    T = q.shape[2]
    before = k.shape[2] - T
    # Kernels that take a mask want as many heads of keys as of queries.
    sharing = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(sharing, dim=1)
    v = v.repeat_interleave(sharing, dim=1)
    first = _attention(q[:, :, :W], k[:, :, : before + W], v[:, :, : before + W], mask)

    def in_blocks(x: Tensor) -> Tensor:  # [B, H, T, R] -> [B, ceil(T / W), H, W, R]
        return F.pad(x, (0, 0, 0, -x.shape[2] % W)).unflatten(2, (-1, W)).transpose(1, 2)

    def with_the_block_before(x: Tensor) -> Tensor:  # [B, G, S, R] -> [B * N, G, 2W, R]
        x = in_blocks(x[:, :, before:])
        return torch.cat([x[:, :-1], x[:, 1:]], dim=3).flatten(0, 1)

    queries = in_blocks(q[:, :, W:])
    o = _attention(
        queries.flatten(0, 1), with_the_block_before(k), with_the_block_before(v), blocks
    )
    o = o.unflatten(0, queries.shape[:2]).transpose(1, 2).flatten(2, 3)
    return torch.cat([first, o[:, :, : T - W]], dim=2)
