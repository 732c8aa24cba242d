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
from interdomain.data import load_tokenizer
from interdomain.files import pretrained
from interdomain.files.checkpoint_index import read_tensors, tensor_index
from interdomain.model import SIZES, Transformer, build_config, count_parameters, meta_model
from interdomain.model.flops import train_flops_per_token
from interdomain.titan import spec
from interdomain.titan.data.torchtitan_text import loader_documents
from interdomain.tools import convert

from ..common import REPOSITORY
from .runs import (
    COMPILED,
    FOUR,
    FULL,
    GRADIENTS,
    HYBRID,
    INTERLEAVED,
    SAVED,
    TINY,
    VALIDATED,
    assert_same_run,
    parallel,
    steps,
)

pytestmark = pytest.mark.e2e

TOLERANCE = 1e-6  # float32 sums in another order; the largest difference seen is 3e-7
BATCH = {"training__local_batch_size": 8, "training__global_batch_size": -1}
MICRO = BATCH | {"parallelism__pipeline_parallel_microbatch_size": 2}
WINDOWS = VALIDATED | {"validation__local_batch_size": 4, "validation__tokens": 1024}
WHOLE, IN_HF = {"checkpoint__last_save_model_only": False}, {"checkpoint__last_save_in_hf": True}
TOKENS = {"training__tokens": 51_200, "lr_scheduler__warmup_tokens": 5_120}  # of a file
STEPS = {"training__steps": 3, "lr_scheduler__warmup_steps": 2}  # win over them
AXES = {  # runs of TorchTitan's trainer: their settings, and ours that do the same
    "2 stock shards": (WINDOWS | SAVED | WHOLE, "2 text"),
    "2 stock accumulated": ({"training__local_batch_size": 2} | FULL, "2 text"),
    "2 stock replicas": (parallel(replicas=2) | SAVED | IN_HF, "2 text"),
    "2 stock context": (parallel(context=2) | WINDOWS, "2 text"),
    "2 stock tensor": (parallel(tensor=2) | HYBRID, "1 layers"),
    "2 stock pipeline": (parallel(pipeline=2) | INTERLEAVED | MICRO | FOUR, "1 four"),
    "2 stock compiled": (COMPILED, "2 text"),
}


@pytest.fixture(scope="module")
def stock(runs):
    """The same runs, and those under TorchTitan's trainer."""
    runs.add("1 four", **FOUR | STEPS | GRADIENTS)
    tokens = toml_of(runs.folder / "tokens.toml", **TOKENS)
    for name, (settings, _) in AXES.items():
        runs.add(name, toml=tokens, **STEPS | GRADIENTS | settings, stock=True)
    runs.add("2 from stock", of=("2 stock shards", 3), **SAVED, training__steps=4)
    runs.add("2 stock again", of=("2 from stock", 4), **SAVED | WHOLE, stock=True)
    start = SAVED | steps(1)
    runs.add("1 from weights", **start, checkpoint__initial_load_path=runs.folder / "2 text" / "checkpoint" / "step-6")
    folder = {"checkpoint__initial_load_path": runs.folder / "exported", "checkpoint__initial_load_in_hf": True}
    runs.add("1 stock from weights", **start, **folder, stock=True)
    return runs


@pytest.mark.parametrize("name", AXES)
def test_every_axis_trains_as_under_our_trainer(stock, name):
    assert_same_run(stock, name, AXES[name][1], TOLERANCE)


def test_the_page_has_the_losses_of_every_trainer(stock):
    """docs/torchtitan.md has the first steps of a run on made-up words, which are the same on every machine."""
    page = (REPOSITORY / "docs" / "torchtitan.md").read_text()
    rows = re.findall(r"^\| (\d) \| (\d\.\d{5}) \| (\d\.\d{4}) \|$", page, re.MULTILINE)
    expected = {int(step): [float(loss), float(norm)] for step, loss, norm in rows}
    for name in ("1 layers", "2 stock tensor"):
        log = stock.seen(name)["log"]
        here = {step: [log[step]["loss"], log[step]["grad_norm"]] for step in (1, 2, 3)}
        for step, (loss, norm) in here.items():
            print(f"| {step} | {loss:.5f} | {norm:.4f} |")  # the page's rows
        assert [*here] == [*expected]
        for step, figures in here.items():
            assert figures == pytest.approx(expected[step], rel=2e-4)  # another processor draws other last bits


def test_learning_rates_and_the_mixers_timescales_are_logged(stock):
    log, ours = (stock.seen(name)["log"] for name in ("2 stock shards", "2 text"))
    assert log[2]["mixer/layer_00/timescale_tokens_max"] > 1
    assert [log[step]["lr"] for step in log] == pytest.approx([ours[step]["lr/main"] for step in log])


def test_a_run_goes_from_one_trainer_to_the_other_and_back(stock, tmp_path):
    for name, expected in (("2 from stock", [4]), ("2 stock again", [5, 6])):
        assert list(stock.seen(name)["log"]) == expected  # the length of the schedule is total_steps in all
        assert_same_run(stock, name, "2 text", TOLERANCE)
    assert convert.main([str(stock.checkpoint("2 stock again", 6)), "--output", str(tmp_path / "folder")]) == 0
    facts = json.loads((tmp_path / "folder" / "config.json").read_text())["facts"]
    assert (facts["step"], facts["tokens"]) == (6, 6 * 512)
    (corpus,) = facts["run"]["corpora"]
    assert (corpus["name"], corpus["share"]) == ("tiny", "1")
    assert corpus["sources"][1:] == ["of these the first 400,000 bytes"]


