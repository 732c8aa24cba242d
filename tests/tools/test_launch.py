"""The launcher: what a dry run prints, what is refused before anything starts, one real start; launch.sh's environment."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from interdomain.tools import bench_training, convert, generate, launch
from interdomain.tools._start.torchrun import CONTINUE, REFUSED

from ..common import REPOSITORY, TIMEOUT, write_program


@pytest.fixture(autouse=True)
def in_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    # The tests may themselves stand in an allocation.
    monkeypatch.setenv("INTERDOMAIN_SITE", "local")


@pytest.fixture
def nothing_starts(monkeypatch):
    monkeypatch.setattr(launch.torchrun, "run", pytest.fail)


def dry_run(capsys, *argv):
    assert launch.main([*argv, "--dry-run"]) == 0
    return capsys.readouterr().out


def test_a_dry_run_of_a_cell_of_the_papers_starts_and_writes_nothing(
    capsys, tmp_path, nothing_starts
):
    """The paper's parameter table has the counts. Its token budget and 375 M-token warmup are steps of 524,288 tokens."""
    folders = f"--job.dump_folder {tmp_path}/out --data.corpus {tmp_path}/none"
    config = ["train_configs/125M.toml", "--mixer.condition", "s4d", "--ranks", "16"]
    out = dry_run(capsys, *config, *folders.split())
    assert "125M, s4d (135,425,424 parameters)" in out
    assert "4,769 of 524,288 tokens (warmup 715)" in out
    assert "2,500,329,472" in out
    assert "--nproc-per-node 16 --max-restarts 3 " in out
    assert "NOT HERE: data.corpus = " in out
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("torchrun_status", "saves", "status"),
    [(1, True, CONTINUE), (1, False, 1), (REFUSED, True, REFUSED)],
)
def test_a_run_that_failed_after_it_saved_something_new_asks_to_be_started_again(
    tmp_path, monkeypatch, torchrun_status, saves, status
):
    def run(command, environment):
        if saves:
            step = tmp_path / "checkpoint/step-7"
            step.mkdir(parents=True)
            (step / ".metadata").touch()
        return torchrun_status

    monkeypatch.setattr(launch.torchrun, "run", run)
    monkeypatch.setattr(launch, "check_data", mock.Mock())
    assert launch.main(["--job.dump_folder", str(tmp_path), "--ranks", "1"]) == status


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--mixer.condition mamba", ["mixer.condition", "mamba", "softmax", "s4d-rope"]),
        ("--data.corpus no/such/corpus", ["no/such/corpus"]),
        ("no/such.toml", ["no/such.toml: No such file"]),
        ("--job.config_file=train_configs/125M.toml", ["./launch.sh FILE.toml"]),
    ],
)
def test_refused_before_anything_starts(
    refused, tmp_path, monkeypatch, nothing_starts, argv, words
):
    monkeypatch.setattr(launch.torch.cuda, "device_count", int)
    refused(launch.main, ["--job.dump_folder", tmp_path / "out", *argv.split()], *words)
    assert os.listdir(tmp_path) == []


def test_gpus_that_pytorch_cannot_use_are_no_reason_to_train_on_the_cpu(
    capsys, refused, tmp_path, monkeypatch, nothing_starts
):
    def glob(pattern):
        return ["/dev/nvidia0"]

    monkeypatch.setattr(launch.glob, "glob", glob)
    monkeypatch.setattr(launch.torch.cuda, "is_available", bool)
    monkeypatch.setattr(launch.torch.cuda, "device_count", int)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    dry_run(capsys)  # on a login node it says what would run elsewhere
    words = "this machine has GPUs (/dev/nvidia0)"
    refused(launch.main, ["--job.dump_folder", tmp_path / "out"], words)
    refused(bench_training.main, ["--output", tmp_path / "out"], words)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    launch.refuse_idle_gpus()


CONFIGS = sorted((REPOSITORY / "train_configs").glob("*.toml"))
# tests/docs/test_stock.py trains this one under TorchTitan's entry.
CONFIGS.remove(REPOSITORY / "train_configs/c4_test.toml")


def test_every_config_names_existing_fields_and_the_plugin(capsys):
    ranks = {"7B": "4", "70B": "32"}
    for path in CONFIGS:
        out = dry_run(capsys, str(path), "--ranks", ranks.get(path.stem, "1"))
        assert path.stem in out


