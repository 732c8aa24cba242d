"""The mixer's statistics against their definition, and what is logged of a step."""

import math
import time
from types import SimpleNamespace

import pytest
import torch

from interdomain.model import Transformer, build_config
from interdomain.titan.plan.run_plan import make_plan
from interdomain.titan.step.guard import StepGuard
from interdomain.titan.watch import metrics
from interdomain.titan.watch.metrics import InterdomainMetrics, mixer_statistics, perplexity

from .runs import parse


def small_model(**settings):
    model = Transformer(build_config("debug", n_basis=8, vocab_size=64, **settings))
    model.init_weights()
    return model


def statistics_of(model):
    """Returns the statistics of a model by layer, on one rank."""

    def size():
        return 1

    meshes = SimpleNamespace(pipeline=SimpleNamespace(size=size))
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
        assert statistics.pop("c_rms") == pytest.approx(math.sqrt(2) / 8, rel=0.1)
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


class RecordingMetrics(InterdomainMetrics):
    """Metrics that keep the scalars of the last log."""

    def __init__(self, job):
        self.job = job
        self.plan = make_plan(job, 1)
        self.optimizers = SimpleNamespace(rates={"main": 1e-3}, step_guard=StepGuard())
        self.meshes = None
        self.first_log = None

    def log(self, step, loss, worst_loss, grad_norm, scalars):
        self.scalars = scalars


@pytest.mark.parametrize("steps", [1, 10])
def test_seconds_per_step(monkeypatch, steps):
    """They are a mean over the steps since the last log, each of two micro-batches."""

    def no_norms(*_):
        return {}

    monkeypatch.setattr(metrics, "gradient_norms", no_norms)
    run = RecordingMetrics(parse("--training.local_batch_size 4 --metrics.mixer_freq 0"))
    run.data_loading_times = [0.25] * 2 * steps
    run.time_last_log = time.perf_counter() - 1000 * steps
    run.log_step(10, 1.0, 1.0, 1.0)
    assert run.scalars["time_metrics/end_to_end(s)"] == pytest.approx(1000, rel=0.01)


def test_statistics_are_logged_in_the_first_log_after_every_third_step(runs):
    """The mixer's frequency need be no multiple of the log's."""
    runs.add("1 rarely logged", metrics__log_freq=2, metrics__mixer_freq=3)
    log = runs.seen("1 rarely logged")["log"]
    assert list(log) == [1, 2, 4, 6]
    steps = [step for step, scalars in log.items() if "mixer/layer_00/dt_median" in scalars]
    assert steps == [1, 4, 6]


def test_perplexity_of_a_run_that_diverged_is_a_number_that_can_be_drawn():
    assert perplexity(2.0) == pytest.approx(7.389056)
    assert torch.isfinite(torch.tensor(perplexity(1e6), dtype=torch.float32))


@pytest.mark.parametrize(
    ("name", "reference"),
    [("2 shards answers", "1 answers"), ("4 replicas shards layers", "1 layers")],
)
def test_gradient_norms_by_group_make_up_the_norm_of_all(runs, name, reference):
    """They are norms before clipping, which begins at 1."""
    log = runs.seen(name)["log"]
    expected = runs.seen(reference)["log"]
    for step, scalars in log.items():
        main = scalars["grad_norm/main"]
        ssm = scalars["grad_norm/ssm"]
        assert math.hypot(main, ssm) == pytest.approx(scalars["grad_norm"], rel=1e-4)
        assert ssm == pytest.approx(expected[step]["grad_norm/ssm"], rel=1e-3)
        assert ssm > 0
    assert max(scalars["grad_norm"] for scalars in log.values()) > 1
