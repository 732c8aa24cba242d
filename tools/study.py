"""python -m interdomain.tools.study outputs/125M outputs/125M-softmax outputs/125M-s4d

The study's main result from the folders of its runs, finished or not: the best validation loss of each, its perplexity against
softmax's at the same size, and the compute 6ND of the paper's scaling figure, beside the paper's own figures.
"""

import argparse
import json
import math
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


@dataclass(frozen=True)
class Run:
    """One run: `validation` is {step: loss in nats per token}, `tokens` what it has trained on by its last step."""

    name: str
    size: str
    condition: str
    parameters: int
    planned: int  # tokens, as its first start had it
    tokens: dict[int, int]
    validation: dict[int, float]
    text: dict[str, object]

    @property
    def best(self) -> int:
        """The step of the lowest validation loss, the first of several."""
        return min(self.validation, key=lambda step: (self.validation[step], step))

    @property
    def perplexity(self) -> float:
        return math.exp(self.validation[self.best])

    @property
    def flops(self) -> int:
        """6ND, N all parameters and D all tokens trained on, as the paper counts."""
        return 6 * self.parameters * max(self.tokens.values())


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
    tokens = {step: int(count) for step, count in curves[TOKENS].items()}
    size, condition = facts["model"], facts["condition"]
    return Run(str(path), size, condition, int(facts["parameters"]), int(facts["tokens"]), tokens, validation, text)


def over_softmax(perplexity: float, softmax: list[float]) -> float | None:
    """The relative change that the paper's tables give, against the mean of the softmax runs; None if there is none."""
    return perplexity / (sum(softmax) / len(softmax)) - 1 if softmax else None


def rows(runs: list[Run]) -> list[dict]:
    """By size and, within it, by perplexity."""
    sizes = {run.size: run.parameters for run in sorted(runs, key=lambda run: -run.parameters)}  # the smallest stays
    found = []
    for run in sorted(runs, key=lambda run: (sizes[run.size], run.perplexity)):
        softmax = [other.perplexity for other in runs if (other.size, other.condition) == (run.size, "softmax")]
        paper = PAPER.get(run.size, {})
        theirs = paper.get(run.condition)
        last = max(run.validation)
        found.append(
            {
                "run": run.name,
                "size": run.size,
                "condition": run.condition,
                "parameters": run.parameters,
                "tokens": max(run.tokens.values()),
                "of planned": max(run.tokens.values()) / run.planned,
                "6ND": run.flops,
                "best step": run.best,
                "best loss": run.validation[run.best],
                "last loss": run.validation[last],
                "perplexity": run.perplexity,
                "vs softmax": over_softmax(run.perplexity, softmax),
                "paper: perplexity": theirs,
                "paper: vs softmax": over_softmax(theirs, [paper["softmax"]]) if theirs else None,
            }
        )
    return found


SHOWN = {
    "parameters": "{:,}",
    "tokens": "{:,}",
    "of planned": "{:.1%}",
    "6ND": "{:.3e}",
    "best step": "{:,}",
    "best loss": "{:.4f}",
    "last loss": "{:.4f}",
    "perplexity": "{:.2f}",
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
        counts = [max(run.tokens.values()) for run in same_size]
        if max(counts) > 1.01 * min(counts):
            said.append(f"{size}: trained on {min(counts):,} to {max(counts):,} tokens.")
    return said


def page(found: list[dict], said: list[str]) -> str:
    cells = [[SHOWN.get(k, "{}").format(v) if v is not None else "-" for k, v in row.items()] for row in found]
    lines = markdown_rows([[*found[0]], *cells])
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
        curves = []
        for run in (run for run in runs if run.size == size):
            steps = sorted(step for step in run.validation if step in run.tokens)
            x, y = [run.tokens[step] / 1e6 for step in steps], [math.exp(run.validation[step]) for step in steps]
            curves.append(Curve(run.condition, x, y))
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
    found, said = rows(runs), remarks(runs)
    print(page(found, said), end="")
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        write_whole(args.output / "study.md", page(found, said).encode())
        contents = {"rows": found, "remarks": said, "validation": {run.name: run.validation for run in runs}}
        write_whole(args.output / "study.json", (json.dumps(contents, indent=1) + "\n").encode())
        drawn = draw(args.output / "study.png", panels(runs))
        print(
            f"wrote {args.output}" if drawn else f"wrote {args.output}, without a figure: matplotlib is not installed"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
