"""Translation models that are trained with the table they are decoded with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PegasusForConditionalGeneration

from methods.base_models.hash_teacher import HashTeacherTraining
from methods.decoder import generate
from methods.early_exit.hash_ee import HashEE
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.training.layer_losses import frozen_from
from tests.base_models.test_translation import BRIEF, PAIRS, SMALL, context

OPTIONS: dict[str, Any] = SMALL | {"layers": (1, 3), "data": "raw", "buckets": 3}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("made")
    return folder, HashTeacherTraining(**OPTIONS, recipe=BRIEF).fit(context(folder))


def test_a_model_learns_to_translate_with_its_table(made: tuple[Path, dict[str, Any]]) -> None:
    folder, facts = made
    assert facts["validation_bleu_greedy"] > 70 and "validation_bleu_beam5" not in facts
    network: Any = PegasusForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    decoder = HashEE(Seq2SeqLM.from_hf(network), Sampling(), head="lens", checkpoint=folder)
    assert decoder.checksum == facts["table_sha256"]
    assert set(decoder.table.depths.tolist()) == {1, 2, 3} and decoder.table.depths[0] == 3  # the start


def test_training_and_decoding_compute_the_same(made: tuple[Path, dict[str, Any]]) -> None:
    """Every token of a decoded text is the likeliest one of the training's own pass over it."""
    folder, _ = made
    network: Any = PegasusForConditionalGeneration.from_pretrained(folder, dtype=torch.float64).eval()
    target = Seq2SeqLM.from_hf(network, keep_hf=True)
    decoder = HashEE(target, Sampling(), head="lens", checkpoint=folder)
    depths = torch.from_numpy(decoder.table.depths.astype("int64"))
    sources = [
        torch.tensor(ids) for ids in AutoTokenizer.from_pretrained(folder)([s for s, _ in PAIRS[:5]])["input_ids"]
    ]
    for source, text in zip(sources, generate(decoder, sources, 20, target.eos_ids), strict=True):
        read = torch.tensor([[0, *text[:-1]]])
        with torch.no_grad(), frozen_from(network.model.decoder.layers, depths[read]):
            logits = network(input_ids=source[None], decoder_input_ids=read).logits[0]
        logits[:, [0, 2]] = -torch.inf  # padding and mask are never written
        assert logits.argmax(-1).tolist() == text
        assert len(set(depths[read[0]].tolist())) > 1


def test_a_model_without_embeddings_clusters_none() -> None:
    with pytest.raises(ValueError, match="kind must be random, .*got clustered and mass"):
        HashTeacherTraining(**OPTIONS, kind="clustered")
    with pytest.raises(ValueError, match="buckets must be at least 1, got 0"):
        HashTeacherTraining(**OPTIONS | {"buckets": 0})
