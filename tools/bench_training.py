"""interdomain bench-training --output benchmarks/results/today

Time training steps by condition, size and sequence length.

Each case is a short run of TorchTitan with this plugin, on random tokens, on one GPU. Cases differ in condition,
torch.compile and activation checkpointing. The table has tokens per second, memory, utilisation and loss, from the
run's own log. A case that fails says why, and the others go on. Without a GPU it trains a tiny model on the CPU, and
the results say so.

    interdomain bench-training --sizes 350M --seq-len 4096 65536 --tokens 65536 --output benchmarks/results/long
    interdomain bench-training --cases softmax:eager:none s4d:eager:none --output benchmarks/results/eager
    interdomain bench-training --ranks 2 --seq-len 16384 262144 --cases interdomain:eager:full \
        --output benchmarks/results/context --train-flags --parallelism.context_parallel_degree 2

Documentation: docs/benchmarks.md
"""

import argparse
import importlib
import itertools
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from interdomain.checkpoint.run_folder import events_of
from interdomain.model import CONDITIONS
from interdomain.tools import launch
from interdomain.tools._bench import results
from interdomain.tools._bench.timing import ratio
from interdomain.tools._cli import argument_parser, user_errors
from interdomain.tools._curves import EVENTS, Curves, read_curves
from interdomain.tools._start import torchrun

CONFIGS = Path(__file__).resolve().parents[1] / "train_configs"
# Scalars of a run.
SPEED = "throughput(tps)"
MFU = "mfu(%)"
MEMORY = "memory/max_reserved(GiB)"
LOSS = "loss_metrics/global_avg_loss"
COLUMNS = [
    "case",
    "tokens/s",
    "over softmax",
    "ms a step",
    "MFU %",
    "GiB reserved",
    "loss",
    "remark",
]
LAST_LINES = 40  # of a failed run's output, on standard error

# A run that is cut should not lose the first ones. Softmax before what is compared with it.
CASES = (
    *("softmax:compile:selective", "interdomain:compile:selective", "s4d:compile:selective"),
    *(
        "softmax:compile:none",
        "interdomain:compile:none",
        "softmax:eager:selective",
        "interdomain:eager:selective",
    ),
    *("softmax:compile:full", "interdomain:compile:full"),
)
TINY_CASES = ("softmax:eager:none", "interdomain:eager:none")
CASE = "CONDITION:compile|eager:none|selective|full"  # compilation, activation checkpointing
CHOICES = (tuple(CONDITIONS), ("compile", "eager"), ("none", "selective", "full"))


@dataclass(frozen=True)
class Run:
    """One case at one size and length."""

    case: str
    config: Path
    batch_size: int
    seq_len: int
    steps: int
    log_freq: int
    ranks: int
    limit: float  # seconds
    train_flags: list[str]


def flags(run: Run, data: Path, output: Path) -> list[str]:
    """Flags on top of the size's TOML file: the same run, but short, on random tokens, saving nothing."""
    condition, mode, checkpointing = run.case.split(":")
    values = {
        "job.dump_folder": output,
        "mixer.condition": condition,
        "activation_checkpoint.mode": checkpointing,
        "data.corpus": data / "random",
        "data.tokenizer": data / "tokenizer.model",
        "training.seq_len": run.seq_len,
        "training.steps": run.steps,
        "training.tokens": 0,
        "training.local_batch_size": run.batch_size,
        "training.global_batch_size": run.batch_size,
        "lr_scheduler.warmup_tokens": 0,
        "lr_scheduler.warmup_steps": 1,
        "metrics.log_freq": run.log_freq,
        "metrics.mixer_freq": 0,
    }
    words = [
        "--validation.no-enable",
        "--checkpoint.no-enable",
        "--metrics.enable_tensorboard",
        "--metrics.disable_color_printing",
        "--compile.enable" if mode == "compile" else "--compile.no-enable",
    ]
    for name, value in values.items():
        words += [f"--{name}", str(value)]
    return [*words, *run.train_flags]


def write_data(folder: Path, vocabulary: int, tokens: int) -> None:
    """Random ids as a bare shard, and a tokenizer to satisfy the trainer, which never encodes a word here."""
    import numpy as np

    from interdomain.data.indexed import IndexedDatasetWriter
    from interdomain.data.tokenizer import train_sentencepiece

    # Every model's vocabulary is larger.
    (folder / "tokenizer.model").write_bytes(train_sentencepiece([Path(__file__).read_text()], 512))
    with IndexedDatasetWriter(folder / "random", vocabulary) as writer:
        writer.add_document(np.random.default_rng(0).integers(0, vocabulary, tokens))


def run_case(run: Run, data: Path, output: Path) -> dict:
    """One run from start to end: a row of the table."""
    command = torchrun.torchrun_command(str(run.config), flags(run, data, output), run.ranks)
    env = torchrun.environment(run.ranks) | {"TQDM_DISABLE": "1"}
    log = data / "log.txt"
    problem = None
    with open(log, "w") as f:
        try:
            done = subprocess.run(
                command, stdout=f, stderr=subprocess.STDOUT, env=env, timeout=run.limit
            )
            if done.returncode:
                problem = f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:  # torchrun was killed, and its ranks die with it
            problem = f"cut after {run.limit:.0f} s"
    events = events_of(output)
    curves = read_curves(events) if any(events.glob(EVENTS)) else {}
    row = {"case": run.case, **figures(curves, run)}
    if problem:
        output_of_run = log.read_text(errors="replace")
        row["remark"] = explain(problem, output_of_run)
        print(*output_of_run.splitlines()[-LAST_LINES:], sep="\n", file=sys.stderr, flush=True)
    elif "tokens/s" not in row:
        row["remark"] = f"no steady step was logged in {run.steps} steps"
    return row


