"""The baseline mixer: causal multi-head softmax attention with RoPE, through scaled_dot_product_attention."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from interdomain.features import input_features

from .config import Execution, ModelConfig
from .initialize import initialize
from .interface import Mixer
from .layers import Linear
from .shard import Part, gather_shards
from .state import KVCache, ModelState

# Shapes: B batch, T time, S slots of the cache.


class Window(NamedTuple):
    """Which keys the queries of a piece attend to, and where its own go in the cache: the same in all layers.

    mask: added to the scores, [B, 1, T, S] or [T, S]: 0, and -inf where a query does not attend; or a causal bias of PyTorch's;
    None for all keys before the query's. begin: the first slot (see KVCache.append).
    """

    mask: Any = None
    begin: int | Tensor = 0

    @classmethod
    def of(cls, attended: Tensor, dtype: torch.dtype, begin: int | Tensor = 0) -> "Window":
        """attended: which keys, bool. scaled_dot_product_attention would make the same of it, in every layer anew."""
        return cls(torch.zeros_like(attended, dtype=dtype).masked_fill_(~attended, -math.inf), begin)

    @classmethod
    def after(cls, begin: int, tokens: int, device: torch.device, dtype: torch.dtype) -> "Window":
        """Of queries that `begin` keys come before: those, and the queries' own up to each."""
        if not begin or tokens == 1:
            return cls(None, begin)
        if device.type == "cuda":  # whose kernels know this one without a mask
            from torch.nn.attention.bias import causal_lower_right  # takes as long to import as torch

            return cls(causal_lower_right(tokens, begin + tokens), begin)
        keys = torch.arange(begin + tokens, device=device)
        return cls.of(keys <= keys[begin:, None], dtype, begin)


class SoftmaxMixer(Mixer):
    state_grows = True

    def __init__(self, config: ModelConfig, execution: Execution | None = None) -> None:
        super().__init__()
        self.execution = execution or Execution()
        self.head_dim = config.head_dim
        self.n_kv_heads = config.n_kv_heads
        kv_dim = config.n_kv_heads * config.head_dim
        self.wq = Linear(config.dim, config.dim)
        self.wk = Linear(config.dim, kv_dim)
        self.wv = Linear(config.dim, kv_dim)
        self.wo = Linear(config.dim, config.dim)
        initialize(self, config)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        dynamics: tuple[()] = (),
        state: KVCache | None = None,
        packing: Window | None = None,
    ) -> Tensor:
        """x [B, T, dim] -> [B, T, dim]; with a state, attends to its keys as well and adds its own."""
        q, k = (
            input_features(proj(x), self.head_dim, rope=rope, backend=self.execution.features).transpose(1, 2)
            for proj in (self.wq, self.wk)
        )
        v = self.wv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        mask, begin = packing or Window()
        if state is not None:
            k, v = state.append(k, v, begin)
        elif self.shard is not None:
            k, v = _up_to_here(k, v, self.shard)
        if isinstance(mask, Tensor) and not hasattr(mask, "variant"):  # a causal bias has one, and no numbers
            mask = mask.to(q.dtype)
        k, v = k.to(q.dtype), v.to(q.dtype)
        grouped, T = q.shape[1] != k.shape[1], q.shape[2]
        causal = mask is None and bool(T > 1)  # torch.export's T is no number
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
        return self.wo(o.transpose(1, 2).flatten(2))

    @staticmethod
    def dynamics(mixers: "list[SoftmaxMixer]") -> list[tuple[()]]:
        """Nothing: softmax has no recurrence."""
        return [()] * len(mixers)

    def init_state(
        self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device, dynamics: tuple[()] = ()
    ) -> KVCache:
        shape = batch, self.n_kv_heads, capacity, self.head_dim
        return KVCache(*(torch.zeros(shape, dtype=dtype, device=device) for _ in "kv"))

    @staticmethod
    def packing(order: Tensor, positions: Tensor | None, dtype: torch.dtype, shard: Part | None) -> Window | None:
        T, device = order.shape[0], order.device
        before = 0 if shard is None else shard.rank * T
        if positions is None:
            return Window.after(before, T, device, dtype) if before else None
        keys, first = torch.arange(before + T, device=device), order - positions  # first: of each token's document
        attended = (keys <= order[:, None]) & (keys >= first[..., None])
        return Window.of(attended[:, None], dtype)

    @staticmethod
    def continuing(state: ModelState, tokens: int, dtype: torch.dtype) -> Window:
        """All keys so far but those of left padding."""
        begin = state.length if state.cursor is None else state.cursor
        device = state.position.device
        if isinstance(begin, int) and not state.padded:
            return Window.after(begin, tokens, device, dtype)
        slots = torch.arange(begin + tokens if isinstance(begin, int) else state.capacity or 0, device=device)
        own = begin + torch.arange(tokens, device=device)[:, None]  # each query's slot
        mask = slots <= own
        if state.padded:
            start = begin - state.position  # a row's tokens end where all rows end
            mask = (mask & (slots >= start[:, None, None]))[:, None]
        return Window.of(mask, dtype, begin)

    @staticmethod
    def macs(config: ModelConfig, seq_len: int) -> dict[str, int]:
        """Scores and values over the causal half of the context; full-matrix conventions would double the core."""
        linear = config.dim * (2 * config.dim + 2 * config.n_kv_heads * config.head_dim)
        return {"linear": linear, "conv": 0, "mixer": config.dim * 2 * (seq_len + 1) // 2}

    @staticmethod
    def state_size(config: ModelConfig) -> int:
        return 2 * config.n_kv_heads * config.head_dim

    @staticmethod
    def kept(config: ModelConfig) -> dict[str, int]:
        """Queries before and after RoPE, and the output."""
        return {"token": 3 * config.dim + 3 * config.n_kv_heads * config.head_dim, "scores": 0, "tables": 0}

    @staticmethod
    def handed_on(config: ModelConfig) -> dict[str, int]:
        return {"state": 0, "tail": 0, "token": 2 * config.n_kv_heads * config.head_dim}


def _up_to_here(k: Tensor, v: Tensor, shard: Part) -> tuple[Tensor, ...]:
    """Keys and values of all shards up to this one: each [B, H, T, R] -> [B, H, (rank + 1) T, R]."""
    everyone = gather_shards(torch.cat([k, v], dim=-1), shard.size, shard.group)
    return torch.cat(everyone.unbind()[: shard.rank + 1], dim=2).chunk(2, dim=-1)
