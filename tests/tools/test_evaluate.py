"""evaluate: perplexity against a whole forward pass, the harness against our own model, tables, and what can be wrong."""

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
from torch.nn.functional import cross_entropy

from interdomain.checkpoint.pretrained import load_pretrained
from interdomain.data import Documents, load_tokenizer
from interdomain.model.generation import Sampling, generate
from interdomain.tools import _progress, convert, evaluate
from interdomain.tools._evaluate import length as _length
from interdomain.tools._evaluate import perplexity, task_table
from interdomain.tools._evaluate.perplexity import read_spans
from interdomain.tools._paper import PAPER

from ..common import write_rows
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


def read_results(folder):
    return json.loads((folder / "evaluation.json").read_text())


@pytest.fixture(scope="module")
def folders(tmp_path_factory, exported_model):
    """One exported model for each condition. The code that it holds must not run."""
    path = tmp_path_factory.mktemp("evaluate")
    folders = []
    for condition in CONDITIONS:
        folder = shutil.copytree(exported_model(condition)[1], path / condition)
        (folder / "modeling_interdomain.py").write_text("raise SystemExit('it ran')")
        folders.append(folder)
    return folders


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "rows.jsonl"
    return write_rows(path, [{"body": text} for text in TEXTS])


# The protocol


def read(corpus, tokenizer, size, **options):
    return read_spans(str(corpus), tokenizer, size, text_field="body", **options)


def test_spans_tile_each_document_or_the_training_stream(corpus, tokenizer):
    tiles = []
    stream = []
    for text in TEXTS:
        ids = tokenizer.encode(text, add_eos=True)
        stream += ids
        for start in range(0, len(ids) - 59, 60):
            tiles.append(ids[start : start + 60])
    assert read(corpus, tokenizer, 60)[0].tolist() == tiles
    assert read(corpus, tokenizer, 60, limit=2)[0].tolist() == tiles[:2]
    packed, _ = read(corpus, tokenizer, 700, packed=True)
    whole = len(stream) // 700 * 700
    assert packed.flatten().tolist() == stream[:whole]
    # Each token has the number of bytes of text that it stands for. EOS has none.
    ids, sizes = read(corpus, tokenizer, len(stream), packed=True)
    assert sizes.sum() == sum(len(text.encode()) for text in TEXTS)
    assert not sizes[ids == tokenizer.eos_id].any()


def test_joined_documents_of_a_model_whose_documents_begin_with_bos(corpus, tokenizer):
    """A window is read after the first document's BOS. The others have theirs in the text."""
    with_bos = load_tokenizer(tokenizer.path)
    with_bos.documents = Documents((1,), (2,))
    stream = []
    for text in TEXTS:
        stream += [1, *tokenizer.encode(text), 2]
    ids, _ = read(corpus, with_bos, len(stream) - 1, packed=True)
    assert ids[0].tolist() == stream[1:]
    # A document that is not joined to others is read after its BOS, too.
    alone, _ = read(corpus, with_bos, 60)
    assert alone.tolist() == read(corpus, tokenizer, 60)[0].tolist()


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
def direct_losses(model, ids, length, start) -> torch.Tensor:
    """Returns the loss [windows, length] of every token in nats. Each window is one sequence, without state or chunks.

    Args:
        ids: The tokens of each span, [spans, size]. A window does not cross a span's end.
        start: The tokens that stand before each window.
    """
    whole = ids.shape[1] // length * length
    windows = torch.tensor(ids[:, :whole]).long().reshape(-1, length)
    before = torch.tensor(start).expand(len(windows), -1)
    logits = model(torch.cat((before, windows[:, :-1]), dim=1))
    logits = logits[:, len(start) - 1 :].double()
    return cross_entropy(logits.mT, windows, reduction="none")


