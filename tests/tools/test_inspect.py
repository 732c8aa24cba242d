"""inspect-model: maps against the mixer's output, timescales that are known, and what the command writes."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from interdomain.checkpoint.pretrained import load_model
from interdomain.model import maps as _maps
from interdomain.model.pairing import LAGS, by_head
from interdomain.tools import convert
from interdomain.tools import inspect_model as inspect

from ..model.common import OPTIONS, lively, random_tokens, small_config, variant
from .checkpoints import small_model, write_checkpoint

T = 21
TEXT = "def f(x):\n    return x + 1\n"
MIXERS = [
    ("single-query", "kv1"),
    ("single-query", "real"),
    ("interdomain-norope", "plain"),
    ("s4d", "plain"),
    ("dual-linear", "plain"),
    ("gla", "plain"),
]
MIXERS += [("interdomain", option) for option in OPTIONS if "window" not in option]


def read(model, layers=(0, 1)):
    return _maps.read_layers(model, random_tokens(model.config, 1, T)[0], list(layers))


def assert_close(found, expected):
    """The bounds are for float64, relative to the largest expected value."""
    atol = 1e-11 * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=atol)


@torch.no_grad()
@pytest.mark.parametrize(("condition", "option"), MIXERS)
def test_maps_are_causal_and_make_the_output(condition, option):
    for layer in read(variant(condition, option)).values():
        assert layer.error < 1e-12
        assert (layer.weights.triu(1) == 0).all()
        if layer.kind == "interdomain" and layer.mixer.config.normalize:
            # Rows sum to one, except where the denominator is held away from zero.
            assert (layer.weights.sum(-1) - 1).abs().median() < 1e-9


@torch.no_grad()
def test_the_map_times_the_values_is_what_the_mixer_computes():
    """tests/model compares the mixer with the paper."""
    model = variant("interdomain", "plain")
    attention = model.layers["0"].attention
    inputs = []

    def keep_input(module, args):
        inputs.append(args[0])

    attention.register_forward_pre_hook(keep_input)
    attention.wo.register_forward_pre_hook(keep_input)
    layer = read(model, [0])[0]
    x, output = inputs[:2]
    mixer = layer.mixer
    values = mixer._features(mixer.wv(x), None, None, None, norm=mixer.v_norm)[0]
    by_map = torch.einsum("hts,shd->thd", layer.weights, values)
    assert_close(by_map.flatten(1), output[0])
    assert layer.output_rms == pytest.approx(output.square().mean().sqrt().item())


@torch.no_grad()
@pytest.mark.parametrize("readout", ["complex", "real", "hermitian"])
def test_pairing(readout):
    """w(s, r) of docs/paper.md, with phi_n = C beta Lambda^n."""
    layer = read(lively(small_config("interdomain", readout=readout)), [0])[0]
    exponents, _ = layer.mixer.ssm_tensors([layer.mixer])[0]
    log_decay = torch.view_as_complex(exponents.contiguous())
    C = torch.view_as_complex(layer.mixer.ssm.C.contiguous())
    A = log_decay / layer.mixer.ssm.log_dt.exp()[:, None]
    beta = (log_decay.exp() - 1) / A
    lags = torch.arange(LAGS, dtype=torch.float64)[:, None]
    powers = beta[:, None] * (log_decay[:, None] * lags).exp()
    phi = powers @ C.mT  # [H, lags, M]
    products = {
        "complex": phi @ phi.mT,
        "real": phi.real @ phi.real.mT,
        "hermitian": phi.conj() @ phi.mT,
    }
    assert_close(layer.pairing, products[readout].real)
    if readout != "complex":  # a sum of squares
        assert by_head(layer.pairing)["own value positive"] == [1] * 4


@torch.no_grad()
@pytest.mark.parametrize("option", ["plain", "kv2", "hybrid, window"])
def test_softmax_s_map(option):
    """A query sees its window, or all before it without one. In a hybrid the other layers have maps of their own."""
    layers = read(variant("softmax", option))
    assert layers[1].kind == ("interdomain" if "hybrid" in option else "softmax")
    layer = layers[0]
    assert 0 < layer.error < 1e-12
    position = torch.arange(T)
    distance = position[:, None] - position
    is_seen = (distance >= 0) & (distance < (layer.mixer.window or T))
    assert torch.equal(layer.weights > 0, is_seen.expand(4, T, T))
    heads = _maps.by_head(layer.weights)
    weights = layer.weights[2]
    assert heads["distance"][2] == pytest.approx((weights * distance).sum().item() / T)
    assert heads["own token"][2] == pytest.approx(weights.diagonal().mean().item())


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """An exported interdomain model whose second layer's modes all last 4 tokens."""
    path = tmp_path_factory.mktemp("inspect")
    model = small_model("interdomain")
    ssm = model.layers["1"].attention.ssm
    with torch.no_grad():
        ssm.log_A_real[:] = -math.log(4) - ssm.log_dt[:, None]
        ssm.C[:] = torch.tensor([3.0, 4.0])
    checkpoint = write_checkpoint(path / "run", model, tokenizer)
    assert convert.main([str(checkpoint), "--output", f"{path}/model"]) == 0
    return path / "model"


def run(folder, output, *options):
    argv = [folder, "--text", TEXT, "--output", output, *options]
    assert inspect.main(list(map(str, argv))) == 0


def test_what_is_written(folder, tmp_path, tokenizer, refused):
    out = tmp_path / "out"
    run(folder, out)
    pictures = sorted(path.stem for path in out.glob("*.png"))
    assert pictures == ["map-layer-00", "map-layer-01", "pairing-layer-00", "pairing-layer-01"]
    written = json.loads((out / "inspect.json").read_text())
    ids = [tokenizer.eos_id, *tokenizer.encode(TEXT)]
    assert written["tokens"] == ids
    _, second = written["layers"]
    for name in ("timescale min", "timescale median", "timescale max"):
        assert second[name] == pytest.approx(4, rel=1e-5), name
    assert second["at bound"] == 0
    assert second["RMS of C"] == pytest.approx(5, rel=1e-5)
    maps = load_file(out / "maps.safetensors")
    assert sorted(maps) == ["layer-00", "layer-01", "pairing-00", "pairing-01"]
    model = load_model(folder, dtype=torch.float64)
    layer = _maps.read_layers(model, torch.tensor(ids), [1])[1]
    torch.testing.assert_close(maps["layer-01"], layer.weights.float())
    refused(inspect.main, [folder, "--text", TEXT, "--output", out], "nothing is overwritten")


def test_another_mixer(exported_model, tmp_path):
    folder = exported_model("s4d")[1]
    run(folder, tmp_path / "s4d", "--layers", 1, "--dtype", "float32")
    assert [path.name for path in (tmp_path / "s4d").glob("*.png")] == ["map-layer-01.png"]


def test_bad_requests(folder, tmp_path, refused):
    out = tmp_path / "out"
    request = [folder, "--output", out, "--text"]
    refused(inspect.main, [*request, TEXT * 50], "256 (--max-tokens)")
    words = "--layers must be from 0 to 1: got 2"
    refused(inspect.main, [*request, TEXT, "--layers", 2], words)
    assert not out.exists()
