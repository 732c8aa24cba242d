"""Equation 9 of the paper against equation 4, on what docs/kernel-view.md says of them."""

import itertools

import pytest
import torch

from interdomain.tools import kernel_view
from interdomain.tools.kernel_view import BASES, INPUTS, equation_4, equation_9, error, orthonormal, s4d

N = 96


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", ["LegS, orthonormal", "random, orthonormal"])
def test_exact_with_as_many_orthonormal_functions_as_tokens(name, kind):
    assert error(BASES[name](N, N), INPUTS[kind]) < 1e-12  # float64
    assert error(BASES[name](N, N // 2), INPUTS["noise keys and values"]) > 0.01


def test_error_falls_with_the_number_of_functions_where_inputs_are_smooth():
    for name, last in (("LegS, orthonormal", 1e-8), ("S4D-Inv, orthonormal", 1e-4)):
        falling = [error(BASES[name](N, M), INPUTS["smooth keys and values"]) for M in (1, 2, 4, 8, 16, 32)]
        assert all(b < a for a, b in itertools.pairwise(falling))
        assert falling[-1] < last
    bare = [error(BASES["S4D-Inv, C = 1"](N, M), INPUTS["smooth keys and values"]) for M in (1, 8, 32)]
    assert min(bare) > 0.03  # without the C that makes the functions orthonormal nothing is gained


def test_the_error_is_a_product_of_two_residuals():
    """Of the keys' features and of the values: one of the two within the basis is enough."""
    generator = torch.Generator().manual_seed(0)
    basis = BASES["LegS, orthonormal"](N, 6)
    rough = torch.rand(N, 5, generator=generator, dtype=torch.float64)
    within = basis @ torch.randn(6, 5, generator=generator, dtype=torch.float64)
    queries = torch.rand(7, 5, generator=generator, dtype=torch.float64)
    wanted = equation_4(queries, rough, within)
    torch.testing.assert_close(equation_9(queries, rough, within, basis), wanted, rtol=0, atol=1e-12)
    wanted = equation_4(queries, 2 + 0.1 * within, rough)  # the other way round; positive
    torch.testing.assert_close(equation_9(queries, 2 + 0.1 * within, rough, basis), wanted, rtol=0, atol=1e-12)
    # The constant is one of LegS's functions: whatever keys and values are, the denominator is equation 4's.
    integrals = BASES["LegS, integrals of eq. 6"](N, 3)
    denominator = queries @ (rough.T @ integrals) @ (integrals.T @ torch.ones(N, dtype=torch.float64))
    torch.testing.assert_close(denominator, queries @ rough.sum(0), rtol=1e-12, atol=0)


def test_an_orthonormal_basis_spans_the_functions_it_was_made_of():
    functions = s4d("s4d-inv", N, 8)
    basis = orthonormal(functions)
    torch.testing.assert_close(basis.mH @ basis, torch.eye(8, dtype=basis.dtype), rtol=0, atol=1e-12)
    torch.testing.assert_close(basis @ (basis.mH @ functions), functions, rtol=0, atol=1e-12)


def test_the_command_prints_tables_and_writes_a_figure(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert kernel_view.main(["--output", str(tmp_path / "new"), "--tokens", "8", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("| LegS, orthonormal |") == len(INPUTS)
    assert all(f"| {name} | hermitian |" in out for name in kernel_view.MAPS)
    assert "nan" not in out
    assert out.splitlines()[-1] == f"wrote {tmp_path / 'new' / 'kernel-view.png'}"
    assert (tmp_path / "new" / "kernel-view.png").stat().st_size > 10_000
    assert kernel_view.main(["--output", str(tmp_path), "--tokens", "1"]) == 2
