"""What the benchmarks stand on: counts of bytes and FLOPs against hand counts, timing in turns, results on the disk."""

import json
import platform
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
    per = {name: n / 2**20 for name, n in _problems.io_bytes(AT_4K).items()}
    assert per == {"forward": 4 * 128, "backward": 7 * 128, "both": 11 * 128}
    per = {name: n / 2**20 for name, n in _problems.io_bytes(AT_4K, "linear").items()}
    assert per == {"forward": 4 * 128, "backward": 6 * 128, "both": 10 * 128}  # z in, y out; z, dy in, dz out
    per = {name: n / 2**20 for name, n in _problems.io_bytes(AT_4K, "mamba2").items()}
    assert per == {"forward": 2 * 128, "backward": 3 * 128, "both": 5 * 128}
    grouped = _problems.io_bytes(Shape(B=1, T=1, H=1, d=64, G=4))
    assert grouped["forward"] == 128 * (4 + 1 + 1 + 4)
    assert grouped["backward"] == 128 * (4 + 1 + 1 + 4 + 4 + 1 + 1)


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
    forward = _problems.chunkwise_costs(AT_4K, ours)["forward"]
    assert forward == (1024 * 2**20, 2 * (read + mix_expand) * 2**20)
    kept = _problems.chunkwise_costs(AT_4K, ours, recompute=False)
    assert kept["backward"][0] == (4 * 512 + 2 * 640) * 2**20
    both = _problems.chunkwise_costs(AT_4K, ours)["both"]
    assert both == ((4096 + 768) * 2**20, 2 * 405_504 * 2**20)
    assert both[0] == kept["forward"][0] + kept["backward"][0] + 512 * 2**20  # contract once more
    broad = Shape(B=8, T=4096, d=96)
    wide = _problems.chunkwise_costs(broad, plan(broad))["forward"]
    assert wide[0] == (2 * (2 * 192 + 256) + 512) * 2**20  # mix is a pass of its own
    # Padded to 128 channels: contract by halves of M, each with all scores; expand by halves of the channels.
    assert _problems.pass_costs(broad, plan(broad))["contract"][1] == 2**21 * (2 * 64 * 128 + table + 4 * 64 * 128)
    assert _problems.pass_costs(broad, plan(broad))["expand"][1] == 2**21 * 2 * read
    cut = _problems.chunkwise_costs(AT_4K, ours, segments=4)
    assert cut["forward"][0] - forward[0] == 256 * 2**20
    assert cut["backward"][0] - (both[0] - forward[0]) == (256 + 768) * 2**20


def test_flops_are_the_model_s_own():
    """The same algebra, counted a second time in plugin/model/flops.py, where nothing is done twice: one layer of the 1.3B
    model, per token, W in a pass of its own."""
    config, shape = build_config("1.3B", "interdomain"), Shape(B=1, T=4096)
    mine = _problems.chunkwise_costs(shape, plan(shape)._replace(fused=None))["forward"][1] / 4096
    assert mine == forward_flops_per_token(config, 4096)["mixer"] / config.n_layers
    softmax = build_config("1.3B", "softmax")
    mine = _problems.attention_flops(Shape(B=1, T=4096))["forward"] / 4096
    assert mine == forward_flops_per_token(softmax, 4096)["mixer"] / softmax.n_layers


def test_attention_by_hand():
    """T = 4: 10 pairs of query and key, a multiply-add per channel for the score and one for the value."""
    flops = _problems.attention_flops(Shape(B=1, T=4, H=1, d=3))
    assert flops == {"forward": 2 * 2 * 10 * 3, "backward": 5 * 2 * 10 * 3, "both": 7 * 2 * 10 * 3}
    assert _problems.attention_step_bytes(1, 1, 64, 512) == 2 * 128 * 512 + 4 * 128


def test_bytes_of_a_step_by_hand():
    """16 M P for the state in and out, 8 M^2 for half of W, four bf16 rows of the token."""
    assert _problems.step_bytes(1, 1, 64, 64) == 131_072 + 32_768 + 4 * 128
    assert _problems.step_bytes(8, 2, 64, 64) == 16 * (131_072 + 4 * 128) + 2 * 32_768


def test_floor_is_the_larger_of_two_times():
    limits = _timing.Ceilings(bandwidth=1e12, flops=1e14)
    assert limits.floor_ms(2e9) == pytest.approx(2.0)
    assert limits.floor_ms(2e9, 5e11) == pytest.approx(5.0)


