"""How the tests spread over pytest-xdist's workers: by file, and tests/titan, whose files share starts of torchrun, as one.

Without TorchTitan tests/titan is left out, so that a GPU machine that has PyTorch and Triton alone can run `pytest -m gpu`.
"""

import gc
import importlib.util
import os
from pathlib import Path

import pytest

TITAN = "tests/titan/"
LONGEST = (
    TITAN,
    "tests/scan/test_triton_compile",
    "tests/hf/test_alone",
    "tests/tools/test_launch",
    "tests/scan/test_triton_chunkwise",
    "tests/scan/test_triton_sequential",
    "tests/scan/test_triton_budget",
    "tests/features/test_triton",
    "tests/model/test_compile",
)

WITHOUT_TITAN = importlib.util.find_spec("torchtitan") is None
collect_ignore = ["titan"] if WITHOUT_TITAN else []


def pytest_configure():
    """Imports are quicker without the collector; in the processes that tests start, too."""
    gc.disable()
    start = Path(__file__).parent / "start"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(start), os.environ.get("PYTHONPATH"))))


def pytest_collection_finish():
    """What was imported stays: the collector need not look through it in every test."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    gc.unfreeze()
    gc.enable()


def pytest_report_header():
    return "tests/titan: left out, the extra `train` is not installed" if WITHOUT_TITAN else None


def pytest_collection_modifyitems(items):
    """The longest units first: what comes last is short, so that both workers end together."""

    def place(item):
        return next((i for i, unit in enumerate(LONGEST) if item.nodeid.startswith(unit)), len(LONGEST))

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return TITAN if nodeid.startswith(TITAN) else nodeid.partition("::")[0]

    return ByFile(config, log)
