"""Beam search over the engine's static cache: all beams of all rows are one batch, reordered on the device.

K beams run per row. Of the 2K likeliest continuations of a row, those among the first K that end become hypotheses,
scored by log-probability / length^penalty, of which the best K are kept; the best K that do not end run on. A row is
done when its best running beam, divided by its length as it is, is no better than its worst hypothesis. These are the
rules of transformers, which tests compare with: the texts are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from methods.engine.causal_lm import CausalLM
from methods.engine.seq2seq_lm import Seq2SeqLM


@dataclass(frozen=True, slots=True)
class BeamSettings:
    """How a search runs.

    Attributes:
        beams: K, at least 2; one beam is greedy decoding, which has no hypotheses to compare.
        length_penalty: exponent of the length that a hypothesis' log-probability is divided by.
        early_stopping: a row is done once it has K hypotheses, even if a better one might follow.
    """

    beams: int = 5
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        if self.beams < 2:
            raise ValueError(f"num_beams must be at least 2, got {self.beams}. One beam is method=autoregressive.")


@torch.inference_mode()
def search(
    target: CausalLM,
    prompts: Sequence[Int[Tensor, "_"]],
    limit: int,
    settings: BeamSettings,
    watch: Callable[[int], None] = lambda rows: None,
) -> list[list[int]]:
    """The best hypothesis of every prompt: up to its end-of-sequence token, which is part of it, or to the limit.

    Args:
        prompts: ragged; of an encoder-decoder, the sources.
        limit: most tokens of a text.
        watch: called after every pass with the rows that it computed, K for each text that is not done.
    """
    beams = settings.beams
    cache = target.new_cache(len(prompts), max(len(prompt) for prompt in prompts) + limit)
    logits = target.prefill(prompts, cache).logits[:, 0]
    cache.select([row for row in range(len(prompts)) for _ in range(beams)])
    found = _Beams(len(prompts), limit, settings, target)
    texts: list[list[int]] = [[] for _ in prompts]
    places, first = list(range(len(prompts))), min(cache.lengths)
    watch(len(prompts))
    logits = logits.repeat_interleave(beams, 0)
    while True:
        origin, tokens = found.extend(logits)
        done = found.done()
        for row, place in enumerate(places):
            if done[row] and not texts[place]:
                texts[place] = found.best(row)
        left = [row for row, ended in enumerate(done) if not ended]
        if not left:
            return texts
        cache.reorder(origin, first)
        if len(left) < len(places) and target.pays_to_drop(len(left) * beams, len(places) * beams):
            kept = [row * beams + beam for row in left for beam in range(beams)]
            cache.select(kept)
            tokens, places = tokens[kept], [places[row] for row in left]
            found.select(left)
        logits = target.forward(tokens[:, None], None, cache).logits[:, 0]
        cache.advance([1] * len(tokens))
        watch(len(tokens))


class _Beams:
    """The running beams and the hypotheses of R rows.

    Args:
        rows: R.
        limit: most tokens of a text.

    Attributes:
        scores: [R, K] log-probabilities of the running beams, the best first.
        texts: [R, K, limit] their tokens, undefined after ``length``.
        length: tokens that each of them has.
        ended: [R, K] scores of the hypotheses, the best first; -inf where there is none.
        ended_texts, ended_lengths: [R, K, limit] and [R, K].
        finished: [R] rows that are done.
    """

    def __init__(self, rows: int, limit: int, settings: BeamSettings, target: CausalLM) -> None:
        beams, device = settings.beams, target.device
        self.settings, self.limit, self.length = settings, limit, 0
        self._forced = len(target.start) - 1 if isinstance(target, Seq2SeqLM) else 0  # counted as transformers does
        self._eos = torch.tensor(sorted(target.eos_ids), device=device)
        self.scores = torch.full((rows, beams), -torch.inf, device=device)
        self.scores[:, 0] = 0.0  # all beams begin equal: only one may be continued
        self.texts = torch.zeros(rows, beams, limit, dtype=torch.long, device=device)
        self.ended = torch.full((rows, beams), -torch.inf, device=device)
        self.ended_texts = self.texts.clone()
        self.ended_lengths = torch.zeros(rows, beams, dtype=torch.long, device=device)
        self.finished = torch.zeros(rows, dtype=torch.bool, device=device)

    def extend(self, logits: Float[Tensor, "RK V"]) -> tuple[Int[Tensor, "RK"], Int[Tensor, "RK"]]:
        """Continue every beam by one token.

        Returns:
            The rows of the batch that the new beams continue, and their tokens.
        """
        rows, beams = self.scores.shape
        width = logits.shape[-1]
        total = self.scores[:, :, None] + logits.float().log_softmax(-1).view(rows, beams, width)
        candidates = max(2, 1 + len(self._eos)) * beams
        best, place = total.flatten(1).topk(min(candidates, beams * width), dim=1)
        origin, token = place // width, place % width
        texts = self.texts.gather(1, origin[:, :, None].expand(-1, -1, self.limit))
        texts[:, :, self.length] = token
        self.length += 1
        ends = torch.isin(token, self._eos) | (self.length == self.limit)
        self._keep(best, texts, ends)
        self.scores, order = best.masked_fill(ends, -torch.inf).topk(beams, dim=1)
        self.texts = texts.gather(1, order[:, :, None].expand(-1, -1, self.limit))
        base = torch.arange(rows, device=origin.device)[:, None] * beams
        return (origin.gather(1, order) + base).flatten(), token.gather(1, order).flatten()

    def _keep(self, best: Float[Tensor, "R C"], texts: Int[Tensor, "R C L"], ends: Tensor) -> None:
        """Make hypotheses of the candidates that end, if they are among the first K and their row is not done."""
        beams, length = self.settings.beams, self.length
        new = best[:, :beams] / self._divisor()
        new = new.masked_fill(~ends[:, :beams] | self.finished[:, None], -torch.inf)
        self.ended, order = torch.cat([self.ended, new], 1).topk(beams, dim=1)
        everything = torch.cat([self.ended_texts, texts[:, :beams]], 1)
        self.ended_texts = everything.gather(1, order[:, :, None].expand(-1, -1, self.limit))
        lengths = torch.cat([self.ended_lengths, torch.full_like(self.ended_lengths, length)], 1)
        self.ended_lengths = lengths.gather(1, order)

    def _divisor(self) -> float:
        return float((self.length + self._forced) ** self.settings.length_penalty)

    def done(self) -> list[bool]:
        """Which rows are: none of their beams can become a hypothesis that is kept."""
        worst = self.ended[:, -1]
        reachable = self.scores[:, 0] / self._divisor()
        hopeless = (worst > -torch.inf) if self.settings.early_stopping else (reachable <= worst)
        self.finished |= hopeless | (self.length == self.limit)
        found: list[bool] = self.finished.tolist()
        return found

    def best(self, row: int) -> list[int]:
        """The best hypothesis of a row."""
        text: list[int] = self.ended_texts[row, 0, : int(self.ended_lengths[row, 0])].tolist()
        return text

    def select(self, rows: list[int]) -> None:
        """Keep only some rows."""
        for name in ("scores", "texts", "ended", "ended_texts", "ended_lengths", "finished"):
            setattr(self, name, getattr(self, name)[rows])
