"""The corpora of tests/titan."""

import pytest

from ..titan.conftest import corpus, short  # noqa: F401 (fixtures)


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.e2e)
