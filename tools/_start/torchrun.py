"""torchrun on one node: its command, its environment, signals passed on, and an exit status that says whether to come back.

Two things start a run again: torchrun its ranks when one of them fails (--max-restarts), and a scheduler's requeue the job when
a node is lost or the time is over (tools/sites/requeue.sbatch, at exit status 75). This module starts nothing a second time.

srun runs it on every node of an allocation: python -m interdomain.tools._start.torchrun RANKS TORCHRUN'S COMMAND
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from interdomain.folders import private_folder
from interdomain.launcher import ENDED, LEFT, REASON_FILE, STOPPED
from interdomain.tools._cli import python_here, user_errors

CONTINUE = os.EX_TEMPFAIL  # 75: "try again". The same command continues the run
REFUSED = 2  # by the command line, or by a rank's decision, which another start would only repeat
INTERRUPTED = 130  # 128 + SIGINT, as shells say it
ELASTIC = {
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",  # seconds to save in; torchrun's own 30 would cut a large checkpoint short
    # Shared with torchrun, the ranks' store outlives them: those that are restarted would find the addresses of the dead.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # torchrun's own, but for SIGHUP: it would take back what nohup gave, and end the ranks unsaved.
    # Nor SIGINT: a terminal sends it to all processes, and this one decides what it means.
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGQUIT",
    "LOGLEVEL": "ERROR",  # without torchrun's warnings of each signal that it passes on
}
# --standalone alone advertises the machine's name, and the ranks wait for ever where that does not resolve: in a container, on
# a laptop without a network.
ONE_MACHINE = ("--standalone", "--nnodes", "1", "--local-addr", "127.0.0.1")


def torchrun_command(
    config: str,
    flags: list[str],
    ranks: int,
    restarts: int = 0,
    rendezvous: Sequence[str] = ONE_MACHINE,
) -> list[str]:
    """The command of one node. rendezvous: torchrun's flags by which nodes find each other."""
    return [
        *(
            python_here(),
            "-m",
            "interdomain.tools._start.elastic",
            *rendezvous,
            "--nproc-per-node",
            str(ranks),
        ),
        *(("--max-restarts", str(restarts)) if restarts else ()),
        *("--local-ranks-filter", "0"),  # one rank's lines on the console
        *("-m", "interdomain.titan.entry", config, *flags),
    ]


def command_here(name: str) -> list[str]:
    """The words that start one of our commands: this environment's `interdomain NAME`, or the module if that is missing."""
    script = Path(python_here()).with_name("interdomain")
    return (
        [str(script), name]
        if script.is_file()
        else [python_here(), "-m", "interdomain.tools.main", name]
    )


def is_torchrun_option(name: str) -> bool:
    """True for a variable from which torchrun takes an option (PET_NNODES: --nnodes), or the Python that it starts."""
    return name.startswith("PET_") or name == "PYTHON_EXEC"


def environment(ranks: int) -> dict[str, str]:
    """The run's environment. What the user set wins, except for options of torchrun: the command says them all, and operators
    such as Kubeflow's set some in every pod.

    Raises: PermissionError if others could write to the kernels' cache.
    """
    # Compiled kernels on this machine's own disk: thousands of small files, which every rank of a shared disk would wait for.
    cache = private_folder(Path(tempfile.gettempdir()) / f"interdomain-{os.getuid()}")
    ours = {"TRITON_CACHE_DIR": f"{cache}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    if torch.cuda.is_available():
        ours["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    else:
        ours["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
    users = {name: value for name, value in os.environ.items() if not is_torchrun_option(name)}
    return {"PYTHONUNBUFFERED": "1", **ELASTIC, **ours, **users}


@contextmanager
def handlers(by_signal: Mapping[Any, Callable | signal.Handlers]) -> Iterator[None]:
    """Other signal handlers for a while."""
    before = {number: signal.signal(number, handler) for number, handler in by_signal.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(command: list[str], environment: dict[str, str]) -> int:
    """Run torchrun to its end. SIGTERM, SIGUSR1, SIGHUP and Ctrl-C ask the run to save and leave. A second Ctrl-C ends it.

    Returns: 0 for a finished run, CONTINUE for one that left on a signal or ended after one, INTERRUPTED after a second Ctrl-C,
    REFUSED for one that a rank ended by decision, else torchrun's status, of a killed one as shells say it.
    """
    asked = []

    def pass_on(number, frame):
        if number == signal.SIGINT:
            if number in asked:
                end_at_once(process.pid)
            else:
                print(
                    "\nCtrl-C: saving, then leaving. Once more ends the run at once.",
                    file=sys.stderr,
                    flush=True,
                )
        if (
            not asked
        ):  # once: torchrun forwards it to the ranks, and gives up waiting for them at its third
            process.send_signal(signal.SIGTERM)
        asked.append(number)

    requests = dict.fromkeys(
        (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT), pass_on
    )
    if (
        signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    ):  # nohup: the run goes on without its terminal
        del requests[signal.SIGHUP]
    # Ignored when torchrun starts, and so by torchrun: where a scheduler, or a terminal that closes, signals every process, it
    # must not die of it.
    ignored = dict.fromkeys((signal.SIGUSR1, signal.SIGHUP, signal.SIGINT), signal.SIG_IGN)
    with tempfile.TemporaryFile("w+") as reason, handlers(ignored):
        environment = {**environment, REASON_FILE: f"/proc/{os.getpid()}/fd/{reason.fileno()}"}
        process = subprocess.Popen(command, env=environment)
        with handlers(requests):
            code = process.wait()
        reason.seek(0)
        word = reason.read()
    if asked.count(signal.SIGINT) > 1:
        return INTERRUPTED
    if word == STOPPED:  # a full disk, for one: asked to leave or not
        return REFUSED
    if word == ENDED and asked:  # in its last seconds: torchrun's status is the signal's
        return 0
    if word == LEFT or (asked and code):
        saved = (
            "left on a signal"
            if word == LEFT
            else "ended after a signal, without a checkpoint of where it was"
        )
        print(
            f"\nthe run {saved} (exit status {CONTINUE}): the same command continues it.",
            file=sys.stderr,
        )
        return CONTINUE
    if code < 0:
        ended = f"torchrun was ended by {signal.Signals(-code).name}, and its ranks with it"
        print(f"\n{ended}: the same command continues the run.", file=sys.stderr)
        return 128 - code
    return code


def end_at_once(pid: int) -> None:
    """Kill a process and all that it has started. The ranks of a torchrun are in sessions of their own."""
    children = " ".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children"))
    for process in (pid, *map(int, children.split())):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@user_errors
def main(argv=None) -> int:
    ranks, *command = sys.argv[1:] if argv is None else argv
    # By number, not by torchrun's guess from the host's names, of which a node with several networks has several.
    first = os.environ["SLURM_NODEID"] == "0"
    return run(
        command, {"PET_RDZV_CONF": f"is_host={str(first).lower()}", **environment(int(ranks))}
    )


if __name__ == "__main__":
    sys.exit(main())
