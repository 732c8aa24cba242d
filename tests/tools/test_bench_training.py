"""bench_training: a real run of the trainer, what is read from it, and runs that fail; benchmarks/gpu.sh from a bare clone."""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from interdomain.tools import _bench, bench_training, launch
from interdomain.tools.bench_training import Case

from ..common import REPOSITORY, TIMEOUT

pytest.importorskip("torchtitan", reason="the extra `train` is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU tiny mode; on a GPU run benchmarks/gpu.sh")


def results(folder):
    contents = json.loads((folder / "training.json").read_text())
    (table,) = contents["tables"].values()
    return contents, table["rows"]


@pytest.mark.e2e
def test_a_real_step(tmp_path, capsys):
    argv = ["--output", str(tmp_path), "--cases", "interdomain:eager:none", "--seq-len", "32", "--steps", "2"]
    assert bench_training.main([*argv, "--train-flags", "--mixer.backend", "chunkwise-torch"]) == 0
    contents, (row,) = results(tmp_path)
    assert "remark" not in row, row
    assert contents["status"] == "complete"
    assert contents["label"] == _bench.CPU_LABEL
    assert contents["options"]["train_flags"] == ["--mixer.backend", "chunkwise-torch"]
    assert row["tokens/s"] > 0
    assert row["ms a step"] == pytest.approx(1e3 * 128 / row["tokens/s"])
    assert 7 < row["loss"] < 8.5  # random ids of a vocabulary of 2,048: log 2048 = 7.62
    assert row["GiB reserved"] > 0
    assert "MFU %" not in row  # of a CPU there is none
    assert not any(str(place) in json.dumps(contents) for place in (tmp_path, REPOSITORY))
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 of 1 cases measured; complete: wrote ")


def test_figures_leave_the_first_steps_out():
    args = SimpleNamespace(log_freq=5, steps=20, batch_size=4, seq_len=1000, trace=False)
    seen = {
        "throughput(tps)": {1: 1.0, 5: 10.0, 10: 400.0, 15: 500.0, 20: 450.0},
        "memory/max_reserved(GiB)": {1: 70.0, 5: 60.0, 10: 60.0},
        "loss_metrics/global_avg_loss": {1: 10.5, 20: 10.4},
    }
    row = bench_training.figures(seen, args)
    assert (row["tokens/s"], row["GiB reserved"], row["loss"]) == (450.0, 70.0, 10.4)
    assert row["ms a step"] == pytest.approx(1e3 * 4000 / 450)
    assert "tokens/s" not in bench_training.figures({"throughput(tps)": {1: 1.0, 5: 10.0}}, args)
    args.trace = True  # the profiler slows the last steps
    assert list(bench_training.figures(seen, args)["tokens/s by step"]) == [10, 15]


def test_the_kernels_of_a_trace(tmp_path):
    """Three steps; what the CPU did is not the GPU's time."""
    events = [{"cat": "kernel", "name": f"k{i % 30}", "dur": 1e3 * (1 + i % 30)} for i in range(90)]
    events += [{"cat": "cpu_op", "name": "aten::mm", "dur": 1e9}, {"name": "process_name", "ph": "M"}]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    rows = [list(row.values()) for row in bench_training.top_kernels(tmp_path / "trace.json")]
    assert len(rows) == bench_training.TOP_KERNELS + 1
    assert rows[0] == ["k29", 30.0, pytest.approx(100 * 30 / 465), 1]
    assert rows[-1] == ["all", 465.0, 100, 30]


def stand_in(monkeypatch, *scripts):
    """Runs that do what these shell scripts do, in turn."""
    left = list(scripts)
    monkeypatch.setattr(bench_training._torchrun, "torchrun_command", lambda *a: ["sh", "-c", left.pop(0)])
    monkeypatch.setattr(bench_training, "write_data", lambda *a: None)


def test_a_case_that_fails_says_why_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    stand_in(
        monkeypatch,
        "echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB' >&2; exit 1",
        "echo 'error: /some/where/x is unknown'; echo 'torch.distributed.elastic.ChildFailedError: '; exit 1",
        "sleep 60",
        "true",
    )
    monkeypatch.setattr(bench_training, "CASE_SECONDS", 0.0)
    monkeypatch.setattr(_bench.Deadline, "left", 2.0)
    cases = ["softmax", "interdomain", "s4d", "s4d:eager"]
    assert bench_training.main(["--output", str(tmp_path), "--cases", *cases]) == 0
    _, rows = results(tmp_path)
    assert [row["remark"] for row in rows] == [
        "out of memory",
        "exit status 1: error: x is unknown",
        rows[2]["remark"],
        "no steady step was logged in 3 steps",
    ]
    assert rows[2]["remark"].startswith("cut after ")
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 of 4 cases measured; complete")


