"""The rules: proven as mathematics, then the vectorised code against that mathematics, then the edges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from methods.decoder import Guarantee
from methods.drafting import ABSENT, Draft, Verification
from methods.engine.sampling import Sampling
from methods.speculative.verification import (
    RULES,
    BlockRejection,
    ChainRejection,
    DeterministicTree,
    Distance,
    Greedy,
    MinimumBlock,
    TopBetaGap,
    TopK,
    TreeWithoutReplacement,
    TreeWithReplacement,
    Typical,
    default_rule,
    follow,
    follow_tree,
)
from tests.helpers import enumeration
from tests.helpers.host_reads import HostRead, no_host_reads
from tests.helpers.toy_rounds import as_tree, emissions, p_value, rounds

LAWS = {name: pairing.law for name, pairing in enumeration.EXACT.items()} | {"block": enumeration.block_law}
ROWS = 60_000
SAMPLING = Sampling(temperature=1.0)
EXACT_RULES = [ChainRejection, BlockRejection, TreeWithReplacement, TreeWithoutReplacement, DeterministicTree]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- the mathematics: total variation exactly 0 -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "depth, children, zeros", [(1, 3, False), (2, 2, False), (2, 2, True), (3, 1, False), (3, 1, True)]
)
@pytest.mark.parametrize("name", LAWS)
def test_exact_rules_leave_the_joint_distribution_alone(name, depth, children, zeros, seed):
    p, q = enumeration.random_model(2 * seed, 3, zeros), enumeration.random_model(2 * seed + 1, 3, zeros)
    law = LAWS[name](p, q, depth, children)
    assert sum(law.values()) == 1
    joint = enumeration.complete(law, p, depth + 1)
    assert enumeration.total_variation(joint, enumeration.target_law(p, depth + 1)) == 0


@pytest.mark.parametrize("name", LAWS)
def test_a_deep_tree_is_exact_too(name):
    p, q = enumeration.random_model(10, 3), enumeration.random_model(11, 3)
    joint = enumeration.complete(LAWS[name](p, q, 3, 2), p, 4)
    assert enumeration.total_variation(joint, enumeration.target_law(p, 4)) == 0


@pytest.mark.parametrize("seed", range(5))
def test_one_draw_is_the_sequential_rule(seed):
    """Drawing once and looking among the children has the very law of judging them one by one."""
    p, q = enumeration.random_model(seed, 4), enumeration.random_model(seed + 50, 4)
    assert LAWS["deterministic_tree"](p, q, 2, 3) == LAWS["deterministic_tree_in_turn"](p, q, 2, 3)


@pytest.mark.parametrize("seed", range(5))
def test_a_block_is_judged_no_worse_than_its_tokens(seed):
    p, q = enumeration.random_model(seed, 3), enumeration.random_model(seed + 50, 3)
    lengths = [
        (
            enumeration.mean_length(LAWS["chain"](p, q, depth)),
            enumeration.mean_length(enumeration.block_law(p, q, depth)),
        )
        for depth in (1, 2, 3)
    ]
    assert lengths[0][0] == lengths[0][1]
    assert all(block > token for token, block in lengths[1:])


def test_drafting_what_the_target_would_say_is_always_kept():
    p = enumeration.random_model(1, 3)
    for name in ("chain", "block", "tree_with_replacement"):
        assert enumeration.mean_length(LAWS[name](p, p, 3, 2 if "tree" in name else 1)) == 4


# -- the code against the mathematics ---------------------------------------------------------------------------------

CASES = [
    ("chain", ChainRejection(), "with_replacement", 3, 1),
    ("block", BlockRejection(), "with_replacement", 1, 1),
    ("block", BlockRejection(), "with_replacement", 2, 1),
    ("block", BlockRejection(), "with_replacement", 3, 1),
    ("chain", ChainRejection(), "with_replacement", 1, 1),
    ("chain", TreeWithReplacement(), "with_replacement", 3, 1),
    ("chain", TreeWithoutReplacement(), "without_replacement", 3, 1),
    ("tree_with_replacement", TreeWithReplacement(), "with_replacement", 1, 4),
    ("tree_with_replacement", TreeWithReplacement(), "with_replacement", 2, 2),
    ("tree_with_replacement", TreeWithReplacement(), "with_replacement", 3, 2),
    ("tree_without_replacement", TreeWithoutReplacement(), "without_replacement", 1, 3),
    ("tree_without_replacement", TreeWithoutReplacement(), "without_replacement", 2, 2),
    ("tree_without_replacement", TreeWithoutReplacement(), "without_replacement", 2, 3),
    ("deterministic_tree", DeterministicTree(), "top", 1, 3),
    ("deterministic_tree", DeterministicTree(), "top", 2, 2),
    ("deterministic_tree", DeterministicTree(), "top", 3, 1),
    ("deterministic_tree", ChainRejection(), "top", 3, 1),
    ("deterministic_tree", BlockRejection(), "top", 3, 1),
    ("deterministic_tree", TreeWithReplacement(), "top", 2, 2),
    ("deterministic_tree", TreeWithoutReplacement(), "top", 2, 2),
]
LEVEL = 1e-3 / (3 * len(CASES))  # Bonferroni: one false alarm in a thousand suites, were the seeds not fixed


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("law, rule, offering, depth, children", CASES)
def test_rules_emit_by_their_law(law, rule, offering, depth, children, zeros):
    """Not only the tokens: how many of them one round emits follows the enumerated law as well."""
    if zeros and offering == "without_replacement" and children > 1:
        pytest.skip("the draft has fewer tokens than children; see the test of absent siblings")
    p, q = enumeration.random_model(3, 3, zeros), enumeration.random_model(4, 3, zeros)
    draft, logits = rounds(p, q, 3, depth, children, ROWS, offering, rng(depth))
    counts = emissions(draft, rule(draft, logits, SAMPLING, rng(5)), 3)
    assert p_value(counts, LAWS[law](p, q, depth, children)) > LEVEL


@pytest.mark.parametrize("law, rule, offering, depth, children", [case for case in CASES if case[4] == 1])
def test_a_chain_in_a_trees_clothes_has_the_same_law(law, rule, offering, depth, children):
    """The fast paths against the general one."""
    general = TreeWithReplacement() if isinstance(rule, ChainRejection) else rule
    if isinstance(rule, BlockRejection):
        pytest.skip("a block is a chain")
    p, q = enumeration.random_model(13, 3), enumeration.random_model(14, 3)
    draft, logits = rounds(p, q, 3, depth, 1, ROWS, offering, rng(depth))
    counts = emissions(draft, general(as_tree(draft), logits, SAMPLING, rng(5)), 3)
    assert p_value(counts, LAWS[law](p, q, depth, 1)) > LEVEL


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_the_distribution_asked_for_is_the_one_that_judges(rule):
    sampling = Sampling(0.7, top_k=4, top_p=0.8)
    probs = torch.rand(50, 3, 6, generator=rng()).softmax(-1)
    draft = Draft.chain(torch.randint(0, 6, (50, 3), generator=rng(1)), probs)
    logits = torch.randn(50, 4, 6, generator=rng(2))
    same(rule()(draft, logits, sampling, rng(3)), rule().judge(draft, sampling.probs(logits), rng(3)))


def same(first: Verification, second: Verification) -> None:
    for name in ("path", "accepted", "bonus"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


# -- 32 bit -----------------------------------------------------------------------------------------------------------


def bonus_law(rule, tokens: Tensor, q: Tensor, p: Tensor) -> dict[int, int]:
    """First emitted token of rounds over siblings with the given tokens [B, k], counted."""
    rows, nodes = tokens.shape
    draft = Draft(
        tokens, torch.full_like(tokens, -1), q.expand(rows, nodes, -1), depths=[1] * rows, levels=1, width=nodes
    )
    verdict = rule.judge(draft, p.expand(rows, nodes + 1, -1), rng(1))
    kept = tokens.gather(1, verdict.path.clamp(min=0))[:, 0]
    first = torch.where(verdict.accepted > 0, kept, verdict.bonus)
    return dict(enumerate(torch.bincount(first, minlength=len(p)).tolist()))


@pytest.mark.parametrize("rest", [1e-3, 1e-5, 1e-7])
def test_a_draft_that_is_almost_sure_is_judged_without_cancellation(rest):
    """Without replacement the mass q keeps behind its first child may be far below the resolution of 1 - q(c)."""
    q = torch.tensor([1.0 - rest, 0.5 * rest, 0.3 * rest, 0.2 * rest])
    p = torch.tensor([0.4, 0.05, 0.25, 0.3])
    tokens = torch.multinomial(q.double().expand(200_000, -1), 3, generator=rng())
    counts = bonus_law(TreeWithoutReplacement(), tokens, q, p)
    law = {(token,): enumeration.Fraction(float(x)) for token, x in enumerate(p)}
    assert p_value({(token,): n for token, n in counts.items()}, law) > 1e-4


@pytest.mark.parametrize("rule", [ChainRejection, BlockRejection, TreeWithReplacement, TreeWithoutReplacement])
def test_a_rejection_that_leaves_nothing_falls_back_to_the_target(rule):
    """p = q up to rounding: what is rejected by that rounding has no residual, and p may forbid the rejected token."""
    p = torch.tensor([0.0, 0.5, 0.5])
    q = torch.tensor([0.25, 0.5, 0.5])  # as if 0.25 were lost in rounding
    tokens = torch.zeros(2_000, 1, dtype=torch.long)
    verdict = rule().judge(Draft.chain(tokens, q.expand(2_000, 1, 3)), p.expand(2_000, 2, 3), rng())
    counts = torch.bincount(verdict.bonus, minlength=3)
    assert verdict.accepted.sum() == 0
    assert counts[0] == 0, "a token the target forbids was emitted"
    assert abs(int(counts[1]) - 1000) < 150, "the fallback is not the target's distribution"


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_any_precision_of_logits_and_draft(rule, dtype):
    """The draft's probabilities are 32 bit whatever the target computes in."""
    draft = Draft.chain(torch.tensor([[1, 2], [0, ABSENT]]), torch.full((2, 2, 4), 0.25))
    verdict = rule()(draft, torch.randn(2, 3, 4, generator=rng()).to(dtype), SAMPLING, rng())
    assert verdict.path.shape == (2, 2)
    assert ((verdict.bonus >= 0) & (verdict.bonus < 4)).all()


