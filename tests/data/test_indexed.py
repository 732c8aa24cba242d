"""Megatron's .bin/.idx shards: the bytes, damage of every kind, and writers that die."""

import re
import struct
import subprocess
import sys
from pathlib import Path

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


def reference_read(prefix):
    """An independent reader of the published layout: dtype code and documents."""
    data = Path(f"{prefix}.idx").read_bytes()
    assert data[:9] == b"MMIDIDX\0\0"
    version, code, n_seq, n_doc = struct.unpack_from("<QBQQ", data, 9)
    assert version == 1
    assert len(data) == 34 + 20 * n_seq + 8 == 34 + 12 * n_seq + 8 * n_doc
    lengths = np.frombuffer(data, "<i4", n_seq, 34)
    offsets = np.frombuffer(data, "<i8", n_seq, 34 + 4 * n_seq)
    assert np.array_equal(np.frombuffer(data, "<i8", n_doc, 34 + 12 * n_seq), np.arange(n_seq + 1))
    raw, dtype = Path(f"{prefix}.bin").read_bytes(), {8: "<u2", 4: "<i4"}[code]
    return code, [np.frombuffer(raw, dtype, n, o).tolist() for n, o in zip(lengths, offsets, strict=True)]


@pytest.mark.parametrize(("vocab_size", "code"), [(2000, 8), (65499, 8), (65500, 4)])
def test_layout(tmp_path, vocab_size, code):
    documents = [*DOCUMENTS, [vocab_size - 1, 0]]
    info = write(tmp_path / "a", documents, vocab_size)
    assert reference_read(tmp_path / "a") == (code, documents)
    assert write(tmp_path / "b", []).tokens == len(IndexedDataset(tmp_path / "b")) == 0
    IndexedDataset(tmp_path / "b").verify()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx", "b.bin", "b.idx"]
    assert (info.name, info.documents, info.tokens) == ("a", 4, 12)
    assert info.bin_sha256 == file_sha256(tmp_path / "a.bin")
    assert info.idx_sha256 == file_sha256(tmp_path / "a.idx")
    assert info.bin_bytes == (tmp_path / "a.bin").stat().st_size == 12 * (2 if code == 8 else 4)
    assert info.idx_bytes == (tmp_path / "a.idx").stat().st_size


def hand_built(prefix, code, documents, dtype=None):
    """An index by hand; a document is a list of sequences."""
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


def test_reads_every_integer_dtype_and_documents_of_several_sequences(tmp_path):
    for code in DTYPES:
        dataset = IndexedDataset(hand_built(tmp_path / str(code), code, [[[1, 2], [3]], [], [[4, 5, 6]]]))
        assert (len(dataset), dataset.num_tokens) == (3, 6)
        assert [dataset[i].tolist() for i in range(3)] == [[1, 2, 3], [], [4, 5, 6]]
        assert dataset[-1].tolist() == [4, 5, 6]
        assert dataset.tokens(2, 5).tolist() == [3, 4, 5]
        starts = [dataset.document_starts(*span).tolist() for span in ((0, 6), (1, 3), (3, 4))]
        assert starts == [[0, 3], [], [3]]
        dataset.verify()
    with pytest.raises(IndexError):
        dataset[3]


def test_documents_in_another_order(tmp_path):
    """Opening a shard compares ends only; whoever asks where documents begin is told."""
    path = hand_built(tmp_path / "a", 4, [[[1]], [[2]], [[3]], [[4]]]).with_suffix(".idx")
    index = bytearray(path.read_bytes())
    index[-32:-16] = struct.pack("<qq", 2, 1)
    path.write_bytes(index)
    with pytest.raises(ValueError, match="follow one another"):
        IndexedDataset(tmp_path / "a").document_starts(0, 4)


def test_refuses_what_are_not_text_tokens(tmp_path):
    for code in (6, 7, 0, 9):
        with pytest.raises(ValueError, match=f"dtype code {code}"):
            IndexedDataset(hand_built(tmp_path / "a", code, [[[1]]], dtype="<u2"))
    write(tmp_path / "b")
    with open(tmp_path / "b.idx", "ab") as f:
        f.write(bytes(3))
    with pytest.raises(NotImplementedError, match="multimodal"):
        IndexedDataset(tmp_path / "b")


def test_every_truncation_is_refused(tmp_path):
    write(tmp_path / "a")
    for suffix in (".idx", ".bin"):
        path = tmp_path / f"a{suffix}"
        data = path.read_bytes()
        for size in range(len(data)):
            path.write_bytes(data[:size])
            with pytest.raises(ValueError, match=re.escape(str(path))):
                IndexedDataset(tmp_path / "a")
        path.write_bytes(data + b"xx")
        with pytest.raises(ValueError, match="damaged"):
            IndexedDataset(tmp_path / "a")
        path.unlink()
        with pytest.raises(FileNotFoundError, match=rf"{suffix} is missing"):
            IndexedDataset(tmp_path / "a")
        path.write_bytes(data)
    IndexedDataset(tmp_path / "a")


def test_damaged_index(tmp_path):
    write(tmp_path / "a")
    path = tmp_path / "a.idx"
    whole = path.read_bytes()
    for at, data in ((0, b"X"), (9, b"\2"), (26, b"\1"), (34 + 4 * 3 + 8 * 2, b"\1"), (34 + 12 * 3, b"\1")):
        path.write_bytes(whole[:at] + data + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"a\.idx"):
            IndexedDataset(tmp_path / "a")
    path.write_bytes(whole[:34] + bytes([whole[34] + 1]) + whole[35:])  # the first length: no size changes
    with pytest.raises(ValueError, match="back to back"):
        IndexedDataset(tmp_path / "a").verify()


@pytest.mark.parametrize("tokens", [[2000], [-1, 3], [], [[1]], [1.5], [70000]])
def test_writer_refuses_ids_outside_the_vocabulary_and_never_overwrites(tmp_path, tokens):
    with pytest.raises(ValueError, match=r"vocabulary|non-empty"):
        write(tmp_path / "a", [[1], tokens])
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "a")
    with pytest.raises(FileExistsError, match="never overwritten"):
        write(tmp_path / "a")


KILLED = """
import os, sys
import interdomain.data.indexed as indexed
real, calls = indexed.os.replace, []
def replace(a, b):
    if len(calls) == int(sys.argv[2]):
        os._exit(9)
    calls.append(b)
    real(a, b)
indexed.os.replace = replace
with indexed.IndexedDatasetWriter(sys.argv[1], 2000) as writer:
    writer.add_document([1, 2, 3])
    if sys.argv[2] == "now":
        os._exit(9)
"""


@pytest.mark.parametrize("moment", ["now", 0, 1])
def test_a_killed_writer_leaves_no_shard(tmp_path, moment):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "a"), str(moment)])
    assert killed.returncode == 9
    assert not (tmp_path / "a.idx").exists()
    with pytest.raises(FileNotFoundError):
        IndexedDataset(tmp_path / "a")
    (tmp_path / "a.bin").unlink(missing_ok=True)  # killed between the two renames
    write(tmp_path / "a")  # over the leftovers
    assert reference_read(tmp_path / "a")[1] == DOCUMENTS
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx"]
