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


def refuse_sync(monkeypatch, number, files_too):
    """The file system answers fsync of a folder, and of a file if `files_too`, with an error."""
    fsync = os.fsync

    def sync(descriptor):
        if files_too or stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)


@pytest.mark.parametrize(
    ("number", "files_too"), [(errno.EINVAL, True), (errno.ENOTSUP, False), (errno.ENOSYS, True)]
)
def test_a_file_system_that_cannot_sync_keeps_the_work(tmp_path, monkeypatch, number, files_too):
    refuse_sync(monkeypatch, number, files_too)
    with folders.new_folder(tmp_path / "output") as folder:
        folders.write_atomically(folder / "weights", b"...")
    assert (tmp_path / "output/weights").read_bytes() == b"..."


def test_a_failing_disk_is_an_error_that_names_the_place(tmp_path, monkeypatch):
    refuse_sync(monkeypatch, errno.EIO, files_too=False)
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
    (tmp_path / "archive/weights").write_bytes(b"...")
    (tmp_path / f".output.{suffix}").symlink_to("archive")
    with pytest.raises(NotADirectoryError, match=suffix), build(tmp_path / "output"):
        pass
    assert os.listdir(tmp_path / "archive") == ["weights"]


def test_a_folder_has_its_name_when_its_files_are_on_the_disk(tmp_path, monkeypatch):
    synced = set()

    def sync(descriptor):
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", sync)
    output = tmp_path / "folder"
    with folders.new_folder(output) as folder:
        (folder / "inner").mkdir()
        (folder / "inner/weights").write_bytes(b"...")
    for path in (tmp_path, output, output / "inner", output / "inner/weights"):
        assert path.stat().st_ino in synced, path
