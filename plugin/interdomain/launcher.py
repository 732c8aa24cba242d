"""Knowledge that a run and the process which started it have of each other. Standard library only.

Why a run ended stands in a file, where torchrun's exit status cannot say it.
"""

import contextlib
import ctypes
import os
import sys

# The variable that names the launcher's file: /proc/PID/fd/N, which ends with the launcher.
REASON_FILE = "INTERDOMAIN_REASON_FILE"
LEFT, STOPPED, ENDED = "left", "stopped", "ended"
PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent dies


def notify_launcher(reason: str) -> None:
    """LEFT: asked to, and the same command continues. STOPPED: by a decision that a restart would only repeat. ENDED: all steps
    are done and saved."""
    if path := os.environ.get(REASON_FILE):
        with (
            contextlib.suppress(OSError),
            open(path, "w") as f,
        ):  # a full disk is one of the reasons to stop
            f.write(reason)


def launcher_has_ended() -> bool:
    """True if the launcher that started this rank has ended."""
    path = os.environ.get(REASON_FILE)
    return bool(path) and not os.path.isdir(os.path.dirname(os.path.dirname(path)))  # /proc/PID


def end_with_parent(number: int) -> None:
    """Ask Linux for this signal to this process when its parent dies, however it dies; 0: for none."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
