"""The plan of a configuration, and refusals before anything is built."""

import dataclasses
import re

import pytest

from interdomain.model import CONDITIONS, Execution, build_config
from interdomain.titan.plan.dry_run import cost_model, describe
from interdomain.titan.plan.run_plan import make_plan, model_config
from interdomain.titan.settings.job_config import read_job_config

from ..common import REPOSITORY
from .runs import AXES, CONTEXT, PIPELINE, TENSOR, flags

CONFIGS, GIB = REPOSITORY / "train_configs", 2**30


def arguments(**settings):
    return flags("corpus", "folder", **{"training__local_batch_size": 4, "model__n_layers": 4, **settings})


def parse(**settings):
    return read_job_config(arguments(**settings))


def dry_run(ranks=1, on_gpus=False, **settings):
    """The dry run's table."""
    job = parse(**settings)
    return describe(make_plan(job, ranks, on_gpus), job, on_gpus)


def memory_of(job, plan):
    return sum(cost_model(plan, job).memory().values())


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
        assert 12 * GIB < memory_of(job, plan) < (0.8 if ranks == 1 else 0.7) * 80e9
        assert not plan.execution.recompute
        assert plan.precision == "bf16"


def advice_of(refused):
    """Flags that the refusal names."""
    return re.search(r"can run ((?:--[\w.]+ \d+ ?)+)", str(refused))[1].split()


@pytest.mark.parametrize(("ranks", "larger", "local"), [(256, 256, 1), (96, 192, 2), (64, None, 2)])
def test_more_ranks_than_the_batch_divides_over(ranks, larger, local):
    """The refusal names flags that run on as many ranks, in the same steps or larger ones."""
    arguments = ["--job.config_file", str(CONFIGS / "1.3B.toml"), "--training.local_batch_size", "4"]
    with pytest.raises(ValueError, match=r"training.global_batch_size = 128 sequences does not divide") as refused:
        make_plan(read_job_config(arguments), ranks)
    assert ("feeds at most 128 ranks" in str(refused.value)) == (ranks > 128)
    plan = make_plan(read_job_config([*arguments, *advice_of(refused.value)]), ranks)
    assert (plan.global_batch, plan.local_batch) == (larger or 128, local)


EACH = {"replicas": 2, "context": 2, "tensor": 2, "pipeline": 4}
LONG = {"training__seq_len": 2**17, "training__local_batch_size": 1, "training__global_batch_size": 8}
LONG |= {"validation__seq_len": 2**17, "validation__local_batch_size": 1, "activation_checkpoint__mode": "selective"}


@pytest.mark.parametrize(
    ("ranks", "degrees", "settings", "mesh", "batch", "accumulation"),
    [
        (256, {"replicas": 32}, {}, "replicas 32 x shards 8", 256, 1),  # a rank needs a sequence of its own
        (512, {"replicas": 4, "context": 4}, {}, "replicas 4 x shards 32 x context 4", 128, 1),
        (512, EACH, {}, "replicas 2 x shards 16 x context 2 x tensor 2 x pipeline 4", 128, 4),
        (256, {"context": 16, "tensor": 4}, LONG, "shards 4 x context 16 x tensor 4", 8, 2),
    ],
)
def test_the_largest_run_on_hundreds_of_ranks(ranks, degrees, settings, mesh, batch, accumulation):
    """The paper's run on more ranks; the advice of a refusal is taken."""
    settings = settings | {f"parallelism__{AXES[axis]}_degree": degree for axis, degree in degrees.items()}
    given = flags("corpus", "folder", CONFIGS / "1.3B.toml", **settings)
    try:
        plan = make_plan(read_job_config(given), ranks, on_gpus=True)
    except ValueError as refused:
        given += advice_of(refused)
        plan = make_plan(read_job_config(given), ranks, on_gpus=True)
    assert str(plan.topology) == f"{mesh} = {ranks} ranks"
    assert (plan.global_batch, plan.accumulation) == (batch, accumulation)
    job = read_job_config(given)
    assert memory_of(job, plan) < 80e9
    traffic = cost_model(plan, job).traffic()
    received = describe(plan, job, on_gpus=True).partition("received per step")[2].partition("\n")[0]
    for name, degree in plan.topology._asdict().items():
        if name != "shards":
            assert (traffic[name] > 0) == (degree > 1) == (f"{name} " in received)


