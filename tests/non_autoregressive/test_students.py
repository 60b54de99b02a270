"""The non-autoregressive family: its network, aligner, decode loops, objectives and trainings."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from bench.config import compose, instantiate
from bench.config.schema import PathsConfig, SamplingConfig
from bench.contract import checks
from bench.errors import UserError
from bench.models import artifacts, loading
from bench.train import command
from methods.decoder import Guarantee
from methods.engine.checkpoint_files import MissingPart
from methods.engine.cpu_kernels import reading_groups, usable
from methods.engine.positions import sinusoids
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.non_autoregressive import nat_finetuning
from methods.non_autoregressive.cmlm import Cmlm, CmlmStudent, MaskPredict
from methods.non_autoregressive.ctc import Ctc, CtcPass, CtcStudent, CtcTraining, join
from methods.non_autoregressive.decoder_inputs import SoftCopy, UniformCopy
from methods.non_autoregressive.depa import Depa, DepaStudent
from methods.non_autoregressive.diffusion import Diffusion
from methods.non_autoregressive.glat import Glat, GlatStudent, GlatTraining
from methods.non_autoregressive.length_predictor import LengthHead
from methods.non_autoregressive.loop import write
from methods.non_autoregressive.nat import FertilityPass, Nat, NatStudent, NatTraining, copies
from methods.non_autoregressive.nat_finetuning import Finetuning, reverse_kl
from methods.non_autoregressive.network import Memory, Network, Shape, attended, present_up_to
from methods.non_autoregressive.rescoring import score
from methods.non_autoregressive.student import LengthStudent, OnePass, lowest
from methods.non_autoregressive.word_alignment import NULL, align, fertilities
from methods.training.interface import TrainingContext
from methods.training.trainer import added
from methods.training.translation import TranslationConfig
from tests.helpers import tiny_students
from tests.helpers.interruptions import interrupted_at
from tests.helpers.tiny_students import VOCABULARY, batch_of, save, sources, student

GLAT: dict[str, Any] = {"copy": "soft", "ratio": [0.5, 0.3], "positional": False}
NAT: dict[str, Any] = {"classes": 5, "positional": True}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "glat": (GlatStudent, GLAT),
    "glat_positional": (GlatStudent, GLAT | {"copy": "uniform", "positional": True}),
    "cmlm": (CmlmStudent, {}),
    "ctc": (CtcStudent, {"upsample": 2}),
    "nat": (NatStudent, NAT),
    "depa": (DepaStudent, {"backward": 0.0}),
}
DECODERS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "glat": (Glat, "glat", {}),
    "glat_beam": (Glat, "glat_positional", {"length_beam": 3}),
    "glat_rescored": (Glat, "glat", {"length_beam": 4, "rescore": True}),
    "cmlm_1": (Cmlm, "cmlm", {"iterations": 1}),
    "cmlm_4": (Cmlm, "cmlm", {"iterations": 4}),
    "cmlm_10": (Cmlm, "cmlm", {"iterations": 10, "length_beam": 3}),
    "ctc": (Ctc, "ctc", {}),
    "depa": (Depa, "depa", {"length_beam": 2, "rescore": True}),
    "nat": (Nat, "nat", {}),
    "nat_average": (Nat, "nat", {"decoding": "average"}),
    "nat_collapsed": (Nat, "nat", {"collapse": True}),
}
SOURCES = sources(7, 1, 12, 4, 2)
PAIRS = [([5, 9, 4, 1], [7, 7, 8]), ([3, 1], [6]), ([8, 4, 11, 20, 6, 1], [9, 5, 30, 12])]
FERTILITIES = [[2, 0, 1, 0], [1, 0], [0, 2, 1, 0, 1, 0]]


@pytest.fixture(scope="module", params=tiny_students.FAMILIES)
def target(request: pytest.FixtureRequest) -> Seq2SeqLM:
    return tiny_students.teacher(family=request.param)


def rng(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def texts(decoder: Any, batch: list[Tensor]) -> list[list[int]]:
    (step,) = decoder.decode(batch, 40, rng())
    found: list[list[int]] = step.tokens
    return found


def read(made: Any, batch: list[Tensor]) -> Memory:
    rows = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
    memory: Memory = made.network.encode(rows, torch.tensor([len(row) for row in batch]))
    return memory


# --------------------------------------------------------------------------------------------------------- the network


def test_positions_are_the_teachers(target: Seq2SeqLM) -> None:
    hf: Any = target.hf
    torch.testing.assert_close(sinusoids(48, 16), hf.model.encoder.embed_positions.weight.float(), atol=1e-6, rtol=0)


def test_with_a_causal_mask_it_is_the_teacher(target: Seq2SeqLM) -> None:
    """Same weights, same logits as transformers' own, over padded rows; so what it begins with is what was trained."""
    hf: Any = target.hf
    network = Network(Shape.of(target), hf.get_input_embeddings().weight)
    network.double().start_from(hf)
    network.positions.copy_(hf.model.encoder.embed_positions.weight)  # 32-bit tables differ in their last digit
    rows = torch.nn.utils.rnn.pad_sequence(SOURCES, batch_first=True)
    lengths = torch.tensor([len(source) for source in SOURCES])
    present = torch.arange(rows.shape[1]) < lengths[:, None]
    read_by_decoder = torch.randint(3, VOCABULARY, (len(SOURCES), 6), generator=rng())
    with torch.no_grad():
        wanted = hf(input_ids=rows, attention_mask=present.long(), decoder_input_ids=read_by_decoder).logits
        memory = network.encode(rows, lengths)
        states = network.decode(network.embed(read_by_decoder), None, memory, causal=True)
        torch.testing.assert_close(network.logits(states), wanted, rtol=1e-9, atol=1e-9)
        free = network.decode(network.embed(read_by_decoder), None, memory)
    assert (free - states).abs().max() > 1e-3


def for_kernels(family: str, positional: bool, blind: bool) -> tuple[Seq2SeqLM, Network]:
    """A teacher of a shape that the kernels run, and a network that begins as it and is not settled yet."""
    heads = {"encoder_attention_heads": 1, "decoder_attention_heads": 1}  # of 16 numbers, as the kernels need them
    hf = tiny_students.network(torch.float32, family=family, **heads)
    lm = Seq2SeqLM.from_hf(hf, keep_hf=True, linear="panels")
    network = Network(Shape.of(lm), hf.get_input_embeddings().weight, positional=positional, blind=blind)
    network.start_from(hf)
    for layer in network.decoder if positional else ():
        torch.nn.init.normal_(layer.positional.out.weight, std=0.3)  # type: ignore[union-attr,arg-type]
    network.eval().requires_grad_(False)
    return lm, network


