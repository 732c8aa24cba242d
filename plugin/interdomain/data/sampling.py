"""Packs tokens into training samples, in a random order that is computed and not stored.

`PackedDataset(corpus, seq_len=4096, seed=42)[g]` is sample g of one corpus. `MixtureDataset([code,
web], [0.3, 0.7])[g]` is sample g of several, mixed by weight.

Sample g depends only on (corpora, weights, seq_len, seed, g): not on the number of ranks or worker
processes, and not on the samples that were read before. So one integer, the number of consumed
samples, resumes a run on any number of ranks. With B samples per step, the ranks share the samples
[s * B, (s + 1) * B) of global step s in any way.
"""

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np

from interdomain.data.corpus import TokenCorpus

MASK64 = 0xFFFF_FFFF_FFFF_FFFF
LONGEST_PATTERN = 1_000_000  # samples after which the order of a mixture's corpora repeats, at most


class FeistelPermutation:
    """A bijection of [0, n) that a key chooses: `FeistelPermutation(n, key)(i)` is the place of i.

    An alternating Feistel network permutes the next power of two, at least 16. A result that is
    not below n is permuted again: fewer than two times on average if n is 8 or more. The memory
    does not depend on n. The order looks random; it is not meant for cryptography.
    """

    ROUNDS = 8  # an even number: two rounds change each half once

    def __init__(self, n: int, key: str) -> None:
        """Prepares the keys of the rounds.

        Args:
            n: Number of elements.
            key: Any text. Each text gives another order.
        """
        assert n > 0
        bits = max(4, (n - 1).bit_length())  # with halves of one bit, some orders would never occur
        self.n = n
        # An index is split into its low and its high bits. Each round changes one of them by a
        # function of the other.
        self.low_bits = bits // 2
        self.low_mask = (1 << self.low_bits) - 1
        self.high_mask = (1 << (bits - self.low_bits)) - 1
        digest = hashlib.shake_256(key.encode()).digest(8 * self.ROUNDS)
        keys = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8)]
        self.key_pairs = list(zip(keys[::2], keys[1::2], strict=True))

    def __call__(self, i: int) -> int:
        """Returns the place of element i, from 0 to n - 1."""
        assert 0 <= i < self.n
        # Local names, which are faster than attributes in this loop.
        low_bits = self.low_bits
        low_mask = self.low_mask
        high_mask = self.high_mask
        while True:
            low = i & low_mask
            high = i >> low_bits
            for even, odd in self.key_pairs:
                # Multiply, fold, multiply: the upper half of the product depends on every bit of
                # the other half and the key. The factors are those of SplitMix64.
                x = (high ^ even) * 0x9E3779B97F4A7C15 & MASK64
                low ^= ((x ^ (x >> 29)) * 0xBF58476D1CE4E5B9 & MASK64) >> 32 & low_mask
                x = (low ^ odd) * 0x9E3779B97F4A7C15 & MASK64
                high ^= ((x ^ (x >> 29)) * 0xBF58476D1CE4E5B9 & MASK64) >> 32 & high_mask
            i = high << low_bits | low
            if i < self.n:
                return i