@pytest.mark.parametrize("rule", [ChainRejection, BlockRejection, TreeWithReplacement, TreeWithoutReplacement])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forbidden_tokens_are_never_emitted(rule, dtype):
    """Top-k leaves most of p at 0; drafts from a q with full support meet these zeros all the time."""
    vocab, rows, sampling = 50, 20_000, Sampling(1.0, top_k=3)
    logits = torch.randn(rows, 4, vocab, generator=rng()).to(dtype) * 3
    q = torch.randn(rows, 3, vocab, generator=rng(1)).softmax(-1).to(dtype)
    tokens = torch.multinomial(q.view(-1, vocab), 1, generator=rng(2)).view(rows, 3)
    verdict = rule()(Draft.chain(tokens, q), logits, sampling, rng(3))
    p = sampling.probs(logits)
    assert (p[torch.arange(rows), verdict.accepted].gather(1, verdict.bonus[:, None]) > 0).all()
    kept = verdict.path != ABSENT
    assert (p[:, :-1].gather(2, tokens[:, :, None])[:, :, 0][kept] > 0).all()


# -- edges ------------------------------------------------------------------------------------------------------------


def all_rules():
    return [MinimumBlock(1, TopK(1)) if rule is MinimumBlock else rule() for rule in RULES.values()]


