"""evaluate: perplexity against a whole forward pass, the harness against our own model, tables, and what can be wrong."""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import sentencepiece
import torch

from interdomain.checkpoint.pretrained import load_model, load_pretrained
from interdomain.data import load_tokenizer
from interdomain.model import cell_of
from interdomain.model.generation import Sampling, generate
from interdomain.tools import convert, evaluate
from interdomain.tools._evaluate import length as _length
from interdomain.tools._evaluate import perplexity, task_table
from interdomain.tools._evaluate.perplexity import read_spans
from interdomain.tools._paper import PAPER

from ..model.common import small_config
from .checkpoints import edit_run, small_model, write_checkpoint

CONDITIONS = ("interdomain", "softmax")
# Different lengths, characters of several bytes, and one that is too short for anything.
TEXTS = [
    "def f(x):\n    return x\n" * 30,
    "Straße, 漢字, 🙂. " * 40,
    "short",
    "import os, sys\n" * 25,
]

# Through the harness.
MAX_LENGTH = 90
TEXT = "def f(x):\n    return [x, x + 1]\n\n\n" * 9
RECALLED = ("phonebook_16", "niah_single_1_1024")

# What a user's commands leave: status and standard error of each.
DRIVER = """
import contextlib, functools, io, json, sys
from interdomain.tools import evaluate
said = []
for argv in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        status = evaluate.main(argv)
    said.append((status, err.getvalue().strip().split(chr(10))[-1]))
    # Reading the harness's own tasks takes it seconds, and is left out from here on. Imported when the tool has.
    import lm_eval.tasks
    lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory, exported_model):
    """One folder per condition, made by convert."""
    path = tmp_path_factory.mktemp("evaluate")
    for condition in CONDITIONS:
        shutil.copytree(exported_model(condition)[1], path / condition)
        (path / condition / "modeling_interdomain.py").write_text(
            "raise SystemExit('the folder's code ran')"
        )
    return [path / condition for condition in CONDITIONS]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "rows.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    return path


def run(*argv):
    assert evaluate.main([str(a) for a in argv]) == 0


# The protocol


def test_spans_tile_each_document_or_the_training_stream(corpus, tokenizer):
    documents = [tokenizer.encode(text, add_eos=True) for text in TEXTS]
    tiles = [ids[i : i + 60] for ids in documents for i in range(0, len(ids) - 59, 60)]
    stream = [token for ids in documents for token in ids]
    packed = [stream[: len(stream) // 700 * 700]]
    for size, options, wanted in (
        (60, {}, tiles),
        (60, {"limit": 2}, tiles[:2]),
        (700, {"packed": True}, packed),
    ):
        assert (
            read_spans(str(corpus), tokenizer, size, text_field="body", **options)[0].tolist()
            == wanted
        ), options
    ids, sizes = read_spans(str(corpus), tokenizer, len(stream), text_field="body", packed=True)
    assert sizes.sum() == sum(len(text.encode()) for text in TEXTS)
    assert (sizes[ids == tokenizer.eos_id] == 0).all()


def unigram(path):
    """A tokenizer that normalises, has no bytes to fall back on, and has no exact counterpart in transformers."""
    options = dict(
        model_type="unigram", vocab_size=60, hard_vocab_limit=False, minloglevel=2, pad_id=-1
    )
    with path.open("wb") as file:
        lines = (line for text in (TEXTS[0], TEXTS[3], TEXT) for line in text.splitlines())
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=lines, model_writer=file, **options
        )
    return load_tokenizer(path)


@torch.no_grad()
def direct(model, spans, length, *start) -> torch.Tensor:
    """NLL [windows, length] without state or chunks: the windows as whole sequences."""
    windows = [
        span[i : i + length] for span in spans[0] for i in range(0, len(span) - length + 1, length)
    ]
    inputs = [[*start, *window[:-1]] for window in windows]
    logits = model(torch.tensor(inputs)).double().log_softmax(-1)[:, len(start) - 1 :]
    return -logits.gather(-1, torch.tensor(np.array(windows)).long()[..., None])[..., 0]


def test_results(folders, corpus, tokenizer, tmp_path, capsys, monkeypatch, refused):
    """Two corpora and a mean, read in pieces; a second run into the same folder is refused."""
    monkeypatch.setattr(perplexity, "PREFILL_CHUNK", 16)
    second = tmp_path / "second.txt"
    second.write_text(TEXTS[3])
    rows = tmp_path / "first.jsonl"
    rows.write_text(corpus.read_text().replace('"body"', '"text"'))
    out = tmp_path / "out"
    # 60 does not divide the span of 80 tokens; 16 divides neither.
    options = (
        f"--lengths 80 60 80 --batch-size 3 --output {out} --perplexity {rows} {second}".split()
    )
    run(*folders, *options)
    contents = json.loads((out / "evaluation.json").read_text())
    assert contents["status"] == "complete"
    facts = [
        (row["size"], row["condition"], row["step"])
        for row in contents["tables"]["folders"]["rows"]
    ]
    assert facts == [
        (*cell_of(small_config(name, vocab_size=420), "debug"), 100) for name in CONDITIONS
    ]
    perplexities = []
    for row in contents["perplexity"]:
        spans = read_spans(row["corpus"], tokenizer, 80)
        losses = direct(load_model(row["folder"]), spans, row["length"], tokenizer.eos_id)
        perplexities.append(losses.mean().exp().item())
        assert row["tokens"] == losses.numel()
        assert row["perplexity"] == pytest.approx(perplexities[-1], rel=1e-5)
        bits = losses.sum().item() / math.log(2) / spans[1, :, : row["length"]].sum()
        assert row["bits per byte"] == pytest.approx(bits, rel=1e-6)
    assert len(perplexities) == 2 * 2 * 2  # folders, corpora, lengths
    # Of the first folder at 60 tokens: 80 is second at each corpus.
    page = (out / "evaluation.md").read_text()
    assert f"| mean of 2 | 60 | {(perplexities[0] + perplexities[2]) / 2:.2f} |" in page
    assert page in capsys.readouterr().out
    refused(evaluate.main, [*folders, *options], "never overwritten")


def test_bad_requests(folders, corpus, tmp_path, monkeypatch, refused):
    out, model = tmp_path / "out", folders[0]
    text = ("--perplexity", corpus, "--text-field", "body", "--output", out)
    damaged = shutil.copytree(model, tmp_path / "damaged")
    data = bytearray((damaged / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (damaged / "model.safetensors").write_bytes(data)
    for argv, words in (
        ([*text], "no folder was given"),
        ([damaged, *text], "not as it was written"),
        ([model, *text, "--lengths", 0], "--lengths must be at least 1"),
        ([model, *text, "--lengths", 5000], "its longest document has"),
        ([model, "--perplexity", tmp_path / "no.txt", "--output", out], "No file matches"),
        ([model, "--perplexity", corpus, "--output", out], "text"),
        (["--perplexity", corpus, "--fetch"], "has nothing to fetch"),
        (["--perplexity", "paper", corpus, "--fetch"], "stands alone"),
    ):
        refused(evaluate.main, argv, words)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    # The default is tasks.
    refused(
        evaluate.main,
        [model],
        "this needs lm_eval, which is not installed. The extra `eval` has it",
    )
    assert not out.exists()


def test_the_paper_s_averages_are_those_of_its_rows():
    for group in ("commonsense", "based"):
        rows = [*task_table.TASKS[group].values()]
        assert np.mean(rows, axis=0) == pytest.approx(PAPER["averages"][group]["values"], abs=0.006)
    for condition, means in PAPER["length"][_length.MEAN].items():
        rows = [PAPER["length"][corpus][condition] for corpus in _length.IN_MEAN]
        assert np.mean(rows, axis=0) == pytest.approx(means, abs=0.00501)


def test_the_table_has_folders_and_paper_side_by_side():
    ours = {}
    for i, key in enumerate([*task_table.TASKS["commonsense"], *task_table.TASKS["modeling"]]):
        task, metric = key.split()
        ours.setdefault(task, {})[metric] = {"value": 0.1 * i, "stderr": 0.01}
    ours["lambada_openai"]["other"] = {
        "value": 3.0,
        "stderr": None,
    }  # not in the paper's table: left to the JSON
    ours["mine"] = {"acc": {"value": 0.5, "stderr": None}}
    half = {task: metrics for task, metrics in ours.items() if task != "boolq"}
    every = {("1.3B", condition) for condition in ("softmax", "interdomain", "s4d")}
    table = task_table.task_rows({"a": ours, "b": half}, every)
    paper = [f"paper's 1.3B {condition}" for condition in ("softmax", "interdomain", "s4d")]
    assert [*table[0]] == ["task", "metric", "a", "b", *paper]
    rows = [[*row.values()] for row in table]
    assert len(rows) == 8 + 1 + 3 + 1  # with their average; a task of one's own
    assert rows[1] == ["piqa", "acc %", "10.00 ± 1.00", "10.00 ± 1.00", "69.42", "71.38", "71"]
    assert rows[7][2:4] == ["70.00 ± 1.00", "-"]
    assert rows[8] == ["average of the eight", "acc %", "35.00", "-", "51.51", "54.54", "49.44"]
    assert rows[9][2:4] == ["0.8000 ± 0.0100", "0.8000 ± 0.0100"]
    assert rows[-1][2:] == ["50.00", "50.00", "-", "-", "-"]
    # Only what is exactly a cell of the paper's has the paper's figures beside it.
    cells = {("1.3B", "s4d"), ("1.3B", "softmax, n_kv_heads 4"), ("debug", "interdomain")}
    assert [*task_table.task_rows({"a": half}, cells)[0]] == [
        "task",
        "metric",
        "a",
        "paper's 1.3B s4d",
    ]


# The paper's study of length, with local files in the place of the hub's data sets


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Data sets with the real ones' columns: each text twice, as LongBench has one for every question about it."""
    for name, source in _length.CORPORA.items():
        (tmp_path / "hub" / name).mkdir(parents=True)
        rows = [
            {source.field: f"{name} {i}: {text}", "other": i}
            for i, text in enumerate(TEXTS)
            for _ in "ab"
        ]
        (tmp_path / "hub" / name / "rows.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    local = {
        name: _length.Source(f"{tmp_path / 'hub' / name}::train", x.field)
        for name, x in _length.CORPORA.items()
    }
    monkeypatch.setattr(_length, "CORPORA", local)
    return tmp_path


