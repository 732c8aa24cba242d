"""Facts that vLLM asks for before a model exists: its kind, and the shape of a request's state."""

import torch
from transformers import PretrainedConfig

from interdomain.files.pretrained import from_transformers
from interdomain.hf import InterdomainConfig
from interdomain.model.config import ModelConfig
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
        states = [kind == "linear_attention" for kind in self.layer_types]
        all_, hybrid, softmax = ARCHITECTURES
        self.architectures = [all_ if all(states) else hybrid if any(states) else softmax]


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


def register_states() -> None:
    """Tell vLLM how to page states of fixed size beside keys and values."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, HybridAttentionMambaModelConfig, MambaModelConfig
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

    states, hybrid, _ = ARCHITECTURES
    MODELS_CONFIG_MAP[states], MODELS_CONFIG_MAP[hybrid] = MambaModelConfig, HybridAttentionMambaModelConfig
    register_backend(MambaAttentionBackendEnum.CUSTOM, "interdomain.vllm.states.Backend", is_mamba=True)
