"""Checkpoints to exported models and back, bitwise; and everything that can be wrong with either."""

import json
import os
import pickle
import re
import resource
import shutil
import tomllib
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from interdomain.checkpoint import pretrained
from interdomain.checkpoint import step_folder as checkpoints
from interdomain.checkpoint.index import read_tensors, tensor_index, write_tensors
from interdomain.checkpoint.pretrained import MODEL_PREFIX, read_config
from interdomain.megatron import checkpoint as megatron
from interdomain.model import Transformer, cell_of
from interdomain.tools import convert

from ..model.common import assert_same_tensors
from .checkpoints import edit_run, small_model, write_checkpoint


def run(source, output, *options):
    assert convert.main([str(word) for word in (source, "--output", output, *options)]) == 0


@pytest.fixture
def output(tmp_path):
    """A folder to write, alone in its parent, so that leftovers show."""
    (tmp_path / "exports").mkdir()
    return tmp_path / "exports/out"


@pytest.fixture
def refused(refused, output):
    """refused(source, words, *options): the conversion is refused with these words, and nothing is left."""

    def refused_and_nothing_left(source, words, *options):
        refused(convert.main, [source, "--output", output, *options], words)
        assert os.listdir(output.parent) == []

    return refused_and_nothing_left


@pytest.fixture
def checkpoint(tmp_path, tokenizer):
    return write_checkpoint(tmp_path / "run/checkpoint", small_model(), tokenizer)


def exported_tensors(folder):
    tensors = load_file(folder / "model.safetensors")
    return {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in tensors.items()}


def checkpoint_tensors(folder):
    return read_tensors(folder, list(tensor_index(folder)))


EXPORTED = """
LICENSE README.md config.json generation_config.json model.safetensors tokenizer.json tokenizer.model tokenizer_config.json
cache_interdomain.py configuration_interdomain.py modeling_interdomain.py plain_interdomain.py
"""


RFF = {
    "feature_map": "rff",
    "normalize": True,
    "n_kv_heads": 2,
    "c_form": "diagonal",
    "output_gate": True,
}


@pytest.mark.parametrize(
    ("condition", "overrides"), [("interdomain", {}), ("single-query", RFF), ("softmax", {})]
)
def test_every_bit_arrives_and_goes_back(tmp_path, tokenizer, output, capsys, condition, overrides):
    model = small_model(condition, **overrides)
    checkpoint = write_checkpoint(tmp_path / "run/checkpoint", model, tokenizer)
    run(checkpoint, output)
    assert_same_tensors(exported_tensors(output), model.state_dict())
    assert set(os.listdir(output)) == set(EXPORTED.split())
    # The umask decides who may read the files: safetensors' own mode is 0600.
    assert len({path.stat().st_mode for path in output.iterdir()}) == 1
    settings = json.loads((output / "generation_config.json").read_text())
    assert settings == {
        "bos_token_id": tokenizer.eos_id,  # a text begins where training documents began
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.unk_id,
        "suppress_tokens": list(range(tokenizer.vocab_size, model.config.vocab_size)),
    }
    config, record = read_config(output)
    assert config == model.config
    facts = record["facts"]
    assert (facts["size"], facts["condition"]) == cell_of(config, "debug")
    assert facts["tokens"] == 204_800

    # Back to a checkpoint that training starts from.
    again = tmp_path / "again/step-0"
    run(output, again, "--to-checkpoint")
    assert f"--checkpoint.initial_load_path {again}" in capsys.readouterr().out
    config, record = checkpoints.read_run_record(again)
    assert config == model.config
    assert record["step"] == 0
    assert record["run"]["started_from"]["step"] == 100
    assert_same_tensors(checkpoint_tensors(again), model.state_dict())


