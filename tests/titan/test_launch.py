"""The entry point, `torchrun -m interdomain.titan.entry`: what it writes, and how it ends when something is wrong."""

import functools
import math
import resource
import shutil

import pytest

from interdomain.tools._curves import curves_of, read_events

from .conftest import flags, torchrun

pytestmark = pytest.mark.e2e

# One rank's lines on the console; a refusal is not tried again.
ONE = ("--local-ranks-filter", "0", "--max-restarts", "1")


@pytest.fixture(scope="session")
def stock(tmp_path_factory, corpus):
    """(finished process, folder) of a run of two ranks with everything on."""
    folder = tmp_path_factory.mktemp("stock")
    settings = {"checkpoint__enable": True, "validation__enable": True, "metrics__enable_tensorboard": True}
    settings |= {"metrics__disable_color_printing": False}  # left to the program
    arguments = flags(corpus, folder, training__local_batch_size=4, **settings)
    done = torchrun(2, *ONE, "-m", "interdomain.titan.entry", *arguments)
    assert done.returncode == 0, done.stderr[-8000:]
    return done, folder


@pytest.fixture(scope="session")
def events(stock):
    return read_events(stock[1] / "tb")


def test_the_stock_run_is_the_drivers(events, one):
    """Not one process group for many jobs, but the entry point that users start: the same numbers."""
    curves, reference = curves_of(events), one.seen("interdomain")
    for tag, key in (("loss_metrics/global_avg_loss", "loss"), ("grad_norm", "grad_norm")):
        expected = {step: pytest.approx(log[key], rel=1e-5) for step, log in reference["log"].items()}
        assert curves[tag] == expected
    expected = {step: pytest.approx(seen["loss"], rel=1e-5) for step, seen in reference["validation"].items()}
    assert curves["validation_metrics/loss"] == expected


def test_tensorboard_shows_the_run_and_the_mixers_life_signs(events):
    curves = curves_of(events)
    for group, peak in (("main", 3e-3), ("ssm", 1e-3)):
        rates = curves[f"lr/{group}"]
        assert (rates[2], rates[6]) == (pytest.approx(peak), pytest.approx(1e-5))
    for kind, loss in (("loss_metrics", "global_avg_loss"), ("validation_metrics", "loss")):
        losses = curves[f"{kind}/{loss}"]
        for step, value in curves[f"{kind}/perplexity"].items():
            assert value == pytest.approx(math.exp(losses[step]), rel=1e-4)
    for name in (f"mixer/layer_{layer:02d}" for layer in range(4)):
        for sign in (
            "timescale_tokens_min",
            "timescale_tokens_max",
            "one_minus_abs_lambda_min",
            "share_at_decay_bound",
        ):
            assert set(curves[f"{name}/{sign}"]) == {1, 2, 4, 6}  # mixer_freq 2


def test_nothing_is_printed_that_is_not_so(stock):
    """On a CPU: no utilisation of an A100, no autocast that does not happen, no random numbers that DTensor draws."""
    text = stock[0].stdout + stock[0].stderr
    for phrase in ("A100", "handled by AMP", "HF assets path", "autocast", "Warning", "WARNING", "\x1b"):
        assert phrase not in text
    assert "tflops: " in text
    assert "validation perplexity: " in text
    assert "Traceback" not in text


def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(corpus, stock, tmp_path):
    """A limit on the size of files stands for the disk: each rank's shard is larger, everything else is smaller. The run ends
    with one paragraph from rank 0, and no traceback of a worker: what is left is torchrun's own."""
    shutil.copytree(stock[1] / "checkpoint" / "step-3", tmp_path / "checkpoint" / "step-3")
    limit = 2_000_000
    assert all(path.stat().st_size > limit for path in (tmp_path / "checkpoint" / "step-3").glob("*.distcp"))
    settings = {"training__local_batch_size": 4, "checkpoint__enable": True, "checkpoint__interval": 1}
    small_files = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
    program = ("-m", "interdomain.titan.entry", *flags(corpus, tmp_path, **settings))
    done = torchrun(2, *ONE, *program, preexec_fn=small_files)
    text = done.stdout + done.stderr
    assert done.returncode != 0
    assert "Training starts at step 4" in text
    assert text.count("\nerror: ") == 1
    paragraph = text.partition("\nerror: ")[2].partition("\n")[0]
    for words in ("The disk is full: saving", "step-4 failed (File too large)", "checkpoint is step 3"):
        assert words in paragraph
    for line in text.partition("ChildFailedError")[0].splitlines():
        if line.lstrip().startswith("File "):
            assert "titan" not in line, line
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["step-3"]
