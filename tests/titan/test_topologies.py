"""The same run on every topology: same start, same batches, same losses and gradient norms, same validation."""

import pytest

pytestmark = pytest.mark.e2e

# float32 sums in another order: the largest difference seen over these six steps is 4e-7.
TOLERANCE = 1e-5


def assert_same_run(ours, reference):
    assert list(ours) == list(reference)[: len(ours)]
    assert len(ours) >= 4
    for step in ours:
        for quantity in ("loss", "grad_norm"):
            assert ours[step][quantity] == pytest.approx(reference[step][quantity], rel=TOLERANCE), (step, quantity)


@pytest.mark.parametrize("topology", ["two interdomain", "two replicated", "four hybrid", "one accumulated"])
def test_every_topology_trains_as_one_rank(one, topology, request):
    """From the same initial bits, in the same batches; and it learns in these steps, or that would say little."""
    fixture, name = topology.split()
    runs, reference = request.getfixturevalue(fixture), one.seen("interdomain")
    log = runs.seen(name)["log"]
    assert reference["log"][6]["loss"] < reference["log"][1]["loss"] - 0.3
    assert_same_run(log, reference["log"])
    assert [log[step]["n_tokens_seen"] for step in log] == [512 * step for step in log]
    for rank in range(runs.ranks):  # every rank logs the same
        other = runs.seen(name, rank)
        assert other["initial"] == reference["initial"]
        assert all(other["log"][step][q] == log[step][q] for step in log for q in ("loss", "grad_norm"))
    assert len(set(reference["initial"].values())) > 30  # per tensor, not one constant
    assert runs.samples(name) == one.samples("interdomain")[: len(log)]
    assert {len(set(step)) for step in runs.samples(name)} == {8}
    there, here = reference["validation"], runs.seen(name)["validation"]
    assert list(there) == [1, 3, 6]  # the first step, every validation.freq, the last
    assert name not in ("interdomain", "hybrid") or {1, 3} <= here.keys()
    for step in here.keys() & there.keys():
        assert here[step]["loss"] == pytest.approx(there[step]["loss"], rel=TOLERANCE)


@pytest.mark.parametrize("condition", ["softmax", "s4d"])
def test_other_conditions_agree_on_two_ranks(one, two, condition):
    assert_same_run(two.seen(condition)["log"], one.seen(condition)["log"])
    # Other models than the interdomain one: the switch reaches the model.
    assert two.seen(condition)["log"][1]["loss"] != one.seen("interdomain")["log"][1]["loss"]
