"""Exits for a model that was not trained to exit: an affine map behind each, in closed form.

A map takes the state behind an exit, normed by the model's final norm, to the normed state behind the whole model,
which the output matrix then multiplies: ridge regression over the tokens of a corpus's answers, as the model itself
reads them (Belrose et al. 2023, arXiv 2303.08112, train such maps by gradient descent on the KL divergence; Yom Din et
al. 2023, arXiv 2303.09435, fit linear ones in closed form). It takes seconds beside the forward passes, and the model
stays as it is.

Measured on SmolLM2-135M, agreement with the whole model by lens and by map: 10 and 24 % at layer 15, 36 and 59 % at
layer 24, 60 and 81 % at layer 29 of 30. Gradient training adds 2 to 6 points; what is missing is a model trained to
exit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from methods.decoder import Example, Workshop
from methods.early_exit.confidence import gap
from methods.early_exit.exits import Exits, Lens, Reader, Translated, default_depths, require_depths
from methods.engine.lm import CausalLM
from methods.engine.sampling import argmax

_HELD_OUT = 8  # every eighth dialogue
_ROWS = 1024  # judged at once
_PRECISION = 0.98  # at which the coverage of an exit is reported


@dataclass(frozen=True)
class Places:
    """States of the target at the tokens of answers.

    Attributes:
        exits: by depth, the raw state behind it.
        final: behind the whole model and its norm.
    """

    exits: dict[int, Float[Tensor, "N D"]]
    final: Float[Tensor, "N D"]

    def __len__(self) -> int:
        return len(self.final)


class TranslatorFit:
    """Fits the maps.

    Args:
        exits: depths, in layers run; None: every fourth from the middle of the model on.
        ridge: penalty on the map, as a share of the mean variance of a state.
        tokens: of answers to fit to; an eighth as many are held out.

    Raises:
        ValueError: a number out of range.
    """

    prepares: ClassVar[str] = "affine maps that make the states behind earlier layers readable"
    takes: ClassVar[str] = "some minutes on two CPU cores for smollm2, most of them its forward passes"

    def __init__(self, exits: Sequence[int] | None = None, ridge: float = 1e-3, tokens: int = 16384) -> None:
        if ridge <= 0 or tokens < 1:
            raise ValueError(f"ridge={ridge}, tokens={tokens} came; a ridge above 0 and at least 1 token are allowed.")
        self.exits, self.ridge, self.tokens = exits, ridge, tokens

    def fit(self, workshop: Workshop) -> dict[str, Any]:
        """See ``methods.decoder.Trainable``."""
        target = workshop.target
        depths = chosen_depths(self.exits, target)
        train, held_out = gather(workshop, depths, self.tokens)
        exits = Exits(depths, fit_maps(target, train, self.ridge))
        facts = {"tokens": len(train), "ridge": self.ridge} | compare(target, exits, held_out)
        Exits(depths, exits.translators, facts=facts).save(workshop.folder, target)
        return facts


def chosen_depths(exits: Sequence[int] | None, target: CausalLM) -> tuple[int, ...]:
    """The depths asked for, or every fourth from the middle of the model on.

    Raises:
        ValueError: depths that the model does not have.
    """
    depths = default_depths(target) if exits is None else tuple(exits)
    require_depths(depths, target, Lens(target), "train.exits")
    return depths


@torch.inference_mode()
def gather(workshop: Workshop, depths: Sequence[int], tokens: int) -> tuple[Places, Places]:
    """States over answers of the corpus, in an order that the seed decides: to fit to, and held out.

    Raises:
        ValueError: the corpus has no answer for either.
    """
    kept: tuple[list[dict[int, Tensor]], list[dict[int, Tensor]]] = ([], [])
    wanted, counts = (tokens, -(-tokens // _HELD_OUT)), [0, 0]
    for number, example in enumerate(_shuffled(workshop)):
        kind = int(number % _HELD_OUT == _HELD_OUT - 1)
        if counts[kind] < wanted[kind]:
            found = _states(workshop.target, example, depths)
            kept[kind].append(found)
            counts[kind] += len(found[0])
            workshop.progress("states (tokens)", min(counts[0], tokens), tokens)
        if counts[0] >= wanted[0] and counts[1] >= wanted[1]:
            break
    if not all(kept):
        raise ValueError(
            f"The corpus has {counts[0]} tokens of answers to fit to and {counts[1]} held out; both need some. Name "
            f"one with at least {_HELD_OUT} dialogues that fit the model (corpus=...)."
        )
    return _joined(kept[0], depths), _joined(kept[1], depths)


def fit_maps(
    target: CausalLM, places: Places, ridge: float
) -> dict[int, tuple[Float[Tensor, "D D"], Float[Tensor, "D"]]]:
    """Weight and bias of the map at each exit: ridge regression with a free bias, in 64 bit."""
    wanted = places.final.double()
    centre = wanted.mean(0)
    maps = {}
    for depth, states in places.exits.items():
        normed = target.norm(states).double()
        middle = normed.mean(0)
        x, y = normed - middle, wanted - centre
        square = x.T @ x
        penalty = ridge * square.diagonal().mean() * torch.eye(len(square), dtype=square.dtype, device=square.device)
        weight = torch.linalg.solve(square + penalty, x.T @ y).T
        maps[depth] = (weight, centre - weight @ middle)
    return maps


@torch.inference_mode()
def judge(target: CausalLM, reader: Reader, places: Places, depth: int) -> tuple[Bool[Tensor, "N"], Float[Tensor, "N"]]:
    """Whether an exit has the whole model's token, and how sure it is, at every place."""
    agrees, gaps = [], []
    for start in range(0, len(places), _ROWS):
        rows = slice(start, start + _ROWS)
        logits = target.head(reader.read(depth, places.exits[depth][rows]))
        agrees.append(argmax(logits) == argmax(target.head(places.final[rows])))
        gaps.append(gap(logits))
    return torch.cat(agrees), torch.cat(gaps)


