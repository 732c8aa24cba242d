"""Messages from a run to the launcher that started it: why it ended, in a file, where torchrun's exit status cannot say it.

Standard library only.
"""

import contextlib
import os

# The variable that names the launcher's file: /proc/PID/fd/N, which ends with the launcher.
REASON_FILE = "INTERDOMAIN_REASON_FILE"
LEFT, STOPPED = "left", "stopped"


def tell_launcher(reason: str) -> None:
    """LEFT: asked to, and the same command continues. STOPPED: by a decision that a restart would only repeat."""
    if path := os.environ.get(REASON_FILE):
        with contextlib.suppress(OSError), open(path, "w") as f:  # a full disk is one of the reasons to stop
            f.write(reason)


def launcher_has_ended() -> bool:
    """True if the launcher that started this rank has ended."""
    path = os.environ.get(REASON_FILE)
    return bool(path) and not os.path.isdir(os.path.dirname(os.path.dirname(path)))  # /proc/PID
