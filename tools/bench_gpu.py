"""python -m interdomain.tools.bench_gpu --output benchmarks/results/today

Check and measure everything on a GPU, what tells most first, within a fixed time: what benchmarks/gpu.sh runs. Each part has a
share of the time and a process of its own, which is ended with all that it started when its share is over; after every part
the folder holds one archive of all results so far. With a part named, only that one, its files in the folder, its tool's flags
behind it. Without a GPU: tiny and labelled.
"""

import argparse
import contextlib
import ctypes
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from interdomain.folders import write_whole

from . import _apart
from ._cli import argument_parser, user_errors
from ._tables import markdown_rows, page

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 540.0
EARLY = 4.0  # a tool is told to end so long before its share does
LEAST = 8.0  # seconds under which a part is not started
ARCHIVE, SUMMARY, LOG = "results.tar.gz", "summary.md", "log.txt"
PR_SET_CHILD_SUBREAPER = 36
FAILED = "THE CORRECTNESS CHECK DID NOT PASS. What follows is measured all the same and marked. Do not use it."


class Part(NamedTuple):
    """A part of the benchmarks: the seconds that it may take, and its command or why it is skipped."""

    seconds: float
    command: Callable[["Run", float], list[str] | str]
    in_all: bool = True


class Run:
    """The parts that ran, what is known of the machine, and the folder of their results.

    Args:
        folder: of the parts' files. out: where archive, summary and log go; None: nowhere, and parts print to the screen.
    """

    def __init__(self, folder: Path, seconds: float, out: Path | None = None) -> None:
        self.folder, self.out = folder, out
        self.began = time.monotonic()
        self.ends = self.began + seconds
        self.gpu = bool(shutil.which("nvidia-smi") or list(Path("/dev").glob("nvidia[0-9]*")))  # until torch was asked
        self.ptxas = None
        self.env = {"PYTHONUNBUFFERED": "1", **os.environ}
        self.rows, self.loud = [], []
        self.child = None

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()

    def part(self, name: str, seconds: float, flags: list[str] = (), alias: str = "") -> int:
        """Run a part for `seconds` at most; its exit status, 0 for one that was skipped or not run."""
        row = {"part": alias or name, "status": "not run: no time left", "seconds": 0.0}
        self.rows.append(row)
        code, command = 0, PARTS[name].command(self, seconds - EARLY)
        if isinstance(command, str):
            row["status"] = f"skipped: {command}"
        elif seconds >= LEAST:
            began, row["status"] = time.monotonic(), "running"
            print(f"\n== {row['part']}, at most {seconds:.0f} s ==", flush=True)
            self.pack()
            code = self.run([*command, *flags], seconds, self.folder / f"{row['part']}.log")
            row |= {"seconds": time.monotonic() - began, "status": self.status(name, row["part"], code)}
        self.pack()
        print(f"{row['part']}: {row['status']} ({row['seconds']:.0f} s)", flush=True)
        return 1 if code is None else code

    def run(self, command: list[str], seconds: float, log: Path) -> int | None:
        """Exit status, or None if the process had to be ended. It prints to `log`, without an archive to the screen."""
        code = None
        with open(log, "wb") if self.out else contextlib.nullcontext() as said:
            streams = dict(stdout=said, stderr=said and subprocess.STDOUT, stdin=subprocess.DEVNULL)
            self.child = subprocess.Popen(command, cwd=ROOT, env=self.env, start_new_session=bool(self.out), **streams)
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.child.wait(seconds)
        self.end_child()
        return code

    def end_child(self) -> None:
        """End the part, and what its processes left behind: as their next parent (PR_SET_CHILD_SUBREAPER) we have them all."""
        if self.child:
            _apart.stop(self.child)
            _apart.signal_all(_apart.descendants(os.getpid()), signal.SIGKILL)

    def results(self, part: str) -> dict:
        """What the part's file holds so far; empty if it has none."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / f"{part}.json").read_text())
        return {}

    def status(self, name: str, alias: str, code: int | None) -> str:
        """The part's own, or the last words of its log."""
        cut = "cut at the end of its share" if code is None else f"exit status {code}"
        if own := self.results(name).get("status"):
            return own if own != "unfinished" or not code else f"unfinished, {cut}"
        said = ""
        with contextlib.suppress(OSError):
            lines = (self.folder / f"{alias}.log").read_text(errors="replace").splitlines()
            said = next((line for line in reversed(lines) if re.search(r"\w{3}", line)), "").strip(" =")[:200]
        return f"{'complete' if code == 0 else cut}: {said}"

    def pack(self) -> None:
        """Write archive, log and summary, each of them complete at any time."""
        if not self.out:
            return
        buffer, log = io.BytesIO(), b""
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            archive.add(self.folder, "results", filter=anonymous)
        cells = [["part", "status", "seconds"]]
        summary, pages = [f"# Summary\n\n{time.monotonic() - self.began:.0f} s.\n"], []
        summary += [f"**{text}**\n" for text in self.loud]
        for row in self.rows:
            cells.append([row["part"], row["status"].replace("|", "/"), f"{row['seconds']:.0f}"])
            pages += page(contents) if (contents := self.results(row["part"])) else []
            with contextlib.suppress(OSError):
                said = (self.folder / f"{row['part']}.log").read_bytes()
                log += f"\n== {row['part']}: {row['status']} ==\n".encode() + said
        text = "\n".join([*summary, *markdown_rows(cells), *pages]) + "\n"
        for name, data in (ARCHIVE, buffer.getvalue()), (LOG, log), (SUMMARY, text.encode()):
            write_whole(self.out / name, data)


