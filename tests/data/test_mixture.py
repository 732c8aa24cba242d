"""Proportions that hold in every prefix, an order that is a function of the index, and positions in documents."""

from fractions import Fraction

import numpy as np
import pytest

from interdomain.data import IndexedDatasetWriter, MixtureDataset, PackedDataset, TokenCorpus
from interdomain.data.mixture import exact_weights, fair_pattern


@pytest.mark.parametrize(
    "weights",
    [
        [1],
        [0.7, 0.3],
        [1, 2, 3, 4],
        [0.9, 0.09, 0.009, 0.001],
        [3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        [0.333, 0.333, 0.334],
    ],
)
def test_every_prefix_is_fair_within_one_sample(weights):
    exact = exact_weights(weights)
    assert sum(exact) == 1
    pattern = fair_pattern(exact)
    for c, w in enumerate(exact):
        counts = np.cumsum(pattern == c)
        n = np.arange(1, len(pattern) + 1)
        scaled = counts * w.denominator - n * w.numerator  # integers: exact
        assert np.abs(scaled).max() < w.denominator
        assert scaled[-1] == 0


def test_weights_are_taken_as_written():
    assert exact_weights([0.1, 0.2, 0.7]) == [Fraction(1, 10), Fraction(2, 10), Fraction(7, 10)]
    assert exact_weights([70, 30]) == exact_weights([0.7, 0.3])


def test_bad_weights():
    for weights in ([], [1, 0], [1, -1], [float("nan"), 1], [float("inf"), 1], [0.12345678901, 1]):
        with pytest.raises(ValueError, match=r"positive number|fewer digits"):
            fair_pattern(exact_weights(weights))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Three of 40, 25 and 90 samples of 8 tokens; every token tells its corpus and place."""
    folder, made = tmp_path_factory.mktemp("corpora"), []
    for c, samples in enumerate((40, 25, 90)):
        with IndexedDatasetWriter(folder / str(c), 10_000) as writer:
            rng, left = np.random.default_rng(c), 8 * samples + 1
            tokens = np.arange(left) + 1000 * c
            while left:
                n = min(left, int(rng.integers(1, 30)))
                writer.add_document(tokens[len(tokens) - left :][:n])
                left -= n
        made.append(TokenCorpus(folder / str(c)))
    return made


@pytest.fixture
def mixture(corpora):
    return MixtureDataset([PackedDataset(corpus, 8, seed=5) for corpus in corpora], [0.5, 0.3, 0.2])


def test_a_mixture_gives_each_corpus_s_own_samples_in_its_own_order(mixture):
    taken = [0, 0, 0]
    for g in range(500):
        c, i = mixture.locate(g)
        assert i == taken[c]
        taken[c] += 1
        assert np.array_equal(mixture[g], mixture.datasets[c][i])
        assert set(mixture[g] // 1000) == {c}
    assert taken == [250, 150, 100]
    assert (
        len(mixture) == len(list(mixture)) == 80
    )  # of the first corpus, 40 samples at a half: no corpus repeats in it
    assert mixture.epochs(500) == [250 / 40, 150 / 25, 100 / 90]
    assert mixture.epochs(7) == [
        sum(mixture.locate(g)[0] == c for g in range(7)) / n for c, n in enumerate((40, 25, 90))
    ]
    assert np.array_equal(mixture.read_batch([3, 400]), np.stack([mixture[3], mixture[400]]))


def test_a_fingerprint_of_corpora_weights_seed_and_length(corpora, mixture):
    def fingerprint(weights=(0.5, 0.3, 0.2), seed=5, seq_len=8, order=(0, 1, 2)):
        return MixtureDataset([PackedDataset(corpora[c], seq_len, seed) for c in order], weights).fingerprint

    same = [fingerprint(), fingerprint(weights=(5, 3, 2))]
    other = [fingerprint((0.3, 0.5, 0.2)), fingerprint(seed=6), fingerprint(seq_len=4), fingerprint(order=(1, 0, 2))]
    assert set(same) == {mixture.fingerprint}
    assert len({*other, mixture.fingerprint}) == 5
    with pytest.raises(ValueError, match="needs 1 weights, got 2"):
        fingerprint([1, 2], order=(0,))


def test_positions_count_from_the_document_s_start_in_the_sample(corpora, mixture):
    for dataset in (*mixture.datasets, mixture):
        for g in range(60):
            starts, wanted, at = set(dataset.document_starts(g).tolist()), [], -1
            for t in range(8):
                at = 0 if t in starts or t == 0 else at + 1
                wanted.append(at)
            found = dataset.positions(g)
            assert found.tolist() == wanted
            assert found.dtype == np.int32
    assert any((mixture.positions(g) == 0).sum() > 1 for g in range(60))
