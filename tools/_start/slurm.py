"""Starts a run in a SLURM allocation.

srun starts one torchrun per node, and they find each other at the first node. A site is a cluster,
and its file in tools/sites holds the environment variables that runs need there.
"""

import os
import re
import shlex
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from interdomain.folders import expand_path
from interdomain.tools._cli import python_here
from interdomain.tools._start.torchrun import (
    CONTINUE,
    ONE_MACHINE,
    REFUSED,
    handlers,
    torchrun_command,
)

if TYPE_CHECKING:
    from interdomain.titan.plan.device import Gpu

# The clusters' files of environment variables, NAME.env.
SITES = Path(__file__).parents[1] / "sites"
LOCAL = "local"  # --site local: this machine only, even inside an allocation
# Steps of a job with higher numbers are SLURM's own: the batch script, an interactive shell.
FIRST_SPECIAL_STEP = 2**32 - 16
# Variables by which a job shares its nodes' GPUs and CPUs among tasks. srun reads them, too, and
# would give our one task per node only a share, or refuse.
SHARES = re.compile(
    r"S(LURM|RUN)_((GPUS|CPUS|TRES|NTASKS)_PER_(TASK|GPU|TRES)|(GPU|CPU|TRES|MEM)_BIND)"
)
# When one node has ended, srun gives the others this time to end, too. Nodes that save end
# together. Where one lost its torchrun, the others would wait in vain: ten minutes at the
# rendezvous, as long in a collective.
WAIT_SECONDS = 180


@dataclass(frozen=True)
class Allocation:
    """The nodes and GPUs that SLURM gave the job, or those that a dry run plans for.

    Attributes:
        job: The number of the job. Empty in a dry run outside of one.
        hosts: The names of the nodes. Empty in a dry run outside of a job.
        n_nodes: The number of nodes.
        ranks: The number of processes per node.
        gpus: GPUs per node. 0 if SLURM does not say.
        cpus: CPUs of the smallest node. 0 if SLURM does not say.
        site: The variables of the cluster's file.
        environment: The environment of srun: the site's variables, and over them the shell's.
    """

    job: str
    hosts: list[str]
    n_nodes: int
    ranks: int
    gpus: int
    cpus: int
    site: dict[str, str]
    environment: dict[str, str]

    @property
    def has_gpus(self) -> bool:
        """Returns True if SLURM or the site says that the nodes have GPUs.

        This machine may be a login node without any.
        """
        return bool(self.gpus or _count("INTERDOMAIN_GPUS_PER_NODE", self.environment))

    @property
    def gpu(self) -> "Gpu | None":
        """The GPU that the site names, or None if it names none.

        Raises:
            ValueError: Its memory is not given, or is no number.
        """
        from interdomain.titan.plan.device import Gpu

        name = self.environment.get("INTERDOMAIN_GPU", "")
        memory = self.environment.get("INTERDOMAIN_GPU_GIB", "")
        if not name and not memory:
            return None
        if not re.fullmatch(r"[1-9]\d*(\.\d+)?", memory):
            raise ValueError(
                f"INTERDOMAIN_GPU_GIB must be the memory of a GPU in GiB, such as 94.5: got {memory!r}."
            )
        return Gpu(name or "GPU", float(memory) * 2**30)

    def command(self, config: str, flags: list[str], restarts: int) -> list[str]:
        """Returns the command of srun, which starts the same command of torchrun on every node.

        Args:
            config: The TOML file.
            flags: Settings that override the file's.
            restarts: How many times torchrun starts failed ranks again.
        """
        nodes = str(self.n_nodes)
        srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        # Without these, a step of a job with --gpus-per-task gets the GPUs of one task, and one
        # CPU.
        if self.gpus:
            srun.append(f"--gpus-per-node={self.gpus}")
        if self.cpus:
            srun.append(f"--cpus-per-task={self.cpus}")
        # A node that leaves first must not end the others while they save.
        srun += ["--kill-on-bad-exit=0", f"--wait={WAIT_SECONDS}"]
        srun += shlex.split(self.environment.get("INTERDOMAIN_SRUN", ""))

        rendezvous = [*ONE_MACHINE]
        if self.n_nodes > 1:
            # A port of the job's own, because jobs may share a node. It is below the ports that
            # Linux gives to programs that ask for any.
            endpoint = f"{self.hosts[0]}:{20_000 + int(self.job) % 10_000}"
            rendezvous = ["--nnodes", nodes, "--rdzv-backend", "c10d"]
            rendezvous += ["--rdzv-id", self.job, "--rdzv-endpoint", endpoint]
        rendezvous += shlex.split(self.environment.get("INTERDOMAIN_TORCHRUN", ""))
        on_node = [python_here(), "-m", "interdomain.tools._start.torchrun", str(self.ranks)]
        return srun + on_node + torchrun_command(config, flags, self.ranks, restarts, rendezvous)

    def describe(self) -> dict[str, str]:
        """Returns rows of the plan: the nodes, and the site's variables as they are set."""
        variables = []
        for name in self.site:
            if not name.startswith("INTERDOMAIN_"):
                variables.append(f"{name}={shlex.quote(self.environment[name])}")
        place = "planned, without a SLURM job"
        if self.job:
            place = f"{', '.join(self.hosts)} (SLURM job {self.job})"
        nodes = f"{self.n_nodes} x {self.ranks} rank(s): {place}"
        return {"nodes": nodes, "site": " ".join(variables) or "sets nothing for the ranks"}


