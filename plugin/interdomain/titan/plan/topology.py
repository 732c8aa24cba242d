"""The axes that a run's ranks are divided by, the layers of a pipeline's stages, and what the axes refuse."""

import copy
import itertools
import math
from typing import NamedTuple

import torch

from interdomain.model import ModelConfig
from interdomain.model.config import FIXED_STATE, state_shape
from interdomain.scan import CHUNK
from interdomain.scan.ops import runs_as

from ..host import generate_llm_fqn_per_model_part, logger
from ..settings.job_config import noting, refuse, value_of
from ..settings.schema import JobConfig, Parallelism
from .pipeline_order import MULTI_STAGE


class Topology(NamedTuple):
    """replicas x shards x context x tensor x pipeline = ranks."""

    replicas: int
    shards: int
    context: int  # ranks that share a sequence
    tensor: int  # ranks that share heads, feed-forward and vocabulary
    pipeline: int  # ranks that share the layers

    @property
    def data_ranks(self) -> int:
        """Groups of ranks that read samples of their own."""
        return self.replicas * self.shards

    @property
    def ranks(self) -> int:
        return math.prod(self)

    def __str__(self) -> str:
        """replicas 2 x tensor 4 = 8 ranks: the axes that divide anything."""
        axes = [f"{name} {degree}" for name, degree in self._asdict().items() if degree > 1]
        return f"{' x '.join(axes)} = {self.ranks} ranks" if axes else "1 rank"


def topology(parallel: Parallelism, world_size: int) -> Topology:
    """Raises: ValueError for degrees whose product is not the number of ranks."""
    left, words, degrees = world_size, "", {}
    for name in ("pipeline", "tensor", "context"):
        degree = degrees[name] = getattr(parallel, f"{name}_parallel_degree")
        if left % degree:
            raise ValueError(
                f"parallelism.{name}_parallel_degree = {degree} does not divide the {left} rank(s){words}: replicas x shards x "
                f"context x tensor x pipeline must be the number of ranks. Set one of {_divisors(left)}, or start a multiple "
                f"of {world_size // left * degree} ranks."
            )
        if degree > 1:
            words += f"{' and' if words else ' left by'} {name}_parallel_degree = {degree}"
        left //= degree
    replicas, shards = parallel.data_parallel_replicate_degree, parallel.data_parallel_shard_degree
    if replicas < 1 or left % replicas:
        raise ValueError(
            f"parallelism.data_parallel_replicate_degree = {replicas} does not divide the {left} rank(s){words}. Set one of "
            f"{_divisors(left)}."
        )
    if shards == -1:
        shards = left // replicas
    if replicas * shards != left:
        raise ValueError(
            f"parallelism.data_parallel_replicate_degree x data_parallel_shard_degree = {replicas} x {shards} must be "
            f"the number of ranks{words}: {left}. Set the shard degree to -1 to let it follow."
        )
    return Topology(replicas, shards, **degrees)


def pipeline_stages(parallel: Parallelism, n_layers: int) -> tuple[tuple[str, ...], ...]:
    """TorchTitan's module names of each virtual stage, as its `pipeline_llm` makes them; without a pipeline one has all.

    Raises: ValueError for layers that do not divide over the stages.
    """
    given = getattr(parallel, "module_fqns_per_model_part", None)  # of TorchTitan's own entry
    ranks, per_stage = parallel.pipeline_parallel_degree, parallel.pipeline_parallel_layers_per_stage
    first, last = parallel.pipeline_parallel_first_stage_less_layers, parallel.pipeline_parallel_last_stage_less_layers
    schedule = parallel.pipeline_parallel_schedule
    several, (whole,) = schedule in MULTI_STAGE, generate_llm_fqn_per_model_part(1, n_layers)
    # PyTorch keeps the weights of three stages gathered. Those of more it would gather anew in every micro-batch.
    allowed = [2 * ranks, 3 * ranks] if several else [ranks]
    if given is not None:
        if ranks == 1 or len(given) not in allowed or not all(given) or [*itertools.chain(*given)] != whole:
            raise ValueError(
                f"parallelism.module_fqns_per_model_part = {given} must name {', '.join(whole)}, each once and in this order, "
                f"in {' or '.join(map(str, allowed))} parts, and needs a pipeline. Or leave it out."
            )
        return tuple(map(tuple, given))
    if ranks == 1:
        return (tuple(whole),)
    weight, stages = n_layers + first + last, 2 * ranks if several else ranks
    words = (
        f"n_layers = {n_layers}, with {first} for the embedding (parallelism.pipeline_parallel_first_stage_less_layers) and "
        f"{last} for the head (pipeline_parallel_last_stage_less_layers)"
    )
    if per_stage is not None:
        stages = math.ceil(weight / per_stage)
        if stages not in allowed:
            raise ValueError(
                f"parallelism.pipeline_parallel_layers_per_stage = {per_stage} makes {stages} stages of {words}: "
                f"{schedule} on pipeline_parallel_degree = {ranks} ranks needs {' or '.join(map(str, allowed))}. Leave it "
                f"out for {2 * ranks if several else ranks}."
            )
    if max(first, last, 1) > weight // stages:
        raise ValueError(
            f"{words}, cannot be divided over {stages} stages ({schedule} on "
            f"parallelism.pipeline_parallel_degree = {ranks} ranks): at most {weight // max(first, last, 1)} are possible."
        )
    return tuple(map(tuple, generate_llm_fqn_per_model_part(stages, n_layers, first, last)))