def test_the_paper_s_corpora_are_fetched_once_and_evaluated(folders, hub, monkeypatch, refused):
    """Here as a trial."""
    data = hub / "data"
    out = hub / "out"
    request = ("--perplexity", "paper", "--corpora", data)
    refused(evaluate.main, [folders[0], *request], f"--fetch --perplexity paper --corpora {data}")
    monkeypatch.setattr(_length, "CORPUS_BYTES", sum(len(text.encode()) for text in TEXTS[:2]))
    run(*request, "--fetch")
    rows = [json.loads(line)["text"] for line in (data / "QMSum.jsonl").read_text().splitlines()]
    assert rows == [
        f"QMSum {i}: {text}" for i, text in enumerate(TEXTS[:2])
    ]  # the first, each once
    record = json.loads((data / "sources.json").read_text())
    assert (record["QMSum"]["documents"], record["QMSum"]["bytes"]) == (
        2,
        sum(len(row.encode()) for row in rows),
    )
    shutil.rmtree(hub / "hub")
    run(*request, "--fetch")  # they are there
    run(folders[0], *request, "--output", out, "--lengths", 60, "--limit", 2)
    contents = json.loads((out / "evaluation.json").read_text())
    assert contents["corpora"] == record
    assert contents["options"]["packed"]
    measured = {row["corpus"]: row["perplexity"] for row in contents["perplexity"]}
    assert [*measured] == [*_length.CORPORA]
    mean = sum(measured[corpus] for corpus in _length.IN_MEAN) / 5
    assert f"| mean of 5 | 60 | {mean:.2f} |" in (out / "evaluation.md").read_text()
    (data / "PG19.jsonl").write_text("{}")
    refused(evaluate.main, [folders[0], *request], "PG19.jsonl has changed since it was fetched")


