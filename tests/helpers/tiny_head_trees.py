"""Small heads of Medusa and Hydra for small targets, and a target whose every token can be told from any before it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.engine.sampling import Sampling
from methods.speculative.heads.candidate_tree import RANKS
from methods.speculative.heads.hydra import HydraHeads
from methods.speculative.heads.hydra_training import HydraLearner
from methods.speculative.heads.medusa import Medusa
from methods.speculative.heads.medusa_training import MedusaLearner
from tests.helpers.tiny_heads import batch_of, learn_by_heart

FACTS = {"accuracies": [[0.5]]}


def counting_target(vocab_size: int = 29) -> CausalLM:
    """Writes the next number, modulo the size of its vocabulary; its states tell which one it read. 64 bit."""
    from bench.contract import checks

    model = checks.tiny_target(vocab_size).hf
    assert model is not None
    directions, _ = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).double())
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(directions[:vocab_size])
        model.lm_head.weight.copy_(directions[:vocab_size].roll(1, 0))
    return CausalLM.from_hf(model, keep_hf=True)


Text = tuple[int, ...]
Kind = type[MedusaLearner] | type[HydraLearner]


@cache
def heads_of(
    kind: Kind, target: CausalLM, texts: tuple[Text, ...], heads: int = 3, blocks: int = 2, **options: Any
) -> Any:
    """Heads that know some texts by heart; without texts random ones, measured at random."""
    torch.manual_seed(0)
    learner = kind(target, DraftVocabulary.all(target.vocab_size, target.device), heads, blocks, **options)
    if texts:
        batch = batch_of(target, [list(text) for text in texts], [1] * len(texts))
        learn_by_heart(learner, batch)
        return learner.trained(learner.ranks(batch)[0])
    for parameter in learner.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return learner.trained(torch.randint(0, min(RANKS, target.vocab_size), (64, heads)))


def medusa(target: CausalLM, sampling: Sampling, texts: Sequence[Sequence[int]] = (), **options: Any) -> Medusa:
    """The method with such heads."""
    with tempfile.TemporaryDirectory() as folder:
        heads_of(MedusaLearner, target, tuple(map(tuple, texts))).save(Path(folder), target, FACTS)
        return Medusa(target, sampling, checkpoint=Path(folder), **options)


def hydra(
    target: CausalLM,
    sampling: Sampling,
    texts: Sequence[Sequence[int]] = (),
    prefix: float | None = None,
    **options: Any,
) -> HydraHeads:
    """The method with such heads, with a prefix layer where ``prefix`` says how long its states are."""
    with tempfile.TemporaryDirectory() as folder:
        heads_of(HydraLearner, target, tuple(map(tuple, texts)), prefix=prefix).save(Path(folder), target, FACTS)
        return HydraHeads(target, sampling, checkpoint=Path(folder), **options)
