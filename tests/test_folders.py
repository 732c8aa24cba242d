"""Files that appear complete or not at all."""

import errno
import os

import pytest

from interdomain import folders


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, error):
    path = tmp_path / "record.json"
    folders.write_whole(path, b"one")
    monkeypatch.setattr(folders, "sync", lambda f: (_ for _ in ()).throw(error))
    with pytest.raises(type(error)):
        folders.write_whole(path, b"two")
    assert path.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["record.json"]


def test_a_folder_has_its_name_when_its_files_are_on_the_disk(tmp_path, monkeypatch):
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
    with folders.new_folder(tmp_path / "folder") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_bytes(b"...")
    assert {path.stat().st_ino for path in (tmp_path, *(tmp_path / "folder").rglob("*"))} <= synced
