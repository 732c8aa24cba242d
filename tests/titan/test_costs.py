"""The dry run's estimates: memory against what PyTorch traces, bytes received against a count of real steps."""

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from interdomain.model import Transformer
from interdomain.titan.host import SAVED_OPS, apply_ac, translate
from interdomain.titan.parallelize import SCAN_OPS
from interdomain.titan.plan.costs import cost_model
from interdomain.titan.plan.run_plan import make_plan
from interdomain.titan.settings.job_config import read_job_config

from .runs import parse as parse_flags
from .test_plan import parse


def traced_peak(job, plan):
    """Returns the peak memory of a training step on one rank, in bytes, by PyTorch's tracker."""
    model = Transformer(plan.config, plan.execution)
    settings = translate(job).activation_checkpoint
    if settings.mode != "none":
        saved = SAVED_OPS | SCAN_OPS
        apply_ac(model, settings, model_compile_enabled=False, op_sac_save_list=saved)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(plan.local_batch, plan.seq_len, dtype=torch.int64)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        for _ in range(2):  # the first step makes the optimizer's state
            model(tokens, labels=tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_memory_is_about_what_a_step_takes(mode):
    """The layers are softmax: plain PyTorch keeps more of the scan than the kernels do."""
    given = "--mixer.condition softmax --training.seq_len 512 --training.local_batch_size 4"
    job = parse_flags(f"{given} --activation_checkpoint.mode {mode}")
    plan = make_plan(job, 1)
    memory = sum(cost_model(plan, job).memory().values())
    assert memory == pytest.approx(traced_peak(job, plan), rel=0.3)


@pytest.mark.parametrize(
    ("schedule", "in_flight", "idle"),
    [
        ("GPipe", [8, 8, 8, 8], 3 / 11),
        ("1F1B", [4, 3, 2, 1], 3 / 11),
        ("Interleaved1F1B", [5.5, 4.5, 3.5, 2.5], 3 / 19),
    ],
)
def test_micro_batches_in_flight_and_idle_share_of_a_pipeline(schedule, in_flight, idle):
    """The order is PyTorch's own, and the idle share is the textbook's."""
    job = parse(f"""
        --parallelism.pipeline_parallel_degree 4 --model.n_layers 6
        --parallelism.pipeline_parallel_schedule {schedule} --training.local_batch_size 1
    """)
    costs = cost_model(make_plan(job, 4), job)
    assert [costs._in_flight(rank) for rank in range(4)] == in_flight
    assert costs.idle() == pytest.approx(idle)


def received(runs, name):
    """Returns the bytes that a rank received in a step, on the rank that received the most."""
    return max(seen["traffic"] for seen in runs.every(name))


COUNTED = [
    "2 text",
    "2 replicas",
    "2 context full",
    "2 tensor layers",
    "2 pipeline layers",
    "2 context softmax",
    "2 context fixed",
    "2 tensor fixed",
    "2 each bfloat16",
]


@pytest.mark.e2e
@pytest.mark.parametrize("name", COUNTED)
def test_a_step_receives_about_what_the_dry_run_says(runs, name):
    job = read_job_config(runs.jobs[name]["args"])
    traffic = cost_model(make_plan(job, 2), job).traffic()
    assert sum(traffic.values()) == pytest.approx(received(runs, name), rel=0.08)


@pytest.mark.e2e
def test_context_parallelism_receives_the_same_whatever_the_length(runs):
    assert received(runs, "2 context full") == received(runs, "2 context full long")
