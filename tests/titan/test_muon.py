"""Muon on every axis."""
import pytest
from .runs import assert_same_run
pytestmark = pytest.mark.e2e

@pytest.mark.parametrize("axis", ["shards", "replicas", "context", "tensor", "pipeline"])
def test_axis(runs, axis):
    ref, seen = runs.seen("1 muon")["log"], runs.seen(f"2 {axis} muon")["log"]
    for step in seen:
        print(axis, step, [(q, seen[step][q] / ref[step][q] - 1) for q in ("loss", "grad_norm", "grad_norm/main", "grad_norm/matrices")])

def test_four(runs):
    ref, seen = runs.seen("1 muon")["log"], runs.seen("4 tensor shards muon")["log"]
    for step in seen:
        print(step, [(q, seen[step][q] / ref[step][q] - 1) for q in ("loss", "grad_norm", "grad_norm/main", "grad_norm/matrices")])
