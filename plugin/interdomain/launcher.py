"""Messages between a run and the launcher that started it, and what a process asks of Linux.

A run writes the reason of its end to a file, because torchrun's exit status cannot say it. This
module needs the standard library only.
"""

import contextlib
import ctypes
import os
import sys

# The variable that names the launcher's file: /proc/PID/fd/N, which exists as long as the launcher.
REASON_FILE = "INTERDOMAIN_REASON_FILE"
# The variable that names the file in which the launcher writes the signal that it passes on.
SIGNAL_FILE = "INTERDOMAIN_SIGNAL_FILE"
LEFT = "left"  # the run was asked to stop, and the same command continues it
STOPPED = "stopped"  # the run made a decision that a restart would only repeat
ENDED = "ended"  # all steps are done and saved
PR_SET_PDEATHSIG = 1  # Linux: sets the signal that a process gets when its parent ends
# Numbers of glibc's mallopt.
M_TRIM_THRESHOLD = -1  # free bytes at the end of the heap that go back to Linux; -1: none do
M_MMAP_THRESHOLD = -3  # blocks of more bytes are Linux's own, and go back when they are freed


def notify_launcher(reason: str) -> None:
    """Tells the launcher why this run ends: LEFT, STOPPED or ENDED."""
    path = os.environ.get(REASON_FILE)
    if path:
        # A full disk is one of the reasons to stop, so a failed write must not hide it.
        with contextlib.suppress(OSError), open(path, "w") as f:
            f.write(reason)


def launchers_signal() -> str:
    """Returns what the launcher received, such as Ctrl-C. Empty if it received nothing.

    The ranks get SIGTERM for it.
    """
    path = os.environ.get(SIGNAL_FILE)
    if path:
        # The file is gone if the launcher was killed.
        with contextlib.suppress(OSError), open(path) as f:
            return f.read()
    return ""


def launcher_has_ended() -> bool:
    """Returns True if the launcher that started this rank has ended."""
    path = os.environ.get(REASON_FILE)
    if not path:
        return False
    process = os.path.dirname(os.path.dirname(path))  # /proc/PID
    return not os.path.isdir(process)


def parent_is_torchrun() -> bool:
    """Returns True if the parent of this process is the torchrun that started it.

    torchrun runs in the same Python, and sets TORCHELASTIC_RUN_ID for its ranks, not for itself. A
    script between torchrun and this process has the variable, too. If torchrun has ended, the parent
    is another program.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return False
    parent = f"/proc/{os.getppid()}"
    try:
        with open(f"{parent}/environ", "rb") as f:
            variables = f.read().split(b"\0")
        same_python = os.path.samefile(f"{parent}/exe", "/proc/self/exe")
    except OSError:
        return False
    return same_python and f"TORCHELASTIC_RUN_ID={run_id}".encode() not in variables


def end_with_parent(number: int) -> None:
    """Asks Linux to send this process a signal when its parent ends, however it ends.

    Args:
        number: The signal; 0 for none.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))


def keep_freed_memory() -> None:
    """Asks glibc to use freed memory again, in place of giving it back to Linux.

    For computing on a CPU: Linux clears memory that it gives out again, which takes up to half of
    the time of a long forward pass. The peak of the memory grows by up to 28 %
    (docs/measurements.md). A user's own variables win, such as MALLOC_TRIM_THRESHOLD_.
    """
    is_chosen = any(name.startswith("MALLOC_") for name in os.environ)
    c_library = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(c_library, "mallopt") and not is_chosen:
        c_library.mallopt(M_TRIM_THRESHOLD, -1)
        c_library.mallopt(M_MMAP_THRESHOLD, 2**30)
