"""interdomain launch train_configs/125M.toml --mixer.condition s4d --dry-run

Check a training run and start it.

./launch.sh makes an environment and calls this. CONFIG.toml holds the settings; without it,
train_configs/debug.toml is used. SETTINGS are any that --flags lists; they win over the file. The
run uses every GPU of this machine, or the CPU with two ranks. Inside a SLURM allocation (sbatch,
salloc) it uses every GPU of every node. To continue a run that stopped, repeat its command.

    ./launch.sh
    ./launch.sh train_configs/125M.toml --mixer.condition softmax --job.dump_folder outputs/125M-softmax
    ./launch.sh train_configs/1.3B.toml --dry-run --ranks 8
    ./launch.sh train_configs/1.3B.toml --dry-run --site isambard-ai --nodes 8

Exit status: 0 finished; 2 refused, with the reason; 75 the same command continues the run; 130
ended by a second Ctrl-C; others are torchrun's

Documentation: docs/running.md; for SLURM docs/clusters.md
"""

import argparse
import glob
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from interdomain.checkpoint.step_folder import finished_steps
from interdomain.removed import removal_of
from interdomain.tools._cli import argument_parser, python_here, require_at_least, user_errors
from interdomain.tools._curves import EVENTS, read_curves
from interdomain.tools._start import slurm, torchrun
from interdomain.tools._start.torchrun import (
    CONTINUE,
    INTERRUPTED,
    REFUSED,
    command_here,
    torchrun_command,
)

if TYPE_CHECKING:
    from interdomain.titan.settings.schema import JobConfig

