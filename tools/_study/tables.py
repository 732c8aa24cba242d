"""Tables and figures of a study: mean and deviation over seeds, beside the paper's figures.

An arm is a size, condition, setting and learning rate; its runs differ in the seed only. A group is
the arms of one size and setting, which are compared with each other.
"""

import bisect
import functools
import math
import statistics
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from interdomain.markdown import cell_text, markdown_rows
from interdomain.titan.settings.job_config import pairs
from interdomain.tools._paper import PAPER, has_papers_tokens
from interdomain.tools._plots import Curve, Dot, Dots, Panel
from interdomain.tools._study.definition import VALIDATION

ACCURACY = "validation_metrics/accuracy"
PERPLEXITY = "validation perplexity"  # a curve that is computed from the validation loss
# Two runs are compared only if they agree in these settings, in the text and in the tokens read.
COMPARED_SETTINGS = ("data.reset_state_at_documents", "validation.tokens", "validation.seq_len")
# Runs of one arm agree in these settings, too.
CELL_SETTINGS = (
    "optimizer.name",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.ssm_weight_decay",
    "lr_scheduler.decay_ratio",
    "lr_scheduler.decay_type",
    "lr_scheduler.min_lr",
    "checkpoint.initial_load_path",
)
# Hyperparameters in which runs of one arm may differ.
FREE_FACTS = ("seed", "ranks", "recompute")
BOOTSTRAP_SAMPLES = 2000  # of the 95 % intervals
# The meaning of columns of the table.
NOTES = {
    "tokens": "read at the last validation.",
    "compute": "6ND of all parameters.",
    "state": "numbers per sequence in all layers.",
    "loss": "the best validation loss of each run in nats per token, ± the standard deviation over seeds.",
    "interval": "95 %, by bootstrap over the validation documents and the seeds, for the last validation.",
    "vs_softmax": "mean perplexity against softmax at its best rate, if both read as many tokens of the same text.",
    "paper": "perplexity on FineWeb-Edu in tokens of Llama 2, beside runs with the paper's number of tokens. The paper does "
    "not say which part it validated on.",
}

Row = dict[str, Any]


class Value(NamedTuple):
    """The mean over seeds and the sample standard deviation, which is None for a single run."""

    mean: float
    deviation: float | None


def mean_of(values: Iterable[float]) -> Value:
    """Returns the mean of values, one for each seed, and their standard deviation."""
    values = list(values)
    deviation = None
    if len(values) > 1:
        deviation = statistics.stdev(values)
    return Value(statistics.mean(values), deviation)


