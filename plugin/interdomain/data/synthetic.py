"""Makes recall tasks that a small model learns in minutes.

    MQAR(length=64, items=8, vocab=34).examples("train", 0)

An example is one document of `length` tokens, the last of which is EOS. So a window of that length
is an example. All examples of a task have the same number of answer tokens. Examples depend only on
the task and the split, and are the same on every machine.

Shapes: N examples of a block, T tokens of an example, P items of an example.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from interdomain.data.corpus import ANSWERS
from interdomain.data.indexed import ShardWriter
from interdomain.data.tokenize_parallel import SPLITS
from interdomain.data.tokenizer import SPECIALS_KEY

BLOCK = 1024  # examples that are drawn at once (N)
SPECIALS = ["<unk>", "<eos>"]  # the last two ids
MAX_WORDS = 65_536  # ids are uint16
UINT8_CODE = 1  # dtype code of uint8 in a shard's index


class Draw:
    """Random numbers from Philox (Salmon et al., 2011), the same in every version of numpy.

    Args:
        key: Two numbers that choose the sequence.
    """

    def __init__(self, *key: int) -> None:
        self.bits = np.random.Philox(key=np.array(key, np.uint64))

    def below(self, n: int | np.ndarray, *shape: int) -> np.ndarray:
        """Draws int64 from [0, n), of the given shape, to which `n` may broadcast."""
        # The upper 32 bits are a fraction of 2^32. Its product with n is a number below n * 2^32.
        bits = self.bits.random_raw(int(np.prod(shape))).reshape(shape)
        fraction = bits >> np.uint64(32)
        product = fraction * np.asarray(n, np.uint64)
        return (product >> np.uint64(32)).astype(np.int64)

    def distinct(self, n: int, rows: int, columns: int) -> np.ndarray:
        """Draws integers from [0, n), int64 [rows, columns]. The numbers of a row are different."""
        keys = self.bits.random_raw(rows * n).reshape(rows, n)
        return keys.argsort(axis=1, kind="stable")[:, :columns]


@dataclass(frozen=True)
class Task:
    """Base class of the tasks.

    Attributes:
        length: Tokens of an example (T), EOS included.
        items: Things to remember in an example (P).
        vocab: Words of the vocabulary, SPECIALS included.
        seed: Another seed gives other examples.
        defaults: Values of length, items and vocab where the user gives none.

    Raises:
        ValueError: The numbers do not fit one another.
    """

    length: int
    items: int
    vocab: int
    seed: int = 0
    defaults: ClassVar[dict[str, int]]

    def __post_init__(self) -> None:
        """Checks that the numbers fit one another."""
        if min(self.length, self.items, self.vocab) < 1 or self.seed < 0:
            problem = "each must be at least 1, and the seed at least 0"
        elif self.vocab > MAX_WORDS:
            problem = f"a vocabulary has at most {MAX_WORDS:,} words"
        else:
            problem = self._problem()
        if problem:
            raise ValueError(
                f"--synthetic with {self.items} items in {self.length} tokens and a vocabulary of {self.vocab}: {problem}."
            )

    @property
    def answers(self) -> int:
        """Answer tokens of each example."""
        raise NotImplementedError

    def words(self) -> list[str]:
        """Returns the vocabulary by id, without SPECIALS."""
        raise NotImplementedError

    def _problem(self) -> str:
        """Says which constraint the numbers break. Empty if they break none."""
        raise NotImplementedError

    def _fill(self, draw: Draw, ids: np.ndarray, marks: np.ndarray, split: str) -> None:
        """Writes N examples: all of their T tokens but the last, which is EOS.

        Args:
            draw: Source of random numbers.
            ids: Token ids to write, uint16 [N, T - 1]. They are zeros before.
            marks: To be set to 1 at answers, uint8 [N, T - 1]. They are zeros before.
            split: `train` or `validation`.
        """
        raise NotImplementedError

    def examples(self, split: str, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Makes the examples block * BLOCK to (block + 1) * BLOCK of a split.

        Args:
            split: `train` or `validation`.
            block: Number of the block, from 0.

        Returns:
            Token ids, uint16 [N, T], and 1 for each answer, uint8 [N, T].
        """
        ids = np.zeros((BLOCK, self.length), np.uint16)
        marks = np.zeros((BLOCK, self.length), np.uint8)
        ids[:, -1] = len(self.words()) + SPECIALS.index("<eos>")
        # Every block of every split has random numbers of its own.
        draw = Draw(self.seed, 2 * block + SPLITS.index(split))
        # EOS is never an answer.
        self._fill(draw, ids[:, :-1], marks[:, :-1], split)
        return ids, marks


