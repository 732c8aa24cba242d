"""One token of all projections against `input_features` part by part, and token by token against whole sequences.

The plain form is checked here; test_triton.py runs the same checks on the kernel.
"""

from dataclasses import dataclass

import pytest
import torch

from interdomain.features import input_features, input_features_step

from ..scan.devices import DEVICE
from .common import EPS, TOLERANCES


@dataclass(frozen=True)
class Layer:
    """Heads of q, k and v, and how many of the first (norm: last) of them have a stage."""

    heads: tuple[int, ...] = (3, 3, 3)
    conv: int = 0
    rotated: int = 0
    silu: int = 0
    norm: int = 0
    R: int = 8
    W: int = 4
    B: int = 2


LAYERS = {
    "interdomain": Layer(conv=6, rotated=6, silu=6, norm=6),
    "single-query": Layer(conv=9, rotated=6, silu=3, norm=6),
    "dual-linear": Layer((3, 3), conv=3, rotated=3, silu=3, norm=6),
    "s4d-rope": Layer((3, 3), conv=6, rotated=3, norm=6),
    "softmax": Layer(rotated=6),
    "grouped": Layer((6, 2, 2), conv=8, rotated=8, silu=8, norm=4, B=3),
    "head32": Layer((2, 1, 1), conv=3, rotated=3, silu=3, norm=2, R=32, B=1),
    "head96": Layer((2, 2, 2), conv=4, rotated=4, silu=4, norm=4, R=96, W=3, B=5),
    "many": Layer((1, 1, 1), conv=2, rotated=2, silu=2, norm=2, R=64, B=19),
}
CASES = [(name, torch.float32) for name in LAYERS]
CASES += [(name, torch.bfloat16) for name in ("interdomain", "single-query", "head96")] + [
    ("head32", torch.float16)
]


