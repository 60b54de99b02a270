"""Whether a text to train on repeats a prompt of an evaluation set.

The rule: a text overlaps if one of its lines has eight words in a row (letters and digits, in lower case) of a line of
an evaluation prompt. Eight words of ten or more prompts of one set do not count: they are its wording, such as the task
that it puts before each question. The rule looks at one text alone, so what is left out depends on no other text.
GPT-3's test for contamination has the same form with 8 to 13 words (Brown et al. 2020, arXiv 2005.14165, app. C).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from bench.errors import UserError
from bench.tasks.chat import Demo, MTBench, SpecBench
from bench.tasks.exercises import Gsm8k, HumanEval
from bench.tasks.single_turn import NQOpen, XSum
from bench.tasks.sources import Sources
from methods.training.ngrams import ngrams

WORDS = 8  # in a row
_WORDING = 10  # prompts of one set


@dataclass(frozen=True)
class Evaluated:
    """What evaluation prompts say.

    Attributes:
        runs: of words, which no training text may have.
        sets: that were read.
        missing: sets that are not on this machine.
    """

    runs: frozenset[str]
    sets: tuple[str, ...]
    missing: tuple[str, ...]

    def overlaps(self, *texts: str) -> bool:
        """Whether one of some texts has a run of an evaluation prompt."""
        return any(not self.runs.isdisjoint(ngrams(text, WORDS)) for text in texts)

    @property
    def warning(self) -> str | None:
        """Names the sets that could not be compared."""
        if not self.missing:
            return None
        names = " ".join(self.missing)
        return (
            f"the corpus was not compared with {names}, which are not on this machine. Fetch them first: python -m "
            f"bench fetch data {names}"
        )


def evaluation(sources: Sources) -> Evaluated:
    """The prompts of all evaluation sets that are in the data folder or the cache; nothing is fetched."""
    return _evaluation(sources.data, sources.cache.parent)


@lru_cache(maxsize=2)
def _evaluation(data: Path | None, cache: Path) -> Evaluated:
    sources = Sources(data, cache, fetch=False)
    runs: set[str] = set()
    missing = []
    for name, read in _SETS.items():
        try:
            prompts = read(sources)
        except UserError:
            missing.append(name)
            continue
        counts = Counter(run for prompt in set(prompts) for run in ngrams(prompt, WORDS))
        runs |= {run for run, count in counts.items() if count < _WORDING}
    return Evaluated(frozenset(runs), tuple(name for name in _SETS if name not in missing), tuple(missing))


def _turns(kind: Callable[[], MTBench | SpecBench | Gsm8k | HumanEval | XSum | NQOpen | Demo]) -> _Read:
    return lambda sources: (turn for example in kind().load(sources) for turn in example.turns)


def _lines(name: str) -> _Read:
    return lambda sources: (row["text"] for row in sources.get(name).rows)


_Read = Callable[[Sources], Iterable[str]]
_SETS: dict[str, _Read] = {
    "demo": _turns(Demo),
    "mtbench": _turns(MTBench),
    "spec_bench": _turns(SpecBench),
    "gsm8k": _turns(Gsm8k),
    "humaneval": _turns(HumanEval),
    "xsum": _turns(XSum),
    "nq_open": _turns(NQOpen),
    "multi30k_test_en": _lines("multi30k_test_en"),
    "multi30k_test_de": _lines("multi30k_test_de"),
}
