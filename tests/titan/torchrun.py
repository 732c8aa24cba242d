"""torchrun whose ranks are forks of it, so that TorchTitan is imported once and not by every rank of every restart.

python torchrun.py TORCHRUN'S ARGUMENTS. All else is torchrun's own: agent, store, restarts, signals, logs. The ranks are
forked while there is one thread, and wait for torchrun to start them.
"""

import gc
import json
import os
import runpy
import subprocess
import sys
import time

import torch.distributed.run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import interdomain.titan.trainer  # noqa: F401

waiting = []  # (pid, where its start is written to) of every rank that has not started


class Rank:
    """What torchrun asks of subprocess.Popen."""

    def __init__(self, args, env, stdout, stderr, start_new_session):
        self.pid, start = waiting.pop()
        logs = [stream and stream.name for stream in (stdout, stderr)]
        with os.fdopen(start, "w") as pipe:
            json.dump({"program": args[2:], "environment": env, "logs": logs}, pipe)  # after python and -u
        self.returncode = None

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout=None):
        limit = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if limit is not None and time.monotonic() > limit:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.01)
        return self.returncode


def fork(ranks):
    """Returns in torchrun, with None; and in a rank once it starts, with what it is to run."""
    for _ in range(ranks):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            for end in (write, *(start for _, start in waiting)):  # else nobody notices the end of torchrun
                os.close(end)
            with os.fdopen(read) as pipe:
                start = pipe.read()
            return json.loads(start or "null") or sys.exit()
        os.close(read)
        waiting.append((pid, write))


def run(program, environment, logs):
    os.setsid()
    os.environ.clear()
    os.environ |= environment
    for stream, log in enumerate(logs, start=1):
        if log:
            os.dup2(os.open(log, os.O_WRONLY), stream)
    sys.argv = program
    sys.path[0] = os.path.dirname(program[0])
    runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    arguments = torch.distributed.run.parse_args(sys.argv[1:])
    gc.freeze()  # every rank collects once as it starts: not through what was imported
    start = fork(int(arguments.nproc_per_node) * (arguments.max_restarts + 1))
    if start:
        run(**start)
    else:
        subprocess_handler.Popen = Rank
        torch.distributed.run.main(sys.argv[1:])
