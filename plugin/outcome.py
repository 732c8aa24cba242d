"""What a run tells its launcher of its end, where torchrun's exit status cannot: a word in a file. Standard library only."""

import contextlib
import os

# The variable that names the launcher's file: /proc/PID/fd/N, which ends with the launcher.
OUTCOME = "INTERDOMAIN_OUTCOME"
LEFT, STOPPED = "left", "stopped"


def tell_launcher(outcome: str) -> None:
    """LEFT: asked to, and the same command continues. STOPPED: by a decision that a restart would only repeat."""
    if path := os.environ.get(OUTCOME):
        with contextlib.suppress(OSError), open(path, "w") as f:  # a full disk is one of the reasons to stop
            f.write(outcome)


def launcher_has_ended() -> bool:
    """Whether the launcher that started this rank is no more."""
    path = os.environ.get(OUTCOME)
    return bool(path) and not os.path.isdir(os.path.dirname(os.path.dirname(path)))  # /proc/PID
