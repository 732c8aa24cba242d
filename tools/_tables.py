"""Tables in Markdown, and the page of a benchmark's results. Standard library only."""


def markdown_rows(cells: list[list[str]]) -> list[str]:
    """Lines of a table; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return [lines[0], "|---" * len(cells[0]) + "|", *lines[1:]]


def show(value: object) -> str:
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


def page(contents: dict) -> list[str]:
    """Lines of one part's results, as `_bench.Report` has them: label, machine, tables, notes."""
    lines = ["", f"# {contents['part']}", "", f"**{contents['label']}.** Status: {contents['status']}."]
    facts = contents["environment"] | {f"--{name}": show(value) for name, value in contents["options"].items()}
    lines += ["", ", ".join(f"{name} {value}" for name, value in facts.items()) + "."]
    for name, table in contents["tables"].items():
        cells = [[show(row.get(c)).replace("|", "/") for c in table["columns"]] for row in table["rows"]]
        lines += ["", f"## {name}", "", *markdown_rows([table["columns"], *cells])]
    return [*lines, "", *(f"- {note}" for note in contents["notes"])]
