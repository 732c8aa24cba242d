"""Rotary angles and what they do. Feature maps: test_mixer; the arithmetic of the convolution and the norms: tests/features."""

import math

import pytest
import torch

from interdomain.features import input_features
from interdomain.model.feature_map import rope_frequencies, rope_tables

from .test_mixer import rotate

FREQUENCIES = rope_frequencies(16, 1e4)


def turn(x, rope):
    return input_features(x.flatten(2), x.shape[-1], rope=rope)


def test_rope_angles():
    head_dim, positions = 96, [0, 1, 7, 4095, 1_000_000]
    cos, sin = rope_tables(torch.tensor(positions), rope_frequencies(head_dim, 1e4))
    assert cos.shape == sin.shape == (len(positions), 1, head_dim // 2)
    assert cos.dtype == torch.float32
    for t, position in enumerate(positions):
        for i in range(head_dim // 2):
            angle = position / 10_000.0 ** (2 * i / head_dim)  # Python floats: float64
            # float32 values of exact angles, at a million tokens as at one.
            assert cos[t, 0, i].item() == pytest.approx(math.cos(angle), abs=1e-7)
            assert sin[t, 0, i].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_rope_turns_and_keeps_relative_positions():
    x = torch.randn(2, 30, 3, 16, dtype=torch.float64)
    turned = turn(x, rope_tables(torch.arange(30), FREQUENCIES, torch.float64))
    torch.testing.assert_close(turned, rotate(x), rtol=0, atol=1e-13)
    # q at t, k at s: the product depends on t - s alone.
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    at = lambda x, t: turn(x, rope_tables(torch.tensor([t]), FREQUENCIES, torch.float64))  # noqa: E731
    product = [(at(q, t) * at(k, t - 5)).sum().item() for t in (5, 90, 3000)]
    assert product == pytest.approx([product[0]] * 3, abs=1e-10)
    # Rows at positions of their own.
    positions = torch.tensor([[0, 1, 2, 3], [50, 51, 52, 53]])
    both = turn(x[:, :4], rope_tables(positions, FREQUENCIES, torch.float64))
    for row in range(2):
        alone = turn(x[row : row + 1, :4], rope_tables(positions[row], FREQUENCIES, torch.float64))
        assert torch.equal(both[row : row + 1], alone)
