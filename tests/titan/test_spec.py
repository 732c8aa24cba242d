"""The registered variant under TorchTitan's own trainer: the same run as under ours, on every axis, and one set of files."""

import dataclasses
import json
import re
import tomllib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.components.tokenizer import HuggingFaceTokenizer

import interdomain.titan
from interdomain.checkpoint import pretrained
from interdomain.checkpoint.index import read_tensors, tensor_index
from interdomain.data import load_tokenizer
from interdomain.model import SIZES, Transformer, build_config, count_parameters, meta_model
from interdomain.model.flops import train_flops_per_token
from interdomain.titan import spec
from interdomain.titan.data.torchtitan_text import loader_documents
from interdomain.tools import convert

from ..common import REPOSITORY
from .runs import TINY, assert_same_run, read_runs

pytestmark = pytest.mark.e2e

STOCK = read_runs("titan_0_2")
TOKENS = {
    "training__tokens": 51_200,
    "lr_scheduler__warmup_tokens": 5_120,
}  # of a file; flags of steps win over them


@pytest.fixture(scope="module")
def stock(runs):
    """The same runs, and those under TorchTitan's trainer."""
    tokens = toml_of(runs.folder / "tokens.toml", **TOKENS)
    for name, given in STOCK.items():
        runs.add(name, toml=tokens if given.get("stock") else TINY, **given)
    one_step = {"checkpoint__enable": True, "training__steps": 1}
    trained = runs.folder / "2 text" / "checkpoint" / "step-6"
    runs.add("1 from weights", **one_step, checkpoint__initial_load_path=trained)
    exported = {
        "checkpoint__initial_load_path": runs.folder / "exported",
        "checkpoint__initial_load_in_hf": True,
    }
    runs.add("1 stock from weights", **one_step, **exported, stock=True)
    return runs


@pytest.mark.parametrize("name", STOCK)
def test_every_axis_trains_as_under_our_trainer(stock, name):
    """A run goes from one trainer to the other and back: the length of the schedule is total_steps in all."""
    assert_same_run(stock, name)


@pytest.mark.parametrize("name", ["1 layers", "2 stock tensor"])
def test_the_page_has_the_losses_of_every_trainer(stock, name):
    """docs/torchtitan.md has the first steps of a run on made-up words, which are the same on every machine."""
    page = (REPOSITORY / "docs" / "torchtitan.md").read_text()
    rows = re.findall(r"^\| (\d) \| (\d\.\d{5}) \| (\d\.\d{4}) \|$", page, re.MULTILINE)
    assert [int(step) for step, _, _ in rows] == [1, 2, 3]
    for step, loss, norm in rows:
        log = stock.seen(name)["log"][int(step)]
        print(f"| {step} | {log['loss']:.5f} | {log['grad_norm']:.4f} |")  # the page's row
        # Another processor draws other last bits.
        assert log["loss"] == pytest.approx(float(loss), rel=2e-4)
        assert log["grad_norm"] == pytest.approx(float(norm), rel=2e-4)


def test_learning_rates_and_the_mixers_timescales_are_logged(stock):
    log, ours = (stock.seen(name)["log"] for name in ("2 stock shards", "2 text"))
    assert log[2]["mixer/layer_00/timescale_tokens_max"] > 1
    for step in log:
        assert log[step]["lr"] == pytest.approx(ours[step]["lr/main"])


def exported(checkpoint, folder):
    """A checkpoint as `convert` writes it."""
    assert convert.main([str(checkpoint), "--output", str(folder)]) == 0
    return folder


def test_an_exported_model_says_what_it_was_trained_on(stock, tmp_path):
    """Its last steps were TorchTitan's trainer's, those before ours."""
    folder = exported(stock.checkpoint("2 stock again", 6), tmp_path / "folder")
    facts = json.loads((folder / "config.json").read_text())["facts"]
    assert (facts["step"], facts["tokens"]) == (6, 6 * 512)
    (corpus,) = facts["run"]["corpora"]
    assert (corpus["name"], corpus["share"]) == ("tiny", "1")
    assert corpus["sources"][1:] == ["of these the first 400,000 bytes"]


def test_weights_go_to_and_from_an_exported_folder(stock):
    saved = load_file(stock.checkpoint("2 stock replicas", 3) / "model-00001-of-00001.safetensors")
    weights = load_file(
        exported(stock.at("2 text"), stock.folder / "exported") / pretrained.WEIGHTS
    )
    assert {name: x.shape for name, x in saved.items()} == {
        name: x.shape for name, x in weights.items()
    }
    ours, there = (stock.seen(name)["log"] for name in ("1 from weights", "1 stock from weights"))
    assert there[1]["loss"] == ours[1]["loss"] < stock.seen("2 text")["log"][6]["loss"] + 0.5
    assert (list(ours), ours[1]["n_tokens_seen"]) == ([1], 512)


def assert_equal(tensors, expected):
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_the_steps_of_torchtitans_conversion_scripts(stock, tmp_path):
    """scripts/checkpoint_conversion, which no wheel has, there and back: the weights of `convert`."""
    train_spec = interdomain.titan.get_train_spec()
    saved = stock.checkpoint("2 stock shards", 3)
    args = spec.ModelArgs(config=build_config("debug", vocab_size=512, n_layers=2))
    adapter = train_spec.state_dict_adapter(args, None)
    trained = ModelWrapper(train_spec.model_cls(args))._get_state_dict()
    dcp.load(trained, checkpoint_id=saved)
    writer = HuggingFaceStorageWriter(
        path=tmp_path / "hf", save_distributed=True, enable_consolidation=True
    )
    dcp.save(adapter.to_hf(trained), storage_writer=writer)
    folder = exported(saved, tmp_path / "exported")
    weights = load_file(tmp_path / "hf" / "model-00001-of-00001.safetensors")
    assert_equal(weights, load_file(folder / pretrained.WEIGHTS))

    read = adapter.to_hf(ModelWrapper(train_spec.model_cls(args))._get_state_dict())
    dcp.load(read, storage_reader=HuggingFaceStorageReader(path=folder))
    dcp.save(adapter.from_hf(read), checkpoint_id=tmp_path / "dcp")
    assert_equal(read_tensors(tmp_path / "dcp", list(tensor_index(tmp_path / "dcp"))), trained)


