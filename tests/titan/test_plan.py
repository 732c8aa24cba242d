"""What a configuration implies, and what is refused before anything is built."""

import dataclasses
import re

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list

from interdomain.features import support
from interdomain.model import CONDITIONS, Execution, Transformer
from interdomain.model.flops import memory_estimate
from interdomain.scan import library, triton_support
from interdomain.titan import plan, trainer
from interdomain.titan.parallelize import SCAN_OPS
from interdomain.titan.plan import make_plan, model_config
from interdomain.titan.run_log import hyperparameters
from interdomain.titan.settings import read_job_config
from tests.model.common import small_config

from .conftest import REPOSITORY, flags

CONFIGS = REPOSITORY / "train_configs"


def arguments(**settings):
    return flags("corpus", "folder", **{"training__local_batch_size": 4, **settings})


def parse(**settings):
    return read_job_config(arguments(**settings))


@pytest.mark.parametrize(
    ("size", "peak", "tokens", "steps"),
    [
        ("125M", 3e-3, 2_500_000_000, 4_769),
        ("350M", 1.5e-3, 7_000_000_000, 13_352),
        ("760M", 1e-3, 15_000_000_000, 28_611),
        ("1.3B", 1e-3, 26_000_000_000, 49_592),
    ],
)
def test_the_papers_runs(size, peak, tokens, steps):
    job = read_job_config(["--job.config_file", str(CONFIGS / f"{size}.toml")])
    assert (job.optimizer.lr, job.optimizer.ssm_lr, job.training.tokens) == (peak, 1e-3, tokens)
    assert (job.training.max_norm, job.lr_scheduler.min_lr, job.lr_scheduler.decay_type) == (1.0, 1e-5, "cosine")
    for ranks in (1, 8):
        plan = make_plan(job, ranks)
        assert (plan.steps, plan.warmup_steps, plan.tokens_per_step, plan.seed) == (steps, 715, 524_288, 42)
        assert plan.local_batch * ranks * plan.accumulation == plan.global_batch == 128
        assert plan.tokens >= tokens > plan.tokens - plan.tokens_per_step
        # On cards of 80 GB, the scan's scores kept or not, with room for the allocator.
        assert 12 * GIB < sum(plan.memory.values()) < 0.7 * 80e9
        assert plan.precision == "bf16"


@pytest.mark.parametrize(("ranks", "larger", "local"), [(512, 512, 1), (256, 256, 1), (96, 192, 2), (64, None, 2)])
def test_more_ranks_than_the_batch_divides_over(ranks, larger, local):
    """The refusal names flags that run on as many ranks, in the same steps or larger ones."""
    arguments = ["--job.config_file", str(CONFIGS / "1.3B.toml"), "--training.local_batch_size", "4"]
    with pytest.raises(ValueError, match=r"training.global_batch_size = 128 sequences does not divide") as refused:
        make_plan(read_job_config(arguments), ranks)
    assert ("feeds at most 128 ranks" in str(refused.value)) == (ranks > 128)
    advice = re.search(r"can run ((?:--[\w.]+ \d+ ?)+)", str(refused.value))[1].split()
    plan = make_plan(read_job_config([*arguments, *advice]), ranks)
    assert (plan.global_batch, plan.local_batch) == (larger or 128, local)


def test_switches_stand_over_the_condition():
    config = model_config(parse(mixer__condition="s4d", mixer__rope=True, mixer__c_form="diagonal", mixer__n_basis=8))
    expected = {**CONDITIONS["s4d-rope"], "c_form": "diagonal", "n_basis": 8}
    assert dataclasses.asdict(config.mixer).items() >= expected.items()


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
    without = ({"backend": "fft"}, {"n_basis": 48}, {"condition": "s4d"}, {"condition": "softmax"})
    for mixer in without:
        settings = {f"mixer__{name}": value for name, value in mixer.items()}
        assert make_plan(parse(**settings), 1).execution.recompute


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


def test_a_run_begins_with_how_it_is_computed(monkeypatch, caplog, alone):
    """Logged once, and written into what TorchTitan reads and the run records."""
    on_a_gpu(monkeypatch, 100 * GIB)
    library._log_once.cache_clear()
    this = trainer.InterdomainTrainer.__new__(trainer.InterdomainTrainer)
    this.job_config = job = parse(training__tokens=10_000, training__steps=None, lr_scheduler__total_steps=None)
    with caplog.at_level("INFO"):
        this.plan = make_plan(job, 1)
        this._settle()
    said = [
        "backend 'auto' is chunkwise (Triton kernels)",
        "backend 'auto' is triton (one kernel)",
        "auto: kept: about",
    ]
    assert [sum(words in r.getMessage() for r in caplog.records) for words in said] == [1, 1, 1]
    assert job.mixer.recompute is hyperparameters(this.plan, job)["recompute"] is False
    assert (job.training.steps, job.training.tokens) == (20, 0)  # 19.5 steps of 512 tokens, rounded up


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


def test_a_size_of_ones_own():
    job = parse(model__dim=192, model__n_layers=2, model__n_heads=4)
    made = make_plan(job, 1)
    config = made.config
    assert (config.dim, config.n_layers, config.n_heads, config.head_dim, config.ffn_hidden) == (192, 2, 4, 48, 512)
    own = "vocab_size 512, max_seq_len 64"  # of the test's file
    assert f"debug with dim 192, n_layers 2, {own}, interdomain (" in made.describe()
    assert make_plan(parse(model__dim=128), 1).cell.size == f"debug with {own}"


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
    settings = dict(shards=1, seq_len=1, checkpointing="selective", precision="bf16")
    one, two = (memory_estimate(config, 0, local_batch=n, **settings)["activations"] for n in (1, 2))
    assert two - one == 2 * counted
