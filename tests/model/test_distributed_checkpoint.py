"""Reading checkpoints that nobody vouches for: an index describes tensors, or it is refused, and nothing in it runs."""

import io
import pickle
import random
from dataclasses import replace
from enum import Enum
from pathlib import Path, PosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from interdomain.checkpoint import step_folder as checkpoints
from interdomain.checkpoint.index import (
    overlapping,
    read_index,
    read_tensors,
    tensor_index,
    write_tensors,
)
from interdomain.checkpoint.run_folder import note_folders

TENSORS = {
    "a": torch.arange(12.0).view(3, 4),
    "b": torch.arange(5, dtype=torch.bfloat16),
    "c": torch.tensor(2.5),
}


@pytest.fixture
def checkpoint(tmp_path):
    write_tensors(tmp_path / "step-1", TENSORS)
    return tmp_path / "step-1"


def edit_index(checkpoint, change):
    path = checkpoint / checkpoints.METADATA
    metadata = pickle.loads(path.read_bytes())
    metadata = change(metadata) or metadata
    path.write_bytes(pickle.dumps(metadata))


def test_round_trip(checkpoint):
    index = tensor_index(checkpoint)
    assert {name: entry.size for name, entry in index.items()} == {
        name: t.shape for name, t in TENSORS.items()
    }
    for name, tensor in read_tensors(checkpoint, list(index)).items():
        assert torch.equal(tensor, TENSORS[name])
        assert tensor.dtype == TENSORS[name].dtype
    assert list(read_tensors(checkpoint, ["b"])) == ["b"]


class Runs:
    """Unpickling this runs code: it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


GADGETS = {
    "builtins.eval": b"cbuiltins\neval\n(S'1'\ntR.",
    "torch.load": b"ctorch\nload\n(S'x'\ntR.",
    "an enum's class": b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nS'__class__'\ntR.",
    "a dotted name": b"\x80\x04\x8c\x07pathlib\x94\x8c\x0fPath.write_text\x94\x93\x94.",
    "builtins.getattr": b"cbuiltins\ngetattr\n(cpathlib\nPath\nS'write_text'\ntR.",
    "a module's module": b"\x80\x04\x8c\x05torch\x94\x8c\x09os.system\x94\x93\x94.",
    "a class's attribute": b"cpathlib\nPosixPath\n(N(S'_str'\nS'elsewhere'\ndtb.",
    "a class's bases": b"cpathlib\nPosixPath\n(N(S'__bases__'\n(cpathlib\nPurePosixPath\ntdtb.",
    "a member's value": b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    b"S'TORCH_CHANNELS_LAST'\ntR(S'_value_'\nI9\ndb.",
}


class AsPython3112(pickle.Pickler):
    """Members of enums as Python 3.11.2, Debian 12's, writes them."""

    def reducer_override(self, obj):
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def test_an_index_that_another_python_wrote(checkpoint):
    path = checkpoint / checkpoints.METADATA
    there = io.BytesIO()
    AsPython3112(there).dump(pickle.loads(path.read_bytes()))
    path.write_bytes(there.getvalue())
    assert b"getattr" in there.getvalue()
    test_round_trip(checkpoint)


def test_no_gadget_is_reached(checkpoint):
    for gadget in GADGETS.values():
        (checkpoint / checkpoints.METADATA).write_bytes(gadget)
        with pytest.raises(ValueError, match="is damaged"):
            tensor_index(checkpoint)
    assert (
        str(Path("here")),
        PosixPath.__bases__[0],
        _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST.value,
    ) == (
        "here",
        Path,
        1,
    )


def test_code_in_an_index_never_runs(checkpoint, tmp_path):
    """Neither at the top nor in an entry."""
    trap = tmp_path / "sprung"
    whole = (checkpoint / checkpoints.METADATA).read_bytes()
    for change in (
        lambda metadata: Runs(trap),
        lambda metadata: metadata.state_dict_metadata.update(d=Runs(trap)),
    ):
        edit_index(checkpoint, change)
        for read in (tensor_index, lambda folder: read_tensors(folder, ["a"])):
            with pytest.raises(ValueError, match="has no place in the index"):
                read(checkpoint)
        assert not trap.exists()
        (checkpoint / checkpoints.METADATA).write_bytes(whole)
    pickle.loads(pickle.dumps(Runs(trap)))  # the trap is real
    assert trap.exists()


@pytest.mark.filterwarnings(
    "ignore:Detected pickle protocol"
)  # torch's, at the code in place of a tensor
def test_code_in_a_shard_never_runs(tmp_path):
    """A tensor that we read is loaded with weights_only; whatever is beside it is not loaded at all."""
    trap = tmp_path / "sprung"
    folder = tmp_path / "step-1"
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp.save({**TENSORS, "optimizer.state": Runs(trap)}, checkpoint_id=folder, no_dist=True)
    index = tensor_index(folder)
    assert set(index) == set(TENSORS)
    found = read_tensors(folder, list(index))
    assert torch.equal(found["a"], TENSORS["a"])
    assert not trap.exists()
    # The bytes of a tensor replaced by code: refused as damaged.
    stored = read_index(folder)
    number = list(stored.entries).index("a")
    piece = stored.pieces[stored.pieces["entry"] == number][0]
    first, length = int(piece["first"]), int(piece["length"])
    code = pickle.dumps(Runs(trap)).ljust(length, b"\0")
    with open(folder / stored.files[piece["file"]], "r+b") as file:
        file.seek(first)
        file.write(code[:length])
    with pytest.raises(ValueError, match="could not be read"):
        read_tensors(folder, ["a"])
    assert not trap.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: {"state_dict_metadata": {}},
        lambda m: Metadata(None),
        lambda m: m.state_dict_metadata["a"].chunks.pop() and None,
        lambda m: delattr(m.state_dict_metadata["a"], "size"),
    ],
)
def test_an_index_that_describes_too_little_is_refused(checkpoint, change):
    edit_index(checkpoint, change)
    with pytest.raises(ValueError, match=r"\.metadata is damaged"):
        tensor_index(checkpoint)


