"""The model under Megatron-Core, on real ranks, is the plain one: logits, gradients, training, checkpoints."""

import functools
import re
from types import SimpleNamespace

import pytest
import torch

from interdomain.megatron import contiguous

from . import ranks

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
]
LEGS = {name: leg for legs in ranks.LEGS.values() for name, leg in legs.items()}
PACKED = [f"packed, {tensor} x {context}" for tensor, _, context in ranks.PACKED]
CASES = {name: options.get("case", "interdomain") for name, (_, _, options) in LEGS.items()}
CASES |= {name: name for name in ranks.CASES} | dict.fromkeys(PACKED, "interdomain")
BEGIN = [
    name
    for name, (source, _, _) in LEGS.items()
    if source == "start" and name not in ("bf16", "torchtitan")
]
FLOAT32 = [
    name
    for name, (_, until, options) in LEGS.items()
    if until > 1 and not {"bf16", "case"} & options.keys()
]


@functools.cache
def plain_gradients(case, dtype, packed):
    model, tokens, positions = ranks.plain_model(case).to(dtype), ranks.tokens_of(0), None
    if packed:
        tokens = tokens[:1]
        positions = torch.cat([torch.arange(n) for n in torch.tensor(ranks.ENDS).diff()])[None]
    loss = model(tokens[:, :-1], labels=tokens[:, 1:], positions=positions)
    (loss / tokens[:, 1:].numel()).backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


def difference(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


def gradients_of(computed, name):
    """Of all ranks together."""
    parts = [part for seen in computed[1] for part in seen["gradients"][name]]
    return ranks.whole_gradients(ranks.config_of(CASES[name]), parts)


@pytest.mark.parametrize("name", [*BEGIN, *ranks.CASES, *PACKED])
def test_every_gradient(name, computed):
    """float32, against the plain model in float64, whose own float32 says how far that may be off."""
    found = gradients_of(computed, name)
    packed = name in PACKED
    wanted, rounded = (
        plain_gradients(CASES[name], dtype, packed) for dtype in (torch.float64, torch.float32)
    )
    assert found.keys() == wanted.keys()
    for parameter, gradient in wanted.items():
        limit = 1e-5 + 10 * difference(rounded[parameter], gradient)
        assert difference(found[parameter].double(), gradient) < limit, parameter


def test_the_dynamics_are_computed_once_a_step(computed):
    """Whatever the micro-batches; of all layers together from the second step on."""
    layers = ranks.config_of("interdomain").n_layers
    for seen in computed[1]:
        assert seen["folds"]["tensor"] == [layers, 1]
        assert seen["folds"]["context"] == [layers] + [1] * (ranks.STEPS - 1)


@pytest.mark.parametrize("name", FLOAT32)
def test_training_goes_as_on_one_rank(name, computed):
    """Also after a checkpoint of another layout of ranks: the optimizer's state is as exact as the weights."""
    one = computed[1][-1]["losses"]["one"]
    assert list(one) == list(range(ranks.STEPS))
    for seen in computed[1]:
        assert seen["losses"][name]
        for step, (loss, norm) in seen["losses"][name].items():
            assert loss is None or loss == pytest.approx(one[step][0], rel=2e-6)
            assert norm == pytest.approx(one[step][1], rel=1e-4)


def test_ten_steps_go_as_torchtitan_s(computed, titan):
    """The same start, batches and settings: the same losses, norms of the gradients, and first gradients."""
    for step, (loss, norm) in computed[1][-1]["losses"]["torchtitan"].items():
        wanted = titan["log"][step + 1]
        assert loss == pytest.approx(wanted["loss"], abs=1e-5)
        assert norm == pytest.approx(wanted["grad_norm"], rel=1e-4)
    found = gradients_of(computed, "torchtitan")
    clipped = min(1, 1 / titan["log"][1]["grad_norm"])
    assert found.keys() == titan["gradients"].keys()
    for name, gradient in titan["gradients"].items():
        assert difference(clipped * found[name], gradient) < 1e-4, name


def test_bf16(computed):
    """With float32 SSM parameters and input norms, and from one layout to another."""
    seen = computed[1][-1]  # rank 3 is on the last stage
    one, half, resumed = (seen["losses"][name] for name in ("one", "bf16", "bf16 to pipeline"))
    assert [loss for loss, _ in half.values()] == pytest.approx(
        [one[step][0] for step in half], rel=3e-3
    )
    assert resumed[5][0] == pytest.approx(half[5][0], rel=1e-3)
    for name, dtype in seen["dtypes"].items():
        exact = re.search(r"\.core\.(ssm|k_norm|v_norm)\.", name)
        assert dtype == (torch.float32 if exact else torch.bfloat16), name


def test_initial_values_are_the_plain_model_s(computed):
    assert all(all(seen["initial"]) for seen in computed[1])


def test_delayed_gradients_of_weights(computed):
    """Those of both projections, with stand-ins for Transformer Engine."""
    assert all(seen["delayed"] for seen in computed[1])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("inference", "NotImplementedError: Megatron's inference engines keep keys and values"),
        (
            "heads",
            "ValueError: 4 heads and 1 heads of keys and values cannot be split over 2 ranks.",
        ),
        ("pieces", "ValueError: context-parallel ranks hand a state from piece to piece"),
        (
            "a norm within in_proj",
            "ValueError: mamba2 has products of all heads, which need the input norm",
        ),
        ("another tokenizer", "ValueError: the checkpoint is of another tokenizer"),
        ("another mixer", "ValueError: the checkpoint is of another model"),
    ],
)
def test_refusals(case, words, computed):
    assert words in computed[1][0]["refused"][case]


def test_a_length_that_the_ranks_do_not_divide():
    group = SimpleNamespace(size=lambda: 4)
    with pytest.raises(ValueError, match="31 tokens cannot be cut into 4 equal pieces"):
        contiguous({"tokens": torch.zeros(1, 31)}, cp_group=group)