@dataclass(frozen=True)
class Run:
    """A run as `study show` reads it.

    Attributes:
        labels: Its size, condition, setting and rate in a study. A single run has size and
            condition.
        facts: The hyperparameters that it logged.
        curves: The value of each tag by tokens read.
        trained: The number of tokens that it had read at the last validation.
        status: How far it is. None if it is finished.
        documents: Sums over each validation document at the last validation: its loss in "nats",
            and its "labels", the number of predicted tokens, 0 if it was not read. None if the
            split has many documents.
        configuration: The value of each setting.
    """

    labels: Row
    facts: Row
    curves: dict[str, dict[int, float]]
    trained: int
    status: str | None
    documents: dict[str, list[float]] | None
    configuration: Row

    @classmethod
    def of(cls, name: str, record: Row) -> "Run":
        """Reads a record of `definition.record_of`.

        A study's records also have labels and documents.

        Args:
            name: The name of the run, for the error's text.
            record: The record.

        Raises:
            ValueError: The run was never validated.
        """
        facts = record["facts"]

        # The number of tokens is logged every few steps. Other curves have points between these.
        logged = {0: 0}
        for step, tokens in record["curves"]["n_tokens_seen"].items():
            logged[int(step)] = int(tokens)
        logged_steps = sorted(logged)

        def tokens_at(step: int) -> int:
            before = logged_steps[bisect.bisect(logged_steps, step) - 1]
            return logged[before] + (step - before) * facts["tokens_per_step"]

        # Put all finite values of the curves on an axis of tokens.
        last_step = 0
        curves: dict[str, dict[int, float]] = {}
        for tag, curve in record["curves"].items():
            curves[tag] = {}
            for step in sorted(map(int, curve)):
                last_step = max(last_step, step)
                if math.isfinite(curve[str(step)]):
                    curves[tag][tokens_at(step)] = curve[str(step)]
        if not curves.get(VALIDATION):
            raise ValueError(f"{name} was never validated: train with validation.enable = true.")
        losses = curves[VALIDATION].items()
        curves[PERPLEXITY] = {tokens: math.exp(loss) for tokens, loss in losses}

        # A run ends with a validation of its last step.
        validated = max(map(int, record["curves"][VALIDATION]))
        steps = facts["tokens"] // facts["tokens_per_step"]
        status = None
        if validated < steps:
            status = f"unfinished, step {last_step:,} of {steps:,}"

        # A run outside of a study is labelled by what it logged.
        labels = {"size": facts["model"], "condition": facts["condition"]}
        if "run" in record:
            labels = dict(record["run"])
            del labels["seed"]
        return cls(
            labels=labels,
            facts=facts,
            curves=curves,
            trained=tokens_at(validated),
            status=status,
            documents=record.get("documents"),
            configuration=dict(pairs(record["configuration"])),
        )

    @property
    def loss(self) -> float:
        """Returns the lowest validation loss in nats per token."""
        return min(self.curves[VALIDATION].values())

    @property
    def compared(self) -> dict[str, str]:
        """Returns all in which two runs must agree for their perplexities to be compared."""
        compared = {name: str(self.configuration.get(name)) for name in COMPARED_SETTINGS}
        fingerprints = self.facts["fingerprints"]
        compared["the training text"] = str(fingerprints.get("train"))
        compared["the validation text"] = str(fingerprints.get("validation"))
        compared["tokens"] = f"{self.trained:,}"
        return compared

    @property
    def settings(self) -> dict[str, str]:
        """Returns the settings that tell an arm from other arms of the same condition."""
        settings = {name: str(self.configuration.get(name)) for name in CELL_SETTINGS}
        return {"lr": f"{self.facts['lr']:g}", **settings}


def perplexities(runs: list[dict[str, list[float]]], seed: int) -> np.ndarray:
    """Draws bootstrap samples of the mean perplexity of runs that differ in the seed only.

    Every sample draws as many documents as there are and as many runs, with replacement.

    Args:
        runs: The losses by document of each run. All runs have read the same documents.
        seed: Seed of the choice of runs. The choice of documents depends on their number only.
    Returns:
        float64 [BOOTSTRAP_SAMPLES].
    """
    # A long validation split is not read to its end: leave out the documents that were not read.
    labels = np.array(runs[0]["labels"], np.float64)
    nats = np.array([run["nats"] for run in runs])
    was_read = labels > 0
    labels = labels[was_read]
    nats = nats.T[was_read]  # [documents, runs]
    # The loss of each run over the documents of each sample.
    counts = _document_counts(len(labels))
    losses = counts @ nats / (counts @ labels)[:, None]  # [BOOTSTRAP_SAMPLES, runs]
    # As many runs as there are, drawn with replacement, and the mean of their losses.
    chosen = np.random.default_rng(seed).integers(len(runs), size=losses.shape)
    return np.exp(np.take_along_axis(losses, chosen, axis=1).mean(axis=1))


@functools.cache
def _document_counts(documents: int) -> np.ndarray:
    """Returns how many times each sample draws each document, [BOOTSTRAP_SAMPLES, documents].

    Args:
        documents: The number of documents.
    """
    probabilities = np.full(documents, 1 / documents)
    counts = np.random.default_rng(0).multinomial(documents, probabilities, BOOTSTRAP_SAMPLES)
    return counts.astype(np.float64)