class PackedDataset:
    """Windows of seq_len + 1 consecutive tokens of a corpus: inputs and their next tokens.

    Windows tile the stream with stride seq_len, so that a token is a target once per epoch. They
    run across the bounds of documents and shards. A last window that is not full is dropped.

    Indices are global and have no end: index g is sample g % n of epoch g // n (n =
    samples_per_epoch), and every epoch has an order of its own. Validation reads with
    `shuffle=False` at indices 0, 1, ...: the same tokens each time.

    Args:
        corpus: A TokenCorpus.
        seq_len: Tokens that the model sees, positive.
        seed: Any integer, which chooses the order. It has no effect with shuffle=False.
        shuffle: False for the order of the stream.

    Attributes:
        first: The index that sample 0 has in the order. A loader sets it to continue where an
            earlier run stopped.
        samples_per_epoch: Windows in the corpus.
        targets: Labels of a sample that count in the loss.
        fingerprint: SHA-256 of corpus, seq_len and order. A checkpoint keeps it with the number of
            consumed samples.
        made_of: The values behind the fingerprint, so that an error can say which of them differs.
        num_tokens: Tokens of the corpus.
        num_documents: Documents of the corpus.

    Raises:
        ValueError: The corpus is shorter than one window, or windows would have different numbers
            of answers.
    """

    def __init__(self, corpus: TokenCorpus, seq_len: int, seed: int, shuffle: bool = True) -> None:
        """Counts the windows, and describes the order of the samples."""
        if seq_len < 1:
            raise ValueError(f"seq_len is {seq_len}, it must be at least 1.")
        self.corpus = corpus
        self.seq_len = seq_len
        self.seed = seed
        self.shuffle = shuffle
        self.first = 0
        self.num_tokens = corpus.num_tokens
        self.num_documents = corpus.num_documents
        self.samples_per_epoch = (corpus.num_tokens - 1) // seq_len
        if self.samples_per_epoch < 1:
            raise ValueError(
                f"The split {corpus.split!r} has {corpus.num_tokens:,} tokens, fewer than one sample of seq_len + 1 = "
                f"{seq_len + 1:,}. Take a shorter sequence length or prepare more text"
                + (" (a larger --validation-fraction)." if corpus.split == "validation" else ".")
            )
        # Every sample must have the same number of labels that count: the loss of a step is a mean
        # over them.
        answers = corpus.answers
        self.targets = seq_len
        if answers is not None:
            if seq_len % answers.example_tokens:
                raise ValueError(
                    f"seq_len is {seq_len}, but the corpus is made of examples of {answers.example_tokens} tokens each. "
                    f"Set training.seq_len and validation.seq_len to {answers.example_tokens}, or a multiple."
                )
            self.targets = seq_len // answers.example_tokens * answers.per_example
        order = "in order"
        if shuffle:
            order = f"feistel-1:{seed}"
        description = f"{corpus.fingerprint}:{corpus.split}:{seq_len}:{order}"
        self.fingerprint = hashlib.sha256(description.encode()).hexdigest()
        self.made_of = {
            "corpora": [corpus.fingerprint],
            "weights": ["1"],
            "seq_len": seq_len,
            "order": order,
        }
        # The last epoch and its order: one tuple, so that threads replace both at once.
        self._order: tuple[int, FeistelPermutation] | None = None

    def __len__(self) -> int:
        return self.samples_per_epoch

    @property
    def parts(self) -> list["PackedDataset"]:
        """The dataset of each corpus."""
        return [self]

    def counts(self, consumed: int) -> list[int]:
        """Returns the number of samples of each corpus among the first `consumed` samples."""
        return [consumed]

    def epochs(self, consumed: int) -> list[float]:
        """Returns the epochs that are read of each corpus after `consumed` samples."""
        counts = zip(self.counts(consumed), self.parts, strict=True)
        return [(part.first + count) / len(part) for count, part in counts]

    def _start(self, g: int) -> int:
        """Returns the position in the stream at which sample g begins."""
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
        """Returns sample g: token ids, int64 [seq_len + 1]."""
        start = self._start(g)
        return self.corpus.read(start, start + self.seq_len + 1)

    def counted(self, g: int) -> np.ndarray | None:
        """Returns a mask of the labels of sample g that count in the loss, bool [seq_len].

        These are the answers. None means that all labels count.
        """
        if self.corpus.answers is None:
            return None
        start = self._start(g) + 1
        return self.corpus.answers.marks.read(start, start + self.seq_len) > 0

    def document_starts(self, g: int) -> np.ndarray:
        """Returns the positions in sample g at which a document begins: int64, ascending."""
        start = self._start(g)
        return self.corpus.document_starts(start, start + self.seq_len + 1) - start

    def documents(self, g: int) -> np.ndarray:
        """Returns the number of the document of each label of sample g, int64 [seq_len]."""
        start = self._start(g) + 1
        return self.corpus.documents(start, start + self.seq_len)

    def read_batch(self, indices: Iterable[int]) -> np.ndarray:
        """Returns the samples at these global indices, int64 [len(indices), seq_len + 1]."""
        return np.stack([self[g] for g in indices])

    def positions(self, g: int) -> np.ndarray:
        """Returns the position of each input of sample g in its document, int32 [seq_len].

        A document that began before the sample counts from the start of the sample, because the
        model does not see the rest.
        """
        starts = self.document_starts(g)
        last_start = np.zeros(self.seq_len, np.int32)
        starts = starts[starts < self.seq_len]
        last_start[starts] = starts
        return np.arange(self.seq_len, dtype=np.int32) - np.maximum.accumulate(last_start)


