"""Parallel decoding of masked diffusion language models (LLaDA, Dream, MDLM and block diffusion models).

The answer starts as masks, which are filled in block by block. A pass predicts the token at each mask of the block with
a confidence; the most confident are kept ("low-confidence remasking", LLaDA, Nie et al. 2025, arXiv 2502.09992, alg.
5). Their number is set by

* a schedule: ``tokens_per_step`` in every pass;
* a threshold: all above it, and always the best one (Fast-dLLM, Wu et al. 2025, arXiv 2505.22618, alg. 1).

``cache`` sets what a pass does not compute again. If attention ends with the block, keys and values of finished blocks
are final and the cache is exact. With attention both ways Fast-dLLM's caches are approximations: a pass over everything
opens a block, and until its end the keys of the text before it are kept (``prefix``), or of the masks after it too
(``dual``).

The baseline of a run is the same network with its own block size, one token per pass, the most confident first, without
cache. A speed-up over it says nothing about an autoregressive model of this size. Agreement is only the share of
answers equal to the baseline's.

Published, LLaDA-8B on GSM8K with 256 tokens in blocks of 32: accuracy 79.3 and 6.73 tokens/s without any of this, 78.5
and 54.4 with threshold 0.9 and cache.

Differences: a token must be above the threshold, not at it, since a probability in 32 bit can be 1. The mask itself is
never written. Confidence is of the model's own distribution at every temperature, as in LLaDA. A last block that the
limit cuts is shorter, or whole where attention ends with the block. With shifted logits a cached pass reads one token
before the block. A step of the record is a full block, with the passes it took.

Command: ``python -m bench method=diffusion model=llada_8b dataset=gsm8k max_new_tokens=256``
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from methods.decoder import Decoder, Guarantee, Step
from methods.engine.causal_lm import CausalLM
from methods.engine.kv_cache import Cache
from methods.engine.masked_lm import MaskedLM
from methods.engine.sampling import Sampling, in_float
from methods.non_autoregressive.diffusion_canvas import Canvas

Reuse = Literal["auto", "none", "prefix", "dual", "exact"]
Confidence = Literal["probability", "margin", "entropy", "random"]
_LATE = 1e3  # below every confidence


class Diffusion(Decoder):
    """Fill in masks, several per pass.

    Args:
        target: a diffusion model.
        threshold: confidence above which a token is kept; None: ``tokens_per_step`` of them are.
        tokens_per_step: how many the schedule keeps per pass.
        confidence: the token's probability, its lead over the second, the negative entropy, or a random order. A
            threshold needs one of the first two.
        block_size: tokens filled in together; None: the model's own.
        cache: what passes keep; ``auto``: the exact one where the model has it, else ``dual``.
        late_eos: end-of-sequence is kept only where nothing else is left to keep, for models that end long canvases too
            soon.

    Raises:
        ValueError: a target that fills in no masks, or an option out of range.
    """

    guarantee = Guarantee.RELAXED
    family = "non_autoregressive"
    model_kind = "masked"
    paper = "Nie et al. 2025, arXiv 2502.09992; Wu et al. 2025, arXiv 2505.22618"

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        threshold: float | None = 0.9,
        tokens_per_step: int = 1,
        confidence: Confidence = "probability",
        block_size: int | None = None,
        cache: Reuse = "auto",
        late_eos: bool = False,
    ) -> None:
        if not isinstance(target, MaskedLM):
            raise ValueError(
                f"method=diffusion needs a model that fills in masks, got {target.name}, which writes from left to "
                "right. Choose model=llada_8b, dream_7b or another of its kind."
            )
        _check(target, threshold, tokens_per_step, confidence, block_size, cache)
        self.target, self.sampling, self.threshold, self.tokens_per_step = target, sampling, threshold, tokens_per_step
        self.confidence, self.late_eos = confidence, late_eos
        self.block_size = block_size or target.denoising.block_size
        self.cache = cache if cache != "auto" else "exact" if target.denoising.block_causal else "dual"
        self._passes = self._scored = self._filled = self._full = 0

    def stats(self) -> dict[str, Any]:
        """The baseline, and work since the decoder was made: passes, positions they scored, masks filled.

        Masks are counted per row up to the end of its canvas, even after an end-of-sequence token.
        """
        return {
            "baseline": "the same network in blocks of its own size, one token per pass, surest first, no cache",
            "cache": self.cache,
            "passes": self._passes,
            "full_passes": self._full,
            "positions_scored": self._scored,
            "masks_filled": self._filled,
        }

    @torch.inference_mode()
    def decode(self, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator) -> Iterator[Step]:
        """See ``methods.decoder.Decoder.decode``; ends by itself with the canvas."""
        canvas = Canvas(self.target, prompts, limit, self.block_size or limit)
        cache = self.target.new_cache(len(prompts), canvas.capacity)
        for block in range(canvas.n_blocks):
            canvas.open(block)
            passes = scored = 0
            while canvas.masked:
                scored += self._pass(canvas, cache, rng, fresh=passes == 0)
                passes += 1
            self._passes += passes
            tokens = canvas.take()
            self._filled += sum(map(len, tokens))
            yield Step.undrafted(tokens, nodes=-(-scored // passes), target_passes=passes)

    def _pass(self, canvas: Canvas, cache: Cache, rng: Generator, *, fresh: bool) -> int:
        """One pass; returns how many positions per row it scored."""
        starts, stops, ends = self._window(canvas, fresh)
        cache.set_lengths(starts)
        nodes, wanted = canvas.nodes(starts, stops), canvas.columns(starts)
        logits = self.target.denoise(nodes, cache, ends, canvas.origins, wanted)
        tokens = self.sampling.pick(logits, rng)
        canvas.fill(tokens, self._kept(logits, tokens, canvas.open_masks(), rng))
        self._scored += nodes.numel()
        self._full += max(starts) == 0
        return nodes.shape[1]

    def _window(self, canvas: Canvas, fresh: bool) -> tuple[list[int], list[int], list[int]]:
        """Per row: the first position of the pass, the one after its last, and the one after the last it may see."""
        lead = int(self.target.denoising.shifted)
        ends = canvas.block_ends if self.target.denoising.block_causal else canvas.totals
        if self.cache == "none" or (fresh and self.cache != "exact"):
            return [0] * len(ends), ends, ends
        if self.cache == "exact":
            begins = canvas.unwritten if fresh else canvas.block_origins
            return [max(0, begin - lead) for begin in begins], ends, ends
        starts = [begin - lead for begin in canvas.block_starts]
        return starts, canvas.block_ends if self.cache == "dual" else ends, ends

    def _kept(
        self, logits: Float[Tensor, "B W V"], tokens: Int[Tensor, "B W"], masked: Bool[Tensor, "B W"], rng: Generator
    ) -> Bool[Tensor, "B W"]:
        """Which of the proposed tokens stay; at least one in every row that has a mask."""
        sure = confidences(self.confidence, logits, tokens, rng)
        if self.late_eos and self.target.eos_ids:
            ends = torch.isin(tokens, torch.tensor(self.target.eos_ids, device=tokens.device))
            sure = torch.where(ends, sure - _LATE, sure)
        sure = sure.masked_fill(~masked, -torch.inf)
        rank = sure.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        if self.threshold is None:
            return masked & (rank < self.tokens_per_step)
        return masked & ((sure > self.threshold) | (rank == 0))


def confidences(
    kind: Confidence, logits: Float[Tensor, "B W V"], tokens: Int[Tensor, "B W"], rng: Generator
) -> Float[Tensor, "B W"]:
    """How sure the model is of the tokens; larger is surer."""
    if kind == "random":
        return torch.rand(tokens.shape, device=tokens.device, generator=rng)
    probs = in_float(logits).softmax(-1)
    if kind == "probability":
        return probs.gather(-1, tokens[..., None])[..., 0]
    if kind == "margin":
        first, second = probs.topk(2, dim=-1).values.unbind(-1)
        return first - second
    return torch.special.xlogy(probs, probs).sum(-1)


def _check(
    target: MaskedLM,
    threshold: float | None,
    tokens_per_step: int,
    confidence: Confidence,
    block_size: int | None,
    cache: Reuse,
) -> None:
    if tokens_per_step < 1 or (block_size is not None and block_size < 1):
        raise ValueError(
            "tokens_per_step and block_size must be at least 1, or block_size null for the model's own, got "
            f"tokens_per_step={tokens_per_step}, block_size={block_size}. Correct them."
        )
    if threshold is not None and not (0 <= threshold <= 1 and confidence in ("probability", "margin")):
        raise ValueError(
            f"threshold must be between 0 and 1 and of a probability or a margin, got {threshold} with "
            f"confidence={confidence}. Correct it, or set method.threshold=null for a schedule of tokens_per_step."
        )
    own = target.denoising
    if own.block_causal and block_size not in (None, own.block_size):
        raise ValueError(
            f"block_size must be {own.block_size} for {target.name}, whose attention ends with such blocks, got "
            f"{block_size}. Leave method.block_size out."
        )
    fitting = ("auto", "none", "exact") if own.block_causal else ("auto", "none", "prefix", "dual")
    if cache not in fitting:
        looks = "ends with the block" if own.block_causal else "looks both ways"
        raise ValueError(
            f"cache must be one of {', '.join(fitting)} for {target.name}, whose attention {looks}, got {cache}. Set "
            "method.cache."
        )
