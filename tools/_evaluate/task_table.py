"""The paper's tasks, and the tables of `evaluate` with the paper's figures beside ours."""

from collections.abc import Sequence
from typing import Any

from interdomain.markdown import cell_text
from interdomain.tools._paper import CONDITIONS, PAPER, SIZE

TASKS: dict[str, dict[str, list[float]]] = PAPER[
    "tasks"
]  # {group: {"task metric": figures by condition}}
LENGTHS = (4096, 8192, 14_336)  # the paper's context lengths in tokens
PERCENT = ("acc", "acc_norm", "exact_match", "contains")


def _split(key: str) -> tuple[str, str]:
    task, _, metric = key.partition(" ")
    return task, metric


def _tasks_of(*groups: str) -> list[str]:
    return [_split(key)[0] for group in groups for key in TASKS[group]]


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
    measured: dict[tuple[str, str], None] = {}
    for by_task in results.values():
        for task, metrics in by_task.items():
            measured |= {(task, metric): None for metric in metrics}

    # The paper's rows with its figures, in its order, and averages of its groups; then other tasks. The JSON file also has
    # other metrics of the paper's tasks.
    wanted: dict[tuple[str, str], Sequence[float]] = {}
    averages: dict[str, str] = {}  # name -> group
    for group, tasks in TASKS.items():
        keys = {_split(key): figures for key, figures in tasks.items()}
        wanted |= {key: figures for key, figures in keys.items() if key in measured}
        average = PAPER["averages"].get(group)
        if average and keys.keys() <= measured.keys():
            averages[average["name"]] = group
            wanted[average["name"], [*keys][-1][1]] = average["values"]
    in_paper = {task for task, _ in wanted}
    wanted |= {key: () for key in measured if key[0] not in in_paper}

    rows = []
    for (task, metric), figures in wanted.items():
        percent = metric in PERCENT
        row = {"task": task, "metric": f"{metric} %" if percent else metric}
        for model, by_task in results.items():
            value = by_task.get(task, {}).get(metric)
            if task in averages:
                value = mean_of(by_task, averages[task])
            row[model] = _text(value, percent)
        for condition in conditions_in(cells):
            figure = figures[CONDITIONS.index(condition)] if figures else None
            row[f"paper's {SIZE} {condition}"] = cell_text(figure, "g")
        rows.append(row)
    return rows


def _text(measured: dict | None, percent: bool) -> str:
    if measured is None:
        return "-"
    scale = 100 if percent else 1
    stderr = scale * measured["stderr"] if measured["stderr"] else None
    return cell_text((scale * measured["value"], stderr), ".2f" if percent else ".4f")


def conditions_in(cells: set[tuple[str, str]]) -> list[str]:
    """The conditions of the paper's figures that are among the models."""
    return [condition for condition in CONDITIONS if (SIZE, condition) in cells]


def mean_of(by_task: dict, group: str) -> dict | None:
    """Mean over a group of tasks; None unless all of them were measured."""
    values = []
    for key in TASKS[group]:
        task, metric = _split(key)
        measured = by_task.get(task, {}).get(metric)
        if measured is None:
            return None
        values.append(measured["value"])
    return {"value": sum(values) / len(values), "stderr": None}


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

    def mean(model: str, corpora: list[str], length: int, measure: str, form: str) -> str:
        values: list[Any] = [
            by_place.get((model, corpus, length), {}).get(measure) for corpus in corpora
        ]
        return cell_text(None if None in values else sum(values) / len(values), form)

    rows = []
    for title, corpora in groups.items():
        for length in lengths:
            row = {"corpus": title, "length": f"{length:,}"}
            for model in models:
                row[f"{model}, perplexity"] = mean(model, corpora, length, "perplexity", ".2f")
            for model in models:
                row[f"{model}, bits per byte"] = mean(
                    model, corpora, length, "bits per byte", ".4f"
                )
            for condition in conditions_in(cells):
                figures = dict(zip(LENGTHS, PAPER["length"][title][condition], strict=True))
                row[f"paper's {SIZE} {condition}"] = cell_text(figures.get(length), ".2f")
            rows.append(row)
    return rows
