"""The paper's tasks and its figures for them, and results as a table beside these, for `evaluate`."""

SIZE, CONDITIONS = "1.3B", ("softmax", "interdomain", "s4d")
# The paper's tables there: task, metric -> softmax, interdomain, s4d. Accuracies in percent. Its perplexity of WikiText is
# the harness's per word: ln(perplexity) / bits per byte is the same in all its columns, the bytes of WikiText's words. Of
# LAMBADA its bits per byte are left out: in all its columns they are log2(perplexity) / 3.908, whatever it counts.
COMMONSENSE = {
    ("lambada_openai", "acc"): (39.43, 44.36, 25.64),
    ("piqa", "acc"): (69.42, 71.38, 71.00),
    ("hellaswag", "acc_norm"): (48.53, 54.27, 49.34),
    ("winogrande", "acc"): (54.22, 57.85, 53.83),
    ("arc_easy", "acc"): (65.87, 69.91, 60.86),
    ("arc_challenge", "acc_norm"): (33.02, 37.46, 33.36),
    ("social_iqa", "acc"): (40.28, 41.45, 41.10),
    ("boolq", "acc"): (61.28, 59.63, 60.37),
}
MODELING = {
    ("lambada_openai", "perplexity"): (21.03, 14.76, 41.02),
    ("wikitext", "word_perplexity"): (20.55, 19.77, 25.27),
    ("wikitext", "bits_per_byte"): (0.8156, 0.8051, 0.8713),
}
RETRIEVAL = {  # made by tools/_evaluate/recall.py
    ("niah_single_1_1024", "contains"): (99.5, 65.5, 0),
    ("niah_single_1_2048", "contains"): (100, 28, 0),
    ("niah_single_1_4096", "contains"): (89, 9.5, 0),
    ("niah_single_1_8192", "contains"): (0, 3.5, 0),
    ("phonebook_16", "exact_match"): (54.5, 0, 0),
    ("phonebook_32", "exact_match"): (52, 0, 0),
    ("phonebook_64", "exact_match"): (45.5, 0, 0),
    ("phonebook_128", "exact_match"): (24, 0, 0),
}
BASED = {
    ("swde", "contains"): (60.58, 17.46, 6.57),
    ("fda", "contains"): (50.45, 9.53, 0.36),
    ("squad_completion", "contains"): (11.33, 33.78, 14.91),
    ("based_nq", "contains"): (16.44, 11.43, 7.95),
    ("based_triviaqa", "contains"): (56.93, 54.27, 42.83),
    ("based_drop", "contains"): (23.47, 21.31, 14.04),
}
# The 14 that Gated DeltaNet's authors chose, in [0, 1]; the paper has their average alone.
_OF_LONGBENCH = """narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique gov_report qmsum multi_news trec triviaqa samsum
lcc repobench-p"""
LONGBENCH = {(f"longbench_{task}", "score"): None for task in _OF_LONGBENCH.split()}
PAPER = COMMONSENSE | MODELING | RETRIEVAL | BASED | LONGBENCH
AVERAGES = {  # the paper's own, each below its group
    "average of the eight": (COMMONSENSE, (51.51, 54.54, 49.44)),
    "average of Based's six": (BASED, (36.53, 24.63, 14.44)),
    "average of LongBench's 14": (LONGBENCH, (0.1240, 0.1229, 0.0857)),
}
PERCENT = ("acc", "acc_norm", "exact_match", "contains")
SUITES = {
    "commonsense": [task for task, _ in COMMONSENSE],
    "lambada": ["lambada_openai"],
    "wikitext": ["wikitext"],
    "paper": [*(task for task, _ in COMMONSENSE), "wikitext"],
    "recall": [task for task, _ in RETRIEVAL | BASED],
    "longbench-14": [task for task, _ in LONGBENCH],
}


def task_names(asked: list[str]) -> list[str]:
    """Suites taken apart; each task once."""
    return list(dict.fromkeys(task for name in asked for task in SUITES.get(name, [name])))


def table(results: dict[str, dict], cells: set[tuple[str, str]]) -> list[list[str]]:
    """Folders side by side, {label: {task: {metric: ...}}}, as rows of cells, the head first.

    cells: (size, condition) of the folders. The paper's figures of a condition stand beside them where one is exactly it.
    """
    theirs = [i for i, condition in enumerate(CONDITIONS) if (SIZE, condition) in cells]
    measured = dict.fromkeys((t, m) for by_task in results.values() for t, metrics in by_task.items() for m in metrics)
    ours = [key for key in PAPER if key in measured]
    tasks = {task for task, _ in ours}
    rows = [["task", "metric", *results, *(f"paper's {SIZE} {CONDITIONS[i]}" for i in theirs if ours)]]

    def add(name: str, metric: str, values: list[dict | None], paper: tuple | None) -> None:
        unit = f"{metric} %" if metric in PERCENT else metric
        figures = [f"{paper[i]:g}" if paper else "-" for i in theirs if ours]
        rows.append([name, unit, *(_cell(x, metric) for x in values), *figures])

    for key in [*ours, *(key for key in measured if key[0] not in tasks)]:
        task, metric = key
        add(task, metric, [by_task.get(task, {}).get(metric) for by_task in results.values()], PAPER.get(key))
        for name, (group, means) in AVERAGES.items():
            if key == list(group)[-1] and group.keys() <= measured.keys():
                add(name, metric, [average(by_task, group) for by_task in results.values()], means)
    return rows


def average(by_task: dict, group: dict) -> dict | None:
    """Mean over a group of tasks; None unless all are there."""
    values = [by_task.get(task, {}).get(metric) for task, metric in group]
    return {"value": sum(x["value"] for x in values) / len(values), "stderr": None} if all(values) else None


def _cell(x: dict | None, metric: str) -> str:
    if x is None:
        return "-"
    scale, digits = (100, 2) if metric in PERCENT else (1, 4)
    return f"{scale * x['value']:.{digits}f}" + (f" ± {scale * x['stderr']:.{digits}f}" if x["stderr"] else "")
