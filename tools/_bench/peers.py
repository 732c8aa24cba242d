"""Calls other packages' mixers, which `bench_kernels` times beside ours if they are installed.

They are called by their public names.

Each is given the q, k, v [B, T, H, d] that ours is given. What else it needs (gates, rates) is
drawn at the values that its method starts from, and gets gradients too. None of the kernels has
been run on a GPU yet.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# The package, module and function of each. Those with the most kernels to tune come last.
KERNELS = {
    "flash-attn-3": ("flash_attn_interface", "flash_attn_interface", "flash_attn_func"),
    "flash-attn-2": ("flash_attn", "flash_attn", "flash_attn_func"),
    "fla-gated-delta": ("fla", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "fla-simple-gla": ("fla", "fla.ops.simple_gla", "chunk_simple_gla"),
    "mamba2": ("mamba_ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"),
    "fla-gla": ("fla", "fla.ops.gla", "chunk_gla"),
}
# The same for those in plain PyTorch, which run on a CPU too.
IN_PYTORCH = {
    "transformers-gated-delta": (
        "transformers",
        "transformers.models.qwen3_next.modeling_qwen3_next",
        "torch_chunk_gated_delta_rule",
    ),
    "transformers-mamba2": (
        "transformers",
        "transformers.models.mamba2.modeling_mamba2",
        "mamba2_chunk_scan",
    ),
}
PEERS = KERNELS | IN_PYTORCH

# flash-linear-attention refuses the gated backward of these on Hopper with Triton 3.4 to 3.7.0,
# whose results it found to be wrong. A variable of one of its modules switches this off.
REFUSED = ("fla-gated-delta", "fla-simple-gla")
FLA_GUARD = ("fla.ops.common.chunk_o", "TRITON_ABOVE_3_7_1")
WRONG_RESULTS = "time only: with this version of Triton its gradients are wrong on Hopper"
UNTUNED = "one configuration per kernel, not tuned"


def time_refused_kernels(name: str, device: torch.device) -> list[str]:
    """Lets flash-linear-attention run kernels that it refuses on this GPU.

    Args:
        name: One of PEERS.
        device: The device that is measured.

    Returns:
        The remarks that their times need.
    """
    if name not in REFUSED or device.type != "cuda":
        return []
    module_name, switch = FLA_GUARD
    module = importlib.import_module(module_name)
    affected = module.IS_NVIDIA_HOPPER and module.TRITON_ABOVE_3_4_0
    if not affected or getattr(module, switch):
        return []
    setattr(module, switch, True)
    return [WRONG_RESULTS]


def leave_untuned(package: str) -> None:
    """Leaves one configuration to every kernel of a package that tunes itself.

    Tuning takes minutes: a kernel has 105 to 270 configurations.

    Args:
        package: The name of the package, which is imported already.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import KernelInterface

    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != package:
            continue
        for value in vars(module).values():
            # The decorators of a kernel lie around each other, in any order.
            while isinstance(value, KernelInterface):
                if isinstance(value, Autotuner):
                    del value.configs[1:]
                value = getattr(value, "fn", None)


def peer(name: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable, dict[str, Any]]:
    """Returns the function of a peer, and its arguments. All tensors among them are leaves.

    Args:
        name: One of PEERS.
        q: Queries, [B, T, H, d].
        k: Keys, [B, T, H, d].
        v: Values, [B, T, H, d].

    Raises:
        ImportError: The package is not installed.
    """
    package, module, function = PEERS[name]
    # This finds the package without importing it.
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ImportError(f"{package} is not installed")
    if name == "mamba2":
        # Its __init__ imports a CUDA extension that the Triton kernels do not need: leave it out.
        sys.modules.setdefault(package, importlib.util.module_from_spec(spec))
    return getattr(importlib.import_module(module), function), _arguments(name, q, k, v)


def _arguments(name: str, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """Returns the arguments of a peer's function for q, k and v, each [B, T, H, d]."""
    if name.startswith("flash-attn"):
        return {"q": q, "k": k, "v": v, "causal": True}
    if name in ("mamba2", "transformers-mamba2"):
        # State space duality on the values: a state of d numbers per channel, one group of B and C.
        step_size = 0.1 * torch.rand(v.shape[:3], device=v.device)
        decay = -torch.ones(v.shape[2], device=v.device)
        one_group = (*v.shape[:2], 1, v.shape[3])
        inputs = torch.randn(one_group, device=v.device, dtype=v.dtype)
        outputs = torch.randn(one_group, device=v.device, dtype=v.dtype)
        leaves = {"dt": step_size, "A": decay, "B": inputs, "C": outputs}
        for leaf in leaves.values():
            leaf.requires_grad_()
        values = "x" if name == "mamba2" else "hidden_states"
        return {values: v, "chunk_size": 256, **leaves}
    # The log of a forget gate near 1, per token and head (in fla-gla per channel, too), fp32.
    gate_shape = k.shape if name == "fla-gla" else k.shape[:3]
    gate = F.logsigmoid(torch.randn(gate_shape, device=k.device) + 4).requires_grad_()
    if not name.endswith("gated-delta"):
        return {"q": q, "k": k, "v": v, "g": gate}
    # The delta rule needs unit keys, and a learning rate per token and head.
    unit_keys = F.normalize(k.detach().float(), dim=-1).to(k.dtype).requires_grad_()
    beta = torch.rand(k.shape[:3], device=k.device).to(k.dtype).requires_grad_()
    if name == "transformers-gated-delta":
        return {"query": q, "key": unit_keys, "value": v, "g": gate, "beta": beta}
    return {"q": q, "k": unit_keys, "v": v, "g": gate, "beta": beta}
