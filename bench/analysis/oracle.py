"""What recorded drafts would allow: rows computed from the rounds of runs over the same prompts, marked ORACLE.

All runs decode greedily, row by row, and EXACT, so they write one text until a near-tie parts them. A prompt counts up
to the first token in which the runs differ; ``coverage`` is the share of the first run's tokens that is left, all of
them where there is one run. A text position is the number of output tokens before it; position 1 follows the prefill.

**A run at a position** is its round that starts there or, where none does, the one that starts nearest before. Of such
a round only the rest counts: it commits the tokens from the position to its end, at its whole drafting time, and of a
chain the tokens that are behind the position are not scored. A drafter that started there anew could draft further, so
mixtures of runs are underestimated. ``route`` gives the opposite bound too, which lets the round commit all its tokens
from the position on; it overestimates, since long rounds cover more positions than short ones. Where ``coverage`` is
small, what is left are the beginnings of the answers: compare a mixture with ``recorded``, its best run on these texts.

**Prices.** A round costs its target passes on the cost curve and its recorded drafting time, as in
``metrics.predicted_speedup``; a token of autoregression costs a pass over one. A run alone gives its own prediction,
but for answers whose two arms differ in length. Both arms include the recorded prefill of the baseline, and the runs
what their prefill takes beyond it; where a text counts in part, so does its prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import accumulate, takewhile
from typing import Any

from bench.analysis import metrics
from bench.analysis.cost_curve import CostCurve, CostSurface
from bench.records.run_folder import Sample

MARK = "ORACLE"
LEAST_MATCHES = tuple(range(1, 9))
Curve = CostCurve | CostSurface
Price = Callable[[int, int, int], float]
_LONGEST = 63  # tokens of a perfect draft, where the curve allows
_NS = 1e9


def is_oracle(summary: Mapping[str, Any]) -> bool:
    """Whether a run was measured with drafts that no method has: those of ``method=oracle``."""
    return bool((summary.get("method_facts") or {}).get("oracle"))


@dataclass(frozen=True, slots=True)
class Run:
    """A recorded run: its name, the content of its manifest.json, its samples."""

    name: str
    manifest: Mapping[str, Any]
    samples: Sequence[Sample]

    @property
    def method(self) -> str:
        return str(self.manifest["method"]["name"])

    @property
    def curve(self) -> CostCurve | None:
        """The cost curve the run measured, if it did."""
        stored = self.manifest.get("cost_curve")
        return CostCurve.from_dict(stored) if stored else None

    def unfit(self) -> str:
        """Why its rounds cannot be mixed with those of another run; empty if they can."""
        if self.manifest["guarantee"] != "EXACT":
            return f"it must be EXACT, got {self.manifest['guarantee']}"
        if temperature := self.manifest["sampling"]["temperature"]:
            return f"it must be greedy, got sampling.temperature={temperature:g}"
        if self.manifest["batch_size"] != 1:
            return f"its batch size must be 1, got {self.manifest['batch_size']}"
        if not any(sample.phase == "measure" for sample in self.samples):
            return "it has no measured prompt yet"
        return "" if _timed(self.samples) else "the drafts of its draft model were not timed"


@dataclass(frozen=True, slots=True)
class Round:
    """A recorded round.

    Attributes:
        start: output tokens before it.
        tokens: it commits.
        depth: positions of its draft.
        nodes: it scored.
        chain: its draft had one token per position.
        passes: of the target, times the share of the layers they ran and the cost of exits.
        draft_s: time of its proposal.
        draft_passes: passes of the drafter in it.
    """

    start: int
    tokens: int
    depth: int
    nodes: int
    chain: bool
    passes: float
    draft_s: float
    draft_passes: int


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the part of its answer that all runs share.

    Attributes:
        prompt: tokens of the prompt.
        length: output tokens that are shared, at least 2.
        written: output tokens of the first run.
        prefill_s: of the first run's baseline, in proportion to what is shared.
        extra_s: what the prefill of each run took beyond that of its own baseline, likewise.
        rounds: of each run, by text position: the round that is running there.
    """

    prompt: int
    length: int
    written: int
    prefill_s: float
    extra_s: tuple[float, ...]
    rounds: tuple[tuple[Round, ...], ...]


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds and rounds of a text, or of several, without the prefill."""

    seconds: float = 0.0
    rounds: int = 0
    by_run: tuple[int, ...] = ()

    def __add__(self, other: Took) -> Took:
        pairs = zip(self.by_run or (0,) * len(other.by_run), other.by_run, strict=True)
        return Took(self.seconds + other.seconds, self.rounds + other.rounds, tuple(a + b for a, b in pairs))


# ---------------------------------------------------------------------------------------------------- shared texts


def texts(runs: Sequence[Run]) -> list[Text]:
    """The prompts that all runs decoded, with what their answers have in common; the first repeat of each."""
    arms = [_arms(run) for run in runs]
    shared = [name for name in arms[0] if all(name in other for other in arms[1:])]
    found = (_text([each[name] for each in arms], runs) for name in shared)
    return [text for text in found if text is not None]


def _arms(run: Run) -> dict[str, dict[str, Any]]:
    """Baseline and method by prompt."""
    rows = metrics.paired(metrics.frame(run.samples))
    found: dict[str, dict[str, Any]] = {}
    for row in rows.sort_values("repeat", kind="stable").itertuples():
        found.setdefault(str(row.prompt_id), {}).setdefault(str(row.arm), row)
    return found


def _text(pairs: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> Text | None:
    first = pairs[0]["method"]
    asked = {(pair["method"].n_prompt_tokens, tuple(pair["method"].prompt_ids)) for pair in pairs}
    if len(asked) > 1:  # a later turn quotes the answer before it
        return None
    outputs = (pair["method"].output_ids for pair in pairs)
    length = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, zip(*outputs, strict=False)))
    if length < 2:
        return None
    counted_s = length / first.n_output_tokens / _NS
    return Text(
        first.n_prompt_tokens,
        length,
        first.n_output_tokens,
        pairs[0]["baseline"].prefill_ns * counted_s,
        tuple((pair["method"].prefill_ns - pair["baseline"].prefill_ns) * counted_s for pair in pairs),
        tuple(
            _by_position(list(_rounds(pair["method"], metrics.cost_over_layers(run.manifest))), length)
            for pair, run in zip(pairs, runs, strict=True)
        ),
    )


def _rounds(row: Any, over: float) -> Iterator[Round]:
    """The rounds that commit something; what a prefill commits beyond its first token costs nothing."""
    starts = [0, *accumulate(row.step_tokens)]
    for step, tokens in enumerate(row.step_tokens):
        if tokens:
            passes = row.step_target_passes[step] * min(1.0, row.step_layers[step]) * over if step else 0.0
            draft_s = (row.step_draft_ns[step] or 0) / _NS if step else 0.0
            depth, chain = row.step_depth[step], row.step_drafted[step] == row.step_depth[step]
            nodes, draft_passes = row.step_nodes[step], row.step_draft_passes[step]
            yield Round(starts[step], tokens, depth, nodes, chain, passes, draft_s, draft_passes)


def _by_position(rounds: Sequence[Round], length: int) -> tuple[Round, ...]:
    places = [one for one in rounds for _ in range(one.tokens)]
    return tuple(places[:length])


def _timed(samples: Sequence[Sample]) -> bool:
    """Whether no pass of a draft model lacks its time."""
    return not any(
        passes and ns is None
        for sample in samples
        if sample.arm == "method" and sample.phase == "measure"
        for passes, ns in zip(sample.step_draft_passes[1:], sample.step_draft_ns[1:], strict=True)
    )


# -------------------------------------------------------------------------------------------------------- policies


def alone(text: Text, price: Price, run: int = 0) -> Took:
    """The rounds of one run as recorded."""
    return _walk(text, price, lambda position: run)


def plain(text: Text, price: Price) -> Took:
    """Autoregression: a pass over one token for each."""
    return Took(sum(price(1, 1, text.prompt + place) for place in range(1, text.length)), text.length - 1)


def best_run(text: Text, price: Price) -> Took:
    """At every position the run that leads to the least total time over the shared text.

    It is found backwards from the end, so no other choice among the recorded rounds is faster.
    """
    runs = range(len(text.rounds))
    least, chosen, goes_to = [0.0] * (text.length + 1), [0] * text.length, [0] * text.length
    for place in range(text.length - 1, 0, -1):
        ends = [_end(text, run, place) for run in runs]
        costs = [_seconds(text, run, place, price) + least[ends[run]] for run in runs]
        chosen[place] = min(runs, key=costs.__getitem__)
        least[place], goes_to[place] = costs[chosen[place]], ends[chosen[place]]
    return _walk(text, price, lambda position: chosen[position])


def route(text: Text, price: Price, least: int, *, whole: bool = False) -> Took:
    """The first run where what is left of its draft has at least ``least`` tokens, else the second one.

    The proposal of the first is made in every round, since its length decides.

    Args:
        whole: a round commits all its tokens from a position within it, not only the rest of them.
    """

    def choose(position: int) -> int:
        one = text.rounds[0][position]
        return 0 if one.depth - (0 if whole else position - one.start) >= least else 1

    return _walk(text, price, choose, whole=whole, always=0)


def best_length(text: Text, price: Price, run: int = 0) -> Took:
    """The rounds of a run with drafts of just the tokens that were accepted; where none was, with no draft."""
    took = Took()
    for one in dict.fromkeys(text.rounds[run][1:]):
        kept = min(one.start + one.tokens, text.length) - one.start
        if one.passes:
            share = (kept - 1) / one.depth if one.draft_passes == one.depth and one.depth else float(kept > 1)
            pass_s = price(kept, 1, text.prompt + one.start)
            took += Took(one.passes * pass_s + one.draft_s * min(1.0, share), 1)
    return took


def perfect(text: Text, price: Price, length: int, draft_s: Callable[[int], float]) -> Took:
    """Drafts of ``length`` tokens, all of them right.

    Args:
        draft_s: seconds of a proposal over its tokens.
    """
    took, place = Took(), 1
    while place < text.length:
        tokens = min(length + 1, text.length - place)
        took += Took(price(tokens, 1, text.prompt + place) + draft_s(tokens - 1), 1)
        place += tokens
    return took


def draft_cost(runs_texts: Sequence[Text], run: int = 0) -> Callable[[int], float]:
    """Mean seconds of a run's proposals over their tokens: proportional if each token takes a pass, else constant."""
    rounds = [one for text in runs_texts for one in dict.fromkeys(text.rounds[run][1:]) if one.depth]
    if not rounds:
        return lambda tokens: 0.0
    seconds, depth, passes = (
        sum(getattr(one, name) for one in rounds) / len(rounds) for name in ("draft_s", "depth", "draft_passes")
    )
    each_a_pass = passes > 0 and abs(passes - depth) < 0.01 * depth
    return lambda tokens: (seconds * tokens / depth if each_a_pass else seconds) if tokens else 0.0


