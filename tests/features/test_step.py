"""One token of all projections against `input_features` part by part, and token by token against whole sequences.

The kernel is checked on a GPU, or by tests/scan/test_triton_gpu.py in a process of its own.
"""

from dataclasses import dataclass

import pytest
import torch

from interdomain.features import input_features, input_features_step

from ..scan.common import assert_within
from ..scan.devices import DEVICE, on_kernels, use_kernels
from .common import EPS, TOLERANCES


@pytest.fixture(params=["torch", pytest.param("triton", marks=on_kernels)])
def backend(request, monkeypatch):
    if request.param == "triton":
        use_kernels(monkeypatch)
    return request.param


@dataclass(frozen=True)
class Layer:
    """Heads of all projections, and how many of the first (norm: last) of them have a stage."""

    heads: int = 9
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
    "dual-linear": Layer(6, conv=3, rotated=3, silu=3, norm=6),
    "s4d-rope": Layer(6, conv=6, rotated=3, norm=6),
    "softmax": Layer(rotated=6),
    "grouped": Layer(10, conv=8, rotated=8, silu=8, norm=4, B=3),
    "head32": Layer(4, conv=3, rotated=3, silu=3, norm=2, R=32, B=1),
    "head96": Layer(6, conv=4, rotated=4, silu=4, norm=4, R=96, W=3, B=5),
    "many": Layer(3, conv=2, rotated=2, silu=2, norm=2, R=64, B=19),
}
CASES = [(name, torch.float32) for name in LAYERS]
CASES += [(name, torch.bfloat16) for name in ("interdomain", "single-query", "head96")]
CASES += [("head32", torch.float16)]


