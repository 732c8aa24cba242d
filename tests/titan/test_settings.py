"""What is read from a TOML file and flags, and what is refused in one paragraph before anything is built."""

import dataclasses
import re
from pathlib import Path

import pytest
import torchtitan
from torchtitan.config import JobConfig

from interdomain import titan
from interdomain.titan import entry, schema, settings, trainer
from interdomain.titan.plan import make_plan
from interdomain.titan.settings import read_job_config

from .conftest import TINY, refusal
from .test_plan import arguments, parse

# Defaults of ours that are not TorchTitan's.
OURS = {
    "model.name": "interdomain",
    "model.flavor": "debug",
    "lr_scheduler.warmup_steps": None,
    "lr_scheduler.decay_type": "cosine",
    "training.steps": None,
    "checkpoint.last_save_model_only": False,
    "activation_checkpoint.selective_ac_option": "op",
}


def test_every_setting_of_torchtitan_is_read_or_refused():
    """Field by field: with TorchTitan's default, and with another value that somebody reads or that is refused."""
    unused = {}
    for section in dataclasses.fields(JobConfig()):
        for field in dataclasses.fields(section.type):
            setting, default = f"{section.name}.{field.name}", getattr(section.default_factory(), field.name)
            if setting in settings.KINDS:
                assert settings.value_of(schema.JobConfig(), setting) == OURS.get(setting, default), setting
                continue
            unused[setting] = default
            job = schema.JobConfig()
            job.unused = {setting: "another"}
            if setting not in settings.IGNORED:
                with pytest.raises(ValueError, match=f"^{setting} = another is not used by this plugin. [A-Z]"):
                    settings.refuse_unsupported(job)
    assert len(unused) > 40
    job = schema.JobConfig()
    job.unused = unused
    settings.refuse_unsupported(job)
    read = ("train.py", "config/job_config.py", "components/*.py", "distributed/*.py", "tools/*.py")
    theirs = [path for name in read for path in Path(torchtitan.__file__).parent.glob(name)]
    theirs += Path(torchtitan.__file__).parent.glob("models/llama3/infra/parallelize.py")
    text = "".join(path.read_text() for path in [*theirs, *Path(titan.__file__).parent.glob("*.py")])
    for setting in settings.KINDS:
        section, name = setting.split(".")
        by_name = section == "mixer" or setting in ("model.dim", "model.n_layers", "model.n_heads")
        assert by_name or re.search(rf"\.{name}\b", text), setting


