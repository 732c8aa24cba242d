"""SLURM: what the same line does in an allocation. tests/titan/test_launch.py starts it."""

import re
import shlex
import subprocess
import sys

import pytest
from torch.distributed.run import get_args_parser

from interdomain.tools import launch
from interdomain.tools._start import slurm as _slurm
from interdomain.tools._start.torchrun import CONTINUE, REFUSED

from .. import slurm_stand_in
from ..common import REPOSITORY, when_listening


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    return slurm_stand_in.allocations(tmp_path, monkeypatch)


def dry(capsys, *argv):
    assert launch.main([*argv, "--dry-run"]) == 0
    return dict(line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines())


def test_a_dry_run_prints_what_every_node_would_run(slurm, capsys):
    slurm("nid001", "nid002", "nid003", "nid004", GPUS_ON_NODE="4", JOB_CPUS_PER_NODE="288(x3),144")
    rows = dry(capsys, "train_configs/1.3B.toml", "--site", "isambard-ai")
    assert rows["nodes"] == "4 x 4 rank(s): nid001, nid002, nid003, nid004 (SLURM job 4242)"
    assert "4 per rank x 16 rank(s)" in rows["batch"]
    assert "NCCL_NET='AWS Libfabric'" in rows["site"]
    assert "INTERDOMAIN_" not in rows["site"]
    assert "NCCL_SOCKET_IFNAME=hsn GLOO_SOCKET_IFNAME=hsn0" in rows["site"]
    command = shlex.split(rows["command"])
    node = command.index("interdomain.tools._start.torchrun")
    own, (ranks, *torchrun) = command[: node - 2], command[node + 1 :]
    gpus_and_cores = {"--gpus-per-node=4", "--cpus-per-task=144"}
    assert {
        "srun",
        "--nodes=4",
        "--ntasks=4",
        "--ntasks-per-node=1",
        "--cpu-bind=none",
        *gpus_and_cores,
    } <= {*own}
    assert ranks == "4"
    args = get_args_parser().parse_args(
        torchrun[torchrun.index("interdomain.tools._start.elastic") + 1 :]
    )
    assert (args.nnodes, args.nproc_per_node, args.max_restarts, args.numa_binding) == (
        "4",
        "4",
        3,
        "node",
    )
    assert (args.rdzv_id, args.rdzv_endpoint, args.standalone) == ("4242", "nid001:24242", False)
    assert torchrun[-3:] == ["-m", "interdomain.titan.entry", "train_configs/1.3B.toml"]


def test_one_node_meets_at_its_own_address(slurm, capsys):
    """The node's name need not resolve there, as in a container."""
    slurm("nid001", GPUS_ON_NODE="4")
    command = shlex.split(dry(capsys, "train_configs/1.3B.toml")["command"])
    args = get_args_parser().parse_args(
        command[command.index("interdomain.tools._start.elastic") + 1 :]
    )
    assert (args.standalone, args.nnodes, args.local_addr) == (True, "1", "127.0.0.1")


def test_ranks_per_node(slurm, capsys):
    batch = ("--training.global_batch_size", "64")
    for variables, argv, ranks in (
        ({}, ["--site", "alps"], 4),
        ({"GPUS_ON_NODE": "2", "GPUS_PER_NODE": "8"}, [], 2),
        ({"GPUS_ON_NODE": "4"}, ["--ranks", "1"], 1),
        ({"GPUS_ON_NODE": "", "GPUS_PER_NODE": "a100:2,h100:2"}, [], 4),
        ({"GPUS_ON_NODE": "4", "STEP_ID": "batch"}, [], 4),  # a number elsewhere
    ):
        slurm("a", **variables)
        assert dry(capsys, *argv, *batch)["nodes"].startswith(f"1 x {ranks} rank(s)")


def test_a_node_s_task_gets_all_of_its_node(slurm, monkeypatch):
    """However many tasks the job asked for: srun takes these for its own flags, and what it is not told from the job."""
    shares = {
        "GPUS_PER_TASK": "1",
        "CPUS_PER_TASK": "36",
        "NTASKS_PER_GPU": "1",
        "TRES_BIND": "gres/gpu:per_task:1",
    }
    slurm("a", "b", GPUS_ON_NODE="4", JOB_CPUS_PER_NODE="144(x2)", GPU_BIND="single:1", **shares)
    monkeypatch.setenv("SRUN_CPUS_PER_TASK", "36")
    environment = _slurm.allocation(None, None, 1).environment
    assert not [name for name in environment if re.search("PER_TASK|PER_GPU|PER_TRES|_BIND", name)]
    assert environment["SLURM_JOB_ID"] == "4242"


def test_what_the_nodes_gpus_can_do_is_not_refused_for_the_login_node(slurm, monkeypatch):
    monkeypatch.setattr(launch.torch.accelerator, "is_available", lambda: False)
    slurm("a", "b")
    profiled = ["--profiling.enable_profiling", "--ranks", "1", "--dry-run"]
    assert [launch.main([*argv, *profiled]) for argv in (["--site", "alps"], [])] == [0, 2]


