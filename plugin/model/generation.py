"""Text from a model: `prefill` reads a prompt into a state, `decode` takes one token a step, `generate` does both.

The state has a fixed size for every mixer but softmax, so a step costs the same after ten tokens and after a million.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .state import ModelState
from .transformer import Transformer, checked_padding

# Shapes: B batch (prompts), T tokens of a prompt, V vocabulary.

PREFILL_CHUNK = 2048  # tokens per forward pass of a prompt (paper, inference scaling)
MAX_COMPILED = 256  # shapes in a process; torch.compile's own limit for one function's versions in all


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


@torch.no_grad()
def prefill(
    model: Transformer,
    tokens: Tensor,
    state: ModelState | None = None,
    chunk: int = PREFILL_CHUNK,
    padding: Tensor | None = None,
) -> tuple[Tensor, ModelState]:
    """Read tokens [B, T], T >= 1, in pieces of `chunk`: memory for activations does not grow with T.

    Args:
        state: where to go on from, advanced in place; None for a new one.
        padding: [B] integers, the left padding of each row; None for none.
    Returns: (logits after the last token [B, V], state).
    Raises: ValueError, with the state as it was, for what is none of this; tokens on a GPU are not looked at.
    """
    _at_least_one(chunk=chunk)
    if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32) or not tokens.numel():
        raise ValueError(
            f"tokens are {tokens.dtype} of shape {list(tokens.shape)}; expected int64 or int32 [B, T], one at least."
        )
    B, T = tokens.shape
    if tokens.device.type == "cpu" and not 0 <= tokens.min() <= tokens.max() < model.config.vocab_size:
        raise ValueError(
            f"tokens are {tokens.min()} to {tokens.max()}; the vocabulary is 0 to {model.config.vocab_size - 1}. Encode the "
            "text with the tokenizer of this model's folder."
        )
    tokens = tokens.to(model.tok_embeddings.weight.device)
    state = model.init_state(B, capacity=T) if state is None else state
    _one_row_each(B, state)
    padding = checked_padding(padding, state, tokens)
    for begin in range(0, T, chunk):
        piece = tokens[:, begin : begin + chunk]
        here = None if padding is None else (padding - begin).clamp(0, piece.shape[1])
        logits = model(piece, state, padding=here, last=1)
    return logits[:, -1], state


@torch.no_grad()
def decode(model: Transformer, tokens: Tensor, state: ModelState) -> Tensor:
    """One step: tokens [B] -> logits [B, V]; the state is advanced."""
    _one_token_each(tokens, state)
    return model(tokens[:, None], state)[:, -1]


class Decoder:
    """Steps from a state on, at its batch size: on CUDA one CUDA graph, captured here and replayed for every token.

    Made and used in or out of an inference mode, as it comes.

    Args:
        state: taken over; nothing else may advance it from now on.
        room: tokens to decode, for which softmax's cache is made large enough; other mixers need none.
        graph: whether to capture; None for on CUDA alone.
        compiled: whether to compile the step with torch.compile: half a minute here, once per shape, on a CPU too, for fewer
            and faster kernels.
    Raises: ValueError for a graph without CUDA.
    """

    @torch.inference_mode(False)  # what is made here is written in every step, wherever that is taken
    @torch.no_grad()
    def __init__(
        self, model: Transformer, state: ModelState, *, room: int = 0, graph: bool | None = None, compiled: bool = False
    ) -> None:
        device = state.position.device
        captured = device.type == "cuda" if graph is None else graph
        if captured and device.type != "cuda":
            raise ValueError(f"a CUDA graph needs a model on CUDA: this one is on {device}. Leave out graph=True.")
        made = [state.position, *(x for layer in state.layers for x in layer.tensors().values())]
        # What an inference mode has made cannot be written outside of it.
        self.state = state.clone() if any(x.is_inference() for x in made) else state
        self.graph: torch.cuda.CUDAGraph | None = None
        self.forward = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
        if captured or compiled:  # nothing in a step may depend on a number of the host's
            self.state.reserve(max(1, room))
            self.state.cursor = torch.full((1,), self.state.length, device=device)
            self.tokens = torch.zeros(len(state.position), 1, dtype=torch.int64, device=device)
            # All shapes share the one code of the model, of which torch.compile would keep eight versions.
            limit = torch._dynamo.config.patch(recompile_limit=MAX_COMPILED) if compiled else contextlib.nullcontext()
            with limit, _restored(self.state):
                if captured:
                    with torch.cuda.device(device):
                        self._capture(device)
                else:
                    self.forward(self.tokens, self.state)

    def _capture(self, device: torch.device) -> None:
        assert self.state.cursor is not None
        current, aside = torch.cuda.current_stream(device), _stream(device, "warm-up")
        aside.wait_stream(current)
        cached = torch.is_autocast_cache_enabled()
        # Copies of weights in there are freed when autocast ends. From the first step on: if this had changed, torch.compile
        # would compile anew in the capture, where it cannot.
        torch.set_autocast_cache_enabled(False)
        try:
            # The first steps compile kernels and let libraries allocate.
            with torch.cuda.stream(aside):
                for _ in range(3):
                    self.forward(self.tokens, self.state)
                    self.state.cursor.fill_(self.state.length)  # a cache may have room for one
            current.wait_stream(aside)
            self.graph = torch.cuda.CUDAGraph()
            # Other threads may do as they like meanwhile, a server's or a process group's.
            with torch.cuda.graph(self.graph, stream=_stream(device, "capture"), capture_error_mode="thread_local"):
                self.logits = self.forward(self.tokens, self.state)[:, -1]
        finally:
            torch.set_autocast_cache_enabled(cached)

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """tokens [B] -> logits [B, V], which the next step overwrites. Raises: ValueError where softmax's cache is full."""
        _one_token_each(tokens, self.state)
        if self.state.cursor is None:
            return self.forward(tokens[:, None], self.state)[:, -1]
        if self.state.capacity is not None and self.state.length >= self.state.capacity:
            raise ValueError(
                f"the cache is full: {self.state.length} tokens. Make the Decoder with more room (softmax's cache grows with "
                "every token; a graph cannot)."
            )
        self.tokens.copy_(tokens[:, None])
        if self.graph is None:
            self.logits = self.forward(self.tokens, self.state)[:, -1]
        else:
            self.graph.replay()
        self.state.length += 1
        return self.logits