@pytest.mark.parametrize("rule", all_rules(), ids=list(RULES))
@pytest.mark.parametrize("with_probs", [False, True])
def test_an_empty_draft_is_a_plain_step(rule, with_probs):
    """N = 0: the bonus alone, drawn from the target; relaxed rules take its argmax."""
    rows, logits = 20_000, torch.tensor([0.5, 0.2, 0.3], dtype=torch.double).log()
    empty = torch.empty(rows, 0, dtype=torch.long)
    probs = torch.empty(rows, 0, 3, dtype=torch.double) if with_probs else None
    verdict = rule(Draft.chain(empty, probs), logits.expand(rows, 1, 3), SAMPLING, rng())
    assert verdict.path.shape == (rows, 0) and verdict.accepted.tolist() == [0] * rows
    counts = {(token,): n for token, n in enumerate(torch.bincount(verdict.bonus, minlength=3).tolist())}
    if rule.guarantee is Guarantee.EXACT:
        law = {(0,): enumeration.Fraction(1, 2), (1,): enumeration.Fraction(1, 5), (2,): enumeration.Fraction(3, 10)}
        assert p_value(counts, law) > 1e-4
    else:
        assert counts[(0,)] == rows


@pytest.mark.parametrize("rule", all_rules(), ids=list(RULES))
@pytest.mark.parametrize("tree", [False, True])
def test_absent_nodes_are_never_kept(rule, tree):
    """Rows of three, one and no tokens; the target would love to keep whatever it is offered."""
    if tree and isinstance(rule, (ChainRejection, BlockRejection, MinimumBlock)):
        pytest.skip("a rule for chains")
    tokens = torch.tensor([[1, 1, 1], [1, ABSENT, ABSENT], [ABSENT, ABSENT, ABSENT]])
    draft = Draft.chain(tokens, torch.tensor([0.0, 1.0]).expand(3, 3, 2).clone())
    draft = as_tree(draft) if tree else draft
    verdict = rule(draft, torch.tensor([-50.0, 50.0]).expand(3, 4, 2), Sampling(), rng())
    assert verdict.accepted.tolist() == [3, 1, 0]
    assert verdict.path.tolist() == [[0, 1, 2], [0, ABSENT, ABSENT], [ABSENT, ABSENT, ABSENT]]
    assert verdict.bonus.tolist() == [1, 1, 1]


