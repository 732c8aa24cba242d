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
from interdomain.model.generation import Sampling, generate
from interdomain.tools import convert, evaluate
from interdomain.tools._evaluate import length as _length
from interdomain.tools._evaluate import perplexity, task_table
from interdomain.tools._evaluate.perplexity import read_spans
from interdomain.tools._paper import PAPER

from .checkpoints import edit_run, small_model, write_checkpoint

HARNESS = pytest.mark.slow
CONDITIONS = ("interdomain", "softmax")
# Different lengths, characters of several bytes, and one that is too short for anything.
TEXTS = [
    "def f(x):\n    return x\n" * 30,
    "Straße, 漢字, 🙂. " * 40,
    "short",
    "import os, sys\n" * 25,
]
# A text for the harness, which is longer than two windows of MAX_LENGTH tokens.
TEXT = "def f(x):\n    return [x, x + 1]\n\n\n" * 9
MAX_LENGTH = 90


def run(*argv):
    assert evaluate.main([str(word) for word in argv]) == 0


def write_rows(path, rows):
    """Writes a JSON Lines file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_results(folder):
    return json.loads((folder / "evaluation.json").read_text())


@pytest.fixture(scope="module")
def folders(tmp_path_factory, exported_model):
    """One exported model per condition. The code that it holds must not run."""
    path = tmp_path_factory.mktemp("evaluate")
    for condition in CONDITIONS:
        shutil.copytree(exported_model(condition)[1], path / condition)
        (path / condition / "modeling_interdomain.py").write_text("raise SystemExit('it ran')")
    return [path / condition for condition in CONDITIONS]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "rows.jsonl"
    return write_rows(path, [{"body": text} for text in TEXTS])


# The protocol


def test_spans_tile_each_document_or_the_training_stream(corpus, tokenizer):
    tiles = []
    stream = []
    for text in TEXTS:
        ids = tokenizer.encode(text, add_eos=True)
        stream += ids
        for start in range(0, len(ids) - 59, 60):
            tiles.append(ids[start : start + 60])

    def read(size, **options):
        return read_spans(str(corpus), tokenizer, size, text_field="body", **options)

    assert read(60)[0].tolist() == tiles
    assert read(60, limit=2)[0].tolist() == tiles[:2]
    spans = len(stream) // 700
    assert read(700, packed=True)[0].flatten().tolist() == stream[: spans * 700]
    # Each token has the number of bytes of text that it stands for. EOS has none.
    ids, sizes = read(len(stream), packed=True)
    assert sizes.sum() == sum(len(text.encode()) for text in TEXTS)
    assert (sizes[ids == tokenizer.eos_id] == 0).all()


def unigram(path):
    """A tokenizer that normalises, has no bytes to fall back on, and has no exact counterpart in transformers."""
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=iter((TEXTS[0] + TEXTS[3] + TEXT).splitlines()),
            model_writer=file,
            model_type="unigram",
            vocab_size=60,
            hard_vocab_limit=False,
            minloglevel=2,
            pad_id=-1,
        )
    return load_tokenizer(path)


@torch.no_grad()
def direct_losses(model, spans, length, *start) -> torch.Tensor:
    """Returns the loss [windows, length] of every token in nats. Each window is one sequence, without state or chunks."""
    ids, _ = spans
    windows = torch.tensor(ids[:, : ids.shape[1] // length * length].reshape(-1, length)).long()
    begin = torch.tensor(start).expand(len(windows), -1)
    logits = model(torch.cat((begin, windows[:, :-1]), dim=1)).double()
    log_probabilities = logits.log_softmax(-1)[:, len(start) - 1 :]
    return -log_probabilities.gather(-1, windows[..., None])[..., 0]


def test_results(folders, corpus, tokenizer, tmp_path, capsys, monkeypatch, refused):
    """Two corpora and their mean are read in pieces. A second run into the same folder is refused."""
    monkeypatch.setattr(perplexity, "PREFILL_CHUNK", 16)
    second = tmp_path / "second.txt"
    second.write_text(TEXTS[3])
    rows = write_rows(tmp_path / "first.jsonl", [{"text": text} for text in TEXTS])
    out = tmp_path / "out"
    # 60 does not divide the span of 80 tokens; 16 divides neither.
    options = f"--lengths 80 60 --batch-size 3 --output {out} --perplexity {rows} {second}".split()
    run(*folders, *options)
    contents = read_results(out)
    assert contents["status"] == "complete"
    described = contents["tables"]["folders"]["rows"]
    assert [row["step"] for row in described] == [100, 100]
    assert len(contents["perplexity"]) == 2 * 2 * 2  # folders, corpora, lengths
    measured = []
    for row in contents["perplexity"]:
        spans = read_spans(row["corpus"], tokenizer, 80)
        losses = direct_losses(load_model(row["folder"]), spans, row["length"], tokenizer.eos_id)
        assert row["tokens"] == losses.numel()
        assert row["perplexity"] == pytest.approx(losses.mean().exp().item(), rel=1e-5)
        bits = losses.sum().item() / math.log(2)
        nbytes = spans[1][:, : row["length"]].sum()
        assert row["bits per byte"] == pytest.approx(bits / nbytes, rel=1e-6)
        if row["folder"] == str(folders[0]) and row["length"] == 60:
            measured.append(row["perplexity"])
    page = (out / "evaluation.md").read_text()
    assert f"| mean of 2 | 60 | {np.mean(measured):.2f} |" in page
    assert page in capsys.readouterr().out
    refused(evaluate.main, [*folders, *options], "never overwritten")


def test_bad_requests(folders, corpus, tmp_path, monkeypatch, refused):
    out = tmp_path / "out"
    model = folders[0]
    text = ("--perplexity", corpus, "--text-field", "body", "--output", out)
    damaged = shutil.copytree(model, tmp_path / "damaged")
    data = bytearray((damaged / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (damaged / "model.safetensors").write_bytes(data)
    for argv, words in (
        ([*text], "no folder was given"),
        ([damaged, *text], "not as it was written"),
        ([model, *text, "--lengths", 5000], "its longest document has"),
        ([model, "--perplexity", tmp_path / "no.txt", "--output", out], "No file matches"),
        (["--perplexity", corpus, "--fetch"], "has nothing to fetch"),
    ):
        refused(evaluate.main, argv, words)
    monkeypatch.setattr(importlib.util, "find_spec", {}.get)
    lacking = "this needs lm_eval, which is not installed. The extra `eval` has it"
    refused(evaluate.main, [model], lacking)
    assert not out.exists()


def test_the_paper_s_averages_are_those_of_its_rows():
    for group in ("commonsense", "based"):
        rows = list(task_table.TASKS[group].values())
        assert np.mean(rows, axis=0) == pytest.approx(PAPER["averages"][group]["values"], abs=0.006)
    for condition, means in PAPER["length"][_length.MEAN].items():
        rows = [PAPER["length"][name][condition] for name in _length.IN_MEAN]
        assert np.mean(rows, axis=0) == pytest.approx(means, abs=0.00501)


def test_the_table_has_folders_and_paper_side_by_side():
    ours = {"mine": {"acc": {"value": 0.5, "stderr": None}}}
    for i, key in enumerate([*task_table.TASKS["commonsense"], *task_table.TASKS["modeling"]]):
        task, metric = key.split()
        ours.setdefault(task, {})[metric] = {"value": 0.1 * i, "stderr": 0.01}
    # A metric that is not in the paper's table is only in the JSON file.
    ours["lambada_openai"]["other"] = {"value": 3.0, "stderr": None}
    without_boolq = dict(ours)
    del without_boolq["boolq"]
    cells = {("1.3B", "softmax"), ("1.3B", "interdomain"), ("1.3B", "s4d")}
    table = task_table.task_rows({"a": ours, "b": without_boolq}, cells)
    paper = ["paper's 1.3B softmax", "paper's 1.3B interdomain", "paper's 1.3B s4d"]
    assert list(table[0]) == ["task", "metric", "a", "b", *paper]
    rows = [list(row.values()) for row in table]
    assert (
        len(rows) == 8 + 1 + 3 + 1
    )  # the eight, their average, language modeling, a task of one's own
    assert rows[1] == ["piqa", "acc %", "10.00 ± 1.00", "10.00 ± 1.00", "69.42", "71.38", "71"]
    assert rows[7][2:4] == ["70.00 ± 1.00", "-"]
    assert rows[8] == ["average of the eight", "acc %", "35.00", "-", "51.51", "54.54", "49.44"]
    assert rows[9][2:4] == ["0.8000 ± 0.0100", "0.8000 ± 0.0100"]
    assert rows[-1][2:] == ["50.00", "50.00", "-", "-", "-"]
    # The paper's figures stand beside a model only if it is exactly a cell of the paper's.
    cells = {("1.3B", "s4d"), ("1.3B", "softmax, n_kv_heads 4"), ("debug", "interdomain")}
    table = task_table.task_rows({"a": ours}, cells)
    assert list(table[0]) == ["task", "metric", "a", "paper's 1.3B s4d"]


# The paper's study of length, with local files in the place of the hub's data sets


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Data sets with the real ones' columns. Each text is there twice, as LongBench has one for every question about it."""
    local = {}
    for name, source in _length.CORPORA.items():
        folder = tmp_path / "hub" / name
        folder.mkdir(parents=True)
        rows = []
        for i, text in enumerate(TEXTS):
            rows += [{source.field: f"{name} {i}: {text}", "other": i}] * 2
        write_rows(folder / "rows.jsonl", rows)
        local[name] = _length.Source(f"{folder}::train", source.field)
    monkeypatch.setattr(_length, "CORPORA", local)
    return tmp_path