@pytest.mark.e2e
def test_first_start_end_to_end(tmp_path, monkeypatch, capsys):
    """The newcomer's run has a corpus and two steps. The commands that it prints work when they are pasted."""
    for name in ("train_configs", "launch.sh"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setenv("INTERDOMAIN_PYTHON", sys.executable)
    settings = """--ranks 1 --max-restarts 0 --training.seq_len 64 --validation.tokens=1024
        --model.n-layers 2 --model.dim 96 --training.steps 2 --lr_scheduler.warmup_steps 0"""
    command = ["./launch.sh", *settings.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    output = done.stdout
    assert done.returncode == 0, f"{output[-2000:]}\n{done.stderr[-4000:]}"
    assert re.findall(r"[\d.]+ at step (\d+)", output) == ["1", "2"]
    assert "debug with dim 96, n_layers 2, " in output
    commands = dict(re.findall(r"^# (\w+).*\n(.+)$", output, re.MULTILINE))
    assert list(commands) == ["watch", "convert", "generate"]
    for name, tool in (("convert", convert), ("generate", generate)):
        program, *arguments = shlex.split(commands[name])
        assert os.access(program, os.X_OK)
        assert tool.main(arguments[arguments.index(name) + 1 :]) == 0
    assert "\ndef main(" in capsys.readouterr().out


# A stand-in for Python, its venv and its pip. An installation notes when it begins, and whether another one is running.
STAND_IN = """
here=$(dirname "$0")
case "$*" in
  --version) echo Python 3.11.0 ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/bin/pip" ;;
  "-m pip --version") test -e "$here/pip" ;;
  "-m pip install"*)
    test -e "$here/pip" || exit 1
    mkdir "$here/busy" || echo two at once >> log
    echo install >> log
    sleep 0.1
    while test -e hold; do sleep 0.1; done
    rmdir "$here/busy" ;;
  "-m interdomain.tools.launch"*) echo started ;;
esac
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """checkout(text, *pythons): writes Pythons of this text into the working folder, which has launch.sh."""
    for name in ("INTERDOMAIN_PYTHON", "INTERDOMAIN_VENV"):
        monkeypatch.delenv(name, raising=False)
    for name in ("launch.sh", "pyproject.toml", "constraints.txt", "constraints-titan03.txt"):
        shutil.copy(REPOSITORY / name, tmp_path)
    monkeypatch.chdir(tmp_path)

    def checkout(text, *pythons):
        for name in pythons:
            python = Path(name)
            python.parent.mkdir(parents=True)
            write_program(python, text)

    return checkout


def test_titan_chooses_an_environment(checkout, monkeypatch):
    checkout('echo $0 "$@" >> log', ".venv/bin/python", ".venv-titan03/bin/python")

    def start(version):
        command = ["./launch.sh", "--titan", version, "run.toml"]
        return subprocess.run(command, capture_output=True, text=True).stderr

    assert start("0.4") == "error: --titan must be 0.2 or 0.3: got 0.4.\n"
    start("0.3")
    log = Path("log").read_text()
    assert "-c constraints-titan03.txt -e .[titan03]" in log
    assert log.endswith("/.venv-titan03/bin/python -m interdomain.tools.launch run.toml\n")
    monkeypatch.setenv("INTERDOMAIN_PYTHON", "python")
    assert "leave one out" in start("0.3")


def test_an_environment_of_another_processor_is_refused(checkout):
    checkout("", ".venv/bin/python")
    Path(".venv/.processor").write_text("another\n")
    done = subprocess.run("./launch.sh", stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "INTERDOMAIN_VENV=" in done.stderr


def test_paths_are_those_of_the_folder_that_it_is_started_in(checkout, tmp_path, monkeypatch):
    """launch.sh may be started from elsewhere, and through a link. The user's file and environments are found."""
    checkout(
        'echo "$PWD $0 $@"',
        "clone/.venv/bin/python",
        "mine/env/bin/python",
        "mine/venv/bin/python",
    )
    for name in ("launch.sh", "pyproject.toml", "constraints.txt"):
        Path(name).rename(f"clone/{name}")
    Path("mine/launch").symlink_to("../clone/launch.sh")
    monkeypatch.chdir("mine")

    def start(script, python):
        output = subprocess.check_output(["bash", script, "mine.toml"], text=True)
        expected = f"{tmp_path}/mine {tmp_path}/{python} -m interdomain.tools.launch mine.toml"
        assert output.splitlines()[-1] == expected

    for script in (f"{tmp_path}/clone/launch.sh", "../clone/launch.sh", "launch"):
        start(script, "clone/.venv/bin/python")
    monkeypatch.setenv("INTERDOMAIN_VENV", "venv")
    start("launch", "mine/venv/bin/python")
    monkeypatch.setenv("INTERDOMAIN_PYTHON", "env/bin/python")
    start("launch", "mine/env/bin/python")


def test_starts_at_once_install_once_and_repair_what_was_killed(checkout, tmp_path, monkeypatch):
    """A start was killed when it had a Python and no pip, another one in the middle of pip. New constraints are installed."""
    checkout(STAND_IN, "tools/python3.11", ".venv/bin/python")
    monkeypatch.setenv("PATH", str(tmp_path / "tools"), prepend=os.pathsep)
    options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}

    def start():
        return subprocess.Popen("./launch.sh", **options)

    Path("hold").touch()
    killed = start()
    while not Path("log").exists():
        assert killed.poll() is None
    waiting = [start(), start()]
    assert waiting[0].stdout.readline() == "waiting for another start, which installs into .venv\n"
    Path(".venv/bin/busy").rmdir()
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    Path("hold").unlink()
    for process in waiting:
        assert process.communicate(timeout=TIMEOUT)[0].endswith("started\n")
    Path("constraints.txt").write_text("torch==0\n")
    for _ in range(2):
        assert start().wait(60) == 0
    # An installation calls pip twice, for torch and for the rest. The first start was killed in torch. One of the two that
    # waited installed, and so did one of the two with other constraints.
    assert Path("log").read_text() == "install\n" * (1 + 2 + 2)
