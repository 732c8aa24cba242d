"""cache_implementation="static": decoding in steps of fixed shape, plain on a CPU and captured on a stand-in for torch.cuda."""

import copy
import sys

import pytest
import torch

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
    """Its steps are made anew where text was read between; a copy has its own."""
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
