"""Verification rules as mathematics: every branch followed in rational arithmetic, no random number drawn.

The laws here are the readable twins of ``methods.speculative.verification`` and ``bench.lossless.wrong_rules``. A rule
is a pairing: how the children of a node are offered, and how they are judged. Most wrong rules are two right halves
that do not belong together, which is why none of them looks wrong.

p and q map a prefix to the target's and the draft's distribution behind it; a law maps what one round emits (kept
tokens and the token that follows them) to its probability.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from random import Random

Prefix = tuple[int, ...]
Dist = tuple[Fraction, ...]
Model = Callable[[Prefix], Dist]
Law = dict[Prefix, Fraction]
Offer = Callable[[Dist, int], Iterator[tuple[Prefix, Fraction]]]  # q, k -> ordered children and their probability
Judge = Callable[[Dist, Dist, Prefix], tuple[list[Fraction], Dist]]  # p, q, children -> kept with, else drawn from

ONE, ZERO = Fraction(1), Fraction(0)


@dataclass(frozen=True, slots=True)
class Pairing:
    """How children are offered and judged; ``single`` offers one child whatever is asked for."""

    offer: Offer
    judge: Judge
    single: bool = False

    def law(self, p: Model, q: Model, depth: int, children: int = 1, prefix: Prefix = ()) -> Law:
        """What one round over a tree of ``depth`` levels emits behind ``prefix``.

        A subtree is drafted independently of its siblings, so only the one that is descended into has to be followed.
        """
        emitted: Law = {}
        if depth == 0:
            return _emit(emitted, prefix, p(prefix), ONE)
        for offered, chance in self.offer(q(prefix), 1 if self.single else children):
            kept, rest = self.judge(p(prefix), q(prefix), offered)
            for child, share in zip(offered, kept, strict=True):
                if share:
                    below = self.law(p, q, depth - 1, children, (*prefix, child))
                    for tokens, probability in below.items():
                        emitted[tokens] = emitted.get(tokens, ZERO) + chance * share * probability
            _emit(emitted, prefix, rest, chance * (1 - sum(kept)))
        return emitted


def block_law(p: Model, q: Model, depth: int, children: int = 1) -> Law:
    """Block verification, Sun et al. 2024 (arXiv 2403.10444, alg. 2), over every chain of ``depth`` drawn tokens."""
    emitted: Law = {}
    for draft, chance in _chains(q, depth):
        weights = [ONE]
        for place, token in enumerate(draft):
            weights.append(min(ONE, weights[-1] * p(draft[:place])[token] / q(draft[:place])[token]))
        longer = ONE  # probability that no longer prefix is kept
        for length in range(depth, -1, -1):
            behind, weight = p(draft[:length]), weights[length]
            taken = q(draft[:length]) if length < depth else (ZERO,) * len(behind)
            stays = _block_odds(behind, taken, weight, length, depth)
            left = _positive(tuple(weight * a - b for a, b in zip(behind, taken, strict=True)))
            _emit(emitted, draft[:length], _normalised(left, behind), chance * longer * stays)
            longer *= 1 - stays
    return emitted


def _block_odds(behind: Dist, taken: Dist, weight: Fraction, length: int, depth: int) -> Fraction:
    if length == 0:
        return ONE
    if length == depth:
        return weight
    surplus = sum(_positive(tuple(weight * a - b for a, b in zip(behind, taken, strict=True))), ZERO)
    return surplus / (surplus + 1 - weight) if surplus + 1 - weight else ZERO


def _chains(q: Model, depth: int, prefix: Prefix = ()) -> Iterator[tuple[Prefix, Fraction]]:
    if len(prefix) == depth:
        yield prefix, ONE
        return
    for token, probability in enumerate(q(prefix)):
        if probability:
            for chain, chance in _chains(q, depth, (*prefix, token)):
                yield chain, probability * chance


# -- how children are offered -----------------------------------------------------------------------------------------


def drawn_with_replacement(q: Dist, children: int) -> Iterator[tuple[Prefix, Fraction]]:
    if children == 0:
        yield (), ONE
        return
    for first, chance in drawn_with_replacement(q, children - 1):
        for token, probability in enumerate(q):
            if probability:
                yield (*first, token), chance * probability


def drawn_without_replacement(q: Dist, children: int) -> Iterator[tuple[Prefix, Fraction]]:
    """Children, or as many as q has tokens."""
    if children == 0:
        yield (), ONE
        return
    for first, chance in drawn_without_replacement(q, children - 1):
        rest = _normalised(_without(q, first), None)
        if not any(rest):
            yield first, chance
        for token, probability in enumerate(rest):
            if probability:
                yield (*first, token), chance * probability


def most_likely(q: Dist, children: int) -> Iterator[tuple[Prefix, Fraction]]:
    """No draw at all: the top of q, the lower index first among equals."""
    yield tuple(sorted(range(len(q)), key=lambda token: (-q[token], token))[:children]), ONE


# -- how they are judged ----------------------------------------------------------------------------------------------


def by_rejection(p: Dist, q: Dist, children: Prefix) -> tuple[list[Fraction], Dist]:
    """min(1, p/q) in turn, p <- norm(max(p - q, 0)) after a failure; right for draws with replacement."""
    return _in_turn(p, [q] * len(children), children)


def by_masked_rejection(p: Dist, q: Dist, children: Prefix) -> tuple[list[Fraction], Dist]:
    """The same with q stripped of earlier siblings; right for draws without replacement."""
    masked = [_normalised(_without(q, children[:place]), q) for place in range(len(children))]
    return _in_turn(p, masked, children)


def by_removal(p: Dist, q: Dist, children: Prefix) -> tuple[list[Fraction], Dist]:
    """p(c) in turn, p(c) <- 0 after a failure; right for children that were not drawn."""
    kept, failed = [], ONE
    for child in children:
        kept.append(failed * p[child])
        failed *= 1 - p[child]
        p = _normalised(_without(p, (child,)), p)
    return kept, p


def by_one_draw(p: Dist, q: Dist, children: Prefix) -> tuple[list[Fraction], Dist]:
    """t ~ p; the first child that is t is kept, else t is emitted. ``by_removal`` with a single random number."""
    kept = [p[child] if child not in children[:place] else ZERO for place, child in enumerate(children)]
    return kept, _normalised(_without(p, children), p)


def by_a_draw_each(p: Dist, q: Dist, children: Prefix) -> tuple[list[Fraction], Dist]:
    """WRONG: a draw from p for every child, and another one where no child met its own."""
    kept, failed = [], ONE
    for child in children:
        kept.append(failed * p[child])
        failed *= 1 - p[child]
    return kept, p


def by_uncorrected_rejection(p: Dist, q: Dist, children: Prefix) -> tuple[list[Fraction], Dist]:
    """WRONG: min(1, p/q), but p itself behind a failure."""
    return by_rejection(p, q, children)[0], p


def _in_turn(p: Dist, drawn_from: list[Dist], children: Prefix) -> tuple[list[Fraction], Dist]:
    kept, failed = [], ONE
    for child, q in zip(children, drawn_from, strict=True):
        odds = min(ONE, p[child] / q[child])
        kept.append(failed * odds)
        failed *= 1 - odds
        p = _normalised(_positive(tuple(a - b for a, b in zip(p, q, strict=True))), p)
    return kept, p


EXACT = {
    "chain": Pairing(drawn_with_replacement, by_rejection, single=True),
    "tree_with_replacement": Pairing(drawn_with_replacement, by_rejection),
    "tree_without_replacement": Pairing(drawn_without_replacement, by_masked_rejection),
    "deterministic_tree": Pairing(most_likely, by_one_draw),
    "deterministic_tree_in_turn": Pairing(most_likely, by_removal),
}
WRONG = {
    "independent_paths": Pairing(most_likely, by_a_draw_each),
    "argmax_as_drawn": Pairing(most_likely, by_rejection, single=True),
    "top_as_drawn": Pairing(most_likely, by_rejection),
    "unmasked_without_replacement": Pairing(drawn_without_replacement, by_rejection),
    "uncorrected_rejection": Pairing(drawn_with_replacement, by_uncorrected_rejection, single=True),
}


# -- models and distances ---------------------------------------------------------------------------------------------


def random_model(seed: int, vocab: int, zeros: bool = False) -> Model:
    """A distribution for every prefix, each of its own; ``zeros`` leaves tokens out of the support."""

    @cache
    def model(prefix: Prefix) -> Dist:
        random = Random(f"{seed}/{prefix}")
        weights = [Fraction(random.randint(1, 20)) for _ in range(vocab)]
        if zeros:
            weights = [w if random.random() < 0.6 else ZERO for w in weights]
            weights[random.randrange(vocab)] += 1
        return _normalised(tuple(weights), None)

    return model


def target_law(p: Model, horizon: int, prefix: Prefix = ()) -> Law:
    """The joint distribution of ``horizon`` tokens."""
    return complete({prefix: ONE}, p, horizon)


def complete(law: Law, p: Model, horizon: int) -> Law:
    """Rounds of different lengths made comparable: the target goes on by itself until ``horizon`` tokens stand."""
    whole: Law = {}
    for tokens, chance in law.items():
        if len(tokens) == horizon:
            whole[tokens] = whole.get(tokens, ZERO) + chance
            continue
        step = {(*tokens, x): chance * probability for x, probability in enumerate(p(tokens)) if probability}
        for longer, probability in complete(step, p, horizon).items():
            whole[longer] = whole.get(longer, ZERO) + probability
    return whole


def total_variation(first: Law, second: Law) -> Fraction:
    keys = first.keys() | second.keys()
    return sum((abs(first.get(key, ZERO) - second.get(key, ZERO)) for key in keys), ZERO) / 2


def mean_length(law: Law) -> Fraction:
    """Tokens a round emits on average."""
    return sum((len(tokens) * probability for tokens, probability in law.items()), ZERO)


def _emit(emitted: Law, prefix: Prefix, dist: Dist, chance: Fraction) -> Law:
    for token, probability in enumerate(dist):
        if chance * probability:
            key = (*prefix, token)
            emitted[key] = emitted.get(key, ZERO) + chance * probability
    return emitted


def _positive(values: Dist) -> Dist:
    return tuple(max(value, ZERO) for value in values)


def _without(dist: Dist, tokens: Prefix) -> Dist:
    return tuple(ZERO if token in tokens else value for token, value in enumerate(dist))


def _normalised(values: Dist, fallback: Dist | None) -> Dist:
    """Scaled to mass 1; the fallback, or the values themselves, where there is no mass."""
    mass = sum(values, ZERO)
    return tuple(value / mass for value in values) if mass else (values if fallback is None else fallback)
