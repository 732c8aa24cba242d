"""One token of all projections against `input_features` part by part, and token by token against whole sequences.

The plain form is checked here. On a machine with a GPU the kernel is, too; elsewhere test_triton.py runs its tests in a process
of its own under Triton's interpreter, which has to be chosen before triton is imported.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from interdomain.features import input_features, input_features_step, support

from .common import TOLERANCES

REPOSITORY = Path(__file__).parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
BACKENDS = ("torch", "triton") if INTERPRETED or DEVICE == "cuda" else ("torch",)
EPS = 1e-5


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

    def __str__(self):
        return f"{self.heads}-conv{self.conv}-rope{self.rotated}-silu{self.silu}-norm{self.norm}-R{self.R}-B{self.B}"


LAYERS = {
    "interdomain": Layer(conv=6, rotated=6, silu=6, norm=6),
    "interdomain-norope": Layer(conv=6, silu=6, norm=6),
    "single-query": Layer(conv=9, rotated=6, silu=3, norm=6),
    "dual-linear": Layer((3, 3), conv=3, rotated=3, silu=3, norm=6),
    "s4d": Layer((3, 3), conv=6, norm=6),
    "s4d-rope": Layer((3, 3), conv=6, rotated=3, norm=6),
    "softmax": Layer(rotated=6),
    "rff": Layer(conv=6, rotated=6),
    "grouped": Layer((6, 2, 2), conv=8, rotated=8, silu=8, norm=4, B=3),
    "head32": Layer((2, 1, 1), conv=3, rotated=3, silu=3, norm=2, R=32, B=1),
    "head96": Layer((2, 2, 2), conv=4, rotated=4, silu=4, norm=4, R=96, W=3, B=5),
    "many": Layer((1, 1, 1), conv=2, rotated=2, silu=2, norm=2, R=64, B=19),
}
ALL = [(layer, torch.float32) for layer in LAYERS.values()]
ALL += [(LAYERS[name], torch.bfloat16) for name in ("interdomain", "single-query", "softmax", "head96")]
ALL += [(LAYERS["head32"], torch.float16)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Uninitialised memory is NaN; the interpreter runs on the CPU and rounds to bf16 as a GPU does."""
    if INTERPRETED:
        from .test_triton import repair

        repair(monkeypatch)
        monkeypatch.setattr(support, "unsupported", lambda *args: None)

    def empty(*args, make=torch.empty, **kwargs):
        x = make(*args, **kwargs)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", empty)


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


def on_cpu(part):
    """What `make` gives, on the CPU."""
    if isinstance(part, dict):
        return {name: on_cpu(value) for name, value in part.items()}
    if isinstance(part, tuple):
        return tuple(map(on_cpu, part))
    return part.cpu() if isinstance(part, torch.Tensor) else part


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
    window = None if past is None else torch.cat([past.double(), x[..., : past.shape[2]]], dim=1)[:, 1 - layer.W :]
    return torch.cat(out, dim=2), window


def assert_close(got, expected, dtype):
    error = (got.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < TOLERANCES[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("layer", "dtype"), ALL, ids=str)
def test_step_is_input_features(layer, dtype, backend):
    x, options, past, rope = make(layer, dtype)
    expected, window = parts(layer, x, options, past, rope)
    y = input_features_step(x[:, 0], layer.R, past=past, rope=rope, **options, backend=backend)
    assert y.shape == expected[:, 0].shape
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert_close(y, expected[:, 0], dtype)
    if past is not None:
        assert torch.equal(past.double(), window)  # overwritten, with what it was given


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_are_the_sequence(backend):
    """Token by token; inputs and past inputs that are slices; the same angles for all rows."""
    layer = LAYERS["interdomain"]
    x, options, past, rope = make(layer, torch.float32, T=5)
    rope = tuple(t[0] for t in rope)
    expected, window = parts(layer, x, options, past, rope)
    wide = torch.cat([past, past], dim=2)
    live = wide[..., : past.shape[2]]
    for t in range(5):
        turns = tuple(table[t : t + 1] for table in rope)
        y = input_features_step(x[:, t], layer.R, past=live, rope=turns, **options, backend=backend)
        assert_close(y, expected[:, t], torch.float32)
    assert torch.equal(live.double(), window)
    assert torch.equal(wide[..., past.shape[2] :], make(layer, torch.float32, T=5)[2])
    x = make(layer, torch.float32, T=5)[0]
    inner = torch.stack([x[:, 0], x[:, 0]], dim=-1)[..., 0]  # last stride 2
    again, live = (make(layer, torch.float32, T=5)[2] for _ in "ab")
    live = torch.stack([live, live], dim=-1)[..., 0]
    turns = tuple(table[:1] for table in rope)
    y = [
        input_features_step(a, layer.R, past=b, rope=turns, **options, backend=backend)
        for a, b in ((x[:, 0], again), (inner, live))
    ]
    # Plain PyTorch rounds another way on some CPUs where numbers do not lie side by side.
    torch.testing.assert_close(*y, rtol=1e-6, atol=1e-6)
    assert torch.equal(again, live)


@pytest.mark.parametrize("backend", BACKENDS)
def test_low_precision_activations(backend):
    """bf16 activations with fp32 parameters and past, also under autocast; rows of zeros have no NaN."""
    layer = LAYERS["interdomain"]
    x, options, past, rope = make(layer, torch.bfloat16, parameters=torch.float32)
    past = past.float()
    expected, _ = parts(layer, x, options, past, rope)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = input_features_step(x[:, 0], layer.R, past=past, rope=rope, **options, backend=backend)
    assert_close(y, expected[:, 0], torch.bfloat16)
    options["conv"] = tuple(torch.zeros_like(t) for t in options["conv"])
    y = input_features_step(torch.zeros_like(x[:, 0]), layer.R, past=past, rope=rope, **options, backend=backend)
    assert y.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["interdomain", "softmax"])
