"""Recall tasks that a small model learns in minutes: `MQAR(length=64, items=8, vocab=34).examples("train", 0)`.

An example is one document of `length` tokens, the last of which is EOS, so that windows of that length are examples. All of a
task's examples have the same number of answer tokens. Which they are is a function of task and split alone, on every machine.
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

BLOCK = 1024  # examples that are drawn at once
SPECIALS = ["<unk>", "<eos>"]  # the last two ids
MOST_WORDS = 65_536  # ids are uint16
BYTES = 1  # the code of uint8 in an index

# Shapes: N examples of a block, T length, P items.


class Draw:
    """Random numbers from the bits of Philox (Salmon et al., 2011), which no version of numpy changes."""

    def __init__(self, *key: int) -> None:
        self.bits = np.random.Philox(key=np.array(key, np.uint64))

    def below(self, n: int | np.ndarray, *shape: int) -> np.ndarray:
        """Integers in [0, n), int64."""
        raw = self.bits.random_raw(int(np.prod(shape))).reshape(shape) >> np.uint64(32)
        return (raw * np.asarray(n, np.uint64) >> np.uint64(32)).astype(np.int64)

    def distinct(self, n: int, *shape: int) -> np.ndarray:
        """The same, and no row holds a number twice."""
        raw = self.bits.random_raw(shape[0] * n).reshape(shape[0], n)
        return raw.argsort(axis=1, kind="stable")[:, : shape[1]]


@dataclass(frozen=True)
class Task:
    """length: tokens of an example. items: things to remember in it. vocab: words, special ones included.

    Raises: ValueError for numbers that do not fit one another.
    """

    length: int
    items: int
    vocab: int
    seed: int = 0
    defaults: ClassVar[dict[str, int]]

    def __post_init__(self) -> None:
        if min(self.length, self.items, self.vocab, self.seed + 1) < 1:
            wrong = "each must be at least 1, and the seed at least 0"
        elif self.vocab > MOST_WORDS:
            wrong = f"a vocabulary has at most {MOST_WORDS:,} words"
        else:
            wrong = self._wrong()
        if wrong:
            raise ValueError(
                f"--synthetic with {self.items} items in {self.length} tokens and a vocabulary of {self.vocab}: {wrong}."
            )

    @property
    def answers(self) -> int:
        """Answer tokens of each example."""
        raise NotImplementedError

    def words(self) -> list[str]:
        """The vocabulary by id, without SPECIALS."""
        raise NotImplementedError

    def _wrong(self) -> str:
        """Text that says what does not fit, and what would; empty if all does."""
        raise NotImplementedError

    def _fill(self, draw: Draw, ids: np.ndarray, marks: np.ndarray, split: str) -> None:
        """Write examples into ids, uint16 [N, T - 1], and 1 at their answers into marks, uint8 [N, T - 1]; both are zeros."""
        raise NotImplementedError

    def examples(self, split: str, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids, uint16 [N, T], and 1 for each answer, uint8 [N, T], of a split's BLOCK examples from block * BLOCK on."""
        ids = np.zeros((BLOCK, self.length), np.uint16)
        marks = np.zeros((BLOCK, self.length), np.uint8)
        ids[:, -1] = len(self.words()) + SPECIALS.index("<eos>")
        self._fill(
            Draw(self.seed, 2 * block + SPLITS.index(split)), ids[:, :-1], marks[:, :-1], split
        )
        return ids, marks