@pytest.mark.parametrize("rule", [ChainRejection, BlockRejection, TreeWithReplacement])
def test_a_short_row_ends_as_a_shorter_draft_would(rule):
    """Rows whose chain ends early emit by the law of the short chain, not by that of the padded one."""
    p, q = enumeration.random_model(3, 3), enumeration.random_model(4, 3)
    draft, logits = rounds(p, q, 3, 3, 1, ROWS, "with_replacement", rng(1))
    tokens = draft.tokens.clone()
    tokens[:, 2] = ABSENT
    counts = emissions(draft, rule()(replace(draft, tokens=tokens), logits, SAMPLING, rng(2)), 3)
    law = LAWS["block" if rule is BlockRejection else "chain"](p, q, 2)
    assert p_value(counts, law) > LEVEL


def test_absent_siblings():
    """A q of two tokens offers two children, however many columns there are."""
    p, q = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.7, 0.3, 0.0])
    first = torch.multinomial(q.expand(ROWS, -1), 1, generator=rng())
    tokens = torch.cat([first, 1 - first, torch.full_like(first, ABSENT)], dim=1)
    counts = bonus_law(TreeWithoutReplacement(), tokens, q, p)
    law = {(token,): enumeration.Fraction(float(x)) for token, x in enumerate(p)}
    assert p_value({(token,): n for token, n in counts.items()}, law) > 1e-4


@pytest.mark.parametrize("rule", [ChainRejection, BlockRejection, TreeWithReplacement, TreeWithoutReplacement])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_targets_own_draws_are_all_accepted(rule, dtype):
    logits = torch.randn(5_000, 4, 9, generator=rng(), dtype=dtype)
    probs = SAMPLING.probs(logits)[:, :-1]
    tokens = torch.multinomial(probs.reshape(-1, 9), 1, generator=rng(1)).view(-1, 3)
    verdict = rule()(Draft.chain(tokens, probs), logits, SAMPLING, rng(2))
    assert (verdict.accepted == 3).float().mean() == 1.0


@pytest.mark.parametrize("rule", [ChainRejection, BlockRejection, TreeWithReplacement, TreeWithoutReplacement])
def test_disjoint_supports_accept_nothing(rule):
    p = torch.tensor([0.0, 0.0, 0.3, 0.7]).log()
    q = torch.tensor([0.4, 0.6, 0.0, 0.0])
    tokens = torch.multinomial(q.expand(20_000, -1), 1, generator=rng())
    verdict = rule()(Draft.chain(tokens, q.expand(20_000, 1, 4)), p.expand(20_000, 2, 4), SAMPLING, rng(1))
    assert verdict.accepted.sum() == 0
    law = {(2,): enumeration.Fraction(3, 10), (3,): enumeration.Fraction(7, 10)}
    counts = torch.bincount(verdict.bonus, minlength=4).tolist()
    assert p_value({(t,): n for t, n in enumerate(counts) if n}, law) > 1e-4


