"""The launcher: what a dry run prints, what is refused before anything starts, one real start; launch.sh's environment."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from interdomain.tools import launch, prepare_data

from ..common import TIMEOUT

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_repository(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("INTERDOMAIN_SITE", "local")  # the tests may themselves stand in an allocation


def dry(capsys, *argv):
    code = launch.main([*argv, "--dry-run"])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("size", "parameters", "steps", "tokens"),
    [
        ("125M", "135,416,208", "4,769", "2,500,329,472"),
        ("350M", "377,360,768", "13,352", "7,000,293,376"),
        ("760M", "781,498,752", "28,611", "15,000,403,968"),
        ("1.3B", "1,352,406,784", "49,592", "26,000,490,496"),
    ],
)
def test_dry_run_of_the_papers_runs(capsys, size, parameters, steps, tokens):
    """Counts of the paper's parameter table; its token budgets and 375 M-token warmup in steps of 524,288 tokens."""
    code, out, _ = dry(capsys, f"train_configs/{size}.toml", "--ranks", "16")
    assert code == 0
    assert f"{size}, interdomain ({parameters} parameters)" in out
    assert f"{steps} of 524,288 tokens (warmup 715)" in out
    assert tokens in out
    assert "--nproc-per-node 16" in out
    assert "FLOPs per token" in out
    assert "memory per device" in out


def test_another_cell_is_a_flag(capsys):
    code, out, _ = dry(capsys, "--mixer.condition", "s4d", "train_configs/125M.toml", "--ranks", "1")
    assert code == 0
    assert "125M, s4d (135,425,424 parameters)" in out
    code, out, _ = dry(capsys, "train_configs/125M.toml", "--mixer.dual_input", "False", "--ranks", "1")
    assert code == 0
    assert "125M, single-query (135,462,288 parameters)" in out


def test_without_torchtitan_it_says_what_to_install(capsys, monkeypatch):
    for name in [
        name for name in sys.modules if name.split(".")[0] == "torchtitan" or name.startswith("interdomain.titan")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    code, _, err = dry(capsys)
    assert code == 2
    assert err.startswith("error: training needs torchtitan")
    assert "pip install -c constraints.txt -e '.[train]'" in err


def test_killed_ranks_are_restarted(capsys):
    assert "--max-restarts 3 " in dry(capsys)[1]
    assert "--max-restarts 7 " in dry(capsys, "--max-restarts", "7")[1]
    assert "--max-restarts" not in dry(capsys, "--max-restarts", "0")[1]
    code, _, error = dry(capsys, "--max-restarts", "-1")
    assert (code, "--max-restarts must be 0 or more: got -1." in error) == (2, True)


def test_dry_run_starts_and_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(launch._torchrun, "run", lambda *a, **k: pytest.fail("a dry run started a process"))
    code, _, _ = dry(capsys, "--job.dump_folder", str(tmp_path / "out"), "--data.corpus", str(tmp_path / "no corpus"))
    assert code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--mixer.condition", "mamba"], ["mixer.condition = 'mamba'", "softmax", "s4d-rope"]),
        (["--data.corpus", "no/such/corpus"], ["no/such/corpus"]),
        (["--ranks", "0"], ["--ranks", "at least 1"]),
        (["no/such.toml"], ["no/such.toml", "train_configs/debug.toml"]),
        (["a.toml", "b.toml"], ["a.toml, b.toml"]),
        (["--job.config_file=train_configs/125M.toml"], ["without --job.config_file", "./launch.sh FILE.toml"]),
        (["--job.config-file", "train_configs/125M.toml"], ["without --job.config_file", "./launch.sh FILE.toml"]),
    ],
)
def test_refused_in_one_paragraph_before_anything_starts(capsys, tmp_path, monkeypatch, argv, said):
    monkeypatch.setattr(launch._torchrun, "run", lambda *a, **k: pytest.fail("started a run that cannot work"))
    monkeypatch.setattr(launch.torch.cuda, "device_count", lambda: 0)
    code = launch.main(["--job.dump_folder", str(tmp_path / "out"), *argv])
    err = capsys.readouterr().err
    assert code == 2
    message = err[err.index("error: ") :]
    assert "\n" not in message.strip()
    for words in said:
        assert words in message
    assert list(tmp_path.iterdir()) == []


def test_a_first_start_waits_for_another_that_prepares_the_embedded_corpus(monkeypatch, tmp_path):
    """Jobs that were submitted together begin together."""
    asked = []

    def kept_folder(output, wait):
        asked.append((output, wait))
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_data, "kept_folder", kept_folder)
    monkeypatch.setattr(launch, "EMBEDDED_CORPUS", str(tmp_path / "stdlib"))
    job = launch.job_config("train_configs/debug.toml", ["--data.corpus", launch.EMBEDDED_CORPUS])
    with pytest.raises(SystemExit):
        launch.check_data(job)
    assert asked == [(tmp_path / "stdlib", True)]


def test_gpus_that_pytorch_cannot_use_are_no_reason_to_train_on_the_cpu(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(launch.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(launch.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(launch, "check_data", lambda job: pytest.fail("prepared data for a run that cannot be"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert dry(capsys)[0] == 0  # on a login node it says what would run elsewhere
    assert launch.main(["--job.dump_folder", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "this machine has GPUs (/dev/nvidia0)" in error
    assert f"PyTorch {launch.torch.__version__} cannot use them" in error
    for said in launch.NO_GPUS:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
        launch.refuse_idle_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=''"):
        launch.refuse_idle_gpus()
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: True)
    launch.refuse_idle_gpus()


def test_flags_lists_every_setting(capsys):
    from interdomain.titan import settings

    with pytest.raises(SystemExit) as end:
        launch.main(["--flags"])
    said = capsys.readouterr().out
    assert end.value.code == 0
    for setting, kind in settings.KINDS.items():
        assert (f"--{setting.replace('_', '-')}" in said) == (not settings._mark(kind, settings.Unused)), setting
    assert "Train for this many steps" in said


def test_every_config_names_existing_fields_and_the_plugin(capsys):
    for path in sorted((ROOT / "train_configs").glob("*.toml")):
        code, out, _ = dry(capsys, str(path.relative_to(ROOT)), "--ranks", "1")
        assert code == 0, path
        assert path.stem in out


@pytest.mark.e2e
def test_first_start_end_to_end(tmp_path):
    """The newcomer's run in a folder of its own: corpus, two steps, and then every command that it prints, pasted."""
    for name in ("train_configs", "launch.sh"):
        (tmp_path / name).symlink_to(ROOT / name)

    def paste(command, status=0):
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            env={**os.environ, "TQDM_DISABLE": "1", "INTERDOMAIN_PYTHON": sys.executable},
        )
        assert done.returncode == status, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done

    def commands(run):
        printed = run.stdout[run.stdout.index("\n# ") :].strip().splitlines()
        return {line.split()[1]: printed[i + 1] for i, line in enumerate(printed) if line.startswith("# ")}

    def rate(step):
        return json.loads((tmp_path / f"outputs/debug/checkpoint/step-{step}/interdomain.json").read_text())["lr"]

    settings = (
        "--training.seq_len 64 --validation.tokens=1024 --model.n-layers 2 --model.dim 96 --lr_scheduler.warmup_steps 0"
    )
    first = paste(f"./launch.sh --ranks 1 --max-restarts 0 {settings} --training.steps 2")
    assert [int(step) for step in re.findall(r"[\d.]+ at step (\d+)", first.stdout)] == [1, 2]
    assert "debug with dim 96, n_layers 2, " in first.stdout
    assert list((tmp_path / "outputs/debug/tb").glob("*/events*"))
    found = commands(first)
    assert list(found) == ["watch", "convert", "generate", "train"]
    paste(found["convert"])
    assert paste(found["generate"]).stdout.startswith("def main(")
    assert rate(2) == pytest.approx(1e-5)  # the floor

    again = paste(f"./launch.sh --ranks 1 {settings} --training.steps 40", status=2)
    assert "was trained with 1e-05 at step 2" in again.stderr
    assert "--lr_scheduler.total_steps 2" in again.stderr

    assert " --ranks 1 --max-restarts 0 " in found["train"]
    on = paste(found["train"])
    assert "--nproc-per-node 1 " in on.stdout
    assert "--max-restarts" not in on.stdout[: on.stdout.index("output")]
    assert rate(4) == rate(2)
    assert "--training.steps 8" in commands(on)["train"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([], ["--lr_scheduler.total_steps", "400"]),
        (
            ["--training.tokens=409600", "--ranks", "3", "--site", "local", "--max-restarts", "9"],
            ["--lr_scheduler.total_steps", "100"],
        ),
        (["--training.steps", "30", "--compile.enable", "--lr-scheduler.decay-ratio", "0"], []),
        (["--lr_scheduler.min_lr", "0", "--data.corpus", "a"], ["--lr_scheduler.allow_jump"]),
    ],
)
def test_the_command_that_trains_on_is_taken(given, kept):
    from interdomain.titan.plan import make_plan

    args, flags = launch.parse(given)
    job = launch.job_config(args.config, flags)
    plan = make_plan(job, world_size=2)
    (command,) = launch.train_on(args, flags, job, plan).values()
    again, its = launch.parse(command[1:])
    assert vars(again) == vars(args)
    assert make_plan(launch.job_config(again.config, its), world_size=2).steps == 2 * plan.steps
    assert set(kept) <= set(its)
    assert [flag for flag in its if flag.startswith("--")].count("--training.steps") == 1


# Python, its venv and its pip, as far as launch.sh asks: an installation that notes when it begins, and whether it is alone.
STAND_IN = """#!/bin/sh
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
ONE_INSTALLATION = ["install", "install"]  # torch, and the rest


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """launch.sh in a fresh checkout, which finds the stand-in. Returns: start(), a process."""
    for name in ("launch.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "python3.11").write_text(STAND_IN)
    (tools / "python3.11").chmod(0o755)
    for name in ("bash", "dirname", "cat", "cksum", "mkdir", "rmdir", "cp", "touch", "grep", "tail", "sleep", "flock"):
        if path := shutil.which(name):
            (tools / name).symlink_to(path)
    monkeypatch.setenv("PATH", str(tools))
    for name in ("INTERDOMAIN_PYTHON", "INTERDOMAIN_VENV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def start():
        return subprocess.Popen(["./launch.sh"], stdout=subprocess.PIPE, text=True, start_new_session=True)

    return start


def installed():
    return Path("log").read_text().splitlines()


def test_it_runs_where_it_stands(tmp_path):
    """And not in a folder of the same name that the shell's CDPATH knows."""
    for folder in ("main", "other/main"):
        (tmp_path / folder).mkdir(parents=True)
        shutil.copy(ROOT / "launch.sh", tmp_path / folder)
    (tmp_path / "python").write_text("#!/bin/sh\npwd\n")
    (tmp_path / "python").chmod(0o755)
    found = {**os.environ, "CDPATH": str(tmp_path / "other"), "INTERDOMAIN_PYTHON": str(tmp_path / "python")}
    run = subprocess.run(["bash", "main/launch.sh"], cwd=tmp_path, env=found, capture_output=True, text=True)
    assert run.stdout == f"{tmp_path / 'main'}\n"


def test_starts_at_once_install_once(checkout):
    starts = [checkout() for _ in range(4)]
    said = [start.communicate(timeout=TIMEOUT)[0].splitlines() for start in starts]
    assert [start.returncode for start in starts] == [0] * 4
    assert [lines[-1] for lines in said] == ["started"] * 4
    assert installed() == ONE_INSTALLATION
    checkout().wait(60)
    assert installed() == ONE_INSTALLATION


def test_a_start_says_that_it_waits_for_another(checkout):
    Path(".venv").mkdir()
    with open(".venv/.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        start = checkout()
        assert start.stdout.readline() == "waiting for another start, which installs into .venv\n"
        assert not Path("log").exists()
    assert start.communicate(timeout=TIMEOUT)[0].splitlines()[-1] == "started"
    assert installed() == ONE_INSTALLATION


@pytest.mark.parametrize("flock", [None, "#!/bin/sh\nexit 71\n"], ids=["missing", "unsupported"])
def test_without_locks_it_installs_all_the_same(checkout, flock):
    Path("tools/flock").unlink(missing_ok=True)
    if flock:
        Path("tools/flock").write_text(flock)
        Path("tools/flock").chmod(0o755)
    said, _ = checkout().communicate(timeout=TIMEOUT)
    assert "waiting" not in said
    assert said.endswith("started\n")
    assert installed() == ONE_INSTALLATION


def test_an_interrupted_installation_is_repaired(checkout):
    """Killed when it had a Python and no pip, or in the middle of pip."""
    Path(".venv/bin").mkdir(parents=True)
    shutil.copy("tools/python3.11", ".venv/bin/python")
    Path("hold").touch()
    start = checkout()
    while not Path("log").exists() or not installed():
        assert start.poll() is None
    os.killpg(start.pid, signal.SIGKILL)
    start.wait()
    Path("hold").unlink()
    Path(".venv/bin/busy").rmdir()
    assert checkout().wait(60) == 0
    assert installed() == ["install", *ONE_INSTALLATION]
    Path("constraints.txt").write_text("torch==0\n")
    assert checkout().wait(60) == 0
    assert installed() == ["install", *ONE_INSTALLATION * 2]
