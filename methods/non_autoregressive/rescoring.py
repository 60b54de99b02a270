"""The teacher's score of whole candidates, by one pass of teacher forcing over all of them.

Noisy parallel decoding (Gu et al. 2018, sec. 4.2) and length beams let the autoregressive model choose. Its encoder
reads each source once, its decoder one row per candidate. Its time is part of every measurement, and its memory is
reported, since rescoring needs student and teacher together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from methods.engine.sampling import in_float
from methods.engine.seq2seq_lm import Seq2SeqLM, Source
from methods.non_autoregressive.network import present_up_to
from methods.non_autoregressive.student import mean_over


def teacher_log_probs(target: Seq2SeqLM, source: Source, tokens: Int[Tensor, "R T"]) -> Float[Tensor, "R M V"]:
    """Log-probabilities of every token after each prefix of the rows: M = T + 1, the last after the whole row.

    Args:
        source: encoded, B rows; R is a multiple of B, and rows of one source are adjacent.
        tokens: on the target's side, without start and end; padding does not change the results before it.
    """
    times = len(tokens) // len(source.lengths)
    mask = None if source.mask is None else source.mask.repeat_interleave(times, 0)
    lengths = [length for length in source.lengths for _ in range(times)]
    cache = target.new_cache(len(tokens), max(lengths) + tokens.shape[1])
    target.open(Source(source.states.repeat_interleave(times, 0), mask, lengths), cache)
    start = torch.tensor(target.start, device=tokens.device).expand(len(tokens), -1)
    logits = target.forward(torch.cat([start, tokens], 1), None, cache).logits[:, len(target.start) - 1 :]
    return in_float(logits).log_softmax(-1)


def score(
    target: Seq2SeqLM,
    sources: Sequence[Int[Tensor, "_"]],
    tokens: Int[Tensor, "B K T"],
    lengths: Int[Tensor, "B K"],
) -> Float[Tensor, "B K"]:
    """Mean log-probability per token of each candidate, its end included."""
    rows, count = tokens.flatten(0, 1), lengths.flatten()
    inside = present_up_to(count, rows.shape[1])
    rows = rows.masked_fill(~inside, target.eos_ids[0])
    ended = torch.cat([rows, torch.full_like(rows[:, :1], target.eos_ids[0])], 1)
    log_probs = teacher_log_probs(target, target.encode(sources), rows)
    said = log_probs.gather(2, ended[:, :, None])[:, :, 0]
    return mean_over(said, count + 1).view(lengths.shape)
