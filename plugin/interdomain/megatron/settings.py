"""The settings of Megatron that this model does not have, in one table: all that is refused, and docs/megatron.md lists it.

`arguments.check` checks the command line before anything is built, and every layer its configuration when it is made, so that a
training loop of a user's own is checked too.
"""

from typing import Any, NamedTuple

from megatron.core.transformer.enums import AttnBackend

from interdomain.model.config import ModelConfig

from .checkpoint import BACKBONE


class Setting(NamedTuple):
    """A setting and the value that it must have.

    flag: the argument of Megatron-LM. allowed: names in TransformerConfig and among the parsed arguments, and the value of each
    or a function of all settings that gives it. otherwise: the effect of another value here. use: the setting to take instead.
    """

    flag: str
    allowed: dict[str, Any]
    otherwise: str
    use: str


def _ffn_hidden(settings: Any) -> int | None:
    """The MLP's width for this width of the model; None while Megatron has not filled in its own."""
    dim, width = (getattr(settings, name, None) for name in ("hidden_size", "ffn_hidden_size"))
    return ModelConfig(dim, 1, 1, dim).ffn_hidden if dim and width else None


def _implementation(settings: Any) -> str | None:
    """The linears as they are set, where these are ones that a layer can have."""
    here = getattr(settings, "transformer_impl", None)
    return "transformer_engine" if here == "inference_optimized" else here


def _one_way(settings: Any) -> Any:
    """Context parallelism as Megatron leaves it: a list among the arguments, a name or None in a TransformerConfig."""
    here = getattr(settings, "cp_comm_type", None)
    return here if here == ["p2p"] else "p2p" if here else None


def _off(otherwise: str, use: str, *flags: str) -> list[Setting]:
    """Settings that must be off: None, 0 or False."""
    return [
        Setting(flag, dict.fromkeys(NAMES.get(flag, [flag.strip("-").replace("-", "_")])), otherwise, use)
        for flag in flags
    ]


