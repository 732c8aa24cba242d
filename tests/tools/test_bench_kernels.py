"""What the benchmarks share, and bench_kernels: timing, rooflines, results on the disk; and on a stand-in for a GPU."""

import json
import types
from importlib.machinery import ModuleSpec

import pytest
import torch

from interdomain import environment
from interdomain.model import SIZES, Transformer, build_config
from interdomain.model.costs.flops import forward_flops_per_token
from interdomain.tools import bench_inference, bench_kernels, check_kernels, launch
from interdomain.tools._bench import apart, cases, peers, timing
from interdomain.tools._bench import results as _bench
from interdomain.tools._bench.cases import Shape

from .. import cuda_stand_in

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU tiny mode; on a GPU run benchmarks/gpu.sh")
CPU = torch.device("cpu")


def results(folder, part, label=_bench.CPU_LABEL):
    contents = json.loads((folder / f"{part}.json").read_text())
    assert contents["label"] == label
    return contents


def test_bytes_flops_and_roofline_by_hand(monkeypatch):
    """bf16, head width 64: q, k, v, o are 128 bytes each. The algebra is counted a second time in model/costs/flops.py."""
    one = Shape(B=1, T=4096)
    for name, condition in ("chunkwise", "interdomain"), ("sdpa-flash", "softmax"):
        nbytes, flops = bench_kernels.costs(name, one)
        assert nbytes == 4096 * 32 * 11 * 128
        config = build_config("1.3B", condition)
        forward = forward_flops_per_token(config, 4096)["mixer"] / config.n_layers
        assert flops / 4096 == pytest.approx(forward * (3 if name == "chunkwise" else 3.5))
    assert bench_kernels.costs("linear", one) == (4096 * 32 * 10 * 128, 0)
    gpu = types.SimpleNamespace(name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert timing.roofline_ms(torch.device("cuda"), 3.35e9) == pytest.approx(1.0)
    assert timing.roofline_ms(torch.device("cuda"), 3.35e9, 2 * 989e9) == pytest.approx(2.0)
    assert timing.roofline_ms(CPU, 1) is None


def test_a_chain_is_timed_by_steps_and_a_slow_one_less_often():
    seen = []
    times = timing.measure((lambda: 5, lambda x: seen.append(x) or 7, seen.append), CPU, rounds=5)
    assert [t.count for t in times] == [5] * 4  # three steps, and together
    assert seen[:2] == [5, 7]
    (_, slow) = timing.measure(lambda: timing.time.sleep(0.02), CPU, rounds=12, seconds=0.07)
    assert slow.count == 3
    assert slow.high >= slow.median >= slow.low >= 20


def test_rows_are_on_the_disk_when_they_are_measured(tmp_path, monkeypatch):
    report = _bench.Report("kernels", tmp_path / "new", CPU, {"rounds": 3})
    report.table("times", ["name", "ms"])
    report.add("times", {"name": "a|b", "ms": 1.5, "hidden": [1]})
    contents = json.loads(report.json.read_text())
    assert (contents["status"], contents["check"]) == ("unfinished", "not run")
    assert contents["tables"]["times"]["rows"] == [{"name": "a|b", "ms": 1.5, "hidden": [1]}]
    assert {"PyTorch", "triton", "Python", "CPU", "commit"} <= contents["environment"].keys()
    assert "/" not in " ".join(map(str, contents["environment"].values())).replace("CPU/", "")  # no place of a machine
    assert _bench.without_paths("at /a/b/c.py:3, see https://a.b/c, 3/4") == "at c.py:3, see https://a.b/c, 3/4"
    report.finish()
    assert json.loads(report.json.read_text())["status"] == "complete"
    with pytest.raises(FileExistsError, match="never overwritten"):
        _bench.Report("kernels", report.folder, CPU, {})
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("INTERDOMAIN_COMMIT", "abc")
    assert environment.commit() == "abc"


@pytest.mark.parametrize(
    ("tool", "argv", "said"),
    [
        (bench_kernels, ["--mixers", "chunkwise", "flash4"], ["--mixers: there is no flash4", "sdpa-flash"]),
        (bench_kernels, ["--shapes", "8x4096"], ["got 8x4096", "BATCHxTOKENSxHEADSxHEAD_DIM"]),
        (bench_kernels, ["--device", "cuda"], ["--device cuda", "no GPU(s)"]),
        (check_kernels, ["--groups", "magic"], ["--groups: there is no magic", "chunkwise-fp32"]),
    ],
)
def test_refused_in_one_paragraph(tool, argv, said, tmp_path, capsys):
    assert tool.main(["--output", str(tmp_path / "out"), *argv]) == 2
    message = capsys.readouterr().err
    assert (message.startswith("error: "), message.count("\n")) == (True, 1)
    assert all(words in message for words in said)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", peers.PEERS)
def test_others_kernels_get_inputs_of_theirs_and_give_gradients(name, monkeypatch):
    def kernel(**given):
        tensors = [x for x in given.values() if isinstance(x, torch.Tensor)]
        assert all(x.requires_grad for x in tensors)
        out = (given["x"] if name == "mamba2" else given["v"]) * sum(x.mean() for x in tensors)
        return (out, None) if name.startswith("fla-") else out

    shape = Shape(B=1, T=16, H=2, d=8)
    assert "is not installed" in row_of(name, shape)["remark"]
    module = types.SimpleNamespace(**{peers.PEERS[name][2]: kernel})
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda package: ModuleSpec(package, None))
    monkeypatch.setattr(peers.importlib, "import_module", lambda package: module)
    assert row_of(name, shape)["both ms"] > 0


