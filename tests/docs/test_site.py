"""The documentation builds as a site: links lead somewhere, every page is in the navigation, the API's names exist."""

import re
import subprocess
import sys
from html import unescape

import pytest

from ..common import REPOSITORY
from .pages import PAGES, blocks, prose


@pytest.mark.slow
def test_the_site_builds_and_shows_every_formula(tmp_path, monkeypatch):
    """Formulas, `$...$` and blocks of the language math, are MathML. No page needs a network."""
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    build = f"{sys.executable} -m mkdocs build --strict --quiet --site-dir {tmp_path}"
    done = subprocess.run(build.split(), cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in PAGES[1:]:
        if page.suffix == ".md" and page.stem != "index":
            text = re.sub(r"`[^`\n]*`", "", prose(page))
            inline = text.count("$") // 2
            languages = [block.language for block in blocks(page)]
            name = page.relative_to(REPOSITORY / "docs").with_suffix("")
            html = (tmp_path / name / "index.html").read_text()
            formulas = inline + languages.count("math")
            assert html.count('class="arithmatex"><math') == formulas, page
            assert not re.search(r'<(script|link rel="stylesheet")[^>]*"https?:', html), page
    # TeX that the converter does not know stands in the page as it is.
    for path in tmp_path.glob("**/*.html"):
        for formula in re.findall(r"<math.*?</math>", path.read_text(), re.DOTALL):
            text = unescape(re.sub(r"<[^>]+>", "", formula))
            assert not re.search(r"[\\&]", text), f"{path.parent.name}: {text}"
