"""benchmarks/gpu.sh: rehearsals of its plan by a clock of their own, in which a part hangs, fails or is missing."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from interdomain.tools._bench import processes
from interdomain.tools._bench.pages import CHECK_FAILED

from ..common import REPOSITORY, TIMEOUT, write_program

pytestmark = pytest.mark.slow

# The plan of the first call: the seconds of every row that a part measures, as estimated for an H200 with prepared kernels.
PLAN = {
    "machine": [5, 5, 5],
    "check": [5] * 9,
    "kernels": [3.5] * 18,
    "decode": [1] * 54,
    "training-125M": [25] * 2,
    "peers": [5] * 9,
    "training-350M": [50] * 2,
    "profile of the scan": [10] * 2,
    "profile of the features": [7] * 2,
    "memcheck": [18] * 2,
}
TIME_LIMIT = 540
HANGS = 10_000

# A tool of ours, ncu and compute-sanitizer as gpu.sh starts them. The clock is a file: a row moves it on by its seconds, or to
# the end of the part's time, where `timeout` would have killed the tool.
STAND_IN = """
import json, os, pathlib, sys

def option(name):
    return sys.argv[sys.argv.index(name) + 1]

folder = pathlib.Path(os.environ["REHEARSAL"])
clock = folder / "clock"
rehearsal = json.loads((folder / "plan.json").read_text())
if "--name" in sys.argv:
    name = option("--name")
elif sys.argv[1] == "compute-sanitizer":
    name = "memcheck"
else:
    name = "profile of the scan" if "chunkwise" in sys.argv else "profile of the features"
verdicts = {"columns": ["sizes", "verdict"], "rows": rehearsal["verdicts"]}
results = {"part": name, "label": "", "started": clock.read_text(), "status": "unfinished", "environment": {}, "options": {},
           "notes": [], "tables": {"rows": {"columns": ["row"], "rows": []}}}
if name == "check":
    results["tables"]["verdicts"] = verdicts
for number, seconds in enumerate(rehearsal["seconds"][name]):
    now = float(clock.read_text()) + seconds
    if now > float(os.environ["REHEARSAL_DEADLINE"]):
        clock.write_text(os.environ["REHEARSAL_DEADLINE"])
        sys.exit(124)
    clock.write_text(str(now))
    results["tables"]["rows"]["rows"].append({"row": f"row {number} of {name}"})
    if "--output" in sys.argv:
        pathlib.Path(option("--output"), f"{name}.json").write_text(json.dumps(results))
print(len(results["tables"]["rows"]["rows"]), "rows")
sys.exit(rehearsal["status"].get(name, 0))
"""
PROGRAMS = {
    # The interpreter that gpu.sh is given: Python itself, but for the tools, and with a GPU.
    "python": """case "$*" in
  *cuda.is_available*) echo True ;;
  *_bench.pages*|*sys.version_info*|*glob*) exec "$REHEARSAL_PYTHON" "$@" ;;
  *) exec "$REHEARSAL_PYTHON" "$REHEARSAL/tool.py" "$@" ;;
esac""",
    "ncu": 'exec "$REHEARSAL_PYTHON" "$REHEARSAL/tool.py" ncu "$@"',
    "compute-sanitizer": 'exec "$REHEARSAL_PYTHON" "$REHEARSAL/tool.py" compute-sanitizer "$@"',
    "date": """if [ "$1" = +%s ]; then cut -d . -f 1 "$REHEARSAL/clock"; else exec /bin/date "$@"; fi""",
    "timeout": """seconds=$3
