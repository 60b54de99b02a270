"""Blockwise decoding: what is proposed from which state, criteria and what they promise, training, files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.decoder import Guarantee
from methods.drafting import Context
from methods.engine.causal_lm import Output
from methods.engine.checkpoint_files import CONFIG, WEIGHTS, MissingPart
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import Sampling
from methods.speculative import verification
from methods.speculative.heads.blockwise import Blockwise, BlockwiseDrafter, Heads
from methods.speculative.heads.blockwise import states as head_states
from methods.speculative.heads.blockwise_training import BlockwiseLearner, BlockwiseTraining
from methods.training.answers import AnswerRecipe
from methods.training.features import Batch
from methods.training.interface import Example, TrainingContext
from methods.training.trainer import TrainingConfig
from tests.helpers.host_reads import no_host_reads
from tests.helpers.tiny_heads import batch_of, blockwise_heads, learn_by_heart

LIMIT = 20


@pytest.fixture(scope="module")
def target():
    return checks.tiny_target()


@pytest.fixture(scope="module")
def texts(target):
    batch = checks.prompts(target.vocab_size, (3, 9, 5, 14))
    rows = checks.outputs(Autoregressive(target, Sampling()), batch, LIMIT + 4)
    return [prompt.tolist() + row for prompt, row in zip(batch, rows, strict=True)]


@pytest.fixture(scope="module")
def heads(target, texts):
    return blockwise_heads(target, texts)


@pytest.fixture
def folder(heads, tmp_path):
    heads.save(tmp_path)
    return tmp_path


def decode(decoder, batch, limit=LIMIT):
    return list(decoder.decode(batch, limit, torch.Generator().manual_seed(0)))


def prompts_of(texts):
    return [torch.tensor(text[: len(text) - LIMIT - 4]) for text in texts]


# -- proposing --------------------------------------------------------------------------------------------------------


def test_heads_that_know_the_text_draft_most_of_it(target, texts, folder):
    steps = decode(Blockwise(target, Sampling(), checkpoint=folder), prompts_of(texts))
    accepted, drafted = (sum(sum(getattr(step, name)) for step in steps) for name in ("accepted", "drafted"))
    assert accepted > 0.5 * drafted, f"{accepted} of {drafted}"
    assert [row for step in steps for row in step.draft_passes * [1]] == [1] * (len(steps) - 1)
    assert max(step.nodes for step in steps) == 4


def test_each_block_comes_from_the_state_that_wrote_its_root(target, texts, heads, folder, monkeypatch):
    """What the loop proposes, ragged rows and all, is what the heads say of the same state of a plain forward pass."""
    proposed = []
    propose = BlockwiseDrafter.propose

    def watched(self, context):
        draft = propose(self, context)
        proposed.append(([list(row) for row in context.tokens], draft.tokens.tolist()))
        return draft

    monkeypatch.setattr(BlockwiseDrafter, "propose", watched)
    decode(Blockwise(target, Sampling(), checkpoint=folder), prompts_of(texts))
    stored = Heads.load(folder, target)
    for committed, drafts in proposed:
        full = batch_of(target, committed, [1] * len(committed))
        for row, draft in enumerate(drafts):
            state = full.hidden[row, len(committed[row]) - 2].to(target.dtype)
            assert draft == plain_proposal(stored, target, state)


def plain_proposal(heads, target, state):
    """The heads' formula, one head after the other: SiLU-free feed-forward layer, residual, output matrix."""
    hidden = (heads.first[0] @ state + heads.first[1]).clamp(min=0)
    update = (heads.second[0] @ hidden + heads.second[1]).view(-1, len(state))
    weight, _ = target.output_rows(heads.vocabulary.ids)
    return [int(heads.vocabulary.ids[(weight @ (state + own)).argmax()]) for own in update]


def test_fewer_heads_are_the_first_ones(target, texts, folder):
    steps = decode(Blockwise(target, Sampling(), k=3, checkpoint=folder), prompts_of(texts))
    assert max(step.nodes for step in steps) == 3
    context = context_of(torch.randn(2, 1, 32, dtype=torch.double, generator=torch.Generator().manual_seed(1)))
    heads = Heads.load(folder, target)
    few, all_of_them = (BlockwiseDrafter(target, heads, n).propose(context).tokens for n in (2, 3))
    assert few.tolist() == all_of_them[:, :2].tolist()


def context_of(hidden, path=None):
    root = torch.zeros(len(hidden), dtype=torch.long)
    output = Output(torch.zeros(*hidden.shape[:2], 61), hidden)
    return Context([[0]] * len(hidden), root, output, path, Sampling(), torch.Generator())


