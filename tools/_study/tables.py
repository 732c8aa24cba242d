"""The tables of a study: its runs by cell, with mean and deviation over seeds, beside the paper's figures, and as curves.

A cell is a size, condition, setting and rate: its runs differ in the seed only. A group is the cells of one size and setting,
which are compared with each other.
"""

import bisect
import functools
import math
import statistics
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from interdomain.markdown import cell_text, markdown_rows
from interdomain.titan.settings.job_config import pairs
from interdomain.tools._paper import PAPER
from interdomain.tools._plots import Curve, Dot, Dots, Panel
from interdomain.tools._study.definition import VALIDATION

ACCURACY = "validation_metrics/accuracy"
PERPLEXITY = "validation perplexity"  # a curve made of the validation loss
# Settings that two runs must share, in addition to the text and the tokens read, for their perplexities to be compared.
SHARED = ("data.reset_state_at_documents", "validation.tokens", "validation.seq_len")
# Settings that the runs of one cell must share, too.
OF_A_CELL = (
    "optimizer.name",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.ssm_weight_decay",
    "lr_scheduler.decay_ratio",
    "lr_scheduler.decay_type",
    "lr_scheduler.min_lr",
    "checkpoint.initial_load_path",
)
DRAWS = 2000  # of the bootstrap
REPEATED = ("seed", "ranks", "recompute")  # facts in which repetitions of one cell may differ
NOTES = """\
loss: the best validation loss of each run, in nats per token; ± standard deviation over seeds. vs softmax: of the mean
perplexities, at softmax's best rate, if both read as many tokens of the same text. interval: 95 %, by bootstrap over the
validation documents and, of several, over the seeds; of the last validation. compute: 6ND of all parameters. state: numbers of
all layers per sequence. paper: perplexity on FineWeb-Edu in Llama 2's tokens; which part it validated on, it does not say."""


Row = dict[str, Any]


class Documents(NamedTuple):
    """Sums over each validation document, of a run's last validation: losses in nats, and labels."""

    nats: list[float]
    labels: list[int]


class Value(NamedTuple):
    """Mean over seeds, and sample standard deviation; None for a single run."""

    mean: float
    deviation: float | None


def mean_of(values: Iterable[float]) -> Value:
    values = list(values)
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Value(statistics.mean(values), deviation)


@dataclass(frozen=True)
class Run:
    """A run as it is shown.

    Attributes:
        labels: Its size, condition, setting and rate in a study, or what the run says of itself.
        curves: {tag: {tokens: value}}.
        loss: The lowest validation loss.
        trained: Tokens.
        documents: Losses by validation document, if the split has few.
    """

    labels: Row
    facts: Row
    curves: dict[str, dict[int, float]]
    loss: float
    trained: int
    documents: Documents | None
    configuration: Row
    environment: dict[str, str]

    @classmethod
    def of(cls, name: str, record: Row) -> "Run":
        """Reads a record: `definition.record_of`, and a study's own also has labels and documents.

        Raises:
            ValueError: The run was never validated.
        """
        facts = record["facts"]

        # The number of tokens is logged every few steps; other curves have points between these.
        logged = {0: 0}
        for step, tokens in record["curves"]["n_tokens_seen"].items():
            logged[int(step)] = int(tokens)
        logged_steps = sorted(logged)

        def tokens_at(step: int) -> int:
            before = logged_steps[bisect.bisect(logged_steps, step) - 1]
            return logged[before] + (step - before) * facts["tokens_per_step"]

        last_step = 0
        curves: dict[str, dict[int, float]] = {}
        for tag, curve in record["curves"].items():
            steps = sorted(map(int, curve))
            last_step = max(last_step, steps[-1])
            finite = [step for step in steps if math.isfinite(curve[str(step)])]
            curves[tag] = {tokens_at(step): curve[str(step)] for step in finite}
        losses = curves.get(VALIDATION)
        if not losses:
            raise ValueError(f"{name} was never validated: train with validation.enable = true.")

        curves[PERPLEXITY] = {tokens: math.exp(loss) for tokens, loss in losses.items()}

        labels = dict(record.get("run", {"size": facts["model"], "condition": facts["condition"]}))
        labels.pop("seed", None)
        documents = None
        if "documents" in record:
            documents = Documents(**record["documents"])
        return cls(
            labels=labels,
            facts=facts,
            curves=curves,
            loss=min(losses.values()),
            trained=tokens_at(last_step),
            documents=documents,
            configuration=dict(pairs(record["configuration"])),
            environment=record["environment"],
        )

    @property
    def seed(self) -> int:
        return self.facts["seed"]

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def text(self) -> dict[str, str]:
        """What it read and validated on, which a comparison needs to be the same."""
        text = {name: str(self.configuration.get(name)) for name in SHARED}
        for split, name in (("train", "the training text"), ("validation", "the validation text")):
            text[name] = str(self.facts["fingerprints"].get(split))
        return text

    @property
    def settings(self) -> dict[str, str]:
        """Settings that tell a cell from others of the same condition."""
        settings = {name: str(self.configuration.get(name)) for name in OF_A_CELL}
        return {"lr": f"{self.facts['lr']:g}", **settings}


