"""The installed TorchTitan, with the same names for both supported versions.

No other package imports TorchTitan.
"""

# ruff: noqa: F403 (one module has every name)

from typing import TYPE_CHECKING

import torch
import torchtitan

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
