"""The same run on every topology: same start, same batches, same losses and gradients, same validation."""

import pytest

from .runs import RUNS, assert_same_run

pytestmark = pytest.mark.e2e

COMPARED = [name for name, given in RUNS.items() if given.get("same_as", name) != name]


@pytest.mark.parametrize("name", COMPARED)
def test_every_run_trains_as_its_reference(runs, name):
    """A run on any axis trains as one rank does, and as the run on other ranks from whose checkpoint it continues."""
    assert_same_run(runs, name)


def test_the_text_is_learned(runs):
    """Each step has eight samples, and each tensor is drawn by itself."""
    text = runs.seen("1 text")
    log = text["log"]
    assert log[6]["loss"] < log[1]["loss"] - 0.3
    assert [log[step]["n_tokens_seen"] for step in log] == [512 * step for step in log]
    for hashes in text["samples"].values():
        assert len(set(hashes)) == 8
    assert len(set(text["initial"].values())) > 30


def test_a_run_validates_after_its_first_and_its_last_step(runs):
    """And after every third."""
    assert list(runs.seen("1 layers")["validation"]) == [1, 3, 5]


def test_the_references_differ(runs):
    """It would say little that other runs agree with them if the switches did not reach the model."""
    losses = set()
    for name in ("text", "softmax", "s4d", "fixed"):
        losses.add(runs.log(f"1 {name}")[1]["loss"])
    assert len(losses) == 4


@pytest.mark.parametrize(
    ("name", "backend", "layers", "calls"),
    [
        ("2 products compiled", "aot_eager", 2, 2),
        ("2 context answers", "aot_eager", 2, 2),
        ("2 tensor layers", "aot_eager", 4, 2),
        ("2 pipeline answers", "aot_eager", 1, 4),
        ("1 compiled", "inductor", 2, 2),
    ],
)
def test_compilation_and_selective_checkpointing(runs, name, backend, layers, calls):
    """Whole blocks are compiled. The scan's output is saved: it runs once for each of a rank's layers and micro-batches."""
    seen = runs.seen(name)
    compiled = [(call["fullgraph"], call["backend"]) for call in seen["compiled"]]
    assert compiled == [(True, backend)] * layers
    for step in seen["log"]:
        assert seen["calls"][step] == calls


@pytest.mark.parametrize(
    ("name", "stages"), [("1 answers accumulated", 1), ("2 pipeline layers", 2)]
)
def test_the_ssm_tensors_are_computed_once_a_step(runs, name, stages):
    """Each of a rank's stages computes them once for all micro-batches."""
    for seen in runs.every(name):
        for step in (1, 2, 3):
            assert seen["folds"][step] == stages


def test_gradients_summed_in_bf16(runs):
    """Only sums over the ranks are: each number has an error of eight bits, whatever the number of micro-batches."""
    rounded = runs.whole("2 each bfloat16", "gradients")
    exact = runs.whole("2 once", "gradients")
    for name, gradient in exact.items():
        if name.endswith("w1.weight"):
            difference = (rounded[name] - gradient).norm() / gradient.norm()
            assert 1e-4 < difference < 4e-3, name


@pytest.mark.parametrize(
    ("axis", "alike"), [("context", False), ("tensor", True), ("pipeline", True)]
)
def test_the_worst_loss_is_a_mean_over_the_tokens_of_a_rank(runs, axis, alike):
    """Ranks that share heads or layers have the same tokens."""
    for scalars in runs.log(f"2 {axis} layers").values():
        worst = scalars["loss_metrics/global_max_loss"]
        assert scalars["loss"] <= worst < 1.2 * scalars["loss"]
        assert (worst == scalars["loss"]) == alike


def test_the_time_limits_of_comm_reach_all_process_groups(runs):
    """They are set after the first step. TorchTitan builds no groups beside ours."""
    timeouts = dict(runs.seen("4 context tensor layers")["timeouts"])
    assert set(timeouts.values()) == {100.0}
    used = {"default_pg", "mesh_shards", "mesh_context", "mesh_tensor"}
    ours = used | {"mesh_replicas", "mesh_pipeline", "mesh_stage"}
    assert used <= timeouts.keys() <= ours