def test_every_flavor_is_a_model():
    """As TorchTitan's scripts take it, before there is a job configuration."""
    train_spec = interdomain.titan.get_train_spec()
    assert {*train_spec.model_args} == {*SIZES, "debugmodel"}
    for flavor, args in train_spec.model_args.items():
        with torch.device("meta"):
            model = train_spec.model_cls(args)
        config = build_config("debug" if flavor == "debugmodel" else flavor)
        expected = count_parameters(meta_model(config)), train_flops_per_token(config, 256)
        assert args.get_nparams_and_flops(model, 256) == expected
        assert (args.dim, args.n_layers, args.vocab_size) == (
            config.dim,
            config.n_layers,
            config.vocab_size,
        )
        assert json.loads(json.dumps(dataclasses.asdict(args)))["config"]["dim"] == config.dim


def test_a_flavor_computes_on_one_device():
    """In a notebook: no process group, no parallelism; the initial values are a run's."""
    train_spec = interdomain.titan.get_train_spec()
    with torch.device("meta"):
        model = train_spec.model_cls(train_spec.model_args["debugmodel"])
    model.to_empty(device="cpu")
    model.init_weights()
    ours = Transformer(build_config("debug"))
    ours.init_weights(42)
    tokens = torch.arange(24).reshape(2, 12)
    assert torch.equal(model(tokens), ours(tokens))


def own_data(folder):
    """Make data and assets of TorchTitan's own kind. Returns the number of tokens, to which TorchTitan adds <s> and </s>."""
    texts = [f"the cat number {n} sat on mat {n % 7}, and it was glad" for n in range(400)]
    (folder / "data").mkdir()
    (folder / "data" / "text.json").write_text(
        "\n".join(json.dumps({"text": text}) for text in texts)
    )
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"])
    )
    (folder / "assets").mkdir()
    tokenizer.save(str(folder / "assets" / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "assets" / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.get_vocab_size()


def test_torchtitans_own_data_and_tokenizer(tmp_path, runs):
    words = own_data(tmp_path)
    given = {
        "training__dataset_path": tmp_path / "data",
        "model__hf_assets_path": tmp_path / "assets",
    }
    runs.add(
        "1 stock data",
        corpus="",
        **given,
        checkpoint__enable=True,
        checkpoint__interval=6,
        stock=True,
    )
    log = runs.seen("1 stock data")["log"]
    assert log[6]["loss"] < log[1]["loss"] - 0.5
    folder = exported(runs.at("1 stock data"), tmp_path / "folder")
    # The loader writes BOS, a text, EOS: a text begins with BOS.
    _, record = pretrained.read_config(folder)
    assert record["facts"]["run"]["documents"] == {"begin": [words], "end": [words + 1]}
    settings = json.loads((folder / "generation_config.json").read_text())
    assert (settings["bos_token_id"], settings["eos_token_id"]) == (words, words + 1)
    kept = load_tokenizer(folder)
    assert (kept.bos_id, kept.eos_id, kept.vocab_size) == (words, words + 1, words + 2)
    assert "| c4_test | 0 | 1 | not recorded |" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("config", "template", "documents"),
    [
        ({"bos_token": "<s>", "eos_token": "</s>"}, None, (["<s>"], ["</s>"])),
        ({"bos_token": "<s>", "eos_token": "</s>"}, "<s> $A", (["<s>"], ["</s>"])),
        (
            {"bos_token": "<s>", "eos_token": "<s>"},
            None,
            (["<s>"], []),
        ),  # TorchTitan then knows no EOS
        ({"eos_token": "</s>"}, None, ([], ["</s>"])),
        ({}, "<s> $A </s>", (["<s>"], ["</s>"])),
        (None, None, ([], [])),
    ],
)
def test_documents_of_torchtitans_loader(tmp_path, config, template, documents):
    """As its data set has them, for a vocabulary of words that lacks most texts."""
    vocabulary = {"</s>": 0, "<s>": 1, "cat": 2, "dog": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if template:
        specials = [("<s>", 1), ("</s>", 0)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=specials
        )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = HuggingFaceTokenizer(str(tmp_path))
    begin, end = ([vocabulary[token] for token in tokens] for tokens in documents)
    assert theirs.encode("cat dog", add_bos=True, add_eos=True) == [*begin, 2, 3, *end]
    found = loader_documents(theirs)
    assert found.to_dict() == {"begin": begin, "end": end}
    assert found.start == (begin or end)
    assert found.stop == next(iter(end or begin), None)


def toml_of(path, **settings):
    """tiny.toml with these settings, for an entry that has other flags."""
    table = tomllib.loads(TINY.read_text())
    for name, value in settings.items():
        section, _, field = name.partition("__")
        table.setdefault(section, {})[field] = value
    lines = []
    for section, fields in table.items():
        lines.append(f"[{section}]")
        lines += [f"{field} = {json.dumps(value)}" for field, value in fields.items()]
    path.write_text("\n".join(lines))
    return path
