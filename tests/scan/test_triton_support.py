"""What is decided about the Triton kernels without running one: refusals, the choice of `auto`, fake shapes, segments.

Needs neither a GPU nor Triton's interpreter.
"""

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from interdomain import scan
from interdomain.scan import library, ops, triton_support

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def pretend_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    with FakeTensorMode():
        yield


def fake_inputs(dtype=torch.bfloat16, R=64, D=64):
    return tuple(torch.empty(2, 100, 4, d, dtype=dtype, device="cuda") for d in (R, R, D))


@pytest.mark.parametrize(
    ("inputs", "M", "chunk_size", "message"),
    [
        (dict(dtype=torch.float64), 64, None, "the inputs are float64"),
        (dict(), 24, None, "M is 24 and the Triton kernels have M = 16, 32, 64, 128"),
        (dict(D=300), 64, None, "R or D is above 256"),
        (dict(), 64, 48, "chunk_size is 48 and the Triton kernels have 16, 32, 64"),
        (dict(), 128, 64, "chunk_size is 64 at M = 128: on this GPU, tables of this size do not fit; 32 do"),
        (dict(dtype=torch.float32), 64, 32, "chunk_size is 32 at M = 64: in fp32, tables"),
    ],
)
def test_refusals(inputs, M, chunk_size, message, pretend_gpu, caplog):
    inputs = fake_inputs(**inputs)
    with pytest.raises(ValueError, match=f"cannot run this on CUDA: {message}.*chunkwise-torch"):
        scan._choose("chunkwise", chunk_size, inputs, M)
    with pytest.raises(ValueError, match=f"backend 'parallel' cannot run this on CUDA: {message}"):
        scan._choose("parallel", chunk_size, inputs, M)
    assert scan._choose("chunkwise-torch", chunk_size, inputs, M) == "chunkwise-torch"
    library._log_once.cache_clear()
    torch._dynamo.reset()
    compiled = torch.compile(scan._choose, fullgraph=True, backend="eager")
    with caplog.at_level(logging.INFO, logger="interdomain.scan"):
        assert [choose("auto", chunk_size, inputs, M) for choose in (compiled, scan._choose)] == ["chunkwise-torch"] * 2
    assert len(caplog.records) == 1
    assert message in caplog.text


def test_auto_takes_the_kernels_on_cuda(pretend_gpu, caplog):
    library._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="interdomain.scan"):
        assert scan._choose("auto", None, fake_inputs(D=65), 64) == "chunkwise"
        assert scan._choose("chunkwise", 32, fake_inputs(torch.float16), 16) == "chunkwise"
        assert scan._choose("auto", None, fake_inputs(D=300)[2:], 64) == "chunkwise"  # the linear readout has no width
        assert scan._choose("auto", 32, fake_inputs(), 128) == "chunkwise"
        assert scan._choose("auto", 32, fake_inputs(torch.float32), 32) == "chunkwise"
        assert scan._choose("auto", 16, fake_inputs(torch.float32), 128) == "chunkwise"
    assert "'auto' is chunkwise (Triton kernels)" in caplog.text


