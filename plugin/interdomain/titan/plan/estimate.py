"""Seconds of a training step by arithmetic, from a table of GPUs and links; and the bytes that pass between nodes.

Nothing here was measured. A step is the sum of its terms (`seconds`), one function each. What a run has measured scales the sum
(`measured`).
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .costs import Costs
from .machines import DEVICES, Device, Machines, device_here
from .measured import Fit
from .run_plan import RunPlan
from .topology import Topology

# Assumed.
UTILISATION = 0.4  # of the bf16 peak, by products, scan and all that lies between
LAUNCHES = 0.5e-3  # seconds of the host for a layer and micro-batch, forward and backward: some 100 kernels
HIDEABLE = 0.9  # of an exchange behind the computation; the rest is what it takes of multiprocessors and memory
QUERIES = 0.1  # of the computation: what hides the exchange of states, the queries and the gate
# Latencies in NCCL's own table (tuning.cc, protocol Simple): of a call, and of a hop inside a node and between nodes.
CALL, HOP_INSIDE, HOP_BETWEEN = 8.4e-6, 3.4e-6, 14e-6
# AdamW and clipping, a parameter: read it, its gradient and two moments, write three; read the gradient, and scale it. Muon
# reads and writes two numbers less, and four of bfloat16 more.
OPTIMIZER_BYTES = 40


# Bytes between nodes


class Group(NamedTuple):
    """Ranks that exchange something: how many, and the fewest of them in one node with a rank."""

    size: int
    here: int

    @property
    def nodes(self) -> int:
        return math.ceil(self.size / self.here)


@functools.cache
def _group(stride: int, size: int, ranks: int, per_node: int) -> Group:
    """Groups of ranks that lie `stride` apart."""
    node = (np.arange(ranks) // per_node).reshape(-1, size, stride).swapaxes(1, 2)  # of each member, [.., .., size]
    return Group(size, int((node[..., None] == node[..., None, :]).sum(-1).min()))


def groups_of(mesh: Topology, per_node: int) -> dict[str, Group]:
    """The groups of each axis of `Costs.traffic`. TorchTitan's order of the ranks: pipeline, replicas, shards, context, tensor;
    the last is the fastest. FSDP2 shards over context, too."""
    shards, stage = mesh.context * mesh.shards, mesh.ranks // mesh.pipeline
    placed = {
        "tensor": (1, mesh.tensor),
        "context": (mesh.tensor, mesh.context),
        "shards": (mesh.tensor, shards),
        "replicas": (mesh.tensor * shards, mesh.replicas),
        "pipeline": (stage, mesh.pipeline),
        "dynamics": (1, stage),
        "matrices": (1, mesh.tensor * shards),
    }
    return {axis: _group(*place, mesh.ranks, per_node) for axis, place in placed.items()}


def between_nodes(traffic: dict[str, int], groups: dict[str, Group]) -> dict[str, int]:
    """Bytes by axis that a rank receives of ranks on other nodes: each of the others hands on the same. A pipeline's rank has
    two neighbours, of which one is on another node where a node has several stages."""
    share = {axis: (size - here) / max(1, size - 1) for axis, (size, here) in groups.items()}
    size, here = groups["pipeline"]
    share["pipeline"] = 0 if here == size else 1 if here == 1 else 0.5
    return {axis: round(n * share[axis]) for axis, n in traffic.items()}


# Terms of a step


def computation(costs: Costs, device: Device) -> tuple[float, float]:
    """Seconds of forward and backward pass, and of what the backward pass computes again."""
    training, mesh = costs.job.training, costs.mesh
    tokens = costs.micro_batches * training.local_batch_size * training.seq_len / (mesh.context * mesh.tensor)
    once, again = (tokens * flops / (UTILISATION * device.flops) for flops in costs.flops())
    return once, again


def launches(costs: Costs) -> float:
    """Seconds that the host takes to launch a step's kernels."""
    return LAUNCHES * costs.micro_batches * max(sum(map(len, part.layers)) for part in costs.held)


def optimizer(costs: Costs, device: Device) -> float:
    """Seconds. Of Muon the parameters' traffic as of AdamW, and Newton-Schulz."""
    shards = costs.mesh.shards * costs.mesh.context
    parameters = max(part.dynamics + (part.parameters - part.dynamics) / shards for part in costs.held)
    return OPTIMIZER_BYTES * parameters / device.bandwidth + costs.newton_schulz() / (UTILISATION * device.flops)


