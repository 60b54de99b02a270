"""Common to decoders with trained heads: memory, and the warning for published ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from methods.drafting import AcceptanceRule, Drafter
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling
from methods.speculative.budget import Costs, CostsOption, Unasked, affordable
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.published.formats import check_plausible


@runtime_checkable
class HeadsDrafter(Drafter, Protocol):
    """A drafter that reports the memory of its matrices."""

    @property
    def nbytes(self) -> dict[str, int]: ...


class HeadsDecoder(SpeculativeDecoder):
    """A decoder whose drafter was trained.

    Args:
        published: the origin of its heads, if they are published ones.
        costs: see ``SpeculativeDecoder``.
    """

    trainable = True
    needs = "training"
    min_warmup = 3

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        drafter: HeadsDrafter,
        rule: AcceptanceRule,
        published: str | None = None,
        costs: CostsOption = None,
    ) -> None:
        self._heads, self._published = drafter, published
        super().__init__(target, sampling, drafter, rule, costs)

    def _asked(self) -> Drafter:
        self._settle()
        return super()._asked()

    def _settle(self) -> None:
        """Before a text: draft with the heads, or not at all."""
        self.drafter = self._heads if self._pays(self.costs, self._heads.nodes) else Unasked(self._heads.nodes)

    def _pays(self, costs: Costs | None, nodes: int, part: str = "") -> bool:
        """Whether a drafter of so many nodes drafts in the next text; see ``methods.speculative.budget``.

        Args:
            part: of the drafter.
        """
        gained = self._tally.gained.pop(part, None)
        if costs is None:
            return True
        return affordable(costs, nodes) and not self._texts.sits_out(costs, gained)

    def memory(self) -> dict[str, int | None]:
        """Memory beside the target's, such as the heads, and the rows of its output matrix that they use."""
        return dict(self._heads.nbytes)

    @property
    def draft_weights(self) -> str | None:
        return self.target.drafts_rounded_to

    def acceptance_warning(self, rates: Sequence[Sequence[float]]) -> str | None:
        """A warning where published heads draft implausibly badly."""
        return check_plausible(self._published, rates) if self._published else None
