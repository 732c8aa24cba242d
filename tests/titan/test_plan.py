"""What a configuration implies, and what is refused before anything is built."""

import dataclasses
import re

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list

from interdomain.features import support
from interdomain.model import CONDITIONS, Execution, Transformer
from interdomain.model.flops import memory_estimate
from interdomain.scan import library, triton_support
from interdomain.titan import plan, settings, trainer
from interdomain.titan.parallelize import SCAN_OPS
from interdomain.titan.plan import make_plan, model_config
from interdomain.titan.run_log import hyperparameters
from interdomain.titan.settings import read_job_config
from tests.model.common import small_config

from .conftest import REPOSITORY, TINY, flags, refusal

CONFIGS = REPOSITORY / "train_configs"


def parse(**settings):
    settings = {"training__local_batch_size": 4, **settings}
    return ConfigManager().parse_args(flags("corpus", "folder", **settings))


@pytest.mark.parametrize(
    ("size", "peak", "tokens", "steps"),
    [
        ("125M", 3e-3, 2_500_000_000, 4_769),
        ("350M", 1.5e-3, 7_000_000_000, 13_352),
        ("760M", 1e-3, 15_000_000_000, 28_611),
        ("1.3B", 1e-3, 26_000_000_000, 49_592),
    ],
)
@pytest.mark.parametrize("ranks", [1, 8])
def test_the_papers_runs(size, peak, tokens, steps, ranks):
    job = ConfigManager().parse_args(["--job.config_file", str(CONFIGS / f"{size}.toml")])
    plan = make_plan(job, ranks)
    assert (job.optimizer.lr, job.optimizer.ssm_lr, job.training.tokens) == (peak, 1e-3, tokens)
    assert (plan.steps, plan.warmup_steps, plan.tokens_per_step, plan.seed) == (steps, 715, 524_288, 42)
    assert plan.local_batch * ranks * plan.accumulation == plan.global_batch == 128
    assert plan.tokens >= tokens > plan.tokens - plan.tokens_per_step
    assert job.training.mixed_precision_param == "bfloat16"
    assert (job.training.max_norm, job.lr_scheduler.min_lr, job.lr_scheduler.decay_type) == (1.0, 1e-5, "cosine")


@pytest.mark.parametrize(
    ("ranks", "settings", "runs"),
    [
        (256, [], [(256, 256, 1), (128, 128, 1)]),
        (512, [], [(512, 512, 1), (128, 128, 1)]),
        (256, ["--parallelism.data_parallel_replicate_degree", "4"], [(256, 256, 1), (128, 128, 1)]),
        (256, ["--parallelism.data_parallel_shard_degree", "256"], [(256, 256, 1), (128, 128, 1)]),
        (96, [], [(96, 192, 2), (64, 128, 2)]),
        (64, [], [(64, 128, 2)]),
    ],
)
def test_more_ranks_than_the_batch_divides_over(ranks, settings, runs):
    """The refusal names flags that run: on as many ranks, in larger steps, or in the same steps on fewer."""
    arguments = ["--job.config_file", str(CONFIGS / "1.3B.toml"), "--training.local_batch_size", "4", *settings]
    with pytest.raises(ValueError, match=r"training.global_batch_size = 128 sequences does not divide") as refused:
        make_plan(ConfigManager().parse_args(arguments), ranks)
    assert ("feeds at most 128 ranks" in str(refused.value)) == (ranks > 128)
    advice = re.findall(r"on (\d+) rank\(s\) with ((?:--[\w.]+[ =]-?\d+ ?)+)", str(refused.value))
    found = []
    for n, more in advice:
        plan = make_plan(ConfigManager().parse_args([*arguments, *more.split()]), int(n))
        found.append((plan.world_size, plan.global_batch, plan.local_batch))
    assert found == runs


def test_the_plan_fills_torchtitans_fields(alone):
    job = parse(training__tokens=10_000, training__steps=None, lr_scheduler__total_steps=None)
    trainer.settled(make_plan(job, 2), job)
    assert (job.training.steps, job.training.tokens) == (20, 0)  # 19.5 steps of 512 tokens, rounded up


def test_torchtitans_defaults_hold_where_neither_steps_nor_tokens_are_set():
    unset = {"training__steps": None, "lr_scheduler__warmup_steps": None, "lr_scheduler__total_steps": None}
    plan = make_plan(parse(**unset), 1)
    theirs = JobConfig()
    assert (plan.steps, plan.warmup_steps) == (theirs.training.steps, theirs.lr_scheduler.warmup_steps)


