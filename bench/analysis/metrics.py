"""Every rate of a run, derived from recorded counters and times.

Only measured rows count, and only batches that both arms finished without an error. A *row* is one prompt decoded once.
A *batch* was decoded in lockstep: its time and energy are those of all its rows and are counted once. A *unit*, all
batches of one conversation, is what pairs the arms and what the bootstrap draws, as turns of a conversation are not
independent. With continuous batching a queue is a batch: throughput and speed-up are those of whole queues, there is no
speed-up by category, and a prompt's own times count from the step that read it.

The headline compares equal work: seconds per token where the time of a method grows with its text, as a shorter text
takes less time and is no speed-up; seconds where it does not.

Repeats are averaged per prompt first: a row weighs 1 / (repeats of its prompt) in every sum and mean. None means not
measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from itertools import chain
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bench.analysis.cost_curve import CostCurve, CostSurface
from bench.records.run_folder import Sample
from bench.utils import stats

Array = NDArray[np.float64]
Price = Callable[[int, int, int], float]
Of = Literal["per_token", "total"]

STEP_COLUMNS = (
    "step_ns",
    "step_tokens",
    "step_drafted",
    "step_accepted",
    "step_depth",
    "step_nodes",
    "step_layers",
    "step_draft_ns",
    "step_target_passes",
    "step_draft_passes",
)
MIXED = "mixed"  # category of a batch whose rows are of several
FEWEST_FOR_P99 = 100
ENERGY_BLOCK_S = 5.0
REPEATED_NGRAM = 8  # tokens
NOVEL_SHARE = 0.10  # of the baseline's tokens in a repeated n-gram; a unit with more is not novel
_NS = 1e9
_MORE_QUEUES = "; set measure.refill_queue, the fewest prompts of a queue, to measure several"
_FEWEST_ROUNDS, _FEWEST_BATCHES = 8, 4  # below, the spread of the baseline says nothing
_DUST = 1e-9
_ARM_COLUMNS = ("s", "prefill_s", "tokens")


def summarise(
    samples: Iterable[Sample | Mapping[str, Any]],
    *,
    guarantee: str,
    agreement: Mapping[str, Any] | None = None,
    cost_curve: CostCurve | CostSurface | Price | None = None,
    cost_over_layers: float = 1.0,
    one_pass: bool = False,
    n_bootstrap: int = 10_000,
    seed: int = 0,
) -> dict[str, Any]:
    """The rates in summary.json: those of the method at the top level, those of the other arm under ``baseline``.

    Args:
        samples: the rows of samples.jsonl.
        guarantee: what the method declares: EXACT, RELAXED or INDEPENDENT_MODEL.
        agreement: of ``bench.measure.agreement``.
        cost_curve: measured time of a target pass; None leaves the prediction out.
        cost_over_layers, one_pass: see the functions of these names.
        n_bootstrap, seed: of the intervals.
    """
    everything = frame(samples)
    rows = paired(everything)
    arms = {arm: rows[rows["arm"] == arm] for arm in ("method", "baseline")}
    table, of = units(rows), kind(one_pass)
    ratios = speedups(rows, table, of, n_bootstrap, seed)
    predicted = None if one_pass else predicted_speedup(rows, cost_curve, cost_over_layers)
    rates = {arm: arm_rates(part) for arm, part in arms.items()}
    measured, tokens_per_s = ratios["headline"]["value"], rates["baseline"]["tokens_per_s"]
    summary = {
        "guarantee": str(getattr(guarantee, "value", guarantee)),
        "n_prompts": int(rows["prompt_id"].nunique()),
        "n_repeats": int(rows["repeat"].nunique()),
        "n_errors": int(errors(everything).sum()),
        "speedup": ratios | {"per_token": _divide(rates["method"]["tokens_per_s"], tokens_per_s)},
        "predictability": predictability(table),
        "predicted_speedup": predicted,
        "predicted_ratio": _divide(measured, predicted),
        **rates["method"],
        **({"quality_prompts": counts} if (counts := scored_prompts(arms["method"])) else {}),
        "baseline_tokens_per_s": tokens_per_s,
        "baseline": rates["baseline"],
        **steadiness(rows),
        "agreement": None if agreement is None else dict(agreement),
    }
    return {key: _jsonable(value) for key, value in summary.items()}


# ------------------------------------------------------------------------------------------------------------ frames


def frame(samples: Iterable[Sample | Mapping[str, Any]]) -> pd.DataFrame:
    """One row per sample, one column per field."""
    names = [field.name for field in fields(Sample)]
    rows = [sample if isinstance(sample, Sample) else Sample(**sample) for sample in samples]
    columns = {name: pd.Series([getattr(row, name) for row in rows], dtype=object) for name in names}
    return pd.DataFrame(columns).astype(_SCALARS)


_SCALARS = {
    "repeat": "int64",
    "turn": "int64",
    "batch": "int64",
    "batch_size": "int64",
    "n_prompt_tokens": "int64",
    "n_kept_tokens": "int64",
    "n_output_tokens": "int64",
    "prefill_ns": "float64",
    "batch_ns": "float64",
    "queue": "float64",
    "admitted": "float64",
    "peak_bytes": "float64",
    "energy_j": "float64",
    "cpu_ns": "float64",
    "jump_ns": "float64",
}


def errors(rows: pd.DataFrame) -> pd.Series:
    """Whether something went wrong with a measured row."""
    return rows["error"].notna() & (rows["phase"] == "measure")


def paired(rows: pd.DataFrame) -> pd.DataFrame:
    """The measured rows of batches that both arms finished without an error.

    Adds ``unit``, the number of the conversation, and ``weight``, 1 / repeats of the row's prompt.
    """
    measured = rows[rows["phase"] == "measure"]
    starts = measured.groupby("batch")["turn"].min().sort_index() == 1
    unit = measured["batch"].map(starts.cumsum())
    arms = measured.groupby(["batch", "repeat", "prompt_id"])["arm"].transform("nunique")
    good = measured["error"].isna() & (arms == 2)
    whole = good.groupby([measured["batch"], measured["repeat"]]).transform("all").astype(bool)
    kept = measured.assign(unit=unit)[whole].reset_index(drop=True)
    return kept.assign(weight=1.0 / kept.groupby(["arm", "prompt_id"])["repeat"].transform("nunique"))


def batches(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per arm, batch and repeat: the member with the most steps; for a queue the steps of ``_queue``.

    Adds ``tokens``, the output tokens of all members, and ``contexts``, the length of the text after each step.
    """
    keys = ["arm", "batch", "repeat"]
    tokens = rows.groupby(keys)["n_output_tokens"].transform("sum")
    longest_first = rows.assign(tokens=tokens, steps=rows["step_ns"].map(len)).sort_values(
        "steps", ascending=False, kind="stable"
    )
    done = longest_first.drop_duplicates(keys).sort_values(keys).reset_index(drop=True)
    contexts = [n + np.cumsum(kept) for n, kept in zip(done["n_prompt_tokens"], done["step_tokens"], strict=True)]
    done = done.assign(contexts=pd.Series(contexts, dtype=object))
    if done.empty or done["queue"].isna().any():
        return done
    whole = pd.DataFrame([_queue(members) for _, members in rows.groupby(keys)])  # in the order of ``done``
    return done.assign(**{str(name): whole[name] for name in whole})


