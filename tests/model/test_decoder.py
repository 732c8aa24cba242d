"""Decoder on a stand-in for torch.cuda: a step that is captured once and replayed gives what the model gives step by step."""

import contextlib
import functools

import pytest
import torch

from interdomain.model.generation import Decoder, decode, prefill

from .. import cuda_stand_in
from ..cuda_stand_in import on_cuda
from .common import random_tokens, variant

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU; there is one")
VARIANTS = [
    ("interdomain", "plain"),
    ("interdomain", "all"),
    ("s4d", "plain"),
    ("softmax", "plain"),
    ("softmax", "kv2"),
]
STEPS = 5


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
        for name, x in layer.tensors().items():
            y = wanted.tensors()[name]
            if name in "kv":
                x, y = x[:, :, : state.length], y[:, :, : other.length]
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    assert (state.length, state.position.tolist()) == (other.length, other.position.tolist())


@pytest.mark.parametrize(("condition", "option"), VARIANTS)
@pytest.mark.parametrize("padding", [None, [0, 3]], ids=["", "padded"])
def test_replayed_steps_are_the_model_s(condition, option, padding, cuda, monkeypatch):
    model = variant(condition, option)
    state = read(model, padding and torch.tensor(padding))
    wanted, after = expected(model, state)
    before = state.clone()
    decoder = Decoder(model, state, room=STEPS)
    assert decoder.state is state
    assert_equal(state, before)  # warm-up and capture have left nothing
    places = [x.data_ptr() for layer in state.layers for x in layer.tensors().values()]
    monkeypatch.setattr(type(model), "forward", None)  # from now on only the graph runs
    for tokens, logits in zip(steps(model), wanted, strict=True):
        torch.testing.assert_close(decoder.step(tokens), logits, rtol=0, atol=1e-10)  # float64
    assert [x.data_ptr() for layer in state.layers for x in layer.tensors().values()] == places
    assert_equal(state, after)


