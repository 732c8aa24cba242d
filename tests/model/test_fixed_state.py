"""The baselines with a fixed state against their papers' recurrences per token, in float64."""

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

from .common import EPS, assert_exact, assert_near, normal, small_config, variant
from .test_flops import counted_flops
from .test_mixer import short_conv

# Shapes: B batch, T tokens, H heads, K key width, V value width.
B = 2
H = 3
K = 8
V = 5
RULES = ("gla", "mamba2", "deltanet", "gated-deltanet", "decay per channel and delta rule")


def inputs(rule, T, dtype=torch.float64):
    """Returns a recurrence's arguments. The decay is per channel, per head or None."""
    key_heads = 1 if rule == "mamba2" else H
    log_decay = None
    if rule in ("gla", "decay per channel and delta rule"):
        log_decay = F.logsigmoid(normal(B, T, H, K, seed=3, dtype=dtype))
    elif rule in ("mamba2", "gated-deltanet"):
        log_decay = F.logsigmoid(normal(B, T, H, seed=3, dtype=dtype))
    beta = None
    if "delta" in rule:
        beta = torch.sigmoid(normal(B, T, H, seed=4, dtype=dtype))
    return {
        "q": normal(B, T, key_heads, K, dtype=dtype),
        "k": F.normalize(normal(B, T, key_heads, K, seed=1, dtype=dtype), dim=-1),
        "v": normal(B, T, H, V, seed=2, dtype=dtype),
        "log_decay": log_decay,
        "beta": beta,
        "initial_state": normal(B, H, K, V, seed=5, dtype=dtype),
    }


def per_token(q, k, v, log_decay, beta, initial_state, documents=None):
    """Computes the recurrence token by token.

    With beta: S_t = (I - beta k k^T) diag(a) S_{t-1} + beta k v^T. Without it:
    S_t = diag(a) S_{t-1} + k v^T. The output is o_t = S_t^T q_t.
    """
    S = initial_state
    q = q.expand(-1, -1, v.shape[2], -1)
    k = k.expand(-1, -1, v.shape[2], -1)
    outputs = []
    for t in range(v.shape[1]):
        if documents is not None:
            # The initial state belongs to document 0.
            before = documents[:, t - 1] if t else torch.zeros_like(documents[:, 0])
            continues = documents[:, t] == before
            S = torch.where(continues[:, None, None, None], S, 0)
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


def values_and_gradients(function, arguments, **options):
    """Returns the outputs, the last state and the gradients of all tensors."""
    tensors = {name: x for name, x in arguments.items() if x is not None}
    for x in tensors.values():
        x.requires_grad_()
    o, S = function(**arguments, **options)
    loss = (o * normal(*o.shape, seed=9, dtype=o.dtype)).sum()
    loss = loss + (S * normal(*S.shape, seed=9, dtype=S.dtype)).sum()
    gradients = torch.autograd.grad(
        loss, list(tensors.values()), allow_unused=True, materialize_grads=True
    )
    return {"o": o, "S": S} | dict(zip(tensors, gradients, strict=True))


def assert_recurrence(rule, T, documents=None):
    arguments = inputs(rule, T)
    found = values_and_gradients(recurrence, arguments, documents=documents)
    wanted = values_and_gradients(per_token, arguments, documents=documents)
    for name, x in wanted.items():
        largest = max(1, x.abs().max().item())
        assert_near(found[name], x, 1e-10 * largest, name)


@pytest.mark.parametrize("T", [1, 63, 257])
@pytest.mark.parametrize("rule", RULES)
def test_recurrence(rule, T):
    assert_recurrence(rule, T)


@pytest.mark.parametrize("strength", [30, 1e4, float("inf")])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "deltanet"])
def test_strong_gates_in_float32(rule, strength):
    """Values and gradients are finite and right if some channels forget everything in one token.

    Neither e^(sum over a chunk) nor its inverse is a float32 then. Other channels forget nothing.
    """
    arguments = inputs(rule, 130, torch.float32)
    log_decay = arguments["log_decay"]
    generator = torch.Generator().manual_seed(1)
    strong = torch.rand(log_decay.shape, generator=generator) < 0.3
    arguments["log_decay"] = torch.where(strong, log_decay * strength, log_decay / 100)
    exact = {name: x if x is None else x.double() for name, x in arguments.items()}
    found = values_and_gradients(recurrence, arguments)
    wanted_o, wanted_S = per_token(**exact)
    assert_near(found["o"], wanted_o, 1e-5 * wanted_o.abs().max())
    assert_near(found["S"], wanted_S, 1e-5 * wanted_S.abs().max())
    for name, x in found.items():
        assert x.isfinite().all(), name


