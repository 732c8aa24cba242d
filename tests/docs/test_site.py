"""The documentation builds as a site: links lead somewhere, every page is in the navigation, the API's names exist."""

import os
import re
import subprocess
import sys

import pytest

from ..common import REPOSITORY
from .pages import PAGES, blocks, prose

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    path = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*build, "--site-dir", path],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def html_of(site, page):
    """Returns the HTML of a page of docs/."""
    name = page.relative_to(REPOSITORY / "docs").with_suffix("")
    folder = site if name.stem == "index" else site / name
    return (folder / "index.html").read_text()


def test_formulas_on_github_and_on_the_site(site):
    """MathJax sets `$...$` and blocks of the language math, which stand in `arithmatex`. Nothing else is fetched."""
    for page in PAGES[1:]:
        text = re.sub(r"`[^`\n]*`", "", prose(page))
        inline = re.findall(r"\$[^$\n]+\$", text)
        # GitHub's Markdown takes a backslash before such a character, and a bar ends a table's cell.
        for formula in inline:
            assert not re.search(r"\\[^a-zA-Z]|\|", formula), f"{page}: {formula}"
        html = html_of(site, page)
        math = [block for block in blocks(page) if block.language == "math"]
        if page.suffix == ".md":
            assert html.count('class="arithmatex"') == len(inline) + len(math), page
        fetched = r'<(?:script|img|link rel="stylesheet")[^>]* (?:src|href)="(https?:[^"]+)"'
        for address in re.findall(fetched, html):
            assert address.endswith("/es5/tex-chtml.js"), page
