import pytest
import torch


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Uninitialised memory reads as NaN: what is not written shows, instead of passing on a lucky zero page."""

    def poison(make):
        def made(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() or x.is_complex() else x

        return made

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
