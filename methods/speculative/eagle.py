"""EAGLE: a draft network of one layer guesses the target's next features, and from them a chain or a tree of tokens.

Version 1 (Li et al. 2024, arXiv 2401.15077) predicts the target's last state from the one before and the token that was
drawn behind it, and drafts a tree of fixed shape. Version 2 (Li et al. 2024, arXiv 2406.16858) takes the same network
and lets its confidence shape the tree: on each level the best nodes by the product of their probabilities are expanded,
and of all candidates the best become the draft (sec. 4). Version 3 (Li et al. 2025, arXiv 2503.01840) feeds the network
with states of three layers and trains it on features of its own. After each pass of the target the network reads the
kept tokens again with the target's true features. The network must be trained; the target stays as it is:

    python -m bench.train method=eagle model=smollm2

Published: MT-bench, greedy, one A100 or 3090: EAGLE 2.7 to 3.5x with LLaMA2-Chat 70B; EAGLE-2 3.62x and 4.98 tokens
per step with Vicuna-7B; EAGLE-3 5.58x and 6.65 with Vicuna-13B, where Spec-Bench finds 3.02x and 5.71 on an A100.

Differences: batched, ragged rows. Networks trained here propose from a reduced vocabulary in every version. The dynamic
tree of version 2 breaks ties so that no node stands without its parent. Trees of the most likely tokens are not drawn,
so at a temperature they are judged by the exact rule for such drafts; ``draw`` draws the children of a fixed tree
without replacement, as version 1 does, and judges them by their probabilities.

Command: ``python -m bench method=eagle dataset=mtbench``
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LlamaConfig

from methods.decoder import Context, Draft, MissingPart
from methods.engine.families import PROVEN_ROPE
from methods.engine.lm import CausalLM
from methods.engine.sampling import Sampling, argmax
from methods.engine.tree import Shape
from methods.speculative.eagle_draft import TRAIN, VOCABULARY, WEIGHTS, Network, Part, Reader, Spec, vocabulary_of
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.token_recycling import top_candidates
from methods.speculative.verify import default_rule

TREES: dict[str, list[list[int]]] = {
    # 25 nodes, 4 + 8 + 8 + 3 + 2 on five levels: the tree in the authors' code for version 1.
    "paper": [[4], [3, 2, 2, 1], [3, 2, 2, 1], [3], [2]],
    # 7 nodes, for hardware on which nodes cost time.
    "small": [[3], [2, 1], [1]],
}
"""Name -> numbers of children, as ``methods.engine.tree.Shape.of_children`` reads them."""

TreeKind = Literal["auto", "chain", "static", "dynamic"]

_OF_LLAMA = (  # of a published configuration, what a network's layer depends on
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
)
_FLOOR = 1e-9  # probability that any token of the draft vocabulary keeps when it is drawn from


@runtime_checkable
class Growth(Protocol):
    """How a tree grows from the feature behind the root.

    Attributes:
        nodes: of the tree.
        guesses: pairs that it asks the network about.
        levels: of the tree.
    """

    nodes: int
    guesses: int
    levels: int

    def grow(self, reader: Reader, feature: Float[Tensor, "B 1 D"], context: Context) -> Draft:
        """One tree for every row."""
        ...


class Chain:
    """One path of the most likely tokens, or of drawn ones.

    Args:
        gamma: nodes.
        draw: draw each token instead of taking the most likely one.
    """

    def __init__(self, gamma: int, draw: bool) -> None:
        self.nodes, self.guesses, self.levels, self._draw = gamma, gamma - 1, gamma, draw

    def grow(self, reader: Reader, feature: Float[Tensor, "B 1 D"], context: Context) -> Draft:
        network, drawn = reader.network, self._draw and not context.sampling.greedy
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for level in range(self.levels):
            logits, feature = network.logits(feature)
            if drawn:
                chances = _chances(logits, context.sampling)
                best = _draw_different(chances, 1, context)[..., 0]
                probs.append(_everywhere(chances, network))
            else:
                best = argmax(logits)
            tokens.append(network.vocabulary.tokens(best))
            if level + 1 < self.levels:
                feature = reader.guess(feature, tokens[-1], level)
        return Draft.chain(torch.cat(tokens, 1), torch.cat(probs, 1) if drawn else None, passes=self.levels)


class Level:
    """One level of a fixed tree: which nodes it has and which of them have children.

    Args:
        shape: the tree.
        number: of the level, 0 the first.
        open_columns: columns of the nodes with children on the levels above, in the order in which they were guessed;
            the last ``above`` of them are parents of this level.
        above: how many that are; 1, the root, for the first level.
    """

    def __init__(
        self, shape: Shape, number: int, open_columns: Sequence[int], above: int, device: torch.device
    ) -> None:
        start, end = (0, *shape.level_ends)[number : number + 2]
        parents = list(open_columns[len(open_columns) - above :]) if number else [-1]
        inner = [column for column in range(start, end) if column in shape.parents]
        self.start, self.end, self.inner = start, end, inner
        self.width = max(shape.ranks[start:end]) + 1
        of = [parents.index(shape.parents[column]) for column in range(start, end)]
        self.parents = torch.tensor(of, device=device)
        self.ranks = torch.tensor(shape.ranks[start:end], device=device)
        self.open = torch.tensor([column - start for column in inner], dtype=torch.long, device=device)
        seen = [*open_columns, *inner]
        reach = [[other in _line(shape, column) for other in seen] for column in inner]
        self.reach = torch.tensor(reach, dtype=torch.bool, device=device)[None]


class Static:
    """A tree that has the same shape in every round.

    Args:
        shape: which candidate of which node each node is.
        draw: draw the children of a node without replacement instead of taking the most likely tokens.
    """

    def __init__(self, shape: Shape, draw: bool, device: torch.device) -> None:
        self._draw, self._width = draw, shape.width
        self._levels: list[Level] = []
        opened: list[int] = []
        for number in range(len(shape.level_ends)):
            above = len(self._levels[-1].inner) if self._levels else 1
            self._levels.append(Level(shape, number, opened, above, device))
            opened = opened + self._levels[-1].inner
        self.nodes, self.guesses, self.levels = len(shape.parents), len(opened), len(self._levels)
        self._parents = torch.tensor(shape.parents, device=device)

    def grow(self, reader: Reader, feature: Float[Tensor, "B 1 D"], context: Context) -> Draft:
        network, drawn = reader.network, self._draw and not context.sampling.greedy
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for number, level in enumerate(self._levels):
            logits, feature = network.logits(feature)
            if drawn:
                chances = _chances(logits, context.sampling)
                places = _draw_different(chances, level.width, context)
                probs.append(_everywhere(chances, network)[:, level.parents])
            else:
                places = top_candidates(logits, level.width)
            tokens.append(network.vocabulary.tokens(places[:, level.parents, level.ranks]))
            if level.inner:
                behind = feature[:, level.parents[level.open]]
                feature = reader.guess(behind, tokens[-1][:, level.open], number, level.reach)
        return Draft(
            torch.cat(tokens, 1),
            self._parents.expand(len(feature), -1),
            torch.cat(probs, 1) if drawn else None,
            levels=self.levels,
            width=self._width,
            passes=self.levels,
        )


class Dynamic:
    """A tree shaped by the network's confidence (EAGLE-2, sec. 4).

    Args:
        nodes: of the tree: the best of all candidates.
        levels: most levels.
        top_k: candidates of a node, and nodes of a level that are expanded.
    """

    def __init__(self, nodes: int, levels: int, top_k: int, device: torch.device) -> None:
        self.nodes, self.levels, self._k = nodes, levels, top_k
        self.guesses = (levels - 1) * top_k
        self._roots = torch.full((1, top_k), -1, device=device)
        self._columns = torch.arange(top_k, device=device)[None]
        self._self = torch.eye(top_k, dtype=torch.bool, device=device)[None]

    def grow(self, reader: Reader, feature: Float[Tensor, "B 1 D"], context: Context) -> Draft:
        batch, k = len(feature), self._k
        logits, feature = reader.network.logits(feature)
        scores, tokens = (found[:, 0] for found in self._candidates(reader.network, logits))
        parents, columns = self._roots.expand(batch, -1), self._columns.expand(batch, -1)
        every = [(scores, tokens, parents)]
        beam, feature, reach = (scores, tokens, columns), feature.expand(-1, k, -1), self._self.expand(batch, -1, -1)
        for level in range(self.levels - 1):
            logits, feature = reader.network.logits(reader.guess(feature, beam[1], level, reach))
            gained, tokens = self._candidates(reader.network, logits)
            scores = _below(beam[0])[:, :, None].minimum(beam[0][:, :, None] + gained).flatten(1)
            start, tokens = k + level * k * k, tokens.flatten(1)
            every.append((scores, tokens, beam[2].repeat_interleave(k, 1)))
            if level + 2 < self.levels:
                values, chosen = scores.topk(k)
                source = chosen // k
                beam = (values, tokens.gather(1, chosen), chosen + start)
                feature = feature.gather(1, source[:, :, None].expand(-1, -1, feature.shape[2]))
                seen = reach.gather(1, source[:, :, None].expand(-1, -1, reach.shape[2]))
                reach = torch.cat([seen, self._self.expand(batch, -1, -1)], dim=2)
        return self._best(*(torch.cat(parts, 1) for parts in zip(*every, strict=True)))

    def _candidates(
        self, network: Network, logits: Float[Tensor, "B m v"]
    ) -> tuple[Float[Tensor, "B m k"], Int[Tensor, "B m k"]]:
        """Log-probabilities and ids of the k most likely tokens behind each node."""
        places = top_candidates(logits, self._k)
        exact = logits if logits.dtype == torch.float64 else logits.float()
        gained = exact.gather(2, places) - exact.logsumexp(-1, keepdim=True)
        return gained, network.vocabulary.tokens(places)

    def _best(self, scores: Float[Tensor, "B C"], tokens: Int[Tensor, "B C"], parents: Int[Tensor, "B C"]) -> Draft:
        """The best candidates in their order. A node's score is below its parent's, so the parent is one of them."""
        kept = scores.topk(self.nodes).indices.sort(1).values
        above = parents.gather(1, kept)
        columns = torch.searchsorted(kept, above.clamp(min=0))
        return Draft(
            tokens.gather(1, kept),
            torch.where(above < 0, above, columns),
            levels=self.levels,
            width=self._k,
            passes=self.levels,
        )


class EagleDrafter:
    """Reads what was committed with the target's features, then lets a tree grow behind it."""

    def __init__(self, network: Network, growth: Growth, last_layer: int) -> None:
        self.network, self.growth, self.nodes = network, growth, growth.nodes
        # Behind a prefill the states of all positions are there only if some layer is tapped.
        self.taps: Sequence[int] = network.spec.taps or (last_layer,)
        self._reader: Reader | None = None

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        growth = self.growth
        capacity = max(len(prompt) for prompt in prompts) + limit + 2 * (growth.levels + 1) + growth.guesses
        self._reader = Reader(self.network, len(prompts), capacity)

    def propose(self, context: Context) -> Draft:
        assert self._reader is not None, "reset comes before propose"
        return self.growth.grow(self._reader, self._catch_up(context), context)

    def _catch_up(self, context: Context) -> Float[Tensor, "B 1 D"]:
        """Read the pairs that the last pass completed; the feature behind the one with the root.

        A row at its limit has no new pair; what it reads is forgotten, and what it drafts is never looked at.
        """
        reader = self._reader
        assert reader is not None
        pending = [row[length + 1 :] for row, length in zip(context.tokens, reader.lengths, strict=True)]
        counts = [len(new) for new in pending]
        width = max(counts)
        tokens = torch.tensor([new + [0] * (width - len(new)) for new in pending], device=self.network.device)
        output = context.output
        rows = None if context.path is None else context.path[:, :width].clamp(min=0)
        hidden = _kept(output.hidden, rows, width)
        taps = [_kept(output.taps[tap], rows, width) for tap in self.network.spec.taps]
        return reader.read(self.network.feature(hidden, taps), tokens, counts)