def compare(target: CausalLM, exits: Exits, places: Places) -> dict[str, Any]:
    """How good exits are before (``lens``) and after (``trained``), by depth."""
    readers = {"lens": Lens(target), "trained": Translated(target, exits)}
    return {
        "held_out_tokens": len(places),
        **{
            name: {str(depth): quality(*judge(target, reader, places, depth)) for depth in exits.depths}
            for name, reader in readers.items()
        },
    }


def quality(agrees: Bool[Tensor, "N"], confidence: Float[Tensor, "N"]) -> dict[str, float]:
    """Agreement with the whole model, mean confidence, and the share of tokens among which 98 % agree."""
    order = confidence.argsort(descending=True)
    precision = agrees[order].double().cumsum(0) / torch.arange(1, len(order) + 1, device=order.device)
    enough = (precision >= _PRECISION).nonzero()
    covered = int(enough[-1]) + 1 if len(enough) else 0
    return {
        "agreement": round(float(agrees.double().mean()), 4),
        "confidence": round(float(confidence.double().mean()), 4),
        "coverage_at_98": round(covered / len(order), 4),
    }


def _shuffled(workshop: Workshop) -> Iterator[Example]:
    """Dialogues with an answer that the model can read whole."""
    order = list(range(len(workshop.corpus)))
    random.Random(workshop.seed).shuffle(order)
    for place in order:
        example = workshop.corpus[place]
        whole = len(example.prompt) + len(example.answer) <= workshop.target.max_positions
        if example.prompt and example.answer and whole:
            yield example


def _states(target: CausalLM, example: Example, depths: Sequence[int]) -> dict[int, Float[Tensor, "n D"]]:
    """States from which the tokens of the answer are predicted; depth 0 stands for the whole model."""
    text = torch.tensor((example.prompt + example.answer)[:-1], device=target.device)
    cache = target.new_cache(1, len(text))
    first = len(example.prompt) - 1
    output = target.prefill([text], cache, taps=[depth - 1 for depth in depths])
    return {0: output.hidden[0, first:]} | {depth: output.taps[depth - 1][0, first:] for depth in depths}


def _joined(found: list[dict[int, Tensor]], depths: Sequence[int]) -> Places:
    return Places(
        {depth: torch.cat([states[depth] for states in found]) for depth in depths},
        torch.cat([states[0] for states in found]),
    )
