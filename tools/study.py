"""python -m interdomain.tools.study outputs/125M outputs/125M-softmax outputs/125M-s4d

The study's main result from the folders of its runs, finished or not: the best validation loss of each, its perplexity against
softmax's at the same size, and the compute 6ND of the paper's scaling figure, beside the paper's own figures.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from interdomain.folders import require_empty

from ._bench import markdown_rows
from ._cli import argument_parser, user_errors
from ._curves import configuration_of, curves_of, events_folder, hyperparameters_of, read_events
from ._plots import Curve, Panel, draw

VALIDATION = "validation_metrics/loss"
TOKENS = "n_tokens_seen"
# The paper's best-of-run validation perplexities: its mechanism cube at 125M, its scaling figure at the other sizes.
PAPER = {
    "125M": {
        "interdomain": 16.48,
        "interdomain-norope": 16.51,
        "softmax": 16.65,
        "single-query": 16.94,
        "s4d": 19.22,
        "s4d-rope": 19.77,
        "dual-linear": 20.18,
    },
    "350M": {"softmax": 12.12, "interdomain": 11.47, "s4d": 13.52},
    "760M": {"softmax": 10.08, "interdomain": 8.94, "s4d": 10.67},
    "1.3B": {"softmax": 8.63, "interdomain": 7.98, "s4d": 9.13},
}
# What two runs must share for their perplexities to be of the same text; by section of the configuration.
SAME_TEXT = {
    "data": ("corpus", "validation_corpus", "tokenizer", "reset_state_at_documents"),
    "validation": ("tokens", "seq_len"),
}
REPEATED = ("seed", "ranks", "recompute")  # facts in which repetitions of one cell may differ
FORMATS = {
    **dict.fromkeys(("parameters", "tokens", "best step"), "{:,}"),
    **dict.fromkeys(("perplexity", "paper: perplexity", "mean perplexity", "deviation"), "{:.2f}"),
    **dict.fromkeys(("vs softmax", "paper: vs softmax"), "{:+.2%}"),
    **{"lr": "{:g}", "of planned": "{:.1%}", "6ND": "{:.3e}", "best loss": "{:.4f}"},
}
NOTES = """\
Loss in nats per token, best of run; vs softmax: relative perplexity; 6ND with all parameters; over seeds: sample deviation.
The paper's: FineWeb-Edu in Llama 2's tokens; which part it validated on, it does not say."""


class Run(NamedTuple):
    """One run: its row of the table, validation perplexity by tokens trained on, its hyperparameters, and what it read."""

    row: dict[str, object]
    curve: dict[int, float]
    facts: dict[str, object]
    text: dict[str, object]


def read_run(path: Path) -> Run:
    """Raises: FileNotFoundError, ValueError for a folder that holds no run of the plugin, or none that was validated."""
    events = read_events(events_folder(path))
    curves, facts, configuration = curves_of(events), hyperparameters_of(events), configuration_of(events)
    if not facts or TOKENS not in curves:
        raise ValueError(f"{path} holds no run of this project's plugin: its TensorBoard events do not say what it is.")
    losses = {step: loss for step, loss in sorted(curves.get(VALIDATION, {}).items()) if math.isfinite(loss)}
    if not losses:
        raise ValueError(f"{path} was never validated: train with validation.enable = true.")
    logged = {0: 0} | curves[TOKENS]  # every few steps, and not at the last

    def tokens_at(step: int) -> int:
        before = max(s for s in logged if s <= step)
        return int(logged[before]) + (step - before) * facts["tokens_per_step"]

    best = min(losses, key=losses.get)  # the first of several
    trained = tokens_at(max(*logged, *losses))
    row = {
        "run": str(path),
        "size": facts["model"],
        "condition": facts["condition"],
        "lr": facts["lr"],
        "seed": facts["seed"],
        "parameters": facts["parameters"],
        "tokens": trained,
        "of planned": trained / facts["tokens"],
        "6ND": 6 * facts["parameters"] * trained,  # of all parameters, as the paper counts
        "best step": best,
        "best loss": losses[best],
        "perplexity": math.exp(losses[best]),
    }
    curve = {tokens_at(step): math.exp(loss) for step, loss in losses.items()}
    text = {f"{s}.{name}": configuration.get(s, {}).get(name) for s, names in SAME_TEXT.items() for name in names}
    return Run(row, curve, facts, text)


def by_size(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs by size, the smallest first; within it by perplexity."""
    sizes = dict.fromkeys(run.row["size"] for run in sorted(runs, key=lambda run: run.row["parameters"]))
    ordered = sorted(runs, key=lambda run: run.row["perplexity"])
    return {size: [run for run in ordered if run.row["size"] == size] for size in sizes}


