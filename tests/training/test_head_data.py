"""What trained heads stand on: own answers, the states over them, the draft vocabulary, and the training loop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Generator, nn

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.kv_cache import Cache
from methods.engine.sampling import Sampling
from methods.training import answers as own
from methods.training import features, trainer
from methods.training.answers import AnswerRecipe, answer, own_answers
from methods.training.features import states
from methods.training.head_trainer import Learner, tokens_per_step, train_head
from methods.training.interface import Example, TrainingContext
from methods.training.trainer import Epochs, TrainingConfig
from tests.helpers.interruptions import interrupted_at

RECIPE = AnswerRecipe(tokens=150, limit=12, longest_prompt=9, batch=1)
WINDOW = 8 * RECIPE.batch


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return checks.tiny_target(seed=3)


def context(target: CausalLM, folder: Path, seed: int = 0, points: list | None = None) -> TrainingContext:
    lengths = [1 + (7 * n) % 11 for n in range(40)]
    corpus = [Example(prompt.tolist(), []) for prompt in checks.prompts(target.vocab_size, lengths)]
    folder.mkdir(parents=True, exist_ok=True)
    log = [].append if points is None else points.append
    return TrainingContext(
        output=folder, shared_cache=folder / "common", model=target, examples=corpus, seed=seed, log=log
    )


# ---------------------------------------------------------------------------------------------------------- vocabulary


def test_vocabulary_holds_the_most_frequent_and_what_must_be_there() -> None:
    chosen = DraftVocabulary.frequent(torch.tensor([5, 5, 5, 2, 2, 7, 3]), 3, size=10, always=(9,))
    assert chosen.ids.tolist() == [2, 5, 9] and not chosen.full and len(chosen) == 3
    assert chosen.of(torch.tensor([[5, 3], [9, 2]])).tolist() == [[1, -1], [2, 0]]
    assert chosen.tokens(torch.tensor([2, 0])).tolist() == [9, 2]
    assert DraftVocabulary.frequent(torch.tensor([4, 1]), 5, size=6).ids.tolist() == [1, 4]


def test_vocabulary_of_equally_frequent_ids_takes_the_lower() -> None:
    assert DraftVocabulary.frequent(torch.tensor([8, 3, 5, 1]), 2, size=9).ids.tolist() == [1, 3]


def test_whole_vocabulary_is_the_identity() -> None:
    whole = DraftVocabulary.all(4)
    tokens = torch.tensor([3, 0, 2])
    assert whole.full and whole.of(tokens).equal(tokens) and whole.tokens(tokens).equal(tokens)


@pytest.mark.parametrize("ids", [[], [3, 2], [1, 1], [0, 6], [-1, 2]])
def test_vocabulary_refuses_what_is_no_selection(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="different, ascending and below 6, .*got"):
        DraftVocabulary(torch.tensor(ids, dtype=torch.long), 6)


# ------------------------------------------------------------------------------------------------------------- answers


def alone_text(target: CausalLM, prompt: torch.Tensor, limit: int) -> list[int]:
    text: list[int] = []
    for step in Autoregressive(target, Sampling()).decode([prompt], limit, Generator()):
        text += step.tokens[0]
        if len(text) == limit or text[-1] in target.eos_ids:
            return text
    raise AssertionError


def test_answers_in_a_shrinking_batch_are_what_each_prompt_gets_alone(
    target: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = checks.prompts(target.vocab_size, (1, 5, 9, 3, 7, 2, 4, 8))
    free = [alone_text(target, prompt, 12) for prompt in prompts]
    monkeypatch.setattr(target, "eos_ids", (free[0][2], free[3][5], free[4][7]))
    kept: list[int] = []
    select = Cache.select
    monkeypatch.setattr(Cache, "select", lambda self, rows: (kept.append(len(rows)), select(self, rows))[1])
    expected = [alone_text(target, prompt, 12) for prompt in prompts]
    assert len({len(text) for text in expected}) > 2
    assert answer(target, prompts, 12, Sampling(), Generator()) == expected
    assert kept and all(count < len(prompts) for count in kept)


def test_a_finished_row_takes_the_next_prompt(target: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = checks.prompts(target.vocab_size, [1 + (5 * n) % 9 for n in range(30)])
    free = [alone_text(target, prompt, 24) for prompt in prompts]
    monkeypatch.setattr(target, "eos_ids", (free[0][2], free[3][5], free[4][7]))
    expected = [alone_text(target, prompt, 24) for prompt in prompts]
    assert len({len(text) for text in expected}) > 4
    passes: list[int] = []
    forward = CausalLM.forward
    count = lambda self, nodes, *more, **named: (passes.append(len(nodes)), forward(self, nodes, *more, **named))[1]  # noqa: E731
    monkeypatch.setattr(CausalLM, "forward", count)
    assert answer(target, prompts, 24, Sampling(), Generator(), rows=8) == expected
    together = sum(passes)
    passes.clear()
    for first in range(0, 30, 8):
        answer(target, prompts[first : first + 8], 24, Sampling(), Generator())
    tokens = sum(len(text) - 1 for text in expected)
    assert tokens <= together < sum(passes), "rows that write nothing are fewer than in batches one after the other"


def test_answers_are_the_targets_and_reach_the_number_of_tokens(target: CausalLM, tmp_path: Path) -> None:
    found = own_answers(context(target, tmp_path), RECIPE)
    assert RECIPE.tokens <= found.tokens < RECIPE.tokens + WINDOW * RECIPE.limit
    assert all(len(row.prompt) <= RECIPE.longest_prompt for row in found.rows)
    for row in found.rows:
        assert row.answer == alone_text(target, torch.tensor(row.prompt), RECIPE.limit)


@pytest.mark.parametrize("left", ["window", "torn", "half"])
def test_interrupted_answers_go_on_to_the_same_end(
    target: CausalLM, tmp_path: Path, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = own_answers(context(target, tmp_path / "whole"), RECIPE)
    shop = context(target, tmp_path / "cut")
    folder = shop.shared_cache / f"answers-{RECIPE.digest}"
    folder.mkdir(parents=True)
    lines = (whole.folder / "answers.jsonl").read_bytes().splitlines(keepends=True)
    kept = {"window": lines[:8], "torn": [*lines[:8], lines[8][:9]], "half": lines[:6]}[left]
    (folder / "answers.jsonl").write_bytes(b"".join(kept))
    windows: list[int] = []
    written = own._answer_window
    monkeypatch.setattr(own, "_answer_window", lambda w, r, g, n: (windows.append(n), written(w, r, g, n))[1])
    again = own_answers(shop, RECIPE)
    assert again.rows == whole.rows and again.sha256 == whole.sha256
    assert windows == ([0, 1] if left == "half" else [1])
    assert (folder / "answers.jsonl").read_bytes() == b"".join(lines)


def test_sampled_answers_repeat_with_their_seed_only(target: CausalLM, tmp_path: Path) -> None:
    warm = replace(RECIPE, temperature=1.0)
    texts = [own_answers(context(target, tmp_path / f"{n}", seed), warm).rows for n, seed in enumerate((0, 0, 1))]
    assert texts[0] == texts[1] != texts[2]


def test_answers_refuse_a_corpus_of_long_prompts(target: CausalLM, tmp_path: Path) -> None:
    shop = replace(context(target, tmp_path), examples=[Example([1] * 20, [])])
    with pytest.raises(ValueError, match="must have a prompt of at most 9 tokens, got none"):
        own_answers(shop, RECIPE)
    with pytest.raises(ValueError, match=r"tokens must be at least 1, got 0\."):
        AnswerRecipe(tokens=0)


# ------------------------------------------------------------------------------------------------------------ features


@pytest.fixture(scope="module", params=["cached", "live"])
def made(request: pytest.FixtureRequest, target: CausalLM, tmp_path_factory: pytest.TempPathFactory):
    shop = context(target, tmp_path_factory.mktemp(request.param))
    return features.features(shop, hidden_layers=(0, 2), recipe=RECIPE, form=request.param)


def test_features_are_the_states_of_each_text_alone(made, target: CausalLM) -> None:
    rows = [made.train[0], made.held_out[0], made.train[3]]
    batch = made.batch(rows, torch.float64)
    for place, row in enumerate(rows):
        example = made.answers.rows[row]
        text = torch.tensor(example.prompt + example.answer)
        hidden, hidden_layers = states(target, [text], (0, 2))
        torch.testing.assert_close(batch.hidden[place, : len(text)], hidden[0])
        for tap in (0, 2):
            torch.testing.assert_close(batch.hidden_layers[tap][place, : len(text)], hidden_layers[tap][0])
        logits = target.head(batch.hidden[place, len(example.prompt) - 1 : len(text) - 1])
        assert logits.argmax(-1).tolist() == example.answer
        assert batch.tokens[place, : len(text)].equal(text) and not batch.tokens[place, len(text) :].any()


def test_batches_know_where_answers_stand(made) -> None:
    batch = made.batch(list(made.train[:5]), torch.float64)
    assert batch.hidden.dtype == torch.float64
    for n in (1, 3, 500):
        labels, valid = batch.shifted(n)
        for place, (prompt, length) in enumerate(zip(batch.prompts, batch.lengths, strict=True)):
            wanted = [t for t in range(batch.tokens.shape[1]) if prompt <= t + n < length]
            assert valid[place].nonzero().flatten().tolist() == wanted
            assert all(labels[place, t] == batch.tokens[place, t + n] for t in wanted)


def test_held_out_dialogues_are_not_learnt(made) -> None:
    assert made.held_out and not set(made.train) & set(made.held_out)
    assert sorted({*made.train, *made.held_out}) == list(range(len(made.answers.rows)))


def test_a_dialogue_is_held_out_whatever_others_there_are() -> None:
    rows = [Example([n, n // 7, 3], [1, 2]) for n in range(400)]
    every, some = (features.Features(own.Answers(tuple(few), Path(), "")) for few in (rows, rows[::-2]))
    prompts = [{tuple(made.answers.rows[row].prompt) for row in made.held_out} for made in (every, some)]
    assert 10 < len(prompts[0]) < 30 and prompts[1] == prompts[0] & {tuple(row.prompt) for row in rows[::-2]}
    for count in (2, 3, 5):  # where none is drawn, and where all are, there is one of each kind
        for first in range(300):
            made = features.Features(own.Answers(tuple(rows[first : first + count]), Path(), ""))
            assert made.train and made.held_out and not {*made.train} & {*made.held_out}


def test_features_are_computed_once(target: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = context(target, tmp_path)
    features.features(shop, hidden_layers=(1,), recipe=RECIPE)
    computed: list[list] = []
    compute = features._compute
    monkeypatch.setattr(features, "_compute", lambda w, a, files: (computed.append(list(files)), compute(w, a, files)))
    features.features(shop, hidden_layers=(1,), recipe=RECIPE)
    assert computed == []
    features.features(shop, hidden_layers=(1, 3), recipe=RECIPE)
    assert computed == [[3]]
    (shop.shared_cache / f"answers-{RECIPE.digest}" / "hidden.json").unlink()  # as after a kill
    features.features(shop, hidden_layers=(3,), recipe=RECIPE)
    assert computed[1:] == [[None]]


def test_half_precision_survives_the_files(tmp_path: Path) -> None:
    rounded = checks.tiny_target(seed=3)
    hidden = torch.randn(3, 4).bfloat16()
    assert features._as_tensor(features._as_array(hidden), torch.bfloat16).view(3, 4).equal(hidden)
    assert rounded.dtype == torch.float64 and features._as_tensor(features._as_array(hidden.half()), torch.half).dtype


def test_features_refuse_a_full_disk_and_unknown_layers(
    target: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"must be layers 0 to 3, got \[4\]"):
        features.features(context(target, tmp_path), hidden_layers=(4,), recipe=RECIPE)
    usage = features.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(features.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ValueError, match="features=live"):
        features.features(context(target, tmp_path), (), RECIPE)


# ------------------------------------------------------------------------------------------------------------ training


class NextToken(Learner):
    """Predicts the token behind next from the state: learnable, since the target's greedy text is a function of it."""

    def __init__(self, target: CausalLM) -> None:
        super().__init__(target, DraftVocabulary.all(target.vocab_size))
        self.layer = nn.Linear(target.hidden_size, target.vocab_size)
        self.fixed = nn.Parameter(torch.ones(1), requires_grad=False)

    def loss(self, batch: features.Batch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor | float]]:
        labels, valid = batch.shifted(1)
        scores = self.layer(nn.functional.dropout(batch.hidden.float(), 0.1, self.training))[valid]
        loss = nn.functional.cross_entropy(scores.float(), labels[valid])
        return loss, {"tokens": int(valid.sum())}

    def hits(self, batch: features.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        labels, valid = batch.shifted(1)
        best = self.layer(batch.hidden.float())[valid].topk(3).indices
        return (best == labels[valid][:, None]).sum(0)[None], valid.sum()[None]


CONFIG = TrainingConfig(steps=40, batch_size=4, learning_rate=0.02, evaluations=4, precision="float32")


def taught(target: CausalLM, folder: Path, config: TrainingConfig = CONFIG, points=None):
    torch.manual_seed(0)
    shop = context(target, folder, seed=3, points=points)
    learner = NextToken(target)
    found = features.features(shop, (), RECIPE)
    return learner, train_head(learner, found, config, shop)


def test_a_learner_learns(target: CausalLM, tmp_path: Path) -> None:
    points: list[dict] = []
    learner, facts = taught(target, tmp_path, points=points)
    curve = facts["curve"]
    assert [point["step"] for point in curve] == [10, 20, 30, 40] and facts["steps"] == 40
    assert curve[-1]["acceptance"][0] > curve[0]["acceptance"][0]
    assert facts["acceptance"] == curve[-1]["acceptance"]
    losses = [point["loss"] for point in points if "loss" in point]
    assert losses[-1] < losses[0] / 2 and points[0]["tokens"] > 0
    assert facts["parameters"] == (target.hidden_size + 1) * target.vocab_size
    assert float(learner.fixed) == 1.0


def test_an_interrupted_training_ends_like_an_uninterrupted_one(
    target: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, facts = taught(target, tmp_path / "whole")
    steps = interrupted_at(24, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        taught(target, tmp_path / "cut")
    again, resumed = taught(target, tmp_path / "cut")
    assert steps == [*range(24), *range(23, 40)]
    assert again.layer.weight.equal(whole.layer.weight) and resumed["curve"] == facts["curve"]
    trainer.discard(tmp_path / "cut")
    assert not (tmp_path / "cut" / trainer.STATE).exists()


def test_a_checkpoint_of_other_answers_is_refused(target: CausalLM, tmp_path: Path) -> None:
    taught(target, tmp_path, replace(CONFIG, steps=2, evaluations=1))
    file = tmp_path / "common" / f"answers-{RECIPE.digest}" / "answers.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0][1][0] += 1
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="an unfinished training on other data"):
        taught(target, tmp_path)


def test_every_row_is_seen_once_an_epoch_in_an_order_of_the_seed() -> None:
    lengths, orders = {row: 1 + (7 * row) % 11 for row in range(30)}, []
    for seed in (0, 0, 1):
        epochs = Epochs.shuffled(lengths, 4, seed)
        assert epochs.count(8) == 1.0
        for number in range(2):
            rows = [row for step in range(8) for row in epochs.batch(number * 8 + step)]
            assert sorted(rows) == sorted(lengths)
            orders.append(rows)
    assert orders[0] == orders[2] != orders[1] and orders[0] != orders[4]


def test_the_rate_rises_and_falls() -> None:
    config = TrainingConfig(steps=100, warmup=0.1, final=0.05)
    rates = [config.rate(step) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0 and rates[99] == pytest.approx(0.05, abs=2e-3)
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)


def test_tokens_of_a_chain() -> None:
    assert (
        tokens_per_step([]) == 1 and tokens_per_step([0.5, 0.5]) == 1.75 and tokens_per_step([1.0, 1.0, 0.0, 1.0]) == 3
    )


def test_configs_refuse_numbers_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"steps must be at least 1, got 0\. Set train\.steps"):
        TrainingConfig(steps=0)


# -------------------------------------------------------------------------------------------------------------- engine


def test_rows_of_the_output_matrix_give_the_targets_logits(target: CausalLM) -> None:
    ids = torch.tensor([3, 60, 11])
    hidden = torch.randn(5, target.hidden_size, dtype=target.dtype)
    weight, bias = target.output_rows(ids)
    assert bias is None
    torch.testing.assert_close(hidden @ weight.T, target.head(hidden)[:, ids])
