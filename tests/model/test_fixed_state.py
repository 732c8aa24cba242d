"""The baselines with a fixed state against their papers' recurrences, written per token in float64."""

import sys
import types
from itertools import pairwise
from typing import NamedTuple

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

B, H, K, V = 2, 3, 8, 5


class Rule(NamedTuple):
    """A recurrence: its decay ("channel", "head" or None), the delta rule, one head of keys for all."""

    decay: str | None
    delta: bool = False
    shared_keys: bool = False


RULES = {
    "gla": Rule("channel"),
    "mamba2": Rule("head", shared_keys=True),
    "deltanet": Rule(None, delta=True),
    "gated-deltanet": Rule("head", delta=True),
    "both": Rule("channel", delta=True),
}


def inputs(name, T, dtype=torch.float64):
    rule = RULES[name]
    G = 1 if rule.shared_keys else H
    log_decay = None
    if rule.decay == "channel":
        log_decay = F.logsigmoid(normal(B, T, H, K, seed=3, dtype=dtype))
    elif rule.decay == "head":
        log_decay = F.logsigmoid(normal(B, T, H, seed=3, dtype=dtype))
    beta = None
    if rule.delta:
        beta = torch.sigmoid(normal(B, T, H, seed=4, dtype=dtype))
    return dict(
        q=normal(B, T, G, K, dtype=dtype),
        k=F.normalize(normal(B, T, G, K, seed=1, dtype=dtype), dim=-1),
        v=normal(B, T, H, V, seed=2, dtype=dtype),
        log_decay=log_decay,
        beta=beta,
        initial_state=normal(B, H, K, V, seed=5, dtype=dtype),
    )


def with_each(function, tensors):
    """The function of each tensor in a dict; None stays None."""
    return {name: None if x is None else function(x) for name, x in tensors.items()}


def per_token(q, k, v, log_decay, beta, initial_state, documents=None):
    """S_t = (I - beta k k^T) diag(a) S_{t-1} + beta k v^T, without beta S_t = diag(a) S_{t-1} + k v^T;
    o_t = S_t^T q_t."""
    S = initial_state
    q = q.expand(-1, -1, v.shape[2], -1)
    k = k.expand(-1, -1, v.shape[2], -1)
    outputs = []
    for t in range(v.shape[1]):
        if documents is not None:
            before = documents[:, t - 1] if t else torch.zeros_like(documents[:, 0])
            S = torch.where((documents[:, t] == before)[:, None, None, None], S, 0)
        if log_decay is not None:
            a = log_decay[:, t].exp()
            if a.ndim == 2:  # one decay per head
                a = a[..., None]
            S = S * a[..., None]
        added = torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        if beta is not None:
            erased = torch.einsum("bhk,bhj,bhjv->bhkv", k[:, t], k[:, t], S)
            added = beta[:, t, :, None, None] * (added - erased)
        S = S + added
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outputs, dim=1), S


def assert_same(run, given, documents=None, tolerance=1e-10):
    """Values, the last state and every gradient."""
    leaves = with_each(torch.Tensor.requires_grad_, given)
    tensors = [x for x in leaves.values() if x is not None]

    def values_and_gradients(function):
        o, S = function(**leaves, documents=documents)
        loss = (o * normal(*o.shape, seed=9, dtype=o.dtype)).sum()
        loss = loss + (S * normal(*S.shape, seed=9, dtype=S.dtype)).sum()
        gradients = torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)
        return o, S, *gradients

    for found, wanted in zip(
        values_and_gradients(run), values_and_gradients(per_token), strict=True
    ):
        error = (found - wanted).abs().max() / max(1, wanted.abs().max())
        assert error <= tolerance, f"error {error:.1e}, allowed {tolerance:.0e}"


@pytest.mark.parametrize("T", [1, 63, 257])
@pytest.mark.parametrize("name", RULES)
def test_recurrence(name, T):
    assert_same(recurrence, inputs(name, T))


