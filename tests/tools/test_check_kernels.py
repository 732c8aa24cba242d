"""check_kernels in CPU tiny mode: what it writes, what it finds, and how it judges."""

import itertools

import pytest
import torch

from interdomain.model.mixers import interdomain as mixer
from interdomain.scan import chunkwise
from interdomain.scan.chunkwise import scan_backward, scan_forward
from interdomain.tools import bench_kernels, check_kernels
from interdomain.tools._bench import processes
from interdomain.tools._bench.pages import CHECK_FAILED, UNFINISHED

from .test_bench_kernels import results

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU tiny mode; on a GPU run benchmarks/gpu.sh"
)
CPU = torch.device("cpu")


def check(folder, *groups):
    """Returns the exit status of the command."""
    return check_kernels.main(["--output", str(folder), "--groups", *groups])


def bench(folder):
    """Returns the results of a benchmark in the folder of a check."""
    options = ["--mixers", "sdpa-flash", "--shapes", "1x8x2x8"]
    assert bench_kernels.main(["--output", str(folder), *options]) == 0
    return results(folder, "kernels")


def rows_of(folder):
    return results(folder, "check")["tables"]["cases"]["rows"]


def test_every_backend_passes(tmp_path):
    assert check_kernels.main(["--output", str(tmp_path)]) == 0
    assert results(tmp_path, "check")["status"] == "passed"
    tensors = {}
    for row in rows_of(tmp_path):
        assert row["result"] == "PASS"
        name = row["case"].split(" B=")[0]
        tensors.setdefault(name, set()).update(row["errors"])
    scan = {"out", "state", "dq", "dk", "dv", "dlog_decay", "dmixing", "dinitial_state"}
    for backend in ("chunkwise", "chunkwise-torch", "reference"):
        assert tensors[f"scan: {backend}"] >= scan
    assert {"scan: fft", "step:", "linear step:", "layer step: torch"} <= tensors.keys()
    assert {"out", "dx", "dmixer.wq.weight", "dmixer.v_norm.weight"} <= tensors["layer: torch"]


def test_a_broken_kernel_fails_the_check_and_marks_the_rest(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        dq, dk, *rest = scan_backward(*args, **kwargs)
        return dq, 1.05 * dk, *rest

    monkeypatch.setattr(chunkwise, "scan_backward", broken)
    assert check(tmp_path, "chunkwise-M128", "chunkwise-linear") == 1
    assert results(tmp_path, "check")["status"] == "failed"
    row, *others = rows_of(tmp_path)
    assert (row["result"], row["in"]) == ("FAIL", "dk")
    assert {other["result"] for other in others} == {"PASS"}
    # Other tools name the sizes that failed, and only those.
    contents = bench(tmp_path)
    assert contents["check"]["d=8 M=16 bfloat16"] == "FAIL"
    assert contents["check"]["d=8 M=8 bfloat16"] == "PASS"
    assert f"{CHECK_FAILED}: d=8 M=16 bfloat16." in contents["notes"]


@pytest.mark.parametrize(
    ("kind", "name"), [("layer", "input_features"), ("layer step", "input_features_step")]
)
@pytest.mark.parametrize("stage", ["conv", "rope", "norm", "silu"])
def test_broken_input_features_fail_the_check(kind, name, stage, monkeypatch):
    """The kernel loses a bias or a sine, or leaves an activation out."""
    real = getattr(mixer, name)

    def broken(x, head_dim, **stages):
        # The exact values are computed in float64.
        if x.dtype == torch.float64 or not stages.get(stage):
            return real(x, head_dim, **stages)
        if stage == "silu":
            stages[stage] = False
        else:
            first, second = stages[stage]
            stages[stage] = (first, 0 * second)
        return real(x, head_dim, **stages)

    monkeypatch.setattr(mixer, name, broken)
    for case in check_kernels.groups(False)["layer-interdomain"]:
        if case.kind == kind:
            break
    assert check_kernels.run_case(case, CPU)["result"] == "FAIL"


def break_forward(monkeypatch, change):
    """Changes the output and the state of the scan's forward pass in place."""

    def broken(*args, **kwargs):
        results = scan_forward(*args, **kwargs)
        change(results[0], results[1])
        return results

    monkeypatch.setattr(chunkwise, "scan_forward", broken)


def test_nan_and_another_result_at_the_second_call_fail(monkeypatch):
    case = check_kernels.groups(False)["chunkwise-M128"][0]
    calls = itertools.count(1)

    def spoil(o, state):
        o.fill_(float("nan"))

    def drift(o, state):
        state += 1e-7 * next(calls)

    break_forward(monkeypatch, spoil)
    assert check_kernels.run_case(case, CPU)["result"] == "FAIL"
    break_forward(monkeypatch, drift)
    row = check_kernels.run_case(case, CPU)
    assert row["result"] == "FAIL"
    assert not row["bit-equal"]


def test_an_exception_fails(monkeypatch, tmp_path):
    def raise_error(o, state):
        raise RuntimeError("out of resources")

    break_forward(monkeypatch, raise_error)
    assert check(tmp_path, "chunkwise-M128") == 1
    (row,) = rows_of(tmp_path)
    assert row["result"] == "FAIL: RuntimeError: out of resources"


def test_a_check_that_was_cut_has_not_failed(tmp_path, monkeypatch):
    """The cases that ran have verdicts. A figure of sizes that are not finished says so."""
    run_cases = processes.run_cases

    def run_the_first_group(device, groups, run, add, workers):
        run_cases(device, groups[:1], run, add, workers)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(processes, "run_cases", run_the_first_group)
        with pytest.raises(KeyboardInterrupt):
            check(tmp_path, "chunkwise-M128", "chunkwise-fp16")
    assert results(tmp_path, "check")["status"] == "unfinished"
    contents = bench(tmp_path)
    assert contents["check"] == {"d=8 M=16 bfloat16": "PASS", "d=8 M=8 float16": UNFINISHED}
    notes = " ".join(contents["notes"])
    assert CHECK_FAILED not in notes
    assert "d=8 M=8 float16" in notes


@pytest.mark.parametrize(
    ("bounds", "code", "status", "result"),
    [(2.9, 3, "beyond bounds", "beyond the bound"), (3.1, 1, "failed", "FAIL")],
)
def test_beyond_the_bound_is_not_failed(bounds, code, status, result, tmp_path, monkeypatch):
    """The output is `bounds` times its bound off, and the other tensors are exact."""
    errors = [bounds * check_kernels.groups(False)["chunkwise-M128"][0].bound("out")]

    def relative_rms(got, exact):
        return errors.pop() if errors else 0.0

    monkeypatch.setattr(check_kernels, "relative_rms", relative_rms)
    assert check(tmp_path, "chunkwise-M128") == code
    contents = results(tmp_path, "check")
    assert contents["status"] == status
    assert contents["tables"]["cases"]["rows"][0]["result"] == result
