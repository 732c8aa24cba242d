"""python -m interdomain.tools.study outputs/125M outputs/125M-softmax outputs/125M-s4d

The study's main result from the folders of its runs, finished or not: the best validation loss of each, its perplexity against
softmax's at the same size, and the compute 6ND of the paper's scaling figure, beside the paper's own figures.
"""

import argparse
import bisect
import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from interdomain.folders import write_whole

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
FILES = ("study.md", "study.json", "study.png")


# Facts in which runs of one cell may differ and still be repetitions of each other.
REPEATED = ("seed", "ranks", "recompute")


@dataclass(frozen=True)
class Run:
    """One run: `facts` are its hyperparameters, `logged` {step: tokens trained on}, `validation` {step: nats per token}."""

    name: str
    facts: dict[str, object]
    logged: dict[int, int]
    validation: dict[int, float]
    text: dict[str, object]

    @property
    def size(self) -> str:
        return self.facts["model"]

    @property
    def condition(self) -> str:
        return self.facts["condition"]

    @property
    def parameters(self) -> int:
        return int(self.facts["parameters"])

    @property
    def best(self) -> int:
        """The step of the lowest validation loss, the first of several."""
        return min(self.validation, key=lambda step: (self.validation[step], step))

    @property
    def perplexity(self) -> float:
        return math.exp(self.validation[self.best])

    @property
    def trained(self) -> int:
        """Tokens trained on up to the last step that anything was logged at."""
        return self.tokens_at(max(*self.logged, *self.validation))

    def tokens_at(self, step: int) -> int:
        """Of any step: the number is logged every few steps, and not at the last; on the line through its neighbours."""
        known = {0: 0, **self.logged}
        steps = sorted(known)
        i = min(max(1, bisect.bisect_left(steps, step)), len(steps) - 1)
        a, b = steps[i - 1], steps[i]
        return known[a] + (step - a) * (known[b] - known[a]) // (b - a)

    @property
    def flops(self) -> int:
        """6ND, N all parameters and D all tokens trained on, as the paper counts."""
        return 6 * self.parameters * self.trained


def read_run(path: Path) -> Run:
    """Raises: FileNotFoundError, ValueError for a folder that holds no run of the plugin, or none that was validated."""
    events = read_events(events_folder(path))
    curves, facts, configuration = curves_of(events), hyperparameters_of(events), configuration_of(events)
    if not {"model", "condition", "parameters", "tokens"} <= facts.keys() or TOKENS not in curves:
        raise ValueError(f"{path} holds no run of this project's plugin: its TensorBoard events do not say what it is.")
    validation = {step: loss for step, loss in curves.get(VALIDATION, {}).items() if math.isfinite(loss)}
    if not validation:
        raise ValueError(f"{path} was never validated: train with validation.enable = true.")
    text = {f"{s}.{name}": configuration.get(s, {}).get(name) for s, names in SAME_TEXT.items() for name in names}
    return Run(str(path), facts, {step: int(count) for step, count in curves[TOKENS].items()}, validation, text)


def over_softmax(perplexity: float, softmax: list[float]) -> float | None:
    """The relative change that the paper's tables give, against the mean of the softmax runs; None if there is none."""
    return perplexity / (sum(softmax) / len(softmax)) - 1 if softmax else None


def differing(runs: list[Run]) -> list[str]:
    """Which of learning rate and seed runs of one size differ in."""
    by_size = {run.size: [other for other in runs if other.size == run.size] for run in runs}
    return [
        name
        for name in ("lr", "ssm_lr", "seed")
        if any(len({run.facts.get(name) for run in same}) > 1 for same in by_size.values())
    ]


def rows(runs: list[Run]) -> list[dict]:
    """By size and, within it, by perplexity."""
    sizes = {run.size: run.parameters for run in sorted(runs, key=lambda run: -run.parameters)}  # the smallest stays
    found = []
    for run in sorted(runs, key=lambda run: (sizes[run.size], run.perplexity)):
        softmax = [other.perplexity for other in runs if (other.size, other.condition) == (run.size, "softmax")]
        paper = PAPER.get(run.size, {})
        theirs = paper.get(run.condition)  # of this very cell: a condition with a setting of its own has another name
        found.append(
            {
                "run": run.name,
                "size": run.size,
                "condition": run.condition,
                **{name: run.facts.get(name) for name in differing(runs)},
                "parameters": run.parameters,
                "tokens": run.trained,
                "of planned": run.trained / int(run.facts["tokens"]),
                "6ND": run.flops,
                "best step": run.best,
                "best loss": run.validation[run.best],
                "last loss": run.validation[max(run.validation)],
                "perplexity": run.perplexity,
                "vs softmax": over_softmax(run.perplexity, softmax),
                "paper: perplexity": theirs,
                "paper: vs softmax": over_softmax(theirs, [paper["softmax"]]) if theirs else None,
            }
        )
    return found


