"""Everything that a job configuration implies, computed and checked before anything expensive is built.

`make_plan` is the one place that knows which settings are possible; the trainer and the dry run both go through it.
Every refusal names the setting, what was got, and what is allowed.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from interdomain import features, scan
from interdomain.model import SIZES, Cell, Execution, ModelConfig, build_config, cell_of, count_parameters
from interdomain.model.config import EXECUTION_SETTINGS, FIXED_STATE
from interdomain.model.costs.flops import state_size, train_flops_per_token
from interdomain.model.feature_maps import FEATURE_MAPS
from interdomain.model.mixers import fla_kernels
from interdomain.model.transformer import mixer_class

from ..host import refuse_for_host
from ..settings.job_config import noting, refuse, refuse_unsupported, refuse_wrong_values, value_of
from ..settings.schema import JobConfig
from .costs import CARD, Costs
from .device import device_here, refuse_for_device
from .pipeline_order import stages_of
from .schedule import milestone_steps, run_length
from .topology import Topology, pipeline_stages, refuse_for_batch, refuse_for_reduction, refuse_for_topology, topology


@dataclass(frozen=True)
class RunPlan:
    """The run to come: the model, the schedule in steps and tokens, the topology, and what it costs."""

    config: ModelConfig
    size: str
    execution: Execution
    seed: int
    n_params: int
    flops_per_token: int
    topology: Topology
    stages: tuple[tuple[str, ...], ...]  # their modules' names; `stages_of` says whose they are
    costs: Costs = field(compare=False, repr=False)
    schedule: str  # of the pipeline
    local_batch: int
    global_batch: int
    seq_len: int
    steps: int
    warmup_steps: int
    milestones: frozenset[int]  # steps whose checkpoints are never removed
    precision: str
    memory: dict[str, int]  # bytes by part, of the rank that needs the most
    traffic: dict[str, int]  # bytes by axis that are received in a step, of the rank that receives the most
    reduces_each: bool  # whether gradients are summed over the ranks after each micro-batch, and not once a step
    computed: dict[str, str]  # how the scan and the features are computed, in words

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step, on each rank that reads samples."""
        return self.global_batch // (self.local_batch * self.topology.data_ranks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank of the pipeline."""
        return stages_of(self.schedule, rank, self.topology.pipeline, len(self.stages))

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def flops(self) -> int:
        """FLOPs of the run, forward and backward."""
        return self.tokens * self.flops_per_token

    @property
    def state(self) -> tuple[int, int]:
        """Numbers of the state of all layers: (per sequence, per sequence and token)."""
        sizes = [0, 0]
        for layer in self.config.layers:
            sizes[mixer_class(layer.mixer).state_grows(layer)] += state_size(layer)
        return sizes[0], sizes[1]

    @property
    def cell(self) -> Cell:
        return cell_of(self.config, self.size)

    def describe(self) -> str:
        """The dry run's table."""
        gib = 2**30
        memory = ", ".join(f"{name} {size / gib:.2f}" for name, size in self.memory.items())
        received = ", ".join(f"{name} {size / gib:.3g}" for name, size in self.traffic.items() if size)
        tokens = self.costs.longest_sequence()
        longest = f"{tokens:,} tokens on {CARD / 1e9:.0f} GB, one at a time"
        context = self.topology.context
        if context == 1:
            longest += f" (8 ranks share {8 * tokens:,})"
        states = []
        for layer, n in Counter(self.config.layers).items():
            grows = mixer_class(layer.mixer).state_grows(layer)
            which = f" ({n} x {cell_of(layer, self.size).condition})" if len(self.config.mixers) > 1 else ""
            if layer.mixer.kind in FIXED_STATE:
                which += f" (interdomain attention: {4 * layer.mixer.n_basis * layer.dim:,})"
            states.append(f"{state_size(layer):,} numbers per layer{', token' * grows} and sequence{which}")
        rows = {
            "model": f"{self.cell} ({self.n_params:,} parameters)",
            "state": "; ".join(states),
            "FLOPs per token": f"{self.flops_per_token:.4g} (forward and backward)",
            "steps": f"{self.steps:,} of {self.tokens_per_step:,} tokens (warmup {self.warmup_steps:,})",
            "tokens": f"{self.tokens:,} ({self.tokens / self.n_params:.1f} per parameter)",
            "FLOPs in all": f"{self.flops:.4g}",
            "batch": self._batch(),
            "mesh": str(self.topology),
            **({"pipeline": self._stages()} if self.topology.pipeline > 1 else {}),
            "precision": self.precision,
            "memory per device": f"about {sum(self.memory.values()) / gib:.2f} GiB ({memory})",
            "received per step": f"{sum(self.traffic.values()) / gib:.3g} GiB per device ({received or 'one rank'})",
            **({"gradients": self.costs.reductions()} if self.accumulation > 1 else {}),
            "longest sequence": longest,
            **({"milestones": self._milestones()} if self.milestones else {}),
            **self.computed,
        }
        return "\n".join(f"{name:>18}  {value}" for name, value in rows.items())

    def _milestones(self) -> str:
        """The checkpoints that are never removed, in words."""
        # Per parameter the weight and the optimizer's two means, of Muon's matrices one, in float32.
        muons = sum(matrix.numbers for rank in self.costs.matrices for matrix in rank)
        n, size = len(self.milestones), (12 * self.n_params - 4 * muons) / 1e9
        return f"{n} checkpoint(s) of {size:.3g} GB, {n * size:.3g} GB in all; the first after step {min(self.milestones):,}"

    def _batch(self) -> str:
        context, shared = self.topology.context, "rank(s)"
        if context > 1:
            shared = f"group(s) of {context} ranks with {self.seq_len // context} tokens each"
        return (
            f"{self.global_batch} x {self.seq_len} = {self.local_batch} per rank x {self.topology.data_ranks} {shared} x "
            f"{self.accumulation} accumulation step(s)"
        )

    def _stages(self) -> str:
        """A pipeline in words, and the share of a step that its ranks wait."""
        numbers = [[name.partition(".")[2] for name in stage if name.startswith("layers.")] for stage in self.stages]
        layers = " | ".join("-".join(dict.fromkeys([n[0], n[-1]])) if n else "none" for n in numbers)
        return f"{self.schedule}, idle {self.costs.idle():.1%} of a step; layers by stage {layers}"


