"""River: a token exits onto cheap copies of the layers that are left (River-LLM, Shen and Zou 2026, arXiv 2604.18396).

The copies have weights of 4 bits and share the cache with the model. A token that leaves early runs through them to the
end, so later tokens find its keys and values in every layer, and it is read by the model's own norm. Nothing is
trained. A token leaves after a layer that hardly turns its state: the cosine between the states before and after that
layer must be above ``threshold``. At a threshold of 0 every token leaves at the first exit and nothing is asked; 1 is
the full model.

``accept=verify`` makes it a drafter: the copies draft, one pass of the whole model judges (``verified.py``). Layers
below the first exit have no copy.

Where every token leaves at one layer, the kernels run layers, copies and output matrix in one call. With copies of all
layers and lookups to help them drafts ``methods.speculative.staged``.

Published: 1.71x to 2.16x on mathematical reasoning and code generation.

Differences: the authors' code is not published, and their abstract alone was followed. It names exits onto layers that
share the cache, and decisions by the similarity of state transitions within a layer; the formula of the decision, and
the way of rounding, are this project's. Copies are rounded to blocks of 32 numbers with a scale and a zero each, and
activations to 8 bits (``methods.engine.linear``). ``output=int8`` also reads exits by a copy of the output matrix in 8
bits; in 16 bits it costs as much as eight layers of SmolLM2-135M. In a batch, layers between the first and the last
exit of a step run twice, for the rows that have exited and for the others.

The weights of the embedded SmolLM2-135M are read from a file of 4-bit numbers, so its copies lose only what the
rounding of activations loses. Of a model published in 16 bit they lose more.

Command: ``python -m bench method=river dataset=mtbench``
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from methods.decoder import Calibrated
from methods.drafting import AcceptanceRule
from methods.early_exit.calibrator import RiskTarget
from methods.early_exit.exits import Lens, require_depths
from methods.early_exit.loop import ExitDecision, ExitPoint, FixedExit, Policy, Walk, exact_if, layer_bytes
from methods.early_exit.rounds import RoundsDecoder
from methods.early_exit.threshold import Threshold
from methods.early_exit.verified import Judged, verification
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling, in_float

Output = Literal["full", "int8"]

_EVERY = 4
_GRID = (0.999, 0.998, 0.995, 0.99, 0.98, 0.97, 0.95, 0.9, 0.8, 0.5, 0.0)  # of cosines, which lie near 1


class States(Lens):
    """Exits are not read before the copies have run: the states as they are."""

    def read(self, depth: int, hidden: Float[Tensor, "*b D"]) -> Float[Tensor, "*b D"]:
        return hidden


class RiverPolicy(Policy):
    """Leave after a layer whose output points where its input did."""

    def __init__(self, depths: Sequence[int], layers: int, threshold: Threshold) -> None:
        self.threshold, self.deepest = threshold, layers
        self.fixed = layers if threshold.never else depths[0] if threshold.value == 0 else None
        self.guarantee = exact_if(threshold.never)
        self._exits = frozenset(depths)
        every = sorted({stop for depth in depths for stop in (depth - 1, depth)} | {layers})
        first = [depths[0]] if threshold.value == 0 else every
        self._stops = [layers] if threshold.never else first
        self._before: Tensor | None = None

    def stops(self, roots: Sequence[int]) -> Sequence[int]:
        return self._stops

    def decide(self, point: ExitPoint) -> ExitDecision:
        """One host read per exit, none at the layer before it."""
        before, self._before = self._before, in_float(point.hidden)
        if point.depth not in self._exits:
            return ExitDecision([False] * len(point.open))
        assert before is not None, "the layer before an exit is a stop"
        return ExitDecision((F.cosine_similarity(before, self._before, dim=-1) > self.threshold.value).tolist())


class River(RoundsDecoder, Calibrated):
    """Early exit onto 4-bit copies of the layers that are left.

    Args:
        threshold: cosine between the states before and after a layer above which a token leaves; 0: all leave at the
            first exit; 1: the full model.
        exits: depths that are checked, in layers run, from 2 on, or from 1 with a threshold of 0; None: every fourth.
        output: how exits are read: by the model's output matrix (``full``) or a copy of it in 8 bits (``int8``).
        accept: ``all`` tokens that exit, or ``verify`` them by the whole model, see ``verified.py``.
        rule: exact rule of ``verify``; None: keep a token while the whole model picks it too.
        max_pending: most tokens that wait to be verified.
        calibration: a risk target for which the threshold is chosen; replaces ``threshold``.

    Raises:
        ValueError: no 4-bit weights for this model or here (see ``CausalLM.rounded``), or an option out of range.
    """

    trainable = False
    needs = "nothing"
    model_kind = "causal"
    paper = "Shen and Zou 2026, arXiv 2604.18396"

    light: CausalLM

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        threshold: float = 0.0,
        exits: Sequence[int] | None = None,
        output: Output = "int8",
        accept: Judged = "all",
        rule: AcceptanceRule | None = None,
        max_pending: int = 8,
        calibration: RiskTarget | None = None,
    ) -> None:
        depths = tuple(range(min(_EVERY, target.n_layers - 1), target.n_layers, _EVERY)) if exits is None else exits
        reader = States(target)
        require_depths(depths, target, reader, "method.exits")
        self._depths, self._output = tuple(depths), output
        self.light = target.rounded(depths[0], "int8" if output == "int8" else None)
        copies = target.n_layers - depths[0]
        self._copy_share = self.light.int4_bytes / copies / layer_bytes(target)
        self.calibrator = None if calibration is None else calibration.over(_GRID, sampling)
        verify = verification(accept, rule, max_pending, sampling, self.calibrator is not None)
        super().__init__(target, sampling, self._policy(threshold, target.n_layers), reader, verify)

    def set_threshold(self, threshold: float) -> None:
        self.restart(self._policy(threshold, self.target.n_layers))

    def _policy(self, threshold: float, layers: int) -> RiverPolicy:
        found = Threshold(threshold)
        if 0 < found.value < 1 and self._depths[0] < 2:
            raise ValueError(
                f"method.exits must begin at 2 with a threshold between 0 and 1, which compares the states before and "
                f"after a layer, got {self._depths[0]}. Set method.exits, or method.threshold=0."
            )
        return RiverPolicy(self._depths, layers, found)

    def memory(self) -> dict[str, int | None]:
        """Memory beside the target's."""
        return {"copies": self.light.int4_bytes + (self.light.output_bytes if self._output == "int8" else 0)}

    def fixed_exit(self) -> FixedExit | None:
        """With a threshold of 0 the view with the copies runs all of its layers, with 1 the model does."""
        target, depth, light = self.target, self.policy.fixed, self.light
        if depth is None or not light.ends_fused:
            return None
        return FixedExit(light if depth < target.n_layers else target, target.n_layers, depth)

    def _count_fixed(self, fixed: FixedExit) -> None:
        self.counters.layers += fixed.depth
        self._count_copies(self.target.n_layers - fixed.depth)
        self._count_output(fixed.depth < self.target.n_layers)

    def _count_copies(self, layers: int) -> None:
        self.counters.copies += layers * self._copy_share

    def _count_output(self, copied: bool) -> None:
        """An output matrix; ``copied``: of what the copies made."""
        if copied and self._output == "int8":
            self.counters.copies += self.light.output_bytes / layer_bytes(self.target)
        else:
            self.counters.columns += self.target.vocab_size

    def _finish(self, walk: Walk, logits: Float[Tensor, "B V"] | None) -> Float[Tensor, "B V"]:
        """Run the copies of the layers that are left, and read the states after them."""
        target, light = self.target, self.light
        above = range(walk.depth, target.n_layers)
        if above:
            light.run(walk.state, above)
        self._count_copies(len(above) + walk.mixed)
        ready = target.norm(walk.state.hidden[:, 0])
        early = [depth < target.n_layers for depth in walk.depths]
        if self._output == "full" or not any(early):
            self._count_output(copied=False)
            return target.head(ready)
        self._count_output(copied=True)
        if all(early):
            return light.head(ready)
        self._count_output(copied=False)
        left = torch.tensor(early, device=ready.device)[:, None]
        return torch.where(left, light.head(ready), target.head(ready))
