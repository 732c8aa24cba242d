"""benchmarks/gpu.sh: what is on the disk after a part that crashed, hung or was cut; one tool alone."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from interdomain.tools._bench import results
from interdomain.tools._bench.pages import CHECK_FAILED

from ..common import REPOSITORY, TIMEOUT

pytestmark = pytest.mark.slow_group("benchmarks/", "tools/")
# An interpreter whose `-m interdomain.tools.TOOL --output DIR` writes one row, as a tool does after each case. Then the check
# fails, and crashes with another ptxas, training does not end, and the others finish.
PYTHON = f"""#!/bin/sh
row() {{
  echo '{{"part": "'$2'", "label": "", "status": "unfinished", "environment": {{}}, "options": {{}}, "notes": [],
    "tables": {{"times": {{"columns": ["case"], "rows": [{{"case": "row of '$2'"}}]}}}}}}' >"$1/$2.json"
}}
case $2 in
  *check_kernels) row "$4" check; [ "$TRITON_PTXAS_PATH" ] || exit 1; kill -SEGV $$ ;;
  *bench_training) row "$4" training; exec sleep 600 ;;
  *bench_kernels) row "$4" kernels; echo "1 timings; complete: wrote $4/kernels.json" ;;
  *bench_inference) echo "no row; imports from ${{PYTHONPATH%%:*}}" ;;
  *) exec '{sys.executable}' "$@" ;;
esac
"""


def start(tmp_path, *flags, first="--time-limit=540"):
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    command = ["bash", str(REPOSITORY / "benchmarks/gpu.sh"), first, "--output", str(tmp_path / "out"), *flags]
    (tmp_path / "ptxas").write_text("#!/bin/sh\necho Build 13.1\n")
    (tmp_path / "ptxas").chmod(0o755)
    environment = os.environ | {"INTERDOMAIN_PYTHON": str(tmp_path / "python"), "CUDA_VISIBLE_DEVICES": ""}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def summary_of(tmp_path):
    summary = (tmp_path / "out/summary.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in summary.splitlines() if line.startswith("| ")]
    return summary, {row[0]: row[1] for row in rows if len(row) == 3}


@pytest.mark.e2e
def test_finished_rows_outlive_a_crash_and_a_hang_that_is_cut(tmp_path):
    run = start(tmp_path, "--time-limit", "6")
    printed, _ = run.communicate(timeout=TIMEOUT)
    assert run.returncode == 1, printed
    summary, statuses = summary_of(tmp_path)
    again = "check with another ptxas, Build 13.1"
    assert list(statuses) == ["part", "check", again, "kernels", "training", "inference"]
    assert statuses["check"].startswith("exit status 1:")
    assert statuses[again].startswith("exit status 139:")
    assert f"**{CHECK_FAILED}**" in summary
    assert "\n== check ==\n" in summary.partition("# Log")[2]
    assert {file.name for file in (tmp_path / "out").iterdir()} <= {
        "summary.md",
        "check.json",
        "kernels.json",
        "training.json",
    }
    assert "| row of check |" in summary
    for part, status in (("kernels", "complete: 1 timings; complete"), ("training", "cut after")):
        if not statuses[part].startswith("not run"):  # as on a machine that is too busy to come to it
            assert statuses[part].startswith(status)
            assert f"| row of {part} |" in summary
    assert statuses["inference"] == "not run: no time left"
    again = start(tmp_path)
    assert "never overwritten" in again.communicate(timeout=TIMEOUT)[0]
    assert again.returncode == 2


@pytest.mark.e2e
def test_ended_at_any_moment(tmp_path):
    run = start(tmp_path)
    while not (tmp_path / "out/training.json").exists():
        assert run.poll() is None
        time.sleep(0.05)
    run.terminate()
    run.communicate(timeout=TIMEOUT)
    assert run.returncode == 128 + signal.SIGTERM
    summary, statuses = summary_of(tmp_path)
    assert [*statuses] == ["part", "check", "check with another ptxas, Build 13.1", "kernels"]
    assert "| row of training |" in summary


@pytest.mark.e2e
def test_one_tool_and_an_unknown_one(tmp_path):
    """A clone that is not installed is imported as it lies."""
    run = start(tmp_path, first="inference")
    assert run.communicate(timeout=TIMEOUT)[0] == f"no row; imports from {REPOSITORY}/plugin\n"
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
    monkeypatch.setattr(results, "HANG_SECONDS", HANG)
    groups, rows = [["first", "raises", "second", "third"], ["aborts"], ["hangs"], ["compiles"]], {}
    results.work(torch.device("meta"), groups, case, rows.__setitem__, workers=2)  # a device that is no CPU
    assert rows.keys() == {name for group in groups for name in group}
    assert rows.pop("raises") == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert rows.pop("aborts").startswith("BrokenProcessPool: ")
    assert rows.pop("hangs") == "cut: it hung for 6 s"
    process = {name: row["process"] for name, row in rows.items()}
    assert process["second"] == process["third"]
    assert process["first"] != process["second"]
