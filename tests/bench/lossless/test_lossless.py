"""The losslessness laboratory: statistics by hand, exact rules pass, wrong ones are caught, bad input is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.contract import checks
from bench.errors import UserError
from bench.lossless import command as lossless
from bench.lossless import continuations, experiments, greedy, report
from bench.lossless.experiments import Cell, arrangements, run_cell
from bench.lossless.sampling import Arrangement, _Source, first_tokens, root_distributions
from bench.lossless.settings import LosslessConfig
from bench.lossless.statistics import compare, deviation_shown, goodness_of_fit, mean_absolute_deviation
from bench.lossless.wrong_rules import UncorrectedRejection
from methods.autoregressive import Autoregressive
from methods.engine.sampling import Sampling
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.prompt_lookup import PromptLookup
from methods.speculative.speculative_sampling import SpeculativeSampling
from methods.speculative.verification import ChainRejection

VOCAB = 50
DRAWS = 60_000
ARRANGEMENTS = arrangements(True, 0, LosslessConfig())

# ------------------------------------------------------------------------------------------------------- statistics


def test_deviation_total_variation_and_chi_square_by_hand():
    found = compare(np.array([60.0, 40.0]), np.array([0.5, 0.5]))
    assert found.draws == 100 and found.impossible == 0
    assert found.standard_deviation == pytest.approx(0.1)  # both frequencies are off by a tenth
    assert found.expected_deviation == pytest.approx(0.05)  # sqrt(0.25 / 100)
    assert found.total_variation == pytest.approx(0.1)
    assert found.chi_square == pytest.approx(4.0) and found.degrees == 1  # 10^2 / 50 twice
    assert found.p_value == pytest.approx(0.0455, abs=1e-4)


def test_the_deviation_over_shown_tokens_by_hand():
    found, expected = deviation_shown([0.5, 0.2], [0.6, 0.2], 100)
    assert found == pytest.approx(math.sqrt(0.01 / 2)) and expected == pytest.approx(math.sqrt((0.25 + 0.16) / 2 / 100))
    widest = 1 / math.sqrt(1e6 * 128_256)  # what an exact sampler cannot exceed over a vocabulary of that size
    assert compare(np.ones(128_256), np.ones(128_256) / 128_256).expected_deviation <= 1 / 128_256
    assert widest < 9.694e-5 < deviation_shown([0.01] * 10, [0.01] * 10, 1_000_000)[1]


def test_an_outcome_that_cannot_be_has_p_value_zero():
    found = compare(np.array([50.0, 49.0, 1.0]), np.array([0.5, 0.5, 0.0]))
    assert found.impossible == 1 and found.p_value == 0.0 and math.isinf(found.chi_square)


def test_rare_outcomes_are_joined():
    expected = np.array([50.0, 40.0, 4.0, 3.0, 3.0])
    statistic, degrees, _ = goodness_of_fit(np.array([50.0, 40.0, 10.0, 0.0, 0.0]), expected)
    assert degrees == 2 and statistic == 0.0  # the three rare ones hold ten together, as expected
    statistic, degrees, _ = goodness_of_fit(np.array([58.0, 40.0, 2.0]), np.array([58.0, 40.0, 2.0]))
    assert degrees == 1 and statistic == 0.0  # two are too few even together: they join the smallest


def test_one_cell_can_prove_nothing():
    assert goodness_of_fit(np.array([3.0, 1.0]), np.array([2.0, 2.0])) == (0.0, 0, 1.0)


@pytest.mark.parametrize(("probability", "draws"), [(0.5, 4), (0.01, 30), (1e-7, 1000), (0.97, 11), (1.0, 5), (0.0, 5)])
def test_mean_absolute_deviation_is_that_of_the_binomial(probability, draws):
    law = [math.comb(draws, k) * probability**k * (1 - probability) ** (draws - k) for k in range(draws + 1)]
    wanted = sum(chance * abs(k - draws * probability) for k, chance in enumerate(law))
    assert mean_absolute_deviation(np.array([probability]), draws)[0] == pytest.approx(wanted, rel=1e-9, abs=1e-15)


def test_expectations_are_those_of_an_exact_sampler():
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.full(VOCAB, 0.3))
    found = [compare(rng.multinomial(5000, probs).astype(float), probs) for _ in range(400)]
    squares = np.mean([f.standard_deviation**2 for f in found])
    assert math.sqrt(squares) == pytest.approx(found[0].expected_deviation, rel=0.05)
    assert np.mean([f.total_variation for f in found]) == pytest.approx(found[0].expected_total_variation, rel=0.05)
    assert 0.4 < np.mean([f.p_value for f in found]) < 0.6


def test_nothing_drawn_is_refused():
    with pytest.raises(ValueError, match="0 draws"):
        compare(np.zeros(3), np.ones(3) / 3)


# --------------------------------------------------------------------------------------------------- first tokens


def pair(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(2, VOCAB, generator=generator) * 1.5).softmax(-1)
    return p, q


def p_value(arrangement: Arrangement, seed: int = 0, given: torch.Tensor | None = None) -> float:
    p, q = pair()
    counts = first_tokens(p, q, arrangement, DRAWS, torch.Generator().manual_seed(seed), given)
    assert int(counts.sum()) == DRAWS
    return compare(counts.double().numpy(), p.double().numpy()).p_value


@pytest.mark.parametrize("arrangement", [a for a in ARRANGEMENTS if a.exact], ids=lambda a: a.name)
def test_exact_rules_pass(arrangement):
    assert p_value(arrangement) > 1e-3


@pytest.mark.parametrize("arrangement", [a for a in ARRANGEMENTS if not a.exact], ids=lambda a: a.name)
def test_wrong_rules_are_caught(arrangement):
    assert p_value(arrangement) < 1e-6


def test_a_deterministic_draft_and_none_at_all_pass():
    known, nothing = (arrangements(False, tokens, LosslessConfig())[0] for tokens in (2, 0))
    assert p_value(known, given=torch.tensor([7, 3])) > 1e-3
    assert p_value(nothing) > 1e-3


@pytest.mark.parametrize("kind", ["chain", "with_replacement", "without_replacement"])
def test_drafts_come_from_the_draft_distribution(kind):
    """Each sibling by itself has the law q; without replacement all of them differ."""
    _, q = pair()
    rng = torch.Generator().manual_seed(3)
    source = _Source(q, Arrangement("any", kind, ChainRejection(), 1 if kind == "chain" else 3), None, rng)
    tokens = torch.cat([source.draft(1000).tokens for _ in range(40)])
    first = np.bincount(tokens[:, 0].numpy(), minlength=VOCAB).astype(float)
    assert compare(first, q.double().numpy()).p_value > 1e-3
    if kind == "without_replacement":
        assert all(len(set(row)) == 3 for row in tokens[:500].tolist())
        second = np.bincount(tokens[:, 1].numpy(), minlength=VOCAB).astype(float)
        q64 = q.double()
        law = sum(q64[i] * q64.where(torch.arange(VOCAB) != i, torch.zeros(())) / (1 - q64[i]) for i in range(VOCAB))
        assert compare(second, law.numpy()).p_value > 1e-3


def test_tokens_without_a_chance_are_never_drafted():
    q = torch.tensor([0.5, 0.0, 0.25, 0.0, 0.25, 0.0])
    source = _Source(q, Arrangement("any", "without_replacement", ChainRejection(), 3), None, torch.Generator())
    assert sorted(source.draft(1).tokens[0].tolist()) == [0, 2, 4]
    assert set(source.draft(500).tokens.flatten().tolist()) == {0, 2, 4}


def test_a_cell_reports_what_the_picture_needs():
    p, q = pair()
    cell = Cell("a prompt", 1.0, p.numpy(), q.numpy(), None, ARRANGEMENTS[0], 2000, 5, {3: "three", 4: "four"})
    row = run_cell(cell)
    assert row["overlap"] == pytest.approx(float(torch.minimum(p, q).sum()), rel=1e-6)
    assert [bar["id"] for bar in row["top"]] == [3, 4]
    assert row["top"][0]["target"] == pytest.approx(float(p[3]))
    gaps = [bar["empirical"] - bar["target"] for bar in row["top"]]
    assert row["standard_deviation_shown"] == pytest.approx(math.sqrt(sum(gap**2 for gap in gaps) / 2))
    assert abs(row["top"][0]["empirical"] - float(p[3])) < 5 * math.sqrt(float(p[3]) / 2000)
    assert row["cpu_s"] >= 0
    assert run_cell(cell) | {"cpu_s": 0} == row | {"cpu_s": 0}  # the seed decides


# --------------------------------------------------------------------------------------------- with a small model


@pytest.fixture(scope="module")
def target():
    return checks.tiny_target(vocab_size=8, seed=3)


PROMPT = [1, 5, 2, 5, 2]


def skipping(target, sampling):
    return SpeculativeSampling(target, sampling, gamma=3, skip_attention=[1], skip_mlp=[2])


def test_root_distributions_are_those_of_target_and_draft(target):
    sampling = Sampling(0.8)
    p, q, tokens = root_distributions(skipping(target, sampling), PROMPT, sampling, 0)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        wanted = sampling.probs(target.hf(ids).logits[:, -1])[0]
    torch.testing.assert_close(p.double(), wanted.double())
    assert len(tokens) == 1
    view = target.skip([1], [2])
    wanted = sampling.probs(view.prefill([ids[0]], view.new_cache(1, 8)).logits[:, 0])[0]
    torch.testing.assert_close(q.double(), wanted.double())
    assert not torch.allclose(p, q, atol=0.01)


def test_a_deterministic_drafter_has_tokens_and_no_distribution(target):
    sampling = Sampling(1.0)
    p, q, tokens = root_distributions(PromptLookup(target, sampling), PROMPT, sampling, 0)
    assert q is None and tokens.tolist() == [5]  # what followed the last "5, 2" before
    _, _, tokens = root_distributions(PromptLookup(target, sampling), [1, 2, 3], sampling, 0)
    assert len(tokens) == 0


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.7, top_k=4)], ids=str)
def test_likely_continuations_are_exact_and_complete(sampling, target):
    joint = checks.joint_distribution(target, torch.tensor(PROMPT), sampling, 3)
    found = continuations.likely_continuations(target, PROMPT, sampling, 3, floor=0.004)
    assert set(found) == {tuple(index) for index in (joint >= 0.004).nonzero().tolist()}
    assert 10 < len(found) < 8**3
    for sequence, mass in found.items():
        assert mass == pytest.approx(float(joint[sequence]), rel=1e-5)


def joint_p_value(decoder, target, sampling, draws=3000):
    exact = continuations.likely_continuations(target, PROMPT, sampling, 3, floor=0.002)
    counts = continuations.drawn_continuations(decoder, PROMPT, 3, draws, 1, 256, torch.device("cpu"))
    assert sum(counts.values()) == draws
    return compare(*continuations.as_arrays(exact, counts)).p_value


def test_the_full_decoder_follows_the_joint_distribution_and_a_wrong_one_is_caught(target):
    sampling = Sampling(1.0)
    honest = skipping(target, sampling)
    assert joint_p_value(honest, target, sampling) > 1e-3
    wrong = SpeculativeDecoder(target, sampling, honest.drafter, UncorrectedRejection())
    assert joint_p_value(wrong, target, sampling) < 1e-6
    assert joint_p_value(Autoregressive(target, Sampling(1.2)), target, sampling) < 1e-6


class Forgetful(Autoregressive):
    """Swaps its third token for another one."""

    def decode(self, prompts, limit, rng):
        for number, step in enumerate(super().decode(prompts, limit, rng)):
            if number == 2:
                step.tokens[0] = [(step.tokens[0][0] + 1) % 8]
            yield step


def test_greedy_identity_counts_and_finds_the_first_difference(target):
    alone = Autoregressive(target, Sampling())
    same = greedy.compare_prompt(alone, skipping(target, Sampling()), target, "x", PROMPT, 9, 1e-6)
    assert (same.identical, same.first_divergence, same.exact, same.violation) == (True, None, same.tokens, 0)
    other = greedy.compare_prompt(alone, Forgetful(target, Sampling()), target, "x", PROMPT, 9, 1e-6)
    assert not other.identical and other.first_divergence == 2 and other.violation >= 1 and other.max_gap > 0


# ----------------------------------------------------------------------------------------------- the command line


def words(tmp_path: Path, *more: str) -> list[str]:
    fixed = [
        "model=random",
        "hardware=cpu_fp32",
        "hardware.threads=1",
        f"paths.results={tmp_path}",
        "max_new_tokens=12",
    ]
    return [*fixed, *more]


SKIPPING = ("method=speculative_sampling", "method.skip_attention=[1]", "method.skip_mlp=[2]")


def recorded(tmp_path: Path, experiment: str) -> tuple[dict[str, Any], dict[str, Any]]:
    (folder,) = (tmp_path / "lossless").glob(f"{experiment}-*")
    for file in folder.iterdir():
        assert str(tmp_path) not in file.read_text(), file.name
    return json.loads((folder / "manifest.json").read_text()), json.loads((folder / "result.json").read_text())


def test_sampling_from_the_command_line(tmp_path, capsys):
    code = lossless.main(words(tmp_path, "experiment=sampling", *SKIPPING, "draws=3000", "temperatures=[1.0]"))
    manifest, result = recorded(tmp_path, "sampling")
    table = capsys.readouterr().out
    assert code == (0 if result["passed"] else 3)
    assert len(result["cells"]) == 40 and len(result["rules"]) == 10  # ten rules over four prompts
    assert manifest["lab"]["draws"] == 3000 and manifest["model"]["name"] == "random"
    assert all(row["as_it_should"] for row in result["rules"] if row["exact"])
    obvious = {"argmax draft judged with softmax q", "top-k children judged as drawn"}
    assert all(row["as_it_should"] for row in result["rules"] if row["rule"] in obvious)
    assert "wrong rule: caught" in table and "exact: passes" in table
    assert result["bound"] == pytest.approx(0.01 / 20)


def test_sampling_of_a_deterministic_drafter(tmp_path):
    code = lossless.main(words(tmp_path, "experiment=sampling", "method=prompt_lookup", "draws=2000"))
    _, result = recorded(tmp_path, "sampling")
    assert code == 0 and {row["rule"] for row in result["rules"]} <= {"deterministic draft", "no draft"}
    assert len(result["cells"]) == 8  # four prompts at two temperatures


def test_greedy_from_the_command_line(tmp_path, capsys):
    assert lossless.main(words(tmp_path, "experiment=greedy", "method=prompt_lookup")) == 0
    _, result = recorded(tmp_path, "greedy")
    assert result["identical"] == 8 and result["violations"] == 0 and "PPIO" in result["prompts"][0]["prompt"]
    assert "8 of 8 texts identical" in capsys.readouterr().out


def test_joint_from_the_command_line(tmp_path, capsys):
    more = ("draws=300", "batch_size=64", "temperatures=[0.7]", "floor=0.01")
    assert lossless.main(words(tmp_path, "experiment=joint", *SKIPPING, *more)) == 0
    _, result = recorded(tmp_path, "joint")
    assert len(result["cells"]) == 4 and all(0 <= cell["mass"] <= 1 for cell in result["cells"])
    assert "continuations" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (["experiment=samplng"], "Did you mean 'sampling'"),
        ([], "experiment=greedy|sampling|rounds|joint"),
        (["experiment=sampling", "draws=0"], "draws must be at least 1, got 0"),
        (["experiment=sampling", "draws=many"], "draws"),
        (["experiment=sampling", "temperatures=[0.0]"], "experiment=greedy for temperature 0"),
        (["experiment=sampling", "temperatures=[]"], "above 0"),
        (["experiment=sampling", "level=1"], "level must be between 0 and 1, got 1.0"),
        (["experiment=sampling", "drws=10"], "Did you mean 'draws'"),
        (["experiment=sampling", "draws=["], "cannot be read"),
        (["experiment=sampling", "method=prompt_lokup"], "Did you mean 'prompt_lookup'"),
        (["experiment=sampling", *SKIPPING, "children=1000", "draws=10"], "Set children="),
        (["experiment=sampling", "method=hf_generate"], "experiment=joint"),
        (["experiment=greedy", "dataset.limit=2"], "dataset.limit=2 has no effect"),
    ],
)
def test_bad_input_gets_one_message(said, answer, tmp_path, capsys):
    assert lossless.main(words(tmp_path, *said)) == 2
    told = capsys.readouterr().err
    assert answer in told and "Traceback" not in told
    assert not (tmp_path / "lossless").exists()


def test_a_relaxed_method_is_refused(target):
    decoder = Autoregressive(target, Sampling())
    decoder.guarantee = type(decoder.guarantee).RELAXED
    with pytest.raises(UserError, match="method must be EXACT, got 'typical', which is RELAXED"):
        experiments.require_exact(decoder, "typical")


def test_a_failed_experiment_says_so():
    row = {"rule": "chain", "exact": True, "cells": 4, "failed": 1, "standard_deviation": 1e-3}
    row |= {"standard_deviation_shown": 2e-3, "expected_deviation_shown": 3e-4}
    row |= {"expected_deviation": 1e-4, "total_variation": 0.1, "smallest_p": 1e-9, "as_it_should": False}
    table = "\n".join(report.rules_table({"rules": [row, {**row, "exact": False}], "bound": 1e-4}))
    assert "exact: FAILS" in table and "wrong rule: MISSED" in table
