"""inspect-model: maps against the mixer's output, timescales that are known, and what the command writes."""

import json
import sys

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
# Random Fourier features need no other map; a head of 96 only takes longer.
RECURRENT = [
    *(
        ("interdomain", option)
        for option in OPTIONS
        if option not in ("rff", "head96") and "window" not in option
    ),
    *(("single-query", "kv1"), ("single-query", "real"), ("interdomain-norope", "plain")),
]


def read(model, wanted=(0, 1), length=T):
    return _maps.read_layers(model, random_tokens(model.config, 1, length)[0], list(wanted))


@torch.no_grad()
@pytest.mark.parametrize(("condition", "option"), RECURRENT)
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
    seen = []
    attention.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    attention.wo.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    layer = read(model, [0])[0]
    x, o = seen[:2]
    mixer = layer.mixer
    values = mixer._features(mixer.wv(x), None, None, None, norm=mixer.v_norm)[0]
    made = (layer.weights @ values.movedim(1, 0)).movedim(0, 1).flatten(1)
    torch.testing.assert_close(made, o[0], rtol=1e-9, atol=1e-11 * o.abs().max().item())
    assert layer.output_rms == pytest.approx(o.square().mean().sqrt().item())


@torch.no_grad()
@pytest.mark.parametrize("readout", ["complex", "real", "hermitian"])
def test_pairing(readout):
    """w(s, r) of docs/pairing.md, with phi_n = C beta Lambda^n."""
    layer = read(lively(small_config("interdomain", readout=readout)), [0])[0]
    exponents, _ = layer.mixer.ssm_tensors([layer.mixer])[0]
    log_decay, C = (torch.view_as_complex(x.contiguous()) for x in (exponents, layer.mixer.ssm.C))
    beta = (log_decay.exp() - 1) / (log_decay / layer.mixer.ssm.log_dt.exp()[:, None])
    powers = (
        beta[:, None]
        * (log_decay[:, None] * torch.arange(LAGS, dtype=torch.float64)[:, None]).exp()
    )
    phi = powers @ C.mT  # [H, lags, M]
    if readout == "real":
        expected = phi.real @ phi.real.mT
    else:
        left = phi.conj() if readout == "hermitian" else phi
        expected = (left @ phi.mT).real
    torch.testing.assert_close(
        layer.pairing, expected, rtol=1e-9, atol=1e-11 * expected.abs().max().item()
    )
    if readout != "complex":  # a sum of squares
        assert by_head(layer.pairing)["own value positive"] == [1] * 4


@torch.no_grad()
@pytest.mark.parametrize("condition", ["s4d", "dual-linear", "gla"])
def test_maps_of_linear_readouts_and_of_a_fixed_state(condition):
    for layer in read(variant(condition)).values():
        assert layer.error < 1e-12
        assert (layer.weights.triu(1) == 0).all()
        assert (layer.kind == "linear readout") == (condition != "gla")


@torch.no_grad()
@pytest.mark.parametrize("option", ["plain", "kv2", "window", "hybrid, window"])
def test_softmax_s_map(option):
    """A query sees its window, and all before it without one; in a hybrid the other layers have maps of their own."""
    model = variant("softmax", option)
    layers = read(model)
    kinds = [layer.kind for layer in layers.values()]
    assert kinds == (["softmax", "interdomain"] if "hybrid" in option else ["softmax"] * 2)
    for layer in layers.values():
        assert layer.error < 1e-12
        if layer.kind == "interdomain":
            continue
        assert layer.weights.shape == (4, T, T)
        seen = torch.ones(T, T).tril().triu(1 - (layer.mixer.window or T)).bool()
        assert ((layer.weights > 0) == seen).all()
        torch.testing.assert_close(layer.weights.sum(-1), torch.ones(4, T, dtype=torch.float64))
    heads, w = _maps.by_head(layers[0].weights), layers[0].weights[2]
    assert heads["negative"] == [0] * 4
    assert heads["distance"][2] == pytest.approx(
        sum(w[t, j].item() * (t - j) for t in range(T) for j in range(t)) / T
    )
    assert heads["own token"][2] == pytest.approx(w.diagonal().mean().item())


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer, exported_model):
    """Exported: an interdomain model whose second layer's modes all last 4 tokens; others."""
    path = tmp_path_factory.mktemp("inspect")
    model = small_model("interdomain")
    ssm = model.layers["1"].attention.ssm
    ssm.log_A_real.data.copy_((0.25 / ssm.log_dt.exp()).log()[:, None].expand_as(ssm.log_A_real))
    ssm.C.data.copy_(torch.tensor([3.0, 4.0]).expand_as(ssm.C))
    checkpoint = write_checkpoint(path / "run", model, tokenizer)
    assert convert.main([str(checkpoint), "--output", str(path / "interdomain")]) == 0
    return {
        "interdomain": path / "interdomain",
        "softmax": exported_model("softmax")[1],
        "s4d": exported_model("s4d")[1],
        "hybrid": exported_model("interdomain", softmax_every=2)[1],
    }


