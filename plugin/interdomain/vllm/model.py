"""Served models: the decoder of `interdomain.model` over vLLM's pages of states, keys and values."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFuncCalculator
from vllm.model_executor.models.interfaces import (
    HasInnerState,
    IsAttentionFree,
    IsHybrid,
    SupportsMambaPrefixCaching,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from interdomain.checkpoint.pretrained import BASE, storage_dtype
from interdomain.features import input_features
from interdomain.model import Transformer
from interdomain.model.config import ModelConfig
from interdomain.model.layers import rope_of
from interdomain.model.mixers.base import Packing
from interdomain.model.shard import Part, shard_of, split_dimension
from interdomain.model.state import MixerState

from .config import model_config, refuse, state_dtypes, state_shapes


class Recurrent(MambaBase):
    """A mixer with a state of fixed size: x [tokens, dim] -> the same, each request by the state in its page."""

    mamba_type = MambaAttentionBackendEnum.CUSTOM

    def __init__(self, mixer: Any, config: ModelConfig, vllm_config: VllmConfig, name: str) -> None:
        self.mixer, self.name = mixer, name
        self.shapes = state_shapes(config, vllm_config.parallel_config.tensor_parallel_size)
        self.dtypes = state_dtypes(vllm_config.model_config.dtype)
        self.kv_cache = (torch.empty(0), torch.empty(0))  # vLLM binds its pages
        self.has_conv = config.mixer.conv_past > 0
        vllm_config.compilation_config.static_forward_context[name] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.dtypes

    def prepare(self, dynamics: Any) -> None:
        """Make what steps read of the parameters: once, for the weights that are loaded. For a part of the heads, where there
        is no step function, a step is a piece of one token."""
        self.dynamics = dynamics
        self.prepared = None
        if self.mixer.heads is None:
            weight = self.mixer.wo.weight
            self.prepared = self.mixer.init_state(
                1, 0, weight.dtype, weight.device, dynamics
            ).prepared

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        metadata: Any = get_forward_context().attn_metadata
        out = torch.zeros_like(x)
        if metadata is None:  # a run that measures memory: there are no pages yet
            return out
        conv, ssm = self.kv_cache
        for tokens, pages, fresh, padding in metadata[self.name].batches:
            past = conv[pages] if self.has_conv else conv.new_empty(len(pages), 0, 0)
            state = MixerState(past, ssm[pages], self.prepared)
            if fresh is not None:
                state.conv[fresh] = 0
                state.ssm[fresh] = 0
            rope_of_tokens = None
            if rope is not None:
                cos, sin = rope
                rope_of_tokens = cos[tokens], sin[tokens]
            inputs = x[tokens]
            packing = None
            if (
                padding is not None
            ):  # a document of its own, of zeros: no state and no convolution goes on from it
                inputs = inputs.masked_fill(padding[..., None], 0)
                packing = Packing((~padding).int())
            y = self.mixer(inputs, rope_of_tokens, self.dynamics, state, packing)
            if padding is None:
                out[tokens] = y
            else:
                out[tokens[~padding]] = y[~padding]
            ssm[pages] = state.ssm
            if self.has_conv:
                conv[pages] = state.conv
        return out


class Softmax(nn.Module):
    """Softmax attention by vLLM's own layer, which has keys and values: x [tokens, dim] -> the same."""

    def __init__(self, mixer: Any, config: ModelConfig, vllm_config: VllmConfig, name: str) -> None:
        super().__init__()
        self.mixer: Any
        self.__dict__["mixer"] = mixer  # whose parameters are the Transformer's
        ranks = vllm_config.parallel_config.tensor_parallel_size
        self.attention = Attention(
            config.n_heads // ranks,
            config.head_dim,
            config.head_dim**-0.5,
            num_kv_heads=config.n_kv_heads // ranks,
            cache_config=vllm_config.cache_config,
            per_layer_sliding_window=mixer.window,
            prefix=name,
        )

    def prepare(self, dynamics: Any) -> None:
        """Nothing is made of the parameters."""

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = (table[None] for table in rope)
        width = self.mixer.head_dim
        q = input_features(self.mixer.wq(x)[None], width, rope=(cos, sin))[0].flatten(1)
        k = input_features(self.mixer.wk(x)[None], width, rope=(cos, sin))[0].flatten(1)
        return self.mixer.wo(self.attention(q, k, self.mixer.wv(x)))


