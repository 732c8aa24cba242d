"""Makes tasks of recall from the context, for `evaluate`.

They are the tasks of the paper's table of recall at 1.3B, for lm-evaluation-harness. `swde`, `fda`
and `squad_completion` are the harness's own. The other tasks of that table are made here:

- niah_single_1_LENGTH: a number in a haystack of one repeated sentence, S-NIAH-1 of RULER (Hsieh et
  al., 2024), with its prompt. A text and the 128 tokens of its answer take up to LENGTH tokens of
  the exported model's tokenizer. All of it is seen, also beyond --max-length. (The harness's own
  task makes a list of millions of keys first, with further packages.)
- phonebook_ENTRIES: a list of names and numbers, two answered lookups, and a third to answer
  (Jelassi et al., 2024).
- based_nq, based_triviaqa, based_drop: a passage, and the beginning of a sentence that one of the
  answers completes, of Based (Arora et al., 2024). The harness has the other three. A text that is
  too long loses its beginning.

The paper names the benchmarks, lengths and list sizes, but not prompts or numbers of samples. Here
each length and size has 200 samples from a fixed seed, so that all models read the same.

A "document" here is one sample of a task, a dict, as the harness calls it.
"""

import bisect
import itertools
import random
import re
from collections.abc import Callable
from typing import Any

from datasets import Dataset
from lm_eval.api.task import ConfigurableTask

from interdomain.data import Tokenizer

SAMPLES = 200
SEED = 42
ANSWER_TOKENS = 128  # the largest answer of a needle task, as in RULER
NEEDLES = {f"niah_single_1_{length}": length for length in (1024, 2048, 4096, 8192)}
BOOKS = {f"phonebook_{entries}": entries for entries in (16, 32, 64, 128)}
# The data sets of the hub.
BASED = {
    "based_nq": "hazyresearch/based_nq_2048",
    "based_triviaqa": "hazyresearch/based_triviaqa",
    "based_drop": "hazyresearch/based_drop",
}
MADE = [*NEEDLES, *BOOKS]  # tasks that need no data
NAMES = [*MADE, *BASED]
# Marks of paragraphs, documents and titles in the passages of TriviaQA.
PAGE_MARKS = re.compile(r"\[(?:PAR|DOC|TLE)\]")

# The haystack is this sentence, repeated.
HAY = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
# A needle's key is a word of KINDS and a word of THINGS.
KINDS = "amber brisk calm crystal distant early fierce gentle golden hollow ivory lucky mellow northern quiet rapid silver tiny"
THINGS = "anchor bridge canyon falcon garden harbor island lantern lighthouse meadow orchard pebble river saddle thunder willow"
# First and last names in the phone books.
FIRST = """Alice Amir Anna Boris Carla Chen David Diana Elena Emil Fatima Felix Grace Hugo Ines Ivan Jane Jonas Karim Laura Leo
Lucy Maria Mark Nadia Nora Oliver Olga Omar Paula Peter Rosa Ruth Samuel Sara Simon Tara Tom Vera Victor"""
LAST = """Adams Baker Bauer Brown Carter Cohen Costa Cruz Davis Evans Fischer Garcia Gray Hall Hansen Hill Ito Jones Kaya Kelly
Khan Kim King Lee Lopez Martin Meyer Moore Novak Park Patel Reed Rossi Scott Silva Smith Turner Walker Wang Young"""

Document = dict[str, Any]  # a sample of a task


class MadeTask(ConfigurableTask):
    """A task whose samples are made here."""

    def __init__(self, config: dict, documents: list[Document], length: int = 0) -> None:
        """Makes the task.

        Args:
            config: The task's configuration, from `_config`.
            documents: The samples.
            length: The tokens of its longest text with the answer. 0 if its texts have no fixed
                length.
        """
        self.documents = documents
        self.length = length
        super().__init__(config={"test_split": "test", **config})

    def download(self, dataset_kwargs: Any = None, **kwargs: Any) -> None:
        """Takes the place of reading a data set."""
        self.dataset = {"test": Dataset.from_list(self.documents)}


def make(name: str, tokenizer: Tokenizer | None) -> ConfigurableTask:
    """Makes one of NEEDLES, BOOKS or BASED.

    Args:
        name: The name of the task.
        tokenizer: The tokenizer of the model, which NEEDLES need. None is enough for the others.

    Raises:
        ImportError: A package is missing.
        OSError: The data cannot be read.
    """
    if name in NEEDLES:
        assert tokenizer is not None
        config = _config(name, needle_prompt, contains, until=[], max_tokens=ANSWER_TOKENS)
        return MadeTask(config, needles(NEEDLES[name], tokenizer), NEEDLES[name])
    if name in BOOKS:
        config = _config(name, phone_book_prompt, exact_match, until=["\n"], max_tokens=32)
        return MadeTask(config, phone_books(BOOKS[name]))
    config = _config(name, passage_prompt, contains, until=["\n"], max_tokens=48)
    config |= {"dataset_path": BASED[name], "validation_split": "validation"}
    return ConfigurableTask(config=config)