@pytest.mark.skipif(not usable(torch.device("cpu"), torch.float32, 16), reason="no C++ compiler")
@pytest.mark.parametrize("family", tiny_students.FAMILIES)
@pytest.mark.parametrize(("positional", "blind"), [(False, False), (True, False), (False, True), (True, True)])
def test_by_kernels_it_is_the_network_that_was_trained(family: str, positional: bool, blind: bool) -> None:
    lm, network = for_kernels(family, positional, blind)
    rows = torch.nn.utils.rnn.pad_sequence(SOURCES, batch_first=True)
    lengths, wanted = torch.tensor([len(source) for source in SOURCES]), torch.tensor([6, 2, 9, 1, 4])
    written = torch.randint(3, VOCABULARY, (len(SOURCES), 9), generator=rng())
    present = torch.arange(9) < wanted[:, None]
    settled = copy.deepcopy(network)
    settled.settle(lm)
    for count in (len(SOURCES), 1):
        found = []
        for made in (network, settled):
            whole, shown = count == 1, None if count == 1 else present[:count]
            memory = made.encode(rows[:count, : 7 if whole else 12], lengths[:count], whole)
            inputs = made.embed(written[:count])
            free, causal = made.decode(inputs, shown, memory), made.decode(inputs, None, memory, causal=True)
            read = memory.states if whole else memory.states[memory.present]
            one, other = (made.logits(part)[..., 3:] for part in (free, causal))  # what may be written
            found.append([read, one[present[:count]], other])
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not usable(torch.device("cpu"), torch.float32, 16), reason="no C++ compiler")
def test_sources_of_many_lengths_are_read_in_groups_and_each_as_alone() -> None:
    heads = {"encoder_attention_heads": 1, "decoder_attention_heads": 1}
    hf = tiny_students.network(torch.float32, **heads)
    lm = Seq2SeqLM.from_hf(hf, keep_hf=True, linear="panels")
    sources = [torch.randint(3, VOCABULARY, (length,), generator=rng()) for length in (40, 3, 38, 5, 4)]
    assert len(reading_groups([len(source) for source in sources])) == 2
    together = lm.encode(sources)
    for row, source in enumerate(sources):
        assert torch.equal(together.states[row, : len(source)], lm.encode([source]).states[0])
        assert not together.states[row, 5 if len(source) < 6 else 40 :].any(), "nothing was read there"


@pytest.mark.skipif(not usable(torch.device("cpu"), torch.float32, 16), reason="no C++ compiler")
@pytest.mark.parametrize(("positional", "blind"), [(False, False), (True, True)])
def test_texts_of_many_lengths_are_written_in_groups_and_each_as_alone(positional: bool, blind: bool) -> None:
    lm, network = for_kernels("marian", positional, blind)
    network.settle(lm)
    read, wanted = [9, 40, 2, 30, 4], [40, 3, 38, 5, 4]
    assert len(reading_groups(wanted)) == 2
    lengths, counts = torch.tensor(read), torch.tensor(wanted)
    rows = torch.randint(3, VOCABULARY, (len(read), 40), generator=rng())
    inputs = network.embed(torch.randint(3, VOCABULARY, (len(wanted), 40), generator=rng()))
    together = network.decode(inputs, present_up_to(counts, 40), network.encode(rows, lengths))
    for row, (source, text) in enumerate(zip(read, wanted, strict=True)):
        memory = network.encode(rows[row : row + 1, :source], lengths[row : row + 1], whole=True)
        alone = network.decode(inputs[row : row + 1, :text], None, memory)
        torch.testing.assert_close(together[row, :text], alone[0], rtol=1e-5, atol=1e-5)
        assert not together[row, 5 if text < 6 else 40 :].any(), "nothing was written there"


@pytest.mark.parametrize("name", KINDS)
def test_padding_changes_nothing(name: str, target: Seq2SeqLM) -> None:
    kind, options = KINDS[name]
    made = student(kind, target, **options)
    narrow = batch_of(PAIRS, FERTILITIES)
    wide = batch_of(PAIRS, FERTILITIES, width=9)
    alone = [batch_of([pair], [note]) for pair, note in zip(PAIRS, FERTILITIES, strict=True)]
    if isinstance(made, GlatStudent):
        made.ratio = (0.0, 0.0)
    if name == "cmlm":  # which places are masked is drawn by the shape of the batch
        objective = lambda batch: LengthStudent.objective(made, batch, 0.0, 0.1)  # noqa: E731
    else:
        objective = lambda batch: made.objective(batch, 0.0, 0.1)  # noqa: E731
    with torch.no_grad():
        (loss, numbers), (other, same) = objective(narrow), objective(wide)
        singles = [objective(batch) for batch in alone]
    torch.testing.assert_close(loss, other, rtol=1e-6, atol=1e-6)
    assert numbers.keys() == same.keys()
    if "tokens_loss" in numbers:
        tokens = torch.tensor([len(text) for _, text in PAIRS])
        each = torch.stack([found["tokens_loss"] for _, found in singles])
        torch.testing.assert_close(numbers["tokens_loss"], (each * tokens).sum() / tokens.sum(), rtol=1e-6, atol=1e-6)


def test_who_sees_whom() -> None:
    present = torch.tensor([[True, True, True, False], [True, False, False, False]])
    for blind, causal in itertools.product((False, True), (False, True)):
        looks = attended(present, 4, blind and not causal, causal, torch.device("cpu"))
        assert looks is not None
        for row, one, two in itertools.product(range(2), range(3), range(4)):
            if not present[row, one]:
                continue
            wanted = bool(present[row, two]) and (not causal or two <= one)
            if blind and not causal and one == two and present[row].sum() > 1:
                wanted = False
            assert bool(looks.expand(2, 1, 4, 4)[row, 0, one, two]) == wanted
    assert attended(None, 3, False, False, torch.device("cpu")) is None


def test_a_text_of_one_token_is_no_division_by_zero(target: Seq2SeqLM) -> None:
    made = student(NatStudent, target, **NAT)
    memory = read(made, SOURCES[:2])
    with torch.no_grad():
        inputs = memory.embedded[:, :3]
        both = made.network.decode(inputs, torch.tensor([[True] * 3, [True, False, False]]), memory)
        memory = read(made, SOURCES[1:2])
        alone = made.network.decode(memory.embedded[:, :1], None, memory)
    assert both[0].isfinite().all() and alone.isfinite().all()
    torch.testing.assert_close(both[1:, :1], alone, rtol=1e-9, atol=1e-9)


# -------------------------------------------------------------------------------------------------------------- inputs


