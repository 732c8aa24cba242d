"""Stand-ins for srun and scontrol, which start real processes: the nodes of an allocation, on this machine."""

import os
import sys

from .common import REPOSITORY

SCONTROL = """#!/bin/sh
# scontrol show hostnames LIST, for lists without brackets
echo "$3" | tr ',' '\\n'
"""

# Its own flags begin with --. The command is started once per task, and gets the signals that srun gets.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
flags, command = [], sys.argv[1:]
while command[0].startswith("--"):
    flags.append(command.pop(0))
(tasks,) = [int(flag.partition("=")[2]) for flag in flags if flag.startswith("--ntasks=")]
nodes = [subprocess.Popen(command, env={{**os.environ, "SLURM_NODEID": str(i)}}) for i in range(tasks)]
def forward(number, frame):
    for node in nodes:
        node.send_signal(number)
signal.signal(signal.SIGUSR1, forward)
signal.signal(signal.SIGTERM, forward)
sys.exit(max(node.wait() for node in nodes))
"""


def allocations(folder, monkeypatch):
    """slurm(hosts, ...): from then on this process stands in an allocation of these hosts. The tools go to folder / "bin"."""
    (folder / "bin").mkdir()
    for name, script in (("scontrol", SCONTROL), ("srun", SRUN)):
        (folder / "bin" / name).write_text(script)
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder / "bin"), prepend=os.pathsep)
    for name in list(os.environ):
        if name.startswith(("SLURM_", "INTERDOMAIN_SITE", "NCCL_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(REPOSITORY)

    def slurm(*hosts, **variables):
        values = {"JOB_ID": "4242", "JOB_NODELIST": ",".join(hosts)} | variables
        for name, value in values.items():
            monkeypatch.setenv(f"SLURM_{name}", value)

    return slurm
