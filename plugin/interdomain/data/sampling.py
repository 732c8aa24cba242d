"""Packed training samples in a random order that nobody stores: `PackedDataset(corpus, seq_len=4096, seed=42)[g]`, or
of several corpora by weight: `MixtureDataset([code, web], [0.3, 0.7])[g]`.

Sample g depends on (corpora, weights, seq_len, seed, g) alone: not on the number of ranks, of workers, or on what was
read before. So one integer, the number of samples consumed, resumes a run on any number of ranks: at global step s with
B samples per step, rank r of W reads those of [s * B, (s + 1) * B) that are r modulo W, or any other split of them.
"""

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np

from interdomain.data.corpus import TokenCorpus

MASK64 = 0xFFFF_FFFF_FFFF_FFFF
LONGEST_PATTERN = 1_000_000  # samples after which a mixture's weights repeat


class FeistelPermutation:
    """A keyed bijection of [0, n): an alternating Feistel network on the next power of two, walked until below n.

    O(1) memory; fewer than two walks on average. Not cryptography: an order that looks random and is complete.
    """

    ROUNDS = 8

    def __init__(self, n: int, key: str) -> None:
        assert n > 0
        bits = max(4, (n - 1).bit_length())  # halves of one bit reach only some of the orders
        self.n, self.low_bits = n, bits // 2
        self.low_mask, self.high_mask = (1 << self.low_bits) - 1, (1 << (bits - self.low_bits)) - 1
        digest = hashlib.shake_256(key.encode()).digest(8 * self.ROUNDS)
        keys = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8)]
        self.key_pairs = list(zip(keys[::2], keys[1::2], strict=True))

    def __call__(self, i: int) -> int:
        assert 0 <= i < self.n
        low_bits, low_mask, high_mask = self.low_bits, self.low_mask, self.high_mask
        while True:
            low, high = i & low_mask, i >> low_bits
            for even, odd in self.key_pairs:
                # Multiply, fold, multiply: the upper half of the product has seen every bit of the other half and key.
                x = (high ^ even) * 0x9E3779B97F4A7C15 & MASK64
                low ^= ((x ^ (x >> 29)) * 0xBF58476D1CE4E5B9 & MASK64) >> 32 & low_mask
                x = (low ^ odd) * 0x9E3779B97F4A7C15 & MASK64
                high ^= ((x ^ (x >> 29)) * 0xBF58476D1CE4E5B9 & MASK64) >> 32 & high_mask
            i = high << low_bits | low
            if i < self.n:
                return i


