"""Messages between a run and the launcher that started it. Standard library only.

A run writes the reason of its end to a file, because torchrun's exit status cannot say it.
"""

import contextlib
import ctypes
import os
import sys

# The variable that names the launcher's file: /proc/PID/fd/N, which exists as long as the launcher.
REASON_FILE = "INTERDOMAIN_REASON_FILE"
LEFT = "left"  # the run was asked to stop, and the same command continues it
STOPPED = "stopped"  # the run made a decision that a restart would only repeat
ENDED = "ended"  # all steps are done and saved
PR_SET_PDEATHSIG = 1  # Linux: sets the signal that a process gets when its parent ends


def notify_launcher(reason: str) -> None:
    """Tells the launcher why this run ends: LEFT, STOPPED or ENDED."""
    path = os.environ.get(REASON_FILE)
    if path:
        # A full disk is one of the reasons to stop, so a failed write must not hide it.
        with contextlib.suppress(OSError), open(path, "w") as f:
            f.write(reason)


def launcher_has_ended() -> bool:
    """Returns True if the launcher that started this rank has ended."""
    path = os.environ.get(REASON_FILE)
    if not path:
        return False
    process = os.path.dirname(os.path.dirname(path))  # /proc/PID
    return not os.path.isdir(process)


def end_with_parent(number: int) -> None:
    """Asks Linux to send this process a signal when its parent ends, however it ends.

    Args:
        number: The signal; 0 for none.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