REFUSED = {
    "unknown condition": ({"mixer__condition": "s4"}, "mixer.condition must be one of softmax, interdomain,", "got s4"),
    "unknown size": ({"model__flavor": "7B"}, "model.flavor must be one of debug, 125M, 350M, 760M, 1.3B", "7B"),
    "unknown backend": ({"mixer__backend": "cuda"}, "mixer.backend must be one of auto, chunkwise,"),
    "unknown features": ({"mixer__features": "cuda"}, "mixer.features must be one of auto, triton, torch"),
    "unknown readout": ({"mixer__readout": "imag"}, "mixer.readout = 'imag'", "complex, real, hermitian"),
    "switch of another mixer": ({"mixer__condition": "softmax", "mixer__output_gate": True}, "no such switch"),
    "heads that do not divide": ({"mixer__n_kv_heads": 3}, "n_kv_heads must divide n_heads = 4", "[1, 2, 4]"),
    "heads of half a feature": ({"model__dim": 102}, "dim = 102"),
    "batch and ranks": ({"training__local_batch_size": 3}, "training.global_batch_size = 8", "multiple of 6"),
    "replicas and ranks": ({"parallelism__data_parallel_replicate_degree": 3}, "replicate_degree = 3", "2 rank(s)"),
    "shards and ranks": ({"parallelism__data_parallel_shard_degree": 4}, "1 x 4", "the number of ranks, 2"),
    "tensor parallel": ({"parallelism__tensor_parallel_degree": 2}, "tensor_parallel_degree = 2", "data_parallel"),
    "float8": ({"quantize.linear.float8.emulate": True}, "quantize.linear.float8.emulate", "not supported"),
    "no sequence": ({"training__seq_len": 0}, "training.seq_len must be at least 1", "got 0"),
    "batch of nothing": ({"training__global_batch_size": 0}, "training.global_batch_size must be at least 1", "got 0"),
    "steps and tokens": ({"training__tokens": 4096, "training__steps": 6}, "tokens = 4,096 and training.steps = 6"),
    "warmup past the end": ({"lr_scheduler__warmup_steps": 9}, "warmup of 9 steps", "6 steps"),
    "schedule shorter than the run": (
        {"lr_scheduler__total_steps": 5, "lr_scheduler__min_lr": 0},
        "total_steps = 5",
        "last step 6",
    ),
    "floor above the peak": ({"lr_scheduler__min_lr": 2e-3}, "min_lr = 0.002", "peak learning rate 0.001"),
    "misspelt flag": ({"training__step": 3}, "no setting --training.step. Near to it: --training.steps", "--flags"),
    "no number": ({"optimizer__weight_decay": "nan"}, "optimizer.weight_decay must be at least 0", "got nan"),
    "two precisions": (
        {"training__precision": "bf16", "training__mixed_precision_param": "float32"},
        "training.precision = 'bf16'",
        "bf16-products or float32",
    ),
    "recomputation by budget": ({"activation_checkpoint__mode": "memory_budget"}, "memory_budget", "compile.enable"),
    "recomputation option": (
        {"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "0"},
        "selective_ac_option = '0'",
        "'op'",
    ),
    "recomputation traced": (
        {"activation_checkpoint__mode": "selective", "activation_checkpoint__debug": True},
        "activation_checkpoint.debug",
    ),
    "compiled part": ({"compile__components": "loss,optimizer"}, "compile.components = ['optimizer']", "model, loss"),
    "compiler": ({"compile__enable": True, "compile__backend": "gcc"}, "compile.backend = 'gcc'", "inductor"),
    "model-only end": ({"checkpoint__last_save_model_only": True}, "last_save_model_only must be false", "convert"),
    "one checkpoint": ({"checkpoint__keep_latest_k": 1}, "checkpoint.keep_latest_k must be 2 or more", "got 1"),
    "part of a checkpoint": ({"checkpoint__exclude_from_loading": "data"}, "['data']", "optimizer, lr_scheduler,"),
    "step without checkpoints": ({"checkpoint__load_step": 3}, "checkpoint.load_step = 3", "checkpoint.enable is off"),
    "profiler on a CPU": ({"profiling__enable_profiling": True}, "profiling.enable_profiling", "needs a GPU"),
    "trace of fewer steps than one": (
        {"profiling__enable_profiling": True, "profiling__profile_freq": 3},
        "profiling.profile_freq = 3",
    ),
    "simulated ranks": ({"comm__mode": "fake_backend"}, "comm.mode = 'fake_backend'", "NGPU"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_paragraph(name, monkeypatch, capsys):
    """As the trainer does it before it touches a device: rank 0 prints one paragraph, and the process ends."""
    settings, *said = REFUSED[name]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("NGPU", raising=False)
    error = refusal(capsys, lambda: trainer.check(entry.read(arguments(**settings))[1]))
    assert error.startswith("\nerror: ")
    for words in said:
        assert words in error


WRONG = {
    'mode = "none"': ('mode = "some"', "activation_checkpoint.mode = 'some' is unknown; allowed: selective, full"),
    "steps = 6": ('steps = "6"', "training.steps must be int | None: got '6'"),
    "log_freq = 1": ("log_freq = true", "metrics.log_freq must be int: got True"),
    "trace_buf_size = 0": ('[data]\nweights = [1, "2"]', "data.weights must be list[float]: got [1, '2']"),
}


@pytest.mark.parametrize("right", WRONG)
def test_what_stands_in_a_toml_file_is_checked_too(right, tmp_path):
    wrong, said = WRONG[right]
    toml = tmp_path / "wrong.toml"
    toml.write_text(TINY.read_text().replace(f"\n{right}\n", f"\n{wrong}\n"))
    with pytest.raises(ValueError, match=re.escape(said)):
        read_job_config(["--job.config_file", str(toml)])


BROKEN = {
    "[mixer]\ndual_inputs = true": ["there is no setting mixer.dual_inputs", "Near to it: mixer.dual_input", "--flags"],
    "[lr_schedule]\nmin_lr = 0.0": ["there is no setting lr_schedule.", "lr_scheduler"],
    "[mixer]\nrope = True": ["wrong.toml is not valid TOML", "line ", "train_configs/debug.toml"],
    "\x80": ["wrong.toml is not valid TOML", "UTF-8"],
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_toml_file_that_cannot_be_read(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    toml = tmp_path / "wrong.toml"
    toml.write_bytes(TINY.read_bytes() + f"\n{text}\n".encode("latin1"))
    error = refusal(capsys, entry.read, [str(toml)])
    for words in BROKEN[text]:
        assert words in error


def test_toml_files_of_before_are_read(tmp_path):
    """They name what TorchTitan's entry point needed, and settings at values that change nothing."""
    toml = tmp_path / "old.toml"
    old = (
        '[job]\ncustom_config_module = "interdomain.titan.job_config"\n[experimental]\ncustom_import = "interdomain.titan"\n'
        "[parallelism]\ntensor_parallel_degree = 1\n[memory_estimation]\nenable = false\n"
    )
    toml.write_text(old + TINY.read_text())
    job = read_job_config(entry.arguments_of([str(toml), "--parallelism.no-disable_loss_parallel"]))
    assert make_plan(job, 1) == make_plan(read_job_config(["--job.config_file", str(TINY)]), 1)


def test_the_command_line_wins_over_the_file(tmp_path):
    """In whichever unit the file says it; and a warmup of the file's that is longer than the schedule is shortened."""
    toml = tmp_path / "tokens.toml"
    text = TINY.read_text().replace("warmup_steps = 2", "warmup_tokens = 10_240").replace("total_steps = 6", "")
    toml.write_text(text.replace("\nsteps = 6", "\ntokens = 40_960"))  # 80 steps, 20 of them warm up

    def length(*given):
        made = make_plan(read_job_config(["--job.config_file", str(toml), *given]), 1)
        return made.steps, made.warmup_steps, "warmup  SHORTENED from 20 steps" in made.describe()

    assert length() == (80, 20, False)
    assert length("--training.steps", "30") == (30, 20, False)
    assert length("--training.steps", "10") == (10, 1, True)
    assert length("--training.steps=30", "--lr-scheduler.warmup-steps", "5") == (30, 5, False)
    assert length("--lr_scheduler.warmup_steps", "0") == (80, 0, False)
    assert length("--training.tokens", "0") == (10_000, 20, False)
    with pytest.raises(ValueError, match="warmup of 20 steps is longer than the schedule of 10"):
        length("--training.steps", "10", "--lr_scheduler.warmup_steps", "20")


def test_curves_for_wandb_need_it(monkeypatch):
    job = parse(metrics__enable_wandb=True)
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs wandb"):
        settings.refuse_unsupported(job)
    monkeypatch.setattr(settings, "find_spec", lambda name: name)
    settings.refuse_unsupported(job)