@contextlib.contextmanager
def _restored(state: ModelState) -> Iterator[None]:
    """Undo the steps taken in this context; addresses stay. Copies wait on the host, for a GPU may have no room."""
    before = [x.to("cpu", copy=True) for x in state.overwritten()]
    yield
    for x, old in zip(state.overwritten(), before, strict=True):
        x.copy_(old)
    if state.cursor is not None:
        state.cursor.fill_(state.length)


@functools.cache
def _stream(device: torch.device, use: str) -> torch.cuda.Stream:
    """One for all Decoders of a device: libraries keep memory for every stream. torch.cuda.graph's own is for one device only,
    that of the first capture in the process: steps of another would not be captured."""
    return torch.cuda.Stream(device)


def generate(
    model: Transformer,
    prompts: list[list[int]],
    *,
    max_tokens: int | None,
    prefill_chunk: int = PREFILL_CHUNK,
    state: ModelState | None = None,
    **options,
) -> Iterator[list[int | None]]:
    """Continue several prompts at once; yields one token per prompt and step, None for prompts that have ended.

    Prompts are read together, with padding on the left of the shorter ones, and decoded together. A prompt's text depends on
    (seed, its own tokens) alone, not on the prompts beside it, up to the rounding of batched matrix products.

    Args:
        prompts: token ids, each at least one and all below the vocabulary size.
        state: where the prompts go on from, one row each; advanced. None for a new one.
        options: of `continuation`.
    Raises: ValueError for no prompt, an empty one, a token outside the vocabulary, or a length that is none; at the first
        token, as of any iterator.
    """
    _at_least_one(max_tokens=max_tokens, prefill_chunk=prefill_chunk)
    logits, state = read(model, prompts, state, prefill_chunk, room=max_tokens or 0)
    yield from continuation(model, logits, state, max_tokens=max_tokens, **options)


