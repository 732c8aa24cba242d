"""The settings of Megatron that this model does not have, from the table in settings.toml.

`arguments.check` checks the command line before anything is built. Every layer checks its
configuration when it is made, so that a user's own training loop is checked, too.
"""

import tomllib
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from interdomain.model.config import ModelConfig


class Setting(NamedTuple):
    """A setting of Megatron and the value that it must have.

    Attributes:
        flag: The argument of Megatron-LM's scripts.
        allowed: The names of the setting in TransformerConfig and among the parsed arguments, each
            with its value, or with a function that computes the value from all settings.
        otherwise: What another value would do.
        use: What to use instead.
    """

    flag: str
    allowed: dict[str, Any]
    otherwise: str
    use: str


def _ffn_hidden(settings: Any) -> int | None:
    """Returns the MLP's width for the model's width; None until Megatron has set its own."""
    dim = getattr(settings, "hidden_size", None)
    if not dim or not getattr(settings, "ffn_hidden_size", None):
        return None
    return ModelConfig(dim, 1, 1, dim).ffn_hidden


def _transformer_impl(settings: Any) -> str | None:
    """Returns the allowed implementation of the linear layers.

    It is any that is set, except inference_optimized.
    """
    implementation = getattr(settings, "transformer_impl", None)
    if implementation == "inference_optimized":
        return "transformer_engine"
    return implementation


def _cp_comm_type(settings: Any) -> Any:
    """Returns the allowed communication of context parallelism, which is Megatron's default.

    The default is a list among the arguments, and a name or None in a TransformerConfig.
    """
    communication = getattr(settings, "cp_comm_type", None)
    if communication == ["p2p"] or not communication:
        return communication
    return "p2p"


# The functions for the values that are "computed" in settings.toml. Each takes a TransformerConfig
# or parsed arguments, and returns the allowed value.
COMPUTED = {
    "ffn_hidden_size": _ffn_hidden,
    "transformer_impl": _transformer_impl,
    "cp_comm_type": _cp_comm_type,
}


def _read_table() -> list[Setting]:
    """Reads settings.toml."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    settings = []
    for group in table["group"]:
        for flag, allowed in group["settings"].items():
            for name in allowed.keys() & COMPUTED.keys():
                allowed[name] = COMPUTED[name]
            settings.append(Setting(flag, allowed, group["otherwise"], group["use"]))
    return settings


REQUIRED_SETTINGS = _read_table()


def check_settings(settings: Any) -> None:
    """Checks that Megatron's settings have the values of settings.toml.

    Args:
        settings: A TransformerConfig, or parsed arguments; None if there are no arguments. A name
            that is not in them, as in some versions of Megatron, counts as allowed.
    Raises:
        ValueError: Settings must be changed. The error has a line for each.
    """
    wrong = []
    for flag, allowed, otherwise, use in REQUIRED_SETTINGS:
        for name, value in allowed.items():
            if callable(value):
                value = value(settings)  # one of COMPUTED
            given = getattr(settings, name, value)
            if isinstance(given, Enum):
                given = given.name
            # An activation function is compared by its name.
            given = getattr(given, "__name__", given)
            # false in the table is also 0 and None.
            if given != value and (given or value):
                wrong.append(
                    f"{flag}: {name} = {given!r} {otherwise}. Allowed: {value or 'off'} ({use})."
                )
    if wrong:
        raise ValueError("\n".join(wrong))
