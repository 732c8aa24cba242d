"""Feature maps that estimate a kernel, and the denominator of paper eq. 9."""

import pytest
import torch

from interdomain.model import Execution
from interdomain.model.feature_maps import (
    FEATURE_MAPS,
    MAX_GAIN,
    PositiveRandomFeatures,
    divided,
    feature_map,
)
from interdomain.model.initialize import initial_value
from interdomain.model.mixers.interdomain import InterdomainMixer

from .common import lively, normal, random_tokens, small_config

R = 16


def favor(heads: int, width: int = R) -> PositiveRandomFeatures:
    config = small_config(
        "interdomain", dim=width, n_heads=1, head_dim=width, feature_map="favor", normalize=True
    )
    module = PositiveRandomFeatures(heads, width)
    module.frequencies = initial_value(
        "feature_map.frequencies", module.frequencies.shape, config, 0
    )
    return module


def test_favor_estimates_the_softmax_kernel_without_bias():
    """The mean over 4,000 heads is within four standard errors of exp(q.k / sqrt(R)).

    The vectors of a head are orthogonal, and their lengths vary as those of normal vectors do.
    """
    module = favor(4000)
    q, k = 0.7 * normal(2, 5, R)
    # Both are passed as keys: a query's features are divided by the largest of them.
    q_features = module(q[None, :, None].expand(1, 5, 4000, R))[0]
    k_features = module(k[None, :, None].expand(1, 5, 4000, R))[0]
    estimates = torch.einsum("ihr,jhr->hij", q_features, k_features)
    wanted = torch.exp(q @ k.mT / R**0.5)
    standard_error = estimates.std(dim=0) / 4000**0.5
    assert ((estimates.mean(dim=0) - wanted).abs() < 4 * standard_error).all()
    assert (standard_error < 0.05 * wanted).all()
    w = module.frequencies.double() * R**0.25
    products = w @ w.mT
    squared_lengths = products.diagonal(dim1=1, dim2=2)
    assert (products - torch.diag_embed(squared_lengths)).abs().max() < 1e-4
    assert abs(squared_lengths.std() - (2 * R) ** 0.5) < 0.2  # chi-squared


@pytest.mark.parametrize("name", ["elu", "softplus", "favor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_positive_and_finite_far_from_the_origin(name, dtype):
    """Inputs have up to 40 standard deviations, where exp(x) overflows."""
    module = favor(1, 256) if name == "favor" else feature_map(name, 1, 256)
    scales = torch.tensor([0, 1e-3, 1, 3, 5, 10, 20, 40, 1.0])
    x = normal(1, 9, 1, 256, dtype=dtype) * scales[:, None, None]
    if name == "favor":
        # The exponent of a key is largest at a random vector itself.
        x[0, -1, 0] = module.frequencies[0, 0] * 256**0.5
    x = x.to(dtype).requires_grad_()
    for query in (True, False):
        y = module(x, query=query)
        assert y.isfinite().all()
        assert (y >= 0).all()
        assert (y[0, :4].amax(-1) > 0).all()
        (gradient,) = torch.autograd.grad(y.float().sum(), x)
        assert gradient.isfinite().all()


def test_the_quotient_is_limited_only_if_it_is_too_large():
    """Denominators are from far too small to large, of both signs."""
    o = normal(2, 50, 4, 9)
    v = normal(2, 50, 2, 9, seed=1)
    o[..., -1] *= 10 ** torch.linspace(-6, 1, 50)[:, None]
    quotient = o[..., :-1] / o[..., -1:]
    size = quotient.abs().mean(-1, keepdim=True)
    largest = MAX_GAIN * v[..., :-1].abs().mean(-1, keepdim=True).repeat_interleave(2, dim=2)
    limited = size > largest
    assert 0.1 < limited.double().mean() < 0.9
    wanted = torch.where(limited, quotient * largest / size, quotient)
    torch.testing.assert_close(divided(o, v), wanted, rtol=1e-12, atol=0)
    nothing = torch.zeros(1, 1, 1, 9)
    assert torch.equal(divided(nothing, v[:1, :1, :1].float()), torch.zeros(1, 1, 1, 8))


def times_2_to_the_minus_20(module, args, output):
    return output * 2.0**-20


@pytest.mark.parametrize("name", [name for name, xi in FEATURE_MAPS.items() if xi])
@torch.no_grad()
def test_normalisation_cancels_scales(name):
    """Scales of C and the features by powers of two cancel exactly; those of values remain.

    The first token's output is its value.
    """
    config = small_config("interdomain", normalize=True, feature_map=name)
    model = lively(config, torch.float32)
    mixer = model.layers["0"].attention
    seen = {}

    def record_output(module, args):
        seen["output"] = args[0]

    def record_values(module, args, output):
        seen["values"] = output

    mixer.wo.register_forward_pre_hook(record_output)
    mixer.wv.register_forward_hook(record_values)
    tokens = random_tokens(model.config, 2, 40)
    model(tokens)
    first = seen["output"]
    torch.testing.assert_close(first[:, 0], seen["values"][:, 0], rtol=1e-4, atol=1e-6)
    mixer.ssm.C.mul_(2.0**-12)  # the denominators become 2^-24 of what they were
    model(tokens)
    assert torch.equal(seen["output"], first)
    mixer.feature_map.register_forward_hook(times_2_to_the_minus_20)
    model(tokens)
    assert torch.equal(seen["output"], first)
    mixer.wv.weight.mul_(2.0**9)
    model(tokens)
    assert torch.equal(seen["output"], 2**9 * first)


def test_the_triton_kernel_is_refused_for_a_map_that_it_does_not_have():
    config = small_config("interdomain", feature_map="rff")
    with pytest.raises(ValueError, match=r"mixer\.feature_map = 'rff': the kernel has silu only"):
        InterdomainMixer(config, Execution(features="triton"))
