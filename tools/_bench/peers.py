"""Others' kernels as `bench_kernels` times them beside ours, where their packages are installed; called by their public names.

Each is given the q, k, v [B, T, H, d] that ours is given. What else it needs (gates, steps) is drawn at the values that its
method starts from, and gets gradients too. None of them has been run on a GPU yet.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

PEERS = {  # name: (package, module, function); those with the most kernels to tune come last
    "flash-attn-3": ("flash_attn_interface", "flash_attn_interface", "flash_attn_func"),
    "flash-attn-2": ("flash_attn", "flash_attn", "flash_attn_func"),
    "fla-gated-delta": ("fla", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "fla-simple-gla": ("fla", "fla.ops.simple_gla", "chunk_simple_gla"),
    "mamba2": ("mamba_ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"),
    "fla-gla": ("fla", "fla.ops.gla", "chunk_gla"),
}


# flash-linear-attention refuses its gated backward on Hopper with Triton 3.4 to 3.7.0, whose results it found to be wrong.
FLA_GUARD = "fla.ops.common.chunk_o", "TRITON_ABOVE_3_7_1"
WRONG_RESULTS = "time only: with this version of Triton its gradients are wrong on Hopper"
UNTUNED = "one configuration per kernel, not tuned"


def time_refused_kernels(name: str, device: torch.device) -> str | None:
    """Let flash-linear-attention run kernels that it refuses on this GPU.

    Returns:
        The remark that their times need; None if it refuses none.
    """
    if name not in ("fla-gated-delta", "fla-simple-gla") or device.type != "cuda":
        return None
    module = importlib.import_module(FLA_GUARD[0])
    refused = (
        module.IS_NVIDIA_HOPPER and module.TRITON_ABOVE_3_4_0 and not module.TRITON_ABOVE_3_7_1
    )
    if not refused:
        return None
    setattr(module, FLA_GUARD[1], True)
    return WRONG_RESULTS


def leave_untuned(package: str) -> None:
    """Leave one configuration to every kernel of a package that tunes itself: tuning 105 to 270 of them takes minutes."""
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


def peer(name: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """(forward, the tensors whose gradients its backward takes). Raises: ImportError if the package is not installed."""
    package, module, function = PEERS[name]
    if (spec := importlib.util.find_spec(package)) is None:
        raise ImportError(f"{package} is not installed")
    if (
        name == "mamba2"
    ):  # without what its __init__ imports: that wants its CUDA extension, its Triton kernels do not
        sys.modules.setdefault("mamba_ssm", importlib.util.module_from_spec(spec))
    run = getattr(importlib.import_module(module), function)
    arguments = _arguments(name, q, k, v)

    def forward() -> Tensor:
        out = run(**arguments)
        # Early versions of FlashAttention 3 return the logsumexp, too; fla's kernels the state.
        return out[0] if isinstance(out, tuple) else out

    return forward, [x for x in arguments.values() if isinstance(x, Tensor)]


def _arguments(name: str, q: Tensor, k: Tensor, v: Tensor) -> dict:
    (B, T, H, d), device = q.shape, q.device
    if name.startswith("flash-attn"):
        return dict(q=q, k=k, v=v, causal=True)
    if (
        name == "mamba2"
    ):  # the state space duality on the values: one group of B and C, a state of d
        dt = 0.1 * torch.rand(B, T, H, device=device)
        inputs, outputs = torch.randn(2, B, T, 1, d, device=device, dtype=v.dtype)
        made = dict(dt=dt, A=-torch.ones(H, device=device), B=inputs, C=outputs)
        return dict(x=v, chunk_size=256, **{name: x.requires_grad_() for name, x in made.items()})
    # The log of a forget gate near 1, per token and head (fla-gla: and channel), fp32.
    gate = F.logsigmoid(
        torch.randn(B, T, H, *([d] if name == "fla-gla" else []), device=device) + 4
    ).requires_grad_()
    if name != "fla-gated-delta":
        return dict(q=q, k=k, v=v, g=gate)
    unit = (
        F.normalize(k.detach().float(), dim=-1).to(k.dtype).requires_grad_()
    )  # the rule needs unit keys
    beta = torch.rand(B, T, H, device=device).to(k.dtype).requires_grad_()
    return dict(q=q, k=unit, v=v, g=gate, beta=beta)
