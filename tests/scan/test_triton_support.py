# ruff: noqa: F811 (a fixture is imported)
"""Decisions about the Triton kernels that need no run: refusals, the choice of `auto`, fake shapes, segments.

Needs neither a GPU nor Triton's interpreter.
"""

import itertools
from unittest import mock

import pytest
import torch

from interdomain import scan
from interdomain.scan import triton_support

from .devices import in_process, pretend_gpu  # noqa: F401


def fake_inputs(dtype=torch.bfloat16, R=64, D=64):
    k = torch.empty(2, 100, 4, R, dtype=dtype, device="cuda")
    return k, k, torch.empty(2, 100, 4, D, dtype=dtype, device="cuda")


@pytest.mark.parametrize(
    ("dtype", "D", "M", "message"),
    [
        (torch.float64, 64, 64, "the inputs are float64"),
        (torch.bfloat16, 64, 24, "M is 24 and the Triton kernels have M = 16, 32, 64, 128"),
        (torch.bfloat16, 300, 64, "R or D is above 256"),
    ],
)
def test_refusals(dtype, D, M, message, pretend_gpu):
    inputs = fake_inputs(dtype, D=D)
    refusal = f"chunkwise' cannot run this on CUDA: {message}.*chunkwise-torch"
    with pytest.raises(ValueError, match=refusal):
        scan._choose_backend("chunkwise", inputs, M)
    assert scan._choose_backend("auto", inputs, M) == "chunkwise-torch"


def test_auto_takes_the_kernels_on_cuda(pretend_gpu):
    # The linear readout has no width.
    _, _, z = fake_inputs(D=300)
    for inputs in (fake_inputs(D=65), fake_inputs(torch.float32), (z,)):
        assert scan._choose_backend("auto", inputs, 128) == "chunkwise"


def test_old_gpus_and_machines_without_triton(pretend_gpu, monkeypatch):
    tensor_cores = mock.Mock(return_value=False)
    monkeypatch.setattr(triton_support, "_has_bf16_tensor_cores", tensor_cores)
    with pytest.raises(ValueError, match=r"compute capability 8\.0"):
        scan._choose_backend("chunkwise", fake_inputs(), 64)
    monkeypatch.setattr(triton_support, "_INSTALLED", False)
    with pytest.raises(ValueError, match="triton is not installed"):
        scan._choose_backend("chunkwise", fake_inputs(), 64)
    assert scan._choose_backend("auto", fake_inputs(), 64) == "chunkwise-torch"


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("PATH", "", "Failed to find C compiler"),
        ("CC", "/bin/false", "the compiler failed"),
    ],
)
def test_a_machine_without_a_compiler_says_so(variable, value, problem, monkeypatch, tmp_path):
    """Triton's launcher is C, compiled on the machine that has the GPU."""
    pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    monkeypatch.setenv(variable, value)
    reason = triton_support.cannot_launch.__wrapped__()
    assert problem in reason
    assert "apt-get install gcc python3-dev" in reason


VALUES_ALONE = """
import sys; sys.modules["triton"] = None
import torch
from interdomain import scan
from interdomain.features import input_features

x, decay, W = torch.randn(1, 8, 2, 4), -torch.rand(2, 3, 2), torch.randn(2, 6, 6)
with torch.no_grad():
    o, state = scan.interdomain_scan(x, x, x, decay, W)
    scan.interdomain_step(x[:, 0], x[:, 0], x[:, 0], decay, W, state)
    scan.linear_scan(x, decay, W[:, 0])
assert "torch._dynamo" not in sys.modules
assert o.isfinite().all() and input_features(torch.randn(1, 5, 8), 4, silu=True).isfinite().all()
import interdomain.model.generation
assert not scan.triton_support._INSTALLED and "interdomain.scan.triton_chunkwise" not in sys.modules
"""


def test_values_alone_need_neither_triton_nor_the_compiler():
    """Nothing imports triton before it runs. The first token of a process does not wait for torch.compile's front end."""
    in_process("-c", VALUES_ALONE)


@pytest.mark.parametrize(
    ("sequences", "tokens", "segments"),
    [(256, 4096, 1), (128, 4096, 2), (32, 32768, 8), (4, 4096, 8), (1, 500, 1)],
)
def test_segment_rule(sequences, tokens, segments):
    """Two programs for each of 132 multiprocessors, no segment under 8 chunks of 64, as few as fill the GPU."""
    plans = pytest.importorskip("interdomain.scan.triton_plan")
    assert plans.segment_count(sequences, -(-tokens // 64), torch.device("cpu")) == segments


@pytest.mark.parametrize(
    "capability", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0)], ids=str
)
def test_what_triton_miscompiles_is_not_launched(capability, monkeypatch):
    """Pipelined loops whose state other products read (sm_100, sm_103, sm_110); two warp groups (sm_90, #11047)."""
    plans = pytest.importorskip("interdomain.scan.triton_plan")
    monkeypatch.setattr(plans, "capability", mock.Mock(return_value=capability))
    for M, width in itertools.product(triton_support.BASIS_SIZES, (64, 96, 256)):
        plan = plans.make_plan(torch.device("cpu"), torch.bfloat16, M, width)
        fits = width <= 64 and M <= 64
        assert (plan.fused is not None) == (capability[0] == 9 and fits), (M, width)
        for tile in plan:
            if isinstance(tile, tuple):
                _, warps, stages = tile
                assert warps <= 4, (M, width)
                assert stages == 1 or capability[0] not in (10, 11), (M, width)


@pytest.mark.parametrize("M", [1, 24, 64, 256])
@pytest.mark.parametrize("width", [1, 3, 64, 129, 256])
def test_no_warp_holds_a_copy_of_another_s_numbers(width, M):
    """It would load them when the other one may have stored: a step updates the state in place. No interpreter shows it."""
    triton_step = pytest.importorskip("interdomain.scan.triton_step")
    tiles = triton_step.contract_tiles(width, M)
    assert tiles["num_warps"] == 1 or 2 * tiles["BM"] * tiles["BC"] >= 32 * tiles["num_warps"]
    for heads in (1, 4096):
        tiles = triton_step.expand_tiles(heads, width, M)
        assert tiles["num_warps"] == 1 or 2 * tiles["BM"] * tiles["BD"] >= 32 * tiles["num_warps"]