def explain(problem: str, log: str) -> str:
    """The reason of a failed run in one line, from what it printed."""
    if "OutOfMemoryError" in log:
        return "out of memory"
    # torchrun's own last words, of a ChildFailedError, only repeat the exit status.
    errors = re.findall(r"^(?!.*ChildFailedError).*(?:error:|Error: ).*$", log, re.MULTILINE)
    return results.without_paths(f"{problem}: {errors[-1].strip() if errors else 'no word'}")[:300]


def figures(curves: Curves, run: Run) -> dict:
    """Medians over the steady windows between two logs; the highest memory; the last loss.

    A run logs after its first step and then every `log_freq`; what comes before the second of these is compilation,
    autotuning and growing memory pools, and is left out.
    """
    speed = curves.get(SPEED, {})
    loss = curves.get(LOSS, {})
    row = {
        "GiB reserved": max(curves.get(MEMORY, {}).values(), default=None),
        "loss": loss[max(loss)] if loss else None,
    }
    steady = [step for step in speed if step > run.log_freq]
    if steady:
        row["tokens/s"] = statistics.median(speed[step] for step in steady)
        row["ms a step"] = 1e3 * run.batch_size * run.seq_len / (row["tokens/s"] * run.ranks)
        if torch.cuda.is_available() and MFU in curves:  # a CPU has none
            row["MFU %"] = statistics.median(curves[MFU][step] for step in steady)
    return row


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    results.add_arguments(p, "training", "auto; to choose a GPU, set CUDA_VISIBLE_DEVICES")
    p.add_argument(
        "--sizes",
        nargs="+",
        metavar="SIZE",
        help="files in train_configs (default: 1.3B; on a CPU debug)",
    )
    p.add_argument(
        "--seq-len",
        type=int,
        nargs="+",
        metavar="N",
        help="in tokens (default: 4096; on a CPU 64)",
    )
    p.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="tokens per step (default: 16384; on a CPU 128)",
    )
    p.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="steps of a case, at least 1 (default: 20; on a CPU 3)",
    )
    p.add_argument(
        "--cases",
        nargs="+",
        metavar="CASE",
        help=f"{CASE}: condition, torch.compile, activation checkpointing (default: {' '.join(CASES)}; on a CPU two)",
    )
    p.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="processes; tokens/s and memory are of each (1)",
    )
    p.add_argument(
        "--case-limit",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds that a case may take",
    )
    p.add_argument(
        "--train-flags",
        nargs=argparse.REMAINDER,
        default=[],
        help="settings of every case, as --train-flags --mixer.backend fft; must come last",
    )
    return p.parse_args(argv)


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    device = results.choose_device(args.device)
    if args.device != "auto":
        raise ValueError(
            f"--device must be auto here: got {args.device}. Set CUDA_VISIBLE_DEVICES to choose a GPU."
        )
    defaults = dict(
        sizes=(["1.3B"], ["debug"]), seq_len=([4096], [64]), tokens=(16_384, 128), steps=(20, 3)
    )
    results.fill_in(args, device, **defaults, cases=(CASES, TINY_CASES))
    for case in args.cases:
        if tuple(case.split(":")) not in itertools.product(*CHOICES):
            raise ValueError(
                f"--cases must be {CASE}: got {case}. CONDITION is one of {', '.join(CONDITIONS)}."
            )
    configs = {path.stem: path for path in sorted(CONFIGS.glob("*.toml"))}
    results.choose("--sizes", args.sizes, configs)
    shown = ("sizes", "seq_len", "tokens", "steps", "ranks", "train_flags")
    report = results.Report(
        args.name, args.output, device, {name: getattr(args, name) for name in shown}
    )

    # The sizes of the vocabularies. This imports TorchTitan and what it imports, some of it only to read a configuration.
    try:
        for name in ("tensorboard", "torchdata"):
            importlib.import_module(name)
        from interdomain.titan.plan.run_plan import model_config

        vocabularies = {}
        for size in args.sizes:
            vocabularies[size] = model_config(launch.job_config(str(configs[size]), [])).vocab_size
    except ImportError as e:
        report.note(
            f"Skipped: {e.name or e} cannot be imported; the extra `train` installs what training needs."
        )
        report.finish("skipped")
        return 0

    measured = 0
    cases = list(itertools.product(args.sizes, args.seq_len, args.cases))
    for i, (size, length, case) in enumerate(cases, 1):
        batch = max(1, args.tokens // length)
        table = f"{size}, {batch} x {length:,} tokens per step"
        if case == args.cases[0]:
            report.table(table, COLUMNS)
        print(f"{table}, {i} of {len(cases)}: {case}", file=sys.stderr, flush=True)
        run = Run(
            case=case,
            config=configs[size],
            batch_size=batch,
            seq_len=length,
            steps=args.steps,
            log_freq=5 if device.type == "cuda" else 1,
            ranks=args.ranks,
            limit=args.case_limit,
            train_flags=args.train_flags,
        )
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_data(folder, vocabularies[size], (args.steps + 1) * batch * (length + 1))
            row = run_case(run, folder, folder / "run")
        # Softmax with the same settings, if it came before.
        same_settings = "softmax:" + case.partition(":")[2]
        speeds = {other["case"]: other.get("tokens/s") for other in [*report.rows(table), row]}
        row["over softmax"] = ratio(row.get("tokens/s"), speeds.get(same_settings))
        report.add(table, row)
        measured += "tokens/s" in row
    report.finish(counts=f"{measured} of {len(cases)} cases measured")
    return 0


if __name__ == "__main__":
    sys.exit(main())