def refuse_for_topology(job_config: JobConfig, config: ModelConfig, device: torch.device) -> None:
    """Raises: ValueError for a model, lengths or settings that the axes cannot divide."""
    parallel, training, validation = job_config.parallelism, job_config.training, job_config.validation
    context, tensor = parallel.context_parallel_degree, parallel.tensor_parallel_degree
    problems: list[str] = []
    lengths = {"training.seq_len": training.seq_len}
    if validation.enable:
        lengths["validation.seq_len"] = validation.seq_len
    if context > 1:
        with noting(problems):
            _refuse_for_context(job_config, config, lengths, device)
    if tensor > 1:
        with noting(problems):
            _refuse_for_tensor(tensor, context, config, lengths)
    if training.enable_cpu_offload and (tensor > 1 or parallel.pipeline_parallel_degree > 1):
        problems.append(
            "training.enable_cpu_offload with parallelism.tensor_parallel_degree or pipeline_parallel_degree above 1 is not "
            "tested. Turn it off or set those degrees to 1; data_parallel_shard_degree saves memory, too."
        )
    with noting(problems):
        refuse_for_pipelined_validation(job_config)
    refuse(problems)


def refuse_for_pipelined_validation(job_config: JobConfig) -> None:
    """Raises: ValueError for other micro-batches in validation than in training: a pipeline keeps their shapes."""
    training, validation, problems = job_config.training, job_config.validation, []
    if validation.enable and job_config.parallelism.pipeline_parallel_degree > 1:
        for name in ("local_batch_size", "seq_len"):
            if getattr(validation, name) != getattr(training, name):
                problems.append(
                    f"validation.{name} = {getattr(validation, name)} must be training.{name} = {getattr(training, name)} with "
                    "parallelism.pipeline_parallel_degree above 1: a pipeline keeps the shapes of its micro-batches."
                )
    refuse(problems)


def refuse_for_batch(job_config: JobConfig, mesh: Topology, global_batch: int) -> None:
    """Raises: ValueError for sequences of a step that do not divide over the ranks that read samples, or a number of
    micro-batches that the pipeline's schedule does not take."""
    local, schedule = job_config.training.local_batch_size, job_config.parallelism.pipeline_parallel_schedule
    ranks, batch = mesh.data_ranks, f"training.global_batch_size = {global_batch} sequences"
    wrong, micro_batches = global_batch % (local * ranks), global_batch // (local * ranks)
    if wrong:
        why = (
            f"{batch} does not divide over {ranks} data-parallel rank(s) of training.local_batch_size = {local}: it must be a "
            f"multiple of {local * ranks}."
        )
        if ranks > global_batch:
            why += f" A step of {global_batch} sequences feeds at most {global_batch} ranks."
    else:
        rounds = micro_batches // mesh.pipeline
        why = (
            f"{batch}, {local} at once on each of {ranks} data-parallel ranks, are {micro_batches} micro-batches. {schedule} on"
            f" parallelism.pipeline_parallel_degree = {mesh.pipeline} ranks takes "
            + (f"a multiple of {rounds}, its rounds." if schedule in MULTI_STAGE else f"{mesh.pipeline} or more.")
        )
    if wrong or not runs_with(schedule, mesh.pipeline, micro_batches):
        sequences, fits = _batch_that_divides(global_batch, local, ranks, schedule, mesh.pipeline)
        advice = f"--training.global_batch_size {sequences} " if sequences != global_batch else ""
        advice += f"--training.local_batch_size {fits}"
        if mesh.pipeline > 1 and job_config.validation.enable:
            advice += f" --validation.local_batch_size {fits}"
        raise ValueError(f"{why} These ranks can run {advice}.")


def refuse_for_reduction(job_config: JobConfig, micro_batches: int) -> None:
    """Raises: ValueError for gradients that would be summed over ranks or micro-batches otherwise than the settings say."""
    training, pipelined = job_config.training, job_config.parallelism.pipeline_parallel_degree > 1
    if pipelined and training.reduce_gradients == "micro-batch":
        raise ValueError(
            "training.reduce_gradients = micro-batch is not possible with parallelism.pipeline_parallel_degree above 1: "
            "PyTorch's pipeline sums gradients once a step. Set step."
        )
    if micro_batches > 1 and training.mixed_precision_reduce == "bf16" and training.reduce_gradients == "step":
        instead = "Set float32" if pipelined else "Set training.reduce_gradients = micro-batch, or float32"
        raise ValueError(
            f"training.mixed_precision_reduce = bf16 with {micro_batches} micro-batches and one reduction a step: FSDP2 would "
            f"add up the micro-batches in bf16, too. {instead}."
        )


