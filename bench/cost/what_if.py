"""Predict a speed-up from recorded acceptance with another cost curve, batch size or draft length.

Acceptance depends on model and text, the cost of a round on the machine, so they can be recorded on different machines.

``replay`` prices the recorded rounds one by one, regrouped into batches of another size if asked. With the run's own
curve and batch size it equals the ``predicted_speedup`` of the run.

``chain_forecast`` is for another draft length. It uses the shares of rounds that accepted at least i tokens, which is
exact for shorter drafts; after the longest recorded draft, each position is accepted with the pooled
probability of a judged token (alpha, as in Leviathan et al. 2023, arXiv 2211.17192).

Both leave out the prefill (they predict the speed-up of decoding) and the time a method spends outside drafting and the
target's passes.
"""

from __future__ import annotations

import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.analysis import metrics
from bench.analysis.cost_curve import CostCurve, CostSurface
from bench.errors import UserError
from bench.records.run_folder import Sample, read_manifest, read_samples
from bench.report import tables
from bench.report.terminal import plural

if TYPE_CHECKING:
    from bench.cost.settings import WhatIfQuery

Price = Callable[[int, int, int], float]
_NS = 1e9


@dataclass(frozen=True, slots=True)
class Drafting:
    """Cost of a proposal for a whole batch.

    Attributes:
        seconds: of one proposal.
        passes: of the drafter in it; 0 if it searches or counts.
    """

    seconds: int | float
    passes: int | float = 0.0

    def of(self, passes: int | float) -> float:
        return self.seconds * passes / self.passes if self.passes else self.seconds


# ------------------------------------------------------------------------------------------------------------- replay


def replay(
    samples: Iterable[Sample],
    price: Price,
    *,
    batch: int | None = None,
    drafting: Drafting | None = None,
    prefill: bool = False,
    cost_over_layers: float = 1.0,
) -> float | None:
    """The speed-up of the recorded rounds at other prices; None if the time of the drafts is unknown.

    Args:
        samples: of a run, both arms.
        price: seconds of a round over nodes, rows and context.
        batch: rows in lockstep; None: as recorded.
        drafting: cost of a proposal; None: as recorded.
        prefill: count the recorded prefill in both arms, which is correct only on the machine of the run.
        cost_over_layers: see ``metrics.cost_over_layers``.
    """
    measured = [sample for sample in samples if sample.phase == "measure"]
    if drafting is not None:
        measured = [_with_drafts(sample, drafting) for sample in measured]
    if batch is not None:
        measured = lockstep(measured, batch, per_batch=drafting is not None)
    if not prefill:
        measured = [replace(sample, prefill_ns=0) for sample in measured]
    return metrics.predicted_speedup(metrics.paired(metrics.frame(measured)), price, cost_over_layers)


def _with_drafts(sample: Sample, drafting: Drafting) -> Sample:
    if sample.arm == "baseline":
        return sample
    later = [round(drafting.of(passes) * _NS) for passes in sample.step_draft_passes[1:]]
    return replace(sample, step_draft_ns=[None, *later])


def lockstep(samples: Sequence[Sample], batch: int, *, per_batch: bool = False) -> list[Sample]:
    """Regroup the samples into batches of another size, as a run of that size would form them.

    Consecutive prompts of one turn form a batch; rows leave it as in a run. A round of the new batch scores the nodes
    of its widest row. Its proposal takes the sum of the rows' times if they are searched for row by row on the host,
    and the maximum if a model drafts or the times already are those of a batch.

    Args:
        samples: measured ones, of both arms.
        batch: rows in lockstep.
        per_batch: the recorded times of drafts are those of a batch of the new size.

    Raises:
        ValueError: the run was recorded in larger batches, which cannot be split.
    """
    largest = max((sample.batch_size for sample in samples), default=1)
    if largest > 1 and largest != batch:
        raise ValueError(f"Only a run with batch_size=1 can be regrouped, got one with batches of {largest}.")
    if largest == batch:
        return list(samples)
    turns: dict[tuple[str, int, int], list[Sample]] = defaultdict(list)
    for sample in sorted(samples, key=lambda sample: sample.batch):
        turns[sample.arm, sample.repeat, sample.turn].append(sample)
    numbers: dict[tuple[int, int], int] = {}
    made: list[Sample] = []
    for (_, _, turn), rows in sorted(turns.items()):
        for start in range(0, len(rows), batch):
            number = numbers.setdefault((turn, start), len(numbers))
            made += _together(rows[start : start + batch], number, per_batch)
    return made


