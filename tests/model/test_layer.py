"""The layer for one's own model, and what constructors draw."""

import re
import subprocess
import sys

import pytest
import torch

from interdomain import InterdomainAttention
from interdomain.model import CONDITIONS, Transformer
from interdomain.model.softmax import SoftmaxMixer

from ..common import REPOSITORY
from .common import OPTIONS, positions_of, random_tokens, small_config, variant


def test_the_readme_s_lines():
    (code,) = re.findall(r"own model\n\n```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.S)
    names = {}
    exec(code, names)
    y, layer = names["y"], names["layer"]
    assert y.shape == (2, 100, 512)
    assert 0 < y.std() < 1
    torch.testing.assert_close(torch.cat(names["parts"], 1), y, rtol=0, atol=1e-4 * y.std().item())
    y.sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize(
    ("condition", "option"),
    [("interdomain", "plain"), ("interdomain", "all"), ("interdomain-norope", "kv2"), ("s4d", "gate")],
)
def test_it_is_a_layer_of_the_decoder(condition, option):
    """With the decoder's weights it computes what the decoder's layer does: whole, packed, and in pieces of any length."""
    model = variant(condition, option)
    options = {**CONDITIONS[condition], "n_basis": model.config.mixer.n_basis, **OPTIONS[option]}
    layer = InterdomainAttention(model.config.dim, model.config.n_heads, **options).double()
    attention = model.layers["0"].attention
    layer.mixer.load_state_dict(attention.state_dict())
    seen = []
    attention.register_forward_hook(lambda _, args, out: seen.extend([args[0].detach(), out.detach()]))
    tokens, positions = random_tokens(model.config, 2, 20), positions_of(((3, 17), (12, 8)))
    with torch.no_grad():
        model(tokens)
        model(tokens, positions=positions)
        x, whole, _, packed = seen
        close = dict(rtol=0, atol=1e-10)
        torch.testing.assert_close(layer(x), whole, **close)
        torch.testing.assert_close(layer(x, positions=positions), packed, **close)
        state = layer.init_state(2)
        pieces = [layer(part, state) for part in x.split([7, 1, 9, 1, 1, 1], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, 1), whole, **close)


def test_what_no_layer_has_is_refused():
    for arguments, words in (
        (dict(n_bassis=3), "n_bassis.*n_basis"),
        (dict(kind="softmax"), "kind.*n_basis"),
        (dict(dim=30), "n_heads = 4.*dim = 30|dim = 30.*n_heads = 4"),
        (dict(readout="imag"), "'imag'.*complex"),
    ):
        with pytest.raises(ValueError, match=words):
            InterdomainAttention(**{"dim": 32, "n_heads": 4, **arguments})
    layer = InterdomainAttention(32, 4)
    with pytest.raises(ValueError, match=r"\[batch, tokens, 32\]: got \[2, 32\]"):
        layer(torch.zeros(2, 32))
    with pytest.raises(ValueError, match="leave one of the two out"):
        layer(torch.zeros(2, 3, 32), layer.init_state(2), positions_of(((3,), (3,))))


MADE = {
    "layer": lambda: InterdomainAttention(32, 4, feature_map="rff"),
    "softmax": lambda: SoftmaxMixer(small_config("softmax")),
    "decoder": lambda: Transformer(small_config("interdomain")),
}


@pytest.mark.parametrize("kind", MADE)
def test_constructors_initialise(kind):
    """From the global generator, as PyTorch's own: the same after the same seed, another module otherwise."""
    made = []
    for seed in (1, 1, None):
        if seed is not None:
            torch.manual_seed(seed)
        made.append(MADE[kind]().state_dict())
    first, again, other = made
    assert all(tensor.isfinite().all() and tensor.abs().max() < 2e3 for tensor in first.values())
    assert all(torch.equal(first[name], again[name]) for name in first)
    for name in first:
        drawn = first[name].ndim > 1 and first[name].unique().numel() > first[name].shape[-1]
        assert not (drawn and torch.equal(first[name], other[name])), name
    before = torch.get_rng_state()
    with torch.device("meta"):
        assert all(tensor.is_meta for tensor in MADE[kind]().state_dict().values())
    assert torch.equal(torch.get_rng_state(), before)  # nothing is drawn where there is no memory


def test_the_package_is_light():
    """`import interdomain` alone takes no second: no torch; the layer comes when it is asked for."""
    code = "import sys, interdomain; assert 'torch' not in sys.modules; interdomain.InterdomainAttention(8, 2)"
    subprocess.run([sys.executable, "-c", code], check=True)
