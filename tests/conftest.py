from pathlib import Path

import pytest

TITAN = Path(__file__).parent / "titan"


def pytest_collection_modifyitems(items):
    """tests/titan shares starts of torchrun between its files: under pytest-xdist (--dist loadgroup) one worker takes it."""
    for item in items:
        if item.path.is_relative_to(TITAN):
            item.add_marker(pytest.mark.xdist_group("titan"))
