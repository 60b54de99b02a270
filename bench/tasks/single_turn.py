"""One request, one text: summaries, short answers, translations."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from bench.scoring import NQScorer, RougeScorer, Scorer, TranslationScorer
from bench.tasks.base import ANY, Example, Task
from bench.tasks.sources import Revision, Sources


class XSum(Task):
    """XSum (Narayan et al. 2018, arXiv 1808.08745): BBC articles and their summaries of one sentence.

    Rows of the validation split; one of the 1,000 pinned ones has no article and is left out.
    """

    name = "xsum"

    @cached_property
    def judges(self) -> Mapping[str, Scorer]:
        return {ANY: RougeScorer()}

    def read(self, sources: Sources) -> tuple[list[Example], list[Revision]]:
        table = sources.get("xsum")
        examples = [
            _summary(str(row["id"]), "Summarize the article in one sentence.", row["document"], row["summary"])
            for row in table.rows
            if row["document"].strip()
        ]
        return examples, [table.revision]


class CnnDailyMail(Task):
    """CNN/DailyMail 3.0.0, test split (Hermann et al. 2015, arXiv 1506.03340; See et al. 2017, arXiv 1704.04368)."""

    name = "cnn_dailymail"

    @cached_property
    def judges(self) -> Mapping[str, Scorer]:
        return {ANY: RougeScorer()}

    def read(self, sources: Sources) -> tuple[list[Example], list[Revision]]:
        table = sources.get("cnn_dailymail")
        examples = [
            _summary(str(row["id"]), "Summarize the article in three sentences.", row["article"], row["highlights"])
            for row in table.rows
        ]
        return examples, [table.revision]


class NQOpen(Task):
    """NQ-open (Lee et al. 2019, arXiv 1906.00300): questions that people typed into a search engine."""

    name = "nq_open"

    @cached_property
    def judges(self) -> Mapping[str, Scorer]:
        return {ANY: NQScorer()}

    def read(self, sources: Sources) -> tuple[list[Example], list[Revision]]:
        table = sources.get("nq_open")
        examples = [
            Example(f"nq-{number}", "qa", (_question(row["question"]),), (tuple(row["answer"]),))
            for number, row in enumerate(table.rows)
        ]
        return examples, [table.revision]


class WMT14(Task):
    """WMT14 newstest, German to English: 3,003 sentences, scored with BLEU and chrF."""

    name = "wmt14_de_en"

    @cached_property
    def judges(self) -> Mapping[str, Scorer]:
        return {ANY: TranslationScorer()}

    def read(self, sources: Sources) -> tuple[list[Example], list[Revision]]:
        table = sources.get("wmt14_de_en")
        pairs = [row["translation"] for row in table.rows]
        examples = [
            Example(f"wmt14-{number}", "translation", (_sentence(pair["de"]),), (pair["en"],))
            for number, pair in enumerate(pairs)
        ]
        return examples, [table.revision]


def _summary(identity: str, request: str, article: str, summary: str) -> Example:
    return Example(identity, "summarization", (f"{request}\n\n{article}",), (summary,))


def _question(text: str) -> str:
    return f"Answer with a few words only: {text.strip().rstrip('?')}?"


def _sentence(german: str) -> str:
    return f"Translate this German sentence into English. Reply with the translation only.\n\n{german}"
