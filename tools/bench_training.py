"""python -m interdomain.tools.bench_training --output benchmarks/results/today

Time real training steps: TorchTitan with this plugin, started by torchrun as launch.sh does, on random tokens, by condition,
with torch.compile and activation checkpointing on and off, over sizes and sequence lengths. Tokens per second, memory,
utilisation and loss are the run's own, from its TensorBoard events. A case that fails says so and the others go on. Without a
GPU: a tiny model, labelled.
"""

import argparse
import gzip
import importlib.util
import json
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from . import _apart, launch
from ._bench import Deadline, Report, add_arguments, choose, choose_device, say, without_paths
from ._cli import argument_parser, user_errors
from ._curves import EVENTS, FOLDER, Curves, read_curves
from ._timing import ratio

# Imported where they are used: a machine that lacks one still gets the other parts.
NEEDED = ("torchtitan", "torchdata", "tensorboard", "sentencepiece")
COLUMNS = [
    *(
        "case",
        "tokens/s",
        "over softmax",
        "ms a step",
        "GiB reserved",
        "GiB active",
        "TFLOP/s",
        "MFU %",
        "loss",
        "seconds",
    ),
    "remark",
]
TAGS = {  # column: scalar of the run
    "tokens/s": "throughput(tps)",
    "TFLOP/s": "tflops",
    "MFU %": "mfu(%)",
    "GiB reserved": "memory/max_reserved(GiB)",
    "GiB active": "memory/max_active(GiB)",
    "loss": "loss_metrics/global_avg_loss",
}
CHECKPOINTING = ("none", "selective", "full")
LAST_LINES = 40  # of a failed run's words, on standard error
TRACED, TRACE_WARMUP = 3, 2  # steps
TOP_KERNELS = 20
KERNEL_COLUMNS = ["kernel", "ms a step", "% of GPU time", "calls a step"]
LENGTHS = "tokens/s of interdomain over softmax, by sequence length"
TOKENIZER_SIZE = 512  # any that this file's own text can train; every model's vocabulary is larger


@dataclass(frozen=True)
class Case:
    """CONDITION:compile|eager:none|selective|full[:kept]; `kept` is --mixer.recompute False."""

    condition: str
    compiled: bool = True
    checkpointing: str = "selective"
    kept: bool = False

    def __str__(self) -> str:
        words = [
            self.condition,
            "compile" if self.compiled else "eager",
            self.checkpointing,
            "kept" if self.kept else "",
        ]
        return ":".join(word for word in words if word)

    @classmethod
    def parse(cls, text: str, conditions) -> "Case":
        """Raises: ValueError with what is allowed."""
        condition, *words = text.split(":")
        choices = ("compile", "eager"), CHECKPOINTING, ("kept",)
        good = condition in conditions and len(words) <= 3
        if not good or any(word not in allowed for word, allowed in zip(words, choices, strict=False)):
            raise ValueError(
                f"--cases {text}: expected CONDITION[:compile|eager[:{'|'.join(CHECKPOINTING)}[:kept]]], CONDITION one of "
                f"{', '.join(conditions)}."
            )
        mode, checkpointing, kept = (*words, *("compile", "selective", "")[len(words) :])
        return cls(condition, mode == "compile", checkpointing, kept == "kept")


# A short time limit should not lose the first ones. Softmax before what is compared with it.
CASES = (
    *("softmax:compile:selective", "interdomain:compile:selective", "s4d:compile:selective"),
    *("interdomain:compile:selective:kept", "softmax:compile:none", "interdomain:compile:none"),
    *("softmax:eager:selective", "interdomain:eager:selective", "softmax:compile:full", "interdomain:compile:full"),
)
TINY_CASES = ("softmax:eager:none", "interdomain:eager:none")


def flags(case: Case, args, data: Path, output: Path) -> list[str]:
    """Flags on top of the size's TOML file: the same run, but short, on random tokens, saving nothing."""
    batch = args.batch_size * args.ranks
    return [
        *("--job.dump_folder", str(output)),
        *("--mixer.condition", case.condition),
        *(("--mixer.recompute", "False") if case.kept else ()),
        *("--data.corpus", str(data / "random"), "--data.tokenizer", str(data / "tokenizer.model")),
        *("--training.seq_len", str(args.seq_len)),
        *("--training.tokens", "0", "--training.steps", str(args.steps)),
        *("--training.local_batch_size", str(args.batch_size), "--training.global_batch_size", str(batch)),
        *("--lr_scheduler.warmup_tokens", "0", "--lr_scheduler.warmup_steps", "1"),
        "--compile.enable" if case.compiled else "--compile.no-enable",
        *("--activation_checkpoint.mode", case.checkpointing),
        *("--validation.no-enable", "--checkpoint.no-enable"),
        "--metrics.enable_tensorboard",
        *("--metrics.log_freq", str(args.log_freq), "--metrics.mixer_freq", "0", "--metrics.histogram_freq", "0"),
        "--metrics.disable_color_printing",
        *(trace_flags(args) if args.trace else ()),
        *args.train_flags,
    ]