def test_weights_go_to_and_from_an_exported_folder(stock):
    saved = load_file(stock.checkpoint("2 stock replicas", 3) / "model-00001-of-00001.safetensors")
    assert convert.main([str(stock.at("2 text")), "--output", str(stock.folder / "exported")]) == 0
    weights = load_file(stock.folder / "exported" / pretrained.WEIGHTS)
    assert {name: x.shape for name, x in saved.items()} == {name: x.shape for name, x in weights.items()}
    ours, there = (stock.seen(name)["log"] for name in ("1 from weights", "1 stock from weights"))
    assert there[1]["loss"] == ours[1]["loss"] < stock.seen("2 text")["log"][6]["loss"] + 0.5
    assert (list(ours), ours[1]["n_tokens_seen"]) == ([1], 512)


def test_the_steps_of_torchtitans_conversion_scripts(stock, tmp_path):
    """scripts/checkpoint_conversion, which no wheel has, there and back: the weights of `convert`."""
    train_spec, saved = interdomain.titan.get_train_spec(), stock.checkpoint("2 stock shards", 3)
    args = train_spec.model_args["tiny"] = spec.ModelArgs(config=build_config("debug", vocab_size=512, n_layers=2))

    def state():
        return ModelWrapper(train_spec.model_cls(args))._get_state_dict()

    adapter, trained = train_spec.state_dict_adapter(args, None), state()
    dcp.load(trained, checkpoint_id=saved)
    writer = HuggingFaceStorageWriter(path=tmp_path / "hf", save_distributed=True, enable_consolidation=True)
    dcp.save(adapter.to_hf(trained), storage_writer=writer)
    assert convert.main([str(saved), "--output", str(tmp_path / "exported")]) == 0
    weights = load_file(tmp_path / "hf" / "model-00001-of-00001.safetensors")
    exported = load_file(tmp_path / "exported" / pretrained.WEIGHTS)
    assert weights.keys() == exported.keys()
    assert all(torch.equal(weights[name], exported[name]) for name in exported)

    read = adapter.to_hf(state())
    dcp.load(read, storage_reader=HuggingFaceStorageReader(path=tmp_path / "exported"))
    dcp.save(adapter.from_hf(read), checkpoint_id=tmp_path / "dcp")
    again = read_tensors(tmp_path / "dcp", list(tensor_index(tmp_path / "dcp")))
    assert again.keys() == trained.keys()
    assert all(torch.equal(again[name], trained[name]) for name in trained)


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
        assert (args.dim, args.n_layers, args.vocab_size) == (config.dim, config.n_layers, config.vocab_size)
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
    (folder / "data" / "text.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"]))
    (folder / "assets").mkdir()
    tokenizer.save(str(folder / "assets" / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "assets" / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.get_vocab_size()


def test_torchtitans_own_data_and_tokenizer(tmp_path, runs):
    words = own_data(tmp_path)
    given = {"training__dataset_path": tmp_path / "data", "model__hf_assets_path": tmp_path / "assets"}
    runs.add("1 stock data", data="", **given, **SAVED, checkpoint__interval=6, stock=True)
    log = runs.seen("1 stock data")["log"]
    assert log[6]["loss"] < log[1]["loss"] - 0.5
    assert convert.main([str(runs.at("1 stock data")), "--output", str(tmp_path / "folder")]) == 0
    # The loader writes BOS, a text, EOS: a text begins with BOS.
    _, record = pretrained.read_config(tmp_path / "folder")
    assert record["facts"]["run"]["documents"] == {"begin": [words], "end": [words + 1]}
    settings = json.loads((tmp_path / "folder" / "generation_config.json").read_text())
    assert (settings["bos_token_id"], settings["eos_token_id"]) == (words, words + 1)
    kept = load_tokenizer(tmp_path / "folder")
    assert (kept.bos_id, kept.eos_id, kept.vocab_size) == (words, words + 1, words + 2)
    card = (tmp_path / "folder" / "README.md").read_text()
    assert "| data (fingerprint) | c4_test (no fingerprint) |" in card
    assert "| c4_test | 0 | 1 | not recorded | texts of a folder, read as TorchTitan's data set c4_test |" in card


@pytest.mark.parametrize(
    ("config", "template", "documents"),
    [
        ({"bos_token": "<s>", "eos_token": "</s>"}, None, (["<s>"], ["</s>"])),
        ({"bos_token": "<s>", "eos_token": "</s>"}, "<s> $A", (["<s>"], ["</s>"])),
        ({"bos_token": "<s>", "eos_token": "<s>"}, None, (["<s>"], [])),  # TorchTitan then knows no EOS
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
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)
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
    lines = [
        f"[{section}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in t.items()) for section, t in table.items()
    ]
    path.write_text("\n".join(lines))
    return path
