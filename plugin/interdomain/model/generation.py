"""Text from a model: `prefill` reads a prompt into a state, a `Decoder` takes one token a step, `generate` does both.

The state has a fixed size for every mixer but softmax without a window, so a step costs the same after ten tokens and after a
million.
"""

import contextlib
import functools
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
    """Rule by which the next token is chosen.

    Attributes:
        temperature: divides the logits; 0 takes the most probable token.
        top_k: keep the so many most probable tokens; 0: all.
        top_p: keep the most probable tokens that together have this probability; 1: all.

    Raises:
        ValueError: a value outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature must be 0 (greedy) or a finite number above: got {self.temperature}."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1: got {self.top_p}.")


def sample(logits: Tensor, sampling: Sampling, generators: list[torch.Generator]) -> Tensor:
    """Next tokens [B] from logits [B, V]. Row b draws from generators[b], so that a row does not depend on its batch."""
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
        before = (
            ordered.cumsum(dim=-1) - ordered
        )  # mass ahead of each token: the first is always kept
        kept = ordered.where(before < sampling.top_p, 0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, kept)
    rows = [
        torch.multinomial(row, 1, generator=g)
        for row, g in zip(probabilities, generators, strict=True)
    ]
    return torch.cat(rows)


@torch.no_grad()
def prefill(
    model: Transformer, tokens: Tensor, state: ModelState | None = None, chunk: int = PREFILL_CHUNK
) -> tuple[Tensor, ModelState]:
    """Read prompts of one length in pieces: memory for activations does not grow with T.

    Args:
        tokens: [B, T], T >= 1.
        state: where to go on from, one row for each of tokens, advanced in place. None: a new one.
        chunk: tokens of a piece.
    Returns: (logits [B, V], the state), both after the last token.
    Raises: ValueError for tokens outside the vocabulary; those on a GPU are not checked.
    """
    B, T = tokens.shape
    if (
        tokens.device.type == "cpu"
        and not 0 <= tokens.min() <= tokens.max() < model.config.vocab_size
    ):
        raise ValueError(
            f"tokens are {tokens.min()} to {tokens.max()}; they must be below {model.config.vocab_size}."
        )
    tokens = tokens.to(model.tok_embeddings.weight.device)
    state = model.init_state(B, capacity=T) if state is None else state
    for begin in range(0, T, chunk):
        logits = model(tokens[:, begin : begin + chunk], state, last=1)
    return logits[:, -1], state


class Decoder:
    """Steps from a state on, at its batch size. On CUDA they are one CUDA graph, captured here and replayed for every token.

    Args:
        model: that the state belongs to.
        state: taken over; nothing else may advance it from now on.
        room: tokens to decode, for which softmax's cache is made large enough; other mixers need none.
        graph: whether to capture. None: on CUDA.

    Raises:
        ValueError: a graph without CUDA, or under an autocast around it.
    """

    @torch.no_grad()
    def __init__(
        self, model: Transformer, state: ModelState, *, room: int = 0, graph: bool | None = None
    ) -> None:
        device = state.position.device
        captured = device.type == "cuda" if graph is None else graph
        if captured and device.type != "cuda":
            raise ValueError(
                f"a CUDA graph needs a model on CUDA: this one is on {device}. Leave out graph=True."
            )
        self.model = model
        self.state = state
        self.graph: torch.cuda.CUDAGraph | None = None
        if captured:
            # Autocast frees its copies of weights when it ends, and the graph would go on reading them.
            if torch.is_autocast_enabled("cuda"):
                raise ValueError(
                    "a CUDA graph cannot be captured under autocast: make the Decoder outside of it."
                )
            needed = state.length + max(1, room)
            if state.capacity is not None and state.capacity < needed:
                state.reserve(needed)
            state.captured = True
            self.tokens = torch.zeros(len(state.position), 1, dtype=torch.int64, device=device)
            with _restored(state), torch.cuda.device(device):
                self._capture()

    def _capture(self) -> None:
        position = self.state.position
        begin = position.clone()
        current = torch.cuda.current_stream(position.device)
        aside = _stream(position.device)
        aside.wait_stream(current)
        # The first steps compile kernels and let libraries allocate.
        with torch.cuda.stream(aside):
            for _ in range(3):
                self.model(self.tokens, self.state)
                position.copy_(begin)  # a cache may have room for one token
        current.wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        # Other threads may do as they like meanwhile, a server's or a process group's.
        with torch.cuda.graph(self.graph, stream=aside, capture_error_mode="thread_local"):
            self.logits = self.model(self.tokens, self.state)[:, -1]

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """tokens [B] -> logits [B, V], which the next step overwrites. Raises: ValueError where softmax's cache is full."""
        rows = self.state.position.shape
        if tokens.shape != rows:
            raise ValueError(
                f"tokens are {list(tokens.shape)}; expected {list(rows)}, one of each row."
            )
        if self.graph is None:
            return self.model(tokens[:, None], self.state)[:, -1]
        if self.state.capacity is not None and self.state.length >= self.state.capacity:
            raise ValueError(
                f"the cache is full: {self.state.length} tokens. Make the Decoder with more room."
            )
        self.tokens.copy_(tokens[:, None])
        self.graph.replay()
        self.state.length += 1
        return self.logits


