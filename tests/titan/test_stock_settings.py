"""The settings of a run under TorchTitan 0.2.2's own trainer: what is honoured, passed over and refused."""

import functools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from torchtitan.config import ConfigManager

from interdomain.removed import NO_ASYNC_TENSOR_PARALLEL
from interdomain.titan import spec, variant

from .conftest import refusal
from .runs import TINY, flags

TENSOR = "--parallelism.tensor_parallel_degree 2 "
PIPELINE = (
    "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_microbatch_size 2 "
)


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")


def stock_config(given="", corpus="corpus", toml=TINY):
    """The settings as TorchTitan's own entry reads them."""
    arguments = [
        *flags(corpus, "folder", toml),
        "--job.custom_config_module",
        "interdomain.titan",
        *given.split(),
    ]
    return ConfigManager().parse_args(arguments)


REFUSED = {
    "--training.mixed_precision_param float32": "Set training.precision",
    "--training.max_skipped_steps 3": "start our trainer: ./launch.sh",
    "--checkpoint.keep_every 3": "removes all but the latest checkpoints. Leave it out, or start our trainer",
    "--lr_scheduler.min_lr_factor 0.1": "lr_scheduler.min_lr and lr_scheduler.min_lr_factor say the same",
    f"{PIPELINE}--parallelism.pipeline_parallel_schedule_csv a.csv": "Set parallelism.pipeline_parallel_schedule instead.",
    "--validation.enable --validation.steps 1": "validation.steps = 1 has no effect beside data.corpus",
    "--training.dataset_path c4": "has no effect beside data.corpus",
    "--training.dataset_path c4 --data.corpus= --data.prefetch 2": "no effect without data.corpus",
    "--checkpoint.enable --checkpoint.exclude_from_loading optimizer,data": "must be of optimizer, lr_scheduler",
    "--training.seq_len 0": "training.seq_len must be at least 1",
    f"{PIPELINE}--training.local_batch_size 2": "Set training.local_batch_size to a multiple of 4",
    "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_microbatch_size 0": "or another micro-batch",
    f"{PIPELINE}--training.global_batch_size 12": "must be a multiple of 8",
    "--checkpoint.enable --checkpoint.folder /archive/ck": "leads out of job.dump_folder",
    "--checkpoint.enable --checkpoint.folder ../other/checkpoint": "leads out of job.dump_folder",
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_is_not_honoured_is_refused(given, capsys):
    assert REFUSED[given] in refusal(capsys, spec.resolve, stock_config(given))


def test_all_problems_come_in_one_message(capsys):
    """Of TorchTitan's settings and of ours, of single settings and of several together."""
    wrong = "--model.converters float8 --training.dtype bfloat16 --training.seq_len 0 --training.max_skipped_steps 3"
    wrong += " --profiling.enable_profiling"
    said = refusal(capsys, spec.resolve, stock_config(wrong))
    for setting in re.findall(r"--([\w.]+)", wrong):
        assert f"\n  - {setting} " in said


DEBUG_MODEL = Path(__file__).parent / "debug_model.toml"


def stock_plan(*flags, toml=DEBUG_MODEL):
    return spec.resolve(ConfigManager().parse_args(["--job.config_file", str(toml), *flags])).plan


def test_torchtitans_debug_model_is_a_configuration(monkeypatch):
    """Sections whose feature is off are passed over, and its flavor is `debug`."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    plan = stock_plan()
    assert (plan.size, plan.global_batch, plan.seq_len, plan.steps, plan.warmup_steps) == (
        "debug",
        8,
        2048,
        10,
        2,
    )


def test_asynchronous_tensor_parallelism_is_removed(capsys):
    """debug_model.toml has the setting, and it is off."""
    assert stock_plan(*TENSOR.split()).topology.tensor == 2
    asynchronous = stock_config(TENSOR)
    vars(asynchronous.parallelism)["enable_async_tensor_parallel"] = True
    assert NO_ASYNC_TENSOR_PARALLEL in refusal(capsys, spec.resolve, asynchronous)


# A setting, and the feature with which it is refused; without that it is passed over.
OFF = {
    "--quantize.linear.float8.emulate": "--model.converters float8",
    "--quantize.grouped_mm.mx.fqns experts": "--model.converters mx",
    "--memory_estimation.disable_fake_mode": "--memory_estimation.enable",
    "--fault_tolerance.group_size 2": "--fault_tolerance.enable",
    "--parallelism.context_parallel_rotate_method alltoall": "--parallelism.context_parallel_degree 2",
    "--parallelism.pipeline_parallel_schedule DualPipeV": "--parallelism.pipeline_parallel_degree 2",
    "--parallelism.disable_loss_parallel": "--parallelism.tensor_parallel_degree 2",
    "--parallelism.expert_tensor_parallel_degree 2": "--parallelism.expert_parallel_degree 2",
    "--activation_checkpoint.selective_ac_option x": "--activation_checkpoint.mode selective",
    "--compile.backend none_such": "--compile.enable",
    "--checkpoint.keep_latest_k 1": "--checkpoint.enable",
}


@pytest.mark.parametrize("given", OFF)
def test_a_setting_is_passed_over_while_its_feature_is_off(given, capsys):
    off = ["--activation_checkpoint.mode", "none", *given.split()]
    assert stock_plan(*off).size == "debug"
    setting = given.split()[0].removeprefix("--")
    assert f"{setting} " in refusal(capsys, stock_plan, *off, *OFF[given].split())


def test_a_multiple_of_the_peak_is_the_floor():
    job = ConfigManager().parse_args(
        ["--job.config_file", str(DEBUG_MODEL), "--lr_scheduler.min_lr_factor", "0.1"]
    )
    spec.resolve(job)
    assert job.lr_scheduler.min_lr == pytest.approx(0.1 * 8e-4)


def test_named_stages_are_refused(tmp_path, capsys):
    file = tmp_path / "run.toml"
    stages = '[["tok_embeddings"], ["layers.0", "layers.1", "norm", "output"]]'
    file.write_text(f"{TINY.read_text()}[parallelism]\nmodule_fqns_per_model_part = {stages}\n")
    error = refusal(capsys, spec.resolve, stock_config(PIPELINE, toml=file))
    assert "Set parallelism.pipeline_parallel_layers_per_stage" in error


def test_validation_by_pieces_of_sequences_is_refused_for_answers(pairs, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "1")
    job = stock_config("--validation.enable --validation.seq_len 64", pairs)
    dims = SimpleNamespace(cp_enabled=True)
    parts = {"job_config": job, "parallel_dims": dims}
    windows = functools.partial(spec.build_variant_validator, dp_world_size=1, dp_rank=0, **parts)
    assert "for a corpus with answers" in refusal(capsys, windows)


def test_a_list_is_written_with_commas_as_for_torchtitan():
    job = stock_config("--checkpoint.exclude_from_loading lr_scheduler,dataloader")
    assert job.checkpoint.exclude_from_loading == ["lr_scheduler", "dataloader"]


def test_paths_are_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/people/me")
    config = stock_config(
        "--training.local_batch_size 4 --checkpoint.enable --checkpoint.folder ~/run/checkpoints",
        "~/corpus",
    )
    config.job.dump_folder = "~/run"
    assert spec.resolve(config).job.data.corpus == "/people/me/corpus"
    assert config.job.dump_folder == "/people/me/run"
    assert config.checkpoint.folder == "/people/me/run/checkpoints"


def test_halves_of_copied_checkpoints_stop_a_start_of_torchtitan_s_trainer(
    tmp_path, monkeypatch, capsys
):
    """It would begin at step 1 and overwrite them."""
    monkeypatch.setattr(variant.dist, "get_rank", lambda: 0)
    half = tmp_path / "run" / "ck" / "step-4"
    half.mkdir(parents=True)
    (half / "__0_0.distcp").write_bytes(b"shard")
    job = stock_config("--checkpoint.enable --checkpoint.folder ck")
    job.job.dump_folder = str(tmp_path / "run")
    start = functools.partial(variant.record_run, job, None, {}, None)
    assert "step-4 without .metadata" in refusal(capsys, start)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["ck"]


def test_the_settings_of_the_model_are_missing(capsys):
    job = ConfigManager().parse_args(["--model.name", "interdomain"])
    assert "job.custom_config_module" in refusal(capsys, spec.resolve, job)
