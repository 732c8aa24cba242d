"""What bench_inference times: models with random weights, one decode step launched in every way, and reading a prompt.

A step's time depends on shapes alone, so no prompt is read before it: interdomain's state is put at its prefix by its position,
and softmax's cache holds random keys and values. Shapes: B batch, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from interdomain.model import Execution, ModelConfig, ModelState, Transformer
from interdomain.model.generation import Decoder, decode, prefill
from interdomain.model.initialize import initial_value

from ._bench import Deadline, reason, require_healthy
from ._timing import Ceilings, cuda_timer, interleaved, peak_memory, ratio, release, usable, wall_timer
from .bench_decode import ATTENTION, captured

CONDITIONS = ("interdomain", "softmax")
LARGE = 2**20  # numbers: tensors from this on are drawn on the device, not as training draws them
ROOM = 16  # slots beyond those that a timed call fills, for the steps that warm up


@dataclass(frozen=True)
class Setup:
    """How everything is timed.

    seconds: of all turns of one candidate at one prefix. eager_only: without the ways that differ in a CUDA graph alone.
    compiled: torch.compile too.
    """

    device: torch.device
    steps: int
    rounds: int
    seconds: float
    eager_only: bool = False
    compiled: bool = False

    @property
    def graph(self) -> bool:
        return self.device.type == "cuda"

    @property
    def launched(self) -> str:
        """The last word of a path that is a CUDA graph where there are any."""
        return "graph" if self.graph else "no graph"


class Candidate(NamedTuple):
    """step() takes one token per sequence and advances `state`."""

    step: Callable[[], object]
    state: ModelState


def put(state: ModelState, prefix: int) -> ModelState:
    """`state` as it stands after `prefix` tokens, but for what its tensors hold."""
    state.position.fill_(prefix)
    state.length = prefix
    if state.cursor is not None:
        state.cursor.fill_(prefix)
    return state


@torch.no_grad()
def random_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, execution: Execution | None = None
) -> Transformer:
    """As a folder is loaded; small tensors, the dynamics among them, as training starts from them, large ones normal."""
    with torch.device("meta"):
        model = Transformer(config, execution)
    model.to_empty(device=device)
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.numel() < LARGE:
            x.copy_(initial_value(name, x.shape, config, seed=0))
        else:
            x.normal_(0, 0.02)
    model.to(dtype)
    return model.requires_grad_(False).eval()


def model_bytes(model: Transformer) -> int:
    return sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))


def step_bytes(model: Transformer, state: ModelState, prefix: int) -> int:
    """What a step must move: weights read; the state read and written, or a cache of `prefix` tokens read and one written.

    Of the embedding only a row per sequence is read: none counts. Of the dynamics (in fp32), Lambda and half of W: the
    readout `complex` has the other half by symmetry.
    """
    weights = sum(
        p.numel() * p.element_size()
        for name, p in model.named_parameters()
        if not name.startswith("tok_embeddings.") and ".ssm." not in name
    )
    if state.capacity is not None:
        return weights + state.nbytes() // state.capacity * (prefix + 1)
    M = model.config.mixer.n_basis
    return weights + model.config.n_layers * model.config.n_kv_heads * 4 * (2 * M + 2 * M * M) + 2 * state.nbytes()


# One token


def random_tokens(model: Transformer, *shape: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, shape, device=model.tok_embeddings.weight.device)


def interdomain_candidates(model: Transformer, batch: int, s: Setup) -> dict[str, Callable[[], Candidate]]:
    tokens = random_tokens(model, batch)

    def eager():
        state = model.init_state(batch)
        return Candidate(lambda: decode(model, tokens, state), state)

    found = {"interdomain, eager": eager}
    if not s.eager_only:
        found[f"interdomain, {s.launched}"] = lambda: decoder(model, tokens, model.init_state(batch), s)
    if s.compiled:
        found[f"interdomain, compiled, {s.launched}"] = lambda: decoder(
            model, tokens, model.init_state(batch), s, compiled=True
        )
    return found


def softmax_candidates(model: Transformer, batch: int, prefix: int, s: Setup) -> dict[str, Callable[[], Candidate]]:
    """All share one cache, for at B=64 there is no room for two. Raises: torch.OutOfMemoryError.

    eager: the cache is cut to the tokens it holds. static cache: the model's own way in a CUDA graph, all slots under a mask.
    exact cache: no model can decode so, for it attends to `prefix` tokens at every step; but nothing is masked, so that the
    fastest of PyTorch's attention kernels runs in the graph: what softmax could reach.
    """
    tokens = random_tokens(model, batch)
    cache = model.init_state(batch, capacity=prefix + s.steps + ROOM)
    for layer in cache.layers:
        layer.k.normal_()
        layer.v.normal_()

    def shared():
        layers = [replace(layer) for layer in cache.layers]
        return put(replace(cache, layers=layers, position=cache.position.clone()), prefix)

    def eager():
        state = shared()
        return Candidate(lambda: decode(model, tokens, state), state)

    def exact():
        state = shared()
        backend = fastest_attention(cache, prefix, s)

        def step():
            state.length = prefix - 1
            with sdpa_kernel(backend):
                return decode(model, tokens, state)

        step()
        return Candidate(captured(step) if s.graph else step, state)

    found = {"softmax, eager": eager}
    if not s.eager_only:
        found[f"softmax, static cache, {s.launched}"] = lambda: decoder(model, tokens, shared(), s)
        found[f"softmax, exact cache, {s.launched}"] = exact
    if s.compiled:
        found[f"softmax, static cache, compiled, {s.launched}"] = lambda: decoder(
            model, tokens, shared(), s, compiled=True
        )
    return found


def decoder(model: Transformer, tokens: torch.Tensor, state: ModelState, s: Setup, compiled: bool = False) -> Candidate:
    made = Decoder(model, state, room=s.steps, graph=s.graph, compiled=compiled)
    return Candidate(lambda: made.step(tokens), made.state)


def fastest_attention(cache: ModelState, prefix: int, s: Setup) -> SDPBackend:
    """Of PyTorch's attention kernels, the fastest for one query and one layer's first `prefix` keys."""
    k, v = (x[:, :, :prefix] for x in (cache.layers[0].k, cache.layers[0].v))
    q = torch.randn_like(k[:, :, :1])

    def attend(backend):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    backends = ATTENTION[:3] if s.graph else ATTENTION[:1]  # the fourth, plain PyTorch, copies the cache
    good, bad = usable({b: lambda b=b: attend(b) for b in backends}, s.device)
    if not good:
        raise RuntimeError(f"no attention kernel runs: {bad}")
    times = interleaved(good, s.device, rounds=5, seconds=0.05)
    return min(times, key=lambda b: times[b][-1].median)


def timed(candidate: Candidate, prefix: int, s: Setup) -> tuple[Callable, Callable]:
    """(back to the prefix, with an idle GPU; s.steps tokens): a chain for `interleaved`, of which the second counts."""

    def prepare():
        put(candidate.state, prefix)
        if s.device.type == "cuda":
            torch.cuda.synchronize()

    def run(_):
        for _ in range(s.steps):
            candidate.step()

    return prepare, run


def built(builders: dict, s: Setup, deadline: Deadline) -> tuple[dict[str, Candidate], dict[str, str]]:
    """(candidates, why the others cannot be)."""
    good, bad = {}, {}
    for name, build in builders.items():
        if deadline.passed:
            bad[name] = "not run: time limit"
            continue
        try:
            good[name] = build()
        except Exception as e:
            bad[name] = reason(e)
        if name in bad:  # outside of `except`, where the exception would keep the tensors alive
            release(s.device)
            require_healthy(s.device, name)
    return good, bad


def decode_rows(
    candidates: dict[str, Candidate],
    remarks: dict[str, str],
    models: dict[str, Transformer],
    prefix: int,
    s: Setup,
    limits: Ceilings,
    deadline: Deadline,
) -> list[dict]:
    """One row per way of decoding at one prefix, timed in turns."""
    calls = {name: timed(candidate, prefix, s) for name, candidate in candidates.items()}
    calls, bad = usable(calls, s.device, passed=lambda: deadline.passed)
    times = interleaved(calls, s.device, rounds=s.rounds, seconds=s.seconds, lead_ms=0)  # eager: the host's gaps count
    rows = [{"path": name, "prefix": prefix, "remark": remark} for name, remark in (remarks | bad).items()]
    for name, (_, taken, _) in times.items():
        state = candidates[name].state
        batch = state.position.shape[0]
        ms = taken.median / s.steps
        nbytes = step_bytes(models[name.split(",")[0]], state, prefix)
        floor = limits.floor_ms(nbytes)
        rows.append({
            "path": name, "B": batch, "prefix": prefix, "ms a step": ms, "tokens/s": 1e3 * batch / ms, "MB": nbytes / 1e6,
            "floor ms": floor, "of floor": ratio(floor, ms), "turns": taken.count,
            "low ms": taken.low / s.steps, "high ms": taken.high / s.steps,
        })  # fmt: skip
    return rows


def flat_row(candidate: Candidate, prefixes, s: Setup) -> dict | None:
    """ms of a step at every prefix, from one graph in one set of turns, and the most over the least; None if it fails."""
    calls = {prefix: timed(candidate, prefix, s) for prefix in prefixes}
    _, bad = usable(dict([*calls.items()][:1]), s.device)
    if bad:  # it will fail in every cell, and say why
        return None
    try:
        times = interleaved(calls, s.device, rounds=s.rounds, seconds=s.seconds, lead_ms=0)
    except torch.OutOfMemoryError:
        return None
    ms = {prefix: taken.median / s.steps for prefix, (_, taken, _) in times.items()}
    return {"ms": ms, "flat": max(ms.values()) / min(ms.values())}


# A prompt


def prefill_figures(model: Transformer, batch: int, length: int, chunk: int, device: torch.device) -> dict:
    """GiB at the peak, these weights included, and tokens/s, of the second time that random tokens [batch, length] are read.

    What else lives on the device is left out. One that cannot be read says why in "remark": out of memory is a result.
    """
    run = cuda_timer(device, lead_ms=0) if device.type == "cuda" else wall_timer
    found, ms = {}, []
    try:
        tokens = random_tokens(model, batch, length)

        def read():
            prefill(model, tokens, chunk=chunk)

        read()
        if device.type == "cuda":
            peak = peak_memory(lambda: ms.extend(run([read])[0]), device)
            found["GiB"] = peak / 2**10 + model_bytes(model) / 2**30
        else:
            ms += run([read])[0]
        found["tokens/s"] = 1e3 * batch * length / sum(ms)
    except Exception as e:
        found["remark"] = reason(e)
    release(device)
    require_healthy(device, "reading a prompt")
    return found