def test_every_kernel_of_ours_is_listed():
    times = row_of("chunkwise", Shape(B=1, T=16, H=2, d=8))["kernels ms"]
    assert times["aten::bmm"] > 0


def row_of(name, shape):
    rows = []
    bench_kernels.run_case((name, shape), rows.append, CPU, rounds=1)
    return rows[0]


def test_a_gpu_that_pytorch_cannot_use_is_no_reason_for_the_tiny_mode(monkeypatch):
    """With a driver too old for this PyTorch, gpu.sh would pass its check on the CPU."""
    monkeypatch.setattr(launch.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match=r"this machine has GPUs \(/dev/nvidia0\)"):
        _bench.choose_device("auto")
    assert _bench.choose_device("cpu").type == "cpu"


# What only a GPU would run: events, graphs, peak memory, workers. Tensors stay on the CPU, and the figures mean nothing.


@pytest.fixture
def gpu(monkeypatch):
    for name, value in cuda_stand_in.gpu("Stand-in 9000").items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cases, "generator", lambda device, seed: torch.Generator().manual_seed(seed))
    monkeypatch.setattr(timing, "MIN_FLUSH", 4096)
    monkeypatch.setattr(timing, "DATASHEET", {"Stand-in": (4e12, 8e14)})
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91_002)
    monkeypatch.setattr(_bench, "cannot_launch", lambda: None)
    monkeypatch.setattr(apart, "run", apart.inline)
    with cuda_stand_in.OnTheCPU():
        yield "measured on Stand-in 9000"


def test_a_gpu_is_timed_by_events_behind_writes_that_give_the_host_its_lead(gpu, monkeypatch):
    """On a clock that the calls move: 2 ms of writes at 0.1 ms each come before every call and are in no time; where launches
    count, one write for the cache, and it is over."""
    now, seen = [0.0], []

    def takes(ms, what):
        def call(*_):
            now[0] += ms
            seen.append(what)

        return call

    monkeypatch.setattr(cuda_stand_in.Event, "clock", lambda self: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("done"))
    monkeypatch.setattr(torch.Tensor, "zero_", takes(0.1, "write"))
    for lead, writes in ((timing.LEAD_MS, 20), (0, 1)):
        run = timing.timer(torch.device("cuda"), lead)
        seen.clear()
        assert run((takes(1, "call"), takes(2, "backward"))) == pytest.approx([1, 2])
        before = seen[: seen.index("call")]
        assert abs(before.count("write") - writes) <= 1
        assert before.count("done") == (lead == 0)


