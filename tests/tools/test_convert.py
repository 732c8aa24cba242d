"""Checkpoints to standalone folders and back, to the bit; and everything that can be wrong with either."""

import json
import os
import pickle
import re
import resource
import shutil
import tomllib
from dataclasses import asdict
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from interdomain.checkpoint import step_folder as checkpoints
from interdomain.checkpoint.index import read_tensors, tensor_index, write_tensors
from interdomain.checkpoint.model_card import TEMPLATE
from interdomain.checkpoint.pretrained import BASE, read_config
from interdomain.checkpoint.run_folder import note_folders
from interdomain.megatron import checkpoint as megatron
from interdomain.model import Transformer, cell_of, count_parameters
from interdomain.tools import convert

from ..common import REPOSITORY
from .checkpoints import edit_run, small_model, write_checkpoint


def run(source, output, *options, expect=0):
    assert convert.main([str(a) for a in (source, "--output", output, *options)]) == expect


@pytest.fixture
def refused(refused, output):
    """refused(source, words, *options): it is, with these words, and nothing is left."""

    def refused_and_nothing_left(source, words, *options):
        refused(convert.main, [source, "--output", output, *options], words)
        assert not os.listdir(output.parent)

    return refused_and_nothing_left


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stored(folder):
    return {
        name.removeprefix(BASE): t for name, t in load_file(folder / "model.safetensors").items()
    }


def of_checkpoint(folder):
    return read_tensors(folder, list(tensor_index(folder)))


def assert_same(found, wanted):
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def checkpoint(tmp_path, tokenizer):
    return write_checkpoint(tmp_path / "run" / "checkpoint", small_model(), tokenizer)


@pytest.fixture
def output(tmp_path):
    """A folder to write, alone in its parent, so that leftovers show."""
    (tmp_path / "exports").mkdir()
    return tmp_path / "exports" / "out"


@pytest.mark.parametrize(
    ("condition", "overrides"),
    [
        ("interdomain", {}),
        (
            "single-query",
            dict(
                feature_map="rff", normalize=True, n_kv_heads=2, c_form="diagonal", output_gate=True
            ),
        ),
        ("softmax", {}),
    ],
    ids=["interdomain", "rff", "softmax"],
)
def test_every_bit_arrives_and_goes_back(tmp_path, tokenizer, output, capsys, condition, overrides):
    model = small_model(condition, **overrides)
    checkpoint = write_checkpoint(tmp_path / "run" / "checkpoint", model, tokenizer)
    run(checkpoint, output)
    assert f"{len(model.state_dict())} tensors, step 100)" in capsys.readouterr().out
    assert_same(stored(output), model.state_dict())
    assert {path.name for path in output.iterdir()} == {
        *(
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer.model",
            "tokenizer_config.json",
        ),
        *(
            "configuration_interdomain.py",
            "modeling_interdomain.py",
            "cache_interdomain.py",
            "plain_interdomain.py",
        ),
        *("generation_config.json", "README.md", "LICENSE"),
    }
    assert (
        len({path.stat().st_mode for path in output.iterdir()}) == 1
    )  # by the umask: safetensors' own is 0600
    assert json.loads((output / "generation_config.json").read_text()) == {
        "bos_token_id": tokenizer.eos_id,  # a text begins where training documents began
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.unk_id,
        "suppress_tokens": list(range(tokenizer.vocab_size, model.config.vocab_size)),
    }
    config, record = read_config(output)
    assert config == model.config
    facts = record["facts"]
    cell = cell_of(config, "debug")
    assert [facts[name] for name in ("size", "condition", "step", "tokens")] == [
        *cell,
        100,
        204_800,
    ]

    # Back to a checkpoint that training starts from, and to a folder again.
    again = tmp_path / "again" / "step-0"
    run(output, again, "--to-checkpoint")
    assert f"--checkpoint.initial_load_path {again}" in capsys.readouterr().out
    config, record = checkpoints.read_run_record(again)
    assert config == model.config
    assert (record["step"], record["run"]["started_from"]["step"]) == (0, 100)
    assert_same(of_checkpoint(again), model.state_dict())
    note_folders(
        tmp_path, "again", "tb"
    )  # by the folder of a run whose checkpoint.folder is `again`
    run(tmp_path, tmp_path / "exports" / "second")
    first = contents(output)
    second = contents(tmp_path / "exports" / "second")
    for name in ("config.json", "README.md"):  # facts differ: step 0, started from step 100
        assert first.pop(name) != second.pop(name)
    assert first == second


