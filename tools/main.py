"""interdomain convert outputs/debug --output exports/debug

Run any of the commands. `interdomain COMMAND ...` is `python -m interdomain.tools.MODULE ...`,
where the project is installed.
"""

import ast
import importlib
import re
import sys
from pathlib import Path

from interdomain.removed import removal_of
from interdomain.tools._cli import PAGES, user_errors

# The file of each command. A command has its module's name, with dashes.
FILES = sorted(Path(__file__).parent.glob("[a-z]*.py"))
TOOLS = {file.stem.replace("_", "-"): file for file in FILES if file.stem != "main"}
USAGE = """\
usage: interdomain COMMAND [OPTIONS]

Prepare data, train, convert, generate, evaluate and measure.

{commands}

`interdomain COMMAND --help` explains one command. docs/start.md shows a first run.
{pages}"""


def summary(tool: Path) -> str:
    """Returns the first sentence of the second paragraph of a tool's docstring.

    The tool is not imported.

    Args:
        tool: The tool's Python file.
    """
    docstring = ast.get_docstring(ast.parse(tool.read_text())) or ""
    paragraph = " ".join(docstring.split("\n\n")[1].split())
    return re.split(r"\.(?: |$)", paragraph)[0]


@user_errors
def main(argv: list[str] | None = None) -> int:
    """Runs a command, or prints the list of commands. Returns the exit status.

    Args:
        argv: The command's name and its arguments; None takes the words of the process.
    """
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        lines = [f"  {name:<17}{summary(file)}" for name, file in TOOLS.items()]
        print(USAGE.format(commands="\n".join(lines), pages=PAGES), flush=True)
        return 0
    name, *arguments = words
    if removal := removal_of(name):
        raise ValueError(removal)
    if name not in TOOLS:
        raise ValueError(f"there is no command '{name}'. `interdomain --help` lists the commands.")
    # Only this tool is imported: some need libraries that others do without.
    tool = importlib.import_module(f"interdomain.tools.{TOOLS[name].stem}")
    return tool.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
