"""One TensorBoard folder per run: one curve over all restarts, and what a folder says about its run."""

import itertools
import re
import resource
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from tensorboard.summary.writer import event_file_writer

from interdomain.titan.plan.run_plan import make_plan
from interdomain.titan.settings.rules import check_combinations
from interdomain.titan.watch.run_log import CHARTS, RunLog, WandbLog
from interdomain.tools._curves import facts_of, read_curves, read_events

from .runs import parse

LOSS = "loss_metrics/global_avg_loss"
VALIDATION = "validation_metrics/loss"


@pytest.fixture(scope="module")
def job():
    return parse("--optimizer.lr 5e-4 --mixer.c_scale 1")


@pytest.fixture
def start(tmp_path, job, monkeypatch):
    """start(first, last, value): a start of the run that logs `value` as the loss of each step, and is killed."""
    # SummaryWriter names its file by the second, and TensorBoard reads the files in the order of
    # their names. The clocks of some nodes are behind that of an earlier start.
    clock = itertools.cycle([1_700_000_000, 1_700_000_000, 1_600_000_000, 1_600_000_500])

    def start(first, last, value):
        node = SimpleNamespace(time=itertools.repeat(next(clock)).__next__)
        monkeypatch.setattr(event_file_writer, "time", node)
        log = RunLog(tmp_path / "tb", make_plan(job, 1), job, first, {"train": "text"})
        for step in range(first, last + 1):
            log.log({LOSS: value}, step)
            if step in (1, 6):
                log.log({VALIDATION: value}, step)

    return start


def test_steps_run_again_replace_the_old_ones(start, tmp_path):
    """A run from the beginning in a used folder replaces all."""
    start(1, 9, 0.0)
    start(1, 6, 1.0)
    start(4, 8, 2.0)
    start(6, 7, 3.0)
    losses = {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0, 5: 2.0, 6: 3.0, 7: 3.0}
    assert read_curves(tmp_path / "tb") == {LOSS: losses, VALIDATION: {1: 1.0, 6: 3.0}}


def test_the_folder_says_what_the_run_is(start, tmp_path):
    start(1, 2, 1.0)
    events = read_events(tmp_path / "tb")
    assert facts_of(events, "configuration")["optimizer"]["lr"] == 5e-4
    assert "PyTorch" in facts_of(events, "environment")
    expected = {
        "model": "debug with n_layers 2, vocab_size 512, max_seq_len 64",
        "condition": "interdomain, c_scale 1",
        "ssm_lr": 5e-4,
        "tokens": 6 * 512,
        "fingerprints": {"train": "text"},
    }
    assert facts_of(events, "hyperparameters").items() >= expected.items()
    assert events.Tensors("custom_scalars__config__")


def test_every_chart_of_the_layout_finds_its_curves(runs):
    """TensorBoard draws nothing if a tag has parentheses."""
    curves = read_curves(runs.at("2 text") / "tb")
    tags = "\n".join([*curves, *read_curves(runs.at("2 shards answers") / "tb")])
    for charts in CHARTS.values():
        for pattern in itertools.chain(*charts.values()):
            found = re.findall(f"^{pattern}$", tags, re.MULTILINE)
            assert found, f"no tag matches {pattern}"
            assert "(" not in "".join(found)


def test_a_full_disk_ends_the_curve_and_not_the_run(tmp_path, job, caplog):
    log = RunLog(tmp_path / "tb", make_plan(job, 1), job, 1, {})
    written = sum(path.stat().st_size for path in (tmp_path / "tb").iterdir())
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (written, unlimited[1]))
        for step in range(1, 4):
            log.log({LOSS: 1.0}, step)
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert caplog.text.count("the curve ends here, the run goes on") == 1


def test_weights_and_biases_has_one_run_over_restarts(tmp_path, job, monkeypatch):
    """A stand-in takes the place of the package, which is not installed for tests."""
    wandb = mock.Mock(Error=RuntimeError)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_PROJECT", "mixers")
    for _ in range(2):
        log = WandbLog(tmp_path / "run", make_plan(job, 1), job, {"train": "text"})
    log.log({"mfu(%)": 40.0}, 1)
    logged = {"step": 1, "mfu(%)": 40.0, "machine/mfu_percent": 40.0}
    wandb.init.return_value.log.assert_called_once_with(logged)
    first, second = wandb.init.call_args_list
    assert first == second
    assert first.kwargs["id"] == (tmp_path / "run" / "wandb_id").read_text()
    assert first.kwargs["resume"] == "allow"
    assert first.kwargs["project"] == "mixers"
    assert first.kwargs["config"]["configuration"] == job.to_dict()


def test_weights_and_biases_without_its_package_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb"):
        check_combinations(parse("--metrics.enable_wandb"))
