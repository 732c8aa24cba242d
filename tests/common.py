"""Parts that the tests of several packages share."""

import json
import os
from pathlib import Path

from torch.utils._python_dispatch import TorchDispatchMode

from interdomain.data.readers import read_documents
from interdomain.data.tokenizer import train_sentencepiece

REPOSITORY = Path(__file__).parent.parent
# Seconds after which a test gives up a process that it started: for one that hangs, not for a machine that is busy.
TIMEOUT = int(os.environ.get("INTERDOMAIN_TEST_TIMEOUT", "1800"))


class NothingReadBack(TorchDispatchMode):
    """Refuses ops that wait for the device, or copy from a Python object on the host."""

    HOST = frozenset(
        {
            "aten::_local_scalar_dense",
            "aten::nonzero",
            "aten::equal",
            "aten::is_nonzero",
            "aten::lift_fresh",
        }
    )

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        assert func._schema.name not in self.HOST, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def small_tokenizer(path: Path, vocab_size: int = 400) -> Path:
    """Bytes, and a few dozen pieces of the standard library's sources."""
    path.write_bytes(train_sentencepiece(read_documents(["stdlib"], max_bytes=60_000), vocab_size))
    return path


def write_rows(path, rows):
    """Writes a JSON Lines file, and returns its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_program(path, text):
    """Writes a program of the shell."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def bytes_in(folder):
    """Returns {path: contents} of all files in a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def when_listening(to_interrupts: str) -> str:
    """The beginning of a program that signals who started it: it waits until that process has set its handlers, of which
    SIGINT's comes last. to_interrupts: "SigCgt" if it catches them, "SigIgn" if it ignores them."""
    return f"""
import os, re, signal, sys, time
launcher, me, bit = os.getppid(), os.getpid(), 1 << signal.SIGINT - 1
while not int(re.search("{to_interrupts}:(.*)", open(f"/proc/{{launcher}}/status").read())[1], 16) & bit:
    time.sleep(0.01)
"""
