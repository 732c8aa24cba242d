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
AT_4K = Shape(B=8, T=4096)  # 1,048,576 tokens and heads


# Floors


def test_bytes_of_the_interface_by_hand():
    """bf16, head width 64: q, k, v, o are 128 bytes each; backward q, k, v, do in and dq, dk, dv out."""

    def per_token(mixer):
        return [n / 2**20 / 128 for n in _problems.io_bytes(AT_4K, mixer).values()]

    assert per_token("") == [4, 7, 11]
    assert per_token("linear") == [4, 6, 10]  # z in, y out; z, dy in, dz out
    assert per_token("mamba2") == [2, 3, 5]
    grouped = _problems.io_bytes(Shape(B=1, T=1, H=1, d=64, G=4))
    assert [n / 128 for n in grouped.values()][:2] == [4 + 1 + 1 + 4, 4 + 1 + 1 + 4 + 4 + 1 + 1]


def plan(shape):
    pytest.importorskip("triton")
    return _problems.tiles(shape, CPU)  # that of sm_90


def test_bytes_and_flops_of_the_passes_by_hand():
    """kernels/README.md: 128 + 128 in, 256 out. Multiply-adds at M = R = D = L = 64 are counted in the kernels' products."""
    ours = plan(AT_4K)
    per = {name: (b / 2**20, f / 2**21) for name, (b, f) in _problems.pass_costs(AT_4K, ours).items()}
    scores, table, state, W = 64 * 64, 2 * 64 * 64, 4 * 64 * 64, 128 * 128
    read = scores + table + state
    # Two blocks of 32 values: W and the scores once per block. Two of 32 basis functions: q k^T once per block; b~ held.
    mix_expand = 2 * (W + table + (scores + state) // 2)
    decay = 2 * (scores + 2 * table // 2 + 2 * state // 2)
    assert (mix_expand, decay) == (69_632, 57_344)
    assert per == {
        "contract": (512, read),
        "mix_expand": (512, mix_expand),
        "mix_backward": (1024, 3 * W),
        "expand": (512, read),
        "adjoint_decay": (640, read + decay),
        "adjoint": (512, read),
        "decay": (512, decay),
        "mix": (512, W),
        "states": (256, state),
        "costates": (768, state),
    }
    nbytes, flops = _problems.chunkwise_costs(AT_4K, ours)
    kept, _ = _problems.chunkwise_costs(AT_4K, ours, recompute=False)
    cut, _ = _problems.chunkwise_costs(AT_4K, ours, segments=4)
    assert (nbytes["forward"], flops["forward"]) == (1024 * 2**20, 2 * (read + mix_expand) * 2**20)
    assert (nbytes["both"], flops["both"]) == ((4096 + 768) * 2**20, 2 * 405_504 * 2**20)
    assert nbytes["both"] - kept["both"] == 512 * 2**20  # contract once more
    assert [cut[p] - nbytes[p] for p in ("forward", "backward")] == [256 * 2**20, (256 + 768) * 2**20]
    broad = Shape(B=8, T=4096, d=96)
    wide = _problems.pass_costs(broad, plan(broad))
    assert _problems.chunkwise_costs(broad, plan(broad))[0]["forward"] == (2 * (2 * 192 + 256) + 512) * 2**20
    # Padded to 128 channels: contract by halves of M, each with all scores; expand by halves of the channels.
    assert wide["contract"][1] == 2**21 * (2 * 64 * 128 + table + 4 * 64 * 128)
    assert wide["expand"][1] == 2**21 * 2 * read


def test_flops_are_the_model_s_own():
    """The same algebra, counted a second time in plugin/model/flops.py, where nothing is done twice: one layer of the 1.3B
    model, per token, W in a pass of its own."""
    shape = Shape(B=1, T=4096)
    mine = _problems.chunkwise_costs(shape, plan(shape)._replace(fused=None))[1]["forward"] / 4096
    for condition, flops in ("interdomain", mine), ("softmax", _problems.attention_flops(shape)["forward"] / 4096):
        config = build_config("1.3B", condition)
        assert flops == forward_flops_per_token(config, 4096)["mixer"] / config.n_layers
    # T = 4: 10 pairs of query and key, a multiply-add per channel for the score and one for the value.
    flops = _problems.attention_flops(Shape(B=1, T=4, H=1, d=3))
    assert flops == {"forward": 2 * 2 * 10 * 3, "backward": 5 * 2 * 10 * 3, "both": 7 * 2 * 10 * 3}


def test_floor_is_the_larger_of_two_times():
    limits = _timing.Ceilings(bandwidth=1e12, flops=1e14)
    assert limits.floor_ms(2e9) == pytest.approx(2.0)
    assert limits.floor_ms(2e9, 5e11) == pytest.approx(5.0)
    assert all(1e7 < x < 1e14 for x in _timing.ceilings(CPU))


# Timing


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
    assert _timing.usable({"a": lambda: 1}, CPU, passed=lambda: True) == ({}, {"a": "not run: time limit"})

    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(RuntimeError, match="after chunkwise the GPU is in an error state"):
        _bench.require_healthy(torch.device("cuda"), "chunkwise")


# Results


def test_rows_are_on_the_disk_when_they_are_measured(tmp_path, capsys):
    report = _bench.Report("kernels", tmp_path / "new" / "results", CPU, {"rounds": 3})
    report.table("times", ["name", "ms", "peak"])
    report.add("times", {"name": "a|b", "ms": 1.5, "hidden": [1]})
    report.add("times", {"name": "worse", "ms": float("nan")})
    contents = json.loads(report.json.read_text())
    assert (contents["status"], contents["check"]) == ("unfinished", "not run")
    assert contents["tables"]["times"]["rows"][0] == {"name": "a|b", "ms": 1.5, "hidden": [1]}
    page = report.markdown.read_text()
    for line in (f"**{_bench.CPU_LABEL}.**", "| a/b | 1.500 | - |", "| worse | nan | - |"):
        assert line in page
    assert {"PyTorch", "triton", "Python", "CPU", "commit"} <= contents["environment"].keys()
    assert sorted(p.name for p in report.folder.iterdir()) == ["kernels.json", "kernels.md"]
    report.finish()
    assert json.loads(report.json.read_text())["status"] == "complete"
    assert capsys.readouterr().out.splitlines()[-1] == f"complete: wrote {report.json} and kernels.md"
    with pytest.raises(FileExistsError, match="never overwritten"):
        _bench.Report("kernels", report.folder, CPU, {})


@pytest.mark.parametrize("status", ["failed", "unfinished", "passed"])
def test_a_check_that_did_not_pass_marks_what_follows(status, tmp_path, capsys):
    (tmp_path / "check.json").write_text(json.dumps({"status": status}))
    report = _bench.Report("decode", tmp_path, CPU, {})
    for said in (report.markdown.read_text(), capsys.readouterr().out):
        assert (_bench.CHECK_FAILED in said) == (status != "passed")
    assert json.loads(report.json.read_text())["check"] == status


def test_the_record_names_no_place_and_the_commit_where_git_cannot(monkeypatch):
    record = " ".join(map(str, _bench.environment(CPU).values()))
    assert "/" not in record.replace("CPU/", "")
    assert _bench.without_paths("at /a/b/c.py:3, see https://a.b/c, 3/4") == "at c.py:3, see https://a.b/c, 3/4"
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("INTERDOMAIN_COMMIT", "abc")
    assert _bench.commit() == "abc"


def test_figures_are_short():
    values = [None, True, 1234, 1234.5, 12.34, 1e-5, 0.0, float("inf"), [1, 2.0]]
    assert " ".join(map(_bench.show, values)) == "- yes 1,234 1,234 12.3 1.0e-05 0.000 inf 1 2.000"


def test_a_gpu_that_pytorch_cannot_use_is_no_reason_for_the_tiny_mode(monkeypatch):
    """With a driver too old for this PyTorch, gpu.sh would pass its check on the CPU."""
    monkeypatch.setattr(launch.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match=r"this machine has GPUs \(/dev/nvidia0\)"):
        _bench.choose_device("auto")
    assert _bench.choose_device("cpu").type == "cpu"
