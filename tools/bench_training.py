"""interdomain bench-training --output benchmarks/results/today

Time training steps by condition, size and sequence length.

Each case is a short run of TorchTitan with this plugin, on random tokens, on one GPU. Cases differ
in condition, torch.compile and activation checkpointing. The table has tokens per second, memory,
utilisation and loss, from the run's own log. A case that fails says why, and the others go on.
Without a GPU it trains a tiny model on the CPU, and the results say so.

    interdomain bench-training --sizes 350M --seq-len 4096 65536 --tokens 65536 \
        --output benchmarks/results/long
    interdomain bench-training --cases softmax:eager:none s4d:eager:none \
        --output benchmarks/results/eager
    interdomain bench-training --ranks 2 --seq-len 16384 262144 --cases interdomain:eager:full \
        --output benchmarks/results/context --train-flags --parallelism.context_parallel_degree 2

Documentation: docs/measurements.md
"""

import argparse
import importlib
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from interdomain.checkpoint.run_folder import events_of
from interdomain.model import CONDITIONS
from interdomain.tools._bench import results
from interdomain.tools._bench.timing import ratio
from interdomain.tools._cli import argument_parser, user_errors
from interdomain.tools._curves import EVENTS, Curves, read_curves
from interdomain.tools._start import torchrun

TRAIN_CONFIGS = Path(__file__).resolve().parents[1] / "train_configs"
CONFIGS = {path.stem: path for path in sorted(TRAIN_CONFIGS.glob("*.toml"))}
# Tags of a run's scalars.
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
LAST_LINES = 40  # lines of a failed run's output that are shown

# CONDITION:compilation:activation checkpointing, where the condition is the name of the layers'
# mixer, such as softmax. The most telling cases come first, and softmax before what is compared
# with it.
CASES = (
    "softmax:compile:selective",
    "interdomain:compile:selective",
    "s4d:compile:selective",
    "softmax:compile:none",
    "interdomain:compile:none",
    "softmax:eager:selective",
    "interdomain:eager:selective",
    "softmax:compile:full",
    "interdomain:compile:full",
)
TINY_CASES = ("softmax:eager:none", "interdomain:eager:none")
CASE = "CONDITION:compile|eager:none|selective|full"


@dataclass(frozen=True)
class Run:
    """One case at one size and length.

    Attributes:
        case: CONDITION:compile|eager:none|selective|full.
        config: The TOML file of the size.
        batch_size: Sequences in a step, over all ranks.
        seq_len: Tokens of a sequence.
        steps: Training steps.
        log_freq: Steps between two logs.
        ranks: Processes.
        limit: The longest time that the run may take, in seconds.
        train_flags: More flags of the trainer.
    """

    case: str
    config: Path
    batch_size: int
    seq_len: int
    steps: int
    log_freq: int
    ranks: int
    limit: float
    train_flags: list[str]


def flags(run: Run, data: Path, output: Path) -> list[str]:
    """Returns the trainer's flags on top of the size's TOML file.

    They make the run short, on random tokens, and let it save nothing.

    Args:
        run: The run.
        data: The folder that `write_data` filled.
        output: The folder of the run.
    """
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
    # Flags without a value.
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
    """Writes random ids as a corpus, and a tokenizer, which the trainer opens and never uses.

    Args:
        folder: An empty folder.
        vocabulary: The number of different ids.
        tokens: The number of ids.
    """
    import numpy as np

    from interdomain.data.indexed import IndexedDatasetWriter
    from interdomain.data.tokenizer import train_sentencepiece

    # A tokenizer may be smaller than the vocabulary of a model, not larger: this one fits every
    # model.
    tokenizer = train_sentencepiece([Path(__file__).read_text()], 512)
    (folder / "tokenizer.model").write_bytes(tokenizer)
    # One long document.
    with IndexedDatasetWriter(folder / "random", vocabulary) as writer:
        writer.add_document(np.random.default_rng(0).integers(0, vocabulary, tokens))


def run_case(run: Run, data: Path) -> dict[str, Any]:
    """Trains from start to end. Returns a row of the table.

    Args:
        run: The run.
        data: The folder that `write_data` filled. The run's folder and its log are written there.
    """
    output = data / "run"
    command = torchrun.torchrun_command(str(run.config), flags(run, data, output), run.ranks)
    environment = torchrun.environment(run.ranks) | {"TQDM_DISABLE": "1"}

    # The run in processes of its own, which may fail or hang.
    log = data / "log.txt"
    problem = None
    with open(log, "w") as f:
        try:
            done = subprocess.run(
                command, stdout=f, stderr=subprocess.STDOUT, env=environment, timeout=run.limit
            )
            if done.returncode:
                problem = f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:  # torchrun was killed, and its ranks end with it
            problem = f"cut after {run.limit:.0f} s"

    # A run that failed has figures, too, if it came to a steady step.
    events = events_of(output)
    curves = {}
    if any(events.glob(EVENTS)):
        curves = read_curves(events)
    row = {"case": run.case, **figures(curves, run)}
    # A failed run says why in the table, and shows its last lines.
    if problem:
        printed = log.read_text(errors="replace")
        row["remark"] = explain(problem, printed)
        print(*printed.splitlines()[-LAST_LINES:], sep="\n", file=sys.stderr, flush=True)
    elif "tokens/s" not in row:
        row["remark"] = f"no steady step was logged in {run.steps} steps"
    return row


