"""Small trained heads for small targets: what they draft is right now and then, without a training run of minutes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.speculative.heads.blockwise import Heads
from methods.speculative.heads.blockwise_training import BlockwiseLearner
from methods.training.features import Batch, states
from methods.training.head_trainer import Learner


def batch_of(
    target: CausalLM, texts: Sequence[list[int]], prompts: Sequence[int], hidden_layers: Sequence[int] = ()
) -> Batch:
    """Texts as a head learns them: ids and the target's states over them, in 32 bit."""
    rows = [torch.tensor(text, device=target.device) for text in texts]
    hidden, seen = states(target, rows, hidden_layers)
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    kept = {tap: state.float().clone() for tap, state in seen.items()}
    return Batch(tokens, hidden.float().clone(), kept, list(prompts), [len(text) for text in texts])


def learn_by_heart(learner: Learner, batch: Batch, steps: int = 60, rate: float = 1e-2) -> list[float]:
    """Adam over one batch; the losses."""
    optimizer = torch.optim.Adam(learner.parameters(), rate)
    losses = []
    for _ in range(steps):
        loss, _ = learner.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def blockwise_heads(target: CausalLM, texts: Sequence[list[int]], k: int = 4, vocabulary: int | None = None) -> Heads:
    """Heads that know some texts by heart; without texts, random ones."""
    tokens = torch.tensor([token for text in texts for token in text])
    size = target.vocab_size
    chosen = DraftVocabulary.frequent(tokens, vocabulary, size) if vocabulary else DraftVocabulary.all(size)
    torch.manual_seed(0)
    learner = BlockwiseLearner(target, chosen.to(target.device), k, 64, "all")
    if texts:
        learn_by_heart(learner, batch_of(target, texts, [1] * len(texts)))
    else:
        torch.nn.init.normal_(learner.second.weight)
    return learner.heads()
