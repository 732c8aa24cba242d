"""python -m interdomain.tools.bench_gpu --output benchmarks/results/today

Check and measure everything on a GPU, what tells most first, within a fixed time: what benchmarks/gpu.sh runs. Each part is a
process with a share of the time; after it, summary.md has what is known so far. With a part named, only that one runs, with its
tool's flags behind it. Without a GPU: tiny and labelled.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from interdomain.folders import write_whole

from ._cli import argument_parser, user_errors
from ._tables import markdown_rows, page

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 540.0
EARLY = 4.0  # a tool is told to end so long before its share does
LEAST = 8.0  # seconds under which a part is not started
GONE = 5.0  # seconds to wait after SIGKILL: a process inside a driver may take longer, and is left behind
SUMMARY, LOG = "summary.md", "log.txt"
FAILED = "THE CORRECTNESS CHECK DID NOT PASS. What follows is measured all the same and marked. Do not use it."


class Part(NamedTuple):
    """A part of the benchmarks: the seconds that it may take, a tool of this package or a program, and its flags.

    A tool has these flags on a GPU, where the user gives none. A program always has them, and runs on a GPU only.
    """

    seconds: float
    program: str
    flags: tuple[str, ...] = ()

    @property
    def is_tool(self) -> bool:
        return self.program.startswith(("bench_", "check_"))


ONCE = (sys.executable, "-m", "interdomain.tools.bench_kernels", "--device", "cuda", "--once", "--mixers")
NCU = (
    *("--clock-control", "none", "--kernel-name", r"regex:^(contract|mix|expand|adjoint)_kernel$"),
    *("--section", "SpeedOfLight", "--section", "ComputeWorkloadAnalysis", "--section", "MemoryWorkloadAnalysis"),
    *("--section", "Occupancy", "--section", "LaunchStats", "--section", "WarpStateStats"),
    *("--metrics", "dram__bytes_read.sum,dram__bytes_write.sum"),
)
# Small: a ragged one, and one that is cut into segments.
SANITIZED = (*ONCE, "chunkwise", "linear", "features", "--heads", "2", "--shapes", "1x130x64", "1x1030x64")
TRAINED = (
    *("--sizes", "350M", "--seq-len", "4096", "65536", "--tokens", "32768", "--trace"),
    *("--cases", "softmax:compile:selective", "interdomain:compile:selective"),
)
# Only files that have such a test: others may need what this machine lacks.
TESTS = f"grep -rl mark.gpu --include='test_*.py' tests | xargs -r {sys.executable} -m pytest -q -m gpu --tb=short"
PARTS = {  # in the order in which `all` runs them; a tool's file has the name of its part
    "machine": Part(10, "nvidia-smi", ("-q", "-d", "CLOCK,POWER,TEMPERATURE,PERFORMANCE")),
    "check": Part(120, "check_kernels"),
    "kernels": Part(100, "bench_kernels"),
    "training": Part(150, "bench_training", TRAINED),
    "profile": Part(60, "ncu", (*NCU, *ONCE, "chunkwise", "--shapes", "8x4096x64")),
    "memcheck": Part(30, "compute-sanitizer", ("--error-exitcode", "9", "--tool", "memcheck", *SANITIZED)),
    "racecheck": Part(30, "compute-sanitizer", ("--error-exitcode", "9", "--tool", "racecheck", *SANITIZED)),
    "tests": Part(120, "bash", ("-c", TESTS)),
    "inference": Part(150, "bench_inference", ("--quick",)),
}


def command(part: Part, out: Path, seconds: float, flags: list[str]) -> list[str] | str:
    """The command of a part, or why it is skipped."""
    import torch  # late: --help needs none

    gpu = torch.cuda.is_available()
    if part.is_tool:
        limits = ["--output", str(out), "--time-limit", f"{max(1.0, seconds - EARLY):.0f}"]
        flags = flags or list(part.flags if gpu else ())
        return [sys.executable, "-m", f"interdomain.tools.{part.program}", *limits, *flags]
    found = shutil.which(part.program) or next(Path("/usr/local").glob(f"cuda*/bin/{part.program}"), None)
    if not gpu or not found:
        return f"{part.program} is not installed" if gpu else "there is no GPU here"
    return [str(found), *part.flags, *flags]


def run_part(name: str, out: Path, seconds: float) -> tuple[str, int]:
    """(how a part ended, its exit status or 0 for one that did not run). What it prints goes to the log."""
    words = command(PARTS[name], out, seconds, [])
    if isinstance(words, str):
        return f"skipped: {words}", 0
    if seconds < LEAST:
        return "not run: no time left", 0
    print(f"{name}, at most {seconds:.0f} s ...", flush=True)
    with open(out / LOG, "ab") as log:
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
    if status := results(out, name).get("status"):
        return (f"{status}, {ended}" if status == "unfinished" and code else status), code
    lines = (out / LOG).read_bytes()[began:].decode(errors="replace").splitlines()
    last = next((line for line in reversed(lines) if re.search(r"\w{3}", line)), "")
    return f"{ended}: {last.strip(' =')[:200]}", code


def results(out: Path, name: str) -> dict:
    """What a tool's file holds so far; empty if there is none."""
    path = out / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def run_all(out: Path, seconds: float) -> int:
    """All parts in order; 1 if one failed, 2 if the check refused to run."""
    ends, worst = time.monotonic() + seconds, 0
    rows, loud, pages = [["part", "status", "seconds"]], [], []
    for name, part in PARTS.items():
        began = time.monotonic()
        status, code = run_part(name, out, min(part.seconds, ends - began))
        print(f"{name}: {status}", flush=True)
        if name == "check" and code == 2:  # there is no GPU that can be used, for one: the tool has said so
            print((out / LOG).read_text(), file=sys.stderr)
            return 2
        if name == "check" and code:
            loud = ["**Some errors are beyond their bound, none by far.**" if code == 3 else f"**{FAILED}**", ""]
        worst = max(worst, 0 if code in (0, 3) else 1)
        rows.append([name, status.replace("|", "/"), f"{time.monotonic() - began:.0f}"])
        pages += page(contents) if (contents := results(out, name)) else []
        write_whole(out / SUMMARY, "\n".join(["# Summary", "", *loud, *markdown_rows(rows), *pages, ""]).encode())
    return worst


