"""Rules that concern several settings at once. A rule about one setting is its `Bound` in `schema`.

Each check raises a SettingsError with all problems that it finds: what was given, what is allowed, what to do.
"""

import importlib.util
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from interdomain.model import ModelConfig
from interdomain.model.config import FIXED_STATE, state_shape
from interdomain.scan import CHUNK
from interdomain.scan.ops import runs_as
from interdomain.scan.triton_support import cannot_launch

from ..host import VERSION, logger
from .problems import raises_all
from .schema import SETTINGS, JobConfig, Training

MULTI_STAGE = "Interleaved1F1B"  # the schedule under which a rank has several stages


@raises_all
def check_combinations(job: JobConfig) -> Iterator[str]:
    """Checks the settings by themselves, on any number of ranks of any machine."""
    defaults = JobConfig()
    n_basis = job["mixer.n_basis"]
    if n_basis is not None and not reads_n_basis(vars(job.mixer)):
        yield (
            f"mixer.n_basis = {n_basis} is not possible: no layer reads it. It is not for softmax, and with mixer.state_heads "
            "not for gla, deltanet and gated-deltanet. Choose another condition, or leave it out."
        )

    # The optimizer and its learning rate.
    optimizer = job.optimizer
    if optimizer.name != "Muon" and optimizer.momentum != defaults.optimizer.momentum:
        yield (
            f"optimizer.momentum = {optimizer.momentum} has no effect with {optimizer.name}, which has beta1. Set "
            "optimizer.name = Muon, or leave it out."
        )
    if optimizer.name == "Muon" and job.training.enable_cpu_offload:
        yield (
            "optimizer.name = Muon with training.enable_cpu_offload: the CPU would compute Newton-Schulz of every matrix. Turn "
            "the offload off, or set AdamW."
        )
    lowest_peak = min(optimizer.lr, optimizer.ssm_lr)
    if job.lr_scheduler.min_lr > lowest_peak:
        yield (
            f"lr_scheduler.min_lr = {job.lr_scheduler.min_lr:g} is above the peak learning rate {lowest_peak:g} "
            "(the smaller of optimizer.lr and optimizer.ssm_lr)."
        )

    # Checkpoints.
    checkpoint = job.checkpoint
    if checkpoint.enable and job.comm.mode == "fake_backend":
        yield (
            "checkpoint.enable is not possible with comm.mode = fake_backend: one process has not what the others would save. "
            "Set --checkpoint.no-enable."
        )
    for name in ("initial_load_path", "load_step", "keep_every", "keep_every_tokens", "keep_steps"):
        setting = f"checkpoint.{name}"
        # TorchTitan would pass over it.
        if not checkpoint.enable and job[setting] != defaults[setting]:
            yield (
                f"{setting} has no effect while checkpoint.enable is off: nothing is loaded or saved. Turn it on "
                f"(--checkpoint.enable), or leave {setting} out."
            )
    if checkpoint.exclude_from_loading and (
        not checkpoint.initial_load_path or checkpoint.initial_load_model_only
    ):
        yield (
            "checkpoint.exclude_from_loading is for a run that starts from another run's checkpoint. Set "
            "checkpoint.initial_load_path and --checkpoint.no-initial_load_model_only, or leave it out."
        )

    # Other features.
    if job.metrics.enable_wandb and importlib.util.find_spec("wandb") is None:
        yield (
            "metrics.enable_wandb needs the package wandb, which is not installed: pip install wandb, or leave the setting out."
        )
    if job.compile.enable and not job.compile.components:
        yield "compile.enable has no effect while compile.components is empty. Set model, loss or both, or turn it off."
    recomputed = job.activation_checkpoint
    if (
        VERSION == "0.3.0"
        and recomputed.mode == "selective"
        and recomputed.selective_ac_option != "op"
    ):
        yield (
            f"activation_checkpoint.selective_ac_option = {recomputed.selective_ac_option}: TorchTitan 0.3.0 has no "
            "checkpointing of every n-th block. Set op, or install TorchTitan 0.2.2."
        )


