"""The model in vLLM (docs/serving.md).

If the package is installed, `vllm serve exports/debug` finds it: vLLM calls `register` in each of
its processes, through the entry point `vllm.general_plugins`.
"""

from importlib import import_module
from typing import Any

SUPPORTED = ("0", "32")  # the version of vLLM


def register() -> None:
    """Makes the architectures of exported models known to vLLM.

    vLLM reads the classes, through `__getattr__`, when it loads a model.
    """
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from .config import ARCHITECTURES, ServedConfig, register_states

    AutoConfig.register(ServedConfig.model_type, ServedConfig, exist_ok=True)
    for architecture, name in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, f"interdomain.vllm:{name}")
    if _is_supported():
        register_states()


def _is_supported() -> bool:
    """Returns True if vLLM's version is SUPPORTED. Raises an ImportError without vLLM."""
    try:
        from vllm import __version__ as version
    except ImportError as e:
        raise ImportError(
            "interdomain.vllm needs vLLM, the extra `vllm`: pip install 'interdomain[vllm]'."
        ) from e
    return tuple(version.split(".")[:2]) == SUPPORTED


def __getattr__(name: str) -> Any:
    """Imports the class of a served model when vLLM reads it.

    Args:
        name: One of the classes in `config.ARCHITECTURES`.
    Raises:
        ImportError: vLLM is not installed, or its version is not SUPPORTED.
    """
    if not name.startswith("Interdomain"):
        raise AttributeError(name)
    if not _is_supported():
        import vllm

        raise ImportError(
            f"interdomain.vllm runs with vLLM 0.32, and this is {vllm.__version__}. Install vLLM "
            "0.32."
        )
    return getattr(import_module("interdomain.vllm.model"), name)
