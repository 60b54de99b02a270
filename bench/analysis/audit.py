"""Whether the numbers of a run may be believed: a list of checks, each of which says in plain words what is wrong.

A *reason* makes a run INVALID, a *warning* does not. Every text says what was found, what is allowed and what to do.
"""

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
    """Whether the numbers of a run may be believed; if not, why, and what to do."""

    valid: bool
    reasons: list[str]
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the checks look at.

    Attributes:
        measured: the measured rows of both arms, failed ones included.
        rows: those that count, see ``bench.analysis.metrics.paired``.
        summary: what was derived from them.
        manifest: facts of the run; of these ``eos_ids``, ``dtype``, ``hardware`` (``threads``, ``logical_cores``),
            ``load_average`` (``end``: 1, 5 and 15 minutes) and ``gpu_utilisation`` (``start``: percent) are read where
            they are present.
    """

    measured: list[Sample]
    rows: pd.DataFrame
    summary: Mapping[str, Any]
    manifest: Mapping[str, Any]

    @property
    def exact(self) -> bool:
        """Whether the method promises the target's own output."""
        return self.summary["guarantee"] == "EXACT"


@dataclass(slots=True)
class _Findings:
    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def judge(self, value: float, limits: tuple[float, float], text: str) -> None:
        """A warning above the lower limit, a reason above the higher one."""
        if value > limits[1]:
            self.reasons.append(text)
        elif value > limits[0]:
            self.warnings.append(text)


def audit(
    samples: Iterable[Sample | Mapping[str, Any]],
    summary: Mapping[str, Any],
    manifest: Mapping[str, Any] | None = None,
) -> AuditResult:
    """Check a run.

    Args:
        samples: the rows of samples.jsonl.
        summary: what ``bench.analysis.metrics.summarise`` made of them.
        manifest: manifest.json; None leaves out what only it can tell.
    """
    rows = [sample if isinstance(sample, Sample) else Sample(**sample) for sample in samples]
    measured = [sample for sample in rows if sample.phase == "measure"]
    evidence = Evidence(measured, metrics.paired(metrics.frame(rows)), summary, manifest or {})
    found = _Findings()
    for check in CHECKS:
        check(evidence, found)
    return AuditResult(not found.reasons, found.reasons, found.warnings)


def check_complete(evidence: Evidence, found: _Findings) -> None:
    """Every measured row is free of errors and has its partner in the other arm."""
    failed = [f"{_name(sample)}: {sample.error}" for sample in evidence.measured if sample.error is not None]
    if failed:
        found.reasons.append(
            f"Measured rows that failed: {len(failed)}; none may. {_first(failed)} Correct the cause, delete the run's "
            "folder and run again."
        )
    arms = {arm: {(s.prompt_id, s.repeat) for s in evidence.measured if s.arm == arm} for arm in ("baseline", "method")}
    lonely = [f"prompt {name}, repeat {repeat}" for name, repeat in sorted(arms["baseline"] ^ arms["method"])]
    if lonely:
        found.reasons.append(
            f"Prompts measured by one arm only: {len(lonely)}; both arms must. {_first(lonely)} Run the same command "
            "to go on."
        )
    if evidence.rows.empty:
        found.reasons.append("No prompt was measured by both arms without an error. Run the same command to go on.")


def check_doubt(evidence: Evidence, found: _Findings) -> None:
    """What the method itself found strange about its part during the warm-up."""
    if doubt := evidence.manifest.get("doubt"):
        found.warnings.append(str(doubt))


def check_agreement(evidence: Evidence, found: _Findings) -> None:
    """An EXACT method writes what the target would, and so does the baseline, up to stated near-ties."""
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
                f"Tokens of the {arm} that {_writer(arm, agreement)} would not write: {_violations(part)}"
                f"{_gap(agreement)}; none may be there. Compare with hardware=cpu_fp32: if they stay, {culprit} is "
                "wrong."
            )
    exact = agreement.get("exact")
    if evidence.exact and evidence.manifest.get("dtype") in _FULL_PRECISION and exact is not None and exact < 1:
        found.warnings.append(
            f"{1 - exact:.2%} of the tokens are not the target's argmax, although the run is in "
            f"{evidence.manifest['dtype']}, where all should be. Look at first_divergence in summary.json."
        )


def check_ids(evidence: Evidence, found: _Findings) -> None:
    """Reported tokens are ids kept, end-of-sequence stands at the end or nowhere, times fit into each other."""
    ends = frozenset(evidence.manifest.get("eos_ids") or ())
    faults = [f"{_name(sample)}: {fault}" for sample in evidence.measured for fault in _id_faults(sample, ends)]
    if faults:
        found.reasons.append(
            f"Records that contradict themselves: {len(faults)}; none may. {_first(faults)} The harness is wrong, or "
            "the file was changed: report it, or delete the run's folder and run again."
        )


