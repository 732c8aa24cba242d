"""Seeded problems, and the literal reference: the paper's equations token by token in float64, no helper shared with the code.

Shapes: B batch, T time, H heads, R head_dim, E = H R channels, W convolution width.
"""

import math
from dataclasses import dataclass

import torch

from interdomain.features import input_features

from ..scan.common import error

EPS = 1e-5
# Relative RMS. fp32: arithmetic throughout. bf16: rounded once at the end (1.7e-3 RMS), gradients too.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 6e-3}


@dataclass(frozen=True)
class Case:
    T: int
    B: int = 2
    H: int = 3
    R: int = 8
    W: int = 4  # 0: no convolution
    rope: str = "shared"  # over the batch; "rows": angles of each row's own; "": none
    silu: bool = False
    norm: bool = False
    past: bool = False
    documents: bool = False  # two starts in every row: one in the middle, and one right after it
    strided: bool = False  # x and the cotangent are slices of wider tensors


# What the mixers ask for.
MIXES = {
    "q": dict(silu=True),
    "k": dict(silu=True, norm=True),
    "v": dict(W=0, rope="", norm=True),
    "a": dict(norm=True),
    "b": dict(rope="", norm=True),
    "q-norope": dict(rope="", silu=True),
    "k-norope": dict(rope="", silu=True, norm=True),
    "rff": dict(),
    "rff-norope": dict(rope=""),
    "softmax": dict(W=0),
}


def make(case, dtype=torch.float64, parameters=None, device="cpu"):
    """(leaves by name, (cos, sin) or None, cotangent); activations of dtype, parameters of another if given."""
    g = torch.Generator().manual_seed(case.T)
    B, T, H, R, W = case.B, case.T, case.H, case.R, case.W
    parameters = parameters or dtype

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).to(device)

    E = H * R
    leaves = {"x": normal(B, T, 3 * E)[..., E : 2 * E] if case.strided else normal(B, T, E)}
    dy = normal(B, T, H, R + 2)[..., 1:-1] if case.strided else normal(B, T, H, R)
    if W:
        leaves |= {"weight": normal(E, 1, W, dtype=parameters), "bias": normal(E, dtype=parameters)}
    if case.past:
        leaves["past"] = normal(B, W - 1, E)
    if case.norm:
        leaves |= {"scale": normal(R, dtype=parameters), "shift": normal(H, R, dtype=parameters)}
    rope = None
    if case.rope:
        angles = torch.rand(
            *((B,) if case.rope == "rows" else ()), T, 1, R // 2, generator=g, dtype=torch.float64
        )
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        rope = tuple(f(2 * math.pi * angles).to(wide).to(device) for f in (torch.cos, torch.sin))
    return {n: x.detach().requires_grad_() for n, x in leaves.items()}, rope, dy


def documents(case, device="cpu"):
    """Row b: document 1 from token T // 2 - b, 3 from the one after; with a past, its first tokens are of document 0."""
    if not case.documents:
        return None
    starts = case.T // 2 - torch.arange(case.B, device=device)[:, None]
    at = torch.arange(case.T, device=device)
    return (at >= starts).int() + 2 * (at > starts).int()


def run(case, leaves, rope, dy, function=input_features, **kwargs):
    """The output of `input_features`, or of a function around it, and every gradient."""
    y = function(
        leaves["x"],
        case.R,
        conv=(leaves["weight"], leaves["bias"]) if case.W else None,
        past=leaves.get("past"),
        documents=documents(case, leaves["x"].device),
        rope=rope,
        silu=case.silu,
        norm=(leaves["scale"], leaves["shift"]) if case.norm else None,
        eps=EPS,
        **kwargs,
    )
    grads = torch.autograd.grad(y, list(leaves.values()), dy)
    return {"y": y.detach(), **{f"d{n}": grad for n, grad in zip(leaves, grads, strict=True)}}


def literal(case, leaves, rope, dy):
    """The same in float64, one token and head at a time, RoPE as a product of complex numbers."""
    leaves = {n: x.detach().cpu().double().requires_grad_() for n, x in leaves.items()}
    B, T, H, R, W = case.B, case.T, case.H, case.R, case.W
    x = leaves["x"]
    number = documents(case)
    rows = []
    for b in range(B):
        for t in range(T):
            u = x[b, t]
            if W:
                u = leaves["bias"]
                for i in range(W):
                    s = t - (W - 1) + i
                    if number is not None and (number[b, s] if s >= 0 else 0) != number[b, t]:
                        continue
                    if s >= 0:
                        u = u + leaves["weight"][:, 0, i] * x[b, s]
                    elif case.past:
                        u = u + leaves["weight"][:, 0, i] * leaves["past"][b, s + W - 1]
            for h in range(H):
                z = u[h * R : (h + 1) * R]
                if rope is not None:
                    cos, sin = (
                        table.cpu().double()[b] if case.rope == "rows" else table.cpu().double()
                        for table in rope
                    )
                    turned = torch.complex(z[: R // 2], z[R // 2 :]) * torch.complex(
                        cos[t, 0], sin[t, 0]
                    )
                    z = torch.cat([turned.real, turned.imag])
                if case.silu:
                    z = z / (1 + torch.exp(-z))
                    z = z / (z * z).sum().sqrt()
                if case.norm:
                    z = z / ((z * z).sum() / R + EPS).sqrt() * leaves["scale"] + leaves["shift"][h]
                rows.append(z)
    y = torch.stack(rows).view(B, T, H, R)
    grads = torch.autograd.grad(y, list(leaves.values()), dy.cpu().double())
    return {"y": y.detach(), **{f"d{n}": grad for n, grad in zip(leaves, grads, strict=True)}}


def assert_agree(got, expected, bound):
    assert got.keys() == expected.keys()
    relative = {name: error(got[name].cpu(), value, "rms") for name, value in expected.items()}
    # `not <` instead of `>`: a NaN must fail.
    wrong = {name: f"{value:.1e}" for name, value in relative.items() if not value < bound}
    assert not wrong, f"beyond {bound:.0e}: {wrong}"
