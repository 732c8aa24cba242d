"""The axes that a run's ranks are divided by, the layers of a pipeline's stages, and what the axes refuse."""

import copy
import math
from typing import NamedTuple

import torch

from interdomain.model import ModelConfig
from interdomain.model.config import FIXED_STATE, state_shape
from interdomain.scan import CHUNK
from interdomain.scan.ops import runs_as

from ..host import generate_llm_fqn_per_model_part, logger
from ..settings.job_config import noting, refuse, value_of
from ..settings.schema import JobConfig, Parallelism, Training

MULTI_STAGE = "Interleaved1F1B"  # the schedule under which a rank has several stages


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
    """The axes of a run on `world_size` ranks.

    Raises: ValueError for degrees whose product is not the number of ranks.
    """
    mesh = Topology(
        replicas=parallel.data_parallel_replicate_degree,
        shards=parallel.data_parallel_shard_degree,
        context=parallel.context_parallel_degree,
        tensor=parallel.tensor_parallel_degree,
        pipeline=parallel.pipeline_parallel_degree,
    )
    others = mesh._replace(shards=1).ranks
    if mesh.shards == -1 and others > 0:  # all ranks that the other axes leave
        mesh = mesh._replace(shards=world_size // others)
    if mesh.ranks != world_size or min(mesh) < 1:
        product = " x ".join(f"{name} {degree}" for name, degree in mesh._asdict().items())
        raise ValueError(
            f"the degrees of [parallelism] must multiply to the number of ranks, {world_size}: {product} is {mesh.ranks}. Set "
            f"parallelism.data_parallel_shard_degree to -1 to let it follow, and the others to divisors of {world_size}. "
            f"Or start a multiple of {others} ranks."
        )
    return mesh


def pipeline_stages(parallel: Parallelism, n_layers: int) -> tuple[tuple[str, ...], ...]:
    """TorchTitan's module names of each stage, as its `pipeline_llm` makes them. Without a pipeline one stage has all.

    Raises: ValueError for layers that do not divide over the stages.
    """
    ranks, schedule = parallel.pipeline_parallel_degree, parallel.pipeline_parallel_schedule
    everything = generate_llm_fqn_per_model_part(1, n_layers)[0]
    # PyTorch keeps the weights of three stages gathered. Those of more it would gather anew in every micro-batch.
    allowed = [2 * ranks, 3 * ranks] if schedule == MULTI_STAGE else [ranks]
    in_words = " or ".join(map(str, allowed))

    given = getattr(parallel, "module_fqns_per_model_part", None)  # of TorchTitan's own entry
    if given is not None:
        named = [name for stage in given for name in stage]
        if ranks == 1 or len(given) not in allowed or not all(given) or named != everything:
            raise ValueError(
                f"parallelism.module_fqns_per_model_part = {given} must name {', '.join(everything)}, each once and in this "
                f"order, in {in_words} parts, and needs a pipeline. Or leave it out."
            )
        return tuple(tuple(stage) for stage in given)
    if ranks == 1:
        return (tuple(everything),)

    first = parallel.pipeline_parallel_first_stage_less_layers
    last = parallel.pipeline_parallel_last_stage_less_layers
    layers = (
        f"n_layers = {n_layers}, with {first} for the embedding (parallelism.pipeline_parallel_first_stage_less_layers) and "
        f"{last} for the head (pipeline_parallel_last_stage_less_layers)"
    )
    weight, stages = n_layers + first + last, allowed[0]
    if per_stage := parallel.pipeline_parallel_layers_per_stage:
        stages = math.ceil(weight / per_stage)
        if stages not in allowed:
            raise ValueError(
                f"parallelism.pipeline_parallel_layers_per_stage = {per_stage} makes {stages} stages of {layers}: "
                f"{schedule} on pipeline_parallel_degree = {ranks} ranks needs {in_words}. Leave it out for {allowed[0]}."
            )
    most = weight // max(first, last, 1)
    if stages > most:
        raise ValueError(
            f"{layers}, cannot be divided over {stages} stages ({schedule} on parallelism.pipeline_parallel_degree = {ranks} "
            f"ranks): at most {most} are possible."
        )
    return tuple(tuple(stage) for stage in generate_llm_fqn_per_model_part(stages, n_layers, first, last))


def stages_of(rank: int, ranks: int, stages: int) -> range:
    """The stages of a rank of the pipeline, of `stages` in all."""
    return range(rank, stages, ranks)


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
    if not job_config.validation.enable or job_config.parallelism.pipeline_parallel_degree == 1:
        return
    problems = []
    for name in ("local_batch_size", "seq_len"):
        there, here = getattr(job_config.training, name), getattr(job_config.validation, name)
        if here != there:
            problems.append(
                f"validation.{name} = {here} must be training.{name} = {there} with parallelism.pipeline_parallel_degree above "
                "1: a pipeline keeps the shapes of its micro-batches."
            )
    refuse(problems)


def refuse_for_batch(job_config: JobConfig, mesh: Topology, global_batch: int) -> None:
    """Raises: ValueError for sequences of a step that do not divide over the ranks that read samples, or a number of
    micro-batches that the pipeline's schedule does not take. It says which numbers these ranks can run."""
    local, schedule = job_config.training.local_batch_size, job_config.parallelism.pipeline_parallel_schedule
    ranks, pipeline = mesh.data_ranks, mesh.pipeline
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
    if pipeline > 1 and job_config.validation.enable:
        advice.append(f"--validation.local_batch_size {max(fits)}")
    raise ValueError(f"{problem} These ranks can run {' '.join(advice)}.")


def _local_batches(sequences: int, most: int, schedule: str, pipeline: int) -> list[int]:
    """Local batches, up to a size, that a rank's sequences of a step divide into."""
    sizes = range(1, min(most, sequences) + 1)
    return [n for n in sizes if sequences % n == 0 and runs_with(schedule, pipeline, sequences // n)]


def refuse_for_reduction(training: Training, micro_batches: int, pipelined: bool) -> None:
    """Raises: ValueError for gradients that would be summed over ranks or micro-batches otherwise than the settings say."""
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
    if schedule == MULTI_STAGE:
        return micro_batches % max(1, micro_batches // ranks) == 0
    return micro_batches >= ranks


def _refuse_for_context(
    job_config: JobConfig, config: ModelConfig, lengths: dict[str, int], device: torch.device
) -> None:
    context, backend = job_config.parallelism.context_parallel_degree, value_of(job_config, "mixer.backend")
    degree = f"parallelism.context_parallel_degree = {context}"
    least = context * max(1, *(mixer.conv_past for mixer in config.mixers))
    for setting, length in lengths.items():
        if length % context or length < least:
            raise ValueError(
                f"{setting} = {length} tokens cannot be shared by {degree} ranks: every rank needs the same number, at least "
                f"{least // context} (for the convolution of the next rank). Set a multiple of {context} that is {least} or "
                "more, or another degree."
            )
    if not any(mixer.kind == "interdomain" for mixer in config.mixers):
        return
    if backend != "auto" and runs_as(backend, device) is None:
        raise ValueError(
            f"mixer.backend = {backend} cannot scan a sequence over {degree} ranks on {device.type}: allowed are auto, "
            "chunkwise and chunkwise-torch."
        )
    shard = job_config.training.seq_len // context
    if shard % CHUNK:
        logger.warning("%d tokens per rank are no multiple of the scan's %d: its last chunk is short", shard, CHUNK)


def _refuse_for_tensor(tensor: int, context: int, config: ModelConfig, lengths: dict[str, int]) -> None:
    sizes = {
        "the feed-forward's width": config.ffn_hidden,
        "vocab_size (which may be larger than the tokenizer's)": config.vocab_size,
    }
    for layer in dict.fromkeys(config.layers):
        if layer.mixer.kind in FIXED_STATE:
            name = f"the heads of {layer.mixer.kind}'s state (mixer.state_heads sets them)"
            sizes[name] = state_shape(layer.mixer, config.dim).heads
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
        raise ValueError(
            f"parallelism.tensor_parallel_degree = {tensor} does not divide {', '.join(wrong)}. Set one of "
            f"{', '.join(divisors)}, or change those."
        )
