"""What an example and a task are, and which examples of a data set a run takes."""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from bench.config.typecheck import did_you_mean
from bench.errors import UserError
from bench.scoring import Scorer
from bench.tasks import fill, prompts
from bench.tasks.sources import Revision, Sources
from bench.utils.files import sha256
from bench.utils.stats import Interval

Subset = Literal["first", "random", "stratified"]
Message = dict[str, str]
_Found = TypeVar("_Found", bound="Example | Outline")
ANY = "*"
_MOST_KEPT = 1000  # examples for the warm-up
_MOST_SPARE = 16  # examples for the warm-up that are filled, which takes a while


@dataclass(frozen=True)
class Example:
    """A prompt, or a conversation whose answers are still to be written.

    Attributes:
        id: unique within the data set.
        category: kind of request; results are also reported by it.
        turns: what the user says, in order.
        reference: one entry per turn for the task's scorer, or None.
        meta: what else is known, e.g. a finer category.
        system: instruction that comes before the first turn; empty for none.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    reference: Sequence[Any] | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    system: str = ""


class Outline(NamedTuple):
    """What decides whether an example of a long file is taken.

    Attributes:
        length: characters of the first turn.
        line: where the file has it, from 1.
    """

    id: str
    category: str
    length: int
    line: int


@dataclass(kw_only=True, eq=False)
class Task(ABC):
    """A data set, how its prompts are written and how its answers are scored; subclasses are dataclasses.

    Attributes:
        limit: most examples; None: all. They are spread over the categories, in the order of the file.
        seed: decides which examples ``random`` and ``stratified`` take, and which text ``fill_to`` adds.
        subset: take the ``first`` examples of each category, or ``random`` ones, as many of each; ``stratified`` takes
            random ones, of each category the share that it has in the file. A smaller limit takes a subset of what a
            larger one takes.
        categories: only these; None: all.
        fill_to: tokens of every prompt, reached by unrelated articles before it (``bench.tasks.fill``); the first turn
            of each example alone is asked. None: the prompts as they are.
        kind: what sort of target the prompts are for; the user's own may be for any.
        revision: what ``load`` read: ``files`` (``bench.tasks.sources.Revision``), ``content`` (sha256 of the chosen
            examples before they are filled, the same wherever they came from), ``available`` and ``chosen`` (their
            numbers), ``warnings``; ``subset`` and ``seed`` where examples were drawn; ``fill`` where they are filled.
        spare: examples for a warm-up, which ``load`` did not choose; none is longer than half of the chosen ones, so
            that it fits where these fit.
    """

    name: ClassVar[str]
    kind: ClassVar[Literal["causal", "seq2seq", "any"]] = "causal"

    limit: int | None = None
    seed: int = 0
    subset: Subset = "first"
    categories: Sequence[str] | None = None
    fill_to: int | None = None
    revision: dict[str, Any] = field(default_factory=dict, init=False)
    spare: list[Example] = field(default_factory=list, init=False)
    _articles: list[str] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UserError(f"dataset.limit must be at least 1, or null for all, got {self.limit}.")
        if self.categories is not None and not self.categories:
            raise UserError("dataset.categories must name at least one category, or be null for all, got [].")
        if self.fill_to is not None and (self.fill_to < 1 or self.kind == "seq2seq"):
            raise UserError(
                "dataset.fill_to must be at least 1, or null, and needs prompts for a causal model, got "
                f"{self.fill_to} for {self.name}. Set dataset.fill_to=null."
            )

    @abstractmethod
    def read(self, sources: Sources) -> tuple[Sequence[Example | Outline], list[Revision]]:
        """All examples, in the order of the file, and what was read for them; outlines where ``complete`` reads on.

        Raises:
            UserError: the data is not to be had, or cannot be used.
        """

    def complete(self, outlines: Sequence[Example | Outline]) -> list[Example]:
        """The examples of outlines that ``read`` gave."""
        return [each for each in outlines if isinstance(each, Example)]

    @cached_property
    def judges(self) -> Mapping[str, Scorer]:
        """The scorer of each category; ``ANY`` stands for all others. Where there is none, nothing is scored."""
        return {}

    @property
    def scorers(self) -> tuple[str, ...]:
        """The metrics that ``score`` may report."""
        return tuple(dict.fromkeys(metric for judge in self._judges() for metric in judge.metrics))

    def load(self, sources: Sources | None = None) -> list[Example]:
        """The examples of the run, in the order of the file.

        Args:
            sources: of the data; None: as the environment says.

        Raises:
            UserError: see ``read``; a category that does not exist; or no text to fill prompts with.
        """
        sources = sources or Sources()
        found, files = self.read(sources)
        wanted = self._of_categories(found)
        taken = choose(wanted, self.limit, self.subset, self.seed)
        spare = _spare(wanted, taken)
        read = self.complete([*taken, *spare])
        chosen, self.spare = read[: len(taken)], read[len(taken) :]
        self.revision = {
            "files": [asdict(file) for file in files],
            "content": digest(chosen),
            "available": len(found),
            "chosen": len(chosen),
            "warnings": [file.warning for file in files if file.warning],
        }
        if self.limit is not None and self.subset != "first":
            self.revision |= {"subset": self.subset, "seed": self.seed}
        if self.fill_to is not None:
            self._articles, source = fill.read(sources)
            self.revision["fill"] = {"synthetic": True, "tokens": self.fill_to, "seed": self.seed, **asdict(source)}
        return chosen

    def filled(self, examples: Sequence[Example], tokenizer: Any) -> list[Example]:
        """The examples of ``load`` as they are asked: with ``fill_to`` behind other text, else as they are.

        ``spare`` is filled likewise, and ``revision`` gets the number of prompts that were as long already.

        Args:
            tokenizer: the target's, whose tokens are counted.

        Raises:
            UserError: there is not enough text.
        """
        if self.fill_to is None:
            return list(examples)
        made = [self._filled(example, tokenizer, self.fill_to) for example in examples]
        self.spare = [self._filled(example, tokenizer, self.fill_to) for example in self.spare[:_MOST_SPARE]]
        pairs = zip(examples, made, strict=True)
        longer = sum(before.turns[0] == after.turns[0] for before, after in pairs)
        self.revision["fill"]["longer"] = longer
        if longer:
            print(
                f"warning: {longer} of {len(made)} prompts have {self.fill_to} tokens or more already", file=sys.stderr
            )
        return made

    def _filled(self, example: Example, tokenizer: Any, wanted: int) -> Example:
        """With its first turn alone, as the contexts of later ones depend on the answers before them."""
        request = example.turns[0]
        first = replace(example, turns=(request,), reference=example.reference and example.reference[:1])

        def behind(text: str) -> Example:
            return replace(first, turns=(f"{text}\n\n{request}",)) if text else first

        def count(text: str) -> int:
            return len(prompts.encode(tokenizer, self.messages(behind(text), 0, [])))

        return behind(fill.before(request, self._articles, f"{self.seed}\x1f{example.id}", count, wanted))

    def messages(self, example: Example, turn: int, history: Sequence[str]) -> list[Message]:
        """The conversation up to and including what the user says in ``turn``.

        Args:
            example: one of ``load``.
            turn: 0-based.
            history: the answers to the turns before.
        """
        assert len(history) == turn, f"turn {turn} needs {turn} answers before it, not {len(history)}"
        said: list[Message] = [{"role": "system", "content": example.system}] if example.system else []
        for asked, answered in zip(example.turns, history, strict=False):
            said += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*said, {"role": "user", "content": example.turns[turn]}]

    def score(self, example: Example, turn: int, text: str) -> dict[str, float]:
        """Percentages by metric for one answer; empty where there is no reference."""
        judge, reference = self._judge(example), _reference(example, turn)
        return {} if judge is None or reference is None else judge.score(reference, text)

    def aggregate(self, answered: Iterable[tuple[Example, int, str]]) -> dict[str, float]:
        """Percentages by metric for many answers; a metric that was not measured is absent.

        Args:
            answered: example, turn from 0, answer. A repeated measurement is a further entry.
        """
        answered = list(answered)
        found: dict[str, float | None] = {}
        for judge in self._judges():
            judged = [(_reference(e, turn), text) for e, turn, text in answered if self._judge(e) is judge]
            pairs = [pair for pair in judged if pair[0] is not None]
            found |= judge.aggregate(pairs) if pairs else {}
        return {metric: value for metric, value in found.items() if value is not None}

    def change(
        self, before: Iterable[tuple[Example, int, str]], after: Iterable[tuple[Example, int, str]]
    ) -> dict[str, Interval]:
        """How far ``aggregate`` of ``after`` is from that of ``before``, by the metrics that have an interval.

        Args:
            before, after: as for ``aggregate``, answers to the same examples in the same order.
        """
        found: dict[str, Interval] = {}
        both = [list(answered) for answered in (before, after)]
        for judge in self._judges():
            judged = [[(_reference(e, t), text) for e, t, text in given if self._judge(e) is judge] for given in both]
            found |= judge.change(*([pair for pair in pairs if pair[0] is not None] for pairs in judged))
        return found

    def load_scorers(self) -> None:
        """Import what scoring takes, before the memory of a run is measured."""
        for judge in self._judges():
            judge.load()

    def notes(self) -> dict[str, str]:
        """How each metric is computed, or why it is absent."""
        return {metric: note for judge in self._judges() for metric, note in judge.notes().items()}

    def _judge(self, example: Example) -> Scorer | None:
        return self.judges.get(example.category, self.judges.get(ANY))

    def _judges(self) -> list[Scorer]:
        """Every scorer once; categories may share one."""
        return list({id(judge): judge for judge in self.judges.values()}.values())

    def _of_categories(self, examples: Sequence[Example | Outline]) -> Sequence[Example | Outline]:
        known = dict.fromkeys(example.category for example in examples)
        for category in self.categories or []:
            if category not in known:
                raise UserError(
                    f"dataset.categories names '{category}', which {self.name} does not have."
                    f"{did_you_mean(category, known)} Allowed: {', '.join(known)}."
                )
        return [example for example in examples if self.categories is None or example.category in self.categories]


def choose(examples: Sequence[_Found], limit: int | None, subset: Subset, seed: int) -> list[_Found]:
    """At most ``limit`` examples, in their order, spread over the categories as evenly as these allow.

    One of each category is taken, then a second of each, and so on; with fewer places than categories, some get
    none. ``random`` orders categories and examples by a hash of seed and name, so that a choice does not depend on
    the rest of the file and grows with the limit. ``stratified`` orders likewise, but the k-th of the n examples of a
    category comes at (k - 1/2) / n, so that after any number of examples each category has its share, to within one.
    """
    order = list(range(len(examples)))
    sizes = Counter(example.category for example in examples)
    categories = list(sizes)
    if subset != "first":
        order.sort(key=lambda index: _lot(seed, examples[index].id))
        categories.sort(key=lambda category: _lot(seed, category))
    order_of = {category: place for place, category in enumerate(categories)}
    seen: Counter[str] = Counter()
    places: list[tuple[float, int, int]] = []  # rank within the category, place of the category, index
    for index in order:
        category = examples[index].category
        rank = (seen[category] + 0.5) / sizes[category] if subset == "stratified" else seen[category]
        places.append((rank, order_of[category], index))
        seen[category] += 1
    return [examples[index] for index in sorted(index for _, _, index in sorted(places)[:limit])]


def _spare(wanted: Sequence[_Found], chosen: Sequence[_Found]) -> list[_Found]:
    taken, lengths = {example.id for example in chosen}, sorted(map(_length, chosen))
    usual = lengths[len(lengths) // 2] if lengths else 0
    spare = (example for example in wanted if example.id not in taken and _length(example) <= usual)
    return list(islice(spare, _MOST_KEPT))


def _length(example: Example | Outline) -> int:
    """Characters of the first turn."""
    return example.length if isinstance(example, Outline) else len(example.turns[0])


def digest(examples: Sequence[Example]) -> str:
    """Identifies what is asked and what is right, wherever it came from."""
    content = [[e.id, e.category, e.turns, e.reference, *([e.system] if e.system else [])] for e in examples]
    return sha256(json.dumps(content, ensure_ascii=False))


def _lot(seed: int, name: str) -> str:
    return sha256(f"{seed}\x1f{name}")


def _reference(example: Example, turn: int) -> Any:
    return None if example.reference is None else example.reference[turn]
