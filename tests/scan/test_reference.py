"""The judge, judged: its T x T matrix form, and the same gradients."""

import pytest
import torch

from interdomain.scan import reference

from .common import Case, assert_agree, gradients, make, paper_A, paper_C


def basis_of(dt, A, C, lag):
    """Returns basis function m as it sees its input n after a lag: C gain Lambda^lag, [H, M, N, *lag.shape]; 0 if lag < 0."""
    theta = dt[:, None] * A
    gain = (torch.exp(theta) - 1) / A
    decay = torch.exp(theta[..., None] * lag.flatten().clamp_min(0)) * (lag.flatten() >= 0)
    return torch.einsum("hmn,hn,hnl->hmnl", C, gain, decay).unflatten(-1, lag.shape)


def attention_form(q, k, v, dt, A, C, *, readout, normalize, initial_state):
    """Returns o = (scores of one T x T matrix per head) v, with no recurrence: powers of Lambda by lag."""
    T, R = k.shape[1], k.shape[3]
    G = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(G, dim=2), v.repeat_interleave(G, dim=2)
    dynamics = [x.repeat_interleave(G, dim=0) for x in (dt, A, C)]
    if normalize:
        v = torch.cat((v, torch.ones_like(v[..., :1])), dim=-1)
    t = torch.arange(T)
    basis = basis_of(*dynamics, t[:, None] - t).sum(2)
    q, k, values = (x.to(A.dtype) for x in (q, k, v))
    U = torch.einsum("bthr,bjhr,hmtj->bhtm", q, k, basis)
    Gamma = torch.einsum("hmtj,bjhd->bhtmd", basis, values)
    if initial_state is not None:
        X = torch.view_as_complex(initial_state).repeat_interleave(G, dim=1)
        first = torch.einsum("hmnt,bhnp->bhtmp", basis_of(*dynamics, t + 1), X)
        U = U + torch.einsum("bthr,bhtmr->bhtm", q, first[..., :R])
        Gamma = Gamma + first[..., R:]
    if readout == "hermitian":
        U = U.conj()
    if readout == "real":
        U, Gamma = U.real, Gamma.real
    o = torch.einsum("bhtm,bhtmd->bthd", U, Gamma).real
    if not normalize:
        return o, None
    above, below = o[..., :-1], o[..., -1:]
    # The denominator is held away from zero.
    values = v[..., :-1].abs().mean(-1, keepdim=True)
    least = above.abs().mean(-1, keepdim=True) / (16 * values)
    return above / (torch.maximum(below.abs(), least) * below.sign()), None


@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("readout", ["complex", "hermitian", "real"])
@pytest.mark.parametrize("state", [False, True], ids=["nostate", "state"])
def test_paper_scan_is_its_matrix_form(readout, normalize, state):
    leaves, (d_o, _) = make(Case(T=9, B=2, G=2, R=4, D=3, M=5, state=state))
    if state and normalize:
        # The ones column is one more channel.
        leaves["initial_state"] = torch.randn(2, 2, 5, 8, 2).double().requires_grad_()
    tokens = leaves["q"], leaves["k"], leaves["v"]
    outputs = []
    for form in (reference.paper_scan, attention_form):
        dynamics = leaves["dt"], paper_A(leaves), paper_C(leaves)
        o, _ = form(
            *tokens,
            *dynamics,
            readout=readout,
            normalize=normalize,
            initial_state=leaves.get("initial_state"),
        )
        outputs.append({"o": o, **gradients((o,), (d_o,), leaves)})
    assert_agree(*outputs, "float64")


def test_paper_linear_is_its_convolution():
    leaves, _ = make(Case(T=9, B=2, state=False), linear=True)
    z, c = leaves["z"], leaves["c"]
    dynamics = leaves["dt"], paper_A(leaves), paper_C(leaves)
    t = torch.arange(9)
    basis = basis_of(*dynamics, t[:, None] - t)
    kernel = torch.einsum("hm,hmntj->htj", c.to(basis.dtype), basis).real
    y, _ = reference.paper_linear(z, *dynamics, c)
    expected = torch.einsum("htj,bjhp->bthp", kernel, z)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
