"""What a configuration implies, and what is refused before anything is built."""

import dataclasses
import re

import pytest

from interdomain.model import CONDITIONS, Execution
from interdomain.titan.plan import make_plan, model_config
from interdomain.titan.settings import read_job_config

from .conftest import CONTEXT, REPOSITORY, flags

CONFIGS, GIB = REPOSITORY / "train_configs", 2**30


def arguments(**settings):
    return flags("corpus", "folder", **{"training__local_batch_size": 4, **settings})


def parse(**settings):
    return read_job_config(arguments(**settings))


@pytest.mark.parametrize(
    ("size", "peak", "tokens", "steps"),
    [
        ("125M", 3e-3, 2_500_000_000, 4_769),
        ("350M", 1.5e-3, 7_000_000_000, 13_352),
        ("760M", 1e-3, 15_000_000_000, 28_611),
        ("1.3B", 1e-3, 26_000_000_000, 49_592),
    ],
)
def test_the_papers_runs(size, peak, tokens, steps):
    job = read_job_config(["--job.config_file", str(CONFIGS / f"{size}.toml")])
    assert (job.optimizer.lr, job.optimizer.ssm_lr, job.training.tokens) == (peak, 1e-3, tokens)
    assert (job.training.max_norm, job.lr_scheduler.min_lr, job.lr_scheduler.decay_type) == (1.0, 1e-5, "cosine")
    for ranks in (1, 8):
        plan = make_plan(job, ranks)
        assert (plan.steps, plan.warmup_steps, plan.tokens_per_step, plan.seed) == (steps, 715, 524_288, 42)
        assert plan.local_batch * ranks * plan.accumulation == plan.global_batch == 128
        assert plan.tokens >= tokens > plan.tokens - plan.tokens_per_step
        # On cards of 80 GB with the scan's scores kept, and room for the allocator.
        assert 12 * GIB < sum(plan.memory.values()) < (0.8 if ranks == 1 else 0.7) * 80e9
        assert not plan.execution.recompute
        assert plan.precision == "bf16"


@pytest.mark.parametrize(("ranks", "larger", "local"), [(512, 512, 1), (256, 256, 1), (96, 192, 2), (64, None, 2)])
def test_more_ranks_than_the_batch_divides_over(ranks, larger, local):
    """The refusal names flags that run on as many ranks, in the same steps or larger ones."""
    arguments = ["--job.config_file", str(CONFIGS / "1.3B.toml"), "--training.local_batch_size", "4"]
    with pytest.raises(ValueError, match=r"training.global_batch_size = 128 sequences does not divide") as refused:
        make_plan(read_job_config(arguments), ranks)
    assert ("feeds at most 128 ranks" in str(refused.value)) == (ranks > 128)
    advice = re.search(r"can run ((?:--[\w.]+ \d+ ?)+)", str(refused.value))[1].split()
    plan = make_plan(read_job_config([*arguments, *advice]), ranks)
    assert (plan.global_batch, plan.local_batch) == (larger or 128, local)


def test_ranks_that_share_a_sequence():
    """Steps and tokens stay; a pass has half the tokens on a rank, and the weights as many shards."""
    alone, shared = make_plan(parse(), 2), make_plan(parse(**CONTEXT), 2)
    assert (shared.data_ranks, shared.context, shared.accumulation) == (1, 2, 2)
    same = ("global_batch", "tokens_per_step", "tokens", "steps", "warmup_steps", "flops_per_token")
    assert [getattr(shared, name) for name in same] == [getattr(alone, name) for name in same]
    assert shared.memory["parameters"] == alone.memory["parameters"]
    assert shared.memory["activations"] < 0.65 * alone.memory["activations"]
    assert "4 per rank x 1 group(s) of 2 ranks with 32 tokens each x 2 accumulation" in shared.describe()
    for backend in ("sequential", "fft", "reference"):
        with pytest.raises(ValueError, match=f"mixer.backend = {backend} cannot scan"):
            make_plan(parse(mixer__backend=backend, **CONTEXT), 2, on_gpus=True)
    make_plan(parse(mixer__backend="parallel", **CONTEXT), 2, on_gpus=True)
    make_plan(parse(mixer__condition="softmax", training__seq_len=2, **CONTEXT), 2)  # no scan, no convolution


def test_switches_stand_over_the_condition():
    config = model_config(parse(mixer__condition="s4d", mixer__rope=True, mixer__c_form="diagonal", mixer__n_basis=8))
    expected = {**CONDITIONS["s4d-rope"], "c_form": "diagonal", "n_basis": 8}
    assert dataclasses.asdict(config.mixer).items() >= expected.items()


def test_how_a_mixer_is_computed_is_no_part_of_the_model():
    made = make_plan(parse(mixer__backend="sequential", mixer__recompute=False, mixer__features="torch"), 1)
    assert made.config == model_config(parse())
    assert made.execution == Execution("sequential", recompute=False, features="torch")
    kept, lean = (make_plan(parse(mixer__recompute=r), 1).memory["activations"] for r in (False, True))
    assert kept > lean


def test_a_dry_run_says_how_the_mixer_is_computed():
    """On this machine, and on other machines' GPUs."""
    here, there = make_plan(parse(), 1).describe(), make_plan(parse(), 1, on_gpus=True).describe()
    assert "scan  chunkwise (plain PyTorch on cpu)\n" in here
    assert "scan  chunkwise (Triton kernels)\n" in there
    assert "features  triton (one kernel)" in there
    assert "scan  chunkwise-torch (plain PyTorch): M is 48" in make_plan(parse(mixer__n_basis=48), 1, True).describe()


def test_a_size_of_ones_own():
    job = parse(model__dim=192, model__n_layers=2, model__n_heads=4)
    made = make_plan(job, 1)
    config = made.config
    assert (config.dim, config.n_layers, config.n_heads, config.head_dim, config.ffn_hidden) == (192, 2, 4, 48, 512)
    own = "vocab_size 512, max_seq_len 64"  # of the test's file
    assert f"debug with dim 192, n_layers 2, {own}, interdomain (" in made.describe()
    assert make_plan(parse(model__dim=128), 1).cell.size == f"debug with {own}"
