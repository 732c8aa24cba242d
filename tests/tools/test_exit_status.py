"""How a run ends for whoever started it: exit statuses and signals, with small processes in torchrun's place."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.run import config_from_args, get_args_parser, parse_args

from interdomain.launcher import REASON_FILE, launcher_has_ended
from interdomain.tools import _cli
from interdomain.tools._start import torchrun
from interdomain.tools._start.torchrun import CONTINUE, ELASTIC, REFUSED

from ..common import TIMEOUT, when_listening

# A stand-in for torchrun: `seen` counts the signals that reach it; `wait` is for the first.
STAND_IN = """
seen = []
signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
def ask(number, who):
    os.kill(who, number)
    time.sleep(0.2)
def say(word):
    open(os.environ["INTERDOMAIN_REASON_FILE"], "w").write(word)
def wait():
    while not seen:
        time.sleep(0.01)
"""


def run(program):
    return torchrun.run(
        [sys.executable, "-c", when_listening("SigCgt") + STAND_IN + program], dict(os.environ)
    )


@pytest.mark.parametrize("convert", [_cli.path_argument, _cli.path_or_name])
def test_home_and_variables_in_the_paths_of_a_command(convert, tmp_path, monkeypatch):
    """A shell leaves `~` in --output=~/x. A name of a file that has a `$` in it, as a shell's `*` finds it, is not changed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/people/me")
    monkeypatch.setenv("SCRATCH", "/disk")
    (tmp_path / "A$B.txt").touch()
    assert str(convert("~/x$SCRATCH/x")) == "/people/me/x/disk/x"
    assert str(convert("A$B.txt")) == "A$B.txt"
    with pytest.raises(
        argparse.ArgumentTypeError, match="the environment variable NONE_SUCH is not set"
    ):
        convert("$NONE_SUCH/x")


def test_home_in_the_name_of_a_source(monkeypatch):
    monkeypatch.setenv("HOME", "/people/me")
    assert [_cli.path_or_name(f"{kind}:~/x") for kind in ("debian", "hf")] == [
        "debian:/people/me/x",
        "hf:/people/me/x",
    ]


THRICE = "".join(f"ask(signal.{name}, launcher); " for name in ("SIGUSR1", "SIGTERM", "SIGHUP"))


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        ("", 0, ""),
        (
            THRICE + "wait(); say('left'); sys.exit(1 if seen == [signal.SIGTERM] else 9)",
            CONTINUE,
            "left on a signal",
        ),
        ("ask(signal.SIGUSR1, launcher); wait(); sys.exit(1)", CONTINUE, "without a checkpoint"),
        ("ask(signal.SIGTERM, launcher)", 0, ""),  # after the last step
        (
            "ask(signal.SIGTERM, launcher); wait(); say('ended'); sys.exit(1)",
            0,
            "",
        ),  # in the last seconds
        # By a decision of a rank, asked to leave or not.
        ("ask(signal.SIGUSR1, launcher); wait(); say('stopped'); sys.exit(1)", REFUSED, ""),
        # Schedulers and terminals signal every process: torchrun must not die of what is for the launcher.
        ("ask(signal.SIGUSR1, me); ask(signal.SIGHUP, me); sys.exit(4)", 4, ""),
        # Ctrl-C once is SIGTERM; twice ends the run, whatever it does. A terminal sends it to torchrun as well.
        (
            "ask(signal.SIGINT, me); ask(signal.SIGINT, launcher); wait(); say('left')",
            CONTINUE,
            "Ctrl-C: saving",
        ),
        ("while True: ask(signal.SIGINT, launcher)", torchrun.INTERRUPTED, ""),
        ("os.kill(me, signal.SIGKILL)", 137, "torchrun was ended by SIGKILL"),
    ],
)
def test_what_the_end_of_torchrun_means(program, status, said, capfd):
    numbers = signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT
    before = [signal.getsignal(number) for number in numbers]
    assert run(program) == status
    assert said in capfd.readouterr().err
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_run_that_is_ended_at_once_leaves_no_descendant():
    """A rank is in a session of its own, and may have started processes of its own."""
    grandchild = "import time; print('started', flush=True); time.sleep(600)"
    start = "subprocess.Popen([sys.executable, '-c', {!r}], start_new_session=True).wait()"
    child = f"import subprocess, sys; {start.format(grandchild)}"
    parent = f"import subprocess, sys; {start.format(child)}"
    command = [sys.executable, "-c", parent]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "started\n"
        torchrun.end_at_once(process.pid)
        # All three hold the pipe: it ends when none is left.
        assert process.communicate(timeout=TIMEOUT) == ("", None)


