"""The model in plain PyTorch.

    config                     configurations; the tables of sizes and conditions
    mixer, softmax             the mixers, with `fixed_state` and `recurrence` for gla, mamba2, deltanet and gated-deltanet
    interface                  what every mixer provides
    transformer                the decoder; `state`, `generation`, `initialize`, `flops` belong to it
    pretrained                 standalone folders on the disk
    distributed_checkpoint     checkpoints of training on the disk

Imports interdomain.scan, features, data and folders; never TorchTitan.
"""

# ruff: noqa: F401
from .config import CONDITIONS, SIZES, Cell, Execution, MixerConfig, ModelConfig, build_config, cell_of
from .layer import InterdomainAttention
from .state import KVCache, MixerState, ModelState
from .transformer import Transformer, count_parameters, meta_model
