"""Checkpoints to exported models and back, bitwise; and everything that can be wrong with either."""

import json
import os
import pickle
import re
import resource
import shutil
import tomllib
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file

from interdomain.checkpoint import pretrained
from interdomain.checkpoint import step_folder as checkpoints
from interdomain.checkpoint.index import read_tensors, tensor_index, write_tensors
from interdomain.checkpoint.pretrained import MODEL_PREFIX, read_config
from interdomain.checkpoint.run_folder import note_folders
from interdomain.megatron import checkpoint as megatron
from interdomain.model import Transformer, cell_of, count_parameters
from interdomain.tools import convert

from .checkpoints import edit_run, small_model, write_checkpoint


def run(source, output, *options):
    assert convert.main([str(word) for word in (source, "--output", output, *options)]) == 0


@pytest.fixture
def output(tmp_path):
    """A folder to write, alone in its parent, so that leftovers show."""
    (tmp_path / "exports").mkdir()
    return tmp_path / "exports" / "out"


@pytest.fixture
def refused(refused, output):
    """refused(source, words, *options): the conversion is refused with these words, and nothing is left."""

    def refused_and_nothing_left(source, words, *options):
        refused(convert.main, [source, "--output", output, *options], words)
        assert os.listdir(output.parent) == []

    return refused_and_nothing_left


@pytest.fixture
def checkpoint(tmp_path, tokenizer):
    return write_checkpoint(tmp_path / "run" / "checkpoint", small_model(), tokenizer)


def exported_tensors(folder):
    tensors = load_file(folder / "model.safetensors")
    return {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in tensors.items()}


def checkpoint_tensors(folder):
    return read_tensors(folder, list(tensor_index(folder)))


def assert_same(found, wanted):
    """The dictionaries have the same names, dtypes and values. A failure shows the name and the worst position."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


EXPORTED = """
LICENSE README.md config.json generation_config.json model.safetensors tokenizer.json tokenizer.model tokenizer_config.json
cache_interdomain.py configuration_interdomain.py modeling_interdomain.py plain_interdomain.py
"""


@pytest.mark.parametrize(
    ("condition", "overrides"),
    [
        ("interdomain", {}),
        (
            "single-query",
            dict(
                feature_map="rff",
                normalize=True,
                n_kv_heads=2,
                c_form="diagonal",
                output_gate=True,
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
    assert_same(exported_tensors(output), model.state_dict())
    assert set(os.listdir(output)) == set(EXPORTED.split())
    # The umask decides who may read the files: safetensors' own mode is 0600.
    assert len({path.stat().st_mode for path in output.iterdir()}) == 1
    assert json.loads((output / "generation_config.json").read_text()) == {
        "bos_token_id": tokenizer.eos_id,  # a text begins where training documents began
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.unk_id,
        "suppress_tokens": list(range(tokenizer.vocab_size, model.config.vocab_size)),
    }
    config, record = read_config(output)
    assert config == model.config
    facts = record["facts"]
    assert (facts["size"], facts["condition"]) == cell_of(config, "debug")
    assert (facts["step"], facts["tokens"]) == (100, 204_800)

    # Back to a checkpoint that training starts from.
    again = tmp_path / "again" / "step-0"
    run(output, again, "--to-checkpoint")
    assert f"--checkpoint.initial_load_path {again}" in capsys.readouterr().out
    config, record = checkpoints.read_run_record(again)
    assert config == model.config
    assert (record["step"], record["run"]["started_from"]["step"]) == (0, 100)
    assert_same(checkpoint_tensors(again), model.state_dict())

    # The folder of a run whose checkpoint.folder is `again`, to the same files.
    note_folders(tmp_path, "again", "tb")
    second = tmp_path / "exports" / "second"
    run(tmp_path, second)
    for name in EXPORTED.split():
        same = (second / name).read_bytes() == (output / name).read_bytes()
        # The facts differ: step 0, started from step 100.
        assert same == (name not in ("config.json", "README.md")), name


def test_uptraining(tmp_path, tokenizer, refused, capsys):
    """A hybrid from a softmax model has its softmax layer and projections. The rest is drawn as in a run."""
    pytest.importorskip("torchtitan", reason="the extra `train` is not installed")
    model = small_model("softmax", rope_theta=10_000.0, norm_eps=1e-5)  # those of every run
    run(write_checkpoint(tmp_path / "run", model, tokenizer), tmp_path / "folder")
    settings = """
