"""Another TorchTitan than the plugin was written for ends in words, before a run is built."""

import importlib
import subprocess
import sys

import pytest
import torchtitan

from interdomain.titan import host
from interdomain.titan.checkpoint import SelfDescribingCheckpoints
from interdomain.titan.metrics import InterdomainMetrics
from interdomain.titan.optimizer import GroupedOptimizers, GroupedSchedulers
from interdomain.titan.run_log import RunLog
from interdomain.titan.trainer import InterdomainTrainer
from interdomain.titan.validate import FixedValidator

CLASSES = (
    *(InterdomainTrainer, SelfDescribingCheckpoints, InterdomainMetrics, GroupedOptimizers, GroupedSchedulers),
    *(FixedValidator, RunLog),
)


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(torchtitan, "__version__", "0.3.0")
    with pytest.raises(
        ValueError, match=r"TorchTitan 0\.3\.0 is installed.* with TorchTitan 0\.2\.2 only.*pip install"
    ):
        importlib.reload(host)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_name_that_is_overridden_and_gone_is_refused(cls, monkeypatch):
    """All that a class of ours overrides is in the table, and TorchTitan without it is refused."""
    base = cls.__mro__[1]
    overridden = {name for name in vars(cls) if callable(getattr(base, name, None)) and not name.startswith("__")}
    assert overridden <= set(host.HOOKED[base].split())
    for name in overridden & vars(base).keys():
        with monkeypatch.context() as without:
            without.delattr(base, name)
            without.delitem(sys.modules, f"{host.__name__}.titan_0_2")
            if not hasattr(base, name):
                with pytest.raises(ValueError, match=f"has no {base.__name__}.{name}, .* --force-reinstall"):
                    importlib.reload(host)


def test_torchtitans_own_entry_point_is_refused(tmp_path):
    named = ["--job.custom_config_module", "interdomain.titan.job_config"]  # as TOML files of before do
    command = [sys.executable, "-m", "torchtitan.train", "--job.dump_folder", str(tmp_path / "run"), *named]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "error: TorchTitan's own entry point cannot train this model" in done.stderr