def _walk(
    text: Text, price: Price, choose: Callable[[int], int], *, whole: bool = False, always: int | None = None
) -> Took:
    """Through the text by the rounds that ``choose`` takes at each position."""
    seconds, counts, place = 0.0, [0] * len(text.rounds), 1
    while place < text.length:
        run = choose(place)
        seconds += _seconds(text, run, place, price, whole=whole)
        if always is not None and run != always:
            seconds += text.rounds[always][place].draft_s
        counts[run] += bool(text.rounds[run][place].passes)
        place = _end(text, run, place, whole=whole)
    return Took(seconds, sum(counts), tuple(counts))


def _end(text: Text, run: int, place: int, *, whole: bool = False) -> int:
    one = text.rounds[run][place]
    return min((place if whole else one.start) + one.tokens, text.length)


def _seconds(text: Text, run: int, place: int, price: Price, *, whole: bool = False) -> float:
    one = text.rounds[run][place]
    if not one.passes:
        return 0.0
    behind = 0 if whole or not one.chain else place - one.start
    return one.passes * price(max(1, one.nodes - behind), 1, text.prompt + place) + one.draft_s


# ------------------------------------------------------------------------------------------------------------ rows


PERFECT = "perfect drafter, free"
PERFECT_PAID = "perfect drafter at its own cost"
LENGTH = "best draft length of every round"
RUN = "best recorded drafter of every round"
ROUTE = "draft of the first from {} tokens on, else of the second"