def test_results(folders, tmp_path, capsys, monkeypatch, refused):
    """Two models read two corpora, in pieces. A second run into the same folder is refused.

    One of them does not record how documents began in training: each window is read after EOS, token 2. The documents of the
    other one began with tokens 2 and 1.
    """
    monkeypatch.setattr(perplexity, "PREFILL_CHUNK", 16)
    monkeypatch.setattr(_progress, "LOG_SECONDS", 0.0)
    older = edit_run(shutil.copytree(folders[0], tmp_path / "older"), documents=None)
    two = {"begin": [2, 1], "end": []}
    other = edit_run(shutil.copytree(folders[1], tmp_path / "other"), documents=two)
    first = write_rows(tmp_path / "first.jsonl", [{"text": text} for text in TEXTS])
    second = tmp_path / "second.txt"
    second.write_text(TEXTS[3])
    out = tmp_path / "out"
    # 60 does not divide the span of 80 tokens. 16 divides neither.
    options = f"--lengths 80 60 --batch-size 3 --output {out} --perplexity {first} {second}".split()
    run(older, other, *options)
    rows = read_results(out)["perplexity"]
    assert len(rows) == 2 * 2 * 2  # models, corpora, lengths
    for row in rows:
        length = row["length"]
        model, tokenizer = load_pretrained(row["folder"])
        start = [2] if row["folder"] == str(older) else [2, 1]
        ids, sizes = read_spans(row["corpus"], tokenizer, 80)
        losses = direct_losses(model, ids, length, start)
        assert row["tokens"] == losses.numel()
        assert row["perplexity"] == pytest.approx(losses.mean().exp().item(), rel=1e-5)
        bits = losses.sum().item() / math.log(2)
        expected = bits / sizes[:, :length].sum()
        assert row["bits per byte"] == pytest.approx(expected, rel=1e-6)
    printed, log = capsys.readouterr()
    assert "does not record how documents began" in printed
    assert (out / "evaluation.md").read_text() in printed
    assert f"{older}, {first} 60: 100%" in log
    refused(evaluate.main, [older, *options], "never overwritten")


@pytest.mark.parametrize("text", [*TEXTS, "漢字🙂" * 9])
def test_bits_are_per_byte_of_the_document(text, tmp_path):
    """White space that the tokenizer drops and characters that it does not know are text, too."""
    tokenizer = unigram(tmp_path / "unigram.model")
    ids = tokenizer.encode(text, add_eos=True)
    size = len(text.encode())
    assert len(tokenizer.decode(ids).encode()) != size
    sizes = perplexity.text_sizes(tokenizer, text, ids)
    assert sizes.sum() == size
    assert (sizes >= 0).all()