NAMES = {  # where they are not the flag's
    "--apply-layernorm-1p": ["layernorm_zero_centered_gamma"],
    "--num-experts": ["num_experts", "num_moe_experts"],
    "--fp8-format": ["fp8"],
    "--fp4-format": ["fp4"],
    "--te-precision-config-file": ["te_precision_config_file", "quant_recipe"],
    "--kitchen-config-file": ["kitchen_config_file", "kitchen_recipe_number", "use_kitchen"],
    "--heterogeneous-layers-config-path": ["heterogeneous_layers_config_path", "heterogeneous_block_specs"],
}
FOLDER = "trains another model, of which no folder could be made"
IGNORED = "is ignored: the run would be as without it"
IN_PART = "reaches Megatron's part of the model, and no mixer"
LEAVE, SET, ZERO = "leave it out", "set it, or give model.size, which does", "set 0, or give model.size, which does"
ROPE = "--mixer.rope False for no rotation, --rotary-base for another base"
GATHERED = "has never run here: the dynamics of all layers are read at once, outside of the layers that it gathers"
# Megatron's own values for letters M and G of a HybridModel.
SIZES_OF_OTHERS = {"--mamba-state-dim": 128, "--mamba-head-dim": 64, "--mamba-num-groups": 8}
SIZES_OF_OTHERS |= {"--linear-key-head-dim": 128, "--linear-value-head-dim": 128, "--linear-conv-kernel-dim": 4}
SIZES_OF_OTHERS |= {"--linear-num-key-heads": 16, "--linear-num-value-heads": 32}
DOCUMENTS = "--dataloader-inter-document-masking (from 0.19)"
GATED = {name: BACKBONE[name] for name in ("gated_linear_unit", "activation_func")}
SETTINGS = (
    # The model around the mixer.
    Setting("--swiglu", {"swiglu": True} | GATED, FOLDER, SET),
    Setting("--disable-bias-linear", {"add_bias_linear": BACKBONE["add_bias_linear"]}, FOLDER, SET),
    Setting("--normalization", {"normalization": BACKBONE["normalization"]}, FOLDER, SET),
    Setting("--untie-embeddings-and-output-weights", {"untie_embeddings_and_output_weights": True}, FOLDER, SET),
    Setting("--ffn-hidden-size", {"ffn_hidden_size": _ffn_hidden}, FOLDER, "8/3 of the width, rounded up to 128"),
    *_off(FOLDER, LEAVE, "--squared-relu", "--quick-geglu", "--glu-linear-offset", "--activation-func-clamp-value"),
    *_off(FOLDER, LEAVE, "--apply-layernorm-1p", "--use-mup", "--mtp-num-layers"),
    *_off(IGNORED, LEAVE, "--num-experts", "--openai-gelu", "--apply-residual-connection-post-layernorm"),
    *_off(IGNORED, LEAVE, "--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json"),
    *_off("trains Megatron's own softmax model, whatever --spec says", LEAVE, "--use-legacy-models"),
    *_off("trains with dropout, which neither the paper nor TorchTitan's runs have", ZERO, "--hidden-dropout"),
    Setting("--init-method-std", {"init_method_std": 0.02}, IN_PART, "0.02, as the paper"),
    *_off(IN_PART, LEAVE, "--init-method-xavier-uniform"),
    # Attention, whose place the mixer takes.
    *_off(
        IGNORED, LEAVE, "--multi-latent-attention", "--qk-layernorm", "--qk-l2-norm", "--add-qkv-bias", "softmax_scale"
    ),
    *_off(IGNORED, LEAVE, "--apply-query-key-layer-scaling"),
    Setting("--softmax-type", {"softmax_type": "vanilla"}, IGNORED, LEAVE),
    *_off(IGNORED, ZERO, "--attention-dropout"),
    *_off(IGNORED, "--mixer.window, for layers of softmax", "--window-size", "--window-attn-skip-freq"),
    *_off(IGNORED, "--mixer.output_gate True", "--attention-output-gate"),
    *_off(IGNORED, "--spec for a mixer", "--experimental-attention-variant"),
    Setting("--attention-backend", {"attention_backend": AttnBackend.auto}, IGNORED, "--mixer.backend"),
    *_off(IGNORED, LEAVE, "--log-max-attention-logit", "--linear-attention-freq", "--mamba-num-heads"),
    *_off(IGNORED, LEAVE, "--use-flash-attn", "--flash-attention-version", "--mamba-training-ssm-states-dtype"),
    *_off(IGNORED, LEAVE, "--hierarchical-context-parallel-sizes", "--mtp-hybrid-override-pattern"),
    *_off(IGNORED, LEAVE, "--fused-residual-rmsnorm", "--use-grouped-gemm-for-dense-mlp"),
    *_off(IN_PART, LEAVE, "--fine-grained-activation-offloading"),
    *_off("stops the run at the MLP", LEAVE, "--use-te-activation-func"),
    *(
        Setting(
            flag, {flag.strip("-").replace("-", "_"): size}, IGNORED, "the settings of the mixer (--mixer.state_heads)"
        )
        for flag, size in SIZES_OF_OTHERS.items()
    ),
    *_off("stops the run: the mixer has no scores to clip", LEAVE, "--qk-clip"),
    # Positions and documents.
    Setting(
        "--position-embedding-type",
        {"position_embedding_type": "none"},
        "adds positions to those of the mixer, which rotates queries and keys itself",
        "set none, or give model.size, which does",
    ),
    Setting("--rotary-percent", {"rotary_percent": 1.0}, IGNORED, ROPE),
    *_off(IGNORED, ROPE, "--use-rotary-position-embeddings", "--use-rope-scaling", "--rotary-interleaved"),
    *_off(IGNORED, ROPE, "--rotary-seq-len-interpolation-factor", "--no-rope-freq"),
    *_off(IGNORED, ROPE, "--mrope-section"),
    *_off(IGNORED, DOCUMENTS, "--reset-attention-mask", "--reset-position-ids"),
    *_off("stops the run: it divides batches by softmax's work", LEAVE, "--hybrid-context-parallel"),
    Setting("--cp-comm-type", {"cp_comm_type": _one_way}, "is ignored: a state goes from piece to piece", LEAVE),
    # The optimizer and its shards, and graphs.
    *_off(GATHERED, "--use-distributed-optimizer", "--use-torch-fsdp2", "--use-megatron-fsdp"),
    Setting(
        "--optimizer",
        {"optimizer": "adam"},
        "is not the recipe: Megatron's Muon would orthogonalize the dynamics and biases of two dimensions, too",
        "adam; for Muon train with TorchTitan (optimizer.name)",
    ),
    *_off(IGNORED, LEAVE, "--apply-wd-to-qk-layernorm", "--no-weight-decay-cond-type"),
    *_off(
        "counts the learning rate by its first batch size, and ends above --min-lr",
        "--global-batch-size",
        "--step-batch-size-schedule",
    ),
    Setting(
        "--cuda-graph-impl",
        {"cuda_graph_impl": "none", "enable_cuda_graph": False, "external_cuda_graph": False},
        "has never run here: the dynamics are computed once a step, outside of the layers that it captures",
        LEAVE,
    ),
    # Precision and files.
    Setting("--transformer-impl", {"transformer_impl": _implementation}, IGNORED, "transformer_engine or local"),
    *_off(IGNORED, LEAVE, "--use-transformer-engine-op-fuser"),
    *_off(
        "is ignored by local layers, and has never run with Transformer Engine's", LEAVE, "--fp8-format", "--fp4-format"
    ),
    *_off(IGNORED, LEAVE, "--te-precision-config-file", "--kitchen-config-file"),
    *_off("stops a bf16 run at its first product, of float32 and bfloat16", LEAVE, "--fp32-residual-connection"),
    Setting(
        "--ckpt-format", {"ckpt_format": "torch_dist"}, "writes checkpoints that convert cannot read", "torch_dist"
    ),
)


def refuse(settings: Any) -> None:
    """Check a TransformerConfig or parsed arguments against SETTINGS; a name that a version does not have is as allowed.

    Raises: ValueError, with a line for each setting to change.
    """
    wrong = []
    for flag, allowed, otherwise, use in SETTINGS:
        for name, value in allowed.items():
            value = value(settings) if callable(value) else value
            here = getattr(settings, name, value)
            here = getattr(here, "__name__", here)
            if here != value and (here or value):
                wrong.append(f"{flag}: {name} = {here!r} {otherwise}. Allowed: {value or 'off'} ({use}).")
    if wrong:
        raise ValueError("\n".join(wrong))
