"""Interdomain Attention: kernels, model, and distributed pretraining under TorchTitan.

from interdomain import InterdomainAttention

layer = InterdomainAttention(dim=512, n_heads=8)  # a layer of your own model
y = layer(x)                                      # [B, T, 512] -> [B, T, 512]

The packages, each of which imports only packages above it:

    scan, features             the kernels, on torch and triton only
    folders, environment       safe writing of files; the description of a machine
    launcher                   messages between a run and the launcher that started it
    data                       corpora, tokenizers, samples
    model                      the model in plain PyTorch: decoder, mixers, costs, generation
    files                      exported models and checkpoints
    hf                         the model in transformers
    titan                      training; the only package that imports TorchTitan
    megatron                   the model under Megatron-Core
    vllm                       the model in vLLM
    tools                      the commands
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interdomain.model import InterdomainAttention

__version__ = "0.2.0"
__all__ = ["InterdomainAttention"]


def __getattr__(name: str) -> object:
    # The import is here, so that `import interdomain` does not take a second for torch.
    if name in __all__:
        from interdomain import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
