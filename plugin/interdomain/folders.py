"""Files and folders that appear complete or not at all, however a process ends. Standard library only."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

# Answers of file systems that have no sync for a file or a folder, or not for one that was opened to read: SMB, FUSE, WSL.
CANNOT_SYNC = {
    errno.EINVAL,
    errno.EBADF,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
}


def expand_path(path: str) -> str:
    """A path with `~`, `~user`, `$NAME` and `${NAME}` replaced, as a shell does.

    Raises: ValueError for a variable that is not set or empty, and for a user without a home.
    """
    for braced in re.findall(r"\$(\w+|\{[^}]*\})", path):
        name = braced.strip("{}")
        if not os.environ.get(name):
            raise ValueError(
                f"{path}: the environment variable {name} is not set. Export it, or write the path out."
            )
    # Like a shell, the home first: a `~` that a variable holds is part of a name.
    at_home = os.path.expanduser(path)
    if at_home.startswith("~"):
        raise ValueError(
            f"{path}: there is no such user's home. Write the path out; ./~NAME is a file of that name here."
        )
    return os.path.expandvars(at_home)


@contextlib.contextmanager
def new_folder(output: Path | str) -> Iterator[Path]:
    """A hidden sibling of `output` to build in, renamed to `output` when the block ends; removed if it raises.

    What a killed process left there is removed first.

    Raises: FileExistsError if `output` holds anything, before and after building: nothing is ever overwritten;
        BlockingIOError if another process builds it.
    """
    with _sibling(output, "partial") as (folder, place):
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        try:
            yield folder
            for path in (*folder.rglob("*"), folder):  # what libraries wrote is not on the disk yet
                sync_path(path)
            require_empty(place)
            os.rename(folder, place)  # onto nothing or an empty folder; never onto a full one
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    sync_path(place.parent)


@contextlib.contextmanager
def kept_folder(output: Path | str) -> Iterator[Path]:
    """A hidden sibling of `output` for work that a later process continues: `.<name>.unfinished`.

    It is removed when the block ends, and kept if the block raises or the process dies.

    Raises: FileExistsError if `output` holds anything; BlockingIOError if another process works on it.
    """
    with _sibling(output, "unfinished") as (folder, _):
        yield folder
        shutil.rmtree(folder)


@contextlib.contextmanager
def _sibling(output: Path | str, suffix: str) -> Iterator[tuple[Path, Path]]:
    """(`.<name>.<suffix>` beside `output`, for one process at a time; `output`, links followed)."""
    place = Path(os.path.realpath(output))
    folder = place.with_name(f".{place.name}.{suffix}")
    if os.path.ismount(place):
        raise FileExistsError(f"{output} is where a disk is mounted. Choose a folder in it.")
    with contextlib.ExitStack() as stack:
        while True:
            require_empty(output)
            folder.mkdir(parents=True, exist_ok=True)
            # Not through a link: what lies in the folder is removed.
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                raise BlockingIOError(
                    e.errno, f"Another process is building {output}. Wait for it"
                ) from e
            except OSError:
                break  # no locks on this file system: then nothing tells two processes apart
            # The lock is of the folder, not of its name: another process may have finished and removed it meanwhile.
            if folder.exists() and os.path.samestat(folder.stat(), os.fstat(descriptor)):
                break
        yield folder, place


def require_empty(output: Path | str) -> None:
    """Raises FileExistsError unless `output` does not exist or is an empty folder; ValueError for an address."""
    output = Path(output)
    if output.parts[:1] and output.parts[0].endswith(
        ":"
    ):  # s3://bucket, of which a Path leaves one slash
        raise ValueError(
            f"{output} is an address. Write to a folder, and copy it there (docs/clusters.md)."
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(
            f"{output} exists and is not empty; nothing is overwritten. Choose another folder."
        )


def private_folder(path: Path | str) -> Path:
    """Make a folder that its owner alone can enter, unless it is there: for files that are run as code.

    Returns: its path. Raises: PermissionError for what is not a folder of this user's, or is one that others can write to.
    """
    path = Path(path)
    path.mkdir(mode=0o700, exist_ok=True)
    status = os.lstat(path)  # not of what a link points to
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(
            f"{path} is not a folder that only you can write to. Remove it, or set another TMPDIR."
        )
    return path


def write_whole(path: Path | str, data: bytes) -> None:
    """Write bytes to a file that appears complete or not at all. Of several writers at once the last one's stays."""
    path = Path(path)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "wb") as f:
            f.write(data)
            sync(f)
        os.replace(partial, path)
    except BaseException as e:
        partial.unlink(missing_ok=True)
        if not isinstance(e, OSError):
            raise
        why = f"Writing {path} failed: {e.strerror}. Nothing of it was kept. Check the free space and the permissions"
        raise OSError(e.errno, why) from e


def sync(f: IO[bytes]) -> None:
    """Flush an open file to the disk."""
    f.flush()
    with _synced_where_possible(f.name):
        os.fsync(f.fileno())


def sync_path(path: Path | str) -> None:
    """Flush a file's bytes, or a folder's entries, to the disk, so that a rename survives a power cut."""
    with _synced_where_possible(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _synced_where_possible(path: Path | str) -> Iterator[None]:
    """Pass over the answer of a file system that cannot sync this, such as a folder on SMB. Other errors name the path."""
    try:
        yield
    except OSError as e:
        if e.errno not in CANNOT_SYNC:
            raise OSError(e.errno, e.strerror, str(path)) from e
