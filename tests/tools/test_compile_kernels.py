"""compile-kernels: what it compiles for a GPU that is not there, another process finds, also in another place."""

import os
import re
import subprocess
import sys

import pytest

from ..common import TIMEOUT

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.slow


def compile_kernels(cache, *flags):
    """Returns the numbers of kernels that were compiled, and that were read from the cache."""
    program = [sys.executable, "-m", "interdomain.tools.compile_kernels"]
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [*program, "--groups", "step", "--cache", cache, *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    counts = re.search(r"(\d+) kernels compiled, (\d+) read from the cache", done.stdout)
    return int(counts[1]), int(counts[2])


@pytest.mark.e2e
def test_a_second_process_compiles_nothing(tmp_path):
    """benchmarks/prepare_gpu.sh packs the kernels and gpu.sh unpacks them. Triton writes paths into its cache."""
    cache = tmp_path / "cache"
    compiled, read = compile_kernels(cache, "--capability", "8.0")
    assert compiled > read
    architectures = set()
    for ptx in cache.glob("*/*.ptx"):
        architectures.add(re.search(r"\.target (\w+)", ptx.read_text())[1])
    assert architectures == {"sm_80"}
    moved = cache.rename(tmp_path / "moved")
    for group in moved.glob("*/__grp__*"):
        group.write_text(group.read_text().replace(str(cache), str(moved)))
    assert compile_kernels(moved, "--capability", "8.0") == (0, compiled)


def test_bad_requests(tmp_path, refused):
    from interdomain.tools import compile_kernels

    argv = ["--cache", tmp_path, "--capability", "sm_90"]
    refused(compile_kernels.main, argv, "--capability must be X.Y")
