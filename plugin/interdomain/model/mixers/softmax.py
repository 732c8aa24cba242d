"""The baseline mixer: causal multi-head softmax attention with RoPE, through scaled_dot_product_attention; over all tokens
before, or a sliding window."""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import ModelConfig
from ..layers import Linear
from ..settings import MixerConfig
from ..state import KVCache, WindowCache
from .base import Mixer
from .kernels import input_features

if TYPE_CHECKING:
    from ..config import Execution
    from ..shard import Part
    from ..state import ModelState

# Shapes: B batch, T time, S slots of the cache, H query heads, G heads of keys and values, W tokens of a sliding window,
#         N blocks of so many tokens after the first.


class Attended(NamedTuple):
    """The keys that the queries of a piece attend to, and the places of its own keys in the cache: the same in all layers.

    mask: added to the scores, [B, 1, T, S] or [T, S]: 0, and -inf where a query does not attend; or a causal bias of PyTorch's;
    None for all keys before the query's. begin: the first slot (see KVCache.append).
    blocks: of a sliding window, where T > W: the mask is that of the first W queries, and this one, [B * N, 1, W, 2W] or
    [W, 2W], of those after them, W at a time, over the keys of their block and of the block before.
    """

    mask: Any = None
    begin: int | Tensor = 0
    blocks: Tensor | None = None

    @classmethod
    def after(cls, begin: int, tokens: int, device: torch.device, dtype: torch.dtype) -> "Attended":
        """Attention of queries after `begin` keys: to those keys, and to the queries' own keys up to each query."""
        if not begin or tokens == 1:
            return cls(None, begin)
        if device.type == "cuda":  # whose kernels know this one without a mask
            from torch.nn.attention.bias import causal_lower_right  # takes as long to import as torch

            return cls(causal_lower_right(tokens, begin + tokens), begin)
        keys = torch.arange(begin + tokens, device=device)
        return cls(_mask(keys[begin:], keys, dtype), begin)

    @classmethod
    def within(
        cls, window: int, before: int, first: Tensor | None, order: Tensor, dtype: torch.dtype, begin: int = 0
    ) -> "Attended":
        """Attention of queries to `window` tokens, the query's own the last.

        before: how many keys come before the queries' own, at most W; order: of the queries, 0 to T - 1; first: [B, T], the key
        with which each query's document begins, None for the first of all.
        """
        T, W, mask, blocks = len(order), window, None, None
        if before or first is not None:
            key = torch.arange(before + min(T, W), device=order.device)
            mask = _mask(before + order[:W], key, dtype, None if first is None else first[:, :W], W)
        if T > W:
            if first is not None:
                n = math.ceil(T / W) - 1
                first = F.pad(first[:, W:] - before, (0, (n + 1) * W - T)).unflatten(1, (n, W))
                first = first - W * (1 + order[:n, None])
            blocks = _mask(order[:W], torch.arange(2 * W, device=order.device) - W, dtype, first, W)
        return cls(mask, begin, blocks)


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
        state: KVCache | WindowCache | None = None,
        packing: Attended | None = None,
    ) -> Tensor:
        """x [B, T, dim] -> [B, T, dim]; with a state, attends to its keys as well and adds its own."""
        q, k = (
            input_features(proj(x), self.head_dim, rope=rope, execution=self.execution).transpose(1, 2)
            for proj in (self.wq, self.wk)
        )
        v = self.wv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        mask, begin, blocks = packing or Attended()
        if state is not None:
            k, v = state.append(k, v, begin)
        elif self.shard is not None:
            k, v = self._up_to_here(k, v)
        k, v = k.to(q.dtype), v.to(q.dtype)
        if blocks is None or self.window is None:
            o = self.call_core(_attention, q, k, v, mask)
        else:
            o = self.call_core(_in_blocks, q, k, v, mask, blocks, self.window)
        return self.wo(o.transpose(1, 2).flatten(2))

    def _up_to_here(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of all shards up to this one: each [B, H, T, R] -> [B, H, (rank + 1) T, R]; with a window of those
        before this one the last W."""
        assert self.shard is not None
        everyone, T = self.shard.gather(torch.cat([k, v], dim=-1)), k.shape[2]
        here = torch.cat(everyone.unbind()[: self.shard.rank + 1], dim=2)
        return (here if self.window is None else here[:, :, -(self.window + T) :]).chunk(2, dim=-1)

    def init_state(
        self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device, dynamics: tuple[()] = ()
    ) -> KVCache | WindowCache:
        cache, slots = (KVCache, capacity) if self.window is None else (WindowCache, self.window)
        shape = batch, self.n_kv_heads, slots, self.head_dim
        return cache(*(torch.zeros(shape, dtype=dtype, device=device) for _ in "kv"))

    @staticmethod
    def packing(
        mixer: MixerConfig, order: Tensor, positions: Tensor | None, dtype: torch.dtype, shard: "Part | None"
    ) -> Attended | None:
        T, device = order.shape[0], order.device
        before = 0 if shard is None else shard.rank * T
        first = None if positions is None else order - positions  # of each token's document
        if mixer.window is not None:
            near = min(before, mixer.window)  # as `_up_to_here` leaves them
            first = None if first is None else first - (before - near)
            return Attended.within(mixer.window, near, first, order - before, dtype)
        if first is None:
            return Attended.after(before, T, device, dtype) if before else None
        return Attended(_mask(order, torch.arange(before + T, device=device), dtype, first))

    @staticmethod
    def continuing(mixer: MixerConfig, state: "ModelState", tokens: int, dtype: torch.dtype) -> Attended:
        """All keys so far but those of left padding, and those before the window."""
        begin = state.length if state.cursor is None else state.cursor
        device = state.position.device
        if mixer.window is not None:
            return _continuing_within(mixer.window, begin, state, tokens, dtype)
        if isinstance(begin, int) and not state.padded:
            return Attended.after(begin, tokens, device, dtype)
        slots = torch.arange(begin + tokens if isinstance(begin, int) else state.capacity or 0, device=device)
        start = (begin - state.position)[:, None] if state.padded else None  # a row's tokens end where all rows end
        return Attended(_mask(begin + torch.arange(tokens, device=device), slots, dtype, start), begin)

    @staticmethod
    def macs(config: ModelConfig, seq_len: int) -> dict[str, int]:
        """Scores and values over the causal half of the context, or a window: full-matrix conventions would double them."""
        window = min(config.mixer.window or seq_len, seq_len)
        attended = window * (window + 1) // 2 + (seq_len - window) * window  # by all tokens of a sequence
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
    query: Tensor, key: Tensor, dtype: torch.dtype, first: Tensor | None = None, window: int | None = None
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
    if isinstance(mask, Tensor) and not hasattr(mask, "variant"):  # a causal bias has one, and no numbers
        mask = mask.to(q.dtype)
    grouped, T = q.shape[1] != k.shape[1], q.shape[2]
    causal = mask is None and bool(T > 1)  # torch.export's T is no number
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Any, blocks: Tensor, window: int) -> Tensor:
    """The same for T > W and S <= T + W, by masks as in `Attended`: scores are T x 2W numbers and not T x S."""
    W, T, before = window, q.shape[2], k.shape[2] - q.shape[2]
    # Kernels that take a mask want as many heads of keys as of queries.
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    first = _attention(q[:, :, :W], k[:, :, : before + W], v[:, :, : before + W], mask)

    def in_blocks(x: Tensor) -> Tensor:  # [B, H, T, R] -> [B, ceil(T / W), H, W, R]
        return F.pad(x, (0, 0, 0, -x.shape[2] % W)).unflatten(2, (-1, W)).transpose(1, 2)

    queries = in_blocks(q[:, :, W:])
    keys, values = (in_blocks(x[:, :, before:]) for x in (k, v))
    keys, values = (torch.cat([x[:, :-1], x[:, 1:]], dim=3).flatten(0, 1) for x in (keys, values))
    o = _attention(queries.flatten(0, 1), keys, values, blocks)
    o = o.unflatten(0, queries.shape[:2]).transpose(1, 2).flatten(2, 3)
    return torch.cat([first, o[:, :, : T - W]], dim=2)


def _continuing_within(
    window: int, begin: int | Tensor, state: "ModelState", tokens: int, dtype: torch.dtype
) -> Attended:
    """`SoftmaxMixer.continuing` over a WindowCache of W slots."""
    start = begin - state.position if state.padded else None  # where each row begins
    if tokens > 1:
        assert isinstance(begin, int)
        before, order = min(begin, window), torch.arange(tokens, device=state.position.device)
        first = None if start is None else (start - (begin - before))[:, None].expand(-1, tokens)
        return Attended.within(window, before, first, order, dtype, begin)
    if isinstance(begin, int) and begin + 1 >= window and start is None:
        return Attended(None, begin)
    slots = torch.arange(window, device=state.position.device)
    token = begin - (begin - slots) % window  # in each slot, this one's among them; negative: none yet
    attended = (token >= 0)[None] if start is None else (token >= start[:, None])[:, None, None]
    return Attended(additive_mask(attended, dtype), begin)