def test_ratio_is_to_softmax_of_the_same_settings_and_tokens_fill_a_step(tmp_path, monkeypatch):
    stand_in(monkeypatch, *["true"] * 6)
    speeds = iter([100.0, 150.0, 50.0, 100.0, 300.0, 50.0])
    monkeypatch.setattr(bench_training, "scalars", lambda output: {"throughput(tps)": {2: next(speeds)}})
    cases = ["softmax:eager", "interdomain:eager", "interdomain:compile"]
    argv = ["--output", str(tmp_path), "--seq-len", "32", "256", "--tokens", "64", "--cases", *cases]
    assert bench_training.main(argv) == 0
    tables = json.loads((tmp_path / "training.json").read_text())["tables"]
    assert [name.split(" tokens")[0] for name in tables] == ["debug, 2 x 32", "debug, 1 x 256"]
    found = [[row["over softmax"] for row in table["rows"]] for table in tables.values()]
    assert found == [[1.0, 1.5, None], [1.0, 3.0, None]]


def test_what_torchtitan_itself_lacks_is_named(tmp_path, monkeypatch):
    """Wheels that were carried to a machine without a network: TorchTitan is there and something that it imports is not."""
    monkeypatch.setitem(sys.modules, "typeguard", None)  # tyro imports it to read a configuration
    assert bench_training.main(["--output", str(tmp_path)]) == 0
    contents = json.loads((tmp_path / "training.json").read_text())
    assert contents["status"] == "skipped"
    assert "typeguard" in contents["notes"][-1]


def test_the_default_cases_can_be_planned(tmp_path):
    """Every case for a GPU is a configuration that the trainer takes, at its size."""
    from interdomain.titan.plan import make_plan

    args = SimpleNamespace(seq_len=4096, batch_size=4, steps=20, log_freq=5, trace=True, train_flags=[])
    for text in bench_training.CASES:
        case = Case.parse(text, ("softmax", "interdomain", "s4d"))
        assert str(case) == text
        size = str(REPOSITORY / "train_configs/1.3B.toml")
        job = launch.job_config(size, bench_training.flags(case, args, tmp_path, tmp_path / "out"))
        assert job.mixer.condition == case.condition
        assert (job.compile.enable, job.activation_checkpoint.mode) == (case.mode == "compile", case.checkpointing)
        assert (job.checkpoint.enable, job.validation.enable) == (False, False)
        profiling = job.profiling
        assert (profiling.enable_profiling, profiling.profile_freq, profiling.profiler_active) == (True, 20, 3)
        profiling.enable_profiling = False  # which a machine without a GPU refuses
        assert make_plan(job, world_size=1).accumulation == 1


def test_refused_in_one_paragraph(tmp_path, capsys):
    for argv, said in (
        (["--sizes", "7B"], ["--sizes 7B", "1.3B", "debug"]),
        (["--cases", "mamba:compile"], ["--cases mamba:compile", "softmax", "selective"]),
        (["--steps", "1"], ["--steps 1 has no steady step"]),
    ):
        assert bench_training.main(["--output", str(tmp_path / "out"), *argv]) == 2
        message = capsys.readouterr().err
        assert (message.startswith("error: "), message.count("\n")) == (True, 1)
        assert all(words in message for words in said)
        assert not (tmp_path / "out").exists()


# benchmarks/gpu.sh


def gpu_sh(root, *argv, **env):
    return subprocess.run(
        ["bash", str(root / "benchmarks/gpu.sh"), *argv],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "INTERDOMAIN_PYTHON": sys.executable, **env},
    )


@pytest.mark.e2e
def test_one_command_from_a_clone_that_is_not_installed(tmp_path):
    """The interpreter knows another `interdomain`, if any: what runs is what lies in the clone."""
    for name in ("plugin", "kernels", "tools", "benchmarks"):
        shutil.copytree(
            REPOSITORY / name, tmp_path / "clone" / name, ignore=shutil.ignore_patterns("__pycache__", "results")
        )
    shutil.copyfile(REPOSITORY / "pyproject.toml", tmp_path / "clone/pyproject.toml")
    shared = tmp_path / "clone/tools/_bench.py"
    shared.write_text(shared.read_text().replace("CPU tiny mode:", "CPU tiny mode of the clone:"))
    few = ["--mixers", "sdpa-flash", "--shapes", "1x8x8", "--output", str(tmp_path / "out")]
    done = gpu_sh(tmp_path / "clone", "kernels", *few, INTERDOMAIN_COMMIT="the commit")
    assert done.returncode == 0, done.stderr
    contents = json.loads((tmp_path / "out/kernels.json").read_text())
    assert contents["label"].startswith("CPU tiny mode of the clone")
    assert contents["environment"]["commit"] == "the commit"
    assert contents["status"] == "complete"
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"wrote {tmp_path}/out in ")
    assert last.endswith("(kernels: complete)")
    again = gpu_sh(tmp_path / "clone", "kernels", *few)
    assert again.returncode == 2
    assert "never overwritten" in again.stderr


def test_mistakes_in_the_call(tmp_path):
    for argv, said, env in (
        (["everything"], "no part 'everything'; allowed: all, environment, check, passes, kernels, training", {}),
        (["all", "--rounds", "3"], "flags are for one part", {}),
        (["check"], "/bin/false has no PyTorch", {"INTERDOMAIN_PYTHON": "/bin/false"}),
    ):
        done = gpu_sh(REPOSITORY, *argv, "--output", str(tmp_path / "out"), **env)
        assert (done.returncode, done.stderr.startswith("error: "), said in done.stderr) == (2, True, True)
        assert not (tmp_path / "out").exists()
