"""The order of samples, windows against slices by hand, and mixtures with fair prefixes."""

from fractions import Fraction

import numpy as np
import pytest

from interdomain.data import MixtureDataset, PackedDataset, TokenCorpus
from interdomain.data.sampling import FeistelPermutation, exact_weights, fair_pattern

from .common import write_shard


def permuted(n, key):
    permutation = FeistelPermutation(n, key)
    return [permutation(i) for i in range(n)]


@pytest.mark.parametrize("key", ["42:0", "42:1", "-7:3"])
def test_permutation_is_a_bijection(key):
    for n in (*range(1, 20), 64, 65, 1000, 4097):
        assert sorted(permuted(n, key)) == list(range(n)), n


def test_permutation_is_uniform():
    """Over keys every index goes everywhere equally often.

    Chi-square per degree of freedom is 1 +- sqrt(2 / 144). Neighbours are not correlated: 0.04 is
    more than 5 sigma.
    """
    n = 13
    keys = 2000
    counts = np.zeros((n, n))
    for key in range(keys):
        counts[np.arange(n), permuted(n, f"{key}:0")] += 1
    expected = keys / n
    chi_square = ((counts - expected) ** 2).sum() / expected
    assert 0.4 < chi_square / (n - 1) ** 2 < 1.7
    permutation = FeistelPermutation(10**12 + 7, "0:0")
    images = [permutation(i) for i in range(20_000)]
    correlations = np.corrcoef(images[:-1], images[1:])
    assert abs(correlations[0, 1]) < 0.04


def test_order_is_pinned():
    """Another order breaks checkpoints that resume: the fingerprint's name must change, too."""
    assert permuted(1000, "42:0")[:6] == [838, 813, 660, 456, 73, 780]
    assert permuted(7, "42:1") == [0, 5, 2, 6, 1, 3, 4]
    pattern = fair_pattern(exact_weights([5, 3, 2]))
    assert pattern.tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shards of 40, 0, 25 and 90 samples of 8 tokens; every token tells its shard and place."""
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    for number, samples in ((0, 40), (2, 25), (3, 90)):
        length = 8 * samples + 1
        tokens = 1000 * number + np.arange(length)
        document_starts = rng.choice(range(1, length), samples // 3, replace=False)
        document_starts.sort()
        documents = np.split(tokens, document_starts)
        write_shard(folder / f"s-{number}", documents, vocab_size=4000)
    write_shard(folder / "s-1", [], vocab_size=4000)
    return folder


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("seq_len", [7, 64])
def test_windows_are_slices_of_the_stream(folder, seq_len, shuffle):
    corpus = TokenCorpus(f"{folder}/s-*", vocab_size=4000)
    documents = [document for shard in corpus.shards for document in shard]
    stream = np.concatenate(documents)
    document_ends = np.cumsum([len(document) for document in documents])
    dataset = PackedDataset(corpus, seq_len, seed=3, shuffle=shuffle)
    n = len(dataset)
    assert n == (len(stream) - 1) // seq_len

    # Every epoch has every window once, in an order of its own.
    first_tokens = [dataset._start(g) for g in range(4 * n)]
    epochs = np.reshape(first_tokens, (4, n))
    windows = np.arange(n) * seq_len
    assert (np.sort(epochs) == windows).all()
    assert len(np.unique(epochs, axis=0)) == (4 if shuffle else 1)

    # Samples may be read in any order. Some windows span shards.
    for g in (*range(n), n + 5, 3 * n - 1, 0):
        first = first_tokens[g]
        end = first + seq_len + 1
        assert dataset[g].dtype == np.int64
        assert dataset[g].tolist() == stream[first:end].tolist()
        starts = [start - first for start in (0, *document_ends) if first <= start < end]
        assert dataset.document_starts(g).tolist() == starts
    batch = dataset.read_batch([3, n + 5])
    assert np.array_equal(batch, [dataset[3], dataset[n + 5]])


def test_fingerprint_changes_with_everything_that_changes_the_samples(folder):
    shards = TokenCorpus(f"{folder}/s-*")
    datasets = [
        PackedDataset(shards, 8, 3),
        PackedDataset(TokenCorpus(folder / "s-2"), 8, 3),
        PackedDataset(TokenCorpus(folder / "s-0"), 8, 3),
        PackedDataset(TokenCorpus(f"{folder}/s-*", "validation"), 8, 3),
        PackedDataset(shards, 9, 3),
        PackedDataset(shards, 8, 4),
        PackedDataset(shards, 8, 3, shuffle=False),
    ]
    assert len({dataset.fingerprint for dataset in datasets}) == len(datasets)
    again = PackedDataset(TokenCorpus(f"{folder}/s-*"), 8, 3)
    assert datasets[0].fingerprint == again.fingerprint


@pytest.mark.parametrize(
    "weights",
    [[1], [0.7, 0.3], [0.9, 0.09, 0.009, 0.001], [3, 3, *9 * [1]], [0.333, 0.333, 0.334]],
)
def test_every_prefix_is_fair_within_one_sample(weights):
    exact = exact_weights(weights)
    pattern = fair_pattern(exact)
    samples = np.arange(1, len(pattern) + 1)
    for number, weight in enumerate(exact):
        counts = np.cumsum(pattern == number)
        # Integers, so that the comparison is exact.
        excess = counts * weight.denominator - samples * weight.numerator
        assert np.abs(excess).max() < weight.denominator
        assert excess[-1] == 0


def test_weights_are_taken_as_written():
    wanted = [Fraction(1, 10), Fraction(2, 10), Fraction(7, 10)]
    assert exact_weights([0.1, 0.2, 0.7]) == wanted
    assert exact_weights([10, 20, 70]) == wanted


@pytest.mark.parametrize("weights", [[], [1, 0], [1, -1], [float("nan"), 1], [0.12345678901, 1]])
def test_wrong_weights_are_refused(weights):
    with pytest.raises(ValueError, match=r"positive number|fewer digits"):
        fair_pattern(exact_weights(weights))


def test_a_mixture_gives_each_corpus_s_own_samples_in_its_own_order(folder):
    corpora = []
    for number in (0, 2, 3):
        shard = TokenCorpus(folder / f"s-{number}")
        corpora.append(PackedDataset(shard, 8, seed=5))
    mixture = MixtureDataset(corpora, (0.5, 0.3, 0.2))
    taken = [0, 0, 0]
    for g in range(500):
        c, i = mixture.locate(g)
        assert i == taken[c]
        taken[c] += 1
        assert np.array_equal(mixture[g], corpora[c][i])
        assert np.array_equal(mixture.positions(g), corpora[c].positions(i))
    assert taken == [250, 150, 100]
    assert mixture.epochs(500) == [250 / 40, 150 / 25, 100 / 90]
    assert mixture.epochs(7) == [4 / 40, 2 / 25, 1 / 90]
    # The first corpus has 40 samples and half of the weight: no corpus repeats within 80.
    assert len(mixture) == 80


def test_positions_count_from_the_document_s_start_in_the_sample(folder):
    dataset = PackedDataset(TokenCorpus(folder / "s-0"), 8, seed=5)
    for g in range(60):
        wanted = np.arange(8)
        for start in dataset.document_starts(g):
            wanted[start:] = np.arange(8 - start)
        assert dataset.positions(g).tolist() == wanted.tolist()