def test_long_chunks_where_shared_memory_is_large(pretend_gpu, monkeypatch):
    for capability in ((8, 0), (9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, found=capability: found)
        assert scan._choose("auto", 64, fake_inputs(), 128) == "chunkwise"


def test_the_gpu_is_asked_while_tracing(monkeypatch):
    """torch.compile takes the answer as a constant, without a graph break."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))

    def choose(x):
        return x + 1 if triton_support._has_bf16_tensor_cores(0) else x - 1

    compiled = torch.compile(choose, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(1)).item() == 1


def test_old_gpus_and_machines_without_triton(pretend_gpu, monkeypatch):
    monkeypatch.setattr(triton_support, "_has_bf16_tensor_cores", lambda index: False)
    with pytest.raises(ValueError, match=r"compute capability 8\.0"):
        scan._choose("chunkwise", None, fake_inputs(), 64)
    monkeypatch.setattr(triton_support, "_INSTALLED", False)
    with pytest.raises(ValueError, match="triton is not installed"):
        scan._choose("chunkwise", None, fake_inputs(), 64)
    assert scan._choose("auto", None, fake_inputs(), 64) == "chunkwise-torch"


@pytest.mark.parametrize(
    ("compiler", "said"), [({"PATH": ""}, "Failed to find C compiler"), ({"CC": "/bin/false"}, "the compiler failed")]
)
def test_a_machine_without_a_compiler_says_so(compiler, said, monkeypatch, tmp_path):
    """Triton's launcher is C, compiled on the machine that has the GPU."""
    pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.delenv("CC", raising=False)
    for name, value in {**compiler, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_LIBCUDA_PATH": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    problem = triton_support.cannot_launch.__wrapped__()
    assert said in problem
    assert "apt-get install gcc python3-dev" in problem
    monkeypatch.setattr(torch.version, "hip", "7.0")  # an AMD GPU, where plain PyTorch is all that runs
    assert triton_support.cannot_launch.__wrapped__() is None


def test_shapes_on_cuda_without_one(pretend_gpu):
    """The ops' fake implementations, as torch.compile and FSDP see them."""
    q, k, v = fake_inputs()
    theta, W = torch.empty(4, 64, 2, device="cuda"), torch.empty(4, 128, 128, device="cuda")
    o, state, a = ops.scan(q, k, v, theta, W, None, 0, "chunkwise", True)
    assert (o.shape, o.dtype, state.shape, state.dtype) == (v.shape, v.dtype, (2, 4, 64, 128, 2), torch.float32)
    assert a.shape == (2, 4, 100, 128)
    assert a.dtype == torch.bfloat16


def test_nothing_imports_triton_before_it_runs():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from interdomain import scan; import interdomain.model.generation\n"
        "from interdomain.features import input_features\n"
        "assert input_features(torch.randn(1, 5, 8), 4, silu=True).isfinite().all()\n"
        "x = torch.randn(1, 5, 1, 4); theta = -torch.rand(1, 3, 2)\n"
        "o, _ = scan.interdomain_scan(x, x, x, theta, torch.randn(1, 6, 6)); assert o.isfinite().all()\n"
        "assert not scan.triton_support._INSTALLED and 'interdomain.scan.triton_chunkwise' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)


@pytest.mark.parametrize(
    ("sequences", "tokens", "segments"),
    [(256, 4096, 1), (1000, 4096, 1), (128, 4096, 2), (32, 32768, 8), (4, 4096, 8), (1, 500, 1)],
)
def test_segment_rule(sequences, tokens, segments):
    """Two programs for each of 132 multiprocessors, no segment under 8 chunks of 64, as few as fill the GPU."""
    triton_chunkwise = pytest.importorskip("interdomain.scan.triton_chunkwise")
    assert triton_chunkwise.segment_count(sequences, -(-tokens // 64), torch.device("cpu")) == segments


@pytest.mark.parametrize("sequences", [96, 160, 192, 288, 384])
def test_waves_are_full(sequences):
    """Of what 264 programs at a time could walk until the last one ends, tokens are at least nine tenths."""
    plans, chunks, slots = pytest.importorskip("interdomain.scan.triton_plan"), 64, 264
    length = -(-chunks // plans.segment_count(sequences, chunks, torch.device("cpu")))
    waves = -(-sequences * -(-chunks // length) // slots)
    assert sequences * chunks >= 0.9 * waves * slots * length


@pytest.mark.parametrize("M", triton_support.BASIS_SIZES)
@pytest.mark.parametrize("width", [64, 96, 256])
def test_what_triton_miscompiles_is_not_launched(width, M, monkeypatch):
    """Pipelined loops whose state other products read (sm_100, sm_103); two warp groups (sm_90, triton-lang/triton #11047)."""
    plans = pytest.importorskip("interdomain.scan.triton_plan")
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)):
        monkeypatch.setattr(plans, "capability", lambda device, found=capability: found)
        plan = plans.make_plan(torch.device("cpu"), torch.bfloat16, M, width, None)
        tiles = [x for x in plan if isinstance(x, tuple)]
        assert (plan.fused is not None) == (capability[0] == 9 and width <= 64 and M <= 64)
        assert len(tiles) == (5 if plan.fused else 4)
        assert plan.joined == (M < 128 or capability[0] in (8, 10, 12))
        assert all(warps <= 4 for _, warps, _ in tiles)
        assert capability[0] != 10 or all(stages == 1 for *_, stages in tiles)
