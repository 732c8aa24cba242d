"""How many Triton kernels a process compiled, and how many it read from the cache on the disk."""

import contextlib
from dataclasses import dataclass
from typing import Any


@dataclass
class Compilations:
    compiled: int = 0
    read: int = 0

    def __str__(self) -> str:
        return f"{self.compiled} kernels compiled, {self.read} read from the cache"


def count() -> Compilations:
    """Counts that go on for as long as the process lives. Without Triton they stay 0."""
    counts = Compilations()

    def add(*, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            counts.read += 1
        else:
            counts.compiled += 1

    with contextlib.suppress(ImportError):
        from triton import knobs

        knobs.compilation.listener = add
    return counts
