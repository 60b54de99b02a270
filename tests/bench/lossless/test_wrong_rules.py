"""The known-wrong rules: as wrong as the mathematics says, and caught by the very test the exact rules pass."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from bench.lossless.wrong_rules import CONTROLS
from methods.decoder import Guarantee
from methods.engine.sampling import Sampling
from methods.speculative.verification import RULES, ChainRejection, DeterministicTree, TreeWithoutReplacement
from tests.helpers import enumeration
from tests.helpers.enumeration import Fraction, Law
from tests.helpers.toy_rounds import emissions, p_value, rounds

ROWS = 60_000
LEVEL = 1e-4
SHAPES = [(1, 3), (2, 2)]  # levels, children
SINGLE = {"argmax_as_drawn", "uncorrected_rejection"}
RIGHT_HALF = {  # what should have judged the draft that the control is given
    "independent_paths": DeterministicTree(),
    "argmax_as_drawn": DeterministicTree(),
    "top_as_drawn": DeterministicTree(),
    "unmasked_without_replacement": TreeWithoutReplacement(),
    "uncorrected_rejection": ChainRejection(),
}


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def first_token(law: Law) -> Law:
    marginal: Law = {}
    for tokens, chance in law.items():
        marginal[tokens[:1]] = marginal.get(tokens[:1], Fraction(0)) + chance
    return marginal


def random_pair(seed: int) -> tuple[enumeration.Dist, enumeration.Dist]:
    random = Random(seed)
    weights = [[Fraction(random.randint(1, 20)) for _ in range(5)] for _ in range(2)]
    p, q = (tuple(weight / sum(row) for weight in row) for row in weights)
    return p, q


def distances(pairing: enumeration.Pairing) -> list[float]:
    """Total variation of the first token over 60 random (p, q) of 5 tokens, 3 siblings."""
    found = []
    for p, q in map(random_pair, range(60)):
        law = pairing.law(lambda _, p=p: p, lambda _, q=q: q, 1, 3)
        found.append(float(enumeration.total_variation(first_token(law), {(i,): x for i, x in enumerate(p)})))
    return found


@pytest.mark.parametrize(
    "name, least, most",
    [
        ("independent_paths", 0.15, 0.21),
        ("argmax_as_drawn", 0.40, 0.48),
        ("top_as_drawn", 0.46, 0.56),
        ("unmasked_without_replacement", 0.015, 0.04),
        ("uncorrected_rejection", 0.09, 0.14),
    ],
)
def test_how_wrong_they_are(name, least, most):
    """Mean total variation; other random pairs gave 0.16, 0.43, 0.47 and 0.015 for the first four."""
    found = distances(enumeration.WRONG[name])
    assert least < sum(found) / len(found) < most
    assert max(found) < 0.8


@pytest.mark.parametrize("name", enumeration.EXACT)
def test_the_right_pairings_are_at_zero_over_the_same_pairs(name):
    assert max(distances(enumeration.EXACT[name])) == 0.0


@pytest.mark.parametrize("depth, children", SHAPES)
@pytest.mark.parametrize("name", CONTROLS)
def test_controls_are_wrong_as_enumerated_and_caught(name, depth, children):
    """The code follows the wrong law, and fails where the exact rule passes, on the same drafts."""
    rule, offering = CONTROLS[name]
    children = 1 if name in SINGLE else children
    p, q = enumeration.random_model(6, 4), enumeration.random_model(7, 4)
    kind = "with_replacement" if offering == "chain" else offering
    draft, logits = rounds(p, q, 4, depth, children, ROWS, kind, rng(1))
    counts = emissions(draft, rule()(draft, logits, Sampling(1.0), rng(2)), 4)
    assert p_value(counts, enumeration.WRONG[name].law(p, q, depth, children)) > LEVEL
    target = {(token,): chance for token, chance in enumerate(p(()))}
    assert p_value(first_counts(counts), target) < LEVEL, "a wrong rule passed as exact"

    honest = draft if name not in ("argmax_as_drawn", "top_as_drawn") else undrawn(draft)
    right = emissions(honest, RIGHT_HALF[name](honest, logits, Sampling(1.0), rng(2)), 4)
    assert p_value(first_counts(right), target) > LEVEL


def first_counts(counts: dict[tuple[int, ...], int]) -> dict[tuple[int, ...], int]:
    firsts: dict[tuple[int, ...], int] = {}
    for tokens, n in counts.items():
        firsts[tokens[:1]] = firsts.get(tokens[:1], 0) + n
    return firsts


def undrawn(draft):
    return replace(draft, probs=None)


def test_controls_claim_what_they_do_not_keep_and_cannot_be_configured():
    assert CONTROLS.keys() == enumeration.WRONG.keys() == RIGHT_HALF.keys()
    for rule, _ in CONTROLS.values():
        assert rule.guarantee is Guarantee.EXACT
        assert rule not in RULES.values()
        assert "WRONG" in (rule.__doc__ or "")
