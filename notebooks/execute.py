"""Execute each percent-format source in this folder into its ``.ipynb``: ``python notebooks/execute.py [NAME ...]``.

The result depends on the source and the reference records only: cell ids and those of tables are numbers, times,
versions and addresses in memory are left out. Pictures have few colours and at most 100 kB.
"""

from __future__ import annotations

import base64
import io
import os
import re
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from PIL import Image

HERE = Path(__file__).parent
COLOURS, MOST_BYTES = 32, 100_000  # of a picture
RECORDS = HERE.parent / "results" / "reference"
MEASURING = frozenset({"quickstart"})  # load a model and measure on this machine: executed only by name
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def execute(source: Path) -> nbformat.NotebookNode:
    """The notebook of a source, with the outputs of a run that reads the reference records alone.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"], cell["metadata"] = f"cell-{number:02}", {}
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL})
    resources = {"metadata": {"path": str(HERE)}}
    client = NotebookClient(notebook, timeout=600, record_timing=False, coalesce_streams=True, resources=resources)
    client.execute(env=os.environ | {"DECODEBENCH_RESULTS": str(RECORDS)})
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL})
    for cell in notebook.cells:
        _settle(cell)
    return notebook


def _settle(cell: nbformat.NotebookNode) -> None:
    """Numbers for the random ids that pandas gives to tables and their styles; objects without their addresses."""
    for number, output in enumerate(cell.get("outputs", [])):
        data = output.get("data", {})
        if plain := data.get("text/plain"):
            data["text/plain"] = re.sub(r" at 0x[0-9a-f]+", "", plain)
        if html := data.get("text/html"):
            named = re.sub(r"\bT_[0-9a-f]{5}", f"T_{cell['id']}_{number}", html)
            data["text/html"] = plain_table(re.sub(r"\n +", "\n", named))
        if png := data.get("image/png"):
            data["image/png"] = base64.b64encode(smaller(base64.b64decode(png))).decode()


def plain_table(html: str) -> str:
    """A table of pandas without the names of its cells, two thirds of its text, where no style asks for them."""
    style, found, table = html.partition("</style>")
    if not found or "{" in style:
        return html

    def unnamed(tag: re.Match[str]) -> str:
        return tag[1] + re.sub(r' (?:id|class)="[^"]*"', "", tag[2]) + ">"

    return re.sub(r'(<t\w+)((?: \w+="[^"]*")*) *>', unnamed, table.lstrip())


def smaller(png: bytes) -> bytes:
    """The picture with a palette, in as many pixels as fit into ``MOST_BYTES``."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    while True:
        stream = io.BytesIO()
        small = picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        small.save(stream, "PNG", optimize=True)
        if stream.tell() <= MOST_BYTES:
            return stream.getvalue()
        picture = picture.resize((picture.width * 4 // 5, picture.height * 4 // 5), Image.Resampling.LANCZOS)


def main(names: list[str]) -> None:
    for source in sorted(HERE.glob("*.py")):
        wanted = source.stem in names if names else source.stem not in MEASURING
        if source != Path(__file__) and wanted:
            nbformat.write(execute(source), source.with_suffix(".ipynb"))
            print(f"notebooks/{source.stem}.ipynb")


if __name__ == "__main__":
    main(sys.argv[1:])