def test_uptraining(tmp_path, tokenizer, refused, capsys):
    """A hybrid from a softmax model: its softmax layer whole, projections and all else copied, the rest as a run draws it."""
    pytest.importorskip("torchtitan", reason="the extra `train` is not installed")
    model = small_model("softmax", rope_theta=10_000.0, norm_eps=1e-5)  # those of every run
    run(write_checkpoint(tmp_path / "run", model, tokenizer), tmp_path / "folder")
    file = tmp_path / "hybrid.toml"
    sizes = 'flavor = "debug"\ndim = 32\nn_layers = 2\nn_heads = 4\nvocab_size = 420'
    file.write_text(
        f'[model]\n{sizes}\n[mixer]\nsoftmax_every = 2\nn_basis = 6\nreadout = "hermitian"\n[debug]\nseed = 7'
    )
    run(tmp_path / "folder", tmp_path / "start", "--to-checkpoint", "--uptrain", file)
    assert "21 tensors copied, 12 drawn; start with" in capsys.readouterr().out
    config, _ = checkpoints.read_run_record(tmp_path / "start")
    assert [(layer.mixer.kind, layer.mixer.readout) for layer in config.layers] == [
        ("interdomain", "hermitian"), ("softmax", "complex"),
    ]  # fmt: skip
    drawn = Transformer(config)
    drawn.init_weights(7)
    assert_same(of_checkpoint(tmp_path / "start"), {**drawn.state_dict(), **model.state_dict()})
    file.write_text(file.read_text().replace("n_heads = 4", "n_heads = 2"))
    refused(
        tmp_path / "folder", "n_heads 4 in the folder, 2 in", "--to-checkpoint", "--uptrain", file
    )
    run(tmp_path / "start", tmp_path / "again")
    origin = f"{cell_of(model.config, 'debug')}: step 100, tokens: 204,800"
    assert f"| started from | {origin} |" in (tmp_path / "again" / "README.md").read_text()


def test_the_card_says_what_the_run_recorded(checkpoint, output):
    (checkpoint / checkpoints.VALIDATION).write_text(
        '{"step": 100, "loss": 3.0, "perplexity": 20.25}'
    )
    web = {
        "name": "web",
        "share": "3/4",
        "tokens": 9_000,
        "sources": ["a/b (Hugging Face hub)"],
        "datasets": ["a/b"],
    }
    code = {
        "name": "code",
        "share": "1/4",
        "tokens": 800,
        "sources": ["a|b.txt (0.1 MB)"],
        "datasets": [],
    }
    edit_run(checkpoint, earlier_data=[{"ends": 60, "corpora": [web]}], corpora=[web, code])
    recipe = {
        "optimizer": {"lr": 3e-3},
        "training": {"dataset_path": "mine", "steps": 400, "tokens": None},
    }
    # The condition as it was once written, whatever n_basis is.
    edit_record(
        checkpoint, lambda record: record.update(condition="interdomain", configuration=recipe)
    )
    run(checkpoint, output, "--license", "cc-by-4.0")
    config, _ = read_config(output)
    hub = pytest.importorskip("huggingface_hub")
    card = hub.ModelCard.load(output / "README.md")
    assert (card.data.license, card.data.library_name, card.data.datasets) == (
        "cc-by-4.0",
        "transformers",
        ["a/b"],
    )
    assert card.data.tags == ["interdomain-attention", "interdomain"]
    card = card.content
    settings = tomllib.loads(re.search(r"```toml\n(.*?)```", card, re.DOTALL)[1])
    assert settings == {
        "model": {name: x for name, x in config.to_dict().items() if name != "mixer"},
        "mixer": {name: x for name, x in asdict(config.mixers[0]).items() if x is not None},
        "optimizer": {"lr": 3e-3},
        "training": {"steps": 400},
    }
    for line in (
        "| web | 0 | 3/4 | 9,000 | a/b (Hugging Face hub) |",
        "| code | 60 | 1/4 | 800 | a\\|b.txt (0.1 MB) |",
        f"| parameters | {count_parameters(small_model()):,} |",
        "| step | 100 of 400 |",
        "| validation perplexity | 20.250 |",
    ):
        assert line + "\n" in card


