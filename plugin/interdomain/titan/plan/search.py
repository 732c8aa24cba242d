"""The fastest topology on a number of GPUs, by estimate: every way to divide a run is tried."""

import copy
import logging
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..settings.job_config import refuse_unsupported, set_value, value_of
from ..settings.schema import JobConfig
from .costs import Costs
from .estimate import Estimate, exchanges, seconds
from .machines import Machines
from .measured import Fit
from .run_plan import costs_of, make_plan, model_config

DEGREES = {axis: f"parallelism.{setting}_degree" for axis, setting in (
    ("replicas", "data_parallel_replicate"),
    ("shards", "data_parallel_shard"),
    ("context", "context_parallel"),
    ("tensor", "tensor_parallel"),
    ("pipeline", "pipeline_parallel"),
)}  # fmt: skip
MODES = "none", "selective", "full"


class Candidate(NamedTuple):
    seconds: float
    settings: dict[str, Any]
    costs: Costs


class Found(NamedTuple):
    """A way to divide a run. settings: all that were chosen; flags: those that differ from the run's own."""

    settings: dict[str, Any]
    flags: list[str]
    estimate: Estimate


def topologies(ranks: int, axes: int = len(DEGREES)) -> Iterator[tuple[int, ...]]:
    """All degrees whose product is the number of ranks."""
    if axes == 1:
        yield (ranks,)
        return
    for degree in range(1, ranks + 1):
        if ranks % degree == 0:
            yield from ((degree, *rest) for rest in topologies(ranks // degree, axes - 1))


def candidates(job: JobConfig, ranks: int, machines: Machines) -> Iterator[Candidate]:
    """Every way to divide a run that the plan does not refuse, with its seconds. The settings of `job` change meanwhile.

    Global batch, sequence length and schedule stay.
    """
    config, device, batch = model_config(job), torch.device("cuda"), job.training.global_batch_size
    for degrees in topologies(ranks):
        for local in (n for n in range(1, batch + 1) if batch % n == 0):
            settings = dict(zip(DEGREES.values(), degrees, strict=True)) | {"training.local_batch_size": local}
            if job.validation.enable:
                settings["validation.local_batch_size"] = local
            apply(job, settings)
            try:
                costs = costs_of(job, config, ranks, device)
            except ValueError:
                continue
            for mode in MODES:
                apply(job, {"activation_checkpoint.mode": mode})
                axes = exchanges(costs, machines)
                for recompute in (False, True):
                    apply(job, {"mixer.recompute": recompute})
                    terms, _ = seconds(costs, machines, axes)
                    computed = {"activation_checkpoint.mode": mode, "mixer.recompute": recompute}
                    yield Candidate(sum(terms.values()), settings | computed, costs)


def apply(job: JobConfig, settings: dict[str, Any]) -> None:
    for setting, value in settings.items():
        set_value(job, setting, value)


def fastest(job: JobConfig, ranks: int, machines: Machines, fit: Fit, count: int = 6) -> list[Found]:
    """The fastest topologies that fit, each with its fastest batch, checkpointing and recomputation; the best first.

    Raises: ValueError for settings that cannot be, and where nothing fits.
    """
    refuse_unsupported(job)
    if job.data.stages:
        raise ValueError(
            "--best divides a run of one data stage. Leave [[data.stages]] out, and search for the longest sequences with "
            "--training.seq_len and --training.global_batch_size."
        )
    if job.training.global_batch_size < 1:
        raise ValueError(
            "--best needs training.global_batch_size, the sequences of a step: it stays on any number of GPUs."
        )
    given, job, found = job, copy.deepcopy(job), {}
    warnings_before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # of topologies that are tried
    try:
        for candidate in sorted(candidates(job, ranks, machines), key=lambda candidate: candidate.seconds):
            if candidate.costs.mesh in found:
                continue
            apply(job, candidate.settings)
            if not machines.fits(candidate.costs.memory(job.training.local_batch_size, job.training.seq_len)):
                continue
            plan = make_plan(copy.deepcopy(job), ranks, on_gpus=True)
            found[candidate.costs.mesh] = Found(
                candidate.settings, flags(given, candidate.settings), Estimate(plan, machines, fit)
            )
            if len(found) == count:
                break
    finally:
        logging.disable(warnings_before)
    if not found:
        raise ValueError(
            f"no topology of {ranks} {machines.name} fits: the parts of the model, or a sequence, are too large. Give more "
            "GPUs, a shorter training.seq_len or a smaller training.global_batch_size."
        )
    return list(found.values())


def flags(job: JobConfig, settings: dict[str, Any]) -> list[str]:
    """The settings that differ from a run's, as words of a command line."""
    return [word for name, x in settings.items() if x != value_of(job, name) for word in (f"--{name}", str(x))]


def table(found: list[Found]) -> str:
    """Rows by topology."""
    rows = [("GPUs", "topology", "batch", "checkpointing", "s / step", "GiB", "tokens/s", "GPU-hours", "bound by")]
    for each in found:
        plan, estimate, settings = each.estimate.plan, each.estimate, each.settings
        recompute = " + recompute" * settings["mixer.recompute"]
        rows.append(
            (
                str(plan.topology.ranks),
                str(plan.topology).partition(" = ")[0],
                f"{plan.local_batch} x {plan.accumulation}",
                settings["activation_checkpoint.mode"] + recompute,
                f"{estimate.step:.3g}",
                f"{sum(plan.memory.values()) / 2**30:.1f}",
                f"{estimate.tokens_per_second:,.0f}",
                f"{estimate.gpu_hours:,.0f}",
                estimate.bound,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows)


def describe(job: JobConfig, counts: list[int], machines: Machines, fit: Fit, start: list[str]) -> str:
    """The answer to --best: of one number of GPUs the fastest topologies, of several the fastest of each.

    start: the command that the flags are for.
    """
    each = [fastest(job, ranks, machines, fit) for ranks in counts]
    shown = each[0] if len(each) == 1 else [found[0] for found in each]
    best = min(shown, key=lambda found: found.estimate.step)
    said = f"{machines.name}, {machines.per_node} GPU(s) a node, {machines.network:g} Gb/s a GPU between nodes: {fit}"
    fewest = f"fastest on {best.estimate.plan.topology.ranks} GPUs" if len(each) > 1 else "the fastest"
    return f"{table(shown)}\n\n{said}\n{fewest}:\n{shlex.join([*start, *best.flags])}"