def perplexities(runs: Sequence[Documents], seed: int) -> np.ndarray:
    """Perplexities [DRAWS] of runs that differ in the seed alone. Every draw takes as many documents as there are, and as many
    runs, with replacement. The documents depend on their number alone, so draws of two cells can be compared one by one."""
    labels = np.array(runs[0].labels, np.float64)
    read = labels > 0  # of a long split not every document
    labels, nats = labels[read], np.array([run.nats for run in runs]).T[read]
    documents = _times_drawn(len(labels))
    losses = documents @ nats / (documents @ labels)[:, None]  # [DRAWS, runs]
    chosen = np.random.default_rng(seed).integers(len(runs), size=losses.shape)
    return np.exp(np.take_along_axis(losses, chosen, axis=1).mean(axis=1))


@functools.cache
def _times_drawn(documents: int) -> np.ndarray:
    """[DRAWS, documents]: how many times each draw takes each document."""
    return (
        np.random.default_rng(0)
        .multinomial(documents, np.full(documents, 1 / documents), DRAWS)
        .astype(np.float64)
    )


def interval_of(draws: np.ndarray) -> list[float]:
    """The middle 95 % of the draws."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return [float(low), float(high)]


@dataclass(frozen=True, eq=False)
class Cell:
    """Runs that differ in the seed only."""

    runs: list[Run]

    @property
    def label(self) -> str:
        return str(self.runs[0].labels["condition"])

    @property
    def rate(self) -> str | None:
        return self.runs[0].labels.get("rate")

    @property
    def group(self) -> str:
        labels = self.runs[0].labels.items()
        return " ".join(str(label) for axis, label in labels if axis not in ("condition", "rate"))

    @property
    def perplexity(self) -> Value:
        return mean_of(run.perplexity for run in self.runs)

    @property
    def compute(self) -> float:
        """6ND of all parameters, as the paper counts."""
        return statistics.mean(6 * run.facts["parameters"] * run.trained for run in self.runs)

    @functools.cached_property
    def draws(self) -> np.ndarray | None:
        """Bootstrap samples of the perplexity of the last validation; None without losses by document."""
        documents = [run.documents for run in self.runs if run.documents is not None]
        if len(documents) < len(self.runs):
            return None
        # A seed of its own: the seeds of two cells are drawn independently.
        return perplexities(documents, zlib.crc32(self.label.encode()))

    def curve(self, tag: str) -> dict[int, Value]:
        """Values by tokens, where all runs have the tag."""
        curves = [run.curves.get(tag, {}) for run in self.runs]
        shared = set(curves[0]).intersection(*curves[1:])
        return {tokens: mean_of(curve[tokens] for curve in curves) for tokens in sorted(shared)}

    def last(self, tag: str) -> Value | None:
        curves = [run.curves[tag] for run in self.runs if run.curves.get(tag)]
        return mean_of(curve[max(curve)] for curve in curves) if curves else None

    def name_among(self, cells: "list[Cell]", without: str = "") -> str:
        """The condition, with the settings that tell this cell from others of the same condition."""
        twins = [other.runs[0].settings for other in cells if other.label == self.label]
        words = [self.label]
        for name, value in self.runs[0].settings.items():
            if name != without and any(twin[name] != value for twin in twins):
                words.append(f"{name} {value}")
        return ", ".join(words)


Groups = dict[str, list[Cell]]


def cells_of(runs: list[Run]) -> Groups:
    """Cells by group, the smallest size first; within a group the lowest perplexity first."""
    by_cell: dict[str, Cell] = {}
    for run in sorted(runs, key=lambda run: run.facts["parameters"]):
        same = {name: value for name, value in run.facts.items() if name not in REPEATED}
        key = repr([run.labels, same, run.text, run.settings])
        by_cell.setdefault(key, Cell([])).runs.append(run)
    groups: Groups = {}
    for cell in by_cell.values():
        cell.runs.sort(key=lambda run: run.seed)
        groups.setdefault(cell.group, []).append(cell)
    return {
        group: sorted(cells, key=lambda cell: cell.perplexity.mean)
        for group, cells in groups.items()
    }


def at_best_rates(groups: Groups) -> Groups:
    """Each condition at its best rate only: the one with the most seeds, then the lowest perplexity."""
    chosen = {}
    for group, cells in groups.items():
        best: dict[str, Cell] = {}
        for cell in sorted(cells, key=lambda cell: -len(cell.runs)):
            best.setdefault(cell.label, cell)
        chosen[group] = [cell for cell in cells if cell.rate is None or cell is best[cell.label]]
    return chosen


def differences(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Differences between runs that make their perplexities not comparable: {name: its values}."""
    shared = [run.text | {"tokens": f"{run.trained:,}"} for cell in cells for run in cell.runs]
    values = {name: sorted({facts[name] for facts in shared}) for name in shared[0]}
    return {name: several for name, several in values.items() if len(several) > 1}


