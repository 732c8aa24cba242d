"""Seeded problems, and the literal reference: the paper's equations token by token in float64, no helper shared with the code.

Shapes: B batch, T time, H heads, R head_dim, E = H R channels, W convolution width.
"""

import math
from dataclasses import dataclass

import torch

from interdomain.features import input_features

from ..scan.common import as_float64, gradients

EPS = 1e-5
FP32, BF16 = torch.float32, torch.bfloat16
# Relative RMS. fp32: arithmetic throughout. bf16: rounded once at the end (1.7e-3 RMS), gradients too.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 6e-3}


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


# The settings that the mixers ask for.
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


# Problems and dtypes for the kernels. A program has 16 tokens at these sizes: T = 19 leaves three to the second, all of which
# add to the first one's gradients.
CASES = []
for mix in MIXES.values():
    CASES.append((Case(T=19, B=1, H=1, past=mix.get("W") != 0, **mix), BF16))
CASES += [
    # Shorter than the filter; one program; three.
    (Case(T=2, B=1, H=2, **MIXES["k"]), FP32),
    (Case(T=16, B=1, H=2, **MIXES["k"]), BF16),
    (Case(T=33, B=1, H=2, **MIXES["k"]), FP32),
    (Case(T=1, past=True, strided=True, **MIXES["k"]), FP32),
    (Case(T=17, past=True, strided=True, **MIXES["k"]), FP32),
    # Documents that start in either program, one and two tokens before its end among them.
    (Case(T=4, B=4, documents=True, past=True, **MIXES["k"]), FP32),
    (Case(T=33, B=4, H=1, documents=True, past=True, **MIXES["k"]), FP32),
    # Angles that differ by row.
    (Case(T=18, W=2, past=True, rope="rows", **MIXES["a"]), FP32),
    # Tiles that are not full.
    (Case(T=5, B=3, H=5, R=2, strided=True, **MIXES["k"]), FP32),
    (Case(T=5, B=3, H=5, R=96, strided=True, **MIXES["k"]), FP32),
    (Case(T=3, B=1, H=5, R=256, W=3, **MIXES["q"]), torch.float16),
]


def make(case, dtype=torch.float64, parameters=None, device="cpu"):
    """Makes a problem.

    Args:
        case: Its settings.
        dtype: The dtype of activations.
        parameters: The dtype of parameters and past inputs, if it is another.
        device: Where the tensors are.

    Returns:
        The leaves by name, (cos, sin) or None, and the cotangent.
    """
    generator = torch.Generator().manual_seed(case.T)
    B, T, H, R, W = case.B, case.T, case.H, case.R, case.W
    E = H * R
    parameters = parameters or dtype

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    if case.strided:
        x = normal(B, T, 3 * E)[..., E : 2 * E]
        dy = normal(B, T, H, R + 2)[..., 1:-1]
    else:
        x = normal(B, T, E)
        dy = normal(B, T, H, R)
    leaves = {"x": x}
    if W:
        leaves["weight"] = normal(E, 1, W, dtype=parameters)
        leaves["bias"] = normal(E, dtype=parameters)
    if case.past:
        leaves["past"] = normal(B, W - 1, E, dtype=parameters)
    if case.norm:
        leaves["scale"] = normal(R, dtype=parameters)
        leaves["shift"] = normal(H, R, dtype=parameters)
    for leaf in leaves.values():
        leaf.requires_grad_()
    if not case.rope:
        return leaves, None, dy
    rows = [B] if case.rope == "rows" else []
    turns = torch.rand(*rows, T, 1, R // 2, generator=generator, dtype=torch.float64)
    angles = 2 * math.pi * turns
    wide = torch.promote_types(dtype, torch.float32)
    return leaves, (angles.cos().to(device, wide), angles.sin().to(device, wide)), dy


def documents(case, device="cpu"):
    """Row b: document 1 from token T // 2 - b, 3 from the one after; with a past, its first tokens are of document 0."""
    if not case.documents:
        return None
    starts = case.T // 2 - torch.arange(case.B, device=device)[:, None]
    at = torch.arange(case.T, device=device)
    return (at >= starts).int() + 2 * (at > starts).int()


def run(case, leaves, rope, dy, function=input_features, **options):
    """Returns the output of `input_features`, or of a function around it, and every gradient."""
    y = run_forward(case, leaves, rope, function, **options)
    return {"y": y.detach(), **gradients(y, dy, leaves)}


def run_forward(case, leaves, rope, function=input_features, **options):
    """Returns the output of `input_features`, or of a function around it."""
    x = leaves["x"]
    if case.W:
        options["conv"] = leaves["weight"], leaves["bias"]
    if case.norm:
        options["norm"] = leaves["scale"], leaves["shift"]
    past = leaves.get("past")
    numbers = documents(case, x.device)
    return function(
        x, case.R, past=past, documents=numbers, rope=rope, silu=case.silu, eps=EPS, **options
    )


def literal_convolution(case, leaves, b, t):
    """Returns the convolution at one token, which stays within its document."""
    numbers = documents(case)
    u = leaves["bias"]
    for i in range(case.W):
        s = t - (case.W - 1) + i
        # What is before the first token belongs to document 0.
        if numbers is not None and numbers[b, t] != (numbers[b, s] if s >= 0 else 0):
            continue
        if s >= 0:
            u = u + leaves["weight"][:, 0, i] * leaves["x"][b, s]
        elif case.past:
            u = u + leaves["weight"][:, 0, i] * leaves["past"][b, s + case.W - 1]
    return u


def literal_head(case, leaves, h, z, turn):
    """Returns the features of one head: z is its part of the convolution, and turn are the numbers that RoPE multiplies by."""
    R = case.R
    if turn is not None:
        z = torch.complex(z[: R // 2], z[R // 2 :]) * turn
        z = torch.cat([z.real, z.imag])
    if case.silu:
        z = z / (1 + torch.exp(-z))
        z = z / (z * z).sum().sqrt()
    if case.norm:
        z = z / ((z * z).sum() / R + EPS).sqrt() * leaves["scale"] + leaves["shift"][h]
    return z


def literal(case, leaves, rope, dy):
    """Returns the same in float64, one token and head at a time, RoPE as a product of complex numbers."""
    leaves = as_float64(leaves)
    B, T, H, R = case.B, case.T, case.H, case.R
    turns = None
    if rope is not None:
        cos, sin = rope
        turns = torch.complex(cos.cpu().double(), sin.cpu().double()).expand(B, T, 1, R // 2)
    rows = []
    for b in range(B):
        for t in range(T):
            u = literal_convolution(case, leaves, b, t) if case.W else leaves["x"][b, t]
            turn = None if turns is None else turns[b, t, 0]
            for h, z in enumerate(u.split(R)):
                rows.append(literal_head(case, leaves, h, z, turn))
    y = torch.stack(rows).view(B, T, H, R)
    return {"y": y.detach(), **gradients(y, dy.cpu().double(), leaves)}
