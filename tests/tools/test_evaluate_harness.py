"""lm-evaluation-harness itself on exported folders, with tasks on local files, against our own model by hand."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from interdomain.model.pretrained import load_pretrained
from interdomain.tools import convert

from .checkpoints import small_model, write_checkpoint

pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")

CONDITIONS = ("interdomain", "softmax")
MAX_LENGTH = 90
CHOICES = [
    ("import", [" os", " banana fruit", "ed"]),
    ("def f(", ["x):", "  ", "self, y"]),
    ("return", [" 1", " self.x.y", " None"]),
    ("Straße: 漢字", [" a", "字", " für"]),
    ("class A:\n    pass\n\n\nclass", [" B:", " B(A):\n    def f(self):\n        return 1"]),
]
TEXT = "def f(x):\n    return [x, x + 1]\n\n\n" * 9
RECALLED = ("phonebook_16", "niah_single_1_1024")

# What a user's commands leave: status and standard error of each.
DRIVER = """
import contextlib, functools, io, json, sys
from interdomain.tools import evaluate
import lm_eval.tasks
said = []
for argv in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        status = evaluate.main(argv)
    said.append((status, err.getvalue().strip().split(chr(10))[-1]))
    # Reading the harness's own tasks takes it seconds, and is left out from here on.
    lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
print(json.dumps(said))
"""


def write_task(folder, name, kind, rows, metrics, **more):
    """A task on a local file (JSON is YAML)."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test"}
    task = {"task": name, "output_type": kind, "metric_list": [{"metric": metric} for metric in metrics]}
    (folder / f"{name}.yaml").write_text(json.dumps({**data, **task, "metadata": {"version": 1.0}, **more}))


@pytest.fixture(scope="module")
def ran(tmp_path_factory, tokenizer):
    """(folders, results, those of made tasks, what each further command said)."""
    path = tmp_path_factory.mktemp("harness")
    folders, tasks = [path / condition for condition in CONDITIONS], path / "tasks"
    tasks.mkdir()
    for folder in folders:
        checkpoint = write_checkpoint(path / f"run-{folder.name}", small_model(folder.name), tokenizer)
        assert convert.main([str(checkpoint), "--output", str(folder)]) == 0
        (folder / "modeling_interdomain.py").write_text("raise SystemExit('the folder's code ran')")
    rows = [{"q": q, "c": c, "a": 0} for q, c in CHOICES]
    choice = dict(doc_to_text="{{q}}", doc_to_target="{{a}}", target_delimiter="", doc_to_choice="{{c}}")
    write_task(tasks, "choice", "multiple_choice", rows, ["acc", "acc_norm"], **choice)
    write_task(tasks, "gone", "multiple_choice", rows, ["acc"], dataset_path="nobody/nothing", **choice)
    texts = dict(doc_to_text="", doc_to_target="{{t}}")
    write_task(tasks, "rolling", "loglikelihood_rolling", [{"t": TEXT}], ["bits_per_byte"], **texts)

    include = ["--include-path", tasks, "--output"]
    options = ["--max-length", MAX_LENGTH, "--batch-size", 3]
    commands = [
        [*folders, "--tasks", "choice", "rolling", *include, path / "out", *options],
        [folders[0], "--tasks", *RECALLED, "--limit", 2, "--output", path / "recalled"],
        [folders[0], "--tasks", "choice", "gone", *include, path / "none"],
        [folders[0], "--tasks", "no_such_task", "choice", *include, path / "none"],
        ["--fetch", "--tasks", "phonebook_16", "based_nq"],
        ["--fetch", "--tasks", "choice", "--include-path", tasks],
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps([[str(word) for word in command] for command in commands])],
        capture_output=True,
        text=True,
        cwd=tasks,  # not where a folder is named as the package
        env={**os.environ, **offline},
    )
    assert done.returncode == 0, done.stderr
    assert not (path / "none").exists()
    said = json.loads(done.stdout.splitlines()[-1])
    assert [status for status, _ in said[:2]] == [0, 0], said[:2]
    results, recalled = (json.loads((path / name / "evaluation.json").read_text()) for name in ("out", "recalled"))
    return folders, results, recalled, said[2:]


@torch.no_grad()
def log_likelihoods(model, tokens, scored):
    """Of the last `scored` of tokens, after those before them, each."""
    logits = model(torch.tensor([tokens[:-1]]))[0].double().log_softmax(-1)
    return logits[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])][-scored:]


@pytest.mark.parametrize("i", range(len(CONDITIONS)), ids=CONDITIONS)
def test_a_long_text_and_choices(ran, i):
    """A text in pieces of --max-length: the first after an end-of-text token, the last with as much before it as fits. A
    choice's tokens are those that it adds to its question; per byte of the choice, in acc_norm."""
    folders, results, *_ = ran
    found = results["tasks"][str(folders[i])]["results"]
    model, tokenizer = load_pretrained(folders[i])
    tokens, total, end = tokenizer.encode(TEXT), 0.0, 0
    assert len(tokens) > 2 * MAX_LENGTH
    assert len(tokens) % MAX_LENGTH
    while end < len(tokens):
        scored = min(MAX_LENGTH, len(tokens) - end)
        end += scored
        piece = [tokenizer.eos_id, *tokens[:end]] if end <= MAX_LENGTH else tokens[end - MAX_LENGTH - 1 : end]
        total -= log_likelihoods(model, piece, scored).sum().item() / math.log(2)
    bits = found["rolling"]["bits_per_byte"]["value"]
    assert bits == pytest.approx(total / len(TEXT.encode()), rel=1e-5)

    right = {"acc": 0, "acc_norm": 0}
    for question, choices in CHOICES:
        sums = []
        for choice in choices:
            tokens = tokenizer.encode(question + choice)
            sums.append(log_likelihoods(model, tokens, len(tokens) - len(tokenizer.encode(question))).sum().item())
        norms = [x / len(c) for x, c in zip(sums, choices, strict=True)]
        for metric, scores in (("acc", sums), ("acc_norm", norms)):
            right[metric] += (max(scores) == scores[0]) / len(CHOICES)
    assert {metric: x["value"] for metric, x in found["choice"].items()} == pytest.approx(right)


def test_what_is_recorded(ran):
    folders, results, *_ = ran
    assert (results["status"], results["options"]["max_length"]) == ("complete", MAX_LENGTH)
    samples = results["tasks"][str(folders[1])]["samples"]
    assert {task: n["effective"] for task, n in samples.items()} == {"choice": 5, "rolling": 1}
    assert {"lm_eval", "transformers", "PyTorch", "CPU"} <= set(results["environment"])


def test_tasks_that_cannot_be(ran):
    gone, unknown, made, fetched = ran[3]
    assert [status for status, _ in (gone, unknown, made, fetched)] == [2, 2, 2, 0]
    assert "the data of gone cannot be read" in gone[1]
    assert "evaluate --fetch --tasks choice gone`" in gone[1]
    assert "unknown tasks: no_such_task" in unknown[1]
    assert "the data of based_nq cannot be read" in made[1]


def test_texts_that_are_made_to_a_length(ran):
    """Written, and beyond the length that the model was trained at."""
    recalled = ran[2]
    (out,) = recalled["tasks"].values()
    assert [out["samples"][task]["effective"] for task in RECALLED] == [2, 2]
    assert {task: list(out["results"][task]) for task in RECALLED} == {
        RECALLED[0]: ["exact_match"],
        RECALLED[1]: ["contains"],
    }
    assert recalled["options"]["max_length"] < 1024
