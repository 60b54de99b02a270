"""Exits that learn the whole model's distribution: maps that go on from the closed form by gradient descent.

The loss is the KL divergence of an exit's distribution from the model's, meant over places and exits (Belrose et al.
2023, arXiv 2303.08112), over the tokens that the model writes most often: the output matrix costs most of a step. A
token outside is left to what the closed form makes of it; exits are judged over the whole vocabulary.

Exits have no parameters in common, so each is trained as if it were alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from methods.early_exit.affine_maps import Maps, Places
from methods.early_exit.training_states import DraftVocabulary, Recipe
from methods.training.interface import Workshop
from methods.training.trainer import Loop, autocast

_WATCHED = 1024  # places at which the loss is followed


def distil(
    workshop: Workshop, maps: Maps, train: Places, held_out: Places, recipe: Recipe, vocabulary: int
) -> tuple[Maps, dict[str, Any]]:
    """Train maps to the end of a recipe, going on from a checkpoint in the workshop's folder.

    Args:
        maps: where to begin, by depth.
        train, held_out: states to learn from, and to follow the loss at.
        recipe: ``batch_size`` counts places.
        vocabulary: tokens the distributions are compared over, the most frequent ones.

    Returns:
        The maps, and facts for the card.
    """
    course = _Course(workshop, maps, train, held_out.first(_WATCHED), recipe, vocabulary)
    course.run()
    return course.maps, {"steps": course.step, "vocabulary": len(course.ids), "curve": course.curve}


class _Course(Loop):
    def __init__(
        self, workshop: Workshop, maps: Maps, train: Places, watched: Places, recipe: Recipe, vocabulary: int
    ) -> None:
        self.target, self.train, self.watched, self.recipe = workshop.target, train, watched, recipe
        self.ids = DraftVocabulary.frequent(train.tokens, vocabulary, self.target.vocab_size).ids
        weight, bias = self.target.output_rows(self.ids)
        self.output, self.output_bias = weight.float(), None if bias is None else bias.float()
        learnt = {}
        for depth, (weight, bias) in maps.items():
            learnt[f"{depth}.weight"] = nn.Parameter(weight.float())
            learnt[f"{depth}.bias"] = nn.Parameter(bias.float())
        optimizer = torch.optim.AdamW(
            learnt.values(), recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay
        )
        about = {"exits": f"{list(maps)} over {len(train)} places"}
        super().__init__(learnt, optimizer, recipe, workshop, about)

    @property
    def maps(self) -> Maps:
        """As they are now."""
        depths = self.train.exits
        return {d: (self.learnt[f"{d}.weight"].detach(), self.learnt[f"{d}.bias"].detach()) for d in depths}

    def loss(self) -> tuple[Tensor, Mapping[str, Tensor | float | int]]:
        """Sum over the exits, so that the rate of each is as if it were alone."""
        rows = torch.randint(len(self.train), (self.recipe.batch_size,)).to(self.target.device)
        each = self._divergences(self.train, rows)
        return torch.stack(list(each.values())).sum(), {f"kl_{depth}": kl.detach() for depth, kl in each.items()}

    @torch.no_grad()
    def evaluate(self) -> None:
        each = self._divergences(self.watched, torch.arange(len(self.watched), device=self.target.device))
        self.curve.append({"step": self.step} | {f"kl_{depth}": round(float(kl), 4) for depth, kl in each.items()})
        self.place.log({"step": self.step} | {f"held_out/kl_{depth}": float(kl) for depth, kl in each.items()})

    def _divergences(self, places: Places, rows: Int[Tensor, "n"]) -> dict[int, Float[Tensor, ""]]:
        with autocast(self.recipe.precision, self.target.device):
            with torch.no_grad():
                wanted = self._log_probs(places.final[rows].float())
            found = {}
            for depth, states in places.exits.items():
                with torch.no_grad():
                    normed = self.target.norm(states[rows]).float()
                ready = F.linear(normed, self.learnt[f"{depth}.weight"], self.learnt[f"{depth}.bias"])
                log_probs = self._log_probs(ready)
                found[depth] = F.kl_div(log_probs, wanted, reduction="batchmean", log_target=True)
        return found

    def _log_probs(self, ready: Float[Tensor, "n D"]) -> Float[Tensor, "n v"]:
        return F.linear(ready, self.output, self.output_bias).float().log_softmax(-1)
