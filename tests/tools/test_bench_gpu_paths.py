"""What the benchmarks do on a GPU, driven without one: tensors stay on the CPU, and torch.cuda is a stand-in.

This runs every line that only a GPU would: events, graphs, peak memory, targets. The figures mean nothing.
"""

import contextlib
import dataclasses
import io
import json
import re
import sys
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
    _inference,
    _passes,
    _problems,
    _timing,
    bench_decode,
    bench_inference,
    bench_kernels,
    bench_training,
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


class Graph:
    """Nothing may be replayed that was not captured."""

    captured = False

    def replay(self):
        assert self.captured


@contextlib.contextmanager
def capture(graph):
    yield
    graph.captured = True


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    def run(command, jobs, add, *, left):
        """The workers' side of _apart.run, in this process."""
        for job in jobs:
            lines, rows = tmp_path / "lines", []
            monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(job)))
            assert bench_kernels.main([*command[3:], str(lines)]) == 0
            for line in map(json.loads, lines.read_text().splitlines()):
                rows += [line["row"]] if "row" in line else []
                if "end" in line:
                    add(line["end"], rows, None)
                    rows = []
            lines.unlink()

    stand_in = cuda_stand_in.streams() | dict(
        is_available=lambda: True,
        get_device_properties=lambda device: types.SimpleNamespace(
            **dict(
                name="Stand-in 9000",
                total_memory=2**37,
                L2_cache_size=2**16,
                multi_processor_count=132,
                major=9,
                minor=0,
            )
        ),
        synchronize=lambda: None,
        empty_cache=lambda: None,
        reset_peak_memory_stats=lambda: None,
        memory_allocated=lambda: 2**20,
        max_memory_allocated=lambda: 6 * 2**20,
        Event=Event,
        CUDAGraph=Graph,
        graph=capture,
    )
    for name, value in stand_in.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for module in (_problems, _features):
        monkeypatch.setattr(module, "generator", lambda device, seed: torch.Generator().manual_seed(seed))
    for name, value in dict(MIN_FLUSH=4096, COPY_BYTES=2**16, PRODUCT=64).items():
        monkeypatch.setattr(_timing, name, value)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91_002)
    monkeypatch.setattr(_bench, "_nvidia_smi", {"driver_version": "1.2.3", "compute_mode": "Default"}.get)
    monkeypatch.setattr(_bench, "cannot_launch", lambda: None)
    monkeypatch.setattr(_apart, "run", run)
    for tool in (bench_decode, bench_inference):
        monkeypatch.setattr(tool, "ceilings", lambda device: _timing.Ceilings(4e12, 8e14))
    with cuda_stand_in.OnTheCPU():
        yield


def results(folder, part):
    contents = json.loads((folder / f"{part}.json").read_text())
    assert contents["label"] == "measured on Stand-in 9000"
    assert contents["environment"]["driver"] == "1.2.3"
    assert re.fullmatch(r"\d+\.\d+|unknown", contents["environment"]["ptxas"])
    assert _bench.CPU_LABEL not in (folder / f"{part}.md").read_text()
    return contents


def test_kernels(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_kernels, "TARGETS", ((bench_kernels.OURS, bench_kernels.ATTENTION, 256, 0.3),))
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
    assert bench_kernels.main([*argv, "--mixers", "chunkwise", "sdpa-flash", "sdpa-cudnn", "fla-gla"]) == 0
    contents = results(tmp_path, "kernels")
    *tables, features, targets = contents["tables"].values()
    rows = {row["features"]: row for row in features["rows"]}
    assert {
        f"{kind}, {backend}" for kind in ("query", "key", "value") for backend in ("triton", "torch")
    } == rows.keys()
    assert rows["key, torch"]["of floor"] > 0
    assert "cannot run" in rows["key, triton"]["remark"]  # the stand-in's tensors are on the CPU
    for table in tables:
        rows = {row["mixer"]: row for row in table["rows"]}
        assert rows["chunkwise"]["peak MiB"] == 5.0
        assert rows["chunkwise"]["host ms"] > 0
        assert rows["chunkwise"]["both ms"] > 0
        assert rows["sdpa-cudnn"]["remark"]
        assert rows["sdpa-cudnn"]["by"] == "cuDNN 9.10.2"
        assert rows["sdpa-flash"]["by"] == f"PyTorch {torch.__version__}: kernel unknown"  # no CUPTI here
    met = {row["target"]: row for row in targets["rows"]}
    over = met["chunkwise over sdpa-flash, forward and backward, B=1 T=256 H=1 d=64 M=8"]
    assert over["measured"] == rows["chunkwise"]["of best attention"]
    assert over["met"] is (over["measured"] <= 0.3)
    assert sum(name.startswith("chunkwise, byte floor") for name in met) == 2


