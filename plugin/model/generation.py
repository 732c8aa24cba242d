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
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .joined import JoinedProjections
from .state import MixerState, ModelState
from .transformer import Transformer, _checked

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
    if tokens.device.type == "cpu":
        _within_vocabulary("tokens", [tokens.min().item(), tokens.max().item()], model.config.vocab_size)
    state = model.init_state(B, capacity=T) if state is None else state
    _one_row_each(B, state)
    padding = _checked(padding, state, tokens)
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
    Attributes:
        restarts: whether `restart` is possible: with a graph, of a model of nothing but its own modules.
    """

    @torch.inference_mode(False)  # what is made here is written in every step, wherever that is taken
    @torch.no_grad()
    def __init__(
        self, model: Transformer, state: ModelState, *, room: int = 0, graph: bool | None = None, compiled: bool = False
    ) -> None:
        device = state.position.device
        self.state, self.graph, self.model, self._at = state, None, model, None
        self.forward = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
        captured = device.type == "cuda" if graph is None else graph
        if captured and device.type != "cuda":
            raise ValueError(f"a CUDA graph needs a model on CUDA: this one is on {device}. Leave out graph=True.")
        state.leave_inference_mode()
        if captured or compiled:  # nothing in a step may depend on a number of the host's
            state.reserve(max(1, room))
            state.cursor = torch.full((1,), state.length, device=device)
            self.tokens = torch.zeros(len(state.position), 1, dtype=torch.int64, device=device)
            before = state.snapshot()
            # All shapes share the one code of the model, of which torch.compile would keep eight versions.
            with torch._dynamo.config.patch(recompile_limit=MAX_COMPILED) if compiled else contextlib.nullcontext():
                if captured:
                    with torch.cuda.device(device):
                        self._capture(device)
                else:
                    self.forward(self.tokens, state)
            state.restore(before)

    def _capture(self, device: torch.device) -> None:
        for layer in self.state.layers:
            if isinstance(layer, MixerState):  # tables of its own: `restart` writes them
                layer.step = tree_map_only(Tensor, Tensor.clone, layer.step)
        self._at = _places(self.model, self.state)
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
            mode = dict(stream=_stream(device, "capture"), capture_error_mode="thread_local")
            with torch.cuda.graph(self.graph, **mode):
                self.logits = self.forward(self.tokens, self.state)[:, -1]
        finally:
            torch.set_autocast_cache_enabled(cached)

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """tokens [B] -> logits [B, V], which the next step overwrites."""
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

    @property
    def restarts(self) -> bool:
        return self._at is not None

    def fits(self, state: ModelState, room: int = 0) -> bool:
        """Whether `restart` can: rows, padding or none, dtype and room are as captured, and what the graph reads lies where
        it lay. (Weights may have changed in place.)"""
        return self.restarts and self.state.fits(state, room) and self._at == _places(self.model, self.state)

    @torch.inference_mode(False)
    @torch.no_grad()
    def restart(self, state: ModelState, room: int = 0) -> None:
        """Go on from another state of the same model, which is copied: a capture takes as long as hundreds of steps.

        Raises: ValueError where the graph is not one of this state's steps (`fits`).
        """
        if not self.fits(state, room):
            raise ValueError("the captured graph is not of this state's steps: make another Decoder.")
        self.state.become(state)


def _places(model: Transformer, state: ModelState) -> list | None:
    """What a captured step takes for granted beside its state: where each weight lies, and how it is computed with.

    None where that is not all there is to it: modules of others (adapters, quantized or sharded weights) and hooks do what they
    do by values of Python's.
    """
    device = state.position.device
    found = [torch.cuda.current_stream(device), torch.backends.cuda.matmul.fp32_precision]
    found += [torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)]
    for name, module in model.named_modules():
        ours = type(module).__module__.rpartition(".")[0] == __name__.rpartition(".")[0]
        hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
        if hooked or not (ours or type(module) in (nn.Embedding, nn.ModuleDict)):
            return None
        tensors = module._parameters | module._buffers
        if isinstance(module, JoinedProjections):
            found.append(module.execution if hasattr(module, "execution") else None)
            if module._is_joined():
                tensors["joined"] = module.joined
        for key, x in tensors.items():
            if type(x) not in (Tensor, nn.Parameter, type(None)):
                return None
            found.append((name, key, x if x is None else (x.data_ptr(), x.dtype, x.device, x.shape, x.stride())))
    return found


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
        if all(ended) or step == max_tokens:
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
    if not prompts:
        raise ValueError("there is no prompt; give a list of at least one list of tokens.")
    check_tokens(prompts, model.config.vocab_size)
    if state is not None:
        _one_row_each(len(prompts), state)
    device = model.tok_embeddings.weight.device
    longest = max(map(len, prompts))
    missing = [longest - len(p) for p in prompts]
    if any(missing) and state is not None:
        # Texts that have begun cannot be padded: each is read by itself.
        rows = [state.select(torch.tensor([i])) for i in range(len(prompts))]
        found = [
            prefill(model, torch.tensor([p], device=device), row, chunk) for p, row in zip(prompts, rows, strict=True)
        ]
        return torch.cat([logits for logits, _ in found]), ModelState.stack([row for _, row in found])
    state = state or model.init_state(len(prompts), capacity=longest + room)
    tokens = torch.tensor([[0] * n + [*p] for p, n in zip(prompts, missing, strict=True)], device=device)
    return prefill(model, tokens, state, chunk, torch.tensor(missing, device=device) if any(missing) else None)


def _at_least_one(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and (value < 1 or value % 1):
            raise ValueError(f"{name} must be at least 1, a whole number: got {value}.")


def check_tokens(prompts: list[list[int]], vocab_size: int) -> None:
    """Raises ValueError unless every prompt has tokens, all of the vocabulary."""
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {i} is empty; give it at least one token (the tokenizer's BOS, say).")
        _within_vocabulary(f"prompt {i}", prompt, vocab_size)


def _within_vocabulary(name: str, tokens: list[int], vocab_size: int) -> None:
    outside = [t for t in tokens if not 0 <= t < vocab_size]
    if outside:
        raise ValueError(
            f"{name}: the token {outside[0]} is outside the vocabulary of 0 to {vocab_size - 1}. Encode the text with the "
            "tokenizer of this model's folder."
        )


def _one_token_each(tokens: Tensor, state: ModelState) -> None:
    if tokens.shape != state.position.shape:
        raise ValueError(f"tokens are {list(tokens.shape)}; expected {list(state.position.shape)}, one of each row.")


def _one_row_each(texts: int, state: ModelState) -> None:
    if len(state.position) != texts:
        raise ValueError(f"{texts} text(s) for a state of {len(state.position)} row(s); there must be one each.")
