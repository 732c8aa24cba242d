"""The judge, judged: its T x T matrix form, and the same gradients."""

import pytest
import torch

from interdomain.scan import reference

from .common import Case, assert_agree, gradients, make, paper_A, paper_C


def paper_form(q, k, v, dt, A, C, readout, normalize, state):
    """Returns the output of the paper's loop."""
    o, _ = reference.paper_scan(
        q, k, v, dt, A, C, readout=readout, normalize=normalize, initial_state=state
    )
    return o


def basis_by_lag(dt, A, C, T):
    """Returns the input at j as basis function m sees it at t: C gain Lambda^(t - j), [H, M, T, T]."""
    theta = dt[:, None] * A
    gain = (torch.exp(theta) - 1) / A
    lag = torch.arange(T)[:, None] - torch.arange(T)
    decay = torch.exp(theta[..., None, None] * lag.clamp_min(0)) * (lag >= 0)
    return torch.einsum("hmn,hn,hntj->hmtj", C, gain, decay)


def carried_basis(dt, A, C, T):
    """Returns the state before the first token as basis function m sees it at t, by its n, [H, M, N, T]."""
    theta = dt[:, None] * A
    gain = (torch.exp(theta) - 1) / A
    decay = torch.exp(theta[..., None] * torch.arange(1, T + 1))
    return torch.einsum("hmn,hn,hnt->hmnt", C, gain, decay)


def attention_form(q, k, v, dt, A, C, readout, normalize, initial_state):
    """Returns o = (scores of one T x T matrix per head) v, with no recurrence: powers of Lambda by lag."""
    T, R = k.shape[1], k.shape[3]
    G = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(G, dim=2), v.repeat_interleave(G, dim=2)
    dynamics = [x.repeat_interleave(G, dim=0) for x in (dt, A, C)]
    if normalize:
        v = torch.cat((v, torch.ones_like(v[..., :1])), dim=-1)
    basis = basis_by_lag(*dynamics, T)
    q, k, values = (x.to(A.dtype) for x in (q, k, v))
    U = torch.einsum("bthr,bjhr,hmtj->bhtm", q, k, basis)
    Gamma = torch.einsum("hmtj,bjhd->bhtmd", basis, values)
    if initial_state is not None:
        X = torch.view_as_complex(initial_state).repeat_interleave(G, dim=1)
        first = torch.einsum("hmnt,bhnp->bhtmp", carried_basis(*dynamics, T), X)
        U = U + torch.einsum("bthr,bhtmr->bhtm", q, first[..., :R])
        Gamma = Gamma + first[..., R:]
    if readout == "hermitian":
        U = U.conj()
    if readout == "real":
        U, Gamma = U.real, Gamma.real
    o = torch.einsum("bhtm,bhtmd->bthd", U, Gamma).real
    if not normalize:
        return o
    above, below = o[..., :-1], o[..., -1:]
    # The denominator is held away from zero.
    values = v[..., :-1].abs().mean(-1, keepdim=True)
    least = above.abs().mean(-1, keepdim=True) / (16 * values)
    return above / (torch.maximum(below.abs(), least) * below.sign())


@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("readout", ["complex", "hermitian", "real"])
@pytest.mark.parametrize("state", [False, True], ids=["nostate", "state"])
def test_paper_scan_is_its_matrix_form(readout, normalize, state):
    leaves, (d_o, _) = make(Case(T=9, B=2, G=2, R=4, D=3, M=5, state=state))
    if state and normalize:
        # The ones column is one more channel.
        leaves["initial_state"] = torch.randn(2, 2, 5, 8, 2).double().requires_grad_()
    outputs = []
    for form in (paper_form, attention_form):
        inputs = leaves["q"], leaves["k"], leaves["v"], leaves["dt"]
        A = paper_A(leaves)
        state = leaves.get("initial_state")
        o = form(*inputs, A, paper_C(leaves), readout, normalize, state)
        outputs.append({"o": o, **gradients((o,), (d_o,), leaves)})
    got, expected = outputs
    assert_agree(got, expected, "float64")


def test_paper_linear_is_its_convolution():
    leaves, _ = make(Case(T=9, B=2, state=False), linear=True)
    z, c = leaves["z"], leaves["c"]
    dynamics = leaves["dt"], paper_A(leaves), paper_C(leaves)
    basis = basis_by_lag(*dynamics, 9)
    kernel = torch.einsum("hm,hmtj->htj", c.to(basis.dtype), basis).real
    y, _ = reference.paper_linear(z, *dynamics, c)
    expected = torch.einsum("htj,bjhp->bthp", kernel, z)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
