"""The baseline against a masked softmax written out."""

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

from interdomain.model.generation import prefill
from interdomain.model.mixers.softmax import Attended, SoftmaxMixer

from .common import OPTIONS, Largest, assert_near, positions_of, random_tokens, rms_norm, variant
from .test_mixer import literal, rotate


def plain_softmax(mixer, x, window):
    T = x.shape[1]
    heads = (-1, mixer.head_dim)
    q = (x @ mixer.wq.weight.T).unflatten(-1, heads)
    k = (x @ mixer.wk.weight.T).unflatten(-1, heads)
    v = (x @ mixer.wv.weight.T).unflatten(-1, heads)
    q = rotate(q)
    k = rotate(k)
    # Query heads share the keys and values of their group.
    group = q.shape[2] // k.shape[2]
    k = k.repeat_interleave(group, dim=2)
    v = v.repeat_interleave(group, dim=2)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    hidden = (distance < 0) | (distance >= (window or T))
    scores = torch.einsum("bihr,bjhr->bhij", q, k) / mixer.head_dim**0.5
    shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    o = torch.einsum("bhij,bjhr->bihr", shares, v)
    return o.flatten(2) @ mixer.wo.weight.T


# A window has 7 tokens: one block, two, and several blocks with a rest.
@pytest.mark.parametrize("T", [5, 7, 14, 40])
@pytest.mark.parametrize(
    ("condition", "option"),
    [
        ("softmax", "plain"),
        ("softmax", "kv2"),
        ("softmax", "window"),
        ("s4d", "hybrid"),
        ("s4d", "hybrid, window"),
    ],
)
@torch.no_grad()
def test_the_model_by_the_letter(condition, option, T):
    model = variant(condition, option)
    tokens = random_tokens(model.config, 2, T)
    x = model.tok_embeddings.weight[tokens]
    for layer in model.layers.values():
        mixer = layer.attention
        y = rms_norm(x, layer.attention_norm)
        if isinstance(mixer, SoftmaxMixer):
            x = x + plain_softmax(mixer, y, OPTIONS[option].get("window"))
        else:
            x = x + literal(mixer, y)
        y = rms_norm(x, layer.ffn_norm)
        mlp = layer.feed_forward
        gate = y @ mlp.w1.weight.T
        gate = gate * torch.sigmoid(gate)
        x = x + (gate * (y @ mlp.w3.weight.T)) @ mlp.w2.weight.T
    wanted = rms_norm(x, model.norm) @ model.output.weight.T
    # The recurrence's bound on the decay differs from the letter (test_mixer.py).
    tolerance = 1e-10 if condition == "softmax" else 1e-6
    assert_near(model(tokens), wanted, tolerance)


@torch.no_grad()
def test_a_window_has_neither_a_square_of_scores_nor_a_growing_cache():
    model = variant("softmax", "window")
    T = 800
    tokens = random_tokens(model.config, 1, T)
    with Largest() as seen:
        model(tokens)
        model(tokens, positions=positions_of(((300, 500),)))
    assert seen.largest < T * T / 4
    state = model.init_state(1)
    model(tokens, state)
    assert state.nbytes() == 2 * 2 * 7 * 32 * 8  # layers, keys and values, window, width, bytes


def causal_bias(mixer, state, tokens, dtype):
    token = state.position[:, None] + torch.arange(tokens)
    return Attended(causal_lower_right(tokens, state.length + tokens), token, state.length)


@torch.no_grad()
def test_a_piece_on_a_gpu_needs_no_mask(monkeypatch):
    """PyTorch's causal bias, which is used only on CUDA, gives what the mask gives."""
    model = variant("softmax", dtype=torch.float32)
    _, state = prefill(model, random_tokens(model.config, 2, 9))
    piece = random_tokens(model.config, 2, 3)
    wanted = model(piece, state.clone())
    monkeypatch.setattr(SoftmaxMixer, "continuing", staticmethod(causal_bias))
    torch.testing.assert_close(model(piece, state), wanted)