def _together(rows: Sequence[Sample], number: int, per_batch: bool) -> list[Sample]:
    """Rows of one batch, with the nodes, passes and drafting time of the batch in every round."""
    rounds = range(max(len(row.step_ns) for row in rows))
    open_rows = [[row for row in rows if step < len(row.step_ns)] for step in rounds]
    shared: dict[str, Any] = {
        name: [max(getattr(row, name)[step] for row in some) for step, some in enumerate(open_rows)]
        for name in ("step_nodes", "step_target_passes", "step_draft_passes", "step_layers")
    }
    shared["step_draft_ns"] = [
        _draft_of([row.step_draft_ns[step] for row in some], per_batch or bool(shared["step_draft_passes"][step]))
        for step, some in enumerate(open_rows)
    ]
    shared["step_rows"] = _computed(list(map(len, open_rows)))
    return [
        replace(
            row,
            batch=number,
            batch_size=len(rows),
            **{name: values[: len(row.step_ns)] for name, values in shared.items()},
        )
        for row in rows
    ]


def _computed(open_rows: Sequence[int]) -> list[int]:
    """Rows that each round computes: finished ones leave when the model drops them."""
    from methods.engine.causal_lm import pays_to_drop

    computed = list(open_rows[:1])
    for count in open_rows[1:]:
        computed.append(count if pays_to_drop(count, computed[-1]) else computed[-1])
    return computed


def _draft_of(times: Sequence[int | None], at_once: bool) -> int | None:
    known = [ns for ns in times if ns is not None]
    if not known:
        return None
    return max(known) if at_once else sum(known)


# -------------------------------------------------------------------------------------------------------------- chain


@dataclass(frozen=True, slots=True)
class Chain:
    """Acceptance of a method that drafts chains, over the rounds after the prefill.

    Attributes:
        reach: share of the rounds that accepted at least 1, 2, ... tokens.
        had: share of the rounds whose draft had at least 1, 2, ... tokens.
        alpha: probability that a judged token is accepted.
        drafting: mean time and passes of a proposal at the batch size of the run; None: not recorded.
        context: mean committed tokens of a row.
        batch: rows in lockstep.
    """

    reach: tuple[float, ...]
    had: tuple[float, ...]
    alpha: float
    drafting: Drafting | None
    context: float
    batch: int

    def tokens(self, gamma: int) -> float:
        """Tokens a round commits at draft length ``gamma``, bonus included."""
        return 1.0 + sum(self._at(self.reach, place, self.alpha) for place in range(1, gamma + 1))

    def sizes(self, gamma: int, batch: int) -> list[float]:
        """Probability that the longest draft among ``batch`` rows has 0, 1, ... ``gamma`` tokens."""
        some = [1.0, *(1 - (1 - self._at(self.had, place, 1.0)) ** batch for place in range(1, gamma + 1)), 0.0]
        return [here - beyond for here, beyond in zip(some, some[1:], strict=False)]

    def draft_seconds(self, gamma: int, drafting: Drafting | None = None) -> float | None:
        """Time of a proposal of ``gamma`` tokens: proportional to it if each token takes a pass, else constant."""
        if (known := drafting or self.drafting) is None:
            return None
        recorded = sum(self.had)
        each_a_pass = known.passes > 0 and recorded > 0 and abs(known.passes - recorded) < 0.01 * recorded
        return known.seconds * gamma / recorded if each_a_pass else known.seconds

    def _at(self, shares: Sequence[float], place: int, onward: float) -> float:
        if place <= len(shares):
            return shares[place - 1]
        return (shares[-1] if shares else 0.0) * onward ** (place - len(shares))


