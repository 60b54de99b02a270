"""Synthetic contexts: unrelated articles before a request, so that every prompt has a given number of tokens.

The articles are those of XSum, in an order drawn by seed and prompt, each once. A paragraph with five words in a row
that occurred before, in an article or in the request, is left out. So the text is natural and does not repeat itself,
and methods that look for repetitions gain nothing by its length. Such prompts measure the cost of a long context, not
the use of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.errors import UserError
from bench.tasks.sources import Revision, Sources
from bench.utils.files import sha256

ARTICLES = "xsum"
_REPEAT = 5  # words in a row that make a repetition
_CHARACTERS = 4  # of a token, as a first guess
_MOST_TRIES = 60  # of a length; a few suffice, as the tokens grow with the text almost evenly
_NEAR = 40  # characters beyond the longest text that is too short, among which one that fits exactly is looked for


def read(sources: Sources) -> tuple[list[str], Revision]:
    """The articles.

    Raises:
        UserError: they are not to be had.
    """
    try:
        table = sources.get(ARTICLES)
    except UserError as error:
        raise UserError(f"dataset.fill_to needs the articles of {ARTICLES}. {error}") from error
    return [row["document"] for row in table.rows if row["document"].strip()], table.revision


def before(request: str, articles: Sequence[str], lot: str, count: Callable[[str], int], wanted: int) -> str:
    """The text to put before a request so that its prompt has ``wanted`` tokens, in rare cases one or two less.

    Empty if the prompt has as many already.

    Args:
        articles: of ``read``.
        lot: decides their order.
        count: tokens of the prompt with a text before the request.

    Raises:
        UserError: the articles do not suffice.
    """
    document = _Document(articles, lot, request)

    def tokens(characters: int) -> int:
        return count(document.start(characters))

    low, at_low = 0, tokens(0)
    if at_low >= wanted:
        return ""
    high = _CHARACTERS * wanted
    while (at_high := tokens(high)) < wanted:
        if len(document.start(high)) < high:
            raise UserError(
                f"dataset.fill_to must be at most about {at_high:,}, the tokens of all articles, got {wanted:,}. Lower "
                "it."
            )
        high *= 2
    for _ in range(_MOST_TRIES):
        if at_high == wanted or high - low <= 1:
            break
        step = round((high - low) * (wanted - at_low) / (at_high - at_low))
        middle = low + min(max(1, step), high - low - 1)
        found = tokens(middle)
        low, at_low, high, at_high = (low, at_low, middle, found) if found >= wanted else (middle, found, high, at_high)
    if at_high == wanted:
        return document.start(high)
    near = range(low, low + _NEAR)
    return document.start(next((place for place in near if tokens(place) == wanted), low))


@dataclass(slots=True)
class _Document:
    """Articles in a drawn order, one after the other, without repetitions; read as far as they are asked for."""

    articles: Sequence[str]
    lot: str
    request: str
    _text: str = ""
    _order: list[int] = field(default_factory=list)
    _seen: set[tuple[str, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        places = range(len(self.articles))
        self._order = sorted(places, key=lambda place: sha256(f"{self.lot}\x1f{place}"), reverse=True)
        self._is_new(self.request)

    def start(self, characters: int) -> str:
        """Its first characters; fewer where the articles end."""
        while len(self._text) < characters and self._order:
            lines = (line.strip() for line in self.articles[self._order.pop()].splitlines())
            self._text += "".join(f"{line}\n" for line in lines if line and self._is_new(line))
        return self._text[:characters]

    def _is_new(self, text: str) -> bool:
        """Whether no words in a row occurred before; if so, they have now."""
        words = text.lower().split()
        found = {tuple(words[start : start + _REPEAT]) for start in range(max(1, len(words) - _REPEAT + 1))}
        if found & self._seen:
            return False
        self._seen |= found
        return True
