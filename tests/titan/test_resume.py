"""Interrupted and continued runs: to the bit on the same ranks, with the same batches on others."""

import json

import pytest
import torch

from interdomain.model.distributed_checkpoint import read_tensors, tensor_index

pytestmark = pytest.mark.e2e


def checkpoint(runs, name, step):
    return runs.folder / name / "checkpoint" / f"step-{step}"


def test_twice_three_steps_are_six_to_the_bit(one):
    full, rest = one.seen("interdomain")["log"], one.seen("second half")["log"]
    assert list(rest) == [4, 5, 6]
    for step, log in rest.items():
        for quantity in ("loss", "grad_norm", "lr/main", "lr/ssm", "n_tokens_seen"):
            assert log[quantity] == full[step][quantity], (step, quantity)


def test_their_checkpoints_hold_the_same_bits(one):
    ours, reference = checkpoint(one, "halves", 6), checkpoint(one, "interdomain", 6)
    index = tensor_index(reference)
    assert tensor_index(ours).keys() == index.keys()
    moments = [name for name in index if name.startswith("optimizer.state.")]
    assert len(moments) == 3 * len(one.seen("interdomain")["initial"])  # step, exp_avg, exp_avg_sq of every parameter
    ours, reference = (read_tensors(folder, list(index), index) for folder in (ours, reference))
    differing = [name for name in index if not torch.equal(ours[name], reference[name])]
    assert not differing
    start = read_tensors(checkpoint(one, "interdomain", 3), list(index), index)
    assert not torch.equal(start["output.weight"], reference["output.weight"])  # the second half trained


@pytest.mark.parametrize("ranks", ["one", "four"])
def test_a_run_of_two_ranks_continues_on_others(two, ranks, request):
    runs = request.getfixturevalue(ranks)
    full, rest = two.seen("interdomain")["log"], runs.seen("after two")["log"]
    assert list(rest) == [4, 5, 6]
    for step, log in rest.items():
        assert log["n_tokens_seen"] == 512 * step
        for quantity in ("loss", "grad_norm"):
            assert log[quantity] == pytest.approx(full[step][quantity], rel=1e-5)
    assert runs.samples("after two") == two.samples("interdomain")[3:]


def test_an_index_is_read_once_by_rank_0(one, four):
    """At a start that loads a checkpoint, saves one, and keeps the latest two."""
    assert [four.seen("after two", rank)["index_reads"] for rank in range(4)] == [1, 0, 0, 0]
    assert one.seen("second half")["index_reads"] == one.seen("started")["index_reads"] == 1
    assert one.seen("interdomain")["index_reads"] == 0


def test_what_a_checkpoint_replaces_is_not_drawn(one, four):
    parameters = list(one.seen("interdomain")["initial"])
    for runs, name in ((one, "second half"), (one, "started"), (four, "after two")):
        assert [runs.seen(name, rank)["undrawn"] for rank in range(runs.ranks)] == [parameters] * runs.ranks
    assert one.seen("interdomain")["undrawn"] == []
    index = tensor_index(checkpoint(one, "halves", 6))
    for name, saved in read_tensors(checkpoint(one, "halves", 6), parameters, index).items():
        assert saved.isfinite().all(), name


def test_a_changed_learning_rate_takes_effect_on_resume(one):
    """The checkpoint was saved with a peak of 3e-3; the schedule goes on from its step under the new peak."""
    at_four, before = one.seen("other rate")["log"][4], one.seen("interdomain")["log"][4]
    for log, peak in ((at_four, 2e-4), (before, 3e-3)):
        assert log["lr/main"] == pytest.approx(1e-5 + (peak - 1e-5) * 0.75)  # cos(pi / 3) = 1 / 2
    assert at_four["loss"] == pytest.approx(before["loss"], rel=1e-5)  # the step itself starts from the same weights


def test_a_run_starts_from_another_runs_weights(one, two):
    """Where its own folder holds only the remains of a save: TorchTitan alone would start from scratch."""
    log = one.seen("started")["log"]
    assert list(log) == [1]
    assert log[1]["n_tokens_seen"] == 512
    scratch = two.seen("interdomain")["log"]
    assert log[1]["loss"] < scratch[3]["loss"]  # three steps learned, on the first batch again
    assert json.loads((checkpoint(one, "started", 1) / "interdomain.json").read_text())["tokens"] == 512


def test_a_checkpoint_says_what_it_is(one, two):
    for runs, name in ((one, "halves"), (two, "interdomain")):
        record = json.loads((checkpoint(runs, name, 6) / "interdomain.json").read_text())
        assert record["size"] == "debug with vocab_size 512, max_seq_len 64"
        assert (record["condition"], record["step"], record["tokens"]) == ("interdomain", 6, 3072)
        assert record["model"]["vocab_size"] == 512
        assert record["run"]["tokens_per_step"] == 512
    tokenizer = (two.corpus / "tokenizer.model").read_bytes()
    assert (checkpoint(two, "interdomain", 6) / "tokenizer.model").read_bytes() == tokenizer


def test_asynchronous_saves_keep_the_latest_two(two):
    folder = two.folder / "asynchronous" / "checkpoint"
    assert sorted(path.name for path in folder.iterdir() if (path / ".metadata").is_file()) == ["step-3", "step-4"]
    index = tensor_index(folder / "step-4")
    earlier, saved = (read_tensors(folder / step, ["output.weight"], index) for step in ("step-3", "step-4"))
    assert torch.isfinite(saved["output.weight"]).all()
    # The step before it, copied in the background while step 4 was computed, holds other weights.
    assert not torch.equal(earlier["output.weight"], saved["output.weight"])


def test_another_models_checkpoint_is_not_continued(two):
    """In the folder of the interdomain run, when that is done."""
    assert f"error: {checkpoint(two, 'interdomain', 6)} is a checkpoint of another model" in two.output
    assert two.seen("other model")["log"] == {}
    found = (two.folder / "interdomain" / "checkpoint").iterdir()
    assert sorted(path.name for path in found) == ["step-3", "step-6"]
