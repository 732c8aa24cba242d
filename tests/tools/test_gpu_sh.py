"""benchmarks/gpu.sh: rehearsals of its plan by a clock of their own, in which a part hangs, fails or is missing."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from interdomain.tools._bench import processes
from interdomain.tools._bench.pages import CHECK_FAILED

from ..common import REPOSITORY, TIMEOUT

pytestmark = pytest.mark.slow

# The plan of the first call: the seconds of every row that a part measures, as estimated for an H200 with prepared kernels.
PLAN = {
    "machine": [6, 4, 5],
    "check": [5] * 9,
    "kernels": [3.5] * 18,
    "decode": [1] * 54,
    "training-125M": [25, 25],
    "peers": [5] * 9,
    "training-350M": [50, 50],
    "profile of the scan": [10, 10],
    "profile of the features": [7, 7],
    "memcheck": [18, 18],
}
LIMITS = dict(zip(PLAN, (20, 80, 75, 65, 55, 50, 105, 30, 20, 40), strict=True))
HANGS = [10_000]

# A tool of ours, ncu and compute-sanitizer as gpu.sh starts them. The clock is a file: a row moves it on by its seconds, or to
# the end of the part's time, where `timeout` would have killed the tool.
STAND_IN = """
import json, os, pathlib, sys

def option(name):
    return sys.argv[sys.argv.index(name) + 1]

clock = pathlib.Path(os.environ["REHEARSAL_CLOCK"])
rehearsal = json.loads(pathlib.Path(os.environ["REHEARSAL"]).read_text())
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
if name in rehearsal["skipped"]:
    print("Skipped: torchtitan cannot be imported.")
    sys.exit(0)
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
  *) exec "$REHEARSAL_PYTHON" "$REHEARSAL_TOOL" "$@" ;;
esac""",
    "ncu": 'exec "$REHEARSAL_PYTHON" "$REHEARSAL_TOOL" ncu "$@"',
    "compute-sanitizer": 'exec "$REHEARSAL_PYTHON" "$REHEARSAL_TOOL" compute-sanitizer "$@"',
    "date": """if [ "$1" = +%s ]; then cut -d . -f 1 "$REHEARSAL_CLOCK"; else exec /bin/date "$@"; fi""",
    "timeout": """seconds=$3
