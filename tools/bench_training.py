"""python -m interdomain.tools.bench_training --output benchmarks/results/today

Time real training steps: TorchTitan with this plugin, started by torchrun as launch.sh does, on random tokens, by condition,
with torch.compile and activation checkpointing on and off, over sizes and sequence lengths. Tokens per second, memory,
utilisation and loss are the run's own, from its TensorBoard events. A case that fails says so and the others go on. Without a
GPU: a tiny model, labelled.
"""

import argparse
import gzip
import importlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

from . import _apart, _bench, _torchrun, launch
from ._cli import argument_parser, user_errors
from ._curves import EVENTS, FOLDER, Curves, read_curves
from ._timing import ratio

# Imported where they are used: a machine that lacks one still gets the other parts.
NEEDED = ("tensorboard", "sentencepiece", "torchtitan", "torchdata")
TAGS = {  # column: scalar of the run
    "tokens/s": "throughput(tps)",
    "MFU %": "mfu(%)",
    "GiB reserved": "memory/max_reserved(GiB)",
    "loss": "loss_metrics/global_avg_loss",
}
COLUMNS = ["case", "tokens/s", "over softmax", "ms a step", *list(TAGS)[1:], "remark"]
CASE_SECONDS = 75.0  # that a case may take, or 1.5 equal shares of what is left if that is more
LAST_LINES = 40  # of a failed run's output, on standard error
TRACED, TRACE_WARMUP = 3, 2  # steps
TOP_KERNELS = 20
KERNEL_COLUMNS = ["kernel", "ms a step", "% of GPU time", "calls a step"]
TOKENIZER_SIZE = 512  # any that this file's own text can train; every model's vocabulary is larger


class Case(NamedTuple):
    """CONDITION:compile|eager:none|selective|full."""

    condition: str
    mode: str = "compile"
    checkpointing: str = "selective"

    def __str__(self) -> str:
        return ":".join(self)

    @classmethod
    def parse(cls, text: str, conditions: tuple[str, ...]) -> "Case":
        """Raises: ValueError with what is allowed."""
        allowed = f"({'|'.join(conditions)})(?::(compile|eager))?(?::(none|selective|full))?"
        if not (found := re.fullmatch(allowed, text)):
            raise ValueError(f"--cases {text}: expected {cls.__doc__} CONDITION is one of {', '.join(conditions)}.")
        condition, mode, checkpointing = found.groups()
        return cls(condition, mode or "compile", checkpointing or "selective")


# A short time limit should not lose the first ones. Softmax before what is compared with it.
CASES = (
    *("softmax:compile:selective", "interdomain:compile:selective", "s4d:compile:selective"),
    *("softmax:compile:none", "interdomain:compile:none", "softmax:eager:selective", "interdomain:eager:selective"),
    *("softmax:compile:full", "interdomain:compile:full"),
)
TINY_CASES = ("softmax:eager:none", "interdomain:eager:none")


def flags(case: Case, args: argparse.Namespace, data: Path, output: Path) -> list[str]:
    """Flags on top of the size's TOML file: the same run, but short, on random tokens, saving nothing."""
    values = {
        "job.dump_folder": output,
        "mixer.condition": case.condition,
        "data.corpus": data / "random",
        "data.tokenizer": data / "tokenizer.model",
        "training.seq_len": args.seq_len,
        "training.tokens": 0,
        "training.steps": args.steps,
        "training.local_batch_size": args.batch_size,
        "training.global_batch_size": args.batch_size,
        "lr_scheduler.warmup_tokens": 0,
        "lr_scheduler.warmup_steps": 1,
        "activation_checkpoint.mode": case.checkpointing,
        "metrics.log_freq": args.log_freq,
        "metrics.mixer_freq": 0,
    }
    switches = ["validation.no-enable", "checkpoint.no-enable", "metrics.enable_tensorboard"]
    switches += ["metrics.disable_color_printing", "compile.enable" if case.mode == "compile" else "compile.no-enable"]
    if args.trace:  # TorchTitan's own profiler, on the last steps, after those that are timed
        switches += ["profiling.enable_profiling"]
        values |= {"profiling.save_traces_folder": "traces", "profiling.profile_freq": args.steps}
        values |= {"profiling.profiler_active": TRACED, "profiling.profiler_warmup": TRACE_WARMUP}
    given = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return [*(f"--{name}" for name in switches), *given, *args.train_flags]


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
    if ordered:
        ordered[TOP_KERNELS:] = [("all", every, sum(calls for _, _, calls in ordered))]
    values = [(name[:120], ms / steps, 100 * ms / every, calls / steps) for name, ms, calls in ordered]
    return [dict(zip(KERNEL_COLUMNS, row, strict=True)) for row in values]


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