@pytest.mark.parametrize("rule", [ChainRejection, BlockRejection, TreeWithReplacement, TreeWithoutReplacement])
def test_a_sure_draft_is_judged_as_a_deterministic_one(rule):
    """One-hot q and no q at all have the same law."""
    p, q = enumeration.random_model(3, 3), enumeration.random_model(4, 3)
    draft, logits = rounds(p, q, 3, 3, 1, ROWS, "top", rng())
    sure = replace(draft, probs=torch.nn.functional.one_hot(draft.tokens, 3).double())
    counts = emissions(draft, rule()(sure, logits, SAMPLING, rng(1)), 3)
    assert p_value(counts, LAWS["deterministic_tree"](p, q, 3, 1)) > LEVEL


@pytest.mark.parametrize("rule", [TreeWithReplacement, TreeWithoutReplacement, DeterministicTree])
def test_equal_siblings_are_no_second_chance(rule):
    """Three times the same child: kept with the probability of one, never found in the residual."""
    p, q = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.6, 0.2, 0.2])
    draws = torch.multinomial(q.expand(ROWS, -1), 1, generator=rng()).expand(-1, 3).contiguous()
    if rule is TreeWithReplacement:
        draws = torch.multinomial(q.expand(ROWS, -1), 3, replacement=True, generator=rng())
    counts = bonus_law(rule(), draws, q, p)
    law = {(token,): enumeration.Fraction(float(x)) for token, x in enumerate(p)}
    assert p_value({(token,): n for token, n in counts.items()}, law) > 1e-4


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_greedy_decoding_through_a_sampling_rule_is_greedy(rule):
    """A one-hot p keeps exactly the argmaxes, whatever q says."""
    logits = torch.randn(500, 4, 5, generator=rng())
    tokens = torch.where(torch.rand(500, 3, generator=rng(1)) < 0.7, logits[:, :-1].argmax(-1), 2)
    draft = Draft.chain(tokens, torch.rand(500, 3, 5, generator=rng(2)).softmax(-1))
    same(rule()(draft, logits, Sampling(), rng(3)), Greedy()(draft, logits, Sampling(), rng(3)))


@pytest.mark.parametrize("rule", [ChainRejection, BlockRejection])
def test_rules_for_chains_refuse_trees(rule):
    tree = Draft(torch.zeros(1, 2, dtype=torch.long), torch.tensor([[-1, -1]]), torch.full((1, 2, 3), 1 / 3), levels=1)
    with pytest.raises(AssertionError, match="chain"):
        rule()(tree, torch.zeros(1, 3, 3), SAMPLING, rng())


# -- trees, greedily, against a walk in plain Python ------------------------------------------------------------------


@st.composite
def trees(draw_, rows: int = 3, vocab: int = 3, most: int = 8):
    """A draft and integer logits, so that ties and equal siblings abound; some rows end in absent nodes."""
    nodes = draw_(st.integers(1, most))
    integers = st.integers(0, vocab - 1)
    tokens = [[draw_(integers) for _ in range(nodes)] for _ in range(rows)]
    parents = [[draw_(st.integers(-1, i - 1)) for i in range(nodes)] for _ in range(rows)]
    for row in tokens:
        present = draw_(st.integers(0, nodes))
        row[present:] = [ABSENT] * (nodes - present)
    logits = [[[draw_(st.integers(-2, 2)) for _ in range(vocab)] for _ in range(nodes + 1)] for _ in range(rows)]
    return tokens, parents, logits


def as_tensors(case) -> tuple[Draft, Tensor]:
    tokens, parents, logits = case
    draft = Draft(torch.tensor(tokens), torch.tensor(parents), levels=len(tokens[0]))
    return draft, torch.tensor(logits, dtype=torch.float32)


def paths_of(draft: Draft, row: int) -> list[list[int]]:
    """Every path from the root of a row, the empty one first, as columns."""
    found: list[list[int]] = [[]]
    for column, parent in enumerate(draft.parents[row].tolist()):
        if draft.tokens[row, column] != ABSENT:
            found += [[*path, column] for path in found if (path[-1] if path else -1) == parent]
    return found


