"""Wrong uses of Megatron's settings: each is refused on the command line of Megatron-LM's script, and by the layer."""

import sys
from types import SimpleNamespace

import pytest
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.enums import AttnBackend
from torch.nn import functional as F

from interdomain.files.megatron_checkpoint import BACKBONE
from interdomain.megatron import layer_spec, spec
from interdomain.megatron.settings import SETTINGS
from interdomain.model import build_config

from ..common import REPOSITORY
from .conftest import GOOD

BARE = "--spec interdomain.megatron.spec interdomain"
# On the command line: (in a TransformerConfig, where it has the setting).
WRONG = {
    "--squared-relu": {},
    "--quick-geglu": {},
    "--openai-gelu": {},
    "--glu-linear-offset 1.0": dict(glu_linear_offset=1.0),
    "--activation-func-clamp-value 7.0": dict(activation_func_clamp_value=7.0),
    "--normalization LayerNorm": dict(normalization="LayerNorm"),
    "--apply-layernorm-1p": dict(layernorm_zero_centered_gamma=True),
    "--use-mup": dict(use_mup=True),
    "--ffn-hidden-size 3072": dict(ffn_hidden_size=3072),
    "--mtp-num-layers 1": dict(mtp_num_layers=1),
    "--optimizer muon": {},
    "--optimizer sgd": {},
    "--ckpt-format torch": {},
    "--ckpt-format torch_dcp": {},
    "--ckpt-format fsdp_dtensor": {},
    "--position-embedding-type learned_absolute": {},
    "--position-embedding-type rope": {},
    "--position-embedding-type mrope": {},
    "--use-rotary-position-embeddings": {},
    "--use-rope-scaling": {},
    "--rotary-percent 0.5": {},
    "--rotary-interleaved": dict(rotary_interleaved=True),
    "--rotary-seq-len-interpolation-factor 2": {},
    "--no-rope-freq 4": dict(no_rope_freq=4),
    "--num-experts 8": dict(num_moe_experts=8),
    "--multi-latent-attention": dict(multi_latent_attention=True),
    "--experimental-attention-variant gated_delta_net": dict(experimental_attention_variant="gated_delta_net"),
    "--qk-layernorm": dict(qk_layernorm=True),
    "--qk-l2-norm": dict(qk_l2_norm=True),
    "--qk-clip": dict(qk_clip=True),
    "--window-size (128,0)": dict(window_size=(128, 0)),
    "--softmax-type learnable": dict(softmax_type="learnable"),
    "--apply-query-key-layer-scaling": dict(apply_query_key_layer_scaling=True),
    "--attention-output-gate": dict(attention_output_gate=True),
    "--add-qkv-bias": dict(add_qkv_bias=True),
    "--attention-dropout 0.1": dict(attention_dropout=0.1),
    "--hidden-dropout 0.1": dict(hidden_dropout=0.1),
    "--apply-residual-connection-post-layernorm": dict(apply_residual_connection_post_layernorm=True),
    "--fp32-residual-connection": dict(fp32_residual_connection=True),
    "--transformer-impl inference_optimized": dict(transformer_impl="inference_optimized"),
    "--use-transformer-engine-op-fuser": dict(use_transformer_engine_op_fuser=True),
    "--fp8-format hybrid": dict(fp8="hybrid"),
    "--fp4-format e2m1": dict(fp4="e2m1"),
    "--te-precision-config-file x": dict(quant_recipe=object()),
    "--kitchen-config-file x": dict(use_kitchen=True),
    "--heterogeneous-layers-config-path x": dict(heterogeneous_block_specs=True),
    "--heterogeneous-layers-config-encoded-json x": {},
    "--init-method-std 0.01": dict(init_method_std=0.01),
    "--init-method-xavier-uniform": {},
    "--reset-attention-mask": {},
    "--reset-position-ids": {},
    "--hybrid-context-parallel": dict(hybrid_context_parallel=True),
    "--use-legacy-models": {},
    "--use-torch-fsdp2": {},
    "--use-megatron-fsdp": {},
    "--cuda-graph-impl local": dict(cuda_graph_impl="local"),
    "--attention-backend flash": dict(attention_backend=AttnBackend.flash),
    "--log-max-attention-logit": dict(log_max_attention_logit=True),
    "--cp-comm-type a2a": dict(cp_comm_type="a2a"),
    "--linear-attention-freq 4": dict(linear_attention_freq=4),
    "--linear-conv-kernel-dim 3": dict(linear_conv_kernel_dim=3),
    "--linear-key-head-dim 64": dict(linear_key_head_dim=64),
    "--linear-value-head-dim 64": dict(linear_value_head_dim=64),
    "--linear-num-key-heads 8": dict(linear_num_key_heads=8),
    "--linear-num-value-heads 8": dict(linear_num_value_heads=8),
    "--mamba-state-dim 64": dict(mamba_state_dim=64),
    "--mamba-head-dim 32": dict(mamba_head_dim=32),
    "--mamba-num-groups 4": dict(mamba_num_groups=4),
    "--mamba-num-heads 4": dict(mamba_num_heads=4),
}
# Settings of a TransformerConfig that another flag turns on, or none.
MORE = {
    "--swiglu": [
        dict(gated_linear_unit=False),
        *(dict(activation_func=function) for function in (F.gelu, quick_gelu, squared_relu)),
    ],
    "--disable-bias-linear": [dict(add_bias_linear=True)],
    "softmax_scale": [dict(softmax_scale=0.1)],
}
# Switches that Megatron's defaults leave out, and --model.size sets.
MISSING = ["--swiglu", "--disable-bias-linear", "--normalization", "--untie-embeddings-and-output-weights"]
MISSING += ["--position-embedding-type", "--attention-dropout", "--hidden-dropout"]


