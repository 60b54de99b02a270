"""Rounds over drafts of several levels: the joint distribution is exact, exact rules keep it, wrong ones do not."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.lossless import command as lossless
from bench.lossless import experiments, rounds
from bench.lossless.sampling import Arrangement
from bench.lossless.settings import LosslessConfig
from bench.lossless.statistics import compare
from methods.speculative.verification import BlockRejection, ChainRejection
from tests.helpers.enumeration import random_model
from tests.helpers.toy_rounds import p_value

VOCAB, DRAWS, LEVELS = 5, 60_000, 2
CONFIG = LosslessConfig(levels=LEVELS)
RULES = [*experiments.arrangements(True, 0, CONFIG), *experiments.deep_controls(CONFIG)]
DEEP = [each.name for each in experiments.deep_controls(CONFIG)]


def distributions(prefix: list[int]) -> tuple[Tensor, Tensor]:
    """p without token 4 and q without token 0, both by the prefix."""
    p, q = (torch.tensor([float(x) for x in random_model(seed, VOCAB)(tuple(prefix))]) for seed in (6, 7))
    p[4] = q[0] = 0.0
    return p / p.sum(), q / q.sum()


@cache
def tables(levels: int = LEVELS) -> rounds.Tables:
    return rounds.tables_of(distributions, levels)


def test_the_joint_distribution_is_the_product_along_every_prefix() -> None:
    exact = dict(zip(map(tuple, tables().continuations()), tables().joint().tolist(), strict=True))
    assert sum(exact.values()) == pytest.approx(1.0)
    for tokens in itertools.product(range(VOCAB), repeat=LEVELS + 1):
        wanted = math.prod(float(distributions(list(tokens[:place]))[0][token]) for place, token in enumerate(tokens))
        assert exact[tokens] == pytest.approx(wanted, abs=1e-6)


@cache
def cell(name: str, levels: int = LEVELS) -> dict[str, Any]:
    (rule,) = (each for each in RULES if each.name == name)
    return experiments.round_cell(tables(levels), rule, DRAWS, 3)


@pytest.mark.parametrize("name", [each.name for each in RULES if each.exact])
@pytest.mark.parametrize("levels", [2, 3])
def test_exact_rules_keep_the_joint_distribution(name: str, levels: int) -> None:
    assert cell(name, levels)["p_value"] > 1e-3
    assert cell(name, levels)["impossible"] == 0


@pytest.mark.parametrize("name", [each.name for each in RULES if not each.exact])
def test_wrong_rules_do_not(name: str) -> None:
    assert cell(name)["p_value"] < 1e-6


@pytest.mark.parametrize("name", DEEP)
def test_some_wrong_rules_are_right_in_the_first_token(name: str) -> None:
    assert cell(name)["first_p_value"] > 1e-3


def test_a_block_keeps_more_than_a_chain() -> None:
    assert cell("block")["kept"] > cell("chain")["kept"] + 0.01
    one = rounds.tables_of(distributions, 1)
    chain, block = (
        rounds.rounds(one, Arrangement("", "chain", rule()), DRAWS, torch.Generator().manual_seed(1))
        for rule in (ChainRejection, BlockRejection)
    )
    assert block[1] == pytest.approx(chain[1], abs=0.01), "a block of one token is a chain"


def test_drafts_follow_q_along_their_own_prefix() -> None:
    """Of two siblings on each of two levels: every path has the law of q, and the target's rows are those behind it."""
    arrangement = Arrangement("", "with_replacement", BlockRejection(), 2)
    draft, behind = rounds.offer(tables(), arrangement, 20_000, torch.Generator().manual_seed(0))
    assert draft.tokens.shape == (20_000, 6) and draft.parents[0].tolist() == [-1, -1, 0, 0, 1, 1]
    ids = tables().ids
    path = torch.stack([ids[0, draft.tokens[:, 1]], ids[behind[:, 2], draft.tokens[:, 4]]], 1)
    counts: dict[tuple[int, ...], int] = {}
    for tokens in map(tuple, path.tolist()):
        counts[tokens] = counts.get(tokens, 0) + 1
    law = {
        (a, b): Fraction(float(distributions([])[1][a] * distributions([a])[1][b])) for a in range(5) for b in range(5)
    }
    assert p_value(counts, {key: mass for key, mass in law.items() if mass}) > 1e-3
    torch.testing.assert_close(draft.probs, tables().draft[behind[:, [0, 0, 1, 1, 2, 2]]])


def test_a_cell_shows_its_likeliest_continuations() -> None:
    found = cell("chain")
    assert [round(t["target"], 9) for t in found["top"]] == sorted(round(t["target"], 9) for t in found["top"])[::-1]
    best = max(zip(tables().joint().tolist(), tables().continuations(), strict=True))
    assert found["top"][0]["ids"] == best[1]
    assert abs(found["top"][0]["empirical"] - best[0]) < 5 * math.sqrt(best[0] / DRAWS)


def test_power_against_a_small_change() -> None:
    """60,000 rounds notice when a single conditional probability is off by a tenth."""
    counts, _ = rounds.rounds(tables(), RULES[1], DRAWS, torch.Generator().manual_seed(2))
    joint = tables().joint().numpy().reshape(tables().width, -1).copy()
    likely = int(np.argmax(joint.sum(1)))
    joint[likely, : joint.shape[1] // 2] *= 1.1
    assert compare(counts.double().numpy(), joint.flatten() / joint.sum()).p_value < 1e-6


# ----------------------------------------------------------------------------------------------- the command line


def words(folder: Path, *more: str) -> list[str]:
    fixed = ["experiment=rounds", "model=random", "hardware=cpu_fp32", "hardware.threads=1", f"paths.results={folder}"]
    return [*fixed, "temperatures=[1.0]", "prompts=1", "draws=20000", *more]


SKIPPING = ("method=speculative_sampling", "method.skip_attention=[1]", "method.skip_mlp=[2]")


def test_rounds_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = lossless.main(words(tmp_path, *SKIPPING, "sampling.top_k=3", "children=2"))
    table = capsys.readouterr().out
    (folder,) = (tmp_path / "lossless").glob("rounds-*")
    result = json.loads((folder / "result.json").read_text())
    assert code == (0 if result["passed"] else 3)
    assert all(row["as_it_should"] for row in result["rules"] if row["exact"])
    assert {row["rule"] for row in result["rules"]} == {each.name for each in RULES}
    assert all(row["continuations"] == 27 for row in result["cells"]) and "first token p" in table
    assert all(isinstance(token["text"], str) for token in result["cells"][0]["top"])


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (SKIPPING, "sampling.top_k must be between 3 (children) and 8"),
        ((*SKIPPING, "sampling.top_k=20"), "got 20. Set sampling.top_k=4"),
        (("method=prompt_lookup", "sampling.top_k=4"), "needs a method that draws its drafts, got 'prompt_lookup'"),
        ((*SKIPPING, "sampling.top_k=4", "levels=4"), "levels must be between 1 and 3, got 4"),
    ],
)
def test_bad_input_gets_one_message(
    said: tuple[str, ...], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lossless.main(words(tmp_path, *said)) == 2
    assert answer in capsys.readouterr().err
