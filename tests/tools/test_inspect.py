"""inspect: maps against the paper's sum and the mixer's output, timescales that are known, and what the command writes."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

from interdomain.files.pretrained import load_model, load_pretrained
from interdomain.model.layers import rope_of
from interdomain.model.mixers.interdomain import InterdomainMixer
from interdomain.tools import convert
from interdomain.tools import inspect_model as inspect
from interdomain.tools._inspect import maps as _maps

from ..model.common import OPTIONS, random_tokens, variant
from .checkpoints import small_model, write_checkpoint

T = 21
TEXT = "def f(x):\n    return x + 1\n"
# Random Fourier features need no other map; a head of 96 only takes longer.
RECURRENT = [
    *(("interdomain", option) for option in OPTIONS if option not in ("rff", "head96") and "window" not in option),
    *(("single-query", "kv1"), ("single-query", "real"), ("interdomain-norope", "plain")),
]


def read(model, wanted=(0, 1), length=T):
    return _maps.read_layers(model, random_tokens(model.config, 1, length)[0], list(wanted))


def written_out(mixer, q, k) -> torch.Tensor:
    """Paper eqs. 11 and 13: w_tj = Re sum_s (q_t . k_s) phi(t - s)^T phi(t - j), where phi(n) = C diag(beta) Lambda^n is what a
    token's coefficients are n tokens later; the other readouts conjugate the first phi, or take both real parts."""
    ssm, options, T = mixer.ssm, mixer.config, q.shape[1]
    dt = ssm.log_dt.exp()[:, None]
    A = torch.complex(-ssm.log_A_real.exp(), ssm.A_imag)
    scale = (1 + (dt * A.real.abs()) ** 8) ** -0.125  # the soft bound on the decay
    A = torch.complex(A.real * scale, A.imag)
    n = torch.arange(T)
    x = (dt * A).exp()[:, None] ** n[:, None] * ((torch.exp(dt * A) - 1) / A)[:, None]  # [G, T, M]
    if options.c_form != "identity":
        C = torch.view_as_complex(ssm.C)
        x = torch.einsum("gmn,gtn->gtm", C, x) if options.c_form == "full" else C[:, None] * x
    lag = n[:, None] - n
    phi = torch.where((lag >= 0)[None, ..., None], x[:, lag.clamp_min(0)], 0)  # [G, T, T, M]
    repeated = q.shape[2] // k.shape[2]
    phi, k = phi.repeat_interleave(repeated, 0), k.repeat_interleave(repeated, 2)
    a = torch.einsum("thr,shr,htsm->htm", q[0], k[0], phi.real).to(phi.dtype)
    a = a + 1j * torch.einsum("thr,shr,htsm->htm", q[0], k[0], phi.imag)
    if options.readout == "real":
        return torch.einsum("htm,htjm->htj", a.real, phi.real)
    a = a.conj() if options.readout == "hermitian" else a
    return torch.einsum("htm,htjm->htj", a, phi).real


@torch.no_grad()
@pytest.mark.parametrize(("condition", "option"), RECURRENT)
def test_the_map_is_the_paper_s_sum_and_makes_the_mixer_s_output(condition, option):
    model = variant(condition, option)
    seen = []
    for block in model.layers.values():
        block.attention.wo.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        block.attention.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    layers = read(model)
    seen = seen[:4]  # the first forward pass: x and o of each layer
    for i, layer in layers.items():
        if layer.kind != "interdomain":  # of a hybrid
            continue
        x, o = seen[2 * i : 2 * i + 2]
        mixer, rope = layer.mixer, None
        if mixer.config.rope:
            rope = rope_of(model.config, torch.arange(T), x.dtype)
        q, k, v = (mixer._features(n, getattr(mixer, f"w{n}")(x), rope, None, None) for n in "qkv")
        wanted = written_out(mixer, q, k)
        if mixer.config.normalize:
            v = v[..., :-1]
            # To one: but where the denominator is held away from zero, which is a factor per row.
            sums = layer.weights.sum(-1, keepdim=True)
            assert (sums - 1).abs().median() < 1e-9
            wanted = wanted / wanted.sum(-1, keepdim=True) * sums
        torch.testing.assert_close(layer.weights, wanted, rtol=1e-9, atol=1e-11 * wanted.abs().max().item())
        assert (layer.weights.triu(1) == 0).all()
        values = v[0].movedim(1, 0).repeat_interleave(q.shape[2] // k.shape[2], 0)
        made = (layer.weights @ values).movedim(0, 1).flatten(1)
        if mixer.wg is not None:
            made = torch.sigmoid(mixer.wg(x[0])) * made
        torch.testing.assert_close(made, o[0], rtol=1e-9, atol=1e-11 * o.abs().max().item())
        assert layer.error < 1e-12
        assert layer.output_rms == pytest.approx(o.square().mean().sqrt().item())


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
        assert ((layer.weights != 0) == seen).all()
        torch.testing.assert_close(layer.weights.sum(-1), torch.ones(4, T, dtype=torch.float64))
    heads, w = _maps.by_head(layers[0].weights), layers[0].weights[2]
    assert heads["negative"] == [0] * 4
    assert heads["distance"][2] == pytest.approx(sum(w[t, j].item() * (t - j) for t in range(T) for j in range(t)) / T)
    assert heads["own token"][2] == pytest.approx(w.diagonal().mean().item())


@torch.no_grad()
@pytest.mark.parametrize("condition", ["s4d", "dual-linear"])
def test_the_linear_readout_s_kernel(condition):
    """Re sum_m c'_m Lambda_m^n, c' = C^T c beta, for every pair of tokens n apart."""
    model = variant(condition)
    layer = read(model)[1]
    ssm = layer.mixer.ssm
    dt = ssm.log_dt.exp()[:, None]
    theta = torch.complex(ssm.decay()[0], dt * ssm.A_imag)
    c = torch.einsum("hmn,hm->hn", torch.view_as_complex(ssm.C), ssm.c.to(theta.dtype)) * (theta.exp() - 1) / theta * dt
    n = torch.arange(T)
    kernel = (c[:, None] * theta.exp()[:, None] ** n[:, None]).sum(-1).real  # [H, T]
    lag = n[:, None] - n
    wanted = torch.where(lag >= 0, kernel[:, lag.clamp_min(0)], 0)
    torch.testing.assert_close(layer.weights, wanted, rtol=1e-9, atol=1e-11 * wanted.abs().max().item())
    assert (layer.kind, layer.error < 1e-12) == ("linear readout", True)


class Unknown(InterdomainMixer):
    def forward(self, x, *_):
        return self.wo(self.wv(x).cumsum(1))


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer, exported_model):
    """Exported: an interdomain model whose second layer's modes all last 4 tokens, softmax and s4d."""
    path, model = tmp_path_factory.mktemp("inspect"), small_model("interdomain")
    ssm = model.layers["1"].attention.ssm
    ssm.log_A_real.data.copy_((0.25 / ssm.log_dt.exp()).log()[:, None].expand_as(ssm.log_A_real))
    ssm.C.data.copy_(torch.tensor([3.0, 4.0]).expand_as(ssm.C))
    checkpoint = write_checkpoint(path / "run", model, tokenizer)
    assert convert.main([str(checkpoint), "--output", str(path / "interdomain")]) == 0
    return {"interdomain": path / "interdomain", **{name: exported_model(name)[1] for name in ("softmax", "s4d")}}


