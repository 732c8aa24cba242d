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
from interdomain.data import load_tokenizer
from interdomain.model import SIZES, Transformer, build_config, count_parameters, meta_model
from interdomain.model.flops import train_flops_per_token
from interdomain.titan import spec
from interdomain.titan.data.torchtitan_text import loader_documents
from interdomain.tools import convert

from ..common import REPOSITORY
from .runs import TINY, assert_same_run, read_runs, tensors_of

pytestmark = pytest.mark.e2e

STOCK = read_runs("titan_0_2")
# Settings of a file. Flags that count in steps stand over them.
TOKENS = {"training__tokens": 51_200, "lr_scheduler__warmup_tokens": 5_120}


def toml_of(path, **settings):
    """Writes tiny.toml with these settings, for an entry that has other flags."""
    table = tomllib.loads(TINY.read_text())
    for name, value in settings.items():
        section, _, field = name.partition("__")
        table.setdefault(section, {})[field] = value
    with open(path, "w") as file:
        for section, fields in table.items():
            print(f"[{section}]", file=file)
            for field, value in fields.items():
                print(f"{field} = {json.dumps(value)}", file=file)
    return path


@pytest.fixture(scope="module")
def stock(runs):
    """The runs of this folder, and those under TorchTitan's trainer."""
    tokens = toml_of(runs.folder / "tokens.toml", **TOKENS)
    for name, settings in STOCK.items():
        if settings.get("stock"):
            runs.add(name, toml=tokens, **settings)
        else:
            runs.add(name, **settings)
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
    assert len(rows) == 3
    log = stock.seen(name)["log"]
    for step, loss, norm in rows:
        # Another processor draws other last bits.
        scalars = log[int(step)]
        assert scalars["loss"] == pytest.approx(float(loss), rel=2e-4)
        assert scalars["grad_norm"] == pytest.approx(float(norm), rel=2e-4)


def test_learning_rates_and_the_mixers_timescales_are_logged(stock):
    log = stock.seen("2 stock shards")["log"]
    assert log[2]["mixer/layer_00/timescale_tokens_max"] > 1
    ours = stock.seen("2 text")["log"]
    for step, scalars in log.items():
        assert scalars["lr"] == pytest.approx(ours[step]["lr/main"])


def export(checkpoint, folder):
    """Converts a checkpoint to an exported model, and returns its folder."""
    assert convert.main([str(checkpoint), "--output", str(folder)]) == 0
    return folder


def test_both_trainers_start_from_exported_weights(stock):
    """Ours reads a checkpoint, and TorchTitan's the exported model of that checkpoint."""
    settings = {"checkpoint__enable": True, "training__steps": 1}
    settings["checkpoint__initial_load_path"] = stock.checkpoint("2 text", 6)
    stock.add("1 from weights", **settings)
    exported = export(stock.at("2 text"), stock.folder / "exported")
    settings["checkpoint__initial_load_path"] = exported
    stock.add("1 stock from weights", stock=True, checkpoint__initial_load_in_hf=True, **settings)
    log = stock.seen("1 from weights")["log"]
    loss = stock.seen("1 stock from weights")["log"][1]["loss"]
    assert list(log) == [1]
    assert log[1]["n_tokens_seen"] == 512
    assert loss == log[1]["loss"] < stock.seen("2 text")["log"][6]["loss"] + 0.5

    # TorchTitan's trainer saves under the names of an exported model.
    saved = load_file(stock.checkpoint("2 stock replicas", 3) / "model-00001-of-00001.safetensors")
    weights = load_file(exported / pretrained.WEIGHTS)
    assert saved.keys() == weights.keys()


