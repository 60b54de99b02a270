"""Losses over a vocabulary, where they cost as much as the network that is trained."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from methods.training.interface import require

_CHUNK = 256  # rows of logits that exist at once: megabytes that stay in the cache, and in the heap


def cross_entropy(
    logits: Float[Tensor, "n V"], wanted: Int[Tensor, "n"], label_smoothing: float = 0.0
) -> Float[Tensor, ""]:
    """Mean of the rows' losses, zero of none, with label smoothing (Szegedy et al. 2016, arXiv 1512.00567, sec. 7).

    The gradient is computed with the loss, some rows at a time: a CPU then reads and writes logits in 32 bit in its
    cache alone, which takes less than a third of the time of PyTorch's function. In at least 32 bit, whatever the
    logits are.
    """
    loss: Tensor = _CrossEntropy.apply(logits, wanted, label_smoothing)
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor, smoothing: float) -> Tensor:
        wide, size, rows = torch.promote_types(logits.dtype, torch.float32), logits.shape[1], max(1, len(logits))
        loss, gradient = logits.new_zeros((), dtype=wide), torch.empty_like(logits)
        for part, right, slope in zip(_parts(logits), _parts(wanted), _parts(gradient), strict=True):
            buffer, right = part.to(wide, copy=True), right[:, None]
            buffer -= buffer.amax(-1, keepdim=True)
            loss -= (1 - smoothing) * buffer.gather(1, right).sum() + smoothing / size * buffer.sum()
            normal = buffer.exp_().sum(-1, keepdim=True)
            loss += normal.log().sum()
            buffer /= rows * normal
            buffer -= smoothing / size / rows
            buffer.scatter_add_(1, right, buffer.new_full(right.shape, (smoothing - 1) / rows))
            slope.copy_(buffer)
        ctx.save_for_backward(gradient)
        return loss / rows

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer, None, None


def log_probs_at(logits: Float[Tensor, "n V"], places: Int[Tensor, "n K"]) -> Float[Tensor, "n K"]:
    """Log-probabilities of some tokens of each row, the softmax taken over all; some rows at a time as above."""
    found: Tensor = _LogProbs.apply(logits, places)
    return found


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, places: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        normal = torch.cat([part.to(wide).logsumexp(-1, keepdim=True) for part in _parts(logits)])
        ctx.save_for_backward(logits, places, normal)
        return logits.gather(1, places).to(wide) - normal

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None]:
        logits, places, normal = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for part, *rest in zip(*map(_parts, (logits, places, normal, outer, gradient)), strict=True):
            index, total, slope, found = rest
            buffer = (part - total).exp_().mul_(-slope.sum(-1, keepdim=True))
            found.copy_(buffer.scatter_add_(1, index, slope))
        return gradient, None


def _parts(rows: Tensor) -> tuple[Tensor, ...]:
    """Some rows at a time on a CPU, all at once on other devices."""
    return rows.split(_CHUNK if rows.device.type == "cpu" else max(1, len(rows)))


def ctc_loss(
    logits: Float[Tensor, "n V"],
    present: Bool[Tensor, "B T"],
    targets: Int[Tensor, "B U"],
    lengths: Int[Tensor, "B"],
    blank: int,
) -> Float[Tensor, "B"]:
    """-log of the probability of all alignments of each target (Graves et al. 2006, eq. 8); 0 if it has none.

    An alignment chooses between the blank and the target's own tokens, so PyTorch's function gets their probabilities
    alone: of some 40 tokens instead of the vocabulary.

    Args:
        logits: of the places that exist, row by row.
        present: where they are; each row begins with them.
        targets: without blanks, padded at the end with any id.
        lengths: of the targets.
    """
    width = targets.shape[1]
    first = (targets[:, :, None] == targets[:, None]).int().argmax(-1) + 1  # equal tokens share a class; 0: the blank
    classes = torch.cat([targets.new_full((len(targets), 1), blank), targets], 1)
    found = log_probs_at(logits, classes.repeat_interleave(present.sum(1), 0))
    rows = found.new_full((*present.shape, width + 1), 0.0).masked_scatter(present[:, :, None], found)
    losses: Tensor = _Ctc.apply(rows, first, present.sum(1), lengths)
    return losses


class _Ctc(torch.autograd.Function):
    """PyTorch's loss, with the gradient in log-probabilities that are no softmax: minus the occupancy of each class.

    PyTorch's own is the one behind a softmax, probability minus occupancy.
    """

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, targets: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
        with torch.enable_grad():
            given = log_probs.detach().requires_grad_()
            losses = F.ctc_loss(given.transpose(0, 1), targets, places, lengths, reduction="none", zero_infinity=True)
            (slope,) = torch.autograd.grad(losses.sum(), given)
        counted = (torch.arange(log_probs.shape[1], device=places.device) < places[:, None]) & (losses != 0)[:, None]
        ctx.save_for_backward(slope - given.detach().exp() * counted[:, :, None])
        return losses.detach()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * outer[:, None, None], None, None, None


# -- losses of drafts -------------------------------------------------------------------------------------------------

LossKind = Literal["ce", "kl", "tv", "nla", "lk_hybrid", "ce_tv"]

_HYBRID = 3.0  # of the exponent of lk_hybrid
_CE_SHARE, _L1_SHARE = 0.1, 0.9  # of ce_tv


@dataclass(frozen=True)
class DraftLoss:
    """What a drafter minimises at a place, from its distribution q and the target's p over the draft vocabulary.

    The share of drafts that is accepted is the overlap, sum min(p, q) (Leviathan et al. 2023, arXiv 2211.17192, cor.
    3.6).

    Attributes:
        kind: ``ce``, the cross-entropy -sum p log q; ``kl``, the same less the entropy of p; ``tv``, 1 - overlap;
            ``nla``, -log overlap; ``lk_hybrid``, l kl + (1 - l) nla with l = exp(-3 a), where a is the mean overlap of
            the batch; ``ce_tv``, 0.1 ce + 0.9 sum |p - q|, DSpark's (arXiv 2607.05147).
        top_k: K of an added term, -sum p log q over the K likeliest tokens of p (HASS, Zhang et al. 2024, arXiv
            2408.15766, eq. 5); 0: none.
        top_k_weight: of that term.

    Raises:
        ValueError: a number out of range.
    """

    kind: LossKind = "ce"
    top_k: int = 0
    top_k_weight: float = 1.0

    def __post_init__(self) -> None:
        require("at least 0", top_k=self.top_k, top_k_weight=self.top_k_weight)


CROSS_ENTROPY = DraftLoss()


def draft_loss(
    loss: DraftLoss,
    logits: Float[Tensor, "n v"],
    target: Float[Tensor, "n v"],
    weights: Float[Tensor, "n"] | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, "n"]]:
    """Mean loss of some places, and their overlaps, which carry no gradient.

    A row of ``target`` may sum to less than 1: the rest is on tokens that cannot be drafted. That part of p overlaps
    with no q. It is lost to ``tv`` and ``nla`` whatever q is; ``ce`` and ``kl`` count a row by the mass it has.

    Args:
        loss: which one.
        logits: of the drafter over its vocabulary.
        target: p over the same tokens.
        weights: of the rows in the mean; None: equal ones. Rows of weight 0 are not part of it.
    """
    return _mean(loss, [(logits, None)], None, target, None, weights)


def draft_loss_of_states(
    loss: DraftLoss,
    products: Sequence[tuple[Float[Tensor, "n _"], Float[Tensor, "v _"]]],
    bias: Float[Tensor, "v"] | None,
    taught: Float[Tensor, "A v"] | Int[Tensor, "A"],
    index: Int[Tensor, "n"] | None = None,
    weights: Float[Tensor, "n"] | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, "n"]]:
    """``draft_loss`` of the logits that are the sum of states times matrices.

    The logits of all places at once would take gigabytes, so their gradient is computed with them, chunk by chunk.

    Args:
        loss: which one.
        products: pairs of states and matrix, summed; gradients go to those that require one.
        bias: added to the logits; frozen.
        taught: distributions of the target, or the one token it writes, as a place in the draft vocabulary.
        index: which of them each row learns; None: one for each row.
        weights: see ``draft_loss``.
    """
    device = bias.device if bias is not None else products[0][0].device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        products = [(states.to(dtype), matrix.to(dtype)) for states, matrix in products]
    return _mean(loss, products, bias, taught, index, weights)


def _mean(
    loss: DraftLoss,
    products: Sequence[tuple[Tensor, Tensor | None]],
    bias: Tensor | None,
    taught: Tensor,
    index: Tensor | None,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    first = products[0][0]
    shares = torch.ones(len(first), device=first.device) if weights is None else weights
    shares = shares.to(torch.promote_types(first.dtype, torch.float32))
    shares = shares / shares.sum().clamp(min=torch.finfo(shares.dtype).tiny)
    found: tuple[Tensor, Tensor] = _DraftLoss.apply(
        loss, bias, taught, index, shares, *(tensor for pair in products for tensor in pair)
    )
    return found


@dataclass(frozen=True)
class _Chunks:
    """Logits and targets of a loss, some rows at a time, in at least 32 bit."""

    products: list[tuple[Tensor, Tensor | None]]
    bias: Tensor | None
    taught: Tensor
    index: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.products[0][0].dtype, torch.float32)

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows, logits of q, and p."""
        for start in range(0, len(self.products[0][0]), _CHUNK):
            rows = slice(start, start + _CHUNK)
            parts = (s[rows] if matrix is None else s[rows] @ matrix.T for s, matrix in self.products)
            logits = functools.reduce(torch.add, (part.to(self.dtype) for part in parts))
            logits = logits if self.bias is None else logits + self.bias
            taught = self.taught[rows] if self.index is None else self.taught[self.index[rows]]
            p = taught if taught.dim() == 2 else F.one_hot(taught, logits.shape[-1])
            yield rows, logits, p.to(self.dtype)