# The layers


def softplus(x):
    return (1 + x.exp()).log()


def silu(x):
    return x * torch.sigmoid(x)


def literal(mixer, condition, x):
    """Returns a layer's output from its parameters, as its paper's figure has it."""
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
    """A layer computes its paper's formulas.

    The norm of queries and keys has its epsilon in the root.
    """
    model = variant(condition, option)
    x = normal(2, 70, model.config.dim, seed=3)
    with torch.no_grad():
        for layer in model.layers.values():
            wanted = literal(layer.attention, condition, x)
            assert wanted.std() > 0.01
            assert_exact(layer.attention(x), wanted)


@pytest.mark.parametrize("condition", FIXED_STATE)
def test_products(condition):
    """The count of products agrees with PyTorch's counter, in whole chunks.

    PyTorch does not count the triangular system, which is half of a product.
    """
    config = small_config(condition)
    T = 128
    model = Transformer(config)
    flops = forward_flops_per_token(config, T)
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
    assert (counted_flops(model, 2 * T) - counted_flops(model, T)) / T == wanted


@pytest.mark.parametrize(
    ("condition", "setting", "words"),
    [
        ("gla", {"n_basis": 6}, "4 n_basis = 24 wide, which must divide dim = 128"),
        ("mamba2", {"state_heads": 3}, "state_heads must divide 2 dim = 256: got 3"),
        ("deltanet", {"output_gate": True}, "output_gate.*no switches but mixer.n_basis"),
        ("interdomain", {"state_heads": 2}, "state_heads = 2 is not possible: it is for gla"),
    ],
)
def test_wrong_settings_are_refused(condition, setting, words):
    with pytest.raises(ValueError, match=words):
        build_config("debug", condition, **setting)


# The kernels of flash-linear-attention, replaced by functions that compute per token.

# The package's functions, and the names of their tensors in order.
FUNCTIONS = {
    "gla": ("q", "k", "v", "log_decay"),
    "simple_gla": ("q", "k", "v", "log_decay"),
    "delta_rule": ("q", "k", "v", "beta"),
    "gated_delta_rule": ("q", "k", "v", "log_decay", "beta"),
}


def stand_in_for(names):
    """Returns a function with the arguments and the layout of one of the package's functions."""

    def run(*tensors, scale, initial_state, output_final_state, cu_seqlens=None):
        arguments = {"log_decay": None, "beta": None}
        arguments |= zip(names, tensors, strict=True)
        assert scale == 1.0
        assert output_final_state
        if cu_seqlens is None:
            return per_token(**arguments, initial_state=initial_state)
        outputs = []
        states = []
        for i, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            document = dict(arguments)
            for name in names:
                document[name] = arguments[name][:, start:end]
            o, S = per_token(**document, initial_state=initial_state[i : i + 1])
            outputs.append(o)
            states.append(S)
        return torch.cat(outputs, dim=1), torch.cat(states)

    return run


def kernels_are_chosen(device, dtype, backend):
    return backend not in fla_kernels.PLAIN, ""


@pytest.mark.parametrize("rule", FIXED_STATE)
def test_the_op_around_the_package(rule, monkeypatch):
    """The op gives the package's functions their layout, with and without documents."""
    monkeypatch.setitem(sys.modules, "fla", types.ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.ops", types.ModuleType("fla.ops"))
    for name, tensors in FUNCTIONS.items():
        module = types.ModuleType(f"fla.ops.{name}")
        setattr(module, f"chunk_{name}", stand_in_for(tensors))
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", module)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # the comparison is in float64
    monkeypatch.setattr(fla_kernels, "chosen", kernels_are_chosen)
    assert_recurrence(rule, 33)
    # Documents of 3, 1 and 29 tokens. Those of the first row continue from the initial state.
    documents = torch.repeat_interleave(torch.tensor([0, 1, 2]), torch.tensor([3, 1, 29]))
    rows = documents.expand(2, -1) + torch.tensor([[0], [1]])
    assert_recurrence(rule, 33, rows)


def test_when_the_package_computes():
    """The package computes in half precision on CUDA, unless a plain backend is named."""
    cuda = torch.device("cuda")
    assert fla_kernels.chosen(None, torch.bfloat16, "auto")[0]
    assert not fla_kernels.chosen(None, torch.bfloat16, "reference")[0]
    assert not fla_kernels.chosen(None, torch.float32, "auto")[0]
    assert not fla_kernels.chosen(torch.device("cpu"), torch.bfloat16, "auto")[0]
    assert fla_kernels.chosen(cuda, torch.bfloat16, "auto")[0] == fla_kernels.INSTALLED
