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
from .test_plan import FOUR_LAYERS

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
    shared = schema.SETTINGS.keys() & job_config.TORCHTITAN_DEFAULTS.keys()
    assert len(shared) > 50
    assert OURS.keys() <= shared
    for setting in shared:
        default = OURS.get(setting, job_config.TORCHTITAN_DEFAULTS[setting])
        assert schema.JobConfig()[setting] == default, setting


SEVEN = "gives 7 micro-batch(es) ... needs a multiple of 2"
REFUSED = {  # by the axis on two ranks: flags, and what is said of them
    "": {
        "--mixer.condition=s4": "mixer.condition must be one of softmax, interdomain, ... got s4",
        "--model.flavor=8B": "model.flavor must be one of debug, 125M, 350M, 760M, 1.3B, 7B, 70B ... 8B",
        "--mixer.condition=softmax --mixer.n_basis=8": "mixer.n_basis = 8 ... no layer reads it",
        "--mixer.condition=gla --mixer.n_basis=8 --mixer.state_heads=4": "with mixer.state_heads not for gla",
        "--mixer.n_kv_heads=3": "n_kv_heads must divide n_heads = 4 ... got 3",
        "--mixer.layers=s4": "mixer.layers must be of softmax, interdomain, ... got ['s4']",
        "--training.local_batch_size=3": "training.global_batch_size = 8 must be a multiple of 6",
        "--parallelism.data_parallel_replicate_degree=3": "number of ranks, 2: replicas 3 ... is 0. Set",
        "--parallelism.data_parallel_shard_degree=4": "number of ranks, 2: replicas 1 x shards 4 ... is 4. Set",
        "--parallelism.tensor_parallel_degree=4": "number of ranks, 2: ... x tensor 4 ... is 0. Set",
        "--parallelism.context_parallel_degree=0": "context_parallel_degree must be at least 1",
        "--lr_scheduler.total_steps=5 --lr_scheduler.min_lr=0": "total_steps = 5 ... last step 6",
        "--lr_scheduler.min_lr=0.002": "min_lr = 0.002 ... peak learning rate 0.001",
        "--optimizer.weight_decay=nan": "optimizer.weight_decay must be at least 0 ... got nan",
        "--optimizer.name=Muon --training.enable_cpu_offload": "would compute Newton-Schulz",
        "--optimizer.lr=inf": "optimizer.lr must be positive and finite: got inf",
        "--compile.enable --compile.backend=inductr": "compile.backend must be one that torch.compiler.list_backends(()) names",
        "--activation_checkpoint.selective_ac_option=abc": "selective_ac_option must be op, or a number",
        "--debug.seed=18446744073709551616": "debug.seed must be a number of 64 bits",
        "--comm.mode=fake_backend": "needs the environment variables NGPU ... LOCAL_RANK=0: NGPU is not set",
        "--checkpoint.keep_latest_k=1": "checkpoint.keep_latest_k must be 2 or more ... got 1",
        "--checkpoint.keep_steps=0": "checkpoint.keep_steps must be of steps from 1: got [0]",
        "--profiling.enable_profiling": "profiling.enable_profiling ... needs a GPU",
        "--checkpoint.load_step=4": "checkpoint.load_step has no effect while checkpoint.enable is off",
        "--checkpoint.initial_load_path=step-3": "checkpoint.initial_load_path has no effect while checkpoint.enable is off",
    },
    "context": {
        "--parallelism.data_parallel_shard_degree=2": "shards 2 x context 2 ... is 4. Set",
        "--training.seq_len=4": "training.seq_len = 4 ... every rank needs the same number, at least 3",
        "--validation.enable --validation.seq_len=33": "validation.seq_len = 33 ... context_parallel_degree = 2",
        "--mixer.backend=fft": "mixer.backend = fft ... on cpu: allowed are auto",
    },
    "tensor": {
        "--model.n_heads=4 --mixer.n_kv_heads=1": "= 2 does not divide n_kv_heads = 1. Set",
        "--model.vocab_size=513": "does not divide vocab_size ... = 513. Set",
        # The last layer, s4d, has as many heads of keys as query heads.
        "--mixer.condition=s4d --mixer.softmax_every=3 --mixer.n_kv_heads=1": "does not divide n_kv_heads = 1",
        "--mixer.condition=gla": "= 2 does not divide the heads of gla's state (mixer.state_heads sets them) = 1",
        "--validation.enable --validation.seq_len=33": "does not divide validation.seq_len = 33",
    },
    "pipeline": {
        "--pipeline.first_stage_less_layers=6": "n_layers = 4 cannot be divided over 2 stages ... input_weight (6) exceeds",
        "--pipeline.layers_per_stage=2": "layers_per_stage = 2 makes 3 stages of n_layers = 4 ... needs 2.",
        "--pipeline.layers_per_stage=3 --pipeline.schedule=Interleaved1F1B": "makes 2 stages ... needs 4 or 6",
        "--training.local_batch_size=8": "gives 1 micro-batch(es). 1F1B on ... needs 2 or more",
        "--pipeline.schedule=Interleaved1F1B --training.local_batch_size=1 --training.global_batch_size=7": SEVEN,
        "--validation.enable": "validation.local_batch_size = 3 must be training.local_batch_size = 4",
        "--training.reduce_gradients=micro-batch": "PyTorch's pipeline sums gradients once a step",
        "--training.mixed_precision_reduce=bf16": "would add up the micro-batches in bf16",
        "--pipeline.schedule=DualPipeV": "must be one of 1F1B, GPipe, Interleaved1F1B ... got DualPipeV",
    },
}