def test_ceilings_are_measured():
    limits = _timing.ceilings(CPU)
    assert 1e7 < limits.bandwidth < 1e13
    assert 1e7 < limits.flops < 1e14


# Timing


def test_calls_take_turns_and_slow_ones_fewer():
    order = []

    def slow():
        order.append("slow")
        end = _timing.time.perf_counter() + 0.02
        while _timing.time.perf_counter() < end:
            pass

    calls = {"fast": lambda: order.append("fast"), "slow": slow}
    times = _timing.interleaved(calls, CPU, rounds=12, seconds=0.08)
    assert times["fast"][-1].count == 12
    assert times["slow"][-1].count in (3, 4)
    assert times["slow"][-1].median >= 20
    assert times["fast"][-1].low <= times["fast"][-1].median <= times["fast"][-1].high
    turns = [i for i, name in enumerate(order[2:]) if name == "slow"]
    assert max(turns) - min(turns) >= 6  # spread over the rounds, not in a row


def test_a_chain_is_timed_by_step():
    seen = []
    call = (lambda: 5, lambda x: seen.append(x) or 7, seen.append)
    times = _timing.interleaved({"chain": call}, CPU, rounds=3)
    assert len(times["chain"]) == 4  # three steps, and together
    assert seen[:2] == [5, 7]


class FakeEvent:
    """A CUDA event on a clock that the calls move."""

    now = 0.0

    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self):
        self.at = FakeEvent.now

    def elapsed_time(self, end):
        return end.at - self.at


def test_events_leave_the_flush_out_and_split_the_steps(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: types.SimpleNamespace(L2_cache_size=1024))
    monkeypatch.setattr(_timing, "MIN_FLUSH", 4096)

    def takes(ms):
        def call(*_):
            FakeEvent.now += ms

        return call

    def flush(self):
        FakeEvent.now += 1000
        return self

    monkeypatch.setattr(torch.Tensor, "zero_", flush)
    run = _timing.cuda_timer(CPU)
    assert run([takes(3), (takes(1), takes(2))]) == [[3], [1, 2]]


def test_the_host_gets_its_head_start(monkeypatch):
    """2 ms of writes at 0.1 ms each come before every call; where launches count, the one for the cache, and it is over."""
    writes = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: writes.append("done"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: types.SimpleNamespace(L2_cache_size=1024))
    monkeypatch.setattr(_timing, "MIN_FLUSH", 4096)

    def flush(self):
        FakeEvent.now += 0.1
        writes.append(self.nbytes)

    monkeypatch.setattr(torch.Tensor, "zero_", flush)
    for lead, expected in ((_timing.LEAD_MS, 20), (0, 1)):
        run = _timing.cuda_timer(CPU, lead)
        writes.clear()
        run([lambda: writes.append("call")])
        before = writes[: writes.index("call")]
        assert abs(before.count(4096) - expected) <= 1
        assert before.count("done") == (lead == 0)
        assert (before[0], before[-1]) == (4096, 4096 if lead else "done")


