"""Arguments of Megatron-LM's training script with our layer, and those that are refused."""

import sys
from types import SimpleNamespace

import pytest

from interdomain.data import read_manifest
from interdomain.megatron import layer_spec, require_megatron, spec
from interdomain.model import build_config
from interdomain.model.flops import train_flops_per_token
from interdomain.titan.plan.schedule import multiple_of_peak
from interdomain.titan.settings.schema import LRScheduler

from . import stand_ins
from .conftest import GOOD

LR = 3e-3
GLA = "--spec interdomain.megatron.spec gla"


def test_settings_reach_the_layer(parse, corpus):
    flags = "--mixer.rope False --mixer.n_basis 32 --ssm-lr 5e-4 --num-layers 6 --seed 7"
    args = parse(f"{GOOD} --data.corpus {corpus} {flags}")
    assert args.hidden_size == 768
    assert args.num_layers == 6
    assert args.seq_length == 4096
    assert args.position_embedding_type == "none"
    assert args.train_data_path == [f"{corpus}/train-00000"]
    assert args.tokenizer_type == "NullTokenizer"
    params = spec.interdomain.submodules.self_attention.params
    assert params["mixers"] == build_config("125M", "interdomain-norope", n_basis=32).mixers
    assert params["seed"] == 7
    assert params["max_seq_len"] == 4096
    manifest = read_manifest(corpus)
    assert params["tokenizer"] == manifest["tokenizer"]["sha256"]
    assert params["documents"] == {"begin": [], "end": [manifest["eos_id"]]}


@pytest.mark.parametrize(
    ("condition", "in_proj", "own_norm"),
    [("s4d", stand_ins.LayerNormColumn, False), ("mamba2", stand_ins.Column, True)],
)
def test_transformer_impl_names_the_linears(parse, monkeypatch, condition, in_proj, own_norm):
    """A hybrid with a baseline of fixed state has norms before in_proj."""
    stand_ins.install(monkeypatch.setattr)
    hybrid = layer_spec(n_layers=2, layers=["interdomain", condition])
    monkeypatch.setattr(spec, "interdomain", hybrid)
    parse(f"{GOOD} --transformer-impl transformer_engine")
    layer = hybrid.submodules
    assert layer.self_attention.submodules.in_proj is in_proj
    assert layer.self_attention.submodules.out_proj is stand_ins.Row
    assert (layer.input_layernorm is spec.RMSNorm) == own_norm


def test_the_script_has_the_recipe_of_this_project(parse, training):
    """Our parameter group takes the place of Megatron's group of vectors."""
    args = parse(f"{GOOD} --lr 3e-3 --ssm-lr 5e-4 --global-batch-size 8")
    config, groups = training.get_megatron_optimizer_config(args)
    assert config == "config"
    assert groups.pop("head") == {"max_lr": 1}
    (ours,) = groups.values()
    assert ours == {"wd_mult": 0.0, "max_lr": 5e-4, "min_lr": 0.0, "lr_mult": pytest.approx(1 / 6)}


def test_the_log_counts_the_flops_of_this_model(parse, training):
    args = parse(f"{GOOD} --group-query-attention --num-query-groups 4")
    args.padded_vocab_size = 1000
    config = build_config("125M", "interdomain", vocab_size=1000, n_kv_heads=4)
    per_token = train_flops_per_token(config, 4096)
    count = training.num_floating_point_operations
    assert count(args, 8) == 8 * 4096 * per_token
    packed = {"seqlen_squared_sum_in_batch": 10**9, "total_real_tokens_in_batch": 100}
    assert count(args, 8, **packed) == 100 * per_token


@pytest.mark.parametrize(
    ("steps", "warmup", "floor"), [(1, 0, 0.0), (1, 1, 0.0), (10, 4, 1e-5), (10, 10, 1e-5)]
)
def test_every_step_has_the_learning_rate_of_a_run_of_torchtitan(
    parse, training, steps, warmup, floor
):
    """The script's schedule counts sequences."""
    args = parse(f"{GOOD} --lr 3e-3 --global-batch-size 8")
    training.get_megatron_optimizer_config(args)
    group = {"params": [], "max_lr": LR, "min_lr": floor}
    schedule = training.OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=0.0,
        max_lr=1.0,
        min_lr=floor,
        lr_warmup_steps=warmup * 8,
        lr_decay_steps=max(steps, warmup + 1) * 8,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )
    factor = multiple_of_peak(LRScheduler(min_lr=floor), LR, steps=steps, warmup=warmup)
    for step in range(steps):
        assert group["lr"] == pytest.approx(LR * factor(step))
        schedule.step(8)


