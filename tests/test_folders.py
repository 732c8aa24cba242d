"""Files that appear complete or not at all."""

import errno
import os
import stat

import pytest

from interdomain import folders


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, error):

    def fail(file):
        raise error

    path = tmp_path / "record.json"
    folders.write_atomically(path, b"one")
    monkeypatch.setattr(folders, "sync", fail)
    with pytest.raises(type(error)):
        folders.write_atomically(path, b"two")
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["record.json"]


@pytest.mark.parametrize("refused", ["folders", "files and folders"])
def test_a_file_system_that_cannot_sync(tmp_path, monkeypatch, refused):
    """The work is kept all the same. A failing disk is an error that names the place."""
    answer, sync = {"error": errno.EINVAL}, os.fsync

    def fsync(descriptor):
        if refused != "folders" or stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(answer["error"], os.strerror(answer["error"]))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    for number in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
        answer["error"] = number
        output = tmp_path / str(number)
        with folders.new_folder(output) as folder:
            folders.write_atomically(folder / "weights", b"...")
        assert (output / "weights").read_bytes() == b"..."
    answer["error"] = errno.EIO
    with (
        pytest.raises(OSError, match=r"Input/output error: '.*output"),
        folders.new_folder(tmp_path / "output"),
    ):
        pass
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(
    ("build", "suffix"), [(folders.new_folder, "partial"), (folders.resumable_folder, "unfinished")]
)
def test_nothing_is_removed_through_a_link(tmp_path, build, suffix):
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "weights").write_bytes(b"...")
    (tmp_path / f".output.{suffix}").symlink_to(tmp_path / "archive")
    with pytest.raises(NotADirectoryError, match=suffix), build(tmp_path / "output"):
        pass
    assert os.listdir(tmp_path / "archive") == ["weights"]


def test_a_folder_has_its_name_when_its_files_are_on_the_disk(tmp_path, monkeypatch):
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
    with folders.new_folder(tmp_path / "folder") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_bytes(b"...")
    assert {path.stat().st_ino for path in (tmp_path, *(tmp_path / "folder").rglob("*"))} <= synced
