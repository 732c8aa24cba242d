"""Perplexity by context length against a whole forward pass, what is written of it, and everything that can be wrong."""

import importlib.util
import json
import math
import shutil
import sys

import numpy as np
import pytest
import torch

from interdomain.data import load_tokenizer
from interdomain.model import cell_of
from interdomain.model.pretrained import load_model
from interdomain.tools import _perplexity, _task_table, convert, evaluate
from interdomain.tools._perplexity import measure, read_spans

from ..common import small_tokenizer
from ..model.common import small_config
from .checkpoints import small_model, write_checkpoint

CONDITIONS = ("interdomain", "softmax")
# Different lengths, characters of several bytes, and one that is too short for anything.
TEXTS = ["def f(x):\n    return x\n" * 30, "Straße, 漢字, 🙂. " * 40, "short", "import os, sys\n" * 25]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer):
    """One folder per condition, made by convert."""
    path = tmp_path_factory.mktemp("evaluate")
    for condition in CONDITIONS:
        checkpoint = write_checkpoint(path / f"run-{condition}", small_model(condition), tokenizer)
        assert convert.main([str(checkpoint), "--output", str(path / condition)]) == 0
    return [path / condition for condition in CONDITIONS]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "rows.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    return path


def run(*argv, expect=0):
    assert evaluate.main([str(a) for a in argv]) == expect


def error(capsys):
    """The one paragraph on stderr, below what progress bars leave there."""
    line = capsys.readouterr().err.strip().split("\n")[-1]
    assert line.startswith("error: "), line
    return line


def documents(tokenizer):
    return [tokenizer.encode(text, add_eos=True) for text in TEXTS]


# The protocol


def test_spans_tile_each_document(corpus, tokenizer):
    size = 60
    spans = read_spans(str(corpus), tokenizer, size, text_field="body")
    wanted = [ids[i : i + size] for ids in documents(tokenizer) for i in range(0, len(ids) - size + 1, size)]
    assert spans.ids.tolist() == wanted
    assert (spans.documents, spans.skipped) == (4, 1)
    few = read_spans(str(corpus), tokenizer, size, text_field="body", limit=2)
    assert few.ids.tolist() == wanted[:2]


