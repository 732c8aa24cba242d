"""check_kernels in CPU tiny mode: what it writes, what it finds, and how it judges."""

from types import SimpleNamespace

import pytest
import torch

from interdomain import scan
from interdomain.scan import chunkwise, ops
from interdomain.tools import _apart, _bench, bench_kernels, check_kernels

from .test_bench_kernels import results

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU tiny mode; on a GPU run benchmarks/gpu.sh")


def test_every_backend_passes(tmp_path):
    assert check_kernels.main(["--output", str(tmp_path)]) == 0
    contents = results(tmp_path, "check")
    assert contents["status"] == "passed"
    assert contents["options"]["groups"] == list(check_kernels.groups(False))
    rows = [row for table in contents["tables"].values() for row in table["rows"]]
    assert {row["result"] for row in rows} == {"PASS"}
    backends = {row["case"].split()[0] for row in contents["tables"]["scan"]["rows"]}
    assert backends == set(scan.BACKENDS) - {"auto"}
    assert all(row["dinitial_state"] < row["bound"] for row in rows if "no state" not in row["case"] and "dq" in row)


def test_groups_run_in_processes_of_their_own(tmp_path, monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(_apart, "inline", _apart.run)
    assert check_kernels.main(["--output", str(tmp_path), "--groups", "reference", "chunkwise-M128"]) == 0
    contents = results(tmp_path, "check")
    assert [row["result"] for table in contents["tables"].values() for row in table["rows"]] == ["PASS"] * 3


def replace_chunkwise(monkeypatch, **functions):
    """Of the backend `chunkwise`, and not of `chunkwise-torch`, which is the same module."""
    changed, real = SimpleNamespace(**vars(chunkwise) | functions), ops.implementation
    chosen = lambda backend, device: changed if backend == "chunkwise" else real(backend, device)  # noqa: E731
    monkeypatch.setattr(ops, "implementation", chosen)


def test_a_broken_kernel_fails_the_check_and_marks_the_rest(tmp_path, monkeypatch):
    backward = chunkwise.scan_backward

    def broken(*args, **kw):
        dq, dk, *rest = backward(*args, **kw)
        return dq, 1.05 * dk, *rest

    replace_chunkwise(monkeypatch, scan_backward=broken)
    assert check_kernels.main(["--output", str(tmp_path), "--groups", "chunkwise-M128", "chunkwise-torch"]) == 1
    contents = results(tmp_path, "check")
    assert contents["status"] == "failed"
    found = {row["case"].split()[0]: row["result"] for row in contents["tables"]["scan"]["rows"]}
    assert found == {"chunkwise": "FAIL", "chunkwise-torch": "PASS"}
    (row,) = (row for row in contents["tables"]["scan"]["rows"] if row["result"] == "FAIL")
    assert row["dk"] > 3 * row["bound"] > row["bound"] > row["dq"]
    assert bench_kernels.main(["--output", str(tmp_path), "--mixers", "sdpa-flash", "--shapes", "1x8x8"]) == 0
    assert results(tmp_path, "kernels")["check"] == "failed"
    assert _bench.CHECK_FAILED in results(tmp_path, "kernels")["notes"]


def test_nan_other_bits_and_exceptions_fail(monkeypatch):
    calls, forward = [], chunkwise.scan_forward
    (case,) = check_kernels.groups(False)["chunkwise-M128"]

    def run(make):
        replace_chunkwise(monkeypatch, scan_forward=make)
        return check_kernels.run_case(case, torch.device("cpu"))

    def nan(*args, **kw):
        o, state, *kept = forward(*args, **kw)
        return o * float("nan"), state, *kept

    def unsteady(*args, **kw):
        calls.append(1)
        o, state, *kept = forward(*args, **kw)
        return o, state + 1e-7 * len(calls), *kept

    def fails(*args, **kw):
        raise RuntimeError("out of resources")

    assert run(nan)["result"] == "FAIL"
    row = run(unsteady)
    assert (row["result"], row["bit-equal"]) == ("FAIL", False)
    assert run(fails)["result"] == "FAIL: RuntimeError: out of resources"


@pytest.mark.parametrize(
    ("error", "result", "code", "status"),
    [
        (1.1, "beyond the bound", 3, "beyond bounds"),
        (2.9, "beyond the bound", 3, "beyond bounds"),
        (3.1, "FAIL", 1, "failed"),
        (float("nan"), "FAIL", 1, "failed"),
    ],
)
def test_beyond_the_bound_is_not_failed(error, result, code, status, tmp_path, monkeypatch):
    """One tensor of the first case is `error` bounds off."""
    (case, _) = check_kernels.groups(False)["reference"]
    errors = iter([error * check_kernels.BOUNDS[case.arithmetic]])
    monkeypatch.setattr(check_kernels, "relative_rms", lambda got, exact: next(errors, 0.0))
    assert check_kernels.main(["--output", str(tmp_path), "--groups", "reference"]) == code
    contents = results(tmp_path, "check")
    assert contents["status"] == status
    (row,), (other,) = (contents["tables"][kind]["rows"] for kind in ("scan", "linear scan"))
    assert (row["result"], other["result"]) == (result, "PASS")
    assert {"out", "state", "dq", "dk", "dv", "dlog_decay", "dmixing", "dinitial_state"} <= row.keys()


def test_the_list_for_a_gpu_covers_what_is_promised():
    cases = [case for group in check_kernels.groups(True).values() for case in group]
    promised = dict(d={64, 96}, M={16, 32, 64, 128}, T={1, 65, 257, 32_768, 70_001}, G={1, 2, 4})
    for size, values in promised.items():
        assert values <= {getattr(case.shape, size) for case in cases}
    assert {case.mode for case in cases if case.kind == "step"} == {"", "in place", "graph"}
    for backend in ("chunkwise", "sequential", "parallel", "fft"):
        mine = {(c.kind, c.dtype) for c in cases if c.backend == backend and "scan" in c.kind}
        dtypes = (torch.bfloat16, torch.float32)
        assert mine >= {(kind, dtype) for kind in ("scan", "linear scan") for dtype in dtypes}
