"""Who speaks when a run ends on a user's mistake, and what ends with it."""

import os
import signal

import pytest
import torch

from interdomain import launcher
from interdomain.titan import errors
from interdomain.titan.resume.preemption import Preemption
from interdomain.titan.settings import rules
from interdomain.titan.settings.schema import JobConfig


def test_another_rank_than_0_speaks_if_it_is_left_alone(monkeypatch, capsys):
    """test_launch.py has both ranks of a run refuse: rank 0 alone speaks."""

    @errors.user_errors
    def check(error):
        raise error

    waited, ended = [], []
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    monkeypatch.setattr(errors.os, "kill", lambda *to: ended.append(to))
    for name in ("signal", "alarm"):
        monkeypatch.setattr(errors.signal, name, lambda *_: None)
    with pytest.raises(SystemExit) as end:
        check(FileNotFoundError("the disk is gone"))
    assert end.value.code == 1
    assert capsys.readouterr().err.strip().startswith("error: rank 3: the disk")
    assert waited == [errors.GRACE_SECONDS]  # torchrun ends it meanwhile, if rank 0 speaks
    assert ended == [(os.getppid(), signal.SIGTERM)]  # torchrun, which would start the ranks again
    with pytest.raises(KeyError):  # a fault of ours keeps its traceback
        check(KeyError("x"))


def test_what_is_left_of_a_start_that_was_killed_ends(monkeypatch):
    """Ranks take seconds to begin, and torchrun can be killed meanwhile."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv(launcher.REASON_FILE, "/proc/1073741824/fd/3")
    with pytest.raises(SystemExit, match="torchrun was killed"):
        Preemption()


def test_a_gpu_that_nothing_can_be_compiled_for_is_refused_at_the_start(monkeypatch):
    for place in (torch.accelerator, torch.cuda):
        monkeypatch.setattr(place, "is_available", lambda: True)
    monkeypatch.setattr(rules, "cannot_launch", lambda: "there is no C compiler")
    without_kernels = {
        "mixer.backend": "chunkwise-torch",
        "mixer.features": "torch",
        "compile.enable": False,
    }
    job = JobConfig().changed(without_kernels)
    rules.check_device(job)
    for setting, value in (("mixer.features", "auto"), ("compile.enable", True)):
        with pytest.raises(
            ValueError, match=r"^there is no C compiler\. Without kernels, much slower: "
        ):
            rules.check_device(job.changed({setting: value}))