def test_kernels_on_a_gpu(gpu, tmp_path, monkeypatch):
    """What cannot run on a CPU says so. The profiler has no stand-in: it runs on the CPU above."""
    monkeypatch.setattr(bench_kernels, "kernel_times", lambda call, device: {"scan_kernel": 1.0})
    mixers = ["--mixers", "chunkwise", "sdpa-flash", "sdpa-cudnn"]
    assert bench_kernels.main(["--output", str(tmp_path), "--shapes", "1x32x1x64", "--rounds", "1", *mixers]) == 0
    (table,) = results(tmp_path, "kernels", gpu)["tables"].values()
    rows = {row["mixer"]: row for row in table["rows"]}
    row = rows["chunkwise"]
    assert (row["peak MiB"], row["of roofline"]) == (5.0, pytest.approx(row["roofline ms"] / row["both ms"]))
    assert rows["sdpa-cudnn"]["remark"]


def test_inference_on_a_gpu(gpu, tmp_path, monkeypatch):
    """Graphs that replay, and states that are on CUDA."""
    for place, name in ((Transformer, "init_state"), (bench_inference, "put")):
        make = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a, make=make, **k: cuda_stand_in.on_cuda(make(*a, **k)))
    few = dict(
        sizes=("debug",), batches=(1, 2), prefixes=(8, 12), prompts=((2, 16), (1, 24)), chunk=8, rounds=1, steps=2
    )
    monkeypatch.setattr(bench_inference, "GPU", bench_inference.GPU | few)
    monkeypatch.setitem(SIZES, "debug", dict(dim=16, n_layers=1, n_heads=2, head_dim=8, n_basis=4, vocab_size=64))
    assert bench_inference.main(["--output", str(tmp_path)]) == 0
    tables = results(tmp_path, "inference", gpu)["tables"]
    rows = tables["decode, debug"]["rows"]
    assert [row.get("remark") for row in rows] == [None] * 16
    assert all(row["tokens/s"] == pytest.approx(1e3 * row["B"] / row["ms a step"]) for row in rows)
    prompt = {row["read"]: row for row in tables["reading a prompt"]["rows"][:-1]}
    assert prompt["interdomain whole"]["GiB"] == prompt["interdomain chunked"]["GiB"] > prompt["softmax whole"]["GiB"]


def test_a_gpu_that_cannot_be_used(gpu, monkeypatch):
    monkeypatch.setattr(_bench, "cannot_launch", lambda: "there is no C compiler")
    with pytest.raises(ValueError, match="there is no C compiler"):
        _bench.choose_device("auto")

    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(RuntimeError, match="after chunkwise the GPU is in an error state"):
        _bench.require_healthy(torch.device("cuda"), "chunkwise")


def test_the_check_on_a_gpu(gpu, tmp_path, monkeypatch):
    """Its groups go to workers, each row is judged there; a graph that replays nothing must not pass."""
    (case, *_) = (c for c in check_kernels.groups(True)["step"] if c.mode == "graph")
    monkeypatch.setattr(check_kernels, "groups", lambda cuda: {"step": [cases._tiny(case)]})
    assert check_kernels.main(["--output", str(tmp_path / "good")]) == 0
    assert results(tmp_path / "good", "check", gpu)["status"] == "passed"
    monkeypatch.setattr(cuda_stand_in.Graph, "replay", lambda self: None)
    assert check_kernels.main(["--output", str(tmp_path / "bad")]) == 1
    (row,) = results(tmp_path / "bad", "check", gpu)["tables"]["cases"]["rows"]
    assert row["result"] == "FAIL"
