"""The order of samples, windows against slices by hand, and mixtures with fair prefixes."""

import numpy as np
import pytest

from interdomain.data import MixtureDataset, PackedDataset, TokenCorpus
from interdomain.data.sampling import FeistelPermutation, exact_weights, fair_pattern

from .common import write_shard


def permuted(n, key):
    permutation = FeistelPermutation(n, key)
    return [permutation(i) for i in range(n)]


@pytest.mark.parametrize("key", ["42:0", "-7:3"])
def test_permutation_is_a_bijection(key):
    for n in (*range(1, 20), 64, 65, 1000, 4097):
        assert sorted(permuted(n, key)) == list(range(n)), n


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
    stream = corpus.read(0, corpus.num_tokens)
    document_starts = corpus.document_starts(0, corpus.num_tokens)
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
        inside = (first <= document_starts) & (document_starts < end)
        assert np.array_equal(dataset.document_starts(g), document_starts[inside] - first)
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


@pytest.mark.parametrize("weights", [[0.7, 0.3], [0.9, 0.09, 0.009, 0.001], [3, 3, *9 * [1]]])
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
