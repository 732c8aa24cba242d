"""The loss by pieces against PyTorch's cross_entropy of whole logits: value and gradients."""

import pytest
import torch
from torch.nn import functional as F

from interdomain.model import Transformer, loss
from interdomain.model.loss import IGNORE_INDEX, summed_cross_entropy

from .common import Largest, assert_near, small_config

V = 101
E = 12


def small_pieces(vocab_size):
    return 16


@pytest.fixture(autouse=True)
def pieces_of_16_tokens(monkeypatch):
    monkeypatch.setattr(loss, "piece_tokens", small_pieces)


def plain_loss(hidden, weight, labels):
    """Computes the loss as TorchTitan does."""
    logits = F.linear(hidden, weight).flatten(0, -2)
    if logits.dtype != torch.float64:
        logits = logits.float()
    return F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)


def inputs(*shape, dtype=torch.float64, ignored=0.2):
    torch.manual_seed(len(shape))
    hidden = torch.randn(*shape, E).to(dtype).requires_grad_()
    weight = torch.randn(V, E).to(dtype).requires_grad_()
    labels = torch.randint(V, shape).masked_fill_(torch.rand(shape) < ignored, IGNORE_INDEX)
    return hidden, weight, labels


def value_and_gradients(function, hidden, weight, labels):
    value = function(hidden, weight, labels)
    return value, *torch.autograd.grad(value / 37, (hidden, weight))


@pytest.mark.parametrize(
    ("shape", "ignored"),
    [((3, 11), 0.2), ((2, 16), 0), ((5,), 1)],
    ids=["pieces do not divide the tokens", "pieces divide them", "all labels ignored"],
)
def test_equals_the_plain_loss(shape, ignored):
    arguments = inputs(*shape, ignored=ignored)
    found = value_and_gradients(summed_cross_entropy, *arguments)
    wanted = value_and_gradients(plain_loss, *arguments)
    for x, y in zip(found, wanted, strict=True):
        assert_near(x, y, 1e-12 * y.abs().max().clamp_min(1))
    compiled = torch.compile(summed_cross_entropy, backend="aot_eager")
    for x, y in zip(value_and_gradients(compiled, *arguments), found, strict=True):
        assert_near(x, y, 1e-12 * y.abs().max().clamp_min(1))
    with torch.no_grad():
        assert_near(summed_cross_entropy(*arguments), wanted[0], 1e-10)


def test_frozen_weights_or_layers():
    """Adapters freeze the head; the other tensor has the same gradient."""
    hidden, weight, labels = inputs(3, 11)
    _, hidden_gradient, weight_gradient = value_and_gradients(plain_loss, hidden, weight, labels)
    frozen_weight = weight.detach()
    frozen_hidden = hidden.detach()
    (found,) = torch.autograd.grad(summed_cross_entropy(hidden, frozen_weight, labels) / 37, hidden)
    assert_near(found, hidden_gradient, 1e-12)
    (found,) = torch.autograd.grad(summed_cross_entropy(frozen_hidden, weight, labels) / 37, weight)
    assert_near(found, weight_gradient, 1e-12)


def relative_error(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_as_close_as_the_plain_loss(autocast):
    """Sums are float32: the distance from float64 is no more than that of whole logits."""
    dtype = torch.float32 if autocast else torch.bfloat16
    hidden, weight, labels = inputs(4, 160, dtype=dtype)
    exact_hidden = hidden.detach().double().requires_grad_()
    exact_weight = weight.detach().double().requires_grad_()
    wanted = value_and_gradients(plain_loss, exact_hidden, exact_weight, labels)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = value_and_gradients(summed_cross_entropy, hidden, weight, labels)
        plain = value_and_gradients(plain_loss, hidden, weight, labels)
    assert [x.dtype for x in found] == [torch.float32, dtype, dtype]
    for x, y, exact in zip(found, plain, wanted, strict=True):
        assert relative_error(x, exact) < 1.5 * relative_error(y, exact) + 1e-6


def test_logits_are_never_whole():
    """Neither pass makes all logits. V is much larger than E."""
    arguments = inputs(8, 64)
    with Largest() as seen:
        value_and_gradients(summed_cross_entropy, *arguments)
    assert seen.largest < 8 * 64 * V / 4


def test_the_loss_of_a_model():
    model = Transformer(small_config("interdomain", vocab_size=V)).double()
    parameters = list(model.parameters())
    tokens, labels = torch.randint(V, (2, 2, 13))
    found = torch.autograd.grad(model(tokens, labels=labels), parameters)
    plain = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    wanted = torch.autograd.grad(plain, parameters)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