def _kept(states: Float[Tensor, "B P D"], rows: Int[Tensor, "B W"] | None, width: int) -> Float[Tensor, "B W D"]:
    """The states of a pass at the kept nodes; None: at the first ``width`` of them."""
    if rows is None:
        return states[:, :width]
    return states.gather(1, rows[:, :, None].expand(-1, -1, states.shape[2]))


def _below(scores: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """The next smaller numbers: what a sure child (log q = 0) may reach at most, so that its parent stays ahead."""
    return scores.nextafter(torch.full_like(scores, -torch.inf))


def _chances(logits: Float[Tensor, "B m v"], sampling: Sampling) -> Float[Tensor, "B m v"]:
    """What is drawn from: the processed distribution, and a little of every token, lest siblings run out."""
    probs = sampling.probs(logits) + _FLOOR
    return probs / probs.sum(-1, keepdim=True)


def _draw_different(chances: Float[Tensor, "B m v"], count: int, context: Context) -> Int[Tensor, "B m k"]:
    """``count`` places without replacement, in the order drawn: the winners of a race of exponential clocks."""
    clocks = torch.empty_like(chances).exponential_(generator=context.rng)
    return (chances / clocks).topk(count).indices


def _everywhere(chances: Float[Tensor, "B m v"], network: Network) -> Float[Tensor, "B m V"]:
    """Probabilities over the whole vocabulary."""
    vocabulary = network.vocabulary
    if vocabulary.full:
        return chances
    whole = chances.new_zeros(*chances.shape[:2], vocabulary.size)
    return whole.index_copy_(2, vocabulary.ids, chances)


def _line(shape: Shape, column: int) -> set[int]:
    """A node and its ancestors."""
    line = set()
    while column >= 0:
        line.add(column)
        column = shape.parents[column]
    return line


class Eagle(SpeculativeDecoder):
    """EAGLE 1, 2 and 3.

    Args:
        target: model that verifies.
        sampling: how its distribution is processed.
        version: 1, 2 or 3; must be that of the trained network, of which 1 and 2 share one.
        tree: ``chain``; ``static``, the fixed tree ``shape``; ``dynamic``, shaped by confidence; ``auto``: static for
            version 1, else dynamic.
        gamma: nodes of a chain.
        shape: of a static tree: a name in ``TREES``, or numbers of children, level by level and breadth first.
        depth: levels of a dynamic tree.
        top_k: of a dynamic tree: candidates of a node, and nodes that are expanded on a level.
        nodes: of a dynamic tree.
        draw: at a temperature, draw the nodes of a chain or a static tree.
        checkpoint: folder of a trained network, or a published one by path or hub id; None: the one prepared for this
            model.
        part: its folder, from the runner.

    Raises:
        MissingPart: no network.
        ValueError: a network of another target or version, or an option out of range.
    """

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        version: Literal[1, 2, 3] = 3,
        tree: TreeKind = "auto",
        gamma: int = 4,
        shape: str | list[list[int]] = "paper",
        depth: int = 6,
        top_k: int = 10,
        nodes: int = 59,
        draw: bool = False,
        checkpoint: str | Path | None = None,
        part: Path | None = None,
    ) -> None:
        found = _part(checkpoint, part, target)
        _require_version(version, found.spec.version)
        kind = tree if tree != "auto" else ("static" if version == 1 else "dynamic")
        growth = _growth(kind, gamma, shape, (nodes, depth, top_k), draw, len(found.vocabulary), target.device)
        self._network = Network(target, found)
        drafter = EagleDrafter(self._network, growth, target.n_layers - 1)
        super().__init__(
            target, sampling, drafter, default_rule(sampling, "chain" if kind == "chain" else "tree", draw)
        )

    def own_bytes(self) -> dict[str, int | None]:
        """Memory beside the target's: the draft network, and its output matrix where it is no view of the target's."""
        return dict(self._network.nbytes)


