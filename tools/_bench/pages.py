"""Writes results as Markdown, and says what the kernel check found about them.

`python -m interdomain.tools._bench.pages FOLDER` prints the results of every tool in a folder, for
benchmarks/gpu.sh.

The kernel check judges each set of sizes by itself (head width, M and dtype): a failure at M = 16
says nothing about M = 64, whose kernels are compiled apart.
"""

import json
import sys
from pathlib import Path
from typing import Any

from interdomain.markdown import cell_text, markdown_rows

CHECK = "check.json"
VERDICTS = "verdicts"  # the table in CHECK with a row for each set of sizes
CHECK_FAILED = "THE CORRECTNESS CHECK FAILED ON THIS MACHINE: do not use figures of these sizes"
CHECK_CUT = "The correctness check was cut, and found no failure so far, at"
# Verdicts.
FAIL = "FAIL"
UNFINISHED = "unfinished, no failure so far"


def read_verdicts(check: Path) -> dict[str, str]:
    """Returns the verdict of the check on each set of sizes; empty if no check was run.

    Args:
        check: The file of the check's results.
    """
    if not check.exists():
        return {}
    table = json.loads(check.read_text())["tables"][VERDICTS]
    return {row["sizes"]: row["verdict"] for row in table["rows"]}


def warnings(verdicts: dict[str, str]) -> list[str]:
    """Returns the sentences to read before figures of this machine are used.

    Args:
        verdicts: From `read_verdicts`.
    """
    sentences = []
    for verdict, text in ((FAIL, CHECK_FAILED), (UNFINISHED, CHECK_CUT)):
        sizes = [size for size in verdicts if verdicts[size] == verdict]
        if sizes:
            sentences.append(f"{text}: {'; '.join(sizes)}.")
    return sentences


def page(contents: dict[str, Any]) -> list[str]:
    """Returns the lines of one tool's results: label, machine, options, tables, notes.

    Args:
        contents: The contents of the tool's JSON file, as `Report` writes it.
    """
    facts = [f"{name} {value}" for name, value in contents["environment"].items()]
    for name, value in contents["options"].items():
        facts.append(f"--{name} {cell_text(value)}")
    # The title, and a line of all facts.
    lines = [
        "",
        f"# {contents['part']}",
        "",
        f"**{contents['label']}.** Status: {contents['status']}.",
        "",
        ", ".join(facts) + ".",
    ]
    # Every table. A row may lack a column.
    for name, table in contents["tables"].items():
        cells = [table["columns"]]
        for row in table["rows"]:
            cells.append([cell_text(row.get(column)) for column in table["columns"]])
        lines += ["", f"## {name}", "", *markdown_rows(cells)]
    lines.append("")
    for note in contents["notes"]:
        lines.append(f"- {note}")
    return lines


def main(folder: Path) -> None:
    """Prints the results in a folder, the tool that began first on top."""
    for warning in warnings(read_verdicts(folder / CHECK)):
        print(f"\n**{warning}**")
    tools = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    tools.sort(key=lambda contents: contents["started"])
    for contents in tools:
        print("\n".join(page(contents)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
