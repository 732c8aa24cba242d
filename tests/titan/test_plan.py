"""The plan of a configuration, and refusals before anything is built."""

import dataclasses
import re

import pytest

from interdomain.model import CONDITIONS, Execution, build_config
from interdomain.titan.plan.costs import cost_model
from interdomain.titan.plan.dry_run import describe, table
from interdomain.titan.plan.run_plan import make_plan, model_config

from ..common import REPOSITORY
from .runs import parse as parse_flags

CONFIGS = REPOSITORY / "train_configs"
GIB = 2**30
FOUR_LAYERS = "--model.n_layers 4 --training.local_batch_size 4 "
PIPELINE = "--parallelism.pipeline_parallel_degree 2 "
TENSOR = "--parallelism.tensor_parallel_degree 2 "
CONTEXT = "--parallelism.context_parallel_degree 2 "


def parse(given=""):
    return parse_flags(FOUR_LAYERS + given)


def plan_of(given="", ranks=1):
    return make_plan(parse(given), ranks)


def dry_run(given="", on_gpus=False):
    """Returns the dry run's table."""
    job = parse(given)
    return table(describe(make_plan(job, 1, on_gpus), job, on_gpus))


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
    job = parse_flags(toml=CONFIGS / f"{size}.toml")
    plan = make_plan(job, 8)
    recipe = {
        "training.tokens": tokens,
        "training.max_norm": 1.0,
        "optimizer.lr": peak,
        "optimizer.ssm_lr": 1e-3,
        "lr_scheduler.min_lr": 1e-5,
        "lr_scheduler.decay_type": "cosine",
    }
    assert {name: job[name] for name in recipe} == recipe
    assert plan.steps == steps
    assert plan.warmup_steps == 715
    assert plan.tokens_per_step == 524_288
    assert plan.local_batch * 8 * plan.accumulation == 128
    assert plan.seed == 42
    assert plan.precision == "bf16"
    # On cards of 80 GB the scan's scores are kept, and there is room for the allocator.
    assert not plan.execution.recompute
    assert 12 * GIB < memory_of(job, plan) < 0.8 * 80e9


@pytest.mark.parametrize("name", ["125M", "350M", "760M", "1.3B", "7B", "70B"])
def test_a_file_fits_on_the_ranks_that_it_names(name):
    file = CONFIGS / f"{name}.toml"
    ranks, gib = re.search(r"on (\d+) GPUs.*about (\d+) GiB", file.read_text(), re.DOTALL).groups()
    job = parse_flags(toml=file)
    memory = memory_of(job, make_plan(job, int(ranks), on_gpus=True))
    assert memory < 0.7 * 80e9
    assert memory / GIB == pytest.approx(int(gib), abs=1)


def test_a_plan_on_a_cpu_counts_the_process_and_the_copy_of_a_save():
    """The copy has the weights and two moments: 12 bytes for each of 135,416,208 parameters."""
    job = parse_flags(toml=CONFIGS / "125M.toml")
    rows = describe(make_plan(job, 1), job)
    gpu = float(re.search(r"about ([\d.]+) GiB", rows["memory per device"])[1])
    total, process, copy = re.findall(r"\d+\.\d+", rows["on a CPU"])
    assert float(copy) == pytest.approx(12 * 135_416_208 / GIB, abs=0.01)
    assert float(total) == pytest.approx(gpu + float(process) + float(copy), abs=0.02)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--comm.mode fake_backend --checkpoint.enable", "is not possible with comm"),
        (
            "--training.mixed_precision_reduce bf16 --training.local_batch_size 1",
            "would add up the micro-batches in bf16, too",
        ),
        ("--training.enable_cpu_offload " + TENSOR, r"enable_cpu_offload with .* not\s+tested"),
    ],
)
def test_plans_that_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        make_plan(parse(given), 2, on_gpus=True)


STAGES = {
    "": (("tok_embeddings", "layers.0", "layers.1"), ("layers.2", "layers.3", "norm", "output")),
    "--parallelism.pipeline_parallel_last_stage_less_layers 3": (
        ("tok_embeddings", "layers.0", "layers.1", "layers.2"),
        ("layers.3", "norm", "output"),
    ),
    "--parallelism.pipeline_parallel_schedule Interleaved1F1B": (
        ("tok_embeddings", "layers.0"),
        ("layers.1", "layers.2"),
        ("layers.3",),
        ("norm", "output"),
    ),
}


@pytest.mark.parametrize("given", STAGES)
def test_stages_of_a_pipeline(given):
    """Embedding and head count as one layer each, as for TorchTitan, unless settings say other numbers."""
    plan = plan_of(PIPELINE + given, ranks=2)
    assert plan.stages == STAGES[given]
    assert plan.n_params == plan_of().n_params


def test_gpipe_takes_fewer_micro_batches_than_ranks():
    gpipe = "--parallelism.pipeline_parallel_schedule GPipe --training.local_batch_size 8"
    assert plan_of(PIPELINE + gpipe, ranks=2).accumulation == 1


def test_switches_stand_over_the_condition():
    switches = "--mixer.condition s4d --mixer.rope True --mixer.c_form diagonal --mixer.n_basis 8"
    mixer = dataclasses.asdict(model_config(parse(switches)).mixer)
    assert mixer.items() >= {**CONDITIONS["s4d-rope"], "c_form": "diagonal", "n_basis": 8}.items()


def test_the_plan_of_a_hybrid():
    hybrid = "--mixer.condition s4d --mixer.softmax_every 2 --mixer.window 8 --mixer.n_kv_heads 2"
    sizes = {"vocab_size": 512, "max_seq_len": 64}
    config = build_config("debug", "s4d", softmax_every=2, window=8, n_kv_heads=2, **sizes)
    assert plan_of(hybrid).config == config
    table = dry_run(hybrid)
    assert "16,384 numbers per layer and sequence (2 x s4d)" in table
    assert "1,024 numbers per layer and sequence (2 x softmax, n_kv_heads 2, window 8)" in table


def test_how_a_mixer_is_computed_is_no_part_of_the_model():
    plan = plan_of("--mixer.backend fft --mixer.recompute False --mixer.features torch")
    assert plan.config == plan_of().config
    assert plan.execution == Execution("fft", recompute=False, features="torch")


def test_a_dry_run_says_how_the_mixer_is_computed():
    """It says so for this machine, and for other machines' GPUs."""
    assert "scan  chunkwise (plain PyTorch on cpu)\n" in dry_run()
    on_gpus = dry_run(on_gpus=True)
    assert "scan  chunkwise (Triton kernels)\n" in on_gpus
    assert "features  triton (one kernel)" in on_gpus
    assert "features" not in dry_run("--mixer.condition gla", on_gpus=True)
    plain = dry_run("--mixer.n_basis 48", on_gpus=True)
    assert "scan  chunkwise-torch (plain PyTorch): M is 48" in plain
