"""Requests as people make them: our own demo, MT-bench, Spec-Bench, and the user's own file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from bench.scoring import SCORERS, Gsm8kScorer, NQScorer, RougeScorer, Scorer, TranslationScorer
from bench.tasks.base import ANY, Example, Task
from bench.tasks.jsonl_format import read_lines
from bench.tasks.sources import Origin, Revision, Sources, numbered_rows, project_data, read_bytes, sha256

_MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})


class Demo(Task):
    """A dozen short prompts written for this project: nothing to download. Too few for a result worth quoting."""

    name = "demo"

    def read(self, sources: Sources) -> tuple[list[Example], list[Revision]]:
        return _read_file(project_data() / "demo.jsonl", "bundled")


class MTBench(Task):
    """MT-bench (Zheng et al. 2023, arXiv 2306.05685): 80 conversations of two turns in 8 categories.

    The model's own first answer is part of the second prompt. Answers have no reference that a program could compare
    with; agreement with the target is the measure here.
    """

    name = "mtbench"

    def read(self, sources: Sources) -> tuple[list[Example], list[Revision]]:
        table = sources.get("mtbench")
        return read_lines(enumerate(table.rows, start=1), table.revision.file), [table.revision]


class SpecBench(Task):
    """Spec-Bench (Xia et al. 2024, arXiv 2401.07851): 480 prompts of six tasks, 80 each.

    The prompts are used as they are, so answers are not asked to keep a format: the flexible reading of
    ``math_reasoning`` and ``contains_answer`` of ``rag`` say more than the strict ones. The eight categories of its
    MT-bench part are one category here; the finer one is in ``meta["subcategory"]``. ``qa`` has no references.
    """

    name = "spec_bench"

    @cached_property
    def judges(self) -> Mapping[str, Scorer]:
        return {
            "translation": TranslationScorer(),
            "summarization": RougeScorer(),
            "math_reasoning": Gsm8kScorer(),
            "rag": NQScorer(),
        }

    def read(self, sources: Sources) -> tuple[list[Example], list[Revision]]:
        table = sources.get("spec_bench")
        found = read_lines(enumerate(table.rows, start=1), table.revision.file)
        return [_coarse(example) for example in found], [table.revision]


@dataclass(eq=False)
class Jsonl(Task):
    """The user's own prompts, in the line format of Spec-Bench.

    Attributes:
        path: the file, plain or gzipped.
        scorer: how answers are compared with the references, for all categories; None: they are not.
    """

    name = "jsonl"
    kind = "any"

    path: str
    scorer: Literal["gsm8k", "nq", "rouge", "translation"] | None = None

    @cached_property
    def judges(self) -> Mapping[str, Scorer]:
        return {ANY: SCORERS[self.scorer]()} if self.scorer else {}

    def read(self, sources: Sources) -> tuple[list[Example], list[Revision]]:
        return _read_file(Path(self.path).expanduser())


def _read_file(path: Path, origin: Origin = "local") -> tuple[list[Example], list[Revision]]:
    raw = read_bytes(path)
    return read_lines(numbered_rows(raw, path.name), path.name), [Revision(path.name, sha256(raw), origin)]


def _coarse(example: Example) -> Example:
    if example.category not in _MT_BENCH:
        return example
    return replace(example, category="mt_bench", meta={"subcategory": example.category})