def run(*argv, expect=0):
    assert inspect.main([str(word) for word in argv]) == expect


def test_what_is_written(folders, tmp_path, tokenizer, capsys):
    out = tmp_path / "out"
    run(folders["interdomain"], "--text", TEXT, "--output", out)
    printed = capsys.readouterr().out
    pictures = {"map-layer-00.png", "map-layer-01.png", "timescales.png"}
    assert {p.name for p in out.iterdir()} == pictures | {"inspect.json", "inspect.md", "maps.safetensors"}
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    found = json.loads((out / "inspect.json").read_text())
    ids = [tokenizer.eos_id, *tokenizer.encode(TEXT)]
    assert (found["tokens"], len(found["text"])) == (ids, len(ids))
    for row in found["layers"]:
        assert row["error"] < 1e-12
    first, second = found["layers"]
    which = ("timescale min", "timescale median", "timescale max", "at bound", "RMS of C")
    assert [second[name] for name in which] == pytest.approx([4, 4, 4, 0, 5], rel=1e-5)
    assert first["timescale max"] > 4.1
    assert len(found["heads"]) == 8
    model = load_model(folders["interdomain"], dtype=torch.float64)
    layers = _maps.read_layers(model, torch.tensor(ids), [0, 1])
    maps = load_file(out / "maps.safetensors")
    assert list(maps) == ["layer-00", "layer-01"]
    torch.testing.assert_close(maps["layer-01"], layers[1].weights.float())
    assert first["distance"] == pytest.approx(sum(_maps.by_head(layers[0].weights)["distance"]) / 4)
    page = (out / "inspect.md").read_text()
    assert all(line in page for line in printed.splitlines()[:4])
    run(folders["interdomain"], "--text", TEXT, "--output", out, expect=2)
    assert "nothing is overwritten" in capsys.readouterr().err


def test_other_mixers_and_no_matplotlib(folders, tmp_path, capsys, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    run(folders["s4d"], "--text-file", text, "--layers", 1, "--output", tmp_path / "s4d", "--dtype", "float32")
    assert {"kernel-layer-01.png", "timescales.png"} == {p.name for p in (tmp_path / "s4d").glob("*.png")}
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(folders["softmax"], "--text-file", text, "--output", tmp_path / "softmax")
    assert "no pictures: matplotlib is not installed" in capsys.readouterr().out
    assert not list((tmp_path / "softmax").glob("*.png"))

    def load(*given, **options):
        model, tokenizer = load_pretrained(*given, **options)
        model.layers["0"].attention.__class__ = Unknown
        return model, tokenizer

    monkeypatch.setattr(inspect, "load_pretrained", load)
    run(folders["interdomain"], "--text-file", text, "--output", tmp_path / "unknown")
    assert "layer 0: no map for this mixer (Unknown)" in capsys.readouterr().out
    assert list(load_file(tmp_path / "unknown" / "maps.safetensors")) == ["layer-01"]


def test_bad_requests(folders, tmp_path, capsys):
    model, out = folders["interdomain"], ("--output", tmp_path / "out")
    for argv, part in (
        ((tmp_path, "--text", TEXT), "config.json"),
        ((model, "--text", ""), "Allowed are 2 to 256"),
        ((model, "--text", TEXT * 50), "256 (--max-tokens)"),
        ((model, "--text", TEXT, "--layers", 2), "--layers must be from 0 to 1: got 2"),
        ((model, "--text-file", tmp_path / "none.txt"), "none.txt"),
        ((model, "--text", TEXT, "--device", "cuda:9"), "--device cuda:9"),
    ):
        run(*argv, *out, expect=2)
        assert part in capsys.readouterr().err, argv
    assert not (tmp_path / "out").exists()
