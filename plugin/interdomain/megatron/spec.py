"""Layer specifications for Megatron's GPTModel: `--spec interdomain.megatron.spec NAME`.

NAME is any condition of the study.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

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

# The mixer's settings that a user gives by their own names, as fields of MixerConfig. The others
# are given by the condition, and by Megatron's num_query_groups.
OWN_MIXER_SETTINGS = {
    name: f for name, f in MIXER_SETTINGS.items() if name not in ("kind", "n_kv_heads")
}


class RMSNorm(layers.RMSNorm):
    """A norm that knows sequence parallelism. Without Transformer Engine, Megatron has none.

    Args:
        config: Megatron's configuration.
        hidden_size: Width of the hidden states.
        eps: Added to their mean square.
    """

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
    """Returns one layer: Megatron's TransformerLayer and MLP around the mixer of a condition.

    Args:
        condition: A row of `CONDITIONS`.
        rope_theta: Base of the rotary embedding.
        max_seq_len: Tokens of a training sequence, only for the record in a checkpoint.
        n_layers: Number of layers of the model; read for a hybrid only.
        layers: A hybrid: the condition of each layer, in place of `condition`. A shorter list is
            repeated, and every layer takes its mixer by its number. Megatron's configuration then
            needs hetereogenous_dist_checkpoint=True.
        softmax_every: A hybrid: N, so that layers N - 1, 2N - 1, ... are softmax and the others
            `condition`. Megatron's configuration needs the same setting as for `layers`.
        execution: How the mixers are computed. None: the defaults.
        seed: Seed of the mixers' initial values, which are the plain model's.
        contiguous: True if context-parallel ranks cut their batches by `training.contiguous`, as
            they must.
        transformer_engine: True for Transformer Engine's linear layers, False for Megatron's own.
        settings: Fields of `MixerConfig` (n_basis, readout, ...). Megatron's num_query_groups sets
            the number of heads of keys and values.
    Returns:
        A specification that may stand for every layer of the model.
    Raises:
        ValueError: A condition or setting is unknown, no mixer has the combination, or Transformer
            Engine cannot be imported.
    """
    check_names("mixer", settings, OWN_MIXER_SETTINGS)
    # Only the mixers of this configuration are read. The size gives their default n_basis.
    config = build_config(
        "125M",
        condition,
        n_layers=n_layers,
        layers=layers,
        softmax_every=softmax_every,
        **settings,
    )
    params = dict(
        mixers=config.mixers,
        rope_theta=rope_theta,
        max_seq_len=max_seq_len,
        execution=execution,
        seed=seed,
        contiguous=contiguous,
        mlp_apart=False,
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules(params, transformer_engine))


# How the names of a norm's tensors begin in a checkpoint. Transformer Engine's linear layers have
# the norm in them: its names there become those of a norm outside.
NORM_KEYS = {
    "self_attention.in_proj.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
# Megatron's bias, dropout and addition to the residual stream. These layers have no bias and no
# dropout, so it only adds.
ADD: Any = get_bias_dropout_add


def submodules(params: dict[str, Any], transformer_engine: bool) -> TransformerLayerSubmodules:
    """Returns the parts of a layer. Their names in a checkpoint do not depend on the linear layers.

    Args:
        params: The keyword arguments of its InterdomainAttention. If their mlp_apart is True, the
            layer has no MLP.
        transformer_engine: Take Transformer Engine's linear layers, with the norm before each in
            it. The input norm of a fixed-state baseline stays outside, because another product
            beside in_proj needs it. A norm outside is RMSNorm: Transformer Engine's has an extra
            state, which no checkpoint of local layers has.
    Raises:
        ValueError: Transformer Engine cannot be imported.
    """
    backend = _backend(transformer_engine)
    has_fixed_state = any(mixer.kind in FIXED_STATE for mixer in params["mixers"])
    norm: Any = RMSNorm
    in_proj: Any = backend.column_parallel_linear()
    if transformer_engine and not has_fixed_state:
        norm = IdentityOp
        in_proj = backend.column_parallel_layer_norm_linear()
    projections = InterdomainAttentionSubmodules(in_proj, backend.row_parallel_linear())
    mixer = TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=ModuleSpec(
            module=InterdomainAttention, params=params, submodules=projections
        ),
        self_attn_bda=ADD,
        sharded_state_dict_keys_map=NORM_KEYS,
    )
    return mixer if params["mlp_apart"] else mlp_submodules(transformer_engine, mixer)


def mlp_submodules(
    transformer_engine: bool, mixer: TransformerLayerSubmodules | None = None
) -> TransformerLayerSubmodules:
    """Returns the parts of an MLP.

    Args:
        transformer_engine: True for Transformer Engine's linear layers, with the norm in the first
            of them; False for Megatron's own.
        mixer: The parts of the mixer in the same layer. None: the layer has only an MLP.
    """
    return replace(
        mixer or TransformerLayerSubmodules(sharded_state_dict_keys_map=NORM_KEYS),
        pre_mlp_layernorm=IdentityOp if transformer_engine else RMSNorm,
        mlp=get_mlp_module_spec_for_backend(_backend(transformer_engine)),
        mlp_bda=ADD,
    )


def _backend(transformer_engine: bool) -> Any:
    """Returns Megatron's object that names the classes of linear layers.

    Args:
        transformer_engine: True for those of Transformer Engine, False for Megatron's own.
    Raises:
        ValueError: Transformer Engine cannot be imported.
    """
    if transformer_engine and not HAVE_TE:
        raise ValueError(
            "Transformer Engine cannot be imported. Install it, or take Megatron's own linears: "
            "--transformer-impl local, layer_spec(transformer_engine=False)."
        )
    return TESpecProvider() if transformer_engine else LocalSpecProvider()


def block_spec(
    config: TransformerConfig,
    spec: ModuleSpec,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """Returns all layers of a pipeline stage, and a last norm that needs no Transformer Engine.

    Args:
        config: Megatron's configuration.
        spec: What `layer_spec` returned: the specification of every layer.
        vp_stage: Megatron's number of the virtual stage. None: the pipeline has none.
        pp_rank: Megatron's number of the stage. None: this rank's.
    """
    n_layers = get_num_layers_to_build(config, vp_stage, pp_rank)
    norm: Any = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * n_layers, layer_norm=norm)


def backbone(config: ModelConfig) -> dict[str, Any]:
    """Returns Megatron's settings for a model.

    TransformerConfig and Megatron's parsed arguments share these names.
    """
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
    """Returns Megatron's configuration of a model for GPTModel.

    Args:
        config: The plain model's configuration.
        settings: Any other fields of TransformerConfig (parallelism, precision, ...).
    Raises:
        ValueError: The layers of a hybrid differ in their number of heads of keys.
    """
    # Megatron's num_query_groups. Fixed-state baselines do not read it.
    groups = set()
    for layer in config.layers:
        if layer.mixer.kind not in FIXED_STATE:
            groups.add(layer.n_kv_heads)
    if not groups:
        groups = {config.n_heads}
    if len(groups) > 1:
        raise ValueError(
            f"Megatron has one number of key heads for all layers; these have {sorted(groups)}. "
            "Set n_kv_heads."
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


# Any condition can be named after --spec.
globals().update({name: layer_spec(name) for name in CONDITIONS})
