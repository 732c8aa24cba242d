"""What is read from a TOML file and flags, and what is refused in one paragraph before anything is built."""

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from interdomain.model import build_config
from interdomain.titan import entry, host, trainer
from interdomain.titan.plan.run_plan import make_plan
from interdomain.titan.resume.resume_from import ResumePoint, require_same_run
from interdomain.titan.settings import job_config, schema
from interdomain.titan.settings.job_config import read_job_config

from ..common import REPOSITORY
from .conftest import refusal
from .runs import CONTEXT, PIPELINE, TENSOR, TINY
from .test_plan import arguments

# Defaults of ours that are not TorchTitan's.
OURS = {
    "model.name": "interdomain",
    "model.flavor": "debug",
    "lr_scheduler.total_steps": 0,
    "lr_scheduler.decay_ratio": 1.0,
    "lr_scheduler.decay_type": "cosine",
    "activation_checkpoint.selective_ac_option": "op",
    "debug.seed": 42,
}


def test_a_setting_that_torchtitan_has_has_torchtitans_default():
    shared = job_config.KINDS.keys() & host.TORCHTITAN_DEFAULTS.keys()
    assert len(shared) > 50
    assert OURS.keys() <= shared
    for setting in shared:
        default = OURS.get(setting, host.TORCHTITAN_DEFAULTS[setting])
        assert job_config.value_of(schema.JobConfig(), setting) == default, setting


