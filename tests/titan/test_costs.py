"""The dry run's estimates: memory against what PyTorch traces, bytes received against a count of real steps."""

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from interdomain.model import Transformer, build_config, count_parameters, meta_model
from interdomain.titan.host import SAVED_OPS, apply_ac, translate
from interdomain.titan.parallelize import SCAN_OPS
from interdomain.titan.plan.costs import CostModel
from interdomain.titan.plan.dry_run import cost_model
from interdomain.titan.plan.run_plan import make_plan
from interdomain.titan.settings.job_config import read_job_config

from .runs import AXES, flags
from .test_plan import CONFIGS, parse


def traced(job, plan):
    """The peak of a training step's memory on one rank, in bytes, by PyTorch's tracker."""
    model = Transformer(plan.config, plan.execution)
    if job.activation_checkpoint.mode != "none":
        settings = translate(job).activation_checkpoint
        apply_ac(model, settings, model_compile_enabled=False, op_sac_save_list=SAVED_OPS | SCAN_OPS)
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
    job = parse(mixer__condition="softmax", activation_checkpoint__mode=mode, training__seq_len=512, model__n_layers=2)
    plan = make_plan(job, 1)
    assert sum(cost_model(plan, job).memory().values()) == pytest.approx(traced(job, plan), rel=0.3)


def estimate(ranks=1, **settings):
    """Bytes by category of a run of 1.3B on so many ranks, with four micro-batches in a step."""
    given = {"training__local_batch_size": 1, "training__seq_len": 4096, "training__precision": "bf16"} | settings
    given["training__global_batch_size"] = 4 * ranks
    job = read_job_config(flags("corpus", "folder", CONFIGS / "1.3B.toml", **given))
    return cost_model(make_plan(job, ranks, on_gpus=True), job).memory()


def total(ranks=1, **settings):
    return sum(estimate(ranks, **settings).values())


def test_memory_by_category():
    """float32 parameters, gradients and two moments, sharded; gradients are whole until the last micro-batch."""
    one, eight = estimate(), estimate(8)
    n = count_parameters(meta_model(build_config("1.3B", "interdomain")))
    assert (one["parameters"], one["gradients"], one["optimizer"]) == (4 * n, 4 * n, 8 * n)
    assert 1 / 8 < eight["parameters"] / one["parameters"] < 1 / 7  # the dynamics are whole
    assert eight["gradients"] - eight["parameters"] == pytest.approx(4 * n, rel=0.02)
    each = estimate(8, training__reduce_gradients="micro-batch")
    assert each["gradients"] == each["parameters"]


def test_muon_has_one_moment_of_matrices():
    settings = {"training__local_batch_size": 4, "model__n_layers": 2}
    adamw, muon = (parse(optimizer__name=name, **settings) for name in ("AdamW", "Muon"))
    optimizer = [cost_model(make_plan(job, 2), job).memory()["optimizer"] for job in (adamw, muon)]
    assert optimizer[0] - optimizer[1] == 4 * 2 * (4 * 128 * 128 + 3 * 128 * 384) // 2


def test_memory_falls_with_what_saves_it():
    none, selective, full = (total(activation_checkpoint__mode=mode) for mode in ("none", "selective", "full"))
    assert full < selective < none
    every_block = {"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "1"}
    assert total(**every_block) == full
    assert total(**every_block | {"activation_checkpoint__selective_ac_option": "2"}) == none
    assert total(mixer__recompute=True) < total(mixer__recompute=False)
    assert total(training__precision="bf16") < total(training__precision="float32")
    assert total(training__local_batch_size=1) < total(training__local_batch_size=2)
    for axis in ("shards", "context", "tensor", "pipeline"):
        settings = {} if axis == "shards" else {f"parallelism__{AXES[axis]}_degree": 2}
        settings["validation__enable"] = False
        assert total(2, **settings) < total(**settings | {f"parallelism__{AXES[axis]}_degree": 1}), axis


@pytest.mark.parametrize(
    ("schedule", "held"),
    [("GPipe", [8, 8, 8, 8]), ("1F1B", [4, 3, 2, 1]), ("Interleaved1F1B", [5.5, 4.5, 3.5, 2.5])],
)
def test_a_pipeline_s_micro_batches_and_waiting(schedule, held):
    """Those that a rank holds at a time, by PyTorch's own order, and the textbook's idle share."""
    settings = {"parallelism__pipeline_parallel_degree": 4, "parallelism__pipeline_parallel_schedule": schedule}
    plan = make_plan(parse(training__local_batch_size=1, model__n_layers=6, **settings), 4)
    costs = CostModel(plan)
    stages = 2 if schedule == "Interleaved1F1B" else 1
    assert [costs._in_flight(rank) for rank in range(4)] == held
    assert costs.idle() == pytest.approx(3 / (8 * stages + 3))


COUNTED = [
    *("2 text", "2 replicas", "2 context full", "2 tensor layers", "2 pipeline layers", "2 context softmax"),
    *("2 context fixed", "2 tensor fixed", "2 each bfloat16"),
]


@pytest.mark.e2e
@pytest.mark.parametrize("name", COUNTED)
def test_a_step_receives_about_what_the_dry_run_says(runs, name):
    counted = max(seen["traffic"] for seen in runs.every(name))
    job = read_job_config(runs.jobs[name]["args"])
    plan = make_plan(job, int(name[0]))
    assert sum(cost_model(plan, job).traffic().values()) == pytest.approx(counted, rel=0.08)


@pytest.mark.e2e
def test_context_parallelism_receives_the_same_whatever_the_length(runs):
    received = [max(seen["traffic"] for seen in runs.every(name)) for name in ("2 context full", "2 context full long")]
    assert received[0] == received[1]