def make(layer, dtype, T=1, parameters=None):
    """Makes a problem of T tokens.

    Returns:
        x [B, T, E], and the options of the step; its rotary tables are of all T tokens.
    """
    generator = torch.Generator().manual_seed(layer.R + T)
    R = layer.R
    C = layer.conv * R
    parameters = parameters or dtype

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    options = dict(head_dim=R, rotated=layer.rotated, silu=layer.silu, eps=EPS)
    if C:
        options["conv"] = normal(layer.W, C, dtype=parameters), normal(C, dtype=parameters)
        options["past"] = normal(layer.B, layer.W - 1, C)
    if layer.norm:
        scale = normal(layer.norm, R, dtype=parameters)
        options["norm"] = scale, normal(layer.norm, R, dtype=parameters)
    if layer.rotated:
        angles = 3 * normal(layer.B, T, 1, R // 2, dtype=torch.float64)
        wide = torch.promote_types(dtype, torch.float32)
        options["rope"] = angles.cos().to(wide), angles.sin().to(wide)
    return normal(layer.B, T, layer.heads * R), options


def parts(layer, x, options):
    """Returns the same by `input_features` in float64, each head by itself, [B, T, H, R]."""
    heads = []
    for h, u in enumerate(x.double().split(layer.R, dim=2)):
        stages = {"silu": h < layer.silu}
        if h < layer.conv:
            here = slice(h * layer.R, (h + 1) * layer.R)
            weight, bias = (t.double()[..., here] for t in options["conv"])
            stages["conv"] = weight.T, bias
            stages["past"] = options["past"].double()[..., here]
        if h < layer.rotated:
            stages["rope"] = tuple(t.double() for t in options["rope"])
        n = h - (layer.heads - layer.norm)
        if n >= 0:
            scale, shift = (t.double()[n] for t in options["norm"])
            stages["norm"] = scale, shift[None]
        heads.append(input_features(u, layer.R, eps=EPS, backend="torch", **stages))
    return torch.cat(heads, dim=2)


def next_past(x, past):
    """Returns the last inputs of the convolution, which the next token needs."""
    inputs = torch.cat([past, x[..., : past.shape[2]].to(past.dtype)], dim=1)
    return inputs[:, x.shape[1] :]


def assert_step(got, expected):
    assert_within({"y": got}, {"y": expected}, TOLERANCES[got.dtype])


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_step_is_input_features(name, dtype, backend):
    layer = LAYERS[name]
    x, options = make(layer, dtype)
    expected = parts(layer, x, options)
    past = options.get("past")
    if past is not None:
        following = next_past(x, past)
    y = input_features_step(x[:, 0], **options, backend=backend)
    assert y.dtype == dtype
    assert_step(y, expected[:, 0])
    if past is not None:
        assert torch.equal(past, following)  # overwritten, with what it was given


def test_steps_are_the_sequence(backend):
    """Token by token; inputs and past inputs that are slices; the same angles for all rows."""
    layer = LAYERS["interdomain"]
    x, options = make(layer, torch.float32, T=5)
    cos, sin = (t[0] for t in options["rope"])
    options["rope"] = cos, sin
    expected = parts(layer, x, options)
    past = options["past"]
    following = next_past(x, past)
    # The past is every second number of the first half of a wider tensor.
    wide = torch.cat([past, past], dim=2).repeat_interleave(2, dim=2)[..., ::2]
    options["past"] = live = wide[..., : past.shape[2]]
    for t in range(5):
        options["rope"] = cos[t : t + 1], sin[t : t + 1]
        token = x[:, t].repeat_interleave(2, dim=1)[:, ::2]
        y = input_features_step(token, **options, backend=backend)
        assert_step(y, expected[:, t])
    assert torch.equal(live, following)
    assert torch.equal(wide[..., past.shape[2] :], past)


def test_low_precision_activations():
    """bf16 activations with fp32 parameters and past, also under autocast; rows of zeros have no NaN."""
    layer = LAYERS["interdomain"]
    x, options = make(layer, torch.bfloat16, parameters=torch.float32)
    options["past"] = options["past"].float()
    expected = parts(layer, x, options)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = input_features_step(x[:, 0], **options)
    assert_step(y, expected[:, 0])
    weight, bias = options["conv"]
    options["conv"] = torch.zeros_like(weight), torch.zeros_like(bias)
    y = input_features_step(torch.zeros_like(x[:, 0]), **options)
    assert y.isfinite().all()


@pytest.mark.parametrize("name", ["interdomain", "softmax"])
def test_compiles_without_a_graph_break(name, backend):
    x, options = make(LAYERS[name], torch.float32)
    past = options.get("past")
    torch._dynamo.reset()
    compiled = torch.compile(input_features_step, fullgraph=True, backend="aot_eager")
    outputs = []
    for step in (compiled, input_features_step):
        if past is not None:
            options["past"] = past.clone()
        y = step(x[:, 0].clone(), **options, backend=backend)
        outputs.append((y, options.get("past")))
    got, expected = outputs
    torch.testing.assert_close(got[0], expected[0])  # decompositions may round in other places
    assert past is None or torch.equal(got[1], expected[1])


@on_kernels
@pytest.mark.parametrize("name", ["interdomain", "softmax"])
def test_triton_opcheck(name, monkeypatch):
    use_kernels(monkeypatch)
    x, options = make(LAYERS[name], torch.bfloat16)
    nothing = None, None
    args = (
        x[:, 0],
        8,
        *options.get("conv", nothing),
        options.get("past"),
        *options["rope"],
        options["rotated"],
        options["silu"],
        *options.get("norm", nothing),
        EPS,
    )
    op = torch.ops.interdomain.features_step.default
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


X = torch.zeros(2, 72)
CONV = torch.zeros(4, 48), torch.zeros(48)
TABLE = torch.zeros(1, 1, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(x=X[None]), r"x has shape \(1, 2, 72\); expected \[B, H R\] with R = head_dim = 8"),
        (dict(conv=CONV), "conv and past are given together"),
        (
            dict(conv=CONV, past=torch.zeros(2, 2, 48)),
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
        input_features_step(**{"x": X, "head_dim": 8} | options)
