"""Training of the heads of method=hydra_heads on the target's own answers.

Ankner et al. 2024 (Hydra), arXiv 2402.05109, sec. 3 and 4.1. As Medusa's heads, but head i reads the target's last
state and the embeddings of the root and of the i tokens after it; in training these are the answer's own.
The loss is the paper's teacher loss: cross-entropy with the target's distribution at the place of the label, here over
the draft vocabulary. ``labels=hard`` learns the answers themselves; ``loss`` and ``top_k`` are those of Medusa.

A head reads a normed state and embeddings, which are far smaller in most models. AdamW moves all weights by equal
steps, so the embeddings' part would be learnt late. They are scaled to the states' root mean square in training, and
the factor goes into the saved weights.

With ``prefix`` the layer of Hydra++ is trained along (``hydra_prefix.py``), without the noise that the authors add to
the embeddings; it begins as the identity, theirs at random.

Command: ``python -m bench train method=hydra_heads model=smollm2``
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.speculative.heads.hydra import Block, Heads
from methods.speculative.heads.hydra_prefix import PrefixModule
from methods.speculative.heads.medusa_training import DraftStates, HeadsLearner, HeadsTraining, Labels
from methods.training.features import Batch, Features
from methods.training.losses import CROSS_ENTROPY, DraftLoss

_SCALE_ROWS = 8  # dialogues of which the scale of the states is taken


class HydraHead(nn.Module):
    """One head: a block that takes (i + 2) D numbers to D, and further residual ones.

    It starts as the target's own head: the first residual connection passes the state on, and all else is zero.
    """

    def __init__(self, inputs: int, width: int, blocks: int, device: torch.device) -> None:
        super().__init__()
        self.linears = nn.ModuleList(
            nn.Linear(inputs * width if block == 0 else width, width, device=device) for block in range(blocks)
        )
        self.residual = nn.Linear(inputs * width, width, device=device)
        for layer in (*self._layers(), self.residual):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        with torch.no_grad():
            self.residual.weight[:, :width] = torch.eye(width, device=device)

    def forward(self, inputs: Float[Tensor, "n I"]) -> Float[Tensor, "n D"]:
        state = self.residual(inputs) + F.silu(self.linears[0](inputs))
        for layer in self.linears[1:]:
            state = state + F.silu(layer(state))
        return state

    def _layers(self) -> list[nn.Linear]:
        return [layer for layer in self.linears if isinstance(layer, nn.Linear)]

    def trained(self, scale: float) -> list[Block]:
        """Its blocks, for embeddings as the target has them."""
        width = self.residual.out_features
        first, *others = ((layer.weight.detach(), layer.bias.detach()) for layer in self._layers())
        residual = _scaled(self.residual.weight.detach(), width, scale), self.residual.bias.detach()
        return [Block(_scaled(first[0], width, scale), first[1], *residual), *(Block(*other) for other in others)]


class HydraLearner(HeadsLearner):
    """Heads of which each reads the tokens before the one it proposes.

    Args:
        target, vocabulary, heads, labels, decay, draft_loss: see ``HeadsLearner``; the target's embedding is read too.
        blocks: layers of each head.
        scale: factor on the embeddings in training.
        prefix: the root mean square of the states that the prefix layer of Hydra++ begins with; None: no such layer.
    """

    def __init__(
        self,
        target: CausalLM,
        vocabulary: DraftVocabulary,
        heads: int,
        blocks: int,
        labels: Labels = "soft",
        decay: float = 1.0,
        scale: float = 1.0,
        draft_loss: DraftLoss = CROSS_ENTROPY,
        prefix: float | None = None,
    ) -> None:
        super().__init__(target, vocabulary, heads, labels, decay, draft_loss)
        self._embed, self.scale = target.embed, scale
        width = target.hidden_size
        self.layers = nn.ModuleList(HydraHead(head + 2, width, blocks, target.device) for head in range(heads))

        self.prefix = None if prefix is None else PrefixModule(target, prefix)

    def places(self, batch: Batch) -> DraftStates:
        """See ``HeadsLearner``."""
        return DraftStates.of(batch, self.heads, None if self.prefix is None else self.prefix(batch.hidden))

    def states(self, places: DraftStates) -> Iterator[Float[Tensor, "n D"]]:
        """From the state and the tokens up to the one before the label."""
        embedded = self._embed(places.tokens[:, : self.heads]).to(places.hidden.dtype) * self.scale
        inputs = torch.cat([places.hidden[:, None], embedded], 1).flatten(1)
        width = places.hidden.shape[1]
        for head, layer in enumerate(self.layers):
            yield layer(inputs[:, : (head + 2) * width])

    def trained(self, ranks: Int[Tensor, "N P"]) -> Heads:
        """The current heads."""
        blocks = [layer.trained(self.scale) for layer in self.layers if isinstance(layer, HydraHead)]
        return Heads(blocks, self.vocabulary, None, ranks, None if self.prefix is None else self.prefix.trained())


@dataclass(kw_only=True)
class HydraTraining(HeadsTraining):
    """Trains the heads of Hydra, of which head i has 2 (i + 2) D^2 weights and more.

    Args:
        prefix: train the decoder layer before the heads too, which makes them Hydra++.
        heads, blocks, labels, decay, loss, top_k, top_k_weight: see ``HeadsTraining``.
        vocabulary, answers, features, recipe: see ``HeadTraining``.
    """

    description = "heads that each propose a token from those before it, and the tree that suits them"
    paper_labels = "soft"

    prefix: bool = False

    def learner(self, target: CausalLM, vocabulary: DraftVocabulary, found: Features) -> HydraLearner:
        states = state_scale(found)
        scale = states / max(_rms(target.embed(vocabulary.ids)), 1e-6)
        labels, prefix = self.labels or self.paper_labels, states if self.prefix else None
        return HydraLearner(
            target, vocabulary, self.heads, self.blocks, labels, self.decay, scale, self.draft_loss, prefix
        )


def state_scale(found: Features) -> float:
    """Root mean square of the target's states."""
    batch = found.batch(list(found.train or found.held_out)[:_SCALE_ROWS])
    return _rms(batch.hidden[batch.present])


def _rms(values: Float[Tensor, "n D"]) -> float:
    return float(values.float().pow(2).mean().sqrt())


def _scaled(weight: Float[Tensor, "D I"], width: int, scale: float) -> Float[Tensor, "D I"]:
    """A weight that reads embeddings as they are instead of ``scale`` times them."""
    return torch.cat([weight[:, :width], weight[:, width:] * scale], 1)
