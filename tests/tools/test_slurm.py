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
from ..common import when_listening, write_program

NO_JOB = {"JOB_ID": ""}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    return slurm_stand_in.allocations(tmp_path, monkeypatch)


def dry_run(capsys, *argv):
    """Returns the rows that a dry run prints, by their names."""
    assert launch.main([*argv, "--dry-run"]) == 0
    return dict(line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines())


def torchrun_options(command):
    """Returns torchrun's own reading of the command's options."""
    words = shlex.split(command)
    first = words.index("interdomain.tools._start.elastic") + 1
    return get_args_parser().parse_args(words[first:])


def test_a_dry_run_prints_what_every_node_would_run(slurm, capsys):
    slurm("nid001", "nid002", "nid003", "nid004", GPUS_ON_NODE="4", JOB_CPUS_PER_NODE="288(x3),144")
    rows = dry_run(capsys, "train_configs/1.3B.toml", "--site", "isambard-ai")
    assert rows["nodes"] == "4 x 4 rank(s): nid001, nid002, nid003, nid004 (SLURM job 4242)"
    assert "NCCL_SOCKET_IFNAME=hsn GLOO_SOCKET_IFNAME=hsn0" in rows["site"]
    srun, _, node = rows["command"].partition(" interdomain.tools._start.torchrun ")
    expected = """--nodes=4 --ntasks=4 --ntasks-per-node=1 --cpu-bind=none --gpus-per-node=4
        --cpus-per-task=144"""
    assert set(expected.split()) <= set(srun.split())
    assert node.startswith("4 ")  # ranks
    options = torchrun_options(rows["command"])
    assert (options.nnodes, options.nproc_per_node, options.max_restarts) == ("4", "4", 3)
    assert options.numa_binding == "node"
    assert (options.rdzv_id, options.rdzv_endpoint) == ("4242", "nid001:24242")


def test_a_start_names_its_nodes_and_whether_it_fits(slurm, capsys, monkeypatch, tmp_path):
    def check_data(job, samples):
        return "some data"

    def run(command, environment):
        return REFUSED

    monkeypatch.setattr(launch, "check_data", check_data)
    monkeypatch.setattr(_slurm, "run", run)
    slurm("nid001", "nid002", GPUS_ON_NODE="4")
    run_of_two_nodes = ["train_configs/1.3B.toml", "--site", "isambard-ai"]
    settings = f"--training.local_batch_size 16 --job.dump_folder {tmp_path}"
    launch.main([*run_of_two_nodes, *settings.split()])
    printed = capsys.readouterr().out
    assert "49,592 of 524,288 tokens on 8 GPU rank(s) (26,000,490,496 tokens)" in printed
    assert re.search(r"^ +fits  NO: \d+% of 94.5 GiB \(GH200\)$", printed, re.MULTILINE)
    assert "2 x 4 rank(s): nid001, nid002 (SLURM job 4242)" in printed
    assert "some data" in printed


def test_one_node_meets_at_its_own_address(slurm, capsys):
    """The node's name need not resolve there, as in a container."""
    slurm("nid001", GPUS_ON_NODE="4")
    options = torchrun_options(dry_run(capsys, "train_configs/1.3B.toml")["command"])
    assert (options.standalone, options.nnodes, options.local_addr) == (True, "1", "127.0.0.1")


@pytest.mark.parametrize(
    ("variables", "argv", "ranks"),
    [
        ({}, "--site alps", 4),
        ({"GPUS_ON_NODE": "2", "GPUS_PER_NODE": "8"}, "", 2),
        ({"GPUS_ON_NODE": "4"}, "--ranks 1", 1),
        ({"GPUS_PER_NODE": "a100:2,h100:2"}, "", 4),
    ],
)
def test_ranks_per_node(slurm, capsys, variables, argv, ranks):
    slurm("a", **variables)
    rows = dry_run(capsys, *argv.split())
    assert rows["nodes"].startswith(f"1 x {ranks} rank(s)")


