"""Files and folders that appear whole or not at all, however a process ends. Standard library only."""

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
from pathlib import Path


@contextlib.contextmanager
def new_folder(output):
    """A hidden sibling of `output` to build in, renamed to `output` when the block ends; removed if it raises.

    Siblings that killed runs left behind are removed first.

    Raises: FileExistsError if `output` holds anything, before and after building: nothing is ever overwritten.
    """
    output = Path(output)
    require_empty(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    stem = f".{output.name}.partial-"
    for leftover in output.parent.glob(glob.escape(stem) + "*"):
        # Its maker holds a lock while it lives. Where the file system has no locks, nothing is removed.
        with contextlib.suppress(OSError), _locked(leftover):
            shutil.rmtree(leftover)
    folder = output.with_name(f"{stem}{os.getpid()}-{secrets.token_hex(4)}")
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(_locked(folder))
        try:
            yield folder
            sync_folder(folder)
            try:
                os.rename(folder, output)  # onto nothing or an empty folder; never onto a full one
            except OSError:
                require_empty(output)  # another run may have finished meanwhile
                raise
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    sync_folder(output.parent)


def require_empty(output):
    """Raises FileExistsError unless `output` does not exist or is an empty folder."""
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(
            f"{output} exists and is not empty; nothing was written and nothing is overwritten. Choose another output "
            "folder or remove this one."
        )


def write_whole(path, data):
    """Write bytes to a file that is there whole or not at all."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as f:
            f.write(data)
            sync(f)
        os.replace(partial, path)
    except OSError as e:
        partial.unlink(missing_ok=True)
        raise OSError(
            e.errno,
            f"Writing {path} failed: {e.strerror}. Nothing of it was kept. Check the free space and the permissions",
        ) from e


def sync(f):
    """Flush an open file to the disk."""
    f.flush()
    os.fsync(f.fileno())


def sync_folder(folder):
    """Flush a folder's entries to the disk, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(folder):
    """Holds an exclusive lock on a folder. Raises OSError if another process has it, or if there are no locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