class MQAR(Task):
    """Multi-query associative recall (Arora et al., 2023, "Zoology").

    An example is `k3 v7 k1 v2 ... k1 v2 k3 v7 k1 v2 ... <eos>`.

    First come P pairs of a key and its value. Then come keys, each with its value, which is the
    answer. Keys and values of an example are distinct. The keys are drawn uniformly, so that every
    second token is an answer; the published task has each key once, after gaps from a power law,
    with random tokens between.

    A training example consists of 1, 2, 4 or 8 such lists of equal length, with P pairs in all.
    Short lists are learned first, as in the published mixture of lengths. A validation example is
    one list.
    """

    defaults: ClassVar = dict(length=64, items=8, vocab=34)

    @property
    def answers(self) -> int:
        return self.length // 2 - self.items - 1

    def words(self) -> list[str]:
        """Returns as many keys as values: k0, k1, ..., v0, v1, ..."""
        n = (self.vocab - len(SPECIALS)) // 2
        keys = [f"k{i}" for i in range(n)]
        values = [f"v{i}" for i in range(n)]
        return keys + values

    def _problem(self) -> str:
        """Says which constraint the numbers break. Empty if they break none."""
        if self.length % 2 or self.answers < 1:
            return "the length must be even, and at least 2 * items + 4"
        if len(self.words()) < 2 * self.items:
            return "all keys and values are different, so the vocabulary must have at least 2 * items + 2 words"
        return ""

    def _fill(self, draw: Draw, ids: np.ndarray, marks: np.ndarray, split: str) -> None:
        """Writes N examples of pairs and questions, without EOS.

        Args:
            draw: Source of random numbers.
            ids: Token ids to write, uint16 [N, T - 1]. They are zeros before.
            marks: To be set to 1 at answers, uint8 [N, T - 1]. They are zeros before.
            split: `train`, or `validation`, whose examples have a single list.
        """
        N = len(ids)
        P = self.items
        n = len(self.words()) // 2
        keys = draw.distinct(n, N, P)
        values = n + draw.distinct(n, N, P)
        pairs = np.stack([keys, values], axis=2)  # [N, P, 2]

        # Choose for each example the number of its lists, among those that divide pairs and slots.
        # A slot is two tokens: a key and its value. Validation takes the first, which is one list.
        slots = self.length // 2
        possible = []
        for lists in (1, 2, 4, 8):
            if P % lists == 0 and slots % lists == 0:
                possible.append(lists)
        choice = draw.below(len(possible), N)
        if split == "validation":
            choice[:] = 0

        for i, lists in enumerate(possible):
            # Find the list of each slot, and its place in that list.
            rows = np.flatnonzero(choice == i)
            slot = np.arange(slots)
            slots_per_list = slots // lists
            pairs_per_list = P // lists
            first_pair = slot // slots_per_list * pairs_per_list  # of the list
            place = slot % slots_per_list
            # The first slots of a list hold its pairs in order. Each later slot asks for one of
            # these, drawn uniformly.
            is_question = place >= pairs_per_list
            drawn = draw.below(pairs_per_list, len(rows), slots)
            pair = first_pair + np.where(is_question, drawn, place)  # [rows, slots]
            # EOS takes the place of the last value, so the last slot has no answer.
            tokens = pairs[rows[:, None], pair].reshape(len(rows), self.length)
            ids[rows] = tokens[:, :-1]
            answers = 2 * np.flatnonzero(is_question[:-1]) + 1
            marks[np.ix_(rows, answers)] = 1