def test_a_data_set_that_cannot_be_had_leaves_nothing(hub, refused):
    shutil.rmtree(hub / "hub" / "QMSum")
    refused(evaluate.main, ["--perplexity", "paper", "--corpora", hub / "data", "--fetch"], "QMSum")
    assert not (hub / "data").exists()


def test_the_paper_s_figures_of_length():
    """They stand beside a folder that is exactly one of the paper's cells, at the paper's lengths."""
    measured = [
        {
            "folder": "a",
            "corpus": corpus,
            "length": n,
            "perplexity": 10 + (corpus == "NarrativeQA"),
            "bits per byte": 1,
        }
        for corpus in _length.CORPORA
        for n in (4096, 5000)
    ]
    groups = evaluate.corpus_groups([*_length.CORPORA])
    rows = task_table.perplexity_rows(
        measured, ["a"], groups, {("1.3B", "s4d"), ("1.3B", "softmax, n_kv_heads 4")}
    )
    assert [*rows[0]] == [
        "corpus",
        "length",
        "a, perplexity",
        "a, bits per byte",
        "paper's 1.3B s4d",
    ]
    assert [*rows[0].values()] == ["PG19", "4,096", "10.00", "1.0000", "19.96"]
    assert [*rows[-1].values()] == ["mean of 5", "5,000", "10.00", "1.0000", "-"]