def incomparable(group: str, cells: list[Cell]) -> list[str]:
    """Sentences that say why no percentage compares cells of a group."""
    reasons = [
        f"runs differ in {name} ({'; '.join(values)})"
        for name, values in differences(cells).items()
    ]
    if any(len(softmax_cells(cell, cells)) > 1 for cell in cells):
        reasons.append("several rows are of softmax")
    return [f"{group}: {reason}, so no percentage compares them." for reason in reasons]


def softmax_cells(cell: Cell, cells: list[Cell]) -> list[Cell]:
    """Cells of softmax that a cell can be compared with: they read as many tokens of the same text."""
    return [other for other in cells if other.label == "softmax" and not differences([cell, other])]


def rows(groups: Groups) -> list[Row]:
    """One row per cell, against softmax at its best rate, and beside the paper's figures of the same cell."""
    best = at_best_rates(groups)
    return [_row(cell, best[group]) for group, cells in groups.items() for cell in cells]


def _row(cell: Cell, best: list[Cell]) -> Row:
    first = cell.runs[0]
    interval = None
    if cell.draws is not None:
        interval = interval_of(cell.draws)

    # The same documents are drawn for both cells, so their samples can be divided one by one.
    vs_softmax = None
    vs_softmax_interval = None
    comparable = softmax_cells(cell, best)
    if len(comparable) == 1:
        softmax = comparable[0]
        vs_softmax = cell.perplexity.mean / softmax.perplexity.mean - 1
        if softmax is not cell and cell.draws is not None and softmax.draws is not None:
            vs_softmax_interval = interval_of(cell.draws / softmax.draws - 1)

    # A condition with a setting of its own has another name, and so no figure of the paper.
    paper = PAPER["validation_perplexity"].get(first.facts["model"], {})
    theirs = paper.get(first.facts["condition"])
    return {
        "group": cell.group,
        "condition": cell.name_among(best, without="lr"),
        "lr": first.facts["lr"],
        "seeds": [run.seed for run in cell.runs],
        "parameters": first.facts["parameters"],
        "state": describe_state(*first.facts["state"]),
        "tokens": round(statistics.mean(run.trained for run in cell.runs)),
        "of_planned": statistics.mean(run.trained / run.facts["tokens"] for run in cell.runs),
        "compute": cell.compute,
        "loss": mean_of(run.loss for run in cell.runs),
        "perplexity": cell.perplexity,
        "interval": interval,
        "vs_softmax": vs_softmax,
        "vs_softmax_interval": vs_softmax_interval,
        "accuracy": cell.last(ACCURACY),
        "paper": theirs,
        "paper_vs_softmax": theirs / paper["softmax"] - 1 if theirs else None,
    }


def describe_state(fixed: int, growing: int) -> str:
    """Numbers of the state of all layers: per sequence, and what every token adds."""
    words = []
    if fixed or not growing:
        words.append(f"{fixed:,}")
    if growing:
        words.append(f"{growing:,} a token")
    return " + ".join(words)


