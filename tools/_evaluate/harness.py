"""lm-evaluation-harness on exported folders, for `evaluate`: its own Hugging Face model class, its tasks, our model.

docs/evaluation.md lists the choices that change a figure. recall.py makes the tasks of the paper that the harness lacks.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from interdomain.tools._evaluate.task_table import SUITES, task_names

BOOTSTRAP = 1000  # resamples for the standard error of what is not a mean


def load_tasks(
    asked: list[str], include: list[str | Path], tokenizer=None, fetch: bool = False
) -> dict[str, dict]:
    """Loads tasks with their data, before any model is loaded.

    Args:
        asked: Suites, tasks and groups of tasks.
        include: Folders with task files of the user's.
        tokenizer: Of the texts that are made to a length in tokens. Without one, tasks that make theirs are left out.
        fetch: Asks the hub for what is not on this machine.
    Raises:
        ValueError: An unknown name, or a mistake in a task's file.
        FileNotFoundError: Data that cannot be had.
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
    if not set(theirs) <= set(
        manager.all_tasks
    ):  # reading the harness's own 14,000 takes it seconds
        manager = TaskManager(include_path=include)
    if unknown := [name for name in theirs if name not in manager.all_tasks]:
        raise ValueError(
            f"unknown tasks: {', '.join(unknown)}. Give suites ({', '.join(SUITES)}), names of lm-evaluation-harness, or "
            "--include-path with the folder of your task files, each of them YAML. Model folders come first, before --tasks."
        )
    loaded = {}
    for name in names:
        if name in recall.MADE and tokenizer is None:
            continue
        try:
            if name in recall.NAMES:
                loaded[name] = {"tasks": {name: recall.make(name, tokenizer)}}
            else:
                loaded[name] = manager.load([name])
        except OSError as e:
            raise FileNotFoundError(
                f"the data of {name} cannot be read ({e}). A local file must be where the task says. {hub_advice(asked)}"
            ) from e
        except Exception as e:  # a mistake in a task's file may be found anywhere in the harness
            raise ValueError(f"{mistake_in(name, e)} {hub_advice(asked)}") from e
        for task in loaded[name]["tasks"].values():  # as the harness's own command does
            if task.get_config("num_fewshot") is None:
                task.set_config("num_fewshot", 0)
            task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return loaded


def hub_advice(asked: list[str]) -> str:
    """What to do about data of the hub that are not on this machine."""
    return (
        f"Data of the hub need a network once: run `interdomain evaluate --fetch --tasks {' '.join(asked)}` where there is "
        "one, and copy ~/.cache/huggingface (HF_HOME) here."
    )


def mistake_in(name: str, error: Exception) -> str:
    """An error about a task that the harness could not make or evaluate."""
    words = " ".join(str(error).split())
    return (
        f"the task {name} failed ({type(error).__name__}: {words}). If its file is yours, compare the splits, fields, filters "
        "and functions that it names with its data and the harness's documentation."
    )


def evaluate_folder(
    folder: Path, named: dict, tokenizer, device, max_length: int, args
) -> Iterator[tuple[str, dict]]:
    """Evaluates an exported model on one task or group after the other.

    Args:
        named: From `load_tasks`.
        max_length: Tokens that the model sees at most.
        args: The options batch_size, dtype and limit.
    Yields:
        The name of each, and its `results`, {task: {metric: {"value", "stderr"}}}, with what the harness says of samples
        and versions.
    Raises:
        ValueError: A mistake in a task's file that shows only now.
    """
    os.environ.setdefault(
        "DISABLE_MULTIPROC", "1"
    )  # the bootstrap: forks beside a GPU's threads are no help
    from lm_eval import evaluate
    from lm_eval.defaults import DEFAULT_OTHER_SEED

    import interdomain.hf  # noqa: F401  (registers the model)
    from interdomain.tools._evaluate.harness_model import FolderModel, HarnessTokenizer

    options: Any = dict(
        batch_size=args.batch_size, softmax_dtype="float32", tokenizer=HarnessTokenizer(tokenizer)
    )
    placed = dict(device=str(device), dtype=args.dtype or "auto")
    model = FolderModel(pretrained=str(folder), max_length=max_length, **placed, **options)
    model.model.config.use_cache = (
        False  # scoring reads no state; `generate` asks for one by itself
    )
    for name, loaded in named.items():
        torch.manual_seed(
            DEFAULT_OTHER_SEED
        )  # for tasks that sample, as the harness's own command has it
        collected = {"results": {}, "samples": {}, "versions": {}, "shots": {}}
        for length, part in by_length(loaded, max_length).items():
            sees = model
            if length > max_length:
                sees = FolderModel(pretrained=model.model, max_length=length, **options)
            try:
                out: Any = evaluate(
                    sees, part, limit=args.limit, bootstrap_iters=BOOTSTRAP, log_samples=False
                )
            except RuntimeError:  # such as a GPU that is out of memory
                raise
            except Exception as e:
                raise ValueError(mistake_in(name, e)) from e
            collected["results"] |= {
                task: metrics(values) for task, values in out["results"].items()
            }
            collected["samples"] |= out["n-samples"]
            collected["versions"] |= out["versions"]
            collected["shots"] |= out["n-shot"]
        yield name, collected


def by_length(tasks: dict, max_length: int) -> dict[int, dict]:
    """Tasks by how many tokens the model sees: max_length, or more for texts that are longer on purpose."""
    parts = {}
    for name, task in tasks["tasks"].items():
        length = max(max_length, getattr(task, "length", 0))
        groups = tasks.get("groups", {}) if length == max_length else {}
        part = parts.setdefault(length, {"tasks": {}, "groups": groups})
        part["tasks"][name] = task
    return parts


def metrics(values: dict) -> dict:
    """The harness's "acc,none" and "acc_stderr,none" as acc: value, stderr; a filter other than `none` stays in the name."""
    by_metric = {}
    for key, value in values.items():
        metric, comma, kind = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            stderr = values.get(f"{metric}_stderr,{kind}")
            stderr = float(stderr) if isinstance(stderr, int | float) else None
            name = metric if kind == "none" else f"{metric} ({kind})"
            by_metric[name] = {"value": float(value), "stderr": stderr}
    return by_metric
