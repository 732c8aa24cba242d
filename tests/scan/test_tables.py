"""Tables against complex float64 arithmetic, and the bound on the decay."""

import math

import numpy
import pytest
import torch

from interdomain import scan


def as_complex(x):
    return torch.view_as_complex(x.double().contiguous())


def test_the_bound_on_the_decay_does_not_overflow():
    """Its formula and gradient are in test_backends.py."""
    u = torch.tensor([[-69.0, 0, 69]], requires_grad=True)
    decay = -scan.decay_exponent(torch.ones(1), u, torch.zeros_like(u))[..., 0]
    expected = torch.tensor([[math.exp(-69), 2**-0.125, scan.MAX_DECAY_PER_TOKEN]])
    torch.testing.assert_close(decay, expected, rtol=1e-5, atol=0)
    (grad,) = torch.autograd.grad(decay.sum(), u)
    assert grad.isfinite().all()


def test_input_gain_has_no_cancellation():
    """fp32 against float64 over thirteen decades of |theta|, up to 128 radians."""
    real = -torch.logspace(-12, 0, 49)
    positive = torch.logspace(-12, math.log10(128), 60)
    imaginary = torch.cat((-positive, torch.zeros(1), positive))
    theta = torch.cartesian_prod(real, imaginary).unflatten(0, (49, 121))
    gain = as_complex(scan.input_gain(theta, torch.full((49,), 0.03)))
    z = as_complex(theta)
    dt = torch.tensor(0.03).double()  # rounded to fp32
    exact = dt * torch.from_numpy(numpy.expm1(z.numpy())) / z
    assert ((gain - exact).abs() / exact.abs()).max() < 1e-6
    theta = torch.tensor([[[-1e-30, 0.0], [-1e-38, 1e-30]]], requires_grad=True)
    (grad,) = torch.autograd.grad(scan.input_gain(theta, torch.ones(1)).sum(), theta)
    assert grad.isfinite().all()


def test_errors():
    gain = torch.randn(2, 8, 2)
    with pytest.raises(ValueError, match="allowed: complex, hermitian, real"):
        scan.mixing_matrix(gain, None, "imaginary")
    shapes = r"\(2, 8, 8, 2\) \(full\), \(2, 8, 2\) \(diagonal\) or None"
    with pytest.raises(ValueError, match=shapes):
        scan.readout_vector(gain, torch.randn(2, 8, 8), torch.randn(2, 8))
