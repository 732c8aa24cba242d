"""A SLURM cluster of this one machine, by cluster.sh. Needs root, and Debian's slurm-wlm, munge and iproute2."""

import os
import shlex
import subprocess
import time
from pathlib import Path

SCRIPT = Path(__file__).with_name("cluster.sh")


class Cluster:
    """Three nodes that run under one slurmctld. `environment`: with which SLURM's commands find it."""

    def __init__(self, folder: Path) -> None:
        self.environment = os.environ | {
            "CLUSTER": str(folder),
            "SLURM_CONF": f"{folder}/slurm.conf",
        }

    def call(self, command: str) -> str:
        """Returns what the command prints."""
        words = shlex.split(command)
        done = subprocess.run(words, env=self.environment, text=True, capture_output=True)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        return done.stdout

    def start(self) -> None:
        self.call(f"{SCRIPT} start")
        self.wait(self.is_idle, 60, "idle nodes")

    def stop(self) -> None:
        self.call(f"{SCRIPT} stop")

    def boot(self, node: str) -> None:
        self.call(f"{SCRIPT} boot {node}")

    def power_off(self, node: str) -> None:
        """Ends all processes of the node at this moment."""
        self.call(f"{SCRIPT} power-off {node}")

    def is_idle(self) -> bool:
        return " 3 " in self.call("sinfo --noheader --states=idle")

    def is_up(self) -> bool:
        return "down" not in self.call("sinfo --noheader")

    @staticmethod
    def wait(condition, seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited {seconds} s for {what}"
            time.sleep(0.5)
