"""A plan in words, with what its steps cost."""

import torch

from interdomain import features, scan
from interdomain.model import cell_of
from interdomain.model.config import FIXED_STATE
from interdomain.model.flops import state_size
from interdomain.model.mixers import fla_kernels
from interdomain.model.transformer import mixer_class

from ..settings.schema import JobConfig
from .costs import CostModel
from .device import device_here
from .run_plan import RunPlan

GIB = 2**30


def describe(plan: RunPlan, job: JobConfig, on_gpus: bool = False) -> str:
    """The dry run's table.

    Args:
        on_gpus: As for `make_plan`.
    """
    costs = cost_model(plan, job)
    memory, traffic = costs.memory(), costs.traffic()
    memory_by_category = ", ".join(f"{name} {size / GIB:.2f}" for name, size in memory.items())
    received_by_axis = ", ".join(
        f"{name} {size / GIB:.3g}" for name, size in traffic.items() if size
    )

    # The model, the length of the run, and the batch.
    rows = {
        "model": f"{plan.cell} ({plan.n_params:,} parameters)",
        "state": _state(plan),
        "FLOPs per token": f"{plan.flops_per_token:.4g} (forward and backward)",
        "steps": f"{plan.steps:,} of {plan.tokens_per_step:,} tokens (warmup {plan.warmup_steps:,})",
        "tokens": f"{plan.tokens:,} ({plan.tokens / plan.n_params:.1f} per parameter)",
        "FLOPs in all": f"{plan.flops:.4g}",
    }
    context = plan.topology.context
    readers = "rank(s)"
    if context > 1:
        readers = f"group(s) of {context} ranks with {plan.seq_len // context} tokens each"
    rows["batch"] = (
        f"{plan.global_batch} x {plan.seq_len} = {plan.local_batch} per rank x {plan.topology.data_ranks} {readers} x "
        f"{plan.accumulation} accumulation step(s)"
    )

    # The ranks, and what a step costs them.
    rows["mesh"] = str(plan.topology)
    if plan.topology.pipeline > 1:
        layers = " | ".join(map(_layers, plan.stages))
        rows["pipeline"] = (
            f"{plan.schedule}, idle {costs.idle():.1%} of a step; layers by stage {layers}"
        )
    rows["precision"] = plan.precision
    rows["memory per device"] = f"about {sum(memory.values()) / GIB:.2f} GiB ({memory_by_category})"
    received = sum(traffic.values()) / GIB
    rows["received per step"] = (
        f"about {received:.3g} GiB per device ({received_by_axis or 'one rank'})"
    )
    if plan.accumulation > 1:
        when = "after each micro-batch" if plan.reduces_each else "once a step"
        rows["gradients"] = f"summed in {job.training.mixed_precision_reduce} {when}"
        whole = memory["gradients"] - memory["parameters"]
        if whole and plan.topology.pipeline == 1:
            rows["gradients"] += (
                f"; training.reduce_gradients = micro-batch takes {whole / GIB:.2f} GiB less"
            )
    if plan.milestones:
        # The weight and AdamW's two means of each parameter in float32. Muon's matrices have one mean.
        n = len(plan.milestones)
        size = 12 * plan.n_params / 1e9
        most = "at most " if job.optimizer.name == "Muon" else ""
        first = f"the first after step {min(plan.milestones):,}"
        rows["milestones"] = (
            f"{n} checkpoint(s) of {most}{size:.3g} GB, {n * size:.3g} GB in all; {first}"
        )

    # What computes the mixers. None: another machine's GPU.
    device = None if on_gpus else device_here()
    config, execution = plan.config, plan.execution
    dtype = torch.float32 if plan.precision == "float32" else torch.bfloat16
    for mixer in config.mixers:
        if mixer.kind == "interdomain":
            rows["scan"] = execution.backend
            if execution.backend == "auto":
                width = config.head_dim + mixer.normalize if mixer.query_readout else 0
                rows["scan"] = scan.resolve_backend(device, mixer.n_basis, width, dtype=dtype)[1]
        if mixer.kind in FIXED_STATE:
            rows["recurrence"] = fla_kernels.chosen(device, dtype, execution.backend)[1]
    rows["features"] = execution.features
    if execution.features == "auto":
        width = max(mixer.conv_width or 0 for mixer in config.mixers)
        rows["features"] = features.resolve_backend(device, config.head_dim, width, dtype=dtype)[1]
    return "\n".join(f"{name:>18}  {value}" for name, value in rows.items())


def cost_model(plan: RunPlan, job: JobConfig) -> CostModel:
    """The costs of a configuration's run."""
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
    """The size of a layer's state, for each kind of layer."""
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


def _layers(modules: tuple[str, ...]) -> str:
    """The first and the last layer of a stage: 0-1."""
    numbers = [name.removeprefix("layers.") for name in modules if name.startswith("layers.")]
    if not numbers:
        return "none"
    if len(numbers) == 1:
        return numbers[0]
    return f"{numbers[0]}-{numbers[-1]}"