def test_the_state_of_the_last_kept_node():
    hidden = torch.arange(24.0).view(3, 4, 2)
    path = torch.tensor([[0, -1, -1], [0, 1, 3], [0, 2, -1]])
    assert context_of(hidden, path).last_hidden.tolist() == [[0, 1], [14, 15], [20, 21]]
    assert context_of(hidden[:, :1]).last_hidden.tolist() == hidden[:, 0].tolist()


def test_only_words_of_the_draft_vocabulary_are_proposed(target, texts, tmp_path):
    heads = blockwise_heads(target, texts, vocabulary=12)
    heads.save(tmp_path)
    drafter = BlockwiseDrafter(target, Heads.load(tmp_path, target), 3)
    states = torch.randn(50, 1, 32, dtype=torch.double, generator=torch.Generator().manual_seed(2))
    seen = set(drafter.propose(context_of(states)).tokens.flatten().tolist())
    assert len(heads.vocabulary) == 12 and len(seen) > 3
    assert seen <= set(heads.vocabulary.ids.tolist())


def test_proposing_asks_nothing_of_the_device(target, folder):
    drafter = BlockwiseDrafter(target, Heads.load(folder, target), 3)
    hidden = torch.randn(2, 4, 32, dtype=torch.double)
    with no_host_reads():
        drafter.propose(context_of(hidden, torch.tensor([[0, 1, -1, -1], [0, 1, 2, 3]])))


def test_own_bytes_count_what_is_held_beside_the_target(target, folder):
    found = Blockwise(target, Sampling(), k=3, checkpoint=folder).memory()
    assert found == {"heads": 8 * (64 * 32 + 2 * 32 * 64), "draft_output_matrix": 8 * 61 * 32}


# -- criteria ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, rule",
    [
        ({}, verification.Greedy),
        ({"criterion": "top_k", "top": 3}, verification.TopK),
        ({"criterion": "distance", "epsilon": 1}, verification.Distance),
        ({"minimum_block": 2}, verification.MinimumBlock),
        ({"criterion": "top_k", "minimum_block": 3}, verification.MinimumBlock),
    ],
)
def test_the_guarantee_is_the_rules(options, rule, target, folder):
    decoder = Blockwise(target, Sampling(), checkpoint=folder, **options)
    assert type(decoder.rule) is rule
    assert decoder.guarantee is (Guarantee.EXACT if rule is verification.Greedy else Guarantee.RELAXED)


def test_behind_a_minimum_block_the_criterion_decides(target, folder):
    for options, rule in (({}, 1), ({"criterion": "top_k", "top": 3}, 3)):
        decoder = Blockwise(target, Sampling(), minimum_block=3, checkpoint=folder, **options)
        assert decoder.rule.length == 2 and decoder.rule.rule.k == rule


def test_exact_at_a_temperature(target, folder):
    decoder = Blockwise(target, Sampling(1.0), checkpoint=folder)
    assert type(decoder.rule) is verification.DeterministicTree and decoder.guarantee is Guarantee.EXACT


@pytest.mark.parametrize("options", [{"criterion": "top_k", "top": 1}, {"criterion": "distance", "epsilon": 0}])
def test_the_tightest_criteria_change_nothing(options, target, folder):
    checks.check_greedy_identity(lambda t, s: Blockwise(t, s, checkpoint=folder, **options), target)


@pytest.mark.parametrize("options", [{"criterion": "top_k", "top": 5}, {"criterion": "distance", "epsilon": 20}])
def test_looser_criteria_keep_more(options, target, texts, folder):
    prompts = checks.prompts(target.vocab_size, (4, 7, 12, 6), seed=9)
    rounds = [len(decode(Blockwise(target, Sampling(), checkpoint=folder, **o), prompts, 40)) for o in ({}, options)]
    assert rounds[1] < rounds[0]


def test_a_minimum_block_is_always_kept(target, folder):
    prompts = checks.prompts(target.vocab_size, (4, 7), seed=9)
    for length in (2, 4):
        steps = decode(Blockwise(target, Sampling(), minimum_block=length, checkpoint=folder), prompts, 17)
        assert all(len(row) >= length for step in steps[1:] for row in step.tokens if row)
        assert any(len(row) == length for step in steps[1:] for row in step.tokens)


# -- training ---------------------------------------------------------------------------------------------------------


def counting_batch():
    """Two dialogues of ids that count up; the state at each place is its number."""
    tokens = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [10, 11, 12, 13, 0, 0, 0]])
    hidden = torch.arange(14.0).view(2, 7, 1).expand(-1, -1, 32)
    return Batch(tokens, hidden, {}, prompts=[3, 2], lengths=[7, 4])


