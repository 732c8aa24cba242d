"""Tables against complex float64 arithmetic, and the bound on the decay."""

import math

import pytest
import torch

from interdomain import scan


def as_complex(x):
    return torch.view_as_complex(x.double().contiguous())


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_decay_is_bounded_smooth_and_overflow_safe(dtype, rtol):
    x = torch.tensor([1e-30, 1e-6, 0.05, 0.5, 0.99, 1.0, 1.01, 2.0, 50.0, 1e6, 1e30], dtype=dtype)
    u = x.log()[None].requires_grad_()
    theta = scan.decay_exponent(torch.ones(1, dtype=dtype), u, torch.zeros_like(u))
    decay = -theta[0, :, 0]
    assert decay.max() <= scan.MAX_DECAY_PER_TOKEN
    x = x.double()
    expected = x / (1 + x**8) ** 0.125
    torch.testing.assert_close(decay.double(), expected, rtol=rtol, atol=0)
    (grad,) = torch.autograd.grad(decay.sum(), u)
    assert grad.isfinite().all()
    # Up to 50 times the bound; at 1e6 it underflows in fp32.
    slope = x * (1 + x**8) ** -1.125
    torch.testing.assert_close(grad[0, :9].double(), slope[:9], rtol=1e-4, atol=0)


def test_input_gain_has_no_cancellation():
    """fp32 against float64 over thirteen decades of |theta|, up to 128 radians."""
    real = -torch.logspace(-12, 0, 49)
    positive = torch.logspace(-12, math.log10(128), 60)
    imaginary = torch.cat((-positive, torch.zeros(1), positive))
    theta = torch.cartesian_prod(real, imaginary).unflatten(0, (49, 121))
    gain = as_complex(scan.input_gain(theta, torch.full((49,), 0.03)))
    z = as_complex(theta)
    series = 1 + z / 2 * (1 + z / 3 * (1 + z / 4 * (1 + z / 5)))
    exact = torch.where(z.abs() < 1e-3, series, (torch.exp(z) - 1) / z)
    exact *= torch.tensor(0.03).double()  # dt, rounded to fp32
    assert ((gain - exact).abs() / exact.abs()).max() < 1e-6
    theta = torch.tensor([[[-1e-30, 0.0], [-1e-38, 1e-30]]], requires_grad=True)
    (grad,) = torch.autograd.grad(scan.input_gain(theta, torch.ones(1)).sum(), theta)
    assert grad.isfinite().all()


def test_powers():
    exponents = torch.arange(-32, 65)
    dt = torch.tensor([[0.1], [0.01]], dtype=torch.float64)
    n = torch.arange(64, dtype=torch.float64)
    s4d_inv = 64 / math.pi * (64 / (2 * n + 1) - 1)
    theta = torch.stack((-0.5 * dt.expand(2, 64), dt * s4d_inv), dim=-1).float()
    got = scan.powers(theta, exponents)
    assert got.dtype == torch.float32
    # Products of Lambda, not multiples of theta: another way to the same number.
    Lambda = torch.exp(as_complex(theta))
    for j, power in zip(exponents.tolist(), as_complex(got).unbind(1), strict=True):
        expected = Lambda**j
        assert ((power - expected).abs() / expected.abs()).max() < 1e-7


def test_errors():
    gain = torch.randn(2, 8, 2)
    with pytest.raises(ValueError, match="allowed: complex, hermitian, real"):
        scan.mixing_matrix(gain, None, "imaginary")
    shapes = r"\(2, 8, 8, 2\) \(full\), \(2, 8, 2\) \(diagonal\) or None"
    with pytest.raises(ValueError, match=shapes):
        scan.readout_vector(gain, torch.randn(2, 8, 8), torch.randn(2, 8))
