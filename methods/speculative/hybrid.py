"""Hybrid drafting: a lookup in the text so far where it has found something, else a network, or both in a tree.

The network was trained for the target, or is a language model (``draft_model``), such as a copy of the target with
weights of 4 bits. A lookup costs no time and drafts long paths where the text copies or repeats itself; a network
drafts everywhere, some tokens deep. In each round and row the policy chooses:

- ``match``: the lookup, if it matched at least ``min_match`` tokens of the text's ending, else the network.
- ``expected``: the lookup, if by the frequencies in the text more of its path will be kept than lately of the network's
  drafts (Arctic Inference, Snowflake 2025, compares that score with the number of tokens the network would draft).
- ``union``: one tree of both, at most ``budget`` nodes; the lookup's path first. Where at least ``alone`` tokens
  matched, the lookup drafts alone: its path is likely to be kept, and the network's time is saved.

All drafts are deterministic, so greedy text is the target's and at a temperature the rule for trees that were not drawn
is exact, whatever the policy does: it sees nothing that the target has yet to judge.

With ``costs`` a round drafts as many of these nodes as pay, and nothing where none does (``budget.py``). What lookup
and network promise is corrected by what was kept of each, and each sits out rounds while it does not pay. A
network that cannot pay, as in large batches, is not asked, and no states are kept for it. On a GPU it drafts while the
host reads the last round and searches, and pays for what is then not used.

Published: SuffixDecoding with a neural speculator 179 tokens/s on ShareGPT, where the speculator alone has 172 and
suffixes alone 113, and 302 against 294 and 286 on SWE-bench (documentation of Arctic Inference). SAM decoding (Hu et
al. 2024, arXiv 2411.10666) falls back on EAGLE-2 or Token Recycling likewise: 2.73x on Spec-Bench, Vicuna-7B, A100.

Command: ``python -m bench method=hybrid dataset=mtbench``
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from methods.drafting import (
    ABSENT,
    Context,
    Continuation,
    Draft,
    LaunchedDrafter,
    Lookup,
    ResumingDrafter,
    SkippableDrafter,
    padded,
)
from methods.engine.causal_lm import CausalLM, Output
from methods.engine.host_copies import from_host
from methods.engine.sampling import Sampling
from methods.rows import of_rows
from methods.speculative.budget import CostsOption, Unasked
from methods.speculative.dflash.decoder import DFlash, DSpark
from methods.speculative.draft_model import LikeliestChain, require_vocabulary, weights_of
from methods.speculative.eagle.decoder import Eagle
from methods.speculative.heads.base import HeadsDecoder, HeadsDrafter
from methods.speculative.heads.hydra import HydraHeads
from methods.speculative.heads.medusa import Medusa
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.p_eagle.decoder import PEagle
from methods.speculative.prompt_lookup import PromptLookupDrafter
from methods.speculative.suffix_decoding import SuffixDrafter
from methods.speculative.verification import default_rule

Policy = Literal["match", "expected", "union"]
_MEMORY = 0.1  # weight of the latest round in the number of tokens that the network's drafts have kept
_NOTHING = Continuation([])
_PRIOR = 1.0  # what they are taken to keep before the first round


class HybridDrafter:
    """Asks the lookup first and the network where the policy wants it.

    Attributes:
        parts: see ``PartedDrafter``; the lookup alone beside an ``Unasked`` network.
        rounds: those of each row with a draft, by what drafted: lookup, network or both.
    """

    parts: Sequence[str]

    def __init__(
        self,
        lookup: Lookup,
        network: SkippableDrafter,
        rounds: Counter[str],
        policy: Policy,
        min_match: int,
        budget: int | None,
        alone: int | None = None,
    ) -> None:
        self.parts = ("lookup",) if isinstance(network, Unasked) else ("lookup", "network")
        self.rounds = rounds
        self._lookup, self._network, self._policy, self._min_match = lookup, network, policy, min_match
        self._launcher = network if isinstance(network, LaunchedDrafter) else None
        most = lookup.nodes + network.nodes
        self._budget = min(budget or most, most)
        self._alone = min_match if policy != "union" else alone
        self.nodes = self._budget if policy == "union" else max(lookup.nodes, network.nodes)
        self.hidden_layers = network.hidden_layers
        self._kept: list[float] = []
        self._lengths: list[int] = []
        self._asked: list[bool] = []

    @property
    def nbytes(self) -> dict[str, int]:
        """Memory of the network."""
        return self._network.nbytes if isinstance(self._network, HeadsDrafter) else {}

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token in the network."""
        return int(getattr(self._network, "token_bytes", 0))

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        self._forget(prompts, limit)
        self._network.reset(prompts, limit + self._lookup.nodes)  # a long path may end far beyond the limit

    def resume(self, last: Context, prompts: list[list[int]], limit: int, kept: int) -> int:
        """See ``ResumingDrafter``."""
        if isinstance(self._network, ResumingDrafter):
            self._forget(prompts, limit)
            return self._network.resume(last, prompts, limit + self._lookup.nodes, kept)
        self.reset(prompts, limit)
        return 0 if self.hidden_layers else kept

    def _forget(self, prompts: list[list[int]], limit: int) -> None:
        """Start new texts, but for the network."""
        self._lookup.reset(prompts, limit)
        self._kept, self._asked = [_PRIOR] * len(prompts), [False] * len(prompts)
        self._lengths = [len(prompt) for prompt in prompts]

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._lookup.keep_rows(rows)
        self._network.keep_rows(rows)
        self._kept, self._asked = of_rows(self._kept, rows), of_rows(self._asked, rows)
        self._lengths = of_rows(self._lengths, rows)

    def skip(self, context: Context) -> None:
        """Let the network read; the lookup does when it is next asked."""
        self._note_kept(context.tokens)
        self._asked = [False] * len(self._asked)
        self._network.skip(context)

    def launch(self, report: Int[Tensor, "B R"], output: Output, context: Context) -> Draft | None:
        """Let the network draft while the host reads and searches, see ``LaunchedDrafter``: what it makes may not be
        what ``propose`` returns.
        """
        return None if self._launcher is None else self._launcher.launch(report, output, context)

    def propose(self, context: Context) -> Draft:
        return self.propose_by(context, self.parts)

    def propose_by(self, context: Context, parts: Collection[str]) -> Draft:
        """See ``PartedDrafter``."""
        self._note_kept(context.tokens)
        looks = "lookup" in parts
        found = [self._lookup.find(row, text) if looks else _NOTHING for row, text in enumerate(context.tokens)]
        taken = [self._takes(row, path) for row, path in enumerate(found)]
        enough = math.inf if self._alone is None else self._alone
        alone = [take and path.match >= enough for take, path in zip(taken, found, strict=True)]
        if all(alone) or "network" not in parts:
            self._network.skip(context)
            self._asked = [False] * len(taken)
            self._count(taken)
            found = [path if take else _NOTHING for path, take in zip(found, taken, strict=True)]
            draft = Draft.chains([path.tokens for path in found], context.root.device)
            return replace(draft, gains=_gains_of(found), source="lookup")
        drafted = replace(self._network.propose(context), source="network")
        self._asked = [not only for only in alone]
        self._count(taken)
        if not any(taken):
            return drafted
        return self._merged(found, taken, drafted, context.root.device)

    def _note_kept(self, texts: Sequence[list[int]]) -> None:
        """Tokens that the last round kept of the network's drafts, the bonus left out."""
        for row, text in enumerate(texts):
            new = len(text) - self._lengths[row] - 1
            if self._asked[row] and new >= 0:
                self._kept[row] += _MEMORY * (new - self._kept[row])
            self._lengths[row] = len(text)

    def _takes(self, row: int, path: Continuation) -> bool:
        """Whether the lookup's path is drafted."""
        if not path.tokens or path.match < self._min_match:
            return False
        return self._policy != "expected" or path.expected > self._kept[row]

    def _count(self, taken: Sequence[bool]) -> None:
        for take, asked in zip(taken, self._asked, strict=True):
            if take or asked:
                self.rounds["both" if take and asked else "lookup" if take else "network"] += 1

    def _merged(
        self, found: Sequence[Continuation], taken: Sequence[bool], drafted: Draft, device: torch.device
    ) -> Draft:
        """Per row the tree of those that draft; the network's nodes come to the host."""
        nodes, above = drafted.lists()
        promised, sure = drafted.gains, [[1.0] * len(row) for row in nodes]
        chances = sure if promised is None else promised.tolist() if isinstance(promised, Tensor) else promised
        trees = []
        for row, (path, take) in enumerate(zip(found, taken, strict=True)):
            tree = _Tree()
            if take:
                gains = path.gains or [1.0] * len(path.tokens)
                tree.add("lookup", path.tokens, range(-1, len(path.tokens) - 1), gains, self.nodes)
            if self._asked[row]:
                present = [token for token in nodes[row] if token != ABSENT]
                tree.add("network", present, above[row], chances[row], self.nodes)
            trees.append(tree)
        known = promised is not None and _gains_of(found) is not None
        every, origins = [tree.gains for tree in trees] if known else None, [tree.sources for tree in trees]
        if all(tree.is_chain for tree in trees):
            chains = Draft.chains([tree.tokens for tree in trees], device)
            return replace(chains, passes=drafted.passes, gains=every, source="both", sources=origins)
        # padding is -1, in parents too, as for children of the root
        tokens, parents = padded([tree.tokens for tree in trees]), padded([tree.parents for tree in trees])
        return Draft(
            from_host(tokens, device),
            from_host(parents, device),
            sizes=[len(tree.tokens) for tree in trees],
            depths=[tree.depth for tree in trees],
            levels=max(tree.depth for tree in trees),
            width=max(tree.width for tree in trees),
            passes=drafted.passes,
            gains=every,
            source="both",
            sources=origins,
            listed=(tokens, parents),
        )