def check_length(evidence: Evidence, found: _Findings) -> None:
    """Both arms write about the same number of tokens; otherwise total times are of different work."""
    written = evidence.rows.groupby("arm")["n_output_tokens"].sum()
    if len(written) < 2 or not written["baseline"]:
        return
    if abs(written["method"] - written["baseline"]) <= LENGTH_TOLERANCE * written["baseline"]:
        return
    share = written["method"] / written["baseline"]
    text = (
        f"The method wrote {share:.0%} of the baseline's tokens; between {1 - LENGTH_TOLERANCE:.0%} and "
        f"{1 + LENGTH_TOLERANCE:.0%} the total times can be compared. Read speedup.per_token instead"
    )
    if evidence.exact:
        found.warnings.append(f"{text}, or measure more prompts.")
    else:
        found.reasons.append(f"{text}, or set a max_new_tokens that both arms reach.")


def check_repeats(evidence: Evidence, found: _Findings) -> None:
    """A prompt seen before is not decoded faster: nothing is carried over, and the machine was warm."""
    done = metrics.batches(evidence.rows)
    pace = done.assign(pace=done["batch_ns"] / done["tokens"], again=done["repeat"] > 0)
    table = pace.pivot_table(index=["arm", "batch"], columns="again", values="pace", aggfunc="mean")
    if True not in table.columns:
        return
    gain = table[False] / table[True]
    for arm, gains in gain.dropna().groupby("arm"):
        if len(gains) >= _FEWEST_REPEATED and gains.median() > 1 + REPEAT_TOLERANCE:
            found.reasons.append(
                f"The {arm} decoded prompts {gains.median() - 1:.0%} faster when it saw them again; "
                f"{REPEAT_TOLERANCE:.0%} are allowed. Reset what it keeps between prompts, or raise measure.warmup."
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
            f"Rounds whose counters do not fit: {len(faults)}; all must. {_first(faults)} The method reports wrong "
            "counters: correct its Step."
        )


def check_steadiness(evidence: Evidence, found: _Findings) -> None:
    """The machine was steady from one batch to the next, and over the run, see ``metrics.steadiness``.

    The first disturbs the pairs that a speed-up is made of. The second does not, as a method that is measured against
    itself shows (1.00, within a percent, where the machine's speed halved and doubled), so it is a warning.
    """
    spread, jitter = evidence.summary.get("spread"), evidence.summary.get("jitter")
    if jitter is not None:
        text = (
            f"The baseline's time per round varied by {jitter:.0%} from one batch to the next (IQR over median, "
            f"contexts accounted for); up to {JITTER[0]:.0%} is steady, above {JITTER[1]:.0%} is no measurement. Close "
            "other programs, fix the clock rate, and run again."
        )
        found.judge(jitter, JITTER, text)
    if spread is not None and spread > DRIFT:
        found.warnings.append(
            f"The machine's speed drifted: the baseline's time per round varied by {spread:.0%} over the run (IQR over "
            f"median); up to {DRIFT:.0%} is steady. The speed-up is protected, both arms shared each moment; tokens "
            "per second and latencies are not, so compare them within this run alone."
        )


def check_load(evidence: Evidence, found: _Findings) -> None:
    """Nobody else computed on the device.

    On a CPU the load of the last minute minus the threads of this run, over the cores; on a GPU how busy it was before
    this run began.
    """
    manifest = evidence.manifest
    facts, load = manifest.get("hardware") or {}, (manifest.get("load_average") or {}).get("end")
    if load and facts.get("threads") and facts.get("logical_cores"):
        others = max(0.0, load[0] - facts["threads"])
        text = (
            f"Other programs kept {others:.1f} of {facts['logical_cores']} cores busy; up to {LOAD[0]:.0%} of them is "
            f"quiet, above {LOAD[1]:.0%} they disturb. Close them, delete the run's folder and run again."
        )
        found.judge(others / facts["logical_cores"], LOAD, text)
    busy = (manifest.get("gpu_utilisation") or {}).get("start")
    if busy is not None:
        text = (
            f"The GPU was {busy:.0f} % busy before this run began; up to {LOAD[0]:.0%} is quiet, above {LOAD[1]:.0%} "
            "others disturb. Choose a free one with CUDA_VISIBLE_DEVICES and run again."
        )
        found.judge(busy / 100, LOAD, text)


def check_interval(evidence: Evidence, found: _Findings) -> None:
    """The headline has an interval."""
    total = evidence.summary["speedup"]["total"]
    if total["value"] is not None and total["low"] is None:
        found.warnings.append(f"The speed-up has no interval: {total['reason']}.")


def check_harness(evidence: Evidence, found: _Findings) -> None:
    """The time between decodes, which nothing measures, is small."""
    share = evidence.summary.get("harness_share")
    if share is not None and share > HARNESS_SHARE:
        found.warnings.append(
            f"{share:.1%} of the loop was spent outside decoding; {HARNESS_SHARE:.0%} is usual. The speed-up does not "
            "contain it; slow disks and very short answers are the usual causes."
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
    """Faults of one row. Step 0 is the prefill, whose commits a method is free to choose; the last step was cut."""
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
