"""The tables of a study: its runs by cell, with mean and deviation over seeds, beside the paper's figures, and as curves."""

import bisect
import math
import re
import statistics
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from interdomain.markdown import markdown_rows
from interdomain.tools._plots import Curve, Dots, Panel
from interdomain.tools._study.definition import VALIDATION
from interdomain.tools._study.intervals import Documents, interval_of, perplexities

TRAINING = "loss_metrics/global_avg_loss"
ACCURACY, POSITION = "validation_metrics/accuracy", re.compile(r"validation_position/(\d+)-(\d+)$")
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
# Settings that two runs must share, beside the text and the tokens read, for their perplexities to be compared.
SHARED = {"data": ("reset_state_at_documents",), "validation": ("tokens", "seq_len")}
# Settings that the runs of one cell must share, too.
OF_A_CELL = {
    "optimizer": ("name", "beta1", "beta2", "ssm_weight_decay"),
    "lr_scheduler": ("decay_ratio", "decay_type", "min_lr"),
    "checkpoint": ("initial_load_path",),
}
REPEATED = ("seed", "ranks", "recompute")  # facts in which repetitions of one cell may differ
NOTES = """\
Of each run the best validation loss, in nats per token; ± standard deviation over seeds. vs softmax: of the mean perplexities,
where both read as many tokens of the same text. Of several learning rates the best of each condition is shown.
95 %: by bootstrap over the validation documents and, of several, over the seeds; of the last validation.
Training loss: mean over the last quarter of the run; runs of one seed read the same text. Position: of the last validation.
6ND counts all parameters. State: numbers of all layers per sequence.
The paper's: FineWeb-Edu in Llama 2's tokens; which part it validated on, it does not say."""


Value = tuple[float, float | None]  # mean over seeds and standard deviation; None of one seed


@dataclass(frozen=True)
class Run:
    """A run as it is shown. labels: its place in a study, or what it says of itself; curves: {tag: {tokens: value}}."""

    name: str
    labels: dict[str, Any]
    seed: int
    facts: dict[str, Any]
    text: dict[str, Any]
    curves: dict[str, dict[int, float]]
    best: tuple[int, float]  # (tokens, loss) of the lowest validation loss
    trained: int
    documents: Documents | None  # of a split that has few
    configuration: dict[str, Any]  # all settings, by section
    environment: dict[str, str]
    source: str  # the record's file, or the run's folder

    @classmethod
    def of(cls, name: str, record: dict[str, Any], source: Path) -> "Run":
        """record: of `_study.record_of`, and of a study's run with its labels. Raises: ValueError if it was never validated."""
        facts, configuration = record["facts"], record["configuration"]
        curves = {tag: {int(step): x for step, x in curve.items()} for tag, curve in record["curves"].items()}
        logged = {0: 0} | {step: int(n) for step, n in sorted(curves.pop("n_tokens_seen").items())}  # every few steps
        steps = [*logged]

        def tokens_at(step: int) -> int:
            before = steps[bisect.bisect(steps, step) - 1]
            return logged[before] + (step - before) * facts["tokens_per_step"]

        trained = max(tokens_at(step) for curve in (logged, *curves.values()) for step in curve)
        curves = {tag: {tokens_at(s): x for s, x in sorted(c.items()) if math.isfinite(x)} for tag, c in curves.items()}
        if not (losses := curves.get(VALIDATION)):
            raise ValueError(f"{name} was never validated: train with validation.enable = true.")
        best = min(losses, key=lambda tokens: losses[tokens])  # the first of several
        facts_of_run = {"size": facts["model"], "condition": facts["condition"]}
        text = {f"{s}.{n}": configuration.get(s, {}).get(n) for s, names in SHARED.items() for n in names}
        data = configuration.get("data", {})
        paths = {"train": data.get("corpus"), "validation": data.get("validation_corpus") or data.get("corpus")}
        read = facts.get("fingerprints") or paths  # older records have paths alone
        text |= {"the training text": read.get("train"), "the validation text": read.get("validation")}
        labels = {k: v for k, v in (record.get("run") or facts_of_run).items() if k != "seed"}
        documents = Documents(**record["documents"]) if "documents" in record else None
        seen = text, curves, (best, losses[best]), trained, documents
        return cls(name, labels, facts["seed"], facts, *seen, configuration, record["environment"], str(source))

    @property
    def perplexity(self) -> float:
        return math.exp(self.best[1])

    @property
    def training_loss(self) -> float:
        """Mean of the last quarter of what was logged. In the first epoch this is text that is new to the model."""
        curve = self.curves[TRAINING]
        return statistics.mean(loss for tokens, loss in curve.items() if tokens > 0.75 * max(curve))

    @property
    def group(self) -> tuple[str, ...]:
        """Runs of one group are compared: the same size and setting."""
        return tuple(str(value) for name, value in self.labels.items() if name not in ("condition", "rate"))

    @property
    def shared(self) -> dict[str, str]:
        """Facts that another run must share for the two perplexities to be compared, by name."""
        return {name: str(value) for name, value in self.text.items()} | {"tokens": f"{self.trained:,}"}

    @property
    def settings(self) -> dict[str, str]:
        """Settings that tell a cell from others of the same condition, by name."""
        sections = {section: self.configuration.get(section, {}) for section in OF_A_CELL}
        settings = {f"{s}.{n}": str(sections[s].get(n)) for s, names in OF_A_CELL.items() for n in names}
        return {"lr": f"{self.facts['lr']:g}", **settings}

    @property
    def compute(self) -> float:
        """6ND of all parameters, as the paper counts."""
        return 6 * self.facts["parameters"] * self.trained