def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Of the archive: results name no user."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def tool(module: str, *flags: str, on_gpu: tuple[str, ...] = (), in_all: tuple[str, ...] = ()) -> Callable:
    """A benchmark with its flags; on_gpu: those for a GPU; in_all: and there among all parts."""

    def command(run: Run, seconds: float) -> list[str]:
        limit = [*("--output", str(run.folder)), *("--time-limit", f"{max(1.0, seconds):.0f}")]
        more = [*(on_gpu if run.gpu else ()), *(in_all if run.gpu and run.out else ())]
        return [sys.executable, "-m", f"interdomain.tools.{module}", *limit, *flags, *more]

    return command


def environment(run: Run, seconds: float) -> list[str]:
    return [sys.executable, "-m", "interdomain.tools.bench_gpu", "--environment", "--output", str(run.folder)]


def watched(program: str, *flags: str, passes: tuple[str, ...]) -> Callable:
    """Launches of the passes under a tool of CUDA's toolkit."""

    def command(run: Run, seconds: float) -> list[str] | str:
        found = shutil.which(program) or next(map(str, sorted(Path("/usr/local").glob(f"cuda*/bin/{program}"))), None)
        if not run.gpu or not found:
            return f"{program} is not installed" if run.gpu else "there is no GPU here"
        # Without PyTorch's pools: a pool hides an access beyond a tensor's end.
        start = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", found] if program == "compute-sanitizer" else [found]
        return [*start, *flags, sys.executable, "-m", "interdomain.tools.bench_kernels", "--device", "cuda", *passes]

    return command


def gpu_tests(run: Run, seconds: float) -> list[str] | str:
    files = [str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in p.read_text()]
    if not run.gpu or not files:
        return "the tests are not in this tree" if run.gpu else "there is no GPU here"
    return [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=short", "-p", "no:cacheprovider", *files]


NCU = (
    *("--clock-control", "none", "--kernel-name", r"regex:^(contract|mix|expand|adjoint)_kernel$"),
    *("--section", "SpeedOfLight", "--section", "ComputeWorkloadAnalysis", "--section", "MemoryWorkloadAnalysis"),
    *("--section", "Occupancy", "--section", "LaunchStats", "--section", "WarpStateStats"),
    *("--metrics", "dram__bytes_read.sum,dram__bytes_write.sum"),
)
PROFILED = ("contract", "mix_backward", "mix_expand", "adjoint_decay")
SANITIZED = ("--once", "all", "--heads", "2", "--shapes", "1x130x64", "1x1030x64")  # ragged; cut into segments
RATIO = ("--tokens", "32768", "--cases", "softmax:compile:selective", "interdomain:compile:selective")
LENGTHS = ("--sizes", "350M", "1.3B", "--seq-len", "4096", "65536", "16384")
SANITIZER = ("compute-sanitizer", "--error-exitcode", "9", "--tool")
PARTS = {  # in the order in which `all` runs them
    "environment": Part(30, environment),
    "check": Part(120, tool("check_kernels")),
    "passes": Part(40, tool("bench_kernels", "--passes", in_all=("--shapes", "8x4096x64", "2x16384x64"))),
    "kernels": Part(60, tool("bench_kernels")),
    "training": Part(
        150, tool("bench_training", in_all=("--sizes", "350M", "--seq-len", "4096", "65536", *RATIO, "--trace"))
    ),
    "profile": Part(60, watched("ncu", *NCU, passes=("--once", *PROFILED, "--shapes", "8x4096x64"))),
    "memcheck": Part(30, watched(*SANITIZER, "memcheck", passes=SANITIZED)),
    "racecheck": Part(30, watched(*SANITIZER, "racecheck", passes=SANITIZED)),
    "tests": Part(120, gpu_tests),
    "decode": Part(60, tool("bench_inference", "--parts", "decode", in_all=("--quick",))),
    "inference": Part(90, tool("bench_inference", in_all=("--quick", "--parts", "prompts", "sizes"))),
    "steps": Part(SECONDS, tool("bench_training", on_gpu=(*LENGTHS, *RATIO, "--steps", "15")), in_all=False),
}


def everything(run: Run) -> int:
    """All parts in order; 1 if one failed."""
    worst = 0
    for name in (name for name, part in PARTS.items() if part.in_all):
        code = run.part(name, min(PARTS[name].seconds, run.left))
        if name == "environment":
            record = run.results(name).get("environment", {})
            run.gpu, run.ptxas = "GPU" in record if record else run.gpu, record.get("ptxas")
        if name == "check":
            if code == 2:  # a mistake in the call, which the tool explains
                print((run.folder / "check.log").read_text())
                return 2
            code = judged(run, code)
        worst = max(worst, 0 if code == 0 else 1)
    return worst


def judged(run: Run, code: int) -> int:
    """The check's exit status. Where results were wrong, another assembler is tried, and kept if the check passes with it."""
    if code == 3:
        run.loud.append("Some errors are beyond their bound, none by far.")
    if code in (0, 3):
        return 0
    run.loud.append(FAILED)
    others = assemblers(run.ptxas)
    if run.gpu and others and run.left > PARTS["check"].seconds and wrong_results(run.results("check")):
        (version, path), before = others[0], run.env
        (run.folder / "check.json").rename(run.folder / f"check-ptxas-{run.ptxas}.json")
        # Triton 3.6 reads the first; later ones may take their second assembler on every GPU.
        run.env = before | {"TRITON_PTXAS_PATH": path, "TRITON_PTXAS_BLACKWELL_PATH": path}
        if run.part("check", PARTS["check"].seconds, alias=f"check-again-{version}") in (0, 3):
            run.loud[-1] = (
                f"THE ASSEMBLER WRITES WRONG CODE: the check failed with ptxas {run.ptxas} and passed with {version} "
                f"({place(path)}), which all below uses. Set TRITON_PTXAS_PATH and TRITON_PTXAS_BLACKWELL_PATH to it."
            )
            code = 0
        else:
            run.loud[-1] += f" With ptxas {version} neither."
            run.env = before
    print(f"\n!!! {run.loud[-1]} !!!", flush=True)
    return code


def wrong_results(check: dict) -> bool:
    """Whether a case failed, and not for want of time."""
    found = [str(row.get("result")) for table in check.get("tables", {}).values() for row in table["rows"]]
    return any(result.startswith("FAIL") and "time limit" not in result for result in found)


def assemblers(used: str | None = None) -> list[tuple[str, str]]:
    """(version, path) of every ptxas on this machine of another version than `used`, the newest first."""
    found = {}
    patterns = ("triton/backends/nvidia/bin/ptxas*", "nvidia/*/bin/ptxas")
    paths = [path for folder in filter(None, sys.path) for pattern in patterns for path in Path(folder).glob(pattern)]
    for path in (*paths, *Path("/usr/local").glob("cuda*/bin/ptxas"), *filter(None, [shutil.which("ptxas")])):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10).stdout
            if version := re.search(r"release (\d+\.\d+)", said):
                found.setdefault(version[1], str(path))
    found.pop(used, None)
    return sorted(found.items(), key=lambda item: [-int(n) for n in item[0].split(".")])


