"""The layer for a user's own model, and the values that constructors draw."""

import copy
import functools

import pytest
import torch
from torch.nn.utils import parameters_to_vector
from torch.utils.checkpoint import checkpoint

from interdomain import InterdomainAttention
from interdomain.model import CONDITIONS, Transformer
from interdomain.model.feature_maps import rope_tables

from .common import (
    EPS,
    OPTIONS,
    THETA,
    assert_exact,
    in_pieces,
    normal,
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
@torch.no_grad()
def test_it_is_a_layer_of_the_decoder(condition, option):
    """With a decoder's weights it computes the decoder's layer: whole, packed and in pieces."""
    model = variant(condition, option)
    config = model.config
    options = CONDITIONS[condition] | OPTIONS[option]
    layer = InterdomainAttention(
        config.dim,
        config.n_heads,
        n_basis=config.mixer.n_basis,
        rope_theta=THETA,
        norm_eps=EPS,
        **options,
    ).double()
    attention = model.layers["0"].attention
    layer.mixer.load_state_dict(attention.state_dict())
    x = normal(2, 20, config.dim)
    whole = layer(x)
    tables = rope_tables(torch.arange(20), config.head_dim, THETA, x.dtype)
    assert_exact(whole, attention(x, tables))
    packed = layer(x, positions=positions_of(((3, 17), (3, 17))))
    documents = [layer(x[:, :3]), layer(x[:, 3:])]
    assert_exact(packed, torch.cat(documents, dim=1))
    pieces = in_pieces(layer, x, [7, 1, 9, 1, 1, 1], layer.init_state(2))
    assert_exact(pieces, whole)


def test_a_misspelt_argument_is_refused():
    with pytest.raises(ValueError, match=r"n_bassis.*n_basis"):
        InterdomainAttention(32, 4, n_bassis=3)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_cannot_advance_a_state_twice(use_reentrant):
    layer = InterdomainAttention(32, 4)
    x = torch.randn(2, 9, 32, requires_grad=True)
    y = checkpoint(layer, x, layer.init_state(2), use_reentrant=use_reentrant)
    with pytest.raises(ValueError, match="Activation checkpointing"):
        y.sum().backward()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("condition", ["interdomain", "s4d", "softmax", "mamba2", "gated-deltanet"])
def test_copies_of_a_state_are_separate(duplicate, condition):
    """Gradients flow through a copy to the tokens that the original has read."""
    model = variant(condition)
    tokens = random_tokens(model.config, 2, 9)
    first, second = tokens.split([5, 4], dim=1)
    state = model.init_state(2)
    model(first, state)
    model(second.flip(1), duplicate(state))
    found = model(second, duplicate(state))
    wanted = model(tokens)[:, 5:]
    assert_exact(found, wanted)
    assert state.position.tolist() == [5, 5]
    weight = model.layers["0"].attention.wv.weight
    found = torch.autograd.grad(found.sum(), weight)
    wanted = torch.autograd.grad(wanted.sum(), weight)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(InterdomainAttention, 32, 4),
        functools.partial(Transformer, small_config("softmax")),
    ],
)
def test_constructors_initialise(make):
    """Values come from the global generator, as those of PyTorch's modules do."""
    torch.manual_seed(1)
    first = parameters_to_vector(make().parameters())
    second = parameters_to_vector(make().parameters())
    torch.manual_seed(1)
    again = parameters_to_vector(make().parameters())
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    # On the meta device nothing is drawn.
    before = torch.get_rng_state()
    with torch.device("meta"):
        assert all(p.is_meta for p in make().parameters())
    assert torch.equal(torch.get_rng_state(), before)
