"""Served models: the decoder of `interdomain.model` over vLLM's pages of states, keys and values.

vLLM puts the tokens of all requests of a step into one dimension, [tokens]. Methods without a
description are those that vLLM calls.
"""

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

from interdomain.checkpoint.pretrained import MODEL_PREFIX, storage_dtype
from interdomain.features import input_features
from interdomain.model import Transformer
from interdomain.model.config import ModelConfig
from interdomain.model.layers import rope_of
from interdomain.model.mixers.base import Packing
from interdomain.model.parallel import GroupRank, local_slice, split_dimension
from interdomain.model.state import MixerState

from .config import check_vllm_settings, model_config, state_dtypes, state_shapes


class Recurrent(MambaBase):
    """A mixer with a state of fixed size: [tokens, dim] -> [tokens, dim].

    Each request has its state in a page of vLLM.

    Args:
        mixer: The mixer of a layer of `interdomain.model.Transformer`.
        config: The layer's configuration, an entry of `ModelConfig.layers`.
        vllm_config: vLLM's settings.
        name: The layer's name, by which vLLM finds it.

    Attributes:
        shapes: The shapes of the two parts of a request's state (`config.state_shapes`).
        dtypes: Their data types.
        kv_cache: The pages of the two parts, by vLLM's name: [pages, ...] of the convolutions' last
            inputs and of the recurrences' states. vLLM sets it.
        has_conv: True if the mixer has convolutions.
        ssm_tensors: The tables of the mixer's SSM parameters (`Transformer.ssm_tensors`).
        prepared: What step kernels read of these tables (`MixerState.prepared`), or None.
    """

    mamba_type = MambaAttentionBackendEnum.CUSTOM

    def __init__(self, mixer: Any, config: ModelConfig, vllm_config: VllmConfig, name: str) -> None:
        self.mixer = mixer
        self.name = name
        self.shapes = state_shapes(config, vllm_config.parallel_config.tensor_parallel_size)
        self.dtypes = state_dtypes(vllm_config.model_config.dtype)
        self.kv_cache = (torch.empty(0), torch.empty(0))
        self.has_conv = config.mixer.conv_past > 0
        # vLLM finds the layers that need pages here.
        vllm_config.compilation_config.static_forward_context[name] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.dtypes

    def prepare(self, ssm_tensors: Any) -> None:
        """Computes what steps read of the parameters, once for the weights that are loaded.

        Args:
            ssm_tensors: The layer's entry of `Transformer.ssm_tensors`.
        """
        self.ssm_tensors = ssm_tensors
        self.prepared = None
        # With tensor parallelism there is no step function: a step is a piece of one token.
        if self.mixer.tp_rank is None:
            weight = self.mixer.wo.weight
            state = self.mixer.init_state(1, 0, weight.dtype, weight.device, ssm_tensors)
            self.prepared = state.prepared

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """Computes the mixer, and advances the states in their pages.

        Args:
            x: [tokens, dim].
            rope: Cosines and sines of the rotary embedding, each [tokens, 1, head_dim / 2]. None:
                no layer rotates.
        """
        metadata: Any = get_forward_context().attn_metadata
        out = torch.zeros_like(x)
        # vLLM first measures the memory, without pages.
        if metadata is None:
            return out
        conv, ssm = self.kv_cache
        # Each is a `states.Batch`: the places of tokens, the pages of their requests, which
        # requests begin, and which places are padding.
        for tokens, pages, fresh, padding in metadata[self.name].batches:
            # Read the states of the batch. A request that begins has zeros.
            past = conv[pages] if self.has_conv else conv.new_empty(len(pages), 0, 0)
            state = MixerState(past, ssm[pages], self.prepared)
            if fresh is not None:
                state.conv[fresh] = 0
                state.ssm[fresh] = 0
            rope_of_tokens = None
            if rope is not None:
                cos, sin = rope
                rope_of_tokens = cos[tokens], sin[tokens]
            # Padding is a document of its own, of zeros, from which no state and no convolution
            # goes on.
            inputs = x[tokens]
            packing = None
            if padding is not None:
                inputs = inputs.masked_fill(padding[..., None], 0)
                packing = Packing((~padding).int())
            y = self.mixer(inputs, rope_of_tokens, self.ssm_tensors, state, packing)
            # Write the results, and the states back to their pages.
            if padding is None:
                out[tokens] = y
            else:
                out[tokens[~padding]] = y[~padding]
            ssm[pages] = state.ssm
            if self.has_conv:
                conv[pages] = state.conv
        return out