def trace_flags(args) -> list[str]:
    """TorchTitan's own profiler on the last steps, after those that are timed."""
    return [
        *("--profiling.enable_profiling", "--profiling.save_traces_folder", "traces"),
        *("--profiling.profile_freq", str(args.steps), "--profiling.profiler_active", str(TRACED)),
        *("--profiling.profiler_warmup", str(TRACE_WARMUP)),
    ]


def top_kernels(trace: Path, steps: int = TRACED) -> list[dict]:
    """Rows of the kernels that took most GPU time in a trace of torch.profiler, and of all together."""
    total = {}
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            taken = total.setdefault(event["name"], [0.0, 0])
            taken[0] += event.get("dur", 0) / 1e3
            taken[1] += 1
    ordered = sorted(((name, *taken) for name, taken in total.items()), key=lambda taken: -taken[1])
    every = sum(ms for _, ms, _ in ordered)
    shown = [*ordered[:TOP_KERNELS], *([("all", every, sum(calls for _, _, calls in ordered))] if ordered else [])]
    return [
        {
            "kernel": name[:120],
            "ms a step": ms / steps,
            "% of GPU time": 100 * ms / every,
            "calls a step": calls / steps,
        }
        for name, ms, calls in shown
    ]


def write_data(folder: Path, vocabulary: int, tokens: int) -> None:
    """Random ids as a bare shard, and a tokenizer to satisfy the trainer, which never encodes a word here."""
    import numpy as np

    from interdomain.data.indexed import IndexedDatasetWriter

    from .train_tokenizer import train_sentencepiece

    text = Path(__file__).read_text()
    model = train_sentencepiece([SimpleNamespace(text=text)], TOKENIZER_SIZE)
    (folder / "tokenizer.model").write_bytes(model)
    ids = np.random.default_rng(0)
    with IndexedDatasetWriter(folder / "random", vocabulary) as writer:
        for start in range(0, tokens, 65_536):
            writer.add_document(ids.integers(0, vocabulary, min(65_536, tokens - start)))


def run_case(case: Case, args, config: Path, data: Path, output: Path, seconds: float) -> dict:
    """One run from start to end: a row of the table."""
    row = {"case": str(case), "over softmax": None}
    command = launch.torchrun_command(str(config), flags(case, args, data, output), args.ranks)
    shown = shlex.join(command).replace(str(data.parent), "<temporary>").replace(str(config.parent), "train_configs")
    row["command"] = shown.replace(launch.python_here(), "python")
    log = data / "log.txt"
    env = launch.environment(args.ranks) | {"TQDM_DISABLE": "1"}
    with open(log, "w") as f:
        process = subprocess.Popen(command, stdout=f, stderr=subprocess.STDOUT, env=env)
        try:
            code = process.wait(timeout=max(1.0, seconds))
            problem = f"exit status {code}" if code else None
        except subprocess.TimeoutExpired:
            problem = f"cut after {seconds:.0f} s by the time limit"
        finally:
            _apart.stop(process)
    row |= figures(scalars(output), args)
    if problem:
        said = log.read_text(errors="replace")
        row["remark"] = explain(problem, said)
        say("\n".join(said.splitlines()[-LAST_LINES:]))
    elif "tokens/s" not in row:
        row["remark"] = f"no steady step was logged in {args.steps} steps"
    return row


def explain(problem: str, log: str) -> str:
    """The reason of a failed run in one line, from what it printed."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if any("OutOfMemoryError" in line for line in lines):
        return "out of memory"
    said = [line for line in lines if line.startswith("error:") or "Error: " in line]
    # torchrun's own last words only repeat the exit status.
    said = [line for line in said if "ChildFailedError" not in line] or lines
    return without_paths(f"{problem}: {said[-1] if said else 'no word'}")[:300]


def scalars(output: Path) -> Curves:
    """The curves of the run's TensorBoard events; empty if it wrote none."""
    folder = output / FOLDER
    return read_curves(folder) if any(folder.glob(EVENTS)) else {}