def _config(
    name: str,
    prompt: Callable[[Document], str],
    score: Callable[[Document, list[str]], dict[str, float]],
    until: list[str],
    max_tokens: int,
) -> dict[str, Any]:
    """Returns the configuration of a task, as the harness's YAML files have it.

    Args:
        name: The name of the task.
        prompt: Makes the text of a sample.
        score: Makes the metric of a sample from the text that the model wrote: a dict with one
            value under the function's own name.
        until: The answer ends before any of these.
        max_tokens: The largest number of tokens of an answer.
    """
    return {
        "task": name,
        "output_type": "generate_until",
        "doc_to_text": prompt,
        "doc_to_target": first_answer,
        "process_results": score,
        "metric_list": [
            {"metric": score.__name__, "aggregation": "mean", "higher_is_better": True}
        ],
        "generation_kwargs": {"until": until, "max_gen_toks": max_tokens, "do_sample": False},
        "metadata": {"version": 2.0},
    }


def answers(document: Document) -> list[str]:
    return list(document["answers"]) or ["unanswerable"]


def first_answer(document: Document) -> str:
    """Returns the target that the harness logs beside a sample."""
    return answers(document)[0]


def contains(document: Document, results: list[str]) -> dict[str, float]:
    """Returns 1 if an answer stands in the text that was written, in upper or lower case.

    Args:
        document: The sample.
        results: The text that the model wrote, as a list of one.
    """
    text = results[0].lower()
    return {"contains": float(any(answer.lower() in text for answer in answers(document)))}


def exact_match(document: Document, results: list[str]) -> dict[str, float]:
    """Returns 1 if the text that was written, `results[0]`, is an answer."""
    return {"exact_match": float(results[0].strip() in answers(document))}


def needles(length: int, tokenizer: Tokenizer) -> list[Document]:
    """Makes the texts of RULER's S-NIAH-1: as many sentences as fit, and one with the number.

    Args:
        length: Tokens of a prompt and its answer together.
        tokenizer: The tokenizer of the model.

    Raises:
        ValueError: Not one sentence fits into `length` tokens.
    """

    def fits(lines: list[str], key: str) -> bool:
        prompt = needle_prompt({"lines": lines, "key": key})
        return len(tokenizer.encode(prompt)) + ANSWER_TOKENS <= length

    # The number of sentences that fit beside a question with a long key.
    def is_too_long(sentences: int) -> bool:
        return not fits([HAY] * sentences, "crystal-lighthouse")

    room = bisect.bisect(range(1, length), False, key=is_too_long)
    if not room:
        raise ValueError(
            f"{length:,} tokens of this tokenizer are too few for a needle-in-a-haystack text."
        )
    # Draw a key, a number and its place for each text.
    draw = random.Random(SEED)
    made = []
    for _ in range(SAMPLES):
        kind = draw.choice(KINDS.split())
        thing = draw.choice(THINGS.split())
        key = f"{kind}-{thing}"
        number = str(draw.randrange(10**6, 10**7))
        depth = draw.random()  # the number's place in the text, from 0 to 1
        # The sentence with the number was not counted above: leave out others until it fits.
        lines = []
        for sentences in range(room, -1, -1):
            lines = [HAY] * sentences
            place = int(depth * (sentences + 1))
            lines.insert(place, f"One of the special magic numbers for {key} is: {number}.")
            if fits(lines, key):
                break
        made.append({"lines": lines, "key": key, "answers": [number]})
    return made


def needle_prompt(document: Document) -> str:
    """Returns RULER's question about one number, and the beginning of its answer.

    Args:
        document: A sample of `needles`.
    """
    number = f"special magic number for {document['key']} mentioned in the provided text"
    lines = [
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
        "number afterwards.",
        *document["lines"],
        f"What is the {number}? The {number} is",
    ]
    return "\n".join(lines)


def phone_books(entries: int) -> list[Document]:
    """Makes phone books of distinct names.

    Each has its `lines`, "name: number", and the places `asked` of three lines. The prompt shows
    the answers to the first two.

    Args:
        entries: The number of lines of a book.
    """
    draw = random.Random(SEED)
    pairs = itertools.product(FIRST.split(), LAST.split())
    people = [f"{first} {last}" for first, last in pairs]
    made = []
    for _ in range(SAMPLES):
        # A telephone number for each entry.
        numbers = []
        for _ in range(entries):
            area = draw.randrange(1000)
            exchange = draw.randrange(1000)
            line = draw.randrange(10_000)
            numbers.append(f"{area:03}-{exchange:03}-{line:04}")
        # No name stands twice in a book.
        names = draw.sample(people, entries)
        lines = [f"{name}: {number}" for name, number in zip(names, numbers, strict=True)]
        asked = draw.sample(range(entries), 3)
        made.append({"lines": lines, "asked": asked, "answers": [numbers[asked[-1]]]})
    return made


def phone_book_prompt(document: Document) -> str:
    """Returns the list, two lookups with their answers, and the name of the third.

    Args:
        document: A sample of `phone_books`.
    """
    *worked, last = [document["lines"][i] for i in document["asked"]]
    name = last.partition(":")[0]
    return "\n".join([*document["lines"], "", *worked, f"{name}:"])


def passage_prompt(document: Document) -> str:
    """Returns a passage and the sentence to complete.

    The sentence is cut from the end of the passage if it stands there.

    Args:
        document: A sample of one of BASED.
    """
    question = document["question"].strip()
    passage = PAGE_MARKS.sub("", document["context"]).strip()
    # Some passages end with the sentence itself.
    while question and passage.lower().endswith(question.lower()):
        passage = passage[: -len(question)]
    return f"{passage.strip().strip('.')}. {question}"
