"""Requests as people make them: our own demo, MT-bench, Spec-Bench, and the user's own, from a file or the hub."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from sys import intern
from typing import Literal

from bench.errors import UserError
from bench.scoring import SCORERS, Gsm8kScorer, NQScorer, RougeScorer, Scorer, TranslationScorer
from bench.tasks import conversations
from bench.tasks.base import ANY, Example, Outline, Task
from bench.tasks.conversations import Conversation
from bench.tasks.sources import Hub, LinesOf, Revision, Row, Sources, hub_file, project_data, read_folder

_MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})


class Demo(Task):
    """A dozen short prompts written for this project: nothing to download. Too few for a result worth quoting."""

    name = "demo"

    def read(self, sources: Sources) -> tuple[list[Example], list[Revision]]:
        found, revision = conversations.read_file(project_data() / "demo.jsonl")
        return conversations.examples(found), [replace(revision, origin="bundled")]


class MTBench(Task):
    """MT-bench (Zheng et al. 2023, arXiv 2306.05685): 80 conversations of two turns in 8 categories.

    The model's own first answer is part of the second prompt. Answers have no reference that a program could compare
    with; agreement with the target is the measure here.
    """

    name = "mtbench"

    def read(self, sources: Sources) -> tuple[list[Example], list[Revision]]:
        table = sources.get("mtbench")
        return _examples(table.rows, table.revision.file), [table.revision]


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
        found = _examples(table.rows, table.revision.file)
        return [_coarse(example) for example in found], [table.revision]


@dataclass(eq=False)
class OwnPrompts(Task):
    """The user's own prompts.

    Attributes:
        scorer: how answers are compared with the references, for all categories; None: they are not.
    """

    kind = "any"

    scorer: Literal["gsm8k", "nq", "rouge", "translation"] | None = field(default=None, kw_only=True)

    @cached_property
    def judges(self) -> Mapping[str, Scorer]:
        return {ANY: SCORERS[self.scorer]()} if self.scorer else {}

    def _checked(self, found: Iterable[Conversation]) -> Iterator[Conversation]:
        """Only ``nq`` compares with several accepted answers."""
        for each in found:
            if self.scorer not in (None, "nq") and any(isinstance(answer, list) for answer in each.answers or ()):
                raise UserError(
                    f"{each.where}: a reference must be one text with dataset.scorer={self.scorer}, got a list of "
                    "accepted ones. Use dataset.scorer=nq, or keep one of them."
                )
            yield each


@dataclass(eq=False)
class Jsonl(OwnPrompts):
    """The prompts of a file, in the formats of ``bench.tasks.conversations``.

    Attributes:
        path: one prompt per line (.txt), or JSON lines; plain or gzipped.
    """

    name = "jsonl"

    path: str
    _sha256: str = field(default="", init=False, repr=False)

    def read(self, sources: Sources) -> tuple[Sequence[Example | Outline], list[Revision]]:
        """All examples; with a limit outlines, so that a long file is not held in memory."""
        lines = LinesOf(Path(self.path).expanduser())
        found = self._checked(conversations.of_file(lines))
        kept: Sequence[Example | Outline]
        if self.limit is None:
            kept = conversations.examples(found)
        else:
            kept = [Outline(each.id, intern(each.category), len(each.turns[0]), each.line) for each in found]
        self._sha256 = lines.sha256
        return kept, [Revision(lines.path.name, lines.sha256, "local")]

    def complete(self, outlines: Sequence[Example | Outline]) -> list[Example]:
        """Reads the file again where ``read`` gave outlines."""
        wanted = {each.line for each in outlines if isinstance(each, Outline)}
        if not wanted:
            return super().complete(outlines)
        lines = LinesOf(Path(self.path).expanduser(), wanted)
        found = {each.id: each for each in conversations.examples(conversations.of_file(lines))}
        if lines.sha256 != self._sha256:
            raise UserError(f"{self.path} was changed while it was read. Start again when it is complete.")
        return [found[each.id] for each in outlines]


@dataclass(eq=False)
class HubPrompts(OwnPrompts):
    """The prompts of a data set on the Hugging Face hub, or of a folder of its layout (Parquet, JSON, CSV, text).

    Attributes:
        name: hub id, or path of the folder.
        column: of the prompts: texts, lists of texts (turns) or lists of messages; None: the rows have the keys of a
            line of ``dataset=jsonl``.
        reference: column of the reference answers.
        config: which of its configurations.
    """

    name: str  # type: ignore[misc]  # the label of other data sets is one for all runs
    column: str | None = None
    reference: str | None = None
    split: str = "train"
    config: str | None = None

    def read(self, sources: Sources) -> tuple[list[Example], list[Revision]]:
        folder = Path(self.name).expanduser()
        hub = Hub(str(folder) if folder.is_dir() else self.name, self.split, self.config)
        table = read_folder(hub) if folder.is_dir() else sources.read(str(hub), hub_file(hub))
        rows = conversations.rows_of(table.rows, self.column, self.reference)
        return conversations.examples(self._checked(conversations.of_rows(rows, str(hub)))), [table.revision]


def _examples(rows: Sequence[Row], where: str) -> list[Example]:
    return conversations.examples(conversations.read_rows(enumerate(rows, start=1), where))


def _coarse(example: Example) -> Example:
    if example.category not in _MT_BENCH:
        return example
    return replace(example, category="mt_bench", meta={"subcategory": example.category})