def repetitions(runs: list[Run]) -> list[dict]:
    """Of each cell that several seeds trained with the same settings: mean and standard deviation of the best perplexity."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        same = {name: value for name, value in run.facts.items() if name not in REPEATED}
        groups.setdefault((str(sorted(same.items())), str(run.text)), []).append(run)
    found = []
    for group in groups.values():
        seeds = sorted({run.facts.get("seed") for run in group}, key=str)
        if len(seeds) > 1:
            perplexities = [run.perplexity for run in group]
            found.append(
                {
                    "size": group[0].size,
                    "condition": group[0].condition,
                    "lr": group[0].facts.get("lr"),
                    "seeds": ", ".join(map(str, seeds)),
                    "mean perplexity": statistics.mean(perplexities),
                    "deviation": statistics.stdev(perplexities),
                }
            )
    return found


SHOWN = {
    "lr": "{:g}",
    "ssm_lr": "{:g}",
    "parameters": "{:,}",
    "tokens": "{:,}",
    "of planned": "{:.1%}",
    "6ND": "{:.3e}",
    "best step": "{:,}",
    "best loss": "{:.4f}",
    "last loss": "{:.4f}",
    "perplexity": "{:.2f}",
    "mean perplexity": "{:.2f}",
    "deviation": "{:.2f}",
    "vs softmax": "{:+.2%}",
    "paper: perplexity": "{:.2f}",
    "paper: vs softmax": "{:+.2%}",
}


def remarks(runs: list[Run]) -> list[str]:
    """What keeps runs of one size from standing beside each other."""
    said = []
    for size in dict.fromkeys(run.size for run in runs):
        same_size = [run for run in runs if run.size == size]
        for name in same_size[0].text:
            values = sorted({str(run.text[name]) for run in same_size})
            if len(values) > 1:
                said.append(f"{size}: {name} differs ({', '.join(values)}): the perplexities are not of the same text.")
        counts = [run.trained for run in same_size]
        if max(counts) > 1.01 * min(counts):
            said.append(f"{size}: trained on {min(counts):,} to {max(counts):,} tokens.")
    return said


def table(found: list[dict]) -> list[str]:
    cells = [[SHOWN.get(k, "{}").format(v) if v is not None else "-" for k, v in row.items()] for row in found]
    return markdown_rows([[*found[0]], *cells])


def page(found: list[dict], repeated: list[dict], said: list[str]) -> str:
    lines = table(found)
    if repeated:
        lines += [
            "",
            *table(repeated),
            "",
            "Best perplexity over runs that differ in the seed alone, sample deviation.",
        ]
    lines += ["", "Loss in nats per token, best of run; vs softmax: relative perplexity; 6ND with all parameters."]
    if any(row["paper: perplexity"] for row in found):
        lines += ["The paper's: FineWeb-Edu in Llama 2's tokens; which part it validated on, it does not say."]
    lines += [f"- {line}" for line in said]
    return "\n".join(lines) + "\n"


def panels(runs: list[Run]) -> list[Panel]:
    """Perplexity by compute where a condition has several sizes, and by tokens for every size."""
    conditions = list(dict.fromkeys(run.condition for run in runs))
    by_size = sorted(runs, key=lambda run: run.flops)
    drawn = []
    if any(len({run.size for run in runs if run.condition == c}) > 1 for c in conditions):
        curves = []
        for condition in conditions:
            points = [(float(f"{r.flops / 1e18:.3g}"), r.perplexity) for r in by_size if r.condition == condition]
            curves.append(Curve(condition, *zip(*points, strict=True)))
        drawn.append(Panel("all sizes", curves, "6ND ($10^{18}$ FLOPs)", "validation perplexity", True, True))
    for size in dict.fromkeys(run.size for run in by_size):
        curves, same_size = [], [run for run in runs if run.size == size]
        for run in same_size:
            x, y = zip(
                *((run.tokens_at(s) / 1e6, math.exp(loss)) for s, loss in sorted(run.validation.items())), strict=True
            )
            apart = [f"{name} {run.facts.get(name)}" for name in differing(same_size)]
            curves.append(Curve(", ".join([run.condition, *apart]), list(x), list(y)))
        drawn.append(Panel(size, curves, "tokens (millions)", "validation perplexity", log_y=True))
    return drawn


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    p.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder (job.dump_folder)")
    p.add_argument("--output", type=Path, metavar="DIR", help=f"write {', '.join(FILES)} there; nothing is overwritten")
    args = p.parse_args(argv)
    if len({path.resolve() for path in args.runs}) < len(args.runs):
        raise ValueError("a run was given twice.")
    for name in FILES if args.output else ():
        if (args.output / name).exists():
            raise FileExistsError(f"{args.output / name} is there already. Give another --output.")
    return args


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    runs = [read_run(path) for path in args.runs]
    found, repeated, said = rows(runs), repetitions(runs), remarks(runs)
    print(page(found, repeated, said), end="")
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        write_whole(args.output / "study.md", page(found, repeated, said).encode())
        contents = {
            "rows": found,
            "seeds": repeated,
            "remarks": said,
            "validation": {run.name: run.validation for run in runs},
        }
        write_whole(args.output / "study.json", (json.dumps(contents, indent=1) + "\n").encode())
        drawn = draw(args.output / "study.png", panels(runs))
        print(
            f"wrote {args.output}" if drawn else f"wrote {args.output}, without a figure: matplotlib is not installed"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
