"""The Triton kernels against the literal float64 reference.

On a machine with a GPU these tests run there. Elsewhere one test runs this file and test_step.py in a process of their own,
under Triton's interpreter, which has to be chosen before triton is imported; the budgets are compiled in processes, too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from interdomain.features import input_features, ops, support
from interdomain.tools._cases import BOUNDS

from .common import EPS, MIXES, TOLERANCES, Case, assert_agree, documents, literal, make, run

pytest.importorskip("triton")
REPOSITORY = Path(__file__).parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
on_kernels = pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1")
on_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Uninitialised memory is NaN; the interpreter runs on the CPU, rounds to bf16 and broadcasts truth as a GPU does."""
    if not INTERPRETED and DEVICE == "cpu":
        return
    if INTERPRETED:
        repair(monkeypatch)
        monkeypatch.setattr(support, "unsupported", lambda *args: None)

    def poisoned(*args, empty=torch.empty, **kwargs):
        x = empty(*args, **kwargs)
        if x.is_floating_point():
            x.detach().fill_(float("nan"))  # torch.utils.checkpoint makes leaves that require a gradient
        return x

    monkeypatch.setattr(torch, "empty", poisoned)


def repair(monkeypatch):
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from ..scan import triton_interpreter

    triton_interpreter.repair(monkeypatch)
    splat = InterpreterBuilder.create_splat

    def create_splat(self, shape, arg):
        # A comparison of scalars calls itself an integer there, and a mask made of one is refused.
        return splat(self, shape, TensorHandle(arg.data, tl.int1) if arg.data.dtype == bool else arg)

    monkeypatch.setattr(InterpreterBuilder, "create_splat", create_splat)


# 16 tokens to a program at these sizes: T = 19 leaves three to the second, all of them owed to the first.
CASES = [(Case(T=19, B=1, H=2, past=bool(mix.get("W", 4)), **mix), torch.bfloat16) for mix in MIXES.values()]
CASES += [(Case(T=T, B=1, **MIXES["k"]), torch.float32) for T in (1, 2, 3, 5, 16, 17, 63, 65, 130)]
CASES += [(Case(T=T, past=True, strided=True, **MIXES["k"]), torch.float32) for T in (1, 2, 17)]
CASES += [(Case(T=T, documents=True, past=True, **MIXES["k"]), torch.float32) for T in (3, 4, 33, 35)]
CASES += [(Case(T=18, W=2, past=True, rope="rows", **MIXES["a"]), torch.float32)]
CASES += [(Case(T=5, B=3, H=5, R=R, strided=True, **MIXES["k"]), torch.float32) for R in (2, 32, 64, 96, 128)]
CASES += [(Case(T=3, B=2, H=5, R=256, W=3, **MIXES["q"]), torch.float16)]


@on_kernels
@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_by_the_letter(case, dtype):
    problem = make(case, dtype, device=DEVICE)
    got = run(case, *problem, backend="triton")
    assert got["y"].is_contiguous()
    assert all(got[f"d{n}"].dtype == x.dtype for n, x in problem[0].items())
    assert_agree(got, literal(case, *problem), TOLERANCES[dtype])


@on_kernels
def test_mixed_dtypes():
    """bf16 activations with fp32 parameters and past, as without FSDP's casts."""
    case = Case(T=6, past=True, **MIXES["k"])
    leaves, rope, dy = make(case, torch.bfloat16, torch.float32, DEVICE)
    leaves["past"] = leaves["past"].detach().float().requires_grad_()
    got = run(case, leaves, rope, dy, backend="triton")
    assert got["dpast"].dtype == torch.float32
    assert_agree(got, literal(case, leaves, rope, dy), TOLERANCES[torch.bfloat16])


@on_kernels
def test_zeros_have_no_direction_and_no_nan():
    """Rows of zeros, where plain PyTorch and the kernels take the same one-sided derivative."""
    for mix in ("q", "k", "a"):
        case = Case(T=4, **MIXES[mix] | dict(W=0))
        leaves, rope, dy = make(case, torch.float32, device=DEVICE)
        with torch.no_grad():
            leaves["x"][:, :2] = 0
            leaves["x"][:, 2] *= 1e-7  # below the smallest norm that SiLU's features are divided by
        assert_agree(run(case, leaves, rope, dy, backend="triton"), run(case, leaves, rope, dy, backend="torch"), 1e-5)


@on_kernels
def test_runs_repeat_bit_for_bit():
    case = Case(T=18, B=1, H=2, **MIXES["k"])
    problem = make(case, torch.bfloat16, device=DEVICE)
    first, second = (run(case, *problem, backend="triton") for _ in range(2))
    assert all(torch.equal(first[n], second[n]) for n in first)