# lm-evaluation-harness itself, with tasks on local files, against our own model by hand


def write_task(folder, name, kind, rows, metrics, **more):
    """A task on a local file (JSON is YAML)."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
    }
    task = {
        "task": name,
        "output_type": kind,
        "metric_list": [{"metric": metric} for metric in metrics],
    }
    (folder / f"{name}.yaml").write_text(
        json.dumps({**data, **task, "metadata": {"version": 1.0}, **more})
    )


HARNESS = pytest.mark.slow


@pytest.fixture(scope="module")
def inexact(tmp_path_factory):
    """A folder whose tokenizer has no exact counterpart in transformers, of a model whose documents began with BOS."""
    path = tmp_path_factory.mktemp("inexact")
    checkpoint = write_checkpoint(path / "run", small_model(), unigram(path / "unigram.model"))
    edit_run(checkpoint, documents={"begin": [1], "end": [2]})
    assert convert.main([str(checkpoint), "--output", str(path / "folder")]) == 0
    assert not (path / "folder" / "tokenizer.json").exists()
    return path / "folder"


def first_words(folder) -> str:
    """The text that a folder's model begins by itself, greedily: 5 tokens."""
    model, tokenizer = load_pretrained(folder)
    options = dict(
        max_tokens=5, sampling=Sampling(temperature=0), stop=None, vocab_size=tokenizer.vocab_size
    )
    return tokenizer.decode(
        [token for (token,) in generate(model, [tokenizer.documents.start], **options)]
    )


@pytest.fixture(scope="module")
def ran(folders, inexact, tmp_path_factory):
    """(results by name, what each command said at last)."""
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    path = tmp_path_factory.mktemp("harness")
    tasks = path / "tasks"
    tasks.mkdir()
    rows = [{"q": "def f(", "c": ["x):", "  ", "self, y"], "a": 0}]
    choice = dict(
        doc_to_text="{{q}}", doc_to_target="{{a}}", target_delimiter="", doc_to_choice="{{c}}"
    )
    write_task(tasks, "choice", "multiple_choice", rows, ["acc", "acc_norm"], **choice)
    write_task(
        tasks, "gone", "multiple_choice", rows, ["acc"], dataset_path="nobody/nothing", **choice
    )
    texts = dict(doc_to_text="", doc_to_target="{{t}}")
    write_task(tasks, "rolling", "loglikelihood_rolling", [{"t": TEXT}], ["bits_per_byte"], **texts)
    empty = dict(
        doc_to_text="", doc_to_target="{{t}}", generation_kwargs={"until": [], "max_gen_toks": 5}
    )
    write_task(
        tasks, "empty", "generate_until", [{"t": first_words(inexact)}], ["exact_match"], **empty
    )
    spaces = dict(doc_to_text="  ", doc_to_choice=["x", "self"])
    write_task(tasks, "spaces", "multiple_choice", rows, ["acc"], **choice | spaces)
    # Mistakes of a user, found when the task is made and when it is evaluated.
    write_task(
        tasks,
        "field",
        "multiple_choice",
        rows,
        ["acc"],
        **choice | {"doc_to_text": "{{no_such_field}}"},
    )
    write_task(tasks, "late", "multiple_choice", rows, ["acc"], **choice | {"num_fewshot": 5})

    include = ["--include-path", tasks, "--output"]
    options = ["--max-length", MAX_LENGTH, "--batch-size", 3]
    commands = [
        [*folders, "--tasks", "choice", "rolling", *include, path / "out", *options],
        [folders[0], "--tasks", *RECALLED, "--limit", 2, "--output", path / "recalled"],
        [folders[0], "--tasks", "choice", "gone", *include, path / "none"],
        [folders[0], "--tasks", "no_such_task", "choice", *include, path / "none"],
        ["--fetch", "--tasks", "phonebook_16", "based_nq"],
        [inexact, "--tasks", "rolling", "empty", "spaces", *include, path / "inexact", *options],
        [folders[0], "--tasks", "choice", "late", *include, path / "late", *options],
        [folders[0], "--tasks", "field", *include, path / "none"],
    ]
    # Nothing listens there: as without a network. The first command sets the hub's offline mode for all.
    offline = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(path / "home"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            DRIVER,
            json.dumps([[str(word) for word in command] for command in commands]),
        ],
        capture_output=True,
        text=True,
        cwd=tasks,  # not where a folder is named as the package
        env={name: x for name, x in os.environ.items() if not name.endswith("_OFFLINE")} | offline,
    )
    assert done.returncode == 0, done.stderr
    assert not (path / "none").exists()
    said = json.loads(done.stdout.splitlines()[-1])
    assert [status for status, _ in said] == [0, 0, 2, 2, 2, 0, 2, 2], said
    results = {
        name: json.loads((path / name / "evaluation.json").read_text())
        for name in ("out", "recalled", "inexact", "late")
    }
    return results, [words for _, words in said]


