"""The same run on every topology: same start, same batches, same losses and gradients, same validation."""

import itertools

import pytest

from .runs import RUNS, assert_same_run

pytestmark = pytest.mark.e2e

COMPARED = [name for name, given in RUNS.items() if given.get("same_as", name) != name]


@pytest.mark.parametrize("name", COMPARED)
def test_every_run_trains_as_the_one_that_it_must_be_the_same_as(runs, name):
    """Every axis as one rank; and from a checkpoint on other ranks, also where they share sequences, heads or layers."""
    assert_same_run(runs, name)


def test_the_references_learn_and_differ(runs):
    """Or it would say little that others agree with them: the switches reach the model, which draws each tensor."""
    text, layers, answers = (runs.seen(f"1 {name}") for name in ("text", "layers", "answers"))
    assert text["log"][6]["loss"] < text["log"][1]["loss"] - 0.3
    assert [text["log"][step]["n_tokens_seen"] for step in text["log"]] == [
        512 * step for step in range(1, 7)
    ]
    assert len(set(text["initial"].values())) > 30
    assert {len(set(step)) for step in runs.samples("1 text")} == {8}
    assert [list(seen["validation"]) for seen in (text, layers, answers)] == [
        [1, 3, 6],
        [1, 3, 5],
        [1, 3],
    ]
    assert sum(tag.startswith("validation_position") for tag in answers["validation"][3]) == 4
    assert 0.3 < answers["validation"][3]["validation_metrics/accuracy"] < 0.7
    kinds = [f"layers.{i}.attention.ssm.C" in layers["gradients"] for i in range(4)]
    assert kinds == [True, False, True, False]
    others = (runs.seen(f"1 {name}")["log"][1]["loss"] for name in ("softmax", "s4d", "fixed"))
    assert len({text["log"][1]["loss"], *others}) == 4


def of_training(counts):
    return {step: n for step, n in counts.items() if step != "validation"}


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
    assert [(call["fullgraph"], call["backend"]) for call in seen["compiled"]] == [
        (True, "aot_eager")
    ] * layers
    assert of_training(seen["calls"]) == {1: calls, 2: calls, 3: calls}


@pytest.mark.parametrize(
    ("name", "stages"), [("1 answers accumulated", 1), ("2 pipeline layers", 2)]
)
def test_the_dynamics_are_computed_once_a_step(runs, name, stages):
    """One fold of each of a rank's stages, for all four micro-batches."""
    for seen in runs.every(name):
        assert of_training(seen["folds"]) == {1: stages, 2: stages, 3: stages}


def test_gradients_summed_in_bf16(runs):
    """Over the ranks alone: eight bits of each number are left, after any number of micro-batches."""
    ours, exact = (runs.whole(f"2 {name}", "gradients") for name in ("each bfloat16", "once"))
    matrices = [name for name in exact if name.endswith("w1.weight")]
    assert all(
        1e-4 < (ours[name] - exact[name]).norm() / exact[name].norm() < 4e-3 for name in matrices
    )


def test_a_stage_sums_gradients_over_the_ranks_while_it_goes_backward(runs):
    """Its last micro-batch: of each layer before the next begins."""
    order = runs.seen("2 pipeline bfloat16", rank=1)["order"]
    seen = [
        name
        for name in order
        if name == "aten::mm" or name.startswith("FSDP::post_backward_reduce")
    ]
    sums = ["(norm, output)", "(layers.3)", "(layers.2)"]
    assert [name for name, _ in itertools.groupby(seen)][1::2] == [
        f"FSDP::post_backward_reduce {of}" for of in sums
    ]


@pytest.mark.parametrize(
    ("axis", "alike"), [("context", False), ("tensor", True), ("pipeline", True)]
)
def test_the_worst_loss_is_a_mean_over_the_tokens_of_a_rank(runs, axis, alike):
    """Ranks that share heads or layers have the same tokens."""
    for log in runs.seen(f"2 {axis} layers")["log"].values():
        assert log["loss"] <= log["loss_metrics/global_max_loss"] < 1.2 * log["loss"]
        assert (log["loss_metrics/global_max_loss"] == log["loss"]) == alike


def test_the_time_limits_of_comm_reach_all_process_groups(runs):
    """After the first step. There is one set of groups: TorchTitan builds none beside it."""
    timeouts = dict(runs.seen("4 context tensor layers")["timeouts"])
    assert {*timeouts.values()} == {100.0}
    ours = {
        "mesh_replicas",
        "mesh_shards",
        "mesh_context",
        "mesh_tensor",
        "mesh_pipeline",
        "mesh_stage",
    }
    assert (
        {"default_pg", "mesh_shards", "mesh_context", "mesh_tensor"}
        <= timeouts.keys()
        <= {"default_pg", *ours}
    )


@pytest.mark.parametrize(
    "name", ["2 text", "2 pipeline layers", "4 context shards layers", "4 tensor pipeline layers"]
)
def test_each_initial_value_is_drawn_by_one_rank(runs, name):
    """And all ranks have its bits (`assert_same_run`)."""
    every = runs.every(name)
    drawn = [tensor for seen in every for tensor in seen["drawn"]]
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == runs.whole(name, "initial").keys()
    assert min(len(seen["drawn"]) for seen in every) > 0.5 * len(drawn) / len(every)