def test_what_is_set_in_the_shell_wins_over_the_site(slurm, tmp_path, monkeypatch):
    site = tmp_path / "ours.env"
    site.write_text("# ours\n\nNCCL_NET=first\nNCCL_PROTO=^LL128\nINTERDOMAIN_SRUN=--label\n")
    monkeypatch.setenv("NCCL_NET", "shell")
    slurm("a")
    allocation = _slurm.allocation(str(site), 1, 1)
    assert (allocation.environment["NCCL_NET"], allocation.environment["NCCL_PROTO"]) == (
        "shell",
        "^LL128",
    )
    assert "--label" in allocation.command("x.toml", [], 0)
    site.write_text("NCCL_NET=x\nexport NCCL_PROTO=y\n")
    with pytest.raises(ValueError, match=r"ours\.env: 'export NCCL_PROTO=y' is not NAME=VALUE"):
        _slurm.read_site(str(site))


@pytest.mark.parametrize(
    ("signals", "status", "meaning"),
    [
        ([], 1, 1),
        (["SIGUSR1"], 137, CONTINUE),
        (["SIGTERM"], 0, 0),
        (["SIGTERM"], REFUSED, REFUSED),  # a full disk, say: requeued, the job would meet it again
        (["SIGINT"], 1, 1),  # srun shows where its nodes stand, and goes on
    ],
)
def test_what_srun_s_end_means(monkeypatch, signals, status, meaning):
    """A process in srun's place signals the launcher, which waits for it."""
    asks = "".join(f"os.kill(launcher, signal.{name}); " for name in signals)
    code = f"signal.signal(signal.SIGUSR1, signal.SIG_IGN); {asks}sys.exit({status})"
    assert _slurm.run([sys.executable, "-c", when_listening("SigIgn") + code], {}) == meaning


@pytest.mark.parametrize(
    ("code", "answer", "ours", "requeued"),
    [
        (1, "echo ' Restarts=0 BatchFlag=1'", "0", False),
        (CONTINUE, "echo ' Restarts=12 BatchFlag=1'", "12", True),
        (
            CONTINUE,
            "echo ' Restarts=12 BatchFlag=1'",
            "1",
            False,
        ),  # SLURM has started the job again since
        (CONTINUE, "exit 1", "1", False),  # nobody answers: the node is cut off
    ],
)
def test_the_batch_script_requeues_the_job_that_it_is_a_start_of(
    tmp_path, monkeypatch, code, answer, ours, requeued
):
    script = (_slurm.SITES / "requeue.sbatch").read_text()
    config, site = re.search(
        r'^config=\${1:-(\S+)}\n./launch.sh "\$config" --site (\S+)$', script, re.MULTILINE
    ).groups()
    assert (REPOSITORY / config).is_file()
    _slurm.read_site(site)
    for name, does in {
        "launch.sh": f"exit {code}",
        "scontrol": f"echo $@ >> asked\n{answer}",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", ours)
    assert (
        subprocess.run(["bash", _slurm.SITES / "requeue.sbatch"], cwd=tmp_path).returncode == code
    )
    (tmp_path / "asked").touch()
    assert ("requeue 77" in (tmp_path / "asked").read_text()) == requeued


def test_refusals(slurm, tmp_path, refused, monkeypatch):
    for variables, argv, words in (
        ({}, ["--site", "isambard"], "alps, isambard-ai, plain, local"),
        ({"JOB_ID": ""}, ["--site", "alps"], "needs a SLURM allocation"),
        ({"STEP_ID": "0", "STEP_NUM_TASKS": "2"}, [], "srun started this command 2 times"),
        ({"JOB_NODELIST": ""}, [], "SLURM_JOB_NODELIST = ''"),
        ({"GPUS_ON_NODE": "all"}, [], "SLURM_GPUS_ON_NODE must be a number: got 'all'"),
    ):
        slurm("a", "b", **variables)
        refused(launch.main, [*argv, "--dry-run"], words)
        for name in variables:
            monkeypatch.delenv(f"SLURM_{name}", raising=False)
    slurm("a")
    (tmp_path / "bin" / "scontrol").write_text("#!/bin/sh\necho bad list >&2; exit 1\n")
    refused(launch.main, ["--dry-run"], "SLURM_JOB_NODELIST = 'a' (bad list)")
    (tmp_path / "bin" / "scontrol").unlink()
    refused(launch.main, ["--dry-run"], "cannot be run")


def test_this_machine_alone(slurm, capsys):
    """The user says so, or the shell is one that srun gave."""
    for variables, argv in (
        ({}, ["--site", "local"]),
        ({"STEP_ID": "3", "STEP_NUM_TASKS": "1"}, []),
    ):
        slurm("a", "b", **variables)
        rows = dry(capsys, *argv, "--ranks", "1")
        assert "--standalone" in rows["command"]