REFUSED = {  # flags after GOOD: the words of the error
    "--spec": "name the layer: --spec interdomain.megatron.spec",
    "--spec interdomain.nowhere x": "No module named 'interdomain.nowhere'",
    "--spec interdomain.megatron.spec s5": "s5 is no layer of this project. Name a layer that",
    "--spec tests.megatron.conftest STOCK": "is no layer of this project",
    "--hybrid-layer-pattern M-*-": "M-*- is ignored by GPTModel's layers, as interdomain.megatron.spec makes them",
    "--num-query-groups 4": "--num-query-groups is ignored without --group-query-attention",
    "--transformer-impl transformer_engine": "Transformer Engine cannot be imported.",
    "--overlap-grad-reduce --pipeline-model-parallel-size 2": "Set --no-align-grad-reduce",
    "--rampup-batch-size 2": "--rampup-batch-size is ignored by this version",
    f"{GLA} --group-query-attention": "is ignored: no layer shares",
    "--kv-channels 48": "got 12 * 48, dim = 768",
    "--group-query-attention --num-query-groups 5": "n_kv_heads must divide n_heads = 12: got 5",
    "--tensor-model-parallel-size 5": "12 heads and 12 heads of keys and values cannot be split over 5",
    f"{GLA} --mixer.state_heads 3 --tensor-model-parallel-size 2": "3 heads of gla's state cannot be split over 2",
    "--sft --context-parallel-size 2": "--sft with --context-parallel-size: ",
    "--bf16": "Set --use-distributed-optimizer.",
    "--use-distributed-optimizer --save x": "Set --dist-ckpt-optim-fully-reshardable.",
    "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --save x": "Install one of them.",
    "--qk-layernorm": "error: --qk-layernorm: ",
    "--num-experts 4": "error: --num-experts: ",
    "--transformer-impl inference_optimized": "error: --transformer-impl: ",
    "--mixer.readout imaginary": "invalid choice: 'imaginary'",
    "--mixer.rope perhaps": "'perhaps' is neither True nor False",
    "--data.corpus $NONE_SUCH/x": "the environment variable NONE_SUCH is not set",
    "--data.corpus ~/nowhere": "/nowhere is not a prepared corpus",
    "--data.corpus answers": "is a corpus whose loss is that of its answers",
}


def always(*arguments):
    return True


ANSWERS = """{"format": "interdomain-corpus", "format_version": 1, "vocab_size": 514, "answers": {}, "splits": {}}"""


@pytest.mark.parametrize("flags", REFUSED)
def test_refused_at_the_start(flags, parse, capsys, tmp_path, monkeypatch):
    # There is a GPU, and neither Transformer Engine nor Apex.
    monkeypatch.setattr("torch.cuda.is_available", always)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "manifest.json").write_text(ANSWERS)
    with pytest.raises(SystemExit) as ended:
        parse(f"{GOOD} {flags}")
    assert ended.value.code == 2
    assert REFUSED[flags] in capsys.readouterr().err


def test_an_unknown_setting_of_the_mixer_is_refused():
    with pytest.raises(ValueError, match="unknown mixer setting"):
        layer_spec(n_kv_heads=2)


@pytest.mark.parametrize(
    ("megatron_core", "words"),
    [
        (None, "needs megatron-core, the extra `megatron`: pip install"),
        (
            SimpleNamespace(__version__="0.15.3"),
            r"runs with megatron-core 0.16 to 0.19; found 0\.15\.3\.",
        ),
    ],
)
def test_without_megatron_core_or_with_another(monkeypatch, megatron_core, words):
    """Neither is asked for until it is needed: `convert` reads checkpoints without it."""
    monkeypatch.setitem(sys.modules, "megatron.core", megatron_core)
    with pytest.raises(ImportError, match=words):
        require_megatron()
