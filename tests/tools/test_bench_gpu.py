"""bench_gpu with stand-ins for its tools: order, shares of time, what is on the disk when, the second assembler."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time

import pytest

from interdomain.tools import bench_gpu

from ..common import TIMEOUT

# `python -m interdomain.tools.TOOL ...`: says in $CALLS that it was called, and does what $FAKE has for its part.
TOOL = """#!{python} -SE
import json, os, signal, sys, time
argv = sys.argv[1:]
module = argv[1].split(".")[-1]
part = {{"bench_gpu": "environment", "check_kernels": "check", "pytest": "tests"}}.get(module, module.removeprefix("bench_"))
part = "passes" if "--passes" in argv else "decode" if "decode" in argv else part
how = json.loads(os.environ["FAKE"]).get(part, {{}})
with open(os.environ["CALLS"], "a") as f:
    print(json.dumps(dict(part=part, argv=argv, pid=os.getpid(), ptxas=os.environ.get("TRITON_PTXAS_PATH"))), file=f)
if os.environ.get("TRITON_PTXAS_PATH") and not how.get("always"):
    how = dict(contents=dict(status="passed"))
machine = {{"GPU": "Stand-in 9000", "ptxas": "12.8"}}
contents = dict(part=part, label="", status="complete", environment=machine, options={{}}, tables={{}}, notes=["of " + part])
if "--output" in argv:
    with open(os.path.join(argv[argv.index("--output") + 1], part + ".json"), "w") as f:
        f.write(json.dumps(contents | how.get("contents", {{}})))