shift 3
export REHEARSAL_DEADLINE=$(($(cut -d . -f 1 "$REHEARSAL_CLOCK") + seconds))
exec "$@"
""",
}


def rehearse(tmp_path, *flags, seconds=None, status=None, skipped=(), verdicts=()):
    """Run gpu.sh by a clock that is moved on by what the parts are estimated to take.

    Returns:
        The exit status, the summary, the status of each part by its name, and the rows of each results file.
    """
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "tool.py").write_text(STAND_IN)
    (tmp_path / "clock").write_text("1000")
    plan = {
        "seconds": PLAN | (seconds or {}),
        "status": status or {},
        "skipped": skipped,
        "verdicts": verdicts,
    }
    (tmp_path / "rehearsal.json").write_text(json.dumps(plan))
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "INTERDOMAIN_PYTHON": str(tmp_path / "python"),
        "REHEARSAL": str(tmp_path / "rehearsal.json"),
        "REHEARSAL_CLOCK": str(tmp_path / "clock"),
        "REHEARSAL_PYTHON": sys.executable,
        "REHEARSAL_TOOL": str(tmp_path / "tool.py"),
    }
    command = [
        "bash",
        str(REPOSITORY / "benchmarks/gpu.sh"),
        *flags,
        "--output",
        str(tmp_path / "out"),
    ]
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    print(run.stdout, run.stderr)
    summary, statuses = summary_of(tmp_path)
    rows = {}
    for path in (tmp_path / "out").glob("*.json"):
        rows[path.stem] = len(json.loads(path.read_text())["tables"]["rows"]["rows"])
    assert float((tmp_path / "clock").read_text()) <= 1000 + sum(LIMITS.values())
    return run.returncode, summary, statuses, rows


def summary_of(tmp_path):
    summary = (tmp_path / "out/summary.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in summary.splitlines() if line.startswith("| ")]
    return summary, {row[0]: row[1] for row in rows if len(row) == 3 and row[0] != "part"}


def part_name(name):
    return "flash-linear-attention" if name == "peers" else name


@pytest.mark.e2e
def test_rehearsal_as_planned(tmp_path):
    code, _, statuses, rows = rehearse(tmp_path)
    assert code == 0
    assert list(statuses) == [part_name(name) for name in PLAN]
    assert {status.partition(":")[0] for status in statuses.values()} == {"complete"}
    measured = [name for name in PLAN if not name.startswith(("profile", "memcheck"))]
    assert rows == {name: len(PLAN[name]) for name in measured}
    # A lent machine sends eight files back.
    assert sorted(path.stem for path in (tmp_path / "out").iterdir()) == sorted(
        [*measured, "summary"]
    )


@pytest.mark.e2e
def test_rehearsal_in_which_every_part_hangs(tmp_path):
    """A part is cut when its time is over, keeps the rows that it has, and takes nothing from the others."""
    code, _, statuses, rows = rehearse(tmp_path, seconds={name: [1, *HANGS] for name in PLAN})
    assert code == 0
    assert len(statuses) == len(PLAN)
    assert all(status.startswith("cut after") for status in statuses.values())
    assert {*rows.values()} == {1}


@pytest.mark.e2e
def test_rehearsal_with_kernels_that_were_not_prepared(tmp_path):
    """All 205 are compiled in the check: 277 s of processor time on twelve cores."""
    code, _, statuses, rows = rehearse(tmp_path, seconds={"check": [12] * 9})
    assert code == 0
    assert statuses.pop("check").startswith("cut after")
    assert rows["check"] == 7
    assert all(status.startswith("complete") for status in statuses.values())


@pytest.mark.e2e
def test_rehearsal_without_torchtitan_and_with_a_peer_that_raises(tmp_path):
    training = [name for name in PLAN if name.startswith("training")]
    code, _, statuses, rows = rehearse(
        tmp_path, skipped=training, status={"peers": 1}, seconds={"peers": [2]}
    )
    assert code == 1
    assert statuses["training-125M"] == "complete: Skipped: torchtitan cannot be imported."
    assert statuses["flash-linear-attention"].startswith("exit status 1")
    assert not rows.keys() & {*training}
    assert all(
        statuses[part].startswith("complete")
        for part in ("decode", "profile of the scan", "memcheck")
    )


@pytest.mark.e2e
def test_rehearsal_of_a_failed_check(tmp_path):
    """It is repeated with a prepared ptxas, in time that the last parts lose; what failed is named by its sizes."""
    verdicts = [
        {"sizes": "d=64 M=64 bfloat16", "verdict": "PASS"},
        {"sizes": "d=64 M=16 bfloat16", "verdict": "FAIL"},
    ]
    prepared = tmp_path / "prepared"
    (prepared / "site").mkdir(parents=True)
    (prepared / "cache").mkdir()
    (prepared / "ptxas").write_text(
        "#!/bin/sh\necho Cuda compilation tools, release 13.5, V13.5.1\n"
    )
    (prepared / "ptxas").chmod(0o755)
    subprocess.run(["tar", "-czf", tmp_path / "gpu.tar.gz", "-C", prepared, "."], check=True)
    failed = {"status": {"check": 1}, "verdicts": verdicts}
    code, summary, statuses, _ = rehearse(
        tmp_path, "--prepared", str(tmp_path / "gpu.tar.gz"), **failed
    )
    assert code == 1
    again = [part for part in statuses if part.startswith("check with another ptxas, ")]
    assert len(again) == 1
    assert list(statuses).index(again[0]) == list(statuses).index("check") + 1
    assert f"**{CHECK_FAILED}: d=64 M=16 bfloat16.**" in summary


def start(tmp_path, *flags, first="--time-limit=540"):
    """gpu.sh by the real clock, with tools that write one row; training does not end."""
    (tmp_path / "python").write_text(f"""#!/bin/sh
