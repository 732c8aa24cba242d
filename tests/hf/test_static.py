"""cache_implementation="static": decoding in steps of fixed shape, plain on a CPU and captured on a stand-in for torch.cuda."""

import copy
import gc
import pickle
import sys
import weakref

import pytest
import torch
from torch import nn

from .. import cuda_stand_in
from .common import KINDS, greedy, random_texts

ON = dict(eos_token_id=None, cache_implementation="static")
OPTIONS = {
    "greedy": dict(do_sample=False),
    "sampled": dict(do_sample=True, num_return_sequences=2, prefill_chunk_size=4),
    "beams": dict(do_sample=False, num_beams=3, num_return_sequences=2, length_penalty=0.0),
}


@pytest.fixture
def captured(loaded, monkeypatch):
    """captured(case) -> (the model, the same in transformers, with a state that says it is on CUDA)."""
    if torch.cuda.is_available():
        pytest.skip("stands in for a GPU; there is one")
    for name, value in cuda_stand_in.streams().items():
        monkeypatch.setattr(torch.cuda, name, value)

    def load(case):
        model, there = loaded(case)
        cache = sys.modules[type(there).__module__].InterdomainCache
        step = cache.step

        def on_cuda(self, *args):
            if self.decoder is None:
                cuda_stand_in.on_cuda(self.state)
            logits = step(self, *args)
            assert self.decoder.graph is not None
            return logits

        monkeypatch.setattr(cache, "step", on_cuda)
        return model, there

    with cuda_stand_in.OnTheCPU():
        yield load


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("how", OPTIONS)
def test_the_same_text(captured, case, how):
    compare(captured(case)[1], how)


@pytest.mark.parametrize("how", OPTIONS)
def test_the_same_text_without_cuda(loaded, how):
    compare(loaded("softmax")[1], how)


def compare(there, how):
    tokens = random_texts(2, 9)
    mask = (torch.arange(9) >= torch.tensor([[4], [0]])).long()
    found = []
    for kind in (None, "static"):
        torch.manual_seed(3)
        options = {**ON, **OPTIONS[how], "cache_implementation": kind}
        found.append(there.generate(tokens, attention_mask=mask, max_new_tokens=4, **options))
    assert torch.equal(*found)


@pytest.mark.parametrize("case", ["interdomain", "softmax"])
def test_a_text_that_goes_on(captured, case):
    """With the same steps where text was read between; a copy has its own."""
    model, there = captured(case)
    text, cache = random_texts(1, 9), None
    for turn in range(2):
        wanted = greedy(model, text, 3)
        kept = {"past_key_values": cache} if cache else {"cache_implementation": "static"}
        fork = copy.deepcopy(cache)
        options = dict(max_new_tokens=3, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
        mask = torch.ones(text.shape)
        out = there.generate(text, attention_mask=mask, **kept, **options)
        assert torch.equal(out.sequences, wanted)
        if fork is not None:
            again = there.generate(text, attention_mask=mask, past_key_values=fork, **options)
            assert torch.equal(again.sequences, wanted)
        cache = out.past_key_values
        assert cache.decoder is not None
        assert cache.get_seq_length() == wanted.shape[1] - 1
        text = torch.cat([wanted, random_texts(1, 3, seed=turn)], dim=1)
    # The new tokens alone.
    found = there.generate(text[:, -4:], attention_mask=torch.ones(text.shape), past_key_values=cache, **options)
    assert torch.equal(found.sequences[:, 4:], greedy(model, text, 3)[:, -3:])


def test_a_pickled_text_goes_on_without_the_model(loaded):
    """Which its steps know."""
    model, there = loaded("interdomain")
    text = random_texts(1, 9)
    out = static(there, text, return_dict_in_generate=True)
    assert out.past_key_values.decoder is not None
    cache = pickle.loads(pickle.dumps(out.past_key_values))
    assert cache.decoder is None
    found = static(there, out.sequences, cache_implementation=None, past_key_values=cache)
    assert torch.equal(found, greedy(model, text, 6))


def code_of_caches(there):
    return sys.modules[sys.modules[type(there).__module__].InterdomainCache.__module__]


@pytest.fixture
def captures(captured, monkeypatch):
    """captures(case) -> (the model, the same in transformers of its own, what it has captured so far)."""

    def load(case):
        model, there = captured(case)
        code, there, made = code_of_caches(there), copy.deepcopy(there), []

        class Watched(code.Decoder):
            def _capture(self, *args):
                made.append(len(self.state.position))
                super()._capture(*args)

        monkeypatch.setattr(code, "Decoder", Watched)
        return model, there, made

    return load


def static(there, text, steps=3, **options):
    options = dict(max_new_tokens=steps, do_sample=False, attention_mask=torch.ones_like(text)) | ON | options
    return there.generate(text, **options)


@pytest.mark.parametrize("case", KINDS)
def test_another_text_has_the_same_graph(captures, case):
    model, there, made = captures(case)
    for seed, length in enumerate((9, 7, 12)):
        text = random_texts(2, length, seed=seed)
        steps = 15 - length if case == "softmax" else 4  # a cache as large
        assert torch.equal(static(there, text, steps), greedy(model, text, steps))
    assert made == [2]
    text = random_texts(1, 9)
    assert torch.equal(static(there, text), greedy(model, text, 3))
    assert made == [2, 1]


@pytest.mark.parametrize(
    ("options", "steps"), [(dict(attention_mask=torch.tensor([[0] + [1] * 8])), 3), ({}, 20)], ids=["padding", "room"]
)
def test_a_cache_with_another_mask_or_more_room_has_a_graph_of_its_own(captures, options, steps):
    model, there, made = captures("softmax")
    text = random_texts(1, 9)
    static(there, text)
    found = static(there, text, steps, **options)
    begin = 1 if options else 0
    assert torch.equal(found[:, begin:], greedy(model, text[:, begin:], steps))
    assert made == [1, 1]


def test_what_a_broken_text_left_in_a_cache_is_gone(captures):
    model, there, made = captures("softmax")
    first = static(there, random_texts(1, 12), 4, return_dict_in_generate=True)
    for layer in first.past_key_values.state.layers:
        layer.v.fill_(torch.inf)
    del first, layer
    text = random_texts(1, 9)
    assert torch.equal(static(there, text, 5), greedy(model, text, 5))
    assert made == [1]


def change_in_place(there):
    with torch.no_grad():
        for parameter in there.parameters():
            parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))


