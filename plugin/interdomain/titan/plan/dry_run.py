"""The tables of a plan: the whole one that a dry run prints, and the few rows of a start."""

import torch

from interdomain import features, scan
from interdomain.model import cell_of
from interdomain.model.config import FIXED_STATE
from interdomain.model.flops import state_size
from interdomain.model.mixers import fla_kernels
from interdomain.model.transformer import mixer_class

from ..settings.schema import JobConfig
from .costs import cost_model
from .device import Gpu, device_here
from .run_plan import RunPlan

GIB = 2**30
BYTES_PER_PARAMETER = 12  # of a checkpoint: the weight and AdamW's two moments, in float32
# Memory of a process on a CPU before training begins: Python, PyTorch and TorchTitan.
PROCESS = GIB // 2
# Fraction of a GPU's memory up to which a run fits without doubt. Traced memory was at most 1.45
# times the estimate (docs/parallelism.md).
SURE_TO_FIT = 0.7


def table(rows: dict[str, str]) -> str:
    """Returns rows as text, with their names in a column.

    Args:
        rows: Values by name.
    """
    return "\n".join(f"{name:>18}  {value}" for name, value in rows.items())


def summarize(
    plan: RunPlan,
    job: JobConfig,
    data: str,
    on_gpus: bool = False,
    gpu: Gpu | None = None,
) -> dict[str, str]:
    """Returns the rows that a start prints: whether it is the right run shows in them.

    Args:
        plan: The plan of the run.
        job: The configuration of the run.
        data: A description of the data.
        on_gpus: As for `describe`.
        gpu: As for `describe`.
    """
    device = "GPU"
    if not on_gpus and device_here().type == "cpu":
        device = "CPU"
    memory = sum(cost_model(plan, job).memory().values())
    if device == "CPU":
        memory += sum(_more_on_cpu(plan, job).values())
    rows = {
        "model": _describe_model(plan),
        "data": data,
        "steps": (
            f"{plan.steps:,} of {plan.tokens_per_step:,} tokens on {plan.topology.ranks} {device} "
            f"rank(s) ({plan.tokens:,} tokens)"
        ),
        "memory": f"about {memory / GIB:.2f} GiB per device",
    }
    if gpu is not None:
        rows["fits"] = _describe_fit(memory, gpu)
    rows["output"] = job.job.dump_folder
    return rows


def describe(
    plan: RunPlan,
    job: JobConfig,
    on_gpus: bool = False,
    gpu: Gpu | None = None,
) -> dict[str, str]:
    """Returns all rows of a plan.

    Args:
        plan: The plan of the run.
        job: The configuration of the run.
        on_gpus: The ranks are those of other machines, which have GPUs. Otherwise they are those of
            this machine.
        gpu: The GPU of each rank. None if it is not known.
    """
    rows = _rows_of_run(plan)
    rows |= _rows_of_step(plan, job, gpu)
    if plan.milestones:
        size = BYTES_PER_PARAMETER * plan.n_params / 1e9
        rows["milestones"] = (
            f"{len(plan.milestones)} checkpoint(s) of at most {size:.3g} GB; the first after step "
            f"{min(plan.milestones):,}"
        )
        latest = job.checkpoint.keep_latest_k
        if latest:
            # The last milestone is one of the latest. One more is there while it is written.
            total = size * (len(plan.milestones) + latest)
            rows["milestones"] += f"; the folder takes at most {total:.3g} GB"
    rows |= _rows_of_kernels(plan, None if on_gpus else device_here())
    return rows


def _rows_of_run(plan: RunPlan) -> dict[str, str]:
    """Returns the rows of the model, the length of the run, the batch and the ranks.

    Args:
        plan: The plan of the run.
    """
    data_ranks = f"{plan.topology.data_ranks} rank(s)"
    context = plan.topology.context
    if context > 1:
        tokens = plan.seq_len // context
        data_ranks = (
            f"{plan.topology.data_ranks} group(s) of {context} ranks with {tokens} tokens each"
        )
    return {
        "model": _describe_model(plan),
        "state": _describe_state(plan),
        "FLOPs": (
            f"{plan.flops_per_token:.4g} per token, {plan.flops:.4g} in all (forward and backward)"
        ),
        "steps": f"{plan.steps:,} of {plan.tokens_per_step:,} tokens (warmup {plan.warmup_steps:,})",
        "tokens": f"{plan.tokens:,} ({plan.tokens / plan.n_params:.1f} per parameter)",
        "batch": (
            f"{plan.global_batch} x {plan.seq_len} = {plan.local_batch} per rank x {data_ranks} x "
            f"{plan.accumulation} accumulation step(s)"
        ),
        "mesh": str(plan.topology),
        "precision": plan.precision,
    }