def test_uptraining(tmp_path, tokenizer, refused):
    """A hybrid from a softmax model has its softmax layer and projections. The rest is drawn as in a run."""
    pytest.importorskip("torchtitan", reason="the extra `train` is not installed")
    model = small_model("softmax", rope_theta=10_000.0, norm_eps=1e-5)  # those of every run
    softmax = tmp_path / "softmax"
    start = tmp_path / "start"
    run(write_checkpoint(tmp_path / "run", model, tokenizer), softmax)
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
[debug]
seed = 7
"""
    file = tmp_path / "hybrid.toml"
    file.write_text(settings)
    run(softmax, start, "--to-checkpoint", "--uptrain", file)
    config, _ = checkpoints.read_run_record(start)
    assert [mixer.kind for mixer in config.mixers] == ["interdomain", "softmax"]
    drawn = Transformer(config)
    drawn.init_weights(7)
    expected = {**drawn.state_dict(), **model.state_dict()}
    assert_same_tensors(checkpoint_tensors(start), expected)
    file.write_text(settings.replace("n_heads = 4", "n_heads = 2"))
    refused(softmax, "n_heads 4 in the folder, 2 in", "--to-checkpoint", "--uptrain", file)


CORPORA = """
[web]
name = "web"
share = "3/4"
tokens = 9000
sources = ["a/b (Hugging Face hub)"]
datasets = ["a/b"]
[code]
name = "code"
share = "1/4"
tokens = 800
sources = ["a|b.txt (0.1 MB)"]
datasets = []
"""


def test_the_card_says_what_the_run_recorded(checkpoint, output):
    validation = '{"step": 100, "loss": 3.0, "perplexity": 20.25}'
    (checkpoint / checkpoints.VALIDATION).write_text(validation)
    web, code = tomllib.loads(CORPORA).values()
    edit_run(checkpoint, earlier_data=[{"ends": 60, "corpora": [web]}], corpora=[web, code])
    training = {"dataset_path": "mine", "steps": 400, "tokens": None}
    edit_run(checkpoint, "configuration", optimizer={"lr": 3e-3}, training=training)
    run(checkpoint, output, "--license", "cc-by-4.0")
    hub = pytest.importorskip("huggingface_hub")
    card = hub.ModelCard.load(output / "README.md")
    assert card.data.license == "cc-by-4.0"
    assert card.data.datasets == ["a/b"]
    settings = tomllib.loads(re.search(r"```toml\n(.*?)```", card.content, re.DOTALL)[1])
    assert settings["mixer"]["n_basis"] == 6
    assert settings["optimizer"] == {"lr": 3e-3}
    assert settings["training"] == {"steps": 400}
    for row in (
        "| web | 0 | 3/4 | 9,000 | a/b (Hugging Face hub) |",
        "| code | 60 | 1/4 | 800 | a\\|b.txt (0.1 MB) |",
        "| step | 100 of 400 |",
        "| validation perplexity | 20.250 |",
    ):
        assert row + "\n" in card.content


def test_documents_as_they_were_in_training(tmp_path, checkpoint, tokenizer, capsys):
    """An exported model, a checkpoint made of it and a checkpoint of Megatron-Core record how documents begin and end."""
    documents = {"begin": [1], "end": [2]}
    edit_run(checkpoint, documents=documents)
    folder = tmp_path / "folder"
    run(checkpoint, folder)
    run(folder, tmp_path / "start", "--to-checkpoint")
    run(tmp_path / "start", tmp_path / "again")
    run(folder, tmp_path / "megatron", "--to-megatron")
    run(tmp_path / "megatron", tmp_path / "back", "--tokenizer", tokenizer.path)
    assert_same_tensors(exported_tensors(tmp_path / "back"), small_model().state_dict())
    for exported in (folder, tmp_path / "again", tmp_path / "back"):
        assert read_config(exported)[1]["facts"]["run"]["documents"] == documents
    settings = json.loads((folder / "generation_config.json").read_text())
    assert (settings["bos_token_id"], settings["eos_token_id"]) == (1, 2)
    # A checkpoint from before this was recorded
    edit_run(checkpoint, documents=None)
    run(checkpoint, tmp_path / "older")
    assert "does not record how documents began" in capsys.readouterr().err


def test_storage_dtypes_spare_the_ssm_parameters(tmp_path, tokenizer, output):
    """tests/hf/test_folder.py has every dtype."""
    model = small_model()
    run(write_checkpoint(tmp_path / "run", model, tokenizer), output, "--dtype", "bfloat16")
    rounded = model.state_dict()
    for name, tensor in rounded.items():
        if ".ssm." not in name:
            rounded[name] = tensor.bfloat16()
    assert_same_tensors(exported_tensors(output), rounded)
    assert read_config(output)[1]["dtype"] == "bfloat16"
    # Training starts in float32 again, from the rounded values.
    run(output, tmp_path / "again", "--to-checkpoint")
    expected = {name: tensor.float() for name, tensor in rounded.items()}
    assert_same_tensors(checkpoint_tensors(tmp_path / "again"), expected)


# Damaged checkpoints

SHARD = "__0_0.distcp"


def remove_record(checkpoint):
    (checkpoint / "interdomain.json").unlink()


def another_size(checkpoint):
    edit_run(checkpoint, "model", vocab_size=421)


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
        (another_size, "do not fit the configuration"),
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
    words = "A checkpoint to train from is float32"
    refused(folder, words, "--to-checkpoint", "--dtype", "float32")
    flip_a_bit(folder / "model.safetensors")
    refused(folder, "model.safetensors is not as it was written", "--to-checkpoint")
    refused(checkpoint, "is not a model folder", "--to-checkpoint")  # the wrong way round


def test_a_full_disk_leaves_nothing(checkpoint, output, refused):
    """A file that grows beyond a limit fails with EFBIG (Python ignores SIGXFSZ). The weights need more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        refused(checkpoint, "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run(checkpoint, output)


# A checkpoint of Megatron-Core. Those that Megatron wrote are in tests/megatron.


def megatron_checkpoint(folder, backbone=megatron.BACKBONE, sha256=None):
    """Writes a checkpoint whose layers record these settings and the checksum of the corpus's tokenizer."""
    model = small_model()
    with mock.patch.object(megatron, "BACKBONE", backbone):
        megatron.write_checkpoint(folder, model.config, model.state_dict(), sha256)


GELU = megatron.BACKBONE | {"activation_func": "quick_gelu"}
NEWER = megatron.BACKBONE | {"a setting of a newer version": True}
OLDER = {}


@pytest.mark.parametrize(
    ("backbone", "sha256", "words"),
    [
        (GELU, None, "activation_func = 'quick_gelu'. An exported model cannot have that"),
        (NEWER, None, "a setting of a newer version = True"),
        (OLDER, None, "activation_func = 'not recorded'"),
        (megatron.BACKBONE, "0123456789abcdef" * 4, "is not the tokenizer of the run's corpus"),
    ],
)
def test_a_checkpoint_of_megatron_that_no_exported_model_can_have_is_refused(
    tmp_path, tokenizer, refused, backbone, sha256, words
):
    megatron_checkpoint(tmp_path / "run", backbone, sha256)
    refused(tmp_path / "run", words, "--tokenizer", tokenizer.path)


def test_a_tensor_of_megatron_that_no_exported_model_has_is_refused(tmp_path, tokenizer, refused):
    megatron_checkpoint(tmp_path)
    tensors = checkpoint_tensors(tmp_path / "release")
    name = "decoder.layers.mlp.linear_fc1.bias"
    tensors[name] = torch.zeros(3)
    write_tensors(tmp_path / "release", tensors)
    refused(tmp_path, f"no place, such as {name}.", "--tokenizer", tokenizer.path)