DEFAULT_CONFIG = "train_configs/debug.toml"
EMBEDDED_CORPUS = "data/stdlib"  # prepared on first use from the standard library's sources
CPU_RANKS = 2  # processes of a run on a machine without GPUs
# Values of CUDA_VISIBLE_DEVICES for no GPU: by the user, and by SLURM for a job without any.
NO_GPUS = ("", "-1", "NoDevFiles")
# Epochs after which data that are read again teach less than new data (arXiv 2305.16264).
MAX_EPOCHS = 4


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses a command line, on which the TOML file may stand anywhere.

    Returns:
        The launcher's own options, with the TOML file as `config`, and the flags of settings.
    """
    p = argument_parser(__doc__)
    p.prog = "./launch.sh"
    p.usage = "./launch.sh [CONFIG.toml] [OPTIONS] [SETTINGS]"
    p.add_argument(
        "--dry-run", action="store_true", help="check the settings, print what would run, and stop"
    )
    p.add_argument(
        "--flags", action="store_true", help="print every setting with its unit and value, and stop"
    )
    p.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="processes on each machine, at least 1 (default: one per GPU, or 2 on the CPU)",
    )
    p.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="with --dry-run: plan for N nodes of the site (default: the nodes of the SLURM job, else 1)",
    )
    p.add_argument(
        "--max-restarts", type=int, default=3, metavar="N", help="restarts of failed ranks"
    )
    p.add_argument(
        "--site",
        metavar="NAME",
        help="the cluster: a file of tools/sites, or the path of a NAME.env; local: this machine only, inside an allocation "
        "too (default: INTERDOMAIN_SITE, else plain)",
    )
    # Separate the TOML file and our own options from the flags of settings.
    files = [word for word in argv if word.endswith(".toml") and not word.startswith("-")]
    if len(files) > 1:
        raise ValueError(
            f"several configuration files: {', '.join(files)}. Give one, and change its settings by flags."
        )
    args, flags = p.parse_known_args([word for word in argv if word not in files])
    # Flags of settings are checked later, by TorchTitan's names. These have better answers.
    for flag in flags:
        name = flag.partition("=")[0]
        if removal := removal_of(name):
            raise ValueError(removal)
        if name.replace("-", "_") == "__job.config_file":
            raise ValueError(
                "give the configuration file without --job.config_file: ./launch.sh FILE.toml"
            )
    require_at_least(args, ranks=1, nodes=1)
    site = args.site or os.environ.get("INTERDOMAIN_SITE")
    if args.nodes and not args.dry_run:
        raise ValueError(
            f"--nodes {args.nodes} is for --dry-run. A run is on all nodes of its SLURM job: give --nodes to sbatch or salloc."
        )
    if args.nodes and site == slurm.LOCAL:
        raise ValueError(
            f"--nodes {args.nodes} is for nodes of a site, not for this machine only ({slurm.LOCAL}). Leave --nodes out, or "
            "name another --site."
        )
    args.config = DEFAULT_CONFIG
    if files:
        args.config = files[0]
    return args, flags


def refuse_idle_gpus() -> None:
    """Raises ValueError if there are GPUs that PyTorch cannot use.

    Otherwise a run would quietly be on the CPU.
    """
    gpus = sorted(glob.glob("/dev/nvidia[0-9]*"))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in NO_GPUS
    if gpus and not hidden and not torch.cuda.is_available():
        raise ValueError(
            f"this machine has GPUs ({', '.join(gpus)}), but PyTorch {torch.__version__} cannot use them. Install a CUDA build "
            "of PyTorch that fits the driver (INTERDOMAIN_PYTHON can name an environment that has one). To run on the CPU, "
            "set CUDA_VISIBLE_DEVICES=''."
        )


def warn(text: str) -> None:
    """Prints what may be a mistake of the user's."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def check_data(job: "JobConfig", dry_run: bool = False, samples: int = 0) -> str:
    """Opens the tokenizer and the data as the run will.

    The embedded corpus is prepared if it is not there. Data that are read many times are warned of.

    Args:
        job: The settings of the run.
        dry_run: True prepares nothing, and describes missing data instead of raising an error.
        samples: The number of sequences that the run reads.

    Returns:
        A description of the data.

    Raises:
        FileNotFoundError: Data are not there.
        ValueError: Data are damaged, or do not fit the settings.
    """
    from interdomain.titan.data.folders import open_dataset, open_tokenizer
    from interdomain.tools import prepare_data

    # The first run prepares the embedded corpus.
    is_prepared = (Path(EMBEDDED_CORPUS) / "manifest.json").is_file()
    if job.data.corpus == EMBEDDED_CORPUS and not is_prepared:
        if dry_run:
            return f"{EMBEDDED_CORPUS}, which the run prepares first"
        print(
            f"preparing {EMBEDDED_CORPUS} from the sources of Python's standard library", flush=True
        )
        if prepare_data.main(["--input", "stdlib", "--output", EMBEDDED_CORPUS]):
            raise SystemExit(REFUSED)
    # Open what the run will open.
    try:
        tokenizer = open_tokenizer(job)
        dataset = open_dataset(job, "train")
        line = (
            f"{job.data.corpus} ({dataset.num_tokens:,} tokens, vocabulary {tokenizer.vocab_size:,}"
        )
        if job.validation.enable:
            line += f", validation {open_dataset(job, 'validation').num_tokens:,}"
    except FileNotFoundError as e:
        if dry_run:
            return f"NOT HERE: {e}"
        raise
    line += ")"

    # How often the run reads each corpus.
    epochs = dataset.epochs(samples)
    if max(epochs) > 1:
        numbers = ", ".join(f"{number:,.2f}" for number in epochs)
        line += f", for {numbers} epochs"
    if max(epochs) > MAX_EPOCHS:
        warn(
            f"the run reads its data for {max(epochs):,.2f} epochs. After {MAX_EPOCHS} old tokens teach less than new ones: "
            "prepare more data, or set a smaller training.tokens."
        )
    return line


def next_steps(job: "JobConfig") -> str:
    """Returns commands that watch, convert and generate, ready to paste.

    Args:
        job: The settings of the finished run.
    """
    dump = Path(job.job.dump_folder)
    # TensorBoard shows all runs of a folder together.
    runs = dump
    if dump.parent.name:
        runs = dump.parent
    tensorboard = [python_here(), "-m", "tensorboard.main", "--logdir", str(runs)]
    lines = ["# watch", shlex.join(tensorboard)]
    # The newest checkpoint of the run can be converted, and the exported model writes text.
    if job.checkpoint.enable:
        export = f"exports/{dump.name}"
        convert = [*command_here("convert"), str(dump), "--output", export]
        generate = [*command_here("generate"), export, "--prompt", "def main("]
        lines += ["# convert to an exported model", shlex.join(convert)]
        lines += ["# generate", shlex.join(generate)]
    return "\n".join(lines)


