"""Mixer cores that are timed side by side: this package's backends, PyTorch's attention, and others' where installed.

Every candidate is a function of the same q, k, v [B, T, H, d] (views of one projection's layout) that returns o
[B, T, H, d]; what else it needs (decays, gates) is at the values that its method starts from, and takes gradients too.
Others' packages are called by their public names and are never required.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from interdomain import scan

from ._problems import Shape, make_features, make_inputs, run_features

CHUNKWISE = ("chunkwise", "chunkwise-kept")
OURS = (*CHUNKWISE, "linear", "parallel", "chunkwise-torch", "fft")
SLOW = OURS[3:]  # on a GPU only if named
FEATURES = {"features": "triton", "features-torch": "torch"}  # of q, k and v: what stands before the scan
SDPA = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-default": None,  # the one that PyTorch picks by itself
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
PEERS = {  # name: (package, module, function); those that tune the most variants when first called come last
    "flash-attn-3": ("flash_attn_interface", "flash_attn_interface", "flash_attn_func"),
    "flash-attn-2": ("flash_attn", "flash_attn", "flash_attn_func"),
    "fla-gated-delta": ("fla", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "fla-gla": ("fla", "fla.ops.gla", "chunk_gla"),
}
ATTENTION = (*SDPA, "flash-attn-3", "flash-attn-2")
# In the order in which they run: those that a short time limit should not lose come first.
NAMES = (
    *("chunkwise", "sdpa-cudnn", "chunkwise-kept", "sdpa-flash", "linear", "sdpa-default"),
    *("sdpa-efficient", *FEATURES, *PEERS, *SLOW),
)
ON_CPU = ("chunkwise", "linear", "parallel", "fft", "sdpa-flash", "features-torch")
CHUNK = 64  # tokens


def candidate(name: str, shape: Shape, device: torch.device) -> tuple[Callable, list[Tensor], Tensor | list[Tensor]]:
    """(forward() -> o, the leaves whose gradients the backward takes, d_out)."""
    if name in FEATURES:
        made = {x: make_features(x, shape, torch.bfloat16, device) for x in ("query", "key", "value")}
        leaves = [x for given, _, _ in made.values() for x in given.values()]
        how = shape.d, FEATURES[name]
        forward = lambda: [run_features(x, given, rope, *how) for x, (given, rope, _) in made.items()]  # noqa: E731
        return forward, leaves, [d_out for _, _, d_out in made.values()]
    inputs, (d_out, _) = make_inputs(shape, torch.bfloat16, device, linear=name == "linear")
    how = dict(final_state=False, backend="chunkwise")
    if name == "linear":  # the core of the s4d conditions: 2d channels in, 2d out
        return lambda: scan.linear_scan(**inputs, **how)[0], list(inputs.values()), d_out
    if name in OURS:
        how |= dict(backend=name.removesuffix("-kept"), recompute=name != "chunkwise-kept")
        return lambda: scan.interdomain_scan(**inputs, **how)[0], list(inputs.values()), d_out
    qkv = [inputs[x] for x in ("q", "k", "v")]
    if name in SDPA:
        return lambda: _sdpa(*qkv, SDPA[name]), qkv, d_out
    run = getattr(importlib.import_module(PEERS[name][1]), PEERS[name][2])
    if name in ATTENTION:
        return lambda: _first(run(*qkv, causal=True)), qkv, d_out
    given = _gated(name, *qkv)
    return lambda: _first(run(**given)), list(given.values()), d_out


def _first(out: Tensor | tuple) -> Tensor:
    """Early versions of FlashAttention 3 return the logsumexp, too; fla's kernels the state."""
    return out[0] if isinstance(out, tuple) else out


def _sdpa(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None) -> Tensor:
    with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _gated(name: str, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Arguments of fla's kernels: the log of a forget gate near 1, per token and head (fla-gla: and channel), fp32."""
    make = torch.Generator(q.device).manual_seed(1)
    size = q.shape if name == "fla-gla" else q.shape[:3]
    gate = F.logsigmoid(torch.randn(size, generator=make, device=q.device) + 4).requires_grad_()
    if name == "fla-gla":
        return {"q": q, "k": k, "v": v, "g": gate}
    k = F.normalize(k.detach().float(), dim=-1).to(q.dtype).requires_grad_()  # the delta rule needs unit keys
    beta = torch.rand(size, device=q.device).to(q.dtype).requires_grad_()
    return {"q": q, "k": k, "v": v, "g": gate, "beta": beta}


def absent(name: str) -> str | None:
    """The package that a candidate needs and that is not installed."""
    package = PEERS[name][0] if name in PEERS else None
    return package if package and importlib.util.find_spec(package) is None else None


def costs(name: str, s: Shape) -> tuple[int, int]:
    """(bytes, FLOPs) of forward and backward: inputs read and outputs written once, products as MFU counts them.

    In numbers of d channels per token and head: q, k, v in and o out, then q, k, v, do in and dq, dk, dv out. `linear` has z of
    width 2d in place of q, k, v and o, the features three projections. Others' FLOPs are not counted.
    """
    numbers = {"linear": 10, **dict.fromkeys(FEATURES, 15)}.get(name, 11)
    macs = 0
    if name in ATTENTION:  # two products over T (T + 1) / 2 pairs, and five
        macs = 7 * (s.T + 1) * s.d // 2
    if name in CHUNKWISE:  # scores, times the values, state; twice, and a product by W; the backward costs two forwards
        N = 2 * s.M
        macs = 3 * (2 * (CHUNK * s.d + CHUNK * N + 2 * N * s.d) + N * N)
    tokens = s.B * s.T * s.H
    return 2 * tokens * numbers * s.d, 2 * tokens * macs
