"""TorchTitan's version and names: anything else than what the plugin was written for ends in words, before a run is built."""

import importlib
import sys

import pytest
import torchtitan
from torchtitan.distributed import utils as dist_utils

from interdomain.titan import host
from interdomain.titan.settings import read_job_config
from interdomain.titan.trainer import InterdomainTrainer

from .conftest import flags, refusal, torchrun


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(torchtitan, "__version__", "0.3.0")
    with pytest.raises(
        ValueError, match=r"TorchTitan 0\.3\.0 is installed.* with TorchTitan 0\.2\.2 only.*pip install"
    ):
        importlib.reload(host)


def test_a_function_that_is_gone_is_refused(monkeypatch):
    monkeypatch.delattr(dist_utils, "dist_sum")
    monkeypatch.delitem(sys.modules, f"{host.__name__}.titan_0_2")
    with pytest.raises(ValueError, match=r"has been changed since its release .*dist_sum.* --force-reinstall"):
        importlib.reload(host)


@pytest.mark.parametrize(
    ("owner", "name"), [(host.Trainer, "should_continue_training"), (host.CheckpointManager, "_states_to_load")]
)
def test_a_name_that_is_overridden_and_gone_is_refused(owner, name, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(owner, f"{name}_renamed", getattr(owner, name), raising=False)
    monkeypatch.delattr(owner, name)
    job = read_job_config(flags("corpus", tmp_path / "run"))
    assert f"this TorchTitan has no {owner.__name__}.{name}, which" in refusal(capsys, InterdomainTrainer, job)
    assert not (tmp_path / "run").exists()


def test_all_that_a_class_overrides_is_in_the_table():
    """What the plugin's own subclasses define and TorchTitan's class has, too, must be listed."""
    from interdomain.titan.checkpoint import SelfDescribingCheckpoints
    from interdomain.titan.metrics import InterdomainMetrics
    from interdomain.titan.optimizer import GroupedOptimizers, GroupedSchedulers
    from interdomain.titan.run_log import RunLog
    from interdomain.titan.validate import FixedValidator

    ours = (InterdomainTrainer, SelfDescribingCheckpoints, InterdomainMetrics, GroupedOptimizers, GroupedSchedulers)
    for cls in (*ours, FixedValidator, RunLog):
        base = cls.__mro__[1]
        overridden = {name for name in vars(cls) if callable(getattr(base, name, None)) and not name.startswith("__")}
        assert overridden <= set(host.HOOKED[base].split()), cls


@pytest.mark.e2e
def test_torchtitans_own_entry_point_is_refused(corpus, tmp_path):
    done = torchrun(1, "-m", "torchtitan.train", *flags(corpus, tmp_path / "run"))
    assert done.returncode != 0
    assert "error: TorchTitan's own entry point cannot train this model" in done.stderr
    assert not (tmp_path / "run").exists()