def interval_of(samples: np.ndarray) -> list[float]:
    """Returns the interval that holds the middle 95 % of the samples."""
    low, high = np.quantile(samples, [0.025, 0.975])
    return [float(low), float(high)]


@dataclass(frozen=True, eq=False)
class Arm:
    """Runs that differ in the seed only. The class computes their means and intervals."""

    runs: list[Run]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def condition(self) -> str:
        return str(self.first.labels["condition"])

    @property
    def group(self) -> str:
        """Names the group of the arm: its size and setting."""
        labels = self.first.labels.items()
        return " ".join(str(label) for axis, label in labels if axis not in ("condition", "rate"))

    @property
    def perplexity(self) -> Value:
        return mean_of(math.exp(run.loss) for run in self.runs)

    @property
    def compute(self) -> float:
        """Returns 6ND FLOPs (N: all parameters, D: tokens), as the paper counts them."""
        return 6 * self.first.facts["parameters"] * self.first.trained

    @functools.cached_property
    def interval(self) -> list[float] | None:
        """Returns the 95 % interval of the perplexity of the last validation.

        None if a run has no losses by document.
        """
        documents = []
        for run in self.runs:
            if run.documents is None:
                return None
            documents.append(run.documents)
        # The condition decides the draw, so that an interval is the same each time.
        seed = zlib.crc32(self.condition.encode())
        return interval_of(perplexities(documents, seed))

    def curve(self, tag: str) -> dict[int, Value]:
        """Returns the mean of a tag by tokens, wherever all runs have a value.

        Args:
            tag: A key of `Run.curves`.
        """
        curves = [run.curves.get(tag, {}) for run in self.runs]
        means = {}
        for tokens in sorted(set(curves[0]).intersection(*curves[1:])):
            means[tokens] = mean_of(curve[tokens] for curve in curves)
        return means

    @property
    def accuracy(self) -> Value | None:
        """Returns the accuracy of the last validation. None if the corpus has no answers."""
        curve = self.curve(ACCURACY)
        if not curve:
            return None
        return curve[max(curve)]

    def name_among(self, arms: "list[Arm]", without: str = "") -> str:
        """Returns the condition, with the settings that tell this arm from its neighbours.

        Args:
            arms: The arms that stand beside it.
            without: A setting that is left out.
        """
        twins = [other.first.settings for other in arms if other.condition == self.condition]
        name = self.condition
        for setting, value in self.first.settings.items():
            if setting != without and any(twin[setting] != value for twin in twins):
                name += f", {setting} {value}"
        return name


# The arms of each group, by its name.
Groups = dict[str, list[Arm]]


def arms_of(runs: list[Run]) -> Groups:
    """Puts runs into arms and arms into groups.

    The smallest size comes first. Within a group the lowest perplexity comes first.
    """
    # Runs that agree in everything but the seed are one arm.
    by_key: dict[str, Arm] = {}
    for run in sorted(runs, key=lambda run: run.facts["parameters"]):
        facts = {name: fact for name, fact in run.facts.items() if name not in FREE_FACTS}
        key = repr([run.labels, facts, run.compared, run.settings])
        by_key.setdefault(key, Arm([])).runs.append(run)

    # Cells of one size and setting are one group.
    groups: Groups = {}
    for arm in by_key.values():
        arm.runs.sort(key=lambda run: run.facts["seed"])
        groups.setdefault(arm.group, []).append(arm)
    for arms in groups.values():
        arms.sort(key=lambda arm: arm.perplexity.mean)
    return groups


def at_best_rates(arms: list[Arm]) -> list[Arm]:
    """Keeps each condition's best learning rate.

    It is the one with the most seeds, then the one with the lowest perplexity. Cells of a study
    without rates are all kept.

    Args:
        arms: The arms of one group, the lowest perplexity first.
    """
    # `sorted` keeps the order of arms with as many seeds, which is that of their perplexities.
    best: dict[str, Arm] = {}
    for arm in sorted(arms, key=lambda arm: -len(arm.runs)):
        best.setdefault(arm.condition, arm)
    return [arm for arm in arms if "rate" not in arm.first.labels or arm in best.values()]