def reads_n_basis(mixer: Mapping[str, Any]) -> bool:
    """True if a layer of the section [mixer] reads n_basis.

    Softmax attention does not. With state_heads, mamba2 is the only one of the fixed-state baselines that does.
    """
    unread = {"softmax"}
    if mixer.get("state_heads"):
        unread |= {*FIXED_STATE} - {"mamba2"}
    conditions = mixer.get("layers") or [mixer.get("condition", "interdomain")]
    return not unread.issuperset(conditions)


@raises_all
def check_device(job: JobConfig) -> Iterator[str]:
    """Checks settings against this machine: what only a GPU can do, and kernels that cannot be compiled for its GPU."""
    if not torch.accelerator.is_available():
        needing_gpu = ["training.enable_cpu_offload"]
        if VERSION == "0.2.2":  # its profiler also asks for a GPU's events
            needing_gpu.append("profiling.enable_profiling")
        for setting in needing_gpu:
            if job[setting]:
                yield f"{setting} needs a GPU, and this machine has none. Turn it off to run on the CPU."
        return
    is_plain = job["mixer.features"] == "torch" and job["mixer.backend"] == "chunkwise-torch"
    needs_kernels = torch.cuda.is_available() and (job.compile.enable or not is_plain)
    if needs_kernels and (problem := cannot_launch()):
        yield (
            f"{problem}. Without kernels, much slower: --compile.no-enable --mixer.backend chunkwise-torch "
            "--mixer.features torch."
        )


@raises_all
def check_topology(job: JobConfig, config: ModelConfig, device: torch.device) -> Iterator[str]:
    """Checks that the axes divide the model and the lengths, and that the other settings are possible with them."""
    parallel = job.parallelism
    tensor = parallel.tensor_parallel_degree
    lengths = {"training.seq_len": job.training.seq_len}
    if job.validation.enable:
        lengths["validation.seq_len"] = job.validation.seq_len
    if parallel.context_parallel_degree > 1:
        yield from _check_context(job, config, lengths, device)
    if tensor > 1:
        yield from _check_tensor(tensor, parallel.context_parallel_degree, config, lengths)
    if job.training.enable_cpu_offload and (tensor > 1 or parallel.pipeline_parallel_degree > 1):
        yield (
            "training.enable_cpu_offload with parallelism.tensor_parallel_degree or pipeline_parallel_degree above 1 is not "
            "tested. Turn it off or set those degrees to 1; data_parallel_shard_degree saves memory, too."
        )
    yield from _check_pipelined_validation(job)


def _check_context(
    job: JobConfig, config: ModelConfig, lengths: dict[str, int], device: torch.device
) -> Iterator[str]:
    context, backend = job.parallelism.context_parallel_degree, job["mixer.backend"]
    degree = f"parallelism.context_parallel_degree = {context}"
    past = max(1, *(mixer.conv_past for mixer in config.mixers))
    for setting, length in lengths.items():
        if length % context or length < context * past:
            yield (
                f"{setting} = {length} tokens cannot be shared by {degree} ranks: every rank needs the same number, at least "
                f"{past} (for the convolution of the next rank). Set a multiple of {context} that is {context * past} or more, "
                "or another degree."
            )
            return
    if not any(mixer.kind == "interdomain" for mixer in config.mixers):
        return
    if backend != "auto" and runs_as(backend, device) is None:
        yield (
            f"mixer.backend = {backend} cannot scan a sequence over {degree} ranks on {device.type}: allowed are auto, "
            "chunkwise and chunkwise-torch."
        )
    tokens = job.training.seq_len // context
    if tokens % CHUNK:
        logger.warning(
            "%d tokens per rank are no multiple of the scan's %d: its last chunk is short",
            tokens,
            CHUNK,
        )