case $2 in
  *_bench.pages|-*) exec '{sys.executable}' "$@" ;;
  *bench_training) echo started >"$4/started"; exec sleep 600 ;;
  interdomain.tools.*) echo "1 row; imports from ${{PYTHONPATH%%:*}}" ;;
  *) exec '{sys.executable}' "$@" ;;
esac
""")
    (tmp_path / "python").chmod(0o755)
    command = [
        "bash",
        str(REPOSITORY / "benchmarks/gpu.sh"),
        first,
        "--output",
        str(tmp_path / "out"),
        *flags,
    ]
    environment = os.environ | {
        "INTERDOMAIN_PYTHON": str(tmp_path / "python"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.e2e
def test_a_part_that_hangs_is_killed_by_the_real_clock(tmp_path):
    run = start(tmp_path, "--time-limit", "20")
    printed, _ = run.communicate(timeout=TIMEOUT)
    _, statuses = summary_of(tmp_path)
    assert statuses["training-125M"].startswith(("cut after", "not run")), (
        printed
    )  # not run: on a busy machine
    again = start(tmp_path)
    assert "never overwritten" in again.communicate(timeout=TIMEOUT)[0]
    assert again.returncode == 2


@pytest.mark.e2e
def test_ended_at_any_moment(tmp_path):
    run = start(tmp_path)
    while not (tmp_path / "out/started").exists():
        assert run.poll() is None
        time.sleep(0.05)
    run.terminate()
    run.communicate(timeout=TIMEOUT)
    assert run.returncode == 128 + signal.SIGTERM
    _, statuses = summary_of(tmp_path)
    assert [*statuses] == ["machine", "check", "kernels", "decode"]


@pytest.mark.e2e
def test_one_tool_and_an_unknown_one(tmp_path):
    """A clone that is not installed is imported as it lies."""
    run = start(tmp_path, first="inference")
    assert run.communicate(timeout=TIMEOUT)[0] == f"1 row; imports from {REPOSITORY}/plugin\n"
    run = start(tmp_path, first="decoding")
    assert "there is no tool or option 'decoding'" in run.communicate(timeout=TIMEOUT)[0]
    assert run.returncode == 2


# Cases in processes of their own, as on a GPU.
HANG = 6.0


def case(name, device):
    if name == "raises":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if name == "aborts":
        os.abort()
    if name == "hangs":
        time.sleep(600)
    if name == "compiles":
        runtime = pytest.importorskip("triton.knobs").runtime
        runtime.jit_cache_hook(key="as Triton calls it")
        time.sleep(1.2 * HANG)
        runtime.jit_post_compile_hook(key="and after")
    return {"process": os.getpid()}


def test_a_case_that_raises_crashes_or_hangs_loses_its_row_alone(monkeypatch):
    """One that raises leaves its process to the next case; after one that crashes, a new process goes on."""
    monkeypatch.setattr(processes, "HANG_SECONDS", HANG)
    groups = [["first", "raises", "second", "aborts", "third"], ["hangs"], ["compiles"]]
    rows = {}
    device = torch.device("meta")  # no CPU: cases run in processes of their own
    processes.run_cases(device, groups, case, rows.__setitem__, workers=2)
    assert rows.keys() == {name for group in groups for name in group}
    assert rows.pop("raises").startswith("RuntimeError: CUDA error: an illegal memory access")
    assert rows.pop("aborts").startswith("BrokenProcessPool: ")
    assert rows.pop("hangs") == "cut: it hung for 6 s"
    process = {name: row["process"] for name, row in rows.items()}
    assert process["first"] == process["second"]
    assert process["third"] != process["second"]
