"""One token of all projections against `input_features` part by part, and token by token against whole sequences.

The kernel is checked on a GPU, or by tests/scan/test_triton_gpu.py in a process of its own.
"""

import copy
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from interdomain.features import input_features, input_features_step, ops

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
    T: int = 1  # tokens, one after the other


LAYERS = {
    "interdomain": Layer(conv=6, rotated=6, silu=6, norm=6, T=5),
    "single-query": Layer(conv=9, rotated=6, silu=3, norm=6),
    "dual-linear": Layer(6, conv=3, rotated=3, silu=3, norm=6),
    "softmax": Layer(rotated=6),
    "grouped": Layer(10, conv=8, rotated=8, silu=8, norm=4, B=3),
    "head32": Layer(4, conv=3, rotated=3, silu=3, norm=2, R=32, B=1),
    "head96": Layer(6, conv=4, rotated=4, silu=4, norm=4, R=96, W=3, B=5),
    "many": Layer(3, conv=2, rotated=2, silu=2, norm=2, R=64, B=19),
}
FP32 = torch.float32
# The dtypes of activations, and of parameters and past inputs
CASES = [(name, FP32, FP32) for name in LAYERS]
CASES += [(name, torch.bfloat16, torch.bfloat16) for name in ("single-query", "head96")]
CASES += [("interdomain", torch.bfloat16, FP32), ("head32", torch.float16, torch.float16)]


def make(layer, dtype, parameters=None):
    """Makes a problem.

    Returns:
        x [B, T, E], and the options of the step; its rotary tables are of all tokens.
    """
    generator = torch.Generator().manual_seed(layer.R + layer.T)
    T = layer.T
    R = layer.R
    C = layer.conv * R
    parameters = parameters or dtype

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    options = dict(head_dim=R, rotated=layer.rotated, silu=layer.silu, eps=EPS)
    if C:
        options["conv"] = normal(layer.W, C, dtype=parameters), normal(C, dtype=parameters)
        options["past"] = normal(layer.B, layer.W - 1, C, dtype=parameters)
    if layer.norm:
        scale = normal(layer.norm, R, dtype=parameters)
        options["norm"] = scale, normal(layer.norm, R, dtype=parameters)
    if layer.rotated:
        # All rows have the same angles where there are several tokens.
        rows = [layer.B] if T == 1 else []
        angles = 3 * normal(*rows, T, 1, R // 2, dtype=torch.float64)
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


@pytest.mark.parametrize(("name", "dtype", "parameters"), CASES, ids=str)
def test_step_is_input_features(name, dtype, parameters, backend):
    """Token by token; autocast changes nothing.

    Past inputs are the first half of a wider tensor, with several tokens every second number of it.
    """
    layer = LAYERS[name]
    x, options = make(layer, dtype, parameters)
    expected = parts(layer, x, options)
    tables = options.get("rope", ())
    past = options.get("past")
    stride = 2 if layer.T > 1 else 1
    if past is not None:
        wide = torch.cat([past, past], dim=2).repeat_interleave(stride, dim=2)[..., ::stride]
        options["past"] = wide[..., : past.shape[2]]
    for t in range(layer.T):
        if tables:
            options["rope"] = [table[..., t : t + 1, :, :] for table in tables]
        token = x[:, t].repeat_interleave(stride, dim=1)[:, ::stride]
        with torch.autocast(DEVICE, torch.bfloat16):
            y = input_features_step(token, **options, backend=backend)
        assert y.dtype == dtype
        assert_within({"y": y}, {"y": expected[:, t]}, TOLERANCES[dtype])
    if past is not None:
        # It is overwritten with the last inputs, and the other half stays.
        inputs = torch.cat([past, x[..., : past.shape[2]].to(parameters)], dim=1)[:, layer.T :]
        assert torch.equal(wide, torch.cat([inputs, past], dim=2))


@pytest.mark.parametrize("name", ["head32", "softmax"])
def test_compiles_without_a_graph_break(name, backend):
    x, options = make(LAYERS[name], torch.float32)
    copies = copy.deepcopy(options)
    torch._dynamo.reset()
    compiled = torch.compile(input_features_step, fullgraph=True, backend="aot_eager")
    got = compiled(x[:, 0].clone(), **options, backend=backend)
    expected = input_features_step(x[:, 0].clone(), **copies, backend=backend)
    # Decompositions may round in other places. The past, which is overwritten, is compared, too.
    torch.testing.assert_close((got, options), (expected, copies))


@on_kernels
@pytest.mark.parametrize("name", ["head32", "softmax"])
def test_triton_opcheck(name, monkeypatch):
    use_kernels(monkeypatch)
    x, options = make(LAYERS[name], torch.bfloat16)
    with mock.patch.object(ops, "features_step") as call:
        input_features_step(x[:, 0], **options, backend="triton")
    op = torch.ops.interdomain.features_step.default
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(op, call.call_args.args, test_utils=tests)


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
        (dict(x=X.clone().requires_grad_()), "a step records no gradient"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        input_features_step(**{"x": X, "head_dim": 8} | options)
