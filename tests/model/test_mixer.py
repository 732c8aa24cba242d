"""The interdomain mixer by the letter of the paper: its data flow written out, in float64.

Only the parameters come from the model. SC is F.conv1d, RoPE is a product of complex numbers, and
the core is the oracle of interdomain.scan, which forms U and Gamma at every step.
"""

import math
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from interdomain.model import Execution, Transformer
from interdomain.model.config import FIXED_STATE
from interdomain.model.feature_maps import rope_tables
from interdomain.model.mixers import interdomain as mixer
from interdomain.scan.reference import paper_linear, paper_scan

from .common import (
    THETA,
    VARIANTS,
    assert_near,
    normal,
    random_tokens,
    rms_norm,
    small_config,
    variant,
)

T = 70


def short_conv(x, conv):
    """SC: causal depthwise convolution with bias, or none. x [B, T, E]."""
    if conv is None:
        return x
    width = conv.weight.shape[-1]
    padded = F.pad(x.mT, (width - 1, 0))
    return F.conv1d(padded, conv.weight, conv.bias, groups=x.shape[-1]).mT


def rotate(x):
    """RoPE: channels i and R/2 + i are one complex number, turned by t * THETA^(-2i/R). x [B, T, H, R]."""
    T = x.shape[1]
    real, imaginary = x.chunk(2, dim=-1)
    half = real.shape[-1]
    frequency = THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(T)[:, None, None] * frequency
    turned = torch.complex(real, imaginary) * torch.exp(1j * angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def projected(x, frequencies):
    """Returns w.x with the random vectors of the state head that a head belongs to."""
    heads_per_state = x.shape[2] // frequencies.shape[0]
    own = frequencies.repeat_interleave(heads_per_state, dim=0)
    return torch.einsum("bthr,hfr->bthf", x, own)


def features(mixer, x, query=False):
    """Returns xi(x) of the mixer's feature map."""
    R = x.shape[-1]
    match mixer.config.feature_map:
        case "silu":
            y = x * torch.sigmoid(x)
            return y / y.square().sum(-1, keepdim=True).sqrt()
        case "rff":
            # sqrt(2/R) [cos(w x), sin(w x)]
            angle = projected(x, mixer.feature_map.frequencies)
            y = torch.cat([angle.cos(), angle.sin()], dim=-1)
            return y * math.sqrt(2 / R)
        case "elu":
            return (F.elu(x) + 1) / math.sqrt(R)
        case "softplus":
            return torch.log1p(torch.exp(x)) / math.sqrt(R)
        case "favor":
            # FAVOR+. A query's features are relative to the largest of them.
            half_square = x.square().sum(-1, keepdim=True) / (2 * math.sqrt(R))
            y = torch.exp(projected(x, mixer.feature_map.frequencies) - half_square)
            if query:
                y = y / y.amax(-1, keepdim=True) / math.sqrt(R)
            return y / math.sqrt(R)


def input_norm(x, norm):
    """N+b of eq. 12; only SiLU features have it."""
    if norm is None:
        return x
    return rms_norm(x, norm) + norm.bias


def complex_C(mixer, A):
    M = mixer.config.n_basis
    if mixer.config.c_form == "identity":
        return torch.eye(M, dtype=A.dtype).expand(*A.shape, M)
    C = torch.view_as_complex(mixer.ssm.C)
    if mixer.config.c_form == "diagonal":
        C = torch.diag_embed(C)
    return C


def literal(mixer, x):
    """Returns the mixer's output from its parameters, by the paper's data flow."""
    m = mixer.config

    def heads(y):
        return y.unflatten(-1, (-1, mixer.head_dim))

    # Keys and values, or the single input's a and b in their places.
    k = heads(short_conv(x @ mixer.wk.weight.T, mixer.k_conv))
    v = x @ mixer.wv.weight.T
    if m.rope:
        k = rotate(k)
    if m.dual_input:
        k = features(mixer, k)
    else:
        v = short_conv(v, mixer.v_conv)
    k = input_norm(k, mixer.k_norm)
    v = input_norm(heads(v), mixer.v_norm)

    # The recurrence and its readout.
    dt = mixer.ssm.log_dt.exp()
    A = torch.complex(-mixer.ssm.log_A_real.exp(), mixer.ssm.A_imag)
    C = complex_C(mixer, A)
    if m.query_readout:
        q = heads(short_conv(x @ mixer.wq.weight.T, mixer.q_conv))
        if m.rope:
            q = rotate(q)
        q = features(mixer, q, query=True)
        o, _ = paper_scan(q, k, v, dt, A, C, readout=m.readout, normalize=m.normalize)
    else:
        u = torch.cat([k, v], dim=-1)
        o, _ = paper_linear(u, dt, A, C, mixer.ssm.c)

    # The output norm and the output gate.
    if m.output_norm == "rms":
        o = rms_norm(o, mixer.o_norm)
    elif m.output_norm == "soft":
        w = mixer.o_norm.weight
        mean_square = o.square().mean(-1, keepdim=True)
        o = w * o / (mean_square + w**2).sqrt()
    o = o.flatten(2)
    if m.output_gate:
        gate = x @ mixer.wg.weight.T
        if m.gate_function == "silu":
            o = gate * o
        o = torch.sigmoid(gate) * o
    return o @ mixer.wo.weight.T


BY_THE_LETTER = []
for condition, option in VARIANTS:
    if condition not in ("softmax", *FIXED_STATE) and "hybrid" not in option:
        BY_THE_LETTER.append((condition, option))


@pytest.mark.parametrize(("condition", "option"), BY_THE_LETTER)
@torch.no_grad()
def test_by_the_letter(condition, option):
    model = variant(condition, option)
    x = normal(2, T, model.config.dim, seed=3)
    tables = rope_tables(torch.arange(T), model.config.head_dim, THETA, x.dtype)
    # Float64, and the bend below over 70 tokens. A denominator near zero magnifies both.
    tolerance = 1e-8 if model.config.mixer.normalize else 1e-9
    for layer in model.layers.values():
        # The bound on the decay (interdomain.scan.MAX_DECAY_PER_TOKEN) bends a decay x by x^8 / 8
        # of itself: 5e-12 at the fastest decay of the initialisation, 0.05.
        ssm = layer.attention.ssm
        ssm.log_dt.clamp_(max=math.log(0.05) - ssm.log_A_real.max())
        wanted = literal(layer.attention, x)
        assert wanted.std() > 0.01
        assert_near(layer.attention(x, tables), wanted, tolerance * wanted.abs().max())


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(
    ("condition", "scan"),
    [
        ("interdomain", "interdomain_scan"),
        ("s4d", "linear_scan"),
    ],
)
def test_arguments_of_the_scan_in_training(condition, scan, recompute):
    """No final state is asked for, because activation checkpointing would save it.

    `recompute` is as set. Tests of real runs (tests/titan) have the dtypes.
    """
    model = Transformer(small_config(condition), Execution(recompute=recompute))
    with mock.patch.object(mixer, scan, side_effect=getattr(mixer, scan)) as calls:
        model(random_tokens(model.config, 1, 20))
    assert calls.call_count == 2
    for _, options in calls.call_args_list:
        assert options["final_state"] is False
        assert options.get("recompute", recompute) == recompute


def test_rope_angles():
    """float32 values of exact angles, at a million tokens as at one."""
    positions = torch.tensor([0, 1, 7, 4095, 1_000_000])
    frequencies = 1e4 ** (-torch.arange(0, 96, 2, dtype=torch.float64) / 96)
    angles = positions[:, None, None] * frequencies
    found = torch.stack(rope_tables(positions, 96, 1e4))
    wanted = torch.stack([angles.cos(), angles.sin()]).float()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-7)
