"""bench_gpu with stand-ins for its tools: order, shares of time, what is on the disk when."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from ..common import TIMEOUT

# `python -m interdomain.tools.TOOL ...`: notes in $CALLS that it was called, and does what $FAKE has for its part.
TOOL = """#!{python} -SE
import json, os, sys, time
argv = sys.argv[1:]
part = argv[1].split(".")[-1].replace("check_kernels", "check").removeprefix("bench_")
how = json.loads(os.environ["FAKE"]).get(part, {{}})
with open(os.environ["CALLS"], "a") as f:
    print(json.dumps(dict(part=part, argv=argv, pid=os.getpid())), file=f)
status = how.get("status", "complete")
contents = dict(part=part, label="", status=status, environment={{}}, options={{}}, tables={{}}, notes=["of " + part])
with open(os.path.join(argv[argv.index("--output") + 1], part + ".json"), "w") as f:
    json.dump(contents, f)
print("said by", part, flush=True)
if how.get("hangs"):
    time.sleep(600)
sys.exit(how.get("code", 0))
"""
PROGRAMS = {
    "ncu": "#!/bin/sh\necho 'contract_kernel: Duration 0.211 ms'\n",
    "compute-sanitizer": "#!/bin/sh\necho '========= ERROR SUMMARY: 2 errors'\nexit 9\n",
    "nvidia-smi": "#!/bin/sh\n",
    "bash": "#!/bin/sh\necho '9 passed'\n",  # pytest
}
DRIVER = """
import sys, torch
torch.cuda.is_available = lambda: True
sys.executable = sys.argv[1]
from interdomain.tools import bench_gpu
bench_gpu.LEAST, bench_gpu.EARLY = 0.1, 0.0
{setup}
sys.exit(bench_gpu.main(sys.argv[2:]))
"""


class Machine:
    """Tools on a PATH of their own, and what was called."""

    def __init__(self, folder, fake=(), tools=PROGRAMS, setup="", seconds="540"):
        (folder / "bin").mkdir()
        for name in ("python", *tools):
            path = folder / "bin" / name
            path.write_text(PROGRAMS.get(name, TOOL.format(python=sys.executable)))
            path.chmod(0o755)
        self.out, self.calls_file = folder / "out", folder / "calls"
        env = {**os.environ, "PATH": str(folder / "bin"), "CALLS": str(self.calls_file), "FAKE": json.dumps(dict(fake))}
        command = [sys.executable, "-c", DRIVER.format(setup=setup), str(folder / "bin/python")]
        command += ["--output", str(self.out), "--time-limit", seconds]
        streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.process = subprocess.Popen(command, env=env, **streams)

    def end(self):
        self.said = self.process.communicate(timeout=TIMEOUT)[0]
        return self.process.returncode

    @property
    def calls(self):
        return [json.loads(line) for line in self.calls_file.read_text().splitlines()]

    def statuses(self):
        lines = (self.out / "summary.md").read_text().splitlines()
        rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
        return {name: status for name, status, _ in rows}


def test_everything_in_order_and_what_comes_back(tmp_path):
    machine = Machine(tmp_path, {"check": {"status": "beyond bounds", "code": 3}})
    assert machine.end() == 1, machine.said  # the sanitizer found something
    limits = [(c["part"], int(c["argv"][c["argv"].index("--time-limit") + 1])) for c in machine.calls]
    assert limits == [("check", 120), ("kernels", 100), ("training", 150), ("inference", 150)]
    assert {"350M", "--trace", "softmax:compile:selective"} <= set(machine.calls[2]["argv"])

    tools = {f"{part}.json" for part, _ in limits}
    assert {path.name for path in machine.out.iterdir()} == {*tools, "log.txt", "summary.md"}
    assert machine.statuses() == {
        "part": "status",
        "machine": "complete: no word",
        "check": "beyond bounds",
        "profile": "complete: contract_kernel: Duration 0.211 ms",
        "tests": "complete: 9 passed",
        **dict.fromkeys(("memcheck", "racecheck"), "exit status 9: ERROR SUMMARY: 2 errors"),
        **dict.fromkeys(("kernels", "training", "inference"), "complete"),
    }
    summary, log = ((machine.out / name).read_text() for name in ("summary.md", "log.txt"))
    assert "DID NOT PASS" not in summary
    assert "- of training" in summary
    assert "said by inference" in log


def test_a_part_that_will_not_end_has_its_share_and_the_whole_has_its_time(tmp_path):
    shares = "bench_gpu.PARTS['kernels'] = (0.5, *bench_gpu.PARTS['kernels'][1:])"
    fake = {"check": {"status": "failed", "code": 1}, "kernels": {"hangs": 1}, "training": {"hangs": 1}}
    machine = Machine(tmp_path, fake, setup=shares, tools=(), seconds="4")
    began = time.monotonic()
    assert machine.end() == 1, machine.said
    assert time.monotonic() - began < 30
    statuses = machine.statuses()
    assert statuses["kernels"].startswith("complete")  # its own word; the process had to be ended
    assert statuses["memcheck"] == "skipped: compute-sanitizer is not installed"
    assert statuses["inference"] == "not run: no time left"
    assert "THE CORRECTNESS CHECK DID NOT PASS" in (machine.out / "summary.md").read_text()
    for call in machine.calls:
        with pytest.raises(ProcessLookupError):
            os.kill(call["pid"], 0)


def test_ended_at_any_moment_what_was_finished_is_there(tmp_path):
    machine = Machine(tmp_path, {"training": {"hangs": 1, "status": "unfinished"}}, tools=())
    ends = time.monotonic() + 60
    while not (machine.calls_file.exists() and any(call["part"] == "training" for call in machine.calls)):
        assert time.monotonic() < ends
        time.sleep(0.05)
    machine.process.terminate()
    assert machine.end() == 128 + signal.SIGTERM, machine.said
    assert json.loads((machine.out / "kernels.json").read_text())["status"] == "complete"
    assert machine.statuses()["kernels"] == "complete"
    with pytest.raises(ProcessLookupError):
        os.kill(machine.calls[-1]["pid"], 0)