@pytest.mark.parametrize("condition", ["interdomain", "softmax"])
def test_a_copy_of_its_state_goes_on_without_it(condition, cuda):
    model = variant(condition)
    state = read(model)
    _, after = expected(model, state)
    decoder = Decoder(model, state, room=STEPS + 1)
    for tokens in steps(model):
        decoder.step(tokens)
    copy = state.clone()
    tokens = steps(model)[0]
    wanted = decode(model, tokens, after)
    torch.testing.assert_close(decode(model, tokens, copy), wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(decoder.step(tokens), wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("condition", ["interdomain", "softmax"])
@pytest.mark.parametrize("graphed", [True, False])
@pytest.mark.parametrize("made", ["outside", "inside"])
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
            torch.testing.assert_close(decoder.step(tokens), logits, rtol=0, atol=1e-10)
    assert_equal(state, after)
    torch.testing.assert_close(  # and goes on without it
        decode(model, steps(model)[0], state.clone()), decode(model, steps(model)[0], after), rtol=0, atol=1e-10
    )


class OnASecondOne(torch.Tensor):
    """A tensor that says it is on the second GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: torch.device("cuda", 1))


def test_it_captures_on_the_device_of_its_state(cuda):
    """torch.cuda.graph's own stream is on the device of the first capture: on another one nothing would be captured."""
    model = variant("interdomain")
    first = Decoder(model, read(model))
    state = read(model)
    state.position = state.position.as_subclass(OnASecondOne)
    second = Decoder(model, state)
    assert [d.graph.stream.device for d in (first, second)] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert Decoder(model, read(model)).graph.stream is first.graph.stream  # libraries keep memory for each


def test_autocast_keeps_no_copies_that_a_graph_would_read(cuda, monkeypatch):
    """They are freed when it ends, and the graph would go on reading them."""
    model = variant("softmax", dtype=torch.float32)
    kept = []
    monkeypatch.setattr(torch.cuda, "graph", watched(torch.cuda.graph, kept))
    Decoder(model, read(model), room=1)
    assert kept == [False]
    assert torch.is_autocast_cache_enabled()


def test_a_graph_is_of_one_precision_of_products(cuda):
    """By whichever of PyTorch's switches: set by the newer one, the older one refuses to name it."""
    model, matmul = variant("interdomain"), torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        decoder, other = Decoder(model, read(model)), read(model)
        assert decoder.fits(other)
        matmul.fp32_precision = "ieee"
        assert not decoder.fits(other)
    finally:
        matmul.fp32_precision = before


def watched(graph, kept):
    @contextlib.contextmanager
    def capture(*args, **options):
        kept.append(torch.is_autocast_cache_enabled())
        with graph(*args, **options):
            yield

    return capture


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
    state = prefill(model, random_tokens(model.config, 2, 4))[1]
    decoder = Decoder(model, state, compiled=True)
    with torch.no_grad():
        decoder._capture(torch.device("cuda", 0))  # as where the state is on CUDA
    assert before == [len(compiled)]


def test_compiled_for_more_shapes_than_torch_compile_keeps(monkeypatch):
    """Made here, in every shape; no step compiles anything, whichever mode it is taken in."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    model = variant("softmax")
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
                torch.testing.assert_close(found, decode(model, token, state), rtol=0, atol=1e-10)
        assert_equal(own, state)


def test_logits_are_overwritten_by_the_next_step(cuda):
    model = variant("interdomain")
    decoder = Decoder(model, read(model))
    first = decoder.step(steps(model)[0])
    kept = first.clone()
    assert decoder.step(steps(model)[1]).data_ptr() == first.data_ptr()
    assert not torch.equal(first, kept)


def test_a_full_cache_is_refused_and_nothing_is_written(cuda):
    model = variant("softmax")
    state = read(model)
    decoder = Decoder(model, state, room=1)
    decoder.step(steps(model)[0])
    full = state.clone()
    with pytest.raises(ValueError, match=r"the cache is full: 8 tokens.*more room"):
        decoder.step(steps(model)[1])
    assert_equal(state, full)


def test_the_first_token_of_all(cuda):
    model = variant("softmax")
    state = on_cuda(model.init_state(2))
    wanted, _ = expected(model, state)
    decoder = Decoder(model, state, room=STEPS)
    for tokens, logits in zip(steps(model), wanted, strict=True):
        torch.testing.assert_close(decoder.step(tokens), logits, rtol=0, atol=1e-10)


def test_without_cuda_the_same_without_a_graph():
    model = variant("softmax")
    state = prefill(model, random_tokens(model.config, 2, 7))[1]
    with pytest.raises(ValueError, match="needs a model on CUDA: this one is on cpu"):
        Decoder(model, state, graph=True)
    wanted, after = expected(model, state)
    decoder = Decoder(model, state)
    assert decoder.graph is None
    for tokens, logits in zip(steps(model), wanted, strict=True):
        torch.testing.assert_close(decoder.step(tokens), logits, rtol=0, atol=1e-12)
    assert_equal(state, after)


def test_the_stand_in_does_nothing_of_what_python_would_do_again(cuda):
    """Without the Decoder's cursor a captured step writes the same slot for ever: the stand-in must show that."""
    model = variant("softmax")
    state = read(model)
    state.reserve(STEPS)
    wanted, _ = expected(model, state)
    tokens, graph = torch.zeros(2, dtype=torch.int64), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = decode(model, tokens, state)
    assert logits.isnan().all()
    found = []
    for new in steps(model):
        tokens.copy_(new)
        graph.replay()
        found.append(logits.clone())
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-10)
    assert (found[1] - wanted[1]).abs().max() > 1e-3
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            logits.sum().item()


@pytest.mark.parametrize("condition", ["interdomain", "softmax"])
def test_another_text_with_the_same_graph(condition, cuda):
    model = variant(condition)
    decoder = Decoder(model, read(model, length=9), room=STEPS)
    decoder.step(steps(model)[0])
    graph, state = decoder.graph, read(model)
    wanted, after = expected(model, state)
    decoder.restart(state, room=STEPS)
    assert decoder.graph is graph
    for tokens, logits in zip(steps(model), wanted, strict=True):
        torch.testing.assert_close(decoder.step(tokens), logits, rtol=0, atol=1e-10)
    assert_equal(decoder.state, after)
    assert state.length == 7  # copied
    refused = [read(model, torch.tensor([0, 3])), state.select(torch.tensor([0])), state.clone()]
    model.output.weight = torch.nn.Parameter(model.output.weight.clone())
    for other in refused:
        with pytest.raises(ValueError, match="not of this state's steps"):
            decoder.restart(on_cuda(other), room=STEPS)
    assert not Decoder(model, state, graph=False).restarts
