"""Training of exits over a frozen model: maps, distillation, classifier, and the table of hash_ee with its exits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.contract import checks
from methods.early_exit.affine_maps import gather
from methods.early_exit.calm import Calm
from methods.early_exit.classifier_training import fit_classifier, geometric, independent
from methods.early_exit.exit_distillation import TrainedMaps
from methods.early_exit.exit_training import ExitTraining
from methods.early_exit.exits import Exits, Lens, Translated
from methods.early_exit.free import Free
from methods.early_exit.hash_ee import HashEE
from methods.early_exit.hash_tables import HashTable, even_depths
from methods.early_exit.hash_training import HashTraining, states
from methods.early_exit.static_depth import StaticDepth
from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.training import trainer as training
from methods.training.answers import AnswerRecipe
from methods.training.exit_quality import quality
from methods.training.interface import Example, TrainingContext
from methods.training.layer_losses import frozen_from
from methods.training.trainer import TrainingConfig
from tests.early_exit.test_decoding_seq2seq import deep
from tests.helpers.interruptions import interrupted_at

GREEDY = Sampling()
ANSWERS = AnswerRecipe(tokens=600, limit=12, batch=16)
BRIEF = TrainingConfig(steps=60, batch_size=64, learning_rate=3e-3, evaluations=3, precision="float32")
LEARN: dict[str, Any] = {"tokens": 400, "answers": ANSWERS}


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return checks.tiny_target()


def requests(vocab_size: int = 61, rows: int = 60) -> list[Example]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 9, (rows,), generator=generator).tolist()
    return [Example(torch.randint(3, vocab_size, (n,), generator=generator).tolist(), [1]) for n in lengths]


def context(
    target: CausalLM, folder: Path, common: Path | None = None, points: list[Any] | None = None
) -> TrainingContext:
    return TrainingContext(
        output=folder,
        shared_cache=common or folder / "common",
        model=target,
        examples=requests(target.vocab_size),
        log=[].append if points is None else points.append,
    )


@pytest.fixture(scope="module")
def common(target: CausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers and states that the tests share, as preparations for one model do."""
    folder = tmp_path_factory.mktemp("common")
    gather(context(target, folder, folder), (1, 2, 3), ANSWERS, 400)
    return folder


# ------------------------------------------------------------------------------------------------------------- states


