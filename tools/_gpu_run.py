"""How benchmarks/gpu.sh runs its parts: each in a process of its own, which is ended when its share of the time is over. What
they wrote is in one archive that is whole at any moment. Standard library only.
"""

import contextlib
import ctypes
import io
import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from interdomain.folders import write_whole

from . import _apart

ROOT = Path(__file__).resolve().parents[1]
EARLY = 4.0  # a tool is told to end so long before its share does
LEAST = 8.0  # seconds under which a part is not started
PACK_EVERY, POLL = 10.0, 0.1
ARCHIVE, SUMMARY, LOG = "results.tar.gz", "summary.md", "log.txt"
ARCHIVE_BYTES, LOG_BYTES = 15 * 2**20, 8 * 2**20  # at most; logs by their end
PR_SET_CHILD_SUBREAPER = 36


class Part(NamedTuple):
    """A part of the benchmarks.

    seconds: its share of the time; most: what it may take if it needs to. command(run, seconds): or why it is skipped.
    result(run): what it found, of one that writes no PART.json.
    """

    seconds: float
    command: Callable[["Run", float], list[str] | str]
    most: float = 0.0
    in_all: bool = True
    result: Callable[["Run"], str] | None = None


class Run:
    """The parts that ran, what is known of the machine, and the folder of their results.

    Args:
        folder: of the parts' files. out: where archive, summary and log go; None: nowhere, and what parts say to the screen.
    """

    def __init__(self, parts: dict[str, Part], folder: Path, seconds: float, out: Path | None = None) -> None:
        self.parts = parts
        self.folder, self.out = folder, out
        self.began = time.monotonic()
        self.ends = self.began + seconds
        self.gpu = bool(shutil.which("nvidia-smi") or list(Path("/dev").glob("nvidia[0-9]*")))  # until torch was asked
        self.ptxas = None
        self.env = {"PYTHONUNBUFFERED": "1", **os.environ}
        self.rows, self.loud, self.left_out = [], [], []
        self.log = open(out / LOG, "ab", buffering=0) if out else None  # noqa: SIM115
        self.child = None

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()

    def say(self, text: str) -> None:
        print(text, flush=True)
        if self.log:
            self.log.write(f"{text}\n".encode())

    def part(self, name: str, seconds: float, flags: tuple[str, ...] = (), alias: str = "") -> int:
        """Run a part for `seconds` at most; its exit status, 0 for one that was skipped or not run."""
        alias = alias or name
        row = {"part": alias, "share": seconds, "status": "not run: no time left", "seconds": 0.0}
        self.rows.append(row)
        command = self.parts[name].command(self, seconds - EARLY)
        if isinstance(command, str):
            row["status"] = f"skipped: {command}"
        elif seconds >= LEAST:
            began = time.monotonic()
            self.say(f"\n== {alias}, at most {seconds:.0f} s ==")
            code = self.run([*command, *flags], seconds, self.folder / f"{alias}.log", row)
            row |= {"seconds": time.monotonic() - began, "status": self.status(name, alias, code)}
            self.pack()
            self.say(f"{alias}: {row['status']} ({row['seconds']:.0f} s)")
            return 1 if code is None else code
        self.say(f"\n{alias}: {row['status']}")
        self.pack()
        return 0

    def run(self, command: list[str], seconds: float, log: Path, row: dict) -> int | None:
        """Exit status, or None if the process had to be ended. What it says goes to `log`; without an archive to the screen."""
        ends, packed = time.monotonic() + seconds, time.monotonic()
        row["status"] = "running"
        with open(log, "wb") if self.out else contextlib.nullcontext() as said:
            self.child = subprocess.Popen(
                command, cwd=ROOT, env=self.env, stdout=said, stderr=said and subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=bool(self.out),
            )  # fmt: skip
            with open(log, "rb") if self.out else contextlib.nullcontext() as heard:
                while self.child.poll() is None and time.monotonic() < ends:
                    time.sleep(POLL)
                    self.copy(heard)
                    if time.monotonic() - packed > PACK_EVERY:
                        self.pack()
                        packed = time.monotonic()
                code = self.child.poll()
                self.end_child()
                self.copy(heard)
        return code

    def copy(self, heard) -> None:
        if heard and self.log.tell() < LOG_BYTES:
            self.log.write(heard.read(2**20))

    def end_child(self) -> None:
        """End the part, and what its processes left behind: as their next parent (PR_SET_CHILD_SUBREAPER) we have them all."""
        if self.child is None:
            return
        _apart.stop(self.child)
        self.child = None
        _apart.signal_all(_apart.descendants(os.getpid()), signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def status(self, name: str, alias: str, code: int | None) -> str:
        """In the part's own words where it has some."""
        cut = "cut at the end of its share" if code is None else f"exit status {code}"
        with contextlib.suppress(OSError, ValueError, KeyError):
            own = json.loads((self.folder / f"{name}.json").read_text())["status"]
            return own if own != "unfinished" or not code else f"unfinished, {cut}"
        said = ""
        with contextlib.suppress(OSError):
            lines = (self.folder / f"{alias}.log").read_text(errors="replace").splitlines()
            said = next((line for line in reversed(lines) if re.search(r"\w{3}", line)), "").strip(" =")[:200]
        if result := self.parts[name].result:
            said = result(self)
        return f"{'complete' if code == 0 else cut}: {said}"

    def pack(self) -> None:
        """Archive and summary, each whole at any time."""
        if not self.out:
            return
        buffer, weight, self.left_out = io.BytesIO(), 0.0, []
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for path in sorted(self.folder.rglob("*"), key=lambda p: (p.suffix in (".gz", ".log"), p.name)):
                with contextlib.suppress(OSError):  # gone meanwhile
                    if not path.is_file() or path.suffix == ".partial":
                        continue
                    data = path.read_bytes()
                    data = data[-(2**20) :] if path.suffix == ".log" else data
                    weight += len(data) / (1 if path.suffix in (".gz", ".png") else 3)
                    if weight > ARCHIVE_BYTES:
                        self.left_out.append(path.name)
                        continue
                    entry = tarfile.TarInfo(f"results/{path.relative_to(self.folder)}")
                    entry.size, entry.mtime = len(data), int(time.time())
                    archive.addfile(entry, io.BytesIO(data))
        write_whole(self.out / ARCHIVE, buffer.getvalue())
        write_whole(self.out / SUMMARY, self.summary().encode()[: 2**22])

    def summary(self) -> str:
        lines = ["# Summary", "", f"{time.monotonic() - self.began:.0f} s.", ""]
        lines += [f"**{text}**\n" for text in self.loud]
        lines += ["| part | status | seconds | at most |", "|---|---|---|---|"]
        lines += [
            f"| {r['part']} | {r['status'].replace('|', '/')} | {r['seconds']:.0f} | {r['share']:.0f} |"
            for r in self.rows
        ]
        if self.left_out:
            lines += ["", f"Too large for the archive: {', '.join(self.left_out)}."]
        for row in self.rows:
            with contextlib.suppress(OSError):
                lines += ["", (self.folder / f"{row['part']}.md").read_text()]
        return "\n".join(lines) + "\n"


def adopt_orphans() -> None:
    """Become the next parent of what a part's processes leave behind. Linux only; elsewhere they may outlive it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
