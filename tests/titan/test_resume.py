"""Interrupted and continued runs: to the bit on the same ranks, with the same batches on others."""

import json

import pytest
import torch

from interdomain.files.distributed_checkpoint import read_tensors, tensor_index

from .conftest import assert_same_tensors

pytestmark = pytest.mark.e2e


def checkpoint(runs, name, step):
    return runs.folder / name / "checkpoint" / f"step-{step}"


def test_twice_three_steps_are_six_to_the_bit(one):
    full, rest = one.seen("interdomain")["log"], one.seen("second half")["log"]
    assert list(rest) == [4, 5, 6]
    for step, log in rest.items():
        for quantity in ("loss", "grad_norm", "lr/main", "lr/ssm", "n_tokens_seen"):
            assert log[quantity] == full[step][quantity], (step, quantity)
    assert_same_tensors(checkpoint(one, "halves", 6), checkpoint(one, "interdomain", 6))


@pytest.mark.parametrize(
    ("ranks", "name", "of"),
    [
        ("one", "after two", "interdomain"),
        ("four", "after two", "interdomain"),
        ("one", "after context", "context"),
        ("one", "after tensor", "tensor"),
        ("one", "after pipeline", "pipeline"),
        ("four", "context shards after interdomain", "interdomain"),
        ("four", "context tensor after pipeline", "pipeline"),
        ("four", "tensor pipeline after context", "context"),
    ],
)
def test_a_run_of_two_ranks_continues_on_others(two, ranks, name, of, request):
    """Also where they share sequences, heads or layers, before or after."""
    runs = request.getfixturevalue(ranks)
    full, rest = two.seen(of)["log"], runs.seen(name)["log"]
    assert list(rest) == ([4, 5, 6] if name.startswith("after") else [4])
    for step, log in rest.items():
        assert log["n_tokens_seen"] == 512 * step
        for quantity in ("loss", "grad_norm"):
            assert log[quantity] == pytest.approx(full[step][quantity], rel=1e-5)
    assert runs.samples(name) == two.samples(of)[3 : 3 + len(rest)]


def test_a_changed_learning_rate_takes_effect_on_resume(one):
    """The checkpoint was saved with a peak of 3e-3; the schedule goes on from its step under the new peak."""
    at_four, before = one.seen("other rate")["log"][4], one.seen("interdomain")["log"][4]
    for log, peak in ((at_four, 2e-4), (before, 3e-3)):
        assert log["lr/main"] == pytest.approx(1e-5 + (peak - 1e-5) * 0.75)  # cos(pi / 3) = 1 / 2
    assert at_four["loss"] == pytest.approx(before["loss"], rel=1e-5)  # the step itself starts from the same weights
    assert one.output.count("optimizer.lr: 0.003 -> 0.0002") == 1


def test_a_run_starts_from_another_runs_weights(one, two):
    log = one.seen("started")["log"]
    assert list(log) == [1]
    assert log[1]["n_tokens_seen"] == 512
    assert log[1]["loss"] < two.seen("interdomain")["log"][3]["loss"]  # three steps learned, on the first batch again


def test_a_checkpoint_says_what_it_is(two):
    folder = checkpoint(two, "interdomain", 6)
    record = json.loads((folder / "interdomain.json").read_text())
    assert record["size"] == "debug with vocab_size 512, max_seq_len 64"
    assert (record["condition"], record["step"], record["tokens"]) == ("interdomain", 6, 3072)
    assert (record["model"]["vocab_size"], record["run"]["tokens_per_step"]) == (512, 512)
    assert (folder / "tokenizer.model").read_bytes() == (two.corpus / "tokenizer.model").read_bytes()


def test_an_asynchronous_save_holds_the_weights_of_its_step(two):
    """Copied while the steps after it were computed."""
    assert_same_tensors(checkpoint(two, "asynchronous", 3), checkpoint(two, "interdomain", 3))


@pytest.mark.parametrize("axis", ["context", "tensor", "pipeline"])
def test_a_checkpoint_of_every_axis_holds_what_one_rank_saves(one, two, axis):
    """By the same names, weights and optimizer state, whole: what `convert` reads and every topology continues from."""
    ours, reference = checkpoint(two, axis, 3), checkpoint(one, "interdomain", 3)
    index = tensor_index(reference)
    assert tensor_index(ours).keys() == index.keys()
    ours, theirs = (read_tensors(folder, list(index), tensor_index(folder)) for folder in (ours, reference))
    for name in index:
        difference = torch.linalg.vector_norm((ours[name] - theirs[name]).float())
        assert difference <= 1e-4 * torch.linalg.vector_norm(theirs[name].float()), name