def test_passes_and_tiles_go_to_workers(gpu, tmp_path, monkeypatch):
    """The cases that a worker gets, and what becomes of its rows; here no pass can run, which each row says."""
    monkeypatch.setattr(_timing, "release", lambda device: None)  # slow, and once for every failure
    few = ["--output", str(tmp_path), "--shapes", "1x128x64", "1x1024x64", "--heads", "1", "--rounds", "1"]
    assert bench_kernels.main(["--passes", *few]) == 0
    short, cut = results(tmp_path, "passes")["tables"].values()
    names = [row["pass"] for row in cut["rows"]]
    groups = [name for group in _passes.GROUPS for name in group]
    assert names == [*groups, "all of a step"]
    assert {row["pass"] for row in short["rows"]} == {*names} - {"states", "costates", "chain"}
    assert all(row["remark"] for row in cut["rows"])
    monkeypatch.setattr(_passes, "compile_apart", lambda *args: None)
    monkeypatch.setattr(_passes, "TILES", {name: tiles[-1:] for name, tiles in _passes.TILES.items()})
    assert bench_kernels.main(["--tune", *few[:4], *few[5:]]) == 0
    tables = results(tmp_path, "tune")["tables"]
    assert list(tables) == [f"{one}, B=1 T=128 H=1 d=64 M=64" for one in _passes.PASSES]
    for table in tables.values():
        assert [row["shipped"] for row in table["rows"]].count(True) == 1
        assert len({row["tiles"] for row in table["rows"]}) == len(table["rows"]) == 3


def test_shapes_that_a_gpu_gets_by_default():
    shapes = [bench_kernels.parse_shape(text, 32, 64) for text in bench_kernels.SHAPES]
    assert [(s.B, s.T, s.d) for s in shapes] == [(8, 4096, 64), (2, 16_384, 64), (1, 32_768, 64), (8, 4096, 96)]


def test_decode(gpu, tmp_path):
    argv = [
        "--output",
        str(tmp_path),
        "--batches",
        "1",
        "--caches",
        "8",
        "--heads",
        "1",
        "--head-dim",
        "8",
        "--rounds",
        "1",
    ]
    assert bench_decode.main([*argv, "--basis", "8"]) == 0
    (table,) = results(tmp_path, "decode")["tables"].values()
    rows = {(row["step"], row["graph"]): row for row in table["rows"]}
    for step in ("interdomain, fused in place", "interdomain, plain PyTorch"):
        for graph in (False, True):
            assert rows[step, graph]["us"] > 0
            assert rows[step, graph]["layers"] > 2  # four times the stand-in's L2 cache
    softmax = [row for row in table["rows"] if row["step"].startswith("softmax, cache 8, ")]
    assert sorted(row["graph"] for row in softmax) == [False, True]
    assert all(row["us"] > 0 for row in softmax)


@pytest.fixture
def replaying(gpu, monkeypatch):
    """Graphs that replay, and states that are on CUDA."""
    for name, value in cuda_stand_in.streams().items():
        monkeypatch.setattr(torch.cuda, name, value)
    for place, name in ((Transformer, "init_state"), (_inference, "put")):
        make = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a, make=make, **k: cuda_stand_in.on_cuda(make(*a, **k)))


def test_inference(replaying, tmp_path, monkeypatch):
    few = dict(prompts=((2, 16),), long_prompt=(1, 24), chunk=8)
    monkeypatch.setattr(bench_inference, "GPU", dataclasses.replace(bench_inference.GPU, **few))
    monkeypatch.setitem(SIZES, "debug", dict(dim=16, n_layers=1, n_heads=2, head_dim=8, n_basis=4, vocab_size=64))
    argv = ["--sizes", "debug", "--batches", "1", "2", "--prefixes", "8", "12", "--steps", "2", "--rounds", "1"]
    assert bench_inference.main(["--output", str(tmp_path), *argv]) == 0
    contents = results(tmp_path, "inference")
    tables = contents["tables"]
    rows = tables["decode, debug"]["rows"]
    assert [row.get("remark") for row in rows] == [None] * 20
    assert {row["path"] for row in rows} == {
        *("interdomain, eager", "interdomain, graph"),
        *("softmax, eager", "softmax, static cache, graph", "softmax, exact cache, graph"),
    }
    assert all(row["of floor"] == pytest.approx(row["floor ms"] / row["ms a step"]) for row in rows)
    assert all(row["floor ms"] == pytest.approx(1e3 * row["MB"] * 1e6 / 4e12) for row in rows)
    prompt, long_prompt = tables["peak memory of reading a prompt, debug"]["rows"]
    assert prompt["interdomain whole GiB"] == prompt["interdomain chunked GiB"] > prompt["softmax whole GiB"]
    assert "softmax whole GiB" not in long_prompt
    assert {row["met"] for row in tables["targets"]["rows"]} == {"not measured"}  # they are the 1.3B model's


