"""The Triton kernels of the input features against the literal float64 reference.

On a machine with a GPU these tests run there. Elsewhere tests/scan/test_triton_gpu.py runs this file in a process of its own.
"""

import functools

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from interdomain.features import input_features, input_features_step, ops

from ..scan.devices import DEVICE, on_kernels, use_kernels
from . import test_step as steps
from .common import EPS, MIXES, TOLERANCES, Case, assert_agree, documents, literal, make, run

pytest.importorskip("triton")
pytestmark = on_kernels


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    use_kernels(monkeypatch)


# 16 tokens to a program at these sizes: T = 19 leaves three to the second, all of which add to the first one's gradients.
CASES = [
    (Case(T=19, B=1, H=1, past=bool(mix.get("W", 4)), **mix), torch.bfloat16)
    for mix in MIXES.values()
]
# Shorter than the filter; one program; three.
CASES += [(Case(T=T, B=1, H=2, **MIXES["k"]), torch.float32) for T in (2, 16, 33)]
CASES += [(Case(T=T, past=True, strided=True, **MIXES["k"]), torch.float32) for T in (1, 17)]
# Documents that start in either program, one and two tokens before its end among them.
CASES += [(Case(T=T, B=4, documents=True, past=True, **MIXES["k"]), torch.float32) for T in (4, 33)]
CASES += [
    (Case(T=18, W=2, past=True, rope="rows", **MIXES["a"]), torch.float32)
]  # angles that differ by row
# Tiles that are not full.
CASES += [(Case(T=5, B=3, H=5, R=R, strided=True, **MIXES["k"]), torch.float32) for R in (2, 96)]
CASES += [(Case(T=3, B=1, H=5, R=256, W=3, **MIXES["q"]), torch.float16)]


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_by_the_letter(case, dtype):
    problem = make(case, dtype, device=DEVICE)
    got = run(case, *problem, backend="triton")
    assert got["y"].is_contiguous()
    assert all(got[f"d{n}"].dtype == x.dtype for n, x in problem[0].items())
    assert_agree(got, literal(case, *problem), TOLERANCES[dtype])


def test_mixed_dtypes():
    """bf16 activations with fp32 parameters and past, as without FSDP's casts. The backward needs the inputs, nothing else."""
    case, kept = Case(T=6, past=True, **MIXES["k"]), []
    leaves, rope, dy = make(case, torch.bfloat16, torch.float32, DEVICE)
    leaves["past"] = leaves["past"].detach().float().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        got = run(case, leaves, rope, dy, backend="triton")
    assert sorted(x.numel() for x in kept) == sorted(x.numel() for x in (*leaves.values(), *rope))
    assert got["dpast"].dtype == torch.float32
    assert_agree(got, literal(case, leaves, rope, dy), TOLERANCES[torch.bfloat16])


def test_zeros_have_no_direction_and_no_nan():
    """Rows of zeros, where plain PyTorch and the kernels take the same one-sided derivative."""
    for mix in ("q", "k", "a"):
        case = Case(T=4, **MIXES[mix] | dict(W=0))
        leaves, rope, dy = make(case, torch.float32, device=DEVICE)
        with torch.no_grad():
            leaves["x"][:, :2] = 0
            leaves["x"][:, 2] *= 1e-7  # below the smallest norm that SiLU's features are divided by
        assert_agree(
            run(case, leaves, rope, dy, backend="triton"),
            run(case, leaves, rope, dy, backend="torch"),
            1e-5,
        )
        tokens = leaves["x"].detach()[:, 1:3].flatten(0, 1)
        step = functools.partial(input_features_step, head_dim=case.R, silu=case.H)
        torch.testing.assert_close(
            *(step(tokens.clone(), backend=backend) for backend in ("triton", "torch"))
        )


@pytest.mark.parametrize("mix", ["k", "v"])
def test_opcheck(mix):
    case = Case(T=5, past=mix == "k", documents=mix == "k", **MIXES[mix])
    leaves, rope, dy = make(case, torch.bfloat16, device=DEVICE)
    x, weight, bias, past, scale, shift = (
        leaves.get(n) for n in ("x", "weight", "bias", "past", "scale", "shift")
    )
    weight = weight if weight is None else weight.detach().flatten(1).requires_grad_()
    args = (
        x,
        case.R,
        weight,
        bias,
        past,
        documents(case, DEVICE),
        *(rope or (None, None)),
        case.silu,
        scale,
    )
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.features, (*args, shift, EPS), test_utils=tests)
    args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    torch.library.opcheck(
        ops.features_backward, (dy, *args, EPS, past is not None), test_utils=tests[::2]
    )


def test_under_autocast_and_checkpointing(monkeypatch):
    """Autocast does not reach in; a policy that lists the op by its name saves it, one that does not repeats it."""
    from interdomain.features import triton_launch

    case = Case(T=6, **MIXES["k"])
    problem = make(case, torch.bfloat16, torch.float32, DEVICE)
    expected = run(case, *problem, backend="triton")
    calls, forward = [], triton_launch.forward
    monkeypatch.setattr(triton_launch, "forward", lambda *args: calls.append(1) or forward(*args))

    def checkpointed(*args, save, **kwargs):
        def policy(ctx, op, *args, **kwargs):
            saved = save and op is torch.ops.interdomain.features.default
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        with torch.autocast(DEVICE, torch.bfloat16):
            return checkpoint(
                lambda x: input_features(x, *args[1:], **kwargs) * 1.0,
                args[0],
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(policy),
            )

    for save in (True, False):
        calls.clear()
        got = run(case, *problem, function=checkpointed, save=save, backend="triton")
        assert all(torch.equal(got[n], expected[n]) for n in expected)
        assert len(calls) == (1 if save else 2)


@pytest.mark.parametrize(("name", "dtype"), steps.CASES, ids=str)
def test_step_is_input_features(name, dtype):
    steps.check(steps.LAYERS[name], dtype, "triton")


def test_steps_are_the_sequence():
    steps.check_sequence("triton")


@pytest.mark.parametrize("name", ["interdomain", "softmax"])
def test_step_compiles(name):
    steps.check_compiled(name, "triton")
    x, options, past, rope = steps.make(steps.LAYERS[name], torch.bfloat16)
    args = (
        x[:, 0],
        8,
        *options.get("conv", (None, None)),
        past,
        *rope,
        options["rotated"],
        options["silu"],
    )
    op = torch.ops.interdomain.features_step.default
    args = (*args, *options.get("norm", (None, None)), EPS)
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_offsets_beyond_int32():
    """2^31 numbers and more in x, the last tokens against those tokens alone."""
    T, E, period = 70_001, 32_768, 1009  # a prime: no wrapped offset lands on the same numbers
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, period, E, generator=g).bfloat16().cuda()[:, torch.arange(T) % period]
    conv = torch.randn(E, 4, generator=g).cuda(), torch.randn(E, generator=g).cuda()
    y = input_features(x, 64, conv=conv, silu=True, backend="triton")
    tail = input_features(
        x[:, -100:], 64, conv=conv, past=x[:, -103:-100], silu=True, backend="triton"
    )
    assert torch.equal(y[:, -100:], tail)
