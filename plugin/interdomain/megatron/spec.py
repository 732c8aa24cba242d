"""Layer specifications for Megatron's GPTModel: `--spec interdomain.megatron.spec NAME`, NAME any condition of the study."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from interdomain.model import layers
from interdomain.model.config import (
    CONDITIONS,
    FIXED_STATE,
    MIXER_SETTINGS,
    Execution,
    ModelConfig,
    build_config,
    check_names,
)

from .mixer import InterdomainAttention, InterdomainAttentionSubmodules

# Megatron has settings of its own for these.
SETTINGS = {name: f for name, f in MIXER_SETTINGS.items() if name not in ("kind", "n_kv_heads")}


class RMSNorm(layers.RMSNorm):
    """A norm that knows of sequence parallelism: without Transformer Engine, Megatron has none."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel
        self.to(config.params_dtype)


def layer_spec(
    condition: str = "interdomain",
    *,
    rope_theta: float = 10_000.0,
    max_seq_len: int = 4096,
    n_layers: int = 12,
    layers: Sequence[str] = (),
    softmax_every: int | None = None,
    execution: Execution | None = None,
    seed: int = 42,
    contiguous: bool = False,
    transformer_engine: bool = False,
    **settings: Any,
) -> ModuleSpec:
    """One layer: Megatron's TransformerLayer and MLP around the mixer of a condition.

    Args:
        settings: of `MixerConfig`, by name (n_basis, readout, ...). Heads of keys and values: Megatron's num_query_groups.
        max_seq_len: for a checkpoint's record alone. execution: how the mixers are computed.
        layers, softmax_every: of a hybrid, as in `build_config`; every layer takes its mixer by its number. It needs n_layers,
            if these are not 12, and hetereogenous_dist_checkpoint=True in Megatron's configuration.
        seed: of the mixers' initial values, which are the plain model's.
        contiguous: True if context-parallel ranks cut their batches by `training.contiguous`, as they must.
        transformer_engine: as in `submodules`.
    Raises: ValueError for an unknown condition or setting, for a combination that no mixer has, or as `submodules`.
    """
    check_names("mixer", settings, SETTINGS)
    hybrid = dict(n_layers=n_layers, layers=layers, softmax_every=softmax_every)
    mixers = build_config("125M", condition, **hybrid, **settings).mixers
    options = dict(
        mixers=mixers, rope_theta=rope_theta, max_seq_len=max_seq_len, contiguous=contiguous
    )
    options |= dict(execution=execution, seed=seed, mlp_apart=False)
    return ModuleSpec(module=TransformerLayer, submodules=submodules(options, transformer_engine))


KEYS = {  # in a checkpoint, where a norm is within a linear: as where it is not
    "self_attention.in_proj.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
ADD: Any = get_bias_dropout_add


def submodules(params: dict[str, Any], transformer_engine: bool) -> TransformerLayerSubmodules:
    """The parts of a layer whose InterdomainAttention has these params, with the names in a checkpoint that local layers have.

    Args:
        params: of InterdomainAttention; with mlp_apart the layer has no MLP.
        transformer_engine: whether the linears are Transformer Engine's, and the norms within them where they can be: not the
            input norm of baselines with a fixed state, which have another product beside in_proj. Norms outside are RMSNorm:
            Transformer Engine's has an extra state, which no checkpoint of local layers has.
    Raises: ValueError where Transformer Engine cannot be imported.
    """
    backend = _backend(transformer_engine)
    normed = transformer_engine and not any(mixer.kind in FIXED_STATE for mixer in params["mixers"])
    in_proj: Any = (
        backend.column_parallel_layer_norm_linear() if normed else backend.column_parallel_linear()
    )
    projections = InterdomainAttentionSubmodules(
        in_proj=in_proj, out_proj=backend.row_parallel_linear()
    )
    mixer = TransformerLayerSubmodules(
        input_layernorm=IdentityOp if normed else RMSNorm,
        self_attention=ModuleSpec(
            module=InterdomainAttention, params=params, submodules=projections
        ),
        self_attn_bda=ADD,
        sharded_state_dict_keys_map=KEYS,
    )
    return mixer if params["mlp_apart"] else mlp_submodules(transformer_engine, mixer)


def mlp_submodules(
    transformer_engine: bool, mixer: TransformerLayerSubmodules | None = None
) -> TransformerLayerSubmodules:
    """The MLP of a layer, after its mixer if it has one. Otherwise as `submodules`."""
    return replace(
        mixer or TransformerLayerSubmodules(sharded_state_dict_keys_map=KEYS),
        pre_mlp_layernorm=IdentityOp if transformer_engine else RMSNorm,
        mlp=get_mlp_module_spec_for_backend(_backend(transformer_engine)),
        mlp_bda=ADD,
    )


def _backend(transformer_engine: bool) -> Any:
    if transformer_engine and not HAVE_TE:
        raise ValueError(
            "Transformer Engine cannot be imported. Install it, or take Megatron's own linears: --transformer-impl local, "
            "layer_spec(transformer_engine=False)."
        )
    return TESpecProvider() if transformer_engine else LocalSpecProvider()


def block_spec(
    config: TransformerConfig,
    spec: ModuleSpec,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """All layers of a pipeline stage, and a last norm that knows of sequence parallelism without Transformer Engine."""
    layers, norm = get_num_layers_to_build(config, vp_stage, pp_rank), cast(Any, RMSNorm)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=norm)


def backbone(config: ModelConfig) -> dict[str, Any]:
    """Settings of the backbone under the names that Megatron's TransformerConfig and its parser share."""
    return dict(
        num_layers=config.n_layers,
        hidden_size=config.dim,
        num_attention_heads=config.n_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.ffn_hidden,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.02,
    )


def transformer_config(config: ModelConfig, **settings: Any) -> TransformerConfig:
    """Megatron's configuration of a model; settings: any others of TransformerConfig (parallelism, precision, ...).

    Raises: ValueError for a hybrid whose layers differ in their heads of keys.
    """
    groups = {
        layer.n_kv_heads for layer in config.layers if layer.mixer.kind not in FIXED_STATE
    } or {config.n_heads}
    if len(groups) > 1:
        raise ValueError(
            f"Megatron has one number of key heads for all layers; these have {sorted(groups)}. Set n_kv_heads."
        )
    return TransformerConfig(
        **backbone(config),
        num_query_groups=groups.pop(),
        hetereogenous_dist_checkpoint=len(config.mixers) > 1,
        layernorm_epsilon=config.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        **settings,
    )


globals().update({name: layer_spec(name) for name in CONDITIONS})  # any of them after --spec
