"""The baseline mixer: causal multi-head softmax attention with RoPE, through scaled_dot_product_attention."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from interdomain.features import input_features, input_features_step

from .config import Execution, ModelConfig
from .initialize import initialize
from .joined import JoinedProjections
from .layers import Linear
from .state import KVCache, ModelState

# Shapes: B batch, T time, S slots of the cache.


class Window(NamedTuple):
    """Which keys the queries of a piece attend to, and where its own go in the cache: the same in all layers.

    mask: added to the scores, [B, 1, T, S] or [T, S]: 0, and -inf where a query does not attend; None for all keys before the
    query's. begin: the first slot (see KVCache.append).
    """

    mask: Tensor | None = None
    begin: int | Tensor = 0

    @classmethod
    def of(cls, attended: Tensor, dtype: torch.dtype, begin: int | Tensor = 0) -> "Window":
        """attended: which keys, bool. scaled_dot_product_attention would make the same of it, in every layer anew; and where
        rows do not begin at multiples of 16 numbers, its kernel for masks would copy them there, in every layer too."""
        S = attended.shape[-1]
        rows = torch.full((*attended.shape[:-1], -(-S // 16) * 16), -math.inf, dtype=dtype, device=attended.device)
        return cls(rows[..., :S].masked_fill_(attended, 0), begin)


class SoftmaxMixer(JoinedProjections):
    together = ("wq", "wk", "wv")

    def __init__(self, config: ModelConfig, execution: Execution | None = None) -> None:
        super().__init__()
        self.execution = execution or Execution()
        self.head_dim = config.head_dim
        self.heads = config.n_heads, config.n_kv_heads, config.n_kv_heads  # of q, k, v
        kv_dim = config.n_kv_heads * config.head_dim
        self.wq = Linear(config.dim, config.dim)
        self.wk = Linear(config.dim, kv_dim)
        self.wv = Linear(config.dim, kv_dim)
        self.wo = Linear(config.dim, config.dim)
        initialize(self, config)

    @staticmethod
    def dynamics(mixers: "list[SoftmaxMixer]") -> list[tuple[()]]:
        """Nothing: softmax has no recurrence."""
        return [()] * len(mixers)

    def init_state(
        self, batch: int, capacity: int, dtype: torch.dtype, device: torch.device, dynamics: tuple[()] = ()
    ) -> KVCache:
        shape = batch, self.heads[1], capacity, self.head_dim
        return KVCache(*(torch.zeros(shape, dtype=dtype, device=device) for _ in "kv"))

    @staticmethod
    def packing(documents: Tensor, dtype: torch.dtype) -> Window:
        """Which keys each query, of this dtype, attends to, where documents [B, T] are packed: those of its own document."""
        same = documents[:, :, None] == documents[:, None]
        return Window.of(same.tril()[:, None], dtype)

    @staticmethod
    def continuing(state: ModelState, tokens: int, padding: Tensor | None, dtype: torch.dtype) -> Window:
        """The same for a piece that continues from a state: all keys so far but those of left padding."""
        fixed = state.cursor is not None
        begin = state.cursor if fixed else state.length
        device = state.position.device
        if not fixed and not state.padded and padding is None:
            if not begin or tokens == 1:
                return Window(None, begin)
            if device.type == "cuda":  # whose kernels know this one without a mask
                from torch.nn.attention.bias import causal_lower_right  # takes as long to import as torch

                return Window(causal_lower_right(tokens, begin + tokens), begin)
        slots = torch.arange(state.capacity if fixed else begin + tokens, device=device)
        own = begin + torch.arange(tokens, device=device)[:, None]  # each query's slot
        mask = slots <= own
        if state.padded or padding is not None:
            seen = state.position if padding is None else state.position - padding
            start = begin - seen  # a row's tokens end where all rows end
            # Padding attends to itself: a query without any key would be NaN.
            mask = (mask & (slots >= start[:, None, None])) | (slots == own)
            mask = mask[:, None]
        return Window.of(mask, dtype, begin)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        dynamics: tuple[()] = (),
        state: KVCache | None = None,
        packing: Window | None = None,
    ) -> Tensor:
        """x [B, T, dim] -> [B, T, dim]; with a state, attends to its keys as well and adds its own."""
        B, T, _ = x.shape
        if T == 1 and state is not None and not torch.is_grad_enabled():
            q, k, v = (part[:, :, None] for part in self._token(x[:, 0], rope))
        else:
            q, k = (
                input_features(proj(x), self.head_dim, rope=rope, backend=self.execution.features).transpose(1, 2)
                for proj in (self.wq, self.wk)
            )
            v = self.wv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        mask, begin = packing or Window()
        if state is not None:
            k, v = state.append(k, v, begin)
        if mask is not None and not hasattr(mask, "variant"):  # a CausalBias has one; its numbers mean nothing
            mask = mask.to(q.dtype)
        k, v = k.to(q.dtype), v.to(q.dtype)
        if T == 1 and q.device.type == "cpu" and q.dtype.itemsize == 2:
            o = _one_query(q, k, v, mask)
        else:
            causal, grouped = mask is None and bool(T > 1), q.shape[1] != k.shape[1]  # torch.export's T is no number
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
        return self.wo(o.transpose(1, 2).reshape(B, T, -1))

    def _token(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, H, head_dim] of one token x [B, dim] where nothing is recorded: few operations."""
        run = dict(rope=rope, rotated=self.heads[0] + self.heads[1], backend=self.execution.features)
        return input_features_step(self.project(x), self.head_dim, **run).split(self.heads, dim=1)


def _one_query(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """scaled_dot_product_attention of one query in half precision, for which a CPU's kernel takes two to three times as long.

    q [B, H, 1, head_dim], k, v [B, H or a divisor, S, head_dim], mask [..., 1, S] -> [B, H, 1, head_dim].
    """
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = (k[:, :, None] * grouped).sum(-1, dtype=torch.float32) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask
    return (scores.softmax(-1).to(v.dtype) @ v).view_as(q)
