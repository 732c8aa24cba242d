"""Estimates for the dry run: memory, bytes received, and the idle time of a pipeline.

Training does not read them. docs/parallelism.md says how accurate they were. They leave out the
keys and values that context parallelism gathers, masks of packed documents, validation,
checkpoints, Muon's messages, and that Muon has one moment per matrix in place of two.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from interdomain.model import ModelConfig, meta_model
from interdomain.model.loss import piece_tokens
from interdomain.model.parallel import split_dimension
from interdomain.model.transformer import mixer_class

from ..settings.schema import JobConfig
from .run_plan import RunPlan


@dataclass
class Share:
    """Parameters that one rank of a pipeline holds, before FSDP2 shards them.

    Attributes:
        layers: Configuration of each layer.
        blocks: Parameters of the blocks, without SSM parameters.
        embedding: Parameters of the embedding.
        head: Parameters of the head and the last norm.
        ssm: SSM parameters, which are whole on every rank.
    """

    layers: list[ModelConfig] = field(default_factory=list)
    blocks: int = 0
    embedding: int = 0
    head: int = 0
    ssm: int = 0

    @property
    def sharded(self) -> int:
        """Parameters that FSDP2 shards."""
        return self.blocks + self.embedding + self.head


def shares_of(plan: RunPlan) -> list[Share]:
    """Returns the share of each rank of the pipeline.

    Args:
        plan: The plan of the run.
    """
    model = meta_model(plan.config)
    shares = []
    for rank in range(plan.topology.pipeline):
        share = Share()
        for stage in plan.stages_of(rank):
            for module in plan.stages[stage]:
                is_layer = module.startswith("layers.")
                if is_layer:
                    number = int(module.removeprefix("layers."))
                    share.layers.append(plan.config.layers[number])
                parameters = model.get_submodule(module).named_parameters(prefix=module)
                for name, parameter in parameters:
                    size = parameter.numel()
                    # Tensor parallelism divides the large matrices.
                    if split_dimension(model, name.rpartition(".")[0]) is not None:
                        size //= plan.topology.tensor
                    if ".ssm." in name:
                        share.ssm += size
                    elif is_layer:
                        share.blocks += size
                    elif module == "tok_embeddings":
                        share.embedding += size
                    else:
                        share.head += size
        shares.append(share)
    return shares


@dataclass(frozen=True)
class CostModel:
    """The costs of a run's steps.

    Attributes:
        plan: The plan of the run.
        shares: Parameters of each rank of the pipeline.
        checkpointing: Activation checkpointing: none, selective or full.
        compiled: Whether blocks are compiled.
        stays_gathered: Whether a block's weights stay gathered after its forward pass.
        reduced: Bytes per number when gradients are summed over the ranks.
    """

    plan: RunPlan
    shares: list[Share]
    checkpointing: str
    compiled: bool
    stays_gathered: bool
    reduced: int

    @property
    def stored(self) -> int:
        """Bytes per number of the hidden states and of gathered weights."""
        return 2 if self.plan.precision == "bf16" else 4

    @property
    def width(self) -> int:
        """Bytes per number of the inputs of a matrix product."""
        return 4 if self.plan.precision == "float32" else 2

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.plan.local_batch * self.plan.seq_len // self.plan.topology.context

    @property
    def stages(self) -> int:
        """Stages of one rank of the pipeline."""
        return len(self.plan.stages) // self.plan.topology.pipeline

    def idle(self) -> float:
        """Returns the fraction of a step that a pipeline's ranks wait, if all stages are equal."""
        others = self.plan.topology.pipeline - 1
        return others / (self.plan.accumulation * self.stages + others)

    def memory(self) -> dict[str, int]:
        """Returns the peak memory in bytes by category, on the rank that needs the most."""
        return self._largest(self._memory)

    def traffic(self) -> dict[str, int]:
        """Returns the bytes received in a step by axis, on the rank that receives the most."""
        return self._largest(self._traffic)

    def _largest(self, cost: Callable[[int, Share], dict[str, int]]) -> dict[str, int]:
        """Returns the largest cost of a rank of the pipeline. `cost` takes a rank and its share."""
        costs = [cost(rank, share) for rank, share in enumerate(self.shares)]
        return max(costs, key=lambda parts: sum(parts.values()))

    def _in_flight(self, rank: int) -> float:
        """Returns how many micro-batches a rank keeps for the backward pass at its peak.

        A rank with several stages keeps pairs of stage and micro-batch. Their peak number is divided
        by the number of the rank's stages.

        Args:
            rank: The rank's place in the pipeline.
        """
        ranks = self.plan.topology.pipeline
        micro_batches = self.plan.accumulation
        if ranks == 1:
            return 1
        if self.plan.schedule == "GPipe":
            return micro_batches
        if self.plan.schedule == "1F1B":
            return min(micro_batches, ranks - rank)
        # Interleaved1F1B: forward passes before a rank's first backward pass, and the one with it. As
        # in PyTorch's ScheduleInterleaved1F1B, the ranks go through their stages in rounds.
        rounds = max(1, micro_batches // ranks)
        per_round = micro_batches // rounds
        warmup = (self.stages - 1) * per_round + 2 * (ranks - 1 - rank)
        return min(micro_batches, (warmup + 1) / self.stages)

    def _memory(self, rank: int, share: Share) -> dict[str, int]:
        """Returns the bytes by category of one rank of the pipeline.

        Args:
            rank: The rank's place in the pipeline.
            share: Its parameters.
        """
        plan = self.plan
        tensor = plan.topology.tensor
        shards = plan.topology.shards * plan.topology.context

        # Parameters, gradients and AdamW's two moments are float32.
        own = 4 * (share.sharded // shards + share.ssm)
        gradients = own
        if plan.accumulation > 1 and not plan.reduces_each and shards > 1:
            gradients += 4 * share.sharded  # whole until the last micro-batch

        # Gathered weights of two blocks and of the embedding or the head; and the gradients of a
        # block, as they are computed and as they are sent.
        block = share.blocks // max(1, len(share.layers))
        gathered = (share.embedding or share.head) + 2 * block
        if self.stays_gathered:
            gathered = share.sharded
        gathered = self.stored * (gathered + block) + 4 * block

        # Activations of all micro-batches in flight, and what the block in its backward pass
        # recomputes.
        in_flight = self._in_flight(rank)
        tokens = self.tokens
        saved = 0
        recomputed = 0
        for layer in share.layers:
            layer_saved, layer_total = self._saved_per_token(layer)
            saved += layer_saved
            recomputed = max(recomputed, layer_total - layer_saved)
        activations = int(in_flight * tokens * saved)
        if self.checkpointing == "full":
            activations += tokens * recomputed
        if plan.precision == "bf16-products" and self.checkpointing == "none":
            activations += 2 * share.blocks  # bf16 copies of the weights

        # The head's input before its norm (divided among the tensor-parallel ranks), after it, and
        # its gradient; the head's gradients; and a piece of the logits: as the product gives them,
        # in float32, and after the softmax.
        loss = 0
        if share.head:
            vocabulary = share.head // plan.config.dim
            before_norm = tokens * plan.config.dim * self.stored // tensor
            hidden = before_norm + 2 * tokens * plan.config.dim * self.width
            logits = min(tokens, piece_tokens(vocabulary)) * vocabulary
            # Bytes of the three copies: 2 + 4 + 4, or two of 4 if the product is float32.
            bytes_per_logit = 8 if self.width == 4 else 10
            loss = int(in_flight * hidden) + 4 * share.head + logits * bytes_per_logit
        return {
            "parameters": own,
            "gradients": gradients,
            "optimizer": 2 * own,
            "gathered": gathered,
            "activations": activations,
            "loss": loss,
        }

    def _saved_per_token(self, layer: ModelConfig) -> tuple[int, int]:
        """Returns the bytes per token that autograd saves of a layer.

        - none: the inputs of norms, products, features, scan and activation.
        - selective: the block's input, the scan and every second product, as TorchTitan chooses (q,
          v, the gate, the last).
        - full: the block's input.

        With tensor parallelism a rank saves all tokens of the products' inputs, and 1 / tensor of
        the rest.

        Args:
            layer: Configuration of the layer.

        Returns:
            Bytes with the run's activation checkpointing, and bytes without any.
        """
        dim = layer.dim
        ffn = layer.ffn_hidden
        tensor = self.plan.topology.tensor
        width = self.width
        kept, scores = mixer_class(layer.mixer).saved_elements(layer)

        # `rest` is divided among the tensor-parallel ranks; what is added to it is not.
        rest = dim * self.stored + width * (kept + 3 * ffn + dim)
        if not self.compiled:
            rest += dim * (self.stored - width)
        total = rest // tensor + 2 * width * dim
        if self.checkpointing == "full":
            return dim * self.stored // tensor, total

        saved = total
        if self.checkpointing == "selective":
            rest = dim * self.stored + width * (2 * dim + layer.n_kv_heads * layer.head_dim + ffn)
            saved = rest // tensor + width * dim
        if not self.plan.execution.recompute:
            saved += width * scores // tensor
        return saved, total

    def _traffic(self, rank: int, share: Share) -> dict[str, int]:
        """Returns the bytes that one rank of the pipeline receives in a step, by axis.

        A ring moves (P - 1) / P of the result of a gather or of the input of a scatter over P
        ranks, and twice that for a sum.

        - shards: weights are gathered, gradients scattered.
        - replicas: scattered gradients are summed.
        - context: states, or keys and values (`Mixer.received_elements`).
        - tensor: hidden states are gathered and scattered around mixers and feed-forwards.
        - pipeline: hidden states and their gradients.
        - SSM parameters: gradients of the SSM parameters (Delta, A, C) are summed.

        Args:
            rank: The rank's place in the pipeline.
            share: Its parameters.
        """
        plan = self.plan
        replicas, shards, context, tensor, pipeline = plan.topology
        ranks = plan.topology.ranks
        shards *= context
        n = plan.accumulation

        # FSDP2 gathers weights for the forward and the backward pass of each micro-batch. A
        # pipeline keeps gathered weights for all micro-batches of a step.
        gathers = 2 * n
        if self.stays_gathered:
            gathers = 1 if pipeline > 1 else n
        gathered = self.stored * share.sharded * gathers
        sums = n if plan.reduces_each else 1
        scattered = self.reduced * share.sharded * sums

        # Context parallelism. Full checkpointing exchanges states again in the backward pass;
        # selective checkpointing saves them, and gathers only keys and values again.
        exchanged = 0
        if context > 1:
            state_passes = 3 if self.checkpointing == "full" else 2
            token_passes = 2 if self.checkpointing == "none" else 3
            for layer in share.layers:
                state, per_token = mixer_class(layer.mixer).received_elements(
                    layer, context, tensor
                )
                exchanged += n * plan.local_batch * state * 4 * state_passes
                exchanged += n * self.tokens * per_token * self.width * token_passes

        # Hidden states around the parts of tensor parallelism. A mixer and a feed-forward each have
        # a gather and a scatter, so a block has 4 exchanges forward and 4 backward. Selective
        # checkpointing gathers twice more, full checkpointing does all 4 once more.
        hidden = n * self.tokens * plan.config.dim // tensor
        ends = bool(share.embedding) + bool(share.head)
        exchanges = {"none": 8, "selective": 10, "full": 12}[self.checkpointing]
        exchanges = exchanges * len(share.layers) + 2 * ends
        # A stage receives hidden states and a gradient, the first and the last stage only one.
        between_stages = 0
        if pipeline > 1:
            between_stages = (2 * self.stages - ends) * hidden * self.stored
        return {
            "shards": (shards - 1) * (gathered + scattered) // shards,
            "replicas": 2 * (replicas - 1) * (scattered // shards) // replicas,
            "context": exchanged,
            "tensor": (tensor - 1) * exchanges * hidden * self.width,
            "pipeline": between_stages,
            "SSM parameters": 2 * 4 * share.ssm * (ranks // pipeline - 1) * pipeline // ranks,
        }


def cost_model(plan: RunPlan, job: JobConfig) -> CostModel:
    """Returns the costs of a configuration's run.

    Args:
        plan: The plan of the run.
        job: The configuration of the run.
    """
    # Checkpointing of every first block is full. That of every n-th block is estimated as none.
    checkpointing = job.activation_checkpoint.mode
    option = job.activation_checkpoint.selective_ac_option
    if checkpointing == "selective" and option != "op":
        checkpointing = "full" if option == "1" else "none"
    reshard = job.parallelism.fsdp_reshard_after_forward
    pipelined = plan.topology.pipeline > 1
    return CostModel(
        plan,
        shares_of(plan),
        checkpointing=checkpointing,
        compiled=job.compile.enable and "model" in job.compile.components,
        stays_gathered=reshard == "never" or (reshard == "default" and pipelined),
        reduced=2 if job.training.mixed_precision_reduce == "bf16" else 4,
    )