@pytest.mark.parametrize(
    ("axis", "given"), [(axis, given) for axis in REFUSED for given in REFUSED[axis]]
)
def test_refused_in_one_paragraph(axis, given, monkeypatch, capsys):
    """The trainer's refusal before it touches a device: rank 0 prints one paragraph, and the process ends."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    flags = (FOUR_LAYERS + given.replace("--pipeline.", "--parallelism.pipeline_parallel_")).split()
    if axis:
        flags.append(f"--parallelism.{axis}_parallel_degree=2")
    error = refusal(
        capsys, lambda: trainer.check(entry.read([str(TINY), "--data.corpus=corpus", *flags])[1])
    )
    assert error.startswith("\nerror: ")
    assert all(words in error for words in REFUSED[axis][given].split(" ... "))


def test_every_setting_has_a_help_text(capsys):
    """A comment that a formatter moves away from its field would be lost."""
    with pytest.raises(SystemExit):
        read_job_config(["--help"])
    shown = capsys.readouterr().out
    flags = re.findall(r"^[^\w\n]*--([a-z][\w.-]+).*\n[^\w\n]*(\(default)?", shown, re.MULTILINE)
    assert {flag.replace("-", "_") for flag, _ in flags} >= schema.SETTINGS.keys()
    assert [flag for flag, bare in flags if bare] == []


@pytest.mark.parametrize("flags", [["--training.step", "3"], ["--training.steps", "3x"]])
def test_a_flag_that_cannot_be(flags, capsys):
    with pytest.raises(SystemExit) as end:
        read_job_config(["--job.config_file", str(TINY), *flags])
    assert end.value.code == 2
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in REMOVED if "." in name])
def test_a_removed_setting_says_what_to_do(name, tmp_path):
    """In a file and as a flag."""
    setting, _, value = name.partition(" = ")
    toml = tmp_path / "old.toml"
    toml.write_text(f'parallelism.tensor_parallel_degree = 2\n{setting} = "{value}"')
    for given in (
        ["--job.config_file", str(toml)],
        [f"--{setting}={value}"],
        [f"--{setting}", value],
    ):
        with pytest.raises(ValueError, match=re.escape(REMOVED[name])):
            read_job_config(given)


PIPELINED = "[parallelism]\npipeline_parallel_degree = 2\n"
FLOAT8 = '[model]\nconverters = ["float8"]\n[quantize.linear.float8]\n'
BROKEN = {
    '[activation_checkpoint]\nmode = "some"': "activation_checkpoint.mode must be Literal['selective', 'full', 'none']: got",
    '[training]\nsteps = "6"': "training.steps must be int: got '6'",
    "[metrics]\nlog_freq = true": "metrics.log_freq must be int: got True",
    '[data]\nweights = [1, "2"]': "data.weights must be list[float]: got [1, '2']",
    '[checkpoint]\nexclude_from_loading = ["data"]': "checkpoint.exclude_from_loading must be of optimizer, lr_scheduler",
    "[mixer]\ndual_inputs = true": "there is no setting mixer.dual_inputs. Near to it: mixer.dual_input",
    "[parallelism]\nexpert_parallel_degree = 2": "has no effect here. The model has no experts. Leave it out.",
    f"{PIPELINED}pipeline_parallel_microbatch_size = 2": "Set training.local_batch_size instead. Leave it out.",
    f"{FLOAT8}emulate = true": "quantize.linear.float8.emulate = True is a setting of TorchTitan that",
    "[mixer]\nrope = True": "wrong.toml is not valid TOML",
    "\x80": "wrong.toml is not valid TOML: 'utf-8' codec",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_toml_file_that_cannot_be(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    toml = tmp_path / "wrong.toml"
    toml.write_bytes(text.encode("latin1"))
    assert BROKEN[text] in refusal(capsys, entry.read, [str(toml)])


def test_all_problems_of_a_file_come_in_one_message(tmp_path, monkeypatch, capsys):
    """A name, a type, a bound, and a rule about two settings. A section whose feature is off is passed over."""
    monkeypatch.setenv("RANK", "0")
    toml = tmp_path / "wrong.toml"
    toml.write_text(
        '[model]\nflavor = "8B"\ndims = 64\n[training]\nsteps = "6"\ngc_freq = 0\n[quantize.linear.float8]\nemulate = true'
    )
    first, *said = refusal(capsys, entry.read, [str(toml)]).strip().splitlines()
    assert first.startswith("error: 4 ")
    for setting in ("setting model.dims", "model.flavor", "training.steps", "training.gc_freq"):
        assert [line for line in said if setting in line], setting


def test_torchtitans_name_of_the_smallest_size(tmp_path):
    toml = tmp_path / "debug.toml"
    toml.write_text('model.flavor = "debugmodel"')
    for flag in (f"--job.config_file={toml}", "--model.flavor=debugmodel"):
        assert read_job_config([flag]).model.flavor == "debug"


PATHS = ("job.dump_folder", "profiling.save_traces_folder", "metrics.save_tb_folder", "data.corpus")
PATHS += (
    "data.validation_corpus",
    "data.tokenizer",
    "checkpoint.folder",
    "checkpoint.initial_load_path",
)


def test_home_and_variables_in_every_path(tmp_path, monkeypatch):
    """In a file and in a flag, as it comes from `--job.dump_folder=~/x`, where a shell leaves `~`. Not in other settings."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", "/disk/me")
    assert {name for name, setting in schema.SETTINGS.items() if setting.is_path} == {
        *PATHS,
        "job.config_file",
    }
    toml = tmp_path / "paths.toml"
    lines = [f'{setting} = "$SCRATCH/${{SCRATCH}}x"' for setting in PATHS]
    toml.write_text("\n".join([*lines, 'job.description = "~ $SCRATCH $NONE"']))
    from_file = read_job_config(["--job.config_file", "~/paths.toml"])
    from_flags = read_job_config([f"--{setting}=$SCRATCH/${{SCRATCH}}x" for setting in PATHS])
    for setting in PATHS:
        assert from_file[setting] == from_flags[setting] == "/disk/me//disk/mex"
    assert from_file.job.description == "~ $SCRATCH $NONE"


