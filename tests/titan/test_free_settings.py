"""Settings that a resume may change without a warning change no bit of the weights (`schema.Resume.FREE`)."""

import pytest

from interdomain.titan.settings.schema import SETTINGS, Resume

from .runs import RUNS, assert_same_tensors

# These choose the run's folder or where it starts, or need a GPU, a package or other processes.
NOT_TRIED = {
    "job.config_file",
    "job.dump_folder",
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
    tried = {name.replace("__", ".") for name in RUNS["1 free"]}
    assert free - tried == NOT_TRIED


@pytest.mark.e2e
def test_free_settings_change_no_bit_of_the_weights(runs):
    """All of them are changed at once."""
    checkpoint = runs.at("1 free") / "elsewhere" / "step-6"
    assert_same_tensors(checkpoint, runs.checkpoint("1 text", 6))

    # The mixer's frequency need be no multiple of the log's: the first log after every third step has it.
    log = runs.log("1 free")
    assert list(log) == [1, 2, 4, 6]
    assert [step for step in log if "mixer/layer_00/dt_median" in log[step]] == [1, 4, 6]
