"""HiPPO-LegS in float64: the basis of the paper's derivation (eqs. 2 and 6), for comparison. The mixer does not use it.

At time t the basis functions are Legendre polynomials over the whole history, phi_m(s) = sqrt((2m + 1) / t) P_m(2s/t - 1) for
0 <= s <= t. They are orthonormal, and the first is a constant. HiPPO (Gu et al., 2020) keeps the coefficients c of a history f
by dc/dt = (A c + B f) / t, in another scale: c_m = u_m / sqrt(t) for the paper's u_m, the integral of f phi_m.

Shapes: T tokens, M basis functions. Token n is the history's value for n - 1 <= s < n.
"""

import torch
from torch import Tensor


def legs_matrices(n_basis: int) -> tuple[Tensor, Tensor]:
    """(A [M, M], B [M]): A_mk = -sqrt((2m + 1)(2k + 1)) below the diagonal, -(m + 1) on it, 0 above; B_m = sqrt(2m + 1)."""
    m = torch.arange(n_basis, dtype=torch.float64)
    B = (2 * m + 1).sqrt()
    return -(B[:, None] * B).tril(-1) - torch.diag(m + 1), B


def legs_recurrence(history: Tensor, n_basis: int) -> Tensor:
    """u [M, ...] of a history [T, ...], token by token.

    In log t the equation has constant coefficients, so a token, a second of constant input, has an exact solution:
    c(n) = E c(n - 1) + (1 - E) (-A^-1 B) f(n) with E = exp(A log(n / (n - 1))). -A^-1 B = (1, 0, ...): of a constant history.
    """
    A, _ = legs_matrices(n_basis)
    history = history.double()
    c = history.new_zeros(n_basis, *history.shape[1:])
    c[0] = history[0]
    for n in range(2, len(history) + 1):
        E = torch.linalg.matrix_exp(A * torch.log(torch.tensor(n / (n - 1), dtype=torch.float64)))
        c[0] -= history[n - 1]
        c = torch.tensordot(E, c, dims=1)
        c[0] += history[n - 1]
    return c * len(history) ** 0.5


def legs_projection(tokens: int, n_basis: int) -> Tensor:
    """[T, M]: the integral of phi_m over each token's second, in closed form; u = legs_projection(T, M).T @ history.

    From (2m + 1) P_m = P'_(m+1) - P'_(m-1).
    """
    x = torch.linspace(-1, 1, tokens + 1, dtype=torch.float64)
    P = [torch.ones_like(x), x]
    for m in range(1, n_basis):
        P.append(((2 * m + 1) * x * P[m] - m * P[m - 1]) / (m + 1))
    antiderivatives = [x, *((P[m + 1] - P[m - 1]) / (2 * m + 1) for m in range(1, n_basis))]
    m = torch.arange(n_basis, dtype=torch.float64)
    return torch.stack(antiderivatives, dim=1).diff(dim=0) * ((2 * m + 1) * tokens).sqrt() / 2
