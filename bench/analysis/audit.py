"""Checks whether the numbers of a run can be trusted, and whether they show anything.

A *reason* makes a run INVALID. Without one, a speed-up that noise could have made, or that compares other work, is
INCONCLUSIVE. A *warning* changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import numpy as np
import pandas as pd

from bench.analysis import metrics, stalls
from bench.records.run_folder import Sample
from bench.utils import stats

JITTER = LOAD = (0.10, 0.25)  # warn above the first, invalid above the second
PROCESSOR = (0.05, 0.15)  # likewise, of the processor time; a quiet machine takes less than 0.01
SHORT_BATCH_NS = 20e6
DRIFT = 0.10  # warn above
LENGTH_TOLERANCE = REPEAT_TOLERANCE = 0.10
EXACT_LENGTH_TOLERANCE = 0.02
HARNESS_SHARE = 0.02
CLOCK = 0.9  # of its median, to which a GPU's clock may fall
SAME = (0.98, 1.02)  # speed-ups that mean as fast as the baseline
WIDEST = 2.0  # upper over lower end of an interval that says how fast a method is
STALLED_SHARE = 0.02  # of an arm's time: more moves the speed-up out of SAME
DISAGREEMENT = 0.05  # between two averages of one speed-up; warn above
_FEWEST_STUCK = 8  # tokens of a text that is one token for ever
_MOST_NAMED = 3  # prompts in a message
_FEWEST_REPEATED = 3  # batches measured more than once; the median of fewer is one hiccup
_FULL_PRECISION = ("float32", "float64")
_LOAD_WINDOWS_S = (60, 300, 900)  # over which the system averages its load
_MORE = "Measure more prompts (dataset.limit), on a quieter machine"

Result = Literal["VALID", "INCONCLUSIVE", "INVALID"]
RESULTS: tuple[Result, ...] = ("VALID", "INCONCLUSIVE", "INVALID")  # the best first


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Whether the numbers of a run can be trusted, and what they show; if not, why, and what to do.

    Attributes:
        valid: there is no reason against the numbers; what they show may still be INCONCLUSIVE.
        noisy: INVALID, and nothing but an unsteady or busy machine is the reason: the same run may be VALID next time.
        inconclusive: why the speed-up shows nothing, see ``doubts``.
    """

    valid: bool
    reasons: list[str]
    warnings: list[str]
    noisy: bool = False
    inconclusive: list[str] = field(default_factory=list)

    @property
    def result(self) -> Result:
        """The outcome in one word."""
        return outcome(self.valid, self.inconclusive)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the checks look at.

    Attributes:
        measured: the measured rows of both arms, failed ones included.
        replaced: rows of pairs in which the machine stalled and that were measured again.
        rows: those that count, see ``bench.analysis.metrics.paired``.
        batches: of these rows, see ``bench.analysis.metrics.batches``.
        summary: what was derived from them.
        manifest: facts of the run, as far as present.
    """

    measured: list[Sample]
    replaced: list[Sample]
    rows: pd.DataFrame
    batches: pd.DataFrame
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
    paired = metrics.paired(metrics.frame(rows))
    replaced = [sample for sample in rows if sample.phase == "stalled"]
    evidence = Evidence(measured, replaced, paired, metrics.batches(paired), summary, manifest or {})
    found, by_noise = _Findings(), 0
    for check in CHECKS:
        before = len(found.reasons)
        check(evidence, found)
        by_noise += len(found.reasons) - before if check in NOISE else 0
    noisy = 0 < len(found.reasons) == by_noise
    return AuditResult(not found.reasons, found.reasons, found.warnings, noisy, doubts(summary))


def result(summary: Mapping[str, Any]) -> Result:
    """The outcome of a run from its summary.json; an older one is judged by the numbers it holds.

    INVALID, too, where the summary has no verdict.
    """
    verdict = summary.get("verdict") or {}
    inconclusive = verdict.get("inconclusive")
    return outcome(bool(verdict.get("valid")), doubts(summary) if inconclusive is None else inconclusive)


def explained(summary: Mapping[str, Any]) -> list[str]:
    """Why a run is INVALID or INCONCLUSIVE; empty if it is VALID, or has no verdict."""
    verdict = summary.get("verdict")
    if verdict is None or verdict["reasons"]:
        return [] if verdict is None else list(verdict["reasons"])
    return list(verdict["inconclusive"] if "inconclusive" in verdict else doubts(summary))


def outcome(valid: bool, inconclusive: Sequence[str]) -> Result:
    """In one word, from whether there is no reason against the numbers, and the doubts about what they show."""
    return "INVALID" if not valid else "INCONCLUSIVE" if inconclusive else "VALID"


def doubts(summary: Mapping[str, Any]) -> list[str]:
    """Why the headline shows nothing; empty if it shows that the method is faster, slower, or as fast.

    It must have an interval, whose ends are less than a factor of ``WIDEST`` apart. A value within ``SAME`` means as
    fast; any other must have an interval outside of it. That it leaves out 1 is not enough: of 20 comparisons of the
    baseline with itself one does, and more if the noise is skewed. An EXACT method must have written as many tokens as
    the baseline, within ``EXACT_LENGTH_TOLERANCE``.
    """
    headline = metrics.headline(summary)
    return [] if headline.get("value") is None else [*_noise(headline), *_other_lengths(summary)]


def _noise(headline: Mapping[str, Any]) -> Iterator[str]:
    """The interval is missing, reaches into ``SAME`` or is too wide."""
    value: float = headline["value"]
    low, high, n = (headline.get(name) for name in ("low", "high", "n"))
    if low is None or high is None or (n is not None and n < stats.FEWEST_PAIRS):
        why, _, advice = (headline.get("reason") or stats.few_pairs(n or 0)).partition("; ")
        yield f"The speed-up of {value:.2f}x has no interval: {why}. {_sentence(advice) or _MORE}."
        return
    if not SAME[0] <= value <= SAME[1] and low <= SAME[1] and high >= SAME[0]:
        yield (
            f"The speed-up of {value:.2f}x, 95 % {low:.2f} to {high:.2f}, shows neither faster nor slower, for the "
            f"interval reaches into {SAME[0]:.2f} to {SAME[1]:.2f}, which is as fast. {_MORE}."
        )
    if high > WIDEST * low:
        yield (
            f"The 95 % interval from {low:.2f} to {high:.2f} is wider than a factor of {WIDEST:g}: it does not say how "
            f"fast the method is. {_MORE}."
        )


def _other_lengths(summary: Mapping[str, Any]) -> Iterator[str]:
    """Tokens per second do not correct that prompts and long contexts weigh more in the arm with the longer texts.

    The seconds cancel in the speed-up per token over that of total time, which leaves the share of tokens written.
    """
    headline, total = metrics.headline(summary), summary["speedup"]["total"]["value"]
    if summary.get("guarantee") != "EXACT" or headline.get("of") != "per_token" or not total:
        return
    share = headline["value"] / total
    if not summary.get("ignore_eos") and round(abs(share - 1), 6) > EXACT_LENGTH_TOLERANCE:
        yield (
            f"The method wrote {share:.1%} of the baseline's tokens, an EXACT one at most {EXACT_LENGTH_TOLERANCE:.0%} "
            f"more or fewer: neither total time ({total:.2f}x) nor time per token ({headline['value']:.2f}x) compares "
            "the same work. Set measure.ignore_eos=true to time texts of one length."
        )


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
    if broken := agreement.get("not_finite"):
        found.reasons.append(
            f"The target's logits are NaN or infinite in {_counted(len(broken), 'text', 'texts')}, so it chose none of "
            f"their tokens. {_first(broken)} Use 32 bit (hardware=cpu_fp32) if 16 overflow, else other weights."
        )
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


def check_texts(evidence: Evidence, found: _Findings) -> None:
    """The baseline writes text: one token for ever is a broken model or template, and free to draft."""
    texts = [row.output_ids for row in evidence.measured if row.arm == "baseline" and row.error is None]
    stuck = sum(len(ids) >= _FEWEST_STUCK and len({*ids}) == 1 for ids in texts)
    if 2 * stuck > len(texts):
        found.reasons.append(
            f"The baseline repeats a single token in {stuck} of {len(texts)} texts, which any draft hits. Check the "
            "weights, the chat template and the prompts."
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
    """Both arms write about as much; otherwise quality was lost, or totals compare different work.

    EXACT methods are judged more strictly, see ``doubts``.
    """
    written = evidence.rows.groupby("arm")["n_output_tokens"].sum()
    if evidence.exact or len(written) < 2 or not written["baseline"]:
        return
    share, headline = written["method"] / written["baseline"], metrics.headline(evidence.summary)
    if round(abs(share - 1), 6) <= LENGTH_TOLERANCE:
        return
    if headline.get("of") == "total":
        found.warnings.append(
            f"The method wrote {share:.0%} of the baseline's tokens. Its time does not grow with them, so the speed-up "
            "stays, but words are missing or repeated. Judge it by the scores of its text."
        )
        return
    total = evidence.summary["speedup"]["total"]["value"]
    found.warnings.append(
        f"The method wrote {share:.1%} of the baseline's tokens, so that total time ({total:.2f}x) compares different "
        f"work; the speed-up is per token ({headline['value']:.2f}x). So far apart, prompts and long contexts weigh "
        "more in one arm, which tokens do not correct. Set measure.ignore_eos=true to time texts of one length."
    )


def check_repeats(evidence: Evidence, found: _Findings) -> None:
    """A repeated prompt is not decoded faster: nothing is carried over, and the machine was warm."""
    done = evidence.batches
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


def check_stalls(evidence: Evidence, found: _Findings) -> None:
    """No batch was held up for long, see ``bench.analysis.stalls``; those that were have been measured again."""
    held = stalls.held_up(evidence.batches)
    if held.empty:
        return
    lost = (held["batch_ns"] - held["expected_ns"]).groupby(held["arm"]).sum()
    share = (lost / evidence.batches.groupby("arm")["batch_ns"].sum()).max()
    worst = held.iloc[0]
    prompts = [sample.prompt_id for sample in evidence.measured if sample.batch == worst["batch"]]
    where = f"prompt {prompts[0]} ({worst['arm']}, {_HELD[worst['why']].format(**_seconds_of(worst))})"
    text = (
        f"The machine stalled in {_counted(len(held), 'batch', 'batches')}, worst at {where}. That is {share:.1%} of "
        f"the arm's time; above {STALLED_SHARE:.0%} is INVALID. Close other programs and repeat the command."
    )
    late = share > STALLED_SHARE or (held["why"] == "clock").any()
    (found.reasons if late else found.warnings).append(text)


_HELD = {
    "slow": "{factor:.1f} times as long as its rounds explain",
    "stopped": "the process had no processor for {lost:.2f} of {whole:.2f} s",
    "clock": "the system's clock was set, or the machine slept",
}


def _seconds_of(held: pd.Series) -> dict[str, float]:
    lost = held["batch_ns"] - held["expected_ns"]
    return {"factor": held["factor"], "lost": lost / 1e9, "whole": held["batch_ns"] / 1e9}


def check_measured_again(evidence: Evidence, found: _Findings) -> None:
    """Names the pairs that were measured again, as the machine had stalled or the process was stopped in them."""
    if not evidence.replaced:
        return
    names = list(dict.fromkeys(sample.prompt_id for sample in evidence.replaced))
    longest = max(evidence.replaced, key=lambda sample: sample.batch_ns - (sample.cpu_ns or 0))
    idle = (
        ""
        if longest.cpu_ns is None
        else f" ({max(0, longest.batch_ns - longest.cpu_ns) / 1e9:.2f} s without a processor)"
    )
    found.warnings.append(
        f"{_counted(len(names), 'prompt was', 'prompts were')} measured again, as the machine stalled or the process "
        f"was stopped: {', '.join(names[:_MOST_NAMED])}{', ...' if len(names) > _MOST_NAMED else ''}. The longest took "
        f"{longest.batch_ns / 1e9:.2f} s{idle}. The first measurements do not count."
    )


def check_averages(evidence: Evidence, found: _Findings) -> None:
    """The headline agrees with averages of the pairs' ratios; where not, a few pairs decide it.

    The geometric mean is one of total times, so it is compared with a headline of these alone.
    """
    speedup, headline = evidence.summary["speedup"], metrics.headline(evidence.summary)
    value, averages = headline["value"], {"median": "the median of the pairs"}
    averages |= {"geometric": "the geometric mean of the pairs"} if headline.get("of") == "total" else {}
    for other, name in ((speedup.get(key), name) for key, name in averages.items()):
        if value and other and abs(math.log(value / other)) > math.log(1 + DISAGREEMENT):
            found.warnings.append(
                f"The speed-up of {value:.2f}x is one of sums, {name} is {other:.2f}x: a few prompts decide it, or "
                "long ones gain more, or less, than short ones. Look at each: python -m bench collect what=samples"
            )
            return


def check_load(evidence: Evidence, found: _Findings) -> None:
    """Other programs did not use the device: on a CPU by the load during the run, on a GPU before it."""
    manifest = evidence.manifest
    facts, load = manifest.get("hardware") or {}, _load(manifest)
    if load is not None and facts.get("threads") and facts.get("logical_cores"):
        others = max(0.0, load - facts["threads"])
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


def check_processor(evidence: Evidence, found: _Findings) -> None:
    """On a CPU the process was not kept from its processors: batches of an arm get the processor time of most others.

    Most, and at least one processor, as some thread always computes. What one batch uses of several threads depends on
    the method and the machine, so it is no norm. Of batches of a few milliseconds only that one processor is asked for:
    threads still wait there for the work of the batch before, or have not woken up for their own.
    """
    if (evidence.manifest.get("hardware") or {}).get("gpu"):
        return
    known = evidence.batches[evidence.batches["cpu_ns"].notna()]
    arms = known.groupby("arm")
    short = bool((arms["batch_ns"].median() < SHORT_BATCH_NS).any())
    lost = {str(arm): _lost_processor(part, short) for arm, part in arms}
    for arm, share in lost.items():
        uneven = share - min(lost.values()) > PROCESSOR[0]  # this moves the speed-up, a loss of both arms does not
        text = (
            f"The {arm} got {1 - share:.0%} of its processor time{', the other arm more' if uneven else ''}, as other "
            f"programs ran or the process was stopped; below {1 - PROCESSOR[0]:.0%} is busy, below "
            f"{1 - PROCESSOR[1]:.0%}, or with {PROCESSOR[0]:.0%} between the arms, INVALID. Close other programs and "
            "repeat the command."
        )
        found.judge(math.inf if uneven else share, PROCESSOR, text)


def _lost_processor(batches: pd.DataFrame, short: bool) -> float:
    """Share of the processor time of an arm that its batches did not get; batches with more than most make up for none
    of another arm's.

    Args:
        short: each must have had one processor, and what others did does not count.
    """
    used, wall = batches["cpu_ns"].to_numpy(float), batches["batch_ns"].to_numpy(float)
    if short:
        return float(1 - np.minimum(used, wall).sum() / wall.sum())
    return max(0.0, float(1 - used.sum() / (max(1.0, float(np.median(used / wall))) * wall.sum())))


def check_made_ahead(evidence: Evidence, found: _Findings) -> None:
    """No graph is captured and no function compiled while the clock runs."""
    for kind, count, noun in (("graphs", "captured", "CUDA graphs"), ("compiled", "functions", "functions")):
        made = evidence.manifest.get(kind)
        if made and (late := made["in_all"][count] - made["before"][count]):
            verb = "captured" if kind == "graphs" else "compiled"
            found.reasons.append(
                f"{late} {noun} were {verb} within measured time, which takes longer than a step. Measure with a "
                "longer warm-up (measure.warmup), or without them (hardware.graphs=off, hardware.compile=false)."
            )


def check_graphs(evidence: Evidence, found: _Findings) -> None:
    """Every pass replays a graph where the run has graphs."""
    missed = (evidence.manifest.get("graphs") or {}).get("in_all", {}).get("missed", 0)
    if missed:
        found.warnings.append(
            f"{missed} passes ran kernel by kernel, as none of the captured graphs was of their size; both arms are "
            "timed as they ran. A longer warm-up (measure.warmup) captures more sizes."
        )


def check_clock(evidence: Evidence, found: _Findings) -> None:
    """A GPU keeps its clock; that of a CPU differs from core to core, and is no sign of anything."""
    clock = evidence.summary.get("clocks")
    if not clock or not (evidence.manifest.get("hardware") or {}).get("gpu"):
        return
    if clock["least"] < CLOCK * clock["median"]:
        found.warnings.append(
            f"The GPU's clock fell to {clock['least']:,.0f} MHz, its median is {clock['median']:,.0f} MHz. "
            "Interleaving protects the speed-up; compare tokens per second and latencies within this run only. The "
            "manifest has the readings, with what limited the clock."
        )


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
    check_texts,
    check_ids,
    check_length,
    check_repeats,
    check_acceptance,
    check_steadiness,
    check_stalls,
    check_measured_again,
    check_averages,
    check_load,
    check_processor,
    check_made_ahead,
    check_graphs,
    check_clock,
    check_harness,
)
# They judge the machine, not the method.
NOISE = frozenset({check_repeats, check_steadiness, check_stalls, check_load, check_processor})


def _load(manifest: Mapping[str, Any]) -> float | None:
    """The highest mean load during the run, over its last minute, and over 5 and 15 where it took that long.

    The system's averages fade exponentially: what was there at the start has a share of exp(-seconds / window) in the
    one at the end.
    """
    averages = manifest.get("load_average") or {}
    start, end = averages.get("start"), averages.get("end")
    if not end:
        return None
    seconds, loads = _seconds(manifest), [end[0]]
    for place, window in enumerate(_LOAD_WINDOWS_S):
        if start and place and seconds >= window:
            before = math.exp(-seconds / window)
            loads.append((end[place] - before * start[place]) / (1 - before))
    return float(max(loads))


def _seconds(manifest: Mapping[str, Any]) -> float:
    """Of the run; 0 if unknown."""
    begin, end = manifest.get("started_at"), manifest.get("ended_at")
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds() if begin and end else 0.0


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
    """Faults of one row. The prefill (step 0) may commit any number of tokens; the last step was trimmed.

    A round of a baseline that fills in masks is a block, of which each pass writes a token.
    """
    last = len(sample.step_tokens) - 1
    counters = zip(sample.step_tokens, sample.step_accepted, sample.step_depth, sample.step_drafted, strict=False)
    for step, (kept, accepted, depth, drafted) in enumerate(counters):
        if sample.queue and step and not sample.step_target_passes[step]:
            if kept or drafted:
                yield f"round {step} kept {kept} tokens and judged {drafted}, although the row waited"
            continue
        if not 0 <= accepted <= depth <= drafted:
            yield f"round {step} accepted {accepted} of a path of {depth} among {drafted} nodes"
            continue
        passes = 1 if drafted or sample.arm == "method" else max(1, sample.step_target_passes[step])
        right = {accepted + 1, accepted + passes}
        if exact and step and not (kept in right or (step == last and kept <= max(right))):
            yield f"round {step} kept {kept} tokens with {accepted} accepted"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _counted(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"


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