def test_uniform_copies_are_those_of_the_paper(target: Seq2SeqLM) -> None:
    made = student(GlatStudent, target, **GLAT)
    memory = read(made, SOURCES)
    lengths = torch.tensor([9, 1, 3, 3, 4])
    found = UniformCopy()(memory, lengths, 9)
    for row, length in enumerate(lengths.tolist()):
        content = max(1, len(SOURCES[row]) - 1)
        for t in range(1, length + 1):
            place = max(1, math.floor(content * t / length + 0.5)) - 1
            torch.testing.assert_close(found[row, t - 1], memory.embedded[row, place])


def test_soft_copies_become_hard_ones(target: Seq2SeqLM) -> None:
    made = student(GlatStudent, target, **GLAT)
    memory = read(made, SOURCES[2:3])
    sharp = SoftCopy(1e-4).double()
    with torch.no_grad():
        torch.testing.assert_close(sharp(memory, torch.tensor([11]), 11), memory.embedded[:, :11])
        mixed = SoftCopy(0.5).double()(memory, torch.tensor([11]), 11)
    assert (mixed - memory.embedded[:, :11]).abs().max() > 1e-2


def test_copies_by_fertility(target: Seq2SeqLM) -> None:
    made = student(NatStudent, target, **NAT)
    memory = read(made, [torch.tensor(source) for source, _ in PAIRS])
    found = copies(memory, torch.tensor([[*row, *[0] * (6 - len(row))] for row in FERTILITIES]), 4)
    for row, counts in enumerate(FERTILITIES):
        wanted = [memory.embedded[row, place] for place, count in enumerate(counts) for _ in range(count)]
        torch.testing.assert_close(found[row, : len(wanted)], torch.stack(wanted))


# ------------------------------------------------------------------------------------------------------------- aligner


def synthetic(count: int = 500) -> tuple[list[tuple[list[int], list[int]]], list[list[int]]]:
    """A language in which words have 0, 1 or 2 translations in order, and some come from nowhere."""
    drawn = random.Random(0)
    pairs, truth = [], []
    for _ in range(count):
        source = [drawn.randrange(50) for _ in range(drawn.randint(2, 9))]
        target: list[int] = []
        links: list[int] = []
        for place, word in enumerate(source):
            new = [] if word % 7 == 0 else [100 + word, 200 + word] if word % 5 == 0 else [100 + word]
            target += new
            links += [place] * len(new)
        if drawn.random() < 0.3:
            target.append(300)
            links.append(NULL)
        if target:
            pairs.append((source, target))
            truth.append(links)
    return pairs, truth


def test_the_aligner_finds_what_was_aligned() -> None:
    pairs, truth = synthetic()
    found, wanted = align(pairs), list(itertools.chain.from_iterable(truth))
    links = list(zip(itertools.chain.from_iterable(found), wanted, strict=True))
    assert sum(ours == theirs for ours, theirs in links) > 0.95 * len(links)
    assert sum(ours == NULL for ours, theirs in links if theirs == NULL) > 0.6 * wanted.count(NULL)
    diagonal = itertools.chain.from_iterable(align(pairs, iterations=0))
    assert sum(ours == theirs for ours, theirs in zip(diagonal, wanted, strict=True)) < 0.8 * len(links)


def test_the_aligner_is_expectation_maximisation() -> None:
    """Against plain loops over dictionaries."""
    pairs, _ = synthetic(12)
    tension, null, table = 3.0, 0.1, defaultdict(lambda: 1.0)

    def weights(source: list[int], target: list[int], j: int) -> dict[int, float]:
        scores = [math.exp(-tension * abs((i + 1) / len(source) - (j + 1) / len(target))) for i in range(len(source))]
        prior = {i: (1 - null) * s / sum(scores) for i, s in enumerate(scores)} | {NULL: null}
        return {i: p * table[(source[i] if i != NULL else None, target[j])] for i, p in prior.items()}

    for _ in range(3):
        counts: dict[Any, float] = defaultdict(float)
        for source, target in pairs:
            for j in range(len(target)):
                found = weights(source, target, j)
                for i, weight in found.items():
                    counts[(source[i] if i != NULL else None, target[j])] += weight / sum(found.values())
        totals: dict[Any, float] = defaultdict(float)
        for (word, _), count in counts.items():
            totals[word] += count
        table = defaultdict(float, {key: count / totals[key[0]] for key, count in counts.items()})
    wanted = [
        [max(found := weights(source, target, j), key=lambda i: found[i]) for j in range(len(target))]
        for source, target in pairs
    ]
    assert align(pairs, 3, tension, null) == wanted


@pytest.mark.parametrize(
    ("alignment", "count", "wanted"),
    [
        ([0, 1, 1, 2], 3, [1, 2, 1]),
        ([NULL, 2, NULL, 0, NULL], 3, [2, 0, 3]),
        ([NULL, NULL, NULL, NULL], 2, [2, 2]),
        ([NULL], 3, [1, 0, 0]),
    ],
)
def test_fertilities_sum_to_the_length(alignment: list[int], count: int, wanted: list[int]) -> None:
    assert fertilities(alignment, count) == wanted and sum(wanted) == len(alignment)


def test_chosen_fertilities_make_a_text(target: Seq2SeqLM) -> None:
    """None behind the source, at least one token, at most twice the source."""
    made = student(NatStudent, target, **NAT)
    memory = read(made, sources(4, 3, 2))
    probs = torch.full((3, 4, 5), 0.1, dtype=torch.float64)
    probs[:, 1, 4] = 0.9
    wished = torch.tensor([[[4, 4, 4, 4]], [[0, 0, 3, 0]], [[1, 9, 9, 9]]])
    found = made.limited(memory, wished, probs)
    assert found.tolist() == [[[4, 2, 0, 0]], [[0, 1, 0, 0]], [[1, 0, 0, 0]]]


def test_the_training_annotates_its_pairs_with_fertilities() -> None:
    pairs = [([*source, 1], target) for source, target in synthetic(60)[0]] + [([1], [5, 6])]
    notes = NatTraining().annotate(pairs, lambda *_: None)
    assert [len(note) for note in notes] == [len(source) for source, _ in pairs]
    assert [sum(note) for note in notes] == [len(text) for _, text in pairs]
    assert all(note[-1] == 0 for note in notes[:-1])


# ------------------------------------------------------------------------------------------------------------ decoding


