"""The baselines with a fixed state against their papers' recurrences per token, in float64."""

import sys
import types
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from interdomain.model.config import FIXED_STATE
from interdomain.model.mixers import fla_kernels
from interdomain.model.mixers.fla_kernels import recurrence

from ..scan.common import assert_within
from .common import assert_exact, normal, rms_norm, variant
from .test_mixer import short_conv

# Shapes: B batch, T tokens, H heads, K key width, V value width.
B = 2
H = 3
K = 8
V = 5
RULES = ("gla", "mamba2", "deltanet", "gated-deltanet", "decay per channel and delta rule")


def inputs(rule, T, dtype=torch.float64):
    """Returns a recurrence's tensors by name. The decay is per channel, per head or left out."""
    key_heads = 1 if rule == "mamba2" else H
    tensors = {
        "q": normal(B, T, key_heads, K),
        "k": F.normalize(normal(B, T, key_heads, K, seed=1), dim=-1),
        "v": normal(B, T, H, V, seed=2),
        "initial_state": normal(B, H, K, V, seed=5),
    }
    if rule in ("gla", "decay per channel and delta rule"):
        tensors["log_decay"] = F.logsigmoid(normal(B, T, H, K, seed=3))
    elif rule in ("mamba2", "gated-deltanet"):
        tensors["log_decay"] = F.logsigmoid(normal(B, T, H, seed=3))
    if "delta" in rule:
        tensors["beta"] = torch.sigmoid(normal(B, T, H, seed=4))
    return {name: x.to(dtype) for name, x in tensors.items()}


def per_token(q, k, v, initial_state, log_decay=None, beta=None, documents=None):
    """Computes the recurrence token by token.

    With beta: S_t = (I - beta k k^T) diag(a) S_{t-1} + beta k v^T. Without it:
    S_t = diag(a) S_{t-1} + k v^T. The output is o_t = S_t^T q_t.
    """
    S = initial_state
    q = q.expand(-1, -1, v.shape[2], -1)
    k = k.expand(-1, -1, v.shape[2], -1)
    if documents is not None:
        # The initial state belongs to document 0.
        continues = documents == F.pad(documents, (1, -1))
    outputs = []
    for t in range(v.shape[1]):
        if documents is not None:
            S = S * continues[:, t, None, None, None]
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


def values_and_gradients(function, tensors, documents=None):
    """Returns the outputs, the last state and the gradients of all tensors, by name."""
    for x in tensors.values():
        x.requires_grad_()
    o, S = function(**tensors, documents=documents)
    d_o = normal(*o.shape, seed=9, dtype=o.dtype)
    d_S = normal(*S.shape, seed=9, dtype=S.dtype)
    gradients = torch.autograd.grad((o, S), list(tensors.values()), (d_o, d_S))
    return {"o": o, "S": S} | dict(zip(tensors, gradients, strict=True))


def assert_recurrence(rule, T, documents=None):
    tensors = inputs(rule, T)
    found = values_and_gradients(recurrence, tensors, documents)
    wanted = values_and_gradients(per_token, tensors, documents)
    assert_within(found, wanted, 1e-10)


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
    tensors = inputs(rule, 130, torch.float32)
    log_decay = tensors["log_decay"]
    strong = normal(*log_decay.shape, seed=6) < -0.5
    tensors["log_decay"] = torch.where(strong, log_decay * strength, log_decay / 100)
    exact = {name: x.double() for name, x in tensors.items()}
    found = values_and_gradients(recurrence, tensors)
    wanted_o, wanted_S = per_token(**exact)
    assert_within({"o": found["o"], "S": found["S"]}, {"o": wanted_o, "S": wanted_S}, 1e-5)
    for name, x in found.items():
        assert x.isfinite().all(), name


# The layers


def softplus(x):
    return (1 + x.exp()).log()


def silu(x):
    return x * torch.sigmoid(x)


def normalized(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def literal(mixer, condition, x):
    """Returns a layer's output from its parameters, as its paper's figure has it."""
    heads, K, V = mixer.shape

    def product(name, y=x):
        return y @ getattr(mixer, name).weight.T

    # Queries, keys and values through the convolution and SiLU.
    y = torch.cat([product("wq"), product("wk"), product("wv")], dim=-1)
    y = short_conv(y, mixer.conv)
    if condition != "gla" or mixer.conv is not None:
        y = silu(y)
    values = heads * V
    keys = (y.shape[-1] - values) // 2
    q, k, v = y.split([keys, keys, values], dim=-1)
    q = q.unflatten(-1, (-1, K))
    k = k.unflatten(-1, (-1, K))
    v = v.unflatten(-1, (-1, V))
    zeros = torch.zeros(len(x), heads, K, V).double()

    if condition == "mamba2":
        dt = softplus(product("wa") + mixer.ssm.dt_bias)
        decay = -mixer.ssm.A_log.exp() * dt
        o, _ = per_token(q, k, dt[..., None] * v, zeros, decay)
        o = o + mixer.ssm.D[:, None] * v
        o = o.flatten(2) * silu(product("wg"))
        return product("wo", rms_norm(o, mixer.norm))

    # Decays and step sizes of the others.
    decay = None
    beta = None
    if condition == "gla":
        gate = product("gate_up", product("gate_down")) + mixer.gate_bias
        decay = torch.sigmoid(gate).log() / 16
        decay = decay.unflatten(-1, (-1, K))
    else:
        q = normalized(q)
        k = normalized(k)
        beta = torch.sigmoid(product("wb"))
    if condition == "gated-deltanet":
        dt = softplus(product("wa") + mixer.ssm.dt_bias)
        decay = -mixer.ssm.A_log.exp() * dt
    o, _ = per_token(q * K**-0.5, k, v, zeros, decay, beta)
    o = rms_norm(o, mixer.norm).flatten(2)
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
        assert scale == 1.0
        assert output_final_state
        arguments = dict(zip(names, tensors, strict=True))
        if cu_seqlens is None:
            return per_token(**arguments, initial_state=initial_state)
        outputs = []
        states = []
        for i, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            document = {name: x[:, start:end] for name, x in arguments.items()}
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
    for name, tensors in FUNCTIONS.items():
        module = types.ModuleType(name)
        setattr(module, f"chunk_{name}", stand_in_for(tensors))
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", module)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # the comparison is in float64
    monkeypatch.setattr(fla_kernels, "chosen", kernels_are_chosen)
    assert_recurrence(rule, 33)
    # Documents of 3, 1 and 29 tokens. Those of the first row continue from the initial state.
    row = torch.tensor(3 * [0] + [1] + 29 * [2])
    assert_recurrence(rule, 33, torch.stack([row, row + 1]))


@pytest.mark.parametrize(
    ("device", "dtype", "backend", "expected"),
    [
        (None, torch.bfloat16, "auto", True),
        (None, torch.bfloat16, "reference", False),
        (None, torch.float32, "auto", False),
        (torch.device("cpu"), torch.bfloat16, "auto", False),
        (torch.device("cuda"), torch.bfloat16, "auto", fla_kernels.INSTALLED),
    ],
)
def test_when_the_package_computes(device, dtype, backend, expected):
    """The package computes in half precision on CUDA, unless a plain backend is named."""
    chosen, _ = fla_kernels.chosen(device, dtype, backend)
    assert chosen == expected
