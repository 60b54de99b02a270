"""Blockwise decoding of translations: the loss by hand, frozen and fine-tuned parts, and what each of them promises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.decoder import Guarantee, generate
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.speculative import verification
from methods.speculative.heads.blockwise import Blockwise, BlockwiseTranslation, load_trunk
from methods.speculative.heads.blockwise_translation_training import (
    BlockwiseTranslationTraining,
    Judge,
    TranslationLearner,
    _copy,
)
from methods.speculative.prompt_lookup import PromptLookup
from methods.training.interface import TrainingContext
from methods.training.trainer import Trainer, added
from methods.training.translation import TranslationConfig
from tests.engine.test_seq2seq_lm import EOS, VOCAB, ids, tiny

RECIPE = TranslationConfig(steps=30, tokens=200, learning_rate=5e-3, warmup=3, dropout=0.0, evaluations=1, average=1)
PROMPTS = ids(5, 1, 9, 7, seed=11)
LIMIT = 16


class Letters:
    """A tokenizer of numbers: the text is the ids."""

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}

    def batch_decode(self, rows: list[list[int]], skip: bool) -> list[str]:
        return [" ".join(str(token) for token in row if token != EOS) for row in rows]


def network(variant: str = "marian") -> Any:
    """It ends its texts: the end's row of the output matrix is favoured by a bias."""
    model = tiny(variant, torch.float32)
    if (bias := getattr(model, "final_logits_bias", None)) is not None:
        bias[0, EOS] = 3.0
    return model


@pytest.fixture(scope="module")
def target() -> Seq2SeqLM:
    found = Seq2SeqLM.from_hf(network(), keep_hf=True)
    assert isinstance(found, Seq2SeqLM)
    return found


def context(target: Any, folder: Path, points: list[Any] | None = None) -> TrainingContext:
    (folder / "part").mkdir(parents=True, exist_ok=True)
    sources = ids(*[3 + n % 6 for n in range(32)], seed=5)
    texts = [(" ".join(map(str, source.tolist())), "1") for source in sources]
    shared = {"model": target, "tokenizer": Letters(), "pairs": texts, "validation": texts[:4]}
    log = [].append if points is None else points.append
    return TrainingContext(output=folder / "part", shared_cache=folder / "common", log=log, **shared)


def fitted(target: Any, folder: Path, **options: Any) -> tuple[Path, dict[str, Any], list[Any]]:
    points: list[Any] = []
    shop = context(target, folder, points)
    trainable = BlockwiseTranslationTraining(**{"k": 3, "hidden": 16, "recipe": RECIPE, **options})
    return shop.output, trainable.fit(shop), points


@pytest.fixture(scope="module")
def tuned(target: Seq2SeqLM, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[Any]]:
    return fitted(target, tmp_path_factory.mktemp("tuned"), heads_first=0.0)


