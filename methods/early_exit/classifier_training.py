"""The exit classifier of ``calm``: one linear classifier for all exits predicts whether an exit has the model's token.

Schuster et al. 2022, arXiv 2207.07061, sec. 3.4: the model is frozen, the label of an exit is whether its most likely
token is that of the whole model, and the classifier has one weight per dimension of a state. Two losses:

    independent   mean of the binary cross-entropies of all exits. As in the published code (not in the paper) the two
                  classes of an exit are weighted by the share of the other one (``balance``)
    geometric     cross-entropy of the first right exit under p_i = m_i prod_{j<i} (1 - m_j), with m = 1 for the whole
                  model (Elbayad et al. 2020, arXiv 1910.10073). It is worse in the paper: F1 of "do not exit" on CNN/DM
                  at layers 1, 4 and 7 of 8 is .59, .35, .24, against .62, .49, .37

Both are losses of a generalised linear model over fixed states: L-BFGS takes seconds and needs no learning rate. Over a
model that was not trained to exit, the classifier reads the output of the maps (``exit_training.py``).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from methods.early_exit.affine_maps import Places, judge
from methods.early_exit.exits import Reader
from methods.engine.causal_lm import CausalLM

Loss = Literal["independent", "geometric"]
Weights = tuple[Float[Tensor, "D"], Float[Tensor, ""]]

_STEPS = 200
_DECAY = 1e-4  # of squared weights, for states whose dimensions have variance 1


def fit_classifier(
    states: Float[Tensor, "E N D"], right: Bool[Tensor, "E N"], loss: Loss, balance: bool = True
) -> Weights:
    """Weight and bias that minimise a loss over states at E exits, in the order of their depth."""
    middle, scale = states.mean((0, 1)), states.std((0, 1)).clamp(min=1e-6)
    x = (states - middle) / scale
    weight = torch.zeros(states.shape[-1], dtype=states.dtype, device=states.device, requires_grad=True)
    bias = torch.zeros((), dtype=states.dtype, device=states.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        scores = x @ weight + bias
        value = independent(scores, right, balance) if loss == "independent" else geometric(scores, right)
        value = value + _DECAY * weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(closure)
    plain = weight.detach() / scale
    return plain, bias.detach() - plain @ middle


def independent(scores: Float[Tensor, "E N"], right: Bool[Tensor, "E N"], balance: bool) -> Float[Tensor, ""]:
    """Mean over the exits of the binary cross-entropy; ``balance`` weighs a class by the share of the other one."""
    labels = right.to(scores.dtype)
    losses = F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
    if balance:
        share = labels.mean(1, keepdim=True)
        losses = losses * torch.where(right, 1 - share, share)
    return losses.mean()


def geometric(scores: Float[Tensor, "E N"], right: Bool[Tensor, "E N"]) -> Float[Tensor, ""]:
    """-log p of the first right exit, p_i = m_i prod_{j<i} (1 - m_j); where none is right, of the model (m = 1)."""
    stays = F.logsigmoid(-scores).cumsum(0)
    before = torch.cat([torch.zeros_like(stays[:1]), stays])  # log of the product before each exit, and before the end
    log_p = before + torch.cat([F.logsigmoid(scores), torch.zeros_like(scores[:1])])
    first = torch.cat([right, torch.ones_like(right[:1])]).int().argmax(0)
    return -log_p.gather(0, first[None]).mean()


@torch.inference_mode()
def labelled(target: CausalLM, reader: Reader, places: Places) -> tuple[Float[Tensor, "E N D"], Bool[Tensor, "E N"]]:
    """What the classifier reads at every exit, and whether the exit has the whole model's token."""
    seen = judge(target, {"": reader}, places)[""]
    states = [reader.read(depth, states).float() for depth, states in places.exits.items()]
    return torch.stack(states), torch.stack([agrees for agrees, _ in seen.values()])


def confidences(states: Float[Tensor, "E N D"], classifier: Weights) -> Float[Tensor, "E N"]:
    """Probability that the exit is right."""
    return torch.sigmoid(states @ classifier[0] + classifier[1])