@settings(max_examples=150, deadline=None)
@given(trees())
def test_greedy_trees_keep_the_longest_path_of_argmaxes(case):
    draft, logits = as_tensors(case)
    verdict, best = Greedy()(draft, logits, Sampling(), rng()), logits.argmax(-1)
    for row in range(len(logits)):
        node, length = 0, 0
        while True:  # the first child that is the argmax behind its parent
            wanted = int(best[row, node])
            children = [
                path[-1] for path in paths_of(draft, row) if path and int(draft.parents[row, path[-1]]) == node - 1
            ]
            match = [c for c in children if int(draft.tokens[row, c]) == wanted]
            if not match:
                break
            node, length = match[0] + 1, length + 1
        assert verdict.accepted[row] == length and verdict.bonus[row] == wanted
        assert (verdict.path[row] != ABSENT).sum() == length


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 6), st.integers(0, 10_000))
def test_the_fast_way_down_a_chain_is_the_general_one(nodes, seed):
    tokens = torch.randint(0, 2, (8, nodes), generator=rng(seed))
    tokens[torch.arange(nodes) >= torch.randint(0, nodes + 1, (8, 1), generator=rng(seed + 1))] = ABSENT
    chain = Draft.chain(tokens)
    wanted = torch.randint(0, 2, (8, nodes + 1), generator=rng(seed + 2))
    same(follow(chain, wanted), follow_tree(as_tree(chain), wanted))


# -- relaxed rules ----------------------------------------------------------------------------------------------------


def fits_typical(p: Tensor, token: int) -> bool:
    entropy = -sum(float(x) * float(x.log()) for x in p if x > 0)
    return float(p[token]) > min(0.4, 0.9 * torch.exp(torch.tensor(-entropy)).item())


def rank(p: Tensor, token: int) -> int:
    return sum(bool(x > p[token]) or (bool(x == p[token]) and i < token) for i, x in enumerate(p))


CRITERIA = {
    "typical": (Typical(0.4, 0.9), fits_typical),
    "top_1": (TopK(1), lambda p, token: rank(p, token) < 1),
    "top_2": (TopK(2), lambda p, token: rank(p, token) < 2),
    "top_9": (TopK(9), lambda p, token: True),
    "distance_0": (Distance(0), lambda p, token: token == int(p.argmax())),
    "distance_1": (Distance(1), lambda p, token: abs(token - int(p.argmax())) <= 1),
    "beta": (TopBetaGap(3, 1.5), lambda p, token: rank(p, token) < 3 and float(p.max().log() - p[token].log()) <= 1.5),
    "beta_1": (TopBetaGap(1, 9.0), lambda p, token: token == int(p.argmax())),
}


@pytest.mark.parametrize("name", CRITERIA)
@settings(max_examples=60, deadline=None)
@given(case=trees())
def test_relaxed_rules_keep_the_longest_fitting_path(name, case):
    """The criterion in plain Python; among equally long paths the target's likelihood decides."""
    (rule, fits), (draft, logits) = CRITERIA[name], as_tensors(case)
    verdict = rule(draft, logits.double(), Sampling(), rng())
    for row in range(len(logits)):
        p = logits[row].double().softmax(-1)
        kept = [
            (len(path), likelihood(draft, p, row, path), path)
            for path in paths_of(draft, row)
            if suits(draft, p, row, path, fits)
        ]
        length, best, _ = max(kept)
        path = [column for column in verdict.path[row].tolist() if column != ABSENT]
        assert verdict.accepted[row] == len(path) == length
        assert suits(draft, p, row, path, fits)
        assert likelihood(draft, p, row, path) == pytest.approx(best, abs=1e-9)
        assert verdict.bonus[row] == logits[row, path[-1] + 1 if path else 0].argmax()


def suits(draft, p, row, path, fits) -> bool:
    above = [0, *(column + 1 for column in path)]
    return all(fits(p[node], int(draft.tokens[row, column])) for node, column in zip(above, path, strict=False))


def likelihood(draft, p, row, path) -> float:
    above = [0, *(column + 1 for column in path)]
    return sum(float(p[n, int(draft.tokens[row, c])].log()) for n, c in zip(above, path, strict=False))


@pytest.mark.parametrize("rule", [TopK(1), Distance(0), TopBetaGap(1, 5.0), MinimumBlock(0, TopK(1))])
def test_relaxed_rules_at_their_tightest_are_greedy(rule):
    """Also between equals, where ``topk`` would be free to take the other one."""
    logits = torch.randint(0, 3, (2_000, 5, 40), generator=rng()).float()
    tokens = torch.where(torch.rand(2_000, 4, generator=rng(1)) < 0.6, logits[:, :-1].argmax(-1), 20)
    draft = Draft.chain(tokens)
    same(rule(draft, logits, Sampling(), rng()), Greedy()(draft, logits, Sampling(), rng()))


