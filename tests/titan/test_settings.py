"""Reading of a TOML file and flags, and refusals in one paragraph before anything is built."""

import pytest

from interdomain.removed import NO_SPIKES, NO_ZERO_BUBBLE
from interdomain.titan import entry, trainer
from interdomain.titan.plan.run_plan import make_plan
from interdomain.titan.settings import job_config, schema
from interdomain.titan.settings.job_config import read_job_config

from ..common import REPOSITORY
from .conftest import refusal
from .runs import TINY, parse
from .test_plan import CONTEXT, FOUR_LAYERS, PIPELINE, TENSOR


@pytest.fixture(autouse=True)
def rank_0_of_2(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")


# Our defaults that are not TorchTitan's.
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
    shared = schema.SETTINGS.keys() & job_config.TORCHTITAN_DEFAULTS.keys()
    assert len(shared) > 50
    expected = job_config.TORCHTITAN_DEFAULTS | OURS
    defaults = schema.JobConfig()
    for name in shared:
        assert defaults[name] == expected[name], name


SCHEDULE = "--parallelism.pipeline_parallel_schedule"
# Flags of a run on two ranks, and parts of the error message.
REFUSED = [
    ("--mixer.condition=s4", "mixer.condition must be one of softmax, interdomain, ... got s4"),
    ("--mixer.condition=softmax --mixer.n_basis=8", "mixer.n_basis = 8 ... no layer reads it"),
    (
        "--training.local_batch_size=3",
        "training.global_batch_size = 8 does not divide: 2 data-parallel rank(s) read 3",
    ),
    ("--training.global_batch_size=1", "global_batch_size = 1 does not divide"),
    (
        "--parallelism.data_parallel_shard_degree=4",
        "number of ranks, 2: replicas 1 x shards 4 ... is 4. Set",
    ),
    ("--lr_scheduler.total_steps=5 --lr_scheduler.min_lr=0", "total_steps = 5 ... last step 6"),
    ("--lr_scheduler.min_lr=0.002", "min_lr = 0.002 ... peak learning rate 0.001"),
    (
        "--job.dump_folder=x/${NONE_SUCH}",
        "x/${NONE_SUCH}: the environment variable NONE_SUCH is not set",
    ),
    ("--job.dump_folder=~no-such-user/x", "there is no such user's home"),
    ("--optimizer.lr=inf", "optimizer.lr must be positive and finite: got inf"),
    ("--optimizer.name=Muon --training.enable_cpu_offload", "would compute Newton-Schulz"),
    ("--compile.enable --compile.backend=inductr", "must be one that torch.compiler.list_backends"),
    ("--comm.mode=fake_backend", "environment variables NGPU ... NGPU is not set"),
    ("--checkpoint.keep_latest_k=1", "checkpoint.keep_latest_k must be 2 or more ... got 1"),
    ("--profiling.enable_profiling", "profiling.enable_profiling ... needs a GPU"),
    ("--checkpoint.load_step=4", "has no effect while checkpoint.enable is off"),
    (CONTEXT + "--training.seq_len=4", "every rank needs the same number, at least 3"),
    (CONTEXT + "--mixer.backend=fft", "mixer.backend = fft ... on cpu: allowed are auto"),
    (TENSOR + "--mixer.n_kv_heads=1", "= 2 does not divide n_kv_heads = 1. Set"),
    (TENSOR + "--mixer.condition=gla", "does not divide the heads of gla's state"),
    (
        PIPELINE + "--parallelism.pipeline_parallel_first_stage_less_layers=6",
        "n_layers = 4 cannot be divided over 2 stages ... input_weight (6) exceeds",
    ),
    (
        PIPELINE + "--parallelism.pipeline_parallel_layers_per_stage=2",
        "layers_per_stage = 2 makes 3 stages of n_layers = 4 ... needs 2.",
    ),
    (
        PIPELINE + "--training.local_batch_size=16",
        "1F1B on parallelism.pipeline_parallel_degree = 2 ranks cannot run 1 micro-batch(es)",
    ),
    (
        f"{PIPELINE} {SCHEDULE} Interleaved1F1B --training.local_batch_size 1 "
        "--training.global_batch_size 7",
        "cannot run 7 micro-batch(es) ... is a multiple of 2",
    ),
    (
        f"{PIPELINE} {SCHEDULE} GPipe --training.local_batch_size 16 --validation.enable "
        "--validation.local_batch_size 16",
        "validation.local_batch_size and validation.seq_len must be 8 and 64",
    ),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_a_run_is_refused_in_one_paragraph(given, message, capsys):
    """Rank 0 prints it before a device is touched, and the process ends."""
    flags = (FOUR_LAYERS + given).split()

    def start():
        _, job = entry.read([str(TINY), "--data.corpus=corpus", *flags])
        trainer.check(job)

    error = refusal(capsys, start)
    assert error.startswith("\nerror: ")
    for part in message.split(" ... "):
        assert part in error


@pytest.mark.parametrize("flags", ["--training.step 3", "--training.steps 3x"])
def test_a_flag_that_cannot_be(flags, capsys):
    with pytest.raises(SystemExit) as end:
        parse(flags)
    assert end.value.code == 2
    assert flags.split()[0] in capsys.readouterr().err


# A TOML file, and a part of the error message.
BROKEN = {
    '[activation_checkpoint]\nmode = "some"': "mode must be Literal['selective', 'full', 'none']",
    "[metrics]\nlog_freq = true": "metrics.log_freq must be int: got True",
    '[data]\nweights = [1, "2"]': "data.weights must be list[float]: got [1, '2']",
    "[mixer]\ndual_inputs = true": "no setting mixer.dual_inputs. Near to it: mixer.dual_input",
    "[training]\nmax_spikes = 2": NO_SPIKES,
    '[parallelism]\npipeline_parallel_schedule = "ZBVZeroBubble"': NO_ZERO_BUBBLE,
    "[parallelism]\nexpert_parallel_degree = 2": "The model has no experts. Leave it out.",
    "[mixer]\nrope = True": "wrong.toml is not valid TOML",
    "\x80": "wrong.toml is not valid TOML: 'utf-8' codec",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_toml_file_that_cannot_be(text, tmp_path, capsys):
    toml = tmp_path / "wrong.toml"
    toml.write_bytes(text.encode("latin1"))
    assert BROKEN[text] in refusal(capsys, entry.read, [str(toml)])


def test_all_problems_of_a_file_come_in_one_message(tmp_path, capsys):
    """A section whose feature is off is passed over."""
    toml = tmp_path / "wrong.toml"
    toml.write_text("""
        model.flavor = "8B"
        model.dims = 64
        training.steps = "6"
        training.gc_freq = 0
        quantize.linear.float8.emulate = true
    """)
    error = refusal(capsys, entry.read, [str(toml)])
    assert error.strip().startswith("error: 4 ")
    for setting in ("model.dims", "model.flavor", "training.steps", "training.gc_freq"):
        assert setting in error


PATHS = [
    "job.dump_folder",
    "profiling.save_traces_folder",
    "metrics.save_tb_folder",
    "data.corpus",
    "data.validation_corpus",
    "data.tokenizer",
    "checkpoint.folder",
    "checkpoint.initial_load_path",
]


def test_home_and_variables_are_expanded_in_every_path(tmp_path, monkeypatch):
    """A shell leaves `~` in `--job.dump_folder=~/x`. Other settings stay as they are."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", "/disk/me")
    are_paths = {name for name, setting in schema.SETTINGS.items() if setting.is_path}
    assert are_paths == {*PATHS, "job.config_file"}
    with open(tmp_path / "paths.toml", "w") as file:
        for setting in (*PATHS, "job.description"):
            print(f'{setting} = "~/${{SCRATCH}}$SCRATCH"', file=file)
    job = read_job_config(["--job.config_file=~/paths.toml", "--data.corpus=~/$SCRATCH"])
    expected = dict.fromkeys(PATHS, f"{tmp_path}//disk/me/disk/me")
    expected["data.corpus"] = f"{tmp_path}//disk/me"
    expected["job.description"] = "~/${SCRATCH}$SCRATCH"
    assert {setting: job[setting] for setting in expected} == expected


def test_paths_of_several_corpora(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/me")
    toml = tmp_path / "paths.toml"
    toml.write_text('data.corpus = ["~/a", "b", "shards/*[0-9]$"]')
    from_file = read_job_config([f"--job.config_file={toml}"])
    assert from_file.data.corpus == ["/me/a", "b", "shards/*[0-9]$"]
    from_flag = read_job_config(["--data.corpus", "~/a,$HOME/b"])
    assert from_flag.data.corpus == "/me/a,/me/b"


def test_toml_files_of_torchtitan_are_read(tmp_path):
    """They name what TorchTitan's entry point needs, and settings of TorchTitan at values that change nothing."""
    toml = tmp_path / "old.toml"
    toml.write_text("""
        job.custom_config_module = "interdomain.titan.job_config"
        experimental.custom_import = "interdomain.titan"
        parallelism.tensor_parallel_degree = 1
        memory_estimation.enable = false
        model.flavor = "debugmodel"
    """)
    _, job = entry.read([str(toml)])
    assert make_plan(job, 1) == make_plan(read_job_config([]), 1)


def test_a_condition_from_the_command_line_need_not_read_the_n_basis_of_the_file():
    recall = REPOSITORY / "train_configs/recall.toml"
    assert parse(toml=recall).mixer.n_basis == 16
    job = parse("--mixer.condition gla --mixer.state_heads 2", toml=recall)
    make_plan(job, 1)
    assert job.mixer.n_basis is None


def in_tokens(folder):
    """Writes a file that counts in tokens: 80 steps, 20 of which warm up. Every 25th is kept."""
    toml = folder / "tokens.toml"
    toml.write_text("""
        training = { tokens = 40_960, local_batch_size = 8, global_batch_size = 8, seq_len = 64 }
        lr_scheduler = { warmup_tokens = 10_240 }
        checkpoint = { enable = true, keep_every_tokens = 12_700, keep_steps = [64, 900] }
    """)
    return toml


@pytest.mark.parametrize(
    ("given", "steps", "warmup", "kept"),
    [
        ("", 80, 20, [25, 50, 64, 75, 80]),
        ("--training.steps 30 --lr-scheduler.warmup-steps 5", 30, 5, [25, 30]),
        ("--lr_scheduler.warmup_steps 0 --checkpoint.keep_every_tokens 0", 80, 0, [64, 80]),
        # A warmup of the file that is longer than the schedule is shortened.
        ("--training.steps 10 --checkpoint.keep_every_tokens 1", 10, 1, [*range(1, 11)]),
        ("--checkpoint.keep_every 30 --checkpoint.keep_steps 7", 80, 20, [7, 30, 60, 80]),
    ],
)
def test_the_command_line_wins_over_the_file(tmp_path, given, steps, warmup, kept):
    """It does so whichever unit the file uses."""
    plan = make_plan(parse(given, toml=in_tokens(tmp_path)), 1)
    assert plan.steps == steps
    assert plan.warmup_steps == warmup
    assert sorted(plan.milestones) == kept


def test_no_tokens_leave_the_default_number_of_steps(tmp_path):
    assert make_plan(parse("--training.tokens 0", toml=in_tokens(tmp_path)), 1).steps == 10_000
