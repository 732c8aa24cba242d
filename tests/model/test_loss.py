"""The loss by pieces against PyTorch's cross_entropy of whole logits: value and gradients."""

import pytest
import torch
from torch.nn import functional as F

from interdomain.model import Transformer, loss
from interdomain.model.loss import IGNORE_INDEX, summed_cross_entropy

from .common import Largest, small_config

V, E = 101, 12


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(loss, "piece_tokens", lambda vocab_size: 16)


def plain(hidden, weight, labels):
    """The loss that TorchTitan computes."""
    logits = F.linear(hidden, weight).flatten(0, -2)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)


def inputs(*shape, dtype=torch.float64, ignored=0.2):
    torch.manual_seed(len(shape))
    hidden, weight = torch.randn(*shape, E).to(dtype), torch.randn(V, E).to(dtype)
    labels = torch.randint(V, shape).masked_fill_(torch.rand(shape) < ignored, IGNORE_INDEX)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def gradients(function, hidden, weight, labels, scale=1 / 37):
    value = function(hidden, weight, labels)
    return value.detach(), *torch.autograd.grad(value * scale, (hidden, weight))


@pytest.mark.parametrize(
    ("shape", "ignored", "compiled"),
    [((3, 11), 0.2, True), ((3, 11), 0.2, False), ((2, 16), 0, False), ((5,), 1, False)],
)
def test_equals_the_plain_loss(shape, ignored, compiled):
    """Pieces that divide the tokens and that do not, fewer tokens than one; all tokens ignored."""
    given = inputs(*shape, ignored=ignored)
    by_pieces = (
        torch.compile(summed_cross_entropy, backend="aot_eager")
        if compiled
        else summed_cross_entropy
    )
    for found, wanted in zip(gradients(by_pieces, *given), gradients(plain, *given), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_without_gradients():
    hidden, weight, labels = inputs(3, 11)
    wanted = plain(hidden, weight, labels)
    with torch.no_grad():
        torch.testing.assert_close(
            summed_cross_entropy(hidden, weight, labels), wanted, rtol=1e-12, atol=0
        )
    for frozen in (0, 1):  # a frozen head, as adapters have it; frozen layers
        given = [x.detach().requires_grad_(i != frozen) for i, x in enumerate((hidden, weight))]
        summed_cross_entropy(*given, labels).backward()
        assert given[frozen].grad is None
        wanted = gradients(plain, hidden, weight, labels, 1)[2 - frozen]
        torch.testing.assert_close(given[1 - frozen].grad, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_as_close_as_the_plain_loss(autocast):
    """The same products, sums in float32: what differs from float64 is no more than with whole logits."""
    torch.manual_seed(0)
    exact = inputs(4, 160)
    given = [
        x.detach().to(torch.float32 if autocast else torch.bfloat16).requires_grad_()
        for x in exact[:2]
    ]
    exact = [x.detach().double().requires_grad_() for x in given]
    labels = inputs(4, 160)[2]

    def errors(function):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = gradients(function, *given, labels)
        assert [x.dtype for x in found] == [torch.float32, given[0].dtype, given[1].dtype]
        wanted = gradients(plain, *exact, labels)
        return [
            ((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)
        ]

    for ours, theirs in zip(errors(summed_cross_entropy), errors(plain), strict=True):
        assert ours < 1.5 * theirs + 1e-6


def test_logits_are_never_whole():
    """Forward or backward; V is much larger than E."""
    given = inputs(8, 64)
    with Largest() as found:
        gradients(summed_cross_entropy, *given)
    assert found.largest < 8 * 64 * V / 4


def test_of_the_model():
    """Through blocks, norm and head."""
    model = Transformer(small_config("interdomain", vocab_size=V)).double()
    tokens, labels = torch.randint(V, (2, 2, 13))
    ours = torch.autograd.grad(model(tokens, labels=labels), [*model.parameters()])
    plain = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(
        ours, torch.autograd.grad(plain, [*model.parameters()]), rtol=1e-9, atol=1e-12
    )