def test_the_paper_s_corpora_are_fetched_once_and_evaluated(folders, hub, monkeypatch, refused):
    data = hub / "data"
    request = ("--perplexity", "paper", "--corpora", data)
    refused(evaluate.main, [folders[0], *request], f"--fetch --perplexity paper --corpora {data}")
    monkeypatch.setattr(_length, "CORPUS_BYTES", sum(len(text.encode()) for text in TEXTS[:2]))
    run(*request, "--fetch")
    # The first documents are there, each once.
    lines = (data / "QMSum.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert texts == [f"QMSum 0: {TEXTS[0]}", f"QMSum 1: {TEXTS[1]}"]
    record = json.loads((data / "sources.json").read_text())
    assert record["QMSum"]["documents"] == 2
    assert record["QMSum"]["bytes"] == sum(len(text.encode()) for text in texts)
    shutil.rmtree(hub / "hub")
    run(*request, "--fetch")  # they are there
    run(folders[0], *request, "--output", hub / "out", "--lengths", 60, "--limit", 2)
    contents = read_results(hub / "out")
    assert contents["corpora"] == record
    assert contents["options"]["packed"]
    measured = {row["corpus"]: row["perplexity"] for row in contents["perplexity"]}
    assert list(measured) == list(_length.CORPORA)
    mean = np.mean([measured[name] for name in _length.IN_MEAN])
    assert f"| mean of 5 | 60 | {mean:.2f} |" in (hub / "out/evaluation.md").read_text()
    (data / "PG19.jsonl").write_text("{}")
    refused(evaluate.main, [folders[0], *request], "PG19.jsonl has changed since it was fetched")


def test_a_data_set_that_cannot_be_had_leaves_nothing(hub, refused):
    shutil.rmtree(hub / "hub" / "QMSum")
    refused(evaluate.main, ["--perplexity", "paper", "--corpora", hub / "data", "--fetch"], "QMSum")
    assert not (hub / "data").exists()


# lm-evaluation-harness itself, with tasks on local files, against our own model by hand

CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{q}}",
    "doc_to_target": "{{a}}",
    "doc_to_choice": "{{c}}",
    "target_delimiter": "",
}


