"""The paper's recall tasks through lm-evaluation-harness: models that know the answer's place, and models that do not."""

import re
from pathlib import Path

import pytest

from interdomain.tools._evaluate import task_table

from ..common import write_rows

lm_eval = pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
from lm_eval.api.model import LM  # noqa: E402

from interdomain.tools._evaluate import recall  # noqa: E402


class Reader(LM):
    """A model that answers by `answer(text)`, and keeps the texts and the options of generation."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def generate_until(self, requests, disable_tqdm=False):
        self.texts = [request.args[0] for request in requests]
        self.options = requests[0].args[1]
        return list(map(self.answer, self.texts))

    loglikelihood = pytest.fail
    loglikelihood_rolling = pytest.fail


def run(task, answer):
    """Returns the reader, and the share of its answers that are right."""
    reader = Reader(answer)
    name = task.config.task
    results = lm_eval.evaluate(reader, {"tasks": {name: task}, "groups": {}}, bootstrap_iters=0)
    metric = "exact_match" if name.startswith("phonebook") else "contains"
    return reader, results["results"][name][f"{metric},none"]


NEEDLE = re.compile(r"is: (\d+)\.")


def find_needle(text):
    return f" {NEEDLE.search(text)[1]}. The grass is green."


def find_needle_in_second_half(text):
    needle = NEEDLE.search(text, len(text) // 2)
    return needle[1] if needle else ""


def test_needles_are_found_by_who_reads_the_whole_text(tokenizer):
    length = 1024
    task = recall.make(f"niah_single_1_{length}", tokenizer)
    reader, share = run(task, find_needle)
    assert share == 1
    assert len(reader.texts) == len(set(reader.texts)) == recall.SAMPLES
    # The texts are as long as asked for, with 128 tokens of answer.
    sizes = [len(tokenizer.encode(text)) + 128 for text in reader.texts]
    assert min(sizes) > length - 2 * len(tokenizer.encode(recall.HAY))
    assert max(sizes) <= length
    assert (reader.options["max_gen_toks"], reader.options["until"]) == (128, [])
    assert recall.needles(length, tokenizer) == recall.needles(length, tokenizer)
    # The needle is anywhere in the text: who forgets the first half misses some.
    _, share = run(task, find_needle_in_second_half)
    assert 0.2 < share < 0.8


def look_up(text):
    """Answers from the list, which also has the two answered examples."""
    book, asked = text.split("\n\n")
    *examples, name = asked.split("\n")
    assert len(examples) == 2
    assert name not in "\n".join(examples)
    return " " + re.search(f"^{name} (.*)$", book, re.MULTILINE)[1]


def look_up_wrongly(text):
    return look_up(text) + "0"


@pytest.mark.parametrize("entries", [16, 128])
def test_phone_numbers_are_found_by_who_reads_the_list(entries):
    task = recall.make(f"phonebook_{entries}", None)
    reader, share = run(task, look_up)
    assert share == 1
    assert len(set(reader.texts)) == recall.SAMPLES
    assert reader.options["until"] == ["\n"]
    for text in reader.texts:
        names = re.findall(r"^(.*?):", text.split("\n\n")[0], re.MULTILINE)
        assert len(names) == len(set(names)) == entries
    assert run(task, look_up_wrongly)[1] == 0


def answer_about_elba(text):
    return " an ISLAND of" if "Elba" in text else " Milan"


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
    write_rows(tmp_path / "validation.jsonl", rows)
    monkeypatch.setitem(recall.BASED, "based_triviaqa", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    reader, share = run(recall.make("based_triviaqa", None), answer_about_elba)
    assert reader.texts == [
        "Rome is a city. Italy's capital is",
        "Elba  An island. Elba is an",
        "Nothing. Nobody knows",
    ]
    assert share == pytest.approx(1 / 3)
    assert reader.options == {"until": ["\n"], "max_gen_toks": 48, "do_sample": False}


def test_names_of_the_suites_are_the_harness_s():
    from lm_eval.tasks import TaskManager

    tasks = Path(lm_eval.__file__).parent / "tasks"
    names = "fda squad_completion swde longbench arc hellaswag lambada piqa siqa super_glue wikitext winogrande"
    folders = [tasks / name for name in names.split()]
    theirs = set(TaskManager(include_path=folders, include_defaults=False).all_tasks)
    assert theirs.issuperset(task_table.SUITES["longbench-14"])
    assert theirs.issuperset(task_table.SUITES["paper"])
    assert [name for name in task_table.SUITES["recall"] if name not in theirs] == recall.NAMES
