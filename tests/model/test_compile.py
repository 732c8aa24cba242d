"""torch.compile of a block: one graph, and the same numbers, in training and with a state."""

import pytest
import torch

from interdomain.model.feature_map import rope_tables

from .common import lively, small_config


def tensors_of(state):
    return [] if state is None else state.tensors()


@pytest.mark.parametrize("condition", ["interdomain", "dual-linear", "softmax"])
@pytest.mark.parametrize("situation", ["training", "prompt", "step"])
def test_a_block_is_one_graph(condition, situation):
    torch._dynamo.reset()
    T = 1 if situation == "step" else 20
    model = lively(small_config(condition), torch.float32)
    block = model.layers["0"]
    x = torch.randn(2, T, 32, requires_grad=True)
    rope = rope_tables(torch.arange(5, 5 + T), 8, 10_000.0)
    dynamics = block.attention.dynamics()
    state = None
    if situation != "training":
        dynamics = tuple(t.detach() for t in dynamics)
        with torch.no_grad():
            past = rope_tables(torch.arange(5), 8, 10_000.0)
            state = block(torch.randn(2, 5, 32), past, dynamics, block.attention.init_state(2, x.dtype, x.device))[1]
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")

    def run(f):
        with torch.set_grad_enabled(situation == "training"):
            out = f(x, rope, dynamics, state)
        if situation == "training":
            parameters = [p for p in block.parameters() if p.requires_grad]
            return [out, *torch.autograd.grad(out.square().sum(), [x, *parameters], retain_graph=True)]
        return [out[0], *tensors_of(out[1])]

    for found, wanted in zip(run(compiled), run(block), strict=True):
        # aot_eager runs the same kernels; decompositions may reorder a sum.
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