def write_task(folder, name, metrics=("acc",), rows=None, **settings):
    """Writes a task on a local file: by default a choice of three continuations (JSON is YAML)."""
    rows = rows or [{"q": "def f(", "c": ["x):", "  ", "self, y"], "a": 0}]
    path = write_rows(folder / f"{name}.jsonl", rows)
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "metric_list": [{"metric": metric} for metric in metrics],
        "metadata": {"version": 1.0},
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task | CHOICE | settings))


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
    """Returns the text that a folder's model begins by itself, greedily: 5 tokens."""
    model, tokenizer = load_pretrained(folder)
    steps = generate(
        model,
        [tokenizer.documents.start],
        max_tokens=5,
        sampling=Sampling(temperature=0),
        stop=None,
        vocab_size=tokenizer.vocab_size,
    )
    return tokenizer.decode([token for (token,) in steps])


# A user's commands, one after the other. It prints the status and the last line of standard error of each.
DRIVER = """
import contextlib, functools, io, json, sys
from interdomain.tools import evaluate
ends = []
for argv in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        status = evaluate.main(argv)
    ends.append((status, err.getvalue().strip().split(chr(10))[-1]))
    # Reading the harness's own tasks takes it seconds, and is left out from here on. Imported when the tool has.
    import lm_eval.tasks
    lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def ran(folders, inexact, tmp_path_factory):
    """The results of the commands by name, and the last line that each command wrote to standard error."""
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    path = tmp_path_factory.mktemp("harness")
    tasks = path / "tasks"
    tasks.mkdir()
    write_task(tasks, "choice", ["acc", "acc_norm"])
    write_task(tasks, "spaces", doc_to_text="  ", doc_to_choice=["x", "self"])
    text = {"doc_to_text": "", "doc_to_target": "{{t}}", "doc_to_choice": None}
    rolling = text | {"output_type": "loglikelihood_rolling"}
    write_task(tasks, "rolling", ["bits_per_byte"], [{"t": TEXT}], **rolling)
    generation = {"until": [], "max_gen_toks": 5}
    empty = text | {"output_type": "generate_until", "generation_kwargs": generation}
    write_task(tasks, "empty", ["exact_match"], [{"t": first_words(inexact)}], **empty)
    # A data set that is not there, and a mistake that shows when the task is evaluated.
    write_task(tasks, "gone", dataset_path="nobody/nothing")
    write_task(tasks, "late", num_fewshot=5)

    include = ["--include-path", tasks, "--output"]
    options = ["--max-length", MAX_LENGTH, "--batch-size", 3]
    commands = [
        [*folders, "--tasks", "choice", "rolling", *include, path / "out", *options],
        [inexact, "--tasks", "rolling", "empty", "spaces", *include, path / "inexact", *options],
        [folders[0], "--tasks", "choice", "gone", *include, path / "none"],
        [folders[0], "--tasks", "no_such_task", "choice", *include, path / "none"],
        [folders[0], "--tasks", "choice", "late", *include, path / "late", *options],
    ]
    argvs = json.dumps([list(map(str, command)) for command in commands])
    environment = {**os.environ, "HF_HOME": str(path / "home"), "OMP_NUM_THREADS": "1"}
    # Nothing listens there, as without a network. The first command sets the hub's offline mode for all.
    environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, argvs],
        capture_output=True,
        text=True,
        cwd=tasks,  # a folder in which nothing has the package's name
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert not (path / "none").exists()
    ends = json.loads(done.stdout.splitlines()[-1])
    assert [status for status, _ in ends] == [0, 0, 2, 2, 2], ends
    names = ("out", "inexact", "late")
    errors = [last_line for _, last_line in ends]
    return {name: read_results(path / name) for name in names}, errors


@torch.no_grad()
def bits_per_byte(folder, start) -> float:
    """Computes the value for TEXT in pieces of MAX_LENGTH tokens, by our own model.

    The first piece stands after the token that begins a document. The last has as many tokens before it as fit.
    """
    model, tokenizer = load_pretrained(folder)
    tokens = tokenizer.encode(TEXT)
    assert len(tokens) > 2 * MAX_LENGTH
    assert len(tokens) % MAX_LENGTH
    total = 0.0
    for begin in range(0, len(tokens), MAX_LENGTH):
        end = min(begin + MAX_LENGTH, len(tokens))
        piece = torch.tensor([start, *tokens][max(0, end - MAX_LENGTH) : end + 1])
        log_probabilities = model(piece[None, :-1])[0].double().log_softmax(-1)
        losses = -log_probabilities.gather(-1, piece[1:, None])
        total += losses[begin - end :].sum().item()
    return total / math.log(2) / len(TEXT.encode())


@HARNESS
@pytest.mark.parametrize("i", range(len(CONDITIONS)), ids=CONDITIONS)
def test_a_long_text(ran, folders, tokenizer, i):
    results = ran[0]["out"]["tasks"][str(folders[i])]["results"]
    expected = bits_per_byte(folders[i], tokenizer.eos_id)
    assert results["rolling"]["bits_per_byte"]["value"] == pytest.approx(expected, rel=1e-5)
    assert list(results["choice"]) == ["acc", "acc_norm"]


@HARNESS
def test_a_long_text_and_an_empty_prompt_by_an_inexact_tokenizer(ran, inexact):
    """The bytes are those of the text. A prompt without tokens begins a document."""
    results = ran[0]["inexact"]["tasks"][str(inexact)]["results"]
    expected = bits_per_byte(inexact, start=1)
    assert results["rolling"]["bits_per_byte"]["value"] == pytest.approx(expected, rel=1e-5)
    assert results["empty"]["exact_match"]["value"] == 1
    assert "acc" in results["spaces"]


@HARNESS
def test_tasks_that_fail_are_named_and_leave_what_was_measured(ran):
    results, (*_, gone, unknown, late) = ran
    assert "the data of gone cannot be read" in gone
    assert "OfflineModeIsEnabled" in gone
    assert "evaluate --fetch --tasks choice gone`" in gone
    assert "unknown tasks: no_such_task" in unknown
    assert "the task late failed" in late
    (tasks,) = results["late"]["tasks"].values()
    assert list(tasks["results"]) == ["choice"]
