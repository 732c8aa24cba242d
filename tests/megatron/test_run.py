"""Upstream's training script with our layer: its arguments, what is refused before it starts, and the script itself."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from interdomain.data import read_manifest
from interdomain.files.megatron_checkpoint import TRACKER
from interdomain.megatron import layer_spec, spec, train, watch
from interdomain.megatron.optimizer import Schedule
from interdomain.model import CONDITIONS, build_config
from interdomain.model.flops import train_flops_per_token
from interdomain.titan.plan.schedule import multiple_of_peak
from interdomain.titan.settings.schema import LRScheduler

from . import ranks, stand_ins
from .conftest import GOOD

LR = 3e-3
GLA = "--spec interdomain.megatron.spec gla --model.size 125M --transformer-impl local"


def test_settings_reach_the_layer(parse, corpus):
    line = f"{GOOD} --data.corpus {corpus} --mixer.rope False --mixer.n_basis 32 --ssm-lr 5e-4 --num-layers 6 --seed 7"
    args, _ = parse(line)
    assert (args.hidden_size, args.num_layers, args.seq_length, args.position_embedding_type) == (768, 6, 4096, "none")
    assert (args.train_data_path, args.tokenizer_type) == ([f"{corpus}/train-00000"], "NullTokenizer")
    params = spec.interdomain.submodules.self_attention.params
    assert params["mixers"] == build_config("125M", "interdomain-norope", n_basis=32).mixers
    assert (params["seed"], params["max_seq_len"]) == (7, 4096)
    manifest = read_manifest(corpus)
    assert params["tokenizer"] == manifest["tokenizer"]["sha256"]
    assert params["documents"] == {"begin": [], "end": [manifest["eos_id"]]}


def test_transformer_impl_names_the_linears(parse, monkeypatch):
    """A hybrid with a baseline of fixed state has its norms before in_proj."""
    stand_ins.install(monkeypatch.setattr)
    for condition, in_proj in (("s4d", stand_ins.LayerNormColumn), ("mamba2", stand_ins.Column)):
        monkeypatch.setattr(spec, "interdomain", layer_spec(n_layers=2, layers=["interdomain", condition]))
        for implementation in ("transformer_engine", "local"):  # the last one counts
            parse(f"{GOOD} --transformer-impl {implementation}")
            layer = spec.interdomain.submodules
            here, local = layer.self_attention.submodules, implementation == "local"
            assert here.in_proj is (ColumnParallelLinear if local else in_proj)
            assert here.out_proj is (RowParallelLinear if local else stand_ins.Row)
            assert (layer.input_layernorm is spec.RMSNorm) == (local or condition == "mamba2")


def test_the_script_has_the_recipe_of_this_project(parse):
    """Its parameter group and schedule; of Megatron's groups, all but the one of vectors."""
    args, training = parse(f"{GOOD} --lr 3e-3 --ssm-lr 5e-4 --global-batch-size 8")
    config, groups = training.get_megatron_optimizer_config(args)
    assert (config, groups.pop("head")) == ("config", {"max_lr": 1})
    (ours,) = groups.values()
    assert ours == {"wd_mult": 0.0, "max_lr": 5e-4, "min_lr": 0.0, "lr_mult": pytest.approx(1 / 6)}
    assert rates(training.OptimizerParamScheduler, 8, steps=10, warmup=2, floor=1e-5) == pytest.approx(
        titan_rates(steps=10, warmup=2, floor=1e-5)
    )


def test_the_log_counts_the_flops_of_this_model(parse):
    args, training = parse(f"{GOOD} --group-query-attention --num-query-groups 4")
    args.padded_vocab_size = 1000
    per_token = train_flops_per_token(build_config("125M", "interdomain", vocab_size=1000, n_kv_heads=4), 4096)
    assert training.num_floating_point_operations(args, 8) == 8 * 4096 * per_token
    packed = dict(seqlen_squared_sum_in_batch=10**9, total_real_tokens_in_batch=100)
    assert training.num_floating_point_operations(args, 8, **packed) == 100 * per_token


