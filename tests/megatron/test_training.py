"""Megatron-Core's model on real ranks is the plain one: gradients, training, checkpoints."""

import functools
import re
from unittest import mock

import pytest
import torch

from interdomain.megatron import contiguous

from ..model.common import positions_of
from . import ranks

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
MODELS = {}  # the case of each leg that has float32 gradients
TRAINED = []  # legs that train the first model in float32
for legs in ranks.LEGS.values():
    for name, leg in legs.items():
        case = leg.get("case", "interdomain")
        if "resume" not in leg and name not in ("bf16", "torchtitan"):
            MODELS[name] = case
        if leg.get("steps", 0) > 1 and case == "interdomain" and "bf16" not in leg:
            TRAINED.append(name)


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


def parts_of_all(computed, name):
    """Returns the parts of gradients that all ranks have."""
    parts = []
    for seen in computed[1]:
        parts += seen["gradients"][name]
    return parts


@pytest.mark.parametrize("name", MODELS)
def test_every_gradient(name, computed):
    """float32 gradients are near the plain model's in float64.

    The plain model's own float32 gradients say how near.
    """
    case = MODELS[name]
    packed = name.startswith("packed")
    found = ranks.whole_tensors(ranks.config_of(case), parts_of_all(computed, name))
    exact = plain_gradients(case, torch.float64, packed)
    rounded = plain_gradients(case, torch.float32, packed)
    assert found.keys() == exact.keys()
    for parameter, wanted in exact.items():
        limit = 1e-5 + 10 * difference(rounded[parameter], wanted)
        assert difference(found[parameter].double(), wanted) < limit, parameter


def test_ssm_tensors_are_computed_once_a_step(computed):
    """They are computed once for all micro-batches, and for all layers from the second step on."""
    layers = ranks.config_of("interdomain").n_layers
    for seen in computed[1]:
        assert seen["folds"]["tensor"] == [layers, 1]
        assert seen["folds"]["context"] == [layers, 1, 1]


@pytest.mark.parametrize("name", TRAINED)
def test_training_goes_as_on_one_rank(name, computed):
    """After a checkpoint of another layout, too: the optimizer's state is exact, too."""
    one = computed[1][-1]["losses"]["one"]
    assert list(one) == list(range(7))
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
    config = ranks.config_of("torchtitan")
    found = ranks.whole_tensors(config, parts_of_all(computed, "torchtitan"))
    assert found.keys() == titan["gradients"].keys()
    clipped = min(1, 1 / titan["log"][1]["grad_norm"])
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
    """They are so in our layers. Megatron draws the others."""
    parts = computed[1][0]["initial"] + computed[1][1]["initial"]
    config = ranks.config_of()
    found = ranks.whole_tensors(config, parts)
    for name, p in ranks.initial_model(config, ranks.SEED).named_parameters():
        if ".attention." in name:
            assert torch.equal(found[name], p), name


def test_delayed_gradients_of_weights(computed):
    """Both projections delay them. Stand-ins take the place of Transformer Engine."""
    for seen in computed[1]:
        assert seen["delayed"] == ["in_proj", "out_proj"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("inference", "NotImplementedError: Megatron's inference engines keep keys and values"),
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
