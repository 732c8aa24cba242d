"""python -m interdomain.tools.bench_gpu --output benchmarks/results/today

Check and measure everything on a GPU, what tells most first, within a fixed time: what benchmarks/gpu.sh runs. Each part has a
share of the time and a process of its own; after every part and every few seconds the folder holds a whole archive of all
results so far. With a part named, only that one, its files in the folder, its tool's flags behind it. Without a GPU: tiny and
labelled.
"""

import argparse
import contextlib
import csv
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from interdomain.folders import write_whole

from ._cli import argument_parser, user_errors
from ._gpu_run import ARCHIVE, ROOT, Part, Run, adopt_orphans

SECONDS = 540.0
PROFILED = ("contract", "mix_backward", "mix_expand", "adjoint_decay")
NCU_SECTIONS = (
    *("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "Occupancy", "LaunchStats"),
    *("SchedulerStats", "WarpStateStats"),
)
NCU_METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
NCU_COLUMNS = {  # of the table: the largest of ncu's columns whose names match
    "ms": r"^gpu__time_duration\.sum$",
    "dram %": r"^(gpu__dram_throughput|dram__throughput)\.avg\.pct_of_peak_sustained_elapsed$",
    "dram read": r"^dram__bytes_read\.sum$",
    "dram written": r"^dram__bytes_write\.sum$",
    "tensor %": r"pipe_tensor.*\.avg\.pct_of_peak_sustained_active$",
    "issue %": r"^(sm__inst_issued|smsp__issue_active)\.avg\.pct_of_peak_sustained_active$",
    "warps %": r"^sm__warps_active\.avg\.pct_of_peak_sustained_active$",
    "registers": r"^launch__registers_per_thread$",
}
STALL = re.compile(r"warps_issue_stalled_((?!\w+_not_issued)\w+)_per_issue_active\.ratio")


def tool(
    module: str, *flags: str, on_gpu: tuple[str, ...] = (), in_all: tuple[str, ...] = ()
) -> Callable[[Run, float], list[str]]:
    """A benchmark with its flags; on_gpu: those for a GPU; in_all: and there among all parts."""

    def command(run: Run, seconds: float) -> list[str]:
        limit = [*("--output", str(run.folder)), *("--time-limit", f"{max(1.0, seconds):.0f}")]
        more = [*(on_gpu if run.gpu else ()), *(in_all if run.gpu and run.out else ())]
        return [sys.executable, "-m", f"interdomain.tools.{module}", *limit, *flags, *more]

    return command


def environment(run: Run, seconds: float) -> list[str]:
    return [sys.executable, "-m", "interdomain.tools.bench_gpu", "--environment", "--output", str(run.folder)]


def watched(program: str, *flags: str, passes: tuple[str, ...]) -> Callable[[Run, float], list[str] | str]:
    """Launches of the passes under a tool of CUDA's toolkit."""

    def command(run: Run, seconds: float) -> list[str] | str:
        found = shutil.which(program) or next(map(str, sorted(Path("/usr/local").glob(f"cuda*/bin/{program}"))), None)
        if not run.gpu or not found:
            return f"{program} is not installed" if run.gpu else "there is no GPU here"
        filled = [flag.replace("FOLDER", str(run.folder)) for flag in flags]
        # Without PyTorch's pools: a pool hides an access beyond a tensor's end.
        start = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", found] if program == "compute-sanitizer" else [found]
        return [*start, *filled, sys.executable, "-m", "interdomain.tools.bench_kernels", "--device", "cuda", *passes]

    return command


def gpu_tests(run: Run, seconds: float) -> list[str] | str:
    files = [str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in p.read_text()]
    if not run.gpu or not files:
        return "the tests are not in this tree" if run.gpu else "there is no GPU here"
    return [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=short", "-p", "no:cacheprovider", *files]


SANITIZED = ("--once", "all", "--heads", "2", "--shapes", "1x130x64", "1x1030x64")  # ragged; cut into segments
RATIO = ("--tokens", "32768", "--cases", "softmax:compile:selective", "interdomain:compile:selective")
PARTS = {  # in the order in which `all` runs them
    "environment": Part(10, environment, most=30),
    "check": Part(60, tool("check_kernels"), most=120),
    "passes": Part(40, tool("bench_kernels", "--passes", in_all=("--shapes", "8x4096x64", "2x16384x64"))),
    "kernels": Part(60, tool("bench_kernels")),
    "training": Part(
        150,
        tool(
            "bench_training",
            in_all=(*("--sizes", "350M", "--seq-len", "4096", "65536", *RATIO), *("--trace", "--case-limit", "75")),
        ),
    ),
    "profile": Part(
        60,
        watched(
            "ncu",
            *(
                "--clock-control",
                "none",
                "--kernel-name",
                r"regex:^(contract|mix|expand|adjoint|forward|reverse)_kernel$",
            ),
            *(flag for section in NCU_SECTIONS for flag in ("--section", section)),
            *("--metrics", ",".join(NCU_METRICS), "--csv", "--page", "raw", "--log-file", "FOLDER/profile.csv"),
            passes=("--once", *PROFILED, "--shapes", "8x4096x64"),
        ),
        result=lambda run: profile_page(run.folder),
    ),
    **{
        check: Part(30, watched("compute-sanitizer", "--tool", check, "--error-exitcode", "9", passes=SANITIZED))
        for check in ("memcheck", "racecheck")
    },
    "tests": Part(100, gpu_tests, most=120),
    "decode": Part(30, tool("bench_decode")),
    "inference": Part(60, tool("bench_inference", in_all=("--quick",)), most=120),
    "tune": Part(SECONDS, tool("bench_kernels", "--tune"), in_all=False),
    "steps": Part(
        SECONDS,
        tool(
            "bench_training",
            on_gpu=(*("--sizes", "350M", "1.3B", "--seq-len", "4096", "65536", "16384", *RATIO), "--steps", "15"),
        ),
        in_all=False,
    ),
}


def everything(run: Run) -> int:
    """All parts in order; 1 if one failed."""
    worst = 0
    for name, part in PARTS.items():
        if not part.in_all:
            continue
        try:
            code = run.part(name, min(max(part.seconds, part.most), run.left))
        except OSError as e:  # of the supervisor itself, a full disk say: the next part may do better
            run.say(f"{name}: {e}")
            code = 1
        if name == "environment":
            know_the_machine(run)
        elif name == "check":
            if code == 2:  # a mistake in the call, said by the tool
                run.say((run.folder / "check.log").read_text())
                return 2
            code = judged(run, code)
        worst = max(worst, 0 if code == 0 else 1)
    return worst


def know_the_machine(run: Run) -> None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        record = json.loads((run.folder / "environment.json").read_text())["environment"]
        run.gpu, run.ptxas = "GPU" in record, record.get("ptxas")


def judged(run: Run, code: int) -> int:
    """The check's exit status. Where results were wrong, another assembler is tried, and kept if the check passes with it."""
    if code == 3:
        run.loud.append("Some errors are beyond their bound, none by far: see check.md.")
    if code in (0, 3):
        return 0
    failed = "THE CORRECTNESS CHECK DID NOT PASS. What follows is measured all the same and marked. Do not use it."
    if run.gpu and wrong_results(run.folder / "check.json"):
        first, before = f"check-ptxas-{run.ptxas}", run.env
        rename(run.folder, "check", first)
        for version, path in other_assemblers(run.ptxas):
            if run.left < PARTS["check"].seconds:
                break
            # Triton 3.6 reads the first; later ones may take their second assembler on every GPU.
            run.env = before | {"TRITON_PTXAS_PATH": path, "TRITON_PTXAS_BLACKWELL_PATH": path}
            if run.part("check", PARTS["check"].most, alias=f"check-again-{version}") in (0, 3):
                run.loud.append(
                    f"THE ASSEMBLER WRITES WRONG CODE: the check failed with ptxas {run.ptxas} and passed with {version} "
                    f"({place(path)}), which all below uses. Set TRITON_PTXAS_PATH and TRITON_PTXAS_BLACKWELL_PATH to it. "
                    f"The first check: {first}.md."
                )
                run.say(f"\n!!! {run.loud[-1]} !!!")
                return 0
            failed += f" With ptxas {version} neither."
            rename(run.folder, "check", f"check-ptxas-{version}")
        run.env = before
        rename(run.folder, first, "check")
    run.loud.append(failed)
    run.say(f"\n!!! {failed} !!!")
    return 1


def rename(folder: Path, before: str, after: str) -> None:
    """A part's results, if there are any."""
    for ending in ("json", "md"):
        with contextlib.suppress(FileNotFoundError):
            (folder / f"{before}.{ending}").rename(folder / f"{after}.{ending}")


def wrong_results(file: Path) -> bool:
    """Whether a case failed, and not for want of time."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        tables = json.loads(file.read_text())["tables"].values()
        results = [str(row.get("result")) for table in tables for row in table["rows"]]
        return any(result.startswith("FAIL") and "time limit" not in result for result in results)
    return False


def other_assemblers(used: str | None) -> list[tuple[str, str]]:
    """(version, path) of every ptxas of another version than `used` that lies here, the newest first."""
    found = {}
    places = [Path(folder) for folder in sys.path if folder]
    paths = [p for folder in places for p in folder.glob("triton/backends/nvidia/bin/ptxas*")]
    paths += [p for folder in places for p in folder.glob("nvidia/*/bin/ptxas")]
    paths += [*Path("/usr/local").glob("cuda*/bin/ptxas"), *(Path(p) for p in [shutil.which("ptxas")] if p)]
    for path in paths:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10).stdout
            if version := re.search(r"release (\d+\.\d+)", said):
                found.setdefault(version[1], str(path))
    found.pop(used, None)
    return sorted(found.items(), key=lambda item: [-int(n) for n in item[0].split(".")])


def place(path: str) -> str:
    """Its last folders: results name no place of a machine."""
    return "/".join(Path(path).parts[-4:]).lstrip("/")


def profile_rows(file: Path) -> list[dict]:
    """The kernels of a page "raw" of ncu: what NCU_COLUMNS names, and the three reasons that most warps waited for."""

    def number(text: str) -> float:
        with contextlib.suppress(ValueError):
            return float(text.replace(",", ""))
        return 0.0

    with contextlib.suppress(OSError):
        lines = [line for line in file.read_text(errors="replace").splitlines() if line.startswith('"')]
        head, units, *rows = [*csv.reader(lines), [], []][: max(2, len(lines))]
        found = []
        for row in rows:
            cells, unit = (dict(zip(head, texts, strict=False)) for texts in (row, units))
            entry = {"kernel": cells.get("Kernel Name", "?")}
            for column, pattern in NCU_COLUMNS.items():
                name = max((n for n in cells if re.search(pattern, n)), key=lambda n: number(cells[n]), default=None)
                entry[column] = f"{cells[name]} {unit[name]}".strip() if name else "-"
            stalls = {m[1]: number(text) for name, text in cells.items() if (m := STALL.search(name))}
            most = sorted(stalls, key=stalls.get, reverse=True)[:3]
            found.append(entry | {"waits": ", ".join(f"{reason} {stalls[reason]:.2f}" for reason in most)})
        return found
    return []


def profile_page(folder: Path) -> str:
    """Write profile.md from profile.csv; what it holds."""
    rows, columns = profile_rows(folder / "profile.csv"), ["kernel", *NCU_COLUMNS, "waits"]
    lines = ["# profile", "", "ncu, one launch each; all that it collected is in profile.csv.", ""]
    lines += ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(row[c] for c in columns) + " |" for row in rows]
    write_whole(folder / "profile.md", ("\n".join(lines) + "\n").encode())
    return f"{len(rows)} kernels"


def record_environment(folder: Path) -> int:
    """The part `environment`: versions, the GPU's state, assemblers, tools, packages."""
    import importlib.metadata

    from ._bench import Report, choose_device, without_paths

    report = Report("environment", folder, choose_device("auto"), {})
    for version, path in other_assemblers(None):
        report.note(f"ptxas {version}: {place(path)}")
    for program in ("ncu", "compute-sanitizer", "nvcc"):
        found = shutil.which(program)
        said = found and subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10).stdout.strip()
        report.note(f"{program}: {without_paths(said.splitlines()[-1]) if said else 'not on PATH'}")
    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi"], timeout=10)
        subprocess.run(["nvidia-smi", "-q", "-d", "CLOCK,POWER,TEMPERATURE,PERFORMANCE"], timeout=10)
    print(*sorted(f"{d.name}=={d.version}" for d in importlib.metadata.distributions()))
    report.finish()
    return 0


def parse(argv) -> tuple[argparse.Namespace, list[str]]:
    p = argument_parser(__doc__)
    p.add_argument(
        "part", nargs="?", default="all", help=f"all (default), or one of {', '.join(PARTS)}, with its flags"
    )
    p.add_argument(
        "--output", type=Path, help="folder of the results (default: benchmarks/results/<UTC date and time>)"
    )
    p.add_argument("--environment", action="store_true", help=argparse.SUPPRESS)  # the process of that part
    argv = list(sys.argv[1:] if argv is None else argv)
    args, flags = p.parse_known_args(argv)
    if args.part not in ("all", *PARTS):
        raise ValueError(f"there is no part '{args.part}'; allowed: all, {', '.join(PARTS)}.")
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
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    signal.alarm(int(seconds) + 15)  # whatever this process itself waits for; the files are whole
    with tempfile.TemporaryDirectory() as temporary:
        together = args.part == "all"
        run = Run(PARTS, Path(temporary) if together else out, seconds, out if together else None)
        try:
            code = everything(run) if together else run.part(args.part, run.left, tuple(flags))
        finally:
            run.end_child()
            run.pack()
    statuses = ", ".join(f"{row['part']}: {row['status']}" for row in run.rows)
    run.say(f"\nwrote {out} in {time.monotonic() - run.began:.0f} s ({statuses})")
    return code


if __name__ == "__main__":
    sys.exit(main())
