"""Feature maps that estimate a kernel, and the denominator of paper eq. 9."""

import pytest
import torch

from interdomain.model import Execution
from interdomain.model.feature_maps import divided, feature_map
from interdomain.model.initialize import initial_value
from interdomain.model.mixers.interdomain import InterdomainMixer

from .common import normal, small_config


def map_of(name, heads, width):
    """Returns a feature map with the random vectors of a model's first layer."""
    module = feature_map(name, heads, width)
    if name == "favor":
        size = {"dim": width, "n_heads": 1, "head_dim": width}
        config = small_config(
            "interdomain",
            **size,
            feature_map="favor",
            normalize=True,
        )
        shape = module.frequencies.shape
        module.frequencies = initial_value("feature_map.frequencies", shape, config, 0)
    return module


def test_favor_estimates_the_softmax_kernel_without_bias():
    """The mean over 4,000 heads is within four standard errors of exp(q.k / sqrt(R)).

    The vectors of a head are orthogonal, and their lengths vary as those of normal vectors do.
    """
    heads = 4000
    R = 16
    module = map_of("favor", heads, R)
    q, k = 0.7 * normal(2, 1, 5, 1, R)
    # Both are passed as keys: a query's features are divided by the largest of them.
    q_features = module(q.expand(1, 5, heads, R))
    k_features = module(k.expand(1, 5, heads, R))
    estimates = torch.einsum("bihr,bjhr->hij", q_features, k_features)
    mean = estimates.mean(dim=0)
    standard_error = estimates.std(dim=0) / heads**0.5
    products = torch.einsum("bihr,bjhr->ij", q, k)
    wanted = torch.exp(products / R**0.5)
    assert ((mean - wanted).abs() < 4 * standard_error).all()
    assert (standard_error < 0.05 * wanted).all()

    w = module.frequencies.double() * R**0.25
    products = w @ w.mT
    squared_lengths = products.diagonal(dim1=1, dim2=2)
    between_vectors = products - torch.diag_embed(squared_lengths)
    assert between_vectors.abs().max() < 1e-4
    # A chi-squared distribution of R degrees of freedom.
    assert abs(squared_lengths.std() - (2 * R) ** 0.5) < 0.2


@pytest.mark.parametrize("name", ["elu", "softplus", "favor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_positive_and_finite_far_from_the_origin(name, dtype):
    """Inputs have up to 40 standard deviations, where exp(x) overflows."""
    module = map_of(name, 1, 256)
    scales = torch.tensor([0, 1e-3, 1, 3, 5, 10, 20, 40, 1.0])
    x = normal(1, 9, 1, 256) * scales[:, None, None]
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


def test_scales_cancel_exactly():
    """Nothing is added to a denominator: a scale, such as that of C, changes no quotient. test_mixer.py has the values."""
    o = normal(2, 50, 4, 9)
    v = normal(2, 50, 2, 9, seed=1)
    assert torch.equal(divided(o * 2.0**-60, v), divided(o, v))
    assert not divided(0 * o, v).any()


def test_the_triton_kernel_is_refused_for_a_map_that_it_does_not_have():
    config = small_config("interdomain", feature_map="rff")
    with pytest.raises(ValueError, match=r"mixer\.feature_map = 'rff': the kernel has silu only"):
        InterdomainMixer(config, Execution(features="triton"))
