"""Annotations of the fields of `schema`: which values a setting may have."""

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import tyro


class Bound(NamedTuple):
    """Which numbers a setting may be."""

    words: str
    allows: Callable[[Any], bool]


class OneOf(tuple):
    """Which strings a setting may be."""


class Unused(NamedTuple):
    """A field of TorchTitan's without a reader here. Only its default and what `harmless` names are accepted."""

    instead: str
    harmless: tuple = ()


def unused(kind: type, instead: str, *harmless):
    return Annotated[kind, tyro.conf.Suppress, Unused(instead, harmless)]


_AT_LEAST_1 = Bound("at least 1", lambda x: 1 <= x < math.inf)
_AT_LEAST_0 = Bound("at least 0", lambda x: 0 <= x < math.inf)
Count = Annotated[int, _AT_LEAST_1]
CountOr0 = Annotated[int, _AT_LEAST_0]
Positive = Annotated[float, Bound("positive", lambda x: x > 0)]
NotNegative = Annotated[float, _AT_LEAST_0]
Fraction = Annotated[float, Bound("from 0 to 1", lambda x: 0 <= x <= 1)]
Decay = Annotated[float, Bound("at least 0 and below 1", lambda x: 0 <= x < 1)]