def rows(runs: list[Run]) -> list[dict]:
    """Of all runs, against the mean of the softmax runs of their size, and beside the paper's figures of the same cell."""
    found = []
    for size, same_size in by_size(runs).items():
        softmax = [run.row["perplexity"] for run in same_size if run.row["condition"] == "softmax"]
        paper = PAPER.get(size, {})
        for run in same_size:
            theirs = paper.get(run.row["condition"])  # a condition with a setting of its own has another name
            row = {
                "vs softmax": run.row["perplexity"] / statistics.mean(softmax) - 1 if softmax else None,
                "paper: perplexity": theirs,
                "paper: vs softmax": theirs / paper["softmax"] - 1 if theirs else None,
            }
            found.append(run.row | row)
    return found


def repetitions(runs: list[Run]) -> list[dict]:
    """Of each cell that several seeds trained with the same settings: mean and standard deviation of the best perplexity."""
    groups: dict[str, list[dict]] = {}
    for run in runs:
        same = {name: value for name, value in run.facts.items() if name not in REPEATED}
        groups.setdefault(json.dumps([same, run.text], sort_keys=True), []).append(run.row)
    found = []
    for group in groups.values():
        if len({row["seed"] for row in group}) > 1:
            perplexities = [row["perplexity"] for row in group]
            found.append(
                {name: group[0][name] for name in ("size", "condition", "lr")}
                | {"seeds": ", ".join(sorted(str(row["seed"]) for row in group))}
                | {"mean perplexity": statistics.mean(perplexities), "deviation": statistics.stdev(perplexities)}
            )
    return found


def remarks(runs: list[Run]) -> list[str]:
    """Where runs of one size were not validated on the same text."""
    found = []
    for size, same_size in by_size(runs).items():
        for name in same_size[0].text:
            values = sorted({str(run.text[name]) for run in same_size})
            if len(values) > 1:
                found.append(f"{size}: {name} differs ({', '.join(values)}): perplexities of different text.")
    return found


def table(found: list[dict]) -> list[str]:
    cells = [[FORMATS.get(k, "{}").format(v) if v is not None else "-" for k, v in row.items()] for row in found]
    return markdown_rows([[*found[0]], *cells])


def page(found: list[dict], repeated: list[dict], remarks: list[str]) -> str:
    lines = table(found) + (["", *table(repeated)] if repeated else [])
    return "\n".join([*lines, "", NOTES, *(f"- {remark}" for remark in remarks)]) + "\n"


def panels(runs: list[Run]) -> list[Panel]:
    """Perplexity by compute where there are several sizes, and by tokens for every size."""
    drawn, groups = [], by_size(runs)
    if len(groups) > 1:
        curves = []
        for condition in dict.fromkeys(run.row["condition"] for run in runs):
            points = sorted((r.row["6ND"], r.row["perplexity"]) for r in runs if r.row["condition"] == condition)
            curves.append(Curve(condition, [float(f"{x / 1e18:.3g}") for x, _ in points], [y for _, y in points]))
        drawn.append(Panel("all sizes", curves, "6ND ($10^{18}$ FLOPs)", "validation perplexity", True, True))
    for size, same_size in groups.items():
        curves = []
        for run in same_size:
            label = "{condition}, lr {lr:g}, seed {seed}".format(**run.row)
            curves.append(Curve(label, [tokens / 1e6 for tokens in run.curve], [*run.curve.values()]))
        drawn.append(Panel(size, curves, "tokens (millions)", "validation perplexity", log_y=True))
    return drawn


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    p.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder (job.dump_folder)")
    p.add_argument("--output", type=Path, metavar="DIR", help="a new folder for study.md, study.json and study.png")
    return p.parse_args(argv)


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    if args.output:
        require_empty(args.output)
    runs = [read_run(path) for path in args.runs]
    contents = {"rows": rows(runs), "seeds": repetitions(runs), "remarks": remarks(runs)}
    text = page(*contents.values())
    print(text, end="")
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        contents["perplexity by tokens"] = {run.row["run"]: run.curve for run in runs}
        (args.output / "study.json").write_text(json.dumps(contents, indent=1) + "\n")
        (args.output / "study.md").write_text(text)
        drawn = draw(args.output / "study.png", panels(runs))
        print(f"wrote {args.output}" + ("" if drawn else ", without a figure: matplotlib is not installed"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
