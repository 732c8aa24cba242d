"""The shipped tiles as Triton compiles them: every kernel at R = D = M = 64, and wider, against the float64 references.

Run by `python -m tests.ptx.run 90 tests/ptx/tiles.py`. Three chunks and more, the last one ragged; initial and final state.
"""

import pytest
import torch

from interdomain import scan

from ..features import common as features
from ..features import test_step as features_step
from ..scan import test_triton_chunkwise as chunkwise
from ..scan import test_triton_sequential as sequential
from ..scan import test_triton_step as step
from ..scan.common import Case, error, run_op
from ..scan.test_documents import one_by_one, packed

BF16, FP32 = torch.bfloat16, torch.float32
WIDE = dict(H=1, R=64, D=64, M=64)
dtypes = pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
kernels = chunkwise.kernels  # a fixture


def test_small():
    """What the suite runs."""
    inputs, _, expected = chunkwise.problem(Case(T=70, H=1, R=16, D=16), BF16, False)
    with torch.no_grad():
        o, state = scan.interdomain_scan(**inputs, backend="chunkwise")
    errors = error(o, expected["out"], "rms"), error(state, expected["state"], "rms")
    assert all(e < chunkwise.TOLERANCES[BF16] for e in errors), errors


@dtypes
def test_scan(dtype):
    chunkwise.check(Case(T=150 if dtype == BF16 else 40, G=2, **WIDE), dtype)


@pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])
def test_whole_chunks(linear):
    """Kernels without masks along time are a compilation of their own."""
    chunkwise.check(Case(T=192, **WIDE), BF16, linear)


def test_scan_of_a_step():
    """T = 1 and no state: most of every tile is masked."""
    chunkwise.check(Case(T=1, B=8, state=False, **WIDE), BF16)


@dtypes
@pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])
def test_segments(dtype, linear, kernels, monkeypatch):
    monkeypatch.setattr(kernels, "segment_count", lambda *args: 2)
    chunkwise.check(Case(T=200 if dtype == BF16 else 56, **WIDE), dtype, linear)


@dtypes
@pytest.mark.parametrize("how", ["one segment", "two segments", "linear"])
def test_documents(dtype, how, kernels, monkeypatch):
    if how == "two segments":
        monkeypatch.setattr(kernels, "segment_count", lambda *args: 2)
    T = 150 if dtype == BF16 else 40
    starts = (0, 1, 5, 16, 33, 64, 65, 140), (0, 20, 36, 128)
    inputs, cotangents, _ = chunkwise.problem(Case(T=T, B=2, **WIDE), dtype, how == "linear")
    documents = packed(T, starts)
    expected = one_by_one(inputs, cotangents, documents, how == "linear")
    got = run_op(inputs, cotangents, how == "linear", backend="chunkwise", documents=documents)
    errors = {n: error(got[n], expected[n], "rms") for n in expected}
    assert all(e < chunkwise.TOLERANCES[dtype] for e in errors.values()), errors


@dtypes
def test_parallel(dtype):
    chunkwise.check(Case(T=150 if dtype == BF16 else 40, **WIDE), dtype, backend="parallel")


@pytest.mark.parametrize(
    "sizes", [(96, 96, 64), (64, 65, 64), (128, 128, 64), (32, 32, 32), (16, 16, 16), (64, 64, 128)], ids=str
)
@pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])
def test_other_widths(sizes, linear):
    R, D, M = sizes
    chunkwise.check(Case(T=150, H=1, R=R, D=D, M=M), BF16, linear)


@pytest.mark.parametrize("chunk_size", [16, 32])
def test_other_chunks(chunk_size):
    """On sm_90 with more than one stage Triton loads over what wgmma still reads."""
    chunkwise.check(Case(T=100, **WIDE), BF16, chunk_size=chunk_size)


def test_fp32_of_other_widths():
    chunkwise.check(Case(T=40, H=1, R=96, D=96, M=64), FP32)


def test_at_the_decay_bound():
    """Here small tiles: the rounding of modes that cancel exceeds the bound at others, in Triton's interpreter as here."""
    case = Case(T=130, H=1, G=2, R=16, D=16, M=32)
    chunkwise.check(case, BF16, at_the_bound=True, chunk_size=64)


@dtypes
@pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])
def test_sequential(dtype, linear, monkeypatch):
    monkeypatch.setattr(scan, "_choose", lambda backend, *_: backend)  # which refuses tensors on a CPU
    sequential.check(Case(T=37, **WIDE), dtype, linear)


@dtypes
@pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])
def test_one_step(dtype, linear):
    from interdomain.scan import triton_step

    tokens, tables, state = step.problem(Case(T=1, B=2, decay="s4d", **WIDE), dtype, linear)
    fused, plain = step.functions(triton_step, linear)
    expected = plain(*(x[:, 0].double() for x in tokens), *(x.double() for x in tables), state.double())
    for some in (tables, tables if linear else [tables[0], tables[1][:, :64]]):
        for inplace in (False, True):
            given = state.clone()
            step.compare(fused(*(x[:, 0] for x in tokens), *some, given, inplace=inplace), expected, dtype)


@dtypes
@pytest.mark.parametrize("more", [{}, dict(past=True), dict(documents=True, past=True)], ids=["", "past", "documents"])
@pytest.mark.parametrize(("mix", "R"), [("q", 64), ("k", 64), ("k", 96), ("v", 64), ("a", 64), ("softmax", 64)])
def test_features(mix, R, more, dtype):
    stages = features.MIXES[mix]
    if more and not stages.get("W", 4):
        pytest.skip("no convolution")
    case = features.Case(T=21, B=1, H=9, R=R, **stages, **more)
    problem = features.make(case, dtype)
    features.assert_agree(
        features.run(case, *problem, backend="triton"), features.literal(case, *problem), features.TOLERANCES[dtype]
    )


@dtypes
@pytest.mark.parametrize("R", [64, 96])
def test_features_of_one_token(R, dtype):
    features_step.test_step_is_input_features(
        features_step.Layer(conv=6, rotated=6, silu=6, norm=6, R=R, B=19), dtype, "triton"
    )
