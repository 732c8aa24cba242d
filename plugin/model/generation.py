"""Text from a model: `prefill` reads a prompt into a state, `decode` takes one token a step, `generate` does both.

The state has a fixed size for every mixer but softmax, so a step costs the same after ten tokens and after a million.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .state import ModelState
from .transformer import Transformer

# Shapes: B batch (prompts), T tokens of a prompt, V vocabulary.

PREFILL_CHUNK = 2048  # tokens per forward pass of a prompt (paper, inference scaling)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. temperature 0 takes the most probable one; top_k 0 and top_p 1 keep all."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 (greedy) or a finite number above: got {self.temperature}.")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all) or more: got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1: got {self.top_p}.")


def sample(logits: Tensor, sampling: Sampling, generators: list[torch.Generator]) -> Tensor:
    """Next tokens [B] from logits [B, V]; row b draws from generators[b], so that a row does not depend on its batch."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    # Relative to the largest, so that a temperature near zero gives -inf and not the NaN of inf - inf.
    logits = (logits.double() - logits.amax(dim=-1, keepdim=True)) / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kept = logits.topk(sampling.top_k)  # exactly that many: bf16 logits are often equal
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept.indices, kept.values)
    probabilities = logits.softmax(dim=-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered  # mass ahead of each token: the first is always kept
        probabilities = probabilities.masked_fill(
            torch.zeros_like(probabilities, dtype=torch.bool).scatter(-1, order, before >= sampling.top_p), 0.0
        )
    rows = [torch.multinomial(row, 1, generator=g) for row, g in zip(probabilities, generators, strict=True)]
    return torch.cat(rows)


@torch.inference_mode()
def prefill(
    model: Transformer, tokens: Tensor, state: ModelState | None = None, chunk: int = PREFILL_CHUNK
) -> tuple[Tensor, ModelState]:
    """Read tokens [B, T], T >= 1, in pieces of `chunk`. Returns: (logits after the last token [B, V], state)."""
    state = model.init_state(tokens.shape[0]) if state is None else state
    for piece in tokens.split(chunk, dim=1):
        logits, state = model(piece, state)
    return logits[:, -1], state


@torch.inference_mode()
def decode(model: Transformer, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
    """One step: tokens [B] -> (logits [B, V], state)."""
    logits, state = model(tokens[:, None], state)
    return logits[:, -1], state


def generate(
    model: Transformer,
    prompts: list[list[int]],
    *,
    max_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    vocab_size: int | None = None,
) -> Iterator[list[int | None]]:
    """Continue several prompts at once; yields one token per prompt and step, None for prompts that have ended.

    Prompts of unequal length are read one by one, without padding, and decoded together. A prompt's text depends on
    (seed, its own tokens) alone, not on the prompts beside it, up to the rounding of batched matrix products.

    Args:
        prompts: token ids, each at least one and all below the vocabulary size.
        stop: a token that ends a prompt (it is yielded), or None.
        vocab_size: the tokenizer's, where the model's is padded: spare rows mean nothing and are never chosen.
    Raises: ValueError for no prompt, an empty one, a token outside the vocabulary, or a length that is none; at the first
        token, as of any iterator.
    """
    if not prompts:
        raise ValueError("there is no prompt; give a list of at least one list of tokens.")
    for name, value in (("max_tokens", max_tokens), ("prefill_chunk", prefill_chunk)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1: got {value}.")
    vocab = model.config.vocab_size
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {i} is empty; give it at least one token (the tokenizer's BOS, say).")
        outside = [t for t in prompt if not 0 <= t < vocab]
        if outside:
            raise ValueError(f"prompt {i} holds the token {outside[0]}, outside the vocabulary of 0 to {vocab - 1}.")
    sampling = sampling or Sampling()
    device = model.tok_embeddings.weight.device
    generators = [torch.Generator(device).manual_seed(seed) for _ in prompts]
    read = [prefill(model, torch.tensor([p], device=device), chunk=prefill_chunk) for p in prompts]
    logits = torch.cat([row for row, _ in read])
    state = ModelState.stack([s for _, s in read])
    ended = [False] * len(prompts)
    for step in range(max_tokens):
        tokens = sample(logits[:, :vocab_size], sampling, generators)
        ids = tokens.tolist()
        yield [None if done else t for t, done in zip(ids, ended, strict=True)]
        ended = [done or t == stop for t, done in zip(ids, ended, strict=True)]
        if all(ended) or step + 1 == max_tokens:
            return
        logits, state = decode(model, tokens, state)