print("said by", part, flush=True)
if how.get("hangs"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
sys.exit(how.get("code", 0))
"""
NCU = "#!/bin/sh\necho 'contract_kernel: Duration 0.211 ms'\n"
SANITIZER = "#!/bin/sh\necho '========= ERROR SUMMARY: 2 errors'\nexit 9\n"
PTXAS = "#!/bin/sh\necho 'Cuda compilation tools, release 99.1, V99.1.5'\n"
DRIVER = """
import sys
from interdomain.tools import _apart, bench_gpu
sys.executable = sys.argv[1]
_apart.GRACE, bench_gpu.LEAST, bench_gpu.EARLY = 0.2, 0.1, 0.0
{setup}
sys.exit(bench_gpu.main(sys.argv[2:]))
"""


class Machine:
    """Tools on a PATH of their own, and what was called."""

    def __init__(self, folder, fake=(), tools=("ncu", "compute-sanitizer", "ptxas"), setup="", seconds="540"):
        texts = {"ncu": NCU, "compute-sanitizer": SANITIZER, "ptxas": PTXAS, "nvidia-smi": "#!/bin/sh\n"}
        (folder / "bin").mkdir()
        for name in ("python", "nvidia-smi", *tools):
            path = folder / "bin" / name
            path.write_text(texts.get(name, TOOL.format(python=sys.executable)))
            path.chmod(0o755)
        self.out, self.calls_file = folder / "out", folder / "calls"
        env = {**os.environ, "PATH": f"{folder / 'bin'}:/usr/bin:/bin", "CALLS": str(self.calls_file)}
        env |= {"FAKE": json.dumps(dict(fake)), "INTERDOMAIN_SECONDS": seconds}
        env.pop("TRITON_PTXAS_PATH", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER.format(setup=setup), str(folder / "bin/python"), "--output", str(self.out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )

    def end(self):
        self.said = self.process.communicate(timeout=TIMEOUT)[0]
        return self.process.returncode

    @property
    def calls(self):
        return [json.loads(line) for line in self.calls_file.read_text().splitlines()]

    def archive(self):
        with tarfile.open(self.out / bench_gpu.ARCHIVE) as archive:
            return {
                m.name.removeprefix("results/"): archive.extractfile(m).read().decode() for m in archive if m.isfile()
            }


def test_everything_in_order_and_what_comes_back(tmp_path):
    machine = Machine(tmp_path, {"check": {"contents": {"status": "beyond bounds"}, "code": 3}})
    assert machine.end() == 1, machine.said  # the sanitizer found something
    order = ["environment", "check", "passes", "kernels", "training", "tests", "decode", "inference"]
    assert [call["part"] for call in machine.calls] == order
    limits = {
        c["part"]: int(c["argv"][c["argv"].index("--time-limit") + 1])
        for c in machine.calls
        if "--time-limit" in c["argv"]
    }
    assert limits == dict(check=120, passes=40, kernels=60, training=150, decode=60, inference=90)
    training = machine.calls[4]["argv"]
    assert training[training.index("--seq-len") + 1 :][:2] == ["4096", "65536"]
    assert {"350M", "--trace", "softmax:compile:selective"} <= set(training)

    assert sorted(path.name for path in machine.out.iterdir()) == ["log.txt", "results.tar.gz", "summary.md"]
    summary, files = (machine.out / "summary.md").read_text(), machine.archive()
    assert {"check.json", "training.json", "profile.log", "memcheck.log"} <= files.keys()
    assert "| check | beyond bounds |" in summary
    assert "Some errors are beyond their bound" in summary
    assert "| memcheck | exit status 9: ERROR SUMMARY: 2 errors |" in summary
    assert "- of training" in summary
    for words in ("contract_kernel: Duration 0.211 ms", "said by inference"):
        assert words in (machine.out / "log.txt").read_text()
    assert machine.said.splitlines()[-1].startswith(f"wrote {machine.out} in ")
    again = subprocess.run(
        [sys.executable, "-m", "interdomain.tools.bench_gpu", "--output", machine.out], capture_output=True, text=True
    )
    assert (again.returncode, "never overwritten" in again.stderr) == (2, True)


def failed(result):
    return {
        "status": "failed",
        "tables": {"scan": {"columns": ["result"], "rows": [{"result": r} for r in ("PASS", result)]}},
    }


FAILED, SLOW = failed("FAIL"), failed("FAIL: not run: time limit")


@pytest.mark.parametrize(("check", "assembler"), [(FAILED, True), (SLOW, False), (FAILED, False)])
def test_a_second_assembler_where_results_are_wrong(check, assembler, tmp_path):
    always = check is FAILED and not assembler  # with every assembler
    machine = Machine(tmp_path, {"check": {"contents": check, "code": 1, "always": always}}, tools=("ptxas",))
    assert machine.end() == (0 if assembler else 1), machine.said
    first, *again = [call["ptxas"] for call in machine.calls if call["part"] == "check"]
    other = str(tmp_path / "bin/ptxas")
    assert first is None
    assert again[:1] == ([] if check is SLOW else [other])  # the newest
    used = {call["ptxas"] for call in machine.calls if call["part"] in ("kernels", "tests")}
    assert used == {other if assembler else None}
    summary, files = (machine.out / "summary.md").read_text(), machine.archive()
    found = "THE ASSEMBLER WRITES WRONG CODE: the check failed with ptxas 12.8 and passed with 99.1"
    assert (found in summary) == assembler
    assert ("THE CORRECTNESS CHECK DID NOT PASS" in summary) == (not assembler)
    assert ("With ptxas 99.1 neither." in summary) == always
    assert ("check-ptxas-12.8.json" in files) == (check is FAILED)
    assert json.loads(files["check.json"])["status"] == ("passed" if assembler else "failed")
    assert "| profile | skipped: ncu is not installed |" in summary
    assert "| racecheck | skipped: compute-sanitizer is not installed |" in summary


def test_a_part_that_will_not_end_has_its_share_and_the_whole_has_its_time(tmp_path):
    shares = "bench_gpu.PARTS['kernels'] = bench_gpu.PARTS['kernels']._replace(seconds=0.5)"
    machine = Machine(tmp_path, {"kernels": {"hangs": 1}, "decode": {"hangs": 1}}, setup=shares, tools=(), seconds="4")
    began = time.monotonic()
    assert machine.end() == 1, machine.said
    assert time.monotonic() - began < 12
    rows = [
        line.split(" | ")[:2] for line in (machine.out / "summary.md").read_text().splitlines() if line.startswith("| ")
    ]
    status = {name.removeprefix("| "): said for name, said in rows}
    assert status["training"] == status["passes"] == "complete"
    assert status["kernels"].startswith("complete")  # its own word; the process had to be ended
    assert status["inference"] == "not run: no time left"
    for call in machine.calls:
        with pytest.raises(ProcessLookupError):
            os.kill(call["pid"], 0)


def test_killed_at_any_moment_what_was_finished_is_there(tmp_path):
    machine = Machine(tmp_path, {"training": {"hangs": 1, "contents": {"status": "unfinished"}}}, tools=())
    ends = time.monotonic() + 30
    while not (machine.calls_file.exists() and any(call["part"] == "training" for call in machine.calls)):
        assert time.monotonic() < ends
        time.sleep(0.05)
    machine.process.send_signal(signal.SIGKILL)
    os.kill(machine.calls[-1]["pid"], signal.SIGKILL)
    assert machine.end() == -signal.SIGKILL
    files = machine.archive()
    assert {"check.json", "kernels.json", "passes.json"} <= files.keys()
    assert json.loads(files["kernels.json"])["status"] == "complete"
    assert "| training | running |" in (machine.out / "summary.md").read_text()
