"""Every kind of model: it runs, every parameter learns, nothing looks ahead, and a state continues where it stopped."""

import pytest
import torch

from interdomain.model import ModelState

from .common import IN_TIME, VARIANTS, assert_exact, normal, positions_of, random_tokens, variant


def tensors_of(state):
    return [x for layer in state.layers for x in layer.tensors().values()]


def read(model, tokens):
    """The state after the tokens [B, T]."""
    state = model.init_state(len(tokens))
    model(tokens, state)
    return state


@pytest.mark.parametrize(("condition", "option"), VARIANTS)
def test_every_parameter_learns(condition, option):
    model = variant(condition, option)
    tokens = random_tokens(model.config, 2, 20)
    logits = model(tokens)
    assert logits.shape == (2, 20, model.config.vocab_size)
    assert logits.dtype == torch.float64
    weights = normal(*logits.shape, seed=2)
    (logits * weights).sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        grad = p.grad[tokens.unique()] if name == "tok_embeddings.weight" else p.grad
        assert (grad != 0).all(), name


@pytest.mark.parametrize(("condition", "option"), IN_TIME)
class TestTime:
    def test_pieces_continue_the_whole(self, condition, option):
        model = variant(condition, option)
        tokens = random_tokens(model.config, 2, 90)
        with torch.no_grad():
            whole = model(tokens)
            end, state = model.init_state(2, capacity=90), model.init_state(2, capacity=90)
            addresses = [x.data_ptr() for x in tensors_of(state)]
            at_once = model(tokens, end)
            pieces = [
                model(piece, state) for piece in tokens.split([1, 2, 65, 1, 1, 1, 7, 1, 11], dim=1)
            ]
            assert [x.data_ptr() for x in tensors_of(state)] == addresses  # in place
            assert_exact(model(tokens, model.init_state(2), last=3), at_once[:, -3:])
        assert_exact(at_once, whole)
        assert_exact(torch.cat(pieces, dim=1), whole)
        assert state.position.tolist() == end.position.tolist() == [90, 90]
        assert state.nbytes() == end.nbytes()
        for found, wanted in zip(tensors_of(state), tensors_of(end), strict=True):
            assert found.dtype == torch.float64
            assert_exact(found, wanted)

    def test_stacked_states_are_each_alone(self, condition, option):
        model = variant(condition, option)
        config = model.config
        prompts = [random_tokens(config, 1, n, seed=n) for n in (3, 70, 1, 12)]
        more = random_tokens(config, 4, 6)
        pieces = [more[:, :1], more[:, 1:5], more[:, 5:]]
        with torch.no_grad():
            states = [read(model, p) for p in prompts]
            # A stack can be stacked again, as a server does when a request joins a running batch.
            stacked = ModelState.stack([ModelState.stack(states[:2]), *states[2:]])
            together = [model(piece, stacked) for piece in pieces]
            alone = [
                model(torch.cat([p, more[i : i + 1]], dim=1))[:, -6:] for i, p in enumerate(prompts)
            ]
        assert_exact(torch.cat(together, dim=1), torch.cat(alone))
        assert stacked.position.tolist() == [9, 76, 7, 18]

    def test_packed_documents_are_each_alone(self, condition, option):
        """Shorter than the convolution, of one token, longer than a chunk of the scan: logits and gradients."""
        model, lengths = variant(condition, option), ((3, 1, 66, 2, 8), (40, 40))
        tokens = random_tokens(model.config, 2, 80)
        packed = model(tokens, positions=positions_of(lengths))
        alone = torch.stack(
            [
                torch.cat([model(x[None])[0] for x in row.split(n)])
                for row, n in zip(tokens, lengths, strict=True)
            ]
        )
        assert_exact(packed, alone)
        assert (packed - model(tokens)).abs().max() > 1e-3
        weights = normal(*packed.shape, seed=2)
        found, wanted = (
            torch.autograd.grad((x * weights).sum(), [*model.parameters()]) for x in (packed, alone)
        )
        for a, b in zip(found, wanted, strict=True):
            # Relative to the largest: near a zero of the normalised form's denominator, gradients reach 1e5.
            assert (a - b).abs().max() <= 1e-8 * b.abs().max().clamp_min(1)


@pytest.mark.parametrize("condition", ["interdomain", "softmax", "mamba2"])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8])
@torch.no_grad()
def test_documents_that_begin_in_their_middle(condition, kind):
    """Pieces of documents, as a window cuts them: 0..9, 5..14, 14, 3, 4. The place in the document does not matter."""
    model = variant(condition)
    positions = torch.tensor([[*range(10), *range(5, 15), 14, 3, 4], [*range(7, 30)]])
    tokens = random_tokens(model.config, 2, 23)
    wanted = [model(x[None])[0] for x in tokens[0].split([10, 10, 1, 2])]
    wanted = torch.stack([torch.cat(wanted), model(tokens[1:])[0]])
    assert_exact(model(tokens, positions=positions.to(kind)), wanted)


@pytest.mark.parametrize(
    "positions", [torch.arange(4.0)[None], torch.arange(3)[None], [[0, 1, 2, 3]]]
)
def test_positions_of_another_type_or_shape_are_refused(positions):
    model = variant("interdomain")
    with pytest.raises(ValueError, match=r"positions are .*expected integers \[1, 4\]"):
        model(random_tokens(model.config, 1, 4), positions=positions)


def test_a_state_of_packed_documents_is_refused():
    model = variant("interdomain")
    with pytest.raises(ValueError, match="leave one out"):
        model(
            random_tokens(model.config, 1, 4), model.init_state(1), positions=torch.arange(4)[None]
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_leaves_the_dynamics(dtype):
    """A decay of 0.999 would become 1."""
    model = variant("interdomain", "rff", torch.float32)
    original = {name: t.clone() for name, t in model.state_dict().items()}
    assert model.to(dtype)(random_tokens(model.config, 1, 5)).dtype == dtype
    for name, tensor in model.state_dict().items():
        exact = ".ssm." in name or name.endswith("frequencies")
        assert tensor.dtype == (torch.float32 if exact else dtype), name
        assert not exact or torch.equal(tensor, original[name]), name