@dataclass(frozen=True, eq=False)
class Cell:
    """The runs that differ in the seed alone."""

    label: str
    group: tuple[str, ...]
    runs: list[Run]

    def mean(self, values: Iterable[float]) -> Value:
        """(mean, sample deviation; None of one run)."""
        values = list(values)
        return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None

    @property
    def perplexity(self) -> Value:
        return self.mean(run.perplexity for run in self.runs)

    @property
    def rate(self) -> str | None:
        return self.runs[0].labels.get("rate")

    @property
    def draws(self) -> np.ndarray | None:
        """Perplexities by bootstrap, of the last validation."""
        documents = [run.documents for run in self.runs if run.documents is not None]
        seed = zlib.crc32(self.label.encode())  # of its own: the seeds of two cells are drawn apart
        return perplexities(documents, seed) if len(documents) == len(self.runs) else None

    @property
    def compute(self) -> float:
        return statistics.mean(run.compute for run in self.runs)

    def curve(self, tag: str) -> dict[int, Value]:
        """Mean and deviation by tokens, where all runs have the tag."""
        curves = [run.curves.get(tag, {}) for run in self.runs]
        shared = set(curves[0]).intersection(*curves[1:])
        return {tokens: self.mean(curve[tokens] for curve in curves) for tokens in sorted(shared)}

    def last(self, tag: str) -> Value | None:
        values = [[*curve.values()][-1] for run in self.runs if (curve := run.curves.get(tag))]
        return self.mean(values) if values else None


def cells_of(runs: list[Run]) -> dict[tuple[str, ...], list[Cell]]:
    """Cells by group, the smallest size first; within it by perplexity. Of a study with rates all cells at every rate."""
    by_cell: dict[str, list[Run]] = {}
    for run in runs:
        same = {name: value for name, value in run.facts.items() if name not in REPEATED}
        by_cell.setdefault(repr([run.labels, same, run.text, run.settings]), []).append(run)
    seeds = [sorted(cell, key=lambda run: run.seed) for cell in by_cell.values()]
    cells = [Cell(str(runs[0].labels["condition"]), runs[0].group, runs) for runs in seeds]
    cells.sort(key=lambda cell: cell.perplexity[0])
    groups = dict.fromkeys(run.group for run in sorted(runs, key=lambda run: run.facts["parameters"]))
    return {group: [cell for cell in cells if cell.group == group] for group in groups}


