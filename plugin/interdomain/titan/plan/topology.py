"""The axes that a run's ranks are divided by, and the layers of a pipeline's stages."""

import math
from typing import NamedTuple

from ..host import generate_llm_fqn_per_model_part
from ..settings.rules import MULTI_STAGE
from ..settings.schema import Parallelism


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


def pipeline_stages(
    parallel: Parallelism, n_layers: int, given: list[list[str]] | None = None
) -> tuple[tuple[str, ...], ...]:
    """TorchTitan's module names of each stage, as its `pipeline_llm` makes them. Without a pipeline one stage has all.

    Args:
        given: TorchTitan's setting module_fqns_per_model_part: the names that a user chose.

    Raises:
        ValueError: The layers do not divide over the stages.
    """
    ranks, schedule = parallel.pipeline_parallel_degree, parallel.pipeline_parallel_schedule
    everything = generate_llm_fqn_per_model_part(1, n_layers)[0]
    # PyTorch keeps the weights of three stages gathered. Those of more it would gather anew in every micro-batch.
    allowed = [2 * ranks, 3 * ranks] if schedule == MULTI_STAGE else [ranks]
    in_words = " or ".join(map(str, allowed))

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
    return tuple(
        tuple(stage) for stage in generate_llm_fqn_per_model_part(stages, n_layers, first, last)
    )


def stages_of(rank: int, ranks: int, stages: int) -> range:
    """The stages of a rank of the pipeline, of `stages` in all."""
    return range(rank, stages, ranks)