def make(layer, dtype, T=1, parameters=None):
    """(x [B, T, E], options of the step but past and rope, past, rope over all T)."""
    g = torch.Generator().manual_seed(layer.R + T)
    H, R, C = sum(layer.heads), layer.R, layer.conv * layer.R

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).to(DEVICE)

    parameters = parameters or dtype
    options = dict(rotated=layer.rotated, silu=layer.silu, eps=EPS)
    past = rope = None
    if C:
        options["conv"] = normal(layer.W, C, dtype=parameters), normal(C, dtype=parameters)
        past = normal(layer.B, layer.W - 1, C)
    if layer.norm:
        options["norm"] = tuple(normal(layer.norm, R, dtype=parameters) for _ in "ab")
    if layer.rotated:
        wide = torch.promote_types(dtype, torch.float32)
        angles = 3 * normal(layer.B, T, 1, R // 2, dtype=torch.float64)
        rope = angles.cos().to(wide), angles.sin().to(wide)
    return normal(layer.B, T, H * R), options, past, rope


X = torch.zeros(2, 72)
CONV, PAST = (torch.zeros(4, 48), torch.zeros(48)), torch.zeros(2, 3, 48)
TABLE = torch.zeros(1, 1, 4)


def parts(layer, x, options, past, rope):
    """The same by `input_features` in float64, each head by itself. -> [B, T, H, R], the last inputs."""
    x, H, R = x.double(), sum(layer.heads), layer.R
    out = []
    for h in range(H):
        here = slice(h * R, (h + 1) * R)
        conv = norm = before = None
        if h < layer.conv:
            weight, bias = (t.double()[..., here] for t in options["conv"])
            conv, before = (weight.T, bias), past.double()[..., here]
        if h >= H - layer.norm:
            scale, shift = (t.double()[h - H + layer.norm] for t in options["norm"])
            norm = scale, shift[None]
        out.append(
            input_features(
                x[..., here],
                R,
                conv=conv,
                past=before,
                rope=tuple(t.double() for t in rope) if h < layer.rotated else None,
                silu=h < layer.silu,
                norm=norm,
                eps=EPS,
                backend="torch",
            )
        )
    window = (
        None
        if past is None
        else torch.cat([past.double(), x[..., : past.shape[2]]], dim=1)[:, 1 - layer.W :]
    )
    return torch.cat(out, dim=2), window


def assert_close(got, expected, dtype):
    error = (got.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < TOLERANCES[dtype]


def check(layer, dtype, backend):
    x, options, past, rope = make(layer, dtype)
    expected, window = parts(layer, x, options, past, rope)
    y = input_features_step(x[:, 0], layer.R, past=past, rope=rope, **options, backend=backend)
    assert y.shape == expected[:, 0].shape
    assert y.dtype == dtype
    assert_close(y, expected[:, 0], dtype)
    if past is not None:
        assert torch.equal(past.double(), window)  # overwritten, with what it was given


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_step_is_input_features(name, dtype):
    check(LAYERS[name], dtype, "torch")


def check_sequence(backend):
    """Token by token; inputs and past inputs that are slices; the same angles for all rows."""
    layer = LAYERS["interdomain"]
    x, options, past, rope = make(layer, torch.float32, T=5)
    rope = tuple(t[0] for t in rope)
    expected, window = parts(layer, x, options, past, rope)
    wide = torch.stack([torch.cat([past, past], dim=2)] * 2, dim=-1)[..., 0]  # last stride 2
    live = wide[..., : past.shape[2]]
    for t in range(5):
        turns = tuple(table[t : t + 1] for table in rope)
        token = torch.stack([x[:, t], x[:, t]], dim=-1)[..., 0]
        y = input_features_step(token, layer.R, past=live, rope=turns, **options, backend=backend)
        assert_close(y, expected[:, t], torch.float32)
    assert torch.equal(live.double(), window)
    assert torch.equal(wide[..., past.shape[2] :], past)


def test_steps_are_the_sequence():
    check_sequence("torch")


def test_low_precision_activations():
    """bf16 activations with fp32 parameters and past, also under autocast; rows of zeros have no NaN."""
    layer = LAYERS["interdomain"]
    x, options, past, rope = make(layer, torch.bfloat16, parameters=torch.float32)
    past = past.float()
    expected, _ = parts(layer, x, options, past, rope)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = input_features_step(x[:, 0], layer.R, past=past, rope=rope, **options)
    assert_close(y, expected[:, 0], torch.bfloat16)
    options["conv"] = tuple(torch.zeros_like(t) for t in options["conv"])
    y = input_features_step(torch.zeros_like(x[:, 0]), layer.R, past=past, rope=rope, **options)
    assert y.isfinite().all()


def check_compiled(name, backend):
    layer = LAYERS[name]
    x, options, past, rope = make(layer, torch.float32)
    again = None if past is None else past.clone()
    torch._dynamo.reset()
    compiled = torch.compile(input_features_step, fullgraph=True, backend="aot_eager")
    y = [
        step(x[:, 0].clone(), layer.R, past=p, rope=rope, **options, backend=backend)
        for step, p in ((compiled, past), (input_features_step, again))
    ]
    torch.testing.assert_close(*y)  # decompositions may round in other places
    assert past is None or torch.equal(past, again)


def test_compiles_without_a_graph_break():
    check_compiled("interdomain", "torch")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(x=X[None]), r"x has shape \(1, 2, 72\); expected \[B, H R\] with R = head_dim = 8"),
        (dict(conv=CONV), "conv and past are given together"),
        (
            dict(conv=CONV, past=PAST[:, 1:]),
            r"past has shapes \(\(2, 2, 48\),\); expected \(\(2, 3, 48\),\)",
        ),
        (dict(rope=(TABLE, TABLE)), r"RoPE \(pairs\) of 0 heads"),
        (dict(silu=10), "SiLU of 10"),
        (dict(norm=(torch.zeros(8), torch.zeros(1, 8))), r"norm has shapes"),
        (dict(x=X.clone().requires_grad_()), "a step records no gradient"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        input_features_step(**{"x": X, "head_dim": 8, **options})