@user_errors
def main(argv: list[str] | None = None) -> int:
    """Runs the command, by default with the process's arguments. Returns the exit status."""
    if argv is None:
        argv = sys.argv[1:]
    args, flags = parse(argv)

    # TorchTitan and tyro, of the extra `train`, are imported from here on.
    from interdomain.titan.plan.device import gpu_here
    from interdomain.titan.plan.dry_run import describe, summarize, table
    from interdomain.titan.plan.run_plan import make_plan
    from interdomain.titan.settings.job_config import read_job_config

    arguments = ["--job.config_file", args.config, *flags]
    if args.flags:
        arguments.append("--help")
    job = read_job_config(arguments)

    # The plan, and the command that starts it on this machine or on the nodes of an allocation.
    ranks = args.ranks or torch.cuda.device_count() or CPU_RANKS
    nodes = slurm.allocation(args.site, args.ranks, ranks, args.dry_run, args.nodes)
    on_gpus = False
    rows_of_nodes = {}
    gpu = gpu_here()
    command = []
    if nodes:
        on_gpus = nodes.has_gpus
        gpu = nodes.gpu or gpu
        rows_of_nodes = nodes.describe()
        plan = make_plan(job, nodes.ranks * nodes.n_nodes, on_gpus)
        # There is no command for nodes that no job has.
        if nodes.job:
            command = nodes.command(args.config, flags, args.max_restarts)
        if 0 < nodes.cpus < nodes.ranks:
            warn(
                f"the job has {nodes.cpus} CPU(s) for the {nodes.ranks} ranks of a node, which is slow. Give sbatch or salloc "
                "more, such as --ntasks-per-node=1 --cpus-per-task=N."
            )
    else:
        plan = make_plan(job, ranks)
        command = torchrun_command(args.config, flags, ranks, args.max_restarts)

    # A dry run prints the whole plan. It may be on a login node, without data and GPUs.
    samples = plan.steps * plan.global_batch
    if args.dry_run:
        rows = describe(plan, job, on_gpus, gpu) | rows_of_nodes
        if command:
            rows["command"] = shlex.join(command)
        print(table(rows), flush=True)
        data = check_data(job, dry_run=True, samples=samples)
        print(table({"data": data, "output": job.job.dump_folder}))
        return 0

    # A start prints the rows that tell the runs of a user apart.
    refuse_idle_gpus()
    rows = summarize(plan, job, check_data(job, samples=samples), on_gpus, gpu)
    print(table(rows | rows_of_nodes))
    print("--dry-run prints the whole plan.\n", flush=True)

    # Train.
    checkpoints = Path(job.job.dump_folder) / job.checkpoint.folder
    before = finished_steps(checkpoints).keys()
    if nodes:
        status = slurm.run(command, nodes.environment)
    else:
        environment = torchrun.environment(ranks)
        status = torchrun.run(command, environment)
    new = finished_steps(checkpoints).keys() - before
    if new and status not in (0, CONTINUE, REFUSED, INTERRUPTED):
        # A run that failed after it saved something new may get further in another start. The
        # status tells a scheduler to start it again.
        print(
            f"\nthe run failed (exit status {status}) after it saved step {max(new)}. The same command continues it, on "
            f"another machine if this one is broken (exit status {CONTINUE}).",
            file=sys.stderr,
        )
        return CONTINUE
    if status:
        return status

    # Print the result, and what can be done with it.
    events = Path(job.job.dump_folder) / job.metrics.save_tb_folder
    if any(events.glob(EVENTS)):
        perplexities = read_curves(events).get("validation_metrics/perplexity", {})
        for step, perplexity in sorted(perplexities.items()):
            print(f"validation perplexity {perplexity:.2f} at step {step}")
    print("\n" + next_steps(job))
    return 0


if __name__ == "__main__":
    sys.exit(main())
