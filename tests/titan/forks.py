"""Starts of several ranks without torchrun's seconds: TorchTitan is imported once, and the ranks of every start are forks.

Each line of the input is a start, [RANKS, PROGRAM (a list: its file, its arguments), LOG FILE]; when its ranks have ended, a
line with the exit status is the answer. The first rank that fails ends the others.
"""

import gc
import json
import os
import runpy
import signal
import socket
import sys
import traceback

import interdomain.titan.trainer  # noqa: F401
from tests.common import TIMEOUT


def run(rank, program, log):
    signal.alarm(TIMEOUT)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    for output in (1, 2):
        os.dup2(log, output)
    sys.argv = program
    try:
        runpy.run_path(program[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def start(ranks, program, log):
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    running, status = set(), 0
    with open(log, "ab") as file:
        for rank in range(ranks):
            if (pid := os.fork()) == 0:
                run(rank, program, file.fileno())
            running.add(pid)
    while running:
        pid, ended = os.wait()
        running.remove(pid)
        if ended and not status:
            status = ended
            for other in running:
                os.kill(other, signal.SIGKILL)
    return status


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        print(start(*json.loads(line)), flush=True)
