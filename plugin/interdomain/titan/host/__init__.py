"""The installed TorchTitan, under one set of names for its two versions. No other package imports TorchTitan."""

# ruff: noqa: F403 (one module has every name)

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

torch_compile = torch.compile


def compile_later(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """torch.compile at the first call. TorchTitan compiles attention of its own at import, which costs a second."""
    compiled = functools.cache(lambda: torch_compile(function, **options))
    return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))


torch.compile = compile_later
try:
    import torchtitan
finally:
    torch.compile = torch_compile

VERSION = torchtitan.__version__

if TYPE_CHECKING or VERSION == "0.2.2":
    from .titan_0_2 import *
elif VERSION == "0.3.0":
    if not hasattr(torch.distributed, "set_timeout"):
        raise ValueError(
            f"TorchTitan 0.3.0 needs PyTorch 2.14 or later, and {torch.__version__} is installed. Install a newer one, or "
            "TorchTitan 0.2.2."
        )
    from .titan_0_3 import *
else:
    raise ValueError(
        f"TorchTitan {VERSION} is installed, and this plugin works with TorchTitan 0.2.2 and 0.3.0: others name differently "
        "what it overrides. Install one of them: pip install torchtitan==0.2.2."
    )
