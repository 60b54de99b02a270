"""What follows the layers in a round of greedy decoding, on the device: argmax, which nodes are kept, packing.

It keeps what ``methods.speculative.verification.Greedy`` keeps and takes the same operators for every tree, so that it
can be recorded together with the pass (``methods.engine.cuda_graphs``). One tensor goes back to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from methods.engine.host_copies import Reading
from methods.engine.kv_cache import Cache
from methods.engine.token_tree import ABSENT, Parents, with_root


@dataclass(frozen=True, slots=True)
class Round:
    """What a pass keeps, the root in front; rows that keep fewer nodes than P have states without meaning after them.

    Attributes:
        hidden: after the final norm.
        hidden_layers: states after the layers asked for.
        bonus: the target's token after the last kept node.
        path: places of the kept nodes in these states, 0, 1, ..; ``ABSENT`` after the last.
        report: bonus, the kept nodes of the pass and the tokens of its draft nodes side by side, for the host.
        candidates: see ``causal_lm.Output``.
    """

    hidden: Float[Tensor, "B P D"]
    bonus: Int[Tensor, "B"]
    path: Int[Tensor, "B P"]
    report: Int[Tensor, "B R"]
    hidden_layers: dict[int, Float[Tensor, "B P D"]] = field(default_factory=dict)
    candidates: Int[Tensor, "B C k"] | None = None

    def read(self, reading: Reading | None = None) -> list[tuple[list[int], list[int]]]:
        """Per row, the columns of the kept draft nodes, and the tokens committed. The one read of a round.

        Args:
            reading: of the report, if it is under way.
        """
        levels, found = self.path.shape[1] - 1, []
        for bonus, *row in (reading or Reading(self.report)).read():
            columns = [node - 1 for node in row[1 : 1 + levels] if node != ABSENT]
            found.append((columns, [*row[1 + levels : 1 + levels + len(columns)], bonus]))
        return found


def kept_path(
    tokens: Int[Tensor, "B M"],
    parents: Parents,
    reach: Bool[Tensor, "B M M"] | None,
    levels: int,
    wanted: Int[Tensor, "B M"],
) -> Int[Tensor, "B P"]:
    """The nodes that are what the target wants after their parents, from the root down; P = levels + 1.

    Of equal siblings the one with the longer continuation is kept, where ``Greedy`` takes the first.

    Args:
        tokens: of the nodes, the root in front; ``ABSENT``: there is none.
        parents: of the other nodes; None: a chain.
        reach: ancestors of each node, its own included; None: a chain.
        levels: of the tree, or more.
        wanted: the target's token after each node.
    """
    batch, nodes = tokens.shape
    places = torch.arange(nodes, device=tokens.device)
    if parents is None or reach is None:
        count = (tokens[:, 1:] == wanted[:, :-1]).long().cumprod(1).sum(1, keepdim=True)
        return torch.where(places <= count, places, ABSENT)
    wrong = tokens != wanted.gather(1, with_root(parents))
    wrong[:, 0] = False
    alive = ~(reach & wrong[:, None]).any(2)
    end = torch.where(alive, reach.sum(2), 0).argmax(1)
    line = reach.gather(1, end[:, None, None].expand(-1, 1, nodes))[:, 0]
    ordered = torch.where(line, places, nodes).sort(1).values[:, : levels + 1]
    return torch.where(ordered < nodes, ordered, ABSENT)


def settled(
    tokens: Int[Tensor, "B M"], path: Int[Tensor, "B P"], wanted: Int[Tensor, "B M"]
) -> tuple[Int[Tensor, "B"], Int[Tensor, "B"], Int[Tensor, "B R"]]:
    """Bonus, tokens committed and the report of a path, see ``Round``."""
    moved = (path >= 0).sum(1)
    last = path.gather(1, moved[:, None] - 1)
    bonus = wanted.gather(1, last)
    report = torch.cat([bonus, path, tokens.gather(1, path[:, 1:].clamp(min=0))], dim=1)
    return bonus[:, 0], moved, report


def end_round(
    tokens: Int[Tensor, "B M"],
    parents: Parents,
    reach: Bool[Tensor, "B M M"] | None,
    levels: int,
    places: int,
    wanted: Int[Tensor, "B M"],
    states: Sequence[Float[Tensor, "B M _"]],
    cache: Cache,
) -> tuple[Int[Tensor, "B"], Int[Tensor, "B P"], Int[Tensor, "B R"], list[Float[Tensor, "B P _"]]]:
    """Keep nodes of a pass: they are packed in the cache, whose lengths grow on the device.

    Args:
        tokens, parents, reach, levels, wanted: see ``kept_path``.
        places: P, for the kept nodes; M of a chain.
        states: of all nodes.
        cache: of the pass.

    Returns:
        Bonus, path and report of the round, see ``Round``, and the states of the kept nodes.
    """
    line = kept_path(tokens, parents, reach, levels, wanted)
    kept = list(states)
    if parents is not None:
        cache.pack(line[:, 1:] - 1)
        line = F.pad(line, (0, places - line.shape[1]), value=ABSENT)
        nodes = line.clamp(min=0)[:, :, None]
        kept = [each.gather(1, nodes.expand(-1, -1, each.shape[2])) for each in states]
    bonus, moved, report = settled(tokens, line, wanted)
    cache.length += moved
    every = torch.arange(places, device=tokens.device)
    return bonus, torch.where(every < moved[:, None], every, ABSENT), report, kept


def kept_nodes(report: Int[Tensor, "B R"]) -> Int[Tensor, "B P"]:
    """The path in the report of a round, ``ABSENT`` after the last node."""
    return report[:, 1 : 1 + report.shape[1] // 2]