class _DraftLoss(torch.autograd.Function):
    """Sum of the rows' losses times their shares, and the overlaps."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: DraftLoss,
        bias: Tensor | None,
        taught: Tensor,
        index: Tensor | None,
        shares: Tensor,
        *flat: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        products = [(cast(Tensor, states), matrix) for states, matrix in zip(flat[::2], flat[1::2], strict=True)]
        slopes = [
            torch.zeros_like(tensor) if tensor is not None and needed else None
            for tensor, needed in zip(flat, ctx.needs_input_grad[5:], strict=True)
        ]
        with torch.autocast(taught.device.type, enabled=False):
            chunks = _Chunks(products, bias, taught, index)
            mixture = _mixture(loss.kind, chunks, shares)
            total, overlap = shares.new_zeros(()), torch.zeros_like(shares)
            for rows, logits, p in chunks:
                each, overlap[rows], slope = _row_losses(loss, mixture, logits, p)
                total += each @ shares[rows]
                slope *= shares[rows, None]
                for place, (states, matrix) in enumerate(products):
                    _collect(slopes[2 * place : 2 * place + 2], rows, slope, states, matrix)
        ctx.save_for_backward(*slopes)
        ctx.mark_non_differentiable(overlap)
        return total, overlap

    @staticmethod
    def backward(ctx: Any, outer: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        slopes = (None if slope is None else slope * outer.to(slope.dtype) for slope in ctx.saved_tensors)
        return (None, None, None, None, None, *slopes)


@dataclass(frozen=True)
class _Mixture:
    """A loss as ce * cross-entropy + tv * (1 - overlap) + nla * (-log overlap) + l1 * L1 distance, less constants."""

    ce: float | Tensor = 0.0
    tv: float = 0.0
    nla: float | Tensor = 0.0
    l1: float = 0.0


def _mixture(kind: LossKind, chunks: _Chunks, shares: Tensor) -> _Mixture:
    if kind == "lk_hybrid":
        overlap = shares.new_zeros(())
        for rows, logits, p in chunks:
            overlap += torch.minimum(logits.softmax(-1), p).sum(-1) @ shares[rows]
        far = torch.exp(-_HYBRID * overlap)
        return _Mixture(ce=far, nla=1 - far)
    return {
        "ce": _Mixture(ce=1.0),
        "kl": _Mixture(ce=1.0),
        "tv": _Mixture(tv=1.0),
        "nla": _Mixture(nla=1.0),
        "ce_tv": _Mixture(ce=_CE_SHARE, l1=_L1_SHARE),
    }[kind]


def _row_losses(loss: DraftLoss, mixture: _Mixture, logits: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, overlaps, and slopes with respect to the logits.

    With S the tokens where q < p, the slope of the overlap is q (1[S] - q(S)), that of -sum w log q is q sum w - w.
    """
    w = p * mixture.ce
    if loss.top_k and loss.top_k_weight:
        best = p.topk(min(loss.top_k, p.shape[-1]))
        w.scatter_add_(1, best.indices, loss.top_k_weight * best.values)
    top = logits.amax(-1, keepdim=True)
    q = (logits - top).exp_()
    normal, heaviness = q.sum(-1, keepdim=True), w.sum(-1)
    q /= normal
    each = heaviness * (top + normal.log())[:, 0] - torch.linalg.vecdot(w, logits)
    overlap = torch.minimum(q, p).sum(-1)
    if loss.kind in ("ce", "kl"):
        slope = q.mul_(heaviness[:, None]).sub_(w)
    else:
        safe = overlap.clamp(min=torch.finfo(p.dtype).tiny)
        each += mixture.tv * (1 - overlap) - mixture.nla * safe.log() + mixture.l1 * (p.sum(-1) + 1 - 2 * overlap)
        pull = mixture.tv + mixture.nla / safe + 2 * mixture.l1  # minus the slope of the loss in the overlap
        below = (q < p).to(q.dtype)
        level = heaviness + pull * torch.linalg.vecdot(below, q)
        slope = q.mul_(below.mul_(-pull[:, None]).add_(level[:, None])).sub_(w)
    if loss.kind in ("kl", "lk_hybrid"):
        each -= mixture.ce * torch.special.entr(p).sum(-1)
    return each, overlap, slope


def _collect(
    slopes: Sequence[Tensor | None], rows: slice, slope: Tensor, states: Tensor, matrix: Tensor | None
) -> None:
    """Write the slopes of some rows' logits into those of states and matrix."""
    of_states, of_matrix = slopes
    narrow = slope.to(states.dtype)
    if of_states is not None:
        of_states[rows] = narrow if matrix is None else narrow @ matrix
    if of_matrix is not None:
        of_matrix += narrow.T @ states[rows]