def read_site(name: str) -> dict[str, str]:
    """Reads the variables of a cluster.

    Args:
        name: A file of tools/sites without its ending, or the path of another NAME.env. Its lines
            are NAME=VALUE or comments.

    Raises:
        ValueError: There is no such file, or a line is something else.
    """
    file = SITES / f"{name}.env"
    if name.endswith(".env"):
        file = Path(expand_path(name))
    if not file.is_file():
        known = sorted(path.stem for path in SITES.glob("*.env"))
        raise ValueError(
            f"--site {name}: there is no such site. Known: {', '.join([*known, LOCAL])}; or give the path of a file NAME.env."
        )
    # No shell reads the file: there are no quotes, and no other variables in a value.
    variables = {}
    for line in file.read_text().splitlines():
        if line and not line.startswith("#"):
            if not re.match(r"[A-Za-z_]\w*=", line):
                raise ValueError(f"{file}: {line!r} is not NAME=VALUE.")
            variable, _, value = line.partition("=")
            if value[:1] in ("'", '"'):
                raise ValueError(
                    f"{file}: {line!r}: leave out the quotes, no shell reads this file."
                )
            variables[variable] = value
    return variables


def _count(name: str, environment: dict[str, str]) -> int:
    """Returns the number in a variable; 0 if it is not set.

    GPUs may have types: "h200:4" or "a100:2,h100:2". Their numbers are summed.

    Args:
        name: The name of the variable.
        environment: The environment that may have it.

    Raises:
        ValueError: It is no number.
    """
    text = environment.get(name) or "0"
    total = 0
    for count in text.split(","):
        number = count.rpartition(":")[2]
        if not number.isdecimal():
            raise ValueError(
                f"{name} must be a number: got {text!r}. Set what SLURM had set, or unset it (here and in the site's "
                f"file) and give --ranks N for the GPUs of a node, or give --site {LOCAL} for this machine only."
            )
        total += int(number)
    return total


def _hosts() -> list[str]:
    """Returns the names of the allocation's nodes.

    Raises:
        ValueError: SLURM's variables or its commands are not there, as in a container.
    """
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        hosts = done.stdout.split()
        problem = done.stderr.strip()
    except OSError as e:
        hosts = []
        problem = f"scontrol cannot be run: {e.strerror}"
    if not nodes or not hosts:
        raise ValueError(
            f"SLURM_JOB_ID is set, but no nodes are known from SLURM_JOB_NODELIST = {nodes!r} ({problem}). Use the allocation "
            f"where SLURM's commands and variables are, or give --site {LOCAL} to run on this machine only."
        )
    return hosts