def test_packed_spans_are_the_training_stream(corpus, tokenizer):
    stream = [token for ids in documents(tokenizer) for token in ids]
    for limit, spans in ((None, len(stream) // 700), (1, 1)):
        found = read_spans(str(corpus), tokenizer, 700, text_field="body", packed=True, limit=limit)
        assert found.ids.tolist() == [stream[: spans * 700]]
    assert len(stream) // 700 > 1


def test_bytes_are_those_of_the_text(corpus, tmp_path):
    tokenizer = load_tokenizer(small_tokenizer(tmp_path / "tokenizer.model", 500))
    total = sum(len(ids) for ids in documents(tokenizer))
    spans = read_spans(str(corpus), tokenizer, total, text_field="body", packed=True)
    assert spans.sizes.sum() == sum(len(text.encode()) for text in TEXTS)
    assert (spans.sizes[spans.ids == tokenizer.eos_id] == 0).all()


@torch.no_grad()
def direct(model, spans, length, start) -> torch.Tensor:
    """NLL [windows, length] without state or chunks: the windows as whole sequences."""
    windows = [span[i : i + length] for span in spans.ids for i in range(0, len(span) - length + 1, length)]
    inputs = [[start, *window[:-1]] for window in windows]
    logits = model(torch.tensor(inputs)).double().log_softmax(-1)
    return -logits.gather(-1, torch.tensor(np.array(windows)).long()[..., None])[..., 0]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_chunks_and_batches_change_nothing(condition, corpus, tokenizer, monkeypatch):
    monkeypatch.setattr(_perplexity, "PREFILL_CHUNK", 16)
    model = small_model(condition)
    spans = read_spans(str(corpus), tokenizer, 150, text_field="body")
    assert len(spans.ids) % 4
    for length in (150, 60):  # 60 does not divide the span; 16 divides neither
        wanted = direct(model, spans, length, tokenizer.eos_id)
        found = measure(model, spans, length, tokenizer.eos_id, batch=4)
        assert found["windows"] == len(wanted) == len(spans.ids) * (150 // length)
        assert found["tokens"] == wanted.numel()
        assert found["nll"] == pytest.approx(wanted.mean().item(), rel=1e-6)
        assert found["perplexity"] == pytest.approx(wanted.mean().exp().item(), rel=1e-5)
        used = spans.sizes[:, : 150 // length * length].sum()
        assert found["bits per byte"] == pytest.approx(wanted.sum().item() / math.log(2) / used, rel=1e-6)
        middles, places = found["positions"], wanted.mean(0).tensor_split(len(found["positions"]))
        assert (middles[0], middles[-1]) == (len(places[0]) / 2, length - len(places[-1]) / 2)
        assert found["perplexity by position"] == pytest.approx([x.mean().exp().item() for x in places], rel=1e-5)


# The tool


def test_results(folders, corpus, tokenizer, tmp_path, capsys):
    """Two corpora and a mean; a second run into the same folder changes nothing."""
    second, rows, out = tmp_path / "second.txt", tmp_path / "first.jsonl", tmp_path / "out"
    second.write_text(TEXTS[3])
    rows.write_text(corpus.read_text().replace('"body"', '"text"'))
    options = f"--lengths 80 40 80 --batch-size 3 --output {out} --perplexity {rows} {second}".split()
    run(*folders, *options)
    printed = capsys.readouterr().out
    contents = json.loads((out / "evaluation.json").read_text())
    assert (contents["status"], contents["tasks"]) == ("complete", {})
    named = {name: (facts["size"], facts["condition"]) for name, facts in contents["folders"].items()}
    assert named == {condition: cell_of(small_config(condition, vocab_size=420), "debug") for condition in CONDITIONS}
    assert contents["folders"]["softmax"]["step"] == 100
    found = {(row["folder"], row["corpus"], row["length"]): row["perplexity"] for row in contents["perplexity"]}
    page = (out / "evaluation.md").read_text()
    for folder in folders:
        model = load_model(folder)
        for length in (40, 80):
            spans = [read_spans(str(source), tokenizer, 80) for source in (rows, second)]
            wanted = [direct(model, span, length, tokenizer.eos_id).mean().exp().item() for span in spans]
            assert [found.pop((folder.name, x.name, length)) for x in (rows, second)] == pytest.approx(wanted, rel=1e-5)
            (mean,) = (line for line in page.splitlines() if line.startswith(f"| mean of 2 | {length} "))
            assert f" {sum(wanted) / 2:.2f} |" in mean
    assert not found
    assert page in printed
    assert printed.endswith(f"wrote {out / 'evaluation.json'} and evaluation.md and perplexity.png\n")
    assert (out / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    run(*folders, *options, expect=2)
    assert "never overwritten" in error(capsys)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_trial_and_a_plot_that_cannot_be(folders, corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    options = ("--perplexity", corpus, "--text-field", "body", "--lengths", 30, "--limit", 2, "--dtype", "bfloat16")
    run(folders[0], *options, "--output", tmp_path)
    printed = capsys.readouterr().out
    assert "A trial: only the first 2 " in printed
    assert "no plot without matplotlib: " in printed
    (row,) = json.loads((tmp_path / "evaluation.json").read_text())["perplexity"]
    assert row["windows"] == 2
    assert not (tmp_path / "perplexity.png").exists()


# What is refused, before anything is computed


def test_bad_requests(folders, corpus, tmp_path, capsys, monkeypatch):
    out, model = tmp_path / "out", folders[0]
    text = ("--perplexity", corpus, "--text-field", "body", "--output", out)
    damaged = shutil.copytree(model, tmp_path / "damaged")
    data = bytearray((damaged / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (damaged / "model.safetensors").write_bytes(data)
    for argv, part in (
        ((*text,), "no folder was given"),
        ((tmp_path, *text), "config.json"),
        ((damaged, *text), "not as it was written"),
        ((model, model, *text), "given twice"),
        ((model, *text, "--lengths", 0), "--lengths must be at least 1"),
        ((model, *text, "--lengths", 5000), "its longest document has"),
        ((model, "--perplexity", tmp_path / "no.txt", "--output", out), "No file matches"),
        ((model, "--perplexity", corpus, "--output", out), "text"),
    ):
        run(*argv, expect=2)
        assert part in error(capsys), argv
    other = tmp_path / "elsewhere" / model.name
    assert evaluate.labels([model, other]) == [str(model), str(other)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run(model, expect=2)  # the default is tasks
    assert "--tasks needs lm_eval, accelerate, transformers, not installed here" in error(capsys)
    assert not out.exists()


# The harness's results as a table (test_evaluate_harness.py runs it)


def test_the_paper_s_averages_are_those_of_its_rows():
    assert [len(group) for group, _ in _task_table.AVERAGES.values()] == [8, 6, 14]
    for group, means in list(_task_table.AVERAGES.values())[:2]:
        for i, paper in enumerate(means):
            assert sum(figures[i] for figures in group.values()) / len(group) == pytest.approx(paper, abs=0.006)
    for i in range(3):  # bytes per word of WikiText, from both of the paper's figures
        word, byte = (_task_table.PAPER["wikitext", name][i] for name in ("word_perplexity", "bits_per_byte"))
        assert math.log2(word) / byte == pytest.approx(5.346, abs=0.003)


CELLS = {("1.3B", condition) for condition in _task_table.CONDITIONS}


def test_bits_of_lambada_are_its_perplexity_in_another_unit():
    for name, perplexity, paper in zip(
        _task_table.CONDITIONS,
        _task_table.PAPER["lambada_openai", "perplexity"],
        _task_table.PAPER["lambada_openai", "bits_per_byte"],
        strict=True,
    ):
        results = {"lambada_openai": {"perplexity": {"value": perplexity}}}
        _task_table.add_lambada_bits(results)
        assert results["lambada_openai"]["bits_per_byte"]["value"] == pytest.approx(paper, abs=3e-4), name


def test_the_table_has_folders_and_paper_side_by_side():
    ours = {}
    for i, (task, metric) in enumerate([*_task_table.COMMONSENSE, *_task_table.MODELING]):
        ours.setdefault(task, {})[metric] = {"value": 0.1 * i, "stderr": 0.01}
    ours["lambada_openai"]["other"] = {"value": 3.0, "stderr": None}  # not in the paper's table: left to the JSON
    ours["mine"] = {"acc": {"value": 0.5, "stderr": None}}
    half = {task: metrics for task, metrics in ours.items() if task != "boolq"}
    head, *rows = _task_table.table({"a": ours, "b": half}, {("1.3B", c) for c in _task_table.CONDITIONS})
    assert head == ["task", "metric", "a", "b", *(f"paper's 1.3B {c}" for c in ("softmax", "interdomain", "s4d"))]
    # Their average; a task of one's own.
    assert len(rows) == len(_task_table.COMMONSENSE) + len(_task_table.MODELING) + 2
    assert rows[1] == ["piqa", "acc %", "10.00 ± 1.00", "10.00 ± 1.00", "69.42", "71.38", "71"]
    assert rows[7][2:4] == ["70.00 ± 1.00", "-"]
    assert rows[8][1:] == ["acc %", "35.00", "-", "51.51", "54.54", "49.44"]  # the average of the eight
    assert rows[9][2:] == ["0.8000 ± 0.0100", "0.8000 ± 0.0100", "21.03", "14.76", "41.02"]
    assert rows[-1] == ["mine", "acc %", "50.00", "50.00", "-", "-", "-"]
    # Only what is exactly a cell of the paper's has the paper's figures beside it.
    cells = {("1.3B", "s4d"), ("1.3B", "softmax, n_kv_heads 4"), ("debug", "interdomain")}
    head, *rows = _task_table.table({"a": half}, cells)
    assert (head, rows[1]) == (["task", "metric", "a", "paper's 1.3B s4d"], ["piqa", "acc %", "10.00 ± 1.00", "71"])
