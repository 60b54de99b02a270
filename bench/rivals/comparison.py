"""How much faster an entry is than the entry of a baseline that the same benchmark measured in the same way.

The speed-up per token is the mean time of the baseline divided by that of the entry: of TPOT, (latency - TTFT) /
(output tokens - 1) averaged over the requests, where both files have it; else of the latency of a batch, which includes
the prompt and has as many tokens in both. Its interval is over requests, or batches. It does not contain how a second
run would differ, since each file is one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from bench.records.rivals import Against, Figures, Spread
from bench.rivals.formats import LATENCY, SERVE, SGLANG_SERVE, THROUGHPUT, Entry, Times
from bench.utils import stats
from bench.utils.stats import Interval

LENGTHS = 0.02  # tokens that may differ; the project's own records are per token beyond 1 %
RESAMPLES, SEED = 2_000, 0
_MOST_PAIRS = 1_000  # more are summed in blocks of neighbours, so that an interval takes less than a second
_SERVED = (SERVE, SGLANG_SERVE)  # equal definitions


def against(entry: Entry, baseline: Sequence[Entry], name: str) -> Against:
    """The entry against the one entry of a baseline's file that it can be compared with.

    Args:
        entry: what is to be compared.
        baseline: entries of the baseline's file, at least one.
        name: of that file.
    """
    found = {place: tuple(reasons(entry.figures, each.figures)) for place, each in enumerate(baseline)}
    fitting = [place for place, why in found.items() if not why]
    if len(fitting) > 1:
        return Against(name, (f"{len(fitting)} entries of {name} have these settings, leave one",))
    if not fitting:
        return Against(name, min(found.values(), key=len))
    other = baseline[fitting[0]]
    of, ratio = _per_token(entry, other)
    return Against(other.figures.name, (), of, ratio, _throughput(entry.figures, other.figures))


def reasons(own: Figures, base: Figures) -> Iterator[str]:
    """Why two entries cannot be compared, nothing if they can."""
    if own.tool != base.tool and not (own.tool in _SERVED and base.tool in _SERVED):
        yield f"another benchmark, {own.tool} instead of {base.tool}"
        return
    yield from _differ("model", own.model, base.model, "model=NAME")
    for figures in (own, base):
        if figures.failed:
            yield f"{figures.failed} failed requests in {figures.name}"
    if own.tool in _SERVED:
        yield from _differ("number of requests", own.requests, base.requests)
        yield from _equal("request rate", own.request_rate, base.request_rate)
        yield from _equal("concurrency", own.concurrency, base.concurrency)
        if own.dataset and base.dataset:
            yield from _equal("data set", own.dataset, base.dataset)
    elif own.tool == THROUGHPUT:
        yield from _differ("number of requests", own.requests, base.requests)
        yield from _far("tokens", own.total_tokens, base.total_tokens)
    else:
        yield from _differ("batch size", own.batch_size, base.batch_size, "batch_size=N")
    if own.tool == LATENCY:
        yield from _differ("output tokens", own.output_tokens, base.output_tokens, "output_len=N")
    elif own.requests == base.requests:
        yield from _far("input tokens", own.input_tokens, base.input_tokens)
        yield from _far("output tokens", own.output_tokens, base.output_tokens)


def _differ(what: str, own: object, base: object, setting: str = "") -> Iterator[str]:
    """Both must be known and equal."""
    if own is None or base is None:
        yield f"{what} unknown{f', set {setting}' if setting else ''}"
    else:
        yield from _equal(what, own, base)


def _equal(what: str, own: object, base: object) -> Iterator[str]:
    if own != base:
        named = ("none" if value is None else f"{value}" for value in (own, base))
        yield f"other {what}, {' instead of '.join(named)}"


def _far(what: str, own: int | None, base: int | None) -> Iterator[str]:
    """Numbers of tokens, where both are known."""
    if own and base and abs(own / base - 1) > LENGTHS:
        yield f"other number of {what}, {own} instead of {base}"


def _throughput(own: Figures, base: Figures) -> float | None:
    """Ratio of output tokens per second; of all tokens per second where the files do not say which are output."""
    if own.tokens_per_s and base.tokens_per_s:
        return own.tokens_per_s / base.tokens_per_s
    if own.total_tokens_per_s and base.total_tokens_per_s:
        return own.total_tokens_per_s / base.total_tokens_per_s
    return None


def _per_token(own: Entry, base: Entry) -> tuple[str | None, Interval | None]:
    for of in ("tpot_s", "latency_s"):
        first, second = _mean(own, of), _mean(base, of)
        if own.figures.tool in _SERVED and of == "latency_s":  # it depends on the queue, too
            return None, None
        if first and second:
            return ("mean TPOT" if of == "tpot_s" else "mean latency"), _ratio(own, base, second / first)
    return None, None


def _mean(entry: Entry, of: str) -> float | None:
    spread: Spread = getattr(entry.figures, of)
    return spread.mean


def _ratio(own: Entry, base: Entry, stated: float) -> Interval:
    """Baseline's mean time over this entry's, with an interval where both files have the times."""
    if not own.times or not base.times:
        return Interval(stated, reason="no times of requests in both files")
    if own.input_lens and own.input_lens == base.input_lens:
        return _paired(base.times, own.times)
    return _unpaired(base.times, own.times, stated)


def _paired(numerator: Times, denominator: Times) -> Interval:
    """The same requests in the same order: a ratio of totals over pairs, which is that of the means."""
    both = [(a, b) for a, b in zip(numerator, denominator, strict=True) if a is not None and b is not None]
    size = -(-len(both) // _MOST_PAIRS)
    sums = [np.sum(both[start : start + size], axis=0) for start in range(0, len(both), max(1, size))]
    columns = np.array(sums).reshape(-1, 2).T
    found = stats.ratio_of_totals(columns[0], columns[1], n_resamples=RESAMPLES, seed=SEED)
    reason = stats.few_pairs(len(both), "request") if found.reason else None
    return Interval(found.value, found.low, found.high, len(both), found.kind, reason)


def _unpaired(numerator: Times, denominator: Times, stated: float) -> Interval:
    """Other requests, or batches without an order: both are drawn again, each for itself."""
    top, bottom = (np.array([value for value in times if value is not None]) for times in (numerator, denominator))
    n = min(len(top), len(bottom))
    if n < stats.FEWEST_PAIRS:
        return Interval(stated, n=n, reason=stats.few_pairs(n, "value"))
    rng = np.random.default_rng(SEED)
    drawn = [rng.choice(top, len(top)).mean() / rng.choice(bottom, len(bottom)).mean() for _ in range(RESAMPLES)]
    low, high = map(float, np.percentile(drawn, (2.5, 97.5)))
    return Interval(float(top.mean() / bottom.mean()), low, high, n, "percentile")
