"""The ranks and the corpora of tests/titan."""

import pytest

from ..titan.conftest import corpus, launch, short  # noqa: F401 (fixtures)


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.e2e)
