"""The judge, judged: its T x T matrix form, and the same gradients."""

import pytest
import torch

from interdomain.scan import reference

from .common import Case, assert_agree, leaves_of, make, paper_A, paper_C


def attention_form(q, k, v, dt, A, C, readout, normalize, initial_state):
    """o = (scores of one T x T matrix per head) v, with no recurrence: powers of Lambda by lag."""
    T, G = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(G, dim=2) for x in (k, v))
    dt, A, C = (x.repeat_interleave(G, dim=0) for x in (dt, A, C))
    if normalize:
        v = torch.cat((v, torch.ones_like(v[..., :1])), dim=-1)
    theta = dt[:, None] * A
    gain = (torch.exp(theta) - 1) / A
    lag = torch.arange(T)[:, None] - torch.arange(T)
    decay = torch.exp(theta[..., None, None] * lag.clamp_min(0)) * (lag >= 0)  # [H, M, T, T]
    basis = torch.einsum(
        "hmn,hn,hntj->hmtj", C, gain, decay
    )  # the token at j as basis function m sees it at t
    u = torch.einsum("bthr,bjhr,hmtj->bhtm", q.to(A.dtype), k.to(A.dtype), basis)
    gamma = torch.einsum("hmtj,bjhd->bhtmd", basis, v.to(A.dtype))
    if initial_state is not None:
        X = torch.view_as_complex(initial_state).repeat_interleave(G, dim=1)
        carried = torch.exp(theta[..., None] * torch.arange(1, T + 1))
        first = torch.einsum("hmn,hn,hnt,bhnp->bhtmp", C, gain, carried, X)
        u = u + torch.einsum("bthr,bhtmr->bhtm", q.to(A.dtype), first[..., : k.shape[-1]])
        gamma = gamma + first[..., k.shape[-1] :]
    left = {"complex": u, "hermitian": u.conj(), "real": u.real.to(u.dtype)}[readout]
    right = gamma.real.to(gamma.dtype) if readout == "real" else gamma
    o = torch.einsum("bhtm,bhtmd->bthd", left, right).real
    if not normalize:
        return o
    above, below = o[..., :-1], o[..., -1:]
    least = above.abs().mean(-1, keepdim=True) / (16 * v[..., :-1].abs().mean(-1, keepdim=True))
    return above / (torch.maximum(below.abs(), least) * below.sign())


@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("readout", ["complex", "hermitian", "real"])
@pytest.mark.parametrize("state", [False, True], ids=["nostate", "state"])
def test_paper_scan_is_its_matrix_form(readout, normalize, state):
    leaves, cotangents = leaves_of(Case(T=9, B=2, G=2, R=4, D=3, M=5, state=state), "q", "k", "v")
    if state and normalize:
        leaves["initial_state"] = torch.randn(
            2, 2, 5, 8, 2, dtype=torch.float64, requires_grad=True
        )

    def run(form):
        A = paper_A(leaves["dt"], leaves["log_A_real"], leaves["A_imag"])
        args = (*(leaves[n] for n in ("q", "k", "v", "dt")), A, paper_C(leaves, A))
        o = form(
            *args, readout=readout, normalize=normalize, initial_state=leaves.get("initial_state")
        )
        grads = torch.autograd.grad((o * cotangents["o"]).sum(), list(leaves.values()))
        return {"o": o, **dict(zip(leaves, grads, strict=True))}

    assert_agree(
        run(lambda *a, **k: reference.paper_scan(*a, **k)[0]), run(attention_form), "float64"
    )


def test_paper_linear_is_its_convolution():
    leaves, _ = make(Case(T=9, B=2, state=False))
    A = paper_A(leaves["dt"], leaves["log_A_real"], leaves["A_imag"])
    C = paper_C(leaves, A)
    gain = (torch.exp(leaves["dt"][:, None] * A) - 1) / A
    lag = torch.arange(9)[:, None] - torch.arange(9)
    decay = torch.exp((leaves["dt"][:, None] * A)[..., None, None] * lag.clamp_min(0)) * (lag >= 0)
    kernel = torch.einsum("hm,hmn,hn,hntj->htj", leaves["c"].to(A.dtype), C, gain, decay).real
    z = torch.cat((leaves["k"], leaves["v"]), dim=-1)
    y, _ = reference.paper_linear(z, leaves["dt"], A, C, leaves["c"])
    torch.testing.assert_close(y, torch.einsum("htj,bjhp->bthp", kernel, z), rtol=1e-10, atol=1e-10)
