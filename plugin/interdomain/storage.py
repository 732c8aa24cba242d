"""Folders in object stores, by address: `s3://bucket/runs/debug`, `gs://...` and every other that fsspec opens.

A store has neither renames nor locks. So a folder there is complete when one file is there that is always written last:
manifest.json of a corpus, config.json of an exported folder, .metadata of a checkpoint. Only the files that lie directly in a
folder are seen, under the last part of their names, so that nothing is written outside of the folder that they are fetched to.
fsspec is a dependency of torch; it needs a package for most stores (s3fs, gcsfs, ...), and takes keys from the environment.
"""

import contextlib
import hashlib
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from interdomain.folders import new_folder

CACHE = "INTERDOMAIN_CACHE"  # environment variable: the folder that corpora and exported folders are fetched to
SECONDS = 60.0  # that a listing or a small file may take
AT_ONCE = 8  # files that are sent or fetched at a time
T = TypeVar("T")


def is_address(path: object) -> bool:
    return "://" in str(path)


class RemoteFolder:
    """A folder of a store. Every failure is an OSError that names the address.

    Raises: ValueError if fsspec cannot open addresses of this kind here.
    """

    def __init__(self, address: str) -> None:
        from fsspec.core import url_to_fs

        self.address = address.rstrip("/")
        try:
            options = {"auto_mkdir": True} if self.address.startswith("file://") else {}
            self.files, self.root = url_to_fs(self.address, **options)
        except (ImportError, ValueError) as e:
            raise ValueError(
                f"{address} cannot be opened here: {e}. s3:// needs the package s3fs (pip install s3fs), gs:// gcsfs."
            ) from e

    def __truediv__(self, name: str) -> "RemoteFolder":
        return RemoteFolder(f"{self.address}/{name}")

    @contextlib.contextmanager
    def _explained(self, act: str) -> Iterator[None]:
        try:
            yield
        except Exception as e:  # the packages of the stores have errors of their own
            kind = FileNotFoundError if isinstance(e, FileNotFoundError) else OSError
            raise kind(f"{act} {self.address} failed: {e or type(e).__name__}") from e

    def _list(self, kind: str) -> dict[str, int]:
        """{name: bytes} of what lies directly in the folder; empty where there is none."""
        self.files.invalidate_cache()
        try:
            with self._explained("listing"):
                entries = _within(SECONDS, lambda: self.files.ls(self.root, detail=True))
        except FileNotFoundError:
            return {}
        here = {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in entries if entry["type"] == kind}
        return {name: entry["size"] or 0 for name, entry in here.items() if name not in ("", ".", "..")}

    def sizes(self) -> dict[str, int]:
        """{name: bytes} of the files."""
        return self._list("file")

    def folders(self) -> list[str]:
        return [*self._list("directory")]

    def read(self, name: str) -> bytes:
        """The bytes of a small file. Raises: FileNotFoundError where there is none."""
        with self._explained(f"reading {name} of"):
            return _within(SECONDS, lambda: self.files.cat_file(f"{self.root}/{name}"))

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        with self._explained(f"writing {name} to"):
            _within(SECONDS, lambda: self.files.pipe_file(f"{self.root}/{name}", data))

    def put(self, folder: Path, names: Sequence[str]) -> None:
        """Send files of a folder."""
        with self._explained("sending to"):
            places = [f"{self.root}/{name}" for name in names]
            self.files.put([str(folder / name) for name in names], places, batch_size=AT_ONCE)

    def get(self, folder: Path) -> None:
        """Fetch all files into a folder. Raises: OSError, also if one arrives shorter than the store has it."""
        sizes = self.sizes()
        with self._explained("fetching"):
            places = [f"{self.root}/{name}" for name in sizes]
            self.files.get(places, [str(folder / name) for name in sizes], batch_size=AT_ONCE)
            if short := [name for name, size in sizes.items() if (folder / name).stat().st_size != size]:
                raise OSError(f"{short[0]} did not arrive whole")

    def rename(self, name: str) -> None:
        """Give the folder another name, in its place, by copies inside the store. Of a killed rename nothing is lost."""
        place = f"{self.root.rpartition('/')[0]}/{name}"
        with self._explained("renaming"):
            names = self.sizes()
            self.files.copy([f"{self.root}/{n}" for n in names], [f"{place}/{n}" for n in names])
        self.remove()

    def remove(self) -> None:
        """Remove all files."""
        with self._explained("removing files of"):
            if names := self.sizes():
                self.files.rm([f"{self.root}/{name}" for name in names])


def _within(seconds: float, act: Callable[[], T]) -> T:
    """The result of `act`, in a thread. Raises: its error; TimeoutError after so many seconds."""
    results: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((act(), None))
        except Exception as e:  # of whatever kind: it is raised in the caller's thread
            results.put((None, e))

    threading.Thread(target=work, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.0f} seconds") from None
    if error:
        raise error
    return result


def fetch_folder(address: str, last: str, check: Callable[[Path], object]) -> Path:
    """A folder of a store, fetched once per machine into the cache, by one process while the others wait.

    Args:
        last: the file whose bytes name the contents, as checksums; another one there is another folder here.
        check: raises ValueError for a folder that is damaged.
    Raises: FileNotFoundError if the file is not there; OSError; what `check` raises.
    """
    remote = RemoteFolder(address)
    try:
        contents = remote.read(last)
    except FileNotFoundError:
        raise FileNotFoundError(f"{address} has no {last}: nothing complete is there. Check the address.") from None
    cache = os.environ.get(CACHE) or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "interdomain"
    folder = Path(cache) / hashlib.sha256(contents).hexdigest()[:16] / remote.address.rpartition("/")[2]
    while not folder.is_dir():
        try:
            with new_folder(folder) as partial:
                remote.get(partial)
                (partial / last).write_bytes(contents)
                check(partial)
        except BlockingIOError:
            time.sleep(1)
        except FileExistsError:  # another process was quicker
            continue
    return folder


@contextlib.contextmanager
def output_folder(output: str, last: str) -> Iterator[Path]:
    """The folder to write: `output`, or for an address a temporary one, whose files are sent there when the block ends.

    last: the file that makes it complete. Raises: FileExistsError if the address holds anything; OSError.
    """
    if not is_address(output):
        yield Path(output)
        return
    remote = RemoteFolder(output)
    if remote.sizes():
        raise FileExistsError(f"{output} exists and is not empty; nothing is overwritten. Choose another address.")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "folder"
        yield folder
        names = sorted(path.name for path in folder.iterdir() if path.name != last)
        remote.put(folder, names)
        remote.put(folder, [last])
