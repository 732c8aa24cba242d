"""A user's mistake ends a run with one paragraph from one rank, not with a traceback from each."""

import contextlib
import functools
import os
import signal
import sys
import time

# Ranks fail together, and torchrun ends all of them as soon as the first is gone: the others leave rank 0 the time to say
# why. One that fails alone, on a disk that only its machine has, speaks for itself after that time.
GRACE_SECONDS = 20

# How a run ended, where torchrun's own exit status cannot say it: a word in the file that the launcher names.
OUTCOME = "INTERDOMAIN_OUTCOME"
LEFT, STOPPED = "left", "stopped"


def tell_launcher(outcome: str) -> None:
    """LEFT: asked to, and the same command continues. STOPPED: by a decision that a restart would only repeat."""
    if path := os.environ.get(OUTCOME):
        with contextlib.suppress(OSError), open(path, "w") as f:  # a full disk is one of the reasons to stop
            f.write(outcome)


def launcher_has_ended() -> bool:
    """Whether the launcher that started this rank is no more: it takes the folder of that file along."""
    path = os.environ.get(OUTCOME)
    return bool(path) and not os.path.isdir(os.path.dirname(path))


def stop(message: str):
    """End this process with exit code 1; rank 0 says why."""
    with contextlib.suppress(ValueError):  # not the main thread's: torchrun's SIGKILL follows
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun's way to end the ranks that wait here
    rank = int(os.environ.get("RANK", 0))
    if rank:
        time.sleep(GRACE_SECONDS)
        message = f"rank {rank}: {message}"
    print(f"\nerror: {message}\n", file=sys.stderr, flush=True)
    tell_launcher(STOPPED)
    raise SystemExit(1)


def one_paragraph(check):
    """For hooks whose ValueError, FileNotFoundError and PermissionError are refusals of what the user gave."""

    @functools.wraps(check)
    def checked(*args, **kwargs):
        try:
            return check(*args, **kwargs)
        except (ValueError, FileNotFoundError, PermissionError) as e:
            stop(str(e))

    return checked
