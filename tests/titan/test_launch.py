"""The entry point, `torchrun -m interdomain.titan.entry`: what it writes, and how it ends when something is wrong."""

import functools
import math
import os
import resource
import shutil

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from interdomain.titan import lock
from interdomain.titan.settings import read_job_config
from interdomain.titan.trainer import InterdomainTrainer

from .conftest import HERE, flags, refusal, torchrun

pytestmark = pytest.mark.e2e

# One rank's lines on the console; a refusal is not tried again.
ONE = ("--local-ranks-filter", "0", "--max-restarts", "1")


@pytest.fixture(scope="session")
def stock(tmp_path_factory, corpus):
    """(finished process, folder) of a run of two ranks with everything on."""
    folder = tmp_path_factory.mktemp("stock")
    settings = {"checkpoint__enable": True, "validation__enable": True, "metrics__enable_tensorboard": True}
    colours = {"metrics__disable_color_printing": False}  # left to the program
    arguments = flags(corpus, folder, training__local_batch_size=4, **settings, **colours)
    done = torchrun(2, *ONE, "-m", "interdomain.titan.entry", *arguments)
    assert done.returncode == 0, done.stderr[-8000:]
    return done, folder


@pytest.fixture(scope="session")
def events(stock):
    return EventAccumulator(str(stock[1] / "tb"), size_guidance={"scalars": 0, "histograms": 0}).Reload()


def scalars(events, tag):
    return {event.step: event.value for event in events.Scalars(tag)}


def test_the_stock_run_is_the_drivers(events, one):
    """Not one process group for many jobs, but the entry point that users start: the same numbers."""
    reference = one.seen("interdomain")
    for tag, key in (("loss_metrics/global_avg_loss", "loss"), ("grad_norm", "grad_norm")):
        expected = {step: pytest.approx(log[key], rel=1e-5) for step, log in reference["log"].items()}
        assert scalars(events, tag) == expected
    expected = {step: pytest.approx(seen["loss"], rel=1e-5) for step, seen in reference["validation"].items()}
    assert scalars(events, "validation_metrics/loss") == expected


def test_tensorboard_shows_the_run_and_the_mixers_life_signs(events):
    for group, peak in (("main", 3e-3), ("ssm", 1e-3)):
        rates = scalars(events, f"lr/{group}")
        assert (rates[2], rates[6]) == (pytest.approx(peak), pytest.approx(1e-5))
    for kind, loss in (("loss_metrics", "global_avg_loss"), ("validation_metrics", "loss")):
        losses = scalars(events, f"{kind}/{loss}")
        for step, value in scalars(events, f"{kind}/perplexity").items():
            assert value == pytest.approx(math.exp(losses[step]), rel=1e-4)
    for name in (f"mixer/layer_{layer:02d}" for layer in range(4)):
        for sign in ("timescale_tokens_min", "timescale_tokens_max", "one_minus_abs_lambda_min", "dt_q50"):
            assert set(scalars(events, f"{name}/{sign}")) == {1, 2, 3, 4, 6}  # mixer_freq 2, and validation at 1, 3, 6
        assert set(scalars(events, f"{name}/readout_rms")) == {1, 3, 6}
        seen = events.Histograms(f"{name}/log10_dt")
        assert [event.step for event in seen] == [1, 4]  # histogram_freq 4
        assert seen[0].histogram_value.num == 4  # Delta of 4 heads
        assert -3 <= seen[0].histogram_value.min < seen[0].histogram_value.max <= -1


def test_nothing_is_printed_that_is_not_so(stock):
    """On a CPU: no utilisation of an A100, no autocast that does not happen, no random numbers that DTensor draws."""
    text = stock[0].stdout + stock[0].stderr
    for phrase in ("A100", "handled by AMP", "HF assets path", "autocast", "Warning", "WARNING", "\x1b", "mfu"):
        assert phrase not in text
    assert "tflops: " in text
    assert "validation perplexity: " in text
    assert "Traceback" not in text


def test_a_folder_in_which_a_run_is_alive_is_not_trained_in(corpus, tmp_path, capsys, monkeypatch):
    """In the only rank, as torchrun starts it. The process group is not reached."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    holder = lock.FolderLock(tmp_path)
    holder.record |= {"pid": os.getppid(), "began": lock._began(os.getppid())}  # another process, and it lives
    holder.acquire()
    monkeypatch.setattr(lock, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(lock, "PATIENCE", 10)
    job = read_job_config(flags(corpus, tmp_path, checkpoint__enable=True))
    assert "is held by another run that is alive" in refusal(capsys, InterdomainTrainer, job)
    assert not torch.distributed.is_initialized()
    holder.require()
    holder.release()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(corpus, stock, tmp_path):
    """A limit on the size of files stands for the disk: each rank's shard is larger, everything else is smaller. The run ends
    with one paragraph from rank 0, and no traceback of a worker: what is left is torchrun's own."""
    shutil.copytree(stock[1] / "checkpoint" / "step-3", tmp_path / "checkpoint" / "step-3")
    # The remains of a save that was killed, newer than the complete checkpoint: neither loaded nor in the way.
    (tmp_path / "checkpoint" / "step-5").mkdir()
    (tmp_path / "checkpoint" / "step-5" / "__0_0.distcp").write_bytes(b"half")
    limit = 2_000_000
    assert all(path.stat().st_size > limit for path in (tmp_path / "checkpoint" / "step-3").glob("*.distcp"))
    settings = {"training__local_batch_size": 4, "checkpoint__enable": True, "checkpoint__interval": 1}
    (tmp_path / "plan.json").write_text("[{}]")
    program = (HERE / "disturbed.py", tmp_path / "plan.json", *flags(corpus, tmp_path, **settings))
    small_files = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    done = torchrun(2, *ONE, *program, forked=True, preexec_fn=small_files)
    text = done.stdout + done.stderr
    assert done.returncode != 0
    assert "Training starts at step 4" in text
    assert text.count("\nerror: ") == 1
    paragraph = text.partition("\nerror: ")[2].partition("\n")[0]
    for words in ("The disk is full: saving", "step-4 failed (File too large)", "checkpoint is step 3"):
        assert words in paragraph
    for line in text.partition("ChildFailedError")[0].splitlines():
        if line.lstrip().startswith("File "):
            assert "torch/distributed" in line or "torchrun" in line or "<frozen runpy>" in line, line
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-3", "step-5"]