class PackedDataset:
    """Windows of seq_len + 1 consecutive tokens (inputs and their next tokens) of a corpus's stream.

    Windows tile the stream with stride seq_len, so that a token is a target once per epoch. They span documents and shards;
    a last one that is not full is dropped. Indices are global and never end: g is sample g % n of epoch g // n
    (n = samples_per_epoch), and every epoch has an order of its own. Sample g depends on the corpus, seq_len, seed and g
    alone. Validation reads with `shuffle=False` at indices 0, 1, ...: the same tokens each time.

    Args:
        corpus: a TokenCorpus.
        seq_len: tokens that the model sees, positive.
        seed: any integer; with shuffle=False it changes nothing.
        shuffle: False for the order of the stream.

    Attributes:
        first: the index that sample 0 has in the order. Set it where the order goes on from another reader's.
        samples_per_epoch: windows in the corpus.
        targets: labels of a sample that count in the loss.
        fingerprint: of corpus, seq_len and order; a checkpoint keeps it beside the number of consumed samples.
        made_of: what the fingerprint is of, to say what differs.

    Raises:
        ValueError: the corpus is shorter than one window, or windows would have different numbers of answers.
    """

    def __init__(self, corpus: TokenCorpus, seq_len: int, seed: int, shuffle: bool = True) -> None:
        if seq_len < 1:
            raise ValueError(f"seq_len is {seq_len}, it must be at least 1.")
        self.corpus, self.seq_len, self.seed, self.shuffle, self.first = (
            corpus,
            seq_len,
            seed,
            shuffle,
            0,
        )
        self.num_tokens, self.num_documents = corpus.num_tokens, corpus.num_documents
        self.samples_per_epoch = (corpus.num_tokens - 1) // seq_len
        if self.samples_per_epoch < 1:
            raise ValueError(
                f"The split {corpus.split!r} has {corpus.num_tokens:,} tokens, fewer than one sample of seq_len + 1 = "
                f"{seq_len + 1:,}. Take a shorter sequence length or prepare more text"
                + (" (a larger --validation-fraction)." if corpus.split == "validation" else ".")
            )
        answers, self.targets = corpus.answers, seq_len
        if answers is not None:
            if seq_len % answers.example_tokens:
                raise ValueError(
                    f"seq_len is {seq_len}, but the corpus is made of examples of {answers.example_tokens} tokens each. "
                    f"Set training.seq_len and validation.seq_len to {answers.example_tokens}, or a multiple."
                )
            self.targets = seq_len // answers.example_tokens * answers.per_example
        order = f"feistel-1:{seed}" if shuffle else "in order"
        description = f"{corpus.fingerprint}:{corpus.split}:{seq_len}:{order}"
        self.fingerprint = hashlib.sha256(description.encode()).hexdigest()
        self.made_of = {
            "corpora": [corpus.fingerprint],
            "weights": ["1"],
            "seq_len": seq_len,
            "order": order,
        }
        self._order: tuple[int, FeistelPermutation] | None = (
            None  # of the last epoch; threads swap it at once
        )

    def __len__(self) -> int:
        return self.samples_per_epoch

    @property
    def parts(self) -> list["PackedDataset"]:
        """The data set of each corpus."""
        return [self]

    def counts(self, consumed: int) -> list[int]:
        """Samples of each corpus among the first `consumed`."""
        return [consumed]

    def epochs(self, consumed: int) -> list[float]:
        """Epochs of each corpus after `consumed` samples, with those before `first`."""
        counts = zip(self.counts(consumed), self.parts, strict=True)
        return [(part.first + count) / len(part) for count, part in counts]

    def _start(self, g: int) -> int:
        """The place in the stream where sample g begins."""
        assert g >= 0
        epoch, i = divmod(self.first + int(g), self.samples_per_epoch)
        if self.shuffle:
            order = self._order
            if order is None or order[0] != epoch:
                order = self._order = (
                    epoch,
                    FeistelPermutation(self.samples_per_epoch, f"{self.seed}:{epoch}"),
                )
            i = order[1](i)
        return i * self.seq_len

    def __getitem__(self, g: int) -> np.ndarray:
        """Sample g: [seq_len + 1] int64."""
        start = self._start(g)
        return self.corpus.read(start, start + self.seq_len + 1)

    def counted(self, g: int) -> np.ndarray | None:
        """Mask of the labels of sample g that count in the loss, [seq_len] bool: its answers. None: all."""
        if self.corpus.answers is None:
            return None
        start = self._start(g) + 1
        return self.corpus.answers.marks.read(start, start + self.seq_len) > 0

    def document_starts(self, g: int) -> np.ndarray:
        """Positions within sample g, from 0 to seq_len, at which a document begins (0 only if one begins right there)."""
        start = self._start(g)
        return self.corpus.document_starts(start, start + self.seq_len + 1) - start

    def documents(self, g: int) -> np.ndarray:
        """The number of the document of each label of sample g, [seq_len] int64, below `num_documents`."""
        start = self._start(g) + 1
        return self.corpus.documents(start, start + self.seq_len)

    def read_batch(self, indices: Iterable[int]) -> np.ndarray:
        """Samples at these global indices: [len(indices), seq_len + 1] int64."""
        return np.stack([self[g] for g in indices])

    def positions(self, g: int) -> np.ndarray:
        """Positions of sample g, [seq_len] int32: how many tokens of its document come before each input, in the sample.

        A document that began before the sample counts from the sample's start: nothing of it before that is seen.
        """
        starts = self.document_starts(g)
        last = np.zeros(self.seq_len, np.int32)
        starts = starts[starts < self.seq_len]
        last[starts] = starts
        return np.arange(self.seq_len, dtype=np.int32) - np.maximum.accumulate(last)


def exact_weights(weights: Sequence[float]) -> list[Fraction]:
    """Weights that sum to 1, as written: 0.1 is a tenth, not the nearest binary fraction. Raises ValueError."""
    try:
        exact = [Fraction(str(w)) for w in weights]
    except ValueError:
        exact = [Fraction(0)]  # nan, infinity
    if not exact or min(exact) <= 0:
        raise ValueError(
            f"The weights of a mixture are {list(weights)}; each must be a positive number."
        )
    return [w / sum(exact) for w in exact]