@pytest.mark.parametrize("name", DECODERS)
def test_a_row_of_a_batch_is_what_it_is_alone(name: str, target: Seq2SeqLM, tmp_path: Path) -> None:
    decoder, kind, options = DECODERS[name]
    made = student(KINDS[kind][0], target, **KINDS[kind][1])
    part = save(made, tmp_path, target)
    alone = [texts(decoder(target, Sampling(), checkpoint=part, **options), [source])[0] for source in SOURCES]
    used = decoder(target, Sampling(), checkpoint=part, **options)
    assert texts(used, SOURCES) == alone and texts(used, SOURCES[::-1]) == alone[::-1]
    assert len({tuple(text) for text in alone}) > 2 and all(text[-1] == 1 and 1 not in text[:-1] for text in alone)
    assert not {0, 2} & set(itertools.chain.from_iterable(alone)), "padding and mask are never written"
    checks.check_guarantee(used)
    assert used.guarantee is Guarantee.INDEPENDENT_MODEL


def test_a_part_decodes_as_it_was_trained(target: Seq2SeqLM, tmp_path: Path) -> None:
    """Products in the engine's form, embedding borrowed: the same texts as the network that learns."""
    for own in (False, True):
        made = student(CmlmStudent, target, own=own)
        loaded = Cmlm(target, Sampling(), checkpoint=save(made, tmp_path / str(own), target))
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(parameter.half())
        written = write(made, MaskPredict(), SOURCES, rng()).texts
        assert [text[:-1] for text in texts(loaded, SOURCES)] == written
        assert ("network.embedding" in made.state_dict()) is own


def test_one_iteration_of_mask_predict_is_one_pass_over_masks(target: Seq2SeqLM) -> None:
    made = student(CmlmStudent, target)
    for beam in (1, 4):
        memory = read(made, SOURCES)
        with torch.no_grad():
            ours, theirs = (loop(made, memory, rng()) for loop in (MaskPredict(1, beam), OnePass(beam)))
        assert ours.lengths.equal(theirs.lengths) and ours.passes == theirs.passes == 1
        written = torch.arange(ours.tokens.shape[2]) < ours.lengths[:, :, None]
        assert ours.tokens[written].equal(theirs.tokens[written])
        if beam > 1:
            torch.testing.assert_close(ours.scores, theirs.scores)


@pytest.mark.parametrize("iterations", [2, 4, 10])
def test_mask_predict_is_that_of_the_paper(iterations: int, target: Seq2SeqLM) -> None:
    """Against a loop over one sentence that masks by sorting."""
    made = student(CmlmStudent, target)
    for source in SOURCES:
        memory = read(made, [source])
        with torch.no_grad():
            (length,) = made.lengths.best(memory)[0].tolist()
            found = MaskPredict(iterations)(made, memory, rng())
            tokens, probs, passes = [-1] * length, [0.0] * length, 0
            for done in range(iterations):
                count = length if not done else math.floor(length * (1 - done / iterations) + 1e-9)
                if not count:
                    break
                masked = sorted(range(length), key=lambda place: probs[place])[:count] if done else list(range(length))
                rows = [
                    made.inputs.vector if p in masked else made.network.embed(torch.tensor(tokens[p]))
                    for p in range(length)
                ]
                states = made.network.decode(torch.stack(rows)[None], None, memory)[0]
                logits = made.network.logits(states)
                logits[:, [0, 1, 2]] = -torch.inf
                for place in masked:
                    best = logits[place].log_softmax(-1).max(0)
                    tokens[place], probs[place] = int(best.indices), float(best.values)
                passes += 1
        assert found.tokens[0, 0].tolist() == tokens and found.passes == passes
        assert float(found.scores) == pytest.approx(sum(probs) / length)


def test_one_sample_is_the_likeliest(target: Seq2SeqLM, tmp_path: Path) -> None:
    part = save(student(NatStudent, target, **NAT), tmp_path, target)
    argmax = texts(Nat(target, Sampling(), checkpoint=part), SOURCES)
    assert texts(Nat(target, Sampling(), "npd", 1, checkpoint=part), SOURCES) == argmax
    several = Nat(target, Sampling(), "npd", 8, checkpoint=part)
    assert texts(several, SOURCES) == texts(several, SOURCES) != argmax


def test_the_teacher_chooses_what_it_finds_likeliest(target: Seq2SeqLM, tmp_path: Path) -> None:
    """Against transformers' own log-probabilities, one candidate at a time."""
    made, hf = student(NatStudent, target, **NAT), target.hf
    assert hf is not None
    memory = read(made, SOURCES)
    with torch.no_grad():
        found = FertilityPass("npd", 6)(made, memory, rng())
        scores = score(target, SOURCES, found.tokens, found.lengths)
        assert max(len(set(map(tuple, rows))) for rows in found.tokens.tolist()) > 2
        for row, source in enumerate(SOURCES):
            for place in range(6):
                text = [*found.tokens[row, place, : found.lengths[row, place]].tolist(), 1]
                logits = hf(input_ids=source[None], decoder_input_ids=torch.tensor([[0, *text[:-1]]])).logits[0]
                logits[:, [0, 2]] = -torch.inf  # padding and mask are forbidden
                said = logits.log_softmax(-1)
                wanted = sum(float(said[i, token]) for i, token in enumerate(text)) / len(text)
                assert float(scores[row, place]) == pytest.approx(wanted)
    chosen = write(made, FertilityPass("npd", 6), SOURCES, rng(), target)
    best = scores.argmax(1).tolist()
    wanted_texts = [found.tokens[r, k, : found.lengths[r, k]].tolist() for r, k in enumerate(best)]
    assert chosen.texts == wanted_texts and (chosen.rescorings, chosen.passes, chosen.candidates) == (1, 1, 6)
    assert write(made, FertilityPass("npd", 6), SOURCES, rng()).texts != wanted_texts


def test_equal_neighbours_are_joined_on_request(target: Seq2SeqLM, tmp_path: Path) -> None:
    part = save(student(NatStudent, target, **NAT), tmp_path, target)
    plain, joined = (texts(Nat(target, Sampling(), checkpoint=part, collapse=on), SOURCES) for on in (False, True))
    assert joined == [[token for token, _ in itertools.groupby(text)] for text in plain] != plain


def test_ctc_joins_like_a_loop() -> None:
    tokens = torch.randint(0, 3, (200, 9), generator=rng())
    lengths = torch.randint(1, 10, (200,), generator=rng(1))
    packed, count = join(tokens, torch.arange(9) < lengths[:, None], 0)
    for row, length in enumerate(lengths.tolist()):
        wanted, last = [], None
        for token in tokens[row, :length].tolist():
            if token not in (last, 0):
                wanted.append(token)
            last = token
        assert packed[row, : count[row]].tolist() == wanted


