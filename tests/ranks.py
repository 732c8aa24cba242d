"""Ranks that are forks of one process, which has imported what they need: they start without torchrun's seconds."""

import gc
import multiprocessing
import os
import runpy
import signal
import sys
from multiprocessing import connection, forkserver
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.multiprocessing import start_processes
from torch.multiprocessing.spawn import ProcessException

from interdomain.launcher import end_with_parent
from interdomain.patches import one_gloo_thread

from .common import REPOSITORY, TIMEOUT


def environment():
    """Returns the environment of a process that a test starts: the repository's packages, one thread, no GPU."""
    path = f"{REPOSITORY}{os.pathsep}{os.environ['PYTHONPATH']}"
    changes = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    # PyTorch would start a process for Triton's compilations, which there are none of on a CPU.
    return os.environ | changes | {"TORCH_WARM_POOL": "0"}


def forks():
    """Returns the context of multiprocessing whose processes are forks. Their parent starts with the first call."""
    context = multiprocessing.get_context("forkserver")
    # Where TorchTitan is not installed, the last is left out.
    context.set_forkserver_preload(["pytest", "interdomain.model", "tests.titan.driver"])
    with mock.patch.dict(os.environ, environment()):
        forkserver.ensure_running()
    return context


def new_store():
    """Returns a store in this process, where the ranks of a process group find each other. It has a port of its own."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def become(rank, ranks, port, log):
    """Gives this process the environment that torchrun makes for a rank, and sends its output to the log."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    for output in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), output)


def run_rank(rank, ranks, port, program, log):
    """Runs one of the ranks that `launch` starts."""
    gc.freeze()
    signal.alarm(TIMEOUT)
    become(rank, ranks, port, log)
    sys.argv = program
    runpy.run_path(program[0], run_name="__main__")


def launch(log, ranks, *program):
    """Runs FILE, *arguments on each rank. Returns the output if all ranks came to their end."""
    program = [str(part) for part in program]
    store = new_store()
    forks()
    arguments = (ranks, store.port, program, log)
    try:
        start_processes(run_rank, arguments, nprocs=ranks, start_method="forkserver")
    except ProcessException as error:  # the first that fails ends the others
        raise AssertionError(f"{error}\n{log.read_text()[-8000:]}") from None
    return log.read_text()


def compute(run, ranks, folder):
    """Calls run(rank, folder) on the ranks of a process group, which are forks, and waits for all of them."""
    method = forks().get_start_method()
    start_processes(be_member, (run, ranks, folder), nprocs=ranks, start_method=method)


def be_member(rank, run, ranks, folder):
    torch.set_num_threads(1)
    one_gloo_thread()
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    run(rank, folder)
    dist.destroy_process_group()


def fork_ranks(serve, rank_arguments):
    """Forks the ranks of a process that has imported what they need. It ends with them, and they end with it."""
    gc.freeze()  # the collector need not look through what was imported
    context = multiprocessing.get_context("fork")
    running = []
    for arguments in rank_arguments:
        process = context.Process(target=be_rank, args=(serve, rank_arguments, arguments))
        process.start()
        running.append(process)
    close_pipes(rank_arguments)
    for process in running:
        process.join()


def close_pipes(rank_arguments, kept=None):
    """Closes this process's ends of the ranks' pipes, but for one: a pipe tells of a rank's end if nobody else has it."""
    for arguments in rank_arguments:
        if arguments is not kept:
            arguments[3].close()


def be_rank(serve, rank_arguments, own):
    end_with_parent(signal.SIGKILL)
    close_pipes(rank_arguments, kept=own)
    serve(*own)


class Ranks:
    """Processes of one process group that take jobs, one after the other.

    Args:
        serve: Called on each rank with (rank, ranks, port of the store, pipe, log).
        ranks: The number of ranks.
        log: The file of their output.
        context: Of multiprocessing; "spawn" for packages that the forks' parent must not have.
        path: Where those packages are, before all else.
    """

    def __init__(self, serve, ranks, log, context, path=()):
        self.log = log
        self.ended = False
        self.store = new_store()
        self.pipes = []
        rank_arguments = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            rank_arguments.append((rank, ranks, self.store.port, theirs, log))
        self.parent = context.Process(target=fork_ranks, args=(serve, rank_arguments))
        log.touch()
        with (
            mock.patch.dict(os.environ, environment()),
            mock.patch.object(sys, "path", [*path, *sys.path]),
        ):
            self.parent.start()
        close_pipes(rank_arguments)

    def run(self, job):
        """Returns the output of the ranks. If one fails, all end."""
        begin = self.log.stat().st_size
        waiting = set(self.pipes)
        for pipe in self.pipes:
            pipe.send(job)
        while waiting and not self.ended:
            for pipe in connection.wait(waiting):
                try:
                    pipe.recv()
                    waiting.remove(pipe)
                except (EOFError, ConnectionResetError):
                    self.end()
                    break
        output = self.log.read_bytes()[begin:].decode()
        assert not self.ended, output[-8000:]
        return output

    def end(self):
        self.ended = True
        self.parent.kill()
        self.parent.join()