def test_damaged_bytes_never_end_in_anything_but_a_valueerror(checkpoint):
    """Bits flipped, ends cut: refused, or read as what they still say; never another exception, never other values' memory."""
    path = checkpoint / checkpoints.METADATA
    whole = path.read_bytes()
    chance = random.Random(0)
    refused = 0
    for attempt in range(60):
        data = bytearray(whole)
        if attempt % 3:
            for _ in range(chance.choice((1, 1, 5))):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        else:
            data = data[: chance.randrange(len(data))]
        path.write_bytes(data)
        try:
            index = tensor_index(checkpoint)
            names = [n for n in TENSORS if n in index and index[n].size == TENSORS[n].shape]
            read_tensors(checkpoint, names)
        except ValueError:
            refused += 1
    assert refused > 30


def test_newest_whole_step(tmp_path):
    run = tmp_path / "run"
    whole = ("checkpoint/step-90", "checkpoint/step-100", "checkpoint/step-200.bak", "step-95")
    for name in (*whole, "checkpoint/step-110"):
        (run / name).mkdir(parents=True)
    for name in whole:
        (run / name / checkpoints.METADATA).touch()
    assert checkpoints.latest_checkpoint(run) == run / "checkpoint" / "step-100"
    assert checkpoints.latest_checkpoint(run / "checkpoint") == run / "checkpoint" / "step-100"
    assert checkpoints.latest_checkpoint(str(run / "step-95")) == run / "step-95"
    with pytest.raises(FileNotFoundError, match="no folder"):
        checkpoints.latest_checkpoint(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="not a complete checkpoint"):
        tensor_index(checkpoints.latest_checkpoint(run / "checkpoint" / "step-110"))


class Piece:
    """A rank's part of a tensor, as a DTensor tells it."""

    def __init__(self, offsets, sizes):
        self.chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    def __create_chunk_list__(self):
        return [self.chunk]


@pytest.mark.parametrize("name", ["checkpoint", "ck", "all/ck", "."])
def test_the_record_of_checkpoints_that_have_none_is_in_the_run_s_folder(tmp_path, name):
    """As TorchTitan's own trainer saves, with any checkpoint.folder; not in another run's folder around it."""
    inner = tmp_path / "outer" / "runs" / "inner"
    for run, folder in ((tmp_path / "outer", "ck"), (inner, name)):
        run.mkdir(parents=True)
        (run / checkpoints.RECORD_FILE).write_text("{}")
        note_folders(run, folder, "tb")
    step = inner / name / "step-4"
    step.mkdir(parents=True)
    assert checkpoints.record_folder(step) == inner
    (inner / checkpoints.RECORD_FILE).unlink()
    assert checkpoints.record_folder(step) == step


def test_a_rank_takes_the_pieces_of_its_tensors(checkpoint):
    """Two of a matrix's four pieces; all of a scalar and an object; nothing of a tensor that is on other ranks."""
    boxes = {(0, 2): (1, 2), (0, 0): (1, 2), (1, 2): (2, 2), (1, 0): (2, 2)}  # offsets: sizes

    def cut(metadata):
        place = metadata.storage_data.pop(MetadataIndex("a", torch.Size((0, 0))))
        pieces = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in boxes.items()
        ]
        metadata.state_dict_metadata |= {
            "a": replace(metadata.state_dict_metadata["a"], chunks=pieces)
        }
        metadata.state_dict_metadata |= {"object": BytesStorageMetadata()}
        for n, piece in enumerate(pieces):
            metadata.storage_data[MetadataIndex("a", piece.offsets)] = replace(
                place, relative_path=f"{n}.distcp"
            )
        metadata.storage_data[MetadataIndex("object")] = replace(
            place, relative_path="object.distcp"
        )

    edit_index(checkpoint, cut)
    part = overlapping(
        read_index(checkpoint), {"a": Piece((0, 2), (3, 2)), "c": TENSORS["c"], "object": None}
    )
    assert part.state_dict_metadata.keys() == {"a", "b", "c", "object"}
    places = {
        (key.fqn, key.offset): place.relative_path for key, place in part.storage_data.items()
    }
    assert places.pop(("c", ())).endswith(".distcp")
    assert places == {
        ("a", (0, 2)): "0.distcp",
        ("a", (1, 2)): "2.distcp",
        ("object", None): "object.distcp",
    }
    assert [chunk.sizes for chunk in part.state_dict_metadata["a"].chunks] == [(1, 2), (2, 2)]

    edit_index(
        checkpoint,
        lambda metadata: metadata.storage_data.pop(MetadataIndex("a", torch.Size((1, 0)))) and None,
    )
    with pytest.raises(ValueError, match=r"damaged.*7 pieces and 6 places"):
        read_index(checkpoint)
