"""Several rounds in one call of the kernels, beside the same passes one by one."""

from __future__ import annotations

import torch

from methods.engine.causal_lm import CausalLM
from methods.engine.fused_layers import Drawing
from methods.engine.kv_cache import Cache


def check_rounds(lm: CausalLM, cache: Cache) -> None:
    """Of three rows that the cache holds the second stands still: the same tokens, keys and values as of passes."""
    moves, roots = [True, False, True], [5, 9, 30]
    before, kept = list(cache.lengths), cache.store.clone()
    ran = lm.rounds(roots, cache, 12, moves, lm.eos_ids)
    assert cache.lengths == before and len(ran.times) == len(ran.tokens) and sorted(ran.times) == ran.times
    store, tokens = cache.store.clone(), torch.tensor(roots)
    cache.store.copy_(kept)
    for chosen in ran.tokens:
        tokens = lm.forward(tokens[:, None], None, cache).logits[:, 0].argmax(1)
        assert chosen == tokens.tolist()
        cache.advance([1, 0, 1])
    assert torch.equal(cache.store, store), "the same keys and values"
    ended = [any(chosen[row] in lm.eos_ids for row in (0, 2)) for chosen in ran.tokens]
    assert not any(ended[:-1]) and (ended[-1] or len(ran.tokens) == 12)
    check_drawn(lm, cache, moves, roots)


def check_drawn(lm: CausalLM, cache: Cache, moves: list[bool], roots: list[int]) -> None:
    """Drawn rounds: each token is where the running sum of the distribution after the one before exceeds its luck."""
    drawing = Drawing(0.8, torch.rand(4, 3, dtype=torch.float64), torch.zeros(4, 3, lm.vocab_size))
    ran, tokens = lm.rounds(roots, cache, 4, moves, (), drawing=drawing), torch.tensor(roots)
    assert len(ran.tokens) == 4
    for chosen, luck, probs in zip(ran.tokens, drawing.luck, drawing.probs, strict=True):
        logits = lm.forward(tokens[:, None], None, cache).logits[:, 0]
        torch.testing.assert_close(probs, (logits.float() / 0.8).softmax(-1), rtol=1e-5, atol=1e-8)
        running = probs.double().cumsum(1)
        for row, token in enumerate(chosen):
            spot, end, own = luck[row] * running[row, -1], running[row, token], probs[row, token]
            assert own > 0 and end - own - 1e-6 <= spot < end + 1e-6
        tokens = torch.tensor(chosen)
        cache.advance([1, 0, 1])
