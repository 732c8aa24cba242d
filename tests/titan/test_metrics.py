"""The mixer's life signs against their definition, and the steps at which they are due."""

import math
from types import SimpleNamespace

import pytest
import torch
from torchtitan.components.metrics import MetricsProcessor

from interdomain.model import Transformer, build_config
from interdomain.titan import metrics
from interdomain.titan.guard import Guard
from interdomain.titan.metrics import GROUPS, InterdomainMetrics, SpikeSign, gradient_norms, life_signs, perplexity
from interdomain.titan.settings import read_job_config

from .conftest import TINY


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
    model = Transformer(build_config("debug", "softmax", vocab_size=64))
    assert life_signs(model) == metrics.histograms(model) == {}


@pytest.fixture
def slow(alone, monkeypatch):
    """slow(log_freq, mixer_freq, first, validated): what is logged, by step, of a run whose steps take two seconds each, of
    which a rank waits half a second for data, and whose validations take a hundred."""
    now, seen = [0.0], {}
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0]))
    monkeypatch.setattr(metrics, "gradient_norms", lambda *_: {})
    monkeypatch.setattr(metrics, "life_signs", lambda *_: {"sign": 1.0})
    monkeypatch.setattr(metrics, "histograms", lambda *_: {})

    def log(self, step, *given):
        seen[step] = given[-1]
        self.data_loading_times.clear()
        self.time_last_log = now[0]

    monkeypatch.setattr(MetricsProcessor, "log", log)
    monkeypatch.setattr(MetricsProcessor, "log_validation", lambda self, *_: setattr(self, "time_last_log", now[0]))

    def run(log_freq, mixer_freq, first=1, validated=()):
        this = InterdomainMetrics.__new__(InterdomainMetrics)
        frequencies = [f"--metrics.log_freq={log_freq}", f"--metrics.mixer_freq={mixer_freq}"]
        this.job_config = read_job_config(["--job.config_file", str(TINY), *frequencies])
        this.plan = SimpleNamespace(tokens_per_step=512, steps=50, accumulation=2)
        this.optimizers = SimpleNamespace(rates={"main": 1e-3}, guard=Guard())
        this.model_parts, this.data_loading_times, this.time_last_log, this.resumed = [None], [], 0.0, (0, 0)
        this.spikes, this.run_log, this.began, this.life_signs_at, this.started = SpikeSign(), None, False, None, None
        for step in range(first, 51):
            now[0] += 2
            this.data_loading_times += [0.25, 0.25]  # two micro-batches
            if this.should_log(step):
                this.log_step(step, 1.0, 1.0, 1.0)
            if step in validated:
                now[0] += 100
                this.log_validation(1.0, step)
        return seen

    return run


@pytest.mark.parametrize(("first", "validated"), [(1, (1, 15, 20)), (7, (15,)), (10, ())])
def test_seconds_per_step_whatever_number_of_steps_a_log_is_of(slow, first, validated):
    """And the share of them that a rank waited for data: neither counts a validation."""
    seen = slow(10, 0, first, validated)
    expected = {step: (2.0, 25.0) for step in (1, 10, 20, 30, 40, 50) if step >= first}
    names = ("time_metrics/end_to_end(s)", "machine/data_wait_percent")
    assert {step: tuple(logged[name] for name in names) for step, logged in seen.items()} == expected


@pytest.mark.parametrize(
    ("log_freq", "freq", "expected"),
    [(10, 20, [1, 20, 40]), (10, 25, [1, 30, 50]), (1, 7, [1, 7, 14, 21, 28, 35, 42, 49]), (10, 0, [])],
)
def test_frequencies_need_not_be_multiples_of_the_logs(slow, log_freq, freq, expected):
    assert [step for step, logged in slow(log_freq, freq).items() if "sign" in logged] == expected


def test_perplexity_of_a_run_that_diverged_is_a_number_that_can_be_drawn():
    assert perplexity(2.0) == pytest.approx(7.389056)
    assert torch.isfinite(torch.tensor(perplexity(1e6), dtype=torch.float32))


@pytest.mark.parametrize(
    ("fixture", "name"), [("one", "interdomain"), ("two", "interdomain"), ("two", "compiled"), ("four", "hybrid")]
)
def test_gradient_norms_by_group_make_up_the_norm_of_all(request, fixture, name):
    """On one rank, sharded, compiled (other names), sharded and replicated; before clipping, at 1 and below some norms."""
    groups = {f"grad_norm/{group}" for group in GROUPS}
    clipped = 0
    reference = request.getfixturevalue("one").seen("interdomain")["log"]
    for step, log in request.getfixturevalue(fixture).seen(name)["log"].items():
        assert groups <= log.keys()
        assert math.hypot(*(log[group] for group in groups)) == pytest.approx(log["grad_norm"], rel=1e-4)
        assert all(log[group] == pytest.approx(reference[step][group], rel=1e-3) for group in groups)
        clipped += log["grad_norm"] > 1
    assert clipped


def test_gradient_norms_are_of_their_group():
    """Clipping halved them: the norm was 2 where the dynamics' gradients are 1, and 1 elsewhere."""
    model = Transformer(build_config("debug", n_basis=4, vocab_size=64))
    squares = dict.fromkeys(GROUPS, 0)
    parts = {
        "attention": "mixer",
        "tok_embeddings": "embeddings",
        "output": "embeddings",
        "feed_forward": "feed_forward",
    }
    for name, p in model.named_parameters():
        group = next((parts[part] for part in name.split(".") if part in parts), "norms")
        group = "dynamics" if ".ssm." in name else group
        p.grad = torch.full_like(p, 2.0 if group == "dynamics" else 1.0)
        squares[group] += p.numel() * (4 if group == "dynamics" else 1)
    found = gradient_norms(model, total=2.0, max_norm=1.0)
    assert found == {f"grad_norm/{group}": pytest.approx(2 * n**0.5, rel=1e-4) for group, n in squares.items()}


def test_spikes_stand_out_of_a_falling_noisy_loss():
    sign, generator = SpikeSign(), torch.Generator().manual_seed(0)
    noise = 0.05 * torch.randn(200, generator=generator)
    falling = [7 * math.exp(-i / 60) + 3 + noise[i].item() for i in range(200)]
    signs = [sign(loss) for loss in falling]
    assert signs[:11] == [0.0] * 11
    assert max(signs) < 4
    assert sign(falling[-1] + 1.0) > 5
    assert math.isnan(sign(math.nan))
    assert math.isfinite(sign(falling[-1]))  # a loss that is no number does not spoil the mean