FORMATS = {  # of numbers in the table, by column
    "of_planned": ".1%",
    "compute": ".3e",
    "loss": ".4f",
    "perplexity": ".2f",
    "interval": ".2f",
    "vs_softmax": "+.2%",
    "vs_softmax_interval": "+.1%",
    "accuracy": ".1%",
    "paper": ".2f",
    "paper_vs_softmax": "+.2%",
}


def page(groups: Groups) -> str:
    """The table, what its columns mean, and why runs of one group are not compared."""
    table = rows(groups)
    # A column that no row fills is left out.
    columns = [name for name in table[0] if any(row[name] is not None for row in table)]
    cells = [[name.replace("_", " ") for name in columns]]
    for row in table:
        cells.append([cell_text(row[name], FORMATS.get(name, "")) for name in columns])
    lines = [*markdown_rows(cells), "", NOTES]
    for group, best in at_best_rates(groups).items():
        lines += [f"- {line}" for line in incomparable(group, best)]
    return "\n".join(lines) + "\n"


def panels(runs: list[Run]) -> dict[str, list[Panel | Dots]]:
    """Panels by group: what each condition reaches at its best rate, and how it came there by tokens.

    Then a panel by compute for each setting with several sizes. The measure is accuracy if there is one, else perplexity.
    """
    drawn: dict[str, list[Panel | Dots]] = {}
    by_setting: Groups = {}
    for group, cells in at_best_rates(cells_of(runs)).items():
        labels = cells[0].runs[0].labels
        setting = " ".join(
            str(label)
            for axis, label in labels.items()
            if axis not in ("size", "condition", "rate")
        )
        by_setting.setdefault(setting, []).extend(cells)

        accurate = any(cell.last(ACCURACY) for cell in cells)
        measure = ACCURACY if accurate else PERPLEXITY
        curves = []
        for cell in cells:
            # The first validation is of the untrained model.
            points = list(cell.curve(measure).items())
            points = points[1:] or points
            millions = [tokens / 1e6 for tokens, _ in points]
            curves.append(_curve(cell.name_among(cells), millions, [value for _, value in points]))
        drawn[group] = [_dots(group, cells, accurate)]
        if max(len(curve.x) for curve in curves) > 1:
            y_label = measure.removeprefix("validation_metrics/")
            drawn[group].append(
                Panel(group, curves, "tokens (millions)", y_label, log_y=not accurate)
            )

    for setting, cells in by_setting.items():
        if len({cell.runs[0].labels["size"] for cell in cells}) == 1:
            continue
        curves = []
        for label in dict.fromkeys(cell.label for cell in cells):
            same = sorted(
                (cell for cell in cells if cell.label == label), key=lambda cell: cell.compute
            )
            compute = [float(f"{cell.compute / 1e18:.3g}") for cell in same]
            curves.append(_curve(label, compute, [cell.perplexity for cell in same]))
        title = f"{setting}, all sizes".removeprefix(", ")
        drawn[title] = [
            Panel(
                title,
                curves,
                "6ND ($10^{18}$ FLOPs)",
                "validation perplexity",
                log_x=True,
                log_y=True,
            )
        ]
    return drawn


def _dots(title: str, cells: list[Cell], accurate: bool) -> Dots:
    """The value of each cell, with its 95 % interval if losses by document are known, else its deviation over seeds."""
    bars = ""
    dots = []
    for cell in cells:
        value = cell.perplexity
        if accurate:
            value = cell.last(ACCURACY) or value
        interval = None
        if not accurate and cell.draws is not None:
            interval = interval_of(cell.draws)
            bars = "; bars: 95 %"
        elif value.deviation is not None:
            interval = [value.mean - value.deviation, value.mean + value.deviation]
            bars = bars or "; bars: deviation"
        label = cell.name_among(cells)
        dots.append(Dot(label, value.mean, interval, f"{label} ({len(cell.runs)})"))
    dots.sort(key=lambda dot: dot.value, reverse=accurate)
    x_label = "accuracy (more is better)" if accurate else "validation perplexity (less is better)"
    return Dots(title, dots, x_label + bars)


def _curve(label: str, x: list[float], values: list[Value]) -> Curve:
    errors = [value.deviation or math.nan for value in values]
    return Curve(label, x, [value.mean for value in values], errors)
