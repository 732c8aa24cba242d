"""The layer for one's own model, and what constructors draw."""

import copy
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from interdomain import InterdomainAttention
from interdomain.model import CONDITIONS, Transformer

from .common import (
    EPS,
    OPTIONS,
    THETA,
    assert_exact,
    positions_of,
    random_tokens,
    small_config,
    variant,
)


@pytest.mark.parametrize(
    ("condition", "option"),
    [
        ("interdomain", "plain"),
        ("interdomain", "all"),
        ("interdomain-norope", "kv2"),
        ("s4d", "gate"),
    ],
)
def test_it_is_a_layer_of_the_decoder(condition, option):
    """With the decoder's weights it computes what the decoder's layer does: whole, packed, and in pieces of any length."""
    model = variant(condition, option)
    options = {**CONDITIONS[condition], "n_basis": model.config.mixer.n_basis, **OPTIONS[option]}
    options |= dict(rope_theta=THETA, norm_eps=EPS)
    layer = InterdomainAttention(model.config.dim, model.config.n_heads, **options).double()
    attention = model.layers["0"].attention
    layer.mixer.load_state_dict(attention.state_dict())
    seen = []

    def record(module, args, output):
        seen.extend([args[0].detach(), output.detach()])

    attention.register_forward_hook(record)
    tokens = random_tokens(model.config, 2, 20)
    positions = positions_of(((3, 17), (12, 8)))
    with torch.no_grad():
        model(tokens)
        model(tokens, positions=positions)
        x, whole, _, packed = seen
        assert_exact(layer(x), whole)
        assert_exact(layer(x, positions=positions), packed)
        state = layer.init_state(2)
        pieces = [layer(part, state) for part in x.split([7, 1, 9, 1, 1, 1], dim=1)]
        assert_exact(torch.cat(pieces, 1), whole)


def test_what_no_layer_has_is_refused():
    for options, words in (
        (dict(n_bassis=3), "n_bassis.*n_basis"),
        (dict(kind="softmax"), "kind.*n_basis"),
    ):
        with pytest.raises(ValueError, match=words):
            InterdomainAttention(32, 4, **options)
    layer = InterdomainAttention(32, 4)
    with pytest.raises(ValueError, match="leave one of the two out"):
        layer(torch.zeros(2, 3, 32), layer.init_state(2), positions_of(((3,), (3,))))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_state_that_a_second_pass_would_find_advanced_is_refused(use_reentrant):
    layer = InterdomainAttention(32, 4)
    x = torch.randn(2, 9, 32, requires_grad=True)
    y = checkpoint(layer, x, layer.init_state(2), use_reentrant=use_reentrant)
    with pytest.raises(ValueError, match="Activation checkpointing"):
        y.sum().backward()
    state = layer.init_state(2)
    wanted = torch.autograd.grad(layer(x, copy.copy(state)).sum(), x)[0]

    def with_a_copy(x):
        return layer(x, copy.copy(state))  # nothing is advanced

    checkpoint(with_a_copy, x, use_reentrant=use_reentrant).sum().backward()
    torch.testing.assert_close(x.grad, wanted)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("condition", ["interdomain", "s4d", "softmax", "mamba2", "gated-deltanet"])
def test_copies_of_a_state_go_their_own_ways(duplicate, condition):
    """Gradients flow through a copy to what the original has read."""
    model = variant(condition)
    tokens = random_tokens(model.config, 2, 9)
    state = model.init_state(2)
    model(tokens[:, :5], state)
    model(tokens[:, 5:].flip(1), duplicate(state))
    found = model(tokens[:, 5:], duplicate(state))
    wanted = model(tokens)[:, 5:]
    assert_exact(found, wanted)
    assert state.position.tolist() == [5, 5]
    assert state.length == 5
    weight = model.layers["0"].attention.wv.weight
    found_gradient = torch.autograd.grad(found.square().sum(), weight)
    wanted_gradient = torch.autograd.grad(wanted.square().sum(), weight)
    torch.testing.assert_close(found_gradient, wanted_gradient)


def a_layer():
    return InterdomainAttention(32, 4)


def a_model():
    return Transformer(small_config("softmax"))


@pytest.mark.parametrize("make", [a_layer, a_model])
def test_constructors_initialise(make):
    """From the global generator, as PyTorch's own modules: one seed gives the same values each time."""

    def values(seed):
        torch.manual_seed(seed)
        return torch.cat([p.detach().flatten() for p in make().parameters()])

    assert torch.equal(values(1), values(1))
    assert not torch.equal(values(1), values(2))
    # On the meta device nothing is drawn.
    before = torch.get_rng_state()
    with torch.device("meta"):
        assert all(p.is_meta for p in make().parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_package_is_light():
    """`import interdomain` alone takes no second: no torch; the layer comes when it is asked for."""
    code = "import sys, interdomain; assert 'torch' not in sys.modules; interdomain.InterdomainAttention(8, 2)"
    subprocess.run([sys.executable, "-c", code], check=True)