def allocation(
    site: str | None,
    ranks: int | None,
    ranks_here: int,
    dry_run: bool = False,
    nodes: int | None = None,
) -> Allocation | None:
    """Returns the allocation that this process is in. None for a run on this machine only.

    Args:
        site: The option --site.
        ranks: The option --ranks.
        ranks_here: The number of processes of this machine, if neither the user nor SLURM gives
            one.
        dry_run: True plans for nodes of the site if there is no allocation.
        nodes: The option --nodes of a dry run: plan for this number of nodes.

    Raises:
        ValueError: The allocation cannot be used as it is.
    """
    # This machine only: the user says so, or there is no allocation, no site and no --nodes.
    site = site or os.environ.get("INTERDOMAIN_SITE")
    job = os.environ.get("SLURM_JOB_ID", "")
    if site == LOCAL or not (job or site or nodes):
        return None
    if not job and not dry_run:
        raise ValueError(
            f"--site {site} needs a SLURM allocation, and this is none (SLURM_JOB_ID is not set). Run the same command under "
            f"sbatch or after salloc; --dry-run needs none. To run on this machine only, leave --site out or give "
            f"--site {LOCAL}."
        )
    if nodes or not job:
        # A dry run plans for nodes that no job has.
        job = ""
        hosts = []
        nodes = nodes or 1
    else:
        # A process of `srun COMMAND` is in a step with a low number. SLURM's own steps have higher
        # numbers or names, such as batch.
        step = os.environ.get("SLURM_STEP_ID", "")
        if step.isdecimal() and int(step) < FIRST_SPECIAL_STEP:
            tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
            if tasks != "1":
                raise ValueError(
                    f"srun started this command {tasks} times. Leave srun out: ./launch.sh starts one torchrun per node."
                )
            return None  # a shell of the user's (srun --pty)
        hosts = _hosts()
        nodes = len(hosts)

    # What is set in the shell wins over the site's file.
    variables = read_site(site or "plain")
    environment = dict(variables)
    for name, value in os.environ.items():
        if not SHARES.match(name):
            environment[name] = value
    # SLURM sets the second one in a login node's shell, after salloc.
    gpus = _count("SLURM_GPUS_ON_NODE", environment) or _count("SLURM_GPUS_PER_NODE", environment)
    # CPUs of the nodes, such as "288(x3),72": three nodes of 288 and one of 72.
    cpus = re.findall(r"(?:^|,)(\d+)", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    # A rank for each GPU, unless the user says otherwise. Some clusters do not tell SLURM about
    # GPUs.
    ranks = ranks or gpus or _count("INTERDOMAIN_GPUS_PER_NODE", environment)
    if not ranks and not job:
        raise ValueError(
            f"--site {site or 'plain'} does not say how many ranks a node has. Give --ranks N, or a --site that sets "
            "INTERDOMAIN_GPUS_PER_NODE."
        )
    ranks = ranks or ranks_here
    return Allocation(
        job=job,
        hosts=hosts,
        n_nodes=nodes,
        ranks=ranks,
        gpus=gpus,
        cpus=min(map(int, cpus), default=0),
        site=variables,
        environment=environment,
    )


def run(command: list[str], environment: dict[str, str]) -> int:
    """Runs srun to its end.

    SIGUSR1 and SIGTERM ask the run to save and leave. Both are passed on as SIGUSR1, which srun
    gives to every node; on SIGTERM it would kill them. Ctrl-C is left to srun: once prints the
    state of the nodes, twice ends them.

    Args:
        command: The command of `Allocation.command`.
        environment: The environment of srun, which gives it to all nodes.

    Returns:
        The highest status of the nodes. After a signal CONTINUE, unless the run is finished or was
        refused.
    """
    process = subprocess.Popen(command, env=environment)
    received = []

    def pass_on(number, frame) -> None:
        received.append(number)
        process.send_signal(signal.SIGUSR1)

    by_signal = {signal.SIGUSR1: pass_on, signal.SIGTERM: pass_on, signal.SIGINT: signal.SIG_IGN}
    with handlers(by_signal):
        status = process.wait()
    if received and status not in (0, REFUSED):
        return CONTINUE
    return status
