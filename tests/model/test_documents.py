"""Packed documents equal the documents one by one, in every kind of model: nothing crosses a boundary."""

import pytest
import torch

from .common import VARIANTS, random_tokens, variant

# Tokens of each document: shorter than the convolution, of one token, longer than a chunk of the scan.
LENGTHS = ((3, 1, 66, 2, 8), (40, 40))


def positions_of(lengths):
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


@pytest.mark.parametrize(("condition", "option"), VARIANTS)
def test_documents_one_by_one(condition, option):
    model = variant(condition, option)
    tokens = random_tokens(model.config, 2, 80)
    weights = torch.randn(
        2, 80, model.config.vocab_size, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    packed = model(tokens, positions=positions_of(LENGTHS))
    alone = torch.stack(
        [torch.cat([model(x[None])[0] for x in row.split(n)]) for row, n in zip(tokens, LENGTHS, strict=True)]
    )
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-10)
    assert (packed - model(tokens)).abs().max() > 1e-3
    for a, b in zip(*(torch.autograd.grad((x * weights).sum(), parameters) for x in (packed, alone)), strict=True):
        # Relative to the largest: near a zero of the normalised form's denominator, gradients reach 1e5.
        assert (a - b).abs().max() <= 1e-8 * b.abs().max().clamp_min(1)


def test_positions_and_a_state_are_refused_together():
    model = variant("interdomain")
    with pytest.raises(ValueError, match="leave one out"):
        model(random_tokens(model.config, 1, 4), model.init_state(1), positions=torch.arange(4)[None])
