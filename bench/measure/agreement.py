"""Teacher-forced check of outputs: does the target agree with what was written?

The target reads prompt and output in one pass; every id must be its argmax or within a stated gap of log-probability (a
near-tie). Passes over one and over many tokens round differently, so in 16 bit equal text is reported, not required; in
32 bit every id should be the argmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bench.records.run_folder import Sample
from bench.utils.progress import Progress

NEAR_TIE_GAP = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,
    torch.float16: 0.0625,
    torch.bfloat16: 0.5,
}
"""Largest gap of log-probability that rounding explains.

A bfloat16 logit between 16 and 32, as the largest ones of a language model are, is a multiple of 1/8, and
SmolLM2-135M's logits in bfloat16 differ by up to 0.47 from those in float32. float16 has three more bits, an eighth of
that. In float32 sums in another order differ by some 1e-5 per logit; 1e-3 is far below the gap to a wrong token.
"""


@runtime_checkable
class Scorer(Protocol):
    """What the check needs of a target, e.g. ``methods.engine.causal_lm.CausalLM``."""

    device: torch.device
    dtype: torch.dtype

    def score(self, tokens: Int[Tensor, "T"], start: int = 0) -> Float[Tensor, "R V"]:
        """Logits after tokens ``start`` .. T - 1; row i judges token ``start + i + 1``."""
        ...


Key = tuple[tuple[int, ...], tuple[int, ...]]  # ids of a prompt and of an output


@dataclass(frozen=True, slots=True)
class Check:
    """One output under the target.

    Attributes:
        gaps: per output token, log-probability of the target's argmax minus that of the token; 0 where they agree.
        near_tie: the gap up to which a token that is not the argmax is excused.
        logprob: sum of the tokens' log-probabilities under the target at temperature 1.
        broken: first output token whose logits have NaN or +infinity or are all -infinity, from 0; None: none has.
    """

    gaps: list[float]
    near_tie: float
    logprob: float
    broken: int | None = None

    @property
    def exact(self) -> int:
        """Tokens that are the argmax, also among equal logits."""
        return sum(gap == 0.0 for gap in self.gaps)

    @property
    def near_ties(self) -> int:
        return sum(0.0 < gap <= self.near_tie for gap in self.gaps)

    @property
    def violations(self) -> int:
        return len(self.gaps) - self.exact - self.near_ties

    @property
    def first_divergence(self) -> int | None:
        return next((i for i, gap in enumerate(self.gaps) if gap != 0.0), None)

    @property
    def max_gap(self) -> float:
        return max(self.gaps, default=0.0)


def near_tie_gap(dtype: torch.dtype, wanted: float | None = None) -> float:
    return NEAR_TIE_GAP.get(dtype, 0.5) if wanted is None else wanted


Known = dict[Key, Check]


@torch.inference_mode()
def check(target: Scorer, prompt_ids: Sequence[int], output_ids: Sequence[int], near_tie: float) -> Check:
    """Score an output of at least one id with the target; the last id is judged, not read."""
    ids = torch.tensor([*prompt_ids, *output_ids], dtype=torch.long, device=target.device)
    logits = target.score(ids[:-1], start=len(prompt_ids) - 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    highest = logits.amax(dim=1)  # of NaN if one is
    broken = (~highest.isfinite()).nonzero()[:, 0].tolist()
    if broken:
        return Check([math.inf] * len(output_ids), near_tie, -math.inf, broken[0])
    written = logits.gather(1, ids[len(prompt_ids) :, None])[:, 0]
    gaps = highest - written  # the normaliser is the same for both and cancels
    logprob = (written - logits.logsumexp(dim=1)).sum()
    return Check([max(0.0, gap) for gap in gaps.tolist()], near_tie, float(logprob))


def check_run(
    target: Scorer, samples: Sequence[Sample], near_tie: float, *, greedy: bool, known: Known | None = None
) -> dict[str, Any]:
    """Agreement of a run's outputs with the target, over the measured prompts (first repeat).

    The baseline's outputs are the target's own, so what they show is what rounding alone does on this machine.

    Args:
        target: the model.
        samples: of the run, both arms.
        near_tie: the stated gap.
        greedy: whether tokens were chosen by argmax; drawn tokens need not be it, so only their log-probability counts.
        known: outputs that this target has read before, and those it reads now; for several runs with one baseline.

    Returns:
        ``exact``, ``near_tie`` and ``violation`` as shares of the tokens (None when sampling, with ``reason``),
        ``first_divergence``, ``max_gap``, ``mean_logprob``, ``identical_to_baseline``, the counts, and
        ``baseline`` with the same for the other arm. ``not_finite``: the places where logits are no numbers, if any.
    """
    arms = {arm: _first_repeat(samples, arm) for arm in ("method", "baseline")}
    results = _check_all(target, [*arms["method"].values(), *arms["baseline"].values()], near_tie, known)
    own, reference = ([results[_key(sample)] for sample in rows.values()] for rows in arms.values())
    checked = ((name, results[_key(row)].broken) for rows in arms.values() for name, row in rows.items())
    broken = dict.fromkeys(f"prompt {name}, token {place + 1}" for name, place in checked if place is not None)
    return {
        **({"not_finite": list(broken)} if broken else {}),
        **_aggregate(own, greedy),
        "near_tie_gap": near_tie,
        "identical_to_baseline": _identical(arms["method"], arms["baseline"]) if greedy else None,
        "reason": None if greedy else "tokens were drawn, and a drawn token need not be the most likely one",
        "baseline": _aggregate(reference, greedy),
    }


def check_own(verifier: Scorer, samples: Sequence[Sample], near_tie: float, *, greedy: bool) -> dict[str, Any]:
    """Agreement of the method's outputs with the model of its own whose text it writes, see ``check_run``."""
    results = _check_all(verifier, _first_repeat(samples, "method").values(), near_tie)
    return _aggregate(list(results.values()), greedy)


