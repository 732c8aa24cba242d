"""The mixer's statistics against their definition, and what is logged of a step."""

import math
from unittest import mock

import pytest
import torch

from interdomain.model import Transformer, build_config
from interdomain.titan.watch import metrics
from interdomain.titan.watch.metrics import InterdomainMetrics, mixer_statistics, perplexity


def small_model(**settings):
    model = Transformer(build_config("debug", n_basis=8, vocab_size=64, **settings))
    model.init_weights()
    return model


def statistics_of(model):
    """Returns the statistics of a model by layer, on one rank."""
    meshes = mock.Mock()
    meshes.pipeline.size.return_value = 1
    layers = [{} for _ in model.layers]
    for tag, value in mixer_statistics([model], meshes).items():
        _, layer, name = tag.split("/")
        layers[int(layer.removeprefix("layer_"))][name] = value
    return layers


def test_statistics_at_the_start():
    """Every mode starts with Re A = -1/2: |Lambda| = exp(-dt / 2), a timescale of 2 / dt tokens."""
    model = small_model()
    for layer, statistics in zip(model.layers.values(), statistics_of(model), strict=True):
        dt = layer.attention.ssm.log_dt.exp()
        assert statistics["c_rms"] == pytest.approx(math.sqrt(2) / 8, rel=0.1)
        expected = {
            "timescale_tokens_min": 2 / dt.max().item(),
            "timescale_tokens_max": 2 / dt.min().item(),
            "one_minus_abs_lambda_min": 1 - torch.exp(-dt.min() / 2).item(),
            "dt_median": dt.quantile(0.5).item(),
            "share_at_decay_bound": 0,
        }
        for name, value in expected.items():
            assert statistics[name] == pytest.approx(value, rel=1e-3), name


def test_modes_that_are_pushed_against_the_bound_are_counted():
    model = small_model(c_form="identity")
    for layer, pushed in zip(model.layers.values(), (0, 2, 8, 8), strict=True):
        ssm = layer.attention.ssm
        # dt * |Re A| is 2 for these modes, and the bound makes it 1. It takes less than 1% of 0.7.
        decay = torch.full_like(ssm.log_A_real, 0.7)
        decay[:, :pushed] = 2.0
        ssm.log_A_real.data = decay.log() - ssm.log_dt.data[:, None]
    statistics = statistics_of(model)
    shares = [layer["share_at_decay_bound"] for layer in statistics]
    assert shares == [0, 0.25, 1, 1]
    assert statistics[3]["timescale_tokens_min"] == pytest.approx(1, rel=1e-3)
    assert statistics[3]["c_rms"] == 1  # there is no C


@pytest.mark.parametrize(
    ("name", "ranks"), [("2 text", 2), ("1 answers accumulated", 1), ("1 free", 1)]
)
def test_the_throughput_is_that_of_all_ranks(runs, name, ranks):
    """It is a mean over the steps since the last log or validation. "1 free" logs every second step."""
    for scalars in runs.log(name).values():
        of_all = scalars["machine/tokens_per_second"]
        # The clock is read twice. A busy machine may do other work between.
        assert of_all == pytest.approx(ranks * scalars["throughput(tps)"], rel=0.4)
        assert of_all * scalars["time_metrics/end_to_end(s)"] == pytest.approx(512)


def test_the_line_of_progress_has_the_time_that_is_left(caplog, monkeypatch):
    """Nine steps took 90 seconds."""
    caplog.set_level("INFO")
    monkeypatch.setattr(metrics, "time", mock.Mock(monotonic=lambda: 190.0))
    run = mock.Mock(first_log=(1, 100.0))
    run.plan.steps = 400
    InterdomainMetrics._log_progress(run, 10, 4096.4)
    expected = "  2.5 % of 400 steps, 4,096 tokens per second on all ranks, 1:05:00 left"
    assert caplog.messages == [expected]


def test_perplexity_of_a_run_that_diverged_is_a_number_that_can_be_drawn():
    assert perplexity(2.0) == pytest.approx(7.389056)
    assert torch.isfinite(torch.tensor(perplexity(1e6), dtype=torch.float32))


def test_gradient_norms_by_group_make_up_the_norm_of_all(runs):
    """They are norms before clipping, which begins at 1."""
    log = runs.log("4 replicas shards layers")
    expected = runs.log("1 layers")
    assert log[1]["grad_norm"] > 1
    for step, scalars in log.items():
        main = scalars["grad_norm/main"]
        ssm = scalars["grad_norm/ssm"]
        assert math.hypot(main, ssm) == pytest.approx(scalars["grad_norm"], rel=1e-4)
        assert 0 < ssm == pytest.approx(expected[step]["grad_norm/ssm"], rel=1e-3)
