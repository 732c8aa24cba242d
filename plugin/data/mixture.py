"""Several corpora as one data set, by weight: `MixtureDataset([code, web], [0.3, 0.7])[g]`.

Which corpus sample g comes from, and which of its samples it is, is a function of g and the weights alone. After any
number n of samples each corpus has given n * weight of them, but for less than one.
"""

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

import numpy as np

from interdomain.data.sampling import PackedDataset

LONGEST_PATTERN = 1_000_000


def exact_weights(weights: Sequence[float]) -> list[Fraction]:
    """Weights that sum to 1, as written: 0.1 is a tenth, not the nearest binary fraction. Raises ValueError."""
    try:
        exact = [Fraction(str(w)) for w in weights]
    except ValueError:
        exact = [Fraction(0)]  # nan, infinity
    if not exact or min(exact) <= 0:
        raise ValueError(f"The weights of a mixture are {list(weights)}; each must be a positive number.")
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
            f"The weights of the mixture, {', '.join(map(str, weights))}, repeat only after {length:,} samples, "
            f"{LONGEST_PATTERN:,} are allowed; give them with fewer digits."
        )
    pattern = np.empty(length, np.uint16)
    waiting = [(0, c, 1) for c in range(len(weights))]  # (release, corpus, its how manyeth)
    due: list[tuple[int, int, int]] = []
    heapq.heapify(waiting)
    for n in range(length):
        while waiting and waiting[0][0] <= n:
            _, c, j = heapq.heappop(waiting)
            heapq.heappush(due, (-(-j * weights[c].denominator // weights[c].numerator), c, j))
        deadline, c, j = heapq.heappop(due)
        assert n < deadline
        pattern[n] = c
        heapq.heappush(waiting, (j * weights[c].denominator // weights[c].numerator, c, j + 1))
    return pattern


class MixtureDataset:
    """Samples of several PackedDatasets, as one of them would give its own.

    Args:
        datasets: PackedDatasets of one sequence length; each goes through its own epochs in its own order.
        weights: positive numbers, of samples (so of tokens); they need not sum to 1.
    Attributes: samples_per_epoch, the samples before the first corpus begins anew; fingerprint.
    Raises: ValueError for weights that are not positive or not one for each.
    """

    def __init__(self, datasets: Sequence[PackedDataset], weights: Sequence[float]) -> None:
        if len(datasets) != len(weights):
            raise ValueError(f"A mixture of {len(datasets)} corpora needs {len(datasets)} weights, got {len(weights)}.")
        self.datasets, self.weights = list(datasets), exact_weights(weights)
        self.seq_len = self.datasets[0].seq_len
        assert all(dataset.seq_len == self.seq_len for dataset in self.datasets)
        self._pattern = fair_pattern(self.weights)
        self._rank = np.empty(len(self._pattern), np.int64)  # how many of the same corpus came before, in the pattern
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

    @property
    def num_tokens(self) -> int:
        return sum(dataset.num_tokens for dataset in self.datasets)

    def __len__(self) -> int:
        return self.samples_per_epoch

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[g] for g in range(self.samples_per_epoch))

    def locate(self, g: int) -> tuple[int, int]:
        """(corpus, index in its own data set) of sample g."""
        if g < 0:
            raise IndexError(f"global sample index {g}: indices start at 0")
        block, r = divmod(int(g), len(self._pattern))
        c = int(self._pattern[r])
        return c, block * self._per_pattern[c] + int(self._rank[r])

    def epochs(self, consumed: int) -> list[float]:
        """How often each corpus has been gone through after `consumed` samples."""
        block, r = divmod(consumed, len(self._pattern))
        head = np.bincount(self._pattern[:r], minlength=len(self.datasets)).tolist()
        counts = [block * n + h for n, h in zip(self._per_pattern, head, strict=True)]
        return [count / len(dataset) for count, dataset in zip(counts, self.datasets, strict=True)]

    def __getitem__(self, g: int) -> np.ndarray:
        """Sample g: [seq_len + 1] int64."""
        c, i = self.locate(g)
        return self.datasets[c][i]

    def read_batch(self, indices: Iterable[int]) -> np.ndarray:
        """Samples at these global indices: [len(indices), seq_len + 1] int64."""
        return np.stack([self[g] for g in indices])

    def document_starts(self, g: int) -> np.ndarray:
        c, i = self.locate(g)
        return self.datasets[c].document_starts(i)

    def positions(self, g: int) -> np.ndarray:
        c, i = self.locate(g)
        return self.datasets[c].positions(i)
