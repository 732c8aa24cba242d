"""A plan in words, with what its steps cost."""

from collections import Counter

import torch

from interdomain import features, scan
from interdomain.model import ModelConfig, cell_of
from interdomain.model.config import FIXED_STATE
from interdomain.model.feature_maps import FEATURE_MAPS
from interdomain.model.flops import state_size
from interdomain.model.mixers import fla_kernels
from interdomain.model.transformer import mixer_class

from ..settings.schema import JobConfig
from .costs import CostModel
from .device import device_here
from .run_plan import RunPlan

GIB = 2**30


def describe(plan: RunPlan, job: JobConfig, on_gpus: bool = False) -> str:
    """The dry run's table. on_gpus: as for `make_plan`."""
    costs = cost_model(plan, job)
    memory, traffic = costs.memory(), costs.traffic()
    memory_by_category = ", ".join(f"{name} {size / GIB:.2f}" for name, size in memory.items())
    received_by_axis = ", ".join(f"{name} {size / GIB:.3g}" for name, size in traffic.items() if size)
    rows = {
        "model": f"{plan.cell} ({plan.n_params:,} parameters)",
        "state": _state(plan),
        "FLOPs per token": f"{plan.flops_per_token:.4g} (forward and backward)",
        "steps": f"{plan.steps:,} of {plan.tokens_per_step:,} tokens (warmup {plan.warmup_steps:,})",
        "tokens": f"{plan.tokens:,} ({plan.tokens / plan.n_params:.1f} per parameter)",
        "FLOPs in all": f"{plan.flops:.4g}",
        "batch": _batch(plan),
        "mesh": str(plan.topology),
    }
    if plan.topology.pipeline > 1:
        rows["pipeline"] = (
            f"{plan.schedule}, idle {costs.idle():.1%} of a step; layers by stage {_layers_by_stage(plan)}"
        )
    rows["precision"] = plan.precision
    rows["memory per device"] = f"about {sum(memory.values()) / GIB:.2f} GiB ({memory_by_category})"
    received = sum(traffic.values()) / GIB
    rows["received per step"] = f"about {received:.3g} GiB per device ({received_by_axis or 'one rank'})"
    if plan.accumulation > 1:
        when = "after each micro-batch" if plan.reduces_each else "once a step"
        rows["gradients"] = f"summed in {job.training.mixed_precision_reduce} {when}"
        whole = memory["gradients"] - memory["parameters"]
        if whole and plan.topology.pipeline == 1:
            rows["gradients"] += f"; training.reduce_gradients = micro-batch takes {whole / GIB:.2f} GiB less"
    if plan.milestones:
        # The weight and AdamW's two means of each parameter in float32. Of Muon's matrices there is one mean.
        n, size = len(plan.milestones), 12 * plan.n_params / 1e9
        most = "at most " if job.optimizer.name == "Muon" else ""
        first = f"the first after step {min(plan.milestones):,}"
        rows["milestones"] = f"{n} checkpoint(s) of {most}{size:.3g} GB, {n * size:.3g} GB in all; {first}"
    rows |= _kernels(plan, None if on_gpus else device_here())
    return "\n".join(f"{name:>18}  {value}" for name, value in rows.items())


def cost_model(plan: RunPlan, job: JobConfig) -> CostModel:
    checkpointing = job.activation_checkpoint
    extent = checkpointing.mode
    if extent == "selective" and checkpointing.selective_ac_option != "op":  # every n-th block
        extent = "full" if checkpointing.selective_ac_option == "1" else "none"
    reshard = job.parallelism.fsdp_reshard_after_forward
    return CostModel(
        plan,
        checkpointing=extent,
        compiled=job.compile.enable and "model" in job.compile.components,
        stays_gathered=reshard == "never" or (reshard == "default" and plan.topology.pipeline > 1),
        reduced=2 if job.training.mixed_precision_reduce == "bf16" else 4,
        muon=job.optimizer.name == "Muon",
    )


def _state(plan: RunPlan) -> str:
    """The size of a layer's state, of each kind of layer."""
    states = []
    for layer, n in Counter(plan.config.layers).items():
        unit = "layer and sequence"
        if mixer_class(layer.mixer).state_grows(layer):
            unit = "layer, token and sequence"
        state = f"{state_size(layer):,} numbers per {unit}"
        if len(plan.config.mixers) > 1:
            state += f" ({n} x {cell_of(layer, plan.size).condition})"
        states.append(state)
    return "; ".join(states)


def _batch(plan: RunPlan) -> str:
    context = plan.topology.context
    ranks = "rank(s)"
    if context > 1:
        ranks = f"group(s) of {context} ranks with {plan.seq_len // context} tokens each"
    return (
        f"{plan.global_batch} x {plan.seq_len} = {plan.local_batch} per rank x {plan.topology.data_ranks} {ranks} x "
        f"{plan.accumulation} accumulation step(s)"
    )


def _layers_by_stage(plan: RunPlan) -> str:
    """The first and the last layer of each stage: 0-1 | 2-3."""
    stages = []
    for modules in plan.stages:
        numbers = [name.removeprefix("layers.") for name in modules if name.startswith("layers.")]
        if not numbers:
            stages.append("none")
        elif len(numbers) == 1:
            stages.append(numbers[0])
        else:
            stages.append(f"{numbers[0]}-{numbers[-1]}")
    return " | ".join(stages)


def _kernels(plan: RunPlan, device: torch.device | None) -> dict[str, str]:
    """How the scan and the features are computed. device: None for another machine's GPU."""
    config: ModelConfig = plan.config
    execution = plan.execution
    recurrent = [mixer for mixer in config.mixers if mixer.kind == "interdomain"]
    dtype = torch.float32 if plan.precision == "float32" else torch.bfloat16
    rows = {}
    if recurrent:
        rows["scan"] = execution.backend
        if execution.backend == "auto":
            chosen = []
            for mixer in recurrent:
                width = config.head_dim + mixer.normalize if mixer.query_readout else 0
                chosen.append(scan.resolve_backend(device, mixer.n_basis, width, dtype=dtype)[1])
            rows["scan"] = "; ".join(dict.fromkeys(chosen))
    rows["features"] = execution.features
    if execution.features == "auto":
        width = max(mixer.conv_width or 0 for mixer in config.mixers)
        chosen, rows["features"] = features.resolve_backend(device, config.head_dim, width, dtype=dtype)
        maps = dict.fromkeys(mixer.feature_map for mixer in recurrent if FEATURE_MAPS[mixer.feature_map])
        if chosen == "triton" and maps:
            rows["features"] += f"; then {', '.join(maps)} in plain PyTorch"
    if any(mixer.kind in FIXED_STATE for mixer in config.mixers):
        rows["recurrence"] = fla_kernels.chosen(device, dtype, execution.backend)[1]
    return rows
