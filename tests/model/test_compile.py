"""torch.compile: a block is one graph in training and with a state, and so is a decode step, whatever its number."""

import pytest
import torch

from interdomain.model.feature_map import rope_frequencies, rope_tables
from interdomain.model.generation import prefill

from .common import lively, random_tokens, small_config

# aot_eager runs the same kernels; decompositions may reorder a sum.
CLOSE = dict(rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("condition", ["interdomain", "dual-linear", "softmax"])
def test_a_block_is_one_graph(condition):
    """In training, with its gradients."""
    torch._dynamo.reset()
    model = lively(small_config(condition), torch.float32)
    block, x = model.layers["0"], torch.randn(2, 20, 32, requires_grad=True)
    rope = rope_tables(torch.arange(5, 25), rope_frequencies(8, 1e4))

    def run(f):
        out, wanted = f(x, rope, model.dynamics()[0]), [x, *block.parameters()]
        return [out, *torch.autograd.grad(out.square().sum(), wanted, retain_graph=True, allow_unused=True)]

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled), run(block), **CLOSE)


@pytest.mark.parametrize("condition", ["interdomain", "dual-linear", "softmax"])
def test_a_piece_and_decode_steps_are_one_graph_each(condition):
    """The whole model from a state: the states stay those of the model itself, at their addresses."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = lively(small_config(condition, n_layers=1), torch.float32)
    tokens = random_tokens(model.config, 2, 10)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    _, state = prefill(model, tokens[:, :2])
    own = state.clone()
    addresses = [x.data_ptr() for layer in own.layers for x in layer.tensors().values()]
    with torch.no_grad():
        for piece in tokens.split([2, 3, 1, 1, 1, 1, 1], dim=1)[1:]:
            torch.testing.assert_close(compiled(piece, own), model(piece, state), **CLOSE)
    for name, x in own.layers[0].tensors().items():
        torch.testing.assert_close(x[:, :, :10], state.layers[0].tensors()[name][:, :, :10], **CLOSE)
    if condition != "softmax":  # its cache grows
        assert addresses == [x.data_ptr() for layer in own.layers for x in layer.tensors().values()]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 5  # and not one a step
