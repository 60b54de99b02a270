"""Checks whether the numbers of a run can be trusted. A *reason* makes a run INVALID, a *warning* does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from bench.analysis import metrics
from bench.records.run_folder import Sample

JITTER = LOAD = (0.10, 0.25)  # warn above the first, invalid above the second
DRIFT = 0.10  # warn above
LENGTH_TOLERANCE = REPEAT_TOLERANCE = 0.10
HARNESS_SHARE = 0.02
_FEWEST_REPEATED = 3  # batches measured more than once; the median of fewer is one hiccup
_FULL_PRECISION = ("float32", "float64")


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Whether the numbers of a run can be trusted; if not, why, and what to do.

    Attributes:
        noisy: INVALID, and nothing but an unsteady or busy machine is the reason: the same run may be VALID next time.
    """

    valid: bool
    reasons: list[str]
    warnings: list[str]
    noisy: bool = False


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the checks look at.

    Attributes:
        measured: the measured rows of both arms, failed ones included.
        rows: those that count, see ``bench.analysis.metrics.paired``.
        summary: what was derived from them.
        manifest: facts of the run, as far as present.
    """

    measured: list[Sample]
    rows: pd.DataFrame
    summary: Mapping[str, Any]
    manifest: Mapping[str, Any]

    @property
    def exact(self) -> bool:
        return self.summary["guarantee"] == "EXACT"


@dataclass(slots=True)
class _Findings:
    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def judge(self, value: float, limits: tuple[float, float], text: str) -> None:
        """Warn above the lower limit, invalidate above the higher one."""
        if value > limits[1]:
            self.reasons.append(text)
        elif value > limits[0]:
            self.warnings.append(text)


def audit(
    samples: Iterable[Sample | Mapping[str, Any]],
    summary: Mapping[str, Any],
    manifest: Mapping[str, Any] | None = None,
) -> AuditResult:
    """Check a run: its samples, what ``bench.analysis.metrics.summarise`` made of them, and its manifest."""
    rows = [sample if isinstance(sample, Sample) else Sample(**sample) for sample in samples]
    measured = [sample for sample in rows if sample.phase == "measure"]
    evidence = Evidence(measured, metrics.paired(metrics.frame(rows)), summary, manifest or {})
    found, by_noise = _Findings(), 0
    for check in CHECKS:
        before = len(found.reasons)
        check(evidence, found)
        by_noise += len(found.reasons) - before if check in NOISE else 0
    noisy = 0 < len(found.reasons) == by_noise
    return AuditResult(not found.reasons, found.reasons, found.warnings, noisy)


def check_complete(evidence: Evidence, found: _Findings) -> None:
    """Every measured row is free of errors and has its partner in the other arm."""
    failed = [f"{_name(sample)}: {sample.error}" for sample in evidence.measured if sample.error is not None]
    if failed:
        found.reasons.append(
            f"{len(failed)} measured rows failed. {_first(failed)} Correct the cause and repeat the run with --fresh."
        )
    arms = {arm: {(s.prompt_id, s.repeat) for s in evidence.measured if s.arm == arm} for arm in ("baseline", "method")}
    lonely = [f"prompt {name}, repeat {repeat}" for name, repeat in sorted(arms["baseline"] ^ arms["method"])]
    if lonely:
        found.reasons.append(
            f"{len(lonely)} prompts were measured by one arm only. {_first(lonely)} Run the same command to resume."
        )
    if evidence.rows.empty:
        found.reasons.append("No prompt was measured by both arms without an error. Run the same command to resume.")


def check_doubt(evidence: Evidence, found: _Findings) -> None:
    """The method's own warning about its acceptance during the warm-up."""
    if doubt := evidence.manifest.get("doubt"):
        found.warnings.append(str(doubt))


def check_agreement(evidence: Evidence, found: _Findings) -> None:
    """EXACT methods and the baseline write what the target would, up to stated near-ties."""
    agreement = evidence.summary.get("agreement")
    if agreement is None:
        if evidence.exact:
            found.warnings.append("Agreement with the target was not measured. Set measure.agreement=true.")
        return
    judged = {"baseline": agreement.get("baseline") or {}, "method": agreement if evidence.exact else {}}
    if own := agreement.get("verifier"):
        judged["method"] = own
    for arm, part in judged.items():
        if part.get("violation"):
            culprit = "the engine" if arm == "baseline" else "the method"
            found.reasons.append(
                f"{_violations(part)} tokens of the {arm} are not those of {_writer(arm, agreement)}{_gap(agreement)}. "
                f"Repeat with hardware=cpu_fp32: if they remain, {culprit} is wrong."
            )
    exact = agreement.get("exact")
    if evidence.exact and evidence.manifest.get("dtype") in _FULL_PRECISION and exact is not None and exact < 1:
        found.warnings.append(
            f"{1 - exact:.2%} of the tokens are not the target's argmax, although the run is in "
            f"{evidence.manifest['dtype']}, where all should be. Look at first_divergence in summary.json."
        )


