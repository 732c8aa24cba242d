"""Reading of a TOML file and flags, and refusals in one paragraph before anything is built."""

import re

import pytest

from interdomain.removed import REMOVED
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
    assert OURS.keys() <= shared
    expected = job_config.TORCHTITAN_DEFAULTS | OURS
    defaults = schema.JobConfig()
    for name in shared:
        assert defaults[name] == expected[name], name


SCHEDULE = "--parallelism.pipeline_parallel_schedule"
# Flags of a run on two ranks, and parts of the error message.
REFUSED = [
    ("--mixer.condition=s4", "mixer.condition must be one of softmax, interdomain, ... got s4"),
    ("--model.flavor=8B", "model.flavor must be one of debug, 125M, 350M, ... 8B"),
    ("--mixer.condition=softmax --mixer.n_basis=8", "mixer.n_basis = 8 ... no layer reads it"),
    ("--mixer.n_kv_heads=3", "n_kv_heads must divide n_heads = 4 ... got 3"),
    ("--training.local_batch_size=3", "training.global_batch_size = 8 must be a multiple of 6"),
    (
        "--parallelism.data_parallel_shard_degree=4",
        "number of ranks, 2: replicas 1 x shards 4 ... is 4. Set",
    ),
    ("--lr_scheduler.total_steps=5 --lr_scheduler.min_lr=0", "total_steps = 5 ... last step 6"),
    ("--lr_scheduler.min_lr=0.002", "min_lr = 0.002 ... peak learning rate 0.001"),
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
    (TENSOR + "--model.vocab_size=513", "does not divide vocab_size ... = 513. Set"),
    (TENSOR + "--mixer.condition=gla", "does not divide the heads of gla's state"),
    (
        TENSOR + "--validation.enable --validation.seq_len=33",
        "does not divide validation.seq_len = 33",
    ),
    (
        PIPELINE + "--parallelism.pipeline_parallel_first_stage_less_layers=6",
        "n_layers = 4 cannot be divided over 2 stages ... input_weight (6) exceeds",
    ),
    (
        PIPELINE + "--parallelism.pipeline_parallel_layers_per_stage=2",
        "layers_per_stage = 2 makes 3 stages of n_layers = 4 ... needs 2.",
    ),
    (PIPELINE + "--training.local_batch_size=8", "gives 1 micro-batch(es). 1F1B on ... 2 or more"),
    (
        f"{PIPELINE} {SCHEDULE} Interleaved1F1B --training.local_batch_size 1 "
        "--training.global_batch_size 7",
        "gives 7 micro-batch(es) ... such as a multiple of 2",
    ),
    (PIPELINE + "--validation.enable", "= 3 must be training.local_batch_size = 4"),
    (f"{PIPELINE} {SCHEDULE} DualPipeV", "must be one of 1F1B, GPipe, ... got DualPipeV"),
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


@pytest.mark.parametrize("name", [name for name in REMOVED if "." in name])
def test_a_removed_setting_says_what_to_do(name, tmp_path):
    """It may come in a file or as a flag."""
    setting, _, value = name.partition(" = ")
    toml = tmp_path / "old.toml"
    toml.write_text(f'parallelism.tensor_parallel_degree = 2\n{setting} = "{value}"')
    for arguments in (["--job.config_file", str(toml)], [f"--{setting}", value]):
        with pytest.raises(ValueError, match=re.escape(REMOVED[name])):
            read_job_config(arguments)


# A TOML file, and a part of the error message.
BROKEN = {
    '[activation_checkpoint]\nmode = "some"': "mode must be Literal['selective', 'full', 'none']",
    "[metrics]\nlog_freq = true": "metrics.log_freq must be int: got True",
    '[data]\nweights = [1, "2"]': "data.weights must be list[float]: got [1, '2']",
    "[mixer]\ndual_inputs = true": "no setting mixer.dual_inputs. Near to it: mixer.dual_input",
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
    lines = [f'{setting} = "~/${{SCRATCH}}$SCRATCH"' for setting in PATHS]
    toml = tmp_path / "paths.toml"
    toml.write_text("\n".join([*lines, 'job.description = "~ $SCRATCH"']))
    from_file = read_job_config(["--job.config_file", "~/paths.toml"])
    from_flags = read_job_config([f"--{setting}=~/${{SCRATCH}}$SCRATCH" for setting in PATHS])
    for setting in PATHS:
        assert from_file[setting] == from_flags[setting] == f"{tmp_path}//disk/me/disk/me"
    assert from_file.job.description == "~ $SCRATCH"


def test_paths_of_several_corpora(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/me")
    toml = tmp_path / "paths.toml"
    toml.write_text('data.corpus = ["~/a", "b", "shards/*[0-9]$"]')
    from_file = read_job_config([f"--job.config_file={toml}"])
    assert from_file.data.corpus == ["/me/a", "b", "shards/*[0-9]$"]
    from_flag = read_job_config(["--data.corpus", "~/a,$HOME/b"])
    assert from_flag.data.corpus == "/me/a,/me/b"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("$NONE_SUCH/x", "$NONE_SUCH/x: the environment variable NONE_SUCH is not set"),
        ("x/${EMPTY}", "the environment variable EMPTY is not set"),
        ("~no-such-user/x", "there is no such user's home"),
    ],
)
def test_a_path_that_cannot_be_expanded(path, message, monkeypatch, capsys):
    monkeypatch.setenv("EMPTY", "")
    assert message in refusal(capsys, entry.read, [str(TINY), f"--job.dump_folder={path}"])


def test_toml_files_of_torchtitan_are_read(tmp_path):
    """They name what TorchTitan's entry point needs, and settings of TorchTitan at values that change nothing."""
    toml = tmp_path / "old.toml"
    old = """
        job.custom_config_module = "interdomain.titan.job_config"
        experimental.custom_import = "interdomain.titan"
        parallelism.tensor_parallel_degree = 1
        memory_estimation.enable = false
        model.flavor = "debugmodel"
    """
    toml.write_text(old)
    _, job = entry.read([str(toml)])
    assert make_plan(job, 1) == make_plan(read_job_config([]), 1)


@pytest.mark.parametrize(
    ("flags", "n_basis"), [("", 16), ("--mixer.condition gla --mixer.state_heads 2", None)]
)
def test_a_condition_from_the_command_line_need_not_read_the_n_basis_of_the_file(flags, n_basis):
    job = parse(flags, toml=REPOSITORY / "train_configs/recall.toml")
    make_plan(job, 1)
    assert job.mixer.n_basis == n_basis


def plan_in_tokens(folder, given):
    """Returns the plan of a file that counts in tokens: 80 steps, 20 of which warm up. Every 25th is kept."""
    text = TINY.read_text()
    text = text.replace("warmup_steps = 2", "warmup_tokens = 10_240")
    text = text.replace("total_steps = 6", "").replace("\nsteps = 6", "\ntokens = 40_960")
    kept = "enable = true\nkeep_every_tokens = 12_700\nkeep_steps = [64, 900]\n"
    toml = folder / "tokens.toml"
    toml.write_text(text.replace("[checkpoint]\n", f"[checkpoint]\n{kept}"))
    return make_plan(parse(given, toml=toml), 1)


@pytest.mark.parametrize(
    ("given", "steps", "warmup"),
    [
        ("", 80, 20),
        ("--training.steps=30 --lr-scheduler.warmup-steps 5", 30, 5),
        ("--lr_scheduler.warmup_steps 0", 80, 0),
        ("--training.tokens 0", 10_000, 20),
        # A warmup of the file that is longer than the schedule is shortened.
        ("--training.steps 10", 10, 1),
    ],
)
def test_the_command_line_wins_over_the_file(tmp_path, given, steps, warmup):
    """It does so whichever unit the file uses."""
    plan = plan_in_tokens(tmp_path, given)
    assert plan.steps == steps
    assert plan.warmup_steps == warmup


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("", [25, 50, 64, 75, 80]),
        ("--checkpoint.keep_every 15 --checkpoint.keep_steps 7", [7, 15, 30, 45, 60, 75, 80]),
        ("--checkpoint.keep_every_tokens 1 --training.steps 30", list(range(1, 31))),
        ("--checkpoint.keep_every_tokens 0", [64, 80]),
    ],
)
def test_milestones(tmp_path, given, kept):
    assert sorted(plan_in_tokens(tmp_path, given).milestones) == kept
