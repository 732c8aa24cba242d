"""bench_training: a real run of the trainer, what is read from it, and runs that fail."""

import json
import sys

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
    contents = json.loads((folder / "training.json").read_text())
    return contents, [table["rows"] for table in contents["tables"].values()]


@pytest.mark.e2e
@pytest.mark.slow
def test_a_real_step(tmp_path, capsys):
    argv = [
        "--output",
        str(tmp_path),
        "--cases",
        "interdomain:eager:none",
        "--seq-len",
        "32",
        "--steps",
        "2",
    ]
    assert bench_training.main([*argv, "--train-flags", "--mixer.backend", "chunkwise-torch"]) == 0
    contents, [[row]] = results(tmp_path)
    assert "remark" not in row, row
    assert (contents["status"], contents["label"]) == ("complete", _bench.CPU_LABEL)
    assert contents["options"]["train_flags"] == ["--mixer.backend", "chunkwise-torch"]
    assert row["ms a step"] == pytest.approx(1e3 * 128 / row["tokens/s"])
    assert 7 < row["loss"] < 8.5  # random ids of a vocabulary of 2,048: log 2048 = 7.62
    assert row["GiB reserved"] > 0
    assert "MFU %" not in row  # of a CPU there is none
    assert not any(str(place) in json.dumps(contents) for place in (tmp_path, REPOSITORY))
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .startswith("1 of 1 cases measured; complete: wrote ")
    )


def run_of(case="softmax:eager:none", **changes):
    settings = dict(
        config=CONFIG,
        batch_size=4,
        seq_len=1000,
        steps=20,
        log_freq=5,
        ranks=2,
        limit=60.0,
        train_flags=[],
    )
    return bench_training.Run(case, **settings | changes)


def test_figures_leave_the_first_steps_out():
    seen = {
        "throughput(tps)": {1: 1.0, 5: 10.0, 10: 400.0, 15: 500.0, 20: 450.0},
        "memory/max_reserved(GiB)": {1: 70.0, 5: 60.0, 10: 60.0},
        "loss_metrics/global_avg_loss": {1: 10.5, 20: 10.4},
    }
    row = bench_training.figures(seen, run_of())
    assert row == {
        "tokens/s": 450.0,
        "GiB reserved": 70.0,
        "loss": 10.4,
        "ms a step": pytest.approx(1e3 * 2000 / 450),
    }
    assert "tokens/s" not in bench_training.figures(
        {"throughput(tps)": {1: 1.0, 5: 10.0}}, run_of()
    )


def test_a_case_that_fails_says_why_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    scripts = {
        "softmax": "echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB' >&2; exit 1",
        "interdomain": "echo 'error: /some/where/x is unknown'; echo '...elastic.ChildFailedError: '; exit 1",
        "s4d": "exec sleep 60",
        "s4d-rope": "true",
    }
    remaining = iter(scripts.values())
    monkeypatch.setattr(
        bench_training.torchrun, "torchrun_command", lambda *a: ["sh", "-c", next(remaining)]
    )
    monkeypatch.setattr(bench_training, "write_data", lambda *a: None)
    cases = [f"{condition}:eager:none" for condition in scripts]
    assert (
        bench_training.main(["--output", str(tmp_path), "--case-limit", "5", "--cases", *cases])
        == 0
    )
    assert [row["remark"] for row in results(tmp_path)[1][0]] == [
        "out of memory",
        "exit status 1: error: x is unknown",
        "cut after 5 s: no word",
        "no steady step was logged in 3 steps",
    ]
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 of 4 cases measured; complete")


def test_ratio_is_to_softmax_of_the_same_settings_and_tokens_fill_a_step(tmp_path, monkeypatch):
    speeds = iter([100.0, 150.0, 50.0, 100.0, 300.0, 50.0])
    monkeypatch.setattr(bench_training, "write_data", lambda *a: None)
    monkeypatch.setattr(
        bench_training, "run_case", lambda run, *a: {"case": run.case, "tokens/s": next(speeds)}
    )
    cases = ["softmax:eager:none", "interdomain:eager:none", "interdomain:compile:none"]
    argv = [
        "--output",
        str(tmp_path),
        "--seq-len",
        "32",
        "256",
        "--tokens",
        "64",
        "--cases",
        *cases,
    ]
    assert bench_training.main(argv) == 0
    contents, tables = results(tmp_path)
    assert [name.split(" tokens")[0] for name in contents["tables"]] == [
        "debug, 2 x 32",
        "debug, 1 x 256",
    ]
    assert [[row["over softmax"] for row in rows] for rows in tables] == [
        [1.0, 1.5, None],
        [1.0, 3.0, None],
    ]


def test_what_torchtitan_itself_lacks_is_named(tmp_path, monkeypatch):
    """Wheels that were carried to a machine without a network: TorchTitan is there and something that it imports is not."""
    monkeypatch.setitem(sys.modules, "typeguard", None)  # tyro imports it to read a configuration
    assert bench_training.main(["--output", str(tmp_path)]) == 0
    contents, _ = results(tmp_path)
    assert (contents["status"], "typeguard" in contents["notes"][-1]) == ("skipped", True)


@pytest.mark.parametrize("case", bench_training.CASES)
def test_the_default_cases_can_be_planned(case, tmp_path):
    """Every case for a GPU is a configuration that the trainer takes, at its size."""
    flags = bench_training.flags(run_of(case, seq_len=4096), tmp_path, tmp_path / "out")
    job = read_job_config(["--job.config_file", str(CONFIG), *flags])
    mode = "compile" if job.compile.enable else "eager"
    assert case == f"{job.mixer.condition}:{mode}:{job.activation_checkpoint.mode}"
    assert (job.checkpoint.enable, job.validation.enable) == (False, False)
    assert make_plan(job, world_size=1).accumulation == 1