def _growth(
    kind: str,
    gamma: int,
    shape: str | list[list[int]],
    dynamic: tuple[int, int, int],
    draw: bool,
    vocabulary: int,
    device: torch.device,
) -> Growth:
    if kind == "chain":
        if gamma < 1:
            raise ValueError(f"gamma={gamma} came; a chain has at least 1 node. Set method.gamma=4 or so.")
        return Chain(gamma, draw)
    if kind == "static":
        return Static(_shape(shape, vocabulary), draw, device)
    nodes, depth, top_k = dynamic
    most = top_k + (depth - 1) * top_k**2
    if draw or depth < 1 or not 1 <= top_k <= vocabulary or not depth <= nodes <= most:
        raise ValueError(
            f"tree=dynamic came with depth={depth}, top_k={top_k}, nodes={nodes}, draw={draw}; depth >= 1, 1 <= top_k "
            f"<= {vocabulary} (the draft vocabulary), depth <= nodes <= top_k + (depth - 1) top_k^2 and draw=false are "
            "allowed. Correct method.depth, method.top_k and method.nodes, or set method.tree=static to draw."
        )
    return Dynamic(nodes, depth, top_k, device)


def _shape(given: str | list[list[int]], vocabulary: int) -> Shape:
    if isinstance(given, str) and given not in TREES:
        raise ValueError(
            f"shape={given} came; {', '.join(TREES)} or numbers of children are allowed, e.g. [[3],[2,1]]."
        )
    shape = Shape.of_children(TREES[given] if isinstance(given, str) else given)
    if not 1 <= shape.width <= vocabulary:
        raise ValueError(
            f"shape={given} gives a node {shape.width} children; 1 to {vocabulary}, the size of the draft vocabulary, "
            "are allowed. Name a tree with nodes, or a narrower one."
        )
    return shape