shift 3
export REHEARSAL_DEADLINE=$(($(cut -d . -f 1 "$REHEARSAL/clock") + seconds))
exec "$@"
""",
}


def statuses_of(folder):
    """Returns {part: its status} of a finished run of gpu.sh, in the order of summary.md."""
    summary = (folder / "summary.md").read_text()
    return dict(re.findall(r"^\| (.+?) \| (.+?) \| \d+ \|$", summary, re.MULTILINE))


def rows_of(folder):
    """Returns {part: number of rows in its results file}."""
    rows = {}
    for path in folder.glob("*.json"):
        tables = json.loads(path.read_text())["tables"]
        rows[path.stem] = len(tables["rows"]["rows"])
    return rows


def gpu_sh(*flags):
    return ["bash", str(REPOSITORY / "benchmarks/gpu.sh"), *map(str, flags)]


def rehearse(tmp_path, *flags, seconds=PLAN, status=None, verdicts=()):
    """Runs gpu.sh by a clock that is moved on by what the parts are estimated to take. Returns its exit status.

    Args:
        seconds: The seconds of every row, by part.
        status: The exit status of the parts that fail.
        verdicts: The rows of the check's verdicts.
    """
    for name, text in PROGRAMS.items():
        write_program(tmp_path / name, text)
    (tmp_path / "tool.py").write_text(STAND_IN)
    clock = tmp_path / "clock"
    clock.write_text("1000")
    plan = {"seconds": seconds, "status": status or {}, "verdicts": verdicts}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "INTERDOMAIN_PYTHON": f"{tmp_path}/python",
        "REHEARSAL": str(tmp_path),
        "REHEARSAL_PYTHON": sys.executable,
    }
    command = gpu_sh(*flags, "--output", tmp_path / "out")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    print(done.stdout, done.stderr)
    assert float(clock.read_text()) <= 1000 + TIME_LIMIT
    return done.returncode


@pytest.mark.e2e
def test_rehearsal_as_planned(tmp_path):
    assert rehearse(tmp_path) == 0
    statuses = statuses_of(tmp_path / "out").values()
    assert [status.partition(":")[0] for status in statuses] == ["complete"] * 10
    measured = {name: len(seconds) for name, seconds in PLAN.items()}
    for name in ("profile of the scan", "profile of the features", "memcheck"):
        del measured[name]
    assert rows_of(tmp_path / "out") == measured


@pytest.mark.e2e
def test_rehearsal_in_which_every_part_hangs(tmp_path):
    """A part is cut when its time is over, keeps the rows that it has, and takes nothing from the others."""
    assert rehearse(tmp_path, seconds={name: [1, HANGS] for name in PLAN}) == 0
    statuses = statuses_of(tmp_path / "out")
    assert len(statuses) == len(PLAN)
    for status in statuses.values():
        assert status.startswith("cut after")
    assert set(rows_of(tmp_path / "out").values()) == {1}


@pytest.mark.e2e
def test_rehearsal_of_a_failed_check(tmp_path):
    """It is repeated with a prepared ptxas, in time that the last parts lose. The summary names the sizes that failed."""
    verdicts = [
        {"sizes": "d=64 M=64 bfloat16", "verdict": "PASS"},
        {"sizes": "d=64 M=16 bfloat16", "verdict": "FAIL"},
    ]
    prepared = tmp_path / "prepared"
    for folder in ("site", "cache"):
        (prepared / folder).mkdir(parents=True)
    write_program(prepared / "ptxas", "echo Cuda compilation tools, release 13.5, V13.5.1")
    archive = shutil.make_archive(tmp_path / "gpu", "gztar", prepared)
    options = ("--prepared", archive)
    assert rehearse(tmp_path, *options, status={"check": 1}, verdicts=verdicts) == 1
    parts = list(statuses_of(tmp_path / "out"))
    assert parts[parts.index("check") + 1].startswith("check with another ptxas, ")
    summary = (tmp_path / "out/summary.md").read_text()
    assert f"**{CHECK_FAILED}: d=64 M=16 bfloat16.**" in summary


# In the interpreter's place: the tools write one row, and training does not end.
PYTHON = f"""case $2 in
  *_bench.pages|-*) exec '{sys.executable}' "$@" ;;
  *bench_training) echo started >"$4/started"; exec sleep 600 ;;
  interdomain.tools.*) echo "1 row; imports from ${{PYTHONPATH%%:*}}" ;;
  *) exec '{sys.executable}' "$@" ;;
esac"""


def start(tmp_path, *flags):
    """Starts gpu.sh by the real clock."""
    write_program(tmp_path / "python", PYTHON)
    environment = {**os.environ, "INTERDOMAIN_PYTHON": str(tmp_path / "python")}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = gpu_sh(*flags, "--output", tmp_path / "out")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, **streams)


@pytest.mark.e2e
def test_ended_at_any_moment(tmp_path):
    """The summary has the parts that ended. A second call overwrites nothing.

    Each part has ten thousand times its usual limit, so a busy machine cuts none.
    """
    run = start(tmp_path, "--time-limit=5400000")
    while not (tmp_path / "out/started").exists():
        assert run.poll() is None
        time.sleep(0.05)
    run.terminate()
    run.communicate(timeout=TIMEOUT)
    assert run.returncode == 128 + signal.SIGTERM
    assert list(statuses_of(tmp_path / "out")) == ["machine", "check", "kernels", "decode"]
    again = start(tmp_path)
    assert "never overwritten" in again.communicate(timeout=TIMEOUT)[0]
    assert again.returncode == 2


@pytest.mark.e2e
def test_one_tool(tmp_path):
    """A clone that is not installed is imported as it lies."""
    run = start(tmp_path, "inference")
    assert run.communicate(timeout=TIMEOUT)[0] == f"1 row; imports from {REPOSITORY}/plugin\n"


# Cases in processes of their own, as on a GPU.


def case(name, device):
    if name == "raises":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if name == "aborts":
        os.abort()
    return {"process": os.getpid()}


def test_a_case_that_raises_or_crashes_loses_its_row_alone(monkeypatch):
    """One that raises leaves its process to the next case; after one that crashes, a new process goes on."""
    for limit in ("CASE_SECONDS", "HANG_SECONDS"):
        monkeypatch.setattr(processes, limit, TIMEOUT)
    group = ["first", "raises", "second", "aborts", "third"]
    rows = {}
    device = torch.device("meta")  # no CPU: cases run in processes of their own
    processes.run_cases(device, [group], case, rows.__setitem__)
    assert len(rows) == len(group)
    assert rows["raises"].startswith("RuntimeError: CUDA error: an illegal memory access")
    assert rows["aborts"].startswith("BrokenProcessPool: ")
    assert rows["first"]["process"] == rows["second"]["process"]
    assert rows["third"]["process"] != rows["second"]["process"]


def long_case(path, device):
    """Compiles until its time was looked at, or never ends."""
    if path.stem == "compiles":
        from triton import knobs

        knobs.runtime.jit_cache_hook(key="as Triton calls it")
    path.touch()
    while path.stem == "hangs" or not path.with_name("seen").exists():
        time.sleep(0.05)
    return {}


def test_a_case_that_hangs_is_cut_and_one_that_compiles_is_not(tmp_path, monkeypatch):
    """By a clock that moves on by 30 s whenever a case is at work."""

    def monotonic():
        at_work = list(tmp_path.glob("*.case"))
        if at_work:
            (tmp_path / "seen").touch()
        return 30 * len(at_work)

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=monotonic))
    compiles = tmp_path / "compiles.case"
    hangs = tmp_path / "hangs.case"
    rows = {}
    processes.run_cases(torch.device("meta"), [[compiles, hangs]], long_case, rows.__setitem__)
    assert rows[compiles] == {"compiled": 0, "read": 0}
    assert rows[hangs] == "cut: it hung for 25 s"
