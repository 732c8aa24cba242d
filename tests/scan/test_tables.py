"""Tables against complex float64 arithmetic, and the bound on the decay."""

import math

import pytest
import torch

from interdomain import scan


def as_complex(x):
    return torch.view_as_complex(x.double().contiguous())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decay_is_bounded_smooth_and_overflow_safe(dtype):
    x = torch.tensor([1e-30, 1e-6, 0.05, 0.5, 0.99, 1.0, 1.01, 2.0, 50.0, 1e6, 1e30], dtype=dtype)
    u = x.log()[None].requires_grad_()
    theta = scan.decay_exponent(torch.ones(1, dtype=dtype), u, torch.zeros_like(u))
    decay = -theta[..., 0]
    assert (decay <= scan.MAX_DECAY_PER_TOKEN).all()
    expected = x.double() / (1 + x.double() ** 8) ** 0.125
    torch.testing.assert_close(
        decay[0].double(), expected, rtol=1e-12 if dtype == torch.float64 else 1e-5, atol=0
    )
    (grad,) = torch.autograd.grad(decay.sum(), u)
    assert torch.isfinite(grad).all()
    # Up to 50 times the bound; at 1e6 it underflows in fp32.
    slope = x.double()[:9] * (1 + x.double()[:9] ** 8) ** -1.125
    torch.testing.assert_close(grad[0, :9].double(), slope, rtol=1e-4, atol=0)


def test_input_gain_has_no_cancellation():
    """fp32 against float64 over thirteen decades of |theta|, up to 128 radians."""
    re = -torch.logspace(-12, 0, 49)
    im = torch.cat(
        (
            -torch.logspace(-12, math.log10(128), 60),
            torch.zeros(1),
            torch.logspace(-12, math.log10(128), 60),
        )
    )
    theta = torch.stack(torch.meshgrid(re, im, indexing="ij"), dim=-1)  # [49, 121, 2]
    dt = torch.full((49,), 0.03)
    got = as_complex(scan.input_gain(theta, dt))
    z = as_complex(theta)
    series = 1 + z / 2 * (1 + z / 3 * (1 + z / 4 * (1 + z / 5)))
    exact = dt.double()[:, None] * torch.where(z.abs() < 1e-3, series, (torch.exp(z) - 1) / z)
    assert ((got - exact).abs() / exact.abs()).max() < 1e-6
    theta = torch.tensor([[[-1e-30, 0.0], [-1e-38, 1e-30]]], requires_grad=True)
    assert torch.isfinite(
        torch.autograd.grad(scan.input_gain(theta, torch.ones(1)).sum(), theta)[0]
    ).all()


def test_powers():
    exponents = torch.arange(-32, 65)
    dt = torch.tensor([0.1, 0.01], dtype=torch.float64)
    n = torch.arange(64, dtype=torch.float64)
    A_imag = 64 / math.pi * (64 / (2 * n + 1) - 1)  # S4D-Inv
    theta = torch.stack((-0.5 * dt[:, None].expand(2, 64), dt[:, None] * A_imag), dim=-1).float()
    got = scan.powers(theta, exponents)
    assert got.dtype == torch.float32
    base = torch.exp(
        as_complex(theta)
    )  # products of Lambda, not multiples of theta: another way to the same number
    expected = torch.stack([base ** int(j) for j in exponents], dim=1)
    error = (as_complex(got) - expected).abs() / expected.abs()
    assert error.max() < 1e-7


def test_errors():
    gain = torch.randn(2, 8, 2)
    with pytest.raises(ValueError, match="allowed: complex, hermitian, real"):
        scan.mixing_matrix(gain, None, "imaginary")
    with pytest.raises(
        ValueError, match=r"\(2, 8, 8, 2\) \(full\), \(2, 8, 2\) \(diagonal\) or None"
    ):
        scan.readout_vector(gain, torch.randn(2, 8, 8), torch.randn(2, 8))
