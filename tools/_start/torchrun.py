"""Runs torchrun on one node: its command, its environment, its signals and its exit status.

The exit status says whether the same command continues the run. Two things start a run again:
torchrun starts its ranks again when one of them fails (--max-restarts), and a scheduler puts the
job back in the queue when a node is lost or the time is over (a copy of tools/sites/requeue.sbatch, at
exit status 75). This module starts nothing a second time.

srun runs it on every node of an allocation: python -m interdomain.tools._start.torchrun RANKS
TORCHRUN'S COMMAND
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from interdomain.folders import private_folder
from interdomain.launcher import (
    ENDED,
    LEFT,
    REASON_FILE,
    SIGNAL_FILE,
    STOPPED,
    end_with_parent,
)
from interdomain.tools._cli import python_here, user_errors

# Exit statuses.
CONTINUE = os.EX_TEMPFAIL  # 75, "try again": the same command continues the run
# The command line was refused, or a rank made a decision that another start would only repeat.
REFUSED = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
# Variables that torchrun and its elastic agent read.
ELASTIC = {
    # Seconds in which the ranks can save. torchrun's own 30 would cut a large checkpoint short.
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
    # A store that torchrun shares with its ranks outlives them: restarted ranks would find the
    # addresses of the dead ones.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # torchrun's own, without SIGHUP and SIGINT. Handling SIGHUP would undo nohup, and end the ranks
    # unsaved. A terminal sends SIGINT to all processes, and this one decides what it means.
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGQUIT",
    # No warnings of each signal that torchrun passes on.
    "LOGLEVEL": "ERROR",
}
# --standalone by itself advertises the machine's name. Where that does not resolve, as in a
# container or on a laptop without a network, the ranks would wait for ever.
ONE_MACHINE = ("--standalone", "--nnodes", "1", "--local-addr", "127.0.0.1")


def torchrun_command(
    config: str,
    flags: list[str],
    ranks: int,
    restarts: int = 0,
    rendezvous: Sequence[str] = ONE_MACHINE,
) -> list[str]:
    """Returns the command of one node.

    Args:
        config: The TOML file.
        flags: Settings that override the file's.
        ranks: The number of processes on this node.
        restarts: How many times torchrun starts failed ranks again.
        rendezvous: torchrun's flags by which nodes find each other.
    """
    # `elastic` is torchrun without its traceback after a signal.
    command = [python_here(), "-m", "interdomain.tools._start.elastic", *rendezvous]
    command += ["--nproc-per-node", str(ranks)]
    if restarts:
        command += ["--max-restarts", str(restarts)]
    # One rank's lines are on the console.
    command += ["--local-ranks-filter", "0", "-m", "interdomain.titan.entry", config, *flags]
    return command


def command_here(name: str) -> list[str]:
    """Returns the beginning of one of our commands, to paste in this environment.

    It is the environment's script `interdomain NAME`, or the module if that is missing.

    Args:
        name: The command, such as "convert".
    """
    script = Path(python_here()).with_name("interdomain")
    if script.is_file():
        return [str(script), name]
    return [python_here(), "-m", "interdomain.tools.main", name]


def environment(ranks: int) -> dict[str, str]:
    """Returns the environment of a run on this node.

    Variables of the user win, except for those by which torchrun takes options: the command has all
    of them, and operators such as Kubeflow's set some in every pod.

    Args:
        ranks: The number of processes on this node, which share the CPU's cores if there is no GPU.

    Raises:
        PermissionError: Others could write to the cache of compiled kernels.
    """
    # Compiled kernels are thousands of small files. On a shared disk every rank would wait for
    # them.
    cache = private_folder(Path(tempfile.gettempdir()) / f"interdomain-{os.getuid()}")
    variables = {
        "PYTHONUNBUFFERED": "1",
        **ELASTIC,
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
    }
    if torch.cuda.is_available():
        variables["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    else:
        variables["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
    for name, value in os.environ.items():
        # PET_NNODES is torchrun's --nnodes; PYTHON_EXEC is the Python that it starts.
        if not name.startswith("PET_") and name != "PYTHON_EXEC":
            variables[name] = value
    return variables


@contextmanager
def handlers(by_signal: Mapping[Any, Callable | signal.Handlers]) -> Iterator[None]:
    """Installs signal handlers for the duration of a block.

    Args:
        by_signal: The handler of each signal, as `signal.signal` takes it.
    """
    before = {number: signal.signal(number, handler) for number, handler in by_signal.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(command: list[str], environment: dict[str, str]) -> int:
    """Runs torchrun to its end.

    SIGTERM, SIGUSR1, SIGHUP and Ctrl-C ask the run to save and leave. A second Ctrl-C ends it at
    once.

    Args:
        command: The command of `torchrun_command`.
        environment: All variables of torchrun and its ranks.

    Returns:
        0 for a finished run, CONTINUE for one that left on a signal or ended after one, INTERRUPTED
        after a second Ctrl-C, REFUSED for one that a rank ended by a decision. Otherwise torchrun's
        status, or 128 and the number of the signal that killed it, as shells report it.
    """
    received = []

    def pass_on(number, frame) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT:
            name = "Ctrl-C"
            if number in received:
                end_at_once(process.pid)
            else:
                message = "\nCtrl-C: leaving after the next step. Once more ends the run at once."
                print(message, file=sys.stderr, flush=True)
        if not received:
            # Once only: torchrun passes SIGTERM on to the ranks, and at its third stops waiting for
            # them. They read here which signal it was.
            signal_file.write(name)
            signal_file.flush()
            process.send_signal(signal.SIGTERM)
        received.append(number)

    requests = dict.fromkeys(
        (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT), pass_on
    )
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        del requests[signal.SIGHUP]  # nohup: the run goes on without its terminal
    # Signals that are ignored while torchrun is started are ignored by torchrun, too. A scheduler
    # or a closing terminal may send them to every process, and torchrun must not die of them.
    ignored = dict.fromkeys((signal.SIGUSR1, signal.SIGHUP, signal.SIGINT), signal.SIG_IGN)
    # A rank writes into the first file why the run ended, which torchrun's exit status cannot say.
    # The files have no name on the disk, and are gone when this process ends.
    with (
        tempfile.TemporaryFile("w+") as reason_file,
        tempfile.TemporaryFile("w") as signal_file,
        handlers(ignored),
    ):
        descriptors = f"/proc/{os.getpid()}/fd"
        files = {
            REASON_FILE: f"{descriptors}/{reason_file.fileno()}",
            SIGNAL_FILE: f"{descriptors}/{signal_file.fileno()}",
        }
        # If this process is killed, torchrun gets SIGTERM: the run saves and leaves, and the same
        # command continues it.
        process = subprocess.Popen(
            command,
            env=environment | files,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )
        with handlers(requests):
            status = process.wait()
        reason_file.seek(0)
        reason = reason_file.read()
    return _meaning_of(status, reason, received)


def _meaning_of(status: int, reason: str, received: list[int]) -> int:
    """Returns the exit status of a run.

    Args:
        status: torchrun's exit status; negative if a signal killed it.
        reason: What a rank wrote about its end (see interdomain.launcher); empty if it wrote
            nothing.
        received: The signals that this process received.
    """
    if received.count(signal.SIGINT) > 1:
        return INTERRUPTED
    # A rank's decision, such as on a full disk, whether a signal came or not.
    if reason == STOPPED:
        return REFUSED
    # The signal came in the run's last seconds, and torchrun's status is the signal's.
    if reason == ENDED and received:
        return 0
    if reason == LEFT or (received and status):
        how = "ended after a signal, without a checkpoint of where it was"
        if reason == LEFT:
            how = "left on a signal"
        message = f"\nthe run {how} (exit status {CONTINUE}): the same command continues it."
        print(message, file=sys.stderr)
        return CONTINUE
    if status < 0:
        name = signal.Signals(-status).name
        message = f"\ntorchrun was ended by {name}, and its ranks with it: the same command continues the run."
        print(message, file=sys.stderr)
        return 128 - status
    return status


def end_at_once(pid: int) -> None:
    """Kills a process and all of its descendants.

    The descendants are looked up in /proc, because torchrun's ranks are in sessions of their own.

    Args:
        pid: The id of the process, torchrun.
    """
    processes = [pid]
    for process in processes:  # the list grows by the children of its members
        for file in Path(f"/proc/{process}/task").glob("*/children"):
            with suppress(OSError):  # it has ended meanwhile
                processes += map(int, file.read_text().split())
    # torchrun is the first, so that it starts no rank again.
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@user_errors
def main(argv: list[str] | None = None) -> int:
    """Runs torchrun on this node of an allocation. Returns its exit status.

    Args:
        argv: The number of ranks and torchrun's command; None takes the words of the process.
    """
    ranks, *command = sys.argv[1:] if argv is None else argv
    # The first node is the host of the rendezvous. torchrun would guess it from the hosts' names,
    # and a node with several networks has several.
    is_first = os.environ["SLURM_NODEID"] == "0"
    rendezvous = {"PET_RDZV_CONF": f"is_host={str(is_first).lower()}"}
    return run(command, rendezvous | environment(int(ranks)))


if __name__ == "__main__":
    sys.exit(main())