def test_the_writer_has_the_life_signs(parse, monkeypatch):
    """Written by the rank that has a writer; every rank computes them, at the log's interval."""
    _, training = parse(GOOD)
    written, computed = [], []
    monkeypatch.setattr(watch, "mixer_statistics", lambda chunks: computed.append(chunks) or {"mixer/sign": 0.5})
    writer = SimpleNamespace(add_scalar=lambda *scalar: written.append(scalar))
    training.get_args = lambda: SimpleNamespace(tensorboard_dir="curves", log_interval=2)
    training.get_tensorboard_writer = lambda: writer
    training.training_log = lambda losses, totals, rate, iteration, scale, *, pg_collection: (iteration, scale)
    training.train = lambda forward_step, chunks, steps: [
        training.training_log({}, {}, 1e-3, step, 1.0, pg_collection=None) for step in range(1, steps + 1)
    ]
    watch.watch(training)
    assert training.train("forward step", "chunks", 4) == [(step, 1.0) for step in range(1, 5)]
    assert written == [("mixer/sign", 0.5, 2), ("mixer/sign", 0.5, 4)]
    writer = None
    training.train("forward step", "chunks", 2)
    assert (len(written), computed) == (2, ["chunks"] * 3)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 0), (2, 1), (10, 0), (10, 4), (10, 9), (10, 10)])
@pytest.mark.parametrize("floor", [0.0, 1e-5])
def test_every_step_has_the_learning_rate_of_a_run_of_torchtitan(steps, warmup, floor):
    assert rates(Schedule, 1, steps, warmup, floor) == pytest.approx(titan_rates(steps, warmup, floor))


def rates(schedule, each, steps, warmup, floor):
    optimizer = SimpleNamespace(param_groups=[{"params": [], "max_lr": LR, "min_lr": floor}])
    decay = dict(start_wd=0.1, end_wd=0.1, wd_incr_steps=1, wd_incr_style="constant", lr_decay_style="cosine")
    length = dict(lr_warmup_steps=warmup * each, lr_decay_steps=max(steps, warmup + 1) * each)
    here, seen = schedule(optimizer, init_lr=0.0, max_lr=1.0, min_lr=floor, **length, **decay), []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        here.step(each)
    return seen


