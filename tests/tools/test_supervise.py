"""How a run ends for whoever started it: exit statuses, with small processes in torchrun's place."""

import os
import signal
import sys
import time

import pytest
from torch.distributed.run import get_args_parser

from interdomain.tools import _supervise
from interdomain.tools._supervise import CONTINUE, ELASTIC, INTERRUPTED, REFUSED, keep_going, supervise

# A stand-in for torchrun: `seen` counts the signals that reach it; `wait` gives them time.
STAND_IN = """
import os, signal, sys, time
seen = []
def note(number, frame):
    seen.append(number)
signal.signal(signal.SIGTERM, note)
def ask(number, who):
    os.kill(who, number)
    time.sleep(0.2)
def say(word):
    open(os.environ["INTERDOMAIN_OUTCOME"], "w").write(word)
def wait():
    for _ in range(100):
        if seen:
            return
        time.sleep(0.1)
launcher, me = os.getppid(), os.getpid()
"""


def run(program):
    return supervise([sys.executable, "-c", STAND_IN + program], dict(os.environ))


@pytest.mark.parametrize("status", [0, 3])
def test_the_status_of_a_run_that_nobody_asked_to_leave(status):
    assert run(f"sys.exit({status})") == status


@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_signal_is_passed_on_once_and_the_run_continues_another_time(number, capfd):
    ask = f"ask(signal.{number}, launcher); "
    assert run(f"{ask * 3}wait(); say('left'); sys.exit(1 if seen == [signal.SIGTERM] else 9)") == CONTINUE == 75
    assert "the run left on a signal (exit status 75): the same command continues it" in capfd.readouterr().err


def test_a_signal_that_torchrun_alone_got():
    assert run("ask(signal.SIGTERM, me); say('left'); sys.exit(1)") == CONTINUE


def test_a_signal_that_one_rank_alone_got():
    assert run("say('left')") == CONTINUE


def test_the_folder_of_the_outcome_does_not_age():
    """Else what clears /tmp takes it from a run of weeks, and a run that left would pass for one that came to its end."""
    program = """
folder = os.path.dirname(os.environ["INTERDOMAIN_OUTCOME"])
os.utime(folder, (0, 0))
for _ in range(100):
    if os.stat(folder).st_mtime:
        sys.exit()
    time.sleep(0.1)
sys.exit(9)
"""
    assert run(program) == 0


def test_a_signal_before_the_ranks_could_listen_or_a_save_that_failed(capfd):
    """Nothing is claimed that was not saved."""
    assert run("ask(signal.SIGUSR1, launcher); wait(); sys.exit(1)") == CONTINUE
    said = capfd.readouterr().err
    assert "ended after a signal, with no checkpoint of where it was (torchrun's exit status 1, ours 75)" in said
    assert "left on a signal" not in said


def test_a_signal_and_a_decision():
    """A disk that is full when the run is asked to leave: another start would only meet it again."""
    assert run("ask(signal.SIGUSR1, launcher); wait(); say('stopped'); sys.exit(1)") == REFUSED


def test_a_signal_after_the_last_step_changes_nothing():
    assert run("ask(signal.SIGTERM, launcher); sys.exit(0)") == 0


@pytest.mark.parametrize("number", ["SIGUSR1", "SIGHUP"])
def test_what_kills_other_processes_does_not_kill_torchrun(number):
    """Schedulers and terminals that signal every process: the default of these signals is to end it."""
    assert run(f"ask(signal.{number}, me); sys.exit(4)") == 4


def test_under_nohup_a_run_outlives_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run("ask(signal.SIGHUP, launcher); ask(signal.SIGHUP, me); sys.exit(1 if seen else 4)") == 4
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_torchrun_leaves_the_terminals_signal_alone(monkeypatch):
    """It would handle it, nohup or not, and pass it on to ranks that die of it."""
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", ELASTIC["PET_SIGNALS_TO_HANDLE"])
    handled = get_args_parser().parse_args(["x.py"]).signals_to_handle
    monkeypatch.delenv("PET_SIGNALS_TO_HANDLE")
    default = get_args_parser().parse_args(["x.py"]).signals_to_handle
    assert {*default.split(",")} - {*handled.split(",")} == {"SIGHUP"}


def test_a_decision_is_not_repeated(capfd):
    """torchrun would start the ranks again, to the same end."""
    assert run("say('stopped'); wait(); print(len(seen)); sys.exit(1)") == REFUSED == 2
    assert capfd.readouterr().out == "1\n"


def test_ranks_that_hear_nothing_do_not_hold_up_the_end(monkeypatch, capfd):
    """They wait in a collective for the one that stopped, and torchrun waits for them as if they were saving."""
    monkeypatch.setattr(_supervise, "STOP_SECONDS", 0.2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    began = time.monotonic()
    assert (
        run(
            "import subprocess\n"
            f"rank = subprocess.Popen([sys.executable, '-c', {deaf!r}], start_new_session=True, stdout=subprocess.PIPE)\n"
            "rank.stdout.readline(); say('stopped'); print(rank.wait()); sys.exit(1)"
        )
        == REFUSED
    )
    assert capfd.readouterr().out == f"{-signal.SIGKILL}\n"
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("starts", "status"),
    [
        ([(100, 1), (300, 137), (300, 0)], 0),  # (saved up to, status): two failures, each further than the one before
        ([(100, 1), (100, 1)], CONTINUE),  # elsewhere, perhaps
        ([(300, 137), (100, 1), (100, 1)], CONTINUE),  # it went back, which is no lack of progress
        ([(None, 1)], 1),  # nothing was saved
        ([(100, CONTINUE)], CONTINUE),
        ([(100, INTERRUPTED)], INTERRUPTED),
        ([(100, REFUSED)], REFUSED),
    ],
)
def test_a_run_that_fails_is_started_again_as_long_as_it_gets_further(tmp_path, capfd, starts, status):
    """Real processes; what they save is a file."""
    saved, given = tmp_path / "saved", iter(starts)

    def start():
        step, code = next(given)
        write = "" if step is None else f"open({str(saved)!r}, 'w').write('{step}'); "
        return run(f"{write}sys.exit({code})")

    assert keep_going(start, lambda: int(saved.read_text()) if saved.is_file() else -1) == status
    assert list(given) == []
    said = capfd.readouterr().err
    assert said.count("starting it again") == len(starts) - 1
    if len(starts) == 3:
        assert "exit status 137), but got as far as the checkpoint of step 300" in said


def test_our_own_handlers_come_back():
    numbers = signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP
    before = [signal.getsignal(number) for number in numbers]
    run("sys.exit(0)")
    assert [signal.getsignal(number) for number in numbers] == before
