"""HiPPO-LegS: the differential equation against the integrals that it stands for."""

import torch

from interdomain.scan.legs import legs_matrices, legs_projection, legs_recurrence


def test_the_recurrence_keeps_the_projection_of_the_history():
    history = torch.randn(90, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for tokens in (1, 2, 17, 90):
        past = history[:tokens]
        wanted = torch.tensordot(legs_projection(tokens, 12).T, past, dims=1)
        torch.testing.assert_close(legs_recurrence(past, 12), wanted, rtol=0, atol=1e-11)


def test_the_basis_is_orthonormal_and_holds_the_constant():
    fine = legs_projection(20_000, 8)  # as functions of continuous time
    torch.testing.assert_close(fine.T @ fine, torch.eye(8, dtype=torch.float64), rtol=0, atol=1e-6)
    A, B = legs_matrices(8)
    torch.testing.assert_close(torch.linalg.solve(-A, B), torch.eye(8, dtype=torch.float64)[0], rtol=0, atol=1e-12)
    basis, ones = legs_projection(50, 8), torch.ones(50, dtype=torch.float64)
    torch.testing.assert_close(basis @ (basis.T @ ones), ones, rtol=0, atol=1e-12)
