"""Another TorchTitan than the plugin was written for ends in words, before a run is built."""

import importlib
import subprocess
import sys

import pytest
import torchtitan

from interdomain.titan import host


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(torchtitan, "__version__", "0.3.0")
    with pytest.raises(ValueError, match=r"TorchTitan 0\.3\.0 is installed.* with TorchTitan 0\.2\.2 only"):
        importlib.reload(host)


def test_torchtitans_own_entry_point_is_refused(tmp_path):
    named = ["--job.custom_config_module", "interdomain.titan.job_config"]  # as TOML files of before do
    command = [sys.executable, "-m", "torchtitan.train", "--job.dump_folder", str(tmp_path / "run"), *named]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "error: TorchTitan's own entry point cannot train this model" in done.stderr
