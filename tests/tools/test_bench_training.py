"""bench_training: a real run of the trainer, what is read from it, and runs that fail."""

import json

import pytest
import torch

pytest.importorskip("torchtitan", reason="the extra `train` is not installed")

from interdomain.titan.plan.run_plan import make_plan
from interdomain.titan.settings.job_config import read_job_config
from interdomain.tools import bench_training
from interdomain.tools._bench import results as _bench

from ..common import REPOSITORY

CONFIG = REPOSITORY / "train_configs/1.3B.toml"
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU tiny mode; on a GPU run benchmarks/gpu.sh"
)


def results(folder):
    """Returns the contents of training.json, and the rows of its tables."""
    contents = json.loads((folder / "training.json").read_text())
    return contents, [table["rows"] for table in contents["tables"].values()]


def bench(folder, *options):
    assert bench_training.main(["--output", str(folder), *options]) == 0


@pytest.mark.e2e
@pytest.mark.slow
def test_a_real_step(tmp_path):
    flags = ["--mixer.backend", "chunkwise-torch"]
    options = "--cases interdomain:eager:none --seq-len 32 --steps 2 --train-flags"
    bench(tmp_path, *options.split(), *flags)
    contents, [[row]] = results(tmp_path)
    assert "remark" not in row, row
    assert (contents["status"], contents["label"]) == ("complete", _bench.CPU_LABEL)
    assert 7 < row["loss"] < 8.5  # random ids of a vocabulary of 2,048: log 2048 = 7.62
    assert str(tmp_path) not in json.dumps(contents)


def run_of(case="softmax:eager:none", seq_len=1000):
    return bench_training.Run(
        case,
        config=CONFIG,
        batch_size=4,
        seq_len=seq_len,
        steps=20,
        log_freq=5,
        ranks=2,
        limit=60.0,
        train_flags=[],
    )


def test_figures_leave_the_first_steps_out():
    seen = {
        "throughput(tps)": {1: 1.0, 5: 10.0, 10: 400.0, 15: 500.0, 20: 450.0},
        "memory/max_reserved(GiB)": {1: 70.0, 5: 60.0, 10: 60.0},
        "loss_metrics/global_avg_loss": {1: 10.5, 20: 10.4},
    }
    row = bench_training.figures(seen, run_of())
    step = pytest.approx(1e3 * 2000 / 450)
    assert row == {"tokens/s": 450.0, "GiB reserved": 70.0, "loss": 10.4, "ms a step": step}


def no_data(*args):
    """Takes the place of bench_training.write_data."""


def test_a_case_that_fails_says_why_and_the_others_go_on(tmp_path, monkeypatch):
    scripts = {
        "softmax": "echo 'torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB' >&2; exit 1",
        "interdomain": "echo 'error: /some/where/x is unknown'; echo '...elastic.ChildFailedError: '; exit 1",
        "s4d": "exec sleep 60",
        "s4d-rope": "true",
    }
    remaining = iter(scripts.values())

    def torchrun_command(*args):
        return ["sh", "-c", next(remaining)]

    monkeypatch.setattr(bench_training.torchrun, "torchrun_command", torchrun_command)
    monkeypatch.setattr(bench_training, "write_data", no_data)
    cases = [f"{condition}:eager:none" for condition in scripts]
    bench(tmp_path, "--case-limit", "5", "--cases", *cases)
    assert [row["remark"] for row in results(tmp_path)[1][0]] == [
        "out of memory",
        "exit status 1: error: x is unknown",
        "cut after 5 s: no word",
        "no steady step was logged in 3 steps",
    ]


def test_ratio_is_to_softmax_of_the_same_settings_and_tokens_fill_a_step(tmp_path, monkeypatch):
    speeds = iter([100.0, 150.0, 50.0, 100.0, 300.0, 50.0])

    def run_case(run, *args):
        return {"case": run.case, "tokens/s": next(speeds)}

    monkeypatch.setattr(bench_training, "write_data", no_data)
    monkeypatch.setattr(bench_training, "run_case", run_case)
    options = "--seq-len 32 256 --tokens 64 --cases"
    cases = ["softmax:eager:none", "interdomain:eager:none", "interdomain:compile:none"]
    bench(tmp_path, *options.split(), *cases)
    contents, (short, long) = results(tmp_path)
    batches = [name.split(" tokens")[0] for name in contents["tables"]]
    assert batches == ["debug, 2 x 32", "debug, 1 x 256"]
    assert [row["over softmax"] for row in short] == [1.0, 1.5, None]
    assert [row["over softmax"] for row in long] == [1.0, 3.0, None]


@pytest.mark.parametrize("case", bench_training.CASES)
def test_the_default_cases_can_be_planned(case, tmp_path):
    """Every case for a GPU is a configuration that the trainer takes, at its size."""
    flags = bench_training.flags(run_of(case, seq_len=4096), tmp_path, tmp_path / "out")
    job = read_job_config(["--job.config_file", str(CONFIG), *flags])
    mode = "compile" if job.compile.enable else "eager"
    assert case == f"{job.mixer.condition}:{mode}:{job.activation_checkpoint.mode}"
    assert (job.checkpoint.enable, job.validation.enable) == (False, False)
    assert make_plan(job, world_size=1).accumulation == 1