@dataclass(frozen=True, slots=True)
class Forecast:
    """A prediction.

    Attributes:
        tokens: committed per row and round; None: as recorded.
        draft_s: time of a proposal; None: as recorded, round by round.
        speedup: of decoding; None if the time of the drafts is unknown.
    """

    tokens: float | None
    draft_s: float | None
    speedup: float | None


def chain_of(samples: Iterable[Sample]) -> Chain:
    """Acceptance by position of the method arm.

    Raises:
        ValueError: its drafts are not chains, or its passes are not whole passes of the target.
    """
    rows = metrics.paired(metrics.frame([sample for sample in samples if sample.phase == "measure"]))
    rows = rows[rows["arm"] == "method"]
    rounds = metrics.rounds(rows)
    contexts = np.concatenate(
        [n + np.cumsum(steps)[:-1] for n, steps in zip(rows["n_prompt_tokens"], rows["step_tokens"], strict=True)]
        or [np.empty(0)]
    )
    decode = rounds[rounds["step"] > 0]
    if decode.empty:
        raise ValueError("The run must have a round after the prefill, got none: nothing was accepted or rejected.")
    _require_chains(decode)
    weight, accepted, depth = (decode[name].to_numpy(float) for name in ("weight", "accepted", "depth"))
    places = range(1, int(depth.max()) + 1)
    judged = weight @ np.where(accepted < depth, accepted + 1, accepted)
    timed = decode[decode["draft_ns"].notna()]
    drafting = None
    if len(timed):
        drafting = Drafting(float(timed["draft_ns"].mean()) / _NS, float(timed["draft_passes"].mean()))
    return Chain(
        reach=tuple(float(weight @ (accepted >= place) / weight.sum()) for place in places),
        had=tuple(float(weight @ (depth >= place) / weight.sum()) for place in places),
        alpha=float(weight @ accepted / judged) if judged else 0.0,
        drafting=drafting,
        context=float(weight @ contexts / weight.sum()),
        batch=int(rows["batch_size"].max()),
    )


def _require_chains(decode: Any) -> None:
    tree = (decode["drafted"] != decode["depth"]) | (decode["target_passes"] != 1) | (decode["layers"] != 1.0)
    if tree.any():
        raise ValueError(
            "gamma needs a method that drafts chains and takes one whole pass of the target per round; the method of "
            "this run does not. Leave gamma out."
        )


def chain_forecast(
    chain: Chain, gamma: int, price: Price, batch: int | None = None, drafting: Drafting | None = None
) -> Forecast:
    """Expected speed-up of decoding at another draft length.

    E[tokens] T(1) / (T_draft + E[T(1 + longest draft)]), at the mean context of the run. With position-independent
    acceptance and a pass of constant cost this is theorem 3.8 of Leviathan et al. Rows of a batch are assumed to end
    together.

    Args:
        chain: recorded acceptance.
        gamma: most tokens of a draft.
        price: seconds of a round over nodes, rows and context.
        batch: rows in lockstep; None: as recorded.
        drafting: cost of a proposal for a batch of that size; None: as recorded.
    """
    rows, context = batch or chain.batch, round(chain.context)
    seconds = chain.draft_seconds(gamma, drafting)
    if seconds is not None and drafting is None and chain.drafting is not None and not chain.drafting.passes:
        seconds *= rows / chain.batch  # searched for row by row, on the host
    pass_s = sum(share * price(1 + size, rows, context) for size, share in enumerate(chain.sizes(gamma, rows)) if share)
    tokens = chain.tokens(gamma)
    speedup = None if seconds is None else tokens * price(1, rows, context) / (seconds + pass_s)
    return Forecast(tokens, seconds, speedup)


