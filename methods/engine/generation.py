"""Whole texts outside of any measurement, to train on or to score: greedy, drawn, or by a beam search."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Int
from torch import Generator, Tensor

from methods.engine.beam_search import BeamSettings, search
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM

_REFILL = 1 / 8  # share of the rows that must be free before some are filled: a prefill costs a pass of its own


@torch.inference_mode()
def answer(
    target: CausalLM,
    prompts: Sequence[Int[Tensor, "_"]],
    limit: int,
    sampling: Sampling,
    rng: Generator,
    rows: int | None = None,
) -> list[list[int]]:
    """Decode every prompt to its end-of-sequence token, which is part of the answer, or to ``limit`` tokens.

    Rows that have finished take the next prompts, several at once; at the end they are dropped where that pays.

    Args:
        rows: most prompts decoded together; None: all.
    """
    places = list(range(min(rows or len(prompts), len(prompts))))  # the answer that each row of the cache writes
    waiting = deque(range(len(places), len(prompts)))
    cache = target.new_cache(len(places), max(len(prompt) for prompt in prompts) + limit)
    root = sampling.pick(target.prefill([prompts[place] for place in places], cache).logits[:, 0], rng)
    texts: list[list[int]] = [[] for _ in prompts]

    def is_open(place: int) -> bool:
        text = texts[place]
        return not text or (len(text) < limit and text[-1] not in target.eos_ids)

    def write(new: Iterable[tuple[int, int]]) -> None:
        for place, token in new:
            if is_open(place):
                texts[place].append(token)

    write(zip(places, root.tolist(), strict=True))
    while True:
        opened = [is_open(place) for place in places]
        free = [row for row, busy in enumerate(opened) if not busy]
        if waiting and len(free) >= _REFILL * len(places):
            taken = {row: waiting.popleft() for row in free[: len(waiting)]}
            output = target.prefill_rows({row: prompts[place] for row, place in taken.items()}, cache)
            first = sampling.pick(output.logits[:, 0], rng)
            root = root.index_copy(0, torch.tensor(list(taken), device=root.device), first)
            places = [taken.get(row, place) for row, place in enumerate(places)]
            write(zip(taken.values(), first.tolist(), strict=True))
            continue
        left = [row for row, busy in enumerate(opened) if busy]
        if not left:
            return texts
        if not waiting and target.pays_to_drop(len(left), len(places)):
            cache.select(left)
            places, root, opened = [places[row] for row in left], root[left], [True] * len(left)
        output = target.forward(root[:, None], None, cache)
        cache.advance([int(busy) for busy in opened])
        root = sampling.pick(output.logits[:, 0], rng)
        write(zip(places, root.tolist(), strict=True))


def translate(target: Seq2SeqLM, sources: Sequence[Int[Tensor, "_"]], limit: int, beams: int = 1) -> list[list[int]]:
    """Decode greedily, or with several beams."""
    if beams > 1:
        return search(target, sources, limit, BeamSettings(beams))
    return answer(target, sources, limit, Sampling(), Generator(target.device))