def run_case(case: Case, args: argparse.Namespace, config: Path, data: Path, output: Path, seconds: float) -> dict:
    """One run from start to end: a row of the table."""
    command = _torchrun.torchrun_command(str(config), flags(case, args, data, output), 1)
    row = {"case": str(case)}
    log, problem = data / "log.txt", None
    with open(log, "w") as f:
        env = _torchrun.environment(1) | {"TQDM_DISABLE": "1"}
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
        _bench.say("\n".join(said.splitlines()[-LAST_LINES:]))
    elif "tokens/s" not in row:
        row["remark"] = f"no steady step was logged in {args.steps} steps"
    return row


def explain(problem: str, log: str) -> str:
    """The reason of a failed run in one line, from what it printed."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if any("OutOfMemoryError" in line for line in lines):
        return "out of memory"
    # torchrun's own last words, of a ChildFailedError, only repeat the exit status.
    said = [x for x in lines if (x.startswith("error:") or "Error: " in x) and "ChildFailedError" not in x] or lines
    return _bench.without_paths(f"{problem}: {said[-1] if said else 'no word'}")[:300]


def scalars(output: Path) -> Curves:
    """The curves of the run's TensorBoard events; empty if it wrote none."""
    return read_curves(output / FOLDER) if any((output / FOLDER).glob(EVENTS)) else {}


def figures(seen: Curves, args: argparse.Namespace) -> dict:
    """Medians over the steady windows between two logs; the highest memory; the last loss.

    A run logs after its first step and then every `log_freq`; what comes before the second of these is compilation,
    autotuning and growing memory pools, and is left out.
    """
    speed, memory, loss = (seen.get(TAGS[column], {}) for column in ("tokens/s", "GiB reserved", "loss"))
    last = args.steps - TRACED - TRACE_WARMUP if args.trace else args.steps
    steady = [step for step in sorted(speed) if args.log_freq < step <= last]
    row = {"GiB reserved": max(memory.values(), default=None), "loss": loss[max(loss)] if loss else None}
    if steady:
        row["tokens/s"] = statistics.median(speed[step] for step in steady)
        row["ms a step"] = 1e3 * args.batch_size * args.seq_len / row["tokens/s"]
        row["tokens/s by step"] = {step: speed[step] for step in steady}
        if torch.cuda.is_available() and (used := seen.get(TAGS["MFU %"])):  # there is none of a CPU
            row["MFU %"] = statistics.median(used[step] for step in steady)
    return row


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    _bench.add_arguments(p)
    p.add_argument("--sizes", nargs="+", help="files of train_configs; default 1.3B (CPU: debug)")
    p.add_argument("--seq-len", type=int, nargs="+", help="default 4096 (CPU: 64)")
    p.add_argument("--tokens", type=int, help="per step, in at least one sequence; default 16384 (CPU: 128)")
    p.add_argument("--steps", type=int, help="default 20 (CPU: 3)")
    p.add_argument("--cases", nargs="+", metavar="CASE", help=f"{Case.__doc__} Default: {' '.join(CASES)}")
    trace = f"on a GPU, of the first size and length: the {TOP_KERNELS} kernels that take most time in {TRACED} steps"
    p.add_argument("--trace", action="store_true", help=trace)
    more = "last: the run's flags for every case, --mixer.backend fft"
    p.add_argument("--train-flags", nargs=argparse.REMAINDER, default=[], help=more)
    return p.parse_args(argv)


