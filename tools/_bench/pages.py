"""Results as Markdown. `python -m interdomain.tools._bench.pages FOLDER` prints those of every tool, for benchmarks/gpu.sh.

The kernel check judges each set of sizes by itself (head width, M and dtype): a failure at M = 16 says nothing about
M = 64, whose kernels are compiled apart.
"""

import json
import sys
from pathlib import Path
from typing import Any

from interdomain.markdown import cell_text, markdown_rows

CHECK = "check.json"
VERDICTS = "verdicts"  # the table in it
CHECK_FAILED = "THE CORRECTNESS CHECK FAILED ON THIS MACHINE: do not use figures of these sizes"
FAIL = "FAIL"
UNFINISHED = "unfinished, no failure so far"


def read_verdicts(check: Path) -> dict[str, str]:
    """The verdict of the check at each set of sizes; empty if no check was run."""
    if not check.exists():
        return {}
    table = json.loads(check.read_text())["tables"][VERDICTS]
    return {row["sizes"]: row["verdict"] for row in table["rows"]}


def warnings(verdicts: dict[str, str]) -> list[str]:
    """What to know before figures of this machine are used."""
    sentences = []
    cut = "The correctness check was cut, and found no failure so far, at"
    for verdict, text in ((FAIL, CHECK_FAILED), (UNFINISHED, cut)):
        sizes = [size for size in verdicts if verdicts[size] == verdict]
        if sizes:
            sentences.append(f"{text}: {'; '.join(sizes)}.")
    return sentences


def page(contents: dict[str, Any]) -> list[str]:
    """Lines of one tool's results: label, machine, tables, notes."""
    lines = [
        "",
        f"# {contents['part']}",
        "",
        f"**{contents['label']}.** Status: {contents['status']}.",
    ]
    facts = contents["environment"] | {
        f"--{name}": cell_text(value) for name, value in contents["options"].items()
    }
    lines += ["", ", ".join(f"{name} {value}" for name, value in facts.items()) + "."]
    for name, table in contents["tables"].items():
        cells = [table["columns"]]
        for row in table["rows"]:
            cells.append([cell_text(row.get(column)) for column in table["columns"]])
        lines += ["", f"## {name}", "", *markdown_rows(cells)]
    return [*lines, "", *(f"- {note}" for note in contents["notes"])]


def main(folder: Path) -> None:
    for warning in warnings(read_verdicts(folder / CHECK)):
        print(f"\n**{warning}**")
    tools = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    for contents in sorted(tools, key=lambda contents: contents["started"]):
        print(*page(contents), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