@pytest.mark.parametrize(
    "file", sorted(CONFIGS.glob("*B.toml")) + sorted(CONFIGS.glob("*M.toml")), ids=lambda p: p.stem
)
def test_a_file_fits_on_the_ranks_that_it_names(file):
    ranks = int(re.search(r"on (\d+) GPUs", file.read_text())[1])
    job = read_job_config(["--job.config_file", str(file)])
    memory = memory_of(job, make_plan(job, ranks, on_gpus=True))
    assert memory < 0.7 * 80e9
    assert abs(memory / GIB - int(re.search(r"about (\d+) GiB", file.read_text())[1])) < 1


def test_simulated_ranks_save_nothing():
    with pytest.raises(ValueError, match="is not possible with comm"):
        make_plan(parse(comm__mode="fake_backend", checkpoint__enable=True), 2)


def test_gradients_are_summed_once_a_step_or_after_each_micro_batch():
    step = parse(training__local_batch_size=1)
    each = step.changed({"training.reduce_gradients": "micro-batch"})
    plans = [make_plan(job, 2) for job in (step, each)]
    assert [plan.reduces_each for plan in plans] == [False, True]
    once, often = (cost_model(plan, job) for plan, job in zip(plans, (step, each), strict=True))
    whole = once.memory()["gradients"] - often.memory()["gradients"]
    assert f"micro-batch takes {whole / GIB:.2f} GiB less" in describe(plans[0], step)
    assert once.traffic()["shards"] < often.traffic()["shards"]


def test_bf16_sums_need_one_for_each_micro_batch():
    """FSDP2 would add up the micro-batches in bf16, too. One micro-batch has no other sum."""
    bfloat16 = {"training__mixed_precision_reduce": "bf16"}
    several = {"training__local_batch_size": 1}
    assert not make_plan(parse(**bfloat16), 2).reduces_each
    assert make_plan(parse(**bfloat16, **several, training__reduce_gradients="micro-batch"), 2).reduces_each
    with pytest.raises(ValueError, match=r"Set training\.reduce_gradients = micro-batch, or float32"):
        make_plan(parse(**bfloat16, **several), 2)


def test_stages_of_a_pipeline():
    """TorchTitan's division of layers: embedding and head count as one layer each, unless settings say other numbers."""
    plan = make_plan(parse(**PIPELINE), 2)
    first, last = ("tok_embeddings", "layers.0", "layers.1"), ("layers.2", "layers.3", "norm", "output")
    assert plan.stages == (first, last)
    assert "1F1B, idle 33.3% of a step; layers by stage 0-1 | 2-3" in dry_run(2, **PIPELINE)  # 1 / (2 + 1)
    less = {"parallelism__pipeline_parallel_last_stage_less_layers": 3}
    assert make_plan(parse(**PIPELINE, **less), 2).stages == ((*first, "layers.2"), last[1:])
    looped = {**PIPELINE, "parallelism__pipeline_parallel_schedule": "Interleaved1F1B"}
    plan = make_plan(parse(**looped), 2)
    assert plan.stages == (first[:2], ("layers.1", "layers.2"), ("layers.3",), last[2:])
    words = "Interleaved1F1B, idle 20.0% of a step; layers by stage 0 | 1-2 | 3 | none"  # 1 / (2 x 2 + 1)
    assert words in dry_run(2, **looped)
    assert make_plan(parse(**PIPELINE), 2).n_params == make_plan(parse(), 1).n_params
    gpipe = {"parallelism__pipeline_parallel_schedule": "GPipe", "training__local_batch_size": 8}  # fewer than ranks
    assert make_plan(parse(**PIPELINE | gpipe), 2).accumulation == 1


