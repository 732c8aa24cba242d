"""Ranks that are forks of one process, which has imported what they need: they start without torchrun's seconds."""

import gc
import multiprocessing
import os
import runpy
import signal
import sys
from multiprocessing import connection, forkserver
from unittest import mock

from torch.distributed import TCPStore

from interdomain.launcher import end_with_parent

from .common import REPOSITORY, TIMEOUT


def environment():
    """For a process that a test starts: the repository's packages, one thread, no GPU."""
    path = f"{REPOSITORY}{os.pathsep}{os.environ['PYTHONPATH']}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def forks():
    """The context of multiprocessing whose processes are forks; their parent starts with the first call."""
    context = multiprocessing.get_context("forkserver")
    # Where TorchTitan is not installed, the last is left out.
    context.set_forkserver_preload(["pytest", "interdomain.model", "tests.titan.driver"])
    with mock.patch.dict(os.environ, environment()):
        forkserver.ensure_running()
    return context


def new_store():
    """Where the ranks of a process group find each other, in this process: its port is its own from now on."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def become(rank, ranks, port, log):
    """This process from now on: its environment is as torchrun makes it, and what it says goes to the log."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    for output in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), output)


def run_rank(rank, ranks, port, program, log):
    """One of the ranks that `launch` starts."""
    gc.freeze()
    signal.alarm(TIMEOUT)
    become(rank, ranks, port, log)
    sys.argv = program
    runpy.run_path(program[0], run_name="__main__")


def launch(log, ranks, *program):
    """Run FILE, *arguments on each rank. Returns the output, if all came to their end."""
    program, store, context = [str(part) for part in program], new_store(), forks()
    given = [(rank, ranks, store.port, program, log) for rank in range(ranks)]
    running = [context.Process(target=run_rank, args=args) for args in given]
    for process in running:
        process.start()
    waiting = {process.sentinel: process for process in running}
    while waiting:
        for sentinel in connection.wait(waiting):
            waiting.pop(sentinel).join()
        if any(process.exitcode for process in running):  # the first that fails ends the others
            for process in waiting.values():
                process.kill()
    assert not any(process.exitcode for process in running), log.read_text()[-8000:]
    return log.read_text()


def fork_ranks(serve, given):
    """The ranks of a process that has imported what they need, and ends with them. They collect none of what was imported."""
    gc.freeze()
    context = multiprocessing.get_context("fork")
    running = [
        context.Process(target=be_rank, args=(serve, given, rank)) for rank in range(len(given))
    ]
    for process in running:
        process.start()
    for *_, jobs, _ in given:
        jobs.close()
    for process in running:
        process.join()


def be_rank(serve, given, rank):
    end_with_parent(signal.SIGKILL)
    for *_, jobs, _ in (*given[:rank], *given[rank + 1 :]):
        jobs.close()
    serve(*given[rank])


class Ranks:
    """Processes of one process group that take jobs, one after the other.

    context: "spawn" for packages that the forks' parent must not have; path: where those are, before all else.
    """

    def __init__(self, serve, ranks, log, context, path=()):
        self.log, self.ended, self.store = log, False, new_store()
        pipes = [context.Pipe() for _ in range(ranks)]
        self.pipes = [ours for ours, _ in pipes]
        given = [
            (rank, ranks, self.store.port, theirs, log) for rank, (_, theirs) in enumerate(pipes)
        ]
        self.parent = context.Process(target=fork_ranks, args=(serve, given))
        log.touch()
        with (
            mock.patch.dict(os.environ, environment()),
            mock.patch.object(sys, "path", [*path, *sys.path]),
        ):
            self.parent.start()
        for _, theirs in pipes:
            theirs.close()

    def run(self, job):
        """Returns what the ranks said. Where one fails, all end."""
        begin, waiting = self.log.stat().st_size, set(self.pipes)
        for pipe in self.pipes:
            pipe.send(job)
        while waiting:
            for pipe in connection.wait(waiting):
                try:
                    pipe.recv()
                    waiting.remove(pipe)
                except (EOFError, ConnectionResetError):
                    self.end()
                    waiting.clear()
                    break
        said = self.log.read_bytes()[begin:].decode()
        assert not self.ended, said[-8000:]
        return said

    def end(self):
        self.ended = True
        self.parent.kill()
        self.parent.join()
