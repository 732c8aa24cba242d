"""compare_precision: the table of a run, and that its errors are what they are called."""

import json

import pytest
import torch

from interdomain.model import Transformer
from interdomain.tools import compare_precision
from interdomain.tools.compare_precision import GROUPS, errors, gradients, in_precision
from tests.model.common import small_config


def test_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(compare_precision, "read_text", lambda: torch.arange(5000) % 251)
    monkeypatch.setattr(compare_precision, "BATCH", 2)
    monkeypatch.setattr(compare_precision, "LENGTH", 32)
    argv = ["--output", str(tmp_path), "--device", "cpu", "--conditions", "s4d", "--steps", "2", "--seeds", "1", "2"]
    assert compare_precision.main(argv) == 0
    contents = json.loads((tmp_path / "precision.json").read_text())
    rows = {row["parameters"]: row["each"] for row in contents["tables"]["s4d: error of the gradient in %"]["rows"]}
    assert list(rows) == list(GROUPS)
    assert all(len(each[p]) == 2 and all(0 < x < 20 for x in each[p]) for each in rows.values() for p in each)
    assert sum(rows["all"]["bf16-products"]) < sum(rows["all"]["bf16"])


def test_errors_are_relative():
    model = Transformer(small_config("interdomain"))
    model.init_weights()
    tokens = torch.arange(40)[None]
    exact = gradients(in_precision(model, "float32"), tokens, tokens)
    assert set(errors(exact, exact).values()) == {0.0}
    off = {name: 1.5 * g if ".ssm." in name else g for name, g in exact.items()}
    found = errors(off, exact)
    assert found["dynamics"] == pytest.approx(0.5)
    assert 0 < found["all"] < 0.5
    assert found["other parameters"] == 0
