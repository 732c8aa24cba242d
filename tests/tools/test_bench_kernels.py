"""Parts that the benchmarks share, and bench_kernels: timing, rooflines, results on the disk."""

import json
import types
from importlib.machinery import ModuleSpec

import pytest
import torch

from interdomain import environment
from interdomain.model import build_config
from interdomain.model.flops import forward_flops_per_token
from interdomain.tools import bench_kernels, bench_training, check_kernels
from interdomain.tools._bench import peers, timing
from interdomain.tools._bench import results as _bench
from interdomain.tools._bench.cases import Shape

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU tiny mode; on a GPU run benchmarks/gpu.sh"
)
CPU = torch.device("cpu")


def results(folder, part):
    contents = json.loads((folder / f"{part}.json").read_text())
    assert "CPU" in contents["label"]
    return contents


def test_bytes_flops_and_roofline_by_hand(monkeypatch):
    """bf16, head width 64: q, k, v, o are 128 bytes each. The algebra is counted a second time in model/flops.py."""
    one = Shape(B=1, T=4096)
    for name, condition in ("chunkwise", "interdomain"), ("sdpa-flash", "softmax"):
        nbytes, flops = bench_kernels.costs(name, one)
        assert nbytes == 4096 * 32 * 11 * 128
        config = build_config("1.3B", condition)
        forward = forward_flops_per_token(config, 4096)["mixer"] / config.n_layers
        assert flops / 4096 == pytest.approx(forward * (3 if name == "chunkwise" else 3.5))
    assert bench_kernels.costs("linear", one) == (4096 * 32 * 10 * 128, 0)
    for gpu, nbytes in ("NVIDIA H100 80GB HBM3", 3.35e9), ("NVIDIA GH200 480GB", 4.0e9):
        properties = types.SimpleNamespace(name=gpu)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device, properties=properties: properties
        )
        assert timing.roofline_ms(torch.device("cuda"), nbytes) == pytest.approx(1.0)
    assert timing.roofline_ms(torch.device("cuda"), 0, 2 * 989e9) == pytest.approx(2.0)
    assert timing.roofline_ms(CPU, 1) is None


def test_a_chain_is_timed_by_steps_and_a_slow_one_less_often():
    seen = []
    times = timing.measure((lambda: 5, lambda x: seen.append(x) or 7, seen.append), CPU, rounds=5)
    assert [t.count for t in times] == [5] * 4  # three steps, and together
    assert seen[:2] == [5, 7]
    (_, slow) = timing.measure([lambda: timing.time.sleep(0.02)], CPU, rounds=12, seconds=0.07)
    assert slow.count == 3
    assert slow.high >= slow.median >= slow.low >= 20


def test_rows_are_on_the_disk_when_they_are_measured(tmp_path, monkeypatch):
    report = _bench.Report("kernels", tmp_path / "new", CPU, {"rounds": 3})
    report.table("times", ["name", "ms"])
    report.add("times", {"name": "a|b", "ms": 1.5, "hidden": [1]})
    contents = json.loads(report.json.read_text())
    assert (contents["status"], contents["check"]) == ("unfinished", "not run")
    assert contents["tables"]["times"]["rows"] == [{"name": "a|b", "ms": 1.5, "hidden": [1]}]
    assert "/" not in " ".join(map(str, contents["environment"].values())).replace(
        "CPU/", ""
    )  # no place of a machine
    assert (
        _bench.without_paths("at /a/b/c.py:3, see https://a.b/c, 3/4")
        == "at c.py:3, see https://a.b/c, 3/4"
    )
    report.finish()
    assert json.loads(report.json.read_text())["status"] == "complete"
    with pytest.raises(FileExistsError, match="never overwritten"):
        _bench.Report("kernels", report.folder, CPU, {})
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("INTERDOMAIN_COMMIT", "abc")
    assert environment.commit() == "abc"


