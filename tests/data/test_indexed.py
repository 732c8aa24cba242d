"""Megatron's .bin/.idx shards: the bytes, damage of every kind, and writers that die."""

import re
import struct

import numpy as np
import pytest

from interdomain.data import IndexedDataset, IndexedDatasetWriter
from interdomain.data.indexed import DTYPES, file_sha256

DOCUMENTS = [[5, 6, 7, 2], [2], [1000, 0, 1999, 4, 2]]


def write(prefix, documents=DOCUMENTS, vocab_size=2000):
    with IndexedDatasetWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add_document(document)
        return writer.finalize()


def by_hand(prefix, code, documents, dtype=None):
    """A shard as Megatron publishes the layout; a document is a list of sequences."""
    dtype = np.dtype(dtype or DTYPES[code])
    sequences = [np.array(s, dtype) for d in documents for s in d]
    lengths = np.array([len(s) for s in sequences], "<i4")
    doc_idx = np.cumsum([0] + [len(d) for d in documents])
    offsets = (np.cumsum(lengths) - lengths) * dtype.itemsize
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(doc_idx))
    prefix.with_suffix(".idx").write_bytes(
        head + lengths.tobytes() + offsets.astype("<i8").tobytes() + doc_idx.astype("<i8").tobytes()
    )
    prefix.with_suffix(".bin").write_bytes(b"".join(s.tobytes() for s in sequences))
    return prefix


@pytest.mark.parametrize(("vocab_size", "code"), [(65499, 8), (65500, 4)])
def test_layout(tmp_path, vocab_size, code):
    documents = [*DOCUMENTS, [vocab_size - 1, 0]]
    record = write(tmp_path / "a", documents, vocab_size)
    by_hand(tmp_path / "expected", code, [[document] for document in documents])
    assert (record["name"], record["documents"], record["tokens"]) == ("a", 4, 12)
    for kind in ("bin", "idx"):
        path = tmp_path / f"a.{kind}"
        assert path.read_bytes() == (tmp_path / f"expected.{kind}").read_bytes()
        assert (record[f"{kind}_sha256"], record[f"{kind}_bytes"]) == (
            file_sha256(path),
            path.stat().st_size,
        )
    assert write(tmp_path / "b", [])["tokens"] == len(IndexedDataset(tmp_path / "b")) == 0
    IndexedDataset(tmp_path / "b").verify()


def test_reads_every_integer_dtype_and_documents_of_several_sequences(tmp_path):
    for code in DTYPES:
        dataset = IndexedDataset(
            by_hand(tmp_path / str(code), code, [[[1, 2], [3]], [], [[4, 5, 6]]])
        )
        assert dataset.num_tokens == 6
        assert [document.tolist() for document in dataset] == [[1, 2, 3], [], [4, 5, 6]]
        assert dataset.tokens(2, 5).tolist() == [3, 4, 5]
        starts = [dataset.document_starts(*span).tolist() for span in ((0, 6), (1, 3), (3, 4))]
        assert starts == [[0, 3], [], [3]]
        dataset.verify()
    for code in (6, 7, 0, 9):
        with pytest.raises(ValueError, match=f"dtype code {code}"):
            IndexedDataset(by_hand(tmp_path / "a", code, [[[1]]], dtype="<u2"))


def test_every_truncation_and_a_damaged_index_are_refused(tmp_path):
    write(tmp_path / "a")
    damaged = (
        (0, b"X"),
        (9, b"\2"),
        (26, b"\1"),
        (34 + 4 * 3 + 8 * 2, b"\1"),
        (34 + 12 * 3, b"\1"),
    )
    for suffix in (".bin", ".idx"):
        path = tmp_path / f"a{suffix}"
        data = path.read_bytes()
        changed = [*(data[:size] for size in range(len(data))), data + b"xx"]
        changed += [data[:at] + byte + data[at + 1 :] for at, byte in damaged if suffix == ".idx"]
        for part in changed:
            path.write_bytes(part)
            with pytest.raises(ValueError, match=re.escape(str(path))):
                IndexedDataset(tmp_path / "a")
        path.unlink()
        with pytest.raises(FileNotFoundError, match=rf"{suffix} is missing"):
            IndexedDataset(tmp_path / "a")
        path.write_bytes(data)
    path.write_bytes(
        data[:34] + bytes([data[34] + 1]) + data[35:]
    )  # the first length: no size changes
    with pytest.raises(ValueError, match="back to back"):
        IndexedDataset(tmp_path / "a").verify()


@pytest.mark.parametrize("tokens", [[2000], [-1, 3], [], [[1]], [1.5]])
def test_writer_refuses_ids_outside_the_vocabulary_and_never_overwrites(tmp_path, tokens):
    with pytest.raises(ValueError, match="ids from 0 to 1999"):
        write(tmp_path / "a", [[1], tokens])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a.bin").write_bytes(
        b"of a writer that was killed: without an index it is no shard"
    )
    write(tmp_path / "a")
    assert [document.tolist() for document in IndexedDataset(tmp_path / "a")] == DOCUMENTS
    with pytest.raises(FileExistsError, match="never overwritten"):
        write(tmp_path / "a")