def explain(problem: str, printed: str) -> str:
    """Returns the reason of a failed run in one line, from what it printed.

    Args:
        problem: How it ended, such as "exit status 1".
        printed: Its output.
    """
    if "OutOfMemoryError" in printed:
        return "out of memory"
    # The last words of torchrun, a ChildFailedError, only repeat the exit status.
    errors = re.findall(r"^(?!.*ChildFailedError).*(?:error:|Error: ).*$", printed, re.MULTILINE)
    last_error = errors[-1].strip() if errors else "no word"
    return results.without_paths(f"{problem}: {last_error}")[:300]


def figures(curves: Curves, run: Run) -> dict[str, Any]:
    """Returns the run's speed, its highest memory, and its last loss.

    Speeds are medians over the steady windows between two logs.

    A run logs after its first step, and then every `log_freq` steps. Before the second of these
    logs come compilation, autotuning and growing memory pools. They are left out.

    Args:
        curves: The scalars that the run logged: {tag: {step: value}}.
        run: The run.
    """
    # Memory and loss are known from the first log on.
    row = {}
    if MEMORY in curves:
        row["GiB reserved"] = max(curves[MEMORY].values())
    if LOSS in curves:
        row["loss"] = curves[LOSS][max(curves[LOSS])]
    # Speed and utilisation are known from the second log on.
    speed = curves.get(SPEED, {})
    steady = [step for step in speed if step > run.log_freq]
    if steady:
        row["tokens/s"] = statistics.median(speed[step] for step in steady)
        row["ms a step"] = 1e3 * run.batch_size * run.seq_len / (row["tokens/s"] * run.ranks)
        if torch.cuda.is_available() and MFU in curves:  # on a CPU it has no meaning
            row["MFU %"] = statistics.median(curves[MFU][step] for step in steady)
    return row


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line. If `argv` is None, it is that of the process."""
    p = argument_parser(__doc__)
    results.add_output(p, "training")
    p.add_argument(
        "--sizes",
        nargs="+",
        choices=CONFIGS,
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
        help=f"{CASE}: condition, torch.compile, activation checkpointing "
        f"(default: {' '.join(CASES)}; on a CPU two)",
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


def check_cases(cases: list[str]) -> None:
    """Checks the option --cases.

    Raises:
        ValueError: A case has another form, or names an unknown condition.
    """
    for case in cases:
        condition, _, options = case.partition(":")
        if condition not in CONDITIONS or not re.fullmatch(
            "(compile|eager):(none|selective|full)", options
        ):
            raise ValueError(
                f"--cases must be {CASE}: got {case}. CONDITION is one of {', '.join(CONDITIONS)}."
            )


@user_errors
def main(argv: list[str] | None = None) -> int:
    """Runs the command, by default with the process's arguments. Returns the exit status."""
    args = parse(argv)
    # The trainer chooses its GPUs by itself.
    device = results.choose_device("auto")
    results.fill_in(
        args,
        device,
        sizes=(["1.3B"], ["debug"]),
        seq_len=([4096], [64]),
        tokens=(16_384, 128),
        steps=(20, 3),
        cases=(CASES, TINY_CASES),
    )
    check_cases(args.cases)
    options = {}
    for name in ("sizes", "seq_len", "tokens", "steps", "ranks", "train_flags"):
        options[name] = getattr(args, name)
    report = results.Report(args.name, args.output, device, options)

    # Random ids need the sizes of the vocabularies. To read a configuration, TorchTitan and what it
    # imports must be there.
    vocabularies = {}
    try:
        for name in ("tensorboard", "torchdata"):
            importlib.import_module(name)
        from interdomain.titan.plan.run_plan import model_config
        from interdomain.titan.settings.job_config import read_job_config

        for size in args.sizes:
            vocabularies[size] = model_config(
                read_job_config(["--job.config_file", str(CONFIGS[size])])
            ).vocab_size
    except ImportError as e:
        report.note(
            f"Skipped: {e.name or e} cannot be imported; "
            "the extra `train` installs what training needs."
        )
        report.finish("skipped")
        return 0

    # A table for each size and length, with a row for each case.
    measured = 0
    for size in args.sizes:
        for seq_len in args.seq_len:
            # As many sequences as make the tokens of a step, and at least one.
            batch_size = max(1, args.tokens // seq_len)
            table = f"{size}, {batch_size} x {seq_len:,} tokens per step"
            report.table(table, COLUMNS)
            speeds = {}
            for case in args.cases:
                print(f"{table}: {case}", file=sys.stderr, flush=True)
                run = Run(
                    case=case,
                    config=CONFIGS[size],
                    batch_size=batch_size,
                    seq_len=seq_len,
                    steps=args.steps,
                    log_freq=5 if device.type == "cuda" else 1,
                    ranks=args.ranks,
                    limit=args.case_limit,
                    train_flags=args.train_flags,
                )
                # Each case has its data and its folder, which are removed after it.
                with tempfile.TemporaryDirectory() as folder:
                    tokens = (args.steps + 1) * batch_size * (seq_len + 1)
                    write_data(Path(folder), vocabularies[size], tokens)
                    row = run_case(run, Path(folder))
                # Softmax with the same settings, if it came before.
                speeds[case] = row.get("tokens/s")
                _, _, settings = case.partition(":")
                row["over softmax"] = ratio(speeds[case], speeds.get(f"softmax:{settings}"))
                report.add(table, row)
                measured += "tokens/s" in row
    n_cases = len(args.sizes) * len(args.seq_len) * len(args.cases)
    report.finish(counts=f"{measured} of {n_cases} cases measured")
    return 0


if __name__ == "__main__":
    sys.exit(main())
