"""Layers of HybridModel.

Their options are `--spec interdomain.megatron.hybrid NAME --hybrid-layer-pattern "G-G-*-G-"`.

NAME is any condition of the study. A mixer and its MLP are two layers of the pattern. Its letters
are G for the condition's mixer, * for softmax and M for Mamba-2, all of this project; - for the MLP
after each of them; and | between pipeline stages.

HybridModel needs Megatron-Core 0.18 or later.
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
        f"HybridModel needs megatron-core 0.18 or later ({e}). Install it, or take GPTModel: "
        "--spec interdomain.megatron.spec."
    ) from e

# The fields of HybridStackSubmodules that hold the layers of this project, by the letters of a
# pattern.
SLOTS = {"G": "gdn_layer", "*": "attention_layer", "M": "mamba_layer"}


def mixer_letters(pattern: str) -> str:
    """Returns the letters of the mixers of a pattern, in order.

    Args:
        pattern: HybridModel's --hybrid-layer-pattern, such as "G-G-*-G-".
    Raises:
        ValueError: The model could not be exported: the pattern is not made of pairs of a mixer and
            an MLP.
    """
    letters = pattern.replace("|", "")
    mixers = letters[::2]
    mlps = letters[1::2]
    if not letters or len(letters) % 2 or mixers.strip("".join(SLOTS)) or mlps.strip("-"):
        raise ValueError(
            f"the layer pattern {pattern!r} is of no model that this project converts. A pattern "
            f"is of pairs: a mixer ({', '.join(SLOTS)}), then its MLP (-), such as G-G-*-G-. "
            "Stages may be divided by |."
        )
    return mixers


class Stack(HybridStack):
    """HybridStack with a last norm that needs no Transformer Engine.

    Args:
        config: Megatron's TransformerConfig.
        post_process: True for the last stage, which has the last norm.
        settings: Other arguments of HybridStack.
    """

    def __init__(self, config: Any, *, post_process: bool = True, **settings: Any) -> None:
        # With False HybridStack makes no norm, which would be Transformer Engine's. With True it
        # applies self.final_norm in its forward pass.
        super().__init__(config, post_process=post_process, post_layer_norm=False, **settings)
        self.post_layer_norm = True
        if post_process:
            self.final_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)


def stack_spec(
    condition: str = "interdomain", *, transformer_engine: bool = False, **settings: Any
) -> ModuleSpec:
    """Returns all layers, for HybridModel's hybrid_stack_spec.

    Args:
        condition: The condition whose mixer has the letter G.
        transformer_engine: True for Transformer Engine's linear layers, False for Megatron's own.
        settings: The other keyword arguments of `spec.layer_spec`, such as rope_theta, and fields
            of MixerConfig. The mixer of each letter takes those fields that it has.
    Raises:
        ValueError: A condition or setting is unknown, no mixer has the combination, or Transformer
            Engine cannot be imported.
    """
    # GPTModel's layer for a hybrid of these three mixers, one for each letter of SLOTS. Only its
    # arguments are used.
    whole: Any = layer_spec(layers=(condition, "softmax", "mamba2"), **settings)
    params = whole.submodules.self_attention.params
    layers: dict[str, Any] = {
        "mlp_layer": ModuleSpec(MLPLayer, submodules=mlp_submodules(transformer_engine))
    }
    for letter, mixer in zip(SLOTS, params["mixers"], strict=True):
        parts = submodules(params | {"mixers": (mixer,), "mlp_apart": True}, transformer_engine)
        # HybridStack's numbers of layers count those of earlier pipeline stages already. It tells
        # this to every layer but M, so that TransformerLayer does not add them again.
        offset = {"add_layer_offset": False} if letter == "M" else {}
        layers[SLOTS[letter]] = ModuleSpec(TransformerLayer, submodules=parts, params=offset)
    return ModuleSpec(Stack, submodules=HybridStackSubmodules(**layers))


def hybrid_config(config: ModelConfig, **settings: Any) -> TransformerConfig:
    """Returns Megatron's configuration of a model for HybridModel.

    A mixer and its MLP count as two layers. The order of the layers is no part of it: give
    HybridModel the pattern that `checkpoint.hybrid_pattern(config)` returns.

    Args:
        config: The plain model's configuration.
        settings: Any other fields of TransformerConfig (parallelism, precision, ...).
    Raises:
        ValueError: The layers of a hybrid differ in their number of heads of keys.
    """
    gpt_config = transformer_config(config, **settings)
    return replace(gpt_config, num_layers=2 * config.n_layers, is_hybrid_model=True)


# Any condition can be named after --spec.
globals().update({name: stack_spec(name) for name in CONDITIONS})