@pytest.mark.parametrize("length", [0, 1, 3, 4, 9])
def test_minimum_block(length):
    """At least that many tokens, as far as there are any; beyond it the inner rule goes on."""
    logits = torch.eye(5).expand(4, 5, 5) * 9  # behind node i the argmax is i
    tokens = torch.tensor([[0, 1, 2, 3], [0, 4, 2, 3], [4, 4, 4, 4], [4, 4, ABSENT, ABSENT]])
    verdict = MinimumBlock(length, TopK(1))(Draft.chain(tokens), logits, Sampling(), rng())
    expected = [4, 4 if length > 1 else 1, min(length, 4), min(length, 2)]
    assert verdict.accepted.tolist() == expected
    assert verdict.bonus.tolist() == expected, "the bonus is the argmax behind the last token kept"


def test_forced_tokens_may_be_impossible():
    """A probability of 0 on the kept path is no reason to lose the path."""
    logits = torch.tensor([[[0.0, -torch.inf], [5.0, 0.0]]])
    verdict = MinimumBlock(1, TopK(1))(Draft.chain(torch.tensor([[1]])), logits, Sampling(), rng())
    assert (verdict.accepted.tolist(), verdict.path.tolist(), verdict.bonus.tolist()) == ([1], [[0]], [0])


def test_typical_acceptance_grows_with_the_entropy():
    """Flat: the bound is delta exp(-H) = 0.3 / 8; sharp: it is epsilon."""
    flat, sharp = torch.zeros(8), torch.tensor([0.95] + [0.05 / 7] * 7).log()
    draft = Draft.chain(torch.tensor([[3]]))
    assert Typical()(draft, flat.expand(1, 2, 8), Sampling(), rng()).accepted.tolist() == [1]
    assert Typical()(draft, sharp.expand(1, 2, 8), Sampling(), rng()).accepted.tolist() == [0]


@pytest.mark.parametrize(
    "make",
    [lambda: TopK(0), lambda: Distance(-1), lambda: TopBetaGap(0), lambda: TopBetaGap(2, -0.1)]
    + [lambda: Typical(1.5), lambda: Typical(0.1, -1.0), lambda: MinimumBlock(-1, TopK())],
)
def test_parameters_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match=r"(at least 0|at least 1|>= 0)\b.*, got "):
        make()


# -- the choice of a rule, and what it may cost -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "temperature, shape, drawn, rule",
    [(0.0, shape, drawn, Greedy) for shape in ("chain", "tree") for drawn in (False, True)]
    + [(0.8, "chain", False, DeterministicTree), (0.8, "tree", False, DeterministicTree)]
    + [(0.8, "chain", True, ChainRejection), (0.8, "tree", True, TreeWithoutReplacement)],
)
def test_the_default_rule_is_exact_for_its_draft(temperature, shape, drawn, rule):
    chosen = default_rule(Sampling(temperature), shape, drawn)
    assert type(chosen) is rule and chosen.guarantee is Guarantee.EXACT


def test_the_registry_names_every_rule_and_its_promise():
    promises = {name: rule.guarantee for name, rule in RULES.items()}
    relaxed = {"typical", "top_k", "distance", "top_beta_gap", "minimum_block"}
    assert {name for name, promise in promises.items() if promise is Guarantee.RELAXED} == relaxed
    assert len(set(RULES.values())) == len(RULES) == 11


@pytest.mark.parametrize("rule", all_rules(), ids=list(RULES))
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_rule_reads_back(rule, temperature):
    if isinstance(rule, Greedy) and temperature:
        pytest.skip("the greedy rule judges at temperature 0")
    draft = Draft.chain(torch.tensor([[1, 2], [0, ABSENT]]), torch.full((2, 2, 4), 0.25))
    shapes = [draft] if isinstance(rule, (ChainRejection, BlockRejection, MinimumBlock)) else [draft, as_tree(draft)]
    with no_host_reads():
        for shape in shapes:
            rule(shape, torch.randn(2, 3, 4), Sampling(temperature), rng())


def test_a_read_would_be_noticed():
    values = torch.arange(3)
    for read in (
        lambda: values[0].item(),
        lambda: values.tolist(),
        lambda: values[values > 1],
        lambda: bool((values > 1).any()),
    ):
        with pytest.raises(HostRead), no_host_reads():
            read()
