"""The mixer's life signs against their definition, and the steps at which they are due."""

from types import SimpleNamespace

import pytest
import torch

from interdomain.model import Transformer, build_config
from interdomain.titan.metrics import InterdomainMetrics, life_signs, perplexity


def test_life_signs_at_the_start():
    model = Transformer(build_config("debug", n_basis=8, vocab_size=64))
    model.init_weights()
    signs = life_signs(model)
    for i, layer in enumerate(model.layers.values()):
        ssm, name = layer.attention.ssm, f"mixer/layer_{i:02d}"
        dt = ssm.log_dt.exp()
        # Every mode starts with Re A = -1/2: |Lambda| = exp(-Delta / 2), a timescale of 2 / Delta tokens.
        assert signs[f"{name}/timescale_tokens_min"] == pytest.approx(2 / dt.max().item(), rel=1e-5)
        assert signs[f"{name}/timescale_tokens_max"] == pytest.approx(2 / dt.min().item(), rel=1e-5)
        assert signs[f"{name}/one_minus_abs_lambda_min"] == pytest.approx(1 - torch.exp(-dt.min() / 2).item(), rel=1e-3)
        assert signs[f"{name}/dt_q50"] == pytest.approx(dt.quantile(0.5).item(), rel=1e-5)
        aliased = (dt[:, None] * ssm.A_imag).abs() > torch.pi
        assert signs[f"{name}/aliased_fraction"] == pytest.approx(aliased.float().mean().item())


def test_softmax_has_none():
    assert life_signs(Transformer(build_config("debug", "softmax", vocab_size=64))) == {}


@pytest.mark.parametrize(
    ("log_freq", "freq", "expected"),
    [(10, 20, [1, 20, 40]), (10, 25, [1, 30, 50]), (1, 7, [1, 7, 14, 21, 28, 35, 42, 49]), (10, 0, [])],
)
def test_frequencies_need_not_be_multiples_of_the_logs(log_freq, freq, expected):
    metrics, due = SimpleNamespace(last_logged=None), []
    for step in (1, *(s for s in range(2, 51) if s % log_freq == 0)):
        if InterdomainMetrics._due(metrics, step, freq):
            due.append(step)
        metrics.last_logged = step
    assert due == expected


def test_perplexity_of_a_run_that_diverged_is_a_number_that_can_be_drawn():
    assert perplexity(2.0) == pytest.approx(7.389056)
    assert torch.isfinite(torch.tensor(perplexity(1e6), dtype=torch.float32))
