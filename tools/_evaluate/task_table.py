"""The paper's tasks, and the tables of `evaluate` with the paper's figures beside ours."""

from collections.abc import Sequence
from typing import Any

from interdomain.tools._paper import CONDITIONS, PAPER, SIZE

TASKS: dict[str, dict[str, list[float]]] = PAPER["tasks"]  # {group: {"task metric": figures by condition}}
LENGTHS = (4096, 8192, 14_336)  # the paper's context lengths in tokens
PERCENT = ("acc", "acc_norm", "exact_match", "contains")


def _tasks_of(*groups: str) -> list[str]:
    return [key.partition(" ")[0] for group in groups for key in TASKS[group]]


SUITES = {
    "commonsense": _tasks_of("commonsense"),
    "lambada": ["lambada_openai"],
    "wikitext": ["wikitext"],
    "paper": [*_tasks_of("commonsense"), "wikitext"],
    "recall": _tasks_of("retrieval", "based"),
    "longbench-14": _tasks_of("longbench"),
}


def task_names(asked: list[str]) -> list[str]:
    """The tasks of suites and names, each of them once."""
    return list(dict.fromkeys(task for name in asked for task in SUITES.get(name, [name])))


def task_rows(results: dict[str, dict], cells: set[tuple[str, str]]) -> list[dict[str, str]]:
    """Rows of a table with a column for each exported model.

    Args:
        results: {model: {task: {metric: {"value", "stderr"}}}}.
        cells: (size, condition) of the models. The paper's figures of a condition have a column if a model is exactly it.
    """
    measured: dict[str, None] = {}
    for by_task in results.values():
        for task, metrics in by_task.items():
            for metric in metrics:
                measured[f"{task} {metric}"] = None
    paper = {key: figures for group in TASKS.values() for key, figures in group.items()}
    in_paper = [key for key in paper if key in measured]
    tasks_in_paper = {key.partition(" ")[0] for key in in_paper}
    # Other metrics of the paper's tasks are left to the JSON file.
    others = [key for key in measured if key.partition(" ")[0] not in tasks_in_paper]
    conditions = conditions_in(cells) if in_paper else []

    def row(name: str, metric: str, values: list[dict | None], figures: Sequence[float]) -> dict[str, str]:
        unit = f"{metric} %" if metric in PERCENT else metric
        out = {"task": name, "metric": unit}
        for model, value in zip(results, values, strict=True):
            out[model] = _text(value, metric)
        for condition in conditions:
            out[f"paper's {SIZE} {condition}"] = f"{figures[CONDITIONS.index(condition)]:g}" if figures else "-"
        return out

    rows = []
    for key in [*in_paper, *others]:
        task, _, metric = key.partition(" ")
        values = [by_task.get(task, {}).get(metric) for by_task in results.values()]
        rows.append(row(task, metric, values, paper.get(key, ())))
        for group, average in PAPER["averages"].items():
            if key == [*TASKS[group]][-1] and TASKS[group].keys() <= measured.keys():
                means = [mean_of(by_task, group) for by_task in results.values()]
                rows.append(row(average["name"], metric, means, average["values"]))
    return rows


def conditions_in(cells: set[tuple[str, str]]) -> list[str]:
    """The conditions of the paper's figures that are among the models."""
    return [condition for condition in CONDITIONS if (SIZE, condition) in cells]


def mean_of(by_task: dict, group: str) -> dict | None:
    """Mean over a group of tasks; None unless all of them were measured."""
    values = []
    for key in TASKS[group]:
        task, _, metric = key.partition(" ")
        measured = by_task.get(task, {}).get(metric)
        if measured is None:
            return None
        values.append(measured["value"])
    return {"value": sum(values) / len(values), "stderr": None}


def _text(measured: dict | None, metric: str) -> str:
    if measured is None:
        return "-"
    scale, digits = (100, 2) if metric in PERCENT else (1, 4)
    text = f"{scale * measured['value']:.{digits}f}"
    if measured["stderr"]:
        text += f" ± {scale * measured['stderr']:.{digits}f}"
    return text


def perplexity_rows(
    measured: list[dict[str, Any]],
    models: list[str],
    groups: dict[str, list[str]],
    cells: set[tuple[str, str]],
) -> list[dict[str, str]]:
    """Rows of a table by corpus and length, with columns for each exported model.

    Args:
        measured: Rows of `perplexity.measure`, with "folder" and "corpus".
        groups: {title: its corpora}: a corpus, or several and their arithmetic mean.
        cells: (size, condition) of the models, as for `task_rows`.
    """
    by_place = {(row["folder"], row["corpus"], row["length"]): row for row in measured}
    lengths = list(dict.fromkeys(row["length"] for row in measured))

    def mean(model: str, corpora: list[str], length: int, kind: str, form: str) -> str:
        values: list[Any] = [by_place.get((model, corpus, length), {}).get(kind) for corpus in corpora]
        return "-" if None in values else format(sum(values) / len(values), form)

    rows = []
    for title, corpora in groups.items():
        for length in lengths:
            row = {"corpus": title, "length": f"{length:,}"}
            for model in models:
                row[f"{model}, perplexity"] = mean(model, corpora, length, "perplexity", ".2f")
            for model in models:
                row[f"{model}, bits per byte"] = mean(model, corpora, length, "bits per byte", ".4f")
            for condition in conditions_in(cells):
                figures = dict(zip(LENGTHS, PAPER["length"][title][condition], strict=True))
                row[f"paper's {SIZE} {condition}"] = f"{figures[length]:.2f}" if length in figures else "-"
            rows.append(row)
    return rows