@HARNESS
@torch.no_grad()
@pytest.mark.parametrize(
    "i", [*range(len(CONDITIONS)), None], ids=[*CONDITIONS, "inexact tokenizer"]
)
def test_a_long_text(ran, folders, inexact, i):
    """In pieces of --max-length: the first after what begins a document, the last with as much before it as fits. The bytes
    are those of the text, as in --perplexity."""
    folder, found = (inexact, ran[0]["inexact"]) if i is None else (folders[i], ran[0]["out"])
    model, tokenizer = load_pretrained(folder)
    start = tokenizer.eos_id if i is not None else tokenizer.bos_id
    tokens, total, end = tokenizer.encode(TEXT), 0.0, 0
    assert len(tokens) > 2 * MAX_LENGTH
    assert len(tokens) % MAX_LENGTH
    while end < len(tokens):
        scored = min(MAX_LENGTH, len(tokens) - end)
        end += scored
        piece = [start, *tokens[:end]] if end <= MAX_LENGTH else tokens[end - MAX_LENGTH - 1 : end]
        logits = model(torch.tensor([piece[:-1]]))[0].double().log_softmax(-1)
        total -= (
            logits[torch.arange(len(piece) - 1), torch.tensor(piece[1:])][-scored:].sum().item()
        )
    results = found["tasks"][str(folder)]["results"]
    bits = total / math.log(2) / len(TEXT.encode())
    assert results["rolling"]["bits_per_byte"]["value"] == pytest.approx(bits, rel=1e-5)
    if i is None:
        # A prompt without tokens begins a text, alone in its batch too.
        assert results["empty"]["exact_match"]["value"] == 1
        assert "acc" in results["spaces"]
    else:
        assert [*results["choice"]] == ["acc", "acc_norm"]


@HARNESS
def test_what_cannot_be_is_named_and_leaves_what_was_measured(ran):
    results, (*_, gone, unknown, made, _, late, field) = ran
    for said, *words in (
        (
            gone,
            "the data of gone cannot be read",
            "OfflineModeIsEnabled",
            "evaluate --fetch --tasks choice gone`",
        ),
        (unknown, "unknown tasks: no_such_task"),
        (made, "the data of based_nq cannot be read"),
        (field, "the task field failed", "no_such_field"),
        (late, "the task late failed"),
    ):
        assert [word for word in words if word not in said] == [], said
    (out,) = results["late"]["tasks"].values()
    assert [*out["results"]] == ["choice"]


@HARNESS
def test_what_is_recorded_and_texts_that_are_made_to_a_length(ran):
    """Written, and beyond the length that the model was trained at."""
    results, recalled = ran[0]["out"], ran[0]["recalled"]
    assert (results["status"], results["options"]["max_length"]) == ("complete", MAX_LENGTH)
    assert {"lm_eval", "transformers", "PyTorch", "CPU"} <= set(results["environment"])
    (out,) = recalled["tasks"].values()
    assert [list(out["results"][task]) for task in RECALLED] == [["exact_match"], ["contains"]]
    assert recalled["options"]["max_length"] < 1024