def figures(seen: dict[str, dict[int, float]], args) -> dict:
    """Medians over the steady windows between two logs; peaks over all; the last loss.

    A run logs after its first step and then every `log_freq`; what comes before the second of these is compilation,
    autotuning and growing memory pools, and is left out.
    """
    row = {}
    speed = seen.get(TAGS["tokens/s"], {})
    last = args.steps - TRACED - TRACE_WARMUP if args.trace else args.steps
    steady = [step for step in sorted(speed) if args.skip < step <= last]
    for column, tag in TAGS.items():
        values = seen.get(tag, {})
        if column.startswith("GiB"):
            row[column] = max(values.values(), default=None)
        elif column == "loss":
            row[column] = values[max(values)] if values else None
        elif taken := [values[step] for step in steady if step in values]:
            row[column] = statistics.median(taken)
    row = {column: value for column, value in row.items() if value is not None}
    if steady:
        # TorchTitan counts per rank: all ranks together.
        row["tokens/s of a rank, by step"] = {step: speed[step] for step in steady}
        row["tokens/s"] *= args.ranks
        row["ms a step"] = 1e3 * args.batch_size * args.ranks * args.seq_len / row["tokens/s"]
    if not torch.cuda.is_available():
        row.pop("MFU %", None)  # nothing to compare a CPU with
    return row


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    add_arguments(p)
    p.add_argument("--sizes", nargs="+", help="files of train_configs; default 1.3B (CPU: debug)")
    p.add_argument("--seq-len", type=int, nargs="+", help="default 4096 (CPU: 64)")
    p.add_argument("--batch-size", type=int, help="sequences per rank and step; default 4 (CPU: 2)")
    p.add_argument(
        "--tokens", type=int, help="per rank and step, instead of --batch-size: as many sequences, and at least one"
    )
    p.add_argument("--steps", type=int, help="default 20 (CPU: 3)")
    p.add_argument("--log-freq", type=int, help="steps from one log to the next; default 5 (CPU: 1)")
    p.add_argument("--ranks", type=int, help="processes; default 1")
    p.add_argument("--conditions", nargs="+", metavar="NAME", help="of the cases, those of these conditions only")
    p.add_argument("--cases", nargs="+", metavar="CASE", help=f"{Case.__doc__} Default: {' '.join(CASES)}")
    p.add_argument(
        "--trace",
        action="store_true",
        help=f"on a GPU, of the first size and length: the {TOP_KERNELS} kernels that take most time in {TRACED} steps",
    )
    p.add_argument("--case-limit", type=float, metavar="S", help="seconds for one case (default: what is left)")
    p.add_argument(
        "--train-flags",
        nargs=argparse.REMAINDER,
        default=[],
        help="last: the run's flags for every case, --mixer.backend fft",
    )
    return p.parse_args(argv)


