"""The entry point as users start it: what it writes and says, and how it ends on a signal and on a full disk.

Two nodes of a SLURM allocation: real processes of this machine (slurm_stand_in.py), two torchrun agents of one rank each.
"""

import math
import re
import shutil
import signal
from types import SimpleNamespace

import pytest

from interdomain.tools import compare_runs, launch
from interdomain.tools._curves import curves_of, read_events

from .. import slurm_stand_in
from .runs import flags, run_disturbed, start_launcher

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory, corpus):
    """A run with everything on that gets the time limit's SIGUSR1 after step 6: its status, what it said, its folder."""
    folder, said = tmp_path_factory.mktemp("nodes"), ""
    settings = {"checkpoint__enable": True, "validation__enable": True, "metrics__enable_tensorboard": True}
    settings |= {"training__local_batch_size": 4, "training__steps": 200, "checkpoint__interval": 200}
    settings |= {"metrics__disable_color_printing": False}  # left to the program
    once = ["--ranks", "1", "--max-restarts", "0"]
    with pytest.MonkeyPatch.context() as patch:
        slurm_stand_in.allocations(folder, patch)("localhost", "localhost")
        with start_launcher(corpus, folder / "run", *once, **settings) as running:
            for line in running.stdout:
                said += line
                if re.search(r"step: +6 ", line):
                    running.send_signal(signal.SIGUSR1)
    return SimpleNamespace(status=running.returncode, said=said, folder=folder / "run")


def test_two_nodes_train_as_one_machine_and_leave_on_the_signal(nodes, runs, capsys):
    assert nodes.status == launch.CONTINUE, nodes.said[-5000:]
    left = int(re.search(r"leaving after step (\d+) \(SIG", nodes.said)[1])
    assert (nodes.folder / "checkpoint" / f"step-{left}" / ".metadata").is_file()
    assert len(re.findall(r"(?<!validate )step:  1 ", nodes.said)) == 1  # one node speaks for all
    assert compare_runs.main(["--common", str(nodes.folder), str(runs.at("2 text"))]) == 0, capsys.readouterr().out
    assert "the same to the bit at" in capsys.readouterr().out


def test_tensorboard_shows_the_run_and_the_mixers_life_signs(nodes):
    curves = curves_of(read_events(nodes.folder / "tb"))
    for group, peak in (("main", 3e-3), ("ssm", 1e-3)):
        rates = curves[f"lr/{group}"]
        assert (rates[2], rates[6]) == (pytest.approx(peak), pytest.approx(1e-5))
    for kind, loss in (("loss_metrics", "global_avg_loss"), ("validation_metrics", "loss")):
        losses = curves[f"{kind}/{loss}"]
        assert {1, 3, 6} <= losses.keys()
        for step, value in curves[f"{kind}/perplexity"].items():
            assert value == pytest.approx(math.exp(losses[step]), rel=1e-4)
    signs = ("timescale_tokens_min", "timescale_tokens_max", "one_minus_abs_lambda_min", "share_at_decay_bound")
    for name in (f"mixer/layer_{layer:02d}/{sign}" for layer in range(2) for sign in signs):
        assert [*curves[name]][:4] == [1, 2, 4, 6]  # mixer_freq 2


def test_nothing_is_printed_that_is_not_so(nodes):
    """On a CPU: no utilisation of an A100, no autocast that does not happen, no random numbers that DTensor draws."""
    for phrase in ("A100", "handled by AMP", "HF assets path", "autocast", "Warning", "WARNING", "\x1b", "Traceback"):
        assert phrase not in nodes.said
    assert "tflops: " in nodes.said
    assert "validation perplexity: " in nodes.said


def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(corpus, runs, tmp_path):
    """A limit on the size of files stands for the disk: each rank's shard is larger, everything else is smaller. The run ends
    with one paragraph from rank 0, and no traceback of a worker: what is left is torchrun's own."""
    before, limit = tmp_path / "checkpoint" / "step-3", 1_000_000
    shutil.copytree(runs.checkpoint("2 text", 3), before)
    assert all(path.stat().st_size > limit for path in before.glob("*.distcp"))
    settings = {"training__local_batch_size": 4, "checkpoint__enable": True, "checkpoint__interval": 1}
    (plan := tmp_path / "plan.json").write_text('{"starts": [null]}')  # a refusal is not tried again
    status, text = run_disturbed(plan, 1, *flags(corpus, tmp_path, **settings), largest=limit)
    assert status == launch.torchrun.REFUSED
    assert "Training starts at step 4" in text
    assert text.count("\nerror: ") == 1
    paragraph = text.partition("\nerror: ")[2].partition("\n")[0]
    for words in ("The disk is full: saving", "step-4 failed (unexpected pos)", "checkpoint is step 3"):
        assert words in paragraph
    for line in text.partition("ChildFailedError")[0].splitlines():
        if line.lstrip().startswith("File "):
            assert "interdomain/titan" not in line, line
    assert [path.name for path in (tmp_path / "checkpoint").glob("step-*")] == ["step-3"]