@contextlib.contextmanager
def _restored(state: ModelState) -> Iterator[None]:
    """Undo the steps taken in this context; addresses stay. Copies wait on the host, for a GPU may have no room."""
    # A cache is not overwritten: a step adds to it.
    recurrent = [
        x for layer in state.layers if layer.capacity is None for x in layer.tensors().values()
    ]
    before = [(x, x.to("cpu", copy=True)) for x in (state.position, *recurrent)]
    yield
    for x, old in before:
        x.copy_(old)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Stream of all Decoders of a device: libraries keep memory for every stream. torch.cuda.graph's own is for one device
    only, that of the first capture in the process: steps of another would not be captured."""
    return torch.cuda.Stream(device)


def generate(
    model: Transformer,
    prompts: list[list[int]],
    *,
    max_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: int | None = None,
    vocab_size: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    graph: bool | None = None,
) -> Iterator[list[int | None]]:
    """Continue several prompts at once.

    Prompts are read one after the other and decoded together. A prompt's text depends on (seed, its own tokens) alone, not on
    the prompts beside it, up to the rounding of batched matrix products.

    Args:
        prompts: token ids; each prompt has at least one, all below the vocabulary size.
        max_tokens: new tokens per prompt at most.
        sampling: how tokens are chosen. None: temperature 1, all tokens.
        seed: of the random numbers.
        stop: a token that ends a row (it is yielded), or None.
        vocab_size: the tokenizer's, if the model's is padded: spare rows mean nothing and are never chosen.
        prefill_chunk: tokens of a piece of a prompt, see `prefill`.
        graph: how to decode, see `Decoder`.

    Yields:
        One token per prompt and step; None for prompts that have ended.

    Raises:
        ValueError: no prompt, an empty one, or a token outside the vocabulary; at the first token, as of any iterator.
    """
    if not prompts or not all(prompts):
        raise ValueError(
            f"give prompts of at least one token each: got {[len(p) for p in prompts]} tokens."
        )
    read = [prefill(model, torch.tensor([prompt]), chunk=prefill_chunk) for prompt in prompts]
    logits = torch.cat([last for last, _ in read])
    state = ModelState.stack([state for _, state in read])
    del read  # the states of single prompts

    sampling = sampling or Sampling()
    generators = [torch.Generator(logits.device).manual_seed(seed) for _ in prompts]
    decoder = Decoder(model, state, room=max_tokens, graph=graph) if max_tokens > 1 else None
    ended = [False] * len(prompts)
    for step in range(1, max_tokens + 1):
        chosen = sample(logits[:, :vocab_size], sampling, generators)
        ids = chosen.tolist()
        yield [None if done else t for t, done in zip(ids, ended, strict=True)]
        ended = [done or t == stop for t, done in zip(ids, ended, strict=True)]
        if decoder is None or all(ended) or step == max_tokens:
            return
        logits = decoder.step(chosen)