def continuation(
    model: Transformer,
    logits: Tensor,
    state: ModelState,
    *,
    max_tokens: int | None,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: int | None = None,
    vocab_size: int | None = None,
    graph: bool | None = None,
    compiled: bool = False,
) -> Iterator[list[int | None]]:
    """What follows tokens that are read: `generate` after `read`, or after a state from disk.

    Args:
        logits: after the last token, [B, V]. state: after the last token; advanced.
        max_tokens: None for as many as are taken: without end, at a cost that does not grow (but softmax's).
        stop: a token that ends a row (it is yielded), or None.
        vocab_size: the tokenizer's, where the model's is padded: spare rows mean nothing and are never chosen.
        graph, compiled: how to decode, see `Decoder`.
    """
    _at_least_one(max_tokens=max_tokens)
    if max_tokens is None and state.capacity is not None:
        graph = compiled = False  # a step of fixed shape has no room for a cache that grows without end
    sampling = sampling or Sampling()
    generators = [torch.Generator(logits.device).manual_seed(seed) for _ in logits]
    decoder = Decoder(model, state, room=max_tokens or 0, graph=graph, compiled=compiled) if max_tokens != 1 else None
    ended = [False] * len(logits)
    for step in itertools.count(1):
        tokens = sample(logits[:, :vocab_size], sampling, generators)
        ids = tokens.tolist()
        yield [None if done else t for t, done in zip(ids, ended, strict=True)]
        ended = [done or t == stop for t, done in zip(ids, ended, strict=True)]
        if decoder is None or all(ended) or step == max_tokens:
            return
        logits = decoder.step(tokens)


def read(
    model: Transformer,
    prompts: list[list[int]],
    state: ModelState | None = None,
    chunk: int = PREFILL_CHUNK,
    room: int = 0,
) -> tuple[Tensor, ModelState]:
    """`prefill` for lists of tokens of any lengths, from a state with one row for each or from none.

    room: tokens that are to follow, for which softmax has room from the start.
    """
    if not prompts or not all(prompts):
        raise ValueError(
            f"there must be prompts, each of at least one token (the tokenizer's BOS, say): got {len(prompts)}, of "
            f"{[len(p) for p in prompts]} tokens."
        )
    if state is not None:
        _one_row_each(len(prompts), state)
    device = model.tok_embeddings.weight.device
    longest = max(map(len, prompts))
    missing = [longest - len(p) for p in prompts]
    if any(missing) and state is not None:
        # Texts that have begun cannot be padded: each is read by itself.
        rows = [state.select(torch.tensor([i])) for i in range(len(prompts))]
        found = [prefill(model, torch.tensor([p]), row, chunk) for p, row in zip(prompts, rows, strict=True)]
        return torch.cat([logits for logits, _ in found]), ModelState.stack([row for _, row in found])
    state = state or model.init_state(len(prompts), capacity=longest + room)
    tokens = torch.tensor([[0] * n + [*p] for p, n in zip(prompts, missing, strict=True)])
    return prefill(model, tokens, state, chunk, torch.tensor(missing, device=device) if any(missing) else None)


def _at_least_one(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and (value < 1 or value % 1):
            raise ValueError(f"{name} must be at least 1, a whole number: got {value}.")


def _one_token_each(tokens: Tensor, state: ModelState) -> None:
    if tokens.shape != state.position.shape:
        raise ValueError(f"tokens are {list(tokens.shape)}; expected {list(state.position.shape)}, one of each row.")


def _one_row_each(texts: int, state: ModelState) -> None:
    if len(state.position) != texts:
        raise ValueError(f"{texts} text(s) for a state of {len(state.position)} row(s); there must be one each.")
