"""What is left for a GPU: the tiles that ship, and long sequences, which take Triton's interpreter too long for every day.

The numbers are drawn on the CPU, and `python -m tests.rehearse` shows beforehand that the errors keep a third of their bound.
"""

import os
import subprocess
import sys

import pytest
import torch

from interdomain.tools import check_kernels

from ..common import REPOSITORY
from .common import Case, error, op_inputs, run_op
from .test_triton_chunkwise import DEVICE, DTYPES, errors, kernels, to_device  # noqa: F401 (kernels: a fixture)

on_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
ARITHMETIC = {torch.float32: "fp32", torch.bfloat16: "bf16"}
FULL_TILES = ((64, 64, 64), (96, 96, 64), (128, 128, 64), (64, 65, 64), (64, 64, 128))  # R, D, M


def full_tiles(sizes, dtype, linear, seed=0):
    """Three chunks, the last ragged: of 64 tokens, of 16 in fp32. bf16 has more heads, whose roundings average."""
    (R, D, M), (T, H) = sizes, (130, 4) if dtype == torch.bfloat16 else (40, 2)
    return Case(T=T, H=H, G=1 if linear else 2, R=R, D=D, M=M, decay="s4d", seed=seed)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("linear", [False, True], ids=["query", "linear"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", FULL_TILES, ids=str)
def test_full_tiles(sizes, dtype, linear):
    """The tile sizes that ship, over several chunks: Hopper's 64-row products are a compiler path of their own."""
    for backend in ("chunkwise", "parallel"):
        found = errors(full_tiles(sizes, dtype, linear), dtype, linear, backend=backend)
        assert check_kernels.verdict(found, ARITHMETIC[dtype])["result"] == "PASS", found


def long_sequence_errors(backend, T=70_001, seed=0):
    """By default cut into segments by the rule; against plain PyTorch in fp32 on the same device."""
    H, D, M = 4, 64, 64
    inputs, _ = op_inputs(Case(T=1, H=H, R=D, D=D, M=M, decay="s4d", seed=seed), torch.float32)
    g = torch.Generator().manual_seed(seed)
    for name in "qkv":
        inputs[name] = torch.randn(1, T, H, D, generator=g).bfloat16()
    d_o = torch.randn(1, T, H, D, generator=g).bfloat16()
    inputs, cotangents = to_device(inputs, (d_o, torch.zeros(1, H, M, 2 * D, 2)))
    exact_inputs = {n: x.detach().float().requires_grad_() for n, x in inputs.items()}
    expected = run_op(exact_inputs, tuple(x.float() for x in cotangents), backend="chunkwise-torch")
    got = run_op(inputs, cotangents, backend=backend)
    return {n: error(got[n], expected[n], "rms") for n in expected}


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("backend", ["chunkwise", "parallel"])
def test_long_sequences(backend):
    found = long_sequence_errors(backend)
    assert check_kernels.verdict(found, "bf16")["result"] == "PASS", found


@pytest.mark.skipif(DEVICE == "cuda", reason="the rehearsal is for machines without a GPU")
def test_the_rehearsal_runs(tmp_path):
    """One case of one seed."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    rows, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    options = ["--rows", rows, "--table", page, "--seeds", "1", "--only", "features step: triton B=1 "]
    command = [sys.executable, "-m", "tests.rehearse", *map(str, options)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(rows.read_text().splitlines()) == 1
    assert "| step | features step: triton B=1 T=4 H=4 d=64 M=64 bfloat16 | 1 | 4.0e-03 |" in page.read_text()
