"""lm-evaluation-harness on exported folders, for `evaluate`: its own Hugging Face model class, its tasks, our model.

docs/evaluation.md lists the choices that change a figure. recall.py makes the tasks of the paper that the harness lacks.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from interdomain.tools._cli import install_command
from interdomain.tools._evaluate.task_table import SUITES, task_names

BOOTSTRAP = 1000  # resamples for the standard error of what is not a mean


def require_harness() -> None:
    """Raises ValueError where something is not installed."""
    missing = [name for name in ("lm_eval", "accelerate", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        advice = f"The extra `eval` has it: {install_command('eval')}"
        raise ValueError(f"--tasks needs {', '.join(missing)}, not installed here. {advice}")


def load_tasks(asked: list[str], include: list[str | Path], tokenizer=None, fetch: bool = False) -> dict[str, dict]:
    """Tasks of suites and names with their data, and groups of them, by name, before any model is loaded.

    tokenizer: of the texts that are made to a length in tokens; without one, tasks that make theirs are left out.
    fetch: ask the hub for what is not on this machine.
    Raises: ValueError for an unknown name or a task that lacks a package, FileNotFoundError for data that cannot be had.
    """
    if not fetch:
        # Only --fetch asks the hub: without a network its libraries try again for half a minute per data set. They read
        # this when they are imported. "error": each data set would be a warning.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("DATASETS_VERBOSITY", "error")

    from lm_eval.defaults import DEFAULT_OTHER_SEED
    from lm_eval.tasks import TaskManager

    from interdomain.tools._evaluate import recall

    names = task_names(asked)
    theirs = [name for name in names if name not in recall.NAMES]
    manager = TaskManager(include_path=include, include_defaults=False)
    if not set(theirs) <= set(manager.all_tasks):  # reading the harness's own 14,000 takes it seconds
        manager = TaskManager(include_path=include)
    if unknown := [name for name in theirs if name not in manager.all_tasks]:
        raise ValueError(
            f"unknown tasks: {', '.join(unknown)}. Give suites ({', '.join(SUITES)}), names of lm-evaluation-harness, or "
            "--include-path with the folder of your task files. Model folders come first, before --tasks."
        )
    known = {}
    for name in names:
        if name in recall.MADE and tokenizer is None:
            continue
        try:
            made = name in recall.NAMES
            known[name] = {"tasks": {name: recall.make(name, tokenizer)}} if made else manager.load([name])
        except (OSError, ValueError) as e:
            raise FileNotFoundError(
                f"the data of {name} cannot be read ({e}). They need a network once: run `interdomain evaluate "
                f"--fetch --tasks {' '.join(asked)}` where there is one, and copy ~/.cache/huggingface (HF_HOME) here."
            ) from e
        except ImportError as e:
            raise ValueError(f"{name} needs a package that is missing ({e}). Install: {install_command('eval')}") from e
    for loaded in known.values():  # as the harness's own command does
        for task in loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config("num_fewshot", 0)
            task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return known


def evaluate_folder(folder: Path, named: dict, tokenizer, device, *, max_length, batch_size, dtype, limit) -> dict:
    """One folder's `results`, {task: {metric: {"value", "stderr"}}}, and what the harness says of samples and versions.

    named: of `load_tasks`.
    """
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # the bootstrap: forks beside a GPU's threads are no help
    from lm_eval import evaluate
    from lm_eval.defaults import DEFAULT_OTHER_SEED
    from lm_eval.models import huggingface

    import interdomain.hf  # noqa: F401  (registers the model)

    options = dict(batch_size=batch_size, softmax_dtype="float32", prefix_token_id=tokenizer.eos_id)
    HFLM: Any = huggingface.HFLM  # its decorator hides the type
    lm = HFLM(pretrained=str(folder), max_length=max_length, device=str(device), dtype=dtype or "auto", **options)
    lm.model.config.use_cache = False  # scoring reads no state; `generate` asks for one by itself
    torch.manual_seed(DEFAULT_OTHER_SEED)  # for tasks that sample, as the harness's own command has it
    tasks = {kind: {} for kind in ("tasks", "groups")}
    for kind, known in tasks.items():
        for loaded in named.values():
            known |= loaded.get(kind, {})
    collected = {"results": {}, "samples": {}, "versions": {}, "shots": {}}
    for length, part in by_length(tasks, max_length).items():
        if length > max_length:
            lm = HFLM(pretrained=lm.model, tokenizer=lm.tokenizer, max_length=length, **options)
        out: Any = evaluate(lm, part, limit=limit, bootstrap_iters=BOOTSTRAP, log_samples=False)
        collected["results"] |= {task: metrics(values) for task, values in out["results"].items()}
        for kind, key in (("samples", "n-samples"), ("versions", "versions"), ("shots", "n-shot")):
            collected[kind] |= out[key]
    return collected


def by_length(tasks: dict, max_length: int) -> dict[int, dict]:
    """Tasks by how many tokens the model sees: max_length, or more for texts that are longer on purpose."""
    parts = {max_length: {"tasks": {}, "groups": tasks["groups"]}}
    for name, task in tasks["tasks"].items():
        length = max(max_length, getattr(task, "length", 0))
        parts.setdefault(length, {"tasks": {}, "groups": {}})["tasks"][name] = task
    return {length: part for length, part in parts.items() if part["tasks"]}


def metrics(values: dict) -> dict:
    """The harness's "acc,none" and "acc_stderr,none" as acc: value, stderr; a filter other than `none` stays in the name."""
    by_metric = {}
    for key, value in values.items():
        metric, comma, kind = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            stderr = values.get(f"{metric}_stderr,{kind}")
            name = metric if kind == "none" else f"{metric} ({kind})"
            stderr = float(stderr) if isinstance(stderr, int | float) else None
            by_metric[name] = {"value": float(value), "stderr": stderr}
    return by_metric