def test_switches_stand_over_the_condition():
    config = model_config(parse(mixer__condition="s4d", mixer__rope=True, mixer__c_form="diagonal", mixer__n_basis=8))
    assert (
        dataclasses.asdict(config.mixer).items()
        >= {
            **CONDITIONS["s4d-rope"],
            "c_form": "diagonal",
            "n_basis": 8,
        }.items()
    )
    assert model_config(parse(mixer__condition="interdomain", mixer__rope=False)) == model_config(
        parse(mixer__condition="interdomain-norope")
    )


def test_how_a_mixer_is_computed_is_no_part_of_the_model():
    made = make_plan(parse(mixer__backend="sequential", mixer__recompute=False, mixer__features="torch"), 1)
    assert made.config == model_config(parse())
    assert made.execution == Execution("sequential", recompute=False, features="torch")
    assert Execution(recompute=True) == make_plan(parse(), 1).execution
    kept, lean = (make_plan(parse(mixer__recompute=r), 1).memory["activations"] for r in (False, True))
    assert kept > lean


GIB = 2**30


def on_a_gpu(monkeypatch, memory):
    monkeypatch.setattr(plan, "device_here", lambda: torch.device("cuda"))
    monkeypatch.setattr(plan, "gpu_memory", lambda: memory)
    monkeypatch.setattr(triton_support, "missing", lambda device: None)
    monkeypatch.setattr(support, "missing", lambda device: None)


def test_scores_are_kept_where_the_gpu_has_the_memory(monkeypatch):
    """At most 80 % of it by the estimate, in which full checkpointing has no scores. A choice of the user's stands."""
    needed = {
        mode: sum(make_plan(parse(mixer__recompute=False, activation_checkpoint__mode=mode), 1).memory.values())
        for mode in ("none", "full")
    }
    for mode, most in needed.items():
        for memory, keeps in ((most / 0.8 + 1, True), (most / 0.8 - 1, False)):
            on_a_gpu(monkeypatch, memory)
            made = make_plan(parse(activation_checkpoint__mode=mode), 1)
            assert made.execution.recompute is not keeps
            assert f"auto: {'kept' if keeps else 'computed again'}: about" in made.describe()
            assert (sum(made.memory.values()) == most) == (keeps or mode == "full")
            assert make_plan(parse(mixer__recompute=True), 1).execution.recompute is True
            assert make_plan(parse(mixer__recompute=False), 1).execution.recompute is False
    on_a_gpu(monkeypatch, 100 * GIB)
    without = (
        dict(mixer__backend="fft"),
        dict(mixer__n_basis=48),
        dict(mixer__condition="s4d"),
        dict(mixer__condition="softmax"),
    )
    assert all(make_plan(parse(**settings), 1).execution.recompute for settings in without)


def test_a_dry_run_says_how_a_gpu_would_run_it(monkeypatch):
    """Without one, and of other machines' GPUs."""
    for on_gpus, here in ((False, "chunkwise (plain PyTorch on cpu); on a GPU: "), (True, "")):
        said = make_plan(parse(mixer__n_basis=48), 1, on_gpus).computed
        assert said["scan"].startswith(f"{here}chunkwise-torch (plain PyTorch): M is 48")
        assert said["scores"] == "chunkwise-torch keeps none"
        kept = make_plan(parse(mixer__recompute=False), 1).memory
        made = make_plan(parse(), 1, on_gpus)
        assert made.execution.recompute
        assert made.computed["scores"].startswith(
            f"auto: kept on GPUs of {sum(kept.values()) / 0.8 / GIB:.2f} GiB or more"
        )
        assert made.computed["features"].endswith("triton (one kernel)")


@pytest.mark.parametrize("elsewhere", [0, 1])
def test_a_run_begins_with_how_it_is_computed(elsewhere, monkeypatch, caplog, alone):
    """The scores as the rank with the least memory has to have them, which is what is recorded."""
    on_a_gpu(monkeypatch, 100 * GIB)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, op: x.fill_(max(x.item(), elsewhere)))
    library._log_once.cache_clear()
    job = parse()
    with caplog.at_level("INFO"):
        settled = trainer.settled(make_plan(job, 1), job)
    scores = "auto: computed again, for another rank" if elsewhere else "auto: kept: about"
    said = ["backend 'auto' is chunkwise (Triton kernels)", "backend 'auto' is triton (one kernel)", scores]
    assert [sum(words in r.getMessage() for r in caplog.records) for words in said] == [1, 1, 1]
    assert settled.execution.recompute is job.mixer.recompute is bool(elsewhere)
    assert hyperparameters(settled, job)["recompute"] is bool(elsewhere)


