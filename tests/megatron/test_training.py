"""The model under Megatron-Core, on real ranks, is the plain one: logits, gradients, training, checkpoints."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from interdomain.titan.watch.metrics import mixer_statistics

from . import ranks

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow_group("plugin/interdomain/megatron/", "plugin/interdomain/model/", "kernels/", "tests/megatron/"),
]
FRESH = [name for legs in ranks.LEGS.values() for name, (source, _, o) in legs.items() if source == "start" and not o]
FIRST = ["tensor", "recompute core_attn", "mamba2, stages", "recompute, context"]
FIRST += ["hybrid, context", "mamba2, context", "hybrid, gated-deltanet, context"]
FIRST += ["transformer engine", "mamba2, transformer engine"]
FLOAT32 = [
    name
    for legs in ranks.LEGS.values()
    for name, (_, until, o) in legs.items()
    if until > 1 and not {"bf16", "case"} & o.keys()
]


@functools.cache
def plain_gradients(case, dtype):
    model, tokens = ranks.plain_model(case).to(dtype), ranks.tokens_of(0)
    (model(tokens[:, :-1], labels=tokens[:, 1:]) / (ranks.BATCH * ranks.T)).backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


def difference(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("name", [*FRESH, *FIRST, *ranks.CASES])
def test_every_gradient(name, computed):
    """float32, against the plain model in float64, whose own float32 says how far that may be off."""
    case = name.removesuffix(", stages").removesuffix(", context").removesuffix(", transformer engine")
    case = case if case in ranks.CASES else "interdomain"
    parts = [part for seen in computed[1] for part in seen["gradients"][name]]
    found = ranks.whole_gradients(ranks.config_of(case), parts)
    wanted, rounded = plain_gradients(case, torch.float64), plain_gradients(case, torch.float32)
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


@functools.cache
def plain_steps():
    return ranks.plain_steps()


@pytest.mark.parametrize("name", FLOAT32)
def test_training_goes_as_in_plain_pytorch(name, computed):
    """Also after a checkpoint of another layout of ranks: the optimizer's state is as exact as the weights."""
    for seen in computed[1]:
        for step, (loss, norm) in seen["losses"][name].items():
            wanted_loss, wanted_norm = plain_steps()[step]
            assert loss is None or loss == pytest.approx(wanted_loss, rel=1e-6)
            assert norm == pytest.approx(wanted_norm, rel=1e-4)
    assert set(computed[1][-1]["losses"]["one"]) == set(range(ranks.STEPS))


def test_ten_steps_go_as_torchtitan_s(computed, titan):
    """The same start, batches and settings: the same losses, norms of the gradients, and first gradients."""
    for step, (loss, norm) in computed[1][-1]["losses"]["torchtitan"].items():
        wanted = titan["log"][step + 1]
        assert loss == pytest.approx(wanted["loss"], abs=1e-5)
        assert norm == pytest.approx(wanted["grad_norm"], rel=1e-4)
    parts = [part for seen in computed[1] for part in seen["gradients"]["torchtitan"]]
    found = ranks.whole_gradients(ranks.config_of("torchtitan"), parts)
    clipped = min(1, 1 / titan["log"][1]["grad_norm"])
    assert found.keys() == titan["gradients"].keys()
    for name, gradient in titan["gradients"].items():
        assert difference(clipped * found[name], gradient) < 1e-4, name


def test_bf16(computed):
    """With float32 dynamics and input norms, and from one layout to another."""
    last = computed[1][-1]  # rank 3 is on the last stage
    for step, (loss, _) in last["losses"]["bf16"].items():
        assert loss == pytest.approx(plain_steps()[step][0], rel=3e-3)
    resumed, before = last["losses"]["bf16 to pipeline"][5][0], last["losses"]["bf16"][5][0]
    assert resumed == pytest.approx(before, rel=1e-3)
    for name, dtype in last["dtypes"].items():
        ours = any(part in name for part in (".core.ssm.", ".core.k_norm.", ".core.v_norm."))
        assert dtype == (torch.float32 if ours else torch.bfloat16), name


def test_initial_values_are_the_plain_model_s(computed):
    assert all(seen["initial"] for seen in computed[1])


def test_packed_documents(computed):
    """Losses, and every gradient of their mean."""
    tokens, ends = ranks.tokens_of(0)[:1], torch.tensor(ranks.ENDS)
    positions = torch.cat([torch.arange(n) for n in ends.diff()])[None]
    model = ranks.plain_model()
    wanted, flowing = (
        F.cross_entropy(logits[0], tokens[0, 1:], reduction="none")
        for logits in (model(tokens[:, :-1], positions=positions), model(tokens[:, :-1]))
    )
    wanted.mean().backward()
    for tensor, context in ((2, 1), (1, 2), (1, 4), (2, 2)):
        found = [seen["packed", tensor, context] for seen in computed[1]]
        losses = torch.cat([losses for losses, _ in found[::tensor][:context]], dim=1)
        assert difference(losses[0], wanted) < 1e-5
        parts = [part for _, gradients in found for part in gradients]
        found = ranks.whole_gradients(ranks.config_of(), parts)
        for parameter, p in model.named_parameters():
            assert difference(found[parameter], p.grad) < 1e-4, parameter
    assert difference(flowing, wanted) > 1e-2


def test_life_signs(computed):
    """All heads and layers, on every rank of every layout, as a run of TorchTitan would show them."""
    alone = SimpleNamespace(pipeline=SimpleNamespace(size=lambda: 1))
    wanted = functools.cache(lambda case: mixer_statistics([ranks.plain_model(case)], alone))
    for seen in computed[1]:
        for case, signs in seen["signs"].values():
            assert signs == pytest.approx(wanted(case), rel=1e-6)


def test_delayed_gradients_of_weights(computed):
    """Those of both projections, with stand-ins for Transformer Engine."""
    assert all(seen["delayed"] for seen in computed[1])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("inference", "NotImplementedError: Megatron's inference engines keep keys and values"),
        ("heads", "ValueError: 4 heads and 1 heads of keys and values cannot be split over 2 ranks."),
        (
            "heads of the state",
            "ValueError: 1 heads of gla's state cannot be split over 2 ranks. Set mixer.state_heads.",
        ),
        ("pieces", "ValueError: context-parallel ranks hand a state from piece to piece"),
        ("length", "ValueError: 31 tokens cannot be cut into 4 equal pieces."),
        ("rates", "'min_lr': 0.0002, 'ssm_lr': 0.001, 'seed': 1, 'global_batch': 2}. Give the same."),
        ("a norm within in_proj", "ValueError: mamba2 has products of all heads, which need the input norm"),
        ("another tokenizer", "ValueError: the checkpoint is of another tokenizer"),
        ("another mixer", "ValueError: the checkpoint is of another model"),
    ],
)
def test_refusals(case, words, computed):
    assert words in computed[1][0]["refused"][case]
