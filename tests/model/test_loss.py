"""The loss by pieces against PyTorch's cross_entropy of whole logits: value and gradients."""

import functools

import pytest
import torch
from torch.nn import functional as F

from interdomain.model import Transformer, loss
from interdomain.model.loss import IGNORE_INDEX, summed_cross_entropy

from .common import Largest, small_config

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
    labels = torch.randint(V, shape)
    labels[torch.rand(shape) < ignored] = IGNORE_INDEX
    return hidden, weight, labels


def value_and_gradients(function, hidden, weight, labels):
    value = function(hidden, weight, labels)
    hidden_gradient, weight_gradient = torch.autograd.grad(value / 37, (hidden, weight))
    return value, hidden_gradient, weight_gradient


assert_all_near = functools.partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("shape", "ignored"),
    [((3, 11), 0.2), ((2, 16), 0), ((5,), 1)],
    ids=["pieces do not divide the tokens", "pieces divide them", "all labels ignored"],
)
def test_equals_the_plain_loss(shape, ignored):
    arguments = inputs(*shape, ignored=ignored)
    wanted = value_and_gradients(plain_loss, *arguments)
    compiled = torch.compile(summed_cross_entropy, backend="aot_eager")
    for function in (summed_cross_entropy, compiled):
        assert_all_near(value_and_gradients(function, *arguments), wanted)
    with torch.no_grad():
        assert_all_near(summed_cross_entropy(*arguments), wanted[0])


def test_frozen_weights_or_layers():
    """Adapters freeze the head; the other tensor has the same gradient."""
    hidden, weight, labels = inputs(3, 11)
    wanted = torch.autograd.grad(plain_loss(hidden, weight, labels), (hidden, weight))
    loss_of_hidden = summed_cross_entropy(hidden, weight.detach(), labels)
    loss_of_weight = summed_cross_entropy(hidden.detach(), weight, labels)
    found = torch.autograd.grad(loss_of_hidden + loss_of_weight, (hidden, weight))
    assert_all_near(found, wanted)


def relative_error(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_as_close_as_the_plain_loss(autocast):
    """Sums are float32: the distance from float64 is no more than that of whole logits."""
    dtype = torch.float32 if autocast else torch.bfloat16
    hidden, weight, labels = inputs(4, 160, dtype=dtype)
    wanted = value_and_gradients(plain_loss, hidden.double(), weight.double(), labels)
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
    tokens, labels = torch.randint(V, (2, 26))
    found = torch.autograd.grad(model(tokens[None], labels=labels[None]), parameters)
    plain = F.cross_entropy(model(tokens[None])[0], labels, reduction="sum")
    wanted = torch.autograd.grad(plain, parameters)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
