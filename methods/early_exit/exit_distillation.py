"""Distilled exits: maps trained by gradient descent, starting at the closed form.

The loss is the KL divergence of an exit's distribution from the model's, averaged over places and summed over exits
(Belrose et al. 2023, arXiv 2303.08112), over the model's most frequent tokens: the output matrix is most of the cost of
a step. For other tokens the closed form decides; exits are judged over the whole vocabulary.

Exits have no parameters in common, so each is trained as if it were alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from methods.early_exit.affine_maps import Maps, Places
from methods.engine.causal_lm import CausalLM
from methods.engine.draft_vocabulary import DraftVocabulary
from methods.training.interface import TrainingContext
from methods.training.trainer import Loss, Point, Trainer, TrainingConfig, autocast

_WATCHED = 1024  # places at which the held-out loss is measured


class TrainedMaps(nn.Module):
    """Maps in training.

    Args:
        target: the model whose distribution is learnt.
        maps: where to start.
        ids: tokens that the distributions are compared over.
    """

    def __init__(self, target: CausalLM, maps: Maps, ids: Int[Tensor, "v"]) -> None:
        super().__init__()
        self.target, self.ids = [target], ids  # in a list: its parameters are not trained
        weight, bias = target.output_rows(ids)
        self.output, self.output_bias = weight.float(), None if bias is None else bias.float()
        self.affine = nn.ParameterDict()
        for depth, (weight, bias) in maps.items():
            self.affine[f"weight_{depth}"], self.affine[f"bias_{depth}"] = weight.float(), bias.float()
        self.depths = tuple(maps)

    @property
    def maps(self) -> Maps:
        """The current maps."""
        return {d: (self.affine[f"weight_{d}"].detach(), self.affine[f"bias_{d}"].detach()) for d in self.depths}

    def divergences(self, places: Places, rows: Int[Tensor, "n"]) -> dict[int, Float[Tensor, ""]]:
        """By depth, the KL divergence at some places."""
        with torch.no_grad():
            wanted = self._log_probs(places.final[rows].float())
        found = {}
        for depth, states in places.exits.items():
            with torch.no_grad():
                normed = self.target[0].norm(states[rows]).float()
            ready = F.linear(normed, self.affine[f"weight_{depth}"], self.affine[f"bias_{depth}"])
            found[depth] = F.kl_div(self._log_probs(ready), wanted, reduction="batchmean", log_target=True)
        return found

    def _log_probs(self, ready: Float[Tensor, "n D"]) -> Float[Tensor, "n v"]:
        return F.linear(ready, self.output, self.output_bias).float().log_softmax(-1)


def distil(
    context: TrainingContext, maps: Maps, train: Places, held_out: Places, config: TrainingConfig, vocabulary: int
) -> tuple[Maps, dict[str, Any]]:
    """Train maps to the last step.

    Args:
        maps: where to start, by depth.
        train, held_out: states to learn from, and to measure the loss at.
        config: ``batch_size`` counts places.
        vocabulary: most tokens that the distributions are compared over.

    Returns:
        The maps, and facts for the card.
    """
    target, watched = context.target, held_out.first(_WATCHED)
    trained = TrainedMaps(target, maps, DraftVocabulary.frequent(train.tokens, vocabulary, target.vocab_size).ids)
    trainer = Trainer(config, trained, context, f"{list(maps)} over {len(train)} places")

    def batch(step: int) -> Int[Tensor, "n"]:
        return torch.randint(len(train), (config.batch_size,)).to(target.device)

    def loss(rows: Int[Tensor, "n"], step: int) -> Loss:
        """The sum over the exits, so that the learning rate of each is as if it were alone."""
        each = trained.divergences(train, rows)
        return torch.stack(list(each.values())).sum(), {f"kl_{depth}": kl.detach() for depth, kl in each.items()}

    def evaluate() -> Point:
        with autocast(config.precision, target.device):
            each = trained.divergences(watched, torch.arange(len(watched), device=target.device))
        numbers = {f"kl_{depth}": float(kl) for depth, kl in each.items()}
        return (
            {name: round(kl, 4) for name, kl in numbers.items()},
            {f"held_out/{name}": kl for name, kl in numbers.items()},
        )

    trainer.run(loss, batch, evaluate)
    return trained.maps, {"steps": trainer.step, "vocabulary": len(trained.ids), "curve": trainer.curve}
