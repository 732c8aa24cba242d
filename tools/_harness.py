"""lm-evaluation-harness on exported folders, for `evaluate`: its own Hugging Face model class, its tasks, our model.

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
import math
import os
from pathlib import Path

import torch

INSTALL = ".venv/bin/python -m pip install -c constraints.txt -e '.[eval]'"
NEEDED = ("lm_eval", "accelerate", "transformers")
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
LOCAL = ("json", "csv", "parquet", "text", "arrow")  # datasets' own readers of files
BOOTSTRAP = 1000  # resamples for the standard error of what is not a mean

# The paper's tables at 1.3B: task, metric -> softmax, interdomain, s4d. Accuracies in percent. Its perplexity of WikiText is
# the harness's per word: ln(perplexity) / bits per byte is the same in all its columns, the bytes of WikiText's words. Its
# bits per byte of LAMBADA, of which the harness has none, are no figure of their own: see LAMBADA_BYTES.
CONDITIONS = ("softmax", "interdomain", "s4d")
PAPER = {
    ("lambada_openai", "acc"): (39.43, 44.36, 25.64),
    ("piqa", "acc"): (69.42, 71.38, 71.00),
    ("hellaswag", "acc_norm"): (48.53, 54.27, 49.34),
    ("winogrande", "acc"): (54.22, 57.85, 53.83),
    ("arc_easy", "acc"): (65.87, 69.91, 60.86),
    ("arc_challenge", "acc_norm"): (33.02, 37.46, 33.36),
    ("social_iqa", "acc"): (40.28, 41.45, 41.10),
    ("boolq", "acc"): (61.28, 59.63, 60.37),
    ("lambada_openai", "perplexity"): (21.03, 14.76, 41.02),
    ("wikitext", "word_perplexity"): (20.55, 19.77, 25.27),
    ("wikitext", "bits_per_byte"): (0.8156, 0.8051, 0.8713),
}
COMMONSENSE = list(PAPER)[:8]
# Of LAMBADA; log2(perplexity) over them is the same in all columns, whatever the paper counts there.
LAMBADA_BITS, LAMBADA_BYTES = (1.1244, 0.9937, 1.3712), 3.908
AVERAGE, PAPER_AVERAGE = "average of the eight", (51.51, 54.54, 49.44)
SUITES = {
    "commonsense": [task for task, _ in COMMONSENSE],
    "lambada": ["lambada_openai"],
    "wikitext": ["wikitext"],
    "paper": [*(task for task, _ in COMMONSENSE), "wikitext"],
}
PERCENT = ("acc", "acc_norm", "exact_match")


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


def task_names(asked: list[str]) -> list[str]:
    """Suites taken apart; each task once."""
    return list(dict.fromkeys(task for name in asked for task in SUITES.get(name, [name])))


def load_tasks(names: list[str], include: list[Path]) -> dict:
    """The harness's tasks with their data, and groups of them, before any model is loaded.

    Raises: ValueError for an unknown name or a task that lacks what it needs, FileNotFoundError for data that are not here and
    cannot be fetched.
    """
    from lm_eval.defaults import DEFAULT_OTHER_SEED
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include, include_defaults=False)
    if not set(names) <= set(manager.all_tasks):  # reading the harness's own 14,000 takes it seconds
        manager = TaskManager(include_path=include)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise ValueError(
            f"unknown tasks: {', '.join(unknown)}. Suites are {', '.join(SUITES)}; else give a task or group of "
            "lm-evaluation-harness, or --include-path with the folder of your task files. Model folders come first, before "
            "--tasks."
        )
    offline = any(os.environ.get(name, "").upper() in ("1", "TRUE", "YES", "ON") for name in OFFLINE)
    found, missing, reason = {"tasks": {}, "groups": {}}, {}, ""
    for name in names:
        try:
            loaded = manager.load([name])
        except (OSError, ValueError) as e:
            config = manager.task_index[name].cfg or {}
            missing[name], reason = " ".join(filter(None, map(config.get, ("dataset_path", "dataset_name")))), e
            if not offline:  # each further one would wait for the network as long again
                break
        except (AssertionError, ImportError) as e:  # a task that makes its own data, as RULER's: packages, a tokenizer
            raise ValueError(
                f"{name} cannot be loaded here: {e} A task that wants --model_args or --metadata is for lm_eval itself: "
                "README.md in every model folder has its command."
            ) from e
        else:
            found = {kind: found[kind] | loaded[kind] for kind in found}
    if missing:
        raise _missing(missing, reason, names, offline)
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


def evaluate_folder(
    folder: Path,
    tasks: dict,
    *,
    start: int | None,
    max_length: int,
    batch_size: int,
    device: str,
    dtype: str | None,
    limit: int | None,
) -> dict:
    """One folder's `results`, {task: {metric: {"value", "stderr"}}}, and what the harness says of samples and versions.

    start: the token before a text that has none before it.
    """
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # the bootstrap: forks beside a GPU's threads are no help
    from lm_eval import evaluate
    from lm_eval.defaults import DEFAULT_OTHER_SEED
    from lm_eval.models.huggingface import HFLM

    import interdomain.hf  # noqa: F401  (registers the model)

    lm = HFLM(
        pretrained=str(folder),
        max_length=max_length,
        batch_size=batch_size,
        device=device,
        dtype=dtype or "auto",
        softmax_dtype="float32",
        prefix_token_id=start,
    )
    lm.model.config.use_cache = False  # scoring reads no state; `generate` asks for one by itself
    torch.manual_seed(DEFAULT_OTHER_SEED)  # for tasks that sample, as the harness's own command has it
    out = evaluate(lm, tasks, limit=limit, bootstrap_iters=BOOTSTRAP, log_samples=False)
    del lm
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return {
        "results": {task: _metrics(values) for task, values in out["results"].items()},
        "samples": {task: n["effective"] for task, n in out["n-samples"].items()},
        "versions": out["versions"],
        "shots": out["n-shot"],
    }


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


def table(results: dict[str, dict]) -> list[list[str]]:
    """Folders side by side, {label: {task: {metric: ...}}}, as rows of cells, the head first; the paper's figures beside."""
    labels = list(results)
    found = dict.fromkeys((t, m) for by_task in results.values() for t, ms in by_task.items() for m in ms)
    ours = [key for key in PAPER if key in found]
    tasks = {task for task, _ in ours}
    rest = [key for key in found if key[0] not in tasks]
    rows = [(key, [results[x].get(key[0], {}).get(key[1]) for x in labels], PAPER.get(key)) for key in ours + rest]
    if all(key in found for key in COMMONSENSE):
        means = [average(results[label]) for label in labels]
        rows.insert(len(COMMONSENSE), ((AVERAGE, "acc"), means, PAPER_AVERAGE))
    head = ["task", "metric", *labels, *(f"paper's 1.3B {c}" for c in CONDITIONS if ours)]
    return [head] + [
        [task, f"{metric} %" if metric in PERCENT else metric, *(_cell(x, metric) for x in values)]
        + [f"{x:g}" if paper else "-" for x in paper or CONDITIONS if ours]
        for (task, metric), values, paper in rows
    ]


