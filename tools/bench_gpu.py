"""interdomain bench-gpu --output benchmarks/results/today

Check and measure everything on this machine's GPU.

The parts run one after the other, the most important first, each in a process with a share of the time: the correctness
check, the kernels, training, a profile, memory checks, the GPU tests, inference. summary.md is written after every
part. benchmarks/gpu.sh runs this. Without a GPU it runs at tiny sizes on the CPU, and the results say so.

    interdomain bench-gpu --time-limit 1200 --output benchmarks/results/long

Exit status: 0 every part passed or was skipped; 1 a part failed; 2 the check could not run, or a wrong option

Documentation: docs/benchmarks.md
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from interdomain.environment import ROOT
from interdomain.folders import write_whole
from interdomain.tools._bench.results import Deadline, add_output, markdown_rows, page
from interdomain.tools._cli import argument_parser, user_errors

SECONDS = 540.0
EARLY = 4.0  # a tool is told to end so long before its share does
LEAST = 8.0  # seconds under which a part is not started
GONE = 5.0  # seconds to wait after SIGKILL: a process inside a driver may take longer, and is left behind
SUMMARY, LOG = "summary.md", "log.txt"
FAILED = "THE CORRECTNESS CHECK DID NOT PASS. What follows is measured all the same and marked. Do not use it."

TRAINED = (
    *("--sizes", "350M", "--seq-len", "4096", "65536", "--tokens", "32768", "--trace"),
    *("--cases", "softmax:compile:selective", "interdomain:compile:selective"),
)
ONCE = (sys.executable, "-m", "interdomain.tools.bench_kernels", "--device", "cuda", "--once", "--mixers")
PROFILED = (
    *("--clock-control", "none", "--kernel-name", r"regex:^(contract|mix|expand|adjoint)_kernel$"),
    *("--section", "SpeedOfLight", "--section", "ComputeWorkloadAnalysis", "--section", "MemoryWorkloadAnalysis"),
    *("--section", "Occupancy", "--section", "LaunchStats", "--section", "WarpStateStats"),
    *("--metrics", "dram__bytes_read.sum,dram__bytes_write.sum", *ONCE, "chunkwise", "--shapes", "8x4096x32x64"),
)
# Small: a ragged one, and one that is cut into segments.
SANITIZED = (*ONCE, "chunkwise", "linear", "layer", "--shapes", "1x130x2x64", "1x1030x2x64")
# Only files that have such a test: others may need what this machine lacks.
TESTS = f"grep -rl mark.gpu --include='test_*.py' tests | xargs -r {sys.executable} -m pytest -q -m gpu --tb=short"
# The parts in the order in which `all` runs them: seconds at most; a tool of this package (its results have the part's name) or
# a program; its flags, a tool's on a GPU only. A program runs on a GPU only.
PARTS = {
    "machine": (10, "nvidia-smi", ("-q", "-d", "CLOCK,POWER,TEMPERATURE,PERFORMANCE")),
    "check": (120, "interdomain.tools.check_kernels", ()),
    "kernels": (100, "interdomain.tools.bench_kernels", ()),
    "training": (150, "interdomain.tools.bench_training", TRAINED),
    "profile": (60, "ncu", PROFILED),
    "memcheck": (30, "compute-sanitizer", ("--error-exitcode", "9", "--tool", "memcheck", *SANITIZED)),
    "racecheck": (30, "compute-sanitizer", ("--error-exitcode", "9", "--tool", "racecheck", *SANITIZED)),
    "tests": (120, "bash", ("-c", TESTS)),
    "inference": (150, "interdomain.tools.bench_inference", ("--quick",)),
}


def command(name: str, out: Path, seconds: float) -> list[str] | str:
    """The command of a part, or why it is skipped."""
    _, program, flags = PARTS[name]
    gpu = torch.cuda.is_available()
    if program.startswith("interdomain."):
        limits = ["--output", str(out), "--time-limit", f"{max(1.0, seconds - EARLY):.0f}"]
        return [sys.executable, "-m", program, *limits, *(flags if gpu else ())]
    found = shutil.which(program) or next(Path("/usr/local").glob(f"cuda*/bin/{program}"), None)
    if not gpu or not found:
        return f"{program} is not installed" if gpu else "there is no GPU here"
    return [str(found), *flags]


def run_part(name: str, out: Path, seconds: float) -> tuple[str, int]:
    """(how a part ended, its exit status or 0 for one that did not run). What it prints goes to the log."""
    words = command(name, out, seconds)
    if isinstance(words, str):
        return f"skipped: {words}", 0
    if seconds < LEAST:
        return "not run: no time left", 0
    print(f"{name}, at most {seconds:.0f} s ...", flush=True)
    with open(out / LOG, "a+b") as log:
        log.write(f"\n== {name} ==\n".encode())
        log.flush()
        began = log.tell()
        streams = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        process = subprocess.Popen(words, cwd=ROOT, env={"PYTHONUNBUFFERED": "1", **os.environ}, **streams)
        try:
            code = process.wait(seconds)
            ended = f"exit status {code}" if code else "complete"
        except subprocess.TimeoutExpired:
            code, ended = 1, "cut at the end of its share"
        finally:  # with all that it started; the ranks of torchrun, in sessions of their own, die with it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GONE)
        log.seek(began)
        lines = log.read().decode(errors="replace").splitlines()
    if status := results(out, name).get("status"):
        return (f"{status}, {ended}" if status == "unfinished" else status), code
    last = next((line for line in reversed(lines) if re.search(r"\w{3}", line)), "")
    return f"{ended}: {last.strip(' =')[:200] or 'no word'}", code


def results(out: Path, name: str) -> dict:
    """What a tool's file holds so far; empty if there is none."""
    path = out / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def run_all(out: Path, deadline: Deadline) -> int:
    """All parts in order; 1 if one failed, 2 if the check refused to run."""
    failed, rows, loud, pages = False, [["part", "status", "seconds"]], [], []
    for name, (seconds, *_) in PARTS.items():
        began = time.monotonic()
        status, code = run_part(name, out, min(seconds, deadline.left))
        print(f"{name}: {status}", flush=True)
        if name == "check" and code == 2:  # there is no GPU that can be used, for one: the tool has said so
            print((out / LOG).read_text(), file=sys.stderr)
            return 2
        if name == "check" and code not in (0, 3):  # 3: beyond a bound, none by far
            loud = [f"**{FAILED}**", ""]
        failed |= code not in (0, 3)
        rows.append([name, status.replace("|", "/"), f"{time.monotonic() - began:.0f}"])
        pages += page(contents) if (contents := results(out, name)) else []
        write_whole(out / SUMMARY, "\n".join(["# Summary", "", *loud, *markdown_rows(rows), *pages, ""]).encode())
    return int(failed)


def parse(argv) -> argparse.Namespace:
    p = argument_parser(__doc__)
    add_output(p)
    p.add_argument("--time-limit", type=float, default=SECONDS, metavar="S", help="seconds that all parts may take")
    return p.parse_args(argv)


@user_errors
def main(argv=None) -> int:
    args = parse(argv)
    out, deadline = args.output.absolute(), Deadline(args.time_limit)
    if (out / LOG).exists():
        raise FileExistsError(f"{out / LOG} exists, and results are never overwritten. Give another --output.")
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and the part ends, too
    code = run_all(out, deadline)
    print(f"\nwrote {out}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
