"""mkdocs: mkdocstrings finds a package by its folder; these links show it the repository's folders as `interdomain`."""

import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINKS = ROOT / "build" / "mkdocs" / "interdomain"


def on_startup(command, dirty):
    shutil.rmtree(LINKS, ignore_errors=True)
    LINKS.mkdir(parents=True)
    for path in (
        *(ROOT / "plugin").iterdir(),
        ROOT / "kernels" / "scan",
        ROOT / "kernels" / "features",
        ROOT / "tools",
    ):
        (LINKS / path.name).symlink_to(path)