@pytest.mark.parametrize("name", DECODERS)
def test_every_method_says_what_its_speed_hides(name: str, target: Seq2SeqLM, tmp_path: Path) -> None:
    decoder, kind, options = DECODERS[name]
    used = decoder(
        target,
        Sampling(),
        checkpoint=save(student(KINDS[kind][0], target, **KINDS[kind][1]), tmp_path, target),
        **options,
    )
    texts(used, SOURCES)
    facts, rescored = used.stats(), bool(options.get("rescore"))
    assert facts.keys() >= tiny_students.HONESTY and facts["rescored_by_teacher"] is rescored
    assert (facts["rescoring_seconds_per_sentence"] > 0) is rescored
    whole = target.weight_bytes + target.encoder_bytes
    assert set(used.memory()) == {"student", "of_the_teacher"}
    assert (used.memory()["of_the_teacher"] == whole) is rescored


@pytest.mark.parametrize("name", DECODERS)
def test_passes_do_not_grow_with_the_text(name: str, target: Seq2SeqLM, tmp_path: Path) -> None:
    """What ``one_pass`` says, by which a speed-up is of seconds and not of seconds per token."""
    decoder, kind, options = DECODERS[name]
    part = save(student(KINDS[kind][0], target, **KINDS[kind][1]), tmp_path, target)
    used, passes = decoder(target, Sampling(), checkpoint=part, **options), dict[int, int]()
    for source in SOURCES:
        (step,) = used.decode([source], 48, rng())
        passes[len(step.tokens[0])] = step.draft_passes + step.target_passes
    assert len(passes) > 1 and max(passes.values()) <= options.get("iterations", 4) + used.rescore, passes
    assert used.one_pass and not Diffusion.one_pass


def test_what_decoding_took_is_reported(target: Seq2SeqLM, tmp_path: Path) -> None:
    part = save(student(GlatStudent, target, **GLAT), tmp_path, target, teacher_beams=1)
    decoder = Glat(target, Sampling(), length_beam=3, rescore=True, checkpoint=part)
    (step,) = decoder.decode(SOURCES, 40, rng())
    assert (step.draft_passes, step.target_passes, step.layers) == (1, 1, [1.0] * 5)
    tokens = sum(map(len, step.tokens)) - 5
    facts = decoder.stats()
    assert facts["data"] == "raw" and facts["teacher_beams"] == 1 and facts["rescored_by_teacher"] is True
    assert facts["iterations"] == 1 and facts["tokens"] == tokens and facts["repeats_collapsed"] is False
    assert facts["decoder_layer_passes_per_token"] == pytest.approx(5 * (2 + 2) / tokens)
    repeats = sum(a == b for text in step.tokens for a, b in itertools.pairwise(text[:-1]))
    assert facts["repeated_tokens"] == pytest.approx(repeats / tokens) and repeats
    assert facts["rescoring_passes_per_sentence"] == 1 and facts["rescoring_seconds_per_sentence"] > 0
    json.dumps(facts)
    hf: Any = target.hf
    everything = sum(p.numel() for name, p in hf.named_parameters() if p.dim() > 1 and "positions" not in name)
    embedding = VOCABULARY * 16  # read as embedding and as output matrix: two forms of it
    keys = [
        p for name, p in hf.named_parameters() if "encoder_attn.k_proj.w" in name or "encoder_attn.v_proj.w" in name
    ]
    cross = sum(p.numel() for p in keys)  # multiplied once per source, and no part of a pass
    bytes_of = decoder.memory()
    assert bytes_of["of_the_teacher"] == pytest.approx(8 * (everything + embedding - cross))
    alone = Glat(target, Sampling(), checkpoint=part).memory()
    assert alone["student"] == bytes_of["student"] and alone["of_the_teacher"] == 8 * 2 * embedding


# ---------------------------------------------------------------------------------------------------------- objectives


def test_glancing_at_nothing_is_vanilla(target: Seq2SeqLM) -> None:
    batch = batch_of(PAIRS)
    made = student(GlatStudent, target, **GLAT | {"ratio": [0.0, 0.0]})
    loss = added(made.objective(batch, 0.5, 0.1)[0])
    vanilla = added(LengthStudent.objective(made, batch, 0.5, 0.1)[0])
    assert loss.equal(vanilla)
    made.ratio = (1.0, 1.0)
    assert not added(made.objective(batch, 0.5, 0.1)[0]).isclose(vanilla)


def test_glancing_shows_by_the_distance_of_the_first_guess(target: Seq2SeqLM) -> None:
    made = student(GlatStudent, target, **GLAT)
    memory = made.read(batch_of(PAIRS))
    inputs = made.inputs(memory, torch.tensor([3, 1, 4]), 4)
    with torch.no_grad():
        guess = made.logits(made.network.decode(inputs, batch_of(PAIRS).present, memory)).argmax(-1)
    half = [(source, [int(guess[row, 0]), *text[1:]]) for row, (source, text) in enumerate(PAIRS)]
    batch = batch_of(half)
    wrong = [sum(int(guess[row, p]) != token for p, token in enumerate(text)) for row, (_, text) in enumerate(half)]
    seen = set()
    for seed, ratio in itertools.product(range(5), (0.3, 0.5, 1.0)):
        torch.manual_seed(seed)
        shown = made.glance(memory, inputs, batch, ratio)
        assert shown.sum(1).tolist() == [math.floor(ratio * count) for count in wrong]
        assert not (shown & ~batch.present).any()
        seen.add(str(shown.tolist()))
    assert len(seen) > 4


