"""Files and folders that appear complete or not at all, however a process ends.

Standard library only.
"""

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

# Errors of file systems (SMB, FUSE, WSL) that cannot sync a file or a folder, or cannot sync one
# that was opened to read.
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
    """Replaces `~`, `~user`, `$NAME` and `${NAME}` in a path, as a shell does.

    Raises:
        ValueError: A variable is empty or not set, or the user has no home folder.
    """
    for variable in re.findall(r"\$(\w+|\{[^}]*\})", path):
        name = variable.strip("{}")
        if not os.environ.get(name):
            raise ValueError(
                f"{path}: the environment variable {name} is not set. Export it, or write the "
                "path out."
            )
    # The home first, as a shell does it: a `~` in the value of a variable is part of a name.
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError(
            f"{path}: there is no such user's home. Write the path out; ./~NAME is a file of that "
            "name here."
        )
    return os.path.expandvars(expanded)


@contextlib.contextmanager
def new_folder(output: Path | str) -> Iterator[Path]:
    """Builds a folder beside `output`, which gets the name `output` when the block ends.

    It is built under a hidden name. If the block raises, it is removed. If the process was killed,
    the next one removes what it left there. Nothing is ever overwritten.

    Args:
        output: The folder to build.
    Yields:
        The hidden folder.
    Raises:
        FileExistsError: `output` has contents, before or after building.
        BlockingIOError: Another process is building it.
    """
    with _locked_sibling(output, "partial") as (folder, place):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        try:
            yield folder
            # Libraries do not sync the files that they write.
            for path in folder.rglob("*"):
                sync_path(path)
            sync_path(folder)
            require_empty(place)
            # A rename replaces nothing, or an empty folder; it fails if there is a full one.
            os.rename(folder, place)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    sync_path(place.parent)


@contextlib.contextmanager
def resumable_folder(output: Path | str) -> Iterator[Path]:
    """Opens a hidden folder for work that a later process can continue.

    The folder is `.<name>.unfinished` beside `output`. It is removed when the block ends, and kept
    if the block raises or the process is killed.

    Args:
        output: The folder that the work is for.
    Yields:
        The hidden folder.
    Raises:
        FileExistsError: `output` has contents.
        BlockingIOError: Another process works on it.
    """
    with _locked_sibling(output, "unfinished") as (folder, _):
        yield folder
        shutil.rmtree(folder)


@contextlib.contextmanager
def _locked_sibling(output: Path | str, suffix: str) -> Iterator[tuple[Path, Path]]:
    """Makes the folder `.<name>.<suffix>` beside `output`, and locks it for this process.

    Yields:
        The folder, and the path of `output` with links followed.
    """
    place = Path(os.path.realpath(output))
    folder = place.with_name(f".{place.name}.{suffix}")
    # A mount point cannot be renamed, which would show at the end only.
    if os.path.ismount(place):
        raise FileExistsError(f"{output} is where a disk is mounted. Choose a folder in it.")
    with contextlib.ExitStack() as stack:
        while True:
            require_empty(output)
            folder.mkdir(parents=True, exist_ok=True)
            # Do not follow a link: what lies in the folder will be removed.
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                raise BlockingIOError(
                    e.errno, f"Another process is building {output}. Wait for it"
                ) from e
            except OSError:
                # This file system has no locks, so nothing can tell two processes apart.
                break
            # The lock is on the folder, not on its name. Another process may have finished and
            # removed the folder since it was opened here: try again with a new one.
            if folder.exists() and os.path.samestat(folder.stat(), os.fstat(descriptor)):
                break
        yield folder, place


def require_empty(output: Path | str) -> None:
    """Checks that a folder can be written.

    Raises:
        FileExistsError: It has contents, or is a file.
        ValueError: It is an address, such as that of an object store.
    """
    output = Path(output)
    # A Path keeps one slash of s3://bucket.
    if output.parts[:1] and output.parts[0].endswith(":"):
        raise ValueError(
            f"{output} is an address. Write to a folder, and copy it there (docs/clusters.md)."
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(
            f"{output} exists and is not empty; nothing is overwritten. Choose another folder."
        )


def private_folder(path: Path | str) -> Path:
    """Makes a folder that only its owner can enter, for files that are run as code.

    Args:
        path: The folder. Its parent exists.
    Returns:
        Its path.
    Raises:
        PermissionError: It is not a folder of this user, or others can write to it.
    """
    path = Path(path)
    path.mkdir(mode=0o700, exist_ok=True)
    # lstat does not follow a link, whose target could be changed later.
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(
            f"{path} is not a folder that only you can write to. Remove it, or set another TMPDIR."
        )
    return path


def write_atomically(path: Path | str, data: bytes) -> None:
    """Writes a file that appears complete or not at all.

    If several processes write it at once, the last one's stays.

    Raises:
        OSError: Writing failed. The file is as it was before.
    """
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
        reason = (
            f"Writing {path} failed: {e.strerror}. Nothing of it was kept. Check the free space "
            "and the permissions"
        )
        raise OSError(e.errno, reason) from e


def sync(f: IO[bytes]) -> None:
    """Flushes an open file to the disk."""
    f.flush()
    with _synced_where_possible(f.name):
        os.fsync(f.fileno())


def sync_path(path: Path | str) -> None:
    """Flushes the bytes of a file, or the entries of a folder, to the disk.

    A rename then survives a power cut.
    """
    with _synced_where_possible(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _synced_where_possible(path: Path | str) -> Iterator[None]:
    """Ignores the error of a file system that cannot sync, such as that of a folder on SMB.

    Other errors name the path.
    """
    try:
        yield
    except OSError as e:
        if e.errno not in CANNOT_SYNC:
            raise OSError(e.errno, e.strerror, str(path)) from e
