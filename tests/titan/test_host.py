"""Another TorchTitan than the plugin was written for ends in words, before a run is built; so does one without its PyTorch."""

import importlib

import pytest
import torch.distributed as dist
import torchtitan

from interdomain.titan import host


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(torchtitan, "__version__", "0.2.1")
    installed = r"TorchTitan 0\.2\.1 is installed.* with TorchTitan 0\.2\.2 and 0\.3\.0"
    with pytest.raises(ValueError, match=installed):
        importlib.reload(host)


@pytest.mark.skipif(hasattr(dist, "set_timeout"), reason="this PyTorch is new enough")
def test_an_older_pytorch_than_the_version_needs_is_refused(monkeypatch):
    monkeypatch.setattr(torchtitan, "__version__", "0.3.0")
    needed = r"TorchTitan 0\.3\.0 needs PyTorch 2\.14 or later, and .* is installed"
    with pytest.raises(ValueError, match=needed):
        importlib.reload(host)