def test_flops_belong_to_the_condition():
    """Per token: softmax grows with the context, a recurrence does not; a linear readout costs less than the query's."""

    def flops(condition, seq_len):
        plan = make_plan(parse(mixer__condition=condition, training__seq_len=seq_len), 1)
        assert plan.n_params == sum(p.numel() for p in Transformer(plan.config).parameters())
        return plan.flops_per_token

    conditions = ("softmax", "interdomain", "s4d")
    short, long = ({c: flops(c, seq_len) for c in conditions} for seq_len in (1024, 4096))
    assert len(set(long.values())) == 3
    assert short["interdomain"] == long["interdomain"]
    assert short["s4d"] == long["s4d"] < long["interdomain"]
    # Forward and backward, scores and values over half of 3,072 more keys, 4 layers of width 128.
    assert long["softmax"] - short["softmax"] == 3 * 4 * (2 * 2 * 128) * 3072 // 2


REFUSED = {
    "unknown condition": ({"mixer__condition": "s4"}, "mixer.condition = 's4'", "softmax, interdomain,"),
    "unknown size": ({"model__flavor": "7B"}, "model.flavor = '7B'", "debug, 125M, 350M, 760M, 1.3B"),
    "unknown backend": ({"mixer__backend": "cuda"}, "mixer.backend = 'cuda'", "auto, chunkwise,"),
    "unknown features": ({"mixer__features": "cuda"}, "mixer.features = 'cuda'", "auto, triton, torch"),
    "unknown readout": ({"mixer__readout": "imag"}, "mixer.readout = 'imag'", "complex, real, hermitian"),
    "switch of another mixer": (
        {"mixer__condition": "softmax", "mixer__output_gate": True},
        "softmax condition has no such switch",
        "n_kv_heads",
    ),
    "linear readout with shared heads": (
        {"mixer__condition": "s4d", "mixer__n_kv_heads": 2},
        "mixer.n_kv_heads = 2",
        "query readout",
    ),
    "heads that do not divide": ({"mixer__n_kv_heads": 3}, "n_kv_heads must divide n_heads = 4", "[1, 2, 4]"),
    "batch and ranks": ({"training__local_batch_size": 3}, "training.global_batch_size = 8", "multiple of 6"),
    "replicas and ranks": ({"parallelism__data_parallel_replicate_degree": 3}, "replicate_degree = 3", "2 rank(s)"),
    "shards and ranks": ({"parallelism__data_parallel_shard_degree": 4}, "1 x 4", "the number of ranks, 2"),
    "tensor parallel": ({"parallelism__tensor_parallel_degree": 2}, "tensor_parallel_degree = 2", "data_parallel"),
    "pipeline": ({"parallelism__pipeline_parallel_degree": 2}, "pipeline_parallel_degree = 2", "at 1"),
    "context parallel": ({"parallelism__context_parallel_degree": 2}, "context_parallel_degree = 2", "at 1"),
    "no sequence": ({"training__seq_len": 0}, "training.seq_len must be at least 1", "got 0"),
    "steps and tokens": ({"training__tokens": 4096}, "training.tokens = 4,096 and training.steps = 6", "drop"),
    "warmup twice": ({"lr_scheduler__warmup_tokens": 512}, "warmup_tokens = 512", "lr_scheduler.warmup_steps = 2"),
    "TorchTitan's own steps and tokens": (
        {"training__tokens": 4096, "training__steps": 10_000},
        "training.tokens = 4,096 and training.steps = 10,000",
        "drop",
    ),
    "TorchTitan's own warmup twice": (
        {"lr_scheduler__warmup_tokens": 512, "lr_scheduler__warmup_steps": 200},
        "warmup_tokens = 512",
        "lr_scheduler.warmup_steps = 200",
    ),
    "negative warmup": ({"lr_scheduler__warmup_steps": -1}, "warmup_steps must be at least 0", "got -1"),
    "warmup past the end": ({"lr_scheduler__warmup_steps": 9}, "warmup of 9 steps", "6 steps"),
    "schedule shorter than the run": ({"lr_scheduler__total_steps": 5}, "total_steps = 5", "last step 6"),
    "floor twice": ({"lr_scheduler__min_lr_factor": 0.1}, "min_lr = 1e-05 and min_lr_factor = 0.1", "floor"),
    "floor above the peak": ({"lr_scheduler__min_lr": 2e-3}, "min_lr = 0.002", "peak learning rate 0.001"),
    "optimizer": ({"optimizer__name": "Lion"}, "optimizer.name = 'Lion'", "AdamW, Adam"),
    "step in backward": ({"optimizer__early_step_in_backward": True}, "early_step_in_backward", "clipped"),
    "no rate": ({"optimizer__lr": 0.0}, "optimizer.lr must be positive", "got 0.0"),
    "bfloat16 master weights": ({"training__dtype": "bfloat16"}, "training.dtype", "mixed_precision_param"),
    "TorchTitan's data set": ({"training__dataset": "c4"}, "training.dataset = 'c4'", "data.corpus"),
    "validation by steps": ({"validation__enable": True, "validation__steps": 5}, "steps = 5", "validation.tokens"),
    "recomputation by budget": ({"activation_checkpoint__mode": "memory_budget"}, "memory_budget", "compile.enable"),
    "recomputation option": (
        {"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "0"},
        "selective_ac_option = '0'",
        "'op'",
    ),
    "recomputation traced": (
        {"activation_checkpoint__mode": "selective", "activation_checkpoint__debug": True},
        "activation_checkpoint.debug",
        "another mode",
    ),
    "compiled part": ({"compile__components": "optimizer"}, "compile.components = ['optimizer']", "model, loss"),
    "model-only end": ({"checkpoint__enable": True, "checkpoint__last_save_model_only": True}, "no run can", "false"),
    "one checkpoint": ({"checkpoint__keep_latest_k": 1}, "keep_latest_k = 1", "2 or more"),
    "part of a checkpoint": (
        {"checkpoint__enable": True, "checkpoint__exclude_from_loading": "data"},
        "['data']",
        "optimizer, lr_scheduler,",
    ),
    "logging every 0 steps": ({"metrics__log_freq": 0}, "metrics.log_freq must be at least 1", "got 0"),
    "profiler on a CPU": ({"profiling__enable_profiling": True}, "profiling.enable_profiling", "needs a GPU"),
    "offload on a CPU": ({"training__enable_cpu_offload": True}, "enable_cpu_offload", "needs a GPU"),
    "trace of fewer steps than one": (
        {"profiling__enable_profiling": True, "profiling__profile_freq": 3},
        "profiling.profile_freq = 3",
        "3 + 1",
    ),
    "batch of nothing": ({"training__global_batch_size": 0}, "training.global_batch_size must be at least 1", "got 0"),
    "decay before the start": (
        {"lr_scheduler__decay_ratio": -0.1},
        "lr_scheduler.decay_ratio must be from 0 to 1",
        "-0.1",
    ),
    "rates that rise": ({"lr_scheduler__min_lr_factor": 2.0}, "lr_scheduler.min_lr_factor must be from 0 to 1", "2.0"),
    "mean of nothing": ({"optimizer__beta1": 1.0}, "optimizer.beta1 must be at least 0 and below 1", "got 1.0"),
    "no number": ({"optimizer__weight_decay": "nan"}, "optimizer.weight_decay must be at least 0", "got nan"),
    "compiler": ({"compile__enable": True, "compile__backend": "gcc"}, "compile.backend = 'gcc'", "inductor"),
    "checked recomputation": (
        {"activation_checkpoint__determinism_check": "all"},
        "determinism_check = 'all'",
        "default, none",
    ),
    "another model": ({"model__name": "llama3"}, "model.name = 'llama3'", "allowed: interdomain"),
    "start without checkpoints": (
        {"checkpoint__initial_load_path": "step-3"},
        "initial_load_path = 'step-3'",
        "enable",
    ),
    "step without checkpoints": ({"checkpoint__load_step": 3}, "checkpoint.load_step = 3", "checkpoint.enable is off"),
    "seed of two ranks": (
        {"checkpoint__enable": True, "checkpoint__create_seed_checkpoint": True},
        "create_seed_checkpoint",
        "--ranks 1",
    ),
    "float8": ({"quantize.linear.float8.emulate": True}, "quantize.linear", "not supported"),
    "memory by TorchTitan": ({"memory_estimation__enable": True}, "memory_estimation.enable", "--dry-run"),
    "simulated ranks": ({"comm__mode": "fake_backend"}, "comm.mode = 'fake_backend'", "NGPU"),
    "simulated tensors": ({"comm__mode": "local_tensor"}, "comm.mode = 'local_tensor'", "default, and fake_backend"),
    "collection traced on a CPU": ({"training__gc_debug": True}, "training.gc_debug", "needs a GPU"),
    "torchft": ({"fault_tolerance__enable": True}, "fault_tolerance.enable", "torchft"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_paragraph(name, monkeypatch, capsys):
    """As the trainer does it before it touches a device: rank 0 prints one paragraph, and the process ends."""
    settings, *said = REFUSED[name]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("NGPU", raising=False)
    with pytest.raises(SystemExit) as end:
        trainer.check(parse(**settings))
    assert end.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("\nerror: ")
    assert len(error.strip().splitlines()) == 1
    for words in said:
        assert words in error


WRONG = {
    'mode = "none"': ('mode = "some"', "activation_checkpoint.mode = 'some' is unknown; allowed: selective, full"),
    "steps = 6": ('steps = "6"', "training.steps must be int | None: got '6'"),
    "seq_len = 64": ("seq_len = 64.0", "training.seq_len must be int: got 64.0"),
    "log_freq = 1": ("log_freq = true", "metrics.log_freq must be int: got True"),
    "lr = 3e-3": ('lr = "3e-3"', "optimizer.lr must be float: got '3e-3'"),
    "keep_latest_k = 0": ('enable = "false"', "checkpoint.enable must be bool: got 'false'"),
    "trace_buf_size = 0": ('[data]\nweights = [1, "2"]', "data.weights must be list[float]: got [1, '2']"),
}


@pytest.mark.parametrize("right", WRONG)
def test_what_stands_in_a_toml_file_is_checked_too(right, tmp_path, monkeypatch, capsys):
    """TorchTitan checks it on the command line only."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    wrong, said = WRONG[right]
    toml = tmp_path / "wrong.toml"
    toml.write_text(TINY.read_text().replace(f"\n{right}\n", f"\n{wrong}\n"))
    job = ConfigManager().parse_args(["--job.config_file", str(toml)])
    assert said in refusal(capsys, trainer.check, job)


def test_unknown_keys_of_a_toml_file_are_named(tmp_path):
    toml = tmp_path / "wrong.toml"
    toml.write_text(TINY.read_text() + "\n[mixer]\ndual_inputs = true\n")
    with pytest.raises(ValueError, match=r"dual_inputs.* ./launch.sh --flags"):
        read_job_config(["--job.config_file", str(toml)])


def test_curves_for_wandb_need_it(monkeypatch):
    job = parse(metrics__enable_wandb=True)
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs wandb"):
        settings.refuse_unsupported(job)
    monkeypatch.setattr(settings, "find_spec", lambda name: name)
    settings.refuse_unsupported(job)


@pytest.mark.parametrize("left_out", ["custom_config_module", "custom_import"])
def test_a_toml_file_that_does_not_name_the_plugin(left_out, tmp_path):
    toml = tmp_path / "wrong.toml"
    toml.write_text(TINY.read_text().split("[optimizer]")[0].replace("vocab_size = 512", "").replace(left_out, "#"))
    with pytest.raises(ValueError, match=r'job.custom_config_module = "interdomain.titan.job_config"'):
        read_job_config(["--job.config_file", str(toml)])


def test_torchtitan_s_own_assertions_are_words():
    with pytest.raises(ValueError, match="validation steps must be positive or -1"):
        read_job_config(flags("corpus", "folder", validation__steps=0))


def test_a_plan_that_stands_is_not_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    trainer.check(parse())


@pytest.mark.parametrize("condition", ["interdomain", "softmax"])
def test_what_selective_checkpointing_keeps_is_what_the_plan_counts(condition, monkeypatch):
    """Per token and layer, in a real forward pass. On the CPU TorchTitan's list lacks attention's output, here beside it."""
    contexts, create = [], torch.utils.checkpoint.create_selective_checkpoint_contexts

    def noted(*args):
        contexts.append(create(*args))
        return contexts[-1]

    monkeypatch.setattr(torch.utils.checkpoint, "create_selective_checkpoint_contexts", noted)
    config = small_config(condition, n_layers=3)
    model = Transformer(config)
    settings = parse(activation_checkpoint__mode="selective", activation_checkpoint__selective_ac_option="op")
    apply_ac(model, settings.activation_checkpoint, op_sac_save_list=_op_sac_save_list | SCAN_OPS)

    def kept(tokens):
        contexts.clear()
        model(torch.randint(0, config.vocab_size, (1, tokens)))
        saved = tree_leaves([dict(caching.storage) for caching, _ in contexts])
        tensors = [leaf.val for leaf in saved if hasattr(leaf, "val")]
        return sum(x.numel() for x in tensors)

    counted = config.n_layers * config.dim  # the blocks' inputs
    counted += (kept(128) - kept(64)) // 64  # final states do not grow
    if condition == "softmax":
        counted += config.n_layers * config.dim
    settings = dict(shards=1, local_batch=1, seq_len=1, checkpointing="selective", bf16=True)
    assert memory_estimate(config, 0, **settings)["activations"] == 2 * counted
