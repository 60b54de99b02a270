"""A million first tokens by speculative sampling, through the verification code that decoding uses.

The target's distribution p and the drafter's q after a prompt are computed once; then drafts are drawn and judged in
large batches, and the first token of each round is counted. By the theorem of speculative sampling (Leviathan et al.
2023, arXiv 2211.17192, appendix A.1) these counts are draws from p for any q.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from methods.drafting import ABSENT, Draft
from methods.engine.sampling import Sampling, argmax
from methods.speculative.verification import ExactRule

Kind = Literal["chain", "with_replacement", "without_replacement", "top", "top_as_drawn", "given"]
LIMIT = 8  # tokens to generate, as passed to the drafter
_ROWS = 32  # rounds judged at once: 32 rows of 49,152 probabilities fit the cache


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How drafts are made and judged.

    Attributes:
        name: what the tables call it.
        kind: ``chain``: one token drawn from q; ``with_replacement``, ``without_replacement``: ``children`` siblings
            drawn from q; ``top``: the ``children`` most likely tokens of q, ``top_as_drawn``: the same passed off as
            drawn; ``given``: the drafter's own tokens.
        rule: the verification rule under test.
        children: siblings per draft.
        exact: whether the rule claims to be exact (a control does not keep that claim).
    """

    name: str
    kind: Kind
    rule: ExactRule
    children: int = 1
    exact: bool = True


@torch.inference_mode()
def first_tokens(
    target_probs: Float[Tensor, "V"],
    draft_probs: Float[Tensor, "V"],
    arrangement: Arrangement,
    draws: int,
    rng: Generator,
    given: Int[Tensor, "k"] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Int[Tensor, "V"]:
    """Counts of the first committed token over ``draws`` rounds.

    Args:
        target_probs: p, the processed target distribution after the prompt.
        draft_probs: q, the drafter's.
        given: the tokens of a deterministic draft, for ``kind="given"``.
        progress: called with the number of draws done.
    """
    counts = torch.zeros(len(target_probs), dtype=torch.long, device=target_probs.device)
    source = _Source(draft_probs, arrangement, given, rng)
    for rows in _batches(draws):
        draft = source.draft(rows)
        probs = target_probs.expand(rows, draft.tokens.shape[1] + 1, -1)
        verdict = arrangement.rule.judge(draft, probs, rng)
        chosen = draft.tokens.gather(1, verdict.path[:, :1].clamp(min=0))[:, 0]
        first = torch.where(verdict.path[:, 0] == ABSENT, verdict.bonus, chosen)
        counts += torch.bincount(first, minlength=len(counts))
        progress(rows)
    return counts


def _batches(draws: int) -> Iterator[int]:
    whole, rest = divmod(draws, _ROWS)
    yield from [_ROWS] * whole
    if rest:
        yield rest


class _Source:
    """Drafts of one arrangement."""

    def __init__(
        self, probs: Float[Tensor, "V"], arrangement: Arrangement, given: Int[Tensor, "k"] | None, rng: Generator
    ) -> None:
        self.probs, self.arrangement, self.rng = probs, arrangement, rng
        self._cumulative = probs.double().cumsum(0)
        self._fixed = given if arrangement.kind == "given" else probs.topk(arrangement.children).indices
        self._last = int((probs > 0).nonzero().max())

    def draft(self, rows: int) -> Draft:
        """``rows`` independent drafts whose nodes are all children of the root."""
        tokens = self._tokens(rows)
        nodes = tokens.shape[1]
        drawn = self.arrangement.kind not in ("top", "given")
        probs = self.probs.expand(rows, nodes, -1) if drawn else None
        if nodes == 1:
            return Draft.chain(tokens, probs)
        parents = tokens.new_full((rows, nodes), -1)
        return Draft(tokens, parents, probs, depths=[1] * rows, levels=1, width=nodes)

    def _tokens(self, rows: int) -> Int[Tensor, "B k"]:
        kind, children = self.arrangement.kind, self.arrangement.children
        if kind in ("top", "top_as_drawn", "given"):
            assert self._fixed is not None
            return self._fixed.expand(rows, -1)
        if kind == "without_replacement":
            return self._distinct(rows)
        return self._at(self._uniform(rows * children) * self._cumulative[-1]).view(rows, children)

    def _uniform(self, count: int) -> Float[Tensor, "n"]:
        return torch.rand(count, dtype=torch.double, device=self.probs.device, generator=self.rng)

    def _at(self, spots: Float[Tensor, "n"]) -> Int[Tensor, "n"]:
        return torch.searchsorted(self._cumulative, spots, right=True).clamp(max=self._last)

    def _distinct(self, rows: int) -> Int[Tensor, "B k"]:
        """Siblings drawn one by one, each from q without the earlier ones."""
        tokens = self._at(self._uniform(rows) * self._cumulative[-1])[:, None]
        while tokens.shape[1] < self.arrangement.children:
            tokens = torch.cat([tokens, self._another(tokens)[:, None]], dim=1)
        return tokens

    def _another(self, taken: Int[Tensor, "B k"]) -> Int[Tensor, "B"]:
        """One more token per row, drawn from the rest of q by skipping the shares of the tokens taken.

        Redrawing until the token is new has the same distribution, but does not end if one token has nearly all of q.
        """
        taken = taken.sort(1).values
        share = self.probs.double()[taken]
        spots = self._uniform(len(taken)) * (self._cumulative[-1] - share.sum(1))
        for token, mass in zip(taken.unbind(1), share.unbind(1), strict=True):
            spots = spots + torch.where(spots >= self._cumulative[token] - mass, mass, 0.0)
        return self._at(spots)


@torch.inference_mode()
def root_distributions(
    decoder: object, prompt: list[int], sampling: Sampling, seed: int
) -> tuple[Float[Tensor, "V"], Float[Tensor, "V"] | None, Int[Tensor, "k"] | None]:
    """p after the prompt, and the draft of the decoder's drafter: its q, or its tokens if it has no q.

    As in the decoding loop, the cache contains the prompt without its last token, the drafter proposes, and the target
    scores root and draft in one pass. For an encoder-decoder, which reads the whole prompt, the root is its most likely
    first token.
    """
    from methods.drafting import Context
    from methods.engine.seq2seq_lm import Seq2SeqLM

    target, drafter = decoder.target, decoder.drafter  # type: ignore[attr-defined]
    device = target.device
    rng = torch.Generator(device=device).manual_seed(seed)
    drafter.reset([prompt], LIMIT)
    apart = isinstance(target, Seq2SeqLM)
    read = prompt if apart else prompt[:-1]
    cache = target.new_cache(1, len(prompt) + drafter.nodes + 2)
    before = target.prefill([torch.tensor(read, device=device)], cache, hidden_layers=drafter.hidden_layers)
    root = argmax(before.logits[:, -1]) if apart else torch.tensor([prompt[-1]], device=device)
    draft = drafter.propose(Context([[*read, *root.tolist()]], root, before, None, sampling, rng))
    nodes = torch.cat([root[:, None], draft.tokens.clamp(min=0)], dim=1)
    output = target.forward(nodes, None if draft.is_chain else draft.parents, cache, levels=draft.max_depth)
    children = ((draft.parents[0] == -1) & (draft.tokens[0] != ABSENT)).nonzero()[:, 0]
    tokens = draft.tokens[0, children]
    drawn = draft.probs[0, children[0]] if draft.probs is not None and len(children) else None
    return sampling.probs(output.logits[0, 0]), drawn, tokens
