"""docs/architecture.md names every package and module there is, and the layers that tests/test_imports.py checks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import test_imports

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROWS = {
    name: (sentence, set(re.findall(r"`(\w+)`", modules)))
    for name, sentence, modules in re.findall(r"^\| `([\w.]+)` \| (.+?) \| (.*) \|$", TEXT, re.MULTILINE)
}
PACKAGES = {
    ".".join(file.parent.relative_to(ROOT).parts): file.parent
    for top in ("bench", "methods")
    for file in ROOT.glob(f"{top}/**/__init__.py")
}


def test_every_package_has_a_row() -> None:
    assert set(ROWS) == set(PACKAGES), "run: make readme"


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_row_names_the_modules_that_exist(name: str) -> None:
    assert ROWS[name][1] == {file.stem for file in PACKAGES[name].glob("*.py")} - {"__init__"}


def test_modules_in_the_text_exist() -> None:
    prose = TEXT.partition("## Layers")[2]
    for dotted in re.findall(r"`((?:bench|methods)\.[\w.]+)`", prose):
        path = ROOT.joinpath(*dotted.split("."))
        assert path.is_dir() or path.with_suffix(".py").is_file(), dotted
    for file in re.findall(r"((?:bench|methods|tests)/[\w/]+\.py)", prose):
        assert (ROOT / file).is_file(), file


def test_the_layers_are_those_of_the_import_test() -> None:
    block = TEXT.partition("## Layers")[2].partition("## One run")[0]
    layers = [line.split() for line in block.splitlines() if line.startswith("    ")]
    assert [set(layer) for layer in layers] == [set(layer) for layer in test_imports.LAYERS]
