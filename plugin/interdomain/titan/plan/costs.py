"""Estimates for the dry run: memory by category, bytes received by axis, and how long a pipeline's ranks wait.

Nothing in training reads them. docs/parallelism.md says how far they were right. Left out: the keys and values of other shards,
masks of packed documents, Muon's messages, validation, and checkpoints.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from interdomain.model import ModelConfig, meta_model
from interdomain.model.loss import piece_tokens
from interdomain.model.shard import split_dimension
from interdomain.model.transformer import mixer_class

from .parameter_groups import group_of
from .run_plan import RunPlan


@dataclass
class Share:
    """Numbers of the parameters that one rank holds of a model, before FSDP2 shards them.

    Attributes:
        layers: Configuration of each of its layers.
        blocks: Parameters of the blocks, without SSM parameters.
        embedding: Parameters of the embedding.
        head: Parameters of the head and the last norm.
        dynamics: SSM parameters, which are whole on every rank.
        matrices: Parameters of `blocks` that Muon updates.
    """

    layers: list[ModelConfig] = field(default_factory=list)
    blocks: int = 0
    embedding: int = 0
    head: int = 0
    dynamics: int = 0
    matrices: int = 0

    @property
    def sharded(self) -> int:
        return self.blocks + self.embedding + self.head


@functools.lru_cache(maxsize=256)
def share_of(config: ModelConfig, modules: tuple[str, ...], tensor: int = 1) -> Share:
    """The share of a rank.

    Args:
        modules: Names of its modules, such as layers.0 and output.
        tensor: Ranks that divide the large matrices.
    """
    model = meta_model(config)
    share = Share()
    for module in modules:
        if module.startswith("layers."):
            share.layers.append(config.layers[int(module.removeprefix("layers."))])
        for name, p in model.get_submodule(module).named_parameters(prefix=module):
            size = p.numel()
            if split_dimension(model, name.rpartition(".")[0]) is not None:
                size //= tensor
            if ".ssm." in name:
                share.dynamics += size
            elif module.startswith("layers."):
                share.blocks += size
            elif module == "tok_embeddings":
                share.embedding += size
            else:
                share.head += size
            if group_of(name, p, "Muon") == "matrices":
                share.matrices += size
    return share


@dataclass(frozen=True)
class CostModel:
    """The costs of a run's steps.

    Attributes:
        checkpointing: none, selective or full.
        compiled: Whether blocks are compiled.
        stays_gathered: Whether a block's weights stay gathered after its forward pass.
        reduced: Bytes per number in the sums of gradients.
        muon: Whether matrices have one moment.
    """

    plan: RunPlan
    checkpointing: str = "none"
    compiled: bool = False
    stays_gathered: bool = False
    reduced: int = 4
    muon: bool = False

    @property
    def stored(self) -> int:
        """Bytes of a number of the hidden states and of the gathered weights."""
        return 2 if self.plan.precision == "bf16" else 4

    @property
    def width(self) -> int:
        """Bytes of a number that goes into a matrix product."""
        return 4 if self.plan.precision == "float32" else 2

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.plan.local_batch * self.plan.seq_len // self.plan.topology.context

    @property
    def stages(self) -> int:
        """Stages of a pipeline's rank."""
        return len(self.plan.stages) // self.plan.topology.pipeline

    def idle(self) -> float:
        """Share of a step that the ranks of a pipeline wait, if all stages take the same time."""
        others = self.plan.topology.pipeline - 1
        return others / (self.plan.accumulation * self.stages + others)

    def memory(self) -> dict[str, int]:
        """Bytes by category, on the rank that needs the most."""
        return self._largest(self._memory)

    def traffic(self) -> dict[str, int]:
        """Bytes received in a step by axis, on the rank that receives the most."""
        return self._largest(self._traffic)

    def _largest(self, cost: Callable[[int, Share], dict[str, int]]) -> dict[str, int]:
        plan = self.plan
        costs = []
        for rank in range(plan.topology.pipeline):
            modules = [name for stage in plan.stages_of(rank) for name in plan.stages[stage]]
            costs.append(cost(rank, share_of(plan.config, tuple(modules), plan.topology.tensor)))
        return max(costs, key=lambda parts: sum(parts.values()))

    def _in_flight(self, rank: int) -> float:
        """The most micro-batches whose activations a pipeline's rank holds at a time, on average over its stages."""
        ranks, n = self.plan.topology.pipeline, self.plan.accumulation
        if ranks == 1:
            return 1
        if self.plan.schedule == "GPipe":
            return n
        if self.plan.schedule == "1F1B":
            return min(n, ranks - rank)
        per_round = n // max(1, n // ranks)
        warmup = (self.stages - 1) * per_round + 2 * (ranks - 1 - rank)
        return min(n, (warmup + 1) / self.stages)

    def _memory(self, rank: int, share: Share) -> dict[str, int]:
        plan, tensor = self.plan, self.plan.topology.tensor
        shards = plan.topology.shards * plan.topology.context
        # Parameters, gradients and AdamW's two moments are float32.
        own = 4 * (share.sharded // shards + share.dynamics)
        gradients = own
        if plan.accumulation > 1 and not plan.reduces_each and shards > 1:
            gradients += 4 * share.sharded  # whole until the last micro-batch

        # The weights of two blocks and of the head, and a block's gradients as they are computed and as they are sent.
        block = share.blocks // max(1, len(share.layers))
        gathered = (
            share.sharded if self.stays_gathered else (share.embedding or share.head) + 2 * block
        )
        gathered = self.stored * (gathered + block) + 4 * block

        in_flight, tokens = self._in_flight(rank), self.tokens
        saved = recomputed = 0
        for layer in share.layers:
            each, everything = self._saved_per_token(layer)
            saved += each
            recomputed = max(recomputed, everything - each)
        activations = int(in_flight * tokens * saved)
        if self.checkpointing == "full":
            activations += tokens * recomputed  # of the block that goes backward
        if plan.precision == "bf16-products" and self.checkpointing == "none":
            activations += 2 * share.blocks  # bf16 copies of the weights

        # The head's input, before and after its norm; its gradients, which the loss computes; and a piece of the logits: as the
        # product gives them, in float32, and their softmax.
        loss = 0
        if share.head:
            vocabulary = share.head // plan.config.dim
            hidden = tokens * plan.config.dim * (self.stored // tensor + 2 * self.width)
            piece = min(tokens, piece_tokens(vocabulary)) * vocabulary
            loss = int(in_flight * hidden) + 4 * share.head + piece * (8 if self.width == 4 else 10)
        return {
            "parameters": own,
            "gradients": gradients,
            "optimizer": 2 * own - 4 * self.muon * share.matrices // shards,
            "gathered": gathered,
            "activations": activations,
            "loss": loss,
        }

    def _saved_per_token(self, layer: ModelConfig) -> tuple[int, int]:
        """Bytes that autograd saves per token of a layer: with the run's checkpointing, and without any.

        none: the inputs of norms, products, features, scan and activation (compiled: without the activation's output).
        selective: the block's input, the scan and every second product, as TorchTitan chooses (q, v, the gate, the last).
        full: the block's input.
        Ranks that share the heads save all tokens of the products' inputs, and 1 / tensor of the rest.
        """
        dim, ffn, tensor, width = layer.dim, layer.ffn_hidden, self.plan.topology.tensor, self.width
        kept, scores = mixer_class(layer.mixer).kept(layer)
        rest = dim * self.stored + width * (kept + 3 * ffn + dim)
        if not self.compiled:
            rest += dim * self.stored + width * (ffn - dim)
        everything = rest // tensor + 2 * width * dim
        if self.checkpointing == "full":
            return dim * self.stored // tensor, everything
        saved = everything
        if self.checkpointing == "selective":
            rest = dim * self.stored + width * (2 * dim + layer.n_kv_heads * layer.head_dim + ffn)
            saved = rest // tensor + width * dim
        if not self.plan.execution.recompute:
            saved += width * scores // tensor
        return saved, everything

    def _traffic(self, rank: int, share: Share) -> dict[str, int]:
        """Bytes as a ring moves them: (P - 1) / P of what a gather gives or a scatter takes on P ranks, twice that for a sum.

        - shards: weights are gathered, gradients scattered.
        - replicas: scattered gradients are summed.
        - context: states, or keys and values (`Mixer.received`).
        - tensor: hidden states are gathered and scattered around mixers and feed-forwards.
        - pipeline: hidden states and their gradients.
        - dynamics: gradients of SSM parameters are summed.
        """
        plan = self.plan
        replicas, shards, context, tensor, pipeline = plan.topology
        ranks = plan.topology.ranks
        shards *= context
        n = plan.accumulation
        passes = 1 if pipeline > 1 else n  # a pipeline keeps what is gathered
        gathered = self.stored * share.sharded * (passes if self.stays_gathered else 2 * n)
        scattered = self.reduced * share.sharded * (n if plan.reduces_each else 1)

        exchanged = 0
        for layer in share.layers if context > 1 else []:
            state, per_token = mixer_class(layer.mixer).received(layer, context, tensor)
            # Selective checkpointing saves a state that was received, and gathers keys and values again.
            exchanged += (
                n * plan.local_batch * state * 4 * (3 if self.checkpointing == "full" else 2)
            )
            exchanged += (
                n
                * self.tokens
                * per_token
                * self.width
                * (2 if self.checkpointing == "none" else 3)
            )

        hidden = n * self.tokens * plan.config.dim // tensor
        exchanges = {"none": 8, "selective": 10, "full": 12}[self.checkpointing] * len(share.layers)
        exchanges += 2 * bool(share.embedding) + 2 * bool(share.head)
        messages = 2 * self.stages - bool(share.embedding) - bool(share.head)
        return {
            "shards": (shards - 1) * (gathered + scattered) // shards,
            "replicas": 2 * (replicas - 1) * (scattered // shards) // replicas,
            "context": exchanged,
            "tensor": (tensor - 1) * exchanges * hidden * self.width,
            "pipeline": messages * hidden * self.stored if pipeline > 1 else 0,
            "dynamics": 2 * 4 * share.dynamics * (ranks // pipeline - 1) * pipeline // ranks,
        }
