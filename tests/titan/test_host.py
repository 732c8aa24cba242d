"""Another TorchTitan than the plugin was written for ends in words, before a run is built."""

import importlib

import pytest
import torchtitan

from interdomain.titan import host
from interdomain.titan.checkpoint import SelfDescribingCheckpoints
from interdomain.titan.dataloader import PackedLoader
from interdomain.titan.metrics import InterdomainMetrics
from interdomain.titan.optimizer import GroupedOptimizers, GroupedSchedulers
from interdomain.titan.run_log import RunLog
from interdomain.titan.trainer import InterdomainTrainer
from interdomain.titan.validate import FixedValidator

# Called by TorchTitan's own code, and so without effect where it calls them by other names.
OVERRIDDEN = {
    InterdomainTrainer: "init_distributed train_step should_continue_training close",
    SelfDescribingCheckpoints: "load dcp_save _async_wait _save_last_step _purge_stale_checkpoints",
    GroupedOptimizers: "step load_state_dict",
    GroupedSchedulers: "state_dict load_state_dict",
    InterdomainMetrics: "should_log log_validation",
    RunLog: "log close",
    FixedValidator: "should_validate validate",
    PackedLoader: "state_dict load_state_dict",
}


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(torchtitan, "__version__", "0.3.0")
    with pytest.raises(
        ValueError, match=r"TorchTitan 0\.3\.0 is installed.* with TorchTitan 0\.2\.2 only.*pip install"
    ):
        importlib.reload(host)


@pytest.mark.parametrize("ours", OVERRIDDEN)
def test_what_is_overridden_is_torchtitans(ours):
    for name in OVERRIDDEN[ours].split():
        assert name in vars(ours), name
        assert callable(getattr(ours.__mro__[1], name, None)), name