def test_bad_requests(folders, corpus, tmp_path, refused):
    model = folders[0]
    damaged = shutil.copytree(model, tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    text = ["--perplexity", corpus, "--text-field", "body", "--output", tmp_path / "out"]
    refused(evaluate.main, [damaged, *text], "not as it was written")
    refused(evaluate.main, [model, *text, "--lengths", 5000], "its longest document has")
    bare = shutil.copytree(model, tmp_path / "bare")
    edit_run(bare, documents={"begin": [], "end": []})
    refused(evaluate.main, [bare, *text, "--lengths", 60], "no token stood between the documents")
    assert not (tmp_path / "out").exists()


def test_the_paper_s_averages_are_those_of_its_rows():
    for group in ("commonsense", "based"):
        rows = list(task_table.TASKS[group].values())
        assert np.mean(rows, axis=0) == pytest.approx(PAPER["averages"][group]["values"], abs=0.006)
    for condition, means in PAPER["length"][_length.MEAN].items():
        rows = [PAPER["length"][name][condition] for name in _length.IN_MEAN]
        assert np.mean(rows, axis=0) == pytest.approx(means, abs=0.00501)


def test_the_table_has_models_and_paper_side_by_side():
    """The paper's figures stand beside a model only if it is exactly one of the paper's."""
    ours = {}
    for i, key in enumerate(task_table.TASKS["commonsense"]):
        task, metric = key.split()
        ours[task] = {metric: {"value": 0.1 * i, "stderr": 0.01}}
    ours["mine"] = {"perplexity": {"value": 0.5, "stderr": None}}
    without_boolq = dict(ours)
    del without_boolq["boolq"]
    cells = {("1.3B", "softmax"), ("1.3B", "softmax, n_kv_heads 4"), ("debug", "s4d")}
    table = task_table.task_rows({"a": ours, "b": without_boolq}, cells)
    assert list(table[0]) == ["task", "metric", "a", "b", "paper's 1.3B softmax"]
    rows = [list(row.values()) for row in table]
    # The eight, their average, a task of one's own
    assert rows[1] == ["piqa", "acc %", "10.00 ± 1.00", "10.00 ± 1.00", "69.42"]
    assert rows[7:] == [
        ["boolq", "acc %", "70.00 ± 1.00", "-", "61.28"],
        ["average of the eight", "acc %", "35.00", "-", "51.51"],
        ["mine", "perplexity", "0.5000", "0.5000", "-"],
    ]


# The paper's study of length, with local files in the place of the hub's data sets


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Data sets with the real ones' columns. Each text is there twice, as LongBench has one for every question about it."""
    for name, source in _length.CORPORA.items():
        folder = tmp_path / "hub" / name
        folder.mkdir(parents=True)
        rows = []
        for text in TEXTS:
            rows += [{source.field: f"{name}: {text}"}] * 2
        write_rows(folder / "rows.jsonl", rows)
        local = source._replace(dataset=f"{folder}::train")
        monkeypatch.setitem(_length.CORPORA, name, local)
    return tmp_path


def test_the_paper_s_corpora_are_fetched_once_and_evaluated(folders, hub, monkeypatch, refused):
    """The first documents of each data set are fetched, each once."""
    data = hub / "data"
    request = ("--perplexity", "paper", "--corpora", data)
    refused(evaluate.main, [folders[0], *request], f"--fetch --perplexity paper --corpora {data}")
    monkeypatch.setattr(_length, "CORPUS_BYTES", 1000)  # the second text ends beyond
    run(*request, "--fetch")
    lines = (data / "QMSum.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    assert texts == [f"QMSum: {TEXTS[0]}", f"QMSum: {TEXTS[1]}"]
    record = json.loads((data / "sources.json").read_text())
    shutil.rmtree(hub / "hub")
    run(*request, "--fetch")  # all of them are there
    fetch = f"--perplexity paper --fetch --corpora {hub}/elsewhere"
    refused(evaluate.main, fetch.split(), "PG19")
    assert not (hub / "elsewhere").exists()
    out = hub / "out"
    run(folders[0], *request, "--output", out, "--lengths", 60, "--limit", 2)
    contents = read_results(out)
    assert contents["corpora"] == record
    measured = {row["corpus"]: row["perplexity"] for row in contents["perplexity"]}
    mean = np.mean([measured[name] for name in _length.IN_MEAN])
    assert f"| mean of 5 | 60 | {mean:.2f} |" in (out / "evaluation.md").read_text()
    (data / "PG19.jsonl").write_text("{}")
    refused(evaluate.main, [folders[0], *request], "PG19.jsonl has changed since it was fetched")


# lm-evaluation-harness itself, with tasks on local files, against our own model by hand

# By default a task is a choice of three continuations.
CHOICE = """
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
doc_to_choice: "{{c}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
ROLLING = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{t}}"
metric_list: [{metric: bits_per_byte}]
"""
EMPTY = """
output_type: generate_until
doc_to_text: ""
doc_to_target: "{{t}}"
generation_kwargs: {until: [], max_gen_toks: 5}
metric_list: [{metric: exact_match}]
"""


def write_task(folder, name, text=CHOICE, row=None):
    """Writes a task of one row in a local file."""
    row = row or {"q": "def f(", "c": ["x):", "  ", "self, y"], "a": 0}
    path = write_rows(folder / f"{name}.jsonl", [row])
    data = f"""
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{path}"}}}}
test_split: test
metadata: {{version: 1.0}}
"""
    (folder / f"{name}.yaml").write_text(data + text)


@pytest.fixture(scope="module")
def inexact(tmp_path_factory):
    """A folder whose tokenizer has no exact counterpart in transformers, of a model whose documents began with BOS."""
    path = tmp_path_factory.mktemp("inexact")
    checkpoint = write_checkpoint(path / "run", small_model(), unigram(path / "unigram.model"))
    edit_run(checkpoint, documents={"begin": [1], "end": [2]})
    assert convert.main([str(checkpoint), "--output", str(path / "folder")]) == 0
    assert not (path / "folder/tokenizer.json").exists()
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
    """The folder of the results, and the last line that each command wrote to standard error."""
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    path = tmp_path_factory.mktemp("harness")
    tasks = path / "tasks"
    tasks.mkdir()
    write_task(tasks, "choice")
    write_task(tasks, "spaces", CHOICE.replace("{{q}}", "  ").replace('"{{c}}"', "[x, self]"))
    write_task(tasks, "rolling", ROLLING, {"t": TEXT})
    write_task(tasks, "empty", EMPTY, {"t": first_words(inexact)})
    # The data set of the first is not there. The mistake in the second shows when it is evaluated.
    write_task(tasks, "gone", CHOICE + "dataset_path: nobody/nothing")
    write_task(tasks, "late", CHOICE + "num_fewshot: 5")

    exact = " ".join(map(str, folders))
    options = f"--max-length {MAX_LENGTH} --batch-size 3"
    commands = [
        f"{exact} --output {path}/out --tasks rolling {options}",
        f"{inexact} --output {path}/inexact --tasks rolling empty spaces {options}",
        f"{folders[0]} --output {path}/none --tasks choice gone",
        f"{folders[0]} --output {path}/none --tasks no_such_task choice",
        f"{folders[0]} --output {path}/late --tasks choice late {options}",
    ]
    argvs = [f"{command} --include-path {tasks}".split() for command in commands]
    environment = {**os.environ, "HF_HOME": str(path / "home"), "OMP_NUM_THREADS": "1"}
    # Nothing listens there, as without a network. The first command sets the hub's offline mode for all.
    environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(argvs)],
        capture_output=True,
        text=True,
        cwd=tasks,  # a folder in which nothing has the package's name
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert not (path / "none").exists()
    ends = json.loads(done.stdout.splitlines()[-1])
    assert [status for status, _ in ends] == [0, 0, 2, 2, 2], ends
    return path, [last_line for _, last_line in ends]


@torch.no_grad()
def bits_per_byte(folder) -> float:
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
        piece = torch.tensor(
            [*tokenizer.documents.start, *tokens][max(0, end - MAX_LENGTH) : end + 1]
        )
        logits = model(piece[None, :-1])[0].double()
        losses = cross_entropy(logits, piece[1:], reduction="none")
        total += losses[begin - end :].sum().item()
    return total / math.log(2) / len(TEXT.encode())


@HARNESS
def test_a_long_text_and_an_empty_prompt(ran, folders, inexact):
    """The bytes are those of the text, whatever the tokenizer. A prompt without tokens begins a document."""
    tasks = read_results(ran[0] / "out")["tasks"] | read_results(ran[0] / "inexact")["tasks"]
    for folder in (*folders, inexact):
        results = tasks[str(folder)]["results"]
        expected = bits_per_byte(folder)
        assert results["rolling"]["bits_per_byte"]["value"] == pytest.approx(expected, rel=1e-5)
    assert "acc" in results["spaces"]
    assert results["empty"]["exact_match"]["value"] == 1


@HARNESS
def test_tasks_that_fail_are_named_and_leave_what_was_measured(ran):
    path, (*_, gone, unknown, late) = ran
    assert "the data of gone cannot be read" in gone
    assert "evaluate --fetch --tasks choice gone`" in gone
    assert "unknown tasks: no_such_task" in unknown
    assert "the task late failed" in late
    (tasks,) = read_results(path / "late")["tasks"].values()
    assert list(tasks["results"]) == ["choice"]
