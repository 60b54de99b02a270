"""DePA: its backward phase, its input, its bases, and its training."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from methods.decoder import Guarantee
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.non_autoregressive.depa import AttentiveTransformation, Depa, DepaStudent, DepaTraining, backwards
from methods.non_autoregressive.glat import GlatStudent
from methods.non_autoregressive.loop import write
from methods.non_autoregressive.network import Network
from methods.non_autoregressive.student import OnePass
from methods.training import trainer
from methods.training.trainer import added
from methods.training.translation import TranslationConfig
from tests.helpers import tiny_students
from tests.helpers.tiny_students import batch_of, save, sources, student

SOURCES = sources(7, 1, 12, 4, 2)
PAIRS = [([5, 9, 4, 1], [7, 7, 8]), ([3, 1], [6]), ([8, 4, 11, 20, 6, 1], [9, 5, 30, 12, 13])]
LONG = PAIRS[2]
WORDS = [5, 6, 7, 8, 9, 12, 13, 30]
NAT: dict[str, Any] = {"ratio": [0.0, 0.0]}


@pytest.fixture(scope="module", params=tiny_students.FAMILIES)
def target(request: pytest.FixtureRequest) -> Seq2SeqLM:
    return tiny_students.teacher(family=request.param)


def depa(target: Seq2SeqLM, **options: Any) -> DepaStudent:
    """Random in all that is not the teacher's; with ``words``, those of ``WORDS``."""
    made: DepaStudent = student(DepaStudent, target, **options)
    if isinstance(made.inputs, AttentiveTransformation):
        made.inputs.ids.copy_(torch.tensor(WORDS))
    return made


def transforming(made: DepaStudent) -> AttentiveTransformation:
    assert isinstance(made.inputs, AttentiveTransformation)
    return made.inputs


def encoded(made: DepaStudent) -> Any:
    lengths = torch.tensor([len(row) for row in SOURCES])
    return made.network.encode(torch.nn.utils.rnn.pad_sequence(SOURCES, batch_first=True), lengths)


# ------------------------------------------------------------------------------------------------- the backward phase


def test_rows_are_reversed_up_to_their_length() -> None:
    tokens = torch.tensor([[4, 5, 6, 0], [7, 0, 0, 0], [1, 2, 3, 4]])
    assert backwards(tokens, torch.tensor([3, 1, 4])).tolist() == [[6, 5, 4, 0], [7, 0, 0, 0], [4, 3, 2, 1]]


def predictions(made: DepaStudent, text: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, list[int]]:
    """Logits from which the backward phase's loss is taken, and the tokens that they are judged by."""
    seen: list[tuple[Tensor, list[int]]] = []

    def spy(self: Any, states: Tensor, wanted: Tensor, smoothing: float) -> Any:
        seen.append((self.logits(states).detach(), wanted.tolist()))
        return token_loss(self, states, wanted, smoothing)

    token_loss = DepaStudent.token_loss
    with monkeypatch.context() as patch:
        patch.setattr(DepaStudent, "token_loss", spy)
        made.objective(batch_of([(LONG[0], text)]), 0.0, 0.1)
    return seen[0]


