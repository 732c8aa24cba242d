"""Who speaks when a run ends on a user's mistake."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch

from interdomain import outcome
from interdomain.titan import device, errors, preemption
from interdomain.titan.preemption import Preemption


@pytest.mark.parametrize(("rank", "begins"), [("0", "error: the disk"), ("3", "error: rank 3: the disk")])
def test_rank_0_speaks_at_once_and_others_only_if_they_are_left_alone(rank, begins, monkeypatch, capsys):
    waited, ended = [], []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    monkeypatch.setattr(errors.os, "kill", lambda *to: ended.append(to))
    for name in ("signal", "alarm"):
        monkeypatch.setattr(errors.signal, name, lambda *_: None)
    with pytest.raises(SystemExit) as end:
        errors.stop("the disk is full")
    assert end.value.code == 1
    assert capsys.readouterr().err.strip().startswith(begins)
    assert waited == ([] if rank == "0" else [errors.GRACE_SECONDS])  # torchrun ends them meanwhile
    assert ended == [(os.getppid(), signal.SIGTERM)]  # torchrun, which would start the ranks again


def test_only_refusals_are_turned_into_a_paragraph(capsys):
    @errors.one_paragraph
    def check(error):
        raise error

    with pytest.raises(SystemExit):
        check(FileNotFoundError("no such shard"))
    assert "error: no such shard" in capsys.readouterr().err
    with pytest.raises(KeyError):  # a fault of ours keeps its traceback
        check(KeyError("x"))


def test_what_is_left_of_a_start_that_was_killed_ends(monkeypatch):
    """Ranks take seconds to begin, and torchrun can be killed meanwhile."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv(outcome.OUTCOME, raising=False)
    Preemption()  # torchrun alone
    monkeypatch.setenv(outcome.OUTCOME, "/proc/1073741824/fd/3")
    with pytest.raises(SystemExit, match="torchrun was killed"):
        Preemption()


def test_a_rank_that_leaves_saves_first_and_ends_with_a_status_that_is_not_restarted(monkeypatch):
    done = []
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(preemption, "tell_launcher", done.append)
    saves = SimpleNamespace(save_now=lambda step: done.append(step))
    with pytest.raises(SystemExit) as end:
        Preemption().leave(SimpleNamespace(step=5, checkpointer=saves))
    assert (end.value.code, done) == (0, [5, outcome.LEFT])


def test_a_gpu_that_nothing_can_be_compiled_for_is_refused_at_the_start(monkeypatch):
    for place in (torch.accelerator, torch.cuda):
        monkeypatch.setattr(place, "is_available", lambda: True)
    monkeypatch.setattr(device, "cannot_launch", lambda: "there is no C compiler")

    def config(backend, features, compiled):
        mixer = SimpleNamespace(backend=backend, features=features)
        return SimpleNamespace(mixer=mixer, compile=SimpleNamespace(enable=compiled))

    for needs in (("auto", "auto", False), ("fft", "torch", True), ("parallel", "torch", False)):
        with pytest.raises(ValueError, match=r"^there is no C compiler\. Without them: --compile\.no-enable --mixer"):
            device.refuse_for_device(config(*needs))
    device.refuse_for_device(config("chunkwise-torch", "torch", False))
    monkeypatch.setattr(device, "cannot_launch", lambda: None)
    device.refuse_for_device(config("auto", "auto", True))
