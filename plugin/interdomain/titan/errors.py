"""A user's mistake ends a run with one paragraph from one rank, not with a traceback from each."""

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

from interdomain.launcher import STOPPED, notify_launcher, parent_is_torchrun

# Seconds that a rank other than 0 waits before it reports. All ranks usually fail together, so only
# rank 0 reports, and torchrun ends the others meanwhile. Another rank reports if it failed on its
# own, such as on a disk that only its machine has.
GRACE_SECONDS = 20
P = ParamSpec("P")
R = TypeVar("R")


def stop(message: str) -> NoReturn:
    """Reports an error, and ends this process with exit code 1.

    Torchrun is ended, too: it would start the ranks again, and they would fail again.

    Args:
        message: The error, for the user.
    """
    rank = int(os.environ.get("RANK", 0))
    # torchrun's SIGTERM ends the ranks that wait here. The rank that reports ignores it, and
    # releases its lock. Only the main thread can set this; for a stop from another thread,
    # torchrun's SIGKILL follows.
    reaction = signal.SIG_IGN
    if rank:
        reaction = signal.SIG_DFL
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGTERM, reaction)

    if rank:
        time.sleep(GRACE_SECONDS)
        message = f"rank {rank}: {message}"
    print(f"\nerror: {message}\n", file=sys.stderr, flush=True)
    notify_launcher(STOPPED)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if parent_is_torchrun():
            os.kill(os.getppid(), signal.SIGTERM)
        signal.alarm(GRACE_SECONDS)  # SIGALRM ends a process that hangs in NCCL at its exit
    raise SystemExit(1)


def user_errors(check: Callable[P, R]) -> Callable[P, R]:
    """Decorator for functions whose ValueError or OSError is the user's to correct.

    The error ends the run by `stop`. Other errors keep their traceback.

    Args:
        check: The function to decorate.
    """

    @functools.wraps(check)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return check(*args, **kwargs)
        except (ValueError, OSError) as e:
            stop(str(e))

    return checked