def place(path: str) -> str:
    """Its last folders: results name no place of a machine."""
    return "/".join(Path(path).parts[-4:]).lstrip("/")


def record_environment(folder: Path) -> int:
    """The part `environment`: versions, the GPU's state, assemblers."""
    from ._bench import Report, choose_device

    report = Report("environment", folder, choose_device("auto"), {})
    for version, path in assemblers():
        report.note(f"ptxas {version}: {place(path)}")
    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi", "-q", "-d", "CLOCK,POWER,TEMPERATURE,PERFORMANCE"], timeout=10)
    report.finish()
    return 0


def parse(argv) -> tuple[argparse.Namespace, list[str]]:
    p = argument_parser(__doc__)
    names = ", ".join(PARTS)
    p.add_argument("part", nargs="?", default="all", help=f"all (default), or one of {names}, with its flags")
    p.add_argument(
        "--output", type=Path, help="folder of the results (default: benchmarks/results/<UTC date and time>)"
    )
    p.add_argument("--environment", action="store_true", help=argparse.SUPPRESS)  # the process of that part
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
    if args.environment:
        return record_environment(args.output)
    seconds = float(os.environ.get("INTERDOMAIN_SECONDS") or SECONDS)
    out = (args.output or ROOT / "benchmarks/results" / time.strftime("%Y-%m-%d-%H%M%S", time.gmtime())).absolute()
    out.mkdir(parents=True, exist_ok=True)
    if (out / ARCHIVE).exists():
        raise FileExistsError(
            f"{out / ARCHIVE} is there already, and results are never overwritten. Give another --output."
        )
    with contextlib.suppress(OSError, AttributeError):  # become the next parent of orphans; Linux only
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    signal.alarm(int(seconds) + 15)  # whatever this process itself waits for; the files are complete
    with tempfile.TemporaryDirectory() as temporary:
        together = args.part == "all"
        run = Run(Path(temporary) if together else out, seconds, out if together else None)
        try:
            code = everything(run) if together else run.part(args.part, run.left, flags)
        finally:
            run.end_child()
            run.pack()
    statuses = ", ".join(f"{row['part']}: {row['status']}" for row in run.rows)
    print(f"\nwrote {out} in {time.monotonic() - run.began:.0f} s ({statuses})", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
