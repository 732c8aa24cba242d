"""Intervals of a study's perplexities by bootstrap, over validation documents and over seeds."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

DRAWS = 2000


class Documents(NamedTuple):
    """Sums over each validation document, of a run's last validation: losses in nats, and labels."""

    nats: list[float]
    labels: list[int]


def perplexities(runs: Sequence[Documents], seed: int) -> np.ndarray:
    """Perplexities [DRAWS] of runs that differ in the seed alone. Every draw takes as many documents as there are, and as many
    runs, with replacement. The documents depend on their number alone, so draws of two cells can be compared one by one."""
    labels = np.array(runs[0].labels, np.float64)
    read = labels > 0  # of a long split not every document
    labels, nats = labels[read], np.array([run.nats for run in runs]).T[read]
    documents = _times_drawn(len(labels))
    losses = documents @ nats / (documents @ labels)[:, None]  # [DRAWS, runs]
    chosen = np.random.default_rng(seed).integers(len(runs), size=losses.shape)
    return np.exp(np.take_along_axis(losses, chosen, axis=1).mean(axis=1))


@functools.cache
def _times_drawn(documents: int) -> np.ndarray:
    """[DRAWS, documents]: how many times each draw takes each document."""
    return np.random.default_rng(0).multinomial(documents, np.full(documents, 1 / documents), DRAWS).astype(np.float64)


def interval_of(draws: np.ndarray) -> list[float]:
    """The middle 95 % of the draws."""
    low, high = np.quantile(draws, [0.025, 0.975])
    return [float(low), float(high)]
