"""Texts for encoder-decoder models: the prompt is what the encoder reads, a sentence or an article and nothing else.

T5 needs an instruction before the text: ``dataset.prefix="translate English to German: "``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

from bench.errors import UserError
from bench.scoring import RougeScorer, Scorer, SegmentScorer
from bench.tasks.base import ANY, Example, Task
from bench.tasks.sources import Hub, Revision, Row, Sources, hub_file


@dataclass(eq=False)
class Pairs(Task):
    """Sentences and their translations.

    Attributes:
        source, target: languages, as the data set names them.
        prefix: text before every sentence.
    """

    kind = "seq2seq"

    source: str
    target: str
    prefix: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == self.target:
            raise UserError(f"dataset.source and dataset.target must differ, got '{self.source}' for both.")

    @cached_property
    def judges(self) -> Mapping[str, Scorer]:
        return {ANY: SegmentScorer(self.target)}

    @property
    def languages(self) -> tuple[str, str]:
        """What is read, and what is to be written."""
        return self.source, self.target

    def _examples(self, label: str, pairs: Iterable[tuple[str, str]]) -> list[Example]:
        """Numbered as in the file; a pair without a text on either side is left out."""
        return [
            Example(f"{label}-{number}", "translation", (self.prefix + sentence,), (translation,))
            for number, (sentence, translation) in enumerate(pairs)
            if sentence.strip() and translation.strip()
        ]


@dataclass(eq=False)
class Multi30k(Pairs):
    """Multi30k, task 1 (Elliott et al. 2016, arXiv 1605.00459): captions of pictures, English and German.

    Raw text, cased and not tokenised. ``test`` is test_2016_flickr, 1,000 pairs; train on ``train`` alone.
    """

    name = "multi30k"

    source: Literal["en", "de"] = "en"
    target: Literal["en", "de"] = "de"
    split: Literal["test", "val"] = "test"

    def read(self, sources: Sources) -> tuple[list[Example], list[Revision]]:
        pairs, revisions = read_multi30k(sources, self.split, self.source, self.target)
        return self._examples(f"multi30k-{self.split}", pairs), revisions


class Multi30kReversed(Multi30k):
    """The same pairs from German to English."""

    name = "multi30k_de_en"


def read_multi30k(
    sources: Sources, split: Literal["train", "test", "val"], source: str, target: str
) -> tuple[list[tuple[str, str]], list[Revision]]:
    """All pairs of a split of Multi30k, in the order of its files.

    Raises:
        UserError: the two files do not belong together, or are not to be had.
    """
    ours, theirs = (sources.get(f"multi30k_{split}_{language}") for language in (source, target))
    if len(ours.rows) != len(theirs.rows):
        raise UserError(
            f"{ours.revision.file} has {len(ours.rows):,} lines and {theirs.revision.file} {len(theirs.rows):,}; line "
            "by line they must be translations of each other. Fetch both anew."
        )
    pairs = [(left["text"], right["text"]) for left, right in zip(ours.rows, theirs.rows, strict=True)]
    return pairs, [ours.revision, theirs.revision]


@dataclass(eq=False)
class HubPairs(Pairs):
    """Any parallel text of the hub whose rows are ``{"translation": {"en": ..., "de": ...}}`` or ``{"en": ...}``.

    Attributes:
        repo: hub id.
        config: which of its configurations, usually the pair of languages.
    """

    name = "hub_pairs"

    repo: str = field(kw_only=True)
    config: str | None = None
    split: str = "test"

    @property
    def hub(self) -> Hub:
        """Where it is."""
        return Hub(self.repo, self.split, self.config)

    def read(self, sources: Sources) -> tuple[list[Example], list[Revision]]:
        table = sources.read(str(self.hub), hub_file(self.hub))
        pairs = [self._pair(row) for row in table.rows]
        return self._examples(f"{self.name}-{self.hub.split}", pairs), [table.revision]

    def _pair(self, row: Row) -> tuple[str, str]:
        texts = row.get("translation", row)
        for language in (self.source, self.target):
            if language not in texts:
                raise UserError(
                    f"{self.hub} has no language '{language}'; its rows have {', '.join(map(str, texts))}. Correct "
                    "dataset.source, dataset.target or dataset.config."
                )
        return str(texts[self.source]), str(texts[self.target])


class WMT14Pairs(HubPairs):
    """WMT14 newstest (Bojar et al. 2014): 3,003 sentences for a translation model, of either language."""

    name = "wmt14"


class WMT16(HubPairs):
    """WMT16 newstest (Bojar et al. 2016): English-Romanian, 1,999 sentences, and other pairs."""

    name = "wmt16"


class Iwslt17(HubPairs):
    """IWSLT 2017 (Cettolo et al. 2017): talks, sentence by sentence."""

    name = "iwslt17"


@dataclass(eq=False)
class Articles(Task):
    """Articles and their summaries.

    Attributes:
        prefix: text before every article.
        max_words: words of an article that are kept, its first ones, so that it fits into the model; None: all.
    """

    kind = "seq2seq"
    known: ClassVar[str]
    article: ClassVar[str]
    summary: ClassVar[str]

    prefix: str = ""
    max_words: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_words is not None and self.max_words < 1:
            raise UserError(f"dataset.max_words must be at least 1, or null for all, got {self.max_words}.")

    @cached_property
    def judges(self) -> Mapping[str, Scorer]:
        return {ANY: RougeScorer()}

    def read(self, sources: Sources) -> tuple[list[Example], list[Revision]]:
        table = sources.get(self.known)
        examples = [self._example(row) for row in table.rows if row[self.article].strip()]
        return examples, [table.revision]

    def _example(self, row: Mapping[str, Any]) -> Example:
        text = first_words(row[self.article], self.max_words)
        return Example(str(row["id"]), "summarization", (self.prefix + text,), (row[self.summary],))


class XSumArticles(Articles):
    """XSum (Narayan et al. 2018, arXiv 1808.08745) for BART and T5: the rows of ``dataset=xsum`` without a request."""

    name, known, article, summary = "xsum_articles", "xsum", "document", "summary"


class CnnDailyMailArticles(Articles):
    """CNN/DailyMail 3.0.0 (See et al. 2017, arXiv 1704.04368) for BART and T5: the articles without a request."""

    name, known, article, summary = "cnn_dailymail_articles", "cnn_dailymail", "article", "highlights"


def first_words(text: str, most: int | None) -> str:
    """A text up to a number of words, its blanks and line breaks as they are."""
    words = list(re.finditer(r"\S+", text))
    return text if most is None or len(words) <= most else text[: words[most - 1].end()]
