"""DFlash and DSpark in training: blocks, losses, what is learnt; the network in decoding is the trained one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bench.contract import checks
from methods.engine.causal_lm import CausalLM
from methods.engine.checkpoint_files import CONFIG, WEIGHTS
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import Sampling
from methods.speculative.dflash.decoder import DFlash, DSpark
from methods.speculative.dflash.network import Network, Reader
from methods.speculative.dflash.training import BlockLearner, DFlashTraining, taps_of
from methods.training import trainer
from methods.training.answers import AnswerRecipe
from methods.training.features import Batch
from methods.training.interface import Example, TrainingContext
from methods.training.losses import DraftLoss
from methods.training.trainer import TrainingConfig
from tests.helpers.tiny_head_trees import counting_target
from tests.helpers.tiny_heads import batch_of, learn_by_heart

DFLASH = {"block": 4, "sample_from_anchor": False, "markov_rank": 0, "confidence": False}
DSPARK = {"block": 3, "sample_from_anchor": True, "markov_rank": 8, "confidence": True}
KINDS = pytest.mark.parametrize("options", [DFLASH, DSPARK], ids=["dflash", "dspark"])


@pytest.fixture(scope="module")
def target() -> CausalLM:
    """In 32 bit."""
    return qwen3()


def qwen3(qk_norm: bool = True) -> CausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**sizes)) if qk_norm else LlamaForCausalLM(LlamaConfig(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return CausalLM.from_hf(model.eval())


def learner_of(target: CausalLM, options: dict[str, Any], even: bool = False, random: bool = True) -> BlockLearner:
    """Random weights make every part of it matter; ``even``: only tokens of even id can be drafted."""
    torch.manual_seed(1)
    training = DFlashTraining(layers=2, anchors=40, **options)
    vocabulary = DraftVocabulary(torch.arange(0, target.vocab_size, 1 + even), target.vocab_size)
    learner = BlockLearner(target, training.spec(target), vocabulary, 40, DraftLoss("ce_tv"))
    if random:
        with torch.no_grad():
            for parameter in learner.parameters():
                parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return learner


def ragged(target: CausalLM, lengths: tuple[int, ...] = (9, 4, 12), prompts: tuple[int, ...] = (3, 2, 7)) -> Batch:
    texts = [text.tolist() for text in checks.prompts(target.vocab_size, lengths)]
    return batch_of(target, texts, prompts, range(target.n_layers))


# -- blocks -----------------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_network_in_decoding_is_the_one_that_was_trained(qk_norm: bool, options: dict[str, Any]) -> None:
    """Every block of a batch, each as decoding makes it: features before its anchor, then one pass."""
    target = qwen3(qk_norm)
    learner, batch = learner_of(target, options, even=True), ragged(target)
    network = Network(target, learner.part())
    anchors = learner.places(batch)
    assert len(anchors.row) == sum(
        length - prompt - 1 for length, prompt in zip(batch.lengths, batch.prompts, strict=True)
    )
    with torch.no_grad():
        states = learner.states(batch, anchors)
        for number, (row, place) in enumerate(zip(anchors.row.tolist(), anchors.place.tolist(), strict=True)):
            reader = Reader(network, 1, 20)
            reader.read([batch.hidden_layers[tap][row, None, :place] for tap in learner.spec.taps], [place])
            found = reader.block(batch.tokens[row, place, None])
            torch.testing.assert_close(found[0], states[number], atol=1e-4, rtol=1e-4)
            before = batch.tokens[row, None, : learner.spec.drafted]
            bias, markov = network.bias(before), learner.network.markov(before)
            logits = network.logits(found) + (0 if bias is None else bias)
            ours = learner._best(states[number], None if markov is None else markov[0])
            assert torch.equal(logits[0].topk(10).indices, ours)
            if learner.spec.confidence:
                sure = learner.network.confidence(states[number], None if markov is None else markov[0])
                torch.testing.assert_close(network.confidence(found, before)[0], sure.sigmoid(), atol=1e-4, rtol=1e-4)


def test_anchors_are_random_tokens_of_the_answer_that_others_follow(target: CausalLM) -> None:
    learner, batch = learner_of(target, DSPARK), ragged(target, (30, 14, 4), (5, 12, 4))
    learner.anchors = 6
    draws = [learner.train().places(batch) for _ in range(40)]
    for draw in draws:
        assert torch.bincount(draw.row, minlength=3).tolist() == [6, 1, 0] and draw.width == 6
    assert {int(place) for draw in draws for place in draw.place[draw.row == 0]} == set(range(5, 29))
    assert all(draw.place[draw.row == 1].tolist() == [12] for draw in draws)
    again = [learner.eval().places(batch).place for _ in range(2)]
    assert torch.equal(*again), "evaluations judge the same blocks"


@KINDS
def test_it_begins_as_the_targets_last_layers(options: dict[str, Any], target: CausalLM) -> None:
    network, batch = learner_of(target, options, random=False).network, ragged(target)
    taps = [batch.hidden_layers[tap] for tap in taps_of(target.n_layers)]
    with torch.no_grad():
        assert network.fc.weight[:, :-32].std() < 0.03
        network.fc.weight[:, :-32] = 0
    feature = network.hidden_norm(network.fc(torch.cat(taps, -1)))
    source, layer = target.layers[-2], network.layers[0]
    _, key, value = source.attention.qkv(source.attention.norm(taps[-1])).split([32, 16, 16], -1)
    close = {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(layer.self_attn["v_proj"](feature), value, **close)
    torch.testing.assert_close(layer.heads("k", feature), source.attention.key_norm(key.unflatten(-1, (2, 8))), **close)
    rows = torch.randn(5, 32)
    query = source.attention.qkv(source.attention.norm(rows))[:, :32]
    torch.testing.assert_close(layer.self_attn["q_proj"](layer.input_layernorm(rows)), query, **close)
    gate, up = source.mlp.gate_up(source.mlp.norm(rows)).chunk(2, dim=-1)
    wanted = rows + source.mlp.down(source.mlp.activation(gate) * up)
    torch.testing.assert_close(layer.leave(rows, torch.zeros(5, 32)), wanted, **close)


# -- what is learnt ---------------------------------------------------------------------------------------------------


@KINDS
def test_the_loss_is_a_mean_over_the_places_before_the_first_that_cannot_be_drafted(
    options: dict[str, Any], target: CausalLM
) -> None:
    learner, batch = learner_of(target, options, even=True), ragged(target, (20, 9), (3, 2))
    anchors = learner.places(batch)
    losses, sure, weights, all_weights = [], [], [], []
    states, drafted = learner.states(batch, anchors), learner.spec.drafted
    weight, _ = target.output_rows(learner.vocabulary.ids)
    for number, (row, place) in enumerate(zip(anchors.row.tolist(), anchors.place.tolist(), strict=True)):
        for step in range(drafted):
            at = place + step
            if at + 1 >= batch.lengths[row]:
                break
            p = (batch.hidden[row, at] @ weight.T).softmax(-1)
            logits, state = states[number, step] @ weight.T, states[number, step]
            if options["markov_rank"]:
                markov = learner.network.markov(batch.tokens[row, at])
                logits = logits + learner.network.markov_head["markov_w2"](markov)
                score = learner.network.confidence(state[None], markov[None])[0]
            q, fade = logits.softmax(-1), torch.tensor(-step / 4).exp()
            can = int(batch.tokens[row, at + 1]) % 2 == 0
            if options["confidence"]:
                overlap = torch.minimum(p, q).sum().detach() if can else torch.tensor(0.0)
                sure.append(fade * F.binary_cross_entropy(score.sigmoid(), overlap))
                all_weights.append(fade)
            if not can:
                break
            losses.append(fade * (0.1 * -(p * q.log()).sum() + 0.9 * (p - q).abs().sum()))
            weights.append(fade)
    wanted = torch.stack(losses).sum() / sum(weights)
    if sure:
        wanted = wanted + torch.stack(sure).sum() / sum(all_weights)
    found, curves = learner.loss(batch)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    parameters = list(learner.network.parameters())
    ours, theirs = torch.autograd.grad(found, parameters), torch.autograd.grad(wanted, parameters)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)
    assert set(curves) >= {"loss_drafts", "overlap_1", f"overlap_{drafted}"}


@KINDS
def test_hits_follow_blocks(options: dict[str, Any], target: CausalLM) -> None:
    """A place is judged where all earlier ones were right; a token that cannot be drafted is a miss."""
    learner, batch = learner_of(target, options, even=True).eval(), ragged(target, (30, 19), (2, 3))
    learn_by_heart(learner, batch, 30)
    with torch.no_grad():
        right, judged = learner.hits(batch)
        anchors, count = learner.places(batch), torch.zeros_like(judged)
        wanted, states = torch.zeros_like(right), learner.states(batch, anchors)
        for number, (row, place) in enumerate(zip(anchors.row.tolist(), anchors.place.tolist(), strict=True)):
            for step in range(min(learner.spec.drafted, batch.lengths[row] - place - 1)):
                markov = learner.network.markov(batch.tokens[row, place + step, None])
                best = learner._best(states[number, step, None], markov)[0]
                ranks = (learner.vocabulary.tokens(best) == batch.tokens[row, place + step + 1]).nonzero()
                count[step] += 1
                if len(ranks):
                    wanted[step, ranks[0, 0]] += 1
                if not len(ranks) or int(ranks[0, 0]):
                    break
    assert torch.equal(right, wanted) and torch.equal(judged, count) and count[1] > 0


def context(target: CausalLM, folder: Path, points: list[Any] | None = None) -> TrainingContext:
    """Different prompts of a target whose answers count on from them; copies would all be held out together."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = [Example([(7 * n) % 29, (5 * n + 2 * (n // 29) + 3) % 29], []) for n in range(200)]
    log = [].append if points is None else points.append
    return TrainingContext(
        output=folder, shared_cache=folder.parent / "common", model=target, examples=corpus, seed=3, log=log
    )