def at_best_rates(runs: list[Run]) -> dict[tuple[str, ...], list[Cell]]:
    """Cells by group, of each condition the one at its best rate: the one with the most seeds, then by perplexity."""

    def is_best(cell: Cell, cells: list[Cell]) -> bool:
        same = [other for other in cells if other.label == cell.label]
        return cell.rate is None or cell is min(same, key=lambda other: (-len(other.runs), other.perplexity[0]))

    return {group: [c for c in cells if is_best(c, cells)] for group, cells in cells_of(runs).items()}


def rates(runs: list[Run]) -> dict[tuple[str, ...], list[list[str]]]:
    """Tables by group, a row per condition: each seed's perplexity at each rate, or of a corpus with answers the accuracy of
    the last validation, and before it how the accuracy at the best rate came there. None for a study with neither."""
    by_group, best = {}, at_best_rates(runs)
    for group, cells in cells_of(runs).items():
        names = [rate for _, rate in sorted({(cell.runs[0].facts["lr"], cell.rate) for cell in cells if cell.rate})]
        accurate = any(cell.curve(ACCURACY) for cell in cells)
        names = names if len(names) > 1 else []
        ends = _parts([n for cell in cells for n in cell.curve(ACCURACY)]) if accurate else []
        if not names and len(ends) < 2:
            continue
        head = ["accuracy", "rate", *(f"{n:,} tokens" for n in ends)] if accurate else ["perplexity by rate"]
        table = by_group[group] = [[*head, *(f"at the end: {name}" if accurate else name for name in names)]]
        for cell in best[group]:
            way, same = cell.curve(ACCURACY), [other for other in cells if other.label == cell.label]
            row = [cell.rate or f"{cell.runs[0].facts['lr']:g}", *(_cell(way.get(n), "{:.1%}") for n in ends)]
            each = {other.rate: ", ".join(f"{run.perplexity:.2f}" for run in other.runs) for other in same}
            values = {other.rate: _cell(other.last(ACCURACY), "{:.1%}") for other in same} if accurate else each
            table.append([cell.label, *(row if accurate else []), *(values.get(name, "-") for name in names)])
    return by_group


def _parts(validations: list[int]) -> list[int]:
    """The last validation by a sixth, a third, a half, two thirds and the end, in tokens."""
    end = max(validations)
    parts = [[n for n in validations if n <= end * part] for part in (1 / 6, 1 / 3, 1 / 2, 2 / 3, 1)]
    return [*dict.fromkeys(max(part) for part in parts if part)]


def rows(runs: list[Run]) -> list[dict[str, Any]]:
    """One row per cell, against softmax of the same group, text and tokens, and beside the paper's figures of the same cell."""
    rows = []
    for group, cells in at_best_rates(runs).items():
        for cell in cells:
            comparable = [other for other in cells if other.label == "softmax" and not differences([cell, other])]
            softmax = comparable[0] if len(comparable) == 1 else None
            draws, their_draws = cell.draws, softmax and softmax.draws
            first = cell.runs[0]
            paper = PAPER.get(first.facts["model"], {})
            theirs = paper.get(first.facts["condition"])  # a condition with a setting of its own has another name
            position = {tag: cell.last(tag) for tag in sorted(first.curves) if POSITION.match(tag)}
            rows.append(
                dict(
                    group=" ".join(group),
                    condition=_label(cell, cells, without=("lr",)),  # which has a column
                    lr=first.facts["lr"],
                    seeds=[run.seed for run in cell.runs],
                    parameters=first.facts["parameters"],
                    state=(state := first.facts.get("state")) and state_in_words(*state),
                    tokens=round(statistics.mean(run.trained for run in cell.runs)),
                    of_planned=statistics.mean(run.trained / run.facts["tokens"] for run in cell.runs),
                    compute=cell.compute,
                    loss=cell.mean(run.best[1] for run in cell.runs),
                    perplexity=cell.perplexity,
                    interval=None if draws is None else interval_of(draws),
                    vs_softmax=softmax and cell.perplexity[0] / softmax.perplexity[0] - 1,
                    vs_softmax_interval=interval_of(draws / their_draws - 1)
                    if draws is not None and their_draws is not None and cell is not softmax
                    else None,
                    training_loss=cell.mean(run.training_loss for run in cell.runs),
                    accuracy=cell.last(ACCURACY),
                    first_positions=position[min(position)] if position else None,
                    last_positions=position[max(position)] if position else None,
                    paper=theirs,
                    paper_vs_softmax=theirs / paper["softmax"] - 1 if theirs else None,
                )
            )
    return rows