def _check_tensor(
    tensor: int, context: int, config: ModelConfig, lengths: dict[str, int]
) -> Iterator[str]:
    sizes = {
        "the feed-forward's width": config.ffn_hidden,
        "vocab_size (which may be larger than the tokenizer's)": config.vocab_size,
    }
    for layer in config.layers:
        if layer.mixer.kind in FIXED_STATE:
            name = f"the heads of {layer.mixer.kind}'s state (mixer.state_heads sets them)"
            heads = state_shape(layer.mixer, config.dim).heads
            sizes[name] = math.gcd(heads, sizes.get(name, 0))
        else:
            sizes["n_heads"] = config.n_heads
            sizes["n_kv_heads"] = math.gcd(layer.n_kv_heads, sizes.get("n_kv_heads", 0))
    for setting, length in lengths.items():
        name = setting if context == 1 else f"{setting} / context_parallel_degree {context}"
        sizes[name] = length // context
    wrong = [f"{name} = {size}" for name, size in sizes.items() if size % tensor]
    if wrong:
        common = math.gcd(*sizes.values())
        divisors = [str(n) for n in range(1, common + 1) if common % n == 0]
        yield (
            f"parallelism.tensor_parallel_degree = {tensor} does not divide {', '.join(wrong)}. Set one of "
            f"{', '.join(divisors)}, or change those."
        )


def _check_pipelined_validation(job: JobConfig) -> Iterator[str]:
    """A pipeline keeps the shapes of its micro-batches: those of validation must be those of training."""
    if not job.validation.enable or job.parallelism.pipeline_parallel_degree == 1:
        return
    for name in ("local_batch_size", "seq_len"):
        training, validation = job[f"training.{name}"], job[f"validation.{name}"]
        if training != validation:
            yield (
                f"validation.{name} = {validation} must be training.{name} = {training} with "
                "parallelism.pipeline_parallel_degree above 1: a pipeline keeps the shapes of its micro-batches."
            )


def check_batch(job: JobConfig, ranks: int, pipeline: int, global_batch: int) -> None:
    """Raises: ValueError for sequences of a step that do not divide over the ranks that read samples, or a number of
    micro-batches that the pipeline's schedule does not take. It says which numbers these ranks can run."""
    local, schedule = job.training.local_batch_size, job.parallelism.pipeline_parallel_schedule
    problem = f"training.global_batch_size = {global_batch} sequences"
    micro_batches = global_batch // (local * ranks)
    if global_batch % (local * ranks):
        problem += (
            f" does not divide over {ranks} data-parallel rank(s) of training.local_batch_size = {local}: it must be a "
            f"multiple of {local * ranks}."
        )
        if ranks > global_batch:
            problem += f" A step of {global_batch} sequences feeds at most {global_batch} ranks."
    elif not runs_with(schedule, pipeline, micro_batches):
        needed = f"{pipeline} or more"
        if schedule == MULTI_STAGE:
            needed = f"a multiple of {micro_batches // pipeline}, its rounds"
        problem += (
            f", {local} at once on each of {ranks} data-parallel ranks, are {micro_batches} micro-batches. {schedule} on "
            f"parallelism.pipeline_parallel_degree = {pipeline} ranks takes {needed}."
        )
    else:
        return

    # The smallest step that these ranks can run, from this one on, and the largest local batch for it.
    sequences = math.ceil(global_batch / ranks)
    while not (fits := _local_batches(sequences, local, schedule, pipeline)):
        sequences += 1
    advice = []
    if sequences * ranks != global_batch:
        advice.append(f"--training.global_batch_size {sequences * ranks}")
    advice.append(f"--training.local_batch_size {max(fits)}")
    if pipeline > 1 and job.validation.enable:
        advice.append(f"--validation.local_batch_size {max(fits)}")
    raise ValueError(f"{problem} These ranks can run {' '.join(advice)}.")


