"""The baseline against a masked softmax written out."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode

from interdomain.model import softmax
from interdomain.model.feature_map import rope_frequencies, rope_tables
from interdomain.model.generation import prefill
from interdomain.model.softmax import SoftmaxMixer, Window, _one_query

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


@pytest.mark.parametrize("n_kv_heads", [None, 1, 2, 4])
def test_plain_masked_softmax(n_kv_heads):
    config = small_config("softmax", n_kv_heads=n_kv_heads)
    torch.manual_seed(0)
    mixer = SoftmaxMixer(config).double()
    x = 3 * torch.randn(2, 33, config.dim, dtype=torch.float64)
    with torch.no_grad():
        found = mixer(x, rope_tables(torch.arange(33), rope_frequencies(config.head_dim, 1e4), torch.float64))
        torch.testing.assert_close(found, plain(mixer, x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_one_query_in_half_precision(dtype, n_kv_heads, masked):
    """A CPU's own way, against PyTorch's in float64; what is masked may be anything finite."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, s, 8, generator=generator).to(dtype) for n, s in ((4, 1), *[(n_kv_heads, 33)] * 2))
    mask = None
    if masked:
        mask = Window.of(torch.arange(33) >= torch.tensor([20, 0])[:, None, None, None], dtype).mask
        k[0, :, :20], v[0, :, :20] = 100, 100
    wide = [x.double() for x in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*wide, attn_mask=None if mask is None else mask.double(), enable_gqa=True)
    torch.testing.assert_close(_one_query(q, k, v, mask).double(), wanted, rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_one_query_in_half_precision_is_as_exact_as_pytorch_s():
    """Scores that reach 20: rounded to bfloat16 as they are summed, they would cost twice this."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 64, generator=generator).bfloat16() for n in (1, 512, 512))
    q *= 3
    wanted = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)))
    assert (_one_query(q, k, v, None).double() - wanted).norm() / wanted.norm() < 6e-3


class Masks(TorchDispatchMode):
    """Those that attention is given, in the order of its calls."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "aten::_scaled_dot_product_flash_attention_for_cpu":
            self.found.append(kwargs.get("attn_mask"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "situation", ["step", "padded step", "fixed step", "padded fixed step", "piece", "padded piece"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_layers_share_a_mask(situation, dtype, monkeypatch):
    """As attention wants it, or each would make its own: in the queries' dtype, rows at multiples of 16 numbers."""
    if "step" in situation and dtype == torch.bfloat16:
        monkeypatch.setattr(softmax, "_one_query", lambda *args: F.scaled_dot_product_attention(*args))
    model = variant("softmax", dtype=dtype)
    padding = torch.tensor([0, 4]) if "padded" in situation else None
    _, state = prefill(model, random_tokens(model.config, 2, 9), padding=padding)
    if "fixed" in situation:
        state.reserve(20)
        state.cursor = torch.tensor([state.length])
    with Masks() as masks:
        model(random_tokens(model.config, 2, 3 if "piece" in situation else 1), state)
    assert len(masks.found) == model.config.n_layers
    assert_shared(masks.found, None if situation == "step" else dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_piece_on_a_gpu_needs_no_mask(dtype, monkeypatch):
    """What PyTorch knows by name there, and knows here too."""
    model = variant("softmax", dtype=dtype)
    _, state = prefill(model, random_tokens(model.config, 2, 9))
    piece = random_tokens(model.config, 2, 3)
    wanted = model(piece, state.clone())

    def continuing(state, tokens, padding, dtype):
        return Window(causal_lower_right(tokens, state.length + tokens), state.length)

    monkeypatch.setattr(SoftmaxMixer, "continuing", staticmethod(continuing))
    torch.testing.assert_close(model(piece, state), wanted)


def test_layers_share_the_mask_of_packed_documents():
    model = variant("softmax")
    with Masks() as masks:
        model(random_tokens(model.config, 2, 9), positions=torch.tensor([[0, 1, 0, 1, 2, 3, 0, 1, 2]] * 2))
    assert_shared(masks.found, torch.float64)


def assert_shared(masks, dtype):
    first = masks[0]
    if dtype is None:
        assert masks == [None] * len(masks)
        return
    assert len(masks) > 1
    assert {(m.data_ptr(), m.dtype, m.stride()) for m in masks} == {(first.data_ptr(), dtype, first.stride())}
    assert first.stride(-1) == 1
    assert first.stride(-2) % 16 == 0
