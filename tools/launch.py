"""interdomain launch train_configs/125M.toml --mixer.condition s4d --dry-run

Check a training run and start it.

./launch.sh makes an environment and calls this. CONFIG.toml holds the settings; without it, train_configs/debug.toml is
used. SETTINGS are any that --flags lists; they win over the file. The run uses every GPU of this machine, or the CPU
with two ranks. Inside a SLURM allocation (sbatch, salloc) it uses every GPU of every node. To continue a run that
stopped, repeat its command.

    ./launch.sh
    ./launch.sh train_configs/125M.toml --mixer.condition softmax --job.dump_folder outputs/125M-softmax
    ./launch.sh train_configs/1.3B.toml --dry-run --ranks 8

Exit status: 0 finished; 2 refused, with the reason; 75 the same command continues the run; 130 ended by a second Ctrl-C;
others are torchrun's

Documentation: docs/running.md; for SLURM docs/clusters.md
"""

import argparse
import glob
import os
import shlex
import sys
from pathlib import Path

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

DEFAULT_CONFIG = "train_configs/debug.toml"
EMBEDDED_CORPUS = "data/stdlib"  # prepared on first use from the standard library's sources
CPU_RANKS = 2
NO_GPUS = (
    "",
    "-1",
    "NoDevFiles",
)  # of CUDA_VISIBLE_DEVICES: by the user, by SLURM for a job without any


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns: our own arguments, and the flags of settings. The TOML file may stand anywhere."""
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
        "--max-restarts", type=int, default=3, metavar="N", help="restarts of failed ranks"
    )
    p.add_argument(
        "--site",
        metavar="NAME",
        help="the cluster: a file of tools/sites, or the path of a NAME.env; local: this machine alone, inside an allocation "
        "too (default: INTERDOMAIN_SITE, else plain)",
    )
    files = [word for word in argv if word.endswith(".toml") and not word.startswith("-")]
    if len(files) > 1:
        raise ValueError(
            f"several configuration files: {', '.join(files)}. Give one, and change its settings by flags."
        )
    args, flags = p.parse_known_args([word for word in argv if word not in files])
    for flag in flags:
        name = flag.partition("=")[0]
        if removal := removal_of(name):
            raise ValueError(removal)
        if name.replace("-", "_") == "__job.config_file":
            raise ValueError(
                "give the configuration file without --job.config_file: ./launch.sh FILE.toml"
            )
    require_at_least(args, ranks=1)
    args.config = files[0] if files else DEFAULT_CONFIG
    return args, flags


def job_config(config: str, flags: list[str]):
    """Raises: ValueError, FileNotFoundError."""
    from interdomain.titan.settings.job_config import read_job_config

    return read_job_config(["--job.config_file", config, *flags])


def refuse_idle_gpus() -> None:
    """Raises: ValueError where there are GPUs that PyTorch cannot use: what was started would quietly be on the CPU."""
    gpus = sorted(glob.glob("/dev/nvidia[0-9]*"))
    if (
        gpus
        and not torch.cuda.is_available()
        and os.environ.get("CUDA_VISIBLE_DEVICES") not in NO_GPUS
    ):
        raise ValueError(
            f"this machine has GPUs ({', '.join(gpus)}), but PyTorch {torch.__version__} cannot use them. Install a CUDA build "
            "of PyTorch that fits the driver (INTERDOMAIN_PYTHON can name an environment that has one). To run on the CPU, "
            "set CUDA_VISIBLE_DEVICES=''."
        )


def check_data(job, dry_run: bool = False) -> str:
    """Open the tokenizer and the data, as the run will. A dry run does not prepare the embedded corpus if it is missing."""
    from interdomain.titan.data.folders import open_dataset, open_tokenizer
    from interdomain.tools import prepare_data

    if (
        job.data.corpus == EMBEDDED_CORPUS
        and not (Path(EMBEDDED_CORPUS) / "manifest.json").is_file()
    ):
        if dry_run:
            return f"{EMBEDDED_CORPUS}, which the run prepares first"
        print(
            f"preparing {EMBEDDED_CORPUS} from the sources of Python's standard library", flush=True
        )
        if prepare_data.main(["--input", "stdlib", "--output", EMBEDDED_CORPUS]):
            raise SystemExit(2)
    try:
        tokenizer, train = open_tokenizer(job), open_dataset(job, "train")
    except FileNotFoundError as e:
        if dry_run:
            return f"NOT HERE: {e}"
        raise
    line = f"{job.data.corpus} ({train.num_tokens:,} tokens, vocabulary {tokenizer.vocab_size:,}"
    if job.validation.enable:
        line += f", validation {open_dataset(job, 'validation').num_tokens:,}"
    return f"{line})"


def next_steps(job, plan) -> str:
    """Commands that watch, convert and generate, ready to paste."""
    dump = Path(job.job.dump_folder)
    # The folder in which runs lie beside each other: TensorBoard shows them together.
    runs = dump.parent if dump.parent.name else dump
    lines = [
        "# watch",
        shlex.join([python_here(), "-m", "tensorboard.main", "--logdir", str(runs)]),
    ]
    if job.checkpoint.enable:
        folder = dump / job.checkpoint.folder
        step = max(finished_steps(folder), default=plan.steps)
        export = f"exports/{dump.name}-step{step}"
        convert = [*command_here("convert"), str(folder / f"step-{step}"), "--output", export]
        generate = [*command_here("generate"), export, "--prompt", "def main("]
        lines += [
            "# convert to a standalone folder",
            shlex.join(convert),
            "# generate",
            shlex.join(generate),
        ]
    return "\n".join(lines)


@user_errors
def main(argv=None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    args, flags = parse(argv)
    job = job_config(args.config, [*flags, "--help"] if args.flags else flags)

    from interdomain.titan.plan.dry_run import describe
    from interdomain.titan.plan.run_plan import make_plan
    from interdomain.titan.plan.schedule import check_jump

    # The plan, and the command that carries it out here or on the nodes of an allocation.
    ranks = args.ranks or torch.cuda.device_count() or CPU_RANKS
    nodes = slurm.allocation(args.site, args.ranks, ranks)
    on_gpus = False
    if nodes:
        on_gpus = nodes.has_gpus
        plan = make_plan(job, nodes.ranks * len(nodes.hosts), on_gpus)
        command = nodes.command(args.config, flags, args.max_restarts)
    else:
        plan = make_plan(job, ranks)
        command = torchrun_command(args.config, flags, ranks, args.max_restarts)
    check_jump(job, plan.steps, plan.warmup_steps)
    print(describe(plan, job, on_gpus))
    if nodes:
        print(nodes.describe())
    print(f"{'command':>18}  {shlex.join(command)}", flush=True)
    if args.dry_run:
        print(f"{'data':>18}  {check_data(job, dry_run=True)}")
        return 0
    refuse_idle_gpus()
    print(f"{'data':>18}  {check_data(job)}")
    print(f"{'output':>18}  {job.job.dump_folder}\n", flush=True)

    checkpoints = Path(job.job.dump_folder) / job.checkpoint.folder
    before = finished_steps(checkpoints).keys()
    code = (
        slurm.run(command, nodes.environment)
        if nodes
        else torchrun.run(command, torchrun.environment(ranks))
    )
    if code not in (0, CONTINUE, REFUSED, INTERRUPTED):
        # A run that failed after it saved something new may get further when it is started again.
        new = finished_steps(checkpoints).keys() - before
        if new:
            failed = f"the run failed (exit status {code}) after it saved step {max(new)}"
            advice = f"The same command continues it, on another machine if this one is broken (exit status {CONTINUE})"
            print(f"\n{failed}. {advice}.", file=sys.stderr)
            return CONTINUE
    if code:
        return code

    events = Path(job.job.dump_folder) / job.metrics.save_tb_folder
    if any(events.glob(EVENTS)):
        measured = read_curves(events).get("validation_metrics/perplexity", {})
        for step, value in sorted(measured.items()):
            print(f"validation perplexity {value:.2f} at step {step}")
    print("\n" + next_steps(job, plan))
    return 0


if __name__ == "__main__":
    sys.exit(main())