def test_compiles_without_a_graph_break(name, backend):
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


@pytest.mark.skipif("triton" not in BACKENDS, reason="needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("name", ["interdomain", "softmax"])
def test_opcheck(name):
    layer = LAYERS[name]
    x, options, past, rope = make(layer, torch.bfloat16)
    args = x[:, 0], layer.R, *options.get("conv", (None, None)), past, *rope, layer.rotated, layer.silu
    torch.library.opcheck(
        torch.ops.interdomain.features_step.default,
        (*args, *options.get("norm", (None, None)), EPS),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_the_kernel_is_chosen_on_cuda(monkeypatch):
    monkeypatch.setattr(support, "unsupported", lambda *args: None)
    x, options, past, rope = make(LAYERS["interdomain"], torch.bfloat16)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor
        x, past, rope = fake(x), fake(past), tuple(map(fake, rope))
        options |= {n: tuple(map(fake, options[n])) for n in ("conv", "norm")}
        y = input_features_step(x[:, 0], 8, past=past, rope=rope, **options)
    assert (y.shape, y.dtype) == ((2, 9, 8), torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(x=X[None]), r"x has shape \(1, 2, 72\); expected \[B, H R\] with R = head_dim = 8"),
        (dict(x=X.int()), "x is torch.int32"),
        (dict(conv=CONV), "conv and past are given together"),
        (dict(past=PAST), "conv and past are given together"),
        (dict(conv=CONV, past=PAST[:, 1:]), r"past has shapes \(\(2, 2, 48\),\); expected \(\(2, 3, 48\),\)"),
        (dict(conv=(CONV[0], CONV[1][1:]), past=PAST), r"conv has shapes .* expected \(\(4, 48\), \(48,\)\)"),
        (dict(conv=tuple(t[..., 1:] for t in CONV), past=PAST[..., 1:]), "convolution of 47 channels"),
        (dict(rope=(TABLE, TABLE)), r"RoPE \(pairs\) of 0 heads"),
        (dict(rotated=3), r"x holds 9 heads of 8; .* RoPE \(pairs\) of 3 heads"),
        (dict(rope=(TABLE[0], TABLE[0]), rotated=3), r"rope has shapes"),
        (dict(silu=10), "SiLU of 10"),
        (dict(norm=(torch.zeros(10, 8),) * 2), "norm of 10"),
        (dict(norm=(torch.zeros(8), torch.zeros(1, 8))), r"norm has shapes"),
        (dict(backend="fast"), "backend is 'fast'; allowed: auto, triton, torch"),
        (dict(x=X.clone().requires_grad_()), "a step records no gradient"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        input_features_step(**{"x": X, "head_dim": 8, **options})


REGISTERS = 64  # of a thread, and no spills: a thousand threads and more on every multiprocessor


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
def test_budget(tmp_path):
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1"}
    shapes = ["90/bf16/step:1/64", "90/bf16/softmax:64/64", "80/bf16/step:64/96", "89/fp32/step:8/32"]
    command = [sys.executable, "-m", "tests.features.triton_budget", *shapes]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["kernel"] for r in reports] == ["step_kernel"] * len(shapes)
    over = [r for r in reports if r["registers"] > REGISTERS or r["spill"] or r["shared"] > 2048]
    assert not over, "\n".join(map(str, over))
