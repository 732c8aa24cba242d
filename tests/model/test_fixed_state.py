"""The baselines with a fixed state against their papers' recurrences, written per token in float64."""

import sys
import types
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from interdomain.model import Transformer, build_config
from interdomain.model.config import FIXED_STATE
from interdomain.model.flops import forward_flops_per_token
from interdomain.model.mixers import fla_kernels
from interdomain.model.mixers.fla_kernels import recurrence

from .common import EPS, assert_exact, normal, small_config, variant
from .test_flops import counted
from .test_mixer import short_conv

# decay per head or per channel, or none; beta; one head of queries and keys for all
KINDS = {
    "gla": ("channel", False, False),
    "mamba2": ("head", False, True),
    "deltanet": (None, True, False),
    "gated-deltanet": ("head", True, False),
    "both": ("channel", True, False),
}
B, H, K, V = 2, 3, 8, 5


def inputs(kind, T, dtype=torch.float64):
    decay, delta, shared = KINDS[kind]
    G = 1 if shared else H
    log_decay = None
    if decay == "channel":
        log_decay = F.logsigmoid(normal(B, T, H, K, seed=3, dtype=dtype))
    elif decay == "head":
        log_decay = F.logsigmoid(normal(B, T, H, seed=3, dtype=dtype))
    return dict(
        q=normal(B, T, G, K, dtype=dtype),
        k=F.normalize(normal(B, T, G, K, seed=1, dtype=dtype), dim=-1),
        v=normal(B, T, H, V, seed=2, dtype=dtype),
        log_decay=log_decay,
        beta=torch.sigmoid(normal(B, T, H, seed=4, dtype=dtype)) if delta else None,
        initial_state=normal(B, H, K, V, seed=5, dtype=dtype),
    )


def per_token(q, k, v, log_decay, beta, initial_state, documents=None):
    """S_t = (I - beta k k^T) diag(a) S_{t-1} + beta k v^T, without beta S_t = diag(a) S_{t-1} + k v^T; o_t = S_t^T q_t."""
    heads, out, S = v.shape[2], [], initial_state
    q, k = (x.expand(-1, -1, heads, -1) for x in (q, k))
    for t in range(v.shape[1]):
        if documents is not None:
            before = documents[:, t - 1] if t else torch.zeros_like(documents[:, 0])
            S = torch.where((documents[:, t] == before)[:, None, None, None], S, 0)
        if log_decay is not None:
            a = log_decay[:, t].exp()
            S = S * (a[..., None] if a.ndim == 3 else a[..., None, None])
        kt, vt = k[:, t], v[:, t]
        added = torch.einsum("bhk,bhv->bhkv", kt, vt)
        if beta is not None:
            seen = torch.einsum("bhk,bhj,bhjv->bhkv", kt, kt, S)
            S = S + beta[:, t, :, None, None] * (added - seen)
        else:
            S = S + added
        out.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(out, dim=1), S


def assert_same(run, given, documents=None, tolerance=1e-10):
    """Values, the last state and every gradient."""
    leaves = {name: None if x is None else x.requires_grad_() for name, x in given.items()}
    found, wanted = run(**leaves, documents=documents), per_token(**leaves, documents=documents)
    tensors = [x for x in leaves.values() if x is not None]
    gradients = []
    for out in (found, wanted):
        weighted = [(x * normal(*x.shape, seed=9, dtype=x.dtype)).sum() for x in out]
        gradients.append(
            torch.autograd.grad(sum(weighted), tensors, allow_unused=True, materialize_grads=True)
        )
    for a, b in zip((*found, *gradients[0]), (*wanted, *gradients[1]), strict=True):
        assert (a - b).abs().max() <= tolerance * max(1, b.abs().max())


@pytest.mark.parametrize("T", [1, 63, 257])
@pytest.mark.parametrize("kind", KINDS)
def test_recurrence(kind, T):
    assert_same(recurrence, inputs(kind, T))