def test_both_passes_of_glancing_drop_the_same_units(target: Seq2SeqLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made = student(GlatStudent, target, **GLAT | {"ratio": [1e-6, 1e-6]})  # shows nothing, but looks
    for module in made.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.4
    made.train()
    states: list[Tensor] = []
    decode = Network.decode
    monkeypatch.setattr(Network, "decode", lambda *a, **k: (states.append(decode(*a, **k)), states[-1])[1])
    made.objective(batch_of(PAIRS), 0.0, 0.1)
    assert len(states) == 2 and states[0].equal(states[1].detach())
    made.objective(batch_of(PAIRS), 0.0, 0.1)
    assert not states[0].equal(states[2])


def test_masks_are_learnt_where_they_are(target: Seq2SeqLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made = student(CmlmStudent, target)
    batch, counts = batch_of(PAIRS), set()
    supervise = CmlmStudent.supervise

    def spy(self: Any, memory: Any, inputs: Tensor, batch: Any, judged: Tensor, smoothing: float) -> Any:
        hidden = (inputs == self.inputs.vector).all(-1)
        assert (hidden & batch.present).equal(judged) and judged.any(1).all()
        counts.update(judged.sum(1).tolist()[2:])
        return supervise(self, memory, inputs, batch, judged, smoothing)

    monkeypatch.setattr(CmlmStudent, "supervise", spy)
    for seed in range(30):
        torch.manual_seed(seed)
        made.objective(batch, 0.0, 0.1)
    assert counts == {1, 2, 3, 4}


def test_the_ctc_loss_sums_over_alignments(target: Seq2SeqLM) -> None:
    """Against all strings of tokens and blanks that join to the target."""
    made = student(CtcStudent, target, upsample=2)
    pairs = [([5, 9, 1], [7, 7]), ([4, 6, 1], [8, 3])]
    total = 0.0
    for pair in pairs:
        batch = batch_of([pair])
        memory = made.read(batch)
        inputs, _ = made.places(memory)
        assert inputs[0].equal(memory.embedded[0, [0, 0, 1, 1]])
        probs = made.logits(made.network.decode(inputs, None, memory)).softmax(-1)[0].double()
        likely = 0.0
        for path in itertools.product({*pair[1], made.blank}, repeat=4):
            if [token for token, _ in itertools.groupby(path) if token != made.blank] == pair[1]:
                likely += math.prod(float(probs[place, token]) for place, token in enumerate(path))
        total -= math.log(likely)
    loss, _ = made.objective(batch_of(pairs), 0.0, 0.0)
    assert float(loss) == pytest.approx(total / 4, rel=1e-5)


def test_a_penalty_on_blanks_writes_more(target: Seq2SeqLM, tmp_path: Path) -> None:
    made = student(CtcStudent, target, upsample=3)
    memory = read(made, SOURCES)
    inputs, lengths = made.places(memory)
    with torch.no_grad():  # the blank is a little likelier than the best token at the first place
        state = made.network.decode(inputs, torch.arange(inputs.shape[1]) < lengths[:, None], memory)[0, 0]
        best = made.network.logits(state)[3:].max()
        made.blank_vector.copy_(state * (best + 0.3) / state.dot(state))
    found = [CtcPass(penalty)(made, memory, rng()) for penalty in (0.0, 0.5, 2.0, 1e9)]
    counts = [int(each.lengths.sum()) for each in found]
    assert counts == sorted(counts) and counts[0] < counts[-1]
    states = made.network.decode(inputs, torch.arange(inputs.shape[1]) < lengths[:, None], memory)
    logits = made.logits(states).index_fill(-1, made.barred, -torch.inf)
    blanks = logits[..., made.blank].clone()
    for penalty, candidates in zip((0.0, 0.5, 2.0), found, strict=False):
        logits[..., made.blank] = blanks - penalty
        for row, text in enumerate(logits.argmax(-1)):
            joined = [token for token, _ in itertools.groupby(text[: lengths[row]].tolist()) if token != made.blank]
            assert candidates.tokens[row, 0, : candidates.lengths[row, 0]].tolist() == joined
    made.blank_penalty = 0.5
    assert CtcPass()(made, memory, rng()).tokens.equal(found[1].tokens), "its own unless another one is set"


def test_the_training_chooses_the_penalty_and_the_checkpoint_keeps_it(target: Seq2SeqLM, tmp_path: Path) -> None:
    made = student(CtcStudent, target, upsample=2)
    facts = CtcTraining().choose(made, lambda: 30 - (made.blank_penalty - 0.8) ** 2)
    assert facts["blank_penalty"] == made.blank_penalty == 0.75
    assert facts["bleu_by_blank_penalty"]["0.0"] == pytest.approx(29.36)
    save(made, tmp_path, target)
    assert Ctc(target, Sampling(), checkpoint=tmp_path).student.blank_penalty == 0.75
    with pytest.raises(ValueError, match="blank_penalty must be at least 0, got -1.0"):
        Ctc(target, Sampling(), blank_penalty=-1.0, checkpoint=tmp_path)


def test_pairs_without_a_path_are_left_out(target: Seq2SeqLM) -> None:
    maker = CtcTraining()
    assert maker.fits(([5, 9, 1], [7, 8, 7, 8])) and not maker.fits(([5, 9, 1], [7, 7, 8, 9]))
    made = student(CtcStudent, target, upsample=2)
    for pair in (([5, 9, 1], [7, 7, 8, 9]), ([5, 1], [7, 7])):
        loss, numbers = made.objective(batch_of([pair]), 0.0, 0.0)
        assert not maker.fits(pair) and float(loss) == 0 and float(numbers["unreachable"]) == 1


def test_the_reverse_divergence_is_that_of_the_paper(target: Seq2SeqLM) -> None:
    """Sum over positions and tokens, against transformers' log-probabilities; gradients reach the student alone."""
    made, hf = student(NatStudent, target, **NAT), target.hf
    assert hf is not None
    batch = batch_of(PAIRS, FERTILITIES)
    memory = made.read(batch)
    states = made.network.decode(copies(memory, batch.notes, 4), batch.present, memory)
    rows = [torch.tensor(source) for source, _ in PAIRS]
    found = reverse_kl(made, target, target.encode(rows), states, batch.lengths)
    with torch.no_grad():
        probs = made.logits(states).softmax(-1)
        written, _ = made.choose(states)
        for row, (source, text) in enumerate(zip(rows, [t for _, t in PAIRS], strict=True)):
            read_by_teacher = torch.tensor([[0, *written[row, : len(text) - 1].tolist()]])
            logits = hf(input_ids=source[None], decoder_input_ids=read_by_teacher).logits[0]
            logits[:, [0, 2]] = -torch.inf
            heard = logits.log_softmax(-1).clamp(min=-50)
            wanted = sum(float(-(probs[row, t] * heard[t]).sum()) for t in range(len(text)))
            assert float(found[row]) == pytest.approx(wanted, rel=1e-5)
    found.sum().backward()
    assert made.network.decoder[0].up.weight.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in hf.parameters())


def test_fine_tuning_begins_in_its_last_part(target: Seq2SeqLM) -> None:
    made = student(NatStudent, target, **NAT, finetune={"share": 0.25, "weight": 0.5})
    made.teacher.append(target)
    batch = batch_of(PAIRS, FERTILITIES)
    before = added(made.objective(batch, 0.74, 0.1)[0])
    torch.manual_seed(0)
    loss, numbers = made.objective(batch, 0.75, 0.1)
    assert "reverse_kl" in numbers and abs(float(loss.detach()) - float(before.detach())) > 1e-3
    made.zero_grad()
    # without the distillation loss, fertilities learn from the reward alone
    made.finetuning = Finetuning(0.25, 1.0)
    made.objective(batch, 0.75, 0.1)[0].backward()
    assert made.fertility.weight.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="share must be above 0 and at most 1, got"):
        Finetuning(share=0.0)


