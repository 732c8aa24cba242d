"""The order of samples, windows against slices by hand, and mixtures whose proportions hold in
every prefix.
"""

from fractions import Fraction

import numpy as np
import pytest

from interdomain.data import IndexedDatasetWriter, MixtureDataset, PackedDataset, TokenCorpus
from interdomain.data.sampling import FeistelPermutation, exact_weights, fair_pattern


def test_permutation_is_a_bijection_and_uniform():
    """Every index goes everywhere equally often over keys; chi-square per degree of freedom is 1 +-
    sqrt(2 / 144).
    """
    for n in (*range(1, 20), 64, 65, 1000, 4097):
        for key in ("42:0", "42:1", "-7:3"):
            assert sorted(map(FeistelPermutation(n, key), range(n))) == list(range(n))
    n = 13
    keys = 2000
    orders = np.array([[*map(FeistelPermutation(n, f"{key}:0"), range(n))] for key in range(keys)])
    counts = np.array([np.bincount(column, minlength=n) for column in orders.T])
    chi2 = ((counts - keys / n) ** 2 / (keys / n)).sum() / (n - 1) ** 2
    assert 0.4 < chi2 < 1.7
    n = 10**12 + 7
    images = list(map(FeistelPermutation(n, "0:0"), range(20_000)))
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 0.04  # 0 +- 0.007, 5 sigma


def test_order_is_pinned():
    """Changing the order breaks every checkpoint that resumes; then the fingerprint's name must
    change too.
    """
    assert [FeistelPermutation(1000, "42:0")(i) for i in range(6)] == [838, 813, 660, 456, 73, 780]
    assert [FeistelPermutation(7, "42:1")(i) for i in range(7)] == [0, 5, 2, 6, 1, 3, 4]
    assert fair_pattern(exact_weights([5, 3, 2])).tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shards of 40, 0, 25 and 90 samples of 8 tokens and one token; every token tells its shard and
    place.
    """
    folder = tmp_path_factory.mktemp("shards")
    for c, samples in enumerate((40, 0, 25, 90)):
        ends = np.cumsum(np.random.default_rng(c).integers(1, 30, samples // 3))
        with IndexedDatasetWriter(folder / f"s-{c}", 4000) as writer:
            for document in np.split(np.arange(8 * samples + (samples > 0)) + 1000 * c, ends):
                if len(document):
                    writer.add_document(document)
    return folder


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("seq_len", [7, 64])
def test_windows_are_slices_of_the_stream(folder, seq_len, shuffle):
    corpus = TokenCorpus(f"{folder}/s-*", vocab_size=4000)
    documents = [document for shard in corpus.shards for document in shard]
    tokens = np.concatenate(documents)
    starts = np.cumsum([0, *map(len, documents)])[:-1]
    dataset = PackedDataset(corpus, seq_len, seed=3, shuffle=shuffle)
    n = (len(tokens) - 1) // seq_len
    assert len(dataset) == n
    epochs = [[dataset._start(e * n + i) for i in range(n)] for e in range(4)]
    assert all(sorted(order) == list(range(0, n * seq_len, seq_len)) for order in epochs)
    assert len({tuple(order) for order in epochs}) == (4 if shuffle else 1)
    for g in (*range(n), n + 5, 3 * n - 1, 0):  # epochs back and forth
        a = epochs[g // n][g % n]
        assert dataset[g].dtype == np.int64
        assert dataset[g].tolist() == tokens[a : a + seq_len + 1].tolist()
        assert dataset.document_starts(g).tolist() == [
            s - a for s in starts if a <= s < a + seq_len + 1
        ]
    assert any(a < corpus._starts[1] < a + seq_len for a in epochs[0])  # one spans shards
    assert np.array_equal(dataset.read_batch([3, n + 5]), np.stack([dataset[3], dataset[n + 5]]))


def test_fingerprint_changes_with_everything_that_changes_the_samples(folder):
    shards = f"{folder}/s-*"
    one = folder / "s-0"
    two = folder / "s-2"
    others = (shards, "train"), (two, "train"), (one, "train"), (shards, "validation")
    sets = [PackedDataset(TokenCorpus(*other), 8, 3) for other in others]
    sets += [
        PackedDataset(TokenCorpus(shards), *other) for other in ((9, 3), (8, 4), (8, 3, False))
    ]
    assert len({d.fingerprint for d in sets}) == len(sets)
    assert sets[0].fingerprint == PackedDataset(TokenCorpus(shards), 8, 3).fingerprint


def test_every_prefix_is_fair_within_one_sample():
    for weights in (
        [1],
        [0.7, 0.3],
        [0.9, 0.09, 0.009, 0.001],
        [3, 3, *9 * [1]],
        [0.333, 0.333, 0.334],
    ):
        exact = exact_weights(weights)
        pattern = fair_pattern(exact)
        for c, w in enumerate(exact):
            counts = np.cumsum(pattern == c)
            scaled = (
                counts * w.denominator - np.arange(1, len(pattern) + 1) * w.numerator
            )  # integers: exact
            assert np.abs(scaled).max() < w.denominator
            assert scaled[-1] == 0


def test_weights_are_taken_as_written():
    assert (
        exact_weights([0.1, 0.2, 0.7])
        == exact_weights([10, 20, 70])
        == [Fraction(n, 10) for n in (1, 2, 7)]
    )
    for weights in ([], [1, 0], [1, -1], [float("nan"), 1], [float("inf"), 1], [0.12345678901, 1]):
        with pytest.raises(ValueError, match=r"positive number|fewer digits"):
            fair_pattern(exact_weights(weights))


def test_a_mixture_gives_each_corpus_s_own_samples_in_its_own_order(folder):
    corpora = [PackedDataset(TokenCorpus(folder / f"s-{c}"), 8, seed=5) for c in (0, 2, 3)]
    mixed = MixtureDataset(corpora, (0.5, 0.3, 0.2))
    taken = [0, 0, 0]
    for g in range(500):
        c, i = mixed.locate(g)
        assert i == taken[c]
        taken[c] += 1
        assert np.array_equal(mixed[g], mixed.datasets[c][i])
        assert set(mixed[g] // 1000) == {(0, 2, 3)[c]}
        assert np.array_equal(mixed.positions(g), mixed.datasets[c].positions(i))
    assert taken == [250, 150, 100]
    assert len(mixed) == 80  # of the first corpus, 40 samples at a half: no corpus repeats in it
    assert mixed.epochs(500) == [250 / 40, 150 / 25, 100 / 90]
    assert mixed.epochs(7) == [
        sum(mixed.locate(g)[0] == c for g in range(7)) / n for c, n in enumerate((40, 25, 90))
    ]


def test_positions_count_from_the_document_s_start_in_the_sample(folder):
    dataset = PackedDataset(TokenCorpus(folder / "s-0"), 8, seed=5)
    inside = 0
    for g in range(60):
        starts = set(dataset.document_starts(g).tolist())
        wanted = []
        for t in range(8):
            wanted.append(0 if t in starts or t == 0 else wanted[-1] + 1)
        assert np.array_equal(dataset.positions(g), np.array(wanted, np.int32))
        inside += wanted.count(0) > 1
    assert inside
