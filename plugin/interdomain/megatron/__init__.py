"""The model under Megatron-Core: its mixers are the self-attention of Megatron's layers.

docs/megatron.md shows its use.

    layer_spec, block_spec    for GPTModel's transformer_layer_spec. Megatron-LM's scripts take
                              them by `--spec interdomain.megatron.spec interdomain`
    transformer_config        Megatron's settings for a ModelConfig
    overrides                 the parameter group of the SSM parameters, for get_megatron_optimizer
    Schedule                  the paper's learning rates, in place of OptimizerParamScheduler
    SSMTensorsOnce            for finalize_model_grads_func: SSM parameters computed once a step
    contiguous                a context-parallel rank's piece of a batch

Megatron is imported when one of these is read, because `checkpoint` reads and writes its files
without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .spec import block_spec, layer_spec, transformer_config
    from .training import Schedule, SSMTensorsOnce, contiguous, overrides

__all__ = [
    "SSMTensorsOnce",
    "Schedule",
    "block_spec",
    "contiguous",
    "layer_spec",
    "overrides",
    "transformer_config",
]
# The versions of megatron-core with which this package runs.
OLDEST = (0, 16)
NEWEST = (0, 19)


def require_megatron() -> None:
    """Checks that megatron-core is installed in a version with which this package runs.

    Raises:
        ImportError: It is not installed, or in another version.
    """
    try:
        from megatron.core import __version__ as version
    except ImportError as e:
        raise ImportError(
            "interdomain.megatron needs megatron-core, the extra `megatron`: pip install "
            f"'interdomain[megatron]' ({e})."
        ) from e
    major, minor = version.split(".")[:2]
    if not OLDEST <= (int(major), int(minor)) <= NEWEST:
        raise ImportError(
            f"interdomain.megatron runs with megatron-core 0.16 to 0.19; found {version}. Install "
            "one of these."
        )


def __getattr__(name: str) -> Any:
    """Imports one of the names above when it is first read."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_megatron()
    module = "spec" if name in ("block_spec", "layer_spec", "transformer_config") else "training"
    return getattr(import_module(f".{module}", __name__), name)
