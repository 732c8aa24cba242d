"""The model in plain PyTorch.

    config          configurations; the tables of sizes and conditions
    settings        the settings of a mixer, and their check
    transformer     the decoder; `layers`, `loss`, `initialize`, `state` and `shard` belong to it
    generation      text from a model
    mixers          the token mixers; `base` declares what every mixer provides
    flops           FLOPs per token, and the size of a state

It imports interdomain.scan and interdomain.features, and never TorchTitan.
"""

# ruff: noqa: F401
from .config import (
    CONDITIONS,
    SIZES,
    Cell,
    Execution,
    MixerConfig,
    ModelConfig,
    build_config,
    cell_of,
)
from .feature_maps import float32_modules
from .mixers.layer import InterdomainAttention
from .state import KVCache, MixerState, ModelState
from .transformer import Transformer, count_parameters, meta_model