@pytest.mark.parametrize("strength", [30, 1e4, float("inf")])
@pytest.mark.parametrize("kind", [kind for kind, (decay, *_) in KINDS.items() if decay])
def test_strong_gates_in_float32(kind, strength):
    """Some channels forget all in a token, others nothing: e^(sum over a chunk) is no float32, nor is its inverse."""
    given = inputs(kind, 130, torch.float32)
    strong = torch.rand(given["log_decay"].shape, generator=torch.Generator().manual_seed(1)) < 0.3
    given["log_decay"] = torch.where(
        strong, given["log_decay"] * strength, given["log_decay"] / 100
    )
    leaves = {name: None if x is None else x.requires_grad_() for name, x in given.items()}
    found, S = recurrence(**leaves)
    wanted, end = per_token(
        **{name: None if x is None else x.detach().double() for name, x in given.items()}
    )
    for a, b in ((found, wanted), (S, end)):
        assert (a - b).abs().max() < 1e-5 * b.abs().max()
    for g in torch.autograd.grad(
        (found.sum() + S.sum()), [x for x in leaves.values() if x is not None]
    ):
        assert g.isfinite().all()


# The layers


def literal(mixer, condition, x):
    """A layer's output from its parameters, as its paper's figure has it."""
    heads, K, V = mixer.shape
    silu = lambda y: y * torch.sigmoid(y)  # noqa: E731
    W = lambda name: getattr(mixer, name).weight.T  # noqa: E731
    y = torch.cat([x @ W("wq"), x @ W("wk"), x @ W("wv")], dim=-1)
    if mixer.conv is not None:
        bias = torch.zeros(y.shape[-1]).double() if mixer.conv.bias is None else mixer.conv.bias
        y = short_conv(y, types.SimpleNamespace(weight=mixer.conv.weight, bias=bias))
    y = y if condition == "gla" and mixer.conv is None else silu(y)
    q, k, v = y.split([y.shape[-1] // 2 - heads * V // 2] * 2 + [heads * V], dim=-1)
    q, k, v = q.unflatten(-1, (-1, K)), k.unflatten(-1, (-1, K)), v.unflatten(-1, (-1, V))
    rms = lambda y: y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * mixer.norm.weight  # noqa: E731
    zero = torch.zeros(len(x), heads, K, V).double()
    if condition == "mamba2":
        dt = (1 + (x @ W("wa") + mixer.ssm.dt_bias).exp()).log()
        o, _ = per_token(q, k, dt[..., None] * v, -mixer.ssm.A_log.exp() * dt, None, zero)
        o = (o + mixer.ssm.D[:, None] * v).flatten(2)
        return rms(o * silu(x @ W("wg"))) @ W("wo")
    q, beta, decay = q * K**-0.5, None, None
    if condition == "gla":
        gate = x @ W("gate_down") @ W("gate_up") + mixer.gate_bias
        decay = (torch.sigmoid(gate).log() / 16).unflatten(-1, (-1, K))
    else:
        q = q / (
            (q.square().sum(-1, keepdim=True) + 1e-6 / K).sqrt() * K**0.5
        )  # q is divided by sqrt(K) above
        k, beta = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt(), torch.sigmoid(x @ W("wb"))
    if condition == "gated-deltanet":
        decay = -mixer.ssm.A_log.exp() * (1 + (x @ W("wa") + mixer.ssm.dt_bias).exp()).log()
    o = rms(per_token(q, k, v, decay, beta, zero)[0]).flatten(2)
    return (o if condition == "deltanet" else o * silu(x @ W("wg"))) @ W("wo")


@pytest.mark.parametrize("option", ["plain", "no conv", "conv"])
@pytest.mark.parametrize("condition", FIXED_STATE)
def test_layer_by_the_letter(condition, option):
    """The norm of queries and keys has its epsilon within the root, which counts for small ones."""
    model = variant(condition, option)
    x = normal(2, 70, model.config.dim, seed=3)
    with torch.no_grad():
        for layer in model.layers.values():
            wanted = literal(layer.attention, condition, x)
            assert wanted.std() > 0.01
            assert_exact(layer.attention(x), wanted)


@pytest.mark.parametrize("condition", FIXED_STATE)
def test_products(condition):
    """Torch's count of products, in whole chunks; the triangular system, which torch does not see, is half of a product."""
    config, T = small_config(condition), 128
    model, flops = Transformer(config), forward_flops_per_token(config, T)
    once, twice = (
        counted(lambda t=t: model(torch.zeros(1, t, dtype=torch.int64))) for t in (T, 2 * T)
    )
    wanted = flops["linear"] + flops["head"] + flops["mixer"]
    if (
        condition == "gla"
    ):  # pairs of blocks: half of the scores, and of each token with itself no product
        wanted -= 2 * config.n_layers * 32 * 64 - 2 * config.n_layers * 32 * 63 / 2
    if condition == "mamba2":  # one head's scores serve all
        assert flops["mixer"] == 2 * config.n_layers * (64 * 8 + 64 * 64 + 2 * 8 * 64)
    if "deltanet" in condition:
        wanted -= 2 * config.n_layers * 64 * 2 * 16
    assert (twice - once) / T == wanted


def test_what_does_not_fit_is_refused():
    for condition, options, words in (
        (
            "gla",
            dict(n_basis=6),
            "4 n_basis = 24 wide, which must divide dim = 128",
        ),
        ("mamba2", dict(state_heads=3), "state_heads must divide 2 dim = 256: got 3"),
        (
            "deltanet",
            dict(output_gate=True),
            "output_gate.*no switches but mixer.n_basis, mixer.state_heads, mixer.conv",
        ),
        (
            "interdomain",
            dict(state_heads=2),
            "state_heads = 2 is not possible: it is for gla, mamba2",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            build_config("debug", condition, **options)


# flash-linear-attention, with a stand-in for its kernels


@pytest.fixture
def stand_in(monkeypatch):
    """Modules of the package's names, whose functions have its arguments' names and layout; and no GPU is asked for."""

    def function(*names):
        def run(*tensors, scale, initial_state, output_final_state, cu_seqlens=None):
            given = dict.fromkeys(("q", "k", "v", "log_decay", "beta")) | dict(
                zip(names, tensors, strict=True)
            )
            assert (scale, output_final_state) == (1.0, True)
            if cu_seqlens is None:
                return per_token(**given, initial_state=initial_state)
            outputs, states = [], []
            for i, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
                document = {
                    name: None if x is None else x[:, start:end] for name, x in given.items()
                }
                o, S = per_token(**document, initial_state=initial_state[i : i + 1])
                outputs.append(o)
                states.append(S)
            return torch.cat(outputs, dim=1), torch.cat(states)

        return run

    for module, name, names in (
        ("gla", "chunk_gla", ("q", "k", "v", "log_decay")),
        ("simple_gla", "chunk_simple_gla", ("q", "k", "v", "log_decay")),
        ("delta_rule", "chunk_delta_rule", ("q", "k", "v", "beta")),
        ("gated_delta_rule", "chunk_gated_delta_rule", ("q", "k", "v", "log_decay", "beta")),
    ):
        made = types.ModuleType(f"fla.ops.{module}")
        setattr(made, name, function(*names))
        monkeypatch.setitem(sys.modules, made.__name__, made)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x)  # the comparison is in float64
    monkeypatch.setattr(
        fla_kernels, "chosen", lambda device, dtype, backend: (backend not in fla_kernels.PLAIN, "")
    )


@pytest.mark.parametrize("kind", FIXED_STATE)
def test_the_op_around_the_package(stand_in, kind):
    assert_same(recurrence, inputs(kind, 33))
    documents = torch.repeat_interleave(torch.tensor([0, 1, 2]), torch.tensor([3, 1, 29])).expand(
        2, -1
    )
    assert_same(recurrence, inputs(kind, 33), documents + torch.tensor([[0], [1]]))


def test_when_the_package_computes():
    there, here, half = torch.device("cuda"), torch.device("cpu"), torch.bfloat16
    assert fla_kernels.chosen(None, half, "auto")[0]
    assert not fla_kernels.chosen(None, half, "reference")[0]
    assert not fla_kernels.chosen(None, torch.float32, "auto")[0]
    assert not fla_kernels.chosen(here, half, "auto")[0]
    assert fla_kernels.chosen(there, half, "auto")[0] == fla_kernels.INSTALLED