@pytest.mark.parametrize(
    ("tool", "argv", "words"),
    [
        (bench_kernels, ["--shapes", "8x4096"], ["got 8x4096", "BATCHxTOKENSxHEADSxHEAD_DIM"]),
        (bench_kernels, ["--device", "cuda"], ["--device cuda", "PyTorch sees cpu."]),
        (
            bench_training,
            ["--cases", "mamba:compile:none"],
            ["--cases must be CONDITION:compile|eager"],
        ),
        (bench_training, ["--steps", "0"], ["--steps must be at least 1"]),
    ],
)
def test_refused_before_anything_is_written(tool, argv, words, tmp_path, refused):
    refused(tool.main, ["--output", tmp_path / "out", *argv], *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tool", "option", "known"),
    [
        (bench_kernels, "--mixers", "sdpa-flash"),
        (check_kernels, "--groups", "chunkwise-fp32"),
        (bench_training, "--sizes", "1.3B"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(tool, option, known, capsys):
    with pytest.raises(SystemExit):
        tool.parse([option, "magic"])
    printed = capsys.readouterr().err
    assert f"argument {option}: invalid choice: 'magic'" in printed
    assert known in printed


@pytest.mark.parametrize("name", peers.PEERS)
def test_others_kernels_get_inputs_of_theirs_and_give_gradients(name, monkeypatch):
    def kernel(**given):
        tensors = [x for x in given.values() if isinstance(x, torch.Tensor)]
        assert all(x.requires_grad for x in tensors)
        values = given["x"] if name == "mamba2" else given["v"]
        out = values * sum(x.mean() for x in tensors)
        return (out, None) if name.startswith("fla-") else out

    shape = Shape(B=1, T=16, H=2, d=8)
    with pytest.raises(ImportError, match="is not installed"):
        row_of(name, shape)
    module = types.SimpleNamespace(**{peers.PEERS[name][2]: kernel})
    monkeypatch.setattr(
        peers.importlib.util, "find_spec", lambda package: ModuleSpec(package, None)
    )
    monkeypatch.setattr(peers.importlib, "import_module", lambda package: module)
    assert row_of(name, shape)["both ms"] > 0


def test_one_configuration_is_left_to_every_kernel_of_a_peer(monkeypatch):
    triton = pytest.importorskip("triton")

    def kernel(x, SIZE: triton.language.constexpr):
        pass

    kernel = triton.jit(kernel)

    def tuned(kernel):
        return triton.autotune([triton.Config({"SIZE": size}) for size in (16, 32, 64)], key=[])(
            kernel
        )

    heuristics = triton.heuristics({"EVEN": lambda args: True})
    module = types.SimpleNamespace(plain=tuned(kernel), inside=heuristics(tuned(kernel)), number=3)
    other = types.SimpleNamespace(kernel=tuned(kernel))
    monkeypatch.setitem(peers.sys.modules, "fla.ops.made_up", module)
    monkeypatch.setitem(peers.sys.modules, "other.ops", other)
    peers.leave_untuned("fla")
    assert [
        len(module.plain.configs),
        len(module.inside.fn.configs),
        len(other.kernel.configs),
    ] == [1, 1, 3]


def test_kernels_that_a_peer_refuses_are_timed_and_marked(monkeypatch):
    guard = types.SimpleNamespace(
        IS_NVIDIA_HOPPER=True, TRITON_ABOVE_3_4_0=True, TRITON_ABOVE_3_7_1=False
    )
    monkeypatch.setattr(peers.importlib, "import_module", {peers.FLA_GUARD[0]: guard}.get)
    gpu = torch.device("cuda")
    assert peers.time_refused_kernels("fla-gla", gpu) == []
    assert peers.time_refused_kernels("fla-gated-delta", gpu) == [peers.WRONG_RESULTS]
    assert guard.TRITON_ABOVE_3_7_1
    assert peers.time_refused_kernels("fla-gated-delta", gpu) == []  # as with a newer Triton


def test_every_kernel_of_ours_is_listed():
    for name, operation in ("chunkwise", "aten::bmm"), ("features", "aten::silu_backward"):
        assert row_of(name, Shape(B=1, T=16, H=2, d=8))["kernels ms"][operation] > 0


def row_of(name, shape):
    return bench_kernels.run_case((name, shape), CPU)


def test_a_gpu_for_which_nothing_can_be_compiled(monkeypatch):
    monkeypatch.setattr(_bench._cli, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(_bench, "cannot_launch", lambda: "there is no C compiler")
    with pytest.raises(ValueError, match="there is no C compiler"):
        _bench.choose_device("cuda")