def test_the_steps_of_torchtitans_conversion_scripts(stock, tmp_path):
    """They are the scripts in scripts/checkpoint_conversion, which no wheel has. They give the weights of `convert`."""
    train_spec = interdomain.titan.get_train_spec()
    args = spec.ModelArgs(config=build_config("debug", vocab_size=512, n_layers=2))
    adapter = train_spec.state_dict_adapter(args, None)
    checkpoint = stock.checkpoint("2 stock shards", 3)
    exported = export(checkpoint, tmp_path / "exported")

    # From a checkpoint to an exported model.
    trained = ModelWrapper(train_spec.model_cls(args))._get_state_dict()
    dcp.load(trained, checkpoint_id=checkpoint)
    writer = HuggingFaceStorageWriter(
        path=tmp_path / "hf", save_distributed=True, enable_consolidation=True
    )
    dcp.save(adapter.to_hf(trained), storage_writer=writer)
    written = load_file(tmp_path / "hf" / "model-00001-of-00001.safetensors")
    torch.testing.assert_close(written, load_file(exported / pretrained.WEIGHTS), rtol=0, atol=0)

    # From an exported model to a checkpoint.
    read = adapter.to_hf(ModelWrapper(train_spec.model_cls(args))._get_state_dict())
    dcp.load(read, storage_reader=HuggingFaceStorageReader(path=exported))
    dcp.save(adapter.from_hf(read), checkpoint_id=tmp_path / "dcp")
    torch.testing.assert_close(tensors_of(tmp_path / "dcp"), trained, rtol=0, atol=0)


@pytest.mark.parametrize("flavor", [*SIZES, "debugmodel"])
def test_every_flavor_is_a_model(flavor):
    """TorchTitan's scripts take a flavor before there is a job configuration."""
    train_spec = interdomain.titan.get_train_spec()
    args = train_spec.model_args[flavor]
    config = build_config(flavor.removesuffix("model"))
    parameters = count_parameters(meta_model(config))
    flops = train_flops_per_token(config, 256)
    assert args.get_nparams_and_flops(meta_model(config), 256) == (parameters, flops)
    json.dumps(dataclasses.asdict(args))


def test_a_flavor_computes_on_one_device():
    """A notebook has no process group. The initial values are those of a run."""
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
    """Makes data and assets of TorchTitan's own kind. Returns the number of tokens, to which TorchTitan adds <s> and </s>."""
    texts = [f"the cat number {n} sat on mat {n % 7}, and it was glad" for n in range(400)]
    (folder / "data").mkdir()
    with open(folder / "data" / "text.json", "w") as file:
        for text in texts:
            print(json.dumps({"text": text}), file=file)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"])
    tokenizer.train_from_iterator(texts, trainer)
    (folder / "assets").mkdir()
    tokenizer.save(str(folder / "assets" / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "assets" / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.get_vocab_size()


def test_torchtitans_own_data_and_tokenizer(tmp_path, runs):
    bos = own_data(tmp_path)
    eos = bos + 1
    runs.add(
        "1 stock data",
        stock=True,
        corpus="",
        training__dataset_path=tmp_path / "data",
        model__hf_assets_path=tmp_path / "assets",
        checkpoint__enable=True,
        checkpoint__interval=6,
    )
    log = runs.seen("1 stock data")["log"]
    assert log[6]["loss"] < log[1]["loss"] - 0.5

    # The loader writes BOS, a text, EOS: a text begins with BOS.
    folder = export(runs.at("1 stock data"), tmp_path / "folder")
    facts = pretrained.read_config(folder)[1]["facts"]
    assert facts["run"]["documents"] == {"begin": [bos], "end": [eos]}
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["bos_token_id"] == bos
    assert settings["eos_token_id"] == eos
    assert load_tokenizer(folder).vocab_size == eos + 1
    assert "| c4_test | 0 | 1 | not recorded |" in (folder / "README.md").read_text()


BOTH = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("config", "template", "begin", "end"),
    [
        (BOTH, None, ["<s>"], ["</s>"]),
        # TorchTitan knows no EOS if it is the same token as BOS.
        ({"bos_token": "<s>", "eos_token": "<s>"}, None, ["<s>"], []),
        ({"eos_token": "</s>"}, None, [], ["</s>"]),
        ({}, "<s> $A </s>", ["<s>"], ["</s>"]),
    ],
)
def test_documents_of_torchtitans_loader(tmp_path, config, template, begin, end):
    """They begin and end as TorchTitan's tokenizer writes a text."""
    vocabulary = {"</s>": 0, "<s>": 1, "cat": 2, "dog": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 1), ("</s>", 0)]
        )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    theirs = HuggingFaceTokenizer(str(tmp_path))
    documents = loader_documents(theirs)
    text = theirs.encode("cat dog", add_bos=True, add_eos=True)
    assert text == [*documents.begin, 2, 3, *documents.end]
    assert list(documents.begin) == [vocabulary[token] for token in begin]
    assert list(documents.end) == [vocabulary[token] for token in end]
    assert documents.start == [vocabulary[token] for token in begin or end]
