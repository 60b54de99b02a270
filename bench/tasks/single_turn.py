"""One request, one text: summaries, short answers, translations."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

from bench.scoring import NQScorer, RougeScorer, Scorer, TranslationScorer
from bench.tasks.base import ANY, Example, Task
from bench.tasks.sources import Revision, Row, Sources


class SingleTurn(Task):
    """A public table with one request in each row."""

    scorer: ClassVar[type[Scorer]]

    @cached_property
    def judges(self) -> Mapping[str, Scorer]:
        return {ANY: self.scorer()}

    def read(self, sources: Sources) -> tuple[list[Example], list[Revision]]:
        table = sources.get(self.name)
        found = (self.example(number, row) for number, row in enumerate(table.rows))
        return [example for example in found if example is not None], [table.revision]

    def example(self, number: int, row: Row) -> Example | None:
        """The request of a row, the ``number``-th of its file; None leaves it out."""
        raise NotImplementedError


class XSum(SingleTurn):
    """XSum (Narayan et al. 2018, arXiv 1808.08745): BBC articles and their summaries of one sentence.

    Rows of the validation split; one of the 1,000 pinned ones has no article and is left out.
    """

    name, scorer = "xsum", RougeScorer

    def example(self, number: int, row: Row) -> Example | None:
        if not row["document"].strip():
            return None
        asked = f"Summarize the article in one sentence.\n\n{row['document']}"
        return Example(str(row["id"]), "summarization", (asked,), (row["summary"],))


class CnnDailyMail(SingleTurn):
    """CNN/DailyMail 3.0.0, test split (Hermann et al. 2015, arXiv 1506.03340; See et al. 2017, arXiv 1704.04368)."""

    name, scorer = "cnn_dailymail", RougeScorer

    def example(self, number: int, row: Row) -> Example:
        asked = f"Summarize the article in three sentences.\n\n{row['article']}"
        return Example(str(row["id"]), "summarization", (asked,), (row["highlights"],))


class NQOpen(SingleTurn):
    """NQ-open (Lee et al. 2019, arXiv 1906.00300): questions that people typed into a search engine."""

    name, scorer = "nq_open", NQScorer

    def example(self, number: int, row: Row) -> Example:
        asked = f"Answer with a few words only: {row['question'].strip().rstrip('?')}?"
        return Example(f"nq-{number}", "qa", (asked,), (tuple(row["answer"]),))


class WMT14(SingleTurn):
    """WMT14 newstest, German to English: 3,003 sentences, scored with BLEU and chrF."""

    name, scorer = "wmt14_de_en", TranslationScorer

    def example(self, number: int, row: Row) -> Example:
        pair = row["translation"]
        request = "Translate this German sentence into English. Reply with the translation only."
        return Example(f"wmt14-{number}", "translation", (f"{request}\n\n{pair['de']}",), (pair["en"],))