def test_which_state_learns_which_token(target):
    learner = BlockwiseLearner(target, DraftVocabulary.all(61), 4, 8, "all")
    rows, labels, judged = learner._places(counting_batch())
    assert rows[:, 0].tolist() == [2, 3, 4, 5, 8, 9]  # the last of the prompt, and every one a token was written behind
    assert labels.masked_fill(~judged, -1).tolist() == [
        [4, 5, 6],
        [5, 6, -1],
        [6, -1, -1],
        [-1, -1, -1],
        [13, -1, -1],
        [-1, -1, -1],
    ]


def test_untrained_heads_say_what_the_target_says(target, texts):
    learner = BlockwiseLearner(target, DraftVocabulary.all(61), 3, 8, "all")
    batch = batch_of(target, texts, [1] * len(texts))
    rows, _, _ = learner._places(batch)
    assert torch.equal(head_states(rows, learner.first, learner.second), rows[:, None].expand(-1, 2, -1))


def test_hits_count_what_decoding_would_keep(target, monkeypatch):
    learner = BlockwiseLearner(target, DraftVocabulary.all(61), 4, 8, "all")
    right = torch.zeros(6, 3, 61)
    for row, tokens in enumerate([(4, 5, 9), (9, 6, 9), (9, 9, 9), (9, 9, 9), (13, 9, 9), (9, 9, 9)]):
        for head, token in enumerate(tokens):
            right[row, head, token] = 1
    answers = iter(right.unbind(1))
    monkeypatch.setattr(BlockwiseLearner, "logits", lambda self, rows: next(answers))
    hits, judged = learner.hits(counting_batch())
    assert judged.tolist() == [4, 1, 1] and hits.tolist() == [[2], [1], [0]]  # the 6 stands behind a wrong token


def test_the_loss_is_the_mean_cross_entropy_of_what_can_be_proposed(target, texts):
    vocabulary = DraftVocabulary.frequent(torch.tensor(sum(texts, [])), 20, 61, always=[0])  # 0 also stands for nothing
    learner = BlockwiseLearner(target, vocabulary, 3, 8, "all")
    batch = batch_of(target, texts, [2] * len(texts))
    weight = target.output_rows(vocabulary.ids)[0].float()
    per_head = []
    for head in range(2):  # untrained: every state is the target's own
        losses = [
            -(weight @ batch.hidden[row, place]).log_softmax(-1)[vocabulary.ids.tolist().index(text[place + 2 + head])]
            for row, text in enumerate(texts)
            for place in range(1, len(text) - 2 - head)
            if text[place + 2 + head] in vocabulary.ids.tolist()
        ]
        per_head.append(torch.stack(losses).mean())
    loss, curves = learner.loss(batch)
    assert torch.allclose(loss, torch.stack(per_head).mean())
    assert {key: round(float(value), 4) for key, value in curves.items()} == {
        f"loss_{head + 2}": round(float(value), 4) for head, value in enumerate(per_head)
    }


def test_one_head_per_step_has_the_same_expectation(target, texts):
    batch = batch_of(target, texts, [1] * len(texts))
    all_of_them = BlockwiseLearner(target, DraftVocabulary.all(61), 3, 8, "all")
    torch.nn.init.normal_(all_of_them.second.weight, generator=torch.Generator().manual_seed(0))
    one = BlockwiseLearner(target, DraftVocabulary.all(61), 3, 8, "one")
    one.load_state_dict(all_of_them.state_dict())
    torch.manual_seed(0)
    drawn = [one.loss(batch) for _ in range(40)]
    by_head = {name: float(loss.detach()) for loss, curves in drawn for name in curves}
    assert set(by_head) == {"loss_2", "loss_3"} and all(len(curves) == 1 for _, curves in drawn)
    assert sum(by_head.values()) / 2 == pytest.approx(float(all_of_them.loss(batch)[0].detach()))


def test_no_gradient_reaches_the_target(target, texts):
    learner = BlockwiseLearner(target, DraftVocabulary.all(61), 3, 8, "all")
    assert {name for name, p in learner.named_parameters()} == {
        f"{layer}.{kind}" for layer in ("first", "second") for kind in ("weight", "bias")
    }
    before = learner.output.clone()
    losses = learn_by_heart(learner, batch_of(target, texts, [1] * len(texts)), 30)
    assert losses[-1] < 0.7 * losses[0] and torch.equal(learner.output, before)


@pytest.fixture
def shop(target, tmp_path):
    (tmp_path / "part").mkdir()
    corpus = [Example(prompt.tolist(), [1]) for prompt in checks.prompts(target.vocab_size, (3, 8, 5, 13) * 6)]
    points = []
    shared = {"shared_cache": tmp_path / "common", "model": target, "examples": corpus}
    return TrainingContext(output=tmp_path / "part", log=points.append, **shared), points


