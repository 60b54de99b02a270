"""Notebooks are committed executed: in step with their source and with the records they show."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from bench.report.style import COLOURS

FOLDER = Path(__file__).parents[1] / "notebooks"
sys.path.insert(0, str(FOLDER))

import execute  # noqa: E402  (a script beside the notebooks)

EVERY = sorted(file.stem for file in FOLDER.glob("*.ipynb"))
NAMES = [name for name in EVERY if name not in execute.MEASURING]


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def committed(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


@pytest.fixture(scope="module")
def fresh(name: str) -> nbformat.NotebookNode:
    return execute.execute(FOLDER / f"{name}.py")


def texts(notebook: nbformat.NotebookNode) -> list[str]:
    """What the cells print and show, pictures aside: a picture's bytes differ between versions of its library."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            shown = output.get("data", {})
            found.append(output.get("text") or shown.get("text/markdown") or shown.get("text/html", ""))
    return found


def test_there_is_one_for_each_source() -> None:
    sources = {file.stem for file in FOLDER.glob("*.py")} - {"execute"}
    assert sources == set(EVERY) and NAMES


def test_it_is_in_step_with_its_source(fresh: nbformat.NotebookNode, committed: nbformat.NotebookNode) -> None:
    assert [cell.source for cell in committed.cells] == [cell.source for cell in fresh.cells], "run: make notebooks"


def test_it_shows_what_the_records_hold(fresh: nbformat.NotebookNode, committed: nbformat.NotebookNode) -> None:
    assert texts(committed) == texts(fresh), "the records have changed; run: make notebooks"


def test_it_would_be_the_same_if_executed_again(committed: nbformat.NotebookNode) -> None:
    assert not re.search(r" at 0x[0-9a-f]{6}", json.dumps(committed))
    assert any("<table" in text for text in texts(committed)), "it has tables"
    assert not [text for text in texts(committed) if re.search(r"\bT_[0-9a-f]{5}[_\"]", text)]


def test_it_is_executed_without_errors_and_has_its_pictures(committed: nbformat.NotebookNode) -> None:
    outputs = [output for cell in committed.cells for output in cell.get("outputs", [])]
    assert all(cell.execution_count for cell in committed.cells if cell.cell_type == "code")
    assert not [output for output in outputs if output.output_type == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3


def test_a_table_without_styles_has_no_names_for_its_cells() -> None:
    frame = pd.DataFrame({"a": ["x > y", 2]})
    plain = execute.plain_table(frame.style.to_html())
    assert 'id="' not in plain and 'class="' not in plain and plain.startswith("<table>")
    assert pd.read_html(io.StringIO(plain), index_col=0)[0]["a"].tolist() == ["x > y", "2"]
    styled = frame.style.set_properties(color="red").to_html()
    assert execute.plain_table(styled) == styled
    assert execute.plain_table("<p id='a'>text</p>") == "<p id='a'>text</p>"


def test_a_smaller_picture_keeps_the_colours_of_few_pixels() -> None:
    shades = np.random.default_rng(0).integers(0, 256, (200, 300, 1))
    picture = np.repeat(shades, 3, axis=2).astype(np.uint8)
    colours = [tuple(bytes.fromhex(colour[1:])) for colour in COLOURS.values()]
    for place, colour in enumerate(colours):
        picture[place * 20, :12] = colour
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "PNG")
    small = np.asarray(Image.open(io.BytesIO(execute.smaller(stream.getvalue()))).convert("RGB")).astype(int)
    assert len(stream.getvalue()) > len(execute.smaller(stream.getvalue()))
    for place, colour in enumerate(colours):
        assert np.abs(small[place * 20, :12] - colour).max() <= 16


@pytest.mark.parametrize("name", sorted(execute.MEASURING))
def test_one_that_measures_is_in_step_with_its_source(name: str) -> None:
    committed = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    source = jupytext.read(FOLDER / f"{name}.py")
    assert [cell.source for cell in committed.cells] == [cell.source for cell in source.cells], f"execute.py {name}"
    assert all(cell.execution_count for cell in committed.cells if cell.cell_type == "code")
    assert not [output for cell in committed.cells for output in cell.get("outputs", []) if "ename" in output]
    assert str(FOLDER.parent) not in json.dumps(committed) and str(Path.home()) + "/" not in json.dumps(committed)


def test_it_names_no_path_of_a_machine(committed: nbformat.NotebookNode) -> None:
    assert str(FOLDER.parent) not in json.dumps(committed) and str(Path.home()) + "/" not in json.dumps(committed)


MISSING = {  # notebook: what it prints, or how it ends, without any record
    "start_here": [
        "No finished run yet. Make some: python -m bench sweep=all_methods",
        "No two translation runs are recorded: python -m bench sweep=translation",
        "No two methods have been recorded at two batch sizes: python -m bench sweep=batch",
    ],
    "leaderboard": ["No finished run yet. Make some: python -m bench sweep=all_methods"],
    "batch": ["No finished run yet. Make some: python -m bench sweep=batch"],
    "non_autoregressive": ["Nothing is recorded yet", "python -m bench sweep=translation"],
    "three_families": ["No translation run is recorded: python -m bench sweep=translation", "Nothing to compare yet."],
    "losslessness": ["python -m bench lossless experiment=sampling"],
}


@pytest.mark.parametrize("source", MISSING)
def test_without_records_it_says_what_to_run(source: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{source}.py")],
        env={"DECODEBENCH_RESULTS": str(tmp_path), "PATH": "", "MPLBACKEND": "agg", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == (source == "losslessness"), done.stderr
    assert all(words in done.stdout + done.stderr for words in MISSING[source])
    assert "Traceback" not in done.stderr