def run(*argv):
    assert inspect.main([str(word) for word in argv]) == 0


def test_what_is_written(folders, tmp_path, tokenizer, capsys, refused):
    out = tmp_path / "out"
    run(folders["interdomain"], "--text", TEXT, "--output", out)
    printed = capsys.readouterr().out
    pictures = {f"{kind}-layer-0{i}.png" for kind in ("map", "pairing") for i in (0, 1)}
    assert {p.name for p in out.iterdir()} == pictures | {
        "inspect.json",
        "inspect.md",
        "maps.safetensors",
    }
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    written = json.loads((out / "inspect.json").read_text())
    ids = [tokenizer.eos_id, *tokenizer.encode(TEXT)]
    assert (written["tokens"], len(written["text"]), len(written["heads"])) == (ids, len(ids), 8)
    first, second = written["layers"]
    which = ("timescale min", "timescale median", "timescale max", "at bound", "RMS of C")
    assert [second[name] for name in which] == pytest.approx([4, 4, 4, 0, 5], rel=1e-5)
    assert first["timescale max"] > 4.1
    layers = _maps.read_layers(
        load_model(folders["interdomain"], dtype=torch.float64), torch.tensor(ids), [0, 1]
    )
    maps = load_file(out / "maps.safetensors")
    assert sorted(maps) == ["layer-00", "layer-01", "pairing-00", "pairing-01"]
    torch.testing.assert_close(maps["layer-01"], layers[1].weights.float())
    assert first["distance"] == pytest.approx(sum(_maps.by_head(layers[0].weights)["distance"]) / 4)
    assert printed.splitlines()[2] in (out / "inspect.md").read_text()
    refused(
        inspect.main,
        [folders["interdomain"], "--text", TEXT, "--output", out],
        "nothing is overwritten",
    )


def test_other_mixers_and_no_matplotlib(folders, tmp_path, capsys, monkeypatch):
    run(
        folders["s4d"],
        "--text",
        TEXT,
        "--layers",
        1,
        "--output",
        tmp_path / "s4d",
        "--dtype",
        "float32",
    )
    assert [p.name for p in (tmp_path / "s4d").glob("*.png")] == ["map-layer-01.png"]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(folders["softmax"], "--text", TEXT, "--output", tmp_path / "softmax")
    assert "no pictures: matplotlib is not installed" in capsys.readouterr().out
    assert not list((tmp_path / "softmax").glob("*.png"))
    monkeypatch.setattr(
        _maps, "CORES", {f: core for f, core in _maps.CORES.items() if core.kind != "softmax"}
    )  # no mixer of ours
    run(folders["hybrid"], "--text", TEXT, "--output", tmp_path / "hybrid")
    assert "layer 1: no map for this mixer (SoftmaxMixer)" in capsys.readouterr().out
    assert list(load_file(tmp_path / "hybrid" / "maps.safetensors")) == ["layer-00", "pairing-00"]


def test_bad_requests(folders, tmp_path, refused):
    out = tmp_path / "out"
    for argv, words in (
        (["--text", ""], "Allowed are 2 to 256"),
        (["--text", TEXT * 50], "256 (--max-tokens)"),
        (["--text", TEXT, "--layers", 2], "--layers must be from 0 to 1: got 2"),
        (["--text", TEXT, "--device", "cuda:9"], "--device cuda:9"),
    ):
        refused(inspect.main, [folders["interdomain"], *argv, "--output", out], words)
    assert not out.exists()