@pytest.mark.parametrize(
    ("argv", "nodes", "batch", "fits"),
    [
        ("--training.local_batch_size 16", 1, "16 per rank x 4 rank(s) x 2 ", "NO"),
        ("--nodes 8", 8, "4 per rank x 32 rank(s) x 1 ", "yes"),
        ("--training.local_batch_size 8", 1, "8 per rank x 4 rank(s) x 4 ", "perhaps"),
        ("--nodes 2 --ranks 1", 2, "4 per rank x 2 rank(s) x 16 ", "yes"),
    ],
)
def test_a_dry_run_on_a_login_node_plans_for_the_site_s_gpus(
    slurm, capsys, argv, nodes, batch, fits
):
    slurm(JOB_ID="")
    argv = ["train_configs/1.3B.toml", "--site", "isambard-ai", *argv.split()]
    rows = dry_run(capsys, *argv)
    assert rows["nodes"].startswith(f"{nodes} x ")
    assert batch in rows["batch"]
    assert re.fullmatch(rf"{fits}: \d+% of 94.5 GiB \(GH200\)", rows["fits"])
    assert rows["scan"] == "chunkwise (Triton kernels)"
    assert "command" not in rows


def test_a_node_s_task_gets_all_of_its_node(slurm, monkeypatch):
    """srun would take the job's shares of a task for its own flags. What it is not told, it takes from the job."""
    shares = {"GPUS_PER_TASK": "1", "NTASKS_PER_GPU": "1", "TRES_BIND": "gres/gpu:per_task:1"}
    slurm("a", "b", GPUS_ON_NODE="4", JOB_CPUS_PER_NODE="144(x2)", GPU_BIND="single:1", **shares)
    monkeypatch.setenv("SRUN_CPUS_PER_TASK", "36")
    environment = _slurm.allocation(None, None, 1).environment
    for name in environment:
        assert not re.search("PER_TASK|PER_GPU|PER_TRES|_BIND", name)
    assert environment["SLURM_JOB_ID"] == "4242"


OURS = """
# ours

NCCL_NET=first
NCCL_PROTO=^LL128
INTERDOMAIN_GPUS_PER_NODE=0
INTERDOMAIN_SRUN=--label
"""


def test_what_is_set_in_the_shell_wins_over_the_site(slurm, tmp_path, monkeypatch):
    site = tmp_path / "ours.env"
    site.write_text(OURS)
    monkeypatch.setenv("NCCL_NET", "shell")
    slurm("a")
    allocation = _slurm.allocation(str(site), 1, 1)
    assert allocation.environment["NCCL_NET"] == "shell"
    assert allocation.environment["NCCL_PROTO"] == "^LL128"
    assert "--label" in allocation.command("x.toml", [], 0)
    assert not allocation.has_gpus


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("export NCCL_PROTO=y", "ours.env: 'export NCCL_PROTO=y' is not NAME=VALUE"),
        ("NCCL_NET='AWS Libfabric'", "leave out the quotes"),
        ("INTERDOMAIN_GPU=GH200\nINTERDOMAIN_GPUS_PER_NODE=4", "INTERDOMAIN_GPU_GIB must be"),
    ],
)
def test_a_bad_site_is_refused(slurm, tmp_path, refused, text, words):
    slurm("a")
    (tmp_path / "ours.env").write_text(text)
    refused(launch.main, ["--site", tmp_path / "ours.env", "--dry-run"], words)


@pytest.mark.parametrize(
    ("sent", "status", "meaning"),
    [
        ("", 1, 1),
        ("SIGUSR1", 137, CONTINUE),
        ("SIGTERM", 0, 0),
        ("SIGTERM", REFUSED, REFUSED),  # a full disk: the job would meet it again
        ("SIGINT", 1, 1),  # srun shows where its nodes stand, and goes on
    ],
)
def test_what_srun_s_end_means(sent, status, meaning):
    """A process in srun's place signals the launcher, which waits for it."""
    program = when_listening("SigIgn") + "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
    if sent:
        program += f"os.kill(launcher, signal.{sent})\n"
    program += f"sys.exit({status})"
    assert _slurm.run([sys.executable, "-c", program], {}) == meaning


