# ruff: noqa: F811 (a fixture is imported)
"""Decisions about the Triton kernels that need no run: refusals, the choice of `auto`, fake shapes, segments.

Needs neither a GPU nor Triton's interpreter.
"""

import logging

import pytest
import torch

from interdomain import scan
from interdomain.scan import triton_support

from .devices import in_process, pretend_gpu  # noqa: F401


def fake_inputs(dtype=torch.bfloat16, R=64, D=64):
    return tuple(torch.empty(2, 100, 4, d, dtype=dtype, device="cuda") for d in (R, R, D))


@pytest.mark.parametrize(
    ("inputs", "M", "message"),
    [
        (dict(dtype=torch.float64), 64, "the inputs are float64"),
        (dict(), 24, "M is 24 and the Triton kernels have M = 16, 32, 64, 128"),
        (dict(D=300), 64, "R or D is above 256"),
    ],
)
def test_refusals(inputs, M, message, pretend_gpu, caplog):
    inputs = fake_inputs(**inputs)
    with pytest.raises(
        ValueError, match=f"chunkwise' cannot run this on CUDA: {message}.*chunkwise-torch"
    ):
        scan._choose_backend("chunkwise", inputs, M)
    assert scan._choose_backend("chunkwise-torch", inputs, M) == "chunkwise-torch"
    with caplog.at_level(logging.INFO, logger="interdomain.scan"):
        assert scan._choose_backend("auto", inputs, M) == "chunkwise-torch"
    assert message in caplog.text


def test_auto_takes_the_kernels_on_cuda(pretend_gpu, caplog):
    with caplog.at_level(logging.INFO, logger="interdomain.scan"):
        assert scan._choose_backend("auto", fake_inputs(D=65), 64) == "chunkwise"
        assert scan._choose_backend("auto", fake_inputs(torch.float32), 128) == "chunkwise"
        assert (
            scan._choose_backend("auto", fake_inputs(D=300)[2:], 64) == "chunkwise"
        )  # the linear readout has no width
    assert "'auto' is chunkwise (Triton kernels)" in caplog.text


def test_old_gpus_and_machines_without_triton(pretend_gpu, monkeypatch):
    monkeypatch.setattr(triton_support, "_has_bf16_tensor_cores", lambda index: False)
    with pytest.raises(ValueError, match=r"compute capability 8\.0"):
        scan._choose_backend("chunkwise", fake_inputs(), 64)
    monkeypatch.setattr(triton_support, "_INSTALLED", False)
    with pytest.raises(ValueError, match="triton is not installed"):
        scan._choose_backend("chunkwise", fake_inputs(), 64)
    assert scan._choose_backend("auto", fake_inputs(), 64) == "chunkwise-torch"
    assert scan._choose_backend("fft", fake_inputs(), 64) == "fft"


@pytest.mark.parametrize(
    ("compiler", "said"),
    [({"PATH": ""}, "Failed to find C compiler"), ({"CC": "/bin/false"}, "the compiler failed")],
)
def test_a_machine_without_a_compiler_says_so(compiler, said, monkeypatch, tmp_path):
    """Triton's launcher is C, compiled on the machine that has the GPU."""
    pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.delenv("CC", raising=False)
    for name, value in {
        **compiler,
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_LIBCUDA_PATH": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    problem = triton_support.cannot_launch.__wrapped__()
    assert said in problem
    assert "apt-get install gcc python3-dev" in problem


def test_nothing_imports_triton_before_it_runs():
    in_process(
        "-c",
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from interdomain import scan; import interdomain.model.generation\n"
        "from interdomain.features import input_features\n"
        "assert input_features(torch.randn(1, 5, 8), 4, silu=True).isfinite().all()\n"
        "x = torch.randn(1, 5, 1, 4); theta = -torch.rand(1, 3, 2)\n"
        "o, _ = scan.interdomain_scan(x, x, x, theta, torch.randn(1, 6, 6)); assert o.isfinite().all()\n"
        "assert not scan.triton_support._INSTALLED and 'interdomain.scan.triton_chunkwise' not in sys.modules\n",
    )


@pytest.mark.parametrize(
    ("sequences", "tokens", "segments"),
    [(256, 4096, 1), (128, 4096, 2), (32, 32768, 8), (4, 4096, 8), (1, 500, 1)],
)
def test_segment_rule(sequences, tokens, segments):
    """Two programs for each of 132 multiprocessors, no segment under 8 chunks of 64, as few as fill the GPU."""
    plans = pytest.importorskip("interdomain.scan.triton_plan")
    assert plans.segment_count(sequences, -(-tokens // 64), torch.device("cpu")) == segments


@pytest.mark.parametrize("M", triton_support.BASIS_SIZES)
@pytest.mark.parametrize("width", [64, 96, 256])
def test_what_triton_miscompiles_is_not_launched(width, M, monkeypatch):
    """Pipelined loops whose state other products read (sm_100, sm_103, sm_110); two warp groups (sm_90, #11047)."""
    plans = pytest.importorskip("interdomain.scan.triton_plan")
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0)):
        monkeypatch.setattr(plans, "capability", lambda device, found=capability: found)
        plan = plans.make_plan(torch.device("cpu"), torch.bfloat16, M, width)
        tiles = [x for x in plan if isinstance(x, tuple)]
        assert (plan.fused is not None) == (capability[0] == 9 and width <= 64 and M <= 64)
        assert all(
            warps <= 4 and (capability[0] not in (10, 11) or stages == 1)
            for _, warps, stages in tiles
        )


@pytest.mark.parametrize("M", [1, 24, 64, 256])
@pytest.mark.parametrize("width", [1, 3, 64, 129, 256])
def test_no_warp_holds_a_copy_of_another_s_numbers(width, M):
    """It would load them when the other one may have stored: a step updates the state in place. No interpreter shows it."""
    triton_step = pytest.importorskip("interdomain.scan.triton_step")
    for tiles in (
        triton_step.contract_tiles(width, M),
        *(triton_step.expand_tiles(n, width, M) for n in (1, 4096)),
    ):
        numbers = 2 * tiles["BM"] * tiles.get("BC", tiles.get("BD"))
        assert tiles["num_warps"] == 1 or numbers >= 32 * tiles["num_warps"]