[model]
flavor = "debug"
dim = 32
n_layers = 2
n_heads = 4
vocab_size = 420
[mixer]
softmax_every = 2
n_basis = 6
readout = "hermitian"
[debug]
seed = 7
"""
    file = tmp_path / "hybrid.toml"
    file.write_text(settings)
    run(tmp_path / "folder", tmp_path / "start", "--to-checkpoint", "--uptrain", file)
    assert "21 tensors copied, 12 drawn; start with" in capsys.readouterr().out
    config, _ = checkpoints.read_run_record(tmp_path / "start")
    kinds = [(layer.mixer.kind, layer.mixer.readout) for layer in config.layers]
    assert kinds == [("interdomain", "hermitian"), ("softmax", "complex")]
    drawn = Transformer(config)
    drawn.init_weights(7)
    expected = {**drawn.state_dict(), **model.state_dict()}
    assert_same(checkpoint_tensors(tmp_path / "start"), expected)
    file.write_text(settings.replace("n_heads = 4", "n_heads = 2"))
    words = "n_heads 4 in the folder, 2 in"
    refused(tmp_path / "folder", words, "--to-checkpoint", "--uptrain", file)
    run(tmp_path / "start", tmp_path / "again")
    origin = f"{cell_of(model.config, 'debug')}: step 100, tokens: 204,800"
    assert f"| started from | {origin} |" in (tmp_path / "again" / "README.md").read_text()


def edit_record(checkpoint, **changes):
    file = checkpoint / "interdomain.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_model(checkpoint, **changes):
    model = json.loads((checkpoint / "interdomain.json").read_text())["model"]
    edit_record(checkpoint, model=model | changes)


def corpus_facts(name, share, tokens, source, datasets):
    facts = {"name": name, "share": share, "tokens": tokens}
    return facts | {"sources": [source], "datasets": datasets}


def test_the_card_says_what_the_run_recorded(checkpoint, output):
    validation = '{"step": 100, "loss": 3.0, "perplexity": 20.25}'
    (checkpoint / checkpoints.VALIDATION).write_text(validation)
    web = corpus_facts("web", "3/4", 9_000, "a/b (Hugging Face hub)", ["a/b"])
    code = corpus_facts("code", "1/4", 800, "a|b.txt (0.1 MB)", [])
    edit_run(checkpoint, earlier_data=[{"ends": 60, "corpora": [web]}], corpora=[web, code])
    training = {"dataset_path": "mine", "steps": 400, "tokens": None}
    # The condition is as it was once written, without n_basis.
    configuration = {"optimizer": {"lr": 3e-3}, "training": training}
    edit_record(checkpoint, condition="interdomain", configuration=configuration)
    run(checkpoint, output, "--license", "cc-by-4.0")
    hub = pytest.importorskip("huggingface_hub")
    card = hub.ModelCard.load(output / "README.md")
    assert (card.data.license, card.data.library_name) == ("cc-by-4.0", "transformers")
    assert card.data.datasets == ["a/b"]
    assert card.data.tags == ["interdomain-attention", "interdomain"]
    settings = tomllib.loads(re.search(r"```toml\n(.*?)```", card.content, re.DOTALL)[1])
    config, _ = read_config(output)
    model = config.to_dict()
    del model["mixer"]
    mixer = {name: value for name, value in asdict(config.mixers[0]).items() if value is not None}
    assert settings.pop("model") == model
    assert settings.pop("mixer") == mixer
    assert settings == {"optimizer": {"lr": 3e-3}, "training": {"steps": 400}}
    for line in (
        "| web | 0 | 3/4 | 9,000 | a/b (Hugging Face hub) |",
        "| code | 60 | 1/4 | 800 | a\\|b.txt (0.1 MB) |",
        f"| parameters | {count_parameters(small_model()):,} |",
        "| step | 100 of 400 |",
        "| validation perplexity | 20.250 |",
    ):
        assert line + "\n" in card.content


def test_documents_as_they_were_in_training(tmp_path, checkpoint, tokenizer, capsys):
    """An exported model, a checkpoint made of it and a checkpoint of Megatron-Core record how documents begin and end."""
    documents = {"begin": [1], "end": [2]}
    edit_run(checkpoint, documents=documents)
    folder = tmp_path / "folder"
    run(checkpoint, folder)
    assert "does not record" not in capsys.readouterr().err
    run(folder, tmp_path / "start", "--to-checkpoint")
    run(tmp_path / "start", tmp_path / "again")
    run(folder, tmp_path / "megatron", "--to-megatron")
    run(tmp_path / "megatron", tmp_path / "back", "--tokenizer", tokenizer.path)
    settings = json.loads((folder / "generation_config.json").read_text())
    assert (settings["bos_token_id"], settings["eos_token_id"]) == (1, 2)
    for exported in (folder, tmp_path / "again", tmp_path / "back"):
        assert read_config(exported)[1]["facts"]["run"]["documents"] == documents
    card = (folder / "README.md").read_text()
    assert "| documents in training | begin with BOS (1), end with EOS (2) |" in card
    # A checkpoint from before this was recorded
    edit_run(checkpoint, documents=None)
    older = tmp_path / "older"
    run(checkpoint, older)
    assert "does not record how documents began" in capsys.readouterr().err
    assert "| documents in training | not recorded |" in (older / "README.md").read_text()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_storage_dtypes_spare_the_ssm_parameters(tmp_path, tokenizer, output, dtype):
    model = small_model()
    model.init_weights(0)
    name_of_dtype = str(dtype).removeprefix("torch.")
    checkpoint = write_checkpoint(tmp_path / "run", model, tokenizer)
    run(checkpoint, output, "--dtype", name_of_dtype)
    rounded = model.state_dict()
    for name, tensor in rounded.items():
        if ".ssm." not in name:
            rounded[name] = tensor.to(dtype)
    assert_same(exported_tensors(output), rounded)
    assert read_config(output)[1]["dtype"] == name_of_dtype
    # Training starts in float32 again, from the rounded values.
    run(output, tmp_path / "again", "--to-checkpoint")
    expected = {name: tensor.float() for name, tensor in rounded.items()}
    assert_same(checkpoint_tensors(tmp_path / "again"), expected)


# Damaged checkpoints

SHARD = "__0_0.distcp"


def remove_record(checkpoint):
    (checkpoint / "interdomain.json").unlink()


def empty_record(checkpoint):
    (checkpoint / "interdomain.json").write_text("")


def newer_model(checkpoint):
    edit_model(checkpoint, format_version=3)


def another_size(checkpoint):
    edit_model(checkpoint, vocab_size=421)


def another_depth(checkpoint):
    edit_model(checkpoint, n_layers=3)


def cut_shard(checkpoint):
    os.truncate(checkpoint / SHARD, 5000)


def flip_a_bit(file):
    """Changes one bit of the final norm's weight."""
    data = bytearray(file.read_bytes())
    data[data.index(small_model().norm.weight.detach().numpy().tobytes())] ^= 1
    file.write_bytes(data)