# -------------------------------------------------------------------------------------------------------- the command


@dataclass(frozen=True, slots=True)
class Recorded:
    """A measured curve.

    Attributes:
        where: model, device, type and threads, as text.
        model: its name.
        drafts: costs of proposals, see ``bench.cost.records.drafts``.
    """

    price: CostCurve | CostSurface
    where: str
    model: str
    drafts: tuple[Mapping[str, Any], ...] = ()

    @property
    def batches(self) -> tuple[int, ...]:
        """The measured batch sizes."""
        return tuple(c.batch for c in self.price.curves) if isinstance(self.price, CostSurface) else (self.price.batch,)

    def drafting(self, method: Mapping[str, Any], batch: int) -> Drafting | None:
        """Cost of a proposal of a method, preferably with the same settings; linear between batch sizes."""
        named = [found for found in self.drafts if found["method"]["name"] == method["name"]]
        same = [found for found in named if found["method"] == method] or named
        by_batch = {found["batch"]: found for found in same}
        if not by_batch:
            return None
        sizes = sorted(by_batch)
        seconds, passes = (np.interp(batch, sizes, [by_batch[s][key] for s in sizes]) for key in ("seconds", "passes"))
        return Drafting(float(seconds), float(passes))


def answer(asked: WhatIfQuery) -> str:
    """The predictions as text.

    Raises:
        UserError: a folder without a run or a curve, a batch size beyond the curve, or a run that cannot be predicted.
    """
    assert asked.run is not None, "one run; several are for bench.cost.mixtures"
    manifest, samples = read_run(asked.run)
    curve = own_curve(asked.run, manifest) if asked.curve is None else read_curve(asked.curve)
    if curve.model != manifest["model"]["name"]:
        print(
            f"warning: the acceptance is of {manifest['model']['name']}, the curve of {curve.model}; the prediction "
            "assumes that acceptance is the same",
            file=sys.stderr,
        )
    lines = [
        f"{manifest['method']['name']} on {manifest['dataset']['name']}: {_known(asked.run)}",
        f"acceptance of {where(manifest)}",
        f"curve of {curve.where}",
        "",
    ]
    sizes = asked.batch or (int(manifest["batch_size"]),)
    found = partial(forecast, samples, manifest, curve, asked)
    return "\n".join([*lines, table(sizes, asked.gamma or (None,), curve, found)])


def table(
    sizes: Sequence[int], lengths: Sequence[int | None], curve: Recorded, found: Callable[[int, int | None], Forecast]
) -> str:
    """One line for each batch size and draft length.

    Raises:
        UserError: a batch size beyond the curve, or a prediction that cannot be made.
    """
    header = ["rows", "draft length", "tokens/round", "draft (ms)", "speed-up of decoding"]
    rows = []
    try:
        for size in sizes:
            _check_batch(size, curve)
            rows += [_row(size, gamma, found(size, gamma)) for gamma in lengths]
    except ValueError as error:
        raise UserError(str(error)) from error
    return textwrap.indent(tables.aligned(header, rows, range(len(header))), "  ")


