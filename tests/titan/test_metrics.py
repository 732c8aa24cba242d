"""The mixer's life signs against their definition, and what is logged of a step."""

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

ALONE = SimpleNamespace(pipeline=SimpleNamespace(size=lambda: 1))


def test_life_signs_at_the_start():
    """Every mode starts with Re A = -1/2: |Lambda| = exp(-Delta / 2), a timescale of 2 / Delta tokens."""
    model = Transformer(build_config("debug", n_basis=8, vocab_size=64))
    model.init_weights()
    signs = mixer_statistics([model], ALONE)
    for i, layer in enumerate(model.layers.values()):
        dt = layer.attention.ssm.log_dt.exp()
        expected = {
            "timescale_tokens_min": 2 / dt.max().item(),
            "timescale_tokens_max": 2 / dt.min().item(),
            "one_minus_abs_lambda_min": 1 - torch.exp(-dt.min() / 2).item(),
            "dt_median": dt.quantile(0.5).item(),
            "share_at_decay_bound": 0,
        }
        for name, value in expected.items():
            assert signs[f"mixer/layer_{i:02d}/{name}"] == pytest.approx(value, rel=1e-3)
        assert signs[f"mixer/layer_{i:02d}/c_rms"] == pytest.approx(
            2**0.5 / 8, rel=0.1
        )  # drawn with sqrt(2) / M
    assert (
        mixer_statistics([Transformer(build_config("debug", "softmax", vocab_size=64))], ALONE)
        == {}
    )


def test_modes_that_are_pushed_against_the_bound_are_counted():
    model = Transformer(build_config("debug", n_basis=8, vocab_size=64, c_form="identity"))
    model.init_weights()
    for layer, pushed in zip(model.layers.values(), (0, 2, 8, 8), strict=True):
        ssm = layer.attention.ssm
        # Delta |Re A| is 2 for these modes, and the bound makes 1 of it. Of 0.7 it takes less than 1 %.
        wanted = torch.full_like(ssm.log_A_real, 0.7)
        wanted[:, :pushed] = 2.0
        with torch.no_grad():
            ssm.log_A_real.copy_((wanted / ssm.log_dt.exp()[:, None]).log())
    signs = mixer_statistics([model], ALONE)
    assert [signs[f"mixer/layer_{i:02d}/share_at_decay_bound"] for i in range(4)] == [0, 0.25, 1, 1]
    assert signs["mixer/layer_03/timescale_tokens_min"] == pytest.approx(1, rel=1e-3)
    assert signs["mixer/layer_03/c_rms"] == 1  # there is no C


@pytest.mark.parametrize(
    ("log_freq", "mixer_freq", "first", "logged", "mixer_steps"),
    [
        (10, 25, 1, [1, 10, 20, 30, 40, 50], [1, 30, 50]),
        (1, 20, 1, [*range(1, 51)], [1, 20, 40]),
        (10, 0, 7, [10, 20, 30, 40, 50], []),
    ],
)
def test_scalars_of_every_logged_step(
    monkeypatch, log_freq, mixer_freq, first, logged, mixer_steps
):
    """A run of 50 steps of two seconds, which validates after step 15 for a hundred seconds. Seconds per step are the same
    whatever number of steps a log is of; the mixer's frequency need be no multiple of the log's."""
    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = clock.monotonic = lambda: clock.now
    seen = {}
    monkeypatch.setattr(metrics, "time", clock)
    monkeypatch.setattr(
        MetricsProcessor,
        "log_validation",
        lambda self, *_: setattr(self, "time_last_log", clock.now),
    )
    monkeypatch.setattr(metrics, "gradient_norms", lambda *_: {})
    monkeypatch.setattr(metrics, "mixer_statistics", lambda *_: {"sign": 1.0})
    this = InterdomainMetrics.__new__(InterdomainMetrics)
    length = "--training.local_batch_size 4 --training.steps 50 --lr_scheduler.total_steps 50"
    this.job = this.job_config = parse(
        f"{length} --metrics.log_freq {log_freq} --metrics.mixer_freq {mixer_freq}"
    )
    this.plan = make_plan(this.job, 1)
    this.optimizers = SimpleNamespace(rates={"main": 1e-3}, step_guard=StepGuard())
    this.model_parts = this.meshes = this.first_log = None
    this.log = lambda step, *given: seen.setdefault(step, given[-1])
    this.data_loading_times = []
    this.time_last_log = clock.now
    for step in range(first, 51):
        clock.now += 2
        this.data_loading_times += [0.25, 0.25]  # micro-batches
        if this.should_log(step):
            this.log_step(step, 1.0, 1.0, 1.0)
            # as TorchTitan's `log`
            this.data_loading_times = []
            this.time_last_log = clock.now
        if step == 15:
            clock.now += 100
            this.log_validation(1.0, step)
    assert [*seen] == logged
    assert {scalars["time_metrics/end_to_end(s)"] for scalars in seen.values()} == {2.0}
    assert seen[50]["n_tokens_seen"] == 50 * 512
    assert [step for step, scalars in seen.items() if "sign" in scalars] == mixer_steps


def test_perplexity_of_a_run_that_diverged_is_a_number_that_can_be_drawn():
    assert perplexity(2.0) == pytest.approx(7.389056)
    assert torch.isfinite(torch.tensor(perplexity(1e6), dtype=torch.float32))


@pytest.mark.parametrize("name", ["2 shards answers", "4 replicas shards layers"])
def test_gradient_norms_by_group_make_up_the_norm_of_all(runs, name):
    """Sharded and compiled; sharded and replicated. Before clipping, at 1 and below some norms."""
    log = runs.seen(name)["log"]
    reference = runs.seen(runs.jobs[name]["same_as"])["log"]
    for step, scalars in log.items():
        ssm = scalars["grad_norm/ssm"]
        assert math.hypot(scalars["grad_norm/main"], ssm) == pytest.approx(
            scalars["grad_norm"], rel=1e-4
        )
        assert ssm == pytest.approx(reference[step]["grad_norm/ssm"], rel=1e-3) != 0
    assert max(scalars["grad_norm"] for scalars in log.values()) > 1
