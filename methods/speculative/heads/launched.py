"""Drafts by heads that read one state: recorded calls, which can be launched before the host has read a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from methods.drafting import Context, Draft, StatelessDrafter
from methods.engine.causal_lm import CausalLM, Output
from methods.engine.cuda_graphs import NODES, Calls, GraphedLM
from methods.engine.greedy_round import kept_nodes
from methods.speculative.recorded_network import Drafted


class LaunchedHeads(StatelessDrafter, ABC):
    """Drafts that depend on nothing but the target's state after the last kept token, and on the root.

    Args:
        target: with graphs, drafts are recorded beside them.
    """

    reads_last = True

    def __init__(self, target: CausalLM) -> None:
        self._calls: Calls | None = None
        self._launched: Draft | None = None
        if isinstance(target, GraphedLM):
            self._calls = Calls(target.graphs)
            target.graphs.drafts.add(self)

    @abstractmethod
    def _drafted(self, state: Float[Tensor, "B D"], root: Int[Tensor, "B"]) -> Drafted:
        """The draft after the root, and the tensors in it that change."""

    def reset(self, prompts: list[list[int]], limit: int) -> None:
        self._launched = None

    def reset_rows(self, prompts: Mapping[int, list[int]]) -> None:
        self._launched = None

    def keep_rows(self, rows: Sequence[int]) -> None:
        self._launched = None

    def skip(self, context: Context) -> None:
        self._launched = None

    def propose(self, context: Context) -> Draft:
        draft, self._launched = self._launched, None
        if draft is not None:
            return draft
        state, root = self._state(context), context.root
        if self._calls is None:
            return self._drafted(state, root)[1]
        return self._recorded(self._calls, torch.stack([root, torch.zeros_like(root)], 1), state[:, None])

    def launch(self, report: Int[Tensor, "B R"], output: Output, context: Context) -> Draft | None:
        """See ``LaunchedDrafter``."""
        if self._calls is not None:
            self._launched = self._recorded(self._calls, report, output.hidden)
        return self._launched

    def prepare(self, slots: Mapping[int, int]) -> None:
        """See ``methods.engine.cuda_graphs.RecordedDrafts``."""
        if self._calls is None or not (seen := self._calls.inputs(1)):
            return
        report, hidden = seen[0]
        widths = {inputs[1].shape[1] for inputs in seen}
        widths |= {nodes for nodes in NODES if nodes <= max(widths)}
        for batch in slots:
            for width in sorted(widths, reverse=True):
                inputs = [report.new_zeros(batch, 2 * width), hidden.new_zeros(batch, width, hidden.shape[2])]
                self._calls.record(self._after_round, inputs)

    def _state(self, context: Context) -> Float[Tensor, "B D"]:
        return context.last_hidden

    def _recorded(self, calls: Calls, report: Int[Tensor, "B R"], hidden: Float[Tensor, "B P D"]) -> Draft:
        draft: Draft = calls(self._after_round, [report, hidden])
        return draft

    def _after_round(self, report: Int[Tensor, "B R"], hidden: Float[Tensor, "B P D"]) -> Drafted:
        """The draft after a round, by the states of its kept nodes."""
        last = (kept_nodes(report) >= 0).sum(1) - 1
        state = hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2]))
        return self._drafted(state[:, 0], report[:, 0])
