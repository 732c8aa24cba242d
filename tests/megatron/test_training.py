"""Megatron-Core's model on real ranks is the plain one: gradients, training, checkpoints."""

import functools
import re
from unittest import mock

import pytest
import torch

from interdomain.megatron import contiguous

from ..model.common import positions_of
from . import ranks

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
]
CASES = {case: case for case in ranks.CASES}  # by the name of gradients: the model
BEGIN = []  # legs that begin at the start, in float32
FLOAT32 = []  # legs that train the first model in float32
for legs in ranks.LEGS.values():
    for leg, (source, last_step, options) in legs.items():
        CASES[leg] = options.get("case", "interdomain")
        if source == "start" and leg not in ("bf16", "torchtitan"):
            BEGIN.append(leg)
        if last_step > 1 and options.keys().isdisjoint({"bf16", "case"}):
            FLOAT32.append(leg)
PACKED = [f"packed, {tensor} x {context}" for tensor, _, context in ranks.PACKED]
CASES |= dict.fromkeys(PACKED, "interdomain")


@functools.cache
def plain_gradients(case, dtype, packed):
    model = ranks.plain_model(case).to(dtype)
    tokens = ranks.tokens_of(0)
    positions = None
    if packed:
        tokens = tokens[:1]
        lengths = torch.tensor(ranks.ENDS).diff().tolist()
        positions = positions_of([lengths])
    loss = model(tokens[:, :-1], labels=tokens[:, 1:], positions=positions)
    (loss / tokens[:, 1:].numel()).backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


def difference(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


def gradients_of(computed, name):
    """Returns the gradients of all ranks together."""
    parts = []
    for seen in computed[1]:
        parts += seen["gradients"][name]
    return ranks.whole_gradients(ranks.config_of(CASES[name]), parts)


@pytest.mark.parametrize("name", [*BEGIN, *ranks.CASES, *PACKED])
def test_every_gradient(name, computed):
    """float32 gradients are near the plain model's in float64.

    The plain model's own float32 gradients say how near.
    """
    found = gradients_of(computed, name)
    packed = name in PACKED
    wanted = plain_gradients(CASES[name], torch.float64, packed)
    rounded = plain_gradients(CASES[name], torch.float32, packed)
    assert found.keys() == wanted.keys()
    for parameter, gradient in wanted.items():
        limit = 1e-5 + 10 * difference(rounded[parameter], gradient)
        assert difference(found[parameter].double(), gradient) < limit, parameter


def test_ssm_tensors_are_computed_once_a_step(computed):
    """They are computed once for all micro-batches, and for all layers from the second step on."""
    layers = ranks.config_of("interdomain").n_layers
    for seen in computed[1]:
        assert seen["folds"]["tensor"] == [layers, 1]
        assert seen["folds"]["context"] == [layers] + [1] * (ranks.STEPS - 1)


@pytest.mark.parametrize("name", FLOAT32)
def test_training_goes_as_on_one_rank(name, computed):
    """After a checkpoint of another layout, too: the optimizer's state is exact, too."""
    one = computed[1][-1]["losses"]["one"]
    assert list(one) == list(range(ranks.STEPS))
    for seen in computed[1]:
        assert seen["losses"][name]
        for step, (loss, norm) in seen["losses"][name].items():
            wanted_loss, wanted_norm = one[step]
            assert norm == pytest.approx(wanted_norm, rel=1e-4)
            # Only the last stage of a pipeline has the loss.
            if loss is not None:
                assert loss == pytest.approx(wanted_loss, rel=2e-6)


def test_ten_steps_go_as_torchtitan_s(computed, titan):
    """From the same start and batches, losses, gradient norms and first gradients are the same."""
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
    """bf16 training follows float32, and continues in another layout.

    SSM parameters and input norms are float32.
    """
    seen = computed[1][-1]  # rank 3 is on the last stage
    one = seen["losses"]["one"]
    bf16 = seen["losses"]["bf16"]
    for step, (loss, _) in bf16.items():
        assert loss == pytest.approx(one[step][0], rel=3e-3)
    resumed_loss, _ = seen["losses"]["bf16 to pipeline"][5]
    assert resumed_loss == pytest.approx(bf16[5][0], rel=1e-3)
    for name, dtype in seen["dtypes"].items():
        exact = re.search(r"\.core\.(ssm|k_norm|v_norm)\.", name)
        assert dtype == (torch.float32 if exact else torch.bfloat16), name


def test_initial_values_are_the_plain_model_s(computed):
    for seen in computed[1]:
        assert seen["initial"] == [True] * 4


def test_delayed_gradients_of_weights(computed):
    """Both projections delay them. Stand-ins take the place of Transformer Engine."""
    for seen in computed[1]:
        assert seen["delayed"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("inference", "NotImplementedError: Megatron's inference engines keep keys and values"),
        ("heads", "ValueError: 4 heads and 1 heads of keys and values cannot be split over 2"),
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


def test_a_length_that_the_ranks_do_not_divide_is_refused():
    group = mock.Mock(**{"size.return_value": 4})
    with pytest.raises(ValueError, match="31 tokens cannot be cut into 4 equal pieces"):
        contiguous({"tokens": torch.zeros(1, 31)}, cp_group=group)
