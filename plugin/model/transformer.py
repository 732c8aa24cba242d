"""Llama-style pre-norm decoder around a token mixer. Child names are TorchTitan's, so that its helpers apply as they are."""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import Execution, ModelConfig
from .initialize import initialize
from .interface import Mixer
from .layers import Embedding, Linear, RMSNorm, rope_of
from .loss import Head
from .mixer import InterdomainMixer
from .shard import Shard
from .softmax import SoftmaxMixer
from .state import ModelState

MIXER_CLASSES: dict[str, type[Mixer]] = {"interdomain": InterdomainMixer, "softmax": SoftmaxMixer}


def mixer_class(config: ModelConfig) -> type[Mixer]:
    """The mixer of a model: its function, and what it costs."""
    return MIXER_CLASSES[config.mixer.kind]


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = Linear(config.dim, config.ffn_hidden)
        self.w2 = Linear(config.ffn_hidden, config.dim)
        self.w3 = Linear(config.dim, config.ffn_hidden)
        initialize(self, config)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, config: ModelConfig, execution: Execution | None) -> None:
        super().__init__()
        self.attention = mixer_class(config)(config, execution)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)

    def forward(self, x: Tensor, rope: Any, dynamics: Any, state: Any = None, packing: Any = None) -> Tensor:
        """x [B, T, dim] -> [B, T, dim]; a state is advanced."""
        x = x + self.attention(self.attention_norm(x), rope, dynamics, state, packing)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """tokens [B, T] -> logits [B, T, vocab_size], or the summed loss of labels.

    Initialised from PyTorch's global generator; `init_weights(seed)` draws again, the same numbers on every machine.

    Args:
        execution: how the mixers are computed; every choice computes the same function. None: the defaults.

    Attributes:
        shard: set here and on every mixer (`layers.*.attention`), the model computes one shard of its sequences, together with
            the other ranks of the shard's process group: tokens, positions, labels and what is returned are the shard's.
            Losses and gradients are to be summed over the ranks.
    """

    shard: Shard | None = None

    def __init__(self, config: ModelConfig, execution: Execution | None = None) -> None:
        super().__init__()
        self.config = config
        self.bf16_products = execution is not None and execution.bf16_products
        self.tok_embeddings = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(config, execution) for i in range(config.n_layers)})
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.output = Head(config.dim, config.vocab_size)
        for name in ("tok_embeddings", "output"):  # the blocks have their values
            initialize(getattr(self, name), config, prefix=f"{name}.")

    def forward(
        self,
        tokens: Tensor,
        state: ModelState | None = None,
        positions: Tensor | None = None,
        *,
        last: int | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Without a state: logits of whole sequences (training). With one: of a piece that continues from it; it is advanced.

        Args:
            positions: [B, T] integers, where several documents are packed into a sequence: of each token, how many of its
                document come before it. Nothing is carried from one document into another: not state, convolution or
                attention.
            last: logits of the last so many positions only, [B, last, V]; None for all.
            labels: [B, T] integers, of each position the token after it, or IGNORE_INDEX: returns the cross-entropy, summed
                over tokens, a float32 scalar. The logits of all tokens never exist at once (`summed_cross_entropy`).
        Raises: ValueError for positions with a state, and for a state of other rows; NotImplementedError for a state where the
            sequences are sharded.
        """
        B, T = tokens.shape
        h, order = self.tok_embeddings(tokens), torch.arange(T, device=tokens.device)
        if state is not None:
            if self.shard is not None:
                raise NotImplementedError(
                    f"a state continues whole sequences, and this model computes one of {self.shard.size} shards of them; "
                    "generate with a model that has no shard."
                )
            if positions is not None:
                raise ValueError("positions are for whole sequences; a state knows its own: leave one out.")
            if len(state.position) != B:
                raise ValueError(f"{B} row(s) of tokens for a state of {len(state.position)}; there must be one each.")
            positions = state.position[:, None] + order
            packing = self._mixers[0].continuing(state, T, h.dtype)
        else:
            order = order if self.shard is None else order + self.shard.rank * T
            packing = self._mixers[0].packing(order, positions, h.dtype, self.shard)
            positions = order if positions is None else positions
        rope = rope_of(self.config, positions, h.dtype) if self.config.mixer.rope else None
        dynamics = self.dynamics() if state is None else state.dynamics
        products = contextlib.nullcontext()
        if self.bf16_products:  # autocast's cache would keep a bf16 copy of every weight to the end, to use it once
            products = torch.autocast(h.device.type, torch.bfloat16, cache_enabled=False)
        with products:
            for i, layer in enumerate(self.layers.values()):
                h = layer(h, rope, dynamics[i], state and state.layers[i], packing)
            if state is not None:
                state.advance(T)
            h = self.norm(h if last is None else h[:, -last:])
            return self.output(h) if labels is None else self.output(h, labels)

    @property
    def _mixers(self) -> list[Any]:
        blocks: Any = self.layers.values()
        return [block.attention for block in blocks]

    def dynamics(self) -> list[tuple[Tensor, ...]]:
        """Per layer what its scan reads of the parameters, float32; constant over the sequence.

        Computed outside the blocks and passed in: a float32 island that their precision and compilation do not touch.
        """
        return self._mixers[0].dynamics(self._mixers)

    def init_state(self, batch: int, capacity: int = 0) -> ModelState:
        """The state before the first token.

        capacity: tokens that softmax has room for from the start; its cache grows where they are more. Others need none.
        """
        weight, dynamics = self.tok_embeddings.weight, self.dynamics()
        place = capacity, torch.bfloat16 if self.bf16_products else weight.dtype, weight.device
        return ModelState(
            [mixer.init_state(batch, *place, own) for mixer, own in zip(self._mixers, dynamics, strict=True)],
            torch.zeros(batch, dtype=torch.int64, device=weight.device),
            dynamics,
        )

    def init_weights(self, seed: int = 42) -> None:
        """Set every parameter and buffer: the same numbers on every device and under every sharding (see `initialize`)."""
        initialize(self, self.config, seed)


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def meta_model(config: ModelConfig) -> Transformer:
    """The model without memory: for counting and checking shapes."""
    with torch.device("meta"):
        return Transformer(config)
