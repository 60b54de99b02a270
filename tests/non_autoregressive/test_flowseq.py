"""FlowSeq: its bound, its latents, its decodings, its training; the flow itself is in test_flow.py."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from methods.decoder import Guarantee
from methods.engine.checkpoint_files import WEIGHTS, pack_file
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.non_autoregressive.flowseq.flow import ActNorm, HeadwiseLinear
from methods.non_autoregressive.flowseq.model import FlowPass, FlowSeq, FlowSeqStudent, filled_up, up_to_end
from methods.non_autoregressive.flowseq.networks import CouplingNetwork, log_normal_of
from methods.non_autoregressive.flowseq.training import FlowSeqTraining
from methods.non_autoregressive.loop import write
from methods.non_autoregressive.network import Memory, present_up_to
from methods.training.trainer import added
from methods.training.translation import TranslationConfig
from tests.helpers import tiny_students
from tests.helpers.tiny_students import batch_of, save, sources

END = 1
SMALL: dict[str, Any] = {"latent": 4, "width": 8, "inner": 8, "steps": [1, 1], "posterior_layers": 1}
SOURCES = sources(7, 1, 12, 4, 2)
PAIRS = [([5, 9, 4, 1], [7, 7, 8]), ([3, 1], [6]), ([8, 4, 11, 20, 6, 1], [9, 5, 30, 12])]


def rng(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def target() -> Seq2SeqLM:
    return tiny_students.teacher()


def make(target: Seq2SeqLM, **options: Any) -> FlowSeqStudent:
    """Random throughout, the flow mildly so."""
    made: FlowSeqStudent = tiny_students.student(FlowSeqStudent, target, **SMALL | options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.prior.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
        for module in made.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
    return made


def encoded(student: FlowSeqStudent, rows: list[Tensor]) -> Memory:
    lengths = torch.tensor([len(row) for row in rows])
    return student.network.encode(nn.utils.rnn.pad_sequence(rows, batch_first=True), lengths)


# ----------------------------------------------------------------------------------------------------------- the model


def test_default_flow_has_as_many_couplings_as_its_design() -> None:
    student = make(tiny_students.teacher(), steps=[2, 1])
    assert student.prior.layers == 37 and student.prior.unit == 2
    assert sum(isinstance(module, CouplingNetwork) for module in student.modules()) == 37


def test_latents_are_the_inverse_of_the_density(target: Seq2SeqLM) -> None:
    student = make(target)
    memory, present = encoded(student, SOURCES[:3]), present_up_to(torch.tensor([4, 2, 8]), 8)
    noise = torch.randn(3, 8, 4, generator=rng()).double() * present[:, :, None]
    z = student.prior.latents(noise, memory, present)
    back, log_determinant = student.prior.flow(z, student.prior.condition(memory, present))
    torch.testing.assert_close(back, noise)
    wanted = -0.5 * (noise**2 + math.log(2 * math.pi)) * present[:, :, None]
    torch.testing.assert_close(student.prior.log_prob(z, memory, present), wanted.sum((1, 2)) + log_determinant)
    other = student.prior.log_prob(z, encoded(student, SOURCES[1:4]), present)
    assert (other - student.prior.log_prob(z, memory, present)).abs().min() > 1e-3, "the source says nothing"


def test_normal_density_is_torchs(target: Seq2SeqLM) -> None:
    z, mean, log_variance = torch.randn(3, 2, 5, 4, generator=rng())
    present = present_up_to(torch.tensor([5, 3]), 5)
    normal = torch.distributions.Normal(mean, (0.5 * log_variance).exp())
    wanted = (normal.log_prob(z) * present[:, :, None]).sum((1, 2))
    torch.testing.assert_close(log_normal_of(z, mean, log_variance, present), wanted)


def test_targets_are_filled_up_with_ends() -> None:
    whole = filled_up(batch_of(PAIRS), 4, END)
    assert whole.lengths.tolist() == [4, 4, 4]
    assert whole.targets.tolist() == [[7, 7, 8, END], [6, END, END, END], [9, 5, 30, 12]]
    assert filled_up(batch_of(PAIRS), 2, END).lengths.tolist() == [4, 2, 4]
    rows, lengths = up_to_end(torch.tensor([[5, END, 6, 7], [5, 6, 7, 8]]), torch.tensor([4, 2]), END)
    assert (rows.tolist(), lengths.tolist()) == ([[5, END, END, END], [5, 6, END, END]], [1, 2])


def test_prior_keeps_32_bit_and_its_values(target: Seq2SeqLM) -> None:
    student = make(target).to(torch.float32)
    before = {name: value.clone() for name, value in student.prior.state_dict().items()}
    student.to(torch.device("cpu"), torch.bfloat16)
    assert student.posterior.moments.weight.dtype == torch.bfloat16
    assert all(torch.equal(value, before[name]) for name, value in student.prior.state_dict().items())


# ----------------------------------------------------------------------------------------------------------- the bound


def phases(student: FlowSeqStudent, progress: float, seed: int = 0) -> tuple[Tensor, dict[str, Any]]:
    torch.manual_seed(seed)
    loss, numbers = student.objective(batch_of(PAIRS), progress, 0.0)
    return added(loss), dict(numbers)


def test_first_phase_has_no_noise_and_no_prior(target: Seq2SeqLM) -> None:
    student = make(target)
    first, again = phases(student, 0.1)[0], phases(student, 0.1, seed=9)[0]
    assert torch.equal(first, again) and "kl" not in phases(student, 0.1)[1]
    first.backward()
    assert all(parameter.grad is None for parameter in student.prior.parameters())
    assert not torch.equal(phases(student, 0.5)[0], phases(student, 0.5, seed=9)[0])


def test_weight_of_the_divergence_rises(target: Seq2SeqLM) -> None:
    student = make(target)
    (begin, none), (half, mid), (end, full) = (phases(student, progress) for progress in (0.25, 0.375, 0.9))
    assert [n["kl_weight"] for n in (none, mid, full)] == [0.0, 0.5, 1.0]
    kl = float(full["kl"])
    assert (half - begin).item() == pytest.approx(0.5 * kl) and (end - begin).item() == pytest.approx(kl)


def test_divergence_of_one_sample_is_that_of_its_densities(target: Seq2SeqLM) -> None:
    student = make(target)
    whole = filled_up(batch_of(PAIRS), student.prior.unit, END)
    memory = student.read(whole)
    mean, log_variance = student.infer(whole.targets, whole.present, memory)
    z = mean + (0.5 * log_variance).exp() * torch.randn(mean.shape, generator=rng()).double()
    wanted = log_normal_of(z, mean, log_variance, whole.present) - student.prior.log_prob(z, memory, whole.present)
    found = student.divergence(z, mean, log_variance, whole, memory)
    torch.testing.assert_close(found, wanted.sum() / whole.lengths.sum())


def test_norms_are_set_once_when_the_prior_begins_to_learn(target: Seq2SeqLM) -> None:
    student = make(target)
    norms = [module for module in student.prior.modules() if isinstance(module, ActNorm)]
    for norm in norms:
        nn.init.zeros_(norm.log_scale)
        nn.init.zeros_(norm.shift)
    phases(student, 0.1)
    assert not any(norm.log_scale.any() for norm in norms)
    phases(student, 0.3)
    assert all(norm.log_scale.any() for norm in norms)
    before = [norm.shift.clone() for norm in norms]
    phases(student, 0.3, seed=4)
    assert all(torch.equal(norm.shift, old) for norm, old in zip(norms, before, strict=True))
    fresh = make(target)  # as after a kill: values are there, no flag is
    phases(fresh, 0.3)
    assert torch.equal(fresh.prior.flow.body.maps[0].shift, make(target).prior.flow.body.maps[0].shift)


def test_padding_changes_no_loss(target: Seq2SeqLM) -> None:
    student = make(target)
    narrow, wide = (student.objective(batch_of(PAIRS, width=width), 0.1, 0.1)[0] for width in (0, 11))
    torch.testing.assert_close(narrow, wide)


# ------------------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("writer", [FlowPass(), FlowPass(lengths=3)], ids=str)
def test_row_of_a_ragged_batch_is_what_it_is_alone(target: Seq2SeqLM, writer: FlowPass) -> None:
    student = make(target)
    together = write(student, writer, SOURCES, rng())
    assert any(together.texts) and len({len(text) for text in together.texts}) > 1
    for row, source in enumerate(SOURCES):
        assert together.texts[row] == write(student, writer, [source], rng()).texts[0]


def test_first_sample_is_noise_zero_and_one_sample_is_argmax(target: Seq2SeqLM) -> None:
    student = make(target)
    memory = encoded(student, SOURCES)
    best = FlowPass()(student, memory, rng())
    several = FlowPass(lengths=2, samples=3, temperature=1.0)(student, memory, rng())
    assert several.lengths.shape == (5, 6)
    width = min(best.tokens.shape[2], several.tokens.shape[2])
    assert torch.equal(several.tokens[:, 0, :width], best.tokens[:, 0, :width])
    assert not torch.equal(several.tokens[:, 0], several.tokens[:, 1])
    single = write(student, FlowPass(1, 1, importance=4), SOURCES, rng())
    assert single.texts == write(student, FlowPass(), SOURCES, rng()).texts and single.passes == 1


def test_lengths_are_multiples_of_the_unit_best_first(target: Seq2SeqLM) -> None:
    student = make(target, steps=[1, 1, 0])
    memory = encoded(student, SOURCES)
    lengths, log_probs = student.best_lengths(memory, 3)
    assert (lengths % 4 == 0).all() and (lengths > 0).all() and (log_probs.diff(dim=1) <= 0).all()
    logits = student.lengths(memory)
    possible = [n for n in range(4, 48, 4) if abs(n - int(memory.content[0])) <= 20]
    wanted = max(possible, key=lambda n: float(logits[0, n - int(memory.content[0]) + 20]))
    assert int(lengths[0, 0]) == wanted
    with pytest.raises(ValueError, match="lengths must be at most 5, .*got 6"):
        student.best_lengths(memory, 6)


def test_importance_weights_estimate_the_likelihood(target: Seq2SeqLM) -> None:
    """Against plain sampling from the prior: log mean p(y | z, x) over z ~ p(z | x); the posterior is a wide normal."""
    student, many = make(target, latent=2), 4000
    with torch.no_grad():
        student.reader.enter.weight.mul_(0.1)
        for parameter in student.prior.parameters():  # a density that is not too far from a normal one
            parameter.mul_(0.4)
        for module in student.prior.modules():
            if isinstance(module, HeadwiseLinear):
                nn.init.orthogonal_(module.weight)
        memory, present = encoded(student, SOURCES[:1]), torch.ones(many, 2, dtype=torch.bool)
        rows = memory.repeat(many)
        z = student.prior.latents(torch.randn(many, 2, 2, generator=rng(1)).double(), rows, present)
        spread = z.flatten(0, 1)
        student.posterior.moments.weight.zero_()
        student.posterior.moments.bias.copy_(torch.cat([spread.mean(0), (1.5 * spread.var(0)).log()]))
        logits = student.logits(student.decode(z, present, rows))
        tokens = logits[:1].argmax(-1)
        said = logits.log_softmax(-1).gather(2, tokens.expand(many, -1)[:, :, None]).sum((1, 2))
        wanted = said.logsumexp(0) - math.log(many)
        found = student.importance(tokens, present[:1], memory, many, rng())
    assert said.std() > 0.05, "latents say nothing: bad example"
    assert float(found) == pytest.approx(float(wanted), abs=0.1)


def test_iwd_chooses_by_its_estimate(target: Seq2SeqLM, monkeypatch: pytest.MonkeyPatch) -> None:
    student = make(target)
    memory = encoded(student, SOURCES[:2])
    writer = FlowPass(lengths=3, importance=2)
    values = torch.tensor([0.0, 50.0, 0.0, 0.0, 0.0, 50.0]).double()
    monkeypatch.setattr(FlowSeqStudent, "importance", lambda *a: values)
    found = writer(student, memory, rng())
    assert found.scores.argmax(1).tolist() == [1, 2] and found.passes == 2
    lengths, log_probs = student.best_lengths(memory, 3)
    torch.testing.assert_close(found.scores, (values.view(2, 3) + log_probs) / lengths)


@pytest.mark.parametrize("decoding", ["argmax", "npd", "iwd"])
def test_decoder_reports_the_work_of_the_flow(target: Seq2SeqLM, tmp_path: Path, decoding: str) -> None:
    folder = save(make(target), tmp_path / "part", target)
    decoder = FlowSeq(target, Sampling(), decoding=decoding, checkpoint=folder)  # type: ignore[arg-type]
    (step,) = decoder.decode(SOURCES, 40, rng())
    facts = decoder.stats()
    assert facts.keys() >= tiny_students.HONESTY
    flow, posterior = decoder.student.prior.layers, 1 if decoding == "iwd" else 0
    assert decoder.guarantee is Guarantee.INDEPENDENT_MODEL
    assert facts["flow_layers"] == flow == 25 and step.layers == [(2 + flow + posterior) / 2] * 5
    assert step.draft_passes == (2 if decoding == "iwd" else 1) and step.target_passes == int(decoding == "npd")
    layers = step.draft_passes * (2 + flow + posterior) * 5 + step.target_passes * 2 * 5
    assert facts["decoder_layer_passes_per_token"] == pytest.approx(layers / facts["tokens"])
    assert [row[-1] for row in step.tokens] == [END] * 5 and all(END not in row[:-1] for row in step.tokens)


@pytest.mark.parametrize("family", tiny_students.FAMILIES)
def test_saved_student_writes_the_same_and_its_flow_still_inverts(family: str, tmp_path: Path) -> None:
    single = tiny_students.teacher(torch.float32, family=family)
    student = make(single)
    for value in student.state_dict().values():
        value.copy_(value.half())
    decoder = FlowSeq(single, Sampling(), checkpoint=save(student, tmp_path / "part", single))
    (step,) = decoder.decode(SOURCES, 40, rng())
    assert [row[:-1] for row in step.tokens] == write(student, FlowPass(), SOURCES, rng()).texts


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": []}, "at least one level"),
        ({"autoencoding": 0.8, "annealing": 0.5}, "autoencoding=0.8"),
        ({"latent": 3}, "latent=3"),
        ({"width": 6}, "width=6"),
        ({"steps": [1, 1, 1, 1, 1, 1]}, "multiple of 32"),
    ],
)
def test_refusals(target: Seq2SeqLM, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(target, **options)


# ------------------------------------------------------------------------------------------------------------ learning


def test_bound_rises_in_both_phases_and_the_latents_are_used() -> None:
    """Each source has two translations: a mixture of them is what a latent is there to prevent."""
    torch.manual_seed(0)
    target = tiny_students.teacher(torch.float32)
    student = make(target, latent=4, steps=[1], word_dropout=0.0)
    for module in (student.prior, student.posterior, student.reader):
        for part in module.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
    for part in student.prior.modules():
        if isinstance(part, CouplingNetwork):
            nn.init.zeros_(part.leave.weight), nn.init.zeros_(part.leave.bias)
        if isinstance(part, ActNorm):
            nn.init.zeros_(part.log_scale), nn.init.zeros_(part.shift)
    one, other = [7, 8, 9, 10], [20, 21, 22, 23]
    batch = batch_of([([5, 9, 4, 1], one), ([5, 9, 4, 1], other)] * 4)
    optimizer = torch.optim.Adam([p for p in student.parameters() if p.requires_grad], 3e-3)
    curve: list[dict[str, float]] = []
    for step in range(STEPS):
        loss, numbers = student.objective(batch, step / STEPS, 0.0)
        optimizer.zero_grad()
        added(loss).backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        curve.append({name: float(value) for name, value in numbers.items()})
    first = STEPS // 4
    assert curve[first - 1]["tokens_loss"] < 0.1 < curve[0]["tokens_loss"]
    assert curve[-1]["kl"] < 0.5 * curve[first]["kl"]
    student.eval()
    many = FlowPass(samples=64, temperature=1.0)(student, encoded(student, [torch.tensor([5, 9, 4, 1])]), rng())
    written = [
        tuple(row[:length]) for row, length in zip(many.tokens[0].tolist(), many.lengths[0].tolist(), strict=True)
    ]
    whole = sum(text in (tuple(one), tuple(other)) for text in written)
    assert whole >= 32 and {tuple(one), tuple(other)} <= set(written), "halves of translations are mixed"


STEPS = 240


def test_training_makes_a_part_that_decodes(tmp_path: Path) -> None:
    target = tiny_students.teacher(torch.float32)
    place = tiny_students.context(target, PAIRS * 20, tmp_path)
    recipe = TranslationConfig(steps=8, tokens=64, warmup=2, evaluations=2, average=1, precision="float32")
    training = FlowSeqTraining(**SMALL, data="raw", recipe=recipe)
    facts = training.fit(place)
    assert set(facts["validation_bleu"]) == {"argmax", "iwd"} and facts["pairs_left_out"] == 0
    decoder = FlowSeq(target, Sampling(), checkpoint=place.output)
    (step,) = decoder.decode(SOURCES, 40, rng())
    assert len(step.tokens) == 5 and step.draft_passes == 1 and decoder.stats()["data"] == "raw"


def test_a_part_without_its_posterior_decodes_and_refuses_iwd(tmp_path: Path) -> None:
    target = tiny_students.teacher()
    student = make(target)
    folder = save(student, tmp_path, target)
    wanted = [step.tokens for step in FlowSeq(target, Sampling(), checkpoint=folder).decode(SOURCES, 40, rng())]
    pack_file(folder / WEIGHTS, 8, None, ["posterior."])
    decoder = FlowSeq(target, Sampling(), checkpoint=folder, decoding="npd")
    assert decoder.student.posterior is None and decoder.stats()["posterior_layers"] == 1
    assert len(wanted) == len(list(decoder.decode(SOURCES, 40, rng())))
    with pytest.raises(ValueError, match="stored without it.*bench.train method=flowseq"):
        FlowSeq(target, Sampling(), checkpoint=folder, decoding="iwd")
