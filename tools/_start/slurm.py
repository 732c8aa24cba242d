"""A run in a SLURM allocation: one torchrun per node under srun, which find each other at the first node."""

import os
import re
import shlex
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from interdomain.folders import expand_path
from interdomain.tools._cli import python_here
from interdomain.tools._start.torchrun import (
    CONTINUE,
    ONE_MACHINE,
    REFUSED,
    handlers,
    torchrun_command,
)

SITES = Path(__file__).parents[1] / "sites"
LOCAL = "local"  # --site local: this machine alone, even inside an allocation
# The last steps' numbers are SLURM's own: the batch script, an interactive shell.
FIRST_SPECIAL_STEP = 2**32 - 16
# How a job shares its nodes' GPUs and CPUs out among tasks: srun reads it too, and would give our one task a share, or refuse.
SHARES = re.compile(
    r"S(LURM|RUN)_((GPUS|CPUS|TRES|NTASKS)_PER_(TASK|GPU|TRES)|(GPU|CPU|TRES|MEM)_BIND)"
)
# When one node has ended, the others get this long to end too. They save together, and so end together; where one lost its
# torchrun, they would wait for it in vain: ten minutes at the rendezvous, as long in a collective.
WAIT_SECONDS = 180


@dataclass(frozen=True)
class Allocation:
    """The nodes and GPUs that SLURM gave the job."""

    job: str
    hosts: list[str]
    ranks: int  # per node
    gpus: int  # per node; 0: SLURM does not say
    cpus: int  # the same
    site: dict[str, str]  # a cluster's variables
    environment: dict[str, str]  # of srun: the site's variables under the shell's

    @property
    def has_gpus(self) -> bool:
        """True if SLURM or the site says so. This machine may be a login node without any."""
        return bool(self.gpus or self.environment.get("INTERDOMAIN_GPUS_PER_NODE"))

    def command(self, config: str, flags: list[str], restarts: int) -> list[str]:
        """srun, and behind it torchrun, the same on every node."""
        nodes = str(len(self.hosts))
        # A port of the job's own, for jobs may share a node, and below those that Linux hands out.
        endpoint = f"{self.hosts[0]}:{20_000 + int(self.job) % 10_000}"
        rendezvous = [
            "--nnodes",
            nodes,
            "--rdzv-backend",
            "c10d",
            "--rdzv-id",
            self.job,
            "--rdzv-endpoint",
            endpoint,
        ]
        if len(self.hosts) == 1:
            rendezvous = [*ONE_MACHINE]
        rendezvous += shlex.split(self.environment.get("INTERDOMAIN_TORCHRUN", ""))
        return [
            *("srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"),
            # Unsaid, a step of a job with --gpus-per-task gets the GPUs of one task, and CPUs are not taken over at all.
            *([f"--gpus-per-node={self.gpus}"] if self.gpus else []),
            *([f"--cpus-per-task={self.cpus}"] if self.cpus else []),
            # Not --kill-on-bad-exit: a node that leaves first must not end the others while they save.
            *("--kill-on-bad-exit=0", f"--wait={WAIT_SECONDS}"),
            *shlex.split(self.environment.get("INTERDOMAIN_SRUN", "")),
            *(python_here(), "-m", "interdomain.tools._start.torchrun", str(self.ranks)),
            *torchrun_command(config, flags, self.ranks, restarts, rendezvous),
        ]

    def describe(self) -> str:
        """The dry run's rows."""
        set_here = [
            f"{n}={shlex.quote(self.environment[n])}"
            for n in self.site
            if not n.startswith("INTERDOMAIN_")
        ]
        nodes = f"{len(self.hosts)} x {self.ranks} rank(s): {', '.join(self.hosts)} (SLURM job {self.job})"
        return f"{'nodes':>18}  {nodes}\n{'site':>18}  {' '.join(set_here) or 'sets nothing'}"


def read_site(name: str) -> dict[str, str]:
    """The lines NAME=VALUE of a file of tools/sites by its name, or of any other by its path. Raises: ValueError."""
    file = Path(expand_path(name)) if name.endswith(".env") else SITES / f"{name}.env"
    if not file.is_file():
        known = ", ".join([*sorted(path.stem for path in SITES.glob("*.env")), LOCAL])
        raise ValueError(
            f"--site {name}: there is no such site. Known: {known}; or give the path of a file NAME.env."
        )
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    for line in lines:
        if not re.match(r"[A-Za-z_]\w*=", line):
            raise ValueError(f"{file}: {line!r} is not NAME=VALUE.")
    return dict(line.split("=", 1) for line in lines)


