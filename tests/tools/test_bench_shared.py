"""What the benchmarks stand on: counts of bytes and FLOPs against hand counts, timing in turns, results on the disk."""

import json
import types

import pytest
import torch

from interdomain.model import build_config
from interdomain.model.flops import forward_flops_per_token
from interdomain.tools import _bench, _problems, _timing, launch
from interdomain.tools._problems import Shape

CPU = torch.device("cpu")


def test_bytes_and_flops_by_hand():
    """bf16, head width 64: q, k, v, o are 128 bytes each. Multiply-adds at M = R = D = L = 64 are the kernels' products."""
    shape = Shape(B=8, T=4096)  # 1,048,576 tokens and heads
    per_token = {
        mixer: [n / 2**20 / 128 for n in _problems.io_bytes(shape, mixer)] for mixer in ("", "linear", "mamba2")
    }
    assert per_token == {"": [4, 7], "linear": [4, 6], "mamba2": [2, 3]}
    grouped = [n / 128 for n in _problems.io_bytes(Shape(B=1, T=1, H=1, d=64, G=4))]
    assert grouped == [4 + 1 + 1 + 4, 4 + 1 + 1 + 4 + 4 + 1 + 1]
    costs = {name: (b / 2**20, f / 2**21) for name, (b, f) in _problems.pass_costs(shape).items()}
    read, W = 64 * 64 + 2 * 64 * 64 + 4 * 64 * 64, 128 * 128
    assert costs["contract"] == costs["expand"] == (128 + 128 + 256, read)
    assert costs["mix_expand"] == (512, W + read)
    assert costs["mix_backward"] == (1024, 3 * W)
    assert costs["adjoint_decay"] == (640, 2 * read + 4 * 64 * 64)
    # The same algebra, counted a second time in plugin/model/flops.py: one layer of the 1.3B model, per token.
    one = Shape(B=1, T=4096)
    for condition, flops in ("interdomain", _problems.chunkwise_flops), ("softmax", _problems.attention_flops):
        config = build_config("1.3B", condition)
        assert flops(one)[0] / 4096 == forward_flops_per_token(config, 4096)["mixer"] / config.n_layers
    # T = 4: 10 pairs of query and key, a multiply-add per channel for the score and one for the value.
    assert _problems.attention_flops(Shape(B=1, T=4, H=1, d=3)) == (2 * 2 * 10 * 3, 5 * 2 * 10 * 3)


def test_roofline_is_the_larger_of_two_times(monkeypatch):
    gpu = types.SimpleNamespace(name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    device = torch.device("cuda")
    assert _timing.roofline_ms(device, 3.35e9) == pytest.approx(1.0)
    assert _timing.roofline_ms(device, 3.35e9, 2 * 989e9) == pytest.approx(2.0)
    gpu.name = "a GPU of tomorrow"
    assert _timing.roofline_ms(device, 1) is _timing.roofline_ms(CPU, 1) is None


def test_calls_take_turns_and_slow_ones_fewer():
    order = []

    def slow():
        order.append("slow")
        _timing.time.sleep(0.02)

    calls = {"fast": lambda: order.append("fast"), "slow": slow}
    times = _timing.interleaved(calls, CPU, rounds=12, seconds=0.08)
    assert times["fast"][-1].count == 12
    assert times["slow"][-1].count in (3, 4)
    assert times["slow"][-1].median >= 20
    turns = [i for i, name in enumerate(order[2:]) if name == "slow"]
    assert max(turns) - min(turns) >= 6  # spread over the rounds, not in a row
    seen = []
    times = _timing.interleaved({"chain": (lambda: 5, lambda x: seen.append(x) or 7, seen.append)}, CPU, rounds=3)
    assert len(times["chain"]) == 4  # three steps, and together
    assert seen[:2] == [5, 7]


def test_a_gpu_is_timed_by_events_behind_writes_that_give_the_host_its_lead(monkeypatch):
    """On a clock that the calls move: 2 ms of writes at 0.1 ms each come before every call and are in no time; where launches
    count, one write for the cache, and it is over."""
    now, seen = [0.0], []

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing

        def record(self):
            self.at = now[0]

        def elapsed_time(self, end):
            return end.at - self.at

    def takes(ms, what):
        def call(*_):
            now[0] += ms
            seen.append(what)

        return call

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("done"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: types.SimpleNamespace(L2_cache_size=1024))
    monkeypatch.setattr(_timing, "MIN_FLUSH", 4096)
    monkeypatch.setattr(torch.Tensor, "zero_", takes(0.1, "write"))
    for lead, writes in ((_timing.LEAD_MS, 20), (0, 1)):
        run = _timing.cuda_timer(CPU, lead)
        seen.clear()
        (one,), (first, second) = run([takes(3, "call"), (takes(1, "forward"), takes(2, "backward"))])
        assert (one, first, second) == pytest.approx((3, 1, 2))
        before = seen[: seen.index("call")]
        assert abs(before.count("write") - writes) <= 1
        assert before.count("done") == (lead == 0)


def test_what_fails_is_told_apart_from_what_runs(monkeypatch):
    def fails():
        raise torch.OutOfMemoryError("Tried to allocate")

    good, bad = _timing.usable({"a": lambda: 1, "b": fails, "c": (lambda: 1, lambda x: x / 0)}, CPU)
    assert list(good) == ["a"]
    assert bad == {"b": "out of memory", "c": "ZeroDivisionError: division by zero"}

    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(RuntimeError, match="after chunkwise the GPU is in an error state"):
        _bench.require_healthy(torch.device("cuda"), "chunkwise")


def test_rows_are_on_the_disk_when_they_are_measured(tmp_path, monkeypatch):
    report = _bench.Report("kernels", tmp_path / "new", CPU, {"rounds": 3})
    report.table("times", ["name", "ms"])
    report.add("times", {"name": "a|b", "ms": float("nan"), "hidden": [1]})
    contents = json.loads(report.json.read_text())
    assert (contents["status"], contents["check"]) == ("unfinished", "not run")
    assert contents["tables"]["times"]["rows"] == [{"name": "a|b", "ms": "nan", "hidden": [1]}]
    assert {"PyTorch", "triton", "Python", "CPU", "commit"} <= contents["environment"].keys()
    assert "/" not in " ".join(map(str, contents["environment"].values())).replace("CPU/", "")  # no place of a machine
    assert _bench.without_paths("at /a/b/c.py:3, see https://a.b/c, 3/4") == "at c.py:3, see https://a.b/c, 3/4"
    report.finish()
    assert json.loads(report.json.read_text())["status"] == "complete"
    with pytest.raises(FileExistsError, match="never overwritten"):
        _bench.Report("kernels", report.folder, CPU, {})
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("INTERDOMAIN_COMMIT", "abc")
    assert _bench.commit() == "abc"


def test_a_gpu_that_pytorch_cannot_use_is_no_reason_for_the_tiny_mode(monkeypatch):
    """With a driver too old for this PyTorch, gpu.sh would pass its check on the CPU."""
    monkeypatch.setattr(launch.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match=r"this machine has GPUs \(/dev/nvidia0\)"):
        _bench.choose_device("auto")
    assert _bench.choose_device("cpu").type == "cpu"
