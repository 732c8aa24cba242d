"""torch.compile of a block: one graph, and the same numbers, in training and with a state."""

import copy

import pytest
import torch

from interdomain.model.feature_map import rope_frequencies, rope_tables
from interdomain.model.generation import prefill
from interdomain.model.joined import join_projections

from .common import lively, random_tokens, small_config


def tensors_of(state):
    return [] if state is None else list(state.tensors().values())


@pytest.mark.parametrize("condition", ["interdomain", "dual-linear", "softmax"])
@pytest.mark.parametrize("situation", ["training", "prompt", "step"])
def test_a_block_is_one_graph(condition, situation):
    torch._dynamo.reset()
    T = 1 if situation == "step" else 20
    model = lively(small_config(condition), torch.float32)
    block = model.layers["0"]
    x = torch.randn(2, T, 32, requires_grad=True)
    rope = rope_tables(torch.arange(5, 5 + T), rope_frequencies(8, 1e4))
    dynamics = model.dynamics()[0]
    state, packing = None, None
    if situation != "training":
        dynamics = tuple(t.detach() for t in dynamics)
        with torch.no_grad():
            whole = model.init_state(2, capacity=25)
            model(random_tokens(model.config, 2, 5), whole)
            state = whole.layers[0]
            packing = block.attention.continuing(whole, T, None, x.dtype)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")

    def run(f):
        own = copy.deepcopy(state)
        with torch.set_grad_enabled(situation == "training"):
            out = f(x, rope, dynamics, own, packing)
        if situation == "training":
            parameters = [p for p in block.parameters() if p.requires_grad]
            return [out, *torch.autograd.grad(out.square().sum(), [x, *parameters], retain_graph=True)]
        return [out, *tensors_of(own)]

    for found, wanted in zip(run(compiled), run(block), strict=True):
        # aot_eager runs the same kernels; decompositions may reorder a sum.
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("condition", ["interdomain", "dual-linear", "softmax"])
def test_a_decode_step_is_one_graph(condition):
    """The whole model, its projections joined or not, over several steps: the states stay those of the model itself."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layers = 2 if condition == "interdomain" else 1  # compilation goes with their number
    model = lively(small_config(condition, n_layers=layers), torch.float32)
    tokens = random_tokens(model.config, 2, 10)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for part in ("apart", "joined"):
        if part == "joined":
            join_projections(model)
        _, state = prefill(model, tokens[:, :5])
        own = state.clone()
        addresses = [x.data_ptr() for layer in own.layers for x in layer.tensors().values()]
        with torch.no_grad():
            for token in tokens[:, 5:].split(1, dim=1):
                torch.testing.assert_close(compiled(token, own), model(token, state), rtol=1e-4, atol=1e-4)
        for found, wanted in zip(own.layers, state.layers, strict=True):
            for x, y in zip(tensors_of(found), tensors_of(wanted), strict=True):
                torch.testing.assert_close(x[:, :, :10], y[:, :, :10], rtol=1e-4, atol=1e-4)
        if condition != "softmax":  # its cache grows
            assert addresses == [x.data_ptr() for layer in own.layers for x in layer.tensors().values()]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 8  # and not one a step