@pytest.mark.parametrize("strength", [30, 1e4, float("inf")])
@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.decay])
def test_strong_gates_in_float32(name, strength):
    """Some channels forget all in a token, others nothing: e^(sum over a chunk) is no float32, nor is
    its inverse."""
    given = inputs(name, 130, torch.float32)
    log_decay = given["log_decay"]
    strong = torch.rand(log_decay.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    given["log_decay"] = torch.where(strong, log_decay * strength, log_decay / 100)
    exact = with_each(torch.Tensor.double, given)
    leaves = with_each(torch.Tensor.requires_grad_, given)
    found = recurrence(**leaves)
    for x, wanted in zip(found, per_token(**exact), strict=True):
        assert (x - wanted).abs().max() < 1e-5 * wanted.abs().max()
    o, S = found
    tensors = [x for x in leaves.values() if x is not None]
    for gradient in torch.autograd.grad(o.sum() + S.sum(), tensors):
        assert gradient.isfinite().all()


# The layers


def softplus(x):
    return (1 + x.exp()).log()


def silu(x):
    return x * torch.sigmoid(x)


def literal(mixer, condition, x):
    """A layer's output from its parameters, as its paper's figure has it."""
    heads, K, V = mixer.shape

    def product(name, y=x):
        return y @ getattr(mixer, name).weight.T

    def normed(y):
        return y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * mixer.norm.weight

    # Queries, keys and values through the convolution and SiLU.
    y = torch.cat([product("wq"), product("wk"), product("wv")], dim=-1)
    if mixer.conv is not None:
        bias = mixer.conv.bias
        if bias is None:
            bias = torch.zeros(y.shape[-1]).double()
        y = short_conv(y, types.SimpleNamespace(weight=mixer.conv.weight, bias=bias))
    if condition != "gla" or mixer.conv is not None:
        y = silu(y)
    keys = (y.shape[-1] - heads * V) // 2
    q, k, v = y.split([keys, keys, heads * V], dim=-1)
    q = q.unflatten(-1, (-1, K))
    k = k.unflatten(-1, (-1, K))
    v = v.unflatten(-1, (-1, V))
    zeros = torch.zeros(len(x), heads, K, V).double()

    if condition == "mamba2":
        dt = softplus(product("wa") + mixer.ssm.dt_bias)
        o, _ = per_token(q, k, dt[..., None] * v, -mixer.ssm.A_log.exp() * dt, None, zeros)
        o = (o + mixer.ssm.D[:, None] * v).flatten(2)
        return product("wo", normed(o * silu(product("wg"))))

    # Decays and step sizes of the others.
    beta = None
    decay = None
    if condition == "gla":
        gate = product("gate_up", product("gate_down")) + mixer.gate_bias
        decay = (torch.sigmoid(gate).log() / 16).unflatten(-1, (-1, K))
    else:
        q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        beta = torch.sigmoid(product("wb"))
    if condition == "gated-deltanet":
        decay = -mixer.ssm.A_log.exp() * softplus(product("wa") + mixer.ssm.dt_bias)
    o, _ = per_token(q * K**-0.5, k, v, decay, beta, zeros)
    o = normed(o).flatten(2)
    if condition != "deltanet":
        o = o * silu(product("wg"))
    return product("wo", o)


@pytest.mark.parametrize("option", ["plain", "no conv", "conv"])
@pytest.mark.parametrize("condition", FIXED_STATE)
def test_layer_by_the_letter(condition, option):
    """The norm of queries and keys has its epsilon within the root, which matters for small ones."""
    model = variant(condition, option)
    x = normal(2, 70, model.config.dim, seed=3)
    with torch.no_grad():
        for layer in model.layers.values():
            wanted = literal(layer.attention, condition, x)
            assert wanted.std() > 0.01
            assert_exact(layer.attention(x), wanted)


@pytest.mark.parametrize("condition", FIXED_STATE)
def test_products(condition):
    """Torch's count of products, in whole chunks. Torch does not see the triangular system, which is
    half of a product."""
    config = small_config(condition)
    T = 128
    model = Transformer(config)
    flops = forward_flops_per_token(config, T)

    def count(tokens):
        return counted(lambda: model(torch.zeros(1, tokens, dtype=torch.int64)))

    wanted = flops["linear"] + flops["head"] + flops["mixer"]
    layers = 2 * config.n_layers
    if condition == "gla":
        # Pairs of blocks: half of the scores, and a token's score with itself is no product.
        wanted -= layers * 32 * 64 - layers * 32 * 63 / 2
    if condition == "mamba2":
        # One head's scores serve all.
        assert flops["mixer"] == layers * (64 * 8 + 64 * 64 + 2 * 8 * 64)
    if "deltanet" in condition:
        wanted -= layers * 64 * 2 * 16
    assert (count(2 * T) - count(T)) / T == wanted


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


# The package's functions, and the names of their tensors in order.
FUNCTIONS = {
    "gla": ("q", "k", "v", "log_decay"),
    "simple_gla": ("q", "k", "v", "log_decay"),
    "delta_rule": ("q", "k", "v", "beta"),
    "gated_delta_rule": ("q", "k", "v", "log_decay", "beta"),
}


def stand_in_for(names):
    """A function with the arguments and the layout of one of the package's, per token."""

    def run(*tensors, scale, initial_state, output_final_state, cu_seqlens=None):
        given = dict.fromkeys(("q", "k", "v", "log_decay", "beta"))
        given |= zip(names, tensors, strict=True)
        assert (scale, output_final_state) == (1.0, True)
        if cu_seqlens is None:
            return per_token(**given, initial_state=initial_state)
        outputs = []
        states = []
        for i, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            document = {name: None if x is None else x[:, start:end] for name, x in given.items()}
            o, S = per_token(**document, initial_state=initial_state[i : i + 1])
            outputs.append(o)
            states.append(S)
        return torch.cat(outputs, dim=1), torch.cat(states)

    return run


@pytest.fixture
def stand_in(monkeypatch):
    """Modules of the package's names with stand-ins for its functions; and no GPU is asked for."""
    for module in ("fla", "fla.ops", *(f"fla.ops.{name}" for name in FUNCTIONS)):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    for name, tensors in FUNCTIONS.items():
        setattr(sys.modules[f"fla.ops.{name}"], f"chunk_{name}", stand_in_for(tensors))

    def chosen(device, dtype, backend):
        return backend not in fla_kernels.PLAIN, ""

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # the comparison is in float64
    monkeypatch.setattr(fla_kernels, "chosen", chosen)


@pytest.mark.parametrize("name", FIXED_STATE)
def test_the_op_around_the_package(stand_in, name):
    assert_same(recurrence, inputs(name, 33))
    # Documents of 3, 1 and 29 tokens. Those of the first row continue from the initial state.
    documents = torch.repeat_interleave(torch.tensor([0, 1, 2]), torch.tensor([3, 1, 29]))
    rows = documents.expand(2, -1) + torch.tensor([[0], [1]])
    assert_same(recurrence, inputs(name, 33), rows)


def test_when_the_package_computes():
    cuda = torch.device("cuda")
    cpu = torch.device("cpu")
    assert fla_kernels.chosen(None, torch.bfloat16, "auto")[0]
    assert not fla_kernels.chosen(None, torch.bfloat16, "reference")[0]
    assert not fla_kernels.chosen(None, torch.float32, "auto")[0]
    assert not fla_kernels.chosen(cpu, torch.bfloat16, "auto")[0]
    assert fla_kernels.chosen(cuda, torch.bfloat16, "auto")[0] == fla_kernels.INSTALLED