def check_ids(evidence: Evidence, found: _Findings) -> None:
    """Reported tokens equal ids kept, end-of-sequence is last or absent, step times fit into the batch time."""
    ends = frozenset(evidence.manifest.get("eos_ids") or ())
    faults = [f"{_name(sample)}: {fault}" for sample in evidence.measured for fault in _id_faults(sample, ends)]
    if faults:
        found.reasons.append(
            f"{len(faults)} records contradict themselves. {_first(faults)} The file was changed, or this is a bug: "
            "report it, or repeat the run with --fresh."
        )


def check_length(evidence: Evidence, found: _Findings) -> None:
    """Both arms write about the same number of tokens; otherwise total times compare different work."""
    written = evidence.rows.groupby("arm")["n_output_tokens"].sum()
    if len(written) < 2 or not written["baseline"]:
        return
    if abs(written["method"] - written["baseline"]) <= LENGTH_TOLERANCE * written["baseline"]:
        return
    share = written["method"] / written["baseline"]
    text = (
        f"Tokens of the method must be {1 - LENGTH_TOLERANCE:.0%} to {1 + LENGTH_TOLERANCE:.0%} of the baseline's for "
        f"total times to compare, got {share:.0%}. Use speedup.per_token instead"
    )
    if evidence.exact:
        found.warnings.append(f"{text}, or measure more prompts.")
    else:
        found.reasons.append(f"{text}, or set a max_new_tokens that both arms reach.")


def check_repeats(evidence: Evidence, found: _Findings) -> None:
    """A repeated prompt is not decoded faster: nothing is carried over, and the machine was warm."""
    done = metrics.batches(evidence.rows)
    pace = done.assign(pace=done["batch_ns"] / done["tokens"], again=done["repeat"] > 0)
    table = pace.pivot_table(index=["arm", "batch"], columns="again", values="pace", aggfunc="mean")
    if True not in table.columns:
        return
    gain = table[False] / table[True]
    for arm, gains in gain.dropna().groupby("arm"):
        if len(gains) >= _FEWEST_REPEATED and gains.median() > 1 + REPEAT_TOLERANCE:
            found.reasons.append(
                f"The {arm} decoded repeated prompts {gains.median() - 1:.0%} faster, over {REPEAT_TOLERANCE:.0%}. "
                "Reset its state between prompts, or raise measure.warmup."
            )


def check_acceptance(evidence: Evidence, found: _Findings) -> None:
    """Counters fit: accepted <= depth <= drafted, and an EXACT round keeps what it accepted plus one."""
    faults = [
        f"{_name(sample)}: {fault}"
        for sample in evidence.measured
        for fault in _counter_faults(sample, evidence.exact or sample.arm == "baseline")
    ]
    if faults:
        found.reasons.append(
            f"Counters of {len(faults)} rounds are inconsistent. {_first(faults)} Correct the method's Step."
        )


def check_steadiness(evidence: Evidence, found: _Findings) -> None:
    """The machine was steady from batch to batch, and over the run, see ``metrics.steadiness``.

    Only the first disturbs pairs: the baseline measured against itself gives 1.00 within a percent although the
    machine's speed halved and doubled. So a drift is a warning.
    """
    spread, jitter = evidence.summary.get("spread"), evidence.summary.get("jitter")
    if jitter is not None:
        text = (
            f"The baseline's time per round varied by {jitter:.0%} between batches (IQR over median, context removed); "
            f"up to {JITTER[0]:.0%} is steady, above {JITTER[1]:.0%} is INVALID. Close other programs, fix the clock "
            "rate, and repeat."
        )
        found.judge(jitter, JITTER, text)
    if spread is not None and spread > DRIFT:
        found.warnings.append(
            f"The machine's speed drifted: the baseline's time per round varied by {spread:.0%} over the run (IQR over "
            f"median); up to {DRIFT:.0%} is steady. Interleaving protects the speed-up; compare tokens per second and "
            "latencies within this run only."
        )


