"""The registered variant under TorchTitan's own trainer: the same run as under ours, on every axis, and one set of files."""

import dataclasses
import functools
import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import ConfigManager

import interdomain.titan
from interdomain.data import load_tokenizer
from interdomain.files import pretrained
from interdomain.files.distributed_checkpoint import read_tensors, tensor_index
from interdomain.model import SIZES, Transformer, build_config, count_parameters, meta_model
from interdomain.model.costs.flops import train_flops_per_token
from interdomain.titan import spec, variant
from interdomain.titan.data.torchtitan_text import loader_documents
from interdomain.tools import convert

from ..common import REPOSITORY
from .conftest import refusal
from .runs import (
    COMPILED,
    CONTEXT,
    FOUR,
    FULL,
    GRADIENTS,
    HYBRID,
    INTERLEAVED,
    SAVED,
    TINY,
    VALIDATED,
    assert_same_run,
    flags,
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
    index = tensor_index(tmp_path / "dcp")
    again = read_tensors(tmp_path / "dcp", list(index), index)
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


def test_a_data_set_of_the_hub_is_named():
    training = stock_config(corpus="", training__dataset="c4").training
    assert spec.dataset_record(training)["datasets"] == ["allenai/c4"]
    training.dataset = "c4_test"
    assert spec.dataset_record(training)["datasets"] == []


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


def stock_config(corpus="corpus", **settings):
    """The settings as TorchTitan's own entry reads them."""
    arguments = [*flags(corpus, "folder", **settings), "--job.custom_config_module", "interdomain.titan"]
    return ConfigManager().parse_args(arguments)


PIPELINED = {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_microbatch_size": 2}
REFUSED = [
    ({"training__mixed_precision_param": "float32"}, "Set training.precision"),
    ({"training__max_skipped_steps": 3}, "start with ./launch.sh"),
    ({"checkpoint__keep_every": 3}, "removes all but the latest checkpoints: start with ./launch.sh"),
    ({"training__spike_deviations": 6.0}, "takes spikes"),
    ({"metrics__notify": "true"}, "sends no notes"),
    ({"metrics__samples": 1}, "makes no samples"),
    ({"checkpoint__copy_to": "s3://bucket/run"}, "saves in its folder alone"),
    ({"lr_scheduler__min_lr_factor": 0.1}, "lr_scheduler.min_lr and lr_scheduler.min_lr_factor say the same"),
    ({"model__converters": "float8"}, "converters replace layers"),
    ({"training__reduce_gradients": "step"}, "sums gradients after every micro-batch"),
    (
        PIPELINED | {"parallelism__pipeline_parallel_schedule_csv": "a.csv"},
        "set parallelism.pipeline_parallel_schedule.",
    ),
    ({"validation__enable": True, "validation__steps": 1}, "validation.steps = 1 has no effect beside data.corpus"),
    ({"training__dataset_path": "c4"}, "has no effect beside data.corpus"),
    ({"data__leave_out": [3]}, "leaves no batches out"),
    ({"training__dataset_path": "c4", "data__corpus": "", "data__prefetch": 2}, "no effect without data.corpus"),
    (CONTEXT | {"parallelism__context_parallel_rotate_method": "alltoall"}, "has no effect in this run. Leave it out"),
    ({"profiling__enable_memory_snapshot": True}, "needs a GPU"),
    (SAVED | {"checkpoint__exclude_from_loading": "optimizer,data"}, "must be of optimizer, lr_scheduler"),
    ({"training__seq_len": 0}, "training.seq_len must be at least 1"),
    (PIPELINED | {"parallelism__pipeline_parallel_schedule": "ZBVZeroBubble"}, "in one graph for all layers"),
    (PIPELINED | {"training__local_batch_size": 2}, "Set training.local_batch_size to a multiple of 4"),
    (PIPELINED | {"parallelism__pipeline_parallel_microbatch_size": 0}, "or another micro-batch"),
    (PIPELINED | {"training__global_batch_size": 12}, "it must be a multiple of 8"),
]


@pytest.mark.parametrize(("settings", "said"), REFUSED)
def test_what_is_not_honoured_is_refused(settings, said, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert said in refusal(capsys, spec.plan_of, stock_config(**settings))


def test_all_problems_come_in_one_message(monkeypatch, capsys):
    """Of TorchTitan's settings and of ours, of single settings and of several together."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    wrong = {"model__converters": "float8", "training__dtype": "bfloat16", "training__seq_len": 0}
    wrong |= {"metrics__samples": 1, "profiling__enable_profiling": True, "profiling__enable_memory_snapshot": True}
    said = refusal(capsys, spec.plan_of, stock_config(**wrong)).splitlines()
    for setting in wrong:
        assert [line for line in said if line.startswith(f"  - {setting.replace('__', '.')} ")], setting


DEBUG_MODEL = Path(__file__).parent / "debug_model.toml"


def stock_plan(*flags, toml=DEBUG_MODEL):
    return spec.plan_of(ConfigManager().parse_args(["--job.config_file", str(toml), *flags]))


def test_torchtitans_debug_model_is_a_configuration():
    """Sections whose feature is off are passed over, and its flavor is `debug`."""
    plan = stock_plan()
    assert (plan.size, plan.global_batch, plan.seq_len, plan.steps, plan.warmup_steps) == ("debug", 8, 2048, 10, 2)


@pytest.mark.parametrize(
    ("off", "on"),
    [
        ("--quantize.linear.float8.emulate", "--model.converters float8"),
        ("--quantize.grouped_mm.mx.fqns experts", "--model.converters mx"),
        ("--memory_estimation.disable_fake_mode", "--memory_estimation.enable"),
        ("--fault_tolerance.group_size 2", "--fault_tolerance.enable"),
        ("--parallelism.context_parallel_rotate_method alltoall", "--parallelism.context_parallel_degree 2"),
        ("--parallelism.pipeline_parallel_schedule DualPipeV", "--parallelism.pipeline_parallel_degree 2"),
        ("--parallelism.disable_loss_parallel", "--parallelism.tensor_parallel_degree 2"),
        ("--parallelism.enable_async_tensor_parallel", "--parallelism.tensor_parallel_degree 2"),
        ("--parallelism.expert_tensor_parallel_degree 2", "--parallelism.expert_parallel_degree 2"),
        (
            "--activation_checkpoint.selective_ac_option x --activation_checkpoint.mode none",
            "--activation_checkpoint.mode full",
        ),
        ("--compile.backend none_such", "--compile.enable"),
        ("--checkpoint.keep_latest_k 1", "--checkpoint.enable"),
        ("--checkpoint.exclude_from_loading optimizer", "--checkpoint.enable"),
    ],
)
def test_a_setting_is_passed_over_while_its_feature_is_off(off, on, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert stock_plan(*off.split()).size == "debug"
    setting = off.split()[0].removeprefix("--")
    if setting != "checkpoint.exclude_from_loading":  # TorchTitan's has no conditions
        assert f"{setting} " in refusal(capsys, stock_plan, *off.split(), *on.split())


def test_a_multiple_of_the_peak_is_the_floor():
    job = ConfigManager().parse_args(["--job.config_file", str(DEBUG_MODEL), "--lr_scheduler.min_lr_factor", "0.1"])
    spec.plan_of(job)
    assert job.lr_scheduler.min_lr == pytest.approx(0.1 * 8e-4)


STAGES = "[parallelism]\nmodule_fqns_per_model_part = {}\n"
WITHOUT_A_LAYER = STAGES.format('[["tok_embeddings", "layers.0"], ["norm", "output"]]')
ALL_LAYERS = STAGES.format('[["tok_embeddings"], ["layers.0", "layers.1", "norm", "output"]]')


@pytest.mark.parametrize(
    ("table", "settings", "said"),
    [
        ("[[data.stages]]\nat_tokens = 512\n", {}, "has one batch and one length"),
        (WITHOUT_A_LAYER, PIPELINED, "must name tok_embeddings, layers.0, layers.1, norm, output, each once"),
        (ALL_LAYERS, PIPELINED | {"parallelism__pipeline_parallel_schedule": "Interleaved1F1B"}, "in 4 or 6 parts"),
    ],
)
def test_tables_of_a_file_are_refused(table, settings, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    file = tmp_path / "run.toml"
    file.write_text(TINY.read_text() + table)
    assert said in refusal(capsys, spec.plan_of, stock_config(toml=file, **settings))


def test_stages_may_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    file = tmp_path / "run.toml"
    file.write_text(TINY.read_text() + ALL_LAYERS)
    stages = spec.plan_of(stock_config(toml=file, **PIPELINED)).stages
    assert stages == (("tok_embeddings",), ("layers.0", "layers.1", "norm", "output"))


def test_validation_by_pieces_of_sequences_is_refused_for_answers(pairs, capsys):
    parts = {"job_config": stock_config(pairs), "parallel_dims": SimpleNamespace(cp_enabled=True)}
    windows = functools.partial(spec.build_variant_validator, dp_world_size=1, dp_rank=0, **parts)
    assert "for a corpus with answers" in refusal(capsys, windows)


def test_a_list_is_written_with_commas_as_for_torchtitan():
    job = stock_config(checkpoint__exclude_from_loading="lr_scheduler,dataloader")
    assert job.checkpoint.exclude_from_loading == ["lr_scheduler", "dataloader"]


def test_paths_are_expanded(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("HOME", "/people/me")
    job = stock_config("~/corpus", checkpoint__folder="~/run/checkpoints", training__local_batch_size=4)
    job.job.dump_folder = "~/run"
    job.profiling.save_memory_snapshot_folder = "~/memory"  # a setting of TorchTitan's own
    spec.plan_of(job)
    assert (job.data.corpus, job.checkpoint.folder) == ("/people/me/corpus", "/people/me/run/checkpoints")
    assert (job.job.dump_folder, job.profiling.save_memory_snapshot_folder) == ("/people/me/run", "/people/me/memory")


def test_halves_of_copied_checkpoints_stop_a_start_of_torchtitan_s_trainer(tmp_path, monkeypatch, capsys):
    """It would begin at step 1 and overwrite them."""
    monkeypatch.setattr(variant.dist, "get_rank", lambda: 0)
    half = tmp_path / "run" / "ck" / "step-4"
    half.mkdir(parents=True)
    (half / "__0_0.distcp").write_bytes(b"shard")
    job = stock_config(checkpoint__enable=True, checkpoint__folder="ck")
    job.job.dump_folder = str(tmp_path / "run")
    start = functools.partial(variant.record_run, job, None, {}, None)
    assert "step-4 without .metadata" in refusal(capsys, start)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["ck"]


@pytest.mark.parametrize("folder", ["/archive/ck", "../other/checkpoint"])
def test_checkpoints_of_torchtitan_s_trainer_outside_of_the_run_s_folder(folder, monkeypatch, capsys):
    monkeypatch.setattr(spec.dist, "get_world_size", lambda: 2)
    job = stock_config(checkpoint__enable=True, checkpoint__folder=folder, training__local_batch_size=4)
    assert "leads out of job.dump_folder" in refusal(capsys, spec.plan_of, job)


def test_the_settings_of_the_model_are_missing(capsys):
    job = ConfigManager().parse_args(["--model.name", "interdomain"])
    assert "job.custom_config_module" in refusal(capsys, spec.plan_of, job)


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
