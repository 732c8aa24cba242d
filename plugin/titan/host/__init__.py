"""TorchTitan as the rest of the plugin uses it. All names that are bound to its version stand in one module of this package.

Every other module says `from .host import X`. Another version of TorchTitan needs a module of its own here.
"""

import torchtitan

VERSION = "0.2.2"

if torchtitan.__version__ != VERSION:
    raise ValueError(
        f"TorchTitan {torchtitan.__version__} is installed, and this plugin works with TorchTitan {VERSION} only: it overrides "
        f"methods that other versions name differently. Install it: pip install torchtitan=={VERSION}."
    )

from .titan_0_2 import *  # noqa: E402, F403
