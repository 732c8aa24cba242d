"""A user's mistake ends a run with one paragraph from one rank, not with a traceback from each."""

import contextlib
import functools
import os
import signal
import sys
import time

from interdomain.outcome import STOPPED, tell_launcher

# Ranks fail together, and torchrun ends all of them as soon as the first is gone: the others leave rank 0 the time to say
# why. One that fails alone, on a disk that only its machine has, speaks for itself after that time.
GRACE_SECONDS = 20


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