def fair_pattern(weights: Sequence[Fraction]) -> np.ndarray:
    """The shortest sequence of corpora with exactly these proportions (Fractions that sum to 1), uint16.

    In every prefix of n, corpus c stands floor(n w_c) or ceil(n w_c) times: its j-th place is due between the moments at
    which j - 1 and j of them are owed, and the earliest deadline comes first, which meets all of them.

    Raises: ValueError if it is longer than LONGEST_PATTERN.
    """
    length = int(np.lcm.reduce([w.denominator for w in weights], dtype=object))
    if length > LONGEST_PATTERN:
        raise ValueError(
            f"The weights of the mixture, {', '.join(map(str, weights))}, have an order that repeats after {length:,} samples; "
            f"at most {LONGEST_PATTERN:,} are allowed. Give weights with fewer digits."
        )
    pattern, counts, ratios = (
        np.empty(length, np.uint16),
        [0] * len(weights),
        [w.as_integer_ratio() for w in weights],
    )
    for n in range(length):
        # (deadline, corpus) of each corpus's next place that is owed by now.
        due = [
            (-(-(counts[c] + 1) * d // m), c)
            for c, (m, d) in enumerate(ratios)
            if counts[c] * d // m <= n
        ]
        deadline, pattern[n] = min(due)
        assert n < deadline
        counts[pattern[n]] += 1
    return pattern


def counts_in(pattern: np.ndarray, consumed: int) -> list[int]:
    """Samples of each corpus among the first `consumed` of a repeated `fair_pattern`."""
    repetitions, rest = divmod(consumed, len(pattern))
    in_pattern = np.bincount(pattern)
    in_rest = np.bincount(pattern[:rest], minlength=len(in_pattern))
    return (repetitions * in_pattern + in_rest).tolist()


class MixtureDataset(PackedDataset):
    """Samples of several PackedDatasets, by weight. After any number n of samples each corpus has given n * weight of them, to
    within one sample.

    Args:
        datasets: PackedDatasets of one sequence length; each goes through its own epochs in its own order.
        weights: positive numbers, of samples (so of tokens); they need not sum to 1.

    Attributes:
        samples_per_epoch: samples before the first corpus begins again.

    Raises:
        ValueError: weights that are not positive or not one for each, or a corpus with answers.
    """

    def __init__(self, datasets: Sequence[PackedDataset], weights: Sequence[float]) -> None:
        if len(datasets) != len(weights):
            raise ValueError(
                f"A mixture of {len(datasets)} corpora needs {len(datasets)} weights, got {len(weights)}."
            )
        if any(dataset.corpus.answers for dataset in datasets):
            raise ValueError(
                "A corpus whose loss is that of its answers cannot be part of a mixture: steps would have different numbers "
                "of labels. Train on it alone."
            )
        self.datasets, self.weights = list(datasets), exact_weights(weights)
        self.seq_len = self.targets = self.datasets[0].seq_len
        self.num_tokens = sum(dataset.num_tokens for dataset in self.datasets)
        self._first_documents = [
            0,
            *itertools.accumulate(dataset.num_documents for dataset in self.datasets),
        ]
        self.num_documents = self._first_documents[-1]
        assert all(dataset.seq_len == self.seq_len for dataset in self.datasets)
        self._pattern = fair_pattern(self.weights)
        self._rank = np.empty(
            len(self._pattern), np.int64
        )  # how many of the same corpus came before, in the pattern
        self._per_pattern = np.bincount(self._pattern, minlength=len(self.datasets)).tolist()
        for c, count in enumerate(self._per_pattern):
            self._rank[self._pattern == c] = np.arange(count)
        pairs = list(zip(self.datasets, self.weights, strict=True))
        self.samples_per_epoch = min(int(len(dataset) / weight) for dataset, weight in pairs)
        parts = ":".join(f"{dataset.fingerprint}*{weight}" for dataset, weight in pairs)
        self.fingerprint = hashlib.sha256(f"mixture-1:{parts}".encode()).hexdigest()
        self.made_of = {
            "corpora": [dataset.made_of["corpora"][0] for dataset in self.datasets],
            "weights": [str(w) for w in self.weights],
            **{name: self.datasets[0].made_of[name] for name in ("seq_len", "order")},
        }

    def locate(self, g: int) -> tuple[int, int]:
        """The place of sample g: (number of its corpus, index in that data set)."""
        assert g >= 0
        block, r = divmod(int(g), len(self._pattern))
        c = int(self._pattern[r])
        return c, block * self._per_pattern[c] + int(self._rank[r])

    @property
    def parts(self) -> list[PackedDataset]:
        return self.datasets

    def counts(self, consumed: int) -> list[int]:
        return counts_in(self._pattern, consumed)

    def counted(self, g: int) -> None:
        return None

    def __getitem__(self, g: int) -> np.ndarray:
        c, i = self.locate(g)
        return self.datasets[c][i]

    def document_starts(self, g: int) -> np.ndarray:
        c, i = self.locate(g)
        return self.datasets[c].document_starts(i)

    def documents(self, g: int) -> np.ndarray:
        c, i = self.locate(g)
        return self.datasets[c].documents(i) + self._first_documents[c]
