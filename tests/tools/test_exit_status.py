"""How a run ends for whoever started it: exit statuses and signals, with small processes in torchrun's place."""

import argparse
import os
import signal
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


def test_home_and_variables_in_the_paths_of_a_command(tmp_path, monkeypatch):
    """A shell leaves `~` in --output=~/x. The name of a file that has a `$` in it is not changed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/people/me")
    monkeypatch.setenv("SCRATCH", "/disk")
    Path("A$B.txt").touch()
    assert str(_cli.path_argument("~/x$SCRATCH/x")) == "/people/me/x/disk/x"
    assert str(_cli.path_argument("A$B.txt")) == "A$B.txt"
    with pytest.raises(argparse.ArgumentTypeError, match="variable NONE_SUCH is not set"):
        _cli.path_argument("$NONE_SUCH/x")


# A stand-in for torchrun. `seen` has the signals that reach it; `wait` waits for the first.
STAND_IN = """
seen = []
def note(number, frame):
    seen.append(number)
signal.signal(signal.SIGTERM, note)
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
    code = when_listening("SigCgt") + STAND_IN + program
    return torchrun.run([sys.executable, "-c", code], dict(os.environ))


THREE_SIGNALS = """
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
    ask(number, launcher)
wait()
say('left')
sys.exit(1 if seen == [signal.SIGTERM] else 9)
"""


@pytest.mark.parametrize(
    ("program", "status", "message"),
    [
        ("", 0, ""),
        (THREE_SIGNALS, CONTINUE, "left on a signal"),
        ("ask(signal.SIGUSR1, launcher); wait(); sys.exit(1)", CONTINUE, "without a checkpoint"),
        # The signal comes after the last step.
        ("ask(signal.SIGTERM, launcher)", 0, ""),
        # The signal comes in the last seconds.
        ("ask(signal.SIGTERM, launcher); wait(); say('ended'); sys.exit(1)", 0, ""),
        # A rank decides to stop, whether it was asked to leave or not.
        ("ask(signal.SIGUSR1, launcher); wait(); say('stopped'); sys.exit(1)", REFUSED, ""),
        # Schedulers and terminals signal every process: torchrun must not die of what is for the launcher.
        ("ask(signal.SIGUSR1, me); ask(signal.SIGHUP, me); sys.exit(4)", 4, ""),
        # Ctrl-C once is SIGTERM. A terminal sends it to torchrun as well.
        (
            "ask(signal.SIGINT, me); ask(signal.SIGINT, launcher); wait(); say('left')",
            CONTINUE,
            "Ctrl-C: leaving",
        ),
        # Ctrl-C twice ends the run, whatever it does.
        ("while True: ask(signal.SIGINT, launcher)", torchrun.INTERRUPTED, ""),
        ("os.kill(me, signal.SIGKILL)", 137, "torchrun was ended by SIGKILL"),
    ],
)
def test_what_the_end_of_torchrun_means(program, status, message, capfd):
    assert run(program) == status
    assert message in capfd.readouterr().err
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL  # the launcher's handlers are gone


def test_ranks_know_which_signal_the_user_sent(capfd):
    program = "from interdomain.launcher import launchers_signal; print(launchers_signal())"
    run(f"ask(signal.SIGINT, launcher); wait(); {program}")
    assert capfd.readouterr().out == "Ctrl-C\n"


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


def test_a_run_saves_and_leaves_if_its_launcher_is_killed():
    """torchrun gets SIGTERM, as when the launcher is asked to stop."""
    waiting = STAND_IN + "print('ready', flush=True); wait(); print(*seen, flush=True)"
    program = f"import os, signal, sys, time{waiting}"
    launcher = (
        "import os, sys; from interdomain.tools._start import torchrun; "
        f"torchrun.run([sys.executable, '-c', {program!r}], dict(os.environ))"
    )
    command = [sys.executable, "-c", launcher]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
        # torchrun holds the pipe until it has left.
        output, _ = process.communicate(timeout=TIMEOUT)
    assert output == f"{signal.SIGTERM.value}\n"


def test_under_nohup_a_run_outlives_its_terminal():
    """torchrun does not handle SIGHUP and SIGINT: it would take back what nohup gave."""
    program = "ask(signal.SIGHUP, launcher); ask(signal.SIGHUP, me); sys.exit(1 if seen else 4)"
    with torchrun.handlers({signal.SIGHUP: signal.SIG_IGN}):
        assert run(program) == 4
    default = get_args_parser().parse_args(["x.py"]).signals_to_handle.split(",")
    handled = ELASTIC["PET_SIGNALS_TO_HANDLE"].split(",")
    assert set(default) - set(handled) == {"SIGHUP", "SIGINT"}


# Options of torchrun that an operator may have set for other machines
OPERATOR = """
NNODES=2 NPROC_PER_NODE=8 NODE_RANK=1 RDZV_BACKEND=static RDZV_ENDPOINT=other:29500 STANDALONE=0
MASTER_ADDR=other MASTER_PORT=29500 LOCAL_ADDR=other MAX_RESTARTS=9
SIGNALS_TO_HANDLE=SIGINT NO_PYTHON=1 RDZV_CONF=is_host=false SHUTDOWN_TIMEOUT=1
"""


def test_torchrun_on_one_machine_takes_no_option_from_the_environment(monkeypatch):
    """The ranks meet at the loopback address, because the machine's own name need not resolve."""
    command = torchrun.torchrun_command("x.toml", [], 3)
    arguments = command[command.index("interdomain.tools._start.elastic") + 1 :]

    def config():
        with mock.patch.dict(os.environ, torchrun.environment(3), clear=True):
            return config_from_args(parse_args(arguments))

    usual, *program = config()
    assert program[0] == sys.executable
    assert (usual.max_nodes, usual.nproc_per_node, usual.max_restarts) == (1, 3, 0)
    store = RendezvousStoreInfo.build(0, HashStore(), usual.local_addr)
    assert store.master_addr == "127.0.0.1"
    for variable in OPERATOR.split():
        name, _, value = variable.partition("=")
        monkeypatch.setenv(f"PET_{name}", value)
    monkeypatch.setenv("PYTHON_EXEC", "another")
    again, *same_program = config()
    assert same_program == program
    # Every run has an id and a folder of logs of its own.
    again.run_id = usual.run_id
    again.logs_specs = usual.logs_specs
    assert again == usual
    # The command says so itself, for a user who pastes it into such a shell.
    assert parse_args(arguments).nnodes == "1"


def test_a_rank_sees_whether_its_launcher_lives(capfd, monkeypatch):
    program = """
from interdomain.launcher import *
print(launcher_has_ended(), os.environ[REASON_FILE])
"""
    run(program)
    has_ended, path = capfd.readouterr().out.split()
    assert has_ended == "False"
    monkeypatch.setenv(REASON_FILE, path.replace(str(os.getpid()), str(2**30)))
    assert launcher_has_ended()


def test_a_node_keeps_compiled_code_where_nobody_else_can_write(tmp_path, monkeypatch, refused):
    def run(command, environment):
        return environment

    monkeypatch.setattr(torchrun, "run", run)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("SLURM_NODEID", "0")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    environment = torchrun.main(["4", "python"])
    assert environment["PET_RDZV_CONF"] == "is_host=true"
    folder = Path(environment["TRITON_CACHE_DIR"]).parent
    folder.chmod(0o777)
    refused(torchrun.main, ["4", "python"], f"{folder} is not a folder that only you can write to")
