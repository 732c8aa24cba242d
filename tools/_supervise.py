"""torchrun under a scheduler: signals passed on, time to save, and an exit status that says whether to come back."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from interdomain.folders import private_folder
from interdomain.outcome import LEFT, OUTCOME, STOPPED

CONTINUE = os.EX_TEMPFAIL  # 75: "try again". The same command continues the run
REFUSED = 2  # by the command line, or by a rank's decision, which another start would only repeat
INTERRUPTED = 130  # 128 + SIGINT, as shells say it
ELASTIC = {
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",  # seconds to save in; torchrun's own 30 would cut a large checkpoint short
    # Shared with torchrun, the ranks' store outlives them: those that are restarted would find the addresses of the dead.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # torchrun's own, but for SIGHUP: it would take back what nohup gave, and end the ranks unsaved.
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGQUIT",
}
QUIET = (signal.SIGUSR1, signal.SIGHUP)  # for the launcher alone
POLL_SECONDS = 0.5
STOP_SECONDS = 30  # torchrun's own patience with ranks after one that failed


def caches() -> dict[str, str]:
    """Variables that say where Triton and Inductor keep what they compiled; none if the user set both.

    On this machine's own disk: they are thousands of small files, which every rank of a shared disk would wait for.
    Raises: PermissionError if others could write there.
    """
    names = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    if names.keys() <= os.environ.keys():
        return {}
    folder = private_folder(Path(tempfile.gettempdir()) / f"interdomain-{os.getuid()}")
    return {name: str(folder / place) for name, place in names.items()}


def supervise(command: list[str], environment: dict[str, str]) -> int:
    """Run torchrun to its end.

    Returns: 0 for a finished run, CONTINUE for one that left on a signal or ended after one, INTERRUPTED after Ctrl-C, REFUSED
    for one that a rank ended by decision, else torchrun's status.
    """
    asked = []
    with tempfile.TemporaryDirectory(prefix="interdomain-") as folder:
        outcome = Path(folder) / "outcome"
        environment = {**ELASTIC, **environment, OUTCOME: str(outcome)}
        # Ignored when torchrun starts, and so by torchrun: where a scheduler, or a terminal that closes, signals every
        # process, it must not die of it.
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in QUIET}
        process = subprocess.Popen(command, env=environment)

        def pass_on(number, frame):
            if not asked:  # once: torchrun forwards it to the ranks, and gives up waiting for them at its third
                process.send_signal(signal.SIGTERM)
            asked.append(number)

        handlers[signal.SIGTERM] = signal.getsignal(signal.SIGTERM)
        for number, before in handlers.items():
            if number != signal.SIGHUP or before != signal.SIG_IGN:  # nohup: the run goes on without its terminal
                signal.signal(number, pass_on)
        try:
            code, said = _wait(process, outcome)
        except KeyboardInterrupt:  # the terminal has sent it to torchrun and the ranks as well
            process.wait()
            return INTERRUPTED
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    if said == STOPPED:  # a full disk, for one: asked to leave or not
        return REFUSED
    if said == LEFT:
        print(f"\nthe run left on a signal (exit status {CONTINUE}): the same command continues it.", file=sys.stderr)
        return CONTINUE
    if asked and code:
        print(
            f"\nthe run ended after a signal, with no checkpoint of where it was (torchrun's exit status {code}, ours "
            f"{CONTINUE}): the same command continues it from the last one, if there is one.",
            file=sys.stderr,
        )
        return CONTINUE
    return code


def keep_going(start: Callable[[], int], saved_up_to: Callable[[], int]) -> int:
    """Start a run, and again after every failure that left another last checkpoint than it found: a newer one, or an older one,
    where the run went back to a step (checkpoint.load_step).

    For torchrun counts its restarts over all its life, and ends with the node or the process that it runs on.
    Returns: the last status; in place of a failure's CONTINUE, if the last checkpoint is another than at the first start: what
    stops a run that went well may be a machine that broke, and a scheduler may have others.
    """
    at_first = before = saved_up_to()
    while (status := start()) not in (0, CONTINUE, INTERRUPTED, REFUSED):
        step = saved_up_to()
        if step == before:
            if before == at_first:
                return status
            print(
                f"\nthe run failed again (exit status {status}), with the checkpoint of step {step} still the last: leaving "
                f"with exit status {CONTINUE}, for on another machine the same command may continue it.",
                file=sys.stderr,
            )
            return CONTINUE
        print(
            f"\nthe run failed (exit status {status}), but got as far as the checkpoint of step {step}: starting it again.",
            file=sys.stderr,
            flush=True,
        )
        before = step
    return status


def _wait(process: subprocess.Popen, outcome: Path) -> tuple[int, str]:
    """(torchrun's exit status, the word that the ranks left). Ends torchrun when a restart would only repeat the end."""
    ended = None  # when it was told
    while True:
        try:
            code = process.wait(timeout=POLL_SECONDS)
            return code, _read(outcome)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.utime(outcome.parent)  # what clears temporary files by age would take it after ten days
            if ended is None and _read(outcome) == STOPPED:
                process.terminate()
                ended = time.monotonic()
            elif ended is not None and time.monotonic() - ended > STOP_SECONDS:
                _kill_ranks(process.pid)


def _kill_ranks(torchrun: int) -> None:
    """Of a run that has stopped: with NCCL the others wait for the rank that left, deaf to signals, as long as for a save."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
            with contextlib.suppress(ProcessLookupError):  # no group of its own: not a rank
                os.killpg(int(child), signal.SIGKILL)


def _read(outcome: Path) -> str:
    return outcome.read_text() if outcome.is_file() else ""
