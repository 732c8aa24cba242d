"""The documentation builds as a site: links lead somewhere, every page is in the navigation, the API's names exist.

Its pages are also read on GitHub, which does not know everything that the site's theme does.
"""

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
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(path),
    ]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def page_of(site, page):
    """The HTML of a page of docs/."""
    name = page.relative_to(REPOSITORY / "docs").with_suffix("")
    return (site / ("" if name.stem == "index" else name) / "index.html").read_text()


def test_pictures_and_boxes_on_github_and_on_the_site(site):
    """A light and a dark picture: on GitHub one of them shows by <picture>, on the site by the theme's rule for links."""
    for page in PAGES:
        text = prose(page)
        pictures = re.findall(r"<picture>\n.*\n.*\n</picture>", text)
        assert len(pictures) == len(re.findall(r"pictures/[\w-]+-light\.\w+", text)), page
        assert not re.search(r"^ *(!!!|\?\?\?)", text, re.MULTILINE), (
            f"{page}: GitHub shows this box as plain text"
        )
        html = page_of(site, page) if page.parent != REPOSITORY else ""
        for picture in pictures:
            files = re.findall(r"pictures/[\w-]+-(?:light|dark)\.\w+", picture)
            assert len(files) == 2, page
            for file in files if html else ():
                assert f'{file}#only-{file.split("-")[-1][:-4]}"' in html, page


def test_formulas_on_github_and_on_the_site(site):
    """`$...$`, and blocks of the language math. MathJax sets what stands in `arithmatex`; nothing else is fetched."""
    for page in PAGES[1:]:
        text = re.sub(r"`[^`\n]*`", "", prose(page))
        inline = re.findall(r"\$[^$\n]+\$", text)
        # GitHub's Markdown takes a backslash before such a character, and a bar ends a table's cell.
        assert not [formula for formula in inline if re.search(r"\\[^a-zA-Z]|\|", formula)], page
        html, blocks_of_math = (
            page_of(site, page),
            [block for block in blocks(page) if block.language == "math"],
        )
        if page.suffix == ".md":
            assert html.count('class="arithmatex"') == len(inline) + len(blocks_of_math), page
        fetched = re.findall(
            r'<(?:script|img|link rel="stylesheet")[^>]* (?:src|href)="(https?:[^"]+)"', html
        )
        assert [
            address for address in fetched if not address.endswith("/es5/tex-chtml.js")
        ] == [], page