def test_fine_tuning_asks_the_teacher_in_its_own_type(target: Seq2SeqLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that are packed for float32 cannot take the bfloat16 of the student's training."""
    asked: list[bool] = []
    for owner, name in ((Seq2SeqLM, "encode"), (nat_finetuning, "teacher_log_probs")):
        original = getattr(owner, name)

        def spy(*given: Any, original: Any = original, **options: Any) -> Any:
            asked.append(torch.is_autocast_enabled("cpu"))
            return original(*given, **options)

        monkeypatch.setattr(owner, name, spy)
    made = student(NatStudent, target, **NAT, finetune={"share": 0.25, "weight": 0.5})
    made.teacher.append(target)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = made.objective(batch_of(PAIRS, FERTILITIES), 0.75, 0.1)
    assert asked == [False] * 4 and loss.isfinite()


def test_the_loss_of_the_length_does_not_reach_the_encoder(target: Seq2SeqLM) -> None:
    made = student(GlatStudent, target, **GLAT)
    losses, _ = made.objective(batch_of(PAIRS), 0.5, 0.1)
    losses["length"].backward()
    learnt = {name for name, value in made.named_parameters() if value.grad is not None and value.grad.abs().sum() > 0}
    assert learnt == {"lengths.head.weight", "lengths.head.bias"}


def test_frequencies_of_lengths_by_hand() -> None:
    head = LengthHead(4, 30, reach=2)
    wanted = [-math.log((1 + seen) / (5 + 4)) for seen in (2, 1, 0)]  # of 0, of 2 and more, of -1
    assert head.frequency_loss([0, 0, 7, 1], [0, 2, -1]) == pytest.approx(sum(wanted) / 3)


def test_lengths_are_learnt_against_the_source(target: Seq2SeqLM) -> None:
    made = student(GlatStudent, target, **GLAT)
    batch = batch_of([([5, 9, 4, 1], [7] * 3), ([5, 9, 4, 1], [7] * 40)])
    memory = made.read(batch)
    logits = made.lengths(memory)
    loss, _ = made.lengths.loss(memory, batch.lengths)
    wanted = F.cross_entropy(logits.float(), torch.tensor([20, 40]))  # offset 0, and the largest for what is beyond
    torch.testing.assert_close(loss, wanted)
    best = made.lengths.best(memory, 41)
    assert best.min() == 1 and best.max() == 23
    assert best[:, 0].tolist() == (3 + logits.argmax(-1) - 20).clamp(min=1).tolist()
    with pytest.raises(ValueError, match="length_beam must be at most 41, .*got 42"):
        made.lengths.best(memory, 42)


@pytest.mark.parametrize("name", ["glat", "ctc"])
def test_what_may_not_be_written_is_not_chosen(name: str, target: Seq2SeqLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the barred ids, the end among them, only CTC may choose one: its blank stands in the end's place."""
    kind, options = KINDS[name]
    made = student(kind, target, **options)
    barred, end = made.network.shape.suppressed, made.network.shape.end
    given = torch.randn(2, 5, VOCABULARY, generator=rng(1))
    allowed = torch.ones(VOCABULARY, dtype=torch.bool)
    allowed[list(barred)] = False
    given[..., list(barred)] = 50.0
    if name == "ctc":
        allowed[end] = True
        given[:, 0, end] = 100.0
    monkeypatch.setattr(made, "logits", lambda states: given.clone())
    tokens, log_probs = made.choose(given)
    wanted = given.masked_fill(~allowed, -torch.inf).log_softmax(-1)
    assert tokens.equal(wanted.argmax(-1)) and allowed[tokens].all() and end in barred
    assert (tokens == end).any() == (name == "ctc")
    torch.testing.assert_close(log_probs, wanted.amax(-1))


def test_lowest_of_each_row() -> None:
    found = lowest(torch.tensor([[3.0, 1.0, 2.0, torch.inf], [0.0, 0.0, 0.0, 5.0]]), torch.tensor([2, 1]))
    assert found.tolist() == [[False, True, True, False], [True, False, False, False]]


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda t: Glat(t, Sampling()), "python -m bench train method=glat model=MODEL"),
        (lambda t: Nat(t, Sampling()), "python -m bench train method=nat model=MODEL"),
        (lambda t: Cmlm(t, Sampling(), iterations=0), "iterations must be at least 1, got 0"),
        (lambda t: Cmlm(t, Sampling(), length_beam=0), "length_beam must be at least 1, got 0"),
        (lambda t: Nat(t, Sampling(), "npd", 0), "samples must be at least 1, got 0"),
        (lambda t: Ctc(t, Sampling(1.0)), "ctc must be greedy, .*got temperature=1.0"),
        (lambda t: GlatTraining(beams=0), "beams must be at least 1, got 0"),
    ],
)
def test_what_cannot_work_is_refused(make: Any, said: str, target: Seq2SeqLM) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        make(target)
    assert isinstance(raised.value, MissingPart) is said.startswith("python")


@pytest.mark.parametrize("decoder", [Glat, Cmlm, Ctc, Nat])
def test_a_causal_target_is_refused(decoder: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="encoder-decoders of the Marian or Pegasus family"):
        decoder(checks.tiny_target(), Sampling(), checkpoint=tmp_path)


@pytest.mark.parametrize("decoder, kind, own", [(Glat, GlatStudent, GLAT), (Cmlm, CmlmStudent, {})])
def test_more_lengths_than_there_are_are_refused_before_anything_is_written(
    decoder: Any, kind: Any, own: dict[str, Any], target: Seq2SeqLM, tmp_path: Path
) -> None:
    part = save(student(kind, target, **own), tmp_path, target)
    with pytest.raises(
        ValueError, match=r"length_beam must be at most 41, the lengths that the length head knows, got 42"
    ):
        decoder(target, Sampling(), length_beam=42, checkpoint=part)


def test_parts_of_others_are_refused(target: Seq2SeqLM, tmp_path: Path) -> None:
    part = save(student(CmlmStudent, target), tmp_path, target)
    with pytest.raises(ValueError, match="must hold .* as the training of method=glat writes them, got KeyError"):
        Glat(target, Sampling(), checkpoint=part)
    config = json.loads((part / "config.json").read_text())
    (part / "config.json").write_text(json.dumps(config | {"layers": 3}))
    with pytest.raises(ValueError, match="must be of a model like .*, got "):
        Cmlm(target, Sampling(), checkpoint=part)
    with pytest.raises(ValueError, match=r"Sources must have 1 to 48 tokens, got 0 to 4"):
        write(student(CmlmStudent, target), MaskPredict(), [torch.tensor([], dtype=torch.long), SOURCES[3]], rng())


# ------------------------------------------------------------------------------------------------------------ training

WORDS = ["hund", "mann", "kind", "ball", "baum", "rot", "klein", "sieht", "mag", "der"]


