"""Who speaks when a run ends on a user's mistake, and what ends with it."""

import signal
import subprocess
import sys
from unittest import mock

import pytest
import torch

from interdomain import launcher
from interdomain.titan import errors
from interdomain.titan.resume.preemption import Preemption
from interdomain.titan.settings import rules

from ..common import TIMEOUT
from .conftest import refusal
from .runs import parse


@errors.user_errors
def fail(error):
    raise error


def test_another_rank_than_0_speaks_if_it_is_left_alone(monkeypatch, capsys):
    """torchrun ends it before, if rank 0 speaks: test_launch.py has both ranks of a run refuse."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(errors, "signal", mock.Mock(SIGTERM=signal.SIGTERM))
    wait = mock.Mock()
    monkeypatch.setattr(errors, "time", wait)
    assert "error: rank 3: the disk" in refusal(capsys, fail, FileNotFoundError("the disk is gone"))
    wait.sleep.assert_called_once_with(errors.GRACE_SECONDS)


# Runs a command as torchrun starts a rank, and ends with its exit code.
TORCHRUN = """
import os, subprocess, sys
sys.exit(subprocess.run(sys.argv[1:], env=os.environ | {"TORCHELASTIC_RUN_ID": "1"}).returncode)
"""
# Runs a command, as a user's script between torchrun and a rank may do.
SCRIPT = "import subprocess, sys; subprocess.run(sys.argv[1:]); sys.exit(3)"
RANK = "import interdomain.titan.errors; interdomain.titan.errors.stop('no')"


@pytest.mark.parametrize(
    ("between", "exit_code"),
    [
        # It starts no ranks again.
        ([], -signal.SIGTERM),
        (["sh", "-c", '"$0" "$@"; exit 3'], 3),
        ([sys.executable, "-c", SCRIPT], 3),
    ],
)
def test_only_torchrun_is_ended(monkeypatch, between, exit_code):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    command = [sys.executable, "-c", TORCHRUN, *between, sys.executable, "-c", RANK]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT)
    assert result.stderr == "\nerror: no\n\n"
    assert result.returncode == exit_code


def test_a_fault_of_ours_keeps_its_traceback():
    with pytest.raises(KeyError):
        fail(KeyError("x"))


def test_what_is_left_of_a_start_that_was_killed_ends(monkeypatch):
    """Ranks take seconds to begin, and torchrun can be killed meanwhile."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv(launcher.REASON_FILE, "/proc/1073741824/fd/3")
    with pytest.raises(SystemExit, match="torchrun was killed"):
        Preemption()


@pytest.mark.parametrize("needs_it", ["--mixer.features auto", "--compile.enable"])
def test_a_gpu_that_nothing_can_be_compiled_for(monkeypatch, needs_it):
    """Plain PyTorch needs no compiler."""
    yes = mock.Mock(return_value=True)
    monkeypatch.setattr(torch.accelerator, "is_available", yes)
    monkeypatch.setattr(torch.cuda, "is_available", yes)
    monkeypatch.setattr(rules, "cannot_launch", mock.Mock(return_value="there is no compiler"))
    plain = "--mixer.backend chunkwise-torch --mixer.features torch"
    rules.check_device(parse(plain))
    with pytest.raises(ValueError, match=r"^there is no compiler\. Without kernels, much slower: "):
        rules.check_device(parse(f"{plain} {needs_it}"))