def training(**options):
    recipe = TrainingConfig(steps=40, batch_size=8, learning_rate=1e-2, precision="float32", evaluations=2)
    answers = AnswerRecipe(tokens=400, limit=16, batch=8)
    return BlockwiseTraining(k=3, hidden=16, vocabulary=40, answers=answers, **{"recipe": recipe, **options})


def test_training_writes_heads_that_decode(target, shop):
    context, points = shop
    trainable = training()
    facts = trainable.fit(context)
    assert {path.name for path in context.output.iterdir()} == {WEIGHTS, CONFIG}
    losses = [point["loss"] for point in points if "loss" in point]
    assert losses[-1] < losses[0]
    assert len(facts["acceptance"]) == 2 and facts["draft_vocabulary"] <= 40 and 0 < facts["held_out_coverage"] <= 1
    checks.check_greedy_identity(lambda t, s: Blockwise(t, s, checkpoint=context.output), target, lengths=(5,))


def test_an_interrupted_training_ends_as_if_it_had_not_been(target, shop, tmp_path):
    context, _ = shop
    training(heads_per_step="one").fit(context)
    whole = load_file(context.output / WEIGHTS)
    broken = replace(context, output=tmp_path / "broken", report_progress=stop_at("training (steps)", 17))
    broken.output.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("methods.training.trainer.SAVE_EVERY_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            training(heads_per_step="one").fit(broken)
    training(heads_per_step="one").fit(replace(broken, report_progress=context.report_progress))
    again = load_file(broken.output / WEIGHTS)
    assert all(torch.equal(whole[key], again[key]) for key in whole)


def stop_at(stage, step):
    def progress(name, done, total):
        if (name, done) == (stage, step):
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("options", [{"k": 1}, {"vocabulary": 0}, {"hidden": 0}])
def test_training_refuses(options):
    with pytest.raises(ValueError, match="must be at least [12], got"):
        BlockwiseTraining(**options)


# -- files and refusals -----------------------------------------------------------------------------------------------


def test_heads_come_back_as_they_were_written(target, heads, folder):
    back = Heads.load(folder, target)
    assert back.shape == heads.shape and torch.equal(back.vocabulary.ids, heads.vocabulary.ids)
    for was, now in zip((*heads.first, *heads.second), (*back.first, *back.second), strict=True):
        assert now.dtype == target.dtype and torch.equal(was.bfloat16().double(), now)


def test_missing_heads_name_the_command(target):
    with pytest.raises(MissingPart, match=r"python -m bench train method=blockwise model=MODEL"):
        Blockwise(target, Sampling())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"k": 5}, "k must be 2 to 4 with 3 heads, got"),
        ({"k": 1}, "method=autoregressive"),
        ({"minimum_block": 5}, "minimum_block must be 1 to 4, .*got 5"),
        ({"k": 2, "minimum_block": 3}, "minimum_block must be 1 to 2, .*got 3"),
        ({"minimum_block": 0}, "minimum_block must be 1 to 4, .*got 0"),
        ({"criterion": "top_k", "top": 0}, "at least 1"),
        ({"criterion": "distance", "epsilon": -1}, "at least 0"),
    ],
)
def test_blockwise_refuses(options, message, target, folder):
    with pytest.raises(ValueError, match=message):
        Blockwise(target, Sampling(), checkpoint=folder, **options)


@pytest.mark.parametrize("change", [{"vocab_size": 62}, {"layers": 3}])
def test_heads_of_another_model_are_refused(change, folder):
    other = checks.tiny_target(**{"vocab_size": 61, "layers": 4} | change)
    with pytest.raises(ValueError, match="must be of a model like .*, got "):
        Blockwise(other, Sampling(), checkpoint=folder)


def without_bias(folder):
    tensors = load_file(folder / WEIGHTS)
    del tensors["first.bias"]
    save_file(tensors, folder / WEIGHTS)


def other_k(folder):
    shape = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(shape | {"k": 5}))


def torn(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:100])


def vocabulary_beyond(folder):
    tensors = load_file(folder / WEIGHTS)
    tensors["vocabulary"][-1] = 61
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize(
    "damage, message",
    [
        (
            lambda folder: (folder / CONFIG).unlink(),
            "must hold .* as the training of method=blockwise writes them, got ",
        ),
        (
            lambda folder: (folder / CONFIG).write_text("[1]"),
            "must hold .* as the training of method=blockwise writes them, got ",
        ),
        (torn, "must hold .* as the training of method=blockwise writes them, got "),
        (without_bias, "announced beside them, .*, got"),
        (other_k, "announced beside them, .*, got"),
        (vocabulary_beyond, "Draft ids must be different, ascending"),
    ],
)
def test_damaged_heads_are_refused(damage, message, target, folder):
    damage(folder)
    with pytest.raises(ValueError, match=message):
        Blockwise(target, Sampling(), checkpoint=folder)