@pytest.fixture
def run_script(tmp_path, monkeypatch):
    """run_script(launch_sh, scontrol, *argv): the end of the batch script with these programs in place of the real ones."""

    def run_script(launch_sh, scontrol, *argv):
        write_program(tmp_path / "launch.sh", launch_sh)
        write_program(tmp_path / "bin/scontrol", scontrol)
        command = ["bash", _slurm.SITES / "requeue.sbatch", *argv]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    return run_script


@pytest.mark.parametrize(
    ("code", "answer", "requeued"),
    [
        (1, "Restarts=12 BatchFlag=1", False),
        (CONTINUE, "Restarts=12 BatchFlag=1", True),
        # SLURM has started the job again since.
        (CONTINUE, "Restarts=13 BatchFlag=1", False),
        # Nobody answers: the node is cut off.
        (CONTINUE, "", False),
    ],
)
def test_the_batch_script_requeues_the_job_that_it_is_a_start_of(
    run_script, monkeypatch, code, answer, requeued
):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "12")
    done = run_script(f"echo $@ >&2; exit {code}", f"echo $@ >&2; echo ' {answer}'")
    assert done.returncode == code
    _, started, *calls = done.stderr.splitlines()
    assert started == "./train_configs/1.3B.toml --site plain"
    assert ("requeue 77" in calls) == requeued


def test_the_batch_script_finds_its_project_from_any_folder(run_script, tmp_path):
    scontrol = f"echo '   Command={tmp_path}/mine.sbatch x.toml'"
    done = run_script("echo $0 $@", scontrol)
    script = f"{tmp_path}/launch.sh"
    assert done.stdout == f"{script} {tmp_path}/train_configs/1.3B.toml --site plain\n"
    done = run_script("echo $0 $@", scontrol, "x.toml", "--mixer.condition", "s4d")
    assert done.stdout == f"{script} x.toml --mixer.condition s4d --site plain\n"


@pytest.mark.parametrize(
    ("variables", "argv", "words"),
    [
        ({}, "--site isambard", "alps, isambard-ai, plain, local"),
        ({"STEP_ID": "0", "STEP_NUM_TASKS": "2"}, "", "srun started this command 2 times"),
        ({"GPUS_ON_NODE": "all"}, "", "SLURM_GPUS_ON_NODE must be a number: got 'all'"),
        (NO_JOB, "--site alps", "--site alps needs a SLURM allocation"),
        (NO_JOB, "--site alps --nodes 2", "--nodes 2 is for --dry-run"),
        (NO_JOB, "--site local --nodes 2 --dry-run", "not for this machine only (local)"),
        (NO_JOB, "--nodes 2 --dry-run", "--site plain does not say how many ranks a node has"),
    ],
)
def test_a_bad_allocation_is_refused(slurm, refused, variables, argv, words):
    slurm("a", "b", **variables)
    refused(launch.main, argv.split(), words)


def test_a_list_of_nodes_that_scontrol_does_not_know_is_refused(slurm, tmp_path, refused):
    slurm("a")
    write_program(tmp_path / "bin/scontrol", "echo bad list >&2; exit 1")
    refused(launch.main, ["--dry-run"], "SLURM_JOB_NODELIST = 'a' (bad list)")


@pytest.mark.parametrize(
    ("variables", "argv"),
    [({}, ["--site", "local"]), ({"STEP_ID": "3", "STEP_NUM_TASKS": "1"}, [])],
    ids=["as asked", "in a shell that srun gave"],
)
def test_this_machine_alone(slurm, capsys, variables, argv):
    slurm("a", "b", **variables)
    assert "--standalone" in dry_run(capsys, *argv, "--ranks", "1")["command"]
