"""Documentation, messages, docstrings and comments are in plain English, without some phrases of the project's past."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "LOG.md", *sorted(ROOT.glob("docs/*.md"))]
MODULES = sorted(file for top in ("bench", "methods", "decodebench") for file in ROOT.glob(f"{top}/**/*.py"))
INSTEAD = {
    r"came as|\bcame\b(?=[;:])": "got",
    r"\btold\b": "passed, reported, given",
    r"\blies\b": "is",
    r"\bstands\b": "is",
    r"\bgoes on\b": "continues, resumes",
    r"\bwhoever\b|\bnobody\b|\bsomebody\b": "a subject that says who",
}
ALLOWED = re.compile(r"\bstands for\b|\blies (between|next to)\b|\btold apart\b", re.IGNORECASE)  # standard English
IDIOM = re.compile("|".join(INSTEAD), re.IGNORECASE)


def hits(text: str) -> Iterator[str]:
    """The phrases to replace, each with the words around it."""
    plain = ALLOWED.sub("", text)
    for found in IDIOM.finditer(plain):
        yield " ".join(plain[max(0, found.start() - 40) : found.end() + 30].split())


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every string constant, docstrings and parts of f-strings among them, and of every comment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages(page: Path) -> None:
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)
    assert not [f"{page.name}:{number}: {hit}" for number, line in lines for hit in hits(line)]


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_messages_docstrings_and_comments(file: Path) -> None:
    found = prose(file.read_text(encoding="utf-8"))
    assert not [f"{file.name}:{line}: {hit}" for line, text in found for hit in hits(text)]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("batch_size came as 0; it must be at least 1", 1),
        ("gamma=0 came; at least 1 is allowed", 1),
        ("The runner is told what lies there and goes on.", 3),
        ("Nobody knows; SLURM stands for a scheduler.", 1),
        ("batch_size must be at least 1, got 0.", 0),
    ],
)
def test_the_test_can_fail(text: str, count: int) -> None:
    assert len(list(hits(text))) == count