def _number(name: str, environment: dict[str, str]) -> int:
    """A variable that counts, 0 if it is not set: "4", or of GPUs by type "h200:4" or "a100:2,h100:2". Raises: ValueError."""
    text = environment.get(name) or "0"
    counts = [count.rpartition(":")[2] for count in text.split(",")]
    if not all(count.isdecimal() for count in counts):
        raise ValueError(
            f"{name} must be a number: got {text!r}. Set what SLURM had set, or unset it (then --ranks N says how many GPUs of "
            f"a node to use), or give --site {LOCAL} for this machine alone."
        )
    return sum(map(int, counts))


def _hosts() -> list[str]:
    """The allocation's nodes. Raises: ValueError where SLURM's variables or its commands are not there, as in containers."""
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    try:
        show = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True
        )
        hosts = show.stdout.split()
        why = show.stderr.strip()
    except OSError as e:
        hosts = []
        why = f"scontrol cannot be run: {e.strerror}"
    if not nodes or not hosts:
        raise ValueError(
            f"SLURM_JOB_ID is set, but no nodes are known from SLURM_JOB_NODELIST = {nodes!r} ({why}), as in a container. To "
            f"run on this machine alone, give --site {LOCAL} or set INTERDOMAIN_SITE={LOCAL}. Use the allocation where "
            "SLURM's commands and variables are."
        )
    return hosts


def allocation(site: str | None, ranks: int | None, ranks_here: int) -> Allocation | None:
    """The allocation that this process stands in, or None for this machine alone.

    site, ranks: as the user gave them, or None. ranks_here: of this machine, where nobody else says.
    Raises: ValueError for an allocation that cannot be used as it stands.
    """
    site = site or os.environ.get("INTERDOMAIN_SITE")
    job = os.environ.get("SLURM_JOB_ID")
    step = os.environ.get("SLURM_STEP_ID", "")
    if site == LOCAL or (not job and not site):
        return None
    if not job:
        raise ValueError(
            f"--site {site} needs a SLURM allocation, and this is none (SLURM_JOB_ID is not set). Run the same command under "
            f"sbatch or after salloc. To run on this machine alone, leave --site out or give --site {LOCAL}."
        )
    if (
        step.isdecimal() and int(step) < FIRST_SPECIAL_STEP
    ):  # SLURM's own may also have names, such as batch
        tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
        if tasks != "1":
            advice = "Leave srun out: ./launch.sh starts one torchrun per node"
            raise ValueError(f"srun started this command {tasks} times. {advice}.")
        return None  # in a shell of the user's (srun --pty)
    variables = read_site(site or "plain")
    environment = variables | {
        name: value for name, value in os.environ.items() if not SHARES.match(name)
    }
    hosts = _hosts()
    _number("SLURM_JOB_ID", environment)
    # The second is what salloc sets in a login node's shell.
    gpus = _number("SLURM_GPUS_ON_NODE", environment) or _number("SLURM_GPUS_PER_NODE", environment)
    # The smallest node's: "288(x3),72".
    cpus = min(
        map(int, re.findall(r"(?:^|,)(\d+)", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))),
        default=0,
    )
    ranks = ranks or gpus or _number("INTERDOMAIN_GPUS_PER_NODE", environment) or ranks_here
    return Allocation(job, hosts, ranks, gpus, cpus, variables, environment)


def run(command: list[str], environment: dict[str, str]) -> int:
    """Run srun to its end and return its status, the highest of the nodes'; after a signal CONTINUE, unless it is 0, or REFUSED
    on all nodes.

    SIGUSR1 and SIGTERM ask the run to save and leave; both go on as SIGUSR1, which srun gives to every node: of SIGTERM it
    would kill them. Ctrl-C is srun's: once for the nodes' state, twice to end.
    """
    process = subprocess.Popen(command, env=environment)
    asked = []

    def pass_on(number, frame):
        asked.append(number)
        process.send_signal(signal.SIGUSR1)

    with handlers(
        {signal.SIGUSR1: pass_on, signal.SIGTERM: pass_on, signal.SIGINT: signal.SIG_IGN}
    ):
        code = process.wait()
    return CONTINUE if asked and code not in (0, REFUSED) else code
