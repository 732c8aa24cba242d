"""The registered variant under TorchTitan's own trainer: the same run as under ours, on every axis, and one set of files."""

import json
import re
import tomllib

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from interdomain.checkpoint import pretrained
from interdomain.data import load_tokenizer
from interdomain.titan.data.torchtitan_text import loader_documents
from interdomain.tools import convert

from ..common import REPOSITORY, write_rows
from .runs import TINY, assert_close, assert_same_run, read_runs, settings_of

pytestmark = pytest.mark.e2e

STOCK = read_runs("titan_0_2")
# Settings of a file. Flags that count in steps stand over them.
TOKENS = {"training__tokens": 51_200, "lr_scheduler__warmup_tokens": 5_120}


def toml_of(path, **settings):
    """Writes tiny.toml with these settings, for an entry that has other flags."""
    tiny = settings_of(tomllib.loads(TINY.read_text()), {})
    with open(path, "w") as file:
        for name, value in (tiny | settings).items():
            print(f"{name.replace('__', '.')} = {json.dumps(value)}", file=file)
    return path


@pytest.fixture(scope="module")
def stock(runs):
    """The runs of this folder, and those under TorchTitan's trainer."""
    tokens = toml_of(runs.folder / "tokens.toml", **TOKENS)
    for name, settings in STOCK.items():
        if settings.get("stock"):
            settings["toml"] = tokens
        runs.add(name, **settings)
    return runs


@pytest.mark.parametrize("name", STOCK)
def test_every_axis_trains_as_under_our_trainer(stock, name):
    """A run goes from one trainer to the other and back: the length of the schedule is total_steps in all."""
    assert_same_run(stock, name)


def test_the_page_has_the_losses_of_a_run(runs):
    """docs/torchtitan.md has the first steps of a run on made-up words, which are the same on every machine."""
    page = (REPOSITORY / "docs/torchtitan.md").read_text()
    rows = re.findall(r"^\| (\d) \| (\d\.\d{5}) \| (\d\.\d{4}) \|$", page, re.MULTILINE)
    assert len(rows) == 3
    log = runs.log("1 layers")
    for step, loss, norm in rows:
        # Another processor draws other last bits.
        scalars = log[int(step)]
        assert scalars["loss"] == pytest.approx(float(loss), rel=2e-4)
        assert scalars["grad_norm"] == pytest.approx(float(norm), rel=2e-4)


def test_learning_rates_flops_and_the_mixers_timescales_are_logged(stock):
    log = stock.log("2 stock shards")
    assert log[2]["mixer/layer_00/timescale_tokens_max"] > 1
    ours = stock.log("2 text")
    for step, scalars in log.items():
        assert scalars["lr"] == pytest.approx(ours[step]["lr/main"])
        assert flops_per_token(scalars) == pytest.approx(flops_per_token(ours[step]))


def flops_per_token(scalars):
    return scalars["tflops"] / scalars["throughput(tps)"]


def export(checkpoint, folder):
    """Converts a checkpoint to an exported model, and returns its folder."""
    assert convert.main([str(checkpoint), "--output", str(folder)]) == 0
    return folder


def test_both_trainers_start_from_exported_weights(stock):
    """Ours reads a checkpoint, and TorchTitan's the exported model of that checkpoint."""
    settings = {"checkpoint__enable": True, "training__steps": 1}
    initial = "checkpoint__initial_load_path"
    stock.add("1 from weights", **settings, **{initial: stock.checkpoint("2 text", 6)})
    exported = export(stock.at("2 text"), stock.folder / "exported")
    settings |= {"stock": True, "checkpoint__initial_load_in_hf": True}
    stock.add("1 stock from weights", **settings, **{initial: exported})
    log = stock.log("1 from weights")
    loss = stock.log("1 stock from weights")[1]["loss"]
    assert log[1]["n_tokens_seen"] == 512
    assert loss == log[1]["loss"] < stock.log("2 text")[6]["loss"] + 0.5

    # TorchTitan's trainer saves the weights that `convert` makes of its checkpoint.
    saved = load_file(stock.checkpoint("2 stock replicas", 3) / "model-00001-of-00001.safetensors")
    shards = export(stock.checkpoint("2 stock shards", 3), stock.folder / "exported shards")
    assert_close(saved, load_file(shards / pretrained.WEIGHTS), 1e-4)


WORDS = ["<unk>", "the", "cat", "sat", "on", "mat", "and", "was", "glad", *"0123456"]
BOS = len(WORDS)
EOS = BOS + 1
BOTH = {"bos_token": "<s>", "eos_token": "</s>"}


def write_tokenizer(folder, config, special_tokens=(), template=None):
    """Writes a tokenizer of WORDS, and of special tokens after them, as TorchTitan reads it."""
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([*special_tokens])
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def own_data(folder):
    """Makes data and assets of TorchTitan's own kind. TorchTitan adds <s> and </s> to the tokenizer."""
    (folder / "data").mkdir()
    rows = []
    for n in range(400):
        rows.append({"text": f"the cat {n % 5} sat on mat {n % 7} and was glad"})
    write_rows(folder / "data" / "text.json", rows)
    write_tokenizer(folder / "assets", BOTH)


def test_torchtitans_own_data_and_tokenizer(tmp_path, runs):
    own_data(tmp_path)
    runs.add(
        "1 stock data",
        stock=True,
        corpus="",
        training__dataset_path=tmp_path / "data",
        model__hf_assets_path=tmp_path / "assets",
        checkpoint__enable=True,
        checkpoint__interval=6,
    )
    log = runs.log("1 stock data")
    assert log[6]["loss"] < log[1]["loss"] - 0.5

    # The loader writes BOS, a text, EOS: a text begins with BOS.
    folder = export(runs.at("1 stock data"), tmp_path / "folder")
    facts = pretrained.read_config(folder)[1]["facts"]
    assert facts["run"]["documents"] == {"begin": [BOS], "end": [EOS]}
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["bos_token_id"] == BOS
    assert settings["eos_token_id"] == EOS
    assert load_tokenizer(folder).vocab_size == EOS + 1
    assert "| c4_test | 0 | 1 | not recorded |" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("config", "template", "begin", "end"),
    [
        (BOTH, None, [BOS], [EOS]),
        # TorchTitan knows no EOS if it is the same token as BOS.
        ({"bos_token": "<s>", "eos_token": "<s>"}, None, [BOS], []),
        ({"eos_token": "</s>"}, None, [], [EOS]),
        ({}, "<s> $A </s>", [BOS], [EOS]),
    ],
)
def test_documents_of_torchtitans_loader(tmp_path, config, template, begin, end):
    """They begin and end as TorchTitan's tokenizer writes a text."""
    write_tokenizer(tmp_path / "assets", config, BOTH.values(), template)
    theirs = HuggingFaceTokenizer(str(tmp_path / "assets"))
    documents = loader_documents(theirs)
    text = theirs.encode("cat sat", add_bos=True, add_eos=True)
    assert text == [*begin, WORDS.index("cat"), WORDS.index("sat"), *end]
    assert list(documents.begin) == begin
    assert list(documents.end) == end
    assert documents.start == (begin or end)