def learner_of(
    target: Seq2SeqLM, *, tuned: bool = True, per_step: Any = "all", smoothing: float = 0.1, weight: float = 0.5
) -> Any:
    trunk = _copy(target.hf, 0.0).requires_grad_(tuned)
    vocabulary = DraftVocabulary(torch.tensor([1, EOS, *range(5, VOCAB)]), VOCAB)
    learner = TranslationLearner(target, trunk, vocabulary, 3, 8, per_step, smoothing, weight)
    torch.nn.init.normal_(learner.second.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    return learner


PAIRS = [([5, 6, 7], [9, 8, 7, EOS]), ([5], [4, EOS])]


# ------------------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("variant", ["marian", "bart_forced", "t5"])
def test_the_losses_of_the_heads_are_those_of_the_papers_formula(variant: str) -> None:
    """Pair by pair with transformers' own forward; head j at a place predicts the token j places on."""
    model = network(variant)
    target = Seq2SeqLM.from_hf(model, keep_hf=True)
    assert isinstance(target, Seq2SeqLM)
    learner = learner_of(target)
    found, seen = learner.loss_of(PAIRS, torch.device("cpu"))
    losses: list[list[torch.Tensor]] = [[], [], []]
    allowed = learner.vocabulary.ids.tolist()
    for source, text in PAIRS:
        read = torch.tensor([[*target.start, *text]])
        output = model(input_ids=torch.tensor([source]), decoder_input_ids=read, output_hidden_states=True)
        states = output.decoder_hidden_states[-1][0]
        for place in range(len(text)):
            row = len(target.start) - 1 + place
            own = output.logits[0, row]
            smooth = torch.nn.functional.cross_entropy(own[None], torch.tensor([text[place]]), label_smoothing=0.1)
            losses[0].append(smooth)
            hidden = states[row] if learner._scale == 1.0 else states[row] * learner._scale
            updates = learner.second(learner.first(hidden).relu()).view(2, -1)
            for head in (0, 1):
                if place + 1 + head < len(text) and text[place + 1 + head] in allowed:
                    proposed = torch.nn.functional.linear(hidden + updates[head], model.get_output_embeddings().weight)
                    if (bias := getattr(model, "final_logits_bias", None)) is not None:
                        proposed = proposed + bias[0]
                    logits = proposed[allowed].log_softmax(-1)
                    losses[1 + head].append(-logits[allowed.index(text[place + 1 + head])])
    wanted = torch.stack([torch.stack(head).mean() for head in losses])
    torch.testing.assert_close(found["own"], wanted[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["heads"], 0.5 * wanted[1:].mean(), rtol=1e-4, atol=1e-4)
    assert float(seen["loss_1"]) == pytest.approx(float(wanted[0].detach()), rel=1e-4)


@pytest.mark.parametrize("tuned", [False, True])
def test_the_gradient_reaches_the_model_only_where_it_is_tuned(tuned: bool, target: Seq2SeqLM) -> None:
    learner = learner_of(target, tuned=tuned)
    added(learner.loss_of(PAIRS, torch.device("cpu"))[0]).backward()
    reached = {name for name, weight in learner.trunk.named_parameters() if weight.grad is not None}
    assert bool(reached) is tuned and learner.first.weight.grad is not None
    if tuned:
        assert {name.split(".")[1] for name in reached} >= {"encoder", "decoder"}
    assert all(weight.grad is None for weight in target.hf.parameters()), "the target itself is never touched"


def test_one_head_per_step_is_any_of_them(target: Seq2SeqLM) -> None:
    every = learner_of(target)
    _, seen = every.loss_of(PAIRS, torch.device("cpu"))
    one = learner_of(target, per_step="one")
    one.load_state_dict(every.state_dict())
    torch.manual_seed(0)
    drawn = {round(float(one.loss_of(PAIRS, torch.device("cpu"))[0].detach()), 4) for _ in range(40)}
    assert drawn == {round(float(value), 4) for value in seen.values()} and len(drawn) == 3


def test_what_is_judged_is_what_the_loop_writes(target: Seq2SeqLM) -> None:
    """Texts up to their ends, and the rows that each pass after the first one worked on."""
    decoder = PromptLookup(target, Sampling(), gamma=3)
    rows: list[int] = []
    found = generate(decoder, PROMPTS, LIMIT, target.eos_ids, watch=lambda _, some: rows.append(len(some)))
    passes = 0
    for prompt, text in zip(PROMPTS, found, strict=True):
        (wanted,) = checks.outputs(Autoregressive(target, Sampling()), [prompt], LIMIT)
        assert text == (wanted[: wanted.index(EOS) + 1] if EOS in wanted else wanted)
        done = 1
        for step in list(decoder.decode([prompt], LIMIT, torch.Generator()))[1:]:
            if done < len(text):
                passes += 1
                done += len(step.tokens[0])
    assert sum(rows[1:]) == passes


# --------------------------------------------------------------------------------------------------------------- parts


def test_training_lowers_the_loss_and_leaves_a_part(tuned: tuple[Path, dict[str, Any], list[Any]]) -> None:
    folder, facts, points = tuned
    losses = [point["loss"] for point in points if "loss" in point]
    assert losses[-1] < losses[0]
    assert {path.name for path in folder.iterdir()} == {"head.safetensors", "config.json", "trunk"}
    assert facts["trunk"] == "finetuned" and facts["tokens_per_step"] >= 1.0 and facts["steps"] == 30
    assert {"validation_bleu", "validation_bleu_of_the_original"} <= set(facts)


def test_the_text_is_the_fine_tuned_models_to_the_letter_and_not_promised_to_be_the_originals(
    target: Seq2SeqLM, tuned: tuple[Path, dict[str, Any], list[Any]]
) -> None:
    from transformers import AutoModelForSeq2SeqLM

    decoder = BlockwiseTranslation(target, Sampling(), checkpoint=tuned[0])
    assert decoder.guarantee is Guarantee.RELAXED and type(decoder.rule) is verification.Greedy
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(tuned[0] / "trunk", dtype=torch.float32)
    for prompt in PROMPTS:
        text: list[int] = []
        for _ in range(LIMIT):  # transformers' own forward, token by token
            read = torch.tensor([[*target.start, *text]])
            text.append(int(model(input_ids=prompt[None], decoder_input_ids=read).logits[0, -1].argmax()))
        assert checks.outputs(decoder, [prompt], LIMIT) == [text]
    assert checks.outputs(decoder, PROMPTS, LIMIT) == [checks.outputs(decoder, [p], LIMIT)[0] for p in PROMPTS]
    assert decoder.reference_model() is decoder.target and decoder.target is not target
    assert (decoder.memory()["trunk"] or 0) == sum(w.numel() * 4 for w in model.parameters())


@pytest.mark.parametrize("options", [{"criterion": "top_k", "top": 3}, {"criterion": "distance"}, {"minimum_block": 2}])
def test_criteria_that_change_the_text_promise_no_models(
    options: dict[str, Any], target: Seq2SeqLM, tuned: tuple[Path, dict[str, Any], list[Any]]
) -> None:
    decoder = BlockwiseTranslation(target, Sampling(), checkpoint=tuned[0], **options)
    assert decoder.guarantee is Guarantee.RELAXED and decoder.reference_model() is None
    assert len(checks.outputs(decoder, PROMPTS, LIMIT)) == len(PROMPTS)


def test_the_model_learns_at_its_share_of_the_rate_behind_the_heads(target: Seq2SeqLM, tmp_path: Path) -> None:
    before = target.hf.get_encoder().layers[0].fc1.weight  # type: ignore[union-attr]

    def moved(share: float, heads_first: float) -> float:
        part, _, _ = fitted(target, tmp_path / f"{share}-{heads_first}", trunk_share=share, heads_first=heads_first)
        found = load_trunk(part, target)
        assert found is not None and found[0].hf is None
        (file,) = (part / "trunk").glob("*.safetensors")
        after = load_file(file)["model.encoder.layers.0.fc1.weight"].float()
        return float((after - before).abs().mean())

    assert moved(0.01, 0.0) < 0.1 * moved(1.0, 0.0)
    assert 0 < moved(1.0, 0.5) < moved(1.0, 0.0)
    assert moved(1.0, 0.9999) < 1e-4  # what 16 bit round


def test_the_models_rate_rises_from_where_it_is_released(
    target: Seq2SeqLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[tuple[float, float]] = []
    update = Trainer.update

    def noted(self: Any, *given: Any) -> None:
        update(self, *given)
        heads, trunk = (group["lr"] for group in self.optimizer.param_groups)
        rates.append((heads, trunk))

    monkeypatch.setattr(Trainer, "update", noted)
    fitted(target, tmp_path, heads_first=0.2, trunk_warmup=0.3, trunk_share=0.5)
    shares = [trunk / heads for heads, trunk in rates]
    first, risen = round(0.2 * 30), round(0.5 * 30)
    assert shares[:first] == [0.0] * first and shares[risen:] == pytest.approx([0.5] * (30 - risen))
    assert shares[first : first + 2] == pytest.approx([0.5 / 9, 1 / 9])


@pytest.mark.parametrize(
    ("curve", "averaged"),
    [
        ([(99.0, 9.0), (30.0, 1.5), (40.0, 1.2), (39.6, 1.4)], [30]),  # of those that lose little, the fastest
        ([(99.0, 9.0), (30.0, 1.9), (31.0, 1.2), (20.0, 2.0)], [22]),  # all lose: the best text
    ],
)
def test_the_checkpoint_is_the_fastest_that_keeps_the_quality(
    curve: list[tuple[float, float]],
    averaged: list[int],
    target: Seq2SeqLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one is of before the release: the model as it was."""
    points = iter([*curve, (1.0, 1.0)])
    monkeypatch.setattr(Judge, "bleu_of", lambda self, target: 40.0)
    monkeypatch.setattr(
        Judge, "judge", lambda self, learner: dict(zip(("bleu", "tokens_per_step"), next(points), strict=True))
    )
    _, facts, _ = fitted(target, tmp_path, heads_first=0.27, recipe=replace(RECIPE, evaluations=4, average=1))
    assert facts["averaged_steps"] == averaged and facts["validation_bleu"] == 1.0, "of what is saved"


def test_a_frozen_part_keeps_the_targets_text(target: Seq2SeqLM, tmp_path: Path) -> None:
    folder, facts, _ = fitted(target, tmp_path, trunk="frozen")
    assert not (folder / "trunk").exists() and load_trunk(folder, target) is None
    assert facts["validation_bleu"] == pytest.approx(facts["validation_bleu_of_the_original"], abs=0.01)
    decoder = Blockwise(target, Sampling(), checkpoint=folder)
    assert decoder.guarantee is Guarantee.EXACT and decoder.target is target and "trunk" not in decoder.memory()
    wanted = [checks.outputs(Autoregressive(target, Sampling()), [prompt], LIMIT)[0] for prompt in PROMPTS]
    assert checks.outputs(decoder, PROMPTS, LIMIT) == wanted


def test_damaged_and_foreign_parts_are_refused(
    target: Seq2SeqLM, tuned: tuple[Path, dict[str, Any], list[Any]], tmp_path: Path
) -> None:
    import shutil

    folder = shutil.copytree(tuned[0], tmp_path / "part")
    (folder / "trunk" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot be read as a fine-tuned model"):
        BlockwiseTranslation(target, Sampling(), checkpoint=folder)
    with pytest.raises(ValueError, match="method=blockwise_translation model=MODEL"):
        BlockwiseTranslation(target, Sampling())
    with pytest.raises(ValueError, match="needs an encoder-decoder, got .*, a causal model"):
        BlockwiseTranslationTraining(recipe=RECIPE).fit(context(checks.tiny_target(), tmp_path / "shop"))
    with pytest.raises(ValueError, match="k must be at least 2, got 1"):
        BlockwiseTranslationTraining(k=1)
    with pytest.raises(ValueError, match="trunk_share must be above 0 and at most 1, got 0.0"):
        BlockwiseTranslationTraining(trunk_share=0.0)
    with pytest.raises(ValueError, match="heads_first must be from 0 to below 1, got 1.0"):
        BlockwiseTranslationTraining(heads_first=1.0)
