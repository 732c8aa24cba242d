"""Parts that the benchmarks share, and bench_kernels: timing, rooflines, results on the disk."""

import json
import types

import pytest
import torch

from interdomain.model import build_config
from interdomain.model.flops import forward_flops_per_token
from interdomain.scan import triton_chunkwise
from interdomain.scan.triton_plan import make_plan
from interdomain.tools import bench_kernels, bench_training
from interdomain.tools._bench import peers, timing
from interdomain.tools._bench.cases import Shape

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU tiny mode; on a GPU run benchmarks/gpu.sh"
)
CPU = torch.device("cpu")
TINY = Shape(B=1, T=16, H=2, d=8)


def results(folder, part):
    contents = json.loads((folder / f"{part}.json").read_text())
    assert "CPU" in contents["label"]
    return contents


@pytest.mark.parametrize(
    ("name", "condition", "forward_and_backward"),
    [("chunkwise", "interdomain", 3), ("sdpa-flash", "softmax", 3.5)],
)
def test_bytes_and_flops_by_hand(name, condition, forward_and_backward):
    """bf16, head width 64: q, k, v and o have 128 bytes each. model/flops.py counts the products a second time."""
    nbytes, flops = bench_kernels.costs(name, Shape(B=1, T=4096))
    assert nbytes == 4096 * 32 * 11 * 128
    config = build_config("1.3B", condition)
    forward = forward_flops_per_token(config, 4096)["mixer"] / config.n_layers
    assert flops / 4096 == pytest.approx(forward * forward_and_backward)


@pytest.mark.parametrize("name", bench_kernels.VARIANTS)
def test_a_variant_changes_the_plan_of_an_h100(name, monkeypatch):
    """The benchmark on a GPU does not stop at a field that the plan does not have."""
    monkeypatch.setattr(triton_chunkwise, "make_plan", make_plan)
    monkeypatch.setattr(torch.cuda, "get_device_capability", h100)
    bench_kernels.change_plan(bench_kernels.VARIANTS[name])
    arguments = (torch.device("cuda"), torch.bfloat16, 64, 64)
    assert triton_chunkwise.make_plan(*arguments) != make_plan(*arguments)


def h100(device):
    return (9, 0)


def test_roofline(monkeypatch):
    def properties(device):
        return types.SimpleNamespace(name="NVIDIA GH200 480GB")

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    device = torch.device("cuda")
    assert timing.roofline_ms(device, 4.0e9) == pytest.approx(1.0)
    assert timing.roofline_ms(device, 0, 2 * 989e9) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("tool", "argv", "words"),
    [
        (bench_kernels, "--shapes 8x4096", "--shapes must be BATCHxTOKENSxHEADSxHEAD_DIM"),
        (bench_kernels, "--device cuda", "--device cuda"),
        (bench_training, "--cases mamba:compile:none", "--cases must be CONDITION:compile|eager"),
    ],
)
def test_refused_before_anything_is_written(tool, argv, words, tmp_path, refused):
    refused(tool.main, ["--output", tmp_path / "out", *argv.split()], words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", peers.KERNELS)
def test_gradients_of_all_inputs_of_others_kernels_are_asked_for(name):
    q, k, v = torch.randn(3, 1, 16, 2, 8, requires_grad=True).unbind()
    with pytest.raises(ImportError, match="is not installed"):
        peers.peer(name, q, k, v)
    for argument in peers._arguments(name, q, k, v).values():
        assert not isinstance(argument, torch.Tensor) or argument.requires_grad


@pytest.mark.parametrize("name", peers.IN_PYTORCH)
def test_plain_pytorch_of_transformers_is_timed(name):
    assert bench_kernels.run_case((name, TINY), CPU)["backward ms"] > 0


@pytest.mark.parametrize(
    ("name", "operation"), [("chunkwise", "aten::bmm"), ("features", "aten::silu_backward")]
)
def test_every_kernel_of_ours_is_listed(name, operation):
    assert bench_kernels.run_case((name, TINY), CPU)["kernels ms"][operation] > 0