def _gains_of(found: Sequence[Continuation]) -> list[list[float]] | None:
    """Of the paths that the lookup found; None if it does not say."""
    if any(path.tokens and path.gains is None for path in found):
        return None
    return [path.gains or [] for path in found]


class _Tree:
    """Nodes of a row on the host, each token once among the children of a node."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.gains: list[float] = []
        self.sources: list[str] = []  # what says that its node is as likely as that
        self._places: dict[tuple[int, int], int] = {}
        self._depths: list[int] = []

    def add(
        self, source: str, tokens: Sequence[int], parents: Sequence[int], gains: Sequence[float], most: int
    ) -> None:
        """Add a tree, parents first, until there are ``most`` nodes; what is there already is not added again, and is
        as likely as the likelier of both say.
        """
        here = {-1: -1}
        for number, (token, parent, gain) in enumerate(zip(tokens, parents, gains, strict=False)):
            if parent not in here:  # its parent found no room
                continue
            place = self._places.get((here[parent], token))
            if place is None:
                if len(self.tokens) == most:
                    continue
                place = len(self.tokens)
                self._places[here[parent], token] = place
                self._depths.append(1 + (self._depths[here[parent]] if here[parent] >= 0 else 0))
                self.tokens.append(token)
                self.parents.append(here[parent])
                self.gains.append(gain)
                self.sources.append(source)
            if gain > self.gains[place]:
                self.gains[place], self.sources[place] = gain, source
            here[number] = place

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))

    @property
    def depth(self) -> int:
        return max(self._depths, default=0)

    @property
    def width(self) -> int:
        return max(Counter(self.parents).values(), default=0)


class Hybrid(HeadsDecoder):
    """A lookup and a network that draft in turn or together.

    Args:
        network: the method whose network drafts; prepared as for that method.
        draft_model: a language model that drafts its likeliest chain of ``nodes`` tokens instead.
        lookup: suffix, or prompt_lookup.
        policy: see the module.
        min_match: shortest ending of the text that is taken for a match.
        budget: of ``union``, the most nodes of a tree; None: all of both.
        alone: of ``union``, tokens that must match for the lookup to draft alone; None: the network always drafts.
        gamma: most tokens that the lookup drafts.
        factor, min_prob: of ``lookup=suffix``, see ``methods.speculative.suffix_decoding.SuffixDecoding``.
        depth, top_k, nodes, confidence: of ``network=eagle``, its dynamic tree; dflash, dspark and p_eagle draft a
            chain.
        costs: of passes, by which drafts are sized; see ``methods.speculative.budget``.
        checkpoint: folder of the network; None: the one prepared for this model.

    Raises:
        MissingPart: no network.
        ValueError: an option out of range.
    """

    checkpoint_of = "network"
    instead_of_checkpoint = ("draft_model",)
    paper = "Hu et al. 2024, arXiv 2411.10666; Oliaro et al. 2024, arXiv 2411.04975"

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        network: Literal["eagle", "p_eagle", "medusa", "hydra_heads", "dflash", "dspark"] = "eagle",
        lookup: Literal["suffix", "prompt_lookup"] = "suffix",
        policy: Policy = "match",
        min_match: int = 1,
        budget: int | None = None,
        alone: int | None = None,
        gamma: int = 24,
        factor: float = 1.0,
        min_prob: float = 0.1,
        depth: int = 2,
        top_k: int = 3,
        nodes: int = 5,
        confidence: float = 0.0,
        costs: CostsOption = None,
        checkpoint: str | Path | None = None,
        draft_model: CausalLM | None = None,
    ) -> None:
        if min(min_match, gamma, nodes) < 1 or (budget is not None and budget < 1):
            raise ValueError(
                f"hybrid needs min_match, gamma and nodes >= 1, and budget >= 1 or null, got min_match={min_match}, "
                f"gamma={gamma}, nodes={nodes}, budget={budget}. For the network alone use method={network}."
            )
        if alone is not None and alone < 1:
            raise ValueError(f"alone must be at least 1, or null, got {alone}. Set method.alone=4 or so.")
        self._draft = draft_model
        self._own: SpeculativeDecoder
        if draft_model is None:
            options: dict[str, Any] = {"checkpoint": checkpoint, "costs": costs}
            if network == "eagle":
                options |= {"tree": "dynamic", "depth": depth, "top_k": top_k, "nodes": nodes, "confidence": confidence}
            self._own = _METHODS[network](target, sampling, **options)
        else:
            require_vocabulary(draft_model, target)
            chain = LikeliestChain(draft_model, target.vocab_size, nodes, 0.0)
            rule = default_rule(sampling, "chain", drawn=False)
            self._own = SpeculativeDecoder(target, sampling, chain, rule, costs)
        found = _lookup(lookup, gamma, factor, min_match, min_prob)
        self._join = partial(HybridDrafter, found, policy=policy, min_match=min_match, budget=budget, alone=alone)
        self._rounds: Counter[str] = Counter()
        self._joined: SkippableDrafter = self._network()
        drafter = self._join(self._joined, self._rounds)
        super().__init__(target, sampling, drafter, default_rule(sampling, "tree", drawn=False), costs=costs)

    def _network(self) -> SkippableDrafter:
        drafter = self._own.drafter
        assert isinstance(drafter, SkippableDrafter), "networks can skip rounds"
        return drafter

    def use_costs(self, costs: Sequence[Sequence[int | float]]) -> None:
        if self.costs is None:  # others come during a run
            self._rounds.clear()
        self._own.use_costs(costs)
        super().use_costs(costs)

    def forget_costs(self) -> None:
        self._rounds.clear()
        self._own.forget_costs()
        super().forget_costs()

    def _settle(self) -> None:
        """Before a text: join lookup and network, or let the lookup draft alone, which takes no time."""
        network, costs = self._network(), self._own.costs
        if self._pays(costs, network.nodes, "network"):
            self.costs = costs
        else:
            assert costs is not None, "without costs every drafter is asked"
            network = self._joined if isinstance(self._joined, Unasked) else Unasked(network.nodes)
            self.costs = replace(costs, draft=0.0)
        if network is not self._joined:
            self._joined = network
            self.drafter = self._heads = self._join(network, self._rounds)

    def memory(self) -> dict[str, int | None]:
        """Memory of the network, or of the draft model."""
        return super().memory() | weights_of(self._draft)

    def stats(self) -> dict[str, Any]:
        """Share of the rounds of all rows by what drafted, beside those of the budget."""
        rounds = self._rounds
        shares = {f"rounds_by_{name}": round(count / rounds.total(), 4) for name, count in sorted(rounds.items())}
        return shares | super().stats()

    def acceptance_warning(self, rates: Sequence[Sequence[float]]) -> str | None:
        """None: what the lookup drafts says nothing of the network."""
        return None


_METHODS: dict[str, type[Eagle] | type[PEagle] | type[Medusa] | type[HydraHeads] | type[DFlash]] = {
    "eagle": Eagle,
    "p_eagle": PEagle,
    "medusa": Medusa,
    "hydra_heads": HydraHeads,
    "dflash": DFlash,
    "dspark": DSpark,
}


def _lookup(name: str, gamma: int, factor: float, min_match: int, min_prob: float) -> Lookup:
    """Endings shorter than ``min_match`` are not looked up."""
    if name == "suffix":
        return SuffixDrafter(gamma, factor, min_match, min_prob)
    return PromptLookupDrafter(gamma, max(3, min_match), min_match, "text", "last")
