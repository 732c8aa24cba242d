"""Stand-ins for srun and scontrol, which start real processes: the nodes of an allocation, on this machine."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

SCONTROL = """#!/bin/sh
# scontrol show hostnames LIST, for lists without brackets
echo "$3" | tr ',' '\\n'
"""

# Its own flags begin with --; what follows is started once per task, and gets the signals that it gets.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
flags = [argument for argument in sys.argv[1:] if argument.startswith("--")]
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
(tasks,) = [int(flag.partition("=")[2]) for flag in flags if flag.startswith("--ntasks=")]
nodes = [
    subprocess.Popen(command, env={{**os.environ, "SLURM_NODEID": str(i), "SLURM_PROCID": str(i), "SLURM_STEP_ID": "0"}})
    for i in range(tasks)
]
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, _: [node.send_signal(number) for node in nodes])
sys.exit(max(node.wait() for node in nodes))
"""


def allocations(folder, monkeypatch):
    """slurm(hosts, ...): from then on this process stands in an allocation of these hosts. The tools go to folder / "bin"."""
    for name, script in (("scontrol", SCONTROL), ("srun", SRUN)):
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(script)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    for name in [*os.environ]:
        if name.startswith(("SLURM_", "INTERDOMAIN_SITE", "NCCL_")):
            monkeypatch.delenv(name)

    def slurm(*hosts, **variables):
        given = {"JOB_ID": "4242", "JOB_NUM_NODES": str(len(hosts)), "JOB_NODELIST": ",".join(hosts), **variables}
        for name, value in given.items():
            monkeypatch.setenv(f"SLURM_{name}", value) if value else monkeypatch.delenv(f"SLURM_{name}", False)

    monkeypatch.chdir(ROOT)
    return slurm
