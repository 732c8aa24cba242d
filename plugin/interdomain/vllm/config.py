"""Facts that vLLM asks for before a model exists: its kind, and the shape of a request's state."""

from typing import Any

import torch
from transformers import PretrainedConfig

from interdomain.checkpoint.pretrained import from_transformers
from interdomain.hf import InterdomainConfig
from interdomain.model.config import FIXED_STATE, ModelConfig, state_shape
from interdomain.model.transformer import mixer_class

# vLLM asks a class, not a configuration, whether it has attention or states: one class for each kind of model.
ARCHITECTURES = {
    "InterdomainForCausalLM": "Interdomain",  # states alone
    "InterdomainHybridForCausalLM": "InterdomainHybrid",
    "InterdomainSoftmaxForCausalLM": "InterdomainSoftmax",
}


class ServedConfig(InterdomainConfig):
    """config.json of a folder, with the architecture that vLLM needs in the place of transformers' class."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        states_only, hybrid, softmax_only = ARCHITECTURES
        kinds = set(self.layer_types)
        if kinds == {"linear_attention"}:
            self.architectures = [states_only]
        elif "linear_attention" in kinds:
            self.architectures = [hybrid]
        else:
            self.architectures = [softmax_only]


def model_config(config: PretrainedConfig) -> ModelConfig:
    return from_transformers(config.to_dict())


def state_shapes(config: ModelConfig, ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a request's state in a layer, on one of the ranks that share its heads: the convolutions' last inputs, and the
    state of the recurrence.

    Without convolutions the first is one number, which nobody reads: vLLM has no state of size 0.
    """
    shapes = mixer_class(config.mixer).state_shapes(config, ranks)
    return shapes["conv"] if 0 not in shapes["conv"] else (1, 1), shapes["ssm"]


def state_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    return dtype, torch.float32


def refuse(vllm_config: Any, config: ModelConfig) -> None:
    """Raises: ValueError for settings of vLLM that these models would ignore, and for ranks that do not divide the heads."""
    cache = vllm_config.cache_config
    wrong = []
    if vllm_config.quant_config is not None:
        wrong.append(f"quantization = {vllm_config.model_config.quantization}")
    if cache.cache_dtype != "auto" and all(
        layer.mixer.kind != "softmax" for layer in config.layers
    ):
        wrong.append(f"kv_cache_dtype = {cache.cache_dtype}")
    # States are float32, and the convolutions' inputs have the model's type.
    if cache.mamba_cache_dtype != "auto":
        wrong.append(f"mamba_cache_dtype = {cache.mamba_cache_dtype}")
    if cache.mamba_ssm_cache_dtype not in ("auto", "float32"):
        wrong.append(f"mamba_ssm_cache_dtype = {cache.mamba_ssm_cache_dtype}")
    if vllm_config.speculative_config is not None:
        wrong.append("speculative decoding")
    if wrong:
        raise ValueError(f"this model has no {', '.join(wrong)} under vLLM. Leave that out.")

    ranks = vllm_config.parallel_config.tensor_parallel_size
    heads = {config.n_heads}
    for layer in config.layers:
        heads.add(layer.n_kv_heads)
        if layer.mixer.kind in FIXED_STATE:
            heads.add(state_shape(layer.mixer, layer.dim).heads)
    if any(n % ranks for n in heads) or config.ffn_hidden % ranks:
        raise ValueError(
            f"tensor_parallel_size = {ranks} must divide the heads, {sorted(heads)}, and the feed-forward's width, "
            f"{config.ffn_hidden}. Take fewer ranks."
        )


def register_states() -> None:
    """Tell vLLM how to page states of fixed size beside keys and values."""
    from vllm.model_executor.models.config import (
        MODELS_CONFIG_MAP,
        HybridAttentionMambaModelConfig,
        MambaModelConfig,
    )
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

    states, hybrid, _ = ARCHITECTURES
    MODELS_CONFIG_MAP[states], MODELS_CONFIG_MAP[hybrid] = (
        MambaModelConfig,
        HybridAttentionMambaModelConfig,
    )
    register_backend(
        MambaAttentionBackendEnum.CUSTOM, "interdomain.vllm.states.Backend", is_mamba=True
    )