class SelectiveCopying(Task):
    """Selective copying (Gu & Dao, 2023, "Mamba"): `. . t3 . t0 . . . t7 copy t3 t0 t7 <eos>`.

    All tokens after `copy` are one answer. The P tokens are drawn with replacement, their places
    without.
    """

    defaults: ClassVar = dict(length=256, items=16, vocab=20)

    @property
    def answers(self) -> int:
        return self.items

    def words(self) -> list[str]:
        n = self.vocab - len(SPECIALS) - 2
        tokens = [f"t{i}" for i in range(n)]
        return [*tokens, ".", "copy"]

    def _problem(self) -> str:
        """Says which constraint the numbers break. Empty if they break none."""
        if self.length < 2 * self.items + 2:
            return "the length must be at least 2 * items + 2"
        if self.vocab < len(SPECIALS) + 4:
            return f"the vocabulary must have at least {len(SPECIALS) + 4} words"
        return ""

    def _fill(self, draw: Draw, ids: np.ndarray, marks: np.ndarray, split: str) -> None:
        """Writes N examples of noise, tokens and their copy, without EOS.

        Args:
            draw: Source of random numbers.
            ids: Token ids to write, uint16 [N, T - 1]. They are zeros before.
            marks: To be set to 1 at answers, uint8 [N, T - 1]. They are zeros before.
            split: Ignored: the examples of both splits are made alike.
        """
        N, width = ids.shape
        P = self.items
        # The last two words are `.` and `copy`. The words before them are what is copied.
        n = len(self.words()) - 2
        tokens = draw.below(n, N, P)  # [N, P], each from 0 to n - 1
        places = np.sort(draw.distinct(width - P - 1, N, P))  # [N, P], no two alike in a row
        # The first part is noise (`.`), with the tokens at their places.
        ids[:] = n
        ids[np.arange(N)[:, None], places] = tokens
        # After `copy` the tokens come again, as the answer.
        ids[:, -P - 1] = n + 1
        ids[:, -P:] = tokens
        marks[:, -P:] = 1


TASKS: dict[str, type[Task]] = {"mqar": MQAR, "selective-copying": SelectiveCopying}


def tokenizer_json(words: list[str]) -> bytes:
    """Returns a `hf_tokenizer.json` of words between white space.

    It has the `tokenizers` library's WordLevel model, and EOS.

    Args:
        words: The vocabulary by id, without SPECIALS.
    """
    vocabulary = {word: i for i, word in enumerate([*words, "<unk>"])}
    described = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
        "decoder": None,
        # EOS is not in the vocabulary of words: text that names it is text.
        "added_tokens": [
            {
                "id": len(vocabulary),
                "content": "<eos>",
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        ],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
        SPECIALS_KEY: {
            "bos_token": None,
            "eos_token": "<eos>",
            "pad_token": None,
            "unk_token": "<unk>",
        },
    }
    return json.dumps(described, indent=1).encode()


def write_examples(
    task: Task,
    folder: Path,
    counts: dict[str, int],
    shard_tokens: int,
    report: Callable[[int], object],
) -> dict[str, list[dict]]:
    """Writes the shards of examples and of their answers.

    Args:
        task: The task.
        folder: Where to write.
        counts: Examples to draw for each split. A training example that is also a validation
            example is left out.
        shard_tokens: Size of a shard.
        report: Called with the number of examples after each block.

    Returns:
        A manifest's records of the shards by split, without empty splits.
    """
    # Validation comes first, so that its examples can be left out of training.
    splits = {}
    validation_examples = set()
    for split in ("validation", "train"):
        vocab_size = len(task.words()) + len(SPECIALS)
        tokens = ShardWriter(folder / split, vocab_size, shard_tokens)
        answers = ShardWriter(folder / f"{split}{ANSWERS}", 2, shard_tokens, UINT8_CODE)
        for first in range(0, counts[split], BLOCK):
            ids, marks = task.examples(split, first // BLOCK)
            missing = counts[split] - first
            drawn = [row.tobytes() for row in ids[:missing]]
            wanted = [i for i, example in enumerate(drawn) if example not in validation_examples]
            if split == "validation":
                validation_examples.update(drawn)
            lengths = [task.length] * len(wanted)
            tokens.add_documents(ids[wanted].ravel(), lengths)
            answers.add_documents(marks[wanted].ravel(), lengths)
            report(len(drawn))
        token_shards = tokens.close()
        answer_shards = answers.close()
        if token_shards:
            splits[split] = token_shards
            splits[split + ANSWERS] = answer_shards
    return splits
