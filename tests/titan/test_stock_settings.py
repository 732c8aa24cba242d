"""The settings of a run under TorchTitan 0.2.2's own trainer: what is honoured, passed over and refused."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from torchtitan.config import ConfigManager

from interdomain.model import CONDITIONS
from interdomain.removed import NO_ASYNC_TENSOR_PARALLEL
from interdomain.titan import spec, variant

from .conftest import refusal
from .runs import TINY, flags

TENSOR = "--parallelism.tensor_parallel_degree 2 "
PIPELINE = (
    "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_microbatch_size 2 "
)
DEBUG_MODEL = Path(__file__).parent / "debug_model.toml"


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")


def read_config(given="", toml=DEBUG_MODEL):
    """Returns the settings as TorchTitan's own entry reads them."""
    return ConfigManager().parse_args(["--job.config_file", str(toml), *given.split()])


def tiny_config(given="", corpus="corpus", toml=TINY):
    """Returns the settings of the tiny run."""
    arguments = [*flags(corpus, "folder", toml), "--job.custom_config_module", "interdomain.titan"]
    return ConfigManager().parse_args([*arguments, *given.split()])


# Flags, and a part of the error message.
REFUSED = {
    "--training.mixed_precision_param float32": "Set training.precision",
    "--training.max_skipped_steps 3": "start our trainer: ./launch.sh",
    "--lr_scheduler.min_lr_factor 0.1": "min_lr and lr_scheduler.min_lr_factor say the same",
    "--validation.enable --validation.steps 1": "has no effect beside data.corpus",
    "--training.dataset_path c4 --data.corpus= --data.prefetch 2": "no effect without data.corpus",
    "--training.seq_len 0": "training.seq_len must be at least 1",
    f"{PIPELINE}--training.local_batch_size 2": "cannot run 1 micro-batch(es)",
    f"{PIPELINE}--training.global_batch_size 12": "does not divide",
    f"{PIPELINE}--training.global_batch_size 1": "microbatch_size = 2 must divide the 1 seq",
    "--checkpoint.enable --checkpoint.folder ../ck": "leads out of job.dump_folder",
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_is_not_honoured_is_refused(given, capsys):
    assert REFUSED[given] in refusal(capsys, spec.resolve, tiny_config(given))


def test_a_mixer_of_the_users_own_is_a_condition(monkeypatch):
    """TorchTitan imports it (experimental.custom_import) after this plugin."""
    monkeypatch.setitem(CONDITIONS, "mine", CONDITIONS["s4d"])
    config = tiny_config("--mixer.condition mine")
    assert spec.resolve(config).plan.config.mixer.kind == "interdomain"


def test_all_problems_come_in_one_message(capsys):
    """The message names TorchTitan's settings and ours, and rules about one setting and about several."""
    given = "--model.converters float8 --training.dtype bfloat16 --training.seq_len 0"
    given += " --training.max_skipped_steps 3 --profiling.enable_profiling"
    error = refusal(capsys, spec.resolve, tiny_config(given))
    for setting in re.findall(r"--([\w.]+)", given):
        assert f"\n  - {setting} " in error


def test_asynchronous_tensor_parallelism_is_removed(capsys):
    config = tiny_config(TENSOR)
    vars(config.parallelism)["enable_async_tensor_parallel"] = True
    assert NO_ASYNC_TENSOR_PARALLEL in refusal(capsys, spec.resolve, config)


# A setting, and the feature with which it is refused.
OFF = {
    "--quantize.linear.float8.emulate": "--model.converters float8",
    "--fault_tolerance.group_size 2": "--fault_tolerance.enable",
    "--parallelism.context_parallel_rotate_method alltoall": "--parallelism.context_parallel_degree 2",
    "--parallelism.pipeline_parallel_schedule DualPipeV": "--parallelism.pipeline_parallel_degree 2",
    "--parallelism.disable_loss_parallel": "--parallelism.tensor_parallel_degree 2",
    "--activation_checkpoint.selective_ac_option x": "--activation_checkpoint.mode selective",
    "--checkpoint.keep_latest_k 1": "--checkpoint.enable",
}


@pytest.mark.parametrize("given", OFF)
def test_a_setting_is_passed_over_while_its_feature_is_off(given, capsys):
    off = f"--activation_checkpoint.mode none {given}"
    assert spec.resolve(read_config(off)).plan.size == "debug"
    on = read_config(f"{off} {OFF[given]}")
    setting = given.split()[0].removeprefix("--")
    assert f"{setting} " in refusal(capsys, spec.resolve, on)


def test_a_multiple_of_the_peak_is_the_floor():
    config = read_config("--lr_scheduler.min_lr_factor 0.1")
    spec.resolve(config)
    assert config.lr_scheduler.min_lr == pytest.approx(0.1 * 8e-4)


def test_named_stages_are_refused(tmp_path, capsys):
    file = tmp_path / "run.toml"
    stages = '[["tok_embeddings"], ["layers.0", "layers.1", "norm", "output"]]'
    file.write_text(f"{TINY.read_text()}[parallelism]\nmodule_fqns_per_model_part = {stages}\n")
    error = refusal(capsys, spec.resolve, tiny_config(PIPELINE, toml=file))
    assert "Set parallelism.pipeline_parallel_layers_per_stage" in error


def test_context_parallelism_does_not_validate_on_answers(pairs, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "1")
    error = refusal(
        capsys,
        spec.build_variant_validator,
        job_config=tiny_config("--validation.enable --validation.seq_len 64", pairs),
        parallel_dims=SimpleNamespace(cp_enabled=True),
        dp_world_size=1,
        dp_rank=0,
    )
    assert "for a corpus with answers" in error


def test_paths_are_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/people/me")
    given = "--checkpoint.enable --checkpoint.folder ~/run/ck --job.dump_folder ~/run"
    config = tiny_config(f"--training.local_batch_size 4 {given}", "~/corpus")
    assert spec.resolve(config).job.data.corpus == "/people/me/corpus"
    assert config.checkpoint.folder == "/people/me/run/ck"


def test_halves_of_copied_checkpoints_stop_a_start(tmp_path, alone, capsys):
    """TorchTitan's trainer would begin at step 1 and overwrite them."""
    half = tmp_path / "ck" / "step-4"
    half.mkdir(parents=True)
    (half / "__0_0.distcp").write_bytes(b"shard")
    given = f"--checkpoint.enable --checkpoint.folder ck --job.dump_folder {tmp_path}"
    error = refusal(capsys, variant.record_run, tiny_config(given), None, {}, None)
    assert "step-4 without .metadata" in error
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


def test_a_last_checkpoint_of_weights_only_is_announced(caplog):
    full = "--checkpoint.enable --checkpoint.no-last_save_model_only"
    spec.resolve(tiny_config(full))
    assert "only weights" not in caplog.text
    spec.resolve(tiny_config("--checkpoint.enable"))
    assert caplog.text.count("the last checkpoint will hold only weights") == 1


def test_a_folder_without_a_tokenizer(capsys):
    """TorchTitan's own message is about a setting that it has no more."""
    given = "--data.corpus= --model.hf_assets_path ./assets/tokenizer"
    error = refusal(capsys, spec.build_tokenizer, tiny_config(given))
    assert "model.hf_assets_path = './assets/tokenizer': there is no folder /" in error


def test_the_settings_of_the_model_are_missing(capsys):
    config = ConfigManager().parse_args(["--model.name", "interdomain"])
    assert "job.custom_config_module" in refusal(capsys, spec.resolve, config)
