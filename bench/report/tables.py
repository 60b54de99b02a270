"""Tables: aligned for the terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from tabulate import tabulate

Cells = Sequence[Sequence[str]]


def aligned(header: Sequence[str], rows: Cells, right: Collection[int] = ()) -> str:
    """Columns with two blanks between them; those in ``right`` are flush right."""
    sides = ["right" if place in right else "left" for place in range(len(header))]
    text = tabulate([header, *rows], tablefmt="plain", disable_numparse=True, colalign=sides)  # headers would be padded
    return "\n".join(line.rstrip() for line in text.splitlines())


def fitting(
    columns: Mapping[str, Sequence[str]], width: int, least: Iterable[str], right: Collection[str] = ()
) -> tuple[str, list[str]]:
    """An aligned table of at most ``width`` characters, and the columns that were left out for it.

    Args:
        columns: cells by heading, at least one column.
        width: most characters of a line; kept as far as leaving out columns can.
        least: headings, the one that is missed least first.
        right: headings of columns that are flush right.
    """
    shown = dict(columns)
    left_out: list[str] = []
    droppable = [name for name in least if name in shown]
    while True:
        places = [place for place, name in enumerate(shown) if name in right]
        table = aligned(list(shown), list(zip(*shown.values(), strict=True)), places)
        if not droppable or max(map(len, table.splitlines())) <= width:
            return table, left_out
        left_out.append(droppable.pop(0))
        del shown[left_out[-1]]


def markdown(header: Sequence[str], rows: Cells) -> str:
    """One line per row, cells unpadded so that a changed cell changes one line."""
    lines = [header, ["---"] * len(header), *rows]
    escaped = ([cell.replace("|", r"\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)