def check_load(evidence: Evidence, found: _Findings) -> None:
    """Other programs did not use the device: on a CPU by the load of the last minute, on a GPU before the run."""
    manifest = evidence.manifest
    facts, load = manifest.get("hardware") or {}, (manifest.get("load_average") or {}).get("end")
    if load and facts.get("threads") and facts.get("logical_cores"):
        others = max(0.0, load[0] - facts["threads"])
        text = (
            f"Other programs kept {others:.1f} of {facts['logical_cores']} cores busy; up to {LOAD[0]:.0%} is quiet, "
            f"above {LOAD[1]:.0%} is INVALID. Close them and repeat the command."
        )
        found.judge(others / facts["logical_cores"], LOAD, text)
    busy = (manifest.get("gpu_utilisation") or {}).get("start")
    if busy is not None:
        text = (
            f"The GPU was {busy:.0f} % busy before the run; up to {LOAD[0]:.0%} is quiet, above {LOAD[1]:.0%} is "
            "INVALID. Choose a free one with CUDA_VISIBLE_DEVICES and repeat."
        )
        found.judge(busy / 100, LOAD, text)


def check_interval(evidence: Evidence, found: _Findings) -> None:
    """The headline has an interval."""
    total = evidence.summary["speedup"]["total"]
    if total["value"] is not None and total["low"] is None:
        found.warnings.append(f"The speed-up has no interval: {total['reason']}.")


def check_harness(evidence: Evidence, found: _Findings) -> None:
    """Little time passes between decodes."""
    share = evidence.summary.get("harness_share")
    if share is not None and share > HARNESS_SHARE:
        found.warnings.append(
            f"{share:.1%} of the loop was spent outside decoding, {HARNESS_SHARE:.0%} is usual. It is not in the "
            "speed-up; usual causes are slow disks and very short answers."
        )


CHECKS: tuple[Callable[[Evidence, _Findings], None], ...] = (
    check_complete,
    check_doubt,
    check_agreement,
    check_ids,
    check_length,
    check_repeats,
    check_acceptance,
    check_steadiness,
    check_load,
    check_interval,
    check_harness,
)
NOISE = frozenset({check_repeats, check_steadiness, check_load})  # they judge the machine, not the method


def _id_faults(sample: Sample, ends: frozenset[int]) -> Iterator[str]:
    ids, kept = sample.output_ids, sum(sample.step_tokens)
    if not sample.n_output_tokens == len(ids) == kept:
        yield f"reported {sample.n_output_tokens} tokens, kept {len(ids)} ids, counted {kept} in its steps"
    ended = [position for position, token in enumerate(ids) if token in ends]
    if ended and ended[0] != len(ids) - 1:
        yield f"end-of-sequence at token {ended[0] + 1} of {len(ids)}"
    elif ends and (sample.finish == "eos") != bool(ended):
        yield f"finish is {sample.finish!r}, but the text {'ends' if ended else 'does not end'} in end-of-sequence"
    if sum(sample.step_ns) > sample.batch_ns:
        yield f"its steps took {sum(sample.step_ns) / 1e6:.1f} ms of {sample.batch_ns / 1e6:.1f} ms"


def _counter_faults(sample: Sample, exact: bool) -> Iterator[str]:
    """Faults of one row. The prefill (step 0) may commit any number of tokens; the last step was trimmed."""
    last = len(sample.step_tokens) - 1
    counters = zip(sample.step_tokens, sample.step_accepted, sample.step_depth, sample.step_drafted, strict=False)
    for step, (kept, accepted, depth, drafted) in enumerate(counters):
        if sample.queue and step and not sample.step_target_passes[step]:
            if kept or drafted:
                yield f"round {step} kept {kept} tokens and judged {drafted}, although the row waited"
            continue
        if not 0 <= accepted <= depth <= drafted:
            yield f"round {step} accepted {accepted} of a path of {depth} among {drafted} nodes"
        elif exact and step and not (kept == accepted + 1 or (step == last and kept <= accepted + 1)):
            yield f"round {step} kept {kept} tokens with {accepted} accepted"


def _name(sample: Sample) -> str:
    return f"Prompt {sample.prompt_id}, repeat {sample.repeat}, {sample.arm}"


def _first(found: Sequence[str]) -> str:
    return f"{'The first' if len(found) > 1 else 'It is'}: {found[0]}."


def _writer(arm: str, agreement: Mapping[str, Any]) -> str:
    return "its own model" if arm == "method" and agreement.get("verifier") else "the target"


def _violations(part: Mapping[str, Any]) -> str:
    count, share = part.get("n_violations"), f"{part['violation']:.2%}"
    return share if count is None else f"{count} ({share})"


def _gap(agreement: Mapping[str, Any]) -> str:
    gap = agreement.get("near_tie_gap")
    return "" if gap is None else f", near-ties within {gap:g} of log-probability aside"
