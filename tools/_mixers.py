"""Mixer cores that are timed side by side: this package's backends, PyTorch's attention, and others' where installed.

Every candidate is a function of the same q, k, v [B, T, H, d] (views of one projection's layout) that returns o
[B, T, H, d]; what else it needs (decays, gates) is at the values that its method starts from, and takes gradients too.
Others' packages are called by their public names and are never required.
"""

import contextlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from interdomain import scan

from ._problems import Shape, make_inputs


class Candidate(NamedTuple):
    """forward() -> o, and the leaves whose gradients the backward takes."""

    forward: Callable[[], Tensor]
    leaves: list[Tensor]
    d_out: Tensor


class Problem(NamedTuple):
    shape: Shape
    inputs: dict[str, Tensor]  # of interdomain_scan
    d_out: Tensor

    @property
    def qkv(self) -> list[Tensor]:
        return [self.inputs[name] for name in ("q", "k", "v")]


def make_problem(shape: Shape, device: torch.device) -> Problem:
    inputs, (d_out, _) = make_inputs(shape, torch.bfloat16, device)
    return Problem(shape, inputs, d_out)


def ours(backend: str, recompute: bool = True) -> Callable[[Problem], Candidate]:
    def build(p: Problem) -> Candidate:
        def forward():
            return scan.interdomain_scan(**p.inputs, final_state=False, backend=backend, recompute=recompute)[0]

        return Candidate(forward, list(p.inputs.values()), p.d_out)

    return build


def linear_readout(p: Problem) -> Candidate:
    """The core of the s4d conditions: 2d channels in, 2d out."""
    inputs, (d_out, _) = make_inputs(p.shape, torch.bfloat16, p.d_out.device, linear=True)

    def forward():
        return scan.linear_scan(**inputs, final_state=False, backend="chunkwise")[0]

    return Candidate(forward, list(inputs.values()), d_out)


def sdpa(backend: SDPBackend | None) -> Callable[[Problem], Candidate]:
    """PyTorch's attention, one backend forced; None: the one that PyTorch picks by itself."""

    def build(p: Problem) -> Candidate:
        def forward():
            q, k, v = (x.transpose(1, 2) for x in p.qkv)
            with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
                return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

        return Candidate(forward, p.qkv, p.d_out)

    return build


def flash_attention(module: str) -> Callable[[Problem], Candidate]:
    """The package of FlashAttention 2 (`flash_attn`) or 3 (`flash_attn_interface`), not PyTorch's copy of it."""

    def build(p: Problem) -> Candidate:
        run = importlib.import_module(module).flash_attn_func
        q, k, v = p.qkv

        def forward():
            out = run(q, k, v, causal=True)
            return out[0] if isinstance(out, tuple) else out  # early versions of 3: (out, logsumexp)

        return Candidate(forward, p.qkv, p.d_out)

    return build


def fla_gla(p: Problem) -> Candidate:
    from fla.ops.gla import chunk_gla

    q, k, v = p.qkv
    g = _gate(p, p.shape.d)
    return Candidate(lambda: chunk_gla(q=q, k=k, v=v, g=g)[0], [q, k, v, g], p.d_out)


def fla_simple_gla(p: Problem) -> Candidate:
    from fla.ops.simple_gla import chunk_simple_gla

    q, k, v = p.qkv
    g = _gate(p)
    return Candidate(lambda: chunk_simple_gla(q=q, k=k, v=v, g=g)[0], [q, k, v, g], p.d_out)


def fla_gated_delta(p: Problem) -> Candidate:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, _, v = p.qkv
    k = F.normalize(p.inputs["k"].detach().float(), dim=-1).to(v.dtype).requires_grad_()  # the rule needs unit keys
    g = _gate(p)
    beta = torch.rand(g.shape, device=g.device).to(v.dtype).requires_grad_()
    return Candidate(lambda: chunk_gated_delta_rule(q=q, k=k, v=v, g=g, beta=beta)[0], [q, k, v, g, beta], p.d_out)


