"""The documentation builds as a site: links lead somewhere, every page is in the navigation, the API's names exist."""

import os
import subprocess
import sys

from ..common import REPOSITORY


def test_the_site_builds(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site/index.html").is_file()
