"""The registered variant under TorchTitan's own trainer: the same run as under ours, on every axis, and one set of files."""

import functools
import json
import os
import shutil
import subprocess
import tomllib
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torchtitan.config import ConfigManager

from interdomain.data import load_tokenizer
from interdomain.files import pretrained
from interdomain.titan import spec
from interdomain.tools import convert

from ..common import TIMEOUT
from .conftest import (
    COMPILED,
    INTERLEAVED,
    LAYERS,
    REPOSITORY,
    TENSOR,
    TINY,
    VALIDATED,
    Runs,
    environment,
    flags,
    parallel,
    refusal,
    torchrun_command,
)

pytestmark = pytest.mark.e2e

TITAN03 = "INTERDOMAIN_TITAN03"  # a folder with TorchTitan 0.3.0; `./launch.sh test` makes and names it

TOLERANCE = 1e-6  # float32 sums in another order; the largest difference seen is 3e-7
MICRO = {
    "training__local_batch_size": 8,
    "training__global_batch_size": -1,
    "parallelism__pipeline_parallel_microbatch_size": 2,
}
SAVED_OURS = {"checkpoint__enable": True, "checkpoint__interval": 2}
SAVED = SAVED_OURS | {"checkpoint__last_save_model_only": False}
AXES = {  # settings of a run on two ranks
    "shards": {},
    "accumulated": {"training__local_batch_size": 2},
    "replicas": {"parallelism__data_parallel_replicate_degree": 2},
    "context": parallel(context=2),
    "tensor": parallel(tensor=2),
    "pipeline": {**parallel(pipeline=2), **INTERLEAVED, **MICRO},
    "compiled": {**COMPILED, "compile__backend": "aot_eager"},
    "full": {"activation_checkpoint__mode": "full"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus, short, launch):
    runs = Runs(2, tmp_path_factory.mktemp("stock"), corpus, launch)
    windows = {**VALIDATED, "validation__local_batch_size": 4, "validation__tokens": 1024}
    runs.add("ours", **windows, checkpoint__enable=True, checkpoint__interval=2, probes=["gradients"])
    tokens = toml_of(runs.folder / "tokens.toml", training__tokens=51_200, lr_scheduler__warmup_tokens=5_120)
    for name, settings in AXES.items():
        validated = windows if name in ("shards", "context") else {}
        steps = {"training__steps": 4, "lr_scheduler__warmup_steps": 2}  # win over the file's tokens
        runs.add(name, toml=tokens, **settings | validated | steps, probes=["gradients"], stock=True)
    layers = LAYERS | TENSOR | {"data__corpus": short, "training__local_batch_size": 8, "training__steps": 2}
    runs.add("our layers", **layers)
    runs.add("layers", **layers, stock=True)
    for name, stock in (("stock first", True), ("stock then ours", False), ("stock again", True)):
        saved = SAVED if stock else SAVED_OURS
        steps = ["stock first", "stock then ours", "stock again"].index(name) * 2 + 2
        runs.add(name, folder=runs.folder / "shared", **saved, training__steps=steps, stock=stock)
    hf = {"checkpoint__enable": True, "checkpoint__last_save_in_hf": True, "training__steps": 2}
    runs.add("to hf", **hf, stock=True)
    return runs.start()


@pytest.mark.parametrize("name", AXES)
def test_every_axis_trains_as_under_our_trainer(runs, name):
    ours, there = runs.seen("ours")["log"], runs.seen(name, rank=1 if name == "pipeline" else 0)["log"]
    assert list(there) == [1, 2, 3, 4]
    for step in there:
        for quantity in ("loss", "grad_norm", "lr"):
            assert there[step][quantity] == pytest.approx(ours[step][quantity], rel=TOLERANCE), (step, quantity)
    expected, found = (runs.whole(run, "gradients") for run in ("ours", name))
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        error = (found[parameter] - gradient).norm() / gradient.norm()
        assert error < 1e-5, (parameter, error)


def test_the_mixers_timescales_are_logged(runs):
    assert runs.seen("shards")["log"][2]["mixer/layer_00/timescale_tokens_max"] > 1


@pytest.mark.parametrize("name", ["shards", "context"])
def test_validation_is_of_the_same_windows(runs, name):
    ours, there = runs.seen("ours")["validation"], runs.seen(name)["validation"]
    assert {step: found["loss"] for step, found in there.items()} == {
        step: pytest.approx(ours[step]["loss"], rel=TOLERANCE) for step in (1, 3)
    }


def test_documents_and_hybrids_under_tensor_parallelism(runs):
    ours, there = (runs.seen(name)["log"] for name in ("our layers", "layers"))
    assert [there[step]["loss"] for step in there] == pytest.approx(
        [ours[step]["loss"] for step in ours], rel=TOLERANCE
    )


def test_a_run_goes_from_one_trainer_to_the_other_and_back(runs):
    expected = runs.seen("ours")["log"]
    for name, steps in (("stock first", [1, 2]), ("stock then ours", [3, 4]), ("stock again", [5, 6])):
        log = runs.seen(name)["log"]
        assert list(log) == steps
        for step in steps:  # the length of the schedule is total_steps in all
            assert log[step]["loss"] == pytest.approx(expected[step]["loss"], rel=TOLERANCE)


def test_a_checkpoint_of_torchtitans_trainer_converts(runs, tmp_path):
    shared = runs.folder / "shared" / "checkpoint" / "step-6"
    assert convert.main([str(shared), "--output", str(tmp_path / "folder")]) == 0
    facts = json.loads((tmp_path / "folder" / "config.json").read_text())["facts"]
    assert (facts["step"], facts["tokens"]) == (6, 6 * 512)


def test_weights_go_to_and_from_an_exported_folder(runs, tmp_path, launch, corpus):
    saved = load_file(runs.folder / "to hf" / "checkpoint" / "step-2" / "model-00001-of-00001.safetensors")
    assert convert.main([str(runs.folder / "ours"), "--output", str(tmp_path / "folder")]) == 0
    weights = load_file(tmp_path / "folder" / pretrained.WEIGHTS)
    assert {name: x.shape for name, x in saved.items()} == {name: x.shape for name, x in weights.items()}
    again = Runs(1, tmp_path, corpus, launch)
    start = {"checkpoint__enable": True, "training__steps": 1}
    again.add("ours", **start, checkpoint__initial_load_path=runs.folder / "ours" / "checkpoint" / "step-6")
    from_folder = {"checkpoint__initial_load_path": tmp_path / "folder", "checkpoint__initial_load_in_hf": True}
    again.add("stock", **start, **from_folder, stock=True)
    again.start()
    assert again.seen("stock")["log"][1]["loss"] == again.seen("ours")["log"][1]["loss"]


def test_torchtitans_own_data_and_tokenizer(tmp_path, launch, corpus):
    texts = [f"the cat number {n} sat on mat {n % 7}, and it was glad" for n in range(400)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"]))
    words = tokenizer.get_vocab_size()
    (tmp_path / "assets").mkdir()
    tokenizer.save(str(tmp_path / "assets" / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # TorchTitan adds the first two
    (tmp_path / "assets" / "tokenizer_config.json").write_text(json.dumps(settings))
    runs = Runs(1, tmp_path, "", launch)
    given = {"training__dataset_path": tmp_path / "data", "model__hf_assets_path": tmp_path / "assets"}
    runs.add("text", **given, training__steps=6, checkpoint__enable=True, checkpoint__interval=6, stock=True)
    log = runs.start().seen("text")["log"]
    assert log[6]["loss"] < log[1]["loss"] - 0.5
    assert convert.main([str(tmp_path / "text"), "--output", str(tmp_path / "folder")]) == 0
    kept = load_tokenizer(tmp_path / "folder")
    assert (kept.bos_id, kept.eos_id, kept.vocab_size) == (words, words + 1, words + 2)


def stock_config(corpus="corpus", **settings):
    """The settings as TorchTitan's own entry reads them."""
    arguments = [*flags(corpus, "folder", **settings), "--job.custom_config_module", "interdomain.titan"]
    return ConfigManager().parse_args(arguments)


REFUSED = {
    "training__mixed_precision_param": ("float32", "Set training.precision"),
    "training__max_skipped_steps": (3, "start with ./launch.sh"),
    "lr_scheduler__min_lr_factor": (0.1, "Set lr_scheduler.min_lr"),
    "model__converters": ("float8", "converters replace layers"),
    "parallelism__pipeline_parallel_schedule_csv": ("a.csv", "set parallelism.pipeline_parallel_schedule."),
    "checkpoint__exclude_from_loading": ("optimizer,data", "must be of optimizer, lr_scheduler"),
    "training__seq_len": (0, "training.seq_len must be at least 1"),
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_is_not_honoured_is_refused(setting, alone, capsys):
    value, said = REFUSED[setting]
    assert said in refusal(capsys, spec.plan_of, stock_config(**{setting: value}))


MICRO_BATCHES = {
    "with a rest": ({"training__local_batch_size": 3}, "Set training.local_batch_size to a multiple of 4"),
    "too few": ({"training__local_batch_size": 2}, "Set training.local_batch_size to a multiple of 4"),
    "none": ({"parallelism__pipeline_parallel_microbatch_size": 0}, "or another micro-batch"),
    "of a part of a step": ({"training__global_batch_size": 12}, "it must be a multiple of 8"),
}


@pytest.mark.parametrize("name", MICRO_BATCHES)
def test_micro_batches_that_a_pipeline_cannot_run_are_refused(name, monkeypatch, capsys):
    monkeypatch.setattr(spec.dist, "get_world_size", lambda: 2)
    settings, said = MICRO_BATCHES[name]
    pipeline = {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_microbatch_size": 2}
    assert said in refusal(capsys, spec.plan_of, stock_config(**pipeline | settings))


def test_validation_by_pieces_of_sequences_is_refused_for_answers(pairs, capsys):
    parts = {"job_config": stock_config(pairs), "parallel_dims": SimpleNamespace(cp_enabled=True)}
    windows = functools.partial(spec.build_variant_validator, dp_world_size=1, dp_rank=0, **parts)
    assert "for a corpus with answers" in refusal(capsys, windows)


def test_a_list_is_written_with_commas_as_for_torchtitan():
    job = stock_config(checkpoint__exclude_from_loading="lr_scheduler,dataloader")
    assert job.checkpoint.exclude_from_loading == ["lr_scheduler", "dataloader"]


def test_the_settings_of_the_model_are_missing(capsys):
    job = ConfigManager().parse_args(["--model.name", "interdomain"])
    assert "job.custom_config_module" in refusal(capsys, spec.plan_of, job)


def test_masks_are_asked_for_as_torchtitans_validator_does(alone):
    with pytest.raises(TypeError):
        spec.TitanTransformer.get_attention_masks(SimpleNamespace(), input_batch=torch.zeros(1))


def torchrun_03(ranks, *program):
    """`launch` under TorchTitan 0.3.0, which a process that has imported 0.2.2 cannot import."""
    env = environment()
    env["PYTHONPATH"] = f"{os.environ[TITAN03]}{os.pathsep}{env['PYTHONPATH']}"
    command = torchrun_command(ranks, *program)
    done = subprocess.run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


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


@pytest.fixture(scope="module")
def runs_03(runs, tmp_path_factory, corpus):
    if not os.environ.get(TITAN03):
        pytest.skip(f"{TITAN03} names no folder with TorchTitan 0.3.0")
    new = Runs(2, tmp_path_factory.mktemp("titan03"), corpus, torchrun_03)
    for axis in ("shards", "context", "tensor", "pipeline"):
        degrees = {} if axis == "shards" else parallel(**{axis: 2})
        new.add(f"our {axis}", **degrees, training__steps=3, probes=["gradients"])
    replicas = {"parallelism__data_parallel_replicate_degree": 2}
    windows = {**VALIDATED, "validation__local_batch_size": 4, "validation__tokens": 1024}
    for name, settings in {"shards": windows, "replicas": replicas, "compiled": AXES["compiled"]}.items():
        given = settings | {"data__corpus": str(corpus), "training__local_batch_size": 4, "checkpoint__enable": True}
        tokens = {"training__tokens": 51_200, "lr_scheduler__warmup_tokens": 5_120}
        file = toml_of(new.folder / f"{name}.toml", job__dump_folder="elsewhere", **given, **tokens)
        args = ["--module", "interdomain.titan", "--config", str(file), "--dump_folder", str(new.folder / name)]
        args += ["--training.steps", "3", "--lr_scheduler.warmup_steps", "2"]  # win over the file's tokens
        new.jobs.append(
            {"name": name, "args": args, "probes": ["gradients"], "spoil": None, "stops": False, "stock": True}
        )
    shutil.copytree(runs.folder / "ours" / "checkpoint" / "step-2", new.folder / "shared" / "checkpoint" / "step-2")
    new.add("continued", folder=new.folder / "shared", **SAVED_OURS, training__steps=4)
    return new.start()


@pytest.mark.parametrize(
    "name", ["our shards", "our context", "our tensor", "our pipeline", "shards", "replicas", "compiled"]
)
def test_torchtitan_0_3_trains_the_same(runs, runs_03, name):
    """Our trainer on every axis, and TorchTitan's own."""
    expected, log = runs.seen("ours")["log"], runs_03.seen(name)["log"]
    assert list(log) == [1, 2, 3]
    for step in log:
        for quantity in ("loss", "grad_norm"):
            assert log[step][quantity] == pytest.approx(expected[step][quantity], rel=TOLERANCE), (step, quantity)
    gradients, reference = runs_03.whole(name, "gradients"), runs.whole("ours", "gradients")
    assert gradients.keys() == reference.keys()
    for parameter, gradient in reference.items():
        assert (gradients[parameter] - gradient).norm() < 1e-5 * gradient.norm(), parameter


def test_torchtitan_0_3_validates_the_same(runs, runs_03):
    ours, there = runs.seen("ours")["validation"], runs_03.seen("shards")["validation"]
    assert {step: found["loss"] for step, found in there.items()} == {
        step: pytest.approx(ours[step]["loss"], rel=TOLERANCE) for step in (1, 3)
    }


def test_a_checkpoint_of_torchtitan_0_3_converts(runs_03, tmp_path):
    assert convert.main([str(runs_03.folder / "shards"), "--output", str(tmp_path / "folder")]) == 0


def test_a_run_goes_to_torchtitan_0_3_and_back(runs, runs_03, tmp_path, launch, corpus):
    expected, there = runs.seen("ours")["log"], runs_03.seen("continued")["log"]
    back = Runs(1, tmp_path, corpus, launch)
    back.add("back", folder=runs_03.folder / "shared", **SAVED_OURS)
    here = back.start().seen("back")["log"]
    assert (list(there), list(here)) == ([3, 4], [5, 6])
    for step, found in (there | here).items():
        assert found["loss"] == pytest.approx(expected[step]["loss"], rel=TOLERANCE)
