"""A language model that drafts a chain for another one with the same vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from methods.drafting import Context, Draft
from methods.engine.causal_lm import CausalLM
from methods.engine.host_copies import from_host
from methods.engine.kv_cache import Cache
from methods.engine.sampling import argmax, draw
from methods.engine.seq2seq_lm import Seq2SeqLM, SourceCache
from methods.rows import of_rows

_PADDING = 1024  # output matrices of one family differ by their padding at most by this
_MOST_UNREAD = 16  # tokens that others drafted, until a model reads them


class ChainDrafter(ABC):
    """Drafts a chain token by token, from distributions over the target's vocabulary.

    Args:
        gamma: most tokens of a draft.
        confidence: a draft ends where the most likely token of every row is less likely; 0: never.

    Attributes:
        drawn: at a temperature tokens are drawn; else they are the likeliest.
    """

    hidden_layers: Sequence[int] = ()
    drawn: ClassVar[bool] = True

    def __init__(self, gamma: int, confidence: float) -> None:
        self.nodes, self.confidence = gamma, confidence

    @abstractmethod
    def _catch_up(self, context: Context) -> Float[Tensor, "B V"]:
        """Read what was committed since the last draft; logits after each row's last committed token."""

    @abstractmethod
    def _next(self, token: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Logits after a drafted token."""

    def propose(self, context: Context) -> Draft:
        """Draft up to ``nodes`` tokens for every row."""
        tokens, probs = [], []
        logits = self._catch_up(context)
        while True:
            token, prob = self._choose(logits, context)
            tokens.append(token)
            probs.append(prob)
            if len(tokens) == self.nodes or self._unsure(logits):
                break
            logits = self._next(token)
        drawn = torch.stack(probs, dim=1) if self._draws(context) else None
        return Draft.chain(torch.stack(tokens, dim=1), drawn, passes=len(tokens))

    def _choose(self, logits: Float[Tensor, "B V"], context: Context) -> tuple[Int[Tensor, "B"], Tensor]:
        if not self._draws(context):
            return argmax(logits), logits
        probs = context.sampling.probs(logits)
        return draw(probs, context.rng), probs

    def _draws(self, context: Context) -> bool:
        return self.drawn and not context.sampling.greedy

    def _unsure(self, logits: Float[Tensor, "B V"]) -> bool:
        """No row is confident enough to continue: one host read per drafted token, only if asked for."""
        if self.confidence == 0.0:
            return False
        return bool((logits.float().softmax(-1).amax(-1) < self.confidence).all())


class DraftModel(ChainDrafter):
    """A language model that drafts a chain, with a cache of its own."""

    def __init__(self, model: CausalLM, vocab_size: int, gamma: int, confidence: float) -> None:
        super().__init__(gamma, confidence)
        self.model = model
        self._padding = vocab_size - model.vocab_size
        self._cache: Cache | None = None
        self._prompt_lengths: list[int] = []
        self._read = 0  # tokens of the first row's text that the last draft has read; 0: there was none

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        return self.model.token_bytes

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        self._prompt_lengths, self._read = [len(prompt) for prompt in prompts], 0
        capacity = max(len(prompt) for prompt in prompts) + limit + 2 * (self.nodes + 1)
        self._cache = self.model.new_cache(len(prompts), capacity)

    def resume(self, last: Context, prompts: list[list[int]], limit: int, kept: int) -> int:
        """See ``methods.drafting.ResumingDrafter``; as no states of the target are read, ``kept`` is what is kept."""
        before, read = self._cache, min(kept, self._read)
        self.reset(prompts, limit)
        if read:
            assert self._cache is not None and before is not None, "it was read into a cache"
            self._cache.continue_from(before, read)
        return kept

    def keep_rows(self, rows: Sequence[int]) -> None:
        assert self._cache is not None, "reset comes before keep_rows"
        self._prompt_lengths = of_rows(self._prompt_lengths, rows)
        self._cache.select(rows)

    def reset_rows(self, prompts: Mapping[int, list[int]]) -> None:
        assert self._cache is not None, "reset comes before renew"
        for row, prompt in prompts.items():
            self._prompt_lengths[row] = len(prompt)
        if self._read:  # else the first draft will read all prompts at once
            read = {row: self._readable(torch.tensor(ids, device=self.model.device)) for row, ids in prompts.items()}
            self.model.prefill_rows(read, self._cache)

    def propose(self, context: Context) -> Draft:
        model, plain = self.model, type(self)._next is DraftModel._next and not self._padding
        likeliest = not self.confidence and not self._draws(context)
        if plain and likeliest and isinstance(model, Seq2SeqLM) and model.runs_rounds:
            return self._together(model, context)
        return super().propose(context)

    def _together(self, model: Seq2SeqLM, context: Context) -> Draft:
        """The likeliest tokens; the kernels run the rounds in one call, to the end of a text that drafts alone."""
        cache, rows = self._cache, len(context.tokens)
        assert isinstance(cache, SourceCache), "reset comes before propose"
        cache.truncate([len(row) - 1 for row in context.tokens])
        read = zip(context.tokens, cache.lengths, strict=True)
        if any(length == 0 or length + 1 < len(row) for row, length in read):
            columns = [argmax(self._catch_up(context)).tolist()]
        else:
            columns = []
        if len(columns) < self.nodes:
            last = columns[0] if columns else [row[-1] for row in context.tokens]
            ends = model.eos_ids if rows == 1 else ()
            ran = model.rounds(last, cache, self.nodes - len(columns), [True] * rows, ends)
            cache.advance([len(ran.tokens)] * rows)
            columns += ran.tokens
        tokens = from_host([list(row) for row in zip(*columns, strict=True)], context.root.device)
        return Draft.chain(tokens, passes=len(columns))

    def _catch_up(self, context: Context) -> Float[Tensor, "B V"]:
        """Feed what was committed since the last draft; logits after each row's last committed token."""
        committed, cache = context.tokens, self._cache
        assert cache is not None, "reset comes before propose"
        cache.truncate([len(row) - 1 for row in committed])
        if not self._read:
            ends = [min(len(row) - 1, length) for row, length in zip(committed, self._prompt_lengths, strict=True)]
            prompts = [
                torch.tensor(row[:end], device=self.model.device) for row, end in zip(committed, ends, strict=True)
            ]
            self.model.prefill([self._readable(row) for row in prompts], cache, kept=cache.lengths[0])
        pending = [row[length:] for row, length in zip(committed, cache.lengths, strict=True)]
        width = max(len(new) for new in pending)
        tokens = from_host([new + [0] * (width - len(new)) for new in pending], self.model.device)
        logits = self.model.forward(self._readable(tokens), None, cache).logits
        cache.advance([len(new) for new in pending])
        self._read = len(committed[0])
        last = from_host([len(new) - 1 for new in pending], self.model.device)
        return self._fit(logits[torch.arange(len(pending), device=self.model.device), last])

    def _next(self, token: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        cache = self._cache
        assert cache is not None
        logits = self.model.forward(token[:, None], None, cache).logits[:, 0]
        cache.advance([1] * len(token))
        return self._fit(logits)

    def _readable(self, tokens: Int[Tensor, "*b"]) -> Int[Tensor, "*b"]:
        """Replace ids in the padding of a larger target, which have no embedding here, by another token."""
        return tokens.clamp(max=self.model.vocab_size - 1) if self._padding > 0 else tokens

    def _fit(self, logits: Float[Tensor, "B v"]) -> Float[Tensor, "B V"]:
        """Cut or pad to the target's output size, which differs within a family; padding is never drafted."""
        return logits if self._padding == 0 else F.pad(logits, (0, self._padding), value=-torch.inf)


class LikeliestChain(DraftModel):
    """A language model that drafts its likeliest tokens beside another drafter, and reads what that one drafted."""

    drawn = False

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        super().reset(prompts, limit + _MOST_UNREAD)

    def propose(self, context: Context) -> Draft:
        """Draft up to ``nodes`` tokens for every row."""
        draft = super().propose(context)
        assert self._cache is not None
        self._cache.truncate([len(row) for row in context.tokens])  # others may be committed in their place
        return draft

    def skip(self, context: Context) -> None:
        """Read what was committed, once it is long."""
        assert self._cache is not None, "reset comes before skip"
        lengths = self._cache.lengths
        unread = max(len(row) - length for row, length in zip(context.tokens, lengths, strict=True))
        if self._read and unread > _MOST_UNREAD:  # else the first draft reads all
            self._catch_up(context)


def weights_of(draft: CausalLM | None) -> dict[str, int]:
    """Bytes of a draft model, by name; a view of the target has none of its own."""
    return {} if draft is None else {"draft_model": draft.weight_bytes + draft.encoder_bytes}


def require_vocabulary(draft: CausalLM, target: CausalLM) -> None:
    """Refuse a draft model whose output is not that of the target, up to padding.

    Raises:
        ValueError: with the sizes of both.
    """
    if abs(draft.vocab_size - target.vocab_size) > _PADDING:
        raise ValueError(
            f"Draft model and target must share one vocabulary, got {draft.vocab_size} and {target.vocab_size} tokens. "
            "Choose a draft of the target's family."
        )
