"""Recall from the context, for `evaluate`: the paper's table of it at 1.3B as tasks of lm-evaluation-harness.

`swde`, `fda` and `squad_completion` are the harness's own. The other tasks of that table are made here:

- niah_single_1_LENGTH: a number in a haystack of one sentence over and over, S-NIAH-1 of RULER (Hsieh et al., 2024), in its
  words. A text and its 128 tokens of answer take up to LENGTH tokens of the folder's own tokenizer, and all of it is seen, also
  beyond --max-length: that is what is asked. (The harness's own makes a list of millions of keys first, of further packages.)
- phonebook_ENTRIES: a list of names and numbers, two lookups answered, a third to answer (Jelassi et al., 2024).
- based_nq, based_triviaqa, based_drop: a passage and the beginning of a sentence that one of the answers completes; Based
  (Arora et al., 2024), of which the harness has the other three. A text that is too long loses its beginning.

The paper names the benchmarks, lengths and list sizes, not prompts or numbers of samples: here 200 of each length and size,
from a fixed seed, so that all folders read the same.
"""

import bisect
import random
import re

from datasets import Dataset
from lm_eval.api.task import ConfigurableTask

SAMPLES = 200
SEED = 42
ANSWER = 128
NEEDLES = {f"niah_single_1_{length}": length for length in (1024, 2048, 4096, 8192)}
BOOKS = {f"phonebook_{entries}": entries for entries in (16, 32, 64, 128)}
BASED = {
    f"based_{name.partition('_')[0]}": f"hazyresearch/based_{name}"
    for name in ("nq_2048", "triviaqa", "drop")
}
MADE = [*NEEDLES, *BOOKS]  # here, of no data
NAMES = [*MADE, *BASED]
MARKS = re.compile(r"\[(?:PAR|DOC|TLE)\]")  # of TriviaQA's pages

HAY = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
KINDS = "amber brisk calm crystal distant early fierce gentle golden hollow ivory lucky mellow northern quiet rapid silver tiny"
THINGS = "anchor bridge canyon falcon garden harbor island lantern lighthouse meadow orchard pebble river saddle thunder willow"
FIRST = """Alice Amir Anna Boris Carla Chen David Diana Elena Emil Fatima Felix Grace Hugo Ines Ivan Jane Jonas Karim Laura Leo
Lucy Maria Mark Nadia Nora Oliver Olga Omar Paula Peter Rosa Ruth Samuel Sara Simon Tara Tom Vera Victor"""
LAST = """Adams Baker Bauer Brown Carter Cohen Costa Cruz Davis Evans Fischer Garcia Gray Hall Hansen Hill Ito Jones Kaya Kelly
Khan Kim King Lee Lopez Martin Meyer Moore Novak Park Patel Reed Rossi Scott Silva Smith Turner Walker Wang Young"""


class Made(ConfigurableTask):
    """A task whose documents are made here. length: of its longest text with the answer, in tokens; 0 if that is not set."""

    def __init__(self, config: dict, documents: list[dict], length: int = 0) -> None:
        self.documents = documents
        self.length = length
        super().__init__(config={"test_split": "test", **config})

    def download(self, dataset_kwargs=None, **kwargs) -> None:
        self.dataset = {"test": Dataset.from_list(self.documents)}


def make(name: str, tokenizer) -> ConfigurableTask:
    """One of NEEDLES, BOOKS or BASED. Raises: ImportError, and what `datasets` raises for data that cannot be had."""
    text, score, until, tokens = PROMPTS[name.partition("_")[0]]
    config = {
        "task": name,
        "output_type": "generate_until",
        "doc_to_text": text,
        "doc_to_target": lambda doc: answers(doc)[0],
        "process_results": score,
        "metric_list": [
            {"metric": score.__name__, "aggregation": "mean", "higher_is_better": True}
        ],
        "generation_kwargs": {"until": until, "max_gen_toks": tokens, "do_sample": False},
        "metadata": {"version": 1.0},
    }
    if name in NEEDLES:
        return Made(config, needles(NEEDLES[name], tokenizer), NEEDLES[name])
    if name in BOOKS:
        return Made(config, books(BOOKS[name]))
    return ConfigurableTask(
        config={"dataset_path": BASED[name], "validation_split": "validation", **config}
    )