def test_documents_as_they_were_in_training(tmp_path, checkpoint, tokenizer, capsys):
    """In the folder's files, in a checkpoint made of it, and through a checkpoint of Megatron-Core."""
    documents = {"begin": [1], "end": [2]}
    edit_run(checkpoint, documents=documents)
    run(checkpoint, tmp_path / "folder")
    assert "does not record" not in capsys.readouterr().err
    run(tmp_path / "folder", tmp_path / "start", "--to-checkpoint")
    run(tmp_path / "start", tmp_path / "again")
    run(tmp_path / "folder", tmp_path / "megatron", "--to-megatron")
    run(tmp_path / "megatron", tmp_path / "back", "--tokenizer", tokenizer.path)
    settings = json.loads((tmp_path / "folder" / "generation_config.json").read_text())
    assert (settings["bos_token_id"], settings["eos_token_id"]) == (1, 2)
    for name in ("folder", "again", "back"):
        assert read_config(tmp_path / name)[1]["facts"]["run"]["documents"] == documents
    card = (tmp_path / "folder" / "README.md").read_text()
    assert "| documents in training | begin with BOS (1), end with EOS (2) |" in card
    # A checkpoint from before this was recorded.
    edit_run(checkpoint, documents=None)
    capsys.readouterr()
    run(checkpoint, tmp_path / "older")
    assert "does not record how documents began" in capsys.readouterr().err
    assert (
        "| documents in training | not recorded |" in (tmp_path / "older" / "README.md").read_text()
    )
    run(tmp_path / "older", tmp_path / "older start", "--to-checkpoint")
    assert not checkpoints.read_run_record(tmp_path / "older start")[1]["run"].get("documents")


def test_the_card_cites_what_the_readme_cites():
    bibtex = re.search(r"```bibtex\n(.*?)```", TEMPLATE.read_text(), re.DOTALL)[1]
    assert " ".join(bibtex.split()) in " ".join((REPOSITORY / "README.md").read_text().split())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_storage_dtypes_spare_the_dynamics(tmp_path, tokenizer, output, dtype):
    model = small_model()
    model.init_weights(0)
    run(write_checkpoint(tmp_path / "run", model, tokenizer), output, "--dtype", dtype)
    state = model.state_dict()
    rounded = {
        name: x if ".ssm." in name else x.to(getattr(torch, dtype)) for name, x in state.items()
    }
    assert_same(stored(output), rounded)
    assert read_config(output)[1]["dtype"] == dtype
    # Training starts in float32 again, from the rounded values.
    run(output, tmp_path / "again", "--to-checkpoint")
    assert_same(
        of_checkpoint(tmp_path / "again"),
        {name: tensor.float() for name, tensor in rounded.items()},
    )


def edit_record(checkpoint, change):
    record = json.loads((checkpoint / "interdomain.json").read_text())
    change(record)
    (checkpoint / "interdomain.json").write_text(json.dumps(record))


def another_tokenizer(checkpoint):
    file = checkpoint / "tokenizer.model"
    file.write_bytes(file.read_bytes() + b"\x1a\x00")


def shard_elsewhere(checkpoint):
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = f"../step-100/{place.relative_path}"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def flip_a_bit(file, tensor):
    data = bytearray(file.read_bytes())
    data[data.index(tensor.detach().numpy().tobytes())] ^= 1
    file.write_bytes(data)


SHARD = "__0_0.distcp"
DAMAGE = {
    "no record": (lambda c: (c / "interdomain.json").unlink(), "no interdomain.json"),
    "empty record": (
        lambda c: (c / "interdomain.json").write_text(""),
        "interdomain.json is damaged",
    ),
    "newer model": (
        lambda c: edit_record(c, lambda r: r["model"].update(format_version=3)),
        "reads version 2",
    ),
    "cut shard": (lambda c: os.truncate(c / SHARD, 5000), "has 5,000 bytes where"),
    "altered shard": (
        lambda c: flip_a_bit(c / SHARD, small_model().norm.weight),
        "do not match their checksum",
    ),
    "shard elsewhere": (shard_elsewhere, "no shard beside it"),
    "another size": (
        lambda c: edit_record(c, lambda r: r["model"].update(vocab_size=421)),
        "do not fit its config.json",
    ),
    "another depth": (
        lambda c: edit_record(c, lambda r: r["model"].update(n_layers=3)),
        "has no tensor layers.2.",
    ),
    "another tokenizer": (another_tokenizer, "checksum differs"),
    "no folder": (shutil.rmtree, "There is no folder"),
}


def test_a_damaged_checkpoint_is_refused(tmp_path, checkpoint, refused):
    for name, (break_it, words) in DAMAGE.items():
        damaged = shutil.copytree(checkpoint, tmp_path / name / checkpoint.name)
        break_it(damaged)
        refused(damaged, words)