def test_states_are_those_of_transformers_where_the_model_answers(target: CausalLM, tmp_path: Path) -> None:
    learnt, held_out = gather(context(target, tmp_path), (2,), ANSWERS, 400)
    assert len(learnt) + len(held_out) == 456 and len(held_out) >= 50  # whole dialogues of 12 tokens each
    model: Any = target.hf
    rows = {(*row.prompt,): row for row in requests()}
    behind, final, tokens = [], [], []
    for row in rows.values():
        text = row.prompt + checks.greedy_reference(target, torch.tensor(row.prompt), 12)
        with torch.no_grad():
            hidden = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        first = len(row.prompt) - 1
        behind.append(hidden[2][0, first:])
        final.append(hidden[-1][0, first:])
        tokens += text[first + 1 :]
    seen = set()
    for part in (learnt, held_out):
        places = torch.cdist(part.exits[2], torch.cat(behind)).argmin(1)
        assert not seen & set(places.tolist()) and len(places.unique()) == len(part), "every place once"
        seen |= set(places.tolist())
        assert part.tokens.tolist() == torch.tensor(tokens)[places].tolist()
        torch.testing.assert_close(part.exits[2], torch.cat(behind)[places], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(part.final, torch.cat(final)[places], rtol=1e-4, atol=1e-4)  # norms are in 32 bit


def test_states_are_computed_once_for_all(target: CausalLM, common: Path, tmp_path: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in common.rglob("*.bin")}
    gather(context(target, tmp_path, common), (1, 3), ANSWERS, 400)
    assert before and {file: file.stat().st_mtime_ns for file in common.rglob("*.bin")} == before


def test_a_corpus_that_is_too_small_is_refused(target: CausalLM, tmp_path: Path) -> None:
    few = TrainingContext(output=tmp_path, shared_cache=tmp_path, model=target, examples=requests(rows=1))
    with pytest.raises(ValueError, match="must have at least 2 dialogues, got 1"):
        gather(few, (2,), ANSWERS, 400)


# --------------------------------------------------------------------------------------------------------------- maps


def test_maps_are_the_ridge_solution_and_closer_than_the_lens(target: CausalLM, common: Path, tmp_path: Path) -> None:
    shop = context(target, tmp_path, common)
    facts = ExitTraining([1, 3], ridge=1e-6, **LEARN).fit(shop)
    exits, (learnt, held_out) = Exits.load(tmp_path, target), gather(shop, (1, 3), ANSWERS, 400)
    assert (facts["tokens"], facts["held_out_tokens"]) == (len(learnt), len(held_out))
    for depth, found in held_out.exits.items():
        lens, mapped = (reader.read(depth, found) for reader in (Lens(target), Translated(target, exits)))
        assert (mapped - held_out.final).square().mean() < 0.8 * (lens - held_out.final).square().mean()
    normed = target.norm(learnt.exits[3])
    padded = torch.cat([normed, torch.ones(len(normed), 1, dtype=normed.dtype)], 1)
    wanted = torch.linalg.lstsq(padded, learnt.final).solution
    weight, bias = exits.translators[3]
    torch.testing.assert_close(weight.double(), wanted[:-1].T, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(bias.double(), wanted[-1], rtol=2e-2, atol=2e-2)


def divergence(target: CausalLM, exits: Exits, places: Any, depth: int) -> float:
    """Mean KL of an exit's distribution from the model's, over the whole vocabulary."""
    wanted = target.head(places.final).log_softmax(-1)
    found = target.head(Translated(target, exits).read(depth, places.exits[depth])).log_softmax(-1)
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


def test_distilled_maps_are_nearer_to_the_models_distribution(target: CausalLM, common: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    shop, points = context(target, tmp_path / "plain", common), []
    ExitTraining([1, 3], **LEARN).fit(shop)
    (tmp_path / "distilled").mkdir()
    facts = ExitTraining([1, 3], recipe=BRIEF, **LEARN).fit(context(target, tmp_path / "distilled", common, points))
    learnt, _ = gather(shop, (1, 3), ANSWERS, 400)
    for depth in (1, 3):
        before, after = (
            divergence(target, Exits.load(tmp_path / name, target), learnt, depth) for name in ("plain", "distilled")
        )
        assert after < 0.95 * before, f"depth {depth}: {before} before, {after} after"
    assert set(facts) >= {"lens", "closed_form", "distilled"} and set(facts["distilled"]) == {"1", "3"}
    assert facts["distillation"]["steps"] == 60 and len(facts["distillation"]["curve"]) == 3
    assert any("held_out/kl_1" in point for point in points) and len(facts["summary"]) == 1 + 2 * 3


def test_the_loss_of_a_step_is_the_divergence(target: CausalLM, common: Path, tmp_path: Path) -> None:
    shop = context(target, tmp_path, common)
    learnt, held_out = gather(shop, (1, 3), ANSWERS, 400)
    maps = {depth: (torch.eye(32) * 0.5, torch.full((32,), 0.1)) for depth in (1, 3)}
    frequent = DraftVocabulary.frequent(learnt.tokens, 7, 61).ids
    counts = torch.bincount(learnt.tokens, minlength=61)
    assert len(frequent) == 7 and counts[frequent].min() >= counts.sort(descending=True).values[7]
    trained = TrainedMaps(target, maps, torch.arange(61))
    for depth, found in trained.divergences(learnt, torch.arange(len(learnt))).items():
        assert float(found.detach()) == pytest.approx(divergence(target, Exits((1, 3), maps), learnt, depth), rel=1e-3)


def test_an_interrupted_distillation_ends_like_an_uninterrupted_one(
    target: CausalLM, common: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    trainer = ExitTraining([2], recipe=BRIEF, **LEARN)
    trainer.fit(context(target, tmp_path / "whole", common))
    seen = interrupted_at(20, monkeypatch)
    shop = context(target, tmp_path / "broken", common)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(shop)
    trainer.fit(shop)
    assert seen == [*range(20), *range(19, 60)]
    files = [(tmp_path / name / "exits.safetensors").read_bytes() for name in ("whole", "broken")]
    assert files[0] == files[1] and not (tmp_path / "broken" / training.STATE).exists()


# ------------------------------------------------------------------------------------------------------------ quality


def test_coverage_is_the_largest_share_that_is_precise_enough() -> None:
    agrees = torch.tensor([True] * 60 + [False] + [True] * 20 + [False] * 19)
    found = quality(agrees, torch.linspace(1, 0, 100))
    assert (found["agreement"], found["confidence"], found["coverage_at_98"]) == (0.8, 0.5, 0.81)


def test_calibration_error_is_the_mean_distance_of_confidence_and_agreement_in_each_bin() -> None:
    confidence = torch.tensor([0.95, 0.95, 0.95, 0.95, 0.5, 0.5, 1.0])
    agrees = torch.tensor([True, True, True, False, False, False, True])
    wanted = (abs(4 * 0.95 + 1.0 - 4) + abs(2 * 0.5)) / 7  # 1.0 lies in the last bin, with 0.95
    assert quality(agrees, confidence)["calibration_error"] == pytest.approx(wanted, abs=1e-4)


# --------------------------------------------------------------------------------------------------------- classifier


def separable(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """States of two exits whose first coordinate says whether the exit is right, mostly."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(2, 600, 6, generator=generator) * 3 + 1
    noise = torch.randn(2, 600, generator=generator)
    return states, states[..., 0] + noise > torch.tensor([2.0, 0.0])[:, None]


@pytest.mark.parametrize("loss", ["independent", "geometric"])
def test_the_classifier_finds_what_separates_and_stands_at_a_minimum(loss: str) -> None:
    states, right = separable()
    weight, bias = fit_classifier(states, right, loss)  # type: ignore[arg-type]
    assert weight[0] > 4 * weight[1:].abs().max()
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    scores = states @ weight + bias
    value = independent(scores, right, True) if loss == "independent" else geometric(scores, right)
    value.backward()
    assert bias.grad is not None and bias.grad.abs() < 1e-3


def test_losses_equal_their_definitions() -> None:
    scores = torch.tensor([[0.3, -1.0, 2.0], [1.0, 0.5, -0.2]])
    right = torch.tensor([[True, False, False], [True, True, False]])
    m = scores.sigmoid()
    plain = -torch.where(right, m.log(), (1 - m).log())
    torch.testing.assert_close(independent(scores, right, False), plain.mean())
    weights = torch.tensor([[2 / 3, 1 / 3, 1 / 3], [1 / 3, 1 / 3, 2 / 3]])
    torch.testing.assert_close(independent(scores, right, True), (plain * weights).mean())
    first = [m[0, 0], (1 - m[0, 1]) * m[1, 1], (1 - m[0, 2]) * (1 - m[1, 2])]  # the last: no exit, the whole model
    torch.testing.assert_close(geometric(scores, right), -torch.stack(first).log().mean())


# ----------------------------------------------------------------------------------------------------- what is written


def test_what_training_writes_can_be_decoded_with(target: CausalLM, common: Path, tmp_path: Path) -> None:
    batch = checks.prompts(target.vocab_size, (5, 9))
    facts = ExitTraining([1, 2, 3], classifier="independent", **LEARN).fit(context(target, tmp_path, common))
    assert set(facts["classifier"]) == {"1", "2", "3"} and "distilled" not in facts
    assert facts["classifier"]["2"]["agreement"] == facts["closed_form"]["2"]["agreement"]
    for confidence in ("softmax", "saturation", "classifier"):
        decoder = Calm(target, GREEDY, 0.3, confidence, checkpoint=tmp_path)  # type: ignore[arg-type]
        assert [len(row) for row in checks.outputs(decoder, batch, 12)] == [12, 12]
    for make in (Free, StaticDepth):
        decoder = make(target, GREEDY, depth=2, checkpoint=tmp_path)
        assert [len(row) for row in checks.outputs(decoder, batch, 12)] == [12, 12]
        with pytest.raises(ValueError, match=r"trained exits are after \[1, 2, 3\]|1 to "):
            make(target, GREEDY, depth=9, checkpoint=tmp_path)
    stored = (tmp_path / "exits.safetensors").stat().st_size
    assert stored < 3 * 2 * (32 * 32 + 32) + 2 * 33 + 1500, "16 bit each, and a header"


@pytest.mark.parametrize("variant", ["marian", "t5"])
def test_exits_of_a_decoder_with_an_encoder(variant: str, tmp_path: Path) -> None:
    lm = Seq2SeqLM.from_hf(deep(variant), keep_hf=True)
    facts = ExitTraining([1, 3], classifier="geometric", tokens=500, answers=ANSWERS).fit(context(lm, tmp_path))
    for depth in ("1", "3"):
        assert facts["closed_form"][depth]["agreement"] >= facts["lens"][depth]["agreement"]
    make = lambda model, sampling: Calm(model, sampling, 0.2, checkpoint=tmp_path)  # noqa: E731
    checks.check_batch(make, lm, limit=12)
    (tmp_path / "hash").mkdir()
    HashTraining(buckets=2, tokens=200, answers=ANSWERS).fit(context(lm, tmp_path / "hash", tmp_path / "common"))
    checks.check_batch(lambda model, sampling: HashEE(model, sampling, checkpoint=tmp_path / "hash"), lm, limit=12)


# ------------------------------------------------------------------------------------------------------------ hash_ee


@pytest.mark.parametrize("kind", ["random", "frequency", "mutual_information", "clustered", "learnt"])
@pytest.mark.parametrize("balance", ["types", "mass"])
def test_tables_come_with_exits_to_match(
    target: CausalLM, kind: Any, balance: Any, common: Path, tmp_path: Path
) -> None:
    facts = HashTraining(kind, balance, buckets=3, tokens=200, answers=ANSWERS).fit(context(target, tmp_path, common))
    decoder = HashEE(target, GREEDY, checkpoint=tmp_path)
    assert decoder.checksum == facts["table_sha256"] == decoder.stats()["table_sha256"]
    assert decoder.reader.depths == (1, 3) and set(decoder.table.depths.tolist()) == {1, 3, 4}
    assert len(checks.outputs(decoder, checks.prompts(61, (4,)), 9)[0]) == 9
    assert set(facts["matched"]) <= {"1", "3"} and facts["matched"].keys() == facts["lens"].keys()


def test_hashed_states_are_those_of_transformers_with_frozen_layers(
    target: CausalLM, common: Path, tmp_path: Path
) -> None:
    """Prompts run in full; behind them every token is frozen from its own depth on."""
    shop = context(target, tmp_path, common)
    table = HashTable(torch.randint(1, 5, (61,), generator=torch.Generator().manual_seed(2)).numpy(), 4)
    row = Example(requests()[0].prompt, checks.greedy_reference(target, torch.tensor(requests()[0].prompt), 12))
    found, meant = states(shop, table, (1, 2), [row], 99), states(shop, table, (1, 2), [row], 99, meant=True)
    model: Any = target.hf
    text, read = torch.tensor([row.prompt + row.answer[:-1]]), torch.tensor(row.answer[:-1])
    depths = torch.from_numpy(table.depths)[text]
    depths[:, : len(row.prompt)] = 4
    with torch.no_grad(), frozen_from(model.model.layers, depths):
        frozen = model(text, output_hidden_states=True).hidden_states
    with torch.no_grad():
        final = model.model(text).last_hidden_state[0, len(row.prompt) :]
    for depth in (1, 2):
        arrives = torch.from_numpy(table.depths)[read] >= depth
        wanted = frozen[depth][0, len(row.prompt) :]
        torch.testing.assert_close(found[depth].exits[depth], wanted[arrives], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[depth].final, final[arrives], rtol=1e-5, atol=1e-5)
        assert found[depth].tokens.tolist() == torch.tensor(row.answer[1:])[arrives].tolist()
        leaves = torch.from_numpy(table.depths)[read] == depth
        torch.testing.assert_close(meant[depth].exits[depth], wanted[leaves], rtol=1e-5, atol=1e-5)


def test_a_model_that_has_its_own_exits_gets_a_table_alone(target: CausalLM, common: Path, tmp_path: Path) -> None:
    HashTraining(maps=False, buckets=2, answers=ANSWERS).fit(context(target, tmp_path, common))
    assert not (tmp_path / "exits.json").exists()
    HashEE(target, GREEDY, head="lens", checkpoint=tmp_path)


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExitTraining(ridge=0.0), "ridge must be above 0, got 0.0"),
        (lambda: ExitTraining(tokens=0, classifier="independent"), "tokens must be at least 1, got 0"),
        (lambda: ExitTraining(maps=False), "Either maps or a classifier must be trained, got neither"),
        (lambda: HashTraining(balance="none"), "balance must be types or mass for kind=frequency, got none"),
        (lambda: HashTraining(buckets=0), "buckets must be at least 1, got 0"),
        (lambda: even_depths(5, 4), "at most 4, the layers of the model, got 5"),
    ],
)
def test_training_refuses(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("trainer", [ExitTraining([4], **LEARN), HashTraining(depths=[2, 5], answers=ANSWERS)])
def test_depths_that_the_model_does_not_have_are_refused(trainer: Any, target: CausalLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ascending numbers of layers from 1 to [34]"):
        trainer.fit(context(target, tmp_path))
