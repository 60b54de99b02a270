"""Translation by block diffusion: what a training pass reads, its loss, and a model that is trained and translates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from bench.models.hub import HubModel
from methods.base_models import bpe
from methods.base_models.masked_diffusion import (
    MaskedDiffusionTraining,
    block_attention,
    blocks_of,
    random_masks,
    read_masked,
)
from methods.base_models.translation import TeacherTraining
from methods.decoder import generate
from methods.engine.masked_lm import MaskedLM
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.non_autoregressive.diffusion import Diffusion
from methods.training.interface import TrainingContext
from methods.training.translation import NONE
from tests.base_models.test_translation import BRIEF, PAIRS, SMALL, context

OPTIONS: dict[str, Any] = SMALL | {"layers": 2, "block": 3}
CACHES: tuple[Any, ...] = ("exact", "none")
MASK, CPU = 2, torch.device("cpu")


def made_small(dropout: float = 0.0) -> tuple[MaskedDiffusionTraining, Any, list[Any]]:
    maker = MaskedDiffusionTraining(**OPTIONS, recipe=replace(BRIEF, dropout=dropout, label_smoothing=0.0))
    tokenizer = bpe.learn([text for pair in PAIRS for text in pair], 300, 40)
    torch.manual_seed(0)
    return maker, maker.network(len(tokenizer)).eval(), maker._encode(tokenizer, PAIRS[:5])


def test_what_source_text_and_masks_see() -> None:
    """Three places of source, in blocks of two counted back from its end; a text of two blocks; another shorter row."""
    sources, targets = torch.tensor([[1, 1, 1], [0, 1, 1]]).bool().flip(1), torch.tensor([[1] * 4, [1, 1, 0, 0]]).bool()
    seen = block_attention(sources, targets, 2).int()[:, 0].tolist()
    assert seen[0] == [
        [1, 0, 0, *[0] * 8],
        [1, 1, 1, *[0] * 8],
        [1, 1, 1, *[0] * 8],
        *2 * [[1, 1, 1, 1, 1, 0, 0, *[0] * 4]],
        *2 * [[1, 1, 1, 1, 1, 1, 1, *[0] * 4]],
        *2 * [[1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0]],
        *2 * [[1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1]],
    ]
    assert seen[1][0] == seen[1][1] == [1, 1, *[0] * 9] and seen[1][3] == [1, 1, 0, 1, 1, *[0] * 6]
    assert seen[1][2][2] == seen[1][10][10] == 1  # no token: it sees itself, and nobody sees it
    assert all(row[place] == 0 for n, row in enumerate(seen[1]) for place in (2, 5, 6, 9, 10) if n != place)


def test_one_pass_reads_what_decoding_reads() -> None:
    """The logits at the masks of every block are those of the engine's pass over text before it and the block."""
    maker, network, pairs = made_small()
    sources, targets = blocks_of(pairs, maker.block, CPU)
    torch.manual_seed(5)
    hidden, _ = random_masks(targets, maker.block)
    with torch.no_grad():
        found = list(network.lm_head(read_masked(network, sources, targets, hidden, maker.block)))
    target = MaskedLM.from_hf(network, linear="plain", keep_hf=True)
    assert isinstance(target, MaskedLM)
    for row, (source, text) in enumerate(pairs):
        whole = text + [1] * (-len(text) % maker.block)
        for start in range(0, len(whole), maker.block):
            masked = hidden[row, start : start + maker.block].tolist()
            block = [MASK if m else token for m, token in zip(masked, whole[start:], strict=False)]
            read = torch.tensor([source + whole[:start] + block])
            places = [len(source) + start + place for place, m in enumerate(masked) if m]
            cache = target.new_cache(1, read.shape[1])
            ours = target.denoise(read, cache, [read.shape[1]], [len(source)], torch.tensor([places]))[0]
            for logits in ours:
                expected = found.pop(0)
                expected[MASK] = -torch.inf
                torch.testing.assert_close(logits, expected)
    assert not found


def test_a_training_begins_with_the_embedding_of_a_teacher_of_its_width() -> None:
    maker, network, _ = made_small()
    tokenizer = bpe.learn([text for pair in PAIRS for text in pair], 300, 40)
    for width, same in ((32, True), (64, False)):
        hf = TeacherTraining(**SMALL | {"width": width}).network(len(tokenizer))
        teacher = Seq2SeqLM.from_hf(hf, keep_hf=True)
        given = TrainingContext(output=Path(), shared_cache=Path(), model=teacher, tokenizer=tokenizer)
        maker.initialise(network, tokenizer, given)
        ours, theirs = (each.get_input_embeddings().weight for each in (network, hf))
        assert (ours.shape == theirs.shape and ours.equal(theirs)) is same


def test_masks_and_their_weights() -> None:
    targets = torch.full((4000, 6), 7)
    targets[:, 3:][::2] = NONE
    torch.manual_seed(0)
    hidden, weights = random_masks(targets, 3)
    count = hidden.view(4000, 2, 3).sum(2)
    assert count[:, 0].unique().tolist() == [1, 2, 3] and count[::2, 1].unique().tolist() == [0]
    assert (weights.view(4000, 2, 3)[:, 0] * count[:, :1] == 3).all()
    shares = torch.bincount(count[:, 0])[1:] / 4000
    assert (shares - 1 / 3).abs().max() < 0.03
    # on average every place counts once, whatever the number of masks
    assert ((hidden * weights).view(4000, 6)[:, :3].mean(0) - 1).abs().max() < 0.06


def test_the_loss_is_the_weighted_sum_over_masks_per_token() -> None:
    maker, network, pairs = made_small()
    torch.manual_seed(3)
    found, numbers = maker.loss(network, pairs)([0, 1, 2], 0)
    sources, targets = blocks_of(pairs[:3], 3, CPU)
    torch.manual_seed(3)
    hidden, weights = random_masks(targets, 3)
    logits, total, place = network.lm_head(read_masked(network, sources, targets, hidden, 3)), 0.0, 0
    for row, column in hidden.nonzero().tolist():
        total += weights[row, column] * cross_entropy(logits[place][None], targets[row, column][None])
        place += 1
    tokens = sum(len(text) + -len(text) % 3 for _, text in pairs[:3])
    assert place == len(logits) and numbers["tokens"] == tokens
    torch.testing.assert_close(found, total / tokens)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("made")
    recipe = replace(BRIEF, steps=480, tokens=300, dropout=0.0, label_smoothing=0.0)
    return folder, MaskedDiffusionTraining(**OPTIONS, recipe=recipe).fit(context(folder))


def test_a_model_learns_to_translate_in_blocks(made: tuple[Path, dict[str, Any]]) -> None:
    folder, facts = made
    curve = [point["bleu"] for point in facts["curve"]]
    assert curve[-1] > 2 * curve[0] and facts["validation_bleu_greedy"] > 40
    assert facts["memorised"] is False and facts["validation_bleu_one_token_per_pass"] > 40
    read = HubModel(str(folder)).read(torch.float32, folder)
    target = MaskedLM.from_hf(read.model, linear="plain")
    assert isinstance(target, MaskedLM) and target.denoising.block_causal and target.denoising.block_size == 3
    sources = [torch.tensor(read.tokenizer(source)["input_ids"]) for source, _ in PAIRS[:6]]
    texts = [generate(Diffusion(target, Sampling(), cache=cache), sources, 30, target.eos_ids) for cache in CACHES]
    assert texts[0] == texts[1] and all(text[-1] == 1 for text in texts[0])


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="block must be at least 1, got 0. Set train.block"):
        MaskedDiffusionTraining(block=0)
