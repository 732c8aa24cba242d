"""The model in vLLM (docs/checkpoints.md).

If the package is installed, `vllm serve exports/debug` finds it: vLLM calls `register` in each of
its processes, through the entry point `vllm.general_plugins`.
"""

from importlib import import_module
from typing import Any

SUPPORTED = "0.32"  # major and minor version of vLLM


def register() -> None:
    """Makes the architectures of exported models known to vLLM.

    vLLM gets the names of the classes here, and reads the classes themselves when it loads a model,
    through this module's `__getattr__`. With a vLLM of another version than SUPPORTED that is where
    a user gets an error, and vLLM still serves other models.
    """
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from .config import ARCHITECTURES, ServedConfig, register_states

    AutoConfig.register(ServedConfig.model_type, ServedConfig, exist_ok=True)
    for architecture, name in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, f"interdomain.vllm:{name}")
    # The paging of states changes from one version of vLLM to the next.
    if _is_supported():
        register_states()


def _is_supported() -> bool:
    """Returns True if the major and minor version of vLLM are SUPPORTED, such as 0.32.

    Raises:
        ImportError: vLLM is not installed.
    """
    try:
        from vllm import __version__ as version
    except ImportError as e:
        raise ImportError(
            "interdomain.vllm needs vLLM, the extra `vllm`: pip install 'interdomain[vllm]'."
        ) from e
    return version.startswith(f"{SUPPORTED}.")


def __getattr__(name: str) -> Any:
    """Imports the class of a served model when vLLM reads it.

    Python calls this for attributes that the module does not have.

    Args:
        name: One of the classes in `config.ARCHITECTURES`.

    Raises:
        AttributeError: The name is another.
        ImportError: vLLM is not installed, or its version is not SUPPORTED.
    """
    # The names of all these classes begin so. Other names need no vLLM to be refused.
    if not name.startswith("Interdomain"):
        raise AttributeError(name)
    if not _is_supported():
        import vllm

        raise ImportError(
            f"interdomain.vllm runs with vLLM {SUPPORTED}, and this is {vllm.__version__}. Install "
            f"vLLM {SUPPORTED}."
        )
    return getattr(import_module("interdomain.vllm.model"), name)
