"""lm-evaluation-harness itself on exported folders, with tasks on local files, against our own model by hand."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from interdomain.model.generation import Sampling, generate
from interdomain.model.pretrained import load_pretrained
from interdomain.tools import convert

from .checkpoints import small_model, write_checkpoint

tokenizers = pytest.importorskip("tokenizers", reason="the extra `dev` is not installed")
lm_eval = pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
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
PROMPTS = ["import os\n", "class X:\n    def f", "x"]  # of different lengths: padded on the left
WRITTEN = 6

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
RECALLED = ("phonebook_16", "niah_single_1_1024")


def write_task(folder, name, kind, rows, metrics, **more):
    """A task on a local file (JSON is YAML)."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "output_type": kind,
        "metric_list": [{"metric": metric} for metric in metrics],
        "metadata": {"version": 1.0},
        **more,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))
    return task


def written(folder, prompt):
    """Our own text, decoded by the tokenizer that the harness has: it makes something else of broken bytes."""
    model, tokenizer = load_pretrained(folder)
    options = dict(max_tokens=WRITTEN, sampling=Sampling(temperature=0), vocab_size=tokenizer.vocab_size)
    ids = [step[0] for step in generate(model, [tokenizer.encode(prompt)], **options)]
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).decode(ids)


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
    options = dict(doc_to_text="{{q}}", doc_to_target="{{a}}", target_delimiter="")
    task = write_task(tasks, "choice", "multiple_choice", rows, ["acc", "acc_norm"], doc_to_choice="{{c}}", **options)
    (tasks / "gone.yaml").write_text(json.dumps({**task, "task": "gone", "dataset_path": "nobody/nothing"}))
    metrics = ["bits_per_byte", "word_perplexity"]
    texts = dict(doc_to_text="", doc_to_target="{{t}}")
    write_task(tasks, "rolling", "loglikelihood_rolling", [{"t": TEXT}], metrics, **texts)
    rows = [{"q": prompt, "a": written(folders[0], prompt)} for prompt in PROMPTS]
    until = {"until": ["<never>"], "max_gen_toks": WRITTEN}
    write_task(tasks, "write", "generate_until", rows, ["exact_match"], generation_kwargs=until, **options)

    include = ["--include-path", tasks, "--output"]
    names = ["choice", "rolling", "write"]
    commands = [
        [*folders, "--tasks", *names, *include, path / "out", "--max-length", MAX_LENGTH, "--batch-size", 3],
        [folders[0], "--tasks", *RECALLED, "--limit", 2, "--output", path / "recalled"],
        [folders[0], "--tasks", "choice", "gone", *include, path / "none"],
        [folders[0], "--tasks", "no_such_task", "choice", *include, path / "none"],
        ["--fetch", "--tasks", "phonebook_16", "based_nq"],
        ["--fetch", "--tasks", "choice", "--include-path", tasks],
    ]
    commands = [[str(word) for word in command] for command in commands]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(commands)],
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


def value(results, folder, task, metric):
    return results["tasks"][folder.name]["results"][task][metric]["value"]


@pytest.mark.parametrize("i", range(len(CONDITIONS)), ids=CONDITIONS)
def test_a_long_text(ran, i):
    """In pieces of --max-length: the first after an end-of-text token, the last with as much before it as fits."""
    folders, results, *_ = ran
    model, tokenizer = load_pretrained(folders[i])
    tokens, total, end = tokenizer.encode(TEXT), 0.0, 0
    assert len(tokens) > 2 * MAX_LENGTH
    assert len(tokens) % MAX_LENGTH
    while end < len(tokens):
        scored = min(MAX_LENGTH, len(tokens) - end)
        end += scored
        piece = [tokenizer.eos_id, *tokens[:end]] if end <= MAX_LENGTH else tokens[end - MAX_LENGTH - 1 : end]
        total += log_likelihoods(model, piece, scored).sum().item()
    assert value(results, folders[i], "rolling", "bits_per_byte") == pytest.approx(
        -total / math.log(2) / len(TEXT.encode()), rel=1e-5
    )


@pytest.mark.parametrize("i", range(len(CONDITIONS)), ids=CONDITIONS)
def test_choices(ran, i):
    """A choice's tokens are those that it adds to its question; per byte of the choice, in acc_norm."""
    folders, results, *_ = ran
    model, tokenizer = load_pretrained(folders[i])
    right = {"acc": 0, "acc_norm": 0}
    for question, choices in CHOICES:
        n = len(tokenizer.encode(question))
        sums = []
        for choice in choices:
            tokens = tokenizer.encode(question + choice)
            sums.append(log_likelihoods(model, tokens, len(tokens) - n).sum().item())
        right["acc"] += max(range(len(sums)), key=sums.__getitem__) == 0
        norms = [x / len(c) for x, c in zip(sums, choices, strict=True)]
        right["acc_norm"] += max(range(len(sums)), key=norms.__getitem__) == 0
    for metric, count in right.items():
        assert value(results, folders[i], "choice", metric) == pytest.approx(count / len(CHOICES)), metric


def test_written_text(ran):
    """transformers' generate on a left-padded batch writes what our own does; the other model writes something else."""
    folders, results, *_ = ran
    assert value(results, folders[0], "write", "exact_match") == 1
    assert value(results, folders[1], "write", "exact_match") < 1
    assert (results["status"], results["options"]["max_length"]) == ("complete", MAX_LENGTH)
    assert set(results["tasks"]["softmax"]["samples"].items()) == {("choice", 5), ("rolling", 1), ("write", 3)}
    assert {"lm_eval", "transformers", "PyTorch", "CPU"} <= set(results["environment"])


def test_tasks_that_cannot_be(ran):
    gone, unknown, made, fetched = ran[3]
    assert [status for status, _ in (gone, unknown, made, fetched)] == [2, 2, 2, 0]
    assert "the data of gone cannot be read" in gone[1]
    assert "evaluate --fetch --tasks choice gone`" in gone[1]
    assert "unknown tasks: no_such_task" in unknown[1]
    assert "the data of based_nq cannot be read" in made[1]


def test_texts_that_are_made_to_a_length(ran):
    """Beyond the length that the model was trained at, and with what the other tasks of the same command see unchanged."""
    recalled = ran[2]
    (results,) = recalled["tasks"].values()
    assert results["samples"] == dict.fromkeys(RECALLED, 2)
    assert {task: list(metrics) for task, metrics in results["results"].items()} == {
        "niah_single_1_1024": ["contains"],
        "phonebook_16": ["exact_match"],
    }
    assert recalled["options"]["max_length"] < 1024