REFUSED = {
    "unknown condition": ({"mixer__condition": "s4"}, "mixer.condition must be one of softmax, interdomain,", "got s4"),
    "unknown size": (
        {"model__flavor": "8B"},
        "model.flavor must be one of debug, 125M, 350M, 760M, 1.3B, 7B, 70B",
        "8B",
    ),
    "unknown readout": ({"mixer__readout": "imag"}, "mixer.readout = 'imag'", "complex, real, hermitian"),
    "switch of another mixer": ({"mixer__condition": "softmax", "mixer__output_gate": True}, "no switches but"),
    "a size of no layer": (
        {"mixer__condition": "softmax", "mixer__n_basis": 8},
        "mixer.n_basis = 8",
        "no layer reads it",
    ),
    "two sizes of the state": (
        {"mixer__condition": "gla", "mixer__n_basis": 8, "mixer__state_heads": 4},
        "mixer.n_basis = 8",
        "with mixer.state_heads not for gla",
    ),
    "heads that do not divide": ({"mixer__n_kv_heads": 3}, "n_kv_heads must divide n_heads = 4", "got 3"),
    "layers of a hybrid": ({"mixer__softmax_every": 9}, "mixer.softmax_every = 9", "from 2 to n_layers = 4"),
    "unknown layers": ({"mixer__layers": "s4"}, "mixer.layers must be of softmax, interdomain,", "got ['s4']"),
    "a window of no layer": ({"mixer__window": 8}, "mixer.window = 8", "only softmax layers have a window"),
    "batch and ranks": ({"training__local_batch_size": 3}, "training.global_batch_size = 8", "multiple of 6"),
    "replicas and ranks": ({"parallelism__data_parallel_replicate_degree": 3}, "replicate_degree = 3", "2 rank(s)"),
    "shards and ranks": ({"parallelism__data_parallel_shard_degree": 4}, "1 x 4", "the number of ranks: 2"),
    "context and ranks": ({"parallelism__context_parallel_degree": 3}, "context_parallel_degree = 3", "the 2 rank(s)"),
    "context and shards": (
        {**CONTEXT, "parallelism__data_parallel_shard_degree": 2},
        "1 x 2 must be the number of ranks left by context_parallel_degree = 2: 1",
    ),
    "context and tokens": ({**CONTEXT, "training__seq_len": 63}, "training.seq_len = 63", "multiple of 2 that is 6 or"),
    "context and convolution": (
        {**CONTEXT, "training__seq_len": 4},
        "training.seq_len = 4",
        "every rank needs the same number, at least 3",
    ),
    "context and validation": (
        {**CONTEXT, "validation__enable": True, "validation__seq_len": 33},
        "validation.seq_len = 33",
        "context_parallel_degree = 2",
    ),
    "context and scan": (
        {**CONTEXT, "mixer__backend": "fft"},
        "mixer.backend = fft",
        "on cpu: allowed are auto",
    ),
    "tensor and ranks": (
        {"parallelism__tensor_parallel_degree": 4},
        "tensor_parallel_degree = 4 does not divide the 2 rank(s)",
        "Set one of 1, 2, or start a multiple of 4 ranks",
    ),
    "tensor and heads": (
        {**TENSOR, "model__n_heads": 4, "mixer__n_kv_heads": 1},
        "tensor_parallel_degree = 2 does not divide n_kv_heads = 1.",
        "Set one of 1,",
    ),
    "tensor and vocabulary": ({**TENSOR, "model__vocab_size": 513}, "vocab_size", "= 513. Set one of 1,"),
    "tensor and tokens": ({**TENSOR, "training__seq_len": 63}, "does not divide training.seq_len = 63"),
    "tensor and validation": (
        {**TENSOR, "validation__enable": True, "validation__seq_len": 33},
        "does not divide validation.seq_len = 33",
    ),
    "pipeline and layers": (
        {**PIPELINE, "parallelism__pipeline_parallel_first_stage_less_layers": 6},
        "n_layers = 4, with 6 for the embedding",
        "2 stages (1F1B on parallelism.pipeline_parallel_degree = 2 ranks): at most 1 are possible",
    ),
    "pipeline and layers per stage": (
        {**PIPELINE, "parallelism__pipeline_parallel_layers_per_stage": 2},
        "layers_per_stage = 2 makes 3 stages of n_layers = 4",
        "needs 2. Leave it out for 2",
    ),
    "interleaved stages": (
        {
            **PIPELINE,
            "parallelism__pipeline_parallel_layers_per_stage": 3,
            "parallelism__pipeline_parallel_schedule": "Interleaved1F1B",
        },
        "layers_per_stage = 3 makes 2 stages",
        "needs a multiple of 2 that is 4 or more. Leave it out for 4",
    ),
    "pipeline and micro-batches": (
        {**PIPELINE, "training__local_batch_size": 8},
        "8 at once on each of 1 data-parallel ranks, are 1 micro-batches. 1F1B on",
        "takes 2 or more. These ranks can run --training.local_batch_size 4.",
    ),
    "pipeline and rounds": (
        {
            **PIPELINE,
            "parallelism__pipeline_parallel_schedule": "Interleaved1F1B",
            "training__local_batch_size": 1,
            "training__global_batch_size": 7,
        },
        "are 7 micro-batches",
        "a multiple of 3, its rounds. These ranks can run --training.global_batch_size 8 --training.local_batch_size 1.",
    ),
    "pipeline and validation": (
        {**PIPELINE, "validation__enable": True},
        "validation.local_batch_size = 3 must be training.local_batch_size = 4",
    ),
    "schedule that splits the backward pass": (
        {**PIPELINE, "parallelism__pipeline_parallel_schedule": "ZBVZeroBubble"},
        "must be one of 1F1B, GPipe, Interleaved1F1B",
        "got ZBVZeroBubble",
    ),
    "no shard of a sequence": (
        {"parallelism__context_parallel_degree": 0},
        "context_parallel_degree must be at least 1",
    ),
    "no sequence": ({"training__seq_len": 0}, "training.seq_len must be at least 1", "got 0"),
    "schedule shorter than the run": (
        {"lr_scheduler__total_steps": 5, "lr_scheduler__min_lr": 0},
        "total_steps = 5",
        "last step 6",
    ),
    "floor above the peak": ({"lr_scheduler__min_lr": 2e-3}, "min_lr = 0.002", "peak learning rate 0.001"),
    "no number": ({"optimizer__weight_decay": "nan"}, "optimizer.weight_decay must be at least 0", "got nan"),
    "no learning rate": ({"optimizer__lr": "inf"}, "optimizer.lr must be positive and finite: got inf"),
    "no backend": (
        {"compile__enable": True, "compile__backend": "inductr"},
        "compile.backend must be one that torch.compiler.list_backends(()) names",
    ),
    "no block": ({"activation_checkpoint__selective_ac_option": "0"}, "selective_ac_option must be op, or a number"),
    "no blocks": ({"activation_checkpoint__selective_ac_option": "abc"}, "selective_ac_option must be op, or a number"),
    "seed of more than 64 bits": ({"debug__seed": 2**64}, "debug.seed must be a number of 64 bits"),
    "one checkpoint": ({"checkpoint__keep_latest_k": 1}, "checkpoint.keep_latest_k must be 2 or more", "got 1"),
    "profiler on a CPU": ({"profiling__enable_profiling": True}, "profiling.enable_profiling", "needs a GPU"),
    "checkpoint without checkpoints": (
        {"checkpoint__initial_load_path": "step-3"},
        "checkpoint.initial_load_path has no effect while checkpoint.enable is off",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_paragraph(name, monkeypatch, capsys):
    """As the trainer does it before it touches a device: rank 0 prints one paragraph, and the process ends."""
    settings, *said = REFUSED[name]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    error = refusal(capsys, lambda: trainer.check(entry.read(arguments(**settings))[1]))
    assert error.startswith("\nerror: ")
    for words in said:
        assert words in error


@pytest.mark.parametrize(
    "flags", [["--training.step", "3"], ["--training.steps", "3x"], ["--compile.components", "all"]]
)
def test_a_flag_that_cannot_be(flags, capsys):
    with pytest.raises(SystemExit) as end:
        read_job_config(["--job.config_file", str(TINY), *flags])
    assert end.value.code == 2
    assert flags[0] in capsys.readouterr().err


BROKEN = {
    '[activation_checkpoint]\nmode = "some"': "activation_checkpoint.mode must be Literal['selective', 'full', 'none']: got",
    '[training]\nsteps = "6"': "training.steps must be int: got '6'",
    "[metrics]\nlog_freq = true": "metrics.log_freq must be int: got True",
    '[data]\nweights = [1, "2"]': "data.weights must be list[float]: got [1, '2']",
    '[checkpoint]\nexclude_from_loading = ["data"]': "checkpoint.exclude_from_loading must be of optimizer, lr_scheduler",
    "[mixer]\ndual_inputs = true": "there is no setting mixer.dual_inputs. Near to it: mixer.dual_input",
    "[parallelism]\nexpert_parallel_degree = 2": "that this plugin does not use. Leave it out.",
    "[parallelism]\npipeline_parallel_microbatch_size = 2": "Set training.local_batch_size instead, and leave it out.",
    "[parallelism]\nenable_async_tensor_parallel = true": "that this plugin does not use. Leave it out.",
    "[parallelism]\npipeline_parallel_schedule_csv = 'a.csv'": "that this plugin does not use. Leave it out.",
    '[training]\ndataset = "c4"': "does not use. Set data.corpus instead, and leave it out.",
    "[quantize.linear.float8]\nemulate = true": "quantize.linear.float8.emulate = True is a setting of TorchTitan that",
    "[mixer]\nrope = True": "wrong.toml is not valid TOML",
    "\x80": "wrong.toml is not valid TOML: 'utf-8' codec",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_toml_file_that_cannot_be(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    toml = tmp_path / "wrong.toml"
    toml.write_bytes(text.encode("latin1"))
    assert BROKEN[text] in refusal(capsys, entry.read, [str(toml)])


def test_toml_files_of_before_are_read(tmp_path):
    """They name what TorchTitan's entry point needed, and settings of TorchTitan's at values that change nothing."""
    toml = tmp_path / "old.toml"
    old = (
        '[job]\ncustom_config_module = "interdomain.titan.job_config"\n[experimental]\ncustom_import = "interdomain.titan"\n'
        "[parallelism]\ntensor_parallel_degree = 1\n[memory_estimation]\nenable = false\n"
    )
    toml.write_text(old + TINY.read_text())
    job = entry.read([str(toml)])[1]
    assert make_plan(job, 1) == make_plan(read_job_config(["--job.config_file", str(TINY)]), 1)


def test_a_condition_from_the_command_line_need_not_read_the_n_basis_of_the_file(tmp_path):
    file = ["--job.config_file", str(REPOSITORY / "train_configs/recall.toml")]
    for flags, n_basis in (
        ([], 16),
        (["--mixer.condition", "gla"], 16),
        (["--mixer.condition", "mamba2", "--mixer.state_heads", "2"], 16),
        (["--mixer.condition", "softmax"], None),
        (["--mixer.condition", "interdomain", "--mixer.softmax_every", "2"], 16),
        (["--mixer.layers", "softmax", "softmax"], None),
        (["--mixer.condition", "gla", "--mixer.state_heads", "2"], None),
    ):
        job = read_job_config([*file, *flags])
        make_plan(job, 1)
        assert job.mixer.n_basis == n_basis, flags


def test_a_resume_compares_no_n_basis_that_is_not_read(tmp_path, capsys):
    """A run of softmax may have recorded one that it was given."""

    def resume(condition):
        before, now = ({"model": build_config("debug", condition, n_basis=n).to_dict()} for n in (16, 32))
        record = {**before, "size": "debug", "condition": condition}
        require_same_run(ResumePoint(tmp_path, Metadata({}), record, "latest"), now, {}, batch=False)

    resume("softmax")
    assert "mixer.n_basis is 16 there and 32 here" in refusal(capsys, resume, "gla")


def test_the_command_line_wins_over_the_file(tmp_path, caplog):
    """In whichever unit the file says it; and a warmup of the file's that is longer than the schedule is shortened."""
    toml = tmp_path / "tokens.toml"
    text = TINY.read_text().replace("warmup_steps = 2", "warmup_tokens = 10_240").replace("total_steps = 6", "")
    toml.write_text(text.replace("\nsteps = 6", "\ntokens = 40_960"))  # 80 steps, 20 of them warm up

    def length(*given):
        made = make_plan(read_job_config([f"--job.config_file={toml}", *given]), 1)
        return made.steps, made.warmup_steps

    assert length() == (80, 20)
    assert length("--training.steps", "30") == (30, 20)
    assert length("--training.steps=30", "--lr-scheduler.warmup-steps", "5") == (30, 5)
    assert length("--lr_scheduler.warmup_steps", "0") == (80, 0)
    assert length("--training.tokens", "0") == (10_000, 20)
    assert "shortened" not in caplog.text
    assert length("--training.steps", "10") == (10, 1)
    assert "the warmup of 20 steps is longer than the schedule: shortened to 1 steps" in caplog.text
