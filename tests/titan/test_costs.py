"""The dry run's estimates: memory against what PyTorch traces, bytes received against a count of real steps."""

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from interdomain.model import Transformer, build_config, count_parameters, meta_model
from interdomain.titan.host import SAVED_OPS, apply_ac, translate
from interdomain.titan.parallelize import SCAN_OPS
from interdomain.titan.plan.costs import cost_model
from interdomain.titan.plan.run_plan import make_plan
from interdomain.titan.settings.job_config import read_job_config

from .runs import parse as parse_flags
from .test_plan import CONFIGS, parse


def traced(job, plan):
    """The peak of a training step's memory on one rank, in bytes, by PyTorch's tracker."""
    model = Transformer(plan.config, plan.execution)
    if job.activation_checkpoint.mode != "none":
        settings = translate(job).activation_checkpoint
        apply_ac(
            model, settings, model_compile_enabled=False, op_sac_save_list=SAVED_OPS | SCAN_OPS
        )
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(plan.local_batch, plan.seq_len, dtype=torch.int64)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        for _ in range(2):  # the first makes the optimizer's state
            model(tokens, labels=tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_memory_is_about_what_a_step_takes(mode):
    """Of a model whose layers are softmax: plain PyTorch keeps more of the scan than the kernels do."""
    softmax = "--mixer.condition softmax --training.seq_len 512 --model.n_layers 2"
    job = parse_flags(
        f"{softmax} --training.local_batch_size 4 --activation_checkpoint.mode {mode}"
    )
    plan = make_plan(job, 1)
    assert sum(cost_model(plan, job).memory().values()) == pytest.approx(traced(job, plan), rel=0.3)


def estimate(given="", ranks=1):
    """Bytes by category of a run of 1.3B on so many ranks, with four micro-batches in a step."""
    sizes = f"--training.local_batch_size 1 --training.seq_len 4096 --training.global_batch_size {4 * ranks} "
    job = parse_flags(sizes + given, toml=CONFIGS / "1.3B.toml")
    return cost_model(make_plan(job, ranks, on_gpus=True), job).memory()


def test_memory_by_category():
    """float32 parameters, gradients and two moments, sharded; gradients are whole until the last micro-batch."""
    one, eight = estimate(), estimate(ranks=8)
    n = count_parameters(meta_model(build_config("1.3B", "interdomain")))
    assert (one["parameters"], one["gradients"], one["optimizer"]) == (4 * n, 4 * n, 8 * n)
    assert 1 / 8 < eight["parameters"] / one["parameters"] < 1 / 7  # the SSM parameters are whole
    assert eight["gradients"] - eight["parameters"] == pytest.approx(4 * n, rel=0.02)
    each = estimate("--training.reduce_gradients micro-batch", ranks=8)
    assert each["gradients"] == each["parameters"]


LESS = [  # flags that need less memory than other flags
    ("--activation_checkpoint.mode full", "--activation_checkpoint.mode selective"),
    ("--activation_checkpoint.mode selective", "--activation_checkpoint.mode none"),
    ("--mixer.recompute True", "--mixer.recompute False"),
    ("--training.precision bf16", "--training.precision float32"),
    ("--training.local_batch_size 1", "--training.local_batch_size 2"),
]


@pytest.mark.parametrize(("less", "more"), LESS)
def test_memory_falls_with_what_saves_it(less, more):
    assert sum(estimate(less).values()) < sum(estimate(more).values())


@pytest.mark.parametrize(
    "axis", ["data_parallel_shard", "context_parallel", "tensor_parallel", "pipeline_parallel"]
)
def test_memory_falls_with_the_ranks_that_share_it(axis):
    two = estimate(f"--parallelism.{axis}_degree 2 --validation.no-enable", ranks=2)
    assert sum(two.values()) < sum(estimate("--validation.no-enable").values())


def test_checkpointing_of_every_second_block():
    every = "--activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option"
    assert estimate(f"{every} 1") == estimate("--activation_checkpoint.mode full")
    assert estimate(f"{every} 2") == estimate("--activation_checkpoint.mode none")


@pytest.mark.parametrize(
    ("schedule", "held"),
    [("GPipe", [8, 8, 8, 8]), ("1F1B", [4, 3, 2, 1]), ("Interleaved1F1B", [5.5, 4.5, 3.5, 2.5])],
)
def test_a_pipeline_s_micro_batches_and_waiting(schedule, held):
    """Those that a rank holds at a time, by PyTorch's own order, and the textbook's idle share."""
    pipeline = f"--parallelism.pipeline_parallel_degree 4 --parallelism.pipeline_parallel_schedule {schedule}"
    job = parse(f"{pipeline} --training.local_batch_size 1 --model.n_layers 6")
    costs = cost_model(make_plan(job, 4), job)
    stages = 2 if schedule == "Interleaved1F1B" else 1
    assert [costs._in_flight(rank) for rank in range(4)] == held
    assert costs.idle() == pytest.approx(3 / (8 * stages + 3))


COUNTED = [
    "text",
    "replicas",
    "context full",
    "tensor layers",
    "pipeline layers",
    "context softmax",
]
COUNTED += ["context fixed", "tensor fixed", "each bfloat16"]


@pytest.mark.e2e
@pytest.mark.parametrize("name", COUNTED)
def test_a_step_receives_about_what_the_dry_run_says(runs, name):
    counted = max(seen["traffic"] for seen in runs.every(f"2 {name}"))
    job = read_job_config(runs.jobs[f"2 {name}"]["args"])
    plan = make_plan(job, 2)
    assert sum(cost_model(plan, job).traffic().values()) == pytest.approx(counted, rel=0.08)


@pytest.mark.e2e
def test_context_parallelism_receives_the_same_whatever_the_length(runs):
    received = [
        max(seen["traffic"] for seen in runs.every(name))
        for name in ("2 context full", "2 context full long")
    ]
    assert received[0] == received[1]