def read_run(folder: Path) -> tuple[dict[str, Any], list[Sample]]:
    """Manifest and samples of a run whose rounds can be priced.

    Raises:
        UserError: no such run, one without rounds, none of its prompts is measured, or its rows were refilled.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(f"{folder} has no manifest.json. Name the folder of a run.")
    if metrics.one_pass(manifest):
        raise UserError(
            f"{folder} must be of a method that writes in rounds, got {manifest['method']['name']}, which writes "
            "a text in one go. Name another run."
        )
    samples = read_samples(folder)
    if any(sample.queue for sample in samples):
        raise UserError(
            f"{folder} was measured with continuous batching (measure.refill=true); only rounds in lockstep can be "
            "priced. Name a run without it."
        )
    if not any(sample.phase == "measure" for sample in samples):
        raise UserError(f"{folder} has no measured prompt yet. Finish the run, or name another.")
    return manifest, samples


def forecast(
    samples: Sequence[Sample],
    manifest: Mapping[str, Any],
    curve: Recorded,
    asked: WhatIfQuery,
    size: int,
    gamma: int | None,
) -> Forecast:
    """One prediction: the recorded rounds replayed, or a chain of another length."""
    drafting = curve.drafting(manifest["method"], size)
    if asked.draft_ms is not None:
        drafting = Drafting(asked.draft_ms / 1e3)
    if gamma is not None:
        return chain_forecast(chain_of(samples), gamma, curve.price.seconds, size, drafting)
    again = None if size == manifest["batch_size"] else size
    over = metrics.cost_over_layers(manifest)
    found = replay(samples, curve.price.seconds, batch=again, drafting=drafting, cost_over_layers=over)
    return Forecast(None, None if drafting is None else drafting.seconds, found)


def own_curve(run: Path, manifest: Mapping[str, Any]) -> Recorded:
    """The curve a run measured for itself.

    Raises:
        UserError: it has none.
    """
    if not (stored := manifest.get("cost_curve")):
        raise UserError(f"{run} has no cost curve (measure.cost_curve=false). Name one: curve=results/costs/ID.")
    return Recorded(CostCurve.from_dict(stored), where(manifest), manifest["model"]["name"])


def read_curve(folder: Path) -> Recorded:
    """The curve of a folder of ``python -m bench cost``, or of a run.

    Raises:
        UserError: neither of them.
    """
    from bench.cost.records import POINTS, read_summary

    if (folder / POINTS).is_file():
        summary = read_summary(folder)
        if not summary["curves"]:
            raise UserError(f"{folder} has no complete curve yet. Run python -m bench cost again to finish it.")
        name, manifest = str(summary["model"]["name"]), read_manifest(folder) or {}
        return Recorded(CostSurface.from_dict(summary["curves"]), where(manifest), name, tuple(summary["drafts"]))
    manifest = read_manifest(folder) or {}
    if not manifest:
        raise UserError(f"curve must be a folder of python -m bench cost, or of a run, got {folder}. Correct curve=.")
    return own_curve(folder, manifest)


def where(manifest: Mapping[str, Any]) -> str:
    """Model, device and type of a record, as text."""
    facts = manifest["hardware"]
    device = facts["gpu"]["name"] if facts["gpu"] else f"{facts['cpu']}, {plural(facts['threads'], 'thread')}"
    return f"{manifest['model']['name']} on {device}, {manifest['dtype']}"


def _known(run: Path) -> str:
    """The speed-up in the run's own summary."""
    from bench.utils.files import read_json

    summary = read_json(run / "summary.json") or {}
    measured = metrics.headline(summary).get("value") if summary.get("speedup") else None
    parts = [("measured", measured), ("predicted by its own curve, prefill included", summary.get("predicted_speedup"))]
    return ", ".join(f"{name} {value:.2f}x" for name, value in parts if value is not None) or "no summary yet"


def _check_batch(size: int, curve: Recorded) -> None:
    if size > max(curve.batches):
        raise UserError(
            f"batch must be at most {max(curve.batches)}, the largest of this curve, got {size}. Set batch=N, or name "
            "another curve."
        )


def _row(size: int, gamma: int | None, found: Forecast) -> list[str]:
    length = "as recorded" if gamma is None else str(gamma)
    tokens = "as recorded" if found.tokens is None else f"{found.tokens:.2f}"
    draft = "recorded" if found.draft_s is None else f"{found.draft_s * 1e3:.3f}"
    speed = "unknown: the drafts were not timed; set draft_ms" if found.speedup is None else f"{found.speedup:.2f}x"
    return [str(size), length, tokens, draft, speed]
