"""Interdomain Attention: kernels, model, and distributed pretraining under TorchTitan.

from interdomain import InterdomainAttention

layer = InterdomainAttention(dim=512, n_heads=8)  # a layer of your own model
y = layer(x)                                      # [B, T, 512] -> [B, T, 512]

Packages, none of which imports one that is named after it: scan and features, the kernels, on torch alone; folders, environment
and data, files, machines and corpora; model; hf, for transformers; titan, training, the only one that knows TorchTitan; tools,
command lines.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model import InterdomainAttention

__version__ = "0.1.0"
__all__ = ["InterdomainAttention"]


def __getattr__(name: str) -> object:
    # Late: `import interdomain` takes no second for torch.
    if name in __all__:
        from . import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