def test_the_host_s_time_is_taken_five_times_or_for_half_a_second(monkeypatch):
    calls, clock = [], [0.0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(_timing.time, "perf_counter", lambda: clock[0])

    def call(seconds):
        clock[0] += seconds
        calls.append(seconds)

    for seconds, expected in ((0.001, 5), (0.2, 3), (2.0, 1)):
        calls.clear()
        assert _timing.host_ms(lambda s=seconds: call(s), torch.device("cuda")) == pytest.approx(1e3 * seconds)
        assert len(calls) == expected


def test_what_fails_is_told_apart_from_what_runs():
    def fails():
        raise torch.OutOfMemoryError("Tried to allocate")

    good, bad = _timing.usable({"a": lambda: 1, "b": fails, "c": (lambda: 1, lambda x: x / 0)}, CPU)
    assert list(good) == ["a"]
    assert bad == {"b": "out of memory", "c": "ZeroDivisionError: division by zero"}
    good, bad = _timing.usable({"a": lambda: 1}, CPU, passed=lambda: True)
    assert (good, bad) == ({}, {"a": "not run: time limit"})


def test_a_broken_gpu_ends_the_part(monkeypatch):
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
    assert contents["status"] == "unfinished"
    assert contents["check"] == "not run"
    assert contents["tables"]["times"]["rows"][0] == {"name": "a|b", "ms": 1.5, "hidden": [1]}
    page = report.markdown.read_text()
    assert f"**{_bench.CPU_LABEL}.**" in page
    assert "| a/b | 1.500 | - |" in page
    assert "| worse | nan | - |" in page
    assert {"PyTorch", "triton", "Python", "CPU", "commit"} <= contents["environment"].keys()
    assert sorted(p.name for p in report.folder.iterdir()) == ["kernels.json", "kernels.md"]
    report.finish()
    assert json.loads(report.json.read_text())["status"] == "complete"
    assert capsys.readouterr().out.splitlines()[-1] == f"complete: wrote {report.json} and kernels.md"


def test_results_are_never_overwritten(tmp_path):
    _bench.Report("decode", tmp_path, CPU, {})
    with pytest.raises(FileExistsError, match=r"decode.json is there already.*--output"):
        _bench.Report("decode", tmp_path, CPU, {})


@pytest.mark.parametrize("status", ["failed", "unfinished", "passed"])
def test_a_check_that_did_not_pass_marks_what_follows(status, tmp_path, capsys):
    (tmp_path / "check.json").write_text(json.dumps({"status": status}))
    report = _bench.Report("decode", tmp_path, CPU, {})
    for said in (report.markdown.read_text(), capsys.readouterr().out):
        assert (_bench.CHECK_FAILED in said) == (status != "passed")
    assert json.loads(report.json.read_text())["check"] == status


def test_the_record_names_no_place():
    record = " ".join(map(str, _bench.environment(CPU).values()))
    assert "/" not in record.replace("CPU/", "")
    assert _bench.without_paths("at /a/b/c.py:3, see https://a.b/c, 3/4") == "at c.py:3, see https://a.b/c, 3/4"
    assert _bench.reason(OSError("no /x/y/z")) == "OSError: no z"


def test_the_processor_has_a_name_where_the_kernel_has_only_numbers(monkeypatch):
    """As on a GH200: no "model name" in /proc/cpuinfo."""
    numbers = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"
    monkeypatch.setattr(_bench.Path, "read_text", lambda path: numbers)
    monkeypatch.setattr(
        _bench, "_output", lambda command: "Vendor ID:  ARM\nModel name:  Neoverse-V2" if command == ["lscpu"] else ""
    )
    assert _bench._cpu_model() == "Neoverse-V2"
    monkeypatch.setattr(_bench, "_output", lambda command: "Vendor ID:  ARM")
    assert _bench._cpu_model() == platform.machine()
    monkeypatch.setattr(_bench.Path, "read_text", lambda path: f"model name\t: EPYC\n{numbers}")
    assert _bench._cpu_model() == "EPYC"


def test_the_commit_can_be_named(monkeypatch):
    def no_git(*args, **kwargs):
        raise FileNotFoundError

    monkeypatch.setattr(_bench.subprocess, "run", no_git)
    monkeypatch.delenv("INTERDOMAIN_COMMIT", raising=False)
    assert _bench.commit() == "unknown"
    monkeypatch.setenv("INTERDOMAIN_COMMIT", "abc")
    assert _bench.commit() == "abc"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((None, "-"), (True, "yes"), (1234, "1,234"), (1234.5, "1,234")),
        *((12.34, "12.3"), (1e-5, "1.0e-05"), (0.0, "0.000")),
    ],
)
def test_figures_are_short(value, shown):
    assert _bench.show(value) == shown


def test_inputs_are_what_the_door_takes():
    from interdomain import scan

    for linear in (False, True):
        inputs, cotangents = _problems.make_inputs(
            Shape(B=1, T=5, H=2, d=4, M=3, G=2), torch.bfloat16, CPU, linear=linear, state=True, mixed=True
        )
        out, state = (scan.linear_scan if linear else scan.interdomain_scan)(**inputs)
        assert (out.shape, state.shape) == tuple(x.shape for x in cotangents)
        assert all(x.requires_grad and x.is_leaf for x in inputs.values())


def test_a_gpu_that_pytorch_cannot_use_is_no_reason_for_the_tiny_mode(monkeypatch):
    """With a driver too old for this PyTorch, gpu.sh would pass its check on the CPU."""
    monkeypatch.setattr(launch.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match=r"this machine has GPUs \(/dev/nvidia0\)"):
        _bench.choose_device("auto")
    assert _bench.choose_device("cpu").type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert _bench.choose_device("auto").type == "cpu"
