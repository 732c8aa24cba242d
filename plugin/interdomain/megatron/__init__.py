"""The model under Megatron-Core: its token mixer as the self-attention of Megatron's layers (docs/megatron.md).

layer_spec, block_spec     for GPTModel's transformer_layer_spec; `--spec interdomain.megatron.spec interdomain`
transformer_config         Megatron's settings for a ModelConfig
overrides                  the parameter group of the dynamics, for get_megatron_optimizer
Schedule                   the paper's learning rates, in the place of OptimizerParamScheduler
DynamicsOnce               for finalize_model_grads_func: dynamics computed once a step
contiguous                 a context-parallel rank's piece of a batch
"""

SUPPORTED = (0, 16), (0, 20)  # from the first to before the second

try:
    from megatron.core import __version__ as version
except ImportError as e:
    raise ImportError(
        f"interdomain.megatron needs megatron-core, the extra `megatron`: pip install 'interdomain[megatron]' ({e})."
    ) from e
if not SUPPORTED[0] <= tuple(int(part) for part in version.split(".")[:2]) < SUPPORTED[1]:
    raise ImportError(
        f"interdomain.megatron runs with megatron-core 0.16 to 0.19; found {version}. Install one of these."
    )

from .context import contiguous  # noqa: E402 (after the check, which explains what an import would not)
from .dynamics import DynamicsOnce  # noqa: E402
from .optimizer import Schedule, overrides  # noqa: E402
from .spec import block_spec, layer_spec, transformer_config  # noqa: E402

__all__ = ["DynamicsOnce", "Schedule", "block_spec", "contiguous", "layer_spec", "overrides", "transformer_config"]
