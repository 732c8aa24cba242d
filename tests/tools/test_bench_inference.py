"""bench_inference in CPU tiny mode: what it writes, what does not fit; and its floors."""

import json

import pytest
import torch

from interdomain.model import SIZES, Transformer, build_config
from interdomain.model.generation import decode
from interdomain.tools import _bench, _inference, bench_inference
from interdomain.tools._inference import Candidate, Setup, random_model, step_bytes, timed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU tiny mode; on a GPU run benchmarks/gpu.sh")
CPU = torch.device("cpu")
SMALL = dict(dim=16, n_layers=1, n_heads=2, head_dim=8, n_basis=4, vocab_size=64)
PATHS = [
    *("interdomain, eager", "interdomain, no graph"),
    *("softmax, eager", "softmax, static cache, no graph", "softmax, exact cache, no graph"),
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(SIZES, "debug", SMALL)


def run(folder, *argv, part="inference"):
    assert bench_inference.main(["--output", str(folder), *argv]) == 0
    contents = json.loads((folder / f"{part}.json").read_text())
    return contents, {name: table["rows"] for name, table in contents["tables"].items()}


def test_every_path_in_tiny_mode(tmp_path):
    contents, tables = run(tmp_path, "--batches", "2", "--dtype", "bf16-products")
    assert contents["status"] == "complete"
    assert contents["label"] == _bench.CPU_LABEL
    rows = tables["decode, debug"]
    assert [(row["prefix"], row["path"]) for row in rows] == [(prefix, path) for prefix in (32, 64) for path in PATHS]
    assert not any(row.get("remark") for row in rows)
    for row in rows:
        assert row["tokens/s"] == pytest.approx(2e3 / row["ms a step"])
        assert row["of floor"] == pytest.approx(row["MB"] / row["ms a step"] * 1e9 / contents["ceilings"]["bandwidth"])
    for cell in rows[:5], rows[5:]:
        best = min(row["ms a step"] for row in cell[2:])  # of softmax's
        assert cell[1]["speedup"] == pytest.approx(best / cell[1]["ms a step"])
    read = {(row["prompt"], row["read"]): row["tokens/s"] for row in tables["reading a prompt"]}
    assert min(read.values()) > 0
    ways = [f"{kind} {how}" for how in ("chunked", "whole") for kind in ("interdomain", "softmax")]
    assert list(read) == [*(("B=2, 64 tokens", way) for way in ways), ("B=1, 128 tokens", "interdomain chunked")]
    (summary,) = tables["decode, summary"]
    assert summary["max-fit"] == summary["max-fit interdomain"] == 64


def test_what_does_not_fit_is_a_result(tmp_path, monkeypatch):
    """softmax has no room for 64 tokens: its cells say so, the others are measured. Then there is no room to time."""
    init_state = Transformer.init_state

    def little(self, batch, capacity=0):
        if capacity >= 64:
            raise torch.OutOfMemoryError("Tried to allocate")
        return init_state(self, batch, capacity)

    monkeypatch.setattr(Transformer, "init_state", little)
    contents, tables = run(tmp_path / "softmax", "--batches", "1", "--parts", "decode", "prompts")
    assert contents["status"] == "complete"
    rows = tables["decode, debug"]
    assert [row["path"] for row in rows if row["prefix"] == 64] == ["softmax, any", *PATHS[:2]]
    assert [row["remark"] for row in rows if "ms a step" not in row] == ["out of memory"]
    (summary,) = tables["decode, summary"]
    assert (summary["max-fit"], summary["max-fit interdomain"]) == (32, 64)
    assert {row["remark"] for row in tables["reading a prompt"]} == {"out of memory"}

    def full(*args, **options):
        raise torch.OutOfMemoryError("Tried to allocate")

    monkeypatch.setattr(_inference, "interleaved", full)
    _, tables = run(tmp_path / "timer", "--batches", "1", "--parts", "decode", part="decode")
    rows = [row for row in tables["decode, debug"] if row["path"] == "any"]
    assert [(row["prefix"], row["remark"]) for row in rows] == [(prefix, "out of memory") for prefix in (32, 64)]


def test_a_time_limit_that_has_passed_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(_bench.Deadline, "passed", True)
    contents, tables = run(tmp_path)
    assert contents["status"] == "unfinished"
    assert not any(tables.values())


def test_every_turn_starts_at_its_prefix():
    model = random_model(build_config("debug", "softmax"), CPU, torch.float32)
    state = model.init_state(2, capacity=20)
    state.cursor = torch.zeros(1, dtype=torch.int64)
    tokens = torch.zeros(2, dtype=torch.int64)
    candidate = Candidate(lambda: decode(model, tokens, state), state)
    prepare, run = timed(candidate, 8, Setup(CPU, steps=3, rounds=1, seconds=1))
    for _ in range(2):
        run(prepare())
        assert (state.cursor.tolist(), state.position.tolist()) == ([11], [11, 11])
        assert (state.layers[0].k.abs().sum((0, 1, 3)) > 0).nonzero().flatten().tolist() == [8, 9, 10]


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


def test_random_weights_are_of_use():
    """Small tensors as training has them; large ones, which initialisation would take minutes for, not zero or infinite."""
    config = build_config("debug", vocab_size=2**16 + 1, dim=16)
    model, wanted = random_model(config, CPU, torch.float32), Transformer(config)
    wanted.init_weights(0)
    state = wanted.state_dict()
    for name, x in model.state_dict().items():
        if x.numel() < 2**20:
            assert torch.equal(x, state[name]), name
        else:
            assert x.std().item() == pytest.approx(0.02, rel=0.01)


def test_a_summary_is_a_row_of_the_paper_s_table():
    def row(path, prefix, ms):
        return {"path": path, "prefix": prefix, "ms a step": ms, "of floor": 0.5}

    rows = [
        *(row("interdomain, eager", p, 8.0) for p in (512, 4096, 16_384)),
        *(row("interdomain, graph", p, ms) for p, ms in ((512, 1.0), (4096, 1.02), (16_384, 1.0))),
        *(row("softmax, eager", p, ms) for p, ms in ((512, 5.0), (4096, 5.5), (16_384, 6.0))),
        *(row("softmax, static cache, graph", p, ms) for p, ms in ((512, 1.2), (4096, 2.5))),
        *(row("softmax, exact cache, graph", p, ms) for p, ms in ((512, 1.25), (4096, 1.05))),
        {"path": "softmax, static cache, graph", "prefix": 16_384, "remark": "out of memory"},
    ]
    assert bench_inference.summary_row(rows, "1.3B", 1) == {
        "model": "1.3B, B=1",
        "softmax eager ms": "5.000 to 6.000",
        "fastest softmax ms": "1.050 to 6.000",
        "max-fit": 16_384,
        "interdomain ms": "1.000 to 1.020",
        "max-fit interdomain": 16_384,
        "speedup": 1.2,  # the medians': 1.2 over 1.0
        "graph over eager softmax": 5.5,
        "flat": 1.02,
        "of floor": 0.5,
        "paper: softmax eager ms": "13.39 to 13.99",
        "paper: interdomain graph ms": "12.42 to 12.51",
        "paper: speedup over eager": 1.08,
    }
    alone = bench_inference.summary_row(rows[6:7], "125M", 1)
    assert (alone["speedup"], alone["max-fit interdomain"], alone["paper: speedup over eager"]) == (None, None, 2.64)
