"""Runs lm-evaluation-harness on exported models, for `evaluate`: the harness's tasks and our model.

docs/evaluation.md lists the choices that change a figure. recall.py makes the paper's tasks that
the harness lacks.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from interdomain.data import Tokenizer
from interdomain.tools._evaluate.task_table import SUITES, task_names

BOOTSTRAP_SAMPLES = 1000  # for the standard error of metrics that are not means

Tasks = dict[str, dict]  # the harness's "tasks" and "groups", by the name that was asked for


def load_tasks(
    asked: list[str],
    include: list[str | Path],
    tokenizer: Tokenizer | None = None,
    fetch: bool = False,
) -> Tasks:
    """Loads tasks with their data, before any model is loaded.

    Args:
        asked: Suites (groups of tasks in task_table.py), tasks, and groups of the harness's tasks.
        include: Folders with task files of the user.
        tokenizer: Counts the tokens of texts that are made to a length. None leaves out the tasks
            that recall.py makes without data.
        fetch: True asks the hub for data that are not on this machine.

    Raises:
        ValueError: A name is unknown, or a task's file has a mistake.
        FileNotFoundError: Data cannot be read.
    """
    if not fetch:
        # Without a network the hub's libraries would try again for half a minute per data set, and
        # warn of each. They read these variables when they are imported.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("DATASETS_VERBOSITY", "error")
    from lm_eval.defaults import DEFAULT_OTHER_SEED
    from lm_eval.tasks import TaskManager

    from interdomain.tools._evaluate import recall

    # Reading the names of the harness's own tasks takes seconds.
    names = task_names(asked)
    manager = None
    if not set(names) <= set(recall.NAMES):
        manager = TaskManager(include_path=include)
        unknown = set(names) - set(recall.NAMES) - set(manager.all_tasks)
        if unknown:
            raise ValueError(
                f"unknown tasks: {', '.join(sorted(unknown))}. Give suites ({', '.join(SUITES)}), names of "
                "lm-evaluation-harness, or --include-path with the folder of your task files, each of them YAML. Model "
                "folders come first, before --tasks."
            )

    hub_advice = (
        f"Data of the hub need a network once: run `interdomain evaluate --fetch --tasks {' '.join(asked)}` where there is "
        "one, and copy ~/.cache/huggingface (HF_HOME) here."
    )
    loaded = {}
    for name in names:
        if name in recall.MADE and tokenizer is None:
            continue
        try:
            if name in recall.NAMES:
                loaded[name] = {"tasks": {name: recall.make(name, tokenizer)}}
            else:
                assert manager is not None
                loaded[name] = manager.load([name])
        except OSError as e:
            raise FileNotFoundError(
                f"the data of {name} cannot be read ({e}). A local file must be where the task says. {hub_advice}"
            ) from e
        except Exception as e:  # a mistake in a task's file may appear anywhere in the harness
            raise ValueError(f"{describe_mistake(name, e)} {hub_advice}") from e
        # The harness's own command sets these, too.
        for task in loaded[name]["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config("num_fewshot", 0)
            task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return loaded


def describe_mistake(name: str, error: Exception) -> str:
    """Returns the error message for a task that the harness could not make or evaluate.

    Args:
        name: The task.
        error: What the harness raised.
    """
    text = " ".join(str(error).split())
    return (
        f"the task {name} failed ({type(error).__name__}: {text}). If its file is yours, compare the splits, fields, filters "
        "and functions that it names with its data and the harness's documentation."
    )


def evaluate_folder(
    folder: Path,
    named: Tasks,
    tokenizer: Tokenizer,
    device: torch.device,
    max_length: int,
    args: argparse.Namespace,
) -> Iterator[dict[str, dict]]:
    """Evaluates an exported model on one task or group after the other.

    Args:
        folder: The exported model.
        named: The tasks, from `load_tasks`.
        tokenizer: The model's tokenizer.
        device: The device that the model runs on.
        max_length: The number of tokens that the model sees at most. A text that is made to a
            length is seen whole.
        args: The options batch_size, dtype and limit.

    Yields:
        For each task or group its `results`, with a "value" and a "stderr" of each metric of each
        task, and the harness's `samples` (numbers of samples), `versions` and `shots` (examples in
        a prompt).

    Raises:
        ValueError: A mistake in a task's file appears only now.
    """
    # The bootstrap would fork beside a GPU's threads.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    from lm_eval import evaluate
    from lm_eval.defaults import DEFAULT_OTHER_SEED

    import interdomain.hf  # noqa: F401  (registers the model)
    from interdomain.tools._evaluate.harness_model import FolderModel, HarnessTokenizer

    model: Any = FolderModel(
        pretrained=str(folder),
        tokenizer=HarnessTokenizer(tokenizer),
        device=str(device),
        dtype=args.dtype or "auto",
        softmax_dtype="float32",
        batch_size=args.batch_size,
    )
    # Scoring needs no state; `generate` asks for one itself.
    model.model.config.use_cache = False
    for name, tasks in named.items():
        made_lengths = [getattr(task, "length", 0) for task in tasks["tasks"].values()]
        model.context_length = max(max_length, *made_lengths)
        torch.manual_seed(DEFAULT_OTHER_SEED)  # for tasks that sample
        # A mistake in a task's file may appear only now.
        try:
            out: Any = evaluate(
                model,
                tasks,
                limit=args.limit,
                bootstrap_iters=BOOTSTRAP_SAMPLES,
                log_samples=False,
            )
        except RuntimeError:  # such as a GPU that is out of memory
            raise
        except Exception as e:
            raise ValueError(describe_mistake(name, e)) from e
        yield {
            "results": {task: metrics(values) for task, values in out["results"].items()},
            "samples": out["n-samples"],
            "versions": out["versions"],
            "shots": out["n-shot"],
        }


def metrics(values: dict[str, Any]) -> dict[str, dict]:
    """Returns the metrics of a task with their standard errors.

    Args:
        values: As the harness names them: "acc,none" and "acc_stderr,none", with the name of a
            filter of the answers.

    Returns:
        "value" and "stderr" of each metric. A filter other than `none` stays in the metric's name.
    """
    by_metric = {}
    for key, value in values.items():
        metric, comma, filter_name = key.partition(",")
        # Other entries are the task's name and the standard errors.
        if not comma or metric.endswith("_stderr"):
            continue
        stderr = values.get(f"{metric}_stderr,{filter_name}")
        if not isinstance(stderr, int | float):  # "N/A"
            stderr = None
        if filter_name != "none":
            metric += f" ({filter_name})"
        by_metric[metric] = {"value": float(value), "stderr": stderr}
    return by_metric
