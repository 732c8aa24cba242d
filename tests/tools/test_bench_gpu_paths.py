"""What the benchmarks do on a GPU, driven without one: tensors stay on the CPU, and torch.cuda is a stand-in.

This runs every line that only a GPU would: events, graphs, peak memory, workers. The figures mean nothing.
"""

import json
import time
import types

import pytest
import torch

from interdomain.model import SIZES, Transformer
from interdomain.tools import (
    _apart,
    _bench,
    _cases,
    _features,
    _passes,
    _problems,
    _timing,
    bench_inference,
    bench_kernels,
    check_kernels,
)

from .. import cuda_stand_in

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU; there is one")


class Event:
    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


@pytest.fixture
def gpu(monkeypatch):
    sizes = dict(total_memory=2**37, L2_cache_size=2**16, multi_processor_count=132, major=9, minor=0)
    stand_in = cuda_stand_in.streams() | dict(
        is_available=lambda: True,
        get_device_properties=lambda device: types.SimpleNamespace(name="Stand-in 9000", **sizes),
        synchronize=lambda: None,
        empty_cache=lambda: None,
        reset_peak_memory_stats=lambda: None,
        memory_allocated=lambda: 2**20,
        max_memory_allocated=lambda: 6 * 2**20,
        Event=Event,
    )
    for name, value in stand_in.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for module in (_problems, _features):
        monkeypatch.setattr(module, "generator", lambda device, seed: torch.Generator().manual_seed(seed))
    for name, value in dict(MIN_FLUSH=4096, DATASHEET={"Stand-in": (4e12, 8e14)}).items():
        monkeypatch.setattr(_timing, name, value)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91_002)
    monkeypatch.setattr(_bench, "nvidia_smi", {"driver_version": "1.2.3", "compute_mode": "Default"}.get)
    monkeypatch.setattr(_bench, "cannot_launch", lambda: None)
    monkeypatch.setattr(_apart, "run", _apart.inline)
    with cuda_stand_in.OnTheCPU():
        yield


def results(folder, part):
    contents = json.loads((folder / f"{part}.json").read_text())
    assert contents["label"] == "measured on Stand-in 9000"
    assert contents["environment"]["driver"] == "1.2.3"
    return contents


def test_kernels_and_passes(gpu, tmp_path, monkeypatch):
    """The cases that a worker gets, and what becomes of its rows; what cannot run on a CPU says so."""
    monkeypatch.setattr(_timing, "release", lambda device: None)  # slow, and once for every failure
    argv = [
        "--output",
        str(tmp_path),
        "--shapes",
        "1x32x64",
        "1x256x64",
        "--heads",
        "1",
        "--basis",
        "8",
        "--rounds",
        "1",
    ]
    mixers = ["--mixers", "chunkwise", "features", "sdpa-flash", "sdpa-cudnn", "fla-gla"]
    assert bench_kernels.main([*argv, *mixers]) == 0
    for table in results(tmp_path, "kernels")["tables"].values():
        rows = {row["mixer"]: row for row in table["rows"]}
        assert rows["chunkwise"]["peak MiB"] == 5.0
        assert rows["chunkwise"]["of roofline"] == pytest.approx(
            rows["chunkwise"]["roofline ms"] / rows["chunkwise"]["both ms"]
        )
        assert "cannot run" in rows["features"]["remark"]  # the stand-in's tensors are on the CPU
        assert rows["sdpa-cudnn"]["remark"]
        assert rows["fla-gla"]["remark"] == "fla is not installed"
    assert bench_kernels.main(["--passes", *argv]) == 0
    for table in results(tmp_path, "passes")["tables"].values():
        groups = [name for group in _passes.GROUPS for name in group]
        assert [row["pass"] for row in table["rows"]] == [*groups, "all of a step"]
        assert all(row["remark"] for row in table["rows"])


def test_inference(gpu, tmp_path, monkeypatch):
    """Graphs that replay, and states that are on CUDA."""
    for place, name in ((Transformer, "init_state"), (bench_inference, "put")):
        make = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a, make=make, **k: cuda_stand_in.on_cuda(make(*a, **k)))
    monkeypatch.setattr(
        bench_inference, "GPU", bench_inference.GPU | dict(prompts=((2, 16), (1, 24)), chunk=8, rounds=1)
    )
    monkeypatch.setitem(SIZES, "debug", dict(dim=16, n_layers=1, n_heads=2, head_dim=8, n_basis=4, vocab_size=64))
    argv = ["--sizes", "debug", "--batches", "1", "2", "--prefixes", "8", "12", "--steps", "2"]
    assert bench_inference.main(["--output", str(tmp_path), *argv]) == 0
    tables = results(tmp_path, "inference")["tables"]
    rows = tables["decode, debug"]["rows"]
    assert [row.get("remark") for row in rows] == [None] * 16
    assert all(row["of roofline"] == pytest.approx(row["roofline ms"] / row["ms a step"]) for row in rows)
    prompt = {row["read"]: row for row in tables["reading a prompt"]["rows"][:-1]}
    assert prompt["interdomain whole"]["GiB"] == prompt["interdomain chunked"]["GiB"] > prompt["softmax whole"]["GiB"]
    assert tables["reading a prompt"]["rows"][-1]["read"] == "interdomain chunked"


def test_a_gpu_that_nothing_can_be_compiled_for_is_refused(gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_bench, "cannot_launch", lambda: "there is no C compiler")
    assert check_kernels.main(["--output", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err == "error: there is no C compiler.\n"
    assert not (tmp_path / "x").exists()


def test_a_gpu_that_takes_one_process_at_a_time(gpu, monkeypatch):
    """Every process but the first would fail there."""
    monkeypatch.setattr(_bench.os, "sched_getaffinity", lambda pid: range(16))
    assert _bench.processes() == 8
    monkeypatch.setattr(_bench, "nvidia_smi", {"compute_mode": "Exclusive_Process"}.get)
    assert _bench.processes() == 1


def test_the_check(gpu, tmp_path, monkeypatch):
    """Its groups go to workers, each row is judged there; a graph that replays nothing must not pass."""
    (case, *_) = (c for c in check_kernels.groups(True)["step"] if c.mode == "graph")
    tiny = {"step": [_cases._tiny(case)], "reference": check_kernels.groups(False)["reference"]}
    monkeypatch.setattr(check_kernels, "groups", lambda cuda: tiny)
    assert check_kernels.main(["--output", str(tmp_path / "good")]) == 0
    assert results(tmp_path / "good", "check")["status"] == "passed"
    monkeypatch.setattr(check_kernels, "captured", lambda call: (lambda: None, call()))
    assert check_kernels.main(["--output", str(tmp_path / "bad")]) == 1
    (row,) = results(tmp_path / "bad", "check")["tables"]["step"]["rows"]
    assert row["result"] == "FAIL"