@dataclass(frozen=True, slots=True)
class Row:
    """A computed row of a table; never ranked.

    Attributes:
        oracle: what is assumed.
        method: whose drafts; empty where no run's are used.
        runs: names of the runs whose rounds are used.
        speedup: over autoregression on the shared texts, prefill included, as the ``predicted_speedup`` of a run.
        decode_speedup: without the prefill.
        tokens_per_step: tokens per round after the prefill.
        coverage: share of the first run's tokens that all of them wrote.
        recorded: ``speedup`` of the run as it was recorded, of several that of the best; None where no run is used.
        draft_length: of the drafts; in a route the fewest tokens for which the first run is taken; None: it varies.
        most: of a route, ``speedup`` if a round commits all its tokens from a position within it; else None.
        rounds: share of the rounds of each run.
        result, ranked: the mark.
    """

    oracle: str
    method: str
    runs: tuple[str, ...]
    speedup: float
    decode_speedup: float
    tokens_per_step: float
    coverage: float
    recorded: float | None = None
    draft_length: int | None = None
    most: float | None = None
    rounds: tuple[float, ...] = ()
    result: str = MARK
    ranked: bool = False


def oracle_rows(runs: Sequence[Run], curve: Curve | None = None) -> list[dict[str, Any]]:
    """What perfect knowledge would give over these runs: the fields of ``Row``; runs that do not fit are left out.

    Args:
        runs: over the same prompts, with the same model on the same machine.
        curve: prices all rows; None: rows of one run have its own curve, of several that of the first, and the free
            perfect drafter the one with most nodes, up to which its length is chosen.
    """
    fit = [run for run in runs if not run.unfit() and (curve or run.curve)]
    mixes = [_Mix((run,), found, known) for run in fit if (known := curve or run.curve) and (found := texts([run]))]
    rows = [_free(max(mixes, key=lambda mix: mix.most_nodes))] if mixes else []
    for mix in mixes:
        if mix.runs[0].method != "autoregressive":
            rows += [_best_length(mix), _paid(mix)]
    if len(fit) > 1 and (known := curve or fit[0].curve) and (found := texts(fit)):
        rows.append(_best_run(_Mix(tuple(fit), found, known)))
    return [asdict(row) for row in rows]


