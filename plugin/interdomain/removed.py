"""What earlier versions had, and what to do instead. Standard library only.

This is the only place that knows a removed name: of a command, of an option of `./launch.sh` (with its dashes), or of a setting
(with a dot). CHANGELOG.md has the same sentences.
"""

NO_ESTIMATES = "Nothing takes its place: speed was computed from datasheets, and never measured."
REMOVED = {
    "--best": NO_ESTIMATES,
    "--device": NO_ESTIMATES,
    "--gpus-per-node": NO_ESTIMATES,
    "--network": NO_ESTIMATES,
    "bench-serving": "Use `vllm bench serve`, which measures any server.",
    "release": "Convert each run with `interdomain convert`, and publish the exported models with `hf upload`.",
}


def removal_of(name: str) -> str | None:
    """The error message for a removed name; None for any other name."""
    if name not in REMOVED:
        return None
    return f"{name} was removed. {REMOVED[name]}"