def training(steps: int = 150, **changes: Any) -> DFlashTraining:
    recipe = TrainingConfig(steps=steps, batch_size=8, learning_rate=1e-2, precision="float32", evaluations=2)
    answers = AnswerRecipe(tokens=2000, limit=12, longest_prompt=9, batch=50)
    return DFlashTraining(
        **{"layers": 1, "vocabulary": 29, "anchors": 11, "answers": answers, "recipe": recipe} | changes
    )


@KINDS
def test_training_learns_a_periodic_text(options: dict[str, Any], tmp_path: Path) -> None:
    target, points = counting_target(), list[Any]()
    facts = training(**options).fit(context(target, tmp_path / "part", points))
    assert len(facts["acceptance"]) == facts["drafted"] == 3 and min(facts["acceptance"]) > 0.95
    assert sorted(path.name for path in (tmp_path / "part").iterdir()) == [CONFIG, WEIGHTS]
    losses = [point for point in points if "loss" in point]
    assert losses[-1]["loss_drafts"] < 0.5 * losses[0]["loss_drafts"]
    method = DSpark if options is DSPARK else DFlash
    decoder = method(target, Sampling(), checkpoint=tmp_path / "part")
    steps = list(decoder.decode([torch.tensor([4]), torch.tensor([3, 9, 13])], 21, torch.Generator()))
    assert len(steps) <= 11, "21 tokens a row: two a pass and more, at most four"
    if options is DSPARK:
        assert losses[-1]["overlap_1"] > 0.8 and losses[-1]["loss_confidence"] < 0.7 * losses[0]["loss_confidence"]


