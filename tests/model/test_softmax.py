"""The baseline against a masked softmax written out."""

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

from interdomain.model.generation import prefill
from interdomain.model.layers import rope_tables
from interdomain.model.softmax import SoftmaxMixer, Window

from .common import random_tokens, small_config, variant
from .test_mixer import rotate


def plain(mixer, x):
    B, T, dim = x.shape
    R = mixer.head_dim
    q = rotate((x @ mixer.wq.weight.T).view(B, T, -1, R))
    k = rotate((x @ mixer.wk.weight.T).view(B, T, -1, R))
    v = (x @ mixer.wv.weight.T).view(B, T, -1, R)
    o = torch.zeros(B, T, q.shape[2], R, dtype=x.dtype)
    for h in range(q.shape[2]):
        g = h // (q.shape[2] // k.shape[2])  # query heads share the keys of their group
        scores = q[:, :, h] @ k[:, :, g].mT / R**0.5
        future = torch.arange(T)[:, None] < torch.arange(T)
        o[:, :, h] = scores.masked_fill(future, -torch.inf).softmax(-1) @ v[:, :, g]
    return o.reshape(B, T, dim) @ mixer.wo.weight.T


@pytest.mark.parametrize("n_kv_heads", [None, 2])
def test_plain_masked_softmax(n_kv_heads):
    config = small_config("softmax", n_kv_heads=n_kv_heads)
    torch.manual_seed(0)
    mixer = SoftmaxMixer(config).double()
    x = 3 * torch.randn(2, 33, config.dim, dtype=torch.float64)
    with torch.no_grad():
        found = mixer(x, rope_tables(torch.arange(33), config.head_dim, 1e4, torch.float64))
        torch.testing.assert_close(found, plain(mixer, x), rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_piece_on_a_gpu_needs_no_mask(monkeypatch):
    """PyTorch's causal bias, which is used on CUDA alone, gives what the mask gives."""
    model = variant("softmax", dtype=torch.float32)
    _, state = prefill(model, random_tokens(model.config, 2, 9))
    piece = random_tokens(model.config, 2, 3)
    wanted = model(piece, state.clone())

    def continuing(state, tokens, dtype):
        return Window(causal_lower_right(tokens, state.length + tokens), state.length)

    monkeypatch.setattr(SoftmaxMixer, "continuing", staticmethod(continuing))
    torch.testing.assert_close(model(piece, state), wanted)