def _queue(members: pd.DataFrame) -> dict[str, Any]:
    """All steps of a queue: shared counters, the most layers of any row, the mean context.

    Steps that read prompts count as prefill, and no pass of the target.
    """
    begins: list[int] = members["admitted"].astype(int).tolist()
    prompts: Iterable[Any] = members.itertuples()
    count = max(begin + len(steps) for begin, steps in zip(begins, members["step_ns"], strict=True))
    columns = ("step_ns", "step_nodes", "step_draft_ns", "step_rows")
    shared: dict[str, list[Any]] = {name: [None] * count for name in columns}
    passes, draft_passes, layers = np.zeros(count, int), np.zeros(count, int), np.zeros(count)
    lengths, rows = np.zeros(count), np.zeros(count)
    for begin, prompt in zip(begins, prompts, strict=True):
        own = slice(begin, begin + len(prompt.step_ns))
        for name, values in shared.items():
            values[own] = getattr(prompt, name) or [None] * len(prompt.step_ns)
        passes[own] = np.maximum(passes[own], prompt.step_target_passes)
        draft_passes[own] = prompt.step_draft_passes
        layers[own] = np.maximum(layers[own], prompt.step_layers)
        lengths[own] += prompt.n_prompt_tokens + np.cumsum(prompt.step_tokens)
        rows[own] += 1
    reads = sorted(set(begins))
    passes[reads] = 0
    return {
        **shared,
        "step_rows": None if None in shared["step_rows"] else shared["step_rows"],
        "prefill_ns": float(sum(shared["step_ns"][step] for step in reads)),
        "step_target_passes": passes.tolist(),
        "step_draft_passes": draft_passes.tolist(),
        "step_layers": layers.tolist(),
        "contexts": lengths / rows,
    }