def test_a_gpu_that_nothing_can_be_compiled_for_is_refused(gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_bench, "cannot_launch", lambda: "there is no C compiler")
    assert check_kernels.main(["--output", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err == "error: there is no C compiler.\n"
    assert not (tmp_path / "x").exists()


def test_a_gpu_that_takes_one_process_at_a_time(gpu, monkeypatch, tmp_path, capsys):
    """Every process but the first would fail there."""
    monkeypatch.setattr(_bench.os, "sched_getaffinity", lambda pid: range(16))
    assert (_bench.processes(torch.device("cuda")), _bench.processes(torch.device("cpu"))) == (8, 1)
    monkeypatch.setattr(_bench, "_nvidia_smi", {"compute_mode": "Exclusive_Process"}.get)
    assert _bench.processes(torch.device("cuda")) == 1
    assert check_kernels.main(["--output", str(tmp_path / "x"), "--workers", "8"]) == 2
    assert "Leave --workers out, which means --workers 1 here" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    monkeypatch.setattr(_passes.subprocess, "Popen", None)
    _passes.compile_apart(bench_kernels.parse(["--tune"]), _bench.Deadline(10))


def test_the_step_s_graph_is_checked_by_replay(gpu):
    """Captured once, then fed token by token; a graph that replays nothing must not pass."""
    (case, *_) = (c for c in check_kernels.groups(True)["step"] if c.mode == "graph")
    row = check_kernels.run_case(_cases._tiny(case), torch.device("cuda"))
    assert row["result"] == "FAIL"


def test_training_cases(gpu, tmp_path, monkeypatch, capsys):
    pytest.importorskip("torchtitan", reason="the extra `train` is not installed")
    monkeypatch.setattr(bench_training.launch, "torchrun_command", lambda *a: ["true"])
    monkeypatch.setattr(bench_training, "write_data", lambda *a: None)
    seen = {"throughput(tps)": {1: 1.0, 5: 2.0, 10: 40_000.0, 20: 42_000.0}, "mfu(%)": {10: 50.0, 20: 51.0}}
    monkeypatch.setattr(bench_training, "scalars", lambda output: seen)
    assert bench_training.main(["--output", str(tmp_path), "--conditions", "softmax", "interdomain"]) == 0
    contents = results(tmp_path, "training")
    assert contents["options"]["sizes"] == ["1.3B"]
    ((name, table),) = contents["tables"].items()
    assert name == "1.3B, 4 x 4,096 tokens per rank and step"
    assert {row["case"].split(":")[0] for row in table["rows"]} == {"softmax", "interdomain"}
    assert all(row["tokens/s"] == 41_000 and row["MFU %"] == 50.5 for row in table["rows"])
    assert all(row["over softmax"] == 1.0 for row in table["rows"])
    assert bench_training.main(["--output", str(tmp_path / "x"), "--device", "cpu"]) == 2
    assert "CUDA_VISIBLE_DEVICES" in capsys.readouterr().err


def test_the_tile_list_is_compiled_in_parallel_first(gpu, monkeypatch):
    started = []

    class Process:
        def __init__(self, command):
            started.append(command)

        def wait(self, timeout=None):
            return 0

    monkeypatch.setattr(_passes.subprocess, "Popen", Process)
    args = bench_kernels.parse(["--tune", "--shapes", "8x4096x64", "--basis", "32"])
    _passes.compile_apart(args, _bench.Deadline(10))
    for i, command in enumerate(started):
        again = bench_kernels.parse(command[3:])
        assert again.compile_part == f"{i}/{len(started)}"
        assert (again.tune, again.shapes, again.basis, again.heads) == (True, ["8x4096x64"], 32, None)
