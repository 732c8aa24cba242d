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
        # `mixer` belongs to a layer of the Transformer, whose configuration is `config`. vLLM knows
        # the layer by `name`.
        self.mixer = mixer
        self.name = name
        self.shapes = state_shapes(config, vllm_config.parallel_config.tensor_parallel_size)
        self.dtypes = state_dtypes(vllm_config.model_config.dtype)
        # vLLM puts its pages here: of the convolutions' inputs, and of the recurrences' states.
        self.kv_cache = (torch.empty(0), torch.empty(0))
        self.has_conv = config.mixer.conv_past > 0
        # vLLM finds the layers that need pages here.
        vllm_config.compilation_config.static_forward_context[name] = self

    # vLLM asks for the shapes and data types of the two parts of a request's state.
    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self.dtypes

    def prepare(self, ssm_tensors: Any) -> None:
        """Keeps what the recurrence reads of the parameters, once for the weights that are loaded.

        Args:
            ssm_tensors: The tables of the mixer's SSM parameters, the layer's entry of
                `Transformer.ssm_tensors`.
        """
        self.ssm_tensors = ssm_tensors
        # The forms of the tables that kernels for one token read; None without such kernels. With
        # tensor parallelism there are none: one token is computed as a sequence of one.
        self.prepared = None
        if self.mixer.tp_rank is None:
            weight = self.mixer.wo.weight
            # A mixer computes them when it makes a state, here one of a single row.
            state = self.mixer.init_state(1, 0, weight.dtype, weight.device, ssm_tensors)
            self.prepared = state.prepared

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """Computes the mixer, and advances the states in their pages.

        The requests of a step are computed in batches of B requests, T tokens of each. Before the
        tokens of a shorter request there is padding. `prepare` has set what the mixer reads of its
        parameters, `ssm_tensors` and `prepared`.

        Args:
            x: The hidden states of all tokens of a step, [tokens, dim].
            rope: Cosines and sines of the rotary embedding, each [tokens, 1, head_dim / 2]. None:
                no layer rotates.
        """
        metadata: Any = get_forward_context().attn_metadata
        out = torch.zeros_like(x)
        # vLLM measures the memory before there are pages.
        if metadata is None:
            return out
        conv, ssm = self.kv_cache
        # Each is a `states.Batch`: the places of its tokens in x [B, T], the page of each request
        # [B], which requests begin [B], and which places are padding [B, T], or None for none.
        for tokens, pages, fresh, padding in metadata[self.name].batches:
            # Read the states of the batch. A request that begins has zeros: its page has the state
            # of an earlier request.
            past = conv[pages] if self.has_conv else conv.new_empty(len(pages), 0, 0)
            state = MixerState(past, ssm[pages], self.prepared)
            if fresh is not None:
                state.conv[fresh] = 0
                state.ssm[fresh] = 0
            rope_of_tokens = None
            if rope is not None:
                cos, sin = rope
                rope_of_tokens = cos[tokens], sin[tokens]
            # Padding is document 0, of zeros, and the tokens after it are document 1. No state and
            # no convolution goes on from one document to the next.
            inputs = x[tokens]
            packing = None
            if padding is not None:
                inputs = inputs.masked_fill(padding[..., None], 0)
                packing = Packing(documents=(~padding).int())
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
        # `mixer` belongs to a layer of the Transformer, whose configuration is `config`. It is set
        # through __dict__, so that it is no child module: its parameters are the Transformer's.
        self.mixer: Any
        self.__dict__["mixer"] = mixer
        # vLLM's layer keeps the keys and values of this rank's heads, and finds them by `name`.
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
        """Does nothing: softmax has no SSM parameters.

        Args:
            ssm_tensors: Ignored. `Recurrent.prepare` keeps the tables of SSM parameters.
        """

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Computes the mixer. vLLM's layer reads and writes the requests' keys and values.

        Args:
            x: The hidden states of all tokens of a step, [tokens, dim].
            rope: Cosines and sines of the rotary embedding, each [tokens, 1, head_dim / 2]. Softmax
                always rotates, so they are never None.
        """
        # `input_features` splits the products into heads and rotates them. It takes all tokens for
        # one sequence [1, tokens, ...]; rope says where each of them stands in its request.
        cos, sin = rope
        tables = (cos[None], sin[None])
        width = self.mixer.head_dim
        q = input_features(self.mixer.wq(x)[None], width, rope=tables)[0].flatten(1)
        k = input_features(self.mixer.wk(x)[None], width, rope=tables)[0].flatten(1)
        v = self.mixer.wv(x)
        # The heads are side by side, [tokens, heads * head_dim], in q, k, v and the output.
        return self.mixer.wo(self.attention(q, k, v))


class Served(nn.Module):
    """The decoder over the tokens of all requests of a step.

    There is a class for each architecture (`config.ARCHITECTURES`).

    Args:
        vllm_config: vLLM's settings.
        prefix: Unused. vLLM gives it to every model.

    Attributes:
        package_config: This package's configuration of the model.
        dtype: The model's data type.
        model: The weights, of which this rank has its part.
        is_prepared: True when the mixers are prepared for the weights that are loaded.
        tp_rank: This rank's place in tensor parallelism.
        suppressed_ids: Ids of the vocabulary that are never chosen: suppress_tokens of
            generation_config.json.
        blocks: The layers of `model`, whose norms and feed-forwards are called here.
        mixers: A `Recurrent` or `Softmax` for each layer.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        # vLLM gives a prefix of the modules' names to every model. This one stands alone, without
        # a prefix.
        super().__init__()
        settings = vllm_config.model_config
        # This package's ModelConfig, from config.json as transformers read it.
        self.package_config = model_config(settings.hf_config)
        self.dtype = settings.dtype
        check_vllm_settings(vllm_config, self.package_config)
        self.model = Transformer(self.package_config)
        # The first pass prepares the mixers for the weights, which vLLM loads after this.
        self.is_prepared = False
        group = get_tp_group()
        self.tp_rank = GroupRank(
            group.device_group.group_name, group.rank_in_group, group.world_size
        )
        # Ranks divide the heads and the feed-forward's width: cut this rank's slice out of each
        # matrix. The embedding and the head are whole, so they must not know of ranks.
        if self.tp_rank.size > 1:
            self.model.set_ranks(tp_rank=self.tp_rank)
            self.model.tok_embeddings.tp_rank = None
            self.model.output.tp_rank = None
            for name, module in self.model.layers.named_modules():
                dim = split_dimension(self.model.layers, name)
                if dim is not None:
                    module.weight = nn.Parameter(
                        local_slice(module.weight, self.tp_rank, dim).clone()
                    )
        # Rows that only pad the vocabulary are no tokens. `interdomain convert` lists their ids in
        # generation_config.json as suppress_tokens. An edited file may list ids without a row.
        generation: Any = settings.try_get_generation_config()
        suppressed = generation.get("suppress_tokens") or []
        self.suppressed_ids = [
            token for token in suppressed if token < self.package_config.vocab_size
        ]
        self.blocks: list[Any] = list(self.model.layers.values())
        # Each layer's mixer, in an object that reads and writes vLLM's pages.
        self.mixers: list[Any] = []
        for i, (block, layer) in enumerate(
            zip(self.blocks, self.package_config.layers, strict=True)
        ):
            served = Softmax if layer.mixer.kind == "softmax" else Recurrent
            name = f"layers.{i}.attention"
            self.mixers.append(served(block.attention, layer, vllm_config, name))

    # vLLM asks the class for what its states are, before it makes a model. They are two tensors, as
    # Mamba 2's are, and vLLM's prefix caching copies them in the same way.
    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple:
        return MambaStateCopyFuncCalculator.mamba2_state_copy_func()

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple:
        config = model_config(vllm_config.model_config.hf_config)
        # The first layer with a state. Softmax layers have none.
        layer = next(layer for layer in config.layers if layer.mixer.kind != "softmax")
        return state_shapes(layer, vllm_config.parallel_config.tensor_parallel_size)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple:
        return state_dtypes(vllm_config.model_config.dtype)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Returns the embeddings of tokens, [tokens, dim]."""
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
            _: vLLM's other arguments, which are ignored.
        """
        # The tables of the SSM parameters are computed once for the weights.
        if not self.is_prepared:
            for mixer, ssm_tensors in zip(self.mixers, self.model.ssm_tensors(), strict=True):
                mixer.prepare(ssm_tensors)
            self.is_prepared = True
        # Embed the tokens, and pass them through the layers.
        h = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        rope = None
        if any(layer.mixer.rope for layer in self.package_config.layers):
            rope = rope_of(self.package_config, positions, h.dtype)
        for mixer, block in zip(self.mixers, self.blocks, strict=True):
            h = h + self._sum(mixer(block.attention_norm(h), rope))
            h = h + self._sum(block.feed_forward(block.ffn_norm(h)))
        return self.model.norm(h)

    def _sum(self, x: Tensor) -> Tensor:
        """Returns the sum of x over tensor-parallel ranks; x itself if there is one rank.

        Args:
            x: The output of a mixer or feed-forward, of which each rank has computed the share of
                its heads or of its part of the width.
        """
        return x if self.tp_rank.size == 1 else tensor_model_parallel_all_reduce(x)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Returns the logits of hidden states, -inf for ids that are never chosen.

        Args:
            hidden_states: The output of `forward` for the tokens after which vLLM samples,
                [tokens, dim].
        """
        logits = self.model.output(hidden_states)
        logits[:, self.suppressed_ids] = -torch.inf
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
            # The name in the package's model.
            name = name.removeprefix(MODEL_PREFIX)
            # Ranks divide only tensors of layers: take this rank's slice.
            if name.startswith("layers."):
                dim = split_dimension(self.model, name.rpartition(".")[0])
                if dim is not None:
                    tensor = local_slice(tensor, self.tp_rank, dim).contiguous()
            stored[name] = tensor.to(storage_dtype(name, self.dtype))
        self.model.load_state_dict(stored, assign=True)
        self.model.requires_grad_(False)
        # The mixers' tables are those of earlier weights. The next pass computes them anew.
        self.is_prepared = False
        return {f"model.{name}" for name in stored}


class Interdomain(Served, HasInnerState, IsAttentionFree, IsHybrid, SupportsMambaPrefixCaching):
    """All layers have states.

    It is also marked as a hybrid: vLLM caches no prefixes of attention-free models by default.
    """


class InterdomainHybrid(Served, HasInnerState, IsHybrid, SupportsMambaPrefixCaching):
    """Some layers are softmax."""


class InterdomainSoftmax(Served):
    """All layers are softmax."""
