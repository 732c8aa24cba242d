"""Upstream's training script with our layer: its arguments, what is refused before it starts, and the script itself."""

import json
import sys
from types import SimpleNamespace

import pytest
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from interdomain.data import read_manifest
from interdomain.megatron import Schedule, layer_spec, require_megatron, spec
from interdomain.model import CONDITIONS, build_config
from interdomain.model.flops import train_flops_per_token
from interdomain.titan.plan.schedule import multiple_of_peak
from interdomain.titan.settings.schema import LRScheduler

from . import stand_ins
from .conftest import GOOD

LR = 3e-3
GLA = "--spec interdomain.megatron.spec gla"


def test_settings_reach_the_layer(parse, corpus):
    line = f"{GOOD} --data.corpus {corpus} --mixer.rope False --mixer.n_basis 32 --ssm-lr 5e-4 --num-layers 6 --seed 7"
    args, _ = parse(line)
    assert (args.hidden_size, args.num_layers, args.seq_length, args.position_embedding_type) == (
        768,
        6,
        4096,
        "none",
    )
    assert (args.train_data_path, args.tokenizer_type) == (
        [f"{corpus}/train-00000"],
        "NullTokenizer",
    )
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
        monkeypatch.setattr(
            spec, "interdomain", layer_spec(n_layers=2, layers=["interdomain", condition])
        )
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
    assert rates(
        training.OptimizerParamScheduler, 8, steps=10, warmup=2, floor=1e-5
    ) == pytest.approx(titan_rates(steps=10, warmup=2, floor=1e-5))


def test_the_log_counts_the_flops_of_this_model(parse):
    args, training = parse(f"{GOOD} --group-query-attention --num-query-groups 4")
    args.padded_vocab_size = 1000
    per_token = train_flops_per_token(
        build_config("125M", "interdomain", vocab_size=1000, n_kv_heads=4), 4096
    )
    assert training.num_floating_point_operations(args, 8) == 8 * 4096 * per_token
    packed = dict(seqlen_squared_sum_in_batch=10**9, total_real_tokens_in_batch=100)
    assert training.num_floating_point_operations(args, 8, **packed) == 100 * per_token


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), (1, 1), (2, 0), (2, 1), (10, 0), (10, 4), (10, 9), (10, 10)]
)
@pytest.mark.parametrize("floor", [0.0, 1e-5])
def test_every_step_has_the_learning_rate_of_a_run_of_torchtitan(steps, warmup, floor):
    assert rates(Schedule, 1, steps, warmup, floor) == pytest.approx(
        titan_rates(steps, warmup, floor)
    )


def rates(schedule, each, steps, warmup, floor):
    optimizer = SimpleNamespace(param_groups=[{"params": [], "max_lr": LR, "min_lr": floor}])
    decay = dict(
        start_wd=0.1, end_wd=0.1, wd_incr_steps=1, wd_incr_style="constant", lr_decay_style="cosine"
    )
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


REFUSED = {  # what comes after GOOD: the words of the error
    "--spec": "name the layer: --spec interdomain.megatron.spec",
    "--spec interdomain.nowhere x": "No module named 'interdomain.nowhere'",
    "--spec interdomain.megatron.spec s5": "s5 is no layer of this project. Name a layer that",
    "--spec megatron.core.models.gpt.gpt_layer_specs get_gpt_layer_local_spec": "is no layer of this project",
    "--spec tests.megatron.conftest STOCK": "is no layer of this project",
    "--hybrid-layer-pattern M-*-": "M-*- is ignored by GPTModel's layers, as interdomain.megatron.spec makes them",
    "--num-query-groups 4": "--num-query-groups is ignored without --group-query-attention",
    "--transformer-impl transformer_engine": "Transformer Engine cannot be imported.",
    "--overlap-grad-reduce --pipeline-model-parallel-size 2": "Set --no-align-grad-reduce",
    "--rampup-batch-size 2": "--rampup-batch-size is ignored by this version",
    f"{GLA} --group-query-attention": "is ignored: no layer shares",
    "--num-attention-heads 8": "n_heads * head_dim must be dim: got 8 * 64, dim = 768",
    "--kv-channels 48": "got 12 * 48, dim = 768",
    "--kv-channels 63 --hidden-size 756 --ffn-hidden-size 2048": "head_dim must be even",
    "--group-query-attention --num-query-groups 5": "n_kv_heads must divide n_heads = 12: got 5",
    "--tensor-model-parallel-size 5": "12 heads and 12 heads of keys and values cannot be split over 5",
    "--group-query-attention --num-query-groups 3 --tensor-model-parallel-size 2": "12 heads and 3 heads",
    f"{GLA} --mixer.state_heads 3 --tensor-model-parallel-size 2": "3 heads of gla's state cannot be split over 2",
    f"{GLA} --mixer.state_heads 7": "mixer.state_heads must divide",
    "--sft --context-parallel-size 2": "--sft with --context-parallel-size: ",
    "--bf16": "Set --use-distributed-optimizer.",
    "--use-distributed-optimizer --save x": "Set --dist-ckpt-optim-fully-reshardable.",
    "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --save x": "Install one of them.",
    "--mixer.n_basis 0": "mixer.n_basis must be from 1 to 1,048,576: got 0.",
    "--mixer.readout imaginary": "invalid choice: 'imaginary'",
    "--mixer.rope perhaps": "'perhaps' is neither True nor False",
    "--data.corpus $NONE_SUCH/x": "the environment variable NONE_SUCH is not set",
    "--data.corpus ~/nowhere": "/nowhere is not a prepared corpus",
    "--data.corpus answers": "is a corpus whose loss is that of its answers",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_refused_at_the_start(flags, parse, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "torch.cuda.is_available", lambda: True
    )  # a GPU without Transformer Engine and Apex
    monkeypatch.chdir(tmp_path)
    manifest = {
        "format": "interdomain-corpus",
        "format_version": 1,
        "vocab_size": 514,
        "answers": {},
        "splits": {},
    }
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(SystemExit) as ended:
        parse(f"{GOOD} {flags}")
    assert ended.value.code == 2
    assert REFUSED[flags] in capsys.readouterr().err


def test_specs():
    """Every condition after --spec; a setting of the mixer that no model has is refused as everywhere."""
    for condition in CONDITIONS:
        assert (
            vars(spec)[condition].submodules.self_attention.params["mixers"]
            == build_config("125M", condition).mixers
        )
    with pytest.raises(ValueError, match="unknown mixer setting"):
        layer_spec(n_kv_heads=2)


def test_without_megatron_core_or_with_another(monkeypatch):
    """Neither is asked for until it is needed: `convert` reads checkpoints without it."""
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(ImportError, match="needs megatron-core, the extra `megatron`: pip install"):
        require_megatron()
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(__version__="0.15.3"))
    with pytest.raises(
        ImportError, match=r"runs with megatron-core 0.16 to 0.19; found 0\.15\.3\."
    ):
        require_megatron()