class Softmax(nn.Module):
    """Softmax attention: [tokens, dim] -> [tokens, dim]. vLLM's own layer keeps keys and values.

    Args:
        mixer: The mixer of a layer of `interdomain.model.Transformer`.
        config: The layer's configuration, an entry of `ModelConfig.layers`.
        vllm_config: vLLM's settings.
        name: The layer's name, by which vLLM finds it.
    """

    def __init__(self, mixer: Any, config: ModelConfig, vllm_config: VllmConfig, name: str) -> None:
        super().__init__()
        # Not as a child module: the mixer's parameters belong to the Transformer.
        self.mixer: Any
        self.__dict__["mixer"] = mixer
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

    def prepare(self, ssm_tensors: Any) -> None:
        """Does nothing: softmax has no SSM parameters, and steps read its own themselves."""

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Computes the mixer.

        Args:
            x: [tokens, dim].
            rope: Cosines and sines of the rotary embedding, each [tokens, 1, head_dim / 2].
        """
        # `input_features` splits the products into heads and rotates them. To it all tokens are one
        # sequence, and rope says where each of them stands.
        cos, sin = rope
        tables = (cos[None], sin[None])
        width = self.mixer.head_dim
        q = input_features(self.mixer.wq(x)[None], width, rope=tables)[0].flatten(1)
        k = input_features(self.mixer.wk(x)[None], width, rope=tables)[0].flatten(1)
        v = self.mixer.wv(x)
        return self.mixer.wo(self.attention(q, k, v))


class Served(nn.Module):
    """The decoder over the tokens of all requests of a step.

    There is a class for each architecture (`config.ARCHITECTURES`).

    Args:
        vllm_config: vLLM's settings.
        prefix: Unused. vLLM gives it to every model.

    Attributes:
        own: The package's configuration of the model.
        dtype: The model's data type.
        model: The weights, of which this rank has its part.
        ready: True when the mixers are prepared for the weights.
        part: This rank's place in tensor parallelism.
        no_tokens: Ids of the vocabulary's padding, which are never chosen.
        blocks: The layers of `model`, whose norms and feed-forwards are called here.
        mixers: A `Recurrent` or `Softmax` for each layer.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        settings = vllm_config.model_config
        self.own = model_config(settings.hf_config)
        self.dtype = settings.dtype
        check_vllm_settings(vllm_config, self.own)
        self.model = Transformer(self.own)
        self.ready = False
        group = get_tp_group()
        self.part = GroupRank(group.device_group.group_name, group.rank_in_group, group.world_size)
        # Ranks divide the heads and the feed-forward's width, but not the embedding and the head.
        if self.part.size > 1:
            self.model.set_ranks(tp_rank=self.part)
            self.model.tok_embeddings.tp_rank = None
            self.model.output.tp_rank = None
            for name, module in self.model.layers.named_modules():
                dim = split_dimension(self.model.layers, name)
                if dim is not None:
                    module.weight = nn.Parameter(local_slice(module.weight, self.part, dim).clone())
        # Rows of a padded vocabulary are never chosen. generation_config.json names them.
        generation: Any = settings.try_get_generation_config()
        suppressed = generation.get("suppress_tokens") or []
        self.no_tokens = [token for token in suppressed if token < self.own.vocab_size]
        self.blocks: list[Any] = list(self.model.layers.values())
        self.mixers: list[Any] = []
        for i, (block, layer) in enumerate(zip(self.blocks, self.own.layers, strict=True)):
            served = Softmax if layer.mixer.kind == "softmax" else Recurrent
            name = f"layers.{i}.attention"
            self.mixers.append(served(block.attention, layer, vllm_config, name))

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
        """Returns the embeddings of tokens."""
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
        """Computes the output of the last norm for the tokens of a step, [tokens, dim].

        Args:
            input_ids: The tokens of all requests, [tokens].
            positions: The place of each token in its request, [tokens].
            intermediate_tensors: Unused: there is no pipeline parallelism.
            inputs_embeds: Embeddings [tokens, dim] in place of input_ids.
        """
        # The tables of the SSM parameters are computed once for the weights.
        if not self.ready:
            for mixer, ssm_tensors in zip(self.mixers, self.model.ssm_tensors(), strict=True):
                mixer.prepare(ssm_tensors)
            self.ready = True
        # Embed the tokens, and pass them through the layers.
        h = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        rope = None
        if any(layer.mixer.rope for layer in self.own.layers):
            rope = rope_of(self.own, positions, h.dtype)
        for mixer, block in zip(self.mixers, self.blocks, strict=True):
            h = h + self._sum(mixer(block.attention_norm(h), rope))
            h = h + self._sum(block.feed_forward(block.ffn_norm(h)))
        return self.model.norm(h)

    def _sum(self, x: Tensor) -> Tensor:
        """Returns the sum of x over tensor-parallel ranks.

        Each has computed its part of the heads or of the feed-forward's width.
        """
        return x if self.part.size == 1 else tensor_model_parallel_all_reduce(x)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Returns the logits of hidden states, -inf for ids that are no tokens."""
        logits = self.model.output(hidden_states)
        logits[:, self.no_tokens] = -torch.inf
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads an exported model's tensors.

        Args:
            weights: The tensors with their names in the exported model.

        Returns:
            The names of the parameters of this module that were loaded.
        """
        stored = {}
        for name, tensor in weights:
            name = name.removeprefix(MODEL_PREFIX)
            # Ranks divide the tensors of layers only.
            if name.startswith("layers."):
                dim = split_dimension(self.model, name.rpartition(".")[0])
                if dim is not None:
                    tensor = local_slice(tensor, self.part, dim).contiguous()
            stored[name] = tensor.to(storage_dtype(name, self.dtype))
        self.model.load_state_dict(stored, assign=True)
        self.model.requires_grad_(False)
        self.ready = False
        return {f"model.{name}" for name in stored}


class Interdomain(Served, HasInnerState, IsAttentionFree, IsHybrid, SupportsMambaPrefixCaching):
    """All layers have states.

    It is also marked as a hybrid: vLLM caches no prefixes of attention-free models by default.
    """


class InterdomainHybrid(Served, HasInnerState, IsHybrid, SupportsMambaPrefixCaching):
    """Some layers are softmax."""


class InterdomainSoftmax(Served):
    """All layers are softmax."""
