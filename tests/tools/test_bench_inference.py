"""bench_inference in CPU tiny mode: what it writes, what does not fit; and its roofline."""

import json

import pytest
import torch

from interdomain.model import SIZES, Transformer, build_config
from interdomain.model.generation import decode
from interdomain.tools import _bench, bench_inference
from interdomain.tools.bench_inference import put, random_model, step_bytes

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU tiny mode; on a GPU run benchmarks/gpu.sh")
CPU = torch.device("cpu")
SMALL = dict(dim=16, n_layers=1, n_heads=2, head_dim=8, n_basis=4, vocab_size=64)
PATHS = ["softmax, eager", "softmax, graph", "interdomain, eager", "interdomain, graph"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(SIZES, "debug", SMALL)


def run(folder, *argv):
    assert bench_inference.main(["--output", str(folder), *argv]) == 0
    contents = json.loads((folder / "inference.json").read_text())
    return contents, {name: table["rows"] for name, table in contents["tables"].items()}


def test_every_path_in_tiny_mode(tmp_path):
    contents, tables = run(tmp_path, "--batches", "2", "--dtype", "bf16-products")
    assert contents["status"] == "complete"
    assert contents["label"] == _bench.CPU_LABEL
    rows = tables["decode, debug"]
    assert [(row["prefix"], row["path"]) for row in rows] == [(prefix, path) for prefix in (32, 64) for path in PATHS]
    for row in rows:
        if "graph" in row["path"]:
            assert "needs a GPU" in row["remark"]
        else:
            assert row["tokens/s"] == pytest.approx(2e3 / row["ms a step"])
    assert rows[2]["speedup"] == pytest.approx(rows[0]["ms a step"] / rows[2]["ms a step"])
    read = {(row["prompt"], row["read"]): row["tokens/s"] for row in tables["reading a prompt"]}
    assert min(read.values()) > 0
    ways = [f"{kind} {how}" for how in ("chunked", "whole") for kind in ("interdomain", "softmax")]
    assert list(read) == [*(("B=2, 64 tokens", way) for way in ways), ("B=1, 128 tokens", "interdomain chunked")]
    (summary,) = tables["decode, summary"]
    assert summary["softmax eager ms"] == summary["fastest softmax ms"]


def test_what_does_not_fit_is_a_result(tmp_path, monkeypatch):
    """softmax has no room for 64 tokens: its cells say so, the others are measured."""
    init_state = Transformer.init_state

    def little(self, batch, capacity=0):
        if capacity >= 64 and self.config.mixer.kind == "softmax":
            raise torch.OutOfMemoryError("Tried to allocate")
        return init_state(self, batch, capacity)

    monkeypatch.setattr(Transformer, "init_state", little)
    contents, tables = run(tmp_path, "--batches", "1")
    assert contents["status"] == "complete"
    rows = {(row["path"], row["prefix"]): row for row in tables["decode, debug"]}
    assert rows["softmax, eager", 64]["remark"] == "out of memory"
    assert rows["softmax, eager", 32]["ms a step"] > 0
    assert rows["interdomain, eager", 64]["ms a step"] > 0
    remarks = {row["read"]: row.get("remark") for row in tables["reading a prompt"]}
    assert (remarks["softmax whole"], remarks["interdomain whole"]) == ("out of memory", None)


def test_a_time_limit_that_has_passed_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(_bench.Deadline, "passed", True)
    contents, tables = run(tmp_path)
    assert contents["status"] == "unfinished"
    assert not any(tables.values())


def test_a_state_is_put_at_its_prefix():
    model = random_model(build_config("debug", "softmax"), CPU, torch.float32)
    state = model.init_state(2, capacity=20)
    state.cursor = torch.zeros(1, dtype=torch.int64)
    for _ in range(2):
        put(state, 8)
        decode(model, torch.zeros(2, dtype=torch.int64), state)
        assert (state.cursor.tolist(), state.position.tolist()) == ([9], [9, 9])
        assert (state.layers[0].k.abs().sum((0, 1, 3)) > 0).nonzero().flatten().tolist() == [8]


def test_bytes_of_a_step_by_hand():
    """dim 16, 2 heads of 8, M = 4, vocabulary 64, SwiGLU width 128; bf16 weights, fp32 state and dynamics."""
    shared = 2 * (4 * 16 * 16 + 3 * 16 * 128 + 3 * 16 + 16 * 64)  # projections, SwiGLU, norms, output
    softmax = random_model(build_config("debug", "softmax"), CPU, torch.bfloat16)
    cache = softmax.init_state(3, capacity=100)
    assert step_bytes(softmax, cache, 40) == shared + 3 * 41 * 2 * 16 * 2  # keys and values of 40 tokens in, one out
    ours = random_model(build_config("debug"), CPU, torch.bfloat16)
    small = 2 * (2 * (4 + 1) * 16 + 2 * (8 + 16))  # two convolutions of width 4, two input norms
    dynamics = 4 * 2 * (4 * 2 + 4 * 8)  # Lambda and the upper half of W
    state = 3 * (4 * 2 * 4 * 16 * 2 + 2 * 2 * 3 * 16)  # X, and the last three inputs of two convolutions
    assert step_bytes(ours, ours.init_state(3), 40) == shared + small + dynamics + 2 * state
