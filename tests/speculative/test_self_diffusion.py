"""Self-diffusion: the nodes of a pass, what becomes the next draft, a model that is trained for it, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import PegasusForConditionalGeneration

from bench.contract import checks
from methods.autoregressive import Autoregressive
from methods.base_models import bpe
from methods.base_models.self_diffusion import SelfDiffusionTeacherTraining, block_attention, read_twice
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.speculative.self_diffusion import MaskDrafter, SelfDiffusion
from tests.base_models.test_translation import BRIEF, PAIRS, SMALL, context
from tests.helpers.tiny_self_diffusion import with_masks

OPTIONS: dict[str, Any] = SMALL | {"data": "raw", "block": 3}


# ------------------------------------------------------------------------------------------------------------ decoding


def test_masks_follow_the_root_and_every_drafted_node() -> None:
    masks = MaskDrafter(2, mask=7)._masks(drafted=2, batch=1, device=torch.device("cpu"))
    assert masks.tokens.tolist() == [[7] * 6] and masks.asked == 6 and masks.levels == 4
    # columns 0 and 1 are the draft; a first mask hangs below the root (-1), 0 and 1, a second one below the first
    assert masks.parents.tolist() == [[-1, 2, 0, 4, 1, 6]]


def test_a_draft_is_what_the_masks_after_the_last_kept_node_wrote() -> None:
    target = with_masks(checks.tiny_target(), block=3, mask=5)
    decoder = SelfDiffusion(target, Sampling())
    drafter: Any = decoder.drafter
    propose, drafts = drafter.propose, []

    def noted(context: Any) -> Any:
        drafts.append(([list(row) for row in context.tokens], propose(context)))
        return drafts[-1][1]

    drafter.propose = noted
    list(zip(range(9), decoder.decode(checks.prompts(target.vocab_size, (6, 11)), 30, torch.Generator()), strict=False))
    assert drafts[0][1].sizes == [0, 0] and all(draft.sizes == [3, 3] for _, draft in drafts[1:])
    for texts, draft in drafts[1:]:
        for text, drafted in zip(texts, draft.tokens.tolist(), strict=True):
            for place, token in enumerate(drafted):  # the first mask stands for the last committed token
                read = torch.tensor([*text[:-1], *[5] * (place + 1)])
                assert checks.greedy_reference(target, read, 1) == [token]


def test_a_model_without_the_mode_and_too_long_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="trained to fill in blocks of masks.*method=self_diffusion_teacher"):
        SelfDiffusion(checks.tiny_target(), Sampling())
    target = with_masks(checks.tiny_target(), block=3)
    with pytest.raises(ValueError, match="block must be at most 3 for llama, got 4"):
        SelfDiffusion(target, Sampling(), block=4)
    with pytest.raises(ValueError, match="block must be at least 1, got 0"):
        SelfDiffusion(target, Sampling(), block=0)


# ------------------------------------------------------------------------------------------------------------ training


def test_what_texts_and_masks_see() -> None:
    """Five places, blocks of two, the first one cut: masks at 1; 2 and 3; 4."""
    seen = block_attention(5, 2, 1, torch.device("cpu"))[0, 0].int().tolist()
    text = [[1] * (place + 1) + [0] * (8 - place) for place in range(5)]
    masks = [
        [1, 0, 0, 0, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 0, 0, 1, 1, 0],
        [1, 1, 1, 1, 0, 0, 0, 0, 1],
    ]
    assert seen == text + masks


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_one_pass_reads_what_separate_passes_read(offset: int) -> None:
    """The text as the plain model reads it, and each block as a text that ends in masks."""
    maker = SelfDiffusionTeacherTraining(**OPTIONS)
    tokenizer = bpe.learn([text for pair in PAIRS for text in pair], 300, 40)
    pairs = maker._encode(tokenizer, PAIRS[:3])
    torch.manual_seed(0)
    network = maker.network(len(tokenizer)).eval()
    (texts, wanted), (masked, behind) = read_twice(network, pairs, 3, offset)
    found, blocks = list(texts), list(masked)
    assert wanted.tolist() == [token for _, target in pairs for token in target]
    assert behind.tolist() == [token for _, target in pairs for token in target[1:]]
    for source, target in pairs:
        read = [network.config.decoder_start_token_id, *target[:-1]]

        def states(tokens: list[int], source: list[int] = source) -> Any:
            ids = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([tokens])}
            return network.model(**ids).last_hidden_state[0]

        for own, state in zip(states(read), found[: len(read)], strict=True):
            torch.testing.assert_close(state, own)
        for place in range(1, len(read)):
            anchor = max(0, (place - 1 + offset) // 3 * 3 - offset)
            alone = states(read[: anchor + 1] + [2] * (place - anchor))[-1]
            torch.testing.assert_close(blocks[place - 1], alone)
        found, blocks = found[len(read) :], blocks[len(read) - 1 :]
    assert not found and not blocks


def test_the_loss_is_the_sum_of_both_modes() -> None:
    recipe = replace(BRIEF, dropout=0.0)
    maker = SelfDiffusionTeacherTraining(**OPTIONS, block_weight=0.5, recipe=recipe)
    tokenizer = bpe.learn([text for pair in PAIRS for text in pair], 300, 40)
    pairs = maker._encode(tokenizer, PAIRS[:4])
    torch.manual_seed(0)
    network = maker.network(len(tokenizer)).eval()
    torch.manual_seed(4)
    offset = int(torch.randint(3, ()))
    torch.manual_seed(4)
    parts, numbers = maker.loss(network, pairs)([0, 1, 2, 3], 0)
    assert isinstance(parts, dict)
    sides = read_twice(network, pairs, 3, offset)
    following, block = (cross_entropy(network.lm_head(s), t, label_smoothing=0.1) for s, t in sides)
    torch.testing.assert_close(parts["next"], following)
    torch.testing.assert_close(parts["block"], 0.5 * block)
    assert numbers["tokens"] == sum(len(target) for _, target in pairs)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("made")
    return folder, SelfDiffusionTeacherTraining(**OPTIONS, recipe=replace(BRIEF, steps=240)).fit(context(folder))


def test_a_trained_model_drafts_for_itself(made: tuple[Path, dict[str, Any]]) -> None:
    folder, facts = made
    network: Any = PegasusForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    assert (network.config.masked_block, network.config.masked_block_token_id) == (3, 2)
    target = Seq2SeqLM.from_hf(network)
    sources = [torch.tensor(source) for source, _ in _ids(folder, PAIRS[:6])]
    decoder, plain = SelfDiffusion(target, Sampling()), Autoregressive(target, Sampling())
    assert checks.outputs(decoder, sources, 20) == checks.outputs(plain, sources, 20)
    assert facts["tokens_per_step"] > 1.5 and facts["validation_bleu_greedy"] > 80
    assert abs(facts["validation_bleu_self_diffusion"] - facts["validation_bleu_greedy"]) < 0.01


def _ids(folder: Path, pairs: list[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [(tokenizer(source)["input_ids"], tokenizer(target)["input_ids"]) for source, target in pairs]