def softmax_arms(arm: Arm, arms: list[Arm]) -> list[Arm]:
    """Returns the arms of softmax that read as many tokens of the same text as an arm.

    Args:
        arm: The arm to compare.
        arms: The arms of its group.
    """
    softmax = [other for other in arms if other.condition == "softmax"]
    return [other for other in softmax if other.first.compared == arm.first.compared]


def incomparable(group: str, arms: list[Arm]) -> list[str]:
    """Says why no percentage compares some arms of a group, a sentence for each reason.

    Args:
        group: The name of the group.
        arms: Its arms at their best rates.
    """
    reasons = []
    # Other text, validation or number of tokens.
    for name in arms[0].first.compared:
        values = sorted({arm.first.compared[name] for arm in arms})
        if len(values) > 1:
            reasons.append(f"runs differ in {name} ({'; '.join(values)})")
    # Nothing says which of several rows of softmax is the one to compare with.
    if any(len(softmax_arms(arm, arms)) > 1 for arm in arms):
        reasons.append("several rows are of softmax")
    return [f"{group}: {reason}, so no percentage compares them." for reason in reasons]


def rows(groups: Groups) -> list[Row]:
    """Makes a row for each arm, against softmax at its best rate and beside the paper's figures.

    Args:
        groups: The arms of each group, from `arms_of`.
    """
    table = []
    for group, arms in groups.items():
        best = at_best_rates(arms)
        for arm in arms:
            table.append({"group": group, **_row(arm, best)})
    return table


def _row(arm: Arm, best: list[Arm]) -> Row:
    """Returns the columns of an arm.

    Args:
        arm: The arm.
        best: The arms of its group at their best rates.
    """
    # Over the seeds.
    facts = arm.first.facts
    seeds = [run.facts["seed"] for run in arm.runs]
    loss = mean_of(run.loss for run in arm.runs)
    perplexity = arm.perplexity
    # Against softmax.
    vs_softmax = None
    softmax = softmax_arms(arm, best)
    if len(softmax) == 1:
        vs_softmax = perplexity.mean / softmax[0].perplexity.mean - 1

    # The paper's figure. A condition with settings of its own has another name, and so no figure of
    # the paper.
    paper = None
    paper_vs_softmax = None
    if has_papers_tokens(facts["model"], arm.first.trained):
        paper_figures = PAPER["validation_perplexity"][facts["model"]]
        paper = paper_figures.get(facts["condition"])
        if paper:
            paper_vs_softmax = paper / paper_figures["softmax"] - 1

    # The seeds that are not finished.
    status = [run.status for run in arm.runs if run.status]

    return {
        "condition": arm.name_among(best, without="lr"),
        "lr": facts["lr"],
        "seeds": seeds,
        "parameters": facts["parameters"],
        "state": describe_state(*facts["state"]),
        "tokens": arm.first.trained,
        "compute": arm.compute,
        "loss": loss,
        "perplexity": perplexity,
        "interval": arm.interval,
        "vs_softmax": vs_softmax,
        "accuracy": arm.accuracy,
        "paper": paper,
        "paper_vs_softmax": paper_vs_softmax,
        "status": "; ".join(status) or None,
    }


def describe_state(fixed: int, growing: int) -> str:
    """Returns the size of the state in all layers, as text.

    Args:
        fixed: Elements per sequence, such as those of a recurrence's state.
        growing: Elements that every token adds, such as softmax's keys and values.
    """
    if not growing:
        return f"{fixed:,}"
    if not fixed:
        return f"{growing:,} a token"
    return f"{fixed:,} + {growing:,} a token"


# Formats of the numbers in a column.
FORMATS = {
    "compute": ".3e",
    "loss": ".4f",
    "perplexity": ".2f",
    "interval": ".2f",
    "vs_softmax": "+.2%",
    "accuracy": ".1%",
    "paper": ".2f",
    "paper_vs_softmax": "+.2%",
}


