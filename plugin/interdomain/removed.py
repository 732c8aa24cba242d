"""What earlier versions had, and what to do instead. Standard library only.

This is the only place that knows a removed name. A command has no dot in its name, and a setting has one. CHANGELOG.md has the
same sentences.
"""

REMOVED = {
    "bench-serving": "Use `vllm bench serve`, which measures any server.",
    "release": "Convert each run with `interdomain convert`, and publish the exported models with `hf upload`.",
}


def removal_of(name: str) -> str | None:
    """The error message for the name of a removed command or setting; None for any other name."""
    if name not in REMOVED:
        return None
    return f"{name} was removed. {REMOVED[name]}"