def parse(argv) -> tuple[argparse.Namespace, list[str]]:
    p = argument_parser(__doc__)
    names = ", ".join(PARTS)
    p.add_argument("part", nargs="?", default="all", help=f"all (default), or one of {names}, with its flags")
    p.add_argument(
        "--output", type=Path, help="folder of the results (default: benchmarks/results/<UTC date and time>)"
    )
    args, flags = p.parse_known_args(argv)
    if args.part not in ("all", *PARTS):
        raise ValueError(f"there is no part '{args.part}'; allowed: all, {names}.")
    if flags and args.part == "all":
        raise ValueError(
            f"'{shlex.join(flags)}': flags are for one part, such as: benchmarks/gpu.sh kernels --rounds 50"
        )
    return args, flags


@user_errors
def main(argv=None) -> int:
    args, flags = parse(argv)
    began, seconds = time.monotonic(), float(os.environ.get("INTERDOMAIN_SECONDS") or SECONDS)
    out = (args.output or ROOT / "benchmarks/results" / time.strftime("%Y-%m-%d-%H%M%S", time.gmtime())).absolute()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and the part ends, too
    if args.part != "all":
        words = command(PARTS[args.part], out, seconds, flags)
        if isinstance(words, str):
            raise ValueError(f"{args.part}: {words}.")
        return subprocess.run(words).returncode
    if (out / LOG).exists():
        raise FileExistsError(f"{out / LOG} is there, and results are never overwritten. Give another --output.")
    out.mkdir(parents=True, exist_ok=True)
    code = run_all(out, seconds)
    print(f"\nwrote {out} in {time.monotonic() - began:.0f} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
