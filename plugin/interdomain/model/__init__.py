"""The model in plain PyTorch.

    config          configurations; the tables of sizes and conditions
    transformer     the decoder; `layers`, `loss`, `initialize`, `state`, `generation` and `shard` belong to it
    mixers          the token mixers, with `base` for what every mixer provides
    flops           FLOPs per token, and the size of a state

Imports interdomain.scan and features; never TorchTitan.
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
