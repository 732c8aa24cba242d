"""Results as Markdown. `python -m interdomain.tools._bench.pages FOLDER` prints those of every tool, for benchmarks/gpu.sh."""

import json
import sys
from pathlib import Path
from typing import Any

from interdomain.markdown import markdown_rows

PARTS = ("check", "kernels", "training", "inference")
CHECK_FAILED = "THE CORRECTNESS CHECK DID NOT PASS ON THIS MACHINE: do not use these figures"
NO_FAILURE = ("passed", "beyond bounds", "not run")  # of the check in the same folder; one that was cut is 'unfinished'


def show(value: Any) -> str:
    """A figure in three or four digits; what does not exist is a dash."""
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        size = abs(value)
        digits = ",.0f" if size >= 100 else ".1f" if size >= 10 else ".3f" if size >= 0.01 or not size else ".1e"
        return format(value, digits)
    if isinstance(value, int):
        return f"{value:,}"
    return " ".join(map(show, value)) if isinstance(value, list | tuple) else str(value)


def page(contents: dict[str, Any]) -> list[str]:
    """Lines of one tool's results: label, machine, tables, notes."""
    lines = ["", f"# {contents['part']}", "", f"**{contents['label']}.** Status: {contents['status']}."]
    facts = contents["environment"] | {f"--{name}": show(value) for name, value in contents["options"].items()}
    lines += ["", ", ".join(f"{name} {value}" for name, value in facts.items()) + "."]
    for name, table in contents["tables"].items():
        cells = [[show(row.get(c)) for c in table["columns"]] for row in table["rows"]]
        lines += ["", f"## {name}", "", *markdown_rows([table["columns"], *cells])]
    return [*lines, "", *(f"- {note}" for note in contents["notes"])]


def main(folder: Path) -> None:
    contents = [json.loads(path.read_text()) for part in PARTS if (path := folder / f"{part}.json").exists()]
    failed = any(part["part"] == "check" and part["status"] not in NO_FAILURE for part in contents)
    print(*([f"\n**{CHECK_FAILED}**"] if failed else ()), *(line for part in contents for line in page(part)), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
