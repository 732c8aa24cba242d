"""Settings that a resume may change without a warning change no bit of the weights (`schema.Resume.FREE`)."""

import pytest

from interdomain.titan.settings.schema import SETTINGS, Resume

from .runs import assert_same_tensors

# Another value than that of the tiny run.
OTHERS = {
    "job.description": "another run",
    "mixer.recompute": "False",
    "data.prefetch": 0,
    "training.gc_freq": 1,
    "validation.local_batch_size": 2,
    "checkpoint.folder": "elsewhere",
    "checkpoint.interval": 2,
    "checkpoint.async_mode": "async",
    "checkpoint.keep_latest_k": 3,
    "checkpoint.keep_every": 5,
    "checkpoint.keep_every_tokens": 1024,
    "checkpoint.keep_steps": [1],
    "metrics.log_freq": 2,
    "metrics.enable_tensorboard": True,
    "metrics.disable_color_printing": False,
    "metrics.save_tb_folder": "curves",
    "metrics.mixer_freq": 3,
    "profiling.save_traces_folder": "traces",
    "profiling.profile_freq": 20,
    "profiling.profiler_active": 2,
    "profiling.profiler_warmup": 4,
    "comm.init_timeout_seconds": 200,
    "comm.train_timeout_seconds": 150,
    "comm.trace_buf_size": 10,
}
# These choose the run's folder or where it starts, or need a GPU, a package or other processes.
NOT_TRIED = {
    "job.config_file",
    "job.dump_folder",
    "checkpoint.enable",
    "checkpoint.initial_load_path",
    "checkpoint.load_step",
    "checkpoint.initial_load_model_only",
    "checkpoint.exclude_from_loading",
    "metrics.enable_wandb",
    "profiling.enable_profiling",
    "comm.mode",
}


def test_every_free_setting_is_tried():
    free = {name for name, setting in SETTINGS.items() if setting.resume is Resume.FREE}
    assert OTHERS.keys() | NOT_TRIED == free


@pytest.mark.e2e
def test_free_settings_change_no_bit_of_the_weights(runs):
    """All of them are changed at once."""
    settings = {setting.replace(".", "__"): value for setting, value in OTHERS.items()}
    runs.add("1 free", checkpoint__enable=True, validation__enable=True, **settings)
    checkpoint = runs.at("1 free") / "elsewhere" / "step-6"
    assert_same_tensors(checkpoint, runs.checkpoint("1 text", 6))

    # The mixer's frequency need be no multiple of the log's: the first log after every third step has it.
    log = runs.seen("1 free")["log"]
    assert list(log) == [1, 2, 4, 6]
    assert [step for step in log if "mixer/layer_00/dt_median" in log[step]] == [1, 4, 6]
