"""Another TorchTitan than the plugin was written for ends in words, before a run is built; so does one without its PyTorch."""

import importlib

import pytest
import torch.distributed as dist
import torchtitan

from interdomain.titan import host


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.2.1", r"TorchTitan 0\.2\.1 is installed.* with TorchTitan 0\.2\.2 and 0\.3\.0"),
        pytest.param(
            "0.3.0",
            r"TorchTitan 0\.3\.0 needs PyTorch 2\.14 or later, and .* is installed",
            marks=pytest.mark.skipif(hasattr(dist, "set_timeout"), reason="it is new enough"),
        ),
    ],
)
def test_another_version_or_an_older_pytorch_is_refused(monkeypatch, version, words):
    monkeypatch.setattr(torchtitan, "__version__", version)
    with pytest.raises(ValueError, match=words):
        importlib.reload(host)
