"""Rules that concern several settings at once. A rule about one setting is its `Bound` in `schema`.

Each check yields one message per problem: the values that were set, the values that are allowed,
and what to do. The decorator `raises_all` turns the messages of a check into one SettingsError.
`plan.run_plan.make_plan` calls the checks of our trainer.
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
from interdomain.scan.ops import runs_as
from interdomain.scan.triton_support import cannot_launch

from ..host import VERSION
from .problems import raises_all
from .schema import SETTINGS, JobConfig, Training

INTERLEAVED = "Interleaved1F1B"  # the schedule in which a rank has several stages


@raises_all
def check_combinations(job: JobConfig) -> Iterator[str]:
    """Checks rules that hold on any number of ranks and on any machine."""
    n_basis = job["mixer.n_basis"]
    if n_basis is not None and not reads_n_basis(vars(job.mixer)):
        yield (
            f"mixer.n_basis = {n_basis} is not possible: no layer reads it. It is not for softmax, "
            "and with mixer.state_heads not for gla, deltanet and gated-deltanet. Choose another "
            "condition, or leave it out."
        )

    # The optimizer and its learning rate.
    optimizer = job.optimizer
    if optimizer.name == "Muon" and job.training.enable_cpu_offload:
        yield (
            "optimizer.name = Muon with training.enable_cpu_offload: the CPU would compute "
            "Newton-Schulz of every matrix. Turn the offload off, or set AdamW."
        )
    lowest_peak = min(optimizer.lr, optimizer.ssm_lr)
    if job.lr_scheduler.min_lr > lowest_peak:
        yield (
            f"lr_scheduler.min_lr = {job.lr_scheduler.min_lr:g} is above the peak learning rate "
            f"{lowest_peak:g} (the smaller of optimizer.lr and optimizer.ssm_lr)."
        )

    # Checkpoints. A run that asks for one must not start from zero in silence.
    checkpoint = job.checkpoint
    if checkpoint.enable and job.comm.mode == "fake_backend":
        yield (
            "checkpoint.enable is not possible with comm.mode = fake_backend: the one process "
            "cannot save what the simulated ranks would hold. Set --checkpoint.no-enable."
        )
    if not checkpoint.enable:
        for setting in ("checkpoint.initial_load_path", "checkpoint.load_step"):
            if job[setting] != JobConfig()[setting]:
                yield (
                    f"{setting} has no effect while checkpoint.enable is off: nothing is loaded or "
                    f"saved. Turn it on (--checkpoint.enable), or leave {setting} out."
                )

    # What the installed packages lack.
    if job.metrics.enable_wandb and importlib.util.find_spec("wandb") is None:
        yield (
            "metrics.enable_wandb needs the package wandb, which is not installed: pip install "
            "wandb, or leave the setting out."
        )
    recompute = job.activation_checkpoint
    every_nth = recompute.mode == "selective" and recompute.selective_ac_option != "op"
    if VERSION == "0.3.0" and every_nth:
        yield (
            f"activation_checkpoint.selective_ac_option = {recompute.selective_ac_option}: TorchTitan "
            "0.3.0 has no checkpointing of every n-th block. Set op, or install TorchTitan 0.2.2."
        )


def reads_n_basis(mixer: Mapping[str, Any]) -> bool:
    """Returns whether any layer reads the setting n_basis.

    Softmax attention does not. With state_heads, mamba2 is the only baseline of fixed state that
    does.

    Args:
        mixer: The settings of the section [mixer], by name.
    """
    # The conditions whose mixers do not read it.
    unread = {"softmax"}
    if mixer.get("state_heads"):
        unread |= {*FIXED_STATE} - {"mamba2"}
    conditions = mixer.get("layers") or [mixer.get("condition", "interdomain")]
    return not unread.issuperset(conditions)


@raises_all
def check_device(job: JobConfig) -> Iterator[str]:
    """Checks settings that need a GPU, and that this machine can compile kernels for its GPU."""
    if not torch.accelerator.is_available():
        needing_gpu = ["training.enable_cpu_offload"]
        # The profiler of TorchTitan 0.2.2 also records events of a GPU.
        if VERSION == "0.2.2":
            needing_gpu.append("profiling.enable_profiling")
        for setting in needing_gpu:
            if job[setting]:
                yield (
                    f"{setting} needs a GPU, and this machine has none. Turn it off to run on the CPU."
                )
        return

    is_plain = job["mixer.features"] == "torch" and job["mixer.backend"] == "chunkwise-torch"
    needs_kernels = job.compile.enable or not is_plain
    if torch.cuda.is_available() and needs_kernels:
        problem = cannot_launch()
        if problem:
            yield (
                f"{problem}. Without kernels, much slower: --compile.no-enable "
                "--mixer.backend chunkwise-torch --mixer.features torch."
            )


@raises_all
def check_topology(job: JobConfig, config: ModelConfig, device: torch.device) -> Iterator[str]:
    """Checks that the model and the sequences can be divided among the ranks.

    The checks concern context and tensor parallelism, CPU offload beside tensor or pipeline
    parallelism, and the shapes of validation in a pipeline, which must be those of training.

    Args:
        job: The configuration of the run.
        config: The model.
        device: A device of the type that the run computes on.

    Raises:
        SettingsError: They cannot. The message has all problems.
    """
    parallel = job.parallelism
    lengths = {"training.seq_len": job.training.seq_len}
    if job.validation.enable:
        lengths["validation.seq_len"] = job.validation.seq_len
    if parallel.context_parallel_degree > 1:
        yield from _check_context(job, config, lengths, device)
    if parallel.tensor_parallel_degree > 1:
        yield from _check_tensor(job, config, lengths)
    divides_model = parallel.tensor_parallel_degree > 1 or parallel.pipeline_parallel_degree > 1
    if job.training.enable_cpu_offload and divides_model:
        yield (
            "training.enable_cpu_offload with parallelism.tensor_parallel_degree or "
            "pipeline_parallel_degree above 1 is not tested. Turn it off or set those degrees to 1; "
            "data_parallel_shard_degree saves memory, too."
        )


def _check_context(
    job: JobConfig,
    config: ModelConfig,
    lengths: dict[str, int],
    device: torch.device,
) -> Iterator[str]:
    """Yields problems of context parallelism.

    Args:
        job: The configuration of the run.
        config: The model.
        lengths: Tokens of a sequence, by setting.
        device: A device of the type that the run computes on.
    """
    context = job.parallelism.context_parallel_degree
    degree = f"parallelism.context_parallel_degree = {context}"
    # A rank sends the last inputs of its convolutions to the next rank, so it needs as many tokens.
    past = max(1, *(mixer.conv_past for mixer in config.mixers))
    for setting, length in lengths.items():
        if length % context or length < context * past:
            yield (
                f"{setting} = {length} tokens cannot be shared by {degree} ranks: every rank needs "
                f"the same number, at least {past} (for the convolution of the next rank). Set a "
                f"multiple of {context} that is {context * past} or more, or another degree."
            )
            return

    # Only some backends of the scan pass a state from rank to rank.
    if not any(mixer.kind == "interdomain" for mixer in config.mixers):
        return
    backend = job["mixer.backend"]
    if backend != "auto" and runs_as(backend, device) is None:
        yield (
            f"mixer.backend = {backend} cannot scan a sequence over {degree} ranks on {device.type}: "
            "allowed are auto, chunkwise and chunkwise-torch."
        )


def _check_tensor(job: JobConfig, config: ModelConfig, lengths: dict[str, int]) -> Iterator[str]:
    """Yields problems of tensor parallelism.

    Args:
        job: The configuration of the run.
        config: The model.
        lengths: Tokens of a sequence, by setting.
    """
    tensor = job.parallelism.tensor_parallel_degree
    context = job.parallelism.context_parallel_degree
    # Numbers that the ranks divide, by the name that an error gives them. If layers differ, the
    # degree must divide the number of each, which is to divide their greatest common divisor.
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
        yield (
            f"parallelism.tensor_parallel_degree = {tensor} does not divide {', '.join(wrong)}. Set "
            "a degree that divides them, or change them."
        )


@raises_all
def check_batch(
    job: JobConfig, batch: Training, data_ranks: int, micro_batch: int | None = None
) -> Iterator[str]:
    """Checks that a step's sequences divide over ranks and over a pipeline's micro-batches.

    Args:
        job: The configuration of the run, as the user wrote it.
        batch: The section [training] with the sizes of the batch on these ranks (`with_batch`).
        data_ranks: Groups of ranks that read samples of their own.
        micro_batch: Sequences of the micro-batches into which TorchTitan's pipeline divides a local
            batch. None: a local batch is a micro-batch.

    Raises:
        SettingsError: They do not divide.
    """
    ranks = job.parallelism.pipeline_parallel_degree
    schedule = job.parallelism.pipeline_parallel_schedule
    local_batch = batch.local_batch_size
    per_pass = local_batch * data_ranks
    if batch.global_batch_size % per_pass:
        yield (
            f"training.global_batch_size = {job.training.global_batch_size} does not divide: "
            f"{data_ranks} data-parallel rank(s) read {local_batch} sequence(s) each "
            f"(training.local_batch_size). Set a multiple of {per_pass}, a smaller "
            "training.local_batch_size, or another number of ranks; or let several ranks share each "
            "sequence (parallelism.context_parallel_degree)."
        )
        return
    if micro_batch is not None and (micro_batch < 1 or local_batch % micro_batch):
        yield (
            f"parallelism.pipeline_parallel_microbatch_size = {micro_batch} must divide the "
            f"{local_batch} sequence(s) that a rank reads at once (training.local_batch_size)."
        )
        return

    # Our pipeline runs once a step. TorchTitan's runs once for each local batch.
    micro_batches = batch.global_batch_size // per_pass
    if micro_batch is not None:
        micro_batches = local_batch // micro_batch
    if not runs_with(schedule, ranks, micro_batches):
        yield (
            f"{schedule} on parallelism.pipeline_parallel_degree = {ranks} ranks cannot run "
            f"{micro_batches} micro-batch(es). Set training.global_batch_size or "
            "training.local_batch_size (TorchTitan's trainer: or "
            "parallelism.pipeline_parallel_microbatch_size), so that their number is a multiple of "
            f"{ranks}."
        )

    # A pipeline keeps the shapes of its micro-batches.
    shape = (local_batch, job.training.seq_len)
    same_shape = (job.validation.local_batch_size, job.validation.seq_len) == shape
    if job.validation.enable and ranks > 1 and not same_shape:
        yield (
            "with parallelism.pipeline_parallel_degree above 1, validation.local_batch_size and "
            f"validation.seq_len must be {shape[0]} and {shape[1]}, as in training on these ranks."
        )


@raises_all
def check_reduction(training: Training, micro_batches: int, pipelined: bool) -> Iterator[str]:
    """Checks when and in which precision gradients are summed over ranks and micro-batches.

    Args:
        training: Settings [training].
        micro_batches: Micro-batches of a step on each rank.
        pipelined: Whether several ranks share the layers.
    """
    reduces_once = training.reduce_gradients == "step"
    if pipelined and not reduces_once:
        yield (
            "training.reduce_gradients = micro-batch is not possible with "
            "parallelism.pipeline_parallel_degree above 1: PyTorch's pipeline sums gradients once a "
            "step. Set step."
        )
    in_bf16 = training.mixed_precision_reduce == "bf16"
    if in_bf16 and reduces_once and micro_batches > 1:
        yield (
            f"training.mixed_precision_reduce = bf16 with {micro_batches} micro-batches and one "
            "reduction a step: FSDP2 would add up the micro-batches in bf16, too. Set "
            "training.reduce_gradients = micro-batch (not with a pipeline), or float32."
        )


@raises_all
def check_schedule(job: JobConfig, steps: int) -> Iterator[str]:
    """Checks that the learning rate is not 0 before the run's last step.

    Args:
        job: The configuration of the run.
        steps: Steps of the run.
    """
    schedule = job.lr_scheduler
    total = schedule.total_steps or steps
    if total < steps and not schedule.min_lr and schedule.decay_ratio:
        yield (
            f"the schedule ends at lr_scheduler.total_steps = {total:,}, before the run's last step "
            f"{steps:,}, and there is no floor: the learning rate would be 0 from there on. Set "
            "lr_scheduler.min_lr, or total_steps to the number of steps or more, or leave it out."
        )


def runs_with(schedule: str, ranks: int, micro_batches: int) -> bool:
    """Returns whether a pipeline's schedule can run this number of micro-batches.

    The conditions are those of PyTorch's schedule classes.

    Args:
        schedule: Name of the schedule.
        ranks: Ranks of the pipeline.
        micro_batches: Micro-batches of a step.
    """
    if ranks == 1 or schedule == "GPipe":
        return True
    if schedule == INTERLEAVED:
        rounds = max(1, micro_batches // ranks)
        return micro_batches % rounds == 0
    return micro_batches >= ranks


@raises_all
def check_for_torchtitan(job: JobConfig) -> Iterator[str]:
    """Checks that TorchTitan's own trainer honours every setting that differs from its default.

    Args:
        job: The configuration of the run.
    """
    defaults = JobConfig()
    for setting, declared in SETTINGS.items():
        if declared.torchtitan and job[setting] != defaults[setting]:
            yield (
                f"{setting} = {job[setting]} has no effect in this run: TorchTitan's own trainer "
                f"{declared.torchtitan}. Leave it out, or start our trainer: ./launch.sh, or with "
                "TorchTitan 0.3 --module interdomain.titan.trainer."
            )

    # Positions of documents must reach every stage and every piece of a sequence.
    pipeline = job.parallelism.pipeline_parallel_degree > 1
    context = job.parallelism.context_parallel_degree > 1
    if VERSION == "0.2.2" and job.data.reset_state_at_documents and (pipeline or context):
        yield (
            "data.reset_state_at_documents with pipeline_parallel_degree or context_parallel_degree "
            "above 1: TorchTitan's trainer gives positions only to the first stage, and its own to "
            "context parallelism. Start with ./launch.sh."
        )

    # TorchTitan's trainer locks no folder, and its checkpoints have no record. Outside of the run's
    # folder nothing would tell the checkpoints of two runs apart.
    run = Path(os.path.abspath(job.job.dump_folder))
    folder = Path(os.path.abspath(run / job.checkpoint.folder))
    if job.checkpoint.enable and not folder.is_relative_to(run):
        yield (
            f"checkpoint.folder = {job.checkpoint.folder} leads out of job.dump_folder = "
            f"{job.job.dump_folder}. Under TorchTitan's own trainer the checkpoints must lie within "
            "the run's folder, where the run's record is. Set another job.dump_folder, or start with "
            "./launch.sh."
        )