def refuse_for_micro_batches(job_config: JobConfig, size: int) -> None:
    """Check micro-batches of `size` sequences, which are parts of a local batch in TorchTitan's trainer.

    Raises: ValueError for a local batch that cannot be divided into them, or a schedule that the model cannot run there.
    """
    degree = job_config.parallelism.pipeline_parallel_degree
    schedule = job_config.parallelism.pipeline_parallel_schedule
    local = job_config.training.local_batch_size
    if size < 1 or local % size or not runs_with(schedule, degree, local // size):
        raise ValueError(
            f"training.local_batch_size = {local} with parallelism.pipeline_parallel_microbatch_size = {size}: {schedule} on "
            f"pipeline_parallel_degree = {degree} ranks cannot divide a local batch so. Set training.local_batch_size to a "
            f"multiple of {max(size, 1) * degree}, or another micro-batch."
        )


def plan_of_local_batches(job_config: JobConfig, size: int, ranks: int) -> JobConfig:
    """A copy of the configuration for `make_plan`, whose micro-batches are local batches.

    In TorchTitan's trainer a pipeline divides a local batch into micro-batches of `size` sequences.

    Raises: ValueError for a batch that the pipeline cannot divide.
    """
    refuse_for_micro_batches(job_config, size)
    refuse_for_pipelined_validation(job_config)
    mesh = topology(job_config.parallelism, ranks)
    planned = copy.deepcopy(job_config)
    training = planned.training
    if training.global_batch_size < 0:
        training.global_batch_size = training.local_batch_size * mesh.data_ranks
    refuse_for_batch(job_config, mesh._replace(pipeline=1), training.global_batch_size)
    training.local_batch_size = size
    planned.validation.local_batch_size = size
    return planned


def runs_with(schedule: str, ranks: int, micro_batches: int) -> bool:
    """True if a schedule runs so many micro-batches, by the checks of PyTorch's classes."""
    if ranks == 1 or schedule == "GPipe":
        return True
    if schedule in MULTI_STAGE:
        return micro_batches % max(1, micro_batches // ranks) == 0
    return micro_batches >= ranks


def _batch_that_divides(least: int, local: int, ranks: int, schedule: str, pipeline: int) -> tuple[int, int]:
    """The smallest number of sequences per step, from `least` on, that these ranks can run, and the largest local batch."""
    return next(
        (each * ranks, n)
        for each in itertools.count(math.ceil(least / ranks))
        for n in range(min(local, each), 0, -1)
        if each % n == 0 and runs_with(schedule, pipeline, each // n)
    )


def _refuse_for_context(
    job_config: JobConfig, config: ModelConfig, lengths: dict[str, int], device: torch.device
) -> None:
    context, backend = job_config.parallelism.context_parallel_degree, value_of(job_config, "mixer.backend")
    degree = f"parallelism.context_parallel_degree = {context}"
    recurrent = [mixer for mixer in config.mixers if mixer.kind == "interdomain"]
    least = max(1, *(mixer.conv_past for mixer in config.mixers))
    for setting, length in lengths.items():
        if length % context or length < context * least:
            raise ValueError(
                f"{setting} = {length} tokens cannot be shared by {degree} ranks: every rank needs the same number, at least "
                f"{least} (for the convolution of the next rank). Set a multiple of {context} that is {context * least} or "
                "more, or another degree."
            )
    if recurrent and backend != "auto" and runs_as(backend, device) is None:
        raise ValueError(
            f"mixer.backend = {backend} cannot scan a sequence over {degree} ranks on {device.type}: allowed are auto, "
            "chunkwise and chunkwise-torch."
        )
    shard = job_config.training.seq_len // context
    if recurrent and shard % CHUNK:
        logger.warning("%d tokens per rank are no multiple of the scan's %d: its last chunk is short", shard, CHUNK)


def _refuse_for_tensor(tensor: int, context: int, config: ModelConfig, lengths: dict[str, int]) -> None:
    fixed = {mixer.kind: state_shape(mixer, config.dim).heads for mixer in config.mixers if mixer.kind in FIXED_STATE}
    others = [layer for layer in config.layers if layer.mixer.kind not in FIXED_STATE]
    sizes = {f"the heads of {kind}'s state (mixer.state_heads sets them)": heads for kind, heads in fixed.items()}
    if others:
        sizes |= {"n_heads": config.n_heads, "n_kv_heads": math.gcd(*(layer.n_kv_heads for layer in others))}
    sizes |= {
        "the feed-forward's width": config.ffn_hidden,
        "vocab_size (which may be larger than the tokenizer's)": config.vocab_size,
    }
    shared = f" / context_parallel_degree {context}" if context > 1 else ""
    sizes |= {f"{setting}{shared}": length // context for setting, length in lengths.items()}
    wrong = [f"{name} = {size}" for name, size in sizes.items() if size % tensor]
    if wrong:
        raise ValueError(
            f"parallelism.tensor_parallel_degree = {tensor} does not divide {', '.join(wrong)}. Set one of "
            f"{_divisors(math.gcd(*sizes.values()))}, or change those."
        )


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
