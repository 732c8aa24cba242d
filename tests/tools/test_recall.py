"""The paper's recall tasks through lm-evaluation-harness: models that know the answer's place, and models that do not."""

import json
import re
from pathlib import Path

import pytest

from interdomain.tools._evaluate import task_table

lm_eval = pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
from lm_eval.api.model import LM  # noqa: E402

from interdomain.tools._evaluate import recall  # noqa: E402


class Reader(LM):
    """Answers by `answer(text)`, and keeps what it was asked."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer
        self.requests = []

    def generate_until(self, requests, disable_tqdm=False):
        self.requests += [request.args for request in requests]
        return [self.answer(request.args[0]) for request in requests]

    def loglikelihood(self, requests):
        raise AssertionError

    loglikelihood_rolling = loglikelihood


def run(task, answer):
    """(texts, generation options, results)."""
    reader = Reader(answer)
    name = task.config.task
    results = lm_eval.evaluate(reader, {"tasks": {name: task}, "groups": {}}, bootstrap_iters=0)
    texts = [text for text, _ in reader.requests]
    return texts, reader.requests[0][1], results["results"][name]


def test_needles_are_found_by_who_reads_the_whole_text(tokenizer):
    length = 1024
    task = recall.make(f"niah_single_1_{length}", tokenizer)
    texts, options, found = run(
        task, lambda text: " " + re.search(r"is: (\d+)\.", text)[1] + ". The grass is green."
    )
    assert found["contains,none"] == 1
    assert len(texts) == len(set(texts)) == recall.SAMPLES
    # As long as asked for, with 128 tokens of answer.
    sizes = [len(tokenizer.encode(text)) + 128 for text in texts]
    assert length - 2 * len(tokenizer.encode(recall.HAY)) < min(sizes) <= max(sizes) <= length
    assert (options["max_gen_toks"], options["until"]) == (128, [])
    assert recall.needles(length, tokenizer) == recall.needles(length, tokenizer)
    # Anywhere in the text, and nowhere else: who forgets the first half misses some.
    *_, found = run(
        task, lambda text: (re.findall(r"is: (\d+)\.", text[len(text) // 2 :]) or [""])[0]
    )
    assert 0.2 < found["contains,none"] < 0.8


@pytest.mark.parametrize("entries", [16, 128])
def test_phone_numbers_are_found_by_who_reads_the_list(entries):
    task = recall.make(f"phonebook_{entries}", None)

    def look_up(text):
        book, asked = text.split("\n\n")
        assert (
            len(set(book.split("\n")))
            == len({line.split(":")[0] for line in book.split("\n")})
            == entries
        )
        *worked, name = asked.split("\n")
        assert len(worked) == 2
        assert set(worked) < set(book.split("\n"))
        assert name not in "\n".join(worked)
        return " " + re.search(f"^{name} (.*)$", book, re.MULTILINE)[1]

    texts, options, found = run(task, look_up)
    assert (found["exact_match,none"], len(set(texts)), options["until"]) == (
        1,
        recall.SAMPLES,
        ["\n"],
    )
    assert run(task, lambda text: look_up(text) + "0")[2]["exact_match,none"] == 0
    # The second of the answered ones.
    assert run(task, lambda text: text.split("\n")[-2].split(":")[1])[2]["exact_match,none"] < 0.1


def test_passages_are_completed(tmp_path, monkeypatch):
    rows = [
        {
            "context": " Rome is a city. Italy's capital is",
            "question": "Italy's capital is ",
            "answers": ["Rome"],
        },
        {
            "context": "[DOC] [TLE] Elba [PAR] An island.",
            "question": "Elba is an",
            "answers": ["isle", "Island"],
        },
        {"context": "Nothing.", "question": "Nobody knows", "answers": []},
    ]
    (tmp_path / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setitem(recall.BASED, "based_triviaqa", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    task = recall.make("based_triviaqa", None)
    texts, options, found = run(task, lambda text: " an ISLAND of" if "Elba" in text else " Milan")
    assert texts == [
        "Rome is a city. Italy's capital is",
        "Elba  An island. Elba is an",
        "Nothing. Nobody knows",
    ]
    assert found["contains,none"] == pytest.approx(1 / 3)
    assert options == {"until": ["\n"], "max_gen_toks": 48, "do_sample": False}


def test_names_of_the_suites_are_the_harness_s():
    from lm_eval.tasks import TaskManager

    tasks = Path(lm_eval.__file__).parent / "tasks"
    names = "fda squad_completion swde longbench arc hellaswag lambada piqa siqa super_glue wikitext winogrande"
    folders = [tasks / name for name in names.split()]
    theirs = set(TaskManager(include_path=folders, include_defaults=False).all_tasks)
    assert set(task_table.SUITES["longbench-14"] + task_table.SUITES["paper"]) < theirs
    assert [name for name in task_table.SUITES["recall"] if name not in theirs] == recall.NAMES