def routed_rows(
    first: Run, second: Run, curve: Curve | None = None, least: Iterable[int] = LEAST_MATCHES
) -> list[dict[str, Any]]:
    """Drafts of the first run where they are long enough, else those of the second: one row for each threshold.

    Args:
        first, second: runs that fit (``Run.unfit``), over the same prompts.
        curve: prices the rounds; None: that of the first run.
        least: thresholds, in tokens of the draft.

    Returns:
        The fields of ``Row``; empty where the runs share no text, or there is no curve.
    """
    known, shared = curve or first.curve, texts([first, second])
    if known is None or not shared:
        return []
    mix = _Mix((first, second), shared, known)
    recorded = mix.recorded()
    found = []
    for tokens in least:
        took, whole = (mix.total(partial(route, least=tokens, whole=each)) for each in (False, True))
        most = max(mix.speedup(took), mix.speedup(whole))
        found.append(mix.row(ROUTE.format(tokens), took, recorded=recorded, draft_length=tokens, most=most))
    return [asdict(row) for row in found]


def replayed(run: Run, curve: Curve | None = None) -> float | None:
    """The speed-up of a run as it was recorded, as these rows compute it; None without a curve or a text."""
    known, shared = curve or run.curve, texts([run])
    return _Mix((run,), shared, known).recorded() if known and shared else None


