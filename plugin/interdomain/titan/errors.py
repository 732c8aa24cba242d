"""A user's mistake ends a run with one paragraph from one rank, not with a traceback from each."""

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

from interdomain.launcher import STOPPED, notify_launcher

# Seconds. All ranks usually fail together, so only rank 0 reports, and torchrun ends the others meanwhile. Another rank reports
# after this time if it failed on its own, on a disk that only its machine has.
GRACE_SECONDS = 20
P = ParamSpec("P")
R = TypeVar("R")


def stop(message: str) -> NoReturn:
    """End this process with exit code 1, and torchrun, which would start the ranks again to the same end; rank 0 says why."""
    rank = int(os.environ.get("RANK", 0))
    with contextlib.suppress(ValueError):  # not the main thread's: torchrun's SIGKILL follows
        # torchrun ends the ranks that wait here, and not the one that reports, which releases its lock.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if rank else signal.SIG_IGN)
    if rank:
        time.sleep(GRACE_SECONDS)
        message = f"rank {rank}: {message}"
    print(f"\nerror: {message}\n", file=sys.stderr, flush=True)
    notify_launcher(STOPPED)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        os.kill(os.getppid(), signal.SIGTERM)
        signal.alarm(GRACE_SECONDS)  # SIGALRM ends a process that hangs in NCCL at its exit
    raise SystemExit(1)


def user_errors(check: Callable[P, R]) -> Callable[P, R]:
    """Decorate a hook whose ValueError or OSError (a full disk, say) is the user's to correct: it ends the run by `stop`."""

    @functools.wraps(check)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return check(*args, **kwargs)
        except (ValueError, OSError) as e:
            stop(str(e))

    return checked