class MQAR(Task):
    """Multi-query associative recall (Arora et al., 2023, "Zoology"): `k3 v7 k1 v2 ... k1 v2 k3 v7 k1 v2 ... <eos>`.

    First the pairs of a key and its value; after them keys, each with its value, which is the answer. Keys and values of an
    example are distinct. Which key comes is drawn uniformly, so that there is an answer in every second token; the published
    task has each key once, after gaps from a power law, and random tokens between. Training examples consist of 1, 2, 4 or 8
    such lists of equal length, with as many pairs in all: short lists are learned first. The published mixture of lengths does
    the same. Validation examples are one list.
    """

    defaults: ClassVar = dict(length=64, items=8, vocab=34)

    @property
    def answers(self) -> int:
        return self.length // 2 - self.items - 1

    def words(self) -> list[str]:
        n = (self.vocab - len(SPECIALS)) // 2
        return [f"{kind}{i}" for kind in "kv" for i in range(n)]

    def _wrong(self) -> str:
        if self.length % 2 or self.answers < 1:
            return f"the length must be even, and at least {2 * self.items + 4} tokens"
        if len(self.words()) < 2 * self.items:
            return f"all keys and values are different; give {2 * self.items + len(SPECIALS)} words or more"
        return ""

    def _fill(self, draw: Draw, ids: np.ndarray, marks: np.ndarray, split: str) -> None:
        n = len(self.words()) // 2
        N = len(ids)
        P = self.items
        slots = self.length // 2
        pairs = np.stack([draw.distinct(n, N, P), n + draw.distinct(n, N, P)], axis=2)  # [N, P, 2]
        possible = [lists for lists in (1, 2, 4, 8) if P % lists == slots % lists == 0]
        number = draw.below(len(possible), N) * (split == "train")
        for i, lists in enumerate(possible):
            rows = np.flatnonzero(number == i)
            at = np.arange(slots)
            size = slots // lists
            each = P // lists
            first = at // size * each  # the list's first pair
            place = at % size  # the slot's place in the list
            asked = first + np.where(place < each, place, draw.below(each, len(rows), slots))
            ids[rows] = pairs[rows[:, None], asked].reshape(len(rows), self.length)[:, :-1]
            marks[np.ix_(rows, 2 * at[:-1][(place >= each)[:-1]] + 1)] = 1


class SelectiveCopying(Task):
    """Selective copying (Gu & Dao, 2023, "Mamba"): `. . t3 . t0 . . . t7 copy t3 t0 t7 <eos>`.

    What follows `copy` is one answer. The tokens are drawn with replacement, their places without.
    """

    defaults: ClassVar = dict(length=256, items=16, vocab=20)

    @property
    def answers(self) -> int:
        return self.items

    def words(self) -> list[str]:
        return [*(f"t{i}" for i in range(self.vocab - len(SPECIALS) - 2)), ".", "copy"]

    def _wrong(self) -> str:
        if self.length < 2 * self.items + 2:
            return f"an item takes two tokens; give {2 * self.items + 2} tokens or more"
        if self.vocab < len(SPECIALS) + 4:
            return f"give {len(SPECIALS) + 4} words or more"
        return ""

    def _fill(self, draw: Draw, ids: np.ndarray, marks: np.ndarray, split: str) -> None:
        n = len(self.words()) - 2
        N, T = ids.shape
        P = self.items
        tokens = draw.below(n, N, P)
        places = np.sort(draw.distinct(T - P - 1, N, P))
        ids[:] = n  # the noise
        ids[np.arange(N)[:, None], places] = ids[:, -P:] = tokens
        ids[:, -P - 1] = n + 1
        marks[:, -P:] = 1


TASKS: dict[str, type[Task]] = {"mqar": MQAR, "selective-copying": SelectiveCopying}


def tokenizer_json(words: list[str]) -> bytes:
    """A `hf_tokenizer.json` of these words between white space: what `tokenizers` writes of WordLevel, and EOS."""
    vocabulary = {word: i for i, word in enumerate([*words, "<unk>"])}
    eos = {"id": len(vocabulary), "content": "<eos>", "special": True}
    eos |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    described = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
        "added_tokens": [eos],  # not in the vocabulary of words: text that names it is text
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
    """Write so many examples of each split into `folder`, with their marks. A training example that is also one of validation
    is left out.

    Calls `report` with the number of examples that are done. Returns: {split: [a manifest's record of each shard]}.
    """
    splits = {}
    held_out = set()
    for split in ("validation", "train"):
        tokens = ShardWriter(folder / split, len(task.words()) + len(SPECIALS), shard_tokens)
        answers = ShardWriter(folder / f"{split}{ANSWERS}", 2, shard_tokens, BYTES)
        for first in range(0, counts[split], BLOCK):
            ids, marks = (
                rows[: counts[split] - first] for rows in task.examples(split, first // BLOCK)
            )
            rows = [row.tobytes() for row in ids]
            new = [row not in held_out for row in rows]
            if split == "validation":
                held_out.update(rows)
            lengths = [task.length] * sum(new)
            tokens.add_documents(ids[new].ravel(), lengths)
            answers.add_documents(marks[new].ravel(), lengths)
            report(len(ids))
        splits |= {split: tokens.close(), split + ANSWERS: answers.close()}
    return {split: shards for split, shards in splits.items() if shards}