def test_backward_phase_sees_no_answer(target: Seq2SeqLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """y_t is predicted from the tokens behind it alone, and from each of them."""
    made, text = depa(target, backward=0.5, words=len(WORDS)), LONG[1]
    logits, wanted = predictions(made, text, monkeypatch)
    assert wanted == text[::-1]
    for changed in range(len(text)):
        other = [token + 3 if place == changed else token for place, token in enumerate(text)]
        moved = (predictions(made, other, monkeypatch)[0] - logits).abs().amax(-1).flip(0)  # by place in the text
        assert float(moved[changed:].max()) == 0.0, "a token is predicted from itself, or from what stands before it"
        assert (moved[:changed] > 1e-4).all(), "what stands behind a token does not matter to it"


def test_phases_follow_one_another(target: Seq2SeqLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen = depa(target, backward=0.25, ratio=[0.8, 0.4]), []
    glance = GlatStudent.glance

    def spy(self: Any, memory: Any, inputs: Any, batch: Any, ratio: float) -> Tensor:
        seen.append(ratio)
        return glance(self, memory, inputs, batch, ratio)

    monkeypatch.setattr(GlatStudent, "glance", spy)
    for progress in (0.0, 0.2499, 0.25, 0.625, 1.0):
        made.objective(batch_of(PAIRS), progress, 0.1)
    assert seen == pytest.approx([0.8, 0.6, 0.4])


def test_padding_changes_no_phase(target: Seq2SeqLM) -> None:
    made = depa(target, backward=0.5, words=len(WORDS), **NAT)
    for progress in (0.0, 0.9):
        narrow, wide = (made.objective(batch_of(PAIRS, width=width), progress, 0.1) for width in (0, 9))
        torch.testing.assert_close(narrow[0], wide[0], rtol=1e-6, atol=1e-6)
        alone = [made.objective(batch_of([pair]), progress, 0.1)[1]["tokens_loss"] for pair in PAIRS]
        counts = torch.tensor([len(text) for _, text in PAIRS])
        mean = sum(float(loss) * int(count) for loss, count in zip(alone, counts, strict=True)) / int(counts.sum())
        assert float(narrow[1]["tokens_loss"]) == pytest.approx(mean)


# --------------------------------------------------------------------------------------------------------- the input


def test_input_is_a_mixture_of_target_words(target: Seq2SeqLM) -> None:
    made = depa(target, words=len(WORDS))
    network, memory, lengths = made.network, encoded(made), torch.tensor([3, 2, 5, 4, 1])
    with torch.no_grad():
        found = made.inputs(memory, lengths, 5)
        copied = transforming(made).copy(memory, lengths, 5)
        table = network.embedding
        assert table is not None
        for row, place in itertools.product(range(5), range(5)):
            query = transforming(made).query(copied[row, place])
            scores = torch.stack([query @ table[word] for word in WORDS]).softmax(0)
            wanted = sum(share * network.embed(torch.tensor(word)) for share, word in zip(scores, WORDS, strict=True))
            torch.testing.assert_close(found[row, place], wanted)
        shares = torch.linalg.lstsq(network.embed(torch.tensor(WORDS)).T, found.flatten(0, 1).T).solution
        torch.testing.assert_close(shares.sum(0), torch.ones(25, dtype=shares.dtype))
        assert (shares > -1e-9).all() and (found - copied).abs().max() > 0.1
        assert shares.std(1).max() > 0.01, "places read different mixtures"


def test_words_of_the_target_get_no_gradient_through_the_input(target: Seq2SeqLM) -> None:
    made = depa(target, own=True, words=len(WORDS))
    memory = encoded(made)
    made.inputs(memory, torch.tensor([3, 2, 5, 4, 1]), 5).square().sum().backward()
    table: Any = made.network.embedding
    only_written = [word for word in WORDS if not any(word in source for source in SOURCES)]
    assert only_written and float(table.grad[only_written].abs().max()) == 0.0
    assert float(transforming(made).query.weight.grad.abs().max()) > 0


def test_the_input_begins_as_a_dictionary(target: Seq2SeqLM) -> None:
    """A word that is always linked with one other reads it, one with two likely partners both."""
    inputs = transforming(depa(target, words=len(WORDS)))
    links = [(4, 7)] * 40 + [(11, 30)] * 40 + [(20, 12)] * 30 + [(20, 13)] * 10
    told: list[tuple[str, int, int]] = []
    inputs.learn_words(links, lambda stage, done, total: told.append((stage, done, total)), 400)
    with torch.no_grad():
        network, found = inputs._network[0], {}
        for source in (4, 11, 20):
            scores = inputs.query(network.embed(torch.tensor(source))) @ inputs.words().T
            found[source] = dict(zip(WORDS, scores.softmax(-1).tolist(), strict=True))
    assert found[4][7] > 0.95 and found[11][30] > 0.95
    assert found[20][12] == pytest.approx(0.75, abs=0.05) and found[20][13] == pytest.approx(0.25, abs=0.05)
    assert told[-1] == ("dictionary (steps)", 400, 400)


@pytest.mark.parametrize("ratio", [[0.0, 0.0], [0.5, 0.3]])
def test_without_its_two_ideas_it_is_its_base(ratio: list[float], target: Seq2SeqLM) -> None:
    made, base = depa(target, backward=0.0, ratio=ratio), student(GlatStudent, target, ratio=ratio, positional=False)
    assert made.state_dict().keys() == base.state_dict().keys()
    base.load_state_dict(made.state_dict())
    for progress in (0.0, 0.7):
        losses = []
        for each in (made, base):
            torch.manual_seed(4)
            losses.append(added(each.objective(batch_of(PAIRS), progress, 0.1)[0]))
        assert losses[0].equal(losses[1])
    rng = torch.Generator()
    assert write(made, OnePass(3), SOURCES, rng) == write(base, OnePass(3), SOURCES, rng)


# ----------------------------------------------------------------------------------------------------------- decoding


@pytest.mark.parametrize("options", [{}, {"length_beam": 3}, {"length_beam": 2, "rescore": True}])
def test_a_part_decodes_as_it_was_trained(options: dict[str, Any], target: Seq2SeqLM, tmp_path: Path) -> None:
    """The same texts from a part as from the network that learns, in a batch as alone."""
    made = depa(target, words=len(WORDS))
    for value in made.state_dict().values():
        if value.is_floating_point():
            value.copy_(value.half())
    decoder = Depa(target, Sampling(), checkpoint=save(made, tmp_path, target, base="glat"), **options)
    rescorer = target if options.get("rescore") else None
    wanted = write(made, OnePass(options.get("length_beam", 1)), SOURCES, torch.Generator(), rescorer).texts
    (step,) = decoder.decode(SOURCES, 40, torch.Generator())
    assert [row[:-1] for row in step.tokens] == wanted and len({tuple(row) for row in wanted}) > 2
    alone = [next(iter(decoder.decode([source], 40, torch.Generator()))).tokens[0] for source in SOURCES]
    assert alone == step.tokens and decoder.guarantee is Guarantee.INDEPENDENT_MODEL
    assert decoder.stats()["base"] == "glat"
    plain = depa(target)
    table = len(WORDS) * (target.hidden_size * 8 + 4)
    query = sum(parameter.numel() * 8 for parameter in transforming(made).query.parameters())
    assert decoder.memory()["student"] == plain.own_bytes() + table + query


def test_refusals() -> None:
    with pytest.raises(ValueError, match="backward must be from 0 to below 1, got 1.0"):
        DepaStudent(Network.__new__(Network), backward=1.0)
    with pytest.raises(ValueError, match="length_beam must be at least 1, got 0"):
        Depa(tiny_students.teacher(), Sampling(), length_beam=0)


# ----------------------------------------------------------------------------------------------------------- training


def maker(**options: Any) -> DepaTraining:
    recipe = TranslationConfig(steps=12, tokens=48, warmup=2, evaluations=2, average=2, precision="float32")
    return DepaTraining(data="raw", backward=0.5, recipe=recipe, **options)


def test_training_makes_a_part_that_decodes(tmp_path: Path) -> None:
    target = tiny_students.teacher(torch.float32)
    place = tiny_students.context(target, PAIRS * 9, tmp_path)
    facts = maker().fit(place)
    assert (facts["base"], facts["backward"], facts["target_words"], facts["data"]) == ("glat", 0.5, 8, "raw")
    assert set(facts["validation_bleu"]) == {"one_pass", "length_beam_5"}
    decoder = Depa(target, Sampling(), checkpoint=place.output)
    assert transforming(decoder.student).ids.tolist() == WORDS
    places = [place.output, tmp_path / "again" / "part"]
    maker().fit(tiny_students.context(target, PAIRS * 9, tmp_path / "again"))
    first, again = (safetensors.torch.load_file(next(folder.glob("*.safetensors"))) for folder in places)
    assert all(first[name].equal(again[name]) for name in first), "its beginning is drawn with a seed of its own"
    (step,) = decoder.decode(SOURCES, 40, torch.Generator())
    assert len(step.tokens) == 5 and decoder.stats()["target_words"] == 8
    plain = maker(base="nat", transform=False).fit(tiny_students.context(target, PAIRS * 9, tmp_path / "plain"))
    assert plain["base"] == "nat" and "target_words" not in plain
    loaded = Depa(target, Sampling(), checkpoint=tmp_path / "plain" / "part").student
    assert isinstance(loaded, DepaStudent) and loaded.ratio == (0.0, 0.0)


@pytest.mark.parametrize("killed_at", [3, 9])
def test_a_killed_training_goes_on_in_its_phase(
    killed_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_students.teacher(torch.float32)
    whole = maker().fit(tiny_students.context(target, PAIRS * 9, tmp_path / "whole"))
    monkeypatch.setattr(trainer, "SAVE_EVERY_S", 0.0)
    seen: list[bool] = []
    from_the_end, objective = DepaStudent.from_the_end, DepaStudent.objective

    def spy(self: Any, batch: Any, smoothing: float) -> Any:
        seen[-1] = True
        return from_the_end(self, batch, smoothing)

    def killed(self: Any, batch: Any, progress: float, smoothing: float) -> Any:
        seen.append(False)
        if len(seen) == killed_at + 1:
            raise KeyboardInterrupt
        return objective(self, batch, progress, smoothing)

    monkeypatch.setattr(DepaStudent, "from_the_end", spy)
    monkeypatch.setattr(DepaStudent, "objective", killed)
    place = tiny_students.context(target, PAIRS * 9, tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        maker().fit(place)
    assert maker().fit(place) == whole
    assert seen[:killed_at] + seen[killed_at + 1 :] == [True] * 6 + [False] * 6, "backward first, no step twice"
    parts = [(tmp_path / name / "part" / "head.safetensors").read_bytes() for name in ("whole", "cut")]
    assert parts[0] == parts[1]
