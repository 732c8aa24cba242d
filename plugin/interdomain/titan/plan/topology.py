"""The axes of parallelism of a run, and the layers of a pipeline's stages."""

import math
from typing import NamedTuple

from ..host import generate_llm_fqn_per_model_part
from ..settings.rules import INTERLEAVED
from ..settings.schema import Parallelism


class Topology(NamedTuple):
    """The degree of each axis of parallelism. Their product is the number of ranks.

    Attributes:
        replicas: Copies of the model.
        shards: Ranks over which FSDP2 shards a copy.
        context: Ranks that share a sequence.
        tensor: Ranks that share heads, feed-forward layers and vocabulary.
        pipeline: Ranks that share the layers.
    """

    replicas: int
    shards: int
    context: int
    tensor: int
    pipeline: int

    @property
    def data_ranks(self) -> int:
        """Groups of ranks that read samples of their own."""
        return self.replicas * self.shards

    @property
    def ranks(self) -> int:
        """Ranks of the run."""
        return math.prod(self)

    def __str__(self) -> str:
        """Returns the axes that divide anything, such as "replicas 2 x tensor 4 = 8 ranks"."""
        if self.ranks == 1:
            return "1 rank"
        axes = [f"{name} {degree}" for name, degree in self._asdict().items() if degree > 1]
        return f"{' x '.join(axes)} = {self.ranks} ranks"


def topology(parallel: Parallelism, world_size: int) -> Topology:
    """Returns the axes of a run on `world_size` ranks.

    Args:
        parallel: Settings [parallelism].
        world_size: Number of ranks.

    Raises:
        ValueError: The product of the degrees is not the number of ranks.
    """
    mesh = Topology(
        replicas=parallel.data_parallel_replicate_degree,
        shards=parallel.data_parallel_shard_degree,
        context=parallel.context_parallel_degree,
        tensor=parallel.tensor_parallel_degree,
        pipeline=parallel.pipeline_parallel_degree,
    )
    # -1: FSDP2 takes all ranks that the other axes leave.
    others = mesh._replace(shards=1).ranks
    if mesh.shards == -1:
        mesh = mesh._replace(shards=world_size // others)
    if mesh.ranks != world_size:
        product = " x ".join(f"{name} {degree}" for name, degree in mesh._asdict().items())
        raise ValueError(
            f"the degrees of [parallelism] must multiply to the number of ranks, {world_size}: "
            f"{product} is {mesh.ranks}. Set parallelism.data_parallel_shard_degree = -1 to let it "
            "follow from the others, or start another number of ranks."
        )
    return mesh


def pipeline_stages(parallel: Parallelism, n_layers: int) -> tuple[tuple[str, ...], ...]:
    """Returns the module names of each pipeline stage, divided as TorchTitan's `pipeline_llm` does.

    Without a pipeline, one stage has all modules.

    Args:
        parallel: Settings [parallelism].
        n_layers: Layers of the model.

    Raises:
        ValueError: The layers cannot be divided over the stages.
    """
    ranks = parallel.pipeline_parallel_degree
    schedule = parallel.pipeline_parallel_schedule
    if ranks == 1:
        return (tuple(generate_llm_fqn_per_model_part(1, n_layers)[0]),)
    # PyTorch keeps the weights of up to three stages of a rank gathered. With more stages it would
    # gather them again in every micro-batch.
    allowed = [ranks]
    if schedule == INTERLEAVED:
        allowed = [2 * ranks, 3 * ranks]

    # The embedding and the head count as layers in the division.
    first = parallel.pipeline_parallel_first_stage_less_layers
    last = parallel.pipeline_parallel_last_stage_less_layers
    stages = allowed[0]
    per_stage = parallel.pipeline_parallel_layers_per_stage
    if per_stage is not None:
        stages = math.ceil((n_layers + first + last) / per_stage)
    if stages not in allowed:
        allowed_text = " or ".join(map(str, allowed))
        raise ValueError(
            f"parallelism.pipeline_parallel_layers_per_stage = {per_stage} makes {stages} stages of "
            f"n_layers = {n_layers}, plus {first} for the embedding and {last} for the head: "
            f"{schedule} on pipeline_parallel_degree = {ranks} ranks needs {allowed_text}."
        )
    try:
        parts = generate_llm_fqn_per_model_part(stages, n_layers, first, last)
    except ValueError as e:
        raise ValueError(
            f"n_layers = {n_layers} cannot be divided over {stages} stages ({schedule} on "
            f"parallelism.pipeline_parallel_degree = {ranks} ranks): {e} input_weight is "
            "parallelism.pipeline_parallel_first_stage_less_layers, and output_weight is "
            "pipeline_parallel_last_stage_less_layers."
        ) from e
    return tuple(tuple(stage) for stage in parts)
