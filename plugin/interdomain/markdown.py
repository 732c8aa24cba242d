"""Tables in Markdown. Standard library only."""

from collections.abc import Sequence
from typing import Any


def markdown_rows(cells: Sequence[Sequence[Any]]) -> list[str]:
    """Lines of a table; the first row is its head."""
    lines = [
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in cells
    ]
    return [lines[0], "|---" * len(cells[0]) + "|", *lines[1:]]


def cell_text(value: Any, form: str = "") -> str:
    """The text of a value in a table.

    Args:
        value: None is a dash. A tuple is a mean and its deviation, which may be None; a list is its entries.
        form: The format of a number. Without one, a float has three digits.
    """
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return " ± ".join(cell_text(number, form) for number in value if number is not None)
    if isinstance(value, list):
        return ", ".join(cell_text(entry, form) for entry in value)
    if form or isinstance(value, str):
        return format(value, form)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}"
