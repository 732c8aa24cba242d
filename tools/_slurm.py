"""A run in a SLURM allocation: one torchrun per node under srun, which find each other at the first node."""

import os
import shlex
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ._torchrun import CONTINUE, INTERRUPTED, REFUSED

SITES = Path(__file__).parent / "sites"
LOCAL = "local"  # --site local: this machine alone, even inside an allocation
# The last steps' numbers are SLURM's own: the batch script, an interactive shell.
FIRST_SPECIAL_STEP = 2**32 - 16
# How a job shares its nodes' GPUs and CPUs out among tasks: srun reads it too, and would give our one task a share, or refuse.
SHARES = {
    *("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES"),
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_GPU"),
    *("SLURM_GPU_BIND", "SLURM_TRES_BIND", "SLURM_CPU_BIND", "SLURM_MEM_BIND"),
}
# When one node has ended, the others get this long to end too. They save together, and so end together; where one lost its
# torchrun, they would wait for it in vain: ten minutes at the rendezvous, as long in a collective.
WAIT_SECONDS = 180


@dataclass(frozen=True)
class Site:
    """A cluster's variables, from a file of NAME=VALUE lines."""

    name: str
    variables: dict[str, str]

    def get(self, name: str) -> str:
        """One of the launcher's own settings (INTERDOMAIN_...); the shell's wins."""
        return os.environ.get(name, self.variables.get(name, ""))

    @property
    def gpus_per_node(self) -> int:
        """0 where the site does not say."""
        return int(self.get("INTERDOMAIN_GPUS_PER_NODE") or 0)

    @property
    def exported(self) -> dict[str, str]:
        return {name: value for name, value in self.variables.items() if not name.startswith("INTERDOMAIN_")}


@dataclass(frozen=True)
class Allocation:
    """What SLURM gave us."""

    job: str
    hosts: tuple[str, ...]
    ranks: int  # per node
    gpus: int  # per node; 0: SLURM does not say
    cpus: int  # the same
    site: Site

    @property
    def has_gpus(self) -> bool:
        """Whether SLURM or the site says so. This machine may be a login node without any."""
        return bool(self.gpus or self.site.gpus_per_node)

    @property
    def rendezvous(self) -> tuple[str, ...]:
        """torchrun's flags, the same on every node: where nodes meet, and the site's own."""
        # A port of the job's own, for jobs may share a node, and below those that Linux hands out.
        port = 20_000 + int(self.job) % 10_000 if self.job.isdigit() else 29_500
        return (
            *("--nnodes", str(len(self.hosts))),
            *("--rdzv-backend", "c10d", "--rdzv-id", self.job, "--rdzv-endpoint", f"{self.hosts[0]}:{port}"),
            *shlex.split(self.site.get("INTERDOMAIN_TORCHRUN")),
        )

    def command(self, python: str, torchrun: list[str]) -> list[str]:
        nodes = str(len(self.hosts))
        return [
            "srun",
            *(f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"),
            # Unsaid, a step of a job with --gpus-per-task gets the GPUs of one task, and CPUs are not taken over at all.
            *((f"--gpus-per-node={self.gpus}",) if self.gpus else ()),
            *((f"--cpus-per-task={self.cpus}",) if self.cpus else ()),
            # Not --kill-on-bad-exit: a node that leaves first must not end the others while they save.
            *("--kill-on-bad-exit=0", f"--wait={WAIT_SECONDS}"),
            *shlex.split(self.site.get("INTERDOMAIN_SRUN")),
            *(python, "-m", "interdomain.tools._torchrun", str(self.ranks)),
            *torchrun,
        ]

    def describe(self) -> str:
        """The dry run's rows."""
        hosts = ", ".join(self.hosts[:4]) + (f", ... {self.hosts[-1]}" if len(self.hosts) > 4 else "")
        exported = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.site.exported.items())
        rows = {
            "nodes": f"{len(self.hosts)} x {self.ranks} rank(s): {hosts} (SLURM job {self.job})",
            "site": f"{self.site.name}: {exported or 'sets nothing'}",
            "of its own": f"PET_RDZV_CONF=is_host=true on {self.hosts[0]}, PET_RDZV_CONF=is_host=false on others",
        }
        return "\n".join(f"{name:>18}  {value}" for name, value in rows.items())


def site_named(name: str) -> Site:
    """A file of tools/sites by its name, or any other by its path. Raises: ValueError."""
    file = Path(name) if name.endswith(".env") else SITES / f"{name}.env"
    if not file.is_file():
        known = ", ".join([*sorted(path.stem for path in SITES.glob("*.env")), LOCAL])
        raise ValueError(f"--site {name}: there is no such site. Known: {known}; or give the path of a file NAME.env.")
    variables = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        variable, equals, value = line.partition("=")
        if not equals or not variable.isidentifier():
            raise ValueError(f"{file}, line {number}: {line!r} is not NAME=VALUE.")
        variables[variable] = value
    return Site(file.stem, variables)