def test_an_offloaded_run_has_no_other_axes():
    for axis in (TENSOR, PIPELINE):
        with pytest.raises(ValueError, match=r"training.enable_cpu_offload with .* not\s+tested"):
            make_plan(parse(training__enable_cpu_offload=True, **axis), 2, on_gpus=True)


def test_a_short_chunk_at_the_end_of_shards_is_warned_of(caplog):
    make_plan(parse(**CONTEXT, training__seq_len=128), 2)
    assert not caplog.text
    make_plan(parse(**CONTEXT, training__seq_len=192), 2)
    assert "96 tokens per rank are no multiple of the scan's 64" in caplog.text


def test_switches_stand_over_the_condition():
    config = model_config(parse(mixer__condition="s4d", mixer__rope=True, mixer__c_form="diagonal", mixer__n_basis=8))
    expected = {**CONDITIONS["s4d-rope"], "c_form": "diagonal", "n_basis": 8}
    assert dataclasses.asdict(config.mixer).items() >= expected.items()


def test_a_hybrid_s_plan():
    switches = dict(softmax_every=2, window=8, n_kv_heads=2)
    mixer = {f"mixer__{name}": value for name, value in switches.items()} | {"mixer__condition": "s4d"}
    made = make_plan(parse(**mixer), 1)
    assert made.config == build_config("debug", "s4d", vocab_size=512, max_seq_len=64, **switches)
    said = dry_run(**mixer)
    assert "s4d, softmax_every 2, n_kv_heads 2, window 8 (" in said
    assert "16,384 numbers per layer and sequence (2 x s4d)" in said
    assert "1,024 numbers per layer and sequence (2 x softmax, n_kv_heads 2, window 8)" in said


def test_how_a_mixer_is_computed_is_no_part_of_the_model():
    made = make_plan(parse(mixer__backend="fft", mixer__recompute=False, mixer__features="torch"), 1)
    assert made.config == model_config(parse())
    assert made.execution == Execution("fft", recompute=False, features="torch")


def test_a_dry_run_says_how_the_mixer_is_computed():
    """On this machine, and on other machines' GPUs."""
    here, there = dry_run(), dry_run(on_gpus=True)
    assert "scan  chunkwise (plain PyTorch on cpu)\n" in here
    assert "scan  chunkwise (Triton kernels)\n" in there
    assert "features  triton (one kernel)" in there
    assert "scan  chunkwise-torch (plain PyTorch): M is 48" in dry_run(on_gpus=True, mixer__n_basis=48)


def test_a_fixed_state():
    """What computes it; and the axes that need several heads of it."""
    made = dry_run(mixer__condition="gla")
    assert "16,384 numbers per layer and sequence\n" in made
    assert "recurrence  chunkwise-torch (plain PyTorch): the input is on cpu" in made
    with pytest.raises(
        ValueError, match=r"does not divide the heads of gla's state \(mixer.state_heads sets them\) = 1"
    ):
        make_plan(parse(mixer__condition="gla", **TENSOR), 2)
    made = make_plan(parse(mixer__condition="gla", mixer__state_heads=2, **TENSOR), 2)
    assert str(made.topology) == "tensor 2 = 2 ranks"


def test_a_size_of_ones_own():
    size = dict(model__dim=192, model__n_layers=2, model__n_heads=4)
    config = make_plan(parse(**size), 1).config
    assert (config.dim, config.n_layers, config.n_heads, config.head_dim, config.ffn_hidden) == (192, 2, 4, 48, 512)
    own = "vocab_size 512, max_seq_len 64"  # of the test's file
    assert f"debug with dim 192, n_layers 2, {own}, interdomain (" in dry_run(**size)
    assert make_plan(parse(model__dim=128), 1).cell.size == f"debug with {own}"
