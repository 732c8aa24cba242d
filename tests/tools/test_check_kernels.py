"""check_kernels in CPU tiny mode: what it writes, what it finds, and how it judges."""

from types import SimpleNamespace

import pytest
import torch

from interdomain.model.mixers import interdomain as mixer
from interdomain.scan import chunkwise, ops
from interdomain.tools import bench_kernels, check_kernels
from interdomain.tools._bench import processes
from interdomain.tools._bench.pages import CHECK_FAILED, UNFINISHED

from .test_bench_kernels import results

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU tiny mode; on a GPU run benchmarks/gpu.sh"
)
CPU = torch.device("cpu")


def test_every_backend_passes(tmp_path):
    assert check_kernels.main(["--output", str(tmp_path)]) == 0
    contents = results(tmp_path, "check")
    assert contents["status"] == "passed"
    rows = contents["tables"]["cases"]["rows"]
    assert {row["result"] for row in rows} == {"PASS"}
    errors = {}
    for row in rows:
        errors.setdefault(row["case"].split(" B=")[0], set()).update(row["errors"])
    tensors = {"out", "state", "dq", "dk", "dv", "dlog_decay", "dmixing", "dinitial_state"}
    for backend in ("chunkwise", "chunkwise-torch", "reference"):
        assert errors[f"scan: {backend}"] >= tensors
    assert {"scan: fft", "step:", "linear step:", "layer step: torch"} <= errors.keys()
    assert {"out", "dx", "dmixer.wq.weight", "dmixer.v_norm.weight"} <= errors["layer: torch"]


def replace_chunkwise(monkeypatch, **functions):
    """Replace a function of the backend `chunkwise`, and not of `chunkwise-torch`, which is the same module."""
    changed, real = SimpleNamespace(**vars(chunkwise) | functions), ops.implementation
    chosen = lambda backend, device: changed if backend == "chunkwise" else real(backend, device)  # noqa: E731
    monkeypatch.setattr(ops, "implementation", chosen)


def test_a_broken_kernel_fails_the_check_and_marks_the_rest(tmp_path, monkeypatch):
    backward = chunkwise.scan_backward

    def broken(*args, **kw):
        dq, dk, *rest = backward(*args, **kw)
        return dq, 1.05 * dk, *rest

    replace_chunkwise(monkeypatch, scan_backward=broken)
    assert (
        check_kernels.main(
            ["--output", str(tmp_path), "--groups", "chunkwise-M128", "chunkwise-linear"]
        )
        == 1
    )
    contents = results(tmp_path, "check")
    assert contents["status"] == "failed"
    row, *others = contents["tables"]["cases"]["rows"]
    assert (row["result"], row["in"], {other["result"] for other in others}) == (
        "FAIL",
        "dk",
        {"PASS"},
    )
    assert row["worst"] > 3 * row["bound"] > row["bound"] > row["errors"]["dq"]
    assert (
        bench_kernels.main(
            ["--output", str(tmp_path), "--mixers", "sdpa-flash", "--shapes", "1x8x2x8"]
        )
        == 0
    )
    # Other tools name the sizes that failed, and only those.
    bf16, fp32 = "d=8 M=8 bfloat16", "d=8 M=8 float32"
    verdicts = results(tmp_path, "kernels")["check"]
    assert verdicts["d=8 M=16 bfloat16"] == "FAIL"
    assert (verdicts[bf16], verdicts[fp32]) == ("PASS", "PASS")
    assert f"{CHECK_FAILED}: d=8 M=16 bfloat16." in results(tmp_path, "kernels")["notes"]


@pytest.mark.parametrize(
    ("kind", "name"), [("layer", "input_features"), ("layer step", "input_features_step")]
)
@pytest.mark.parametrize("stage", ["conv", "rope", "norm", "silu"])
def test_broken_input_features_fail_the_check(kind, name, stage, monkeypatch):
    """A bias or a sine that the kernel loses, an activation that it leaves out."""
    make = getattr(mixer, name)

    def broken(x, head_dim, **given):
        if x.dtype != torch.float64 and given.get(stage):
            given[stage] = 0 if stage == "silu" else (given[stage][0], 0 * given[stage][1])
        return make(x, head_dim, **given)

    monkeypatch.setattr(mixer, name, broken)
    (case, *_) = (
        case for case in check_kernels.groups(False)["layer-interdomain"] if case.kind == kind
    )
    assert check_kernels.run_case(case, CPU)["result"] == "FAIL"


def test_nan_other_bits_and_exceptions_fail(monkeypatch, tmp_path):
    calls, forward = [], chunkwise.scan_forward
    (case,) = check_kernels.groups(False)["chunkwise-M128"]

    def row_of(change):
        def broken(*args, **kw):
            o, state, *kept = forward(*args, **kw)
            return *change(o, state), *kept

        replace_chunkwise(monkeypatch, scan_forward=broken)
        return check_kernels.run_case(case, CPU)

    def unsteady(o, state):
        calls.append(1)
        return o, state + 1e-7 * len(calls)

    def fails(o, state):
        raise RuntimeError("out of resources")

    assert row_of(lambda o, state: (o * float("nan"), state))["result"] == "FAIL"
    row = row_of(unsteady)
    assert (row["result"], row["bit-equal"]) == ("FAIL", False)
    with pytest.raises(RuntimeError):
        row_of(fails)
    assert check_kernels.main(["--output", str(tmp_path), "--groups", "chunkwise-M128"]) == 1
    (row,) = results(tmp_path, "check")["tables"]["cases"]["rows"]
    assert row["result"] == "FAIL: RuntimeError: out of resources"


def test_a_check_that_was_cut_has_not_failed(tmp_path, monkeypatch):
    """What ran has its verdict; a figure of sizes that are not finished says so."""

    run_cases = processes.run_cases

    def run_the_first_group(device, groups, run, add, workers):
        run_cases(device, groups[:1], run, add, workers)
        raise KeyboardInterrupt

    groups = ["chunkwise-M128", "chunkwise-fp16"]
    monkeypatch.setattr(processes, "run_cases", run_the_first_group)
    with pytest.raises(KeyboardInterrupt):
        check_kernels.main(["--output", str(tmp_path), "--groups", *groups])
    monkeypatch.setattr(processes, "run_cases", run_cases)
    assert results(tmp_path, "check")["status"] == "unfinished"
    assert (
        bench_kernels.main(
            ["--output", str(tmp_path), "--mixers", "sdpa-flash", "--shapes", "1x8x2x8"]
        )
        == 0
    )
    contents = results(tmp_path, "kernels")
    assert contents["check"] == {"d=8 M=16 bfloat16": "PASS", "d=8 M=8 float16": UNFINISHED}
    assert not any(CHECK_FAILED in note for note in contents["notes"])
    assert any("d=8 M=8 float16" in note for note in contents["notes"])


@pytest.mark.parametrize(("error", "code"), [(1.1, 3), (2.9, 3), (3.1, 1)])
def test_beyond_the_bound_is_not_failed(error, code, tmp_path, monkeypatch):
    """One tensor is `error` bounds off."""
    (case,) = check_kernels.groups(False)["chunkwise-M128"]
    errors = iter([error * case.bound("out")])
    monkeypatch.setattr(check_kernels, "relative_rms", lambda got, exact: next(errors, 0.0))
    assert check_kernels.main(["--output", str(tmp_path), "--groups", "chunkwise-M128"]) == code
    contents = results(tmp_path, "check")
    (row,) = contents["tables"]["cases"]["rows"]
    expected = ("beyond bounds", "beyond the bound") if code == 3 else ("failed", "FAIL")
    assert (contents["status"], row["result"]) == expected
