"""The model in vLLM (docs/serving.md): with the package installed, `vllm serve exports/debug` finds this by itself.

vLLM's entry point `vllm.general_plugins` calls `register` in each of its processes.
"""

from vllm import __version__ as version

SUPPORTED = (0, 32), (0, 33)  # from the first to before the second


def register() -> None:
    """Make the folders' architecture known to vLLM. Nothing of a model is imported before one is loaded.

    A version of vLLM that is not SUPPORTED refuses such a folder, with the reason (`interdomain.vllm.model`).
    """
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from .config import ARCHITECTURES, ServedConfig

    AutoConfig.register(ServedConfig.model_type, ServedConfig, exist_ok=True)
    for architecture, name in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, f"interdomain.vllm.model:{name}")
    if SUPPORTED[0] <= tuple(int(part) for part in version.split(".")[:2]) < SUPPORTED[1]:
        from .config import register_states

        register_states()