def altered_shard(checkpoint):
    flip_a_bit(checkpoint / SHARD)


def shard_elsewhere(checkpoint):
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = f"../step-100/{place.relative_path}"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def another_tokenizer(folder):
    with (folder / "tokenizer.model").open("ab") as file:
        file.write(b"\x1a\x00")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove_record, "no interdomain.json"),
        (empty_record, "interdomain.json is damaged"),
        (newer_model, "reads version 2"),
        (another_size, "do not fit the configuration"),
        (another_depth, "has no tensor layers.2."),
        (cut_shard, "has 5,000 bytes where"),
        (altered_shard, "are not as they were saved"),
        (shard_elsewhere, "no shard beside it"),
        (another_tokenizer, "checksum differs"),
        (shutil.rmtree, "There is no folder"),
    ],
)
def test_a_damaged_checkpoint_is_refused(checkpoint, refused, damage, words):
    damage(checkpoint)
    refused(checkpoint, words)


@pytest.mark.parametrize(
    ("value", "dtype", "words"),
    [
        (float("nan"), "float32", "norm.weight holds values that are not finite"),
        (1e6, "float16", "Convert with --dtype float32"),  # float16 ends at 65,504
    ],
)
def test_weights_that_are_not_finite_or_not_in_the_dtype_are_refused(
    tmp_path, tokenizer, refused, value, dtype, words
):
    model = small_model()
    with torch.no_grad():
        model.norm.weight[3] = value
    refused(write_checkpoint(tmp_path / "run", model, tokenizer), words, "--dtype", dtype)