def compare(samples: Sequence[Sample], *, greedy: bool, reason: str) -> dict[str, Any]:
    """What is left of ``check_run`` where the target cannot judge: how many outputs are the baseline's.

    Args:
        reason: why it cannot.
    """
    arms = {arm: _first_repeat(samples, arm) for arm in ("method", "baseline")}
    nothing = _aggregate([], greedy=False)
    return {
        **nothing,
        "near_tie_gap": None,
        "identical_to_baseline": _identical(arms["method"], arms["baseline"]) if greedy else None,
        "reason": reason,
        "baseline": nothing,
    }


def _first_repeat(samples: Iterable[Sample], arm: str) -> dict[str, Sample]:
    return {s.prompt_id: s for s in samples if s.phase == "measure" and s.arm == arm and s.repeat == 0 and s.output_ids}


def _key(sample: Sample) -> Key:
    return tuple(sample.prompt_ids), tuple(sample.output_ids)


def _check_all(target: Scorer, samples: Iterable[Sample], near_tie: float, known: Known | None = None) -> Known:
    """Every different output once: an exact method and its baseline mostly share theirs."""
    results = {} if known is None else known
    distinct = [key for key in dict.fromkeys(map(_key, samples)) if key not in results]
    with Progress("agreement", len(distinct)) as progress:
        for prompt_ids, output_ids in distinct:
            results[prompt_ids, output_ids] = check(target, prompt_ids, output_ids, near_tie)
            progress.advance()
    return results


def _aggregate(checks: list[Check], greedy: bool) -> dict[str, Any]:
    tokens = sum(len(found.gaps) for found in checks)
    sound = [found for found in checks if found.broken is None]
    diverged = [found.first_divergence for found in checks if found.first_divergence is not None]

    def share(count: Callable[[Check], int]) -> float | None:
        return sum(map(count, checks)) / tokens if tokens and greedy else None

    return {
        "exact": share(lambda found: found.exact),
        "near_tie": share(lambda found: found.near_ties),
        "violation": share(lambda found: found.violations),
        "n_violations": sum(found.violations for found in checks) if greedy else None,
        "first_divergence": min(diverged, default=None) if greedy else None,
        "max_gap": max((found.max_gap for found in sound), default=None) if greedy else None,
        "mean_logprob": math.fsum(found.logprob for found in sound) / tokens if tokens and sound == checks else None,
        "n_tokens": tokens,
        "n_prompts": len(checks),
    }


def _identical(method: dict[str, Sample], baseline: dict[str, Sample]) -> float | None:
    """Share of prompts whose ids equal the baseline's."""
    pairs = [(method[name], baseline[name]) for name in method if name in baseline]
    return sum(m.output_ids == b.output_ids for m, b in pairs) / len(pairs) if pairs else None