def make_plan(job_config: JobConfig, world_size: int, on_gpus: bool = False) -> RunPlan:
    """Check `job_config` for a run on `world_size` ranks.

    on_gpus: those are other machines', known to have GPUs; else what this one lacks is refused.
    Raises: ValueError (unknown or impossible setting), FileNotFoundError (data). Nothing is built and nothing is written.
    """
    refuse_wrong_values(job_config)  # what follows reads them
    problems: list[str] = []
    for check in (refuse_unsupported, refuse_for_host, *([] if on_gpus else [refuse_for_device])):
        with noting(problems):
            check(job_config)
    training, device = job_config.training, torch.device("cuda") if on_gpus else device_here()
    costs = None
    with noting(problems):
        costs = costs_of(job_config, model_config(job_config), world_size, device)
        refuse_for_reduction(job_config, costs.micro_batches)
    refuse(problems)
    assert costs is not None
    config = costs.config
    tokens_per_step = costs.global_batch * training.seq_len
    steps, warmup_steps = run_length(job_config, tokens_per_step)
    products = training.precision == "bf16-products"
    chosen = {name: value_of(job_config, f"mixer.{name}") for name in EXECUTION_SETTINGS}
    execution = Execution(**chosen, bf16_products=products)
    for mixer in config.mixers:
        execution.refuse_map(mixer)
    local, seq_len = training.local_batch_size, training.seq_len
    return RunPlan(
        config=config,
        size=job_config.model.flavor,
        execution=execution,
        seed=job_config.debug.seed,
        n_params=count_parameters(costs.model),
        flops_per_token=train_flops_per_token(config, seq_len),
        topology=costs.mesh,
        stages=costs.stages,
        costs=costs,
        schedule=job_config.parallelism.pipeline_parallel_schedule,
        local_batch=local,
        global_batch=costs.global_batch,
        seq_len=seq_len,
        steps=steps,
        warmup_steps=warmup_steps,
        milestones=milestone_steps(job_config, steps, tokens_per_step),
        precision=training.precision,
        memory=costs.memory(local, seq_len),
        traffic=costs.traffic(),
        reduces_each=costs.reduces_each(local, seq_len),
        computed=_computed(execution, config, training.precision, None if on_gpus else device_here()),
    )


def costs_of(job_config: JobConfig, config: ModelConfig, world_size: int, device: torch.device) -> Costs:
    """The ranks' costs, for a model that the axes divide.

    Raises: ValueError for axes, a model and a batch that do not fit each other.
    """
    parallel, training = job_config.parallelism, job_config.training
    mesh, stages = topology(parallel, world_size), pipeline_stages(parallel, config.n_layers)
    refuse_for_topology(job_config, config, device)
    at_once = training.local_batch_size * mesh.data_ranks
    global_batch = training.global_batch_size if training.global_batch_size > 0 else at_once
    refuse_for_batch(job_config, mesh, global_batch)
    return Costs(job_config, config, mesh, stages, global_batch // at_once)


def model_config(job_config: JobConfig) -> ModelConfig:
    """Size x condition, with the switches that [mixer] and the numbers that [model] set on top."""
    model, mixer = job_config.model, job_config.mixer
    others = ("condition", *EXECUTION_SETTINGS)
    changed: dict[str, Any] = {n: x for n, x in vars(mixer).items() if n not in others and x is not None}
    changed |= {name: n for name in ("vocab_size", "dim", "n_layers", "n_heads") if (n := getattr(model, name))}
    if changed.keys() & {"dim", "n_heads"}:  # heads are dim / n_heads wide
        size = SIZES[model.flavor] | changed
        changed["head_dim"] = size["dim"] // size["n_heads"]
    return build_config(model.flavor, mixer.condition, max_seq_len=job_config.training.seq_len, **changed)


def _computed(execution: Execution, config: ModelConfig, precision: str, device: torch.device | None) -> dict[str, str]:
    """Words for how the scan and the features are computed. device: None for another machine's GPU."""
    recurrent = [mixer for mixer in config.mixers if mixer.kind == "interdomain"]
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    words = {}
    if recurrent:
        words["scan"] = execution.backend
        if execution.backend == "auto":
            sizes = [(m.n_basis, config.head_dim + m.normalize if m.query_readout else 0) for m in recurrent]
            words["scan"] = "; ".join(dict.fromkeys(scan.resolve_backend(device, *s, dtype=dtype)[1] for s in sizes))
    words["features"] = execution.features
    if execution.features == "auto":
        width = max(mixer.conv_width or 0 for mixer in config.mixers)
        chosen, words["features"] = features.resolve_backend(device, config.head_dim, width, dtype=dtype)
        plain = dict.fromkeys(m.feature_map for m in recurrent if FEATURE_MAPS[m.feature_map])
        if chosen == "triton" and plain:
            words["features"] += f"; then {', '.join(plain)} in plain PyTorch"
    if any(mixer.kind in FIXED_STATE for mixer in config.mixers):
        words["recurrence"] = fla_kernels.chosen(device, dtype, execution.backend)[1]
    return words
