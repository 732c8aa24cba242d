"""The settings of a run under TorchTitan 0.2.2's own trainer: what is honoured, passed over and refused."""

import functools
from pathlib import Path
from types import SimpleNamespace

import pytest
from torchtitan.config import ConfigManager

from interdomain.removed import NO_ASYNC_TENSOR_PARALLEL
from interdomain.titan import spec, variant

from .conftest import refusal
from .runs import CONTEXT, SAVED, TENSOR, TINY, flags


def stock_config(corpus="corpus", **settings):
    """The settings as TorchTitan's own entry reads them."""
    arguments = [*flags(corpus, "folder", **settings), "--job.custom_config_module", "interdomain.titan"]
    return ConfigManager().parse_args(arguments)


PIPELINED = {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_microbatch_size": 2}
REFUSED = [
    ({"training__mixed_precision_param": "float32"}, "Set training.precision"),
    ({"training__max_skipped_steps": 3}, "start our trainer: ./launch.sh"),
    ({"checkpoint__keep_every": 3}, "removes all but the latest checkpoints. Leave it out, or start our trainer"),
    ({"lr_scheduler__min_lr_factor": 0.1}, "lr_scheduler.min_lr and lr_scheduler.min_lr_factor say the same"),
    ({"model__converters": "float8"}, "Converters replace layers"),
    (
        PIPELINED | {"parallelism__pipeline_parallel_schedule_csv": "a.csv"},
        "Set parallelism.pipeline_parallel_schedule instead.",
    ),
    ({"validation__enable": True, "validation__steps": 1}, "validation.steps = 1 has no effect beside data.corpus"),
    ({"training__dataset_path": "c4"}, "has no effect beside data.corpus"),
    ({"training__dataset_path": "c4", "data__corpus": "", "data__prefetch": 2}, "no effect without data.corpus"),
    (CONTEXT | {"parallelism__context_parallel_rotate_method": "alltoall"}, "has no effect in this run. Leave it out"),
    ({"profiling__enable_memory_snapshot": True}, "needs a GPU"),
    (SAVED | {"checkpoint__exclude_from_loading": "optimizer,data"}, "must be of optimizer, lr_scheduler"),
    ({"training__seq_len": 0}, "training.seq_len must be at least 1"),
    (PIPELINED | {"training__local_batch_size": 2}, "Set training.local_batch_size to a multiple of 4"),
    (PIPELINED | {"parallelism__pipeline_parallel_microbatch_size": 0}, "or another micro-batch"),
    (PIPELINED | {"training__global_batch_size": 12}, "it must be a multiple of 8"),
]


@pytest.mark.parametrize(("settings", "said"), REFUSED)
def test_what_is_not_honoured_is_refused(settings, said, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert said in refusal(capsys, spec.resolve, stock_config(**settings))


def test_all_problems_come_in_one_message(monkeypatch, capsys):
    """Of TorchTitan's settings and of ours, of single settings and of several together."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    wrong = {"model__converters": "float8", "training__dtype": "bfloat16", "training__seq_len": 0}
    wrong |= {
        "training__max_skipped_steps": 3,
        "profiling__enable_profiling": True,
        "profiling__enable_memory_snapshot": True,
    }
    said = refusal(capsys, spec.resolve, stock_config(**wrong)).splitlines()
    for setting in wrong:
        assert [line for line in said if line.startswith(f"  - {setting.replace('__', '.')} ")], setting


DEBUG_MODEL = Path(__file__).parent / "debug_model.toml"


def stock_plan(*flags, toml=DEBUG_MODEL):
    return spec.resolve(ConfigManager().parse_args(["--job.config_file", str(toml), *flags])).plan


def test_torchtitans_debug_model_is_a_configuration():
    """Sections whose feature is off are passed over, and its flavor is `debug`."""
    plan = stock_plan()
    assert (plan.size, plan.global_batch, plan.seq_len, plan.steps, plan.warmup_steps) == ("debug", 8, 2048, 10, 2)


def test_asynchronous_tensor_parallelism_is_removed(monkeypatch, capsys):
    """debug_model.toml has the setting, and it is off."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = ["--parallelism.tensor_parallel_degree", "2"]
    assert stock_plan(*flags).topology.tensor == 2
    asynchronous = stock_config(**TENSOR)
    vars(asynchronous.parallelism)["enable_async_tensor_parallel"] = True
    assert NO_ASYNC_TENSOR_PARALLEL in refusal(capsys, spec.resolve, asynchronous)


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
    spec.resolve(job)
    assert job.lr_scheduler.min_lr == pytest.approx(0.1 * 8e-4)


STAGES = "[parallelism]\nmodule_fqns_per_model_part = {}\n"
WITHOUT_A_LAYER = STAGES.format('[["tok_embeddings", "layers.0"], ["norm", "output"]]')
ALL_LAYERS = STAGES.format('[["tok_embeddings"], ["layers.0", "layers.1", "norm", "output"]]')


@pytest.mark.parametrize(
    ("table", "settings", "said"),
    [
        (WITHOUT_A_LAYER, PIPELINED, "must name tok_embeddings, layers.0, layers.1, norm, output, each once"),
        (ALL_LAYERS, PIPELINED | {"parallelism__pipeline_parallel_schedule": "Interleaved1F1B"}, "in 4 or 6 parts"),
    ],
)
def test_tables_of_a_file_are_refused(table, settings, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    file = tmp_path / "run.toml"
    file.write_text(TINY.read_text() + table)
    assert said in refusal(capsys, spec.resolve, stock_config(toml=file, **settings))


def test_stages_may_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    file = tmp_path / "run.toml"
    file.write_text(TINY.read_text() + ALL_LAYERS)
    stages = spec.resolve(stock_config(toml=file, **PIPELINED)).plan.stages
    assert stages == (("tok_embeddings",), ("layers.0", "layers.1", "norm", "output"))


def test_validation_by_pieces_of_sequences_is_refused_for_answers(pairs, capsys):
    parts = {
        "job_config": stock_config(pairs, validation__enable=True, validation__seq_len=64),
        "parallel_dims": SimpleNamespace(cp_enabled=True),
    }
    windows = functools.partial(spec.build_variant_validator, dp_world_size=1, dp_rank=0, **parts)
    assert "for a corpus with answers" in refusal(capsys, windows)


def test_a_list_is_written_with_commas_as_for_torchtitan():
    job = stock_config(checkpoint__exclude_from_loading="lr_scheduler,dataloader")
    assert job.checkpoint.exclude_from_loading == ["lr_scheduler", "dataloader"]


def test_paths_are_expanded(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("HOME", "/people/me")
    config = stock_config("~/corpus", checkpoint__folder="~/run/checkpoints", training__local_batch_size=4, **SAVED)
    config.job.dump_folder = "~/run"
    config.profiling.save_memory_snapshot_folder = "~/memory"  # a setting of TorchTitan's own
    job = spec.resolve(config).job
    assert (job.data.corpus, config.checkpoint.folder) == ("/people/me/corpus", "/people/me/run/checkpoints")
    assert (config.job.dump_folder, config.profiling.save_memory_snapshot_folder) == (
        "/people/me/run",
        "/people/me/memory",
    )


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
    monkeypatch.setenv("WORLD_SIZE", "2")
    job = stock_config(checkpoint__enable=True, checkpoint__folder=folder, training__local_batch_size=4)
    assert "leads out of job.dump_folder" in refusal(capsys, spec.resolve, job)


def test_the_settings_of_the_model_are_missing(capsys):
    job = ConfigManager().parse_args(["--model.name", "interdomain"])
    assert "job.custom_config_module" in refusal(capsys, spec.resolve, job)


def test_a_data_set_of_the_hub_is_named():
    training = stock_config(corpus="", training__dataset="c4").training
    assert spec.dataset_record(training)["datasets"] == ["allenai/c4"]
    training.dataset = "c4_test"
    assert spec.dataset_record(training)["datasets"] == []
