"""How good exits are: agreement with the whole model, and what their confidence is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from methods.engine.sampling import argmax, in_float

Read = Callable[[int, Float[Tensor, "n D"]], Float[Tensor, "n D"]]
Head = Callable[[Float[Tensor, "n D"]], Float[Tensor, "n V"]]
Seen = tuple[Bool[Tensor, "N"], Float[Tensor, "N"]]

_ROWS = 512  # judged at once
_PRECISION = 0.98  # at which the coverage of an exit is reported
_BINS = 15  # of the calibration error


def gap(logits: Float[Tensor, "*b V"]) -> Float[Tensor, "*b"]:
    """p_1 - p_2 of the softmax."""
    scores = in_float(logits)
    two = (scores.topk(2, dim=-1).values - scores.logsumexp(-1, keepdim=True)).exp()
    return two[..., 0] - two[..., 1]


@torch.inference_mode()
def judge(
    head: Head, readers: Mapping[str, Read], exits: Mapping[int, Float[Tensor, "N D"]], final: Float[Tensor, "N D"]
) -> dict[str, dict[int, Seen]]:
    """By reader and depth: whether the exit has the whole model's token, and how sure it is (gap), at every place.

    Args:
        head: logits of states that are ready for the output matrix.
        readers: make the state behind a depth ready for it.
        exits: by depth, raw states.
        final: of the whole model, ready.
    """
    found: dict[str, dict[int, list[Seen]]] = {name: {depth: [] for depth in exits} for name in readers}
    for start in range(0, len(final), _ROWS):
        rows = slice(start, start + _ROWS)
        wanted = argmax(head(final[rows]))
        for name, read in readers.items():
            for depth, states in exits.items():
                logits = head(read(depth, states[rows]))
                found[name][depth].append((argmax(logits) == wanted, gap(logits)))
    return {name: {depth: _joined(parts) for depth, parts in by.items()} for name, by in found.items()}


def quality(agrees: Bool[Tensor, "N"], confidence: Float[Tensor, "N"]) -> dict[str, float]:
    """How often an exit has the whole model's token, and what its confidence is worth.

    Returns:
        Agreement; mean confidence; the expected calibration error over 15 equal bins of confidence; and the largest
        share of the tokens, surest first, of which 98 % agree.
    """
    order = confidence.argsort(descending=True)
    precision = agrees[order].double().cumsum(0) / torch.arange(1, len(order) + 1, device=order.device)
    enough = (precision >= _PRECISION).nonzero()
    covered = int(enough[-1]) + 1 if len(enough) else 0
    bins = (confidence * _BINS).long().clamp(0, _BINS - 1)
    excess = torch.zeros(_BINS, dtype=torch.double, device=bins.device)
    excess.index_add_(0, bins, confidence.double() - agrees.double())
    return {
        "agreement": round(float(agrees.double().mean()), 4),
        "confidence": round(float(confidence.double().mean()), 4),
        "calibration_error": round(float(excess.abs().sum()) / len(order), 4),
        "coverage_at_98": round(covered / len(order), 4),
    }


def summary(stages: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """What ``quality`` found, by stage and depth, as lines for people."""
    head = f"  {'exit':>5}  {'read by':12} {'agrees':>7} {'sure':>7} {'error':>7}  coverage at 98 %"
    rows = [
        f"  {depth:>5}  {stage:12} {found['agreement']:>7.1%} {found['confidence']:>7.1%} "
        f"{found['calibration_error']:>7.1%} {found['coverage_at_98']:>17.1%}"
        for stage, by in stages.items()
        for depth, found in by.items()
    ]
    return [head, *sorted(rows, key=lambda row: int(row.split()[0]))]


def _joined(parts: list[tuple[Tensor, Tensor]]) -> Seen:
    agrees, confidence = zip(*parts, strict=True)
    return torch.cat(agrees), torch.cat(confidence)
