"""A SLURM cluster of this one machine: nodes with a network, a name and processes of their own, and the real daemons.

A node is a set of Linux namespaces around a slurmd: it can lose its power (all its processes die at once). Nodes share the file
system and the processors. Needs root, and Debian's slurm-wlm, munge and iproute2.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

SUBNET, BRIDGE = "10.217.61", "idbr0"
NODES = {f"node{i}": f"{SUBNET}.{i}" for i in (1, 2, 3)}
SLURM_CONF = """\
ClusterName=interdomain
SlurmctldHost={host}({subnet}.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdTimeout=20
ReturnToService=2
PartitionName=all Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""


def call(*command, **options) -> str:
    done = subprocess.run([*map(str, command)], text=True, capture_output=True, **options)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


class Cluster:
    """Nodes that run under one slurmctld. `environment`: with which SLURM's commands find it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen] = {}
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        folder.chmod(0o755)
        conf = SLURM_CONF.format(
            host=os.uname().nodename, subnet=SUBNET, folder=folder, nodes=",".join(NODES)
        )
        hosts = "127.0.0.1 localhost\n"
        for name, address in NODES.items():
            conf += f"NodeName={name} NodeAddr={address} CPUs=2\n"
            hosts += f"{address} {name}\n"
        (folder / "slurm.conf").write_text(conf)
        (folder / "hosts").write_text(hosts)
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)

    def start(self) -> None:
        self.stop()  # the networks of a cluster that was killed
        call("ip", "link", "add", BRIDGE, "type", "bridge")
        call("ip", "addr", "add", f"{SUBNET}.254/24", "dev", BRIDGE)
        call("ip", "link", "set", BRIDGE, "up")
        munge = ["munged", "--force"]
        for what in ("socket", "key-file", "pid-file", "log-file", "seed-file"):
            munge.append(f"--{what}={self.folder}/munge.{what.removesuffix('-file')}")
        self.call(*munge)
        self.call("slurmctld", "-c")
        for name in NODES:
            self.wire(name)
            self.boot(name)
        self.wait(self.is_idle, 60, "idle nodes")

    def is_idle(self) -> bool:
        return f" {len(NODES)} " in self.call("sinfo", "--noheader", "--states=idle")

    def is_up(self) -> bool:
        return "down" not in self.call("sinfo", "--noheader")

    def stop(self) -> None:
        for name in list(self.running):
            self.power_off(name)
        for file in (self.folder / "slurmctld.pid", self.folder / "munge.pid"):
            if file.is_file():
                os.kill(int(file.read_text()), signal.SIGKILL)
        subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True)
        for name in NODES:
            subprocess.run(["ip", "netns", "delete", f"id{name}"], capture_output=True)
            subprocess.run(["ip", "link", "delete", f"idv{name}"], capture_output=True)

    def wire(self, name: str) -> None:
        space = f"id{name}"
        outside = f"idv{name}"
        call("ip", "netns", "add", space)
        call("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
        call("ip", "link", "set", outside, "master", BRIDGE, "up")
        call("ip", "-n", space, "addr", "add", f"{NODES[name]}/24", "dev", "eth0")
        for link in ("eth0", "lo"):
            call("ip", "-n", space, "link", "set", link, "up")

    def boot(self, name: str) -> None:
        (self.folder / f"spool-{name}").mkdir(exist_ok=True)
        start = f"hostname {name} && mount --bind {self.folder}/hosts /etc/hosts && exec slurmd -D -N {name}"
        own = ("unshare", "--uts", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child")
        self.running[name] = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/id{name}", *own, "bash", "-c", start],
            env=self.environment,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def power_off(self, name: str) -> None:
        """Ends all processes of the node at this moment."""
        node = self.running.pop(name)
        # By unshare's --kill-child the first process of the node dies, and with it all others.
        node.kill()
        node.wait()

    def call(self, *command) -> str:
        return call(*command, env=self.environment)

    @staticmethod
    def wait(condition, seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited {seconds} s for {what}"
            time.sleep(0.5)