def test_a_file_that_does_not_read_back_is_refused(checkpoint, refused, monkeypatch):
    """A machine writes something else than it was given."""
    save = pretrained.save_file

    def save_something_else(tensors, *args, **kwargs):
        tensors["model.norm.weight"][5] += 1e-6
        save(tensors, *args, **kwargs)

    monkeypatch.setattr(pretrained, "save_file", save_something_else)
    refused(checkpoint, "norm.weight did not read back as written")


def test_back_to_a_checkpoint_checks_its_source(tmp_path, checkpoint, refused):
    folder = tmp_path / "folder"
    run(checkpoint, folder)
    dtype = ("--dtype", "float32")
    refused(folder, "A checkpoint to train from is float32", "--to-checkpoint", *dtype)
    flip_a_bit(folder / "model.safetensors")
    refused(folder, "model.safetensors is not as it was written", "--to-checkpoint")
    another_tokenizer(folder)
    refused(folder, "checksum differs from the record's", "--to-checkpoint")
    refused(checkpoint, "is not a model folder", "--to-checkpoint")  # the wrong way round


@pytest.mark.parametrize("size", [100, 50_000], ids=["tokenizer", "weights"])
def test_a_full_disk_leaves_nothing(checkpoint, output, refused, size):
    """A file that grows beyond a limit fails with EFBIG (Python ignores SIGXFSZ)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        refused(checkpoint, "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run(checkpoint, output)


# Checkpoints of Megatron-Core. Those that Megatron wrote are in tests/megatron.


def megatron_run(folder, monkeypatch, tensors=(), backbone=megatron.BACKBONE, sha256=None):
    """Returns a run's folder.

    Args:
        tensors: Names of further tensors in the checkpoint.
        backbone: The settings that the layers record.
        sha256: The checksum of the corpus's tokenizer. None if the run did not record it.
    """
    model = small_model()
    step = folder / "iter_0000007"
    megatron.write_checkpoint(folder / "start", model.config, model.state_dict())
    saved = checkpoint_tensors(folder / "start" / "release")
    with monkeypatch.context() as patch:
        patch.setattr(megatron, "BACKBONE", backbone)
        record = megatron.record_of(model.config, sha256)
    saved["decoder.layers.self_attention.interdomain"] = record.repeat(model.config.n_layers, 1)
    for name in tensors:
        saved[name] = torch.zeros(3)
    write_tensors(step, saved)
    shutil.copyfile(folder / "start" / "release" / megatron.FORMAT, step / megatron.FORMAT)
    (folder / megatron.TRACKER).write_text("7")
    return folder


def test_a_tensor_that_an_exported_model_cannot_have_is_refused(
    tmp_path, tokenizer, refused, monkeypatch
):
    name = "decoder.layers.mlp.linear_fc1.bias"
    source = megatron_run(tmp_path / "run", monkeypatch, tensors=[name])
    refused(source, f"no place, such as {name}.", "--tokenizer", tokenizer.path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("activation_func", "quick_gelu"),
        ("a setting of a newer version", True),
        ("use_mup", "not recorded"),
    ],
)
def test_a_setting_that_an_exported_model_cannot_have_is_refused(
    tmp_path, tokenizer, refused, monkeypatch, name, value
):
    backbone = megatron.BACKBONE | {name: value}
    if value == "not recorded":
        del backbone[name]
    source = megatron_run(tmp_path / "run", monkeypatch, backbone=backbone)
    words = f"is of a run with {name} = {value!r}. An exported model cannot have that"
    refused(source, words, "--tokenizer", tokenizer.path)


def test_the_model_of_a_checkpoint_of_megatron(tmp_path, tokenizer, output, refused, monkeypatch):
    """The optimizer's tensors are left out. If the run recorded its tokenizer, another one of a fitting size is refused."""
    options = ("--tokenizer", tokenizer.path)
    another = megatron_run(tmp_path / "another", monkeypatch, sha256="0123456789abcdef" * 4)
    refused(another, "is not the tokenizer of the run's corpus", *options)
    optimizer = ["optimizer.state.exp_avg.output_layer.weight"]
    source = megatron_run(tmp_path / "run", monkeypatch, optimizer, sha256=tokenizer.sha256)
    run(source, output, *options)
    assert "does not record its corpus" in (output / "README.md").read_text()
    assert_same(exported_tensors(output), small_model().state_dict())
