"""bench_inference in CPU tiny mode: what it writes, and what does not fit."""

import json

import pytest
import torch

from interdomain.model import SIZES, Transformer, build_config
from interdomain.model.generation import Decoder
from interdomain.tools import bench_inference
from interdomain.tools._bench import results
from interdomain.tools.bench_inference import random_model, set_position

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU tiny mode; on a GPU run benchmarks/gpu.sh"
)
CPU = torch.device("cpu")
SMALL = dict(dim=16, n_layers=1, n_heads=2, head_dim=8, n_basis=4, vocab_size=64)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(SIZES, "debug", SMALL)


def test_every_path_and_what_does_not_fit(tmp_path, monkeypatch):
    """softmax has no room for 64 tokens: its rows say so, and the others are measured."""
    init_state = Transformer.init_state

    def init_little_state(self, batch, capacity=0):
        if capacity >= 64 and self.config.mixer.kind == "softmax":
            raise torch.OutOfMemoryError("Tried to allocate")
        return init_state(self, batch, capacity)

    monkeypatch.setattr(Transformer, "init_state", init_little_state)
    assert bench_inference.main(["--output", str(tmp_path)]) == 0
    contents = json.loads((tmp_path / "inference.json").read_text())
    assert (contents["status"], contents["label"]) == ("complete", results.CPU_LABEL)
    decoded, prompts = contents["tables"].values()
    rows = {(row["B"], row["prefix"], row["path"]): row for row in decoded["rows"]}
    assert len(rows) == 2 * 2 * len(bench_inference.PATHS)
    for (batch, prefix, path), row in rows.items():
        # A CUDA graph needs a GPU.
        if "eager" in path and (prefix, path) != (64, "softmax, eager"):
            assert row["tokens/s"] == pytest.approx(1e3 * batch / row["ms a step"])
        else:
            assert row["remark"]
    ours = rows[2, 32, "interdomain, eager"]
    softmax = rows[2, 32, "softmax, eager"]
    assert ours["speedup"] == pytest.approx(softmax["ms a step"] / ours["ms a step"])
    failed = {row["read"] for row in prompts["rows"] if "remark" in row}
    assert failed == {"softmax whole", "softmax chunked"}


def test_a_state_is_set_to_its_prefix():
    model = random_model(build_config("debug", "softmax"), CPU, "float32")
    state = model.init_state(2, capacity=20)
    state.captured = True
    for _ in range(2):
        set_position(state, 8)
        Decoder(model, state).step(torch.zeros(2, dtype=torch.int64))
        assert state.position.tolist() == [9, 9]
        written = state.layers[0].k.abs().sum((0, 1, 3)) > 0
        assert written.nonzero().flatten().tolist() == [8]
