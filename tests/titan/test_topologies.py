"""The same run on every topology: same start, same batches, same losses and gradient norms, same validation."""

import re

import pytest
from torch.nn import functional as F

from interdomain.model import Transformer
from interdomain.titan.data.dataloader import PackedLoader
from interdomain.titan.data.folders import open_dataset
from interdomain.titan.plan.run_plan import make_plan
from interdomain.titan.settings.job_config import read_job_config

from .conftest import ANSWERS, flags

pytestmark = pytest.mark.e2e

# float32 sums in another order: the largest difference seen over these six steps is 4e-7.
TOLERANCE = 1e-5


def assert_same_run(ours, reference):
    assert list(ours) == list(reference)[: len(ours)]
    assert len(ours) >= 4
    for step in ours:
        for quantity in ("loss", "grad_norm"):
            assert ours[step][quantity] == pytest.approx(reference[step][quantity], rel=TOLERANCE), (step, quantity)


TOPOLOGIES = [
    *("two interdomain", "two replicated", "two context", "two tensor", "two pipeline", "one accumulated"),
    *("four hybrid", "four context shards", "four context tensor", "four tensor pipeline"),
]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_topology_trains_as_one_rank(one, topology, request):
    """From the same initial bits, in the same batches; and it learns in these steps, or that would say little."""
    fixture, name = topology.split(maxsplit=1)
    runs, reference = request.getfixturevalue(fixture), one.seen("interdomain")
    log = runs.seen(name)["log"]
    assert reference["log"][6]["loss"] < reference["log"][1]["loss"] - 0.3
    assert_same_run(log, reference["log"])
    assert [log[step]["n_tokens_seen"] for step in log] == [512 * step for step in log]
    for rank in range(runs.ranks):  # every rank logs the same
        other = runs.seen(name, rank)
        assert other["initial"].items() <= reference["initial"].items()
        assert all(other["log"][step][q] == log[step][q] for step in log for q in ("loss", "grad_norm"))
    assert runs.whole(name, "initial") == reference["initial"]
    assert len(set(reference["initial"].values())) > 30  # per tensor, not one constant
    assert runs.samples(name) == one.samples("interdomain")[: len(log)]
    assert {len(set(step)) for step in runs.samples(name)} == {8}
    there, here = reference["validation"], runs.seen(name)["validation"]
    assert list(there) == [1, 3, 6]  # the first step, every validation.freq, the last
    assert name in ("replicated", "accumulated") or {1, 3} <= here.keys()
    for step in here.keys() & there.keys():
        assert here[step]["loss"] == pytest.approx(there[step]["loss"], rel=TOLERANCE)


RECALL = (
    "one answers accumulated",
    "two answers",
    *(f"two {axis} answers" for axis in ("context", "tensor", "pipeline")),
)


def test_the_loss_is_the_mean_over_the_answers(one, pairs):
    """Of the first step, from a forward pass of the model at its initial values."""
    job = read_job_config(flags(pairs, "folder", **ANSWERS))
    plan, loader = make_plan(job, 1), PackedLoader(open_dataset(job, "train"), local_batch=8, rank=0, ranks=1)
    model = Transformer(plan.config)
    model.init_weights(plan.seed)
    inputs, labels = next(iter(loader))
    expected = F.cross_entropy(model(inputs["input"]).flatten(0, 1), labels.flatten(), ignore_index=-100).item()
    assert one.seen("answers")["log"][1]["loss"] == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("topology", RECALL)
def test_answers_train_and_validate_as_on_one_rank(one, topology, request):
    """The loss of the answers alone, accuracy and loss by position. On one rank: tests/titan/test_validation.py."""
    fixture, name = topology.split(maxsplit=1)
    ours, theirs = request.getfixturevalue(fixture).seen(name), one.seen("answers")
    assert_same_run(ours["log"], theirs["log"])
    assert list(ours["validation"]) == [1, 3, 6]
    for step, reference in theirs["validation"].items():
        tags = [tag for tag in reference if re.match("loss|validation_position|validation_metrics/accuracy", tag)]
        here, there = ({tag: seen[tag] for tag in tags} for seen in (ours["validation"][step], reference))
        assert len(tags) == 6
        accuracy = [scalars.pop("validation_metrics/accuracy") for scalars in (here, there)]
        assert accuracy[0] == pytest.approx(accuracy[1], abs=0.011)  # one answer of those of 47 windows
        assert here == pytest.approx(there, rel=TOLERANCE)
    assert 0.3 < accuracy[1] < 0.7


AXES = ("context", "tensor", "pipeline")