def answers(doc: dict) -> list[str]:
    return list(doc["answers"]) or ["unanswerable"]


def contains(doc: dict, results: list[str]) -> dict:
    """True if an answer stands in the text that was written, whatever the case."""
    return {"contains": float(any(answer.lower() in results[0].lower() for answer in answers(doc)))}


def exact_match(doc: dict, results: list[str]) -> dict:
    return {"exact_match": float(results[0].strip() in answers(doc))}


def needles(length: int, tokenizer) -> list[dict]:
    """S-NIAH-1: as many sentences as fit, one of them with the number. Raises: ValueError if not one fits."""

    def fits(lines: list[str], key: str) -> bool:
        return len(tokenizer.encode(find({"lines": lines, "key": key}))) + ANSWER <= length

    room = bisect.bisect(
        range(1, length), False, key=lambda n: not fits([HAY] * n, "crystal-lighthouse")
    )
    if not room:
        raise ValueError(
            f"{length:,} tokens of this tokenizer are too few for a needle-in-a-haystack text."
        )
    draw = random.Random(SEED)
    made = []
    for _ in range(SAMPLES):
        kind = draw.choice(KINDS.split())
        key = f"{kind}-{draw.choice(THINGS.split())}"
        number = str(draw.randrange(10**6, 10**7))
        lines = [HAY] * room
        lines.insert(
            draw.randint(0, room), f"One of the special magic numbers for {key} is: {number}."
        )
        while not fits(lines, key):
            lines.remove(HAY)
        made.append({"lines": lines, "key": key, "answers": [number]})
    return made


def find(doc: dict) -> str:
    """RULER's question about one number, and the beginning of its answer."""
    number = f"special magic number for {doc['key']} mentioned in the provided text"
    before = "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the"
    return "\n".join(
        [f"{before} number afterwards.", *doc["lines"], f"What is the {number}? The {number} is"]
    )


def books(entries: int) -> list[dict]:
    """Phone books of distinct names. lines: "name: number"; asked: three of their places, the last without its answer."""
    draw = random.Random(SEED)
    people = [f"{first} {last}" for first in FIRST.split() for last in LAST.split()]
    made = []
    for _ in range(SAMPLES):
        numbers = []
        for _ in range(entries):
            area = draw.randrange(1000)
            exchange = draw.randrange(1000)
            line = draw.randrange(10_000)
            numbers.append(f"{area:03}-{exchange:03}-{line:04}")
        names = draw.sample(people, entries)
        lines = [f"{name}: {number}" for name, number in zip(names, numbers, strict=True)]
        asked = draw.sample(range(entries), 3)
        made.append({"lines": lines, "asked": asked, "answers": [numbers[asked[-1]]]})
    return made


def lookup(doc: dict) -> str:
    *worked, last = (doc["lines"][i] for i in doc["asked"])
    name = last.partition(":")[0]
    return "\n".join([*doc["lines"], "", *worked, f"{name}:"])


def cloze(doc: dict) -> str:
    """The passage, without the sentence to complete if it ends with it, and then that sentence."""
    question = doc["question"].strip()
    passage = MARKS.sub("", doc["context"]).strip()
    while question and passage.lower().endswith(question.lower()):
        passage = passage[: -len(question)]
    return f"{passage.strip().strip('.')}. {question}"


PROMPTS = {  # by the first word of a name: text, score, where the answer ends, and its tokens
    "niah": (find, contains, [], ANSWER),
    "phonebook": (lookup, exact_match, ["\n"], 32),
    "based": (cloze, contains, ["\n"], 48),
}