def test_paths_of_several_corpora(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/me")
    toml = tmp_path / "paths.toml"
    toml.write_text('data.corpus = ["~/a", "b", "shards/*[0-9]$"]')
    assert read_job_config([f"--job.config_file={toml}"]).data.corpus == [
        "/me/a",
        "b",
        "shards/*[0-9]$",
    ]
    assert read_job_config(["--data.corpus", "~/a,$HOME/b"]).data.corpus == "/me/a,/me/b"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (
            "$NONE_SUCH/x",
            "job.dump_folder = $NONE_SUCH/x: the environment variable NONE_SUCH is not set",
        ),
        ("x/${EMPTY}", "the environment variable EMPTY is not set"),
        ("~no-such-user/x", "there is no such user's home"),
    ],
)
def test_a_path_that_cannot_be_expanded(path, words, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("EMPTY", "")
    assert words in refusal(capsys, entry.read, [str(TINY), f"--job.dump_folder={path}"])


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


@pytest.mark.parametrize(
    ("flags", "n_basis"),
    [
        ("", 16),
        ("--mixer.condition mamba2 --mixer.state_heads 2", 16),
        ("--mixer.layers softmax softmax", None),
        ("--mixer.condition gla --mixer.state_heads 2", None),
    ],
)
def test_a_condition_from_the_command_line_need_not_read_the_n_basis_of_the_file(flags, n_basis):
    job = parse(flags, toml=REPOSITORY / "train_configs/recall.toml")
    make_plan(job, 1)
    assert job.mixer.n_basis == n_basis


@pytest.fixture
def of_tokens(tmp_path):
    """of_tokens(flags): the plan of a file that counts in tokens: 80 steps, 20 of which warm up. Every 25th is kept."""
    text = (
        TINY.read_text()
        .replace("warmup_steps = 2", "warmup_tokens = 10_240")
        .replace("total_steps = 6", "")
    )
    kept = "interval = 3\nenable = true\nkeep_every_tokens = 12_700\nkeep_steps = [64, 900]"
    toml = tmp_path / "tokens.toml"
    toml.write_text(text.replace("interval = 3", kept).replace("\nsteps = 6", "\ntokens = 40_960"))
    return lambda given="": make_plan(parse(given, toml=toml), 1)


@pytest.mark.parametrize(
    ("given", "steps", "warmup"),
    [
        ("", 80, 20),
        ("--training.steps 30", 30, 20),
        ("--training.steps=30 --lr-scheduler.warmup-steps 5", 30, 5),
        ("--lr_scheduler.warmup_steps 0", 80, 0),
        ("--training.tokens 0", 10_000, 20),
        (
            "--training.steps 10",
            10,
            1,
        ),  # a warmup of the file's that is longer than the schedule is shortened
    ],
)
def test_the_command_line_wins_over_the_file(of_tokens, given, steps, warmup, caplog):
    """In whichever unit the file says it."""
    plan = of_tokens(given)
    assert (plan.steps, plan.warmup_steps) == (steps, warmup)
    shortened = "the warmup of 20 steps is longer than the schedule: shortened to 1 steps"
    assert (shortened in caplog.text) == (warmup == 1)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("", [25, 50, 64, 75, 80]),
        ("--checkpoint.keep_every 15 --checkpoint.keep_steps 7", [7, 15, 30, 45, 60, 75, 80]),
        ("--checkpoint.keep_every_tokens 1 --training.steps 30", [*range(1, 31)]),
        ("--checkpoint.keep_every_tokens 0", [64, 80]),
    ],
)
def test_milestones(of_tokens, given, kept):
    assert sorted(of_tokens(given).milestones) == kept
