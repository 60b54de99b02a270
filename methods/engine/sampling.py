"""From logits to the distribution the user asked for: temperature, top-k, top-p."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Generator, Tensor

from methods.engine import cpu_kernels

_BLOCK = 256  # probabilities summed at once
_COLDEST = 1e-6  # below, logits / temperature leaves the range of float32 and the softmax becomes NaN


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target's distribution is processed before a token is drawn, in this order.

    Attributes:
        temperature: 0 is greedy decoding; otherwise logits are divided by it (1e-6 at least, finite).
        top_k: keep the k most likely tokens (exactly k, also among equals); 0 keeps all.
        top_p: keep the shortest list of most likely tokens whose mass reaches top_p, at least one; 1.0 keeps all.

    Raises:
        ValueError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        warm = self.temperature == 0 or _COLDEST <= self.temperature < math.inf
        if not (warm and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ValueError(
                f"Sampling needs temperature 0 or at least {_COLDEST}, top_k >= 0 and 0 < top_p <= 1, got "
                f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}. Set temperature 0 for greedy "
                "decoding, top_k 0 and top_p 1 to keep all tokens."
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def keeps_all(self) -> bool:
        """Whether every token can be drawn."""
        return not self.top_k and self.top_p == 1.0

    def probs(self, logits: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch V"]:
        """The processed distribution, float32 (float64 for float64 logits). One-hot when greedy."""
        if self.greedy:
            exact = in_float(logits)
            return torch.zeros_like(exact).scatter_(-1, argmax(exact)[..., None], 1.0)
        if cpu_kernels.reads(logits):
            probs = cpu_kernels.probabilities(logits, self.temperature)
        else:
            probs = (in_float(logits) / self.temperature).softmax(-1)
        if 0 < self.top_k < probs.shape[-1]:
            probs = _keep_top_k(probs, self.top_k)
        return probs if self.top_p == 1.0 else _keep_top_p(probs, self.top_p)

    def pick(self, logits: Float[Tensor, "*batch V"], rng: Generator) -> Int[Tensor, "*batch"]:
        """One token from the processed distribution; argmax when greedy."""
        return argmax(logits) if self.greedy else draw(self.probs(logits), rng)


def in_float(values: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """At least 32 bit."""
    return values if values.dtype == torch.float64 else values.float()


def argmax(scores: Float[Tensor, "*batch V"]) -> Int[Tensor, "*batch"]:
    """The first of the largest scores in each row.

    On a CPU the kernels find it. Without them blocks come first and then one of them, where the vocabulary divides into
    blocks: ``Tensor.argmax`` takes eight times as long over a vocabulary in 16 bit, ``Tensor.max`` twice.
    """
    vocab = scores.shape[-1]
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    if cpu_kernels.reads(scores):
        return cpu_kernels.largest(scores, 1)[..., 0]
    if vocab % _BLOCK or vocab == _BLOCK:
        return scores.max(-1).indices
    blocks = scores.unflatten(-1, (-1, _BLOCK))
    block = blocks.amax(-1).argmax(-1)
    inside = blocks.gather(-2, block[..., None, None].expand(*block.shape, 1, _BLOCK))
    return block * _BLOCK + inside[..., 0, :].argmax(-1)


def top_candidates(logits: Float[Tensor, "*batch V"], k: int, triton: bool = False) -> Int[Tensor, "*batch k"]:
    """Ids of the k largest logits, largest first. They are in the k blocks with the largest maxima.

    Args:
        triton: Triton's kernels find them.
    """
    if triton:
        return top_log_probs(logits, k, triton)[1]
    if cpu_kernels.reads(logits):
        return cpu_kernels.largest(logits, k)
    vocab = logits.shape[-1]
    if vocab <= k * _BLOCK:
        return logits.topk(k).indices
    padding = -vocab % _BLOCK
    padded = F.pad(logits, (0, padding), value=-torch.inf) if padding else logits
    blocks = padded.unflatten(-1, (-1, _BLOCK))
    best = blocks.amax(-1).topk(k).indices
    places = blocks.gather(-2, best[..., None].expand(*best.shape, _BLOCK)).flatten(-2).topk(k).indices
    return best.gather(-1, places // _BLOCK) * _BLOCK + places % _BLOCK


def log_probs_of(logits: Float[Tensor, "*batch V"], ids: Int[Tensor, "*batch k"]) -> Float[Tensor, "*batch k"]:
    """Log-probabilities of some ids in each row, of at least 32 bit."""
    total = cpu_kernels.log_totals(logits) if cpu_kernels.reads(logits) else in_float(logits).logsumexp(-1)
    return in_float(logits.gather(-1, ids)) - total[..., None]


def top_log_probs(
    logits: Float[Tensor, "*batch V"], k: int, triton: bool = False
) -> tuple[Float[Tensor, "*batch k"], Int[Tensor, "*batch k"]]:
    """Log-probabilities of the k most likely tokens, see ``log_probs_of``, and their ids, see ``top_candidates``."""
    if triton:
        from methods.engine import triton_kernels  # a package that not every machine has

        found: tuple[Tensor, Tensor] = triton_kernels.top_log_probs(logits, k)
        return found
    ids = top_candidates(logits, k)
    return log_probs_of(logits, ids), ids


def draw(weights: Float[Tensor, "*batch V"], rng: Generator) -> Int[Tensor, "*batch"]:
    """One categorical draw per row of non-negative weights, which need not sum to 1.

    Inverse transform in two steps, over blocks and inside one, with running sums in float64: one pass over the
    weights, no bias in the far tail, and never a token of weight 0. A row without any weight gives token 0.
    """
    flat = weights.reshape(-1, weights.shape[-1])
    rows, vocab = flat.shape
    blocks = in_blocks(flat)
    size = blocks.shape[2]
    outer = blocks.sum(-1, dtype=flat.dtype).double().cumsum(-1)
    spot = torch.rand(rows, 1, dtype=torch.float64, device=flat.device, generator=rng) * outer[:, -1:]
    block = _first_above(outer, spot)
    before = torch.where(block > 0, outer.gather(1, (block - 1).clamp(min=0)), 0.0)
    inner = blocks.gather(1, block[:, :, None].expand(-1, -1, size))[:, 0].double().cumsum(-1)
    token = block * size + _first_above(inner, spot - before)
    return token[:, 0].clamp(max=vocab - 1).view(weights.shape[:-1])


def in_blocks(weights: Float[Tensor, "R V"]) -> Float[Tensor, "R blocks size"]:
    """Weights cut into equal blocks, the last one padded with zeros; a view where no padding is needed.

    Sums over blocks and then over their sums round far less than one long sum.
    """
    rows, vocab = weights.shape
    size = min(_BLOCK, vocab)
    padding = -vocab % size
    filled = F.pad(weights, (0, padding)) if padding else weights  # F.pad copies, even by nothing
    return filled.view(rows, (vocab + padding) // size, size)


def _first_above(running: Float[Tensor, "R n"], spot: Float[Tensor, "R 1"]) -> Int[Tensor, "R 1"]:
    """First index whose running sum exceeds the spot; where rounding leaves none, the last one with a weight."""
    last = (running < running[:, -1:]).sum(1, keepdim=True)
    return torch.minimum(torch.searchsorted(running, spot, right=True), last)


def _keep_top_k(probs: Float[Tensor, "*batch V"], top_k: int) -> Float[Tensor, "*batch V"]:
    top = probs.topk(top_k, dim=-1)
    kept = torch.zeros_like(probs).scatter(-1, top.indices, top.values)
    return kept / top.values.sum(-1, keepdim=True)


def _keep_top_p(probs: Float[Tensor, "*batch V"], top_p: float) -> Float[Tensor, "*batch V"]:
    ranked = probs.sort(dim=-1, descending=True, stable=True)
    mass_before = ranked.values.cumsum(-1) - ranked.values
    values = ranked.values.masked_fill(mass_before >= top_p, 0.0)
    kept = torch.zeros_like(probs).scatter(-1, ranked.indices, values)
    return kept / values.sum(-1, keepdim=True)