def test_weights_that_are_not_finite_or_not_in_the_dtype_are_refused(tmp_path, tokenizer, refused):
    for value, dtype, words in (
        (float("nan"), "float32", "norm.weight holds values that are not finite"),
        (1e6, "float16", "Convert with --dtype float32"),  # beyond float16's 65,504
    ):
        model = small_model()
        with torch.no_grad():
            model.norm.weight[3] = value
        refused(write_checkpoint(tmp_path / dtype, model, tokenizer), words, "--dtype", dtype)


def test_what_does_not_read_back_is_refused(checkpoint, refused, monkeypatch):
    """A machine that writes something else than it was given."""
    from interdomain.checkpoint import pretrained

    def flips(tensors, *args, **kwargs):
        tensors["model.norm.weight"][5] += 1e-6
        save(tensors, *args, **kwargs)

    save = pretrained.save_file
    monkeypatch.setattr(pretrained, "save_file", flips)
    refused(checkpoint, "norm.weight did not read back as written")


# Checkpoints of Megatron-Core. Those that Megatron wrote are in tests/megatron.


def megatron_run(folder, tensors=(), backbone=megatron.BACKBONE, sha256=None):
    """A run's folder with further tensors of these names, and with these settings and tokenizer in the layers' records."""
    model, step = small_model(), folder / "iter_0000007"
    megatron.write_checkpoint(folder / "start", model.config, model.state_dict())
    saved = of_checkpoint(folder / "start" / "release")
    with mock.patch.dict(megatron.BACKBONE, backbone.copy(), clear=True):
        record = megatron.record_of(model.config, sha256).repeat(model.config.n_layers, 1)
    saved["decoder.layers.self_attention.interdomain"] = record
    write_tensors(step, saved | dict.fromkeys(tensors, torch.zeros(3)))
    shutil.copyfile(folder / "start" / "release" / megatron.FORMAT, step / megatron.FORMAT)
    (folder / megatron.TRACKER).write_text("7")
    return folder


def test_what_a_folder_has_no_place_for_is_refused(tmp_path, tokenizer, refused):
    """Tensors, and settings of Megatron."""
    for name in ("decoder.layers.mlp.linear_fc1.bias", "mtp.layers.0.eh_proj.weight"):
        run = megatron_run(tmp_path / name, [name])
        refused(run, f"no place, such as {name}.", "--tokenizer", tokenizer.path)
    unrecorded = {name: value for name, value in megatron.BACKBONE.items() if name != "use_mup"}
    for name, value, backbone in (
        ("activation_func", "quick_gelu", megatron.BACKBONE | {"activation_func": "quick_gelu"}),
        (
            "a setting of a newer version",
            True,
            megatron.BACKBONE | {"a setting of a newer version": True},
        ),
        ("use_mup", "not recorded", unrecorded),
    ):
        run = megatron_run(tmp_path / name, backbone=backbone)
        refused(
            run,
            f"is of a run with {name} = {value!r}. An exported model cannot have that",
            "--tokenizer",
            tokenizer.path,
        )


def test_the_model_of_a_checkpoint_of_megatron(tmp_path, tokenizer, output, refused):
    """The optimizer's tensors are left out. A tokenizer of a fitting size must be the run's, if the run recorded it."""
    another = megatron_run(tmp_path / "another", sha256="0123456789abcdef" * 4)
    refused(another, "is not the tokenizer of the run's corpus", "--tokenizer", tokenizer.path)
    optimizer = ["optimizer.state.exp_avg.output_layer.weight"]
    run(
        megatron_run(tmp_path / "run", optimizer, sha256=tokenizer.sha256),
        output,
        "--tokenizer",
        tokenizer.path,
    )
    assert "does not record its corpus" in (output / "README.md").read_text()
    assert_same(stored(output), small_model().state_dict())


def test_back_to_a_checkpoint_checks_its_source(tmp_path, checkpoint, refused):
    folder = tmp_path / "folder"
    run(checkpoint, folder)
    flip_a_bit(folder / "model.safetensors", small_model().norm.weight)
    refused(folder, "model.safetensors is not as it was written", "--to-checkpoint")
    another_tokenizer(folder)
    refused(folder, "checksum differs from the record's", "--to-checkpoint")
    refused(checkpoint, "is not a model folder", "--to-checkpoint")  # the wrong way round
    refused(
        folder, "A checkpoint to train from is float32", "--to-checkpoint", "--dtype", "float32"
    )


def test_a_full_disk_leaves_nothing(checkpoint, output, refused):
    """A file that grows beyond a limit fails with EFBIG (Python ignores SIGXFSZ)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (
        100,
        50_000,
    ):  # the smallest leaves no room for the tokenizer, the largest for the weights
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            refused(checkpoint, "File too large")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run(checkpoint, output)
