"""Llama-style pre-norm decoder around a token mixer. Child names are TorchTitan's, so that its helpers apply as they are."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import Execution, ModelConfig
from .feature_map import rope_tables
from .initialize import initialize
from .mixer import InterdomainMixer
from .softmax import SoftmaxMixer
from .state import ModelState


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, config: ModelConfig, execution: Execution | None) -> None:
        super().__init__()
        mixer = SoftmaxMixer if config.mixer.kind == "softmax" else InterdomainMixer
        self.attention = mixer(config, execution)
        self.feed_forward = FeedForward(config.dim, config.ffn_hidden)
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)

    def forward(self, x: Tensor, rope, dynamics, state=None, packing=None):
        """x [B, T, dim] -> [B, T, dim], or (that, new state) when a state is given."""
        mixed, new_state = self.attention(self.attention_norm(x), rope, dynamics, state, packing)
        x = x + mixed
        x = x + self.feed_forward(self.ffn_norm(x))
        return x if state is None else (x, new_state)


class Transformer(nn.Module):
    """tokens [B, T] -> logits [B, T, vocab_size].

    Args:
        execution: how the mixers are computed; every choice computes the same function. None: the defaults.
    """

    def __init__(self, config: ModelConfig, execution: Execution | None = None) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(config, execution) for i in range(config.n_layers)})
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(
        self, tokens: Tensor, state: ModelState | None = None, positions: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ModelState]:
        """Without a state: logits of whole sequences (training). With one: (logits, the state after the last token).

        positions: [B, T] integers, where several documents are packed into a sequence: of each token, how many of its
        document come before it. Nothing is carried from one document into another: not state, convolution or attention.
        """
        T, packing = tokens.shape[1], None
        if positions is None:
            positions = torch.arange(T, device=tokens.device)
            if state is not None:
                positions = state.position[:, None] + positions
        elif state is not None:
            raise ValueError(
                "positions are for whole sequences of packed documents; a state knows its own: leave one out."
            )
        else:
            documents = (positions == 0).cumsum(1, dtype=torch.int32)
            packing = next(iter(self.layers.values())).attention.packing(documents)
        wide = torch.float64 if self.tok_embeddings.weight.dtype == torch.float64 else torch.float32
        rope = rope_tables(positions, self.config.head_dim, self.config.rope_theta, wide)
        dynamics = self.dynamics() if state is None else state.dynamics
        h = self.tok_embeddings(tokens)
        new_layers = []
        for i, layer in enumerate(self.layers.values()):
            if state is None:
                h = layer(h, rope, dynamics[i], packing=packing)
            else:
                h, new_layer = layer(h, rope, dynamics[i], state.layers[i])
                new_layers.append(new_layer)
        logits = self.output(self.norm(h))
        return logits if state is None else (logits, ModelState(new_layers, state.position + T, dynamics))

    def dynamics(self) -> list[tuple[Tensor, ...]]:
        """Per layer what its scan reads of the parameters, float32; constant over the sequence.

        Computed outside the blocks and passed in: a float32 island that their precision and compilation do not touch.
        """
        return [layer.attention.dynamics() for layer in self.layers.values()]

    def init_state(self, batch: int) -> ModelState:
        """The state before the first token."""
        weight = self.tok_embeddings.weight
        return ModelState(
            [layer.attention.init_state(batch, weight.dtype, weight.device) for layer in self.layers.values()],
            torch.zeros(batch, dtype=torch.int64, device=weight.device),
            self.dynamics(),
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
