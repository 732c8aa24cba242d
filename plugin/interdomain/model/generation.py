"""Text from a model.

`prefill` reads a prompt into a state, a `Decoder` takes one token per step, and `generate` does
both.

The state has a fixed size for every mixer but softmax without a window, so a step costs the same
after ten tokens and after a million.

Shapes: B prompts, T tokens of a prompt, V vocabulary.
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

PREFILL_CHUNK = 2048  # tokens per forward pass of a prompt (paper, inference scaling)


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the temperature is applied first, then top_k, then top_p.

    Attributes:
        temperature: The logits are divided by it; 0 takes the most probable token.
        top_k: Number of most probable tokens to choose from; 0: all.
        top_p: Choose from the most probable tokens that together have this probability; 1: all.
    Raises:
        ValueError: A value is outside its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Checks the ranges."""
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature must be 0 (greedy) or a finite number above: got {self.temperature}."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1: got {self.top_p}.")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all tokens) or more: got {self.top_k}.")


def sample(logits: Tensor, sampling: Sampling, generators: list[torch.Generator]) -> Tensor:
    """Chooses the next tokens.

    Args:
        logits: [B, V].
        sampling: How to choose.
        generators: One per row, so that a row's tokens do not depend on its batch.
    Returns:
        The tokens, [B] integers.
    """
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    # Relative to the largest logit, a temperature near zero gives -inf, and not the NaN of inf -
    # inf.
    logits = (logits.double() - logits.amax(dim=-1, keepdim=True)) / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        # topk keeps exactly top_k tokens. A threshold would not: bf16 logits are often equal.
        kept = logits.topk(sampling.top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept.indices, kept.values)
    probabilities = logits.softmax(dim=-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        # The probability of all tokens before each one. It is 0 for the first, which is therefore
        # always kept.
        before = ordered.cumsum(dim=-1) - ordered
        kept = ordered.where(before < sampling.top_p, 0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, kept)
    tokens = []
    for row, generator in zip(probabilities, generators, strict=True):
        tokens.append(torch.multinomial(row, 1, generator=generator))
    return torch.cat(tokens)


@torch.no_grad()
def prefill(
    model: Transformer, tokens: Tensor, state: ModelState | None = None, chunk: int = PREFILL_CHUNK
) -> tuple[Tensor, ModelState]:
    """Reads prompts of one length in pieces: the memory for activations does not grow with T.

    Args:
        model: The model.
        tokens: [B, T] integers, T >= 1.
        state: The state to continue from, with B rows; it is advanced in place. None: a new one.
        chunk: Number of tokens in a piece.
    Returns:
        The logits [B, V] and the state, both after the last token.
    """
    B, T = tokens.shape
    tokens = tokens.to(model.tok_embeddings.weight.device)
    if state is None:
        state = model.init_state(B, capacity=T)
    for begin in range(0, T, chunk):
        logits = model(tokens[:, begin : begin + chunk], state, last=1)
    return logits[:, -1], state


class Decoder:
    """Takes one token of each row per step.

    On CUDA a step is one CUDA graph, captured here and replayed for every token.

    Args:
        model: The model that the state belongs to.
        state: The state to continue from. It is advanced in place, and nothing else may advance it
            from now on.
        room: Number of tokens to decode, for which softmax's cache is made large enough; other
            mixers need none.
        graph: Capture a CUDA graph. None: on CUDA.
    Raises:
        ValueError: A graph is to be captured under autocast.
    """

    @torch.no_grad()
    def __init__(
        self, model: Transformer, state: ModelState, *, room: int = 0, graph: bool | None = None
    ) -> None:
        """Makes room for `room` tokens in `state`, and captures a step of `model` if `graph`."""
        self.model = model
        self.state = state
        self.graph: torch.cuda.CUDAGraph | None = None
        device = state.position.device
        if graph is None:
            graph = device.type == "cuda"
        if not graph:
            return

        # Autocast frees its copies of weights when it ends, and the graph would go on reading them.
        if torch.is_autocast_enabled("cuda"):
            raise ValueError(
                "a CUDA graph cannot be captured under autocast: make the Decoder outside of it."
            )
        # The graph reads and writes fixed addresses, so the cache cannot grow later.
        needed = state.length + max(1, room)
        if state.capacity is not None and state.capacity < needed:
            state.reserve(needed)
        state.captured = True
        self.tokens = torch.zeros(len(state.position), 1, dtype=torch.int64, device=device)
        with _restored(state), torch.cuda.device(device):
            self._capture()

    def _capture(self) -> None:
        """Captures one step as a CUDA graph, after three steps that warm up."""
        position = self.state.position
        begin = position.clone()
        current = torch.cuda.current_stream(position.device)
        # A capture needs a stream of its own. What was started before must be done first.
        side_stream = _capture_stream(position.device)
        side_stream.wait_stream(current)
        # The first steps compile kernels and let libraries allocate memory.
        with torch.cuda.stream(side_stream):
            for _ in range(3):
                self.model(self.tokens, self.state)
                # Every step writes the same slot: a cache may have room for one token only.
                position.copy_(begin)
        current.wait_stream(side_stream)
        self.graph = torch.cuda.CUDAGraph()
        # Other threads, such as a server's or a process group's, may call CUDA during the capture.
        with torch.cuda.graph(self.graph, stream=side_stream, capture_error_mode="thread_local"):
            self.logits = self.model(self.tokens, self.state)[:, -1]

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Advances the state by one token of each row.

        Args:
            tokens: [B] integers.
        Returns:
            The logits after them, [B, V]. With a CUDA graph it is always the same tensor, which the
            next step overwrites.
        Raises:
            ValueError: There is not one token per row, or with a CUDA graph softmax's cache is
                full.
        """
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
    """Undoes the steps taken in this context. Tensors keep their addresses.

    The copies are on the host, because the GPU may have no room for them.
    """
    changing = [state.position]
    for layer in state.layers:
        # A step only adds to a growing cache, so its tokens need no copy.
        if layer.capacity is None:
            changing += layer.tensors().values()
    copies = [x.to("cpu", copy=True) for x in changing]
    yield
    for x, copy in zip(changing, copies, strict=True):
        x.copy_(copy)


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream on which all Decoders of a device are captured.

    There is one per device because libraries keep memory for every stream. The default stream of
    `torch.cuda.graph` belongs to the device of the first capture in the process, and would not
    capture the steps of another device.
    """
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
) -> Iterator[list[int | None]]:
    """Continues several prompts at once.

    Prompts are read one after the other and decoded together. A prompt's text depends only on the
    seed and its own tokens, not on the prompts beside it, up to the rounding of batched matrix
    products.

    Args:
        model: The model.
        prompts: Token ids of each prompt, at least one.
        max_tokens: Largest number of new tokens per prompt.
        sampling: How tokens are chosen. None: temperature 1, all tokens.
        seed: Seed of the random numbers.
        stop: The token that ends a row; it is yielded. None: rows end at max_tokens only.
        vocab_size: The tokenizer's vocabulary, if the model's is padded: its further rows are never
            chosen.
    Yields:
        One token per prompt and step; None for prompts that have ended.
    Raises:
        ValueError: There is no prompt, or one has no tokens. It is raised when the first token is
            asked for.
    """
    if not prompts or not all(prompts):
        raise ValueError(
            f"give prompts of at least one token each: got {[len(p) for p in prompts]} tokens."
        )
    last_logits = []
    states = []
    for prompt in prompts:
        logits, state = prefill(model, torch.tensor([prompt]))
        last_logits.append(logits)
        states.append(state)
    logits = torch.cat(last_logits)
    state = ModelState.stack(states)
    # The states of single prompts are no longer needed.
    del states

    if sampling is None:
        sampling = Sampling()
    # Each row has the same seed and a generator of its own, so the rows do not affect one another.
    generators = [torch.Generator(logits.device).manual_seed(seed) for _ in prompts]
    decoder = Decoder(model, state, room=max_tokens) if max_tokens > 1 else None
    ended = [False] * len(prompts)
    for step in range(1, max_tokens + 1):
        chosen = sample(logits[:, :vocab_size], sampling, generators)
        tokens: list[int | None] = []
        for row, token in enumerate(chosen.tolist()):
            if ended[row]:
                tokens.append(None)
            else:
                tokens.append(token)
                ended[row] = token == stop
        yield tokens
        if decoder is None or all(ended) or step == max_tokens:
            return
        logits = decoder.step(chosen)
