"""The baseline against a masked softmax written out."""

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

from interdomain.model.generation import prefill
from interdomain.model.mixers.softmax import Attended, SoftmaxMixer

from .common import EPS, Largest, positions_of, random_tokens, variant
from .test_mixer import literal, rotate


def plain(mixer, x, window=None):
    B, T, dim = x.shape
    R = mixer.head_dim
    q = rotate((x @ mixer.wq.weight.T).view(B, T, -1, R))
    k = rotate((x @ mixer.wk.weight.T).view(B, T, -1, R))
    v = (x @ mixer.wv.weight.T).view(B, T, -1, R)
    o = torch.zeros(B, T, q.shape[2], R, dtype=x.dtype)
    for h in range(q.shape[2]):
        g = h // (q.shape[2] // k.shape[2])  # query heads share the keys of their group
        scores = q[:, :, h] @ k[:, :, g].mT / R**0.5
        back = torch.arange(T)[:, None] - torch.arange(T)
        unseen = (back < 0) | (back >= (window or T))
        o[:, :, h] = scores.masked_fill(unseen, -torch.inf).softmax(-1) @ v[:, :, g]
    return o.reshape(B, T, dim) @ mixer.wo.weight.T


def rms(x, norm):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.weight


@torch.no_grad()
@pytest.mark.parametrize(
    "T", [5, 7, 14, 40]
)  # in a window of 7, one, two, and several blocks with a rest
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
def test_by_the_letter(condition, option, T):
    model = variant(condition, option)
    tokens = random_tokens(model.config, 2, T)
    x = model.tok_embeddings.weight[tokens]
    for layer, own in zip(model.layers.values(), model.config.layers, strict=True):
        y = rms(x, layer.attention_norm)
        mixer = layer.attention
        if own.mixer.kind == "softmax":
            x = x + plain(mixer, y, own.mixer.window)
        else:
            x = x + literal(mixer, y)
        y = rms(x, layer.ffn_norm)
        mlp = layer.feed_forward
        a = y @ mlp.w1.weight.T
        x = x + (a * torch.sigmoid(a) * (y @ mlp.w3.weight.T)) @ mlp.w2.weight.T
    wanted = rms(x, model.norm) @ model.output.weight.T
    # The recurrence's bound on the decay differs from the letter (`test_mixer`).
    torch.testing.assert_close(
        model(tokens), wanted, rtol=0, atol=1e-10 if condition == "softmax" else 1e-6
    )


@torch.no_grad()
def test_a_window_has_neither_a_square_of_scores_nor_a_growing_cache():
    model = variant("softmax", "window")
    T = 800
    tokens = random_tokens(model.config, 1, T)
    lengths = ((300, 500),)
    with Largest() as seen:
        model(tokens)
        model(tokens, positions=positions_of(lengths))
    assert seen.largest < T * T / 4
    state = model.init_state(1)
    model(tokens, state)
    assert state.nbytes() == 2 * 2 * 7 * 32 * 8  # layers, keys and values, window, width, bytes


@torch.no_grad()
def test_a_piece_on_a_gpu_needs_no_mask(monkeypatch):
    """PyTorch's causal bias, which is used on CUDA alone, gives what the mask gives."""
    model = variant("softmax", dtype=torch.float32)
    _, state = prefill(model, random_tokens(model.config, 2, 9))
    piece = random_tokens(model.config, 2, 3)
    wanted = model(piece, state.clone())

    def continuing(mixer, state, tokens, dtype):
        token = state.position[:, None] + torch.arange(tokens)
        return Attended(causal_lower_right(tokens, state.length + tokens), token, state.length)

    monkeypatch.setattr(SoftmaxMixer, "continuing", staticmethod(continuing))
    torch.testing.assert_close(model(piece, state), wanted)
