"""The model in pure PyTorch: configuration, mixers, decoder, and the standalone folder."""

from .config import CONDITIONS, SIZES, Cell, Execution, MixerConfig, ModelConfig, build_config, cell_of
from .layer import InterdomainAttention
from .state import KVCache, MixerState, ModelState
from .transformer import Transformer, count_parameters, meta_model

__all__ = [
    "CONDITIONS",
    "SIZES",
    "Cell",
    "Execution",
    "InterdomainAttention",
    "KVCache",
    "MixerConfig",
    "MixerState",
    "ModelConfig",
    "ModelState",
    "Transformer",
    "build_config",
    "cell_of",
    "count_parameters",
    "meta_model",
]