def test_an_interrupted_training_ends_as_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "SAVE_EVERY_S", 0.0)
    target, trainable = counting_target(), training(24, **DSPARK)
    trainable.fit(context(target, tmp_path / "whole"))

    class Killed(Exception):
        pass

    class Points(list[Any]):
        def append(self, point: Any) -> None:
            if point["step"] == 20:
                raise Killed

    with pytest.raises(Killed):
        trainable.fit(context(target, tmp_path / "halves", Points()))
    trainable.fit(context(target, tmp_path / "halves"))
    for file in (WEIGHTS, CONFIG):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "halves" / file).read_bytes()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layers": 0}, "layers must be at least 1, got 0. Set train.layers."),
        ({"anchors": 0}, "anchors must be at least 1, got 0"),
        ({"block": 1, "sample_from_anchor": False}, "block must be at least 2, got 1"),
        ({"fade": 0.0}, "fade must be above 0, got 0"),
        ({"markov_rank": -1}, "markov_rank must be at least 0, got -1"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DFlashTraining(**changes)


def test_more_layers_than_the_target_has_are_refused(target: CausalLM) -> None:
    with pytest.raises(ValueError, match=r"layers must be at most 4, .*got 5\. Set train\.layers\."):
        replace(training(), layers=5).spec(target)
