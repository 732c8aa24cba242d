"""The order of samples, and windows against slices by hand."""

import numpy as np
import pytest

from interdomain.data import FeistelPermutation, IndexedDatasetWriter, PackedDataset, TokenCorpus


@pytest.mark.parametrize("n", [*range(1, 20), 64, 65, 1000, 4097])
def test_permutation_is_a_bijection(n):
    for key in ("42:0", "42:1", "-7:3"):
        permutation = FeistelPermutation(n, key)
        assert sorted(map(permutation, range(n))) == list(range(n))


def test_permutation_large():
    n = 10**12 + 7
    permutation = FeistelPermutation(n, "0:0")
    images = [permutation(i) for i in range(20_000)]
    assert len(set(images)) == 20_000
    assert abs(np.mean(images) / n - 0.5) < 0.02  # 0.5 +- 0.289 / sqrt(20,000), 10 sigma
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 0.04  # 0 +- 0.007, 5 sigma


def test_permutation_is_uniform():
    """Every index goes everywhere equally often over keys; chi-square per degree of freedom is 1 +- sqrt(2 / 144)."""
    n, keys = 13, 2000
    counts = np.zeros((n, n))
    for key in range(keys):
        permutation = FeistelPermutation(n, f"{key}:0")
        for i in range(n):
            counts[i, permutation(i)] += 1
    chi2 = ((counts - keys / n) ** 2 / (keys / n)).sum() / (n - 1) ** 2
    assert 0.4 < chi2 < 1.7


def test_order_is_pinned():
    """Changing the order breaks every checkpoint that resumes; then the fingerprint's `feistel-1` must change too."""
    assert [FeistelPermutation(1000, "42:0")(i) for i in range(6)] == [838, 813, 660, 456, 73, 780]
    assert [FeistelPermutation(7, "42:1")(i) for i in range(7)] == [0, 5, 2, 6, 1, 3, 4]


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """Documents over three shards (one of them empty), the prefixes, and the stream as one array."""
    folder, rng = tmp_path_factory.mktemp("shards"), np.random.default_rng(0)
    shards = [[rng.integers(0, 500, rng.integers(1, 30)) for _ in range(k)] for k in (20, 0, 31)]
    for i, documents in enumerate(shards):
        with IndexedDatasetWriter(folder / f"s-{i}", 500) as writer:
            for document in documents:
                writer.add_document(document)
    documents = [d for shard in shards for d in shard]
    starts = np.cumsum([0] + [len(d) for d in documents])[:-1]
    return folder, np.concatenate(documents), starts


@pytest.mark.parametrize("seq_len", [7, 64])
def test_windows_are_slices_of_the_stream(stream, seq_len):
    folder, tokens, starts = stream
    corpus = TokenCorpus(str(folder / "s-*"), vocab_size=500)
    assert corpus.num_tokens == len(tokens)
    dataset = PackedDataset(corpus, seq_len, seed=0, shuffle=False)
    n = (len(tokens) - 1) // seq_len
    assert len(dataset) == dataset.samples_per_epoch == n == len(list(dataset))
    spans_shards = False
    for g in range(n):
        a, b = g * seq_len, g * seq_len + seq_len + 1
        assert dataset[g].dtype == np.int64
        assert dataset[g].tolist() == tokens[a:b].tolist()
        assert dataset[n + g].tolist() == tokens[a:b].tolist()  # the next epoch, not shuffled
        assert dataset.document_starts(g).tolist() == [s - a for s in starts if a <= s < b]
        spans_shards |= a < corpus._starts[1] < b - 1
    assert spans_shards
    targets = np.concatenate([dataset[g][1:] for g in range(n)])
    assert np.array_equal(targets, tokens[1 : n * seq_len + 1])  # every token is a target exactly once


def test_shuffled_epochs(stream):
    folder, tokens, starts = stream
    corpus = TokenCorpus(str(folder / "s-*"))
    dataset = PackedDataset(corpus, 8, seed=3)
    n = len(dataset)
    epochs = [[dataset._start(e * n + i) for i in range(n)] for e in range(4)]
    for order in epochs:
        assert sorted(order) == list(range(0, 8 * n, 8))
    assert len({tuple(order) for order in epochs}) == 4
    assert epochs[0] == [PackedDataset(corpus, 8, seed=3)._start(i) for i in range(n)]
    assert epochs[0] != [PackedDataset(corpus, 8, seed=4)._start(i) for i in range(n)]
    for g in (0, 5, n + 5, 3 * n - 1, 0):  # epochs back and forth
        a = epochs[g // n][g % n]
        assert dataset[g].tolist() == tokens[a : a + 9].tolist()
        assert dataset.document_starts(g).tolist() == [s - a for s in starts if a <= s < a + 9]


def test_global_batches_do_not_depend_on_the_number_of_ranks(stream):
    folder = stream[0]
    batch = 8

    def steps(world):
        ranks = [PackedDataset(TokenCorpus(str(folder / "s-*")), 16, seed=42) for _ in range(world)]
        for step in range(2 * len(ranks[0]) // batch):  # over the end of an epoch
            g, rows = step * batch, np.empty((batch, 17), np.int64)
            for rank, dataset in enumerate(ranks):
                rows[rank::world] = dataset.read_batch(range(g + rank, g + batch, world))
            yield rows

    for one, two, four in zip(steps(1), steps(2), steps(4), strict=True):
        assert np.array_equal(one, two)
        assert np.array_equal(one, four)


def test_fingerprint_changes_with_everything_that_changes_the_samples(stream):
    folder = stream[0]
    whole = TokenCorpus(str(folder / "s-*"))
    others = (folder / "s-2", "train"), ([folder / "s-2", folder / "s-0"], "train"), (str(folder / "s-*"), "validation")
    sets = [PackedDataset(whole, seq_len, seed) for seq_len, seed in ((8, 3), (9, 3), (8, 4))]
    sets += [PackedDataset(whole, 8, 3, shuffle=False), *(PackedDataset(TokenCorpus(*other), 8, 3) for other in others)]
    assert len({d.fingerprint for d in sets}) == len(sets)
    assert sets[0].fingerprint == PackedDataset(TokenCorpus(str(folder / "s-*")), 8, 3).fingerprint


def test_too_short_a_corpus(stream):
    corpus = TokenCorpus(stream[0] / "s-0")
    assert len(PackedDataset(corpus, corpus.num_tokens - 1, 0)) == 1
    for seq_len in (corpus.num_tokens, 0):
        with pytest.raises(ValueError, match="seq_len"):
            PackedDataset(corpus, seq_len, 0)


def test_ids_outside_the_vocabulary_are_caught_while_reading(stream):
    corpus = TokenCorpus(str(stream[0] / "s-*"), vocab_size=400)
    with pytest.raises(ValueError, match="the vocabulary has 0 to 399"):
        PackedDataset(corpus, 200, 0).read_batch(range(2))
