"""The baseline mixer: causal softmax attention with RoPE, through scaled_dot_product_attention.

A token attends to itself and all tokens before it, or to the last `window` tokens.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import Execution, ModelConfig
from ..layers import Linear
from ..parallel import GroupRank
from ..settings import MixerConfig
from ..state import KVCache, ModelState, WindowCache
from .base import Mixer
from .kernels import input_features

# Shapes: B batch, T tokens (queries), S keys or slots of the cache, H query heads, G heads of keys
#         and values, R head_dim, E width of a projection, W tokens of a sliding window, N blocks
#         of W queries after the first.


class Attended(NamedTuple):
    """The keys that the queries attend to: the same in all layers with these settings.

    Attributes:
        mask: Added to the scores, [B, 1, T, S] or [T, S]: 0, or -inf if a query does not attend to
            a key; or one of PyTorch's causal biases. None means all keys up to the query's own.
        token: The place of each token in its row, [B, T], for a cache.
        before: The number of cached keys before the queries' own that are read (`KVCache.append`).
        blocks: For a sliding window and T > W, the mask of the queries after the first W. They are
            computed in blocks of W, over the keys of their own block and of the block before:
            [B * N, 1, W, 2W] or [W, 2W]. `mask` is then for the first W queries.
    """

    mask: Any = None
    token: Any = None
    before: int = 0
    blocks: Tensor | None = None

    @classmethod
    def after(
        cls,
        before: int,
        tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        token: Tensor | None = None,
    ) -> "Attended":
        """Queries attend to `before` keys, and to the queries' own keys up to each query.

        Args:
            before: The number of keys before the queries' own.
            tokens: The number of queries, T.
            device: The device of the mask.
            dtype: The dtype of the mask.
            token: The attribute `token`.
        """
        if before == 0 or tokens == 1:
            return cls(None, token, before)
        if device.type == "cuda":
            # PyTorch's CUDA kernels know this case without a mask. The import is as slow as
            # torch's.
            from torch.nn.attention.bias import causal_lower_right

            return cls(causal_lower_right(tokens, before + tokens), token, before)
        keys = torch.arange(before + tokens, device=device)
        return cls(_mask(keys[before:], keys, dtype), token, before)

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
        """Queries attend to the last `window` tokens, themselves included.

        Args:
            window: W.
            before: The number of keys before the queries' own, at most W.
            first: The index of the key with which each query's document begins, [B, T]. None means
                the first key.
            order: The queries' indices, 0 to T - 1.
            dtype: The dtype of the masks.
            token: The attribute `token`.
        """
        T = len(order)
        W = window

        # The first W queries; without keys before them and without documents, causal is enough.
        mask = None
        if before or first is not None:
            keys = torch.arange(before + min(T, W), device=order.device)
            first_of_these = None if first is None else first[:, :W]
            mask = _mask(
                before + order[:W],
                keys,
                dtype,
                first_of_these,
                W,
            )
        if T <= W:
            return cls(mask, token, before)

        # The blocks of W queries after them. Key 0 is the first query of a block, and the keys of
        # the block before are -W to -1. The last block is padded.
        if first is not None:
            n = math.ceil(T / W) - 1
            first = F.pad(first[:, W:] - before, (0, (n + 1) * W - T)).unflatten(1, (n, W))
            first = first - W * (1 + order[:n, None])  # [B, N, W], relative to each block
        keys = torch.arange(2 * W, device=order.device) - W
        blocks = _mask(order[:W], keys, dtype, first, W)
        return cls(mask, token, before, blocks)


class SoftmaxMixer(Mixer):
    """Multi-head softmax attention with RoPE on queries and keys.

    Groups of query heads share the keys and values of `n_kv_heads` heads.

    Args:
        config: Configuration of the layer (an entry of `ModelConfig.layers`).
        execution: How to compute the rotation. None means the defaults.
    """

    def __init__(self, config: ModelConfig, execution: "Execution | None" = None) -> None:
        """Makes the layer's projections for `config`; `execution` says how to rotate."""
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
        ssm_tensors: tuple[()] = (),
        state: KVCache | None = None,
        packing: Attended | None = None,
    ) -> Tensor:
        """Mixes tokens: x [B, T, dim] -> [B, T, dim].

        Args:
            x: Hidden states after the layer's norm.
            rope: cos and sin of the rotary angles, each [T, 1, R / 2] or [B, T, 1, R / 2].
            ssm_tensors: Ignored: the layer has no recurrence.
            state: The cache. Its keys are attended to, and x's keys and values are added.
            packing: The keys that the queries attend to. None means all up to the query's own.
        """
        q = self._rotated(self.wq(x), rope)  # [B, H, T, R]
        k = self._rotated(self.wk(x), rope)  # [B, G, T, R]
        v = self.wv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        # Keys and values of the tokens before: cached, or of previous context-parallel ranks.
        mask, token, before, blocks = packing or Attended()
        if state is not None:
            k, v = state.append(k, v, token, before)
        elif self.cp_rank is not None:
            k, v = self._with_previous_ranks(k, v)
        k = k.to(q.dtype)  # [B, G, S, R]
        v = v.to(q.dtype)

        if blocks is None:
            o = self.call_core(_attention, q, k, v, mask)
        else:
            o = self.call_core(
                _in_blocks,
                q,
                k,
                v,
                mask,
                blocks,
                self.window,
            )
        return self.wo(o.transpose(1, 2).flatten(2))

    def _rotated(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Applies RoPE: x [B, T, E] -> [B, E / R, T, R].

        Args:
            x: Projected queries or keys.
            rope: cos and sin of the rotary angles, each [T, 1, R / 2] or [B, T, 1, R / 2].
        """
        rotated = input_features(x, self.head_dim, rope=rope, execution=self.execution)
        return rotated.transpose(1, 2)

    def _with_previous_ranks(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Puts the keys and values of previous context-parallel ranks before this rank's.

        Each [B, G, T, R] -> [B, G, (rank + 1) T, R]; with a window only the last W before x's.

        Args:
            k: This rank's keys.
            v: This rank's values.
        """
        assert self.cp_rank is not None
        all_ranks = self.cp_rank.gather(torch.cat([k, v], dim=-1))
        both = torch.cat(all_ranks.unbind()[: self.cp_rank.rank + 1], dim=2)
        if self.window is not None:
            both = both[:, :, -(self.window + k.shape[2]) :]
        return both.chunk(2, dim=-1)

    def init_state(
        self,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        ssm_tensors: tuple[()] = (),
    ) -> KVCache:
        """Returns an empty cache.

        Args:
            batch: The number of sequences, B.
            capacity: The number of slots. A sliding window has as many slots as tokens instead.
            dtype: The dtype of keys and values.
            device: The device of the cache.
            ssm_tensors: Ignored: the layer has no recurrence.
        """
        cache = KVCache
        if self.window is not None:
            cache = WindowCache
            capacity = self.window
        shape = batch, self.n_kv_heads, capacity, self.head_dim
        k = torch.zeros(shape, dtype=dtype, device=device)
        return cache(k, torch.zeros_like(k))

    @staticmethod
    def packing(
        mixer: MixerConfig,
        order: Tensor,
        positions: Tensor | None,
        dtype: torch.dtype,
        cp_rank: "GroupRank | None",
    ) -> Attended | None:
        """Returns the keys that queries of whole sequences attend to; None: all up to their own.

        Args:
            mixer: Settings of the layers.
            order: The place of each token in its sequence, [T].
            positions: The place of each token in its document, [B, T]. None means that each
                sequence is one document.
            dtype: The dtype of the masks.
            cp_rank: This rank's place in context parallelism. None means whole sequences.
        """
        T = len(order)
        before = 0 if cp_rank is None else cp_rank.rank * T
        # The sequence's index of the token with which each token's document begins, [B, T].
        first = None if positions is None else order - positions
        if mixer.window is not None:
            near = min(before, mixer.window)  # the keys that `_with_previous_ranks` leaves
            if first is not None:
                first = first - (before - near)
            return Attended.within(
                mixer.window,
                near,
                first,
                order - before,
                dtype,
            )
        if first is not None:
            keys = torch.arange(before + T, device=order.device)
            return Attended(_mask(order, keys, dtype, first))
        if before:
            return Attended.after(before, T, order.device, dtype)
        return None

    @staticmethod
    def continuing(
        mixer: MixerConfig,
        state: "ModelState",
        tokens: int,
        dtype: torch.dtype,
    ) -> Attended:
        """Returns the keys that new tokens attend to: those in the cache, and their own.

        Args:
            mixer: Settings of the layers.
            state: The model's state, which says how many tokens each row has seen.
            tokens: The number of new tokens in each row, T.
            dtype: The dtype of the masks.
        """
        window = mixer.window
        order = torch.arange(tokens, device=state.position.device)
        token = state.position[:, None] + order  # [B, T]
        # If all rows have one length that the host knows, no mask of the rows is needed.
        same_length = not (state.ragged or state.captured)

        # A cache of all tokens: token i of a row is in slot i.
        if window is None:
            if same_length:
                return Attended.after(
                    state.length,
                    tokens,
                    order.device,
                    dtype,
                    token,
                )
            before = state.length
            if state.captured:
                before = (state.capacity or 0) - tokens  # all slots: a CUDA graph's size is fixed
            slots = torch.arange(before + tokens, device=order.device)
            mask = additive_mask((slots <= token[..., None])[:, None], dtype)  # [B, 1, T, S]
            return Attended(mask, token, before)

        # A cache of the last W tokens. Several tokens read it in the order of the tokens.
        if tokens > 1:
            before = min(state.length, window)
            first = None
            if not same_length:
                first = (before - state.position)[:, None].expand(-1, tokens)
            return Attended.within(
                window,
                before,
                first,
                order,
                dtype,
                token,
            )
        # One token reads its slots as they are: token i of a row is in slot i mod W.
        if same_length and state.length + 1 >= window:
            return Attended(None, token)
        slots = torch.arange(window, device=order.device)
        token_in_slot = token - (token - slots) % window  # negative if the slot is empty
        mask = additive_mask((token_in_slot >= 0)[:, None, None], dtype)
        return Attended(mask, token)

    # Costs.

    @staticmethod
    def macs(config: ModelConfig, seq_len: int) -> dict[str, int]:
        """Counts scores and values over the causal half of the context, or over the window.

        Conventions that count the full matrix give twice as much.

        Args:
            config: Configuration of the layer.
            seq_len: Tokens of a sequence.
        """
        window = min(config.mixer.window or seq_len, seq_len)
        pairs = window * (window + 1) // 2 + (seq_len - window) * window
        return {"mixer": config.dim * 2 * pairs // seq_len}

    @staticmethod
    def state_size(config: ModelConfig) -> int:
        tokens = config.mixer.window or 1
        return 2 * config.n_kv_heads * config.head_dim * tokens

    @staticmethod
    def state_grows(config: ModelConfig) -> bool:
        return config.mixer.window is None

    @staticmethod
    def saved_elements(config: ModelConfig) -> tuple[int, int]:
        """Counts the elements per token that autograd keeps. There are no scores of a scan."""
        kv_dim = config.n_kv_heads * config.head_dim
        # Queries before and after RoPE, and the output; keys before and after RoPE, and values.
        token = 3 * config.dim + 3 * kv_dim
        if config.mixer.window is not None and config.mixer.window < config.max_seq_len:
            # In blocks: keys and values of all heads, each twice.
            token = 3 * config.dim + kv_dim + 4 * config.dim
        return token, 0

    @staticmethod
    def received_elements(
        config: ModelConfig,
        context: int,
        tensor: int,
    ) -> tuple[int, int]:
        """Counts the keys and values of all other ranks.

        Args:
            config: Configuration of the layer.
            context: The number of context-parallel ranks.
            tensor: The number of tensor-parallel ranks.
        """
        return 0, (context - 1) * 2 * config.n_kv_heads * config.head_dim // tensor


def _mask(
    query: Tensor,
    key: Tensor,
    dtype: torch.dtype,
    first: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Builds the causal mask of queries and keys from their indices.

    Args:
        query: Indices of the queries, [T].
        key: Indices of the keys, [S].
        dtype: The dtype of the mask.
        first: The index of the key with which each query's document begins, [B, T] or [B, N, T].
        window: The number of keys up to its own that a query attends to. None means all.
    Returns:
        [T, S]; with `first` [B, 1, T, S] or [B * N, 1, T, S].
    """
    attended = key <= query[:, None]
    if window is not None:
        attended = attended & (key > query[:, None] - window)
    if first is not None:
        attended = (attended & (key >= first[..., None])).flatten(0, -3)[:, None]
    return additive_mask(attended, dtype)


def additive_mask(attended: Tensor, dtype: torch.dtype) -> Tensor:
    """Turns a bool mask into numbers that are added to the scores: 0 if True, -inf if False.

    scaled_dot_product_attention would do the same with a bool mask, in every layer anew.

    Args:
        attended: True if a query attends to a key, any shape.
        dtype: The dtype of the result.
    """
    return torch.zeros_like(attended, dtype=dtype).masked_fill_(~attended, -math.inf)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
) -> Tensor:
    """Computes softmax attention: q [B, H, T, R]; k, v [B, G, S, R] -> [B, H, T, R].

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        mask: Added to the scores, [B, 1, T, S] or [T, S]; or one of PyTorch's causal biases. None
            means causal.
    """
    # PyTorch's causal bias is a tensor subclass without numbers; only it has `variant`.
    if isinstance(mask, Tensor) and not hasattr(mask, "variant"):
        mask = mask.to(q.dtype)
    is_causal = mask is None and bool(q.shape[2] > 1)  # torch.export's T is not an int
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=is_causal,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    blocks: Tensor,
    window: int,
) -> Tensor:
    """Computes sliding-window attention for T > W and S <= T + W, with T x 2W scores, not T x S.

    Args:
        q: [B, H, T, R].
        k: [B, G, S, R].
        v: [B, G, S, R].
        mask: `Attended.mask`, for the first W queries.
        blocks: `Attended.blocks`, for the other queries.
        window: W.
    Returns:
        [B, H, T, R].
    """
    W = window
    T = q.shape[2]
    before = k.shape[2] - T

    # Kernels that take a mask want as many heads of keys as of queries.
    sharing = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(sharing, dim=1)
    v = v.repeat_interleave(sharing, dim=1)

    # The first W queries, and all keys up to them.
    end = before + W
    first = _attention(q[:, :, :W], k[:, :, :end], v[:, :, :end], mask)

    # The other queries in blocks of W, as rows of a larger batch; the last block is padded.
    def in_blocks(x: Tensor) -> Tensor:  # [B, H, T, R] -> [B, ceil(T / W), H, W, R]
        return F.pad(x, (0, 0, 0, -x.shape[2] % W)).unflatten(2, (-1, W)).transpose(1, 2)

    def with_previous_block(x: Tensor) -> Tensor:  # [B, H, S, R] -> [B * N, H, 2W, R]
        x = in_blocks(x[:, :, before:])
        return torch.cat([x[:, :-1], x[:, 1:]], dim=3).flatten(0, 1)

    queries = in_blocks(q[:, :, W:])  # [B, N, H, W, R]
    k = with_previous_block(k)
    v = with_previous_block(v)
    o = _attention(queries.flatten(0, 1), k, v, blocks)
    o = o.unflatten(0, queries.shape[:2]).transpose(1, 2).flatten(2, 3)  # [B, H, N W, R]
    return torch.cat([first, o[:, :, : T - W]], dim=2)