def rounds(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per step: the step columns without their prefix, ``step`` (0 is the prefill) and the row's ``weight``."""
    lengths = [len(steps) for steps in rows["step_ns"]]
    columns = {name.removeprefix("step_"): _flat(rows[name]) for name in STEP_COLUMNS}
    columns["step"] = np.array([step for length in lengths for step in range(length)], dtype=float)
    columns["weight"] = np.repeat(rows["weight"].to_numpy(dtype=float), lengths)
    return pd.DataFrame(columns)


def units(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per unit: category and, for each arm, seconds, prefill seconds and tokens; repeats averaged.

    ``repeated`` is the share of the baseline's tokens in a repeated n-gram; NaN where a prompt was not recorded.
    """
    if rows.empty:
        names = [f"{arm}_{name}" for name in _ARM_COLUMNS for arm in ("baseline", "method")]
        return pd.DataFrame(columns=[*names, "category", "repeated"], index=pd.Index([], name="unit"))
    done = batches(rows)
    scaled = pd.DataFrame(
        {
            "unit": done["unit"],
            "arm": done["arm"],
            "s": done["batch_ns"] / _NS * done["weight"],
            "prefill_s": done["prefill_ns"] / _NS * done["weight"],
            "tokens": done["tokens"] * done["weight"],
        }
    )
    wide = scaled.groupby(["unit", "arm"]).sum().unstack("arm")
    wide.columns = [f"{arm}_{name}" for name, arm in wide.columns]
    kinds = rows.groupby("unit")["category"].agg(lambda found: found.iloc[0] if found.nunique() == 1 else MIXED)
    return wide.assign(category=kinds, repeated=_repeated(rows[rows["arm"] == "baseline"]))


def _repeated(rows: pd.DataFrame) -> pd.Series:
    """By unit, the share of the output tokens in repeated n-grams."""
    tokens = rows["n_output_tokens"] * rows["weight"]
    texts = zip(rows["prompt_ids"], rows["output_ids"], rows["n_prompt_tokens"], strict=True)
    shares = [float("nan") if n and not prompt else repeated_share(prompt, ids) for prompt, ids, n in texts]
    covered = (tokens * shares).groupby(rows["unit"]).agg(lambda found: found.sum(skipna=False))
    return covered / tokens.groupby(rows["unit"]).sum()


def repeated_share(prompt_ids: Sequence[int], output_ids: Sequence[int], n: int = REPEATED_NGRAM) -> float:
    """Share of the output tokens that lie in an n-gram which began before, in the prompt or in the output.

    The n-gram may begin in the prompt and end in the output, and may overlap with its earlier occurrence. 0 without
    output.
    """
    text, end = [*prompt_ids, *output_ids], len(prompt_ids)  # up to ``end`` is prompt, or counted
    seen: set[tuple[int, ...]] = set()
    covered = 0
    for start in range(len(text) - n + 1):
        ngram = tuple(text[start : start + n])
        if ngram in seen:
            covered += max(0, start + n - max(start, end))
            end = max(end, start + n)
        seen.add(ngram)
    return covered / len(output_ids) if output_ids else 0.0


# --------------------------------------------------------------------------------------------------------- speed-ups


def headline(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """The speed-up of a run: an interval and what it is ``of``; the total of a summary that has no headline."""
    speedup: Mapping[str, Any] = summary["speedup"]
    return speedup.get("headline") or {**speedup["total"], "of": "total"}


def one_pass(manifest: Mapping[str, Any]) -> bool:
    """Whether the method writes a text in a number of passes that does not grow with its length.

    ``Decoder.one_pass`` of the run; of a record of before that was kept, whether it is a non-autoregressive model of
    its own.
    """
    if "one_pass" in manifest:
        return bool(manifest["one_pass"])
    package = str((manifest.get("method") or {}).get("_target_", "")).removeprefix("methods.").partition(".")[0]
    family = manifest.get("family", package)
    return family == "non_autoregressive" and manifest.get("guarantee") == "INDEPENDENT_MODEL"


def kind(one_pass: bool) -> Of:
    """What the headline is of: seconds of the arms for one-pass writers, for all others their seconds per token."""
    return "total" if one_pass else "per_token"


def speedups(rows: pd.DataFrame, table: pd.DataFrame, of: Of, n_bootstrap: int, seed: int) -> dict[str, Any]:
    """The headline and its variants.

    ``total`` is the ratio of the arms' seconds, ``geometric`` the mean of the units' ratios of seconds, ``spec_bench``
    the ratio of the arms' mean rates (Xia et al. 2024); ``prefill`` and ``decode`` split the total. With queues
    ``latency`` is the ratio of the prompts' summed times from being read to their end, paired by conversation. All
    others are of the headline's kind, see ``equal_work``.

    Args:
        rows: see ``paired``.
        table: ``units`` of them.
        of: the headline's kind.
        n_bootstrap, seed: of the intervals.
    """
    queues = not rows.empty and bool(rows["queue"].notna().all())
    compared = equal_work(table, of, n_bootstrap, seed)
    total = asdict(interval(table, "total", n_bootstrap, seed))
    for found in (compared["headline"], compared["novel"], total) if queues else ():
        if found["n"] and found["reason"]:
            found["reason"] = stats.few_pairs(found["n"], "queue") + _MORE_QUEUES
    if queues:
        latency = asdict(interval(_conversations(rows), "total", n_bootstrap, seed))
        compared |= {"by_category": {}, "latency": latency}
    geometric = stats.geometric_mean(table["baseline_s"].to_numpy(float), table["method_s"].to_numpy(float))
    rates = {arm: (table[f"{arm}_tokens"] / table[f"{arm}_s"]).mean() for arm in ("method", "baseline")}
    sums = table.drop(columns="category").astype(float).sum()
    return {
        "headline": compared.pop("headline"),
        "total": total,
        "geometric": geometric.value,
        "geometric_interval": None if geometric.low is None else [geometric.low, geometric.high],
        "spec_bench": _divide(rates["method"], rates["baseline"]),
        "prefill": _divide(sums["baseline_prefill_s"], sums["method_prefill_s"]),
        "decode": _divide(sums["baseline_s"] - sums["baseline_prefill_s"], sums["method_s"] - sums["method_prefill_s"]),
        **compared,
    }


def equal_work(table: pd.DataFrame, of: Of, n_bootstrap: int, seed: int) -> dict[str, Any]:
    """What is of the headline's kind and follows from the units alone, as ``bench.analysis.pairs`` keeps them.

    Returns:
        ``headline``; ``median`` of the units' ratios; ``floor``, the least of them and the share below 1; ``novel``,
        the headline over the novel units; ``by_category``, over the units of each category.
    """
    each, new = unit_ratios(table, of), novel(table)

    def over(part: pd.DataFrame) -> dict[str, Any]:
        return asdict(interval(part, of, n_bootstrap, seed))

    if new is None or not new.any():
        why = "it is not known which texts are novel" if new is None else "no text is novel"
        among = asdict(stats.Interval(None, reason=why))
    else:
        among = over(table[new])
    return {
        "headline": over(table) | {"of": of},
        "median": float(each.median()),
        "floor": {"minimum": float(each.min()), "slower_share": float((each < 1).mean())},
        "novel": among | {"of": of},
        "by_category": {str(name): over(part) for name, part in table.groupby("category")},
    }


def interval(table: pd.DataFrame, of: Of, n_bootstrap: int, seed: int) -> stats.Interval:
    """The speed-up over units: the ratio of the arms' seconds, or of their seconds per token."""
    seconds = table["baseline_s"].to_numpy(float), table["method_s"].to_numpy(float)
    if of == "total":
        return stats.ratio_of_totals(*seconds, n_resamples=n_bootstrap, seed=seed)
    tokens = table["baseline_tokens"].to_numpy(float), table["method_tokens"].to_numpy(float)
    if np.isnan(tokens).any():
        return stats.Interval(None, n=len(table), reason="the lengths of its texts were not kept")
    return stats.ratio_per_token(seconds, tokens, n_resamples=n_bootstrap, seed=seed)


def unit_ratios(table: pd.DataFrame, of: Of) -> pd.Series:
    """Speed-up of each unit, see ``interval``."""
    seconds = (table["baseline_s"] / table["method_s"]).astype(float)
    return seconds if of == "total" else seconds * (table["method_tokens"] / table["baseline_tokens"]).astype(float)


def novel(table: pd.DataFrame) -> pd.Series | None:
    """Whether at most a tenth of the baseline's tokens of a unit lie in repeated n-grams; None if that is not known."""
    shares = table["repeated"].astype(float)
    return None if shares.isna().any() else shares <= NOVEL_SHARE + _DUST


def predictability(table: pd.DataFrame) -> dict[str, Any]:
    """Mean over the units of the share of the baseline's tokens in repeated n-grams, and how many units are novel."""
    new = novel(table)
    return {
        "mean_share": None if new is None else float(table["repeated"].astype(float).mean()),
        "n_novel": None if new is None else int(new.sum()),
        "n_units": len(table),
    }


def _conversations(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per conversation: seconds of each arm from reading its prompts to their ends, repeats averaged."""
    seconds = pd.Series([sum(steps) / _NS for steps in rows["step_ns"]], index=rows.index) * rows["weight"]
    example = rows["prompt_id"].map(lambda name: name.rpartition("/")[0])
    return seconds.groupby([example, rows["arm"]]).sum().unstack("arm").add_suffix("_s")


def predicted_speedup(
    rows: pd.DataFrame, cost_curve: CostCurve | CostSurface | Price | None, cost_over_layers: float = 1.0
) -> float | None:
    """The speed-up of the recorded rounds at the measured cost of target passes; the rest is the method's overhead.

    It is per token, as the headline of all methods that write in rounds. A batch takes its prefill and, for every
    round, the cost of its passes plus the drafting time. None without a curve, or where a draft model's time was not
    recorded.
    """
    if cost_curve is None or rows.empty:
        return None
    round_s = cost_curve.seconds if isinstance(cost_curve, CostCurve | CostSurface) else cost_curve
    price = lru_cache(maxsize=None)(round_s)
    done = batches(rows)
    over = {"method": cost_over_layers, "baseline": 1.0}
    predicted = [_predicted_s(batch, price, over[str(batch.arm)]) for batch in done.itertuples()]
    seconds = np.array(predicted) * done["weight"]
    sums = seconds.groupby(done["arm"]).sum(min_count=1)
    unknown = seconds.isna().groupby(done["arm"]).any()
    tokens = (done["tokens"] * done["weight"]).groupby(done["arm"]).sum()
    total = None if unknown.any() else _divide(sums["baseline"], sums["method"])
    return None if total is None else total * float(tokens["method"] / tokens["baseline"])


def cost_over_layers(manifest: Mapping[str, Any]) -> float:
    """Cost of the method's passes over the share of the layers they ran, as it counted itself.

    With early exit it includes exit decisions, output matrices, and filling the caches of skipped layers.
    """
    return float((manifest.get("method_facts") or {}).get("cost_over_layers", 1.0))


def _predicted_s(batch: Any, price: Price, cost_over_layers: float) -> float:
    """Predicted seconds of a batch; NaN if the time of draft passes is unknown.

    A pass costs what it costs over the rows that it computed. One that ran a share of the layers costs that share,
    times ``cost_over_layers``.
    """
    total = batch.prefill_ns / _NS
    known = isinstance(batch.step_rows, list)
    rows = batch.step_rows if known else [batch.batch_size] * len(batch.step_ns)
    for step in range(1, len(batch.step_ns)):
        draft_ns, layers = batch.step_draft_ns[step], min(1.0, batch.step_layers[step])
        if draft_ns is None and batch.step_draft_passes[step]:
            return float("nan")
        pass_s = price(batch.step_nodes[step], rows[step], int(batch.contexts[step - 1]))
        total += batch.step_target_passes[step] * layers * cost_over_layers * pass_s + (draft_ns or 0) / _NS
    return float(total)


# ----------------------------------------------------------------------------------------------------- rates of an arm


def arm_rates(rows: pd.DataFrame) -> dict[str, Any]:
    """The rates of one arm alone."""
    table, done = rounds(rows), batches(rows)
    decode = table[table["step"] > 0]
    return {
        "tokens_per_s": throughput(done),
        **per_prompt(rows, done),
        "tokens_per_step": tokens_per_step(decode),
        **acceptance(table),
        "layers_per_token": _ratio_of_sums(table["layers"] * table["tokens"], table["tokens"], table["weight"]),
        **latencies(rows),
        "step_s": distribution(decode["ns"] / _NS, decode["weight"]),
        "itl_s": inter_token_latency(rows),
        "time_s": time_split(done),
        "draft_share": draft_share(done),
        "n_output_tokens": _sum(rows["n_output_tokens"] * rows["weight"]),
        "peak_memory_bytes": None if rows["peak_bytes"].isna().all() else int(rows["peak_bytes"].max()),
        "energy_j_per_token": energy_per_token(done),
        "quality": means_of(rows, "quality"),
        "extra": means_of(rows, "extra"),
    }


def throughput(done: pd.DataFrame) -> float | None:
    """Output tokens of all rows per second of wall time, prefill included."""
    return _ratio_of_sums(done["tokens"], done["batch_ns"] / _NS, done["weight"])


def per_prompt(rows: pd.DataFrame, done: pd.DataFrame) -> dict[str, float | None]:
    """Prompts per second of wall time, all rows of a batch together, and milliseconds per prompt."""
    seconds = _sum(done["batch_ns"] / _NS * done["weight"])
    rate = _divide(_sum(rows["weight"]), seconds)
    return {"prompts_per_s": rate, "ms_per_prompt": _divide(1000.0, rate)}


def tokens_per_step(decode: pd.DataFrame) -> float | None:
    """Tokens per target pass and row after the prefill, bonus included; None if there was no such pass."""
    return _ratio_of_sums(decode["tokens"], decode["target_passes"], decode["weight"])


def acceptance(table: pd.DataFrame) -> dict[str, Any]:
    """Acceptance over all rounds that had a draft; every value None or empty if none had.

    ``acceptance_rate`` is accepted / drafted, so a wide tree has a low one. ``alpha`` is accepted / judged along the
    path, as tokens after a rejection were never judged. ``acceptance_at[i]`` is the share of the drafts with at least
    i + 1 positions that kept position i; ``acceptance_at_conditional[i]`` of those that had kept all before it.
    """
    drafts = table[table["depth"] > 0]
    accepted, depth, weight = (drafts[name].to_numpy(float) for name in ("accepted", "depth", "weight"))
    judged = np.where(accepted < depth, accepted + 1, accepted)
    positions = range(1, int(depth.max(initial=0)) + 1)

    def share(position: int, *, among: NDArray[np.bool_]) -> float | None:
        return _divide(weight[among & (accepted >= position)].sum(), weight[among].sum())

    return {
        "acceptance_rate": _ratio_of_sums(table["accepted"], table["drafted"], table["weight"]),
        "alpha": _ratio_of_sums(accepted, judged, weight),
        "acceptance_at": [share(i, among=depth >= i) for i in positions],
        "acceptance_at_conditional": [share(i, among=(depth >= i) & (accepted >= i - 1)) for i in positions],
    }


def kept_at(sample: Sample) -> list[float]:
    """Of the drafts of one answer that had a position, the share that kept it; first position first."""
    found: list[float] = acceptance(rounds(frame([sample]).assign(weight=1.0)))["acceptance_at"]
    return found


def latencies(rows: pd.DataFrame) -> dict[str, Any]:
    """Latency of a request, its time to first token, and its time per token after that (rows of 2 tokens or more)."""
    latency = pd.Series([sum(steps) / _NS for steps in rows["step_ns"]], index=rows.index, dtype=float)
    ttft, longer = rows["prefill_ns"] / _NS, rows["n_output_tokens"] > 1
    tpot = ((latency - ttft) / (rows["n_output_tokens"] - 1))[longer]
    return {
        "ttft_s": distribution(ttft, rows["weight"]),
        "tpot_s": distribution(tpot, rows["weight"][longer]),
        "latency_s": distribution(latency, rows["weight"]),
    }


def inter_token_latency(rows: pd.DataFrame) -> dict[str, float | None]:
    """Gap between commits over its tokens, each token counted; the first commit is left out."""
    gaps: list[Array] = []
    for steps_ns, tokens in zip(rows["step_ns"], rows["step_tokens"], strict=True):
        counts = np.asarray(tokens)
        committed = np.flatnonzero(counts)
        ends_s = np.cumsum(steps_ns)[committed] / _NS
        each = counts[committed][1:]
        gaps.append(np.repeat(np.diff(ends_s) / each, each))
    weights = np.repeat(rows["weight"].to_numpy(float), [len(found) for found in gaps])
    return distribution(np.concatenate([np.empty(0), *gaps]), weights)


def time_split(done: pd.DataFrame) -> dict[str, float | None]:
    """Wall seconds of a pass over all prompts, and how they divide into prefill and decoding."""
    total, prefill = (_sum(done[name] / _NS * done["weight"]) for name in ("batch_ns", "prefill_ns"))
    return {"total": total, "prefill": prefill, "decode": None if total is None else total - (prefill or 0.0)}


def draft_share(done: pd.DataFrame) -> float | None:
    """Share of the wall time spent proposing; None where no proposal was timed."""
    timed = [[ns for ns in steps if ns is not None] for steps in done["step_draft_ns"]]
    if not any(timed):
        return None
    return _ratio_of_sums(np.array([sum(found) for found in timed], dtype=float), done["batch_ns"], done["weight"])


def energy_per_token(done: pd.DataFrame) -> float | None:
    """Joules of the whole device per output token, over the batches where they were measured.

    None if these took less than ``ENERGY_BLOCK_S`` together, as the counter advances every 20 to 100 ms only.
    """
    known = done[done["energy_j"].notna()]
    if known["batch_ns"].sum() / _NS < ENERGY_BLOCK_S:
        return None
    return _ratio_of_sums(known["energy_j"], known["tokens"], known["weight"])


def means_of(rows: pd.DataFrame, column: str) -> dict[str, float | None]:
    """Mean over the prompts of every number in a column of dictionaries, by its name, over the rows that have it."""
    found: dict[str, tuple[float, float]] = {}
    for values, weight in zip(rows[column], rows["weight"], strict=True):
        for name, value in values.items():
            if isinstance(value, (int, float)):
                total, counted = found.get(name, (0.0, 0.0))
                found[name] = total + weight * value, counted + weight
    return {name: _divide(*sums) for name, sums in sorted(found.items())}


def scored_prompts(rows: pd.DataFrame) -> dict[str, int]:
    """Prompts whose answers have a score, by its name; answers of one data set may have different ones."""
    names = {(prompt, name) for prompt, found in zip(rows["prompt_id"], rows["quality"], strict=True) for name in found}
    return dict(sorted(Counter(name for _, name in names).items()))


def steadiness(rows: pd.DataFrame) -> dict[str, float | None]:
    """Variation of the baseline's time per round, as shares of the median: ``spread`` over the run, and ``jitter``.

    An autoregressive round does the same work for any text, apart from the length of the context; that is removed with
    a straight line (Theil-Sen, robust to outliers). ``spread`` is the IQR of what remains. Slow drift affects both arms
    equally, but a change between batches disturbs a pair: ``jitter`` is the IQR of the differences between consecutive
    batches over the square root of 2, which equals the spread for independent values and is far less for a drift.
    Rounds after the first finished rows left the batch, smaller batches than the largest, and those with fewer than 8
    rounds do not count. None if fewer than 4 batches remain, and with continuous batching, whose contexts change within
    a round.
    """
    from scipy.stats import iqr, theilslopes

    unknown: dict[str, float | None] = {"spread": None, "jitter": None}
    if rows["queue"].notna().any():
        return unknown
    done = batches(rows[rows["arm"] == "baseline"]).sort_values(["repeat", "batch"])  # as they were measured
    n_rounds = pd.Series([_whole_rounds(batch) for batch in done.itertuples()], index=done.index, dtype=int)
    full = done.assign(n_rounds=n_rounds)[
        (done["batch_size"] == done["batch_size"].max()) & (n_rounds >= _FEWEST_ROUNDS)
    ]
    if len(full) < _FEWEST_BATCHES:
        return unknown
    counted = zip(full["step_ns"], full["n_rounds"], strict=True)
    round_s = np.array([np.mean(steps[1 : 1 + count]) / _NS for steps, count in counted])
    written = np.minimum(full["n_output_tokens"], full["n_rounds"] + 1)
    contexts = (full["n_prompt_tokens"] + written / 2).to_numpy(float)
    slope = theilslopes(round_s, contexts).slope if np.ptp(contexts) else 0.0
    level = round_s - slope * (contexts - np.median(contexts))
    return {
        "spread": float(iqr(level) / np.median(level)),
        "jitter": float(iqr(np.diff(level)) / np.sqrt(2) / np.median(level)),
    }


def _whole_rounds(batch: Any) -> int:
    """Rounds behind the prefill that computed every row of the batch; they are the first ones."""
    if not isinstance(batch.step_rows, list):
        return len(batch.step_ns) - 1
    return sum(rows == batch.batch_size for rows in batch.step_rows[1:])


# -------------------------------------------------------------------------------------------------------- arithmetic


def distribution(values: Any, weights: Any) -> dict[str, float | None]:
    """Weighted mean and plain percentiles; the 99th only from 100 values on."""
    found = np.asarray(values, dtype=float)
    if not len(found):
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    p50, p90, p99 = (float(value) for value in np.percentile(found, [50, 90, 99]))
    mean = float(np.average(found, weights=np.asarray(weights, dtype=float)))
    return {"mean": mean, "p50": p50, "p90": p90, "p99": p99 if len(found) >= FEWEST_FOR_P99 else None}


def _flat(lists: pd.Series) -> Array:
    return np.array(list(chain.from_iterable(lists)), dtype=float)


def _sum(values: pd.Series) -> float | None:
    return float(values.sum()) if len(values) else None


def _ratio_of_sums(numerator: Any, denominator: Any, weights: Any) -> float | None:
    weight = np.asarray(weights, dtype=float)
    return _divide((np.asarray(numerator) * weight).sum(), (np.asarray(denominator) * weight).sum())


def _divide(numerator: float | None, denominator: float | None) -> float | None:
    """The quotient; None if a side is unknown or the denominator is 0."""
    return float(numerator / denominator) if numerator is not None and denominator else None


def _jsonable(value: Any) -> Any:
    """JSON knows neither NaN nor numpy."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(inner) for inner in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if np.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
