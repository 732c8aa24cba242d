"""Tables in Markdown. Standard library only."""

from collections.abc import Sequence
from typing import Any


def markdown_rows(cells: Sequence[Sequence[Any]]) -> list[str]:
    """Returns the lines of a table, whose first row is its head."""
    lines = []
    for row in cells:
        texts = [str(cell).replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(texts)} |")
    lines.insert(1, "|---" * len(cells[0]) + "|")
    return lines


def cell_text(value: Any, form: str = "") -> str:
    """Returns the text of a value in a table.

    Args:
        value: None becomes a dash. A tuple is a mean and its deviation, which may be None. Of a
            list, all entries are shown.
        form: The format of a number. Empty: a float has three digits.
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
