"""What bench_inference times: models with random weights, one decode step launched in every way, and reading a prompt.

A step's time depends on shapes alone, so no prompt is read before it: interdomain's state is put at its prefix by its position,
and softmax's cache holds random keys and values. Shapes: B batch, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from interdomain.model import Execution, ModelConfig, ModelState, Transformer
from interdomain.model.generation import Decoder, decode, prefill
from interdomain.model.initialize import initial_value

from ._bench import reason, require_healthy
from ._timing import Ceilings, attempt, captured, interleaved, peak_memory, ratio, release, timer, usable

LARGE = 2**20  # numbers: tensors from this on are drawn on the device, not as training draws them
ROOM = 16  # slots beyond those that a timed call fills, for the steps that warm up
ATTENTION = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


@dataclass(frozen=True)
class Setup:
    """How everything is timed. seconds: of all turns of one candidate at one prefix. compiled: by torch.compile, too."""

    device: torch.device
    steps: int
    rounds: int
    seconds: float
    compiled: bool = False

    @property
    def graph(self) -> bool:
        return self.device.type == "cuda"


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


def random_tokens(model: Transformer, *shape: int) -> Tensor:
    return torch.randint(model.config.vocab_size, shape, device=model.tok_embeddings.weight.device)


def decoders(name: str, model: Transformer, tokens: Tensor, make_state: Callable, s: Setup) -> dict[str, Callable]:
    """Candidates by `Decoder`, which is one CUDA graph where there are any: as it is, and compiled."""

    def build(compiled: bool):
        made = Decoder(model, make_state(), room=s.steps, graph=s.graph, compiled=compiled)
        return Candidate(lambda: made.step(tokens), made.state)

    kinds = [("", False), *([("compiled, ", True)] if s.compiled else [])]
    launched = "graph" if s.graph else "no graph"
    return {f"{name}, {kind}{launched}": lambda compiled=compiled: build(compiled) for kind, compiled in kinds}


def interdomain_candidates(model: Transformer, batch: int, s: Setup) -> dict[str, Callable[[], Candidate]]:
    tokens = random_tokens(model, batch)

    def eager():
        state = model.init_state(batch)
        return Candidate(lambda: decode(model, tokens, state), state)

    return {"interdomain, eager": eager} | decoders("interdomain", model, tokens, lambda: model.init_state(batch), s)


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
        k, v = (x[:, :, :prefix] for x in (cache.layers[0].k, cache.layers[0].v))
        backend = fastest_attention(torch.randn_like(k[:, :, :1]), k, v)

        def step():
            state.length = prefix - 1
            with sdpa_kernel(backend):
                return decode(model, tokens, state)

        step()
        return Candidate(captured(step)[0] if s.graph else step, state)

    static = decoders("softmax, static cache", model, tokens, shared, s)
    return {"softmax, eager": eager} | static | {f"softmax, exact cache, {'graph' if s.graph else 'no graph'}": exact}


def fastest_attention(q: Tensor, k: Tensor, v: Tensor) -> SDPBackend:
    """Of PyTorch's attention kernels, the fastest for one query and these keys. Raises: RuntimeError if none runs."""

    def attend(backend):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    backends = ATTENTION if q.device.type == "cuda" else ATTENTION[:1]
    good, bad = usable({b: lambda b=b: attend(b) for b in backends}, q.device)
    if not good:
        raise RuntimeError(f"no attention kernel runs: {bad}")
    times = interleaved(good, q.device, rounds=5, seconds=0.05)
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


def decode_rows(
    models: dict[str, Transformer],
    batch: int,
    prefix: int,
    ours: dict,
    remarks: dict,
    s: Setup,
    limits: Ceilings,
    passed: Callable[[], bool],
) -> list[dict]:
    """A row for every way of decoding at one prefix, timed in turns. ours, remarks: interdomain's candidates, as `attempt` has
    them. passed(): whether no other may begin."""
    try:
        makers = softmax_candidates(models["softmax"], batch, prefix, s)
    except Exception as e:  # a cache that does not fit, as a rule
        makers, remarks = {}, {**remarks, "softmax, any": reason(e)}
    release(s.device)
    softmax, others = attempt(makers, s.device, passed=passed)
    candidates = ours | softmax
    calls, bad = usable({name: timed(c, prefix, s) for name, c in candidates.items()}, s.device, passed=passed)
    rows = [{"path": n, "B": batch, "prefix": prefix, "remark": why} for n, why in (remarks | others | bad).items()]
    try:  # at an idle GPU: eager, the host's gaps count
        times = interleaved(calls, s.device, rounds=s.rounds, seconds=s.seconds, lead_ms=0)
    except torch.OutOfMemoryError as e:  # the timer itself needs some
        return [*rows, {"path": "any", "B": batch, "prefix": prefix, "remark": reason(e)}]
    best = min((taken.median / s.steps for n, (_, taken, _) in times.items() if n in softmax), default=None)
    for name, (_, taken, _) in times.items():
        ms = taken.median / s.steps
        nbytes = step_bytes(models[name.split(",")[0]], candidates[name].state, prefix)
        rows.append({
            "path": name, "B": batch, "prefix": prefix, "ms a step": ms, "tokens/s": 1e3 * batch / ms, "MB": nbytes / 1e6,
            "floor ms": limits.floor_ms(nbytes), "of floor": ratio(limits.floor_ms(nbytes), ms),
            "speedup": None if name in softmax else ratio(best, ms), "times": taken._asdict(),
        })  # fmt: skip
    return rows


# A prompt


def prefill_figures(model: Transformer, batch: int, length: int, chunk: int, device: torch.device) -> dict:
    """GiB at the peak, these weights included, and tokens/s, of the second time that random tokens [batch, length] are read.

    What else lives on the device is left out. One that cannot be read says why in "remark": out of memory is a result.
    """
    run, found, ms = timer(device, lead_ms=0), {}, []
    try:
        tokens = random_tokens(model, batch, length)

        def read():
            prefill(model, tokens, chunk=chunk)

        read()
        peak = peak_memory(lambda: ms.extend(run([read])[0]), device)
        if peak is None:
            ms += run([read])[0]
        else:
            found["GiB"] = peak / 2**10 + model_bytes(model) / 2**30
        found["tokens/s"] = 1e3 * batch * length / sum(ms)
    except Exception as e:
        found["remark"] = reason(e)
    release(device)
    require_healthy(device, "reading a prompt")
    return found
