"""Oracle: the target's own greedy text as drafts, each position right with a set probability. No method; never ranked.

What a published acceptance gives end to end on a machine, without the weights that reach it: with acceptance a_1, a_2,
... by position (of a position if all before it were right) a round keeps 1 + a_1 + a_1 a_2 + ... tokens, whatever the
weights of the target are. So it can be timed with random weights of any shape (``model.like``). The loop, the passes
and the rule are those of every method, and the text is the target's.

Before the clock starts, the decoder writes the text once by passes of the same number of nodes, whose drafts are wrong;
this recorded text is then drafted. Rounding can still part the texts of 16 bit: such a row drafts wrong tokens of the
same shape from there on, and ``off_text_rounds`` of the run says how often that was.

``nodes`` above the number of positions make a tree: the right token, if it is drafted, is the first of several
siblings. ``network=eagle`` also runs a draft network of EAGLE-3 with random weights, in the sizes of the target's
layers and with 32,000 draft tokens, as published heads have, and drops its drafts: the round costs what it costs with
such a head, at any acceptance.

Command: ``python -m bench method=oracle model=random model.like=llama3_8b dataset=mtbench``
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Generator, Tensor

from methods.decoder import Rehearsed, Step, generate
from methods.drafting import Context, Draft
from methods.engine.causal_lm import CausalLM
from methods.engine.host_copies import from_host
from methods.engine.sampling import Sampling
from methods.engine.token_tree import Shape
from methods.speculative.eagle.decoder import EagleDrafter
from methods.speculative.eagle.network import Network
from methods.speculative.eagle.random_network import random_part
from methods.speculative.eagle.trees import Chain, Dynamic
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.verification import Greedy

_TOP_K = 10  # of the network's tree, as published


@dataclass(frozen=True, slots=True)
class Recorded:
    """A text that the target wrote, and its drafts.

    Attributes:
        tokens: ids after the prompt.
        drafts: by the number of tokens written before, the ids of all nodes.
    """

    tokens: list[int]
    drafts: list[list[int]]


class OracleDrafter:
    """Drafts recorded texts; wrong tokens where there is none.

    Args:
        acceptance: probability by level that the draft is right where all before it were.
        shape: of the tree; the first node of each level is the right one.
        vocab_size: of the target.
        network: runs before each proposal, and its drafts are dropped.
    """

    def __init__(
        self, acceptance: Sequence[float], shape: Shape, vocab_size: int, network: EagleDrafter | None = None
    ) -> None:
        self.acceptance, self.shape, self.vocab_size, self.network = acceptance, shape, vocab_size, network
        self.nodes = len(shape.parents)
        self.hidden_layers: Sequence[int] = network.hidden_layers if network else ()
        self.rounds = self.off_text_rounds = 0
        self._texts: list[Recorded | None] = []
        self._prompts: list[int] = []

    def replay(self, texts: Sequence[Recorded | None]) -> None:
        """Draft these texts in the next decode, one for each row."""
        self._texts = list(texts)

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        self._prompts = [len(prompt) for prompt in prompts]
        if self.network:
            self.network.reset(prompts, limit)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._texts = [self._texts[row] for row in rows]
        self._prompts = [self._prompts[row] for row in rows]
        if self.network:
            self.network.keep_rows(rows)

    def propose(self, context: Context) -> Draft:
        passes = self.network.propose(context).passes if self.network else 0
        rows = [self._drafted(row, tokens) for row, tokens in enumerate(context.tokens)]
        tokens = from_host(rows, context.root.device)
        if self.shape.width == 1:
            return Draft.chain(tokens, passes=passes)
        parents = torch.tensor(self.shape.parents, device=tokens.device).expand(len(rows), -1)
        levels = len(self.shape.level_ends)
        return Draft(tokens, parents, levels=levels, width=self.shape.width, passes=passes)

    def _drafted(self, row: int, tokens: list[int]) -> list[int]:
        """The ids of all nodes of a row's draft."""
        text, written = self._texts[row], tokens[self._prompts[row] :]
        if text is None or len(written) >= len(text.drafts):  # it is being recorded, or at its end
            return self._wrong(tokens[-1])
        self.rounds += 1
        if written != text.tokens[: len(written)]:
            self.off_text_rounds += 1
            return self._wrong(tokens[-1])
        return text.drafts[len(written)]

    def _wrong(self, token: int) -> list[int]:
        return [(token + 1 + column) % self.vocab_size for column in range(len(self.shape.parents))]

    def recorded(self, tokens: list[int], seed: str) -> Recorded:
        """A text with the draft of every place in it: which positions are right is drawn from the seed."""
        chance = random.Random(seed)
        ends = (0, *self.shape.level_ends)
        drafts = []
        for written in range(len(tokens)):
            right = self._right(chance)
            nodes: list[int] = []
            for level, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
                known = written + level < len(tokens)
                token = tokens[written + level] if known else tokens[-1]
                nodes += [(token + 1 + column) % self.vocab_size for column in range(end - start)]
                if known and level < right:
                    nodes[start] = token
            drafts.append(nodes)
        return Recorded(tokens, drafts)

    def _right(self, chance: random.Random) -> int:
        """How many positions of a draft are right."""
        for level, probability in enumerate(self.acceptance):
            if chance.random() >= probability:
                return level
        return len(self.acceptance)