def titan_rates(steps, warmup, floor):
    config = LRScheduler(min_lr=floor)
    factor = multiple_of_peak(config, LR, steps=steps, warmup=warmup)
    return [LR * factor(step) for step in range(steps)]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "start it with torchrun on a multiple of 1 ranks"),
        ("--tensor-parallel 3", "a multiple of 3 ranks (tensor x pipeline x context), not 4"),
        ("--micro-batch 3", "--global-batch must be a multiple of 12, --micro-batch x data-parallel ranks"),
        ("--context-parallel 3", "--context-parallel must divide a sequence of 256 tokens"),
        ("--steps 4 --warmup-steps 5", "--warmup-steps may be at most --steps"),
        ("--min-lr 1", "--min-lr may be at most --lr"),
        ("--save x", "--save on a GPU needs Transformer Engine or Apex"),
    ],
)
def test_the_own_program_refuses_before_it_starts(flags, words, corpus, monkeypatch):
    if flags:
        monkeypatch.setenv("WORLD_SIZE", "3" if "context" in flags else "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit, match=re.escape(words)):
        train.main(f"--data.corpus {corpus} --micro-batch 2 --global-batch 8 {flags}".split())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--model.size 125M", "name the layer: --spec interdomain.megatron.spec"),
        (f"{GOOD} --spec interdomain.nowhere x", "No module named 'interdomain.nowhere'"),
        (f"{GOOD} --spec interdomain.megatron.spec s5", "s5 is no layer of this project. Name a layer that"),
        (
            f"{GOOD} --spec megatron.core.models.gpt.gpt_layer_specs get_gpt_layer_local_spec",
            "is no layer of this project",
        ),
        (f"{GOOD} --spec tests.megatron.conftest STOCK", "is no layer of this project"),
        (
            f"{GOOD} --hybrid-layer-pattern M-*-",
            "M-*- is ignored by GPTModel's layers, as interdomain.megatron.spec makes them",
        ),
        (f"{GOOD} --num-query-groups 4", "--num-query-groups is ignored without --group-query-attention"),
        (f"{GOOD} --transformer-impl transformer_engine", "Transformer Engine cannot be imported."),
        (f"{GOOD} --overlap-grad-reduce --pipeline-model-parallel-size 2", "Set --no-align-grad-reduce"),
        (f"{GOOD} --rampup-batch-size 2", "--rampup-batch-size is ignored by this version"),
        (
            f"{GLA} --group-query-attention",
            "is ignored: no layer shares",
        ),
        (f"{GOOD} --num-attention-heads 8", "n_heads * head_dim must be dim: got 8 * 64, dim = 768"),
        (f"{GOOD} --kv-channels 48", "got 12 * 48, dim = 768"),
        (f"{GOOD} --kv-channels 63 --hidden-size 756 --ffn-hidden-size 2048", "head_dim must be even"),
        (f"{GOOD} --group-query-attention --num-query-groups 5", "n_kv_heads must divide n_heads = 12: got 5"),
        (f"{GOOD} --tensor-model-parallel-size 5", "12 heads and 12 heads of keys and values cannot be split over 5"),
        (f"{GOOD} --group-query-attention --num-query-groups 3 --tensor-model-parallel-size 2", "12 heads and 3 heads"),
        (
            f"{GLA} --mixer.state_heads 3 --tensor-model-parallel-size 2",
            "3 heads of gla's state cannot be split over 2",
        ),
        (f"{GLA} --mixer.state_heads 7", "mixer.state_heads must divide"),
        (f"{GOOD} --sft --context-parallel-size 2", "--sft with --context-parallel-size: "),
        (f"{GOOD} --bf16", "Set --use-distributed-optimizer."),
        (f"{GOOD} --use-distributed-optimizer --save x", "Set --dist-ckpt-optim-fully-reshardable."),
        (f"{GOOD} --mixer.n_basis 0", "mixer.n_basis must be at least 1: got 0."),
        (f"{GOOD} --mixer.readout imaginary", "invalid choice: 'imaginary'"),
        (f"{GOOD} --mixer.rope perhaps", "'perhaps' is neither True nor False"),
        (f"{GOOD} --data.corpus $NONE_SUCH/x", "the environment variable NONE_SUCH is not set"),
        (f"{GOOD} --data.corpus ~/nowhere", "/nowhere is not a prepared corpus"),
        (f"{GOOD} --data.corpus nowhere", "nowhere is not a prepared corpus"),
    ],
)
def test_refused_at_the_start(line, words, parse, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(line)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_an_optimizer_that_could_not_be_loaded(parse, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(SystemExit):
        parse(f"{GOOD} --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --save x")
    assert "Install one of them." in capsys.readouterr().err


def test_a_corpus_with_answers_is_refused(parse, capsys, tmp_path):
    """Megatron's data sets would train on every token."""
    marks = {"example_tokens": 256, "per_example": 32}
    manifest = {"format": "interdomain-corpus", "format_version": 1, "vocab_size": 514, "answers": marks, "splits": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(SystemExit):
        parse(f"{GOOD} --data.corpus {tmp_path}")
    assert "is a corpus whose loss is that of its answers" in capsys.readouterr().err


def test_specs():
    """Every condition after --spec; a setting of the mixer that no model has is refused as everywhere."""
    for condition in CONDITIONS:
        assert (
            vars(spec)[condition].submodules.self_attention.params["mixers"] == build_config("125M", condition).mixers
        )
    with pytest.raises(ValueError, match="unknown mixer setting"):
        layer_spec(n_kv_heads=2)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "raise ImportError('not here')",
            "needs megatron-core, the extra `megatron`: pip install 'interdomain[megatron]'",
        ),
        ("__version__ = '0.15.3'", "runs with megatron-core 0.16 to 0.19; found 0.15.3."),
    ],
)
def test_without_megatron_core_or_with_another(source, words, tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core.parent / "__init__.py").touch()
    (core / "__init__.py").write_text(source)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "import interdomain.megatron"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 1
    assert words in done.stderr


@pytest.mark.e2e
@pytest.mark.slow_group("plugin/interdomain/megatron/", "plugin/interdomain/model/", "kernels/", "tests/megatron/")
def test_the_own_program_trains_saves_and_goes_on_in_another_layout(corpus, tmp_path):
    """Two ranks over gloo; the other starts have a pipeline and pieces of sequences, and repeat the last steps."""

    def start(name, *layout):
        given = f"--data.corpus {corpus} --save {tmp_path} --save-interval 2 --micro-batch 2 --global-batch 4 --steps 4"
        argv = [*given.split(), "--warmup-steps", "1", "--log-interval", "1", *layout]
        log = ranks.run_own_program(argv, tmp_path / name)
        return {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss ([\d.]+)", log)}

    first = start("first", "--tensor-parallel", "2")
    assert (tmp_path / TRACKER).read_text() == "4"
    assert list(first) == list(range(1, 5))
    for layout in ("pipeline", "context"):
        (tmp_path / TRACKER).write_text("2")
        second = start(layout, f"--{layout}-parallel", "2")
        assert second == pytest.approx({step: first[step] for step in range(3, 5)}, abs=1e-4)
    assert first[4] < first[1] - 0.2
