"""The plan of a configuration, and refusals before anything is built."""

import dataclasses
import re

import pytest

from interdomain.model import CONDITIONS, Execution, build_config
from interdomain.titan.plan.costs import cost_model
from interdomain.titan.plan.dry_run import describe
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


def dry_run(given="", ranks=1, on_gpus=False):
    """The dry run's table."""
    job = parse(given)
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
    job = parse_flags(toml=CONFIGS / f"{size}.toml")
    assert (job.optimizer.lr, job.optimizer.ssm_lr, job.training.tokens) == (peak, 1e-3, tokens)
    assert (job.training.max_norm, job.lr_scheduler.min_lr, job.lr_scheduler.decay_type) == (
        1.0,
        1e-5,
        "cosine",
    )
    for ranks in (1, 8):
        plan = make_plan(job, ranks)
        assert (plan.steps, plan.warmup_steps, plan.tokens_per_step, plan.seed) == (
            steps,
            715,
            524_288,
            42,
        )
        assert plan.local_batch * ranks * plan.accumulation == plan.global_batch == 128
        assert plan.tokens >= tokens > plan.tokens - plan.tokens_per_step
        # On cards of 80 GB with the scan's scores kept, and room for the allocator.
        assert 12 * GIB < memory_of(job, plan) < 0.8 * 80e9
        assert not plan.execution.recompute
        assert plan.precision == "bf16"


ONE = "--training.local_batch_size 1"
TWO = "--training.local_batch_size 2"
REPLICAS = "--parallelism.data_parallel_replicate_degree"
EVERY_AXIS = f"{REPLICAS} 2 {CONTEXT}{TENSOR}--parallelism.pipeline_parallel_degree 4"
LONG = "--training.seq_len 131072 --training.global_batch_size 8 --activation_checkpoint.mode selective"
LONG += " --parallelism.context_parallel_degree 16 --parallelism.tensor_parallel_degree 4"


@pytest.mark.parametrize(
    ("ranks", "given", "mesh", "batch", "accumulation"),
    [
        (64, TWO, "shards 64", 128, 1),
        (96, f"{TWO} --training.global_batch_size 192", "shards 96", 192, 1),
        (
            256,
            f"{ONE} {REPLICAS} 32 --training.global_batch_size 256",
            "replicas 32 x shards 8",
            256,
            1,
        ),
        (
            512,
            f"{ONE} {REPLICAS} 4 --parallelism.context_parallel_degree 4",
            "replicas 4 x shards 32 x context 4",
            128,
            1,
        ),
        (
            512,
            f"{ONE} --validation.local_batch_size 1 {EVERY_AXIS}",
            "replicas 2 x shards 16 x context 2 x tensor 2 x pipeline 4",
            128,
            4,
        ),
        (256, f"{ONE} {LONG}", "shards 4 x context 16 x tensor 4", 8, 2),
    ],
)
def test_the_largest_run_on_hundreds_of_ranks(ranks, given, mesh, batch, accumulation):
    """The paper's run on more ranks. A rank needs a sequence of its own."""
    job = parse_flags(given, toml=CONFIGS / "1.3B.toml")
    plan = make_plan(job, ranks, on_gpus=True)
    assert str(plan.topology) == f"{mesh} = {ranks} ranks"
    assert (plan.global_batch, plan.accumulation) == (batch, accumulation)
    assert memory_of(job, plan) < 80e9
    traffic = cost_model(plan, job).traffic()
    received = (
        describe(plan, job, on_gpus=True).partition("received per step")[2].partition("\n")[0]
    )
    for name, degree in plan.topology._asdict().items():
        if name != "shards":
            assert (traffic[name] > 0) == (degree > 1) == (f"{name} " in received)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*[BM].toml")), ids=lambda p: p.stem)
def test_a_file_fits_on_the_ranks_that_it_names(file):
    ranks = int(re.search(r"on (\d+) GPUs", file.read_text())[1])
    gib = int(re.search(r"about (\d+) GiB", file.read_text())[1])
    job = parse_flags(toml=file)
    memory = memory_of(job, make_plan(job, ranks, on_gpus=True))
    assert memory < 0.7 * 80e9
    assert abs(memory / GIB - gib) < 1


BFLOAT16 = "--training.mixed_precision_reduce bf16 "
SEVERAL = "--training.local_batch_size 1 "
EACH = "--training.reduce_gradients micro-batch "


