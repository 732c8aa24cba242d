"""Megatron's .bin/.idx shards: the bytes, damage of every kind, and writers that die."""

import hashlib
import re
import struct

import numpy as np
import pytest

from interdomain.data import IndexedDataset
from interdomain.data.indexed import DTYPES

from .common import write_shard

DOCUMENTS = [[5, 6, 7, 2], [2], [500, 0, 599, 4, 2]]


def write_by_hand(prefix, code, dtype, documents):
    """Writes a shard in the layout that Megatron publishes. A document is a list of sequences."""
    data = b""
    lengths = []
    offsets = []
    first_sequences = [0]
    for document in documents:
        for sequence in document:
            offsets.append(len(data))
            lengths.append(len(sequence))
            data += np.array(sequence, dtype).tobytes()
        first_sequences.append(len(lengths))
    index = b"MMIDIDX\0\0"
    index += struct.pack("<QBQQ", 1, code, len(lengths), len(first_sequences))
    index += np.array(lengths, "<i4").tobytes()
    index += np.array(offsets, "<i8").tobytes()
    index += np.array(first_sequences, "<i8").tobytes()
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(data)


@pytest.mark.parametrize(
    ("vocab_size", "code", "dtype"),
    [
        (65499, 8, "<u2"),
        (65500, 4, "<i4"),
    ],
)
def test_layout(tmp_path, vocab_size, code, dtype):
    documents = [*DOCUMENTS, [vocab_size - 1, 0]]
    record = write_shard(tmp_path / "a", documents, vocab_size)
    write_by_hand(tmp_path / "expected", code, dtype, [[document] for document in documents])
    assert record["name"] == "a"
    assert record["documents"] == 4
    assert record["tokens"] == 12
    for kind in ("bin", "idx"):
        data = (tmp_path / f"expected.{kind}").read_bytes()
        assert (tmp_path / f"a.{kind}").read_bytes() == data
        assert record[f"{kind}_sha256"] == hashlib.sha256(data).hexdigest()
        assert record[f"{kind}_bytes"] == len(data)


@pytest.mark.parametrize(("code", "dtype"), DTYPES.items())
def test_reads_every_integer_dtype_and_documents_of_several_sequences(tmp_path, code, dtype):
    write_by_hand(tmp_path / "a", code, dtype, [[[1, 2], [3]], [], [[4, 5, 6]]])
    dataset = IndexedDataset(tmp_path / "a")
    dataset.verify()
    assert dataset.num_tokens == 6
    assert [document.tolist() for document in dataset] == [[1, 2, 3], [], [4, 5, 6]]
    assert dataset.tokens(2, 5).tolist() == [3, 4, 5]
    assert dataset.document_starts(0, 6).tolist() == [0, 3]
    assert dataset.document_starts(1, 3).tolist() == []


@pytest.mark.parametrize("code", [6, 0])
def test_other_dtypes_are_refused(tmp_path, code):
    write_by_hand(tmp_path / "a", code, "<u2", [[[1]]])
    with pytest.raises(ValueError, match=f"dtype code {code}"):
        IndexedDataset(tmp_path / "a")


def assert_refused(path, data):
    """Checks that the shard `a` is refused, and its file is named, if the file has this content."""
    path.write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        IndexedDataset(path.with_name("a"))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_every_truncation_is_refused(tmp_path, suffix):
    write_shard(tmp_path / "a", DOCUMENTS)
    path = tmp_path / f"a{suffix}"
    data = path.read_bytes()
    for size in range(len(data)):
        assert_refused(path, data[:size])
    assert_refused(path, data + b"xx")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=rf"{suffix} is missing"):
        IndexedDataset(tmp_path / "a")


def test_a_damaged_index_is_refused(tmp_path):
    write_shard(tmp_path / "a", DOCUMENTS)
    path = tmp_path / "a.idx"
    data = path.read_bytes()
    # The magic bytes, the version, a count, an offset, a document.
    for at in (0, 9, 26, 62, 70):
        damaged = bytearray(data)
        damaged[at] ^= 1
        assert_refused(path, damaged)
    # No size tells that the first length is wrong.
    damaged = bytearray(data)
    damaged[34] += 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="back to back"):
        IndexedDataset(tmp_path / "a").verify()


@pytest.mark.parametrize("tokens", [[600], [-1, 3], [], [[1]], [1.5]])
def test_the_writer_refuses_ids_outside_the_vocabulary(tmp_path, tokens):
    with pytest.raises(ValueError, match="ids from 0 to 599"):
        write_shard(tmp_path / "a", [[1], tokens])
    assert list(tmp_path.iterdir()) == []


def test_the_writer_never_overwrites_a_shard(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"A killed writer left this. It is no shard without an index.")
    write_shard(tmp_path / "a", DOCUMENTS)
    assert [document.tolist() for document in IndexedDataset(tmp_path / "a")] == DOCUMENTS
    with pytest.raises(FileExistsError, match="never overwritten"):
        write_shard(tmp_path / "a", DOCUMENTS)