@pytest.mark.parametrize(
    "topology",
    [
        *(f"two {axis}" for axis in AXES),
        *(f"two {axis} documents" for axis in AXES),
        *("four context shards", "four context tensor", "four tensor pipeline"),
    ],
)
def test_every_axis_has_the_whole_gradients(topology, request):
    """Of every parameter, after one step; losses alone hide a factor. With documents also the losses and the validation."""
    fixture, name = topology.split(maxsplit=1)
    other, plain = ("two", "documents") if "documents" in name else ("one", "interdomain none")
    runs, theirs = request.getfixturevalue(fixture), request.getfixturevalue(other).seen(plain)
    ours, gradients = runs.seen(name), runs.whole(name, "gradients")
    assert runs.whole(name, "initial") == theirs["initial"]
    assert gradients.keys() == theirs["gradients"].keys()
    for parameter, gradient in theirs["gradients"].items():
        difference = (gradients[parameter] - gradient).norm() / gradient.norm()
        assert difference < 1e-5, (parameter, difference)
    pairs = [(ours["log"][step], theirs["log"][step]) for step in ours["log"].keys() & theirs["log"].keys()]
    if "documents" in name:
        pairs += [(ours["validation"][step], theirs["validation"][step]) for step in (1, 3)]
    assert len(pairs) >= 2
    for here, there in pairs:
        for quantity in {"loss", "grad_norm"} & there.keys():
            assert here[quantity] == pytest.approx(there[quantity], rel=TOLERANCE)


@pytest.mark.parametrize(("axis", "calls"), [("context", 4), ("tensor", 4), ("pipeline", 2 * 4)])
def test_every_axis_under_compilation_and_selective_checkpointing(one, two, axis, calls):
    """The scan's output is saved: it runs once for each of a rank's layers and micro-batches."""
    ours = two.seen(f"{axis} compiled")
    assert_same_run(ours["log"], one.seen("interdomain")["log"])
    assert ours["calls"] == dict.fromkeys(ours["log"], calls)


@pytest.mark.parametrize(("axis", "alike"), [("context", False), ("tensor", True), ("pipeline", True)])
def test_the_worst_loss_is_a_mean_over_the_tokens_of_a_rank(two, axis, alike):
    """Ranks that share heads or layers have the same tokens."""
    for log in two.seen(axis)["log"].values():
        assert log["loss"] * (1 if alike else 1.0001) <= log["loss_metrics/global_max_loss"] < 1.2 * log["loss"]
        assert not alike or log["loss_metrics/global_max_loss"] == log["loss"]


HYBRID = ["layers", "context layers", "tensor layers", "pipeline layers"]


@pytest.mark.parametrize("name", HYBRID)
def test_a_hybrid_with_windows_and_documents_has_the_whole_gradients(one, two, name):
    """Compiled and checkpointed under FSDP2, plain on the other axes; every layer has its own kind and its initial values."""
    theirs, gradients = one.seen("layers"), two.whole(name, "gradients")
    assert two.whole(name, "initial") == theirs["initial"]
    assert gradients.keys() == theirs["gradients"].keys()
    assert {f"layers.{i}.attention.ssm.C" in gradients for i in (0, 2)} == {True}
    assert {f"layers.{i}.attention.ssm.C" in gradients for i in (1, 3)} == {False}
    for parameter, gradient in theirs["gradients"].items():
        assert (gradients[parameter] - gradient).norm() < 1e-5 * gradient.norm(), parameter


OTHERS = ["softmax", "s4d", "context softmax", "context s4d", "gated-deltanet", "pipeline mamba2"]


@pytest.mark.parametrize("name", [*OTHERS, *HYBRID])
def test_other_conditions_agree_on_two_ranks(one, two, name):
    condition = name.split()[-1]
    assert_same_run(two.seen(name)["log"], one.seen(condition)["log"])
    # Other models than the interdomain one: the switch reaches the model.
    assert two.seen(name)["log"][1]["loss"] != one.seen("interdomain")["log"][1]["loss"]


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("name", ["softmax", "layers"])
def test_softmax_layers_compiled_and_checkpointed_under_tensor_parallelism(one, two, name, mode):
    ours, whole = two.seen(f"tensor {name} {mode}")["log"], one.seen(name)["log"]
    for step in (1, 2):
        for scalar in ("loss", "grad_norm"):
            assert ours[step][scalar] == pytest.approx(whole[step][scalar], rel=1e-5)


def test_the_time_limits_of_comm_reach_all_process_groups(two):
    """After the first step; the groups of this run and of no other, for it was the first."""
    assert two.seen("interdomain")["timeouts"] == {100.0}
