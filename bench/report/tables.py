"""Tables: aligned for the terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tabulate import tabulate

Cells = Sequence[Sequence[str]]


def aligned(header: Sequence[str], rows: Cells, right: Collection[int] = ()) -> str:
    """Columns with two blanks between them; those in ``right`` are flush right."""
    sides = ["right" if place in right else "left" for place in range(len(header))]
    text = tabulate([header, *rows], tablefmt="plain", disable_numparse=True, colalign=sides)  # headers would be padded
    return "\n".join(line.rstrip() for line in text.splitlines())


def markdown(header: Sequence[str], rows: Cells) -> str:
    """One line per row, cells unpadded so that a changed cell changes one line."""
    lines = [header, ["---"] * len(header), *rows]
    escaped = ([cell.replace("|", r"\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)