def test_under_nohup_a_run_outlives_its_terminal(monkeypatch):
    with torchrun.handlers({signal.SIGHUP: signal.SIG_IGN}):
        assert (
            run("ask(signal.SIGHUP, launcher); ask(signal.SIGHUP, me); sys.exit(1 if seen else 4)")
            == 4
        )
    default = get_args_parser().parse_args(["x.py"]).signals_to_handle
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", ELASTIC["PET_SIGNALS_TO_HANDLE"])
    handled = get_args_parser().parse_args(["x.py"]).signals_to_handle
    assert {*default.split(",")} - {*handled.split(",")} == {
        "SIGHUP",
        "SIGINT",
    }  # it would take back what nohup gave


KUBEFLOW = """NNODES=2 NPROC_PER_NODE=8 NODE_RANK=1 RDZV_BACKEND=static RDZV_ENDPOINT=other:29500 STANDALONE=0
MASTER_ADDR=other MASTER_PORT=29500 LOCAL_ADDR=other MAX_RESTARTS=9
SIGNALS_TO_HANDLE=SIGINT NO_PYTHON=1 RDZV_CONF=is_host=false SHUTDOWN_TIMEOUT=1"""


def test_torchrun_on_one_machine_takes_no_option_from_the_environment(monkeypatch):
    """An operator may have set them for other machines. The ranks meet at the loopback address, for the machine's own name need
    not resolve."""
    command = torchrun.torchrun_command("x.toml", [], 3)
    arguments = command[command.index("interdomain.tools._start.elastic") + 1 :]

    def config():
        with mock.patch.dict(os.environ, torchrun.environment(3), clear=True):
            return config_from_args(parse_args(arguments))

    monkeypatch.setattr(socket, "getfqdn", lambda *_: "no-such-host")
    usual, python, words = config()
    assert (usual.min_nodes, usual.max_nodes, usual.nproc_per_node, usual.max_restarts) == (
        1,
        1,
        3,
        0,
    )
    store = RendezvousStoreInfo.build(0, HashStore(), usual.local_addr)
    assert store.master_addr == "127.0.0.1"
    for variable in KUBEFLOW.split():
        name, _, value = variable.partition("=")
        monkeypatch.setenv(f"PET_{name}", value)
    monkeypatch.setenv("PYTHON_EXEC", "another")
    again, *start = config()
    assert start == [python, words]
    assert python == sys.executable
    for name in (
        "min_nodes",
        "max_nodes",
        "local_addr",
        "max_restarts",
        "signals_to_handle",
        "rdzv_configs",
    ):
        assert getattr(again, name) == getattr(usual, name), name
    # The command alone does the same for who pastes it into such a shell.
    assert parse_args(arguments).nnodes == "1"


def test_a_rank_sees_whether_its_launcher_lives(tmp_path, monkeypatch):
    program = "from interdomain.launcher import *; print(not launcher_has_ended(), os.environ[REASON_FILE])"
    assert run(f"sys.stdout = open({str(tmp_path / 'said')!r}, 'w'); {program}") == 0
    lived, path = (tmp_path / "said").read_text().split()
    monkeypatch.delenv(REASON_FILE, raising=False)
    assert (lived, launcher_has_ended()) == ("True", False)
    monkeypatch.setenv(REASON_FILE, path.replace(str(os.getpid()), str(2**30)))
    assert launcher_has_ended()


def test_a_node_keeps_compiled_code_where_nobody_else_can_write(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_NODEID", "0")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torchrun, "run", lambda command, environment: environment)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    environment = torchrun.main(["4", "python"])
    assert (environment["PET_RDZV_CONF"], environment["TORCHINDUCTOR_CACHE_DIR"]) == (
        "is_host=true",
        "mine",
    )
    folder = Path(environment["TRITON_CACHE_DIR"]).parent
    folder.chmod(0o777)
    assert torchrun.main(["4", "python"]) == 2
    assert f"{folder} is not a folder that only you can write to" in capsys.readouterr().err
