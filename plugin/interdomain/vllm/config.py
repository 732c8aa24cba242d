"""Facts that vLLM needs before it builds a model: its architecture, and the shapes of states."""

from typing import Any

import torch
from transformers import PretrainedConfig

from interdomain.checkpoint.pretrained import from_transformers
from interdomain.hf import InterdomainConfig
from interdomain.model.config import FIXED_STATE, ModelConfig, state_shape
from interdomain.model.transformer import mixer_class

# The classes of `model.py` by architecture. vLLM asks a class, not a configuration, whether a model
# has attention or states, so there is one for states only, one for both, and one for attention
# only.
ARCHITECTURES = {
    "InterdomainForCausalLM": "Interdomain",
    "InterdomainHybridForCausalLM": "InterdomainHybrid",
    "InterdomainSoftmaxForCausalLM": "InterdomainSoftmax",
}


class ServedConfig(InterdomainConfig):
    """config.json of an exported model, with the architecture by which vLLM finds the class.

    Args:
        settings: The contents of config.json.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # `settings` are the contents of config.json. Every exported model names one architecture
        # there, InterdomainForCausalLM, which is transformers' class for all of them. vLLM needs to
        # know whether there are states, so the name is corrected by the layers.
        states_only, hybrid, softmax_only = ARCHITECTURES
        # The base class has set the kinds of layers as transformers calls them: "linear_attention"
        # for those with states.
        kinds = set(self.layer_types)
        if kinds == {"linear_attention"}:
            self.architectures = [states_only]
        elif "linear_attention" in kinds:
            self.architectures = [hybrid]
        else:
            self.architectures = [softmax_only]


def model_config(config: PretrainedConfig) -> ModelConfig:
    """Returns the package's configuration of a model.

    Args:
        config: transformers' configuration of it, with the contents of config.json.
    """
    return from_transformers(config.to_dict())


def state_shapes(config: ModelConfig, ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of a request's state in a layer on one rank.

    Args:
        config: The layer, an entry of `ModelConfig.layers`: the configuration of a model whose
            layers are all like it.
        ranks: Number of tensor-parallel ranks, which divide the heads and channels.

    Returns:
        The shape of the convolutions' last inputs, and that of the recurrence's state. vLLM has no
        state of size 0: without convolutions the first is that of one number, which is never read.
    """
    # The mixer's class knows the shapes, without a dimension for the requests.
    shapes = mixer_class(config.mixer).state_shapes(config, ranks)
    conv = shapes["conv"]
    if 0 in conv:
        conv = (1, 1)
    return conv, shapes["ssm"]


def state_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Returns the data types of a request's state: the convolutions' inputs, and the recurrence.

    The first have the model's data type, and the recurrence's state is float32.

    Args:
        dtype: The model's data type.
    """
    return dtype, torch.float32


def check_vllm_settings(vllm_config: Any, config: ModelConfig) -> None:
    """Checks that a model can be served with vLLM's settings.

    Args:
        vllm_config: vLLM's VllmConfig.
        config: The package's configuration of the model.

    Raises:
        ValueError: The model would ignore a setting, or the tensor-parallel ranks do not divide its
            heads or its feed-forward's width.
    """
    # Settings that the model would ignore, as "name = value".
    cache = vllm_config.cache_config
    wrong = []
    if vllm_config.quant_config is not None:
        wrong.append(f"quantization = {vllm_config.model_config.quantization}")
    has_softmax = any(layer.mixer.kind == "softmax" for layer in config.layers)
    if cache.cache_dtype != "auto" and not has_softmax:
        wrong.append(f"kv_cache_dtype = {cache.cache_dtype}")
    # `state_dtypes` chooses the data types of both parts of a state. float32 is what it chooses for
    # the recurrence.
    if cache.mamba_cache_dtype != "auto":
        wrong.append(f"mamba_cache_dtype = {cache.mamba_cache_dtype}")
    if cache.mamba_ssm_cache_dtype not in ("auto", "float32"):
        wrong.append(f"mamba_ssm_cache_dtype = {cache.mamba_ssm_cache_dtype}")
    if vllm_config.speculative_config is not None:
        wrong.append("speculative decoding")
    if wrong:
        raise ValueError(f"this model has no {', '.join(wrong)} under vLLM. Leave that out.")

    # The numbers of heads that the ranks divide: of queries, of keys, and of a baseline's state.
    ranks = vllm_config.parallel_config.tensor_parallel_size
    heads = {config.n_heads}
    for layer in config.layers:
        heads.add(layer.n_kv_heads)
        if layer.mixer.kind in FIXED_STATE:
            heads.add(state_shape(layer.mixer, layer.dim).heads)
    if any(n % ranks for n in heads) or config.ffn_hidden % ranks:
        raise ValueError(
            f"tensor_parallel_size = {ranks} must divide the heads, {sorted(heads)}, and the "
            f"feed-forward's width, {config.ffn_hidden}. Take fewer ranks."
        )


def register_states() -> None:
    """Tells vLLM how to page states of fixed size beside keys and values.

    vLLM pages Mamba's states already, and these go the same way. MODELS_CONFIG_MAP has, by
    architecture, how vLLM adapts its settings to a model, such as the size of pages. The backend
    describes a step to the layers with states.
    """
    from vllm.model_executor.models.config import (
        MODELS_CONFIG_MAP,
        HybridAttentionMambaModelConfig,
        MambaModelConfig,
    )
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

    # A model of softmax only has no states, and needs no entry.
    states_only, hybrid, _ = ARCHITECTURES
    MODELS_CONFIG_MAP[states_only] = MambaModelConfig
    MODELS_CONFIG_MAP[hybrid] = HybridAttentionMambaModelConfig
    # CUSTOM is vLLM's place for a backend from outside. `model.Recurrent` asks for it.
    register_backend(
        MambaAttentionBackendEnum.CUSTOM, "interdomain.vllm.states.Backend", is_mamba=True
    )