class Oracle(SpeculativeDecoder, Rehearsed):
    """Drafts that are accepted as often as set.

    Args:
        acceptance: by position, the probability that a draft is right if all before it were; its length is that of the
            drafts.
        nodes: of a tree of so many levels; null: a chain.
        network: ``eagle``: a draft network of EAGLE-3 with random weights runs before each draft.
        seed: of what is right.

    Raises:
        ValueError: a probability outside of [0, 1], none, fewer nodes than positions, or an unknown network.
    """

    greedy_only = True
    speed_only = True
    paper = ""

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        acceptance: Sequence[float] = (0.8, 0.7, 0.6, 0.5),
        nodes: int | None = None,
        network: Literal["eagle"] | None = None,
        seed: int = 0,
    ) -> None:
        if not acceptance or not all(0 <= probability <= 1 for probability in acceptance):
            raise ValueError(
                f"acceptance must be probabilities from 0 to 1, one for each position, got {list(acceptance)}. Set "
                "method.acceptance=[0.8,0.7,0.6]."
            )
        self.seed = seed
        shape = Shape.of_children(_children(len(acceptance), nodes))
        if shape.width >= target.vocab_size:
            raise ValueError(
                f"nodes must leave fewer siblings than the vocabulary has tokens ({target.vocab_size}), got {nodes}. "
                "Lower method.nodes."
            )
        reader = None if network is None else _network(target, len(acceptance), len(shape.parents), seed)
        drafter = OracleDrafter([float(each) for each in acceptance], shape, target.vocab_size, reader)
        self._drafter = drafter
        self._recorder = SpeculativeDecoder(target, sampling, drafter, Greedy())
        self._known: dict[tuple[str, int], Recorded] = {}
        super().__init__(target, sampling, drafter, Greedy())

    def rehearse(self, prompts: Sequence[Int[Tensor, "_"]], limit: int) -> None:
        """Record the texts of some prompts, unless they are known."""
        names = [_digest(prompt) for prompt in prompts]
        if all((name, limit) in self._known for name in names):
            return
        self._drafter.replay([None] * len(prompts))
        texts = generate(self._recorder, prompts, limit)
        for name, tokens in zip(names, texts, strict=True):
            self._known[name, limit] = self._drafter.recorded(tokens, f"{self.seed}/{name}")

    def decode(self, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator) -> Iterator[Step]:
        self.rehearse(prompts, limit)
        self._drafter.replay([self._known[_digest(prompt), limit] for prompt in prompts])
        return super().decode(prompts, limit, rng)

    def memory(self) -> dict[str, int | None]:
        """That of the draft network, if one runs."""
        return dict(self._drafter.network.nbytes) if self._drafter.network else {}

    def stats(self) -> dict[str, Any]:
        """The mark by which it has no rank, and the share of rounds in which a row had left its recorded text."""
        return {"oracle": True, "off_text_rounds": self._drafter.off_text_rounds / max(1, self._drafter.rounds)}


def _children(levels: int, nodes: int | None) -> list[list[int]]:
    """Numbers of children of a tree, of whose nodes the first on each level have them all."""
    if nodes is None:
        return [[1]] * levels
    if nodes < levels:
        raise ValueError(
            f"nodes must be at least the number of positions in acceptance, {levels}, got {nodes}. Raise method.nodes, "
            "or leave it out for a chain."
        )
    return [[nodes // levels + (level < nodes % levels)] for level in range(levels)]


def _network(target: CausalLM, levels: int, nodes: int, seed: int) -> EagleDrafter:
    """A chain, or the tree of version 2 and 3, of as many nodes as candidates allow."""
    growth: Chain | Dynamic = Chain(levels, draw=False)
    if nodes > levels:
        most = _TOP_K + (levels - 1) * _TOP_K**2
        growth = Dynamic(min(nodes, most), levels, _TOP_K, target.device)
    return EagleDrafter(Network(target, random_part(target, seed)), growth, target.n_layers - 1)


def _digest(prompt: Tensor) -> str:
    return sha256(repr(prompt.tolist()).encode()).hexdigest()
