"""Decoder on a stand-in for torch.cuda: a step that is captured once and replayed gives what the model gives step by step."""

import contextlib
import functools

import pytest
import torch

from interdomain.model.generation import Decoder, decode, prefill

from .. import cuda_stand_in
from ..cuda_stand_in import on_cuda
from .common import lively, random_tokens, small_config, variant

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU; there is one")
VARIANTS = [("interdomain", "all"), ("s4d", "plain"), ("softmax", "kv2")]
STEPS = 5
CLOSE = dict(rtol=0, atol=1e-10)  # float64


@pytest.fixture
def cuda(monkeypatch):
    for name, value in cuda_stand_in.streams().items():
        monkeypatch.setattr(torch.cuda, name, value)
    with cuda_stand_in.OnTheCPU():
        yield


def read(model, padding=None, length=7):
    """A state after a prompt of two rows."""
    tokens = random_tokens(model.config, 2, length)
    return on_cuda(prefill(model, tokens, chunk=4, padding=padding)[1])


def steps(model):
    return random_tokens(model.config, 2, STEPS, seed=2).unbind(1)


def expected(model, state):
    """Step by step from a copy of the state: (logits of every step, the state after them)."""
    state = state.clone()
    return [decode(model, tokens, state) for tokens in steps(model)], state


def assert_equal(state, other):
    for layer, wanted in zip(state.layers, other.layers, strict=True):
        used, kept = layer.aligned(state.length, state.length), wanted.aligned(other.length, other.length)
        for name, x in used.tensors().items():
            torch.testing.assert_close(x, kept.tensors()[name], rtol=0, atol=1e-12)
    assert (state.length, state.position.tolist()) == (other.length, other.position.tolist())


@pytest.mark.parametrize(("condition", "option"), VARIANTS)
@pytest.mark.parametrize("padding", [None, [0, 3]], ids=["", "padded"])
def test_replayed_steps_are_the_model_s(condition, option, padding, cuda, monkeypatch):
    model = variant(condition, option)
    state = read(model, padding and torch.tensor(padding))
    wanted, after = expected(model, state)
    before = state.clone()
    decoder = Decoder(model, state, room=STEPS)
    assert_equal(state, before)  # warm-up and capture have left nothing
    places = [x.data_ptr() for layer in state.layers for x in layer.tensors().values()]
    with monkeypatch.context() as only_the_graph_runs:
        only_the_graph_runs.setattr(type(model), "forward", None)
        for tokens, logits in zip(steps(model), wanted, strict=True):
            torch.testing.assert_close(decoder.step(tokens), logits, **CLOSE)
        if condition == "softmax":
            with pytest.raises(ValueError, match="the cache is full: 12 tokens"):
                decoder.step(tokens)
    assert [x.data_ptr() for layer in state.layers for x in layer.tensors().values()] == places
    assert_equal(state, after)
    # A copy of its state goes on without it.
    torch.testing.assert_close(decode(model, tokens, state.clone()), decode(model, tokens, after), **CLOSE)


@pytest.mark.parametrize(
    ("condition", "made"), [("interdomain", "outside"), ("softmax", "outside"), ("softmax", "inside")]
)
@pytest.mark.parametrize("graphed", [True, False])
def test_an_inference_mode_may_begin_and_end_between_its_steps(condition, graphed, made, request):
    if graphed:
        request.getfixturevalue("cuda")
    model = variant(condition)
    wanted, after = expected(model, prefill(model, random_tokens(model.config, 2, 7))[1])
    with torch.inference_mode():
        state = model.init_state(2, capacity=7 + STEPS)  # room enough: no tensor is made anew for it
        state = prefill(model, random_tokens(model.config, 2, 7), state)[1]
        state = on_cuda(state) if graphed else state
        decoder = Decoder(model, state, room=STEPS) if made == "inside" else None
    decoder = decoder or Decoder(model, state, room=STEPS)
    for i, (tokens, logits) in enumerate(zip(steps(model), wanted, strict=True)):
        with torch.inference_mode(i % 2 == 1):
            torch.testing.assert_close(decoder.step(tokens), logits, **CLOSE)
    assert_equal(decoder.state, after)


def test_captures_share_streams_and_keep_no_copies_of_weights(cuda, monkeypatch):
    """Autocast frees its copies when it ends, and the graph would go on reading them; libraries keep memory for each stream."""
    model = variant("softmax", dtype=torch.float32)
    kept, graph = [], torch.cuda.graph

    @contextlib.contextmanager
    def capture(*args, **options):
        kept.append((torch.is_autocast_cache_enabled(), options["stream"]))
        with graph(*args, **options):
            yield

    monkeypatch.setattr(torch.cuda, "graph", capture)
    for _ in range(2):
        Decoder(model, read(model), room=1)
    assert kept == [(False, kept[0][1])] * 2
    assert torch.is_autocast_cache_enabled()


def test_nothing_is_compiled_in_the_capture(monkeypatch):
    """torch.compile asks for the state of CUDA's generator, which is refused while a stream is captured."""
    torch._dynamo.reset()
    compiled, before = [], []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    @contextlib.contextmanager
    def capture(graph, **options):
        before.append(len(compiled))
        yield

    for name, value in (cuda_stand_in.streams() | {"graph": capture}).items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    model = variant("interdomain")
    decoder = Decoder(model, prefill(model, random_tokens(model.config, 2, 4))[1], compiled=True)
    with torch.no_grad():
        decoder._capture(torch.device("cuda", 0))  # as where the state is on CUDA
    assert before == [len(compiled)] > [0]


@pytest.mark.parametrize("condition", ["interdomain", "softmax"])
def test_compiled(condition, monkeypatch):
    """Once per shape for all steps, whichever mode they are taken in; with room for one token where none is named."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    model = lively(small_config(condition, n_layers=1))
    for batch in (1, 2):
        tokens = random_tokens(model.config, batch, 6)
        state = prefill(model, tokens[:, :4])[1]
        own = state.clone()
        with torch.inference_mode(batch == 1):
            decoder = Decoder(model, own, room=2, compiled=True)
        with torch._dynamo.config.patch(recompile_limit=1):
            for i, token in enumerate(tokens[:, 4:].unbind(1)):
                with torch.inference_mode(i == 0):
                    found = decoder.step(token)
                torch.testing.assert_close(found, decode(model, token, state), **CLOSE)
        assert_equal(own, state)
    Decoder(model, state.clone(), compiled=True).step(tokens[:, 0])
