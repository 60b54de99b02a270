"""The whole decoder at a temperature: 100,000 continuations of three tokens against the exact joint distribution.

Cache, tree mask, packing and drafter take part; many rows with one prompt are decoded at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from bench.contract import checks
from bench.lossless import command as lossless
from bench.lossless import continuations, experiments
from bench.lossless.statistics import compare
from bench.lossless.wrong_rules import JudgedBehindRoot, UncorrectedRejection, UnmaskedWithoutReplacement
from methods.decoder import Decoder
from methods.drafting import ABSENT, Context, Draft
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.speculative.dflash.decoder import BlockDrafter
from methods.speculative.dflash.network import Network
from methods.speculative.dflash.trees import Growth
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.speculative_sampling import SpeculativeSampling
from methods.speculative.verification import AcceptanceRule, BlockRejection
from tests.helpers.tiny_block_drafter import DSPARK, block_drafter
from tests.helpers.tiny_eagle import eagle
from tests.helpers.tiny_head_trees import medusa
from tests.helpers.tiny_vocabularies import pair

DRAWS, ROWS, HORIZON, VOCAB = 100_000, 1000, 3, 6
FEWER_DRAWS = 30_000  # where a draft goes through text, row by row
PROMPT = [1, 5, 2, 5, 2]
SAMPLING = Sampling(1.0)


@cache
def target() -> CausalLM:
    return checks.tiny_target(vocab_size=VOCAB, layers=2, seed=3)


def p_value(decoder: Decoder, draws: int = DRAWS) -> float:
    exact = continuations.likely_continuations(target(), PROMPT, SAMPLING, HORIZON, floor=1e-4)
    counts = continuations.drawn_continuations(decoder, PROMPT, HORIZON, draws, 1, ROWS, torch.device("cpu"))
    assert sum(counts.values()) == draws
    return compare(*continuations.as_arrays(exact, counts)).p_value


def skipping() -> SpeculativeDecoder:
    return SpeculativeSampling(target(), SAMPLING, gamma=2, skip_attention=[0], skip_mlp=[1])


def foreign(way: Literal["tli", "slem"]) -> SpeculativeDecoder:
    return SpeculativeSampling(target(), SAMPLING, gamma=3, draft_model=pair(target()), vocabulary=way)


def drawn_tree() -> SpeculativeDecoder:
    return eagle(target(), SAMPLING, 1, tree="static", shape=[[3], [2, 2, 1]], draw=True)


def drawn_chain(**options: Any) -> SpeculativeDecoder:
    sizes = {**DSPARK, "taps": (0, 1), "block": 3}
    return block_drafter(target(), SAMPLING, sizes=sizes, draw=True, **options)


class EndsByItsToken:
    """A chain that ends before the first token that was unlikely where it was drawn: the length depends on it."""

    def __init__(self, growth: Growth) -> None:
        self._growth, self.nodes, self.levels = growth, growth.nodes, growth.levels

    def grow(self, network: Network, hidden: Tensor, context: Context) -> Draft:
        draft = self._growth.grow(network, hidden, context)
        assert draft.probs is not None
        likely = draft.probs.gather(2, draft.tokens[:, :, None])[:, :, 0] > 0.2
        left = likely.cumprod(1).bool()
        return replace(draft, tokens=draft.tokens.where(left, ABSENT), sizes=left.sum(1).tolist())


def ended_by_its_token() -> SpeculativeDecoder:
    decoder = drawn_chain()
    drafter = decoder.drafter
    assert isinstance(drafter, BlockDrafter)
    drafter.growth = EndsByItsToken(drafter.growth)
    return decoder


def with_rule(decoder: SpeculativeDecoder, rule: AcceptanceRule) -> SpeculativeDecoder:
    return SpeculativeDecoder(decoder.target, decoder.sampling, decoder.drafter, rule)


EXACT: dict[str, Callable[[], Decoder]] = {
    "chain": skipping,
    "block": lambda: with_rule(skipping(), BlockRejection()),
    "another vocabulary, its tokens (TLI)": lambda: foreign("tli"),
    "another vocabulary, its text (SLEM)": lambda: foreign("slem"),
    "eagle, drawn tree": drawn_tree,
    "eagle, dynamic tree": lambda: eagle(target(), SAMPLING, 2, tree="dynamic", depth=2, top_k=3, nodes=6),
    "medusa": lambda: medusa(target(), SAMPLING, nodes=12),
    "dspark, ended by confidence, judged as a block": lambda: drawn_chain(block=True, confidence=0.25),
}
WRONG: dict[str, Callable[[], Decoder]] = {
    "chain, rejection without the residual": lambda: with_rule(skipping(), UncorrectedRejection()),
    "drawn tree, judged behind the root": lambda: with_rule(drawn_tree(), JudgedBehindRoot()),
    "drawn tree, unmasked q": lambda: with_rule(drawn_tree(), UnmaskedWithoutReplacement()),
    "chain, ended by its own token": ended_by_its_token,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_exact_decoders_keep_the_joint_distribution(name: str) -> None:
    assert p_value(EXACT[name](), FEWER_DRAWS if "vocabulary" in name else DRAWS) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_caught(name: str) -> None:
    assert p_value(WRONG[name](), DRAWS // 4) < 1e-6


# ----------------------------------------------------------------------------------------------- the command line

SKIPPING = ("method=speculative_sampling", "method.skip_attention=[1]", "method.skip_mlp=[2]", "method.gamma=2")


def lab(folder: Path, *more: str) -> int:
    fixed = ("experiment=joint", "model=random", "hardware=cpu_fp32", "hardware.threads=1", f"paths.results={folder}")
    short = ("openings=true", "prompts=1", "temperatures=[1.0]", "sampling.top_k=3", "batch_size=500", "draws=4000")
    return lossless.main([*fixed, *short, *more])


@pytest.mark.parametrize(("rule", "exact"), [("block", True), ("judged_behind_root", False)])
def test_a_rule_in_place_of_the_methods_own(
    rule: str, exact: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong one is expected to fail, and the record says so."""
    code = lab(tmp_path, *SKIPPING, f"rule={rule}")
    (file,) = (tmp_path / "lossless").glob("joint-*/result.json")
    (cell,) = json.loads(file.read_text())["cells"]
    assert code == 0 and cell["rule"] == rule and cell["exact"] is exact and cell["passed"] is exact
    assert cell["prompt"] == experiments.OPENINGS[0] and cell["continuations"] <= 27 and cell["draws"] == 4000
    assert ("must be rejected" in capsys.readouterr().out) is not exact


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ((*SKIPPING, "rule=typical"), "rule must be one of own, chain, block"),
        (("method=hf_generate", "rule=block"), "rule=block needs a method with a drafter, got 'hf_generate'"),
        ((*SKIPPING, "prompts=5"), "prompts must be between 1 and 4, got 5"),
    ],
)
def test_bad_input_gets_one_message(
    said: tuple[str, ...], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lab(tmp_path, *said) == 2
    assert answer in capsys.readouterr().err