def _local_batches(sequences: int, most: int, schedule: str, pipeline: int) -> list[int]:
    """Local batches, up to a size, that a rank's sequences of a step divide into."""
    sizes = range(1, min(most, sequences) + 1)
    return [
        n for n in sizes if sequences % n == 0 and runs_with(schedule, pipeline, sequences // n)
    ]


@raises_all
def check_reduction(training: Training, micro_batches: int, pipelined: bool) -> Iterator[str]:
    """Checks that gradients can be summed over ranks and micro-batches as the settings say."""
    if pipelined and training.reduce_gradients == "micro-batch":
        yield (
            "training.reduce_gradients = micro-batch is not possible with parallelism.pipeline_parallel_degree above 1: "
            "PyTorch's pipeline sums gradients once a step. Set step."
        )
    if (
        micro_batches > 1
        and training.mixed_precision_reduce == "bf16"
        and training.reduce_gradients == "step"
    ):
        instead = (
            "Set float32"
            if pipelined
            else "Set training.reduce_gradients = micro-batch, or float32"
        )
        yield (
            f"training.mixed_precision_reduce = bf16 with {micro_batches} micro-batches and one reduction a step: FSDP2 would "
            f"add up the micro-batches in bf16, too. {instead}."
        )


@raises_all
def check_micro_batches(job: JobConfig, size: int) -> Iterator[str]:
    """Checks micro-batches of `size` sequences, which are parts of a local batch in TorchTitan's trainer."""
    degree = job.parallelism.pipeline_parallel_degree
    schedule = job.parallelism.pipeline_parallel_schedule
    local = job.training.local_batch_size
    if size < 1 or local % size or not runs_with(schedule, degree, local // size):
        yield (
            f"training.local_batch_size = {local} with parallelism.pipeline_parallel_microbatch_size = {size}: {schedule} on "
            f"pipeline_parallel_degree = {degree} ranks cannot divide a local batch so. Set training.local_batch_size to a "
            f"multiple of {max(size, 1) * degree}, or another micro-batch."
        )
        return
    yield from _check_pipelined_validation(job)


@raises_all
def check_schedule(job: JobConfig, steps: int) -> Iterator[str]:
    """Checks that the schedule does not end before the run, at a learning rate of 0."""
    schedule = job.lr_scheduler
    total = schedule.total_steps or steps
    if total < steps and not schedule.min_lr and schedule.decay_ratio:
        yield (
            f"the schedule ends at lr_scheduler.total_steps = {total:,}, before the run's last step {steps:,}, and there is no "
            "floor: the learning rate would be 0 from there on. Set lr_scheduler.min_lr, or total_steps to the number of "
            "steps or more, or leave it out."
        )


def runs_with(schedule: str, ranks: int, micro_batches: int) -> bool:
    """True if a schedule runs so many micro-batches, by the checks of PyTorch's classes."""
    if ranks == 1 or schedule == "GPipe":
        return True
    if schedule == MULTI_STAGE:
        return micro_batches % max(1, micro_batches // ranks) == 0
    return micro_batches >= ranks


@raises_all
def check_for_torchtitan(job: JobConfig) -> Iterator[str]:
    """Checks what TorchTitan's own trainer does not do, or does otherwise than the model needs."""
    defaults = JobConfig()
    for setting, declared in SETTINGS.items():
        if declared.torchtitan and job[setting] != defaults[setting]:
            yield (
                f"{setting} = {job[setting]} has no effect in this run: TorchTitan's own trainer {declared.torchtitan}. Leave "
                "it out, or start our trainer: ./launch.sh, or with TorchTitan 0.3 --module interdomain.titan.trainer."
            )
    pipeline = job.parallelism.pipeline_parallel_degree > 1
    context = job.parallelism.context_parallel_degree > 1
    if VERSION == "0.2.2" and job.data.reset_state_at_documents and (pipeline or context):
        yield (
            "data.reset_state_at_documents with pipeline_parallel_degree or context_parallel_degree above 1: TorchTitan's "
            "trainer gives positions to the first stage alone, and its own to context parallelism. Start with ./launch.sh."
        )
    # TorchTitan's trainer locks no folder and its checkpoints have no record: nothing would tell two runs elsewhere apart.
    run = Path(os.path.abspath(job.job.dump_folder))
    folder = Path(os.path.abspath(run / job.checkpoint.folder))
    if job.checkpoint.enable and not folder.is_relative_to(run):
        yield (
            f"checkpoint.folder = {job.checkpoint.folder} leads out of job.dump_folder = "
            f"{job.job.dump_folder}. Under TorchTitan's own trainer the checkpoints must lie within the run's folder, "
            f"where the run's record is. Set another job.dump_folder, or make a link there (ln -s {folder} {run}/checkpoint) "
            "and leave checkpoint.folder out, or start with ./launch.sh."
        )