# -- where the network comes from -------------------------------------------------------------------------------------


def _require_version(wanted: int, found: int) -> None:
    if (3 if wanted == 3 else 1) != found:
        theirs = "3" if found == 3 else "1 (which version 2 uses too)"
        raise ValueError(
            f"version={wanted} came, and the trained network is of version {theirs}; both must be the same. Set "
            f"method.version={found}, or train the other: {TRAIN} train.version={wanted} force=true."
        )


def _part(checkpoint: str | Path | None, part: Path | None, target: CausalLM) -> Part:
    """The user's own network, in our format or a published one, else the prepared one."""
    if checkpoint is None:
        if part is None:
            raise MissingPart(
                "eagle has no draft network for this model; it needs one to draft with. Train it: "
                f"{TRAIN}; or name yours, or a published one: method.checkpoint=FOLDER_OR_HUB_ID."
            )
        return Part.load(part, target)
    folder = Path(checkpoint).expanduser()
    if (folder / WEIGHTS).is_file():
        return Part.load(folder, target)
    from methods.speculative import published

    return of_published(published.read(checkpoint, target), str(checkpoint), target)


def of_published(found: object, where: str, target: CausalLM) -> Part:
    """A published network as one of ours.

    Raises:
        ValueError: heads of another method, or rotary positions that are not proven.
    """
    from methods.speculative.published import EagleWeights

    if not isinstance(found, EagleWeights):
        kind = type(found).__name__.removesuffix("Weights")
        raise ValueError(
            f"{where} holds heads of {kind}; method=eagle reads those of EAGLE. Use the method of that name."
        )
    known = {key: found.config[key] for key in _OF_LLAMA if found.config.get(key) is not None}
    config = LlamaConfig(**known)
    rope = dict(config.rope_parameters)  # type: ignore[arg-type]
    if rope.get("rope_type") not in PROVEN_ROPE:
        raise ValueError(
            f"{where} has rotary positions of type {rope.get('rope_type')}; {', '.join(PROVEN_ROPE)} are proven. "
            f"Choose another network, or train one: {TRAIN}."
        )
    tensors = {name: tensor for name, tensor in found.tensors.items() if tensor is not None}
    offsets = tensors.pop(VOCABULARY, None)
    layer = "midlayer" if found.version == 3 else "layers.0"
    spec = Spec(
        version=found.version,
        hidden_size=target.hidden_size,
        intermediate_size=tensors[f"{layer}.mlp.gate_proj.weight"].shape[0],
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or target.hidden_size // config.num_attention_heads,
        rms_eps=config.rms_norm_eps,
        layers=target.n_layers,
        vocab_size=target.vocab_size,
        rope=rope,
        taps=tuple(found.taps),
        norm_before_residual=found.norm_before_residual,
        norm_before_fc=found.norm_before_fc,
        fc_norm=found.fc_norm,
        norm_output=found.norm_output,
    )
    part = Part(spec, tensors, vocabulary_of(offsets, target.vocab_size))
    part.require_shapes(where)
    for note in found.notes:
        warnings.warn(f"{where}: {note}", stacklevel=2)
    return part