def change_by_assignment(there):
    values = {name: x + 0.05 * torch.randn_like(x) for name, x in there.state_dict().items()}
    there.load_state_dict(values, assign=True)


def change_a_parameter(there):
    there.output.weight = nn.Parameter(there.output.weight.flip(0).clone())


class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.scale = base, 1.0

    def forward(self, x):
        return self.base(x) * (1 + self.scale)


def change_a_module(there):
    there.layers["0"].attention.wo = Adapter(there.layers["0"].attention.wo)


def change_by_a_hook(there):
    there.layers["0"].feed_forward.register_forward_hook(lambda module, args, out: out + args[0])


def change_by_an_override(there):
    there.layers["0"].feed_forward.forward = lambda x: x.clone()


@pytest.mark.parametrize(
    ("change", "again"),
    [
        (change_in_place, 0),
        (change_by_assignment, 1),
        (change_a_parameter, 1),
        (change_a_module, 1),
        (change_by_a_hook, 1),
        (change_by_an_override, 1),
        (lambda there: there.to(torch.float64).float(), 1),
    ],
)
@pytest.mark.parametrize(("case", "joined"), [*((case, False) for case in KINDS), ("interdomain", True)])
def test_what_has_changed_is_seen(captures, monkeypatch, case, change, again, joined):
    _, there, made = captures(case)
    # A GPU's step: what a CPU prepares over a state has copies.
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    if joined:
        for module in there.modules():
            if hasattr(module, "join"):
                module.join()
    text = random_texts(1, 9)
    before = static(there, text, 6)
    change(there)
    found = static(there, text, 6)
    assert len(made) == 1 + again
    wanted = there.generate(text, max_new_tokens=6, do_sample=False, **{**ON, "cache_implementation": None})
    assert torch.equal(found, wanted)
    if change.__name__ != "<lambda>":
        assert not torch.equal(found, before)


def test_an_adapter_s_switch_is_seen(captures):
    """Its value is Python's, where no tensor tells of it: nothing is kept."""
    _, there, made = captures("interdomain")
    change_a_module(there)
    text = random_texts(1, 9)
    on = static(there, text)
    there.layers["0"].attention.wo.scale = -30.0
    assert not torch.equal(static(there, text), on)
    assert made == [1, 1]


@torch.no_grad()
def test_two_texts_at_a_time(captures):
    """What one of them has, the other does not get."""
    model, there, made = captures("interdomain")
    text, other = random_texts(1, 9), random_texts(1, 9, seed=2)
    out = static(there, text, return_dict_in_generate=True)
    assert torch.equal(static(there, other), greedy(model, other, 3))
    assert made == [1, 1]
    goes_on = static(there, out.sequences, past_key_values=out.past_key_values, cache_implementation=None)
    assert torch.equal(goes_on, greedy(model, text, 6))
    del out
    static(there, other)
    assert made == [1, 1]


@pytest.mark.parametrize("case", ["interdomain", "softmax"])
def test_a_text_read_on_leaves_its_steps_to_another(captures, case):
    model, there, made = captures(case)
    out = static(there, random_texts(1, 9), return_dict_in_generate=True)
    text, other = torch.cat([out.sequences, random_texts(1, 3)], dim=1), random_texts(1, 9, seed=2)
    kept = dict(cache_implementation=None, past_key_values=out.past_key_values)
    read = static(there, text, 1, **kept)  # no step is taken
    assert torch.equal(static(there, other), greedy(model, other, 3))
    assert made == [1]
    assert torch.equal(static(there, read, **kept), greedy(model, text, 4))


def test_its_memory_goes_with_the_model(captures):
    _, there, made = captures("interdomain")
    code, text = code_of_caches(there), random_texts(1, 9)
    static(there, text)
    left = code.LEFT[there]
    graph = weakref.ref(left.graph)
    assert not any(x is left or x is left.state for x in vars(there).values())
    copied = copy.deepcopy(there)
    assert copied not in code.LEFT
    del left
    there.to("cpu")
    assert graph() is None
    static(there, text)
    graph, model = weakref.ref(code.LEFT[there].graph), weakref.ref(there)
    made.clear()
    del there
    gc.collect()
    assert model() is None
    assert graph() is None


@torch.no_grad()
def test_logits_of_a_step_are_kept(captured):
    """The graph's own are overwritten by the next step."""
    _, there = captured("interdomain")
    out = there.generate(random_texts(1, 9), max_new_tokens=3, return_dict_in_generate=True, **ON)
    steps = [there(torch.tensor([[token]]), past_key_values=out.past_key_values).logits for token in (5, 6)]
    assert not torch.equal(*steps)


def test_other_caches_are_refused(loaded):
    _, there = loaded("interdomain")
    with pytest.raises(ValueError, match="'offloaded': this model has a state of its own"):
        there.generate(random_texts(1, 9), max_new_tokens=2, cache_implementation="offloaded")
    with pytest.raises(NotImplementedError, match=r"continuous batching .* use generate on a batch"):
        there.generate_batch(random_texts(1, 9).tolist())  # would log an error, and return the prompt for a text