@on_kernels
@pytest.mark.parametrize("mix", ["k", "v"])
def test_opcheck(mix):
    case = Case(T=5, past=mix == "k", documents=mix == "k", **MIXES[mix])
    leaves, rope, dy = make(case, torch.bfloat16, device=DEVICE)
    x, weight, bias, past, scale, shift = (leaves.get(n) for n in ("x", "weight", "bias", "past", "scale", "shift"))
    weight = weight if weight is None else weight.detach().flatten(1).requires_grad_()
    args = (x, case.R, weight, bias, past, documents(case, DEVICE), *(rope or (None, None)), case.silu, scale)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.features, (*args, shift, EPS), test_utils=tests)
    args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    torch.library.opcheck(ops.features_backward, (dy, *args, EPS, past is not None), test_utils=tests[::2])


@on_kernels
def test_compiles_without_a_graph_break():
    case = Case(T=6, past=True, **MIXES["k"])
    problem = make(case, torch.bfloat16, device=DEVICE)
    compiled = torch.compile(input_features, fullgraph=True, backend="aot_eager")
    results = [run(case, *problem, door=door, backend="triton") for door in (compiled, input_features)]
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[1])


@on_kernels
def test_under_autocast_and_checkpointing():
    """Autocast does not reach in; a policy that lists the op by its name saves it, one that does not repeats it."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    from interdomain.features import triton_launch

    case = Case(T=6, **MIXES["k"])
    problem = make(case, torch.bfloat16, torch.float32, DEVICE)
    expected = run(case, *problem, backend="triton")
    calls = []
    forward = triton_launch.forward

    def door(*args, save, **kwargs):
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
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_launch, "forward", lambda *args: calls.append(1) or forward(*args))
            got = run(case, *problem, door=door, save=save, backend="triton")
        assert all(torch.equal(got[n], expected[n]) for n in expected)
        assert len(calls) == (1 if save else 2)


# On a GPU alone: what the interpreter takes too long for. `python -m tests.rehearse` shows the errors beforehand.
ARITHMETIC = {torch.bfloat16: "rounded", torch.float32: "fp32"}
SHAPES = ((2, 4096, 32, 64), (1, 3001, 16, 96), (64, 1, 32, 64))  # B, T, H, R


def real_problem(mix, shape, dtype, seed=0):
    B, T, H, R = shape
    case = Case(T=T, B=B, H=H, R=R, past=T == 1 and bool(MIXES[mix].get("W", 4)), seed=seed, **MIXES[mix])
    leaves, rope, dy = make(case, dtype, device=DEVICE)
    wide = {n: x.detach().double().requires_grad_() for n, x in leaves.items()}
    expected = run(case, wide, rope and tuple(table.double() for table in rope), dy.double(), backend="torch")
    return case, (leaves, rope, dy), {n: x.cpu() for n, x in expected.items()}


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_real_shapes(mix, shape):
    for dtype, arithmetic in ARITHMETIC.items():
        case, problem, expected = real_problem(mix, shape, dtype)
        got = run(case, *problem, backend="triton")
        assert_agree(got, expected, BOUNDS[arithmetic])
        again = run(case, *problem, backend="triton")
        assert all(torch.equal(got[n], again[n]) for n in got)


@pytest.mark.gpu
@on_gpu
def test_offsets_beyond_int32():
    """2^31 numbers and more in x, the last tokens against those tokens alone."""
    T, E, period = 70_001, 32_768, 1009  # a prime: no wrapped offset lands on the same numbers
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, period, E, generator=g).bfloat16().cuda()[:, torch.arange(T) % period]
    conv = torch.randn(E, 4, generator=g).cuda(), torch.randn(E, generator=g).cuda()
    y = input_features(x, 64, conv=conv, silu=True, backend="triton")
    tail = input_features(x[:, -100:], 64, conv=conv, past=x[:, -103:-100], silu=True, backend="triton")
    assert torch.equal(y[:, -100:], tail)


# In processes of their own.


@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="this is that process, or there is a GPU")
def test_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-k", "(triton or opcheck) and not interpreter and not budget"]
    command += [__file__, __file__.replace("test_triton", "test_step")]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout


REGISTERS = 255
# Bytes per thread, by capability/dtype/mix/R. On Hopper in bf16 nothing spills; elsewhere some does before the loops.
SPILL = {"90/bf16/k/64": 0, "90/bf16/v/64": 0, "80/bf16/k/96": 128, "89/bf16/k+past+documents/64": 128}


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not compile")
def test_budget(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.features.triton_budget", *SPILL]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["kernel"] for r in reports] == ["forward_kernel", "backward_kernel"] * len(SPILL)
    # Shared memory: none, since sums over R stay inside a warp; Triton 3.6 turns the weights around in it, before the loop.
    over = [r for r in reports if r["registers"] > REGISTERS or r["spill"] > SPILL[r["shape"]] or r["shared"] > 2048]
    over += [r for r in reports if any("HGMMA" in loop for loop in r["loops"])]  # nothing that ptxas could serialise
    assert not over, "\n".join(map(str, over))