def latency(axis: str, group: Group) -> float:
    """Seconds of a collective without bytes, by NCCL's formulas: of a ring; of a tree, for sums; to a neighbour."""
    if axis == "pipeline":
        return CALL + (HOP_INSIDE if group.here == group.size else HOP_BETWEEN)
    if axis == "context":  # from every rank to every rank
        return CALL + (HOP_INSIDE if group.nodes == 1 else HOP_BETWEEN)
    if axis in ("replicas", "dynamics"):
        return CALL + 2 * ((group.here - 1) * HOP_INSIDE + math.log2(group.nodes) * HOP_BETWEEN)
    return CALL + (group.size - group.nodes) * HOP_INSIDE + (group.nodes - 1) * HOP_BETWEEN


def messages(costs: Costs) -> dict[str, int]:
    """Collectives of a step by axis."""
    mode, n = costs.checkpointing, costs.micro_batches
    blocks, layers = (
        max(counts)
        for counts in zip(*((len(part.groups), sum(map(len, part.layers))) for part in costs.held), strict=True)
    )
    training = costs.job.training
    reductions = n if costs.reduces_each(training.local_batch_size, training.seq_len) else 1
    return {
        "shards": blocks * (costs.gathers + reductions),
        "replicas": blocks * reductions,
        "context": 3 * layers * n * (2 + (mode == "full")),  # two of states; the convolutions' inputs
        "tensor": n * (layers * (8 + {"none": 0, "full": 4}.get(mode, 2)) + 4),
        "pipeline": 2 * n * len(costs.held[0].layers),
        "dynamics": 1,
        "matrices": 2 * max(map(len, costs.matrices)),
    }


def exchanges(costs: Costs, machines: Machines) -> dict[str, float]:
    """Seconds of each axis's collectives. A ring brings each byte into a node once, where its members of the group share their
    links; what a rank receives passes over NVLink meanwhile. Of states every rank gets its own."""
    traffic, groups, counts = costs.traffic(), groups_of(costs.mesh, machines.per_node), messages(costs)
    between, network, found = between_nodes(traffic, groups), machines.network * 1e9 / 8, {}
    for axis, group in groups.items():
        found[axis] = 0.0
        if group.size > 1:
            own = axis == "context" and any(mixer.kind != "softmax" for mixer in costs.config.mixers)
            moved = max(traffic[axis] / machines.device.nvlink, between[axis] / (1 if own else group.here) / network)
            found[axis] = moved + counts[axis] * latency(axis, group)
    return found


