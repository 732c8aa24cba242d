import pytest

from .devices import poison


@pytest.fixture
def poisoned_memory(monkeypatch):
    poison(monkeypatch)
