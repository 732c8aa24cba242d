"""On a GPU: the cases of tools/check_kernels.py, at the tile sizes that ship. Without one: the tests of the kernels in Triton's
interpreter, and a rehearsal of one of those cases."""

import pytest
import torch

from interdomain.tools import check_kernels
from interdomain.tools._bench.cases import groups

from .. import rehearse
from .devices import DEVICE, INTERPRETED, in_process


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("group", groups(True))
def test_check_kernels(group):
    for case in groups(True)[group]:
        row = check_kernels.run_case(case, torch.device("cuda"))
        assert row["result"] == "PASS", row


@pytest.mark.slow
@pytest.mark.skipif(
    INTERPRETED or DEVICE == "cuda", reason="this is that process, or there is a GPU"
)
def test_in_the_interpreter():
    """Names of files, tests and backends that have `triton` in them."""
    pytest.importorskip("triton")
    options = ["-q", "-k", "triton", "-m", "not gpu", "-p", "no:cacheprovider", "-p", "no:xdist"]
    tests = [
        "tests/scan/test_triton_scan.py",
        "tests/scan/test_step.py",
        "tests/features/test_triton.py",
        "tests/features/test_step.py",
        f"{__file__}::test_the_rehearsal_runs",
    ]
    output = in_process("-m", "pytest", *options, *tests, TRITON_INTERPRET="1")
    assert "skipped" not in output


@pytest.mark.skipif(not INTERPRETED, reason="runs in test_in_the_interpreter's process")
def test_the_rehearsal_runs(tmp_path):
    page = tmp_path / "page.md"
    options = ["--table", str(page), "--seeds", "1"]
    words = ["layer", "step:", "bfloat16", "mode=interdomain"]
    assert rehearse.main([*options, "--only", *words]) == 0
    row = "| layer step: triton B=2 T=4 H=4 d=64 M=64 bfloat16 mode=interdomain | 1 | 2.0e-02 |"
    assert row in page.read_text()