def settle(args, cuda: bool) -> tuple[list[Case], dict[str, Path]]:
    """Defaults for this device, in `args`; the cases and the TOML files by size. Raises: ValueError."""
    from interdomain.model import CONDITIONS

    usual = dict(sizes=["1.3B"], seq_len=[4096], batch_size=4, tokens=None, steps=20, log_freq=5, ranks=1)
    tiny = dict(sizes=["debug"], seq_len=[64], batch_size=2, tokens=None, steps=3, log_freq=1, ranks=1)
    for name, value in (usual if cuda else tiny).items():
        given = getattr(args, name)
        if given is None:
            setattr(args, name, value)
        elif name != "sizes" and (least := min(given if isinstance(given, list) else [given])) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1: got {least}.")
    args.trace = args.trace and cuda
    args.skip = args.log_freq if args.log_freq > 1 else 1
    least = args.skip + (TRACED + TRACE_WARMUP if args.trace else 0)
    if args.steps <= least:
        raise ValueError(
            f"--steps {args.steps} has no steady step: with --log-freq {args.log_freq}{' and --trace' * args.trace} give more "
            f"than {least}."
        )
    folder = Path(__file__).resolve().parents[1] / "train_configs"
    configs = {size: folder / f"{size}.toml" for size in args.sizes}
    for size, config in configs.items():
        if not config.is_file():
            known = ", ".join(sorted(path.stem for path in folder.glob("*.toml")))
            raise ValueError(
                f"--sizes {size}: there is no such file in train_configs; allowed: {known or 'none found'}."
            )
    conditions = choose("--conditions", args.conditions, CONDITIONS)
    cases = [Case.parse(text, tuple(CONDITIONS)) for text in args.cases or (CASES if cuda else TINY_CASES)]
    return [case for case in cases if case.condition in conditions], configs


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    device = choose_device(args.device)
    if (device.type == "cpu" and torch.cuda.is_available()) or device.index:
        raise ValueError(
            f"--device {args.device}: the trainer takes the first GPUs that it sees. Set CUDA_VISIBLE_DEVICES; '' means the "
            "CPU."
        )
    deadline = Deadline(args.time_limit)
    cases, configs = settle(args, device.type == "cuda")
    shown = ("sizes", "seq_len", "batch_size", "tokens", "ranks", "steps", "log_freq", "train_flags")
    report = Report("training", args.output, device, {k: getattr(args, k) for k in shown})
    if missing := absent(next(iter(configs.values()))):
        report.note(f"Skipped: {missing} cannot be imported here; the extra `train` installs what training needs.")
        report.finish("skipped")
        return 0
    report.note(
        "Tokens/s of all ranks together; figures are the run's own (TensorBoard), medians over its steady steps, memory the "
        "highest. FLOPs per token are each condition's own count (plugin/model/flops.py), MFU against the datasheet rate that "
        "TorchTitan has for this GPU: compare conditions by tokens/s."
    )
    cells = [(size, length) for size in args.sizes for length in args.seq_len]
    if len(cells) > 1:
        report.table(LENGTHS, ["size", *(f"T = {length:,}" for length in args.seq_len)])
        report.rows(LENGTHS).extend({"size": size} for size in args.sizes)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for size, length in cells:
            if args.tokens:
                args.batch_size = max(1, args.tokens // length)
            rows += measure(cases, args, size, length, configs[size], deadline, report, Path(temporary))
            args.trace = False  # of the first cell only
    ran = sum("tokens/s" in row for row in rows)
    report.finish("unfinished" if deadline.passed else "complete", f"{ran} of {len(rows)} cases measured")
    return 0


def absent(config: Path) -> str:
    """What training needs and this interpreter lacks; empty if nothing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not missing:
        try:
            vocabulary_of(config)  # what TorchTitan itself imports, some of it only to read a configuration
        except ImportError as e:
            missing = [e.name or str(e)]
    return ", ".join(missing)


def measure(
    cases: list[Case], args, size: str, length: int, config: Path, deadline: Deadline, report: Report, temporary: Path
) -> list[dict]:
    """Rows of one size and length; ratios are to a softmax of the same settings that ran before."""
    name = f"{size}, {args.batch_size} x {length:,} tokens per rank and step"
    report.table(name, COLUMNS)
    softmax = {}
    args = argparse.Namespace(**{**vars(args), "seq_len": length})
    folder = temporary / f"{size}-{length}"
    data = folder / "data"
    data.mkdir(parents=True)
    write_data(data, vocabulary_of(config), (args.steps + 1) * args.batch_size * args.ranks * (length + 1))
    for i, case in enumerate(cases):
        if deadline.passed:
            row = {"case": str(case), "remark": "not run: time limit"}
        else:
            say(f"{name}, {i + 1} of {len(cases)}: {case}")
            before = deadline.left
            limit = min(deadline.left, args.case_limit or deadline.left)
            row = run_case(case, args, config, data, folder / f"run{i}", limit)
            row["seconds"] = before - deadline.left
        settings = case.compiled, case.checkpointing
        if case.condition == "softmax" and "tokens/s" in row:
            softmax.setdefault(settings, row["tokens/s"])
        row["over softmax"] = ratio(row.get("tokens/s"), softmax.get(settings))
        if case.condition == "interdomain" and row["over softmax"] and LENGTHS in report.contents["tables"]:
            report.rows(LENGTHS)[args.sizes.index(size)].setdefault(f"T = {length:,}", row["over softmax"])
        report.add(name, row)
        if args.trace:
            add_kernels(report, f"{case}, {name}", folder / f"run{i}")
    return report.rows(name)


def add_kernels(report: Report, what: str, output: Path) -> None:
    """The table of a run's trace, and the trace itself beside the results."""
    for trace in sorted(output.glob("traces/**/*.json"))[-1:]:
        table = f"{TOP_KERNELS} kernels, {what}"
        report.table(table, KERNEL_COLUMNS)
        for row in top_kernels(trace):
            report.add(table, row)
        slug = re.sub(r"[^A-Za-z0-9]+", "-", what.split(",")[0])
        (report.folder / f"trace-{slug}.json.gz").write_bytes(gzip.compress(trace.read_bytes()))


def vocabulary_of(config: Path) -> int:
    """Rows of the head of the model that a TOML file names."""
    from interdomain.titan.plan import model_config

    return model_config(launch.job_config(str(config), [])).vocab_size


if __name__ == "__main__":
    sys.exit(main())