def layer(**settings):
    config = spec.transformer_config(build_config("debug"))
    for name, value in settings.items():
        setattr(config, name, value)
    attention, ranks = layer_spec().submodules.self_attention, SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    return attention.module(config, attention.submodules, 1, ranks, **attention.params)


@pytest.mark.parametrize("line", WRONG)
def test_on_the_command_line(line, parse, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(f"{GOOD} {line}")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {line.split()[0]}: ")


def test_all_that_megatron_s_defaults_lack_is_named_at_once(parse, capsys):
    with pytest.raises(SystemExit):
        parse(BARE)
    lines = capsys.readouterr().err.removeprefix("error: ").splitlines()
    assert sorted(text.partition(":")[0] for text in lines) == sorted(MISSING)


LAYERS = [(line.split()[0], settings) for line, settings in WRONG.items() if settings]
LAYERS += [(flag, settings) for flag, cases in MORE.items() for settings in cases]


@pytest.mark.parametrize(("flag", "settings"), LAYERS)
def test_in_a_training_loop_of_one_s_own(flag, settings):
    with pytest.raises(ValueError, match=f"^{flag}: {next(iter(settings))} = ") as refused:
        layer(**settings)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "Start it as python -m interdomain.megatron.run SCRIPT"),
        (dict(ssm_lr=1e-3, reset_position_ids=True), "^--reset-position-ids: "),
    ],
)
def test_what_a_script_of_megatron_lm_has_when_the_layer_is_made(arguments, words, monkeypatch):
    """Whoever started the script, and whatever changed its arguments after they were read."""
    module = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(**arguments))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    with pytest.raises(ValueError, match=words):
        layer()


def test_the_table_is_whole():
    """The documentation lists it, every setting of a checkpoint's record is in it, and every row is tested above."""
    page = (REPOSITORY / "docs/megatron.md").read_text()
    for flag, _, otherwise, use in SETTINGS:
        assert f"| `{flag}` | {otherwise} | {use} |\n" in page
    assert {name for setting in SETTINGS for name in setting.allowed} >= BACKBONE.keys()
    assert {setting.flag for setting in SETTINGS} == {line.split()[0] for line in WRONG} | {*MORE, *MISSING}
