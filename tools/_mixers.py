"""Mixer cores that are timed side by side: this package's backends, PyTorch's attention, and others' where installed.

Every candidate is a function of the same q, k, v [B, T, H, d] (views of one projection's layout) that returns o
[B, T, H, d]; what else it needs (decays, gates) is at the values that its method starts from, and takes gradients too.
Others' packages are called by their public names and are never required.
"""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from interdomain import scan

from . import _features
from ._problems import Shape, make_inputs

OURS = ("chunkwise", "chunkwise-kept", "linear", "parallel", "chunkwise-torch", "fft", "sequential")
FEATURES = {"features": "triton", "features-torch": "torch"}  # of q, k and v: what stands before the scan
SDPA = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-default": None,  # the one that PyTorch picks by itself
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
PEERS = {  # name: (package, module, function); those with the most kernels to tune come last
    "flash-attn-3": ("flash_attn_interface", "flash_attn_interface", "flash_attn_func"),
    "flash-attn-2": ("flash_attn", "flash_attn", "flash_attn_func"),
    "fla-gated-delta": ("fla", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "fla-simple-gla": ("fla", "fla.ops.simple_gla", "chunk_simple_gla"),
    "mamba2": ("mamba_ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"),
    "fla-gla": ("fla", "fla.ops.gla", "chunk_gla"),
}
ATTENTION = (*SDPA, "flash-attn-3", "flash-attn-2")
TUNED = tuple(name for name in PEERS if name not in ATTENTION)  # by themselves, when first called: minutes
SLOW = OURS[4:]  # on a GPU only if named
# In the order in which they run: those that a short time limit should not lose come first.
NAMES = (
    *("chunkwise", "sdpa-cudnn", "chunkwise-kept", "sdpa-flash", "linear", "sdpa-default"),
    *("sdpa-efficient", *FEATURES, *PEERS, *SLOW),
)
ON_CPU = ("chunkwise", "linear", "parallel", "fft", "chunkwise-torch", "sdpa-flash", "features-torch")


class Problem(NamedTuple):
    shape: Shape
    inputs: dict[str, Tensor]  # of interdomain_scan
    d_out: Tensor


def make_problem(shape: Shape, device: torch.device) -> Problem:
    inputs, (d_out, _) = make_inputs(shape, torch.bfloat16, device)
    return Problem(shape, inputs, d_out)


def candidate(name: str, p: Problem) -> tuple[Callable, list[Tensor], Tensor | list[Tensor]]:
    """(forward() -> o, the leaves whose gradients the backward takes, d_out)."""
    if name in FEATURES:
        made = {x: _features.make(x, p.shape, torch.bfloat16, p.d_out.device) for x in ("query", "key", "value")}
        leaves = [x for given, _, _ in made.values() for x in given.values()]
        how = p.shape.d, FEATURES[name]
        forward = lambda: [_features.run(x, given, rope, *how) for x, (given, rope, _) in made.items()]  # noqa: E731
        return forward, leaves, [d_out for _, _, d_out in made.values()]
    q, k, v = (p.inputs[x] for x in ("q", "k", "v"))
    if name == "linear":  # the core of the s4d conditions: 2d channels in, 2d out
        inputs, (d_out, _) = make_inputs(p.shape, torch.bfloat16, p.d_out.device, linear=True)
        how = dict(final_state=False, backend="chunkwise")
        return lambda: scan.linear_scan(**inputs, **how)[0], list(inputs.values()), d_out
    if name in OURS:
        how = dict(backend=name.removesuffix("-kept"), recompute=name != "chunkwise-kept")
        return lambda: scan.interdomain_scan(**p.inputs, final_state=False, **how)[0], list(p.inputs.values()), p.d_out
    if name in SDPA:
        return lambda: _sdpa(q, k, v, SDPA[name]), [q, k, v], p.d_out
    if name == "mamba2":  # without what its __init__ imports: that wants its CUDA extension, its Triton kernels do not
        sys.modules.setdefault("mamba_ssm", importlib.util.module_from_spec(importlib.util.find_spec("mamba_ssm")))
    run = getattr(importlib.import_module(PEERS[name][1]), PEERS[name][2])
    if name in ATTENTION:
        return lambda: _first(run(q, k, v, causal=True)), [q, k, v], p.d_out
    given = _state_space(p) if name == "mamba2" else _gated(name, p)
    leaves = [x for x in given.values() if isinstance(x, Tensor)]
    return lambda: _first(run(**given)), leaves, p.d_out


def _first(out: Tensor | tuple) -> Tensor:
    """Early versions of FlashAttention 3 return the logsumexp, too; fla's kernels the state."""
    return out[0] if isinstance(out, tuple) else out


def _sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None) -> Tensor:
    with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _gated(name: str, p: Problem) -> dict[str, Tensor]:
    """Arguments of fla's kernels: the log of a forget gate near 1, per token and head (fla-gla: and channel), fp32."""
    s, given = p.shape, {x: p.inputs[x] for x in ("q", "k", "v")}
    make = torch.Generator(p.d_out.device).manual_seed(1)
    size = (s.B, s.T, s.H, *([s.d] if name == "fla-gla" else []))
    gate = F.logsigmoid(torch.randn(size, generator=make, device=p.d_out.device) + 4)
    given["g"] = gate.requires_grad_()
    if name == "fla-gated-delta":  # the rule needs unit keys
        given["k"] = F.normalize(given["k"].detach().float(), dim=-1).to(torch.bfloat16).requires_grad_()
        given["beta"] = torch.rand(gate.shape, device=gate.device).to(torch.bfloat16).requires_grad_()
    return given


def _state_space(p: Problem) -> dict:
    """Arguments of Mamba-2's duality, on the values: one group of B and C, state size M."""
    s, v = p.shape, p.inputs["v"]
    make = torch.Generator(v.device).manual_seed(1)
    dt = 0.1 * torch.rand(s.B, s.T, s.H, generator=make, device=v.device)
    B, C = (torch.randn(s.B, s.T, 1, s.M, generator=make, device=v.device).to(v.dtype) for _ in range(2))
    given = {"dt": dt, "A": -torch.ones(s.H, device=v.device), "B": B, "C": C}
    return {"x": v, **{name: x.requires_grad_() for name, x in given.items()}, "chunk_size": 256}


def absent(name: str) -> str | None:
    """The package that a candidate needs and that is not installed."""
    package = PEERS[name][0] if name in PEERS else None
    return package if package and importlib.util.find_spec(package) is None else None
