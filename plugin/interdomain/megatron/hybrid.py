"""Layers of HybridModel (Megatron 0.18 and later): `--spec interdomain.megatron.hybrid NAME --hybrid-layer-pattern "G-G-*-G-"`.

NAME is any condition of the study. A mixer and its MLP are two layers there.

Letters: G the condition's mixer, * softmax, M Mamba-2, all of this project; - the MLP, after each of them; | between stages.
"""

from dataclasses import replace
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from interdomain.model.config import CONDITIONS, ModelConfig

from .spec import RMSNorm, layer_spec, mlp_submodules, submodules, transformer_config

try:
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules  # pyright: ignore[reportMissingImports]
    from megatron.core.ssm.mlp_layer import MLPLayer
except ImportError as e:
    raise ImportError(
        f"HybridModel needs megatron-core 0.18 or later ({e}). Install it, or take GPTModel: --spec interdomain.megatron.spec."
    ) from e

SLOTS = {"G": "gdn_layer", "*": "attention_layer", "M": "mamba_layer"}  # of HybridStackSubmodules


def mixer_letters(pattern: str) -> str:
    """The letters of the mixers in order. Raises: ValueError for a pattern of which no folder could be made."""
    letters = pattern.replace("|", "")
    mixers, mlps = letters[::2], letters[1::2]
    if not letters or len(letters) % 2 or mixers.strip("".join(SLOTS)) or mlps.strip("-"):
        raise ValueError(
            f"the layer pattern {pattern!r} is of no model that this project converts. A pattern is of pairs: a mixer "
            f"({', '.join(SLOTS)}), then its MLP (-), such as G-G-*-G-. Stages may be divided by |."
        )
    return mixers


class Stack(HybridStack):
    """HybridStack with a last norm that needs no Transformer Engine. Raises: ValueError, as `mixer_letters`."""

    def __init__(
        self,
        config: Any,
        *,
        layer_type_list: list[str],
        pp_layer_offset: int = 0,
        post_process: bool = True,
        **settings: Any,
    ) -> None:
        before, after = (
            pp_layer_offset % 2,
            (pp_layer_offset + len(layer_type_list)) % 2,
        )  # halves of pairs, elsewhere
        mixer_letters("".join(["G" * before, *layer_type_list, "-" * after]))
        settings |= dict(
            layer_type_list=layer_type_list,
            pp_layer_offset=pp_layer_offset,
            post_process=post_process,
        )
        super().__init__(config, post_layer_norm=False, **settings)
        self.post_layer_norm = True
        if post_process:
            self.final_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)


def stack_spec(
    condition: str = "interdomain", *, transformer_engine: bool = False, **settings: Any
) -> ModuleSpec:
    """All layers, for HybridModel's hybrid_stack_spec.

    settings: as of `layer_spec`; each letter's mixer takes those settings of MixerConfig that it has.
    Raises: ValueError, as `layer_spec`.
    """
    whole: Any = layer_spec(layers=(condition, "softmax", "mamba2"), **settings)
    params = whole.submodules.self_attention.params
    layers: dict[str, Any] = {
        "mlp_layer": ModuleSpec(MLPLayer, submodules=mlp_submodules(transformer_engine))
    }
    for letter, mixer in zip(SLOTS, params["mixers"], strict=True):
        parts = submodules(params | {"mixers": (mixer,), "mlp_apart": True}, transformer_engine)
        # HybridStack counts the layers of the stages before, and says so to all but M's.
        offset = {"add_layer_offset": False} if letter == "M" else {}
        layers[SLOTS[letter]] = ModuleSpec(TransformerLayer, submodules=parts, params=offset)
    return ModuleSpec(Stack, submodules=HybridStackSubmodules(**layers))


def hybrid_config(config: ModelConfig, **settings: Any) -> TransformerConfig:
    """Megatron's configuration of a model as HybridModel, as `transformer_config`; its pattern is `hybrid_pattern(config)`."""
    return replace(
        transformer_config(config, **settings), num_layers=2 * config.n_layers, is_hybrid_model=True
    )


globals().update({name: stack_spec(name) for name in CONDITIONS})  # any of them after --spec
