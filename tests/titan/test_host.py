"""Another TorchTitan than the plugin was written for ends in words, before a run is built; so does one without its PyTorch."""

import importlib

import pytest
import torch
import torchtitan

from interdomain.titan import host


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.2.1", r"TorchTitan 0\.2\.1 is installed.* with TorchTitan 0\.2\.2 and 0\.3\.0"),
        ("0.3.0", r"TorchTitan 0\.3\.0 needs PyTorch 2\.14 or later, and .* is installed"),
    ],
)
def test_another_version_is_refused(monkeypatch, version, said):
    if version == "0.3.0" and hasattr(torch.distributed, "set_timeout"):
        pytest.skip("this PyTorch is new enough")
    monkeypatch.setattr(torchtitan, "__version__", version)
    with pytest.raises(ValueError, match=said):
        importlib.reload(host)
