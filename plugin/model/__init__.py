"""The model in plain PyTorch.

Configurations and their tables (`config`); the mixers (`mixer`, `softmax`, and `fixed_state` around `recurrence`) and what each
answers for (`interface`); the decoder (`transformer`), states, generation, initial values, FLOPs. On disk: standalone folders
(`pretrained`), training's checkpoints (`distributed_checkpoint`). May import interdomain.scan, features, data and folders; no
TorchTitan.
"""

# ruff: noqa: F401
from .config import CONDITIONS, SIZES, Cell, Execution, MixerConfig, ModelConfig, build_config, cell_of
from .layer import InterdomainAttention
from .state import KVCache, MixerState, ModelState
from .transformer import Transformer, count_parameters, meta_model