class Served(nn.Module):
    """The decoder over the tokens of all requests of a step, [tokens]; one class for each kind of model (`ARCHITECTURES`)."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        settings = vllm_config.model_config
        self.own, self.dtype = model_config(settings.hf_config), settings.dtype
        refuse(vllm_config, self.own)
        self.model = Transformer(self.own)
        self.ready = False  # whether mixers have been prepared for the weights
        group = get_tp_group()
        self.part = Part(group.device_group.group_name, group.rank_in_group, group.world_size)
        if (
            self.part.size > 1
        ):  # the heads and the feed-forward's width are divided, embedding and head are not
            self.model.set_parts(heads=self.part)
            self.model.tok_embeddings.heads = self.model.output.heads = None
            for name, module in self.model.layers.named_modules():
                if (dim := split_dimension(self.model.layers, name)) is not None:
                    module.weight = nn.Parameter(shard_of(module.weight, self.part, dim).clone())
        generation: Any = settings.try_get_generation_config()
        suppressed = generation.get("suppress_tokens") or []  # rows of a padded vocabulary
        self.no_tokens = [token for token in suppressed if token < self.own.vocab_size]
        self.blocks: list[Any] = list(self.model.layers.values())
        self.mixers: list[Any] = []
        for i, (block, layer) in enumerate(zip(self.blocks, self.own.layers, strict=True)):
            kind = Softmax if layer.mixer.kind == "softmax" else Recurrent
            self.mixers.append(kind(block.attention, layer, vllm_config, f"layers.{i}.attention"))

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple:
        return MambaStateCopyFuncCalculator.mamba2_state_copy_func()

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple:
        config = model_config(vllm_config.model_config.hf_config)
        layer = next(layer for layer in config.layers if layer.mixer.kind != "softmax")
        return state_shapes(layer, vllm_config.parallel_config.tensor_parallel_size)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple:
        return state_dtypes(vllm_config.model_config.dtype)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.tok_embeddings(input_ids)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if not self.ready:
            for mixer, dynamics in zip(self.mixers, self.model.dynamics(), strict=True):
                mixer.prepare(dynamics)
            self.ready = True
        h = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        rotates = any(layer.mixer.rope for layer in self.own.layers)
        rope = rope_of(self.own, positions, h.dtype) if rotates else None
        for mixer, block in zip(self.mixers, self.blocks, strict=True):
            h = h + self.sum(mixer(block.attention_norm(h), rope))
            h = h + self.sum(block.feed_forward(block.ffn_norm(h)))
        return self.model.norm(h)

    def sum(self, x: Tensor) -> Tensor:
        """Over the ranks of tensor parallelism, of which each has computed its part of the heads or of the width."""
        return x if self.part.size == 1 else tensor_model_parallel_all_reduce(x)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits = self.model.output(hidden_states)
        logits[:, self.no_tokens] = -torch.inf
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        stored = {}
        for name, tensor in weights:
            name = name.removeprefix(BASE)
            module = name.rpartition(".")[0]
            dim = split_dimension(self.model, module) if name.startswith("layers.") else None
            tensor = tensor if dim is None else shard_of(tensor, self.part, dim).contiguous()
            stored[name] = tensor.to(storage_dtype(name, self.dtype))
        self.model.load_state_dict(stored, assign=True)
        self.model.requires_grad_(False)
        self.ready = False
        return {f"model.{name}" for name in stored}


class Interdomain(Served, HasInnerState, IsAttentionFree, IsHybrid, SupportsMambaPrefixCaching):
    """Layers with states alone; marked as a hybrid too, since vLLM caches no prefixes by default of what is attention-free."""


class InterdomainHybrid(Served, HasInnerState, IsHybrid, SupportsMambaPrefixCaching):
    """Some layers are softmax."""


class InterdomainSoftmax(Served):
    """All layers are softmax."""