def settle(args: argparse.Namespace, device: torch.device) -> tuple[list[Case], dict[str, Path]]:
    """Defaults for this device, in `args`; the cases and the TOML files by size. Raises: ValueError."""
    from interdomain.model import CONDITIONS

    if (device.type == "cpu" and torch.cuda.is_available()) or device.index:
        raise ValueError(f"--device {device}: the trainer takes the first GPUs that it sees. Set CUDA_VISIBLE_DEVICES.")
    cuda = device.type == "cuda"
    defaults = dict(sizes=(["1.3B"], ["debug"]), seq_len=([4096], [64]), tokens=(16_384, 128), steps=(20, 3))
    _bench.fill_in(args, device, **defaults, cases=(CASES, TINY_CASES))
    args.trace, args.log_freq = args.trace and cuda, 5 if cuda else 1  # steps from one log to the next
    least = args.log_freq + (TRACED + TRACE_WARMUP if args.trace else 0)
    if args.steps <= least:
        raise ValueError(f"--steps {args.steps} has no steady step: give more than {least}.")
    configs = {p.stem: p for p in sorted((Path(__file__).resolve().parents[1] / "train_configs").glob("*.toml"))}
    sizes = _bench.choose("--sizes", args.sizes, configs)
    return [Case.parse(text, tuple(CONDITIONS)) for text in args.cases], {size: configs[size] for size in sizes}


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    device, deadline = _bench.choose_device(args.device), _bench.Deadline(args.time_limit)
    cases, configs = settle(args, device)
    shown = ("sizes", "seq_len", "tokens", "steps", "train_flags")
    report = _bench.Report("training", args.output, device, {k: getattr(args, k) for k in shown})
    try:
        for name in NEEDED:
            importlib.import_module(name)
        # Imports what TorchTitan itself imports, some of it only to read a configuration.
        vocabularies = {size: vocabulary_of(config) for size, config in configs.items()}
    except ImportError as e:
        report.note(f"Skipped: {e.name or e} cannot be imported; the extra `train` installs what training needs.")
        report.finish("skipped")
        return 0
    report.note(
        "Figures are the run's own (TensorBoard), medians over its steady steps, memory the highest. FLOPs per token are each "
        "condition's own count (plugin/model/flops.py), MFU against the datasheet rate that TorchTitan has for this GPU: "
        "compare conditions by tokens/s."
    )
    runs = [(size, length, case) for size in args.sizes for length in args.seq_len for case in cases]
    rows, softmax, trace = [], {}, args.trace
    for i, (size, length, case) in enumerate(runs):
        args.seq_len, args.batch_size = length, max(1, args.tokens // length)
        table = f"{size}, {args.batch_size} x {length:,} tokens per step"
        if case == cases[0]:
            report.table(table, COLUMNS)
        row = {"case": str(case), "remark": _bench.NOT_RUN}
        with tempfile.TemporaryDirectory() as temporary:
            folder, args.trace = Path(temporary), trace and i < len(cases)  # of the first size and length
            if not deadline.passed:
                _bench.say(f"{table}, {i + 1} of {len(runs)}: {case}")
                write_data(folder, vocabularies[size], (args.steps + 1) * args.batch_size * (length + 1))
                limit = min(deadline.left, max(CASE_SECONDS, 1.5 * deadline.left / (len(runs) - i)))
                row = run_case(case, args, configs[size], folder, folder / "run", limit)
            settings = size, length, *case[1:]
            if case.condition == "softmax" and "tokens/s" in row:
                softmax[settings] = row["tokens/s"]
            row["over softmax"] = ratio(row.get("tokens/s"), softmax.get(settings))
            report.add(table, row)
            rows.append(row)
            if args.trace:
                add_kernels(report, f"{case}, {table}", folder / "run")
    ran = sum("tokens/s" in row for row in rows)
    report.finish("unfinished" if deadline.passed else "complete", f"{ran} of {len(rows)} cases measured")
    return 0


def add_kernels(report: _bench.Report, what: str, output: Path) -> None:
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