def exact_weights(weights: Sequence[float]) -> list[Fraction]:
    """Returns the weights divided by their sum.

    They are exact in decimal: 0.1 is a tenth, not the nearest binary fraction.

    Raises:
        ValueError: A weight is not a positive number.
    """
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
    """Returns the shortest sequence of corpus numbers (uint16) with exactly these proportions.

    Among the first n places, corpus c has floor(n w_c) or ceil(n w_c). For this, its j-th place
    must have an index n with floor((j - 1) / w_c) <= n < ceil(j / w_c). The upper bound is the
    deadline of that place. Each index goes to the corpus with the earliest deadline, which meets
    all deadlines.

    Args:
        weights: Proportions that sum to 1.

    Raises:
        ValueError: The sequence is longer than LONGEST_PATTERN.
    """
    length = int(np.lcm.reduce([w.denominator for w in weights], dtype=object))
    if length > LONGEST_PATTERN:
        raise ValueError(
            f"The weights of the mixture, {', '.join(map(str, weights))}, have an order that repeats after {length:,} samples; "
            f"at most {LONGEST_PATTERN:,} are allowed. Give weights with fewer digits."
        )
    pattern = np.empty(length, np.uint16)
    counts = [0] * len(weights)  # places of each corpus so far
    ratios = [w.as_integer_ratio() for w in weights]
    for n in range(length):
        # (deadline, corpus) for each corpus whose next place may come now. -(-a // b) rounds up.
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
    """Returns the samples of each corpus among the first `consumed` of a repeated pattern.

    Args:
        pattern: Result of `fair_pattern`.
        consumed: Number of samples.
    """
    repetitions, rest = divmod(consumed, len(pattern))
    in_pattern = np.bincount(pattern)
    in_rest = np.bincount(pattern[:rest], minlength=len(in_pattern))
    return (repetitions * in_pattern + in_rest).tolist()


class MixtureDataset(PackedDataset):
    """Samples of several PackedDatasets, mixed by weight.

    Among any first n samples, a corpus has n * weight, within one sample.

    Args:
        datasets: PackedDatasets of one sequence length. Each goes through its own epochs in its own
            order.
        weights: Shares of the samples, and so of the tokens. Positive; they need not sum to 1.

    Attributes:
        samples_per_epoch: Samples before the first corpus begins again.

    Raises:
        ValueError: The weights are not positive, or not one for each dataset, or a corpus has
            answers.
    """

    def __init__(self, datasets: Sequence[PackedDataset], weights: Sequence[float]) -> None:
        """Makes the pattern that says which data set each sample comes from."""
        if len(datasets) != len(weights):
            raise ValueError(
                f"A mixture of {len(datasets)} corpora needs {len(datasets)} weights, got {len(weights)}."
            )
        if any(dataset.corpus.answers for dataset in datasets):
            raise ValueError(
                "A corpus whose loss is that of its answers cannot be part of a mixture: steps would have different numbers "
                "of labels. Train on it alone."
            )
        self.datasets = list(datasets)
        self.weights = exact_weights(weights)
        self.seq_len = self.targets = self.datasets[0].seq_len
        assert all(dataset.seq_len == self.seq_len for dataset in self.datasets)
        self.num_tokens = sum(dataset.num_tokens for dataset in self.datasets)
        self._first_documents = [
            0,
            *itertools.accumulate(dataset.num_documents for dataset in self.datasets),
        ]
        self.num_documents = self._first_documents[-1]
        # The pattern repeats for ever. For `locate`, count the places of each corpus in it, and
        # before each place those of the same corpus.
        self._pattern = fair_pattern(self.weights)
        self._per_pattern = np.bincount(self._pattern, minlength=len(self.datasets)).tolist()
        self._count_before = np.empty(len(self._pattern), np.int64)
        for c, count in enumerate(self._per_pattern):
            self._count_before[self._pattern == c] = np.arange(count)
        pairs = list(zip(self.datasets, self.weights, strict=True))
        self.samples_per_epoch = min(int(len(dataset) / weight) for dataset, weight in pairs)
        parts = ":".join(f"{dataset.fingerprint}*{weight}" for dataset, weight in pairs)
        self.fingerprint = hashlib.sha256(f"mixture-1:{parts}".encode()).hexdigest()
        self.made_of = {
            "corpora": [dataset.made_of["corpora"][0] for dataset in self.datasets],
            "weights": [str(w) for w in self.weights],
            "seq_len": self.datasets[0].made_of["seq_len"],
            "order": self.datasets[0].made_of["order"],
        }

    def locate(self, g: int) -> tuple[int, int]:
        """Returns the number of the dataset that sample g comes from, and the index in it.

        The pattern of dataset numbers repeats without end.
        """
        assert g >= 0
        repetition, place = divmod(int(g), len(self._pattern))
        c = int(self._pattern[place])
        return c, repetition * self._per_pattern[c] + int(self._count_before[place])

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