def sentences(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """A language whose translation is another spelling, word by word."""
    drawn = random.Random(seed)
    rows = [[drawn.choice(WORDS) for _ in range(drawn.randint(1, 5))] for _ in range(count)]
    return [(" ".join(row), " ".join(word[::-1] + "." for word in row)) for row in rows]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A teacher that was trained for a moment, its corpus, and the words of a command line that uses both."""
    root = tmp_path_factory.mktemp("machine")
    file = root / "own.jsonl"
    lines = [json.dumps({"prompt": source, "answer": text}) + "\n" for source, text in sentences(240)]
    file.write_text("".join(lines))
    own = ["hardware=cpu_fp32", "hardware.threads=1", f"paths.cache={root / 'cache'}", f"corpus={file}"]
    shape = "layers=[1,1] width=32 inner=64 heads=2 vocabulary=300 positions=40"
    recipe = "steps=120 tokens=700 learning_rate=0.01 warmup=20 evaluations=1 average=1 dropout=0.0"
    words = [f"train.{word}" for word in shape.split()] + [f"train.recipe.{word}" for word in recipe.split()]
    patch = pytest.MonkeyPatch()
    patch.setattr(artifacts, "project_data", lambda: root / "data")
    assert command.main(["method=teacher", *own, *words]) == 0
    folder = root / "cache" / "trained" / "teacher-own_1_1"
    yield {"root": root, "words": own, "model": ["model=hf", f"model.name={folder}"], "folder": folder, "file": file}
    patch.undo()


STEPS = {"steps": 30, "tokens": 700, "learning_rate": 0.005, "warmup": 5, "evaluations": 2, "average": 2}


def made_by(machine: dict[str, Any], method: str, *more: str) -> tuple[int, Path]:
    recipe = [f"train.recipe.{name}={value}" for name, value in STEPS.items()]
    code = command.main([f"method={method}", *machine["model"], *machine["words"], *recipe, *more])
    parts = machine["root"] / "cache" / "trained"
    return code, next(iter(sorted(parts.glob(f"{method}-*"))), parts)


@pytest.mark.parametrize(("method", "more"), [("nat", []), ("glat", ["train.data=raw"]), ("cmlm", []), ("ctc", [])])
def test_a_student_is_made_and_decodes(
    method: str, more: list[str], machine: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    code, folder = made_by(machine, method, *more)
    said = capsys.readouterr()
    assert code == 0, said.err
    assert f"python -m bench method={method}" in said.out
    card = artifacts.read_card(folder) or {}
    facts = card["facts"]
    assert facts["data"] == ("raw" if more else "distilled") and facts["steps"] == 30
    assert ("distilled_equal_reference" in facts) is not bool(more)
    assert ("validation_length_loss" in facts) is (method in ("glat", "cmlm"))
    assert ("blank_penalty" in facts) is (method == "ctc")
    assert [point["step"] for point in facts["curve"]] == [15, 30]
    assert all(set(scores) == {"plain", "repeats_collapsed"} for scores in facts["validation_bleu"].values())
    more_files = {"ngrams.npz"} if method == "ctc" else set()
    assert set(card["bytes"]) == {"config.json", "head.safetensors"} | more_files
    losses = [json.loads(line).get("loss") for line in (folder / "curves.jsonl").read_text().splitlines()]
    kept = [loss for loss in losses if loss is not None]
    assert kept[-1] < kept[0]

    fp32 = {"device": "cpu", "dtype": "float32", "threads": 1}
    loaded = loading.load({"name": str(machine["folder"])}, fp32, PathsConfig())
    group = dict(compose.compose([f"method={method}", "dataset=multi30k"]).method)
    decoder = instantiate.build_decoder(group, loaded.lm, SamplingConfig(), checkpoint=folder)
    source = torch.tensor(loaded.tokenizer("hund sieht ball")["input_ids"])
    (text,) = texts(decoder, [source])
    assert text[-1] == 1 and decoder.stats()["data"] == facts["data"]


def test_students_share_the_translations_of_their_teacher(machine: dict[str, Any]) -> None:
    common = list((machine["root"] / "cache" / "common").glob("*/translations-*.jsonl"))
    assert len(common) == 1


def test_the_maker_of_a_student_is_told_apart(machine: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["method=glat", "model=random", *machine["words"]]) == 2
    assert "encoder-decoders of the Marian or Pegasus family" in capsys.readouterr().err
    code, _ = made_by(machine, "glat", "train.ratio=[2.0,0.0]", f"out={machine['root'] / 'other'}")
    assert code == 2 and "two shares from 0 to 1" in capsys.readouterr().err


def shop(machine: dict[str, Any], folder: Path) -> TrainingContext:
    fp32 = {"device": "cpu", "dtype": "float32", "threads": 1}
    loaded = loading.load({"name": str(machine["folder"])}, fp32, PathsConfig(), keep_hf=True)
    folder.mkdir(exist_ok=True)
    given = {"model": loaded.lm, "tokenizer": loaded.tokenizer, "pairs": sentences(90)}
    return TrainingContext(output=folder, shared_cache=folder / "common", **given)


@pytest.mark.parametrize("method", ["nat", "glat"])
def test_an_interrupted_training_ends_like_an_uninterrupted_one(
    method: str, machine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = TranslationConfig(steps=16, tokens=500, warmup=2, evaluations=2, average=2, precision="float32")
    maker: Any = {"nat": NatTraining(recipe=recipe, data="raw"), "glat": GlatTraining(recipe=recipe, data="raw")}[
        method
    ]
    whole = maker.fit(shop(machine, tmp_path / "whole"))
    seen = interrupted_at(11, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        maker.fit(shop(machine, tmp_path / "cut"))
    assert maker.fit(shop(machine, tmp_path / "cut")) == whole
    assert seen == [*range(11), *range(10, 16)]
    first, second = ((tmp_path / name / "head.safetensors").read_bytes() for name in ("whole", "cut"))
    assert first == second
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == ["config.json", "head.safetensors"]


def test_a_corpus_without_a_pair_that_fits_is_refused(machine: dict[str, Any], tmp_path: Path) -> None:
    place = shop(machine, tmp_path / "a")
    with pytest.raises(ValueError, match="At least one pair must be learnable, got none of 1: 1 have a translation"):
        CtcTraining(data="raw").fit(replace(place, pairs=[("hund", "dnuh. " * 9)], validation=sentences(3)))


def test_a_missing_part_names_its_command(machine: dict[str, Any]) -> None:
    fp32 = {"device": "cpu", "dtype": "float32", "threads": 1}
    lm = loading.load({"name": str(machine["folder"])}, fp32, PathsConfig()).lm
    with pytest.raises(UserError, match="python -m bench train method=cmlm model=MODEL"):
        instantiate.build_decoder(
            dict(compose.compose(["method=cmlm", "dataset=multi30k"]).method), lm, SamplingConfig()
        )
