"""Whole texts outside of any measurement, to train on or to score: by our own loop or by a beam search."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM

_REFILL = 1 / 8  # share of the rows that must be free before some are filled: a prefill costs a pass of its own
_KEPT = ("decoder_start_token_id", "forced_bos_token_id", "bad_words_ids", "suppress_tokens")


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
    """Decode greedily by our own loop, or by ``search`` with several beams."""
    if beams > 1:
        return search(target, sources, limit, beams)
    return answer(target, sources, limit, Sampling(), Generator(target.device))


@torch.inference_mode()
def search(target: Seq2SeqLM, sources: Sequence[Int[Tensor, "_"]], limit: int, beams: int) -> list[list[int]]:
    """Beam search of transformers from every source to its end-of-sequence token, which is part of the text.

    Raises:
        ValueError: the engine released the original model, which searches.
    """
    if target.hf is None:
        raise ValueError("A beam search needs the Hugging Face model, which was released. Use keep_hf=True.")
    model: Any = target.hf
    options = search_settings(target, limit, num_beams=beams)
    ids = pad_sequence(list(sources), batch_first=True)
    lengths = torch.tensor([len(source) for source in sources], device=ids.device)
    attention = (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()
    with plainly(model, options):
        written = model.generate(ids, attention_mask=attention, generation_config=options)
    return [_up_to_end(row, target.eos_ids) for row in written[:, len(target.start) :].tolist()]


def search_settings(target: CausalLM, limit: int, **options: Any) -> GenerationConfig:
    """Settings of transformers for a search over the distribution that every method here decodes from.

    Of the model's own settings only those are kept that decide which tokens may be written (start token, forced first
    token, forbidden tokens); penalties on repetition or length and forced ends are left out.
    """
    model: Any = target.hf
    kept = {name: getattr(model.generation_config, name, None) for name in _KEPT}
    start = len(target.start) if isinstance(target, Seq2SeqLM) else 1
    eos = list(target.eos_ids) or None
    return GenerationConfig(
        max_new_tokens=limit + start - 1,  # transformers counts a forced first token
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=(eos or [0])[0],
        **options,
        **{name: value for name, value in kept.items() if value is not None},
    )


@contextmanager
def plainly(model: Any, options: GenerationConfig) -> Iterator[None]:
    """Without the model's own settings, from which transformers would fill what ``options`` leaves open."""
    own = model.generation_config
    model.generation_config = options
    try:
        yield
    finally:
        model.generation_config = own


def _up_to_end(row: list[int], ends: Sequence[int]) -> list[int]:
    place = next((place for place, token in enumerate(row) if token in ends), len(row))
    return row[: place + 1]