COLUMNS = {  # of the table: head, and how a value is written
    "group": ("", "{}"),
    "condition": ("condition", "{}"),
    "lr": ("lr", "{:g}"),
    "seeds": ("seeds", "{}"),
    "parameters": ("parameters", "{:,}"),
    "state": ("state", "{}"),
    "tokens": ("tokens", "{:,}"),
    "of_planned": ("of planned", "{:.1%}"),
    "compute": ("6ND", "{:.3e}"),
    "loss": ("best loss", "{:.4f}"),
    "perplexity": ("perplexity", "{:.2f}"),
    "interval": ("95 %", "{:.2f}"),
    "vs_softmax": ("vs softmax", "{:+.2%}"),
    "vs_softmax_interval": ("95 %", "{:+.1%}"),
    "training_loss": ("training loss", "{:.3f}"),
    "accuracy": ("accuracy", "{:.1%}"),
    "paper": ("paper: perplexity", "{:.2f}"),
    "paper_vs_softmax": ("paper: vs softmax", "{:+.2%}"),
}


def cells_as_text(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table. A column that no row fills is left out."""
    columns = {name: column for name, column in COLUMNS.items() if any(row[name] is not None for row in rows)}
    cells = [[_cell(row[name], form) for name, (_, form) in columns.items()] for row in rows]
    return [head for head, _ in columns.values()], cells


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, value)) if form == "{}" else " to ".join(map(form.format, value))
    if isinstance(value, tuple):
        return " ± ".join(form.format(x) for x in value if x is not None)  # mean and deviation
    return form.format(value)


def state_in_words(fixed: int, growing: int) -> str:
    """Numbers of the state of all layers: per sequence, and what every token adds."""
    return " + ".join([f"{fixed:,}"] * bool(fixed or not growing) + [f"{growing:,} a token"] * bool(growing))


def differences(cells: list[Cell]) -> dict[str, list[str]]:
    """Differences between runs that make their perplexities not comparable: {name: its values}."""
    shared = [run.shared for cell in cells for run in cell.runs]
    values = {name: sorted({facts[name] for facts in shared}) for name in shared[0]}
    return {name: several for name, several in values.items() if len(several) > 1}


def incomparable(group: tuple[str, ...], cells: list[Cell]) -> list[str]:
    """Sentences that say why no percentage compares cells of a group."""
    differ = [f"runs differ in {name} ({'; '.join(values)})" for name, values in differences(cells).items()]
    softmax = [cell for cell in cells if cell.label == "softmax"]
    if any(sum(not differences([cell, other]) for other in softmax) > 1 for cell in cells):
        differ.append("several rows are of softmax")
    return [f"{' '.join(group)}: {difference}, so no percentage compares them." for difference in differ]


def page(runs: list[Run]) -> str:
    """The table, what its columns mean, and why runs of one group are not compared."""
    head, cells = cells_as_text(rows(runs))
    lines = markdown_rows([head, *cells])
    for group, table in rates(runs).items():
        lines += ["", f"{' '.join(group)}:", "", *markdown_rows(table)]
    lines += ["", NOTES]
    for group, of_group in at_best_rates(runs).items():
        lines += [f"- {line}" for line in incomparable(group, of_group)]
    return "\n".join(lines) + "\n"


def panels(runs: list[Run]) -> dict[str, list[Panel | Dots]]:
    """Panels by group: what each condition reaches, and by tokens how it came there; then further ones. The measure is the
    accuracy where there is one, else the perplexity. Of a setting with several sizes: a panel by compute."""
    drawn: dict[str, list[Panel | Dots]] = {}
    by_setting: dict[str, list[Cell]] = {}
    tokens, loss_label = "tokens (millions)", "validation perplexity"
    for group, cells in at_best_rates(runs).items():
        title = " ".join(group)
        size, accurate = str(cells[0].runs[0].labels["size"]), any(cell.last(ACCURACY) for cell in cells)
        by_setting.setdefault(" ".join(part for part in group if part != size), []).extend(cells)
        drawn[title] = [_dots(title, cells, accurate)]
        for tag, label in ((ACCURACY, "accuracy"), (VALIDATION, loss_label)):
            shown = _perplexity if tag == VALIDATION else lambda value: value
            curves = _by_tokens(cells, tag, shown)
            if max(len(curve.x) for curve in curves) > 1:
                drawn[title].append(Panel(title, curves, tokens, label, log_y=tag == VALIDATION))
        tags = [tag for tag in sorted(cells[0].runs[0].curves) if POSITION.match(tag)]
        if len(tags) > 1:
            ends = [int(tag.rpartition("-")[2]) + 1 for tag in tags]
            curves = [_curve(_label(c, cells), ends, [c.last(tag) for tag in tags]) for c in cells]
            drawn[title].append(Panel(title, curves, "position in the context, up to", "validation loss", log_x=True))
    for setting, cells in by_setting.items():
        if len({cell.runs[0].labels["size"] for cell in cells}) > 1:
            curves = []
            for label in dict.fromkeys(cell.label for cell in cells):
                same = sorted((cell for cell in cells if cell.label == label), key=lambda cell: cell.compute)
                x = [float(f"{cell.compute / 1e18:.3g}") for cell in same]
                curves.append(_curve(label, x, [cell.perplexity for cell in same]))
            title = f"{setting}, all sizes".removeprefix(", ")
            drawn[title] = [Panel(title, curves, "6ND ($10^{18}$ FLOPs)", loss_label, log_x=True, log_y=True)]
    return drawn


def _dots(title: str, cells: list[Cell], accurate: bool) -> Dots:
    """A cell's value with its interval over documents and seeds, or its deviation over seeds."""
    dots, names, bars = [], [], ""
    for cell in cells:
        mean, deviation = (accurate and cell.last(ACCURACY)) or cell.perplexity
        interval = None if deviation is None else (mean - deviation, mean + deviation)
        if not accurate and cell.draws is not None:
            interval, bars = tuple(interval_of(cell.draws)), "; bars: 95 %"
        elif interval and not bars:
            bars = "; bars: deviation"
        dots.append((_label(cell, cells), mean, interval))
        names.append(f"{_label(cell, cells)} ({len(cell.runs)})")
    order = sorted(range(len(cells)), key=lambda i: dots[i][1] * (-1 if accurate else 1))
    x_label = "accuracy (more is better)" if accurate else "validation perplexity (less is better)"
    return Dots(title, [dots[i] for i in order], [names[i] for i in order], x_label + bars)


def _by_tokens(cells: list[Cell], tag: str, shown: Callable[[Value], Value]) -> list[Curve]:
    """Curves of a tag, without the first validation (of the untrained model) where there are others."""
    curves = []
    for cell in cells:
        points = [*cell.curve(tag).items()]
        points = points[1:] or points
        curves.append(_curve(_label(cell, cells), [n / 1e6 for n, _ in points], [shown(x) for _, x in points]))
    return curves


def _label(cell: Cell, cells: list[Cell], without: Collection[str] = ()) -> str:
    """The cell's label, with the settings that tell it from others of the same condition."""
    twins = [other.runs[0].settings for other in cells if other.label == cell.label]
    settings = [(name, value) for name, value in cell.runs[0].settings.items() if name not in without]
    return ", ".join([cell.label, *(f"{n} {x}" for n, x in settings if any(twin[n] != x for twin in twins))])


def _perplexity(loss: Value) -> Value:
    """Perplexity from mean and deviation of a loss; the deviation to first order."""
    mean, deviation = loss
    return math.exp(mean), deviation and math.exp(mean) * deviation


def _curve(label: str, x: Sequence[float], y: Sequence[Value | None]) -> Curve:
    errors = [value and value[1] for value in y]
    return Curve(label, x, [value and value[0] for value in y], errors if any(errors) else None)