def seconds(costs: Costs, machines: Machines, axes: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Terms of a step, which add up to it, and what is hidden behind the computation. axes: `exchanges`.

    Hidden are, as far as the computation is long enough: the host's launches; nine tenths of the exchange of shards, behind all
    of it; nine tenths of that of replicas, which comes after the last micro-batch, behind its backward pass; nine tenths of
    that of states, behind the queries. A rank waits for every other exchange.
    """
    once, again = computation(costs, machines.device)
    host = launches(costs)
    terms = {"computation": once, "recomputation": again, "launches": max(0.0, host - once - again)}
    states = min(HIDEABLE * axes["context"], QUERIES * (once + again))
    terms |= {"tensor": axes["tensor"], "context": axes["context"] - states, "pipeline": axes["pipeline"]}
    working, waits = sum(terms.values()), costs.idle()
    terms["waiting for stages"] = working * waits / (1 - waits)
    backward = 2 / 3 * working / costs.micro_batches  # of a micro-batch
    hidden = {axis: min(HIDEABLE * axes[axis], long) for axis, long in (("shards", working), ("replicas", backward))}
    terms |= {axis: axes[axis] - n for axis, n in hidden.items()}
    hidden |= {"launches": host - terms["launches"], "context": states}
    last = {"dynamics": axes["dynamics"], "matrices": axes["matrices"], "optimizer": optimizer(costs, machines.device)}
    return terms | last, hidden


@dataclass(frozen=True)
class Estimate:
    """A plan's step on some machines. fit: what their runs have measured."""

    plan: RunPlan
    machines: Machines
    fit: Fit

    @functools.cached_property
    def parts(self) -> tuple[dict[str, float], dict[str, float]]:
        return seconds(self.plan.costs, self.machines, exchanges(self.plan.costs, self.machines))

    @property
    def unfitted(self) -> float:
        return sum(self.parts[0].values())

    @property
    def step(self) -> float:
        return self.unfitted * self.fit.factor

    @property
    def bound(self) -> str:
        """The term that takes longest."""
        terms, _ = self.parts
        return max(terms, key=lambda term: terms[term])

    @property
    def tokens_per_second(self) -> float:
        return self.plan.tokens_per_step / self.step

    @property
    def gpu_hours(self) -> float:
        steps = zip(self.plan.steps_by_data_stage(self.plan.steps), self._each, strict=True)
        return sum(n * stage.step for n, stage in steps) * self.plan.topology.ranks / 3600

    @property
    def _each(self) -> list["Estimate"]:
        """The estimate of each data stage."""
        return [replace(self, plan=stage) for stage in self.plan.data_stages]

    @functools.cached_property
    def between(self) -> dict[str, int]:
        return between_nodes(self.plan.traffic, groups_of(self.plan.topology, self.machines.per_node))

    def describe(self) -> str:
        """The dry run's rows."""
        terms, hidden = (
            ", ".join(f"{n} {x:.2g}" for n, x in part.items() if x > self.unfitted / 1e3) for part in self.parts
        )
        inside = {axis: n - self.between[axis] for axis, n in self.plan.traffic.items()}
        rows = {
            "inside a node": _received(inside),
            "between nodes": f"{_received(self.between)}; nodes of {self.machines.per_node} GPU(s)",
            "seconds per step": f"{self.step:.3g} on {self.machines.name}: {self.fit} ({terms})",
            **({"hidden": f"{hidden} seconds of the same step, behind the computation"} if hidden else {}),
            "bound by": self.bound,
            "tokens per second": f"{self.tokens_per_second:,.0f}",
            **{
                f"data stage {n}": f"{stage.step:.3g} seconds per step, {stage.tokens_per_second:,.0f} tokens per second"
                for n, stage in enumerate(self._each[1:], 2)
            },
            "GPU-hours": f"{self.gpu_hours:,.0f}, all steps",
            **({"HSDP": words} if (words := self._hsdp()) else {}),
            **({"warning": words} if (words := self._leaves_a_node()) else {}),
        }
        return "\n".join(f"{name:>18}  {value}" for name, value in rows.items())

    def _leaves_a_node(self) -> str:
        groups = groups_of(self.plan.topology, self.machines.per_node)
        wide = [f"{axis} {groups[axis].size}" for axis in ("tensor", "context") if groups[axis].nodes > 1]
        return f"groups leave a node of {self.machines.per_node} GPU(s): {', '.join(wide)}" if wide else ""

    def _hsdp(self) -> str:
        """Flags for replicas of a model that one node shards, where they move fewer bytes between nodes and fit."""
        costs, per_node = self.plan.costs, self.machines.per_node
        mesh = costs.mesh
        replicas, left = divmod(mesh.shards * mesh.context * mesh.tensor, per_node)
        if mesh.replicas > 1 or left or replicas < 2 or mesh.shards % replicas:
            return ""
        with_replicas = mesh._replace(replicas=replicas, shards=mesh.shards // replicas)
        other = Costs(costs.job, costs.config, with_replicas, costs.stages, costs.micro_batches)
        memory = other.memory(self.plan.local_batch, self.plan.seq_len)
        between = sum(between_nodes(other.traffic(), groups_of(with_replicas, per_node)).values())
        if between >= sum(self.between.values()) or not self.machines.fits(memory):
            return ""
        degrees = f"_replicate_degree {replicas} --parallelism.data_parallel_shard_degree {with_replicas.shards}"
        return (
            f"{between / 2**30:.3g} GiB between nodes and {sum(memory.values()) / 2**30:.1f} GiB of memory with "
            f"--parallelism.data_parallel{degrees}"
        )


def _received(traffic: dict[str, int]) -> str:
    axes = ", ".join(f"{axis} {n / 2**30:.3g}" for axis, n in traffic.items() if n)
    return f"{sum(traffic.values()) / 2**30:.3g} GiB received per step" + (f" ({axes})" if axes else "")


def record_of(plan: RunPlan, per_node: int) -> dict[str, Any]:
    """Facts of a run here, to be kept with its measured seconds (`measured.note`): estimate: seconds without a fit, None for a
    device that is not in the table."""
    name, job = device_here(), plan.costs.job
    known = Estimate(plan, Machines(name, per_node), Fit()) if name in DEVICES else None
    return {
        "device": name,
        "gpus_per_node": per_node,
        "topology": plan.topology._asdict(),
        "model": str(plan.cell),
        "batch": [plan.global_batch, plan.local_batch, plan.seq_len],
        "precision": plan.precision,
        "checkpointing": plan.costs.checkpointing,
        "recompute": plan.execution.recompute,
        "compiled": job.compile.enable,
        "estimate": known and known.unfitted,
    }