def page(groups: Groups) -> str:
    """Returns the table, the meaning of its columns, and why some arms are not compared.

    Args:
        groups: The arms of each group, from `arms_of`.
    """
    table = rows(groups)
    # A column that no row fills is left out.
    columns = []
    for name in table[0]:
        if any(row[name] is not None for row in table):
            columns.append(name)
    texts = [[name.replace("_", " ") for name in columns]]
    for row in table:
        texts.append([cell_text(row[name], FORMATS.get(name, "")) for name in columns])
    lines = [*markdown_rows(texts), ""]
    for name in columns:
        if name in NOTES:
            lines.append(f"- {name.replace('_', ' ')}: {NOTES[name]}")
    for group, members in groups.items():
        lines += [f"- {reason}" for reason in incomparable(group, at_best_rates(members))]
    return "\n".join(lines) + "\n"


def panels(runs: list[Run]) -> dict[str, list[Panel | Dots]]:
    """Returns the plots of each group, the runs of one size and setting.

    The first plot has a dot for each condition: its best validation at its best learning rate. The
    second has the curves over tokens, if a curve has several points. The measure is accuracy if the
    corpus has answers, else perplexity.
    """
    drawn: dict[str, list[Panel | Dots]] = {}
    for group, arms in arms_of(runs).items():
        best = at_best_rates(arms)
        has_answers = any(arm.accuracy for arm in best)
        drawn[group] = [_dots(group, best, has_answers)]
        by_tokens = _panel_by_tokens(group, best, has_answers)
        if max(len(curve.x) for curve in by_tokens.curves) > 1:
            drawn[group].append(by_tokens)
    return drawn


def _panel_by_tokens(title: str, arms: list[Arm], has_answers: bool) -> Panel:
    """Draws a curve for each arm by tokens.

    The first validation is left out: it is of the untrained model.

    Args:
        title: The title of the panel, the name of the group.
        arms: The arms of the group at their best rates.
        has_answers: True draws accuracy, False perplexity.
    """
    measure = PERPLEXITY
    if has_answers:
        measure = ACCURACY
    curves = []
    for arm in arms:
        # Leave out the untrained model, unless it is all there is.
        points = list(arm.curve(measure).items())
        if len(points) > 1:
            del points[0]
        millions = []
        means = []
        deviations = []
        for tokens, value in points:
            millions.append(tokens / 1e6)
            means.append(value.mean)
            deviations.append(value.deviation or math.nan)
        curves.append(Curve(arm.name_among(arms), millions, means, deviations))
    y_label = measure.removeprefix("validation_metrics/")
    return Panel(title, curves, "tokens (millions)", y_label, log_y=not has_answers)


def _dots(title: str, arms: list[Arm], has_answers: bool) -> Dots:
    """Draws the result of each arm, with a bar.

    The bar is the 95 % interval if it is known, else the deviation over seeds.

    Args:
        title: The title of the panel, the name of the group.
        arms: The arms of the group at their best rates.
        has_answers: True draws accuracy, False perplexity.
    """
    x_label = "validation perplexity (less is better)"
    if has_answers:
        x_label = "accuracy (more is better)"
    bars = ""
    dots = []
    for arm in arms:
        # The value, and the interval of the last validation's perplexity.
        value = arm.perplexity
        interval = arm.interval
        if has_answers:
            value = arm.accuracy or value
            interval = None
        # The bar, which the label of the axis explains.
        if interval:
            bars = "; bars: 95 %"
        elif value.deviation is not None:
            interval = [value.mean - value.deviation, value.mean + value.deviation]
            bars = bars or "; bars: deviation"
        name = arm.name_among(arms)
        dots.append(Dot(name, value.mean, interval, f"{name} ({len(arm.runs)})"))
    dots.sort(key=lambda dot: dot.value, reverse=has_answers)
    return Dots(title, dots, x_label + bars, log_x=not has_answers)
