"""A SLURM cluster of this one machine: nodes with a network, a name and processes of their own, and the real daemons.

A node is a set of Linux namespaces around a slurmd: it can lose its power (all its processes die at once) or its network (they
live on, unheard). Nodes share the file system and the processors. Needs root, and slurmctld, slurmd and munged.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

DAEMONS = "slurmctld", "slurmd", "munged"
NODES = 3
BRIDGE, SUBNET = "idbr0", "10.217.61"
SLURMD_TIMEOUT = 20  # seconds of silence after which a node is down, and its jobs are put back in the queue

SLURM_CONF = """\
ClusterName=interdomain
SlurmctldHost={host}({subnet}.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdTimeout={timeout}
ReturnToService=2
PartitionName=all Nodes=node[1-{nodes}] Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """What this machine lacks for it, in words."""
    if os.geteuid():
        return "needs root"
    lacking = [name for name in (*DAEMONS, "ip", "nsenter", "unshare") if shutil.which(name) is None]
    return f"needs {', '.join(lacking)} (Debian: apt-get install slurm-wlm munge iproute2)" if lacking else None


def call(*command, **options) -> str:
    done = subprocess.run([*map(str, command)], text=True, capture_output=True, **options)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


class Cluster:
    """Use as a context. `environment`: with which SLURM's commands find it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.nodes = folder, {}
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> "Cluster":
        folder, names = self.folder, [f"node{i}" for i in range(1, NODES + 1)]
        folder.chmod(0o755)
        (folder / "state").mkdir()
        conf = SLURM_CONF.format(
            host=os.uname().nodename, subnet=SUBNET, folder=folder, timeout=SLURMD_TIMEOUT, nodes=NODES
        )
        conf += "".join(f"NodeName={name} NodeAddr={self.address(name)} CPUs=2\n" for name in names)
        (folder / "slurm.conf").write_text(conf)
        hosts = "".join(f"{self.address(name)} {name}\n" for name in names)
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + hosts)
        try:
            self.clear()
            call("ip", "link", "add", BRIDGE, "type", "bridge")
            call("ip", "addr", "add", f"{SUBNET}.254/24", "dev", BRIDGE)
            call("ip", "link", "set", BRIDGE, "up")
            key = folder / "munge.key"
            key.write_bytes(os.urandom(128))
            key.chmod(0o600)
            at = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
            call("munged", "--force", f"--socket={folder}/munge.socket", *at)
            self.call("slurmctld", "-c")
            for name in names:
                self.wire(name)
                self.boot(name)
            self.wait(lambda: self.states().count("idle") == NODES, 60, "nodes to be idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for name in list(self.nodes):
            self.power_off(name)
        for daemon in ("slurmctld", "munge"):
            path = self.folder / f"{daemon}.pid"
            if path.is_file():
                os.kill(int(path.read_text()), signal.SIGKILL)
        self.clear()

    @staticmethod
    def address(name: str) -> str:
        return f"{SUBNET}.{name.removeprefix('node')}"

    def clear(self) -> None:
        """Remove the networks, also those of a cluster that was killed."""
        names = [f"node{i}" for i in range(1, NODES + 1)]
        for what in (
            *(["netns", "delete", f"id{name}"] for name in names),
            *(["link", "delete", f"idv{name}"] for name in names),
        ):
            subprocess.run(["ip", *what], capture_output=True)
        subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True)

    def wire(self, name: str) -> None:
        space, outside = f"id{name}", f"idv{name}"
        call("ip", "netns", "add", space)
        call("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
        call("ip", "link", "set", outside, "master", BRIDGE, "up")
        for what in (["addr", "add", f"{self.address(name)}/24", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            call("ip", "-n", space, *what)
        call("ip", "-n", space, "link", "set", "lo", "up")

    def boot(self, name: str) -> None:
        (self.folder / f"spool-{name}").mkdir(exist_ok=True)
        start = f"hostname {name} && mount --bind {self.folder}/hosts /etc/hosts && exec slurmd -D -N {name}"
        own = ("unshare", "--uts", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child")
        self.nodes[name] = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/id{name}", *own, "bash", "-c", start],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def power_off(self, name: str) -> None:
        """All processes of the node end at this moment."""
        node = self.nodes.pop(name)
        node.kill()  # unshare's --kill-child: the first process of the node dies, and with it all others
        node.wait()

    def kill(self, name: str, what: str) -> bool:
        """SIGKILL to the node's newest process whose command contains this. Returns: whether there was one."""
        node = self.nodes[name].pid
        (first,) = Path(f"/proc/{node}/task/{node}/children").read_text().split()
        pkill = ("pkill", "--signal=KILL", "--newest", "--full", "--", what)
        return subprocess.run(["nsenter", "--target", first, "--pid", "--mount", *pkill]).returncode == 0

    def unplug(self, name: str) -> None:
        """The node's processes live on."""
        call("ip", "link", "set", f"idv{name}", "down")

    def plug_in(self, name: str) -> None:
        call("ip", "link", "set", f"idv{name}", "up")

    def call(self, *command) -> str:
        return call(*command, env=self.environment)

    def states(self) -> list[str]:
        return self.call("sinfo", "--noheader", "--Node", "--format=%T").split()

    def job(self, number: str) -> dict[str, str]:
        """SLURM's record of a job, empty when it has forgotten it."""
        said = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", number], env=self.environment, capture_output=True, text=True
        )
        return dict(word.split("=", 1) for word in said.stdout.split() if "=" in word)

    def start_now(self, number: str) -> None:
        """A job that was put back in the queue waits for two minutes, as SLURM has it."""
        self.wait(lambda: self.job(number).get("JobState") == "PENDING", 300, f"job {number} to be pending")
        self.call("scontrol", "update", f"job={number}", "StartTime=now")

    @staticmethod
    def wait(condition, seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited {seconds} s for {what}"
            time.sleep(0.5)