def allocation(site: str | None, ranks: int | None, ranks_here: int) -> Allocation | None:
    """The allocation that this process stands in, or None outside of one.

    site, ranks: as the user gave them, or None. ranks_here: of this machine, where nobody else says.
    Raises: ValueError for an allocation that cannot be used as it stands.
    """
    site = site or os.environ.get("INTERDOMAIN_SITE")
    job = os.environ.get("SLURM_JOB_ID")
    if not job or site == LOCAL:
        if site and site != LOCAL:
            site_named(site)
            raise ValueError(
                f"--site {site}, but this is no SLURM allocation (SLURM_JOB_ID is not set). Run the same line by sbatch, or "
                f"after salloc; to run on this machine alone, leave --site out or say --site {LOCAL}."
            )
        return None
    if _inside_a_step():
        return None
    found, hosts = site_named(site or "plain"), _hosts(job)
    gpus, cpus = _gpus_per_node(len(hosts)), _least("SLURM_JOB_CPUS_PER_NODE")
    return Allocation(job, hosts, ranks or gpus or found.gpus_per_node or ranks_here, gpus, cpus, found)


def _inside_a_step() -> bool:
    """Whether srun started us: with one task it is a shell of the user's (srun --pty), with more a mistake."""
    step = os.environ.get("SLURM_STEP_ID", "")
    if not step.isdigit() or int(step) >= FIRST_SPECIAL_STEP:
        return False
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1":
        raise ValueError(
            f"srun started this line {tasks} times. Leave srun out: ./launch.sh starts it, with one torchrun per node."
        )
    return True


def _hosts(job: str) -> tuple[str, ...]:
    nodes, listed = os.environ.get("SLURM_JOB_NUM_NODES"), os.environ.get("SLURM_JOB_NODELIST")
    if not nodes or not listed:
        raise ValueError(
            f"SLURM job {job} names no nodes (SLURM_JOB_NUM_NODES or SLURM_JOB_NODELIST is not set). Ask for them (sbatch "
            f"--nodes=N, salloc --nodes=N), or run on this machine alone with --site {LOCAL}."
        )
    try:
        said = subprocess.run(["scontrol", "show", "hostnames", listed], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as e:
        raise ValueError(
            f"SLURM job {job}: `scontrol show hostnames {listed}` failed ({e}). SLURM's commands must be on PATH here."
        ) from e
    hosts = tuple(said.stdout.split())
    if len(hosts) != int(nodes):
        raise ValueError(f"SLURM job {job} has {nodes} node(s), and {listed} names {len(hosts)}: {', '.join(hosts)}.")
    return hosts


def _gpus_per_node(nodes: int) -> int:
    """0 where SLURM does not say. Raises: ValueError for a number of all nodes (--gpus) that they cannot share evenly."""
    by_task = _count("SLURM_GPUS_PER_TASK") * _least("SLURM_TASKS_PER_NODE")
    if by_node := _count("SLURM_GPUS_ON_NODE") or _count("SLURM_GPUS_PER_NODE") or by_task:
        return by_node
    gpus = _count("SLURM_GPUS")  # all that salloc says of --gpus=N on a login node
    if gpus % nodes:
        raise ValueError(f"the job has {gpus} GPUs on {nodes} nodes, of as many ranks each: use --gpus-per-node.")
    return gpus // nodes


def _count(name: str) -> int:
    """Of a variable like "4" or "h200:4"; else 0."""
    count = os.environ.get(name, "").rpartition(":")[2]
    return int(count) if count.isdigit() else 0


def _least(name: str) -> int:
    """The smallest node's, of a variable like "288(x3),72"; 0 where it is not set."""
    groups = os.environ.get(name, "")
    return min((int(group.partition("(")[0]) for group in groups.split(",") if group), default=0)


def run(command: list[str], site: Site) -> int:
    """Run srun to its end and return its status, the highest of the nodes'; after a signal what `_torchrun.run` says: CONTINUE,
    unless it is 0, or REFUSED on all nodes.

    SIGUSR1 and SIGTERM ask the run to save and leave; both go on as SIGUSR1, which srun gives to every node: of SIGTERM it
    would kill them. Ctrl-C is srun's: once for the nodes' state, twice to end.
    """
    kept = {name: value for name, value in os.environ.items() if name not in SHARES}
    process = subprocess.Popen(command, env={**site.exported, **kept})
    asked = []

    def pass_on(number, frame):
        asked.append(number)
        if number != signal.SIGINT:
            process.send_signal(signal.SIGUSR1)

    handlers = {number: signal.signal(number, pass_on) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
    try:
        code = process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if code and asked.count(signal.SIGINT) > 1:
        return INTERRUPTED
    return CONTINUE if code not in (0, REFUSED) and {*asked} - {signal.SIGINT} else code
