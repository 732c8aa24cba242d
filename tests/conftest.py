"""How the tests spread over pytest-xdist's workers: by file, and tests/titan, whose files share starts of torchrun, as one."""

import pytest

TITAN = "tests/titan/"


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.nodeid.startswith(TITAN))  # the longest unit first


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return TITAN if nodeid.startswith(TITAN) else nodeid.partition("::")[0]

    return ByFile(config, log)
