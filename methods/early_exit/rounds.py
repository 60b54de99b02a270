"""Options that methods with exits share: the whole model judges what leaves early, or rows wait for others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxtyping import Int
from torch import Generator, Tensor

from methods.decoder import Guarantee, Step
from methods.early_exit.exits import Reader
from methods.early_exit.loop import EarlyExitDecoder, Policy
from methods.early_exit.regrouping import decode_regrouped
from methods.early_exit.verified import Verify, verified_rounds
from methods.engine.causal_lm import CausalLM
from methods.engine.sampling import Sampling


class RoundsDecoder(EarlyExitDecoder):
    """A target with an exit policy, and with one of two other orders of its passes.

    Args:
        verify: the whole model judges what leaves early (``verified.py``); None: it is committed as it is.
        regroup: in a batch, rows wait at their exits until so many are there (``regrouping.py``); None: all rows take
            a step together.

    Attributes:
        guarantee: what the policy promises, or the rule that judges.

    Raises:
        ValueError: a group of less than one row, or beside ``verify``, or of exits that the kernels cannot judge.
    """

    def __init__(
        self,
        target: CausalLM,
        sampling: Sampling,
        policy: Policy,
        reader: Reader,
        verify: Verify | None = None,
        regroup: int | None = None,
    ) -> None:
        self.verify, self._regroup = verify, regroup
        super().__init__(target, sampling, policy, reader)
        if regroup is not None:
            self._require_regrouping(regroup)

    def _require_regrouping(self, least: int) -> None:
        if least < 1:
            raise ValueError(f"regroup must be at least 1 or null, got {least}. Set method.regroup=8.")
        if self.verify is not None:
            raise ValueError(
                f"regroup must be null with accept=verify, whose rounds all rows share, got {least}. Set "
                "method.regroup=null, or method.accept=all."
            )
        if self.kernel_rule([0], [1]) is None:
            raise ValueError(
                f"regroup needs exits that the CPU kernels judge within a pass; for {self.target.name} and these "
                "settings they cannot. Set method.regroup=null."
            )

    def restart(self, policy: Policy) -> None:
        super().restart(policy)
        self._judged = self.verify if policy.guarantee is not Guarantee.EXACT else None
        if self._judged is not None:
            self.guarantee = self._judged.rule.guarantee

    @property
    def most_nodes(self) -> int:
        return 1 if self._judged is None else 1 + self._judged.most

    def stats(self) -> dict[str, Any]:
        found = super().stats()
        if self._judged is not None:
            found.pop("cost_over_layers", None)  # what was drafted is recorded by its own time
        return found

    def decode(self, prompts: list[Int[Tensor, "_"]], limit: int, rng: Generator) -> Iterator[Step]:
        if self._judged is not None:
            return verified_rounds(self, self._judged, prompts, limit, rng)
        if self._regroup is None or len(prompts) == 1:
            return super().decode(prompts, limit, rng)
        return decode_regrouped(self, prompts, limit, rng, self._regroup)
