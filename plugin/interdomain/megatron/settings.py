"""The settings of Megatron that this model does not have, from the table in settings.toml.

`arguments.check` checks the command line before anything is built, and every layer its configuration when it is made, so that a
training loop of a user's own is checked too.
"""

import tomllib
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from interdomain.model.config import ModelConfig


class Setting(NamedTuple):
    """A setting and the value that it must have.

    Attributes:
        flag: The argument of Megatron-LM.
        allowed: Names in TransformerConfig and among the parsed arguments, and the value of each or a function of all settings
            that gives it.
        otherwise: The effect of another value here.
        use: The setting to take instead.
    """

    flag: str
    allowed: dict[str, Any]
    otherwise: str
    use: str


def _ffn_hidden(settings: Any) -> int | None:
    """The MLP's width for this width of the model; None while Megatron has not filled in its own."""
    dim = getattr(settings, "hidden_size", None)
    if not dim or not getattr(settings, "ffn_hidden_size", None):
        return None
    return ModelConfig(dim, 1, 1, dim).ffn_hidden


def _implementation(settings: Any) -> str | None:
    """The linears as they are set, where these are ones that a layer can have."""
    implementation = getattr(settings, "transformer_impl", None)
    return "transformer_engine" if implementation == "inference_optimized" else implementation


def _one_way(settings: Any) -> Any:
    """Context parallelism as Megatron leaves it: a list among the arguments, a name or None in a TransformerConfig."""
    communication = getattr(settings, "cp_comm_type", None)
    if communication == ["p2p"] or not communication:
        return communication
    return "p2p"


COMPUTED = {
    "ffn_hidden_size": _ffn_hidden,
    "transformer_impl": _implementation,
    "cp_comm_type": _one_way,
}


def _read_table() -> list[Setting]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    settings = []
    for group in table["group"]:
        for flag, allowed in group["settings"].items():
            for name in allowed.keys() & COMPUTED.keys():
                allowed[name] = COMPUTED[name]
            settings.append(Setting(flag, allowed, group["otherwise"], group["use"]))
    return settings


SETTINGS = _read_table()


def refuse(settings: Any) -> None:
    """Check a TransformerConfig or parsed arguments against SETTINGS; a name that a version does not have is as allowed.

    Raises: ValueError, with a line for each setting to change.
    """
    wrong = []
    for flag, allowed, otherwise, use in SETTINGS:
        for name, value in allowed.items():
            if callable(value):
                value = value(settings)
            given = getattr(settings, name, value)
            if isinstance(given, Enum):
                given = given.name
            given = getattr(given, "__name__", given)  # of an activation function
            if given != value and (given or value):
                wrong.append(
                    f"{flag}: {name} = {given!r} {otherwise}. Allowed: {value or 'off'} ({use})."
                )
    if wrong:
        raise ValueError("\n".join(wrong))
