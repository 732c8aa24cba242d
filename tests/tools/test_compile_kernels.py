"""compile-kernels: what it compiles for a GPU that is not there, another process finds, also in another place."""

import os
import re
import subprocess
import sys

import pytest

from ..common import TIMEOUT

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.slow
COUNTS = re.compile(r"(\d+) kernels compiled, (\d+) read from the cache")


def compile_kernels(cache, *flags):
    command = [
        sys.executable,
        "-m",
        "interdomain.tools.compile_kernels",
        "--cache",
        str(cache),
        *flags,
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stderr
    compiled, read = COUNTS.search(done.stdout).groups()
    return int(compiled), int(read)


@pytest.mark.e2e
def test_a_second_process_compiles_nothing(tmp_path):
    """As benchmarks/prepare_gpu.sh packs the kernels and gpu.sh unpacks them, whose paths Triton writes into its cache."""
    compiled, read = compile_kernels(tmp_path / "cache", "--groups", "step")
    assert compiled > 0
    assert read == 0
    moved = (tmp_path / "cache").rename(tmp_path / "moved")
    for group in moved.glob("*/__grp__*"):
        group.write_text(group.read_text().replace(str(tmp_path / "cache"), str(moved)))
    assert compile_kernels(moved, "--groups", "step") == (0, compiled)
    # Kernels for another GPU are others.
    assert compile_kernels(moved, "--groups", "step", "--capability", "8.0") == (compiled, 0)


def test_bad_requests(tmp_path, refused):
    from interdomain.tools import compile_kernels

    refused(
        compile_kernels.main,
        ["--cache", tmp_path, "--capability", "sm_90"],
        "--capability must be X.Y",
    )
