"""The story of docs/torchtitan.md: a fresh folder, a TOML file, TorchTitan's own entry, convert, generate."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..common import REPOSITORY, TIMEOUT
from .pages import blocks


@pytest.mark.e2e
@pytest.mark.slow_group("docs/torchtitan.md", "plugin/interdomain/titan/", "tests/docs/")
def test_a_run_under_torchtitans_own_entry(tmp_path):
    page = REPOSITORY / "docs" / "torchtitan.md"
    (story,) = [block for block in blocks(page) if block.language == "bash" and "cat > run.toml" in block.text]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", story.text],
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "step 4, logits equal to the bit" in done.stdout
    assert "def main(" in done.stdout