def _rows_of_step(plan: RunPlan, job: JobConfig, gpu: Gpu | None) -> dict[str, str]:
    """Returns the rows of a step's costs on the rank that has the largest.

    Args:
        plan: The plan of the run.
        job: The configuration of the run.
        gpu: The GPU of each rank. None if it is not known.
    """
    costs = cost_model(plan, job)
    rows = {}
    if plan.topology.pipeline > 1:
        layers = []
        for modules in plan.stages:
            layers.append(str(sum(name.startswith("layers.") for name in modules)))
        rows["pipeline"] = (
            f"{plan.schedule}, idle {costs.idle():.1%} of a step; layers of the stages: "
            f"{', '.join(layers)}"
        )

    memory = costs.memory()
    categories = ", ".join(f"{name} {size / GIB:.2f}" for name, size in memory.items())
    rows["memory per device"] = f"about {sum(memory.values()) / GIB:.2f} GiB ({categories})"
    rows["fits"] = _describe_fit(sum(memory.values()), gpu)
    if gpu is None:
        more = _more_on_cpu(plan, job)
        total = sum(memory.values()) + sum(more.values())
        categories = ", ".join(f"{name} {size / GIB:.2f}" for name, size in more.items())
        rows["on a CPU"] = f"about {total / GIB:.2f} GiB per process ({categories} more)"
    traffic = costs.traffic()
    axes = ", ".join(f"{name} {size / GIB:.3g}" for name, size in traffic.items() if size)
    received = sum(traffic.values()) / GIB
    rows["received per step"] = f"about {received:.3g} GiB per device ({axes or 'one rank'})"

    # Gradients that are whole until the last micro-batch.
    whole = memory["gradients"] - memory["parameters"]
    if whole and plan.topology.pipeline == 1:
        rows["gradients"] = (
            f"training.reduce_gradients = micro-batch takes {whole / GIB:.2f} GiB less"
        )
    return rows


def _more_on_cpu(plan: RunPlan, job: JobConfig) -> dict[str, int]:
    """Returns the bytes by category that a process on a CPU takes beside those of a GPU.

    Args:
        plan: The plan of the run.
        job: The configuration of the run.
    """
    more = {"process": PROCESS}
    if job.checkpoint.enable and job.checkpoint.async_mode != "disabled":
        # A copy of the weights and of AdamW's two moments, which is written in the background.
        more["copy for saves"] = 3 * cost_model(plan, job).memory()["parameters"]
    return more


def _describe_fit(needed: int, gpu: Gpu | None) -> str:
    """Returns whether a rank fits on its GPU.

    Args:
        needed: Estimate of the rank's peak memory in bytes.
        gpu: The GPU. None if it is not known.
    """
    if gpu is None:
        return "not known: no GPU is here, and no --site names one"
    share = needed / gpu.memory
    if share <= SURE_TO_FIT:
        answer = "yes"
    elif share <= 1:
        answer = "perhaps"
    else:
        answer = "NO"
    return f"{answer}: {share:.0%} of {gpu.memory / GIB:.1f} GiB ({gpu.name})"


def _rows_of_kernels(plan: RunPlan, device: torch.device | None) -> dict[str, str]:
    """Returns the rows that name what computes the mixers.

    Args:
        plan: The plan of the run.
        device: Where the model computes. None means a GPU of another machine.
    """
    rows = {}
    config = plan.config
    execution = plan.execution
    dtype = torch.float32 if plan.precision == "float32" else torch.bfloat16
    for mixer in config.mixers:
        if mixer.kind == "interdomain":
            rows["scan"] = execution.backend
            if execution.backend == "auto":
                # The linear readout takes every width.
                width = 0
                if mixer.query_readout:
                    width = config.head_dim + mixer.normalize
                rows["scan"] = scan.resolve_backend(device, mixer.n_basis, width, dtype=dtype)[1]
        if mixer.kind in FIXED_STATE:
            rows["recurrence"] = fla_kernels.chosen(device, dtype, execution.backend)[1]

    # Only these mixers have input features.
    interdomain = [mixer for mixer in config.mixers if mixer.kind == "interdomain"]
    if interdomain:
        rows["features"] = execution.features
        if execution.features == "auto":
            width = max(mixer.conv_width or 0 for mixer in interdomain)
            backend = features.resolve_backend(device, config.head_dim, width, dtype=dtype)
            rows["features"] = backend[1]
    return rows


def _describe_model(plan: RunPlan) -> str:
    return f"{plan.cell} ({plan.n_params:,} parameters)"


def _describe_state(plan: RunPlan) -> str:
    """Returns the size of a layer's state, for each kind of layer.

    Args:
        plan: The plan of the run.
    """
    layers = plan.config.layers
    states = []
    for layer in dict.fromkeys(layers):
        unit = "layer and sequence"
        if mixer_class(layer.mixer).state_grows(layer):
            unit = "layer, token and sequence"
        state = f"{state_size(layer):,} numbers per {unit}"
        if len(plan.config.mixers) > 1:
            state += f" ({layers.count(layer)} x {cell_of(layer, plan.size).condition})"
        states.append(state)
    return "; ".join(states)
