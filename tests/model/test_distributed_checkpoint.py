"""Reading checkpoints that nobody vouches for: nothing in an index runs, and damage is refused."""

import io
import pickle
import random
from enum import Enum

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from interdomain.checkpoint import step_folder
from interdomain.checkpoint.index import (
    as_metadata,
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


@pytest.fixture
def index_file(checkpoint):
    return checkpoint / step_folder.METADATA


def assert_tensors(checkpoint):
    index = tensor_index(checkpoint)
    assert index.keys() == TENSORS.keys()
    for name, tensor in read_tensors(checkpoint, list(index)).items():
        assert index[name].size == tensor.shape
        torch.testing.assert_close(tensor, TENSORS[name], rtol=0, atol=0)


def test_round_trip(checkpoint):
    assert_tensors(checkpoint)
    assert list(read_tensors(checkpoint, ["b"])) == ["b"]


class AsPython3112(pickle.Pickler):
    """Writes members of enums as Python 3.11.2 does, which is Debian 12's."""

    def reducer_override(self, obj):
        if isinstance(obj, Enum):
            return getattr, (type(obj), obj.name)
        return NotImplemented


def test_an_index_that_another_python_wrote(checkpoint, index_file):
    written = io.BytesIO()
    AsPython3112(written).dump(pickle.loads(index_file.read_bytes()))
    assert b"getattr" in written.getvalue()
    index_file.write_bytes(written.getvalue())
    assert_tensors(checkpoint)


GADGETS = [
    b"cbuiltins\neval\n(S'1'\ntR.",
    b"ctorch\nload\n(S'x'\ntR.",
    # the class of an enum
    b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nS'__class__'\ntR.",
    # getattr of a class that an index may name, by a dotted name and by a call
    b"\x80\x04\x8c\x07pathlib\x94\x8c\x0fPath.write_text\x94\x93\x94.",
    b"cbuiltins\ngetattr\n(cpathlib\nPath\nS'write_text'\ntR.",
    # a module's module
    b"\x80\x04\x8c\x05torch\x94\x8c\x09os.system\x94\x93\x94.",
    # an attribute of a class that is overwritten
    b"cpathlib\nPosixPath\n(N(S'_str'\nS'elsewhere'\ndtb.",
]


@pytest.mark.parametrize("gadget", GADGETS)
def test_no_gadget_is_reached(gadget, checkpoint, index_file):
    index_file.write_bytes(gadget)
    with pytest.raises(ValueError, match="is damaged"):
        tensor_index(checkpoint)


class Runs:
    """Unpickling an object of this class runs code, which creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("place", ["top", "entry"])
def test_code_in_an_index_never_runs(place, checkpoint, index_file, tmp_path):
    trap = Runs(tmp_path / "created")
    metadata = trap
    if place == "entry":
        metadata = pickle.loads(index_file.read_bytes())
        metadata.state_dict_metadata["d"] = trap
    index_file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="has no place in the index"):
        read_tensors(checkpoint, ["a"])
    assert not trap.path.exists()
    # The trap does run if it is unpickled.
    pickle.loads(pickle.dumps(trap))
    assert trap.path.exists()


# PyTorch warns of the code in place of a tensor.
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_code_in_a_shard_never_runs(tmp_path):
    """A tensor is loaded with weights_only, and other objects are not loaded at all."""
    trap = Runs(tmp_path / "created")
    checkpoint = tmp_path / "step-1"
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp.save({**TENSORS, "optimizer.state": trap}, checkpoint_id=checkpoint, no_dist=True)
    assert_tensors(checkpoint)
    # Code in place of a tensor's bytes is refused as damage.
    stored = read_index(checkpoint)
    number = list(stored.entries).index("a")
    piece = stored.pieces[stored.pieces["entry"] == number][0]
    code = pickle.dumps(trap)
    with open(checkpoint / stored.files[piece["file"]], "r+b") as file:
        file.seek(int(piece["first_byte"]))
        file.write(code.ljust(int(piece["length"]), b"\0"))
    with pytest.raises(ValueError, match="could not be read"):
        read_tensors(checkpoint, ["a"])
    assert not trap.path.exists()


def test_damaged_bytes_raise_nothing_but_a_valueerror(checkpoint, index_file):
    """An index with flipped bits or a cut end is refused, or read as what it still says."""
    whole = index_file.read_bytes()
    rng = random.Random(0)
    refused = 0
    for attempt in range(60):
        data = bytearray(whole)
        position = rng.randrange(len(data))
        if attempt % 3 == 0:
            del data[position:]
        else:
            data[position] ^= 1 << rng.randrange(8)
        index_file.write_bytes(data)
        try:
            index = tensor_index(checkpoint)
            names = [n for n in TENSORS if n in index and index[n].size == TENSORS[n].shape]
            read_tensors(checkpoint, names)
        except ValueError:
            refused += 1
    assert refused > 30


def test_the_newest_complete_step(tmp_path):
    folder = tmp_path / "run" / "checkpoint"
    for name in ("step-90", "step-100", "step-200.bak"):
        (folder / name).mkdir(parents=True)
        (folder / name / step_folder.METADATA).touch()
    incomplete = folder / "step-110"
    incomplete.mkdir()
    newest = folder / "step-100"
    for path in (folder.parent, folder, str(newest)):
        assert step_folder.latest_checkpoint(path) == newest
    with pytest.raises(FileNotFoundError, match="no folder"):
        step_folder.latest_checkpoint(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="not a complete checkpoint"):
        tensor_index(step_folder.latest_checkpoint(incomplete))


@pytest.mark.parametrize("folder", ["checkpoint", "all/ck", "."])
def test_the_record_of_a_checkpoint_without_one_is_in_the_run_s_folder(tmp_path, folder):
    """TorchTitan's own trainer saves so. The record of a run around it is not taken."""
    outer = tmp_path / "outer"
    inner = outer / "runs" / "inner"
    step = inner / folder / "step-4"
    step.mkdir(parents=True)
    for run in (outer, inner):
        (run / step_folder.RECORD_FILE).write_text("{}")
        note_folders(run, folder, "tb")
    assert step_folder.record_folder(step) == inner
    (inner / step_folder.RECORD_FILE).unlink()
    assert step_folder.record_folder(step) == step


def test_an_index_without_a_place_of_a_tensor_is_damaged(checkpoint, index_file):
    metadata = pickle.loads(index_file.read_bytes())
    del metadata.storage_data[MetadataIndex("a", torch.Size((0, 0)))]
    index_file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"damaged.*3 pieces and 2 places"):
        read_index(checkpoint)


class LocalPart:
    """A rank's part of a matrix, described as a DTensor describes it."""

    def __init__(self, offsets, sizes):
        self.chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    def __create_chunk_list__(self):
        return [self.chunk]


def names_read(checkpoint, tensors):
    part = as_metadata(read_index(checkpoint), tensors)
    return {key.fqn for key in part.storage_data}


def test_a_rank_reads_only_its_part(checkpoint):
    """It reads no tensor that it does not hold, and none of which its part is empty."""
    columns = LocalPart((0, 2), (3, 2))
    assert names_read(checkpoint, {"a": columns, "c": TENSORS["c"]}) == {"a", "c"}
    for first_row in (0, 3):
        no_rows = LocalPart((first_row, 0), (0, 4))
        assert names_read(checkpoint, {"a": no_rows, "c": TENSORS["c"]}) == {"c"}