def lambada_bits(results: dict[str, dict]) -> str | None:
    """What the paper calls bits per byte of LAMBADA, of every folder that has its perplexity."""
    found = {label: by_task.get("lambada_openai", {}).get("perplexity") for label, by_task in results.items()}
    bits = [f"{label} {math.log2(x['value']) / LAMBADA_BYTES:.4f}" for label, x in found.items() if x]
    theirs = ", ".join(f"{bits:g}" for bits in LAMBADA_BITS)
    rule = f"LAMBADA in the paper's bits per byte, log2(perplexity) / {LAMBADA_BYTES}"
    return f"{rule}: {', '.join(bits)}; the paper's 1.3B: {theirs}." if bits else None


def average(by_task: dict) -> dict | None:
    """Of the eight commonsense tasks; None unless all are there."""
    values = [by_task.get(task, {}).get(metric) for task, metric in COMMONSENSE]
    return {"value": sum(x["value"] for x in values) / len(values), "stderr": None} if all(values) else None


def _cell(x: dict | None, metric: str) -> str:
    if x is None:
        return "-"
    scale, digits = (100, 2) if metric in PERCENT else (1, 4)
    return f"{scale * x['value']:.{digits}f}" + (f" ± {scale * x['stderr']:.{digits}f}" if x["stderr"] else "")
