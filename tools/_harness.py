"""lm-evaluation-harness on exported folders, for `evaluate`: its own Hugging Face model class, its tasks, our model.

Tasks of the paper that it lacks are made by tools/_recall.py.

What is chosen here and not left to its defaults:

- max_length: it cuts longer contexts from the left, and WikiText's documents into pieces of this length, so that figures
  depend on it. The same for all folders; by default the shortest sequence length that one of them was trained at.
- The token before a text that has none before it: end-of-text, which stood there in training. No BOS is added, which the
  models never saw.
- The model's code is this project's own: a folder's is not run.
- The softmax over the vocabulary is float32, also of bfloat16 models.
"""

import gc
import importlib.util
import os
from pathlib import Path

import torch

from ._task_table import SUITES, task_names

INSTALL = ".venv/bin/python -m pip install -c constraints.txt -e '.[eval]'"
NEEDED = ("lm_eval", "accelerate", "transformers")
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
LOCAL = ("json", "csv", "parquet", "text", "arrow")  # datasets' own readers of files
BOOTSTRAP = 1000  # resamples for the standard error of what is not a mean


def require_harness() -> None:
    """Raises ValueError where something is not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"--tasks needs {', '.join(missing)}, not installed here: {INSTALL}")


def check_folder(folder: Path) -> None:
    """Raises FileNotFoundError for a folder that transformers cannot load."""
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(
            f"{folder} cannot be loaded by transformers, for it lacks tokenizer.json. Convert the checkpoint again."
        )


def load_tasks(asked: list[str], include: list[Path], tokenizer=None) -> dict:
    """Tasks of suites and names with their data, and groups of them, before any model is loaded.

    tokenizer: of the texts that are made to a length in tokens; without one, for --fetch, tasks that make their texts are left
    out.

    Raises: ValueError for an unknown name or a task that lacks what it needs, FileNotFoundError for data that are not here and
    cannot be fetched.
    """
    from lm_eval.defaults import DEFAULT_OTHER_SEED
    from lm_eval.tasks import TaskManager

    from . import _recall

    names = task_names(asked)
    manager = TaskManager(include_path=include, include_defaults=False)
    theirs = [name for name in names if name not in _recall.NAMES]
    if not set(theirs) <= set(manager.all_tasks):  # reading the harness's own 14,000 takes it seconds
        manager = TaskManager(include_path=include)
    unknown = [name for name in theirs if name not in manager.all_tasks]
    if unknown:
        raise ValueError(
            f"unknown tasks: {', '.join(unknown)}. Suites are {', '.join(SUITES)}; else give a task or group of "
            "lm-evaluation-harness, or --include-path with the folder of your task files. Model folders come first, before "
            "--tasks."
        )
    offline = any(os.environ.get(name, "").upper() in ("1", "TRUE", "YES", "ON") for name in OFFLINE)
    found, missing, reason = {"tasks": {}, "groups": {}}, {}, ""
    for name in names:
        if name in _recall.MADE:
            found["tasks"] |= {name: _recall.make(name, tokenizer)} if tokenizer else {}
            continue
        try:
            ours = name in _recall.BASED
            loaded = {"tasks": {name: _recall.make(name, tokenizer)}} if ours else manager.load([name])
        except (OSError, ValueError) as e:
            config = {"dataset_path": _recall.BASED[name]} if ours else manager.task_index[name].cfg or {}
            missing[name], reason = " ".join(filter(None, map(config.get, ("dataset_path", "dataset_name")))), e
            if not offline:  # each further one would wait for the network as long again
                break
        except ImportError as e:
            raise ValueError(f"{name} needs a package that is not here: {e} It comes with: {INSTALL}") from e
        except AssertionError as e:  # a task that makes its own data, for a tokenizer that --model_args names
            raise ValueError(
                f"{name} cannot be loaded here: {e} Run lm_eval itself, as in the folder's README.md."
            ) from e
        else:
            found = {kind: found[kind] | loaded.get(kind, {}) for kind in found}
    if missing:
        raise _missing(missing, reason, asked, offline)
    for task in found["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return found


def _missing(missing: dict[str, str], reason: Exception, asked: list[str], offline: bool) -> FileNotFoundError:
    named = ", ".join(f"{task} ({dataset})" if dataset else task for task, dataset in missing.items())
    if set(missing.values()) <= set(LOCAL):
        return FileNotFoundError(f"the files of {named} cannot be read: {reason} Mend the paths in the task's file.")
    why = "; ".join(f"{name} is set" for name in OFFLINE if os.environ.get(name)) if offline else str(reason)
    return FileNotFoundError(
        f"the data of {named} are not on this machine and were not fetched ({why}). They need a network once: where there is "
        f"one, run `python -m interdomain.tools.evaluate --fetch --tasks {' '.join(asked)}` without HF_HUB_OFFLINE and copy "
        "the folder ~/.cache/huggingface (HF_HOME) here; or give tasks on local files by --include-path."
    )


def evaluate_folder(folder: Path, tasks: dict, *, start, max_length, batch_size, device, dtype, limit) -> dict:
    """One folder's `results`, {task: {metric: {"value", "stderr"}}}, and what the harness says of samples and versions.

    start: the token before a text that has none before it.
    """
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # the bootstrap: forks beside a GPU's threads are no help
    from lm_eval import evaluate
    from lm_eval.defaults import DEFAULT_OTHER_SEED
    from lm_eval.models.huggingface import HFLM

    import interdomain.hf  # noqa: F401  (registers the model)

    options = dict(batch_size=batch_size, softmax_dtype="float32", prefix_token_id=start)
    lm = HFLM(pretrained=str(folder), max_length=max_length, device=device, dtype=dtype or "auto", **options)
    lm.model.config.use_cache = False  # scoring reads no state; `generate` asks for one by itself
    torch.manual_seed(DEFAULT_OTHER_SEED)  # for tasks that sample, as the harness's own command has it
    found = {"results": {}, "samples": {}, "versions": {}, "shots": {}}
    for length, part in _by_length(tasks, max_length).items():
        if length > max_length:
            lm = HFLM(pretrained=lm.model, tokenizer=lm.tokenizer, max_length=length, **options)
        out = evaluate(lm, part, limit=limit, bootstrap_iters=BOOTSTRAP, log_samples=False)
        found["results"] |= {task: _metrics(values) for task, values in out["results"].items()}
        found["samples"] |= {task: n["effective"] for task, n in out["n-samples"].items()}
        found["versions"] |= out["versions"]
        found["shots"] |= out["n-shot"]
    del lm
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return found


def _by_length(tasks: dict, max_length: int) -> dict[int, dict]:
    """Tasks by how many tokens the model sees: max_length, or more for texts that are longer on purpose."""
    parts = {}
    for name, task in tasks["tasks"].items():
        part = parts.setdefault(max(max_length, getattr(task, "length", 0)), {"tasks": {}, "groups": {}})
        part["tasks"][name] = task
    if tasks["groups"]:
        parts[max_length]["groups"] = tasks["groups"]
    return parts


def _metrics(values: dict) -> dict:
    """The harness's "acc,none" and "acc_stderr,none" as acc: value, stderr; a filter other than `none` stays in the name."""
    found = {}
    for key, value in values.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        stderr = values.get(f"{metric}_stderr,{kind}")
        name = metric if kind == "none" else f"{metric} ({kind})"
        found[name] = {"value": float(value), "stderr": float(stderr) if isinstance(stderr, int | float) else None}
    return found
