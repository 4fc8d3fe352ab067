"""Plain text tables. Pure."""

from collections.abc import Mapping, Sequence


def format_table(columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> str:
    """A header and one line a row, columns padded to their widest cell."""
    cells = [list(columns), *([str(row[name]) for name in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )
