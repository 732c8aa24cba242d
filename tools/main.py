"""interdomain convert outputs/debug --output exports/debug

Run any of the commands. `interdomain COMMAND ...` is `python -m interdomain.tools.MODULE ...`, where the project is
installed.
"""

import ast
import importlib
import re
import sys
from pathlib import Path

from interdomain.removed import removal_of
from interdomain.tools._cli import user_errors

# Command -> file. A command has its module's name, with dashes.
TOOLS = {
    file.stem.replace("_", "-"): file for file in sorted(Path(__file__).parent.glob("[a-z]*.py"))
}
del TOOLS["main"]


def summary(tool: Path) -> str:
    """Summary of a tool: the first sentence of its docstring's second paragraph. The tool is not imported."""
    paragraph = (ast.get_docstring(ast.parse(tool.read_text())) or "").split("\n\n")[1]
    return re.split(r"\.(?: |$)", " ".join(paragraph.split()))[0]


USAGE = """\
usage: interdomain COMMAND [OPTIONS]

Prepare data, train, convert, generate, evaluate and measure.

{commands}

`interdomain COMMAND --help` explains one command. docs/start.md shows a first run."""


@user_errors
def main(argv=None) -> int:
    name, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        commands = "\n".join(f"  {name:<17}{summary(file)}" for name, file in TOOLS.items())
        print(USAGE.format(commands=commands), flush=True)
        return 0
    if removal := removal_of(name):
        raise ValueError(removal)
    if name not in TOOLS:
        raise ValueError(f"there is no command '{name}'. `interdomain --help` lists the commands.")
    # Imported only now: some tools need libraries that others do without.
    return importlib.import_module(f"interdomain.tools.{TOOLS[name].stem}").main(arguments)


if __name__ == "__main__":
    sys.exit(main())
