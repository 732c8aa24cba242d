"""Runs the tests of the Triton kernels under Triton's interpreter, where there is no GPU."""

import pytest

from .devices import DEVICE, INTERPRETED, in_process

pytest.importorskip("triton")


@pytest.mark.slow_group("kernels/", "tests/scan/", "tests/features/")
@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="this is that process, or there is a GPU")
@pytest.mark.parametrize("files", [("scan/test_triton_scan", "scan/test_triton_step"), ("features/test_triton",)])
def test_in_the_interpreter(files):
    files = [f"tests/{name}.py" for name in files]
    options = ["-q", "-m", "not gpu", "-p", "no:cacheprovider", "-p", "no:xdist"]
    printed = in_process("-m", "pytest", *options, *files, TRITON_INTERPRET="1")
    assert "skipped" not in printed
