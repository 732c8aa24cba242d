"""The baseline mixer: causal multi-head softmax attention with RoPE, through scaled_dot_product_attention."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from interdomain.features import input_features

from .config import Execution, ModelConfig
from .state import KVCache


class SoftmaxMixer(nn.Module):
    def __init__(self, config: ModelConfig, execution: Execution | None = None) -> None:
        super().__init__()
        self.execution = execution or Execution()
        self.head_dim = config.head_dim
        kv_dim = config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def dynamics(self) -> tuple[()]:
        """Nothing: softmax has no recurrence. The model asks every mixer."""
        return ()

    def init_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> KVCache:
        kv = torch.zeros(batch, 0, self.wk.out_features // self.head_dim, self.head_dim, dtype=dtype, device=device)
        return KVCache(k=kv, v=kv)

    @staticmethod
    def packing(documents: Tensor) -> Tensor:
        """Which keys each query attends to, where documents [B, T] are packed: [B, 1, T, T] bool, the same in all layers."""
        same = documents[:, :, None] == documents[:, None]
        return same.tril()[:, None]

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        dynamics: tuple[()] = (),
        state: KVCache | None = None,
        packing: Tensor | None = None,
    ) -> tuple[Tensor, KVCache | None]:
        """x [B, T, dim] -> [B, T, dim]; with a state, attends to its keys as well and returns the longer one."""
        B, T, _ = x.shape
        q, k = (
            input_features(proj(x), self.head_dim, rope=rope, backend=self.execution.features)
            for proj in (self.wq, self.wk)
        )
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        mask = packing
        if state is not None:
            seen = state.k.shape[1]
            k, v = torch.cat([state.k.to(k.dtype), k], dim=1), torch.cat([state.v.to(v.dtype), v], dim=1)
            if (seen and T > 1) or state.start is not None:
                mask = torch.ones(T, seen + T, dtype=torch.bool, device=x.device).tril(
                    seen
                )  # query i: keys to seen + i
            if state.start is not None:
                mask = mask & (torch.arange(seen + T, device=x.device) >= state.start[:, None, None, None])
            state = KVCache(k, v, state.start)
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None and T > 1,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return self.wo(o.transpose(1, 2).reshape(B, T, -1)), state