@dataclass(frozen=True, slots=True)
class _Mix:
    """Runs, the texts they share, and the prices."""

    runs: tuple[Run, ...]
    texts: Sequence[Text]
    curve: Curve

    @property
    def price(self) -> Price:
        return _remembered(self.curve)

    @property
    def most_nodes(self) -> int:
        """The largest measured pass."""
        curves = self.curve.curves if isinstance(self.curve, CostSurface) else (self.curve,)
        return max(one.nodes[-1] for one in curves)

    def total(self, policy: Callable[[Text, Price], Took]) -> Took:
        return sum((policy(text, self.price) for text in self.texts), Took())

    def speedup(self, took: Took, paid: Sequence[int] | None = None) -> float:
        """Of the texts with their prefill; ``paid`` are the runs whose further prefill counts, None: all."""
        prefill = sum(text.prefill_s for text in self.texts)
        more = range(len(self.runs)) if paid is None else paid
        extra = sum(text.extra_s[run] for text in self.texts for run in more)
        return (prefill + self.total(plain).seconds) / (prefill + extra + took.seconds)

    def recorded(self) -> float:
        """That of the best run alone."""
        return max(self.speedup(self.total(partial(alone, run=run)), [run]) for run in range(len(self.runs)))

    def row(self, oracle: str, took: Took, *, paid: Sequence[int] | None = None, **more: Any) -> Row:
        """The row of a policy over all texts."""
        tokens, counted = sum(text.length - 1 for text in self.texts), max(1, took.rounds)
        names = {"method": " + ".join(run.method for run in self.runs), "runs": tuple(run.name for run in self.runs)}
        return Row(
            oracle,
            **names | more,
            speedup=self.speedup(took, paid),
            decode_speedup=self.total(plain).seconds / took.seconds,
            tokens_per_step=tokens / counted,
            coverage=sum(text.length for text in self.texts) / sum(text.written for text in self.texts),
            rounds=tuple(count / counted for count in took.by_run),
        )


def _free(mix: _Mix) -> Row:
    length, took = _fastest_perfect(mix, lambda tokens: 0.0)
    return mix.row(PERFECT, took, paid=(), method="", runs=(), draft_length=length)


def _paid(mix: _Mix) -> Row:
    length, took = _fastest_perfect(mix, draft_cost(mix.texts))
    return mix.row(PERFECT_PAID, took, recorded=mix.recorded(), draft_length=length)


def _best_length(mix: _Mix) -> Row:
    return mix.row(LENGTH, mix.total(best_length), recorded=mix.recorded())


def _best_run(mix: _Mix) -> Row:
    return mix.row(RUN, mix.total(best_run), recorded=mix.recorded())


def _fastest_perfect(mix: _Mix, draft_s: Callable[[int], float]) -> tuple[int, Took]:
    """The one length of perfect drafts that takes the least time over all texts, within the measured nodes."""
    lengths = range(min(_LONGEST + 1, mix.most_nodes))
    totals = {length: mix.total(partial(perfect, length=length, draft_s=draft_s)) for length in lengths}
    best = min(totals, key=lambda length: totals[length].seconds)
    return best, totals[best]


@lru_cache(maxsize=8)
def _remembered(curve: Curve) -> Price:
    return lru_cache(maxsize=None)(curve.seconds)
