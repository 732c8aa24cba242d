"""The model in vLLM (docs/serving.md): with the package installed, `vllm serve exports/debug` finds this by itself.

vLLM's entry point `vllm.general_plugins` calls `register` in each of its processes.
"""

from importlib import import_module
from typing import Any

SUPPORTED = (0, 32), (0, 33)  # from the first to before the second


def register() -> None:
    """Make the folders' architectures known to vLLM; `__getattr__` has the classes, when a model is loaded."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from .config import ARCHITECTURES, ServedConfig, register_states

    AutoConfig.register(ServedConfig.model_type, ServedConfig, exist_ok=True)
    for architecture, name in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, f"interdomain.vllm:{name}")
    if _is_supported():
        register_states()


def _is_supported() -> bool:
    try:
        from vllm import __version__ as version
    except ImportError as e:
        raise ImportError(
            "interdomain.vllm needs vLLM, the extra `vllm`: pip install 'interdomain[vllm]'."
        ) from e
    return SUPPORTED[0] <= tuple(int(part) for part in version.split(".")[:2]) < SUPPORTED[1]


def __getattr__(name: str) -> Any:
    """A served model's class. Raises: ImportError without vLLM, and with a version that is not SUPPORTED."""
    if not name.startswith("Interdomain"):
        raise AttributeError(name)
    if not _is_supported():
        import vllm

        raise ImportError(
            f"interdomain.vllm runs with vLLM 0.32, and this is {vllm.__version__}. Install vLLM 0.32."
        )
    return getattr(import_module("interdomain.vllm.model"), name)
