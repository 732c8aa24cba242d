"""The Python files of a standalone folder: what transformers runs there, without this package."""

import re
import shutil
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
PLAIN = "plain_interdomain.py"
PARTS = (  # Python and torch alone; each needs only what stands before it
    "model/feature_maps.py",
    "model/recomputation.py",
    "model/settings.py",
    "scan/tables.py",
    "scan/step.py",
    "features/plain.py",
    "model/mixers/fixed_state_scan.py",
)


def write_code(folder: Path) -> None:
    """Write the files of interdomain/hf and the license to a folder, and PARTS as its PLAIN."""
    for file in (*(PACKAGE / "hf").glob("*_interdomain.py"), PACKAGE / "hf" / "LICENSE"):
        shutil.copyfile(file, folder / file.name)
    (folder / PLAIN).write_text(plain())


def plain() -> str:
    """PARTS as one text, without the lines by which they import from each other."""
    listed = "\n".join(PARTS)
    texts = [
        f'"""Settings and formulas: these files of the package interdomain, one after the other.\n\n{listed}\n"""\n'
    ]
    for file in PARTS:
        text = re.sub(r"^from (\.|interdomain).*\n", "", (PACKAGE / file).read_text(), flags=re.MULTILINE)
        texts.append(f"# interdomain/{file}\n\n{text}")
    return "\n\n".join(texts)
