"""Feature maps that estimate a kernel, and the denominator of paper eq. 9 which they make possible."""

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
    """Over 4,000 heads, each with draws of its own, the mean lies within four standard errors of exp(q.k / sqrt(R)). The
    vectors of a head are orthogonal, and the lengths vary as those of normal vectors do."""
    module, (q, k) = favor(4000), 0.7 * normal(2, 5, R)
    # As keys both: a query's features are divided by the largest of them.
    features = [module(x[None, :, None].expand(1, 5, 4000, R))[0] for x in (q, k)]
    estimates = torch.einsum("ihr,jhr->hij", *features)
    wanted = torch.exp(q @ k.mT / R**0.5)
    error = estimates.std(dim=0) / 4000**0.5
    assert ((estimates.mean(dim=0) - wanted).abs() < 4 * error).all()
    assert (error < 0.05 * wanted).all()  # so that the line above says something
    w = module.frequencies.double() * R**0.25
    gram = w @ w.mT
    lengths = gram.diagonal(dim1=1, dim2=2)
    assert (gram - torch.diag_embed(lengths)).abs().max() < 1e-4
    assert abs(lengths.std() - (2 * R) ** 0.5) < 0.2  # chi-squared


@pytest.mark.parametrize("name", ["elu", "softplus", "favor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_positive_and_finite_far_from_the_origin(name, dtype):
    """Queries and keys of up to 40 standard deviations, where exp(x) alone overflows; and keys at a random vector itself."""
    module = favor(1, 256) if name == "favor" else feature_map(name, 1, 256)
    x = (
        normal(1, 9, 1, 256, dtype=dtype)
        * torch.tensor([0, 1e-3, 1, 3, 5, 10, 20, 40, 1.0])[:, None, None]
    )
    if name == "favor":
        x[0, -1, 0] = module.frequencies[0, 0] * 256**0.5  # where the exponent of a key is largest
    x = x.to(dtype).requires_grad_()
    for query in (True, False):
        y = module(x, query=query)
        assert y.isfinite().all()
        assert (y >= 0).all()
        assert (y[0, :4].amax(-1) > 0).all()
        (gradient,) = torch.autograd.grad(y.float().sum(), x)
        assert gradient.isfinite().all()


def test_the_denominator_is_held_only_where_the_output_would_be_too_large():
    o, v = normal(2, 50, 4, 9), normal(2, 50, 2, 9, seed=1)
    o[..., -1] *= (
        10 ** torch.linspace(-6, 1, 50)[:, None]
    )  # denominators from far too small to large, of both signs
    found, quotient = divided(o, v), o[..., :-1] / o[..., -1:]
    allowed = MAX_GAIN * v[..., :-1].abs().mean(-1, keepdim=True).repeat_interleave(2, dim=2)
    size = quotient.abs().mean(-1, keepdim=True)
    held = (size > allowed).expand_as(found)
    assert 0.1 < held.double().mean() < 0.9
    torch.testing.assert_close(found[~held], quotient[~held], rtol=1e-12, atol=0)
    torch.testing.assert_close(found[held], (quotient * allowed / size)[held], rtol=1e-12, atol=0)
    o = torch.zeros(1, 1, 1, 9).requires_grad_()  # nothing over nothing
    assert torch.equal(divided(o, v[:1, :1, :1].float()), torch.zeros(1, 1, 1, 8))


@pytest.mark.parametrize(
    "options", [dict(feature_map=name) for name, xi in FEATURE_MAPS.items() if xi]
)
def test_no_scale_matters(options):
    """Exactly: of C, of the features or of the values, by powers of two. The first token's output is its value."""
    model = lively(small_config("interdomain", normalize=True, **options), torch.float32)
    mixer, seen = model.layers["0"].attention, []
    mixer.wo.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    tokens = random_tokens(model.config, 2, 40)

    def output():
        seen.clear()
        model(tokens)
        return seen[0]

    with torch.no_grad():
        first = output()
        mixer.ssm.C.mul_(2.0**-12)  # the denominators become 2^-24 of what they were
        assert torch.equal(output(), first)
        mixer.feature_map.register_forward_hook(lambda module, args, out: out * 2.0**-20)
        assert torch.equal(output(), first)
        values = []
        mixer.wv.register_forward_hook(lambda module, args, out: values.append(out))
        mixer.wv.weight.mul_(2.0**9)
        assert torch.equal(output(), 2**9 * first)
    torch.testing.assert_close(2**9 * first[:, 0], values[0][:, 0], rtol=1e-4, atol=1e-4)


def test_the_triton_kernel_is_refused_for_a_map_that_it_does_not_have():
    with pytest.raises(ValueError, match=r"mixer\.feature_map = 'rff': the kernel has silu only"):
        InterdomainMixer(
            small_config("interdomain", feature_map="rff"), Execution(features="triton")
        )
