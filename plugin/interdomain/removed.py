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
    "data.stages": (
        "Resume with another `data.corpus` or `data.weights`. For another length or batch, start a second run with "
        "`checkpoint.initial_load_path`."
    ),
    "metrics.notify": "Let the scheduler write to you: `#SBATCH --mail-type=END,FAIL,REQUEUE`.",
    "metrics.samples": "Convert a checkpoint of the run, and use `interdomain generate` and `interdomain inspect-model`.",
    "release": "Convert each run with `interdomain convert`, and publish the exported models with `hf upload`.",
}


def removal_of(name: str) -> str | None:
    """The error message for a removed name, or the flag of a removed setting; None for any other name."""
    if "." in name:
        name = name.removeprefix("--").replace("-", "_")
    if name not in REMOVED:
        return None
    return f"{name} was removed. {REMOVED[name]}"