@pytest.mark.parametrize(
    ("given", "each"),
    [
        (SEVERAL, False),
        (SEVERAL + EACH, True),
        (SEVERAL + EACH + BFLOAT16, True),
        (BFLOAT16, False),  # one micro-batch has no other sum
    ],
)
def test_gradients_are_summed_once_a_step_or_after_each_micro_batch(given, each):
    assert plan_of(given, ranks=2).reduces_each == each


def test_sums_after_each_micro_batch_save_memory_and_cost_traffic():
    once, often = parse(SEVERAL), parse(SEVERAL + EACH)
    plan = make_plan(once, 2)
    costs = cost_model(plan, once)
    others = cost_model(make_plan(often, 2), often)
    whole = costs.memory()["gradients"] - others.memory()["gradients"]
    assert f"micro-batch takes {whole / GIB:.2f} GiB less" in describe(plan, once)
    assert costs.traffic()["shards"] < others.traffic()["shards"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--comm.mode fake_backend --checkpoint.enable", "is not possible with comm"),
        (BFLOAT16 + SEVERAL, "would add up the micro-batches in bf16, too"),
        (
            "--training.enable_cpu_offload " + TENSOR,
            r"training.enable_cpu_offload with .* not\s+tested",
        ),
        (
            "--training.enable_cpu_offload " + PIPELINE,
            r"training.enable_cpu_offload with .* not\s+tested",
        ),
    ],
)
def test_plans_that_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
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
    """TorchTitan's division of layers: embedding and head count as one layer each, unless settings say other numbers."""
    plan = plan_of(PIPELINE + given, ranks=2)
    assert plan.stages == STAGES[given]
    assert plan.n_params == plan_of().n_params


def test_a_pipeline_with_fewer_micro_batches_than_ranks():
    gpipe = "--parallelism.pipeline_parallel_schedule GPipe --training.local_batch_size 8"
    assert plan_of(PIPELINE + gpipe, ranks=2).accumulation == 1


def test_switches_stand_over_the_condition():
    switches = "--mixer.condition s4d --mixer.rope True --mixer.c_form diagonal --mixer.n_basis 8"
    mixer = dataclasses.asdict(model_config(parse(switches)).mixer)
    assert mixer.items() >= {**CONDITIONS["s4d-rope"], "c_form": "diagonal", "n_basis": 8}.items()


def test_a_hybrid_s_plan():
    hybrid = "--mixer.condition s4d --mixer.softmax_every 2 --mixer.window 8 --mixer.n_kv_heads 2"
    switches = {"softmax_every": 2, "window": 8, "n_kv_heads": 2}
    assert plan_of(hybrid).config == build_config(
        "debug", "s4d", vocab_size=512, max_seq_len=64, **switches
    )
    said = dry_run(hybrid)
    assert "16,384 numbers per layer and sequence (2 x s4d)" in said
    assert "1,024 numbers per layer and sequence (2 x softmax, n_kv_heads 2, window 8)" in said


def test_how_a_mixer_is_computed_is_no_part_of_the_model():
    plan = plan_of("--mixer.backend fft --mixer.recompute False --mixer.features torch")
    assert plan.config == plan_of().config
    assert plan.execution == Execution("fft", recompute=False, features="torch")


def test_a_dry_run_says_how_the_mixer_is_computed():
    """On this machine, and on other machines' GPUs."""
    assert "scan  chunkwise (plain PyTorch on cpu)\n" in dry_run()
    there = dry_run(on_gpus=True)
    assert "scan  chunkwise (Triton kernels)\n" in there
    assert "features  triton (one kernel)" in there
    assert "scan  chunkwise-torch (plain PyTorch): M is 48" in dry_run(
        "--mixer.n_basis 48", on_gpus=True
    )
    assert "recurrence  chunkwise-torch (plain PyTorch): the input is on cpu" in dry_run(
        "--mixer.condition gla"
    )


def test_tensor_parallelism_of_a_fixed_state():
    """It needs several heads of the state."""
    gla = "--mixer.condition gla --mixer.state_heads 2 "
    assert str(plan_of(gla + TENSOR, ranks=2).topology) == "tensor 2 = 2 ranks"


def test_a_size_of_ones_own():
    config = plan_of("--model.dim 192 --model.n_layers 2 --model.n_heads 4").config
    assert (config.dim, config.n_layers, config.n_heads, config.head_dim, config.ffn_hidden) == (
        192,
        2,
        4,
        48,
        512,
    )
    assert plan_of("--model.dim 128").cell.size == "debug with vocab_size 512, max_seq_len 64"
