"""The mixer's statistics against their definition, and what is logged of a step."""

import math
from types import SimpleNamespace

import pytest
import torch
from torchtitan.components.metrics import MetricsProcessor

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


class Clock:
    """Stands for the module `time`. It stands still unless a test moves it."""

    now = 0.0

    def perf_counter(self):
        return self.now

    monotonic = perf_counter


class SteppedMetrics(InterdomainMetrics):
    """Metrics of a run of 50 steps of two seconds. `logged` has the scalars of each step that is logged."""

    def __init__(self, job, clock):
        self.job = self.job_config = job
        self.plan = make_plan(job, 1)
        self.optimizers = SimpleNamespace(rates={"main": 1e-3}, step_guard=StepGuard())
        self.model_parts = None
        self.meshes = None
        self.first_log = None
        self.clock = clock
        self.logged = {}
        self.reset()

    def reset(self):
        self.data_loading_times = []
        self.time_last_log = self.clock.now

    def log(self, step, loss, worst_loss, norm, scalars):
        self.logged[step] = scalars
        self.reset()

    def train(self, first):
        for step in range(first, 51):
            self.clock.now += 2
            self.data_loading_times += [0.25, 0.25]  # of two micro-batches
            if self.should_log(step):
                self.log_step(step, 1.0, 1.0, 1.0)
            if step == 15:
                self.clock.now += 100
                self.log_validation(1.0, step)


@pytest.mark.parametrize(
    ("log_freq", "mixer_freq", "first", "logged", "mixer_steps"),
    [
        (10, 25, 1, [1, 10, 20, 30, 40, 50], [1, 30, 50]),
        (1, 20, 1, list(range(1, 51)), [1, 20, 40]),
        (10, 0, 7, [10, 20, 30, 40, 50], []),
    ],
)
def test_scalars_of_every_logged_step(
    monkeypatch, log_freq, mixer_freq, first, logged, mixer_steps
):
    """A validation after step 15 takes a hundred seconds, which count in no step."""

    def no_norms(*_):
        return {}

    def one_statistic(*_):
        return {"statistic": 1.0}

    def log_validation(processor, *_):
        processor.reset()

    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    monkeypatch.setattr(metrics, "gradient_norms", no_norms)
    monkeypatch.setattr(metrics, "mixer_statistics", one_statistic)
    monkeypatch.setattr(MetricsProcessor, "log_validation", log_validation)
    flags = "--training.local_batch_size 4 --training.steps 50 --lr_scheduler.total_steps 50"
    flags += f" --metrics.log_freq {log_freq} --metrics.mixer_freq {mixer_freq}"
    run = SteppedMetrics(parse(flags), clock)
    run.train(first)
    assert list(run.logged) == logged
    for scalars in run.logged.values():
        assert scalars["time_metrics/end_to_end(s)"] == 2.0
    assert run.logged[50]["n_tokens_seen"] == 50 * 512
    steps = [step for step, scalars in run.logged.items() if "statistic" in scalars]
    assert steps == mixer_steps


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
        assert ssm == pytest.approx(expected[step]["grad_norm/ssm"], rel=1e-3) != 0
    assert max(scalars["grad_norm"] for scalars in log.values()) > 1