def mamba2(p: Problem) -> Candidate:
    """State-space duality with one group of B and C, state size M, on the values."""
    _bare("mamba_ssm")
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    s, v = p.shape, p.inputs["v"]
    make = torch.Generator(v.device).manual_seed(1)
    dt = 0.1 * torch.rand(s.B, s.T, s.H, generator=make, device=v.device)
    A = -torch.ones(s.H, device=v.device)
    B, C = (torch.randn(s.B, s.T, 1, s.M, generator=make, device=v.device).to(v.dtype) for _ in range(2))
    leaves = [v, *(x.requires_grad_() for x in (dt, A, B, C))]
    return Candidate(lambda: mamba_chunk_scan_combined(v, dt, A, B, C, chunk_size=256), leaves, p.d_out)


def _bare(package: str) -> None:
    """`package` without what its __init__ imports: mamba_ssm's wants its CUDA extension, its Triton kernels do not."""
    if package not in sys.modules:
        sys.modules[package] = importlib.util.module_from_spec(importlib.util.find_spec(package))


def _gate(p: Problem, *width: int) -> Tensor:
    """Log of a forget gate near 1, per token and head (and channel), fp32."""
    s, device = p.shape, p.d_out.device
    make = torch.Generator(device).manual_seed(1)
    return (F.logsigmoid(torch.randn(s.B, s.T, s.H, *width, generator=make, device=device) + 4)).requires_grad_()


OURS = {
    "chunkwise": ours("chunkwise"),
    "chunkwise-kept": ours("chunkwise", recompute=False),
    "linear": linear_readout,
    "parallel": ours("parallel"),
    "sequential": ours("sequential"),
    "chunkwise-torch": ours("chunkwise-torch"),
    "fft": ours("fft"),
}
SDPA = {
    "sdpa-cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "sdpa-flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa-default": sdpa(None),
    "sdpa-efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION),
}
PEERS = {  # name: (package, its distributions, builder); those with the most kernels to tune come last
    "flash-attn-3": ("flash_attn_interface", ("flash-attn-3",), flash_attention("flash_attn_interface")),
    "flash-attn-2": ("flash_attn", ("flash-attn",), flash_attention("flash_attn")),
    "fla-gated-delta": ("fla", ("flash-linear-attention", "fla-core"), fla_gated_delta),
    "fla-simple-gla": ("fla", ("flash-linear-attention", "fla-core"), fla_simple_gla),
    "mamba2": ("mamba_ssm", ("mamba-ssm",), mamba2),
    "fla-gla": ("fla", ("flash-linear-attention", "fla-core"), fla_gla),
}
ATTENTION = (*SDPA, "flash-attn-3", "flash-attn-2")
TUNED = tuple(name for name in PEERS if name not in ATTENTION)  # by themselves, when first called: minutes
# In the order in which they run: those that a short time limit should not lose come first.
NAMES = (
    *("chunkwise", "sdpa-cudnn", "chunkwise-kept", "sdpa-flash", "linear", "sdpa-default"),
    *("sdpa-efficient", *PEERS),
)
SLOW = ("parallel", "chunkwise-torch", "fft", "sequential")  # on a GPU by name only
NAMES += SLOW
ON_CPU = ("chunkwise", "linear", "parallel", "fft", "chunkwise-torch", "sdpa-flash")


def made_by(name: str) -> str | None:
    """The package that computes it, with its version; None for this one."""
    if name in OURS:
        return None
    if name == "sdpa-cudnn":
        version = torch.backends.cudnn.version() or 0
        return f"cuDNN {version // 10_000}.{version // 100 % 100}.{version % 100}"
    if name in SDPA:
        return f"PyTorch {torch.__version__}"
    package, distributions, _ = PEERS[name]
    for distribution in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{distribution} {importlib.metadata.version(distribution)}"
    return package


def absent(name: str) -> str | None:
    """The package that a candidate needs and that is not installed."""
    package = PEERS[name][0] if name in PEERS else None
    return package if package and importlib.util.find_spec(package) is None else None


def candidate(name: str, p: Problem) -> Candidate:
    return PEERS[name][2](p) if name in PEERS else {**OURS, **SDPA}[name](p)
