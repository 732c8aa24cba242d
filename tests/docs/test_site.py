"""The documentation builds as a site: links lead somewhere, every page is in the navigation, the API's names exist."""

import re
import subprocess
import sys

import pytest

from ..common import REPOSITORY


@pytest.mark.slow
def test_the_site_builds_and_shows_every_formula(tmp_path, monkeypatch):
    """Formulas, `$...$` and blocks of the language math, are MathML. No page needs a network."""
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    build = f"{sys.executable} -m mkdocs build --strict --quiet --site-dir {tmp_path}"
    done = subprocess.run(build.split(), cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    formulas = 0
    for path in tmp_path.glob("**/*.html"):
        html = path.read_text()
        assert not re.search(r'<(script|link rel="stylesheet")[^>]*"https?:', html), path
        text = re.sub(r"<(code|script).*?</\1>", "", html, flags=re.DOTALL)
        assert "$" not in text, path
        # TeX that the converter does not know stands in a formula as it is.
        assert re.findall(r"<m[a-z]+[^>]*>([^<]*(?:\\|&amp;)[^<]*)", text) == [], path
        formulas += text.count("<math")
    assert formulas > 100
