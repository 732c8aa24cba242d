"""The names of the paper's tasks, and the tables of `evaluate`.

The tables show the paper's figures beside ours. A cell is a model's (size, condition), such as
("1.3B", "interdomain"); the condition is the name of a mixer's settings in the paper. A group is a
list of tasks that the paper averages or shows together.
"""

from typing import Any

from interdomain.markdown import cell_text
from interdomain.tools._paper import CONDITIONS, PAPER, SIZE

# By group of tasks: the paper's figures of each "task metric", in the order of CONDITIONS.
TASKS: dict[str, dict[str, list[float]]] = PAPER["tasks"]
LENGTHS = (4096, 8192, 14_336)  # the paper's context lengths in tokens
PERCENT = ("acc", "acc_norm", "exact_match", "contains")  # metrics that are printed in percent

Row = dict[str, str]
Key = tuple[str, str]  # a task and a metric
Measured = dict[str, Any]  # "value", and "stderr", which may be None
Tasks = dict[str, dict[str, Measured]]  # the results of one model, by task and metric


def _tasks_of(group: str) -> list[str]:
    return [name.split()[0] for name in TASKS[group]]


# The names that --tasks takes, in addition to those of single tasks.
SUITES = {
    "commonsense": _tasks_of("commonsense"),
    "lambada": ["lambada_openai"],
    "wikitext": ["wikitext"],
    "paper": [*_tasks_of("commonsense"), "wikitext"],
    "recall": [*_tasks_of("retrieval"), *_tasks_of("based")],
    "longbench-14": _tasks_of("longbench"),
}


def task_names(asked: list[str]) -> list[str]:
    """Returns the tasks of suites and names, each of them once.

    Args:
        asked: Names of SUITES and of single tasks.
    """
    names = []
    for name in asked:
        names += SUITES.get(name, [name])
    return list(dict.fromkeys(names))


def _keys_of(group: str) -> list[Key]:
    keys = []
    for name in TASKS[group]:
        task, metric = name.split()
        keys.append((task, metric))
    return keys


def _paper_figures() -> dict[Key, list[float]]:
    """Returns the paper's figures of each result, in the order of CONDITIONS.

    The average of a group follows its tasks.
    """
    figures = {}
    for group, tasks in TASKS.items():
        keys = _keys_of(group)
        figures |= dict(zip(keys, tasks.values(), strict=True))
        if group in PAPER["averages"]:
            # The average has the metric of its last task, for it is printed below that.
            average = PAPER["averages"][group]
            metric = keys[-1][1]
            figures[average["name"], metric] = average["values"]
    return figures


def with_averages(tasks: Tasks) -> dict[Key, Measured]:
    """Returns the results of one model, with the averages of the paper's groups of tasks.

    An average is left out if a task of its group was not measured.

    Args:
        tasks: The results by task and metric.
    """
    results = {}
    for task, metrics in tasks.items():
        for metric, measured in metrics.items():
            results[task, metric] = measured
    for group, average in PAPER["averages"].items():
        # As in `_paper_figures`, the average has the metric of its last task.
        keys = _keys_of(group)
        if results.keys() >= set(keys):
            mean = sum(results[key]["value"] for key in keys) / len(keys)
            metric = keys[-1][1]
            results[average["name"], metric] = {"value": mean, "stderr": None}
    return results


def task_rows(tasks: dict[str, Tasks], cells: set[tuple[str, str]]) -> list[Row]:
    """Makes the table of tasks, with a column for each exported model.

    Args:
        tasks: The results of each model.
        cells: (size, condition) of the models. The paper's figures of a condition have a column if
            a model has exactly that size and condition of the paper.
    """
    by_model = {model: with_averages(results) for model, results in tasks.items()}
    measured = {}
    for results in by_model.values():
        measured |= results

    # The paper's results come first, in its order. Other metrics of its tasks are in the JSON file
    # only.
    figures = _paper_figures()
    paper_tasks = {task for task, _ in figures}
    keys = [key for key in figures if key in measured]
    keys += [key for key in measured if key[0] not in paper_tasks]

    rows = []
    for key in keys:
        # The task, and the value of each model with its standard error.
        task, metric = key
        is_percent = metric in PERCENT
        row = {"task": task, "metric": metric}
        if is_percent:
            row["metric"] += " %"
        for model, results in by_model.items():
            row[model] = _text(results.get(key), is_percent)
        # The paper's figures, a column for each condition that is among the models.
        paper = dict(zip(CONDITIONS, figures.get(key, ()), strict=False))
        for condition in CONDITIONS:
            if (SIZE, condition) in cells:
                row[f"paper's {SIZE} {condition}"] = cell_text(paper.get(condition), "g")
        rows.append(row)
    return rows


def _text(measured: Measured | None, is_percent: bool) -> str:
    """Returns a value with its standard error as text, "-" for None.

    Args:
        measured: "value" and "stderr" as the harness gives them, shares from 0 to 1 for percents.
        is_percent: True multiplies both by 100.
    """
    if measured is None:
        return "-"
    value = measured["value"]
    stderr = measured["stderr"] or None  # 0 stands for a metric without a standard error
    if not is_percent:
        return cell_text((value, stderr), ".4f")
    if stderr is not None:
        stderr *= 100
    return cell_text((100 * value, stderr), ".2f")


def perplexity_rows(
    measured: list[dict[str, Any]],
    models: list[str],
    groups: dict[str, list[str]],
    cells: set[tuple[str, str]],
) -> list[Row]:
    """Makes the table of perplexities by corpus and length.

    Each exported model has two columns: perplexity and bits per byte.

    Args:
        measured: Rows of `perplexity.measure`, with "folder" and "corpus".
        models: The folders of the models, in the order of the columns.
        groups: The corpora of each title: one corpus, or several, whose arithmetic mean is shown.
        cells: (size, condition) of the models, as for `task_rows`.
    """
    by_place = {(row["folder"], row["corpus"], row["length"]): row for row in measured}
    lengths = list(dict.fromkeys(row["length"] for row in measured))

    rows = []
    for title, corpora in groups.items():
        for length in lengths:
            row = {"corpus": title, "length": f"{length:,}"}
            # First the perplexities of all models, then their bits per byte.
            for measure, form in (("perplexity", ".2f"), ("bits per byte", ".4f")):
                for model in models:
                    places = [by_place.get((model, corpus, length), {}) for corpus in corpora]
                    mean = _mean([place.get(measure) for place in places])
                    row[f"{model}, {measure}"] = cell_text(mean, form)
            # The paper's figures, at its own lengths.
            for condition in CONDITIONS:
                if (SIZE, condition) in cells:
                    figures = dict(zip(LENGTHS, PAPER["length"][title][condition], strict=True))
                    row[f"paper's {SIZE} {condition}"] = cell_text(figures.get(length), ".2f")
            rows.append(row)
    return rows


def _mean(values: list[float | None]) -> float | None:
    """Returns the arithmetic mean of values. None if one of the `values` is not known yet."""
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total / len(values)
