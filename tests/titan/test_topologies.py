"""The same run on every topology: same start, same batches, same losses and gradients, same validation."""

import itertools

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
    for step, scalars in log.items():
        assert scalars["n_tokens_seen"] == 512 * step
    for hashes in runs.samples("1 text").values():
        assert len(set(hashes)) == 8
    assert len(set(text["initial"].values())) > 30


@pytest.mark.parametrize(
    ("name", "steps"), [("1 text", [1, 3, 6]), ("1 layers", [1, 3, 5]), ("1 answers", [1, 3])]
)
def test_a_run_validates_after_its_first_and_its_last_step(runs, name, steps):
    assert list(runs.seen(name)["validation"]) == steps


def test_validation_of_answers(runs):
    scalars = runs.seen("1 answers")["validation"][3]
    positions = [tag for tag in scalars if tag.startswith("validation_position")]
    assert len(positions) == 4
    assert 0.3 < scalars["validation_metrics/accuracy"] < 0.7


def test_the_references_differ(runs):
    """It would say little that other runs agree with them if the switches did not reach the model."""
    losses = set()
    for name in ("text", "softmax", "s4d", "fixed"):
        losses.add(runs.seen(f"1 {name}")["log"][1]["loss"])
    assert len(losses) == 4
    gradients = runs.seen("1 layers")["gradients"]
    scans = [f"layers.{i}.attention.ssm.C" in gradients for i in range(4)]
    assert scans == [True, False, True, False]


@pytest.mark.parametrize(
    ("name", "layers", "calls"),
    [
        ("2 shards answers", 2, 2),
        ("2 context answers", 2, 2),
        ("2 tensor answers", 2, 2),
        ("2 pipeline answers", 1, 4),
    ],
)
def test_compilation_and_selective_checkpointing(runs, name, layers, calls):
    """Whole blocks are compiled. The scan's output is saved: it runs once for each of a rank's layers and micro-batches."""
    seen = runs.seen(name)
    compiled = [(call["fullgraph"], call["backend"]) for call in seen["compiled"]]
    assert compiled == [(True, "aot_eager")] * layers
    for step in (1, 2, 3):
        assert seen["calls"][step] == calls


@pytest.mark.parametrize(
    ("name", "stages"), [("1 answers accumulated", 1), ("2 pipeline layers", 2)]
)
def test_the_ssm_tensors_are_computed_once_a_step(runs, name, stages):
    """Each of a rank's stages computes them once for all four micro-batches."""
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


def test_a_stage_sums_gradients_over_the_ranks_during_the_backward_pass(runs):
    """Each layer's sum begins before the next layer's products in the last micro-batch."""
    reduce = "FSDP::post_backward_reduce "
    order = runs.seen("2 pipeline bfloat16", rank=1)["order"]
    seen = [name for name in order if name == "aten::mm" or name.startswith(reduce)]
    without_repeats = [name for name, _ in itertools.groupby(seen)]
    assert without_repeats[1::2] == [
        f"{reduce}(norm, output)",
        f"{reduce}(layers.3)",
        f"{reduce}(layers.2)",
    ]


@pytest.mark.parametrize(
    ("axis", "alike"), [("context", False), ("tensor", True), ("pipeline", True)]
)
def test_the_worst_loss_is_a_mean_over_the_tokens_of_a_rank(runs, axis, alike):
    """Ranks that share heads or layers have the same tokens."""
    for scalars in runs.seen(f"2 {axis} layers")["log"].values():
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


@pytest.mark.parametrize(
    "name", ["2 text", "2 pipeline layers", "4 context shards layers", "4 tensor pipeline layers"]
)
def test_each_initial_value_is_drawn_by_one_rank(runs, name):
    """Every rank draws about as many. All ranks have the same bits then (`assert_same_run`)."""
    every = [seen["drawn"] for seen in runs.every(name)]
    drawn = list(itertools.chain.from_iterable(every))
    assert sorted(drawn) == sorted(runs.whole(name, "initial"))
    assert min(map(len, every)) > 0.5 * len(drawn) / len(every)
