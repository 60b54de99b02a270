"""The headline of every reference record, computed again by code that shares nothing with ``bench``; and the ranks."""

from __future__ import annotations

import gzip
import itertools
import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import norm, t

from bench.analysis import audit
from bench.report import collect, leaderboard

RECORDS = sorted(file.parent for file in Path(__file__).parents[3].glob("results/reference/*/manifest.json"))
ONE_PASS = {"nat", "glat", "ctc", "depa", "flowseq", "cmlm"}
RESAMPLES, SEED = 2000, 20_261_123
SURE = 5  # standard errors of the resampling
Array = NDArray[np.float64]
Theta = Callable[[Array], Array]  # of sums [..., 4] of baseline seconds and tokens, method seconds and tokens


def per_token(sums: Array) -> Array:
    found: Array = (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])
    return found


def total(sums: Array) -> Array:
    found: Array = sums[..., 0] / sums[..., 2]
    return found


def conversations(folder: Path) -> Array:
    """[conversations, 4], see ``Theta``."""
    if (folder / "pairs.json.gz").is_file():
        kept = json.loads(gzip.decompress((folder / "pairs.json.gz").read_bytes()))["units"]
        names = ("baseline_s", "baseline_tokens", "method_s", "method_tokens")
        return np.array([kept[name] for name in names], dtype=float).T
    lines = gzip.decompress((folder / "samples.jsonl.gz").read_bytes()).splitlines()
    rows = [row for row in map(json.loads, lines) if row["phase"] == "measure"]
    assert all(row["error"] is None and row["repeat"] == 0 and not row.get("queue") for row in rows)
    turns: dict[int, int] = {}
    spent: dict[tuple[int, str], tuple[float, float]] = {}
    for row in rows:
        key = row["batch"], row["arm"]
        turns[row["batch"]] = min(row["turn"], turns.get(row["batch"], row["turn"]))
        spent[key] = row["batch_ns"] / 1e9, spent.get(key, (0.0, 0.0))[1] + len(row["output_ids"])
    table: list[list[float]] = []
    for batch in sorted(turns):  # a first turn begins a conversation
        found = [*spent[batch, "baseline"], *spent[batch, "method"]]
        table = [*table, found] if turns[batch] == 1 else [*table[:-1], [a + b for a, b in zip(table[-1], found)]]  # noqa: B905
    return np.array(table)


@cache
def counts(n: int) -> Array:
    """[RESAMPLES, n]: how often each conversation is drawn."""
    drawn = np.random.default_rng(SEED).integers(0, n, (RESAMPLES, n)) + n * np.arange(RESAMPLES)[:, None]
    return np.bincount(drawn.ravel(), minlength=RESAMPLES * n).reshape(RESAMPLES, n).astype(float)


def without_each(table: Array, theta: Theta) -> Array:
    return np.array([theta(np.delete(table, row, axis=0).sum(0)) for row in range(len(table))])


def jackknife_t(table: Array, theta: Theta) -> tuple[float, float]:
    """On the log, around the estimate."""
    n, estimate = len(table), math.log(theta(table.sum(0)))
    logs = np.log(without_each(table, theta))
    error = math.sqrt((n - 1) / n * ((logs - logs.mean()) ** 2).sum())
    half = float(t.ppf(0.975, n - 1)) * error
    return math.exp(estimate - half), math.exp(estimate + half)


def bca(table: Array, theta: Theta, n_resamples: int) -> tuple[float, float, float]:
    """Efron 1987, and how far each end may be from that of another ``n_resamples`` draws."""
    drawn = np.sort(theta(counts(len(table)) @ table))
    bias = norm.ppf((drawn < theta(table.sum(0))).mean())
    apart = (left := without_each(table, theta)).mean() - left
    bend = (apart**3).sum() / (6 * (apart**2).sum() ** 1.5)
    low, high = (
        np.quantile(drawn, norm.cdf(bias + (bias + z) / (1 - bend * (bias + z)))) for z in norm.ppf([0.025, 0.975])
    )
    # Standard errors of a 2.5 % quantile, and of the bias correction, which moves an end twice, in spreads of ``drawn``
    quantile, middle = math.sqrt(0.025 * 0.975) / norm.pdf(1.96), 2 * math.sqrt(0.25) / norm.pdf(0)
    error = math.hypot(quantile, middle) * math.sqrt(1 / RESAMPLES + 1 / n_resamples) * drawn.std()
    return float(low), float(high), SURE * error


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)
def test_headline(folder: Path) -> None:
    summary, manifest = (json.loads((folder / name).read_text()) for name in ("summary.json", "manifest.json"))
    table, stored = conversations(folder), summary["speedup"]["headline"]
    theta = total if summary["method"] in ONE_PASS else per_token
    assert stored["of"] == theta.__name__
    assert stored["value"] == pytest.approx(float(theta(table.sum(0))), rel=1e-9)
    assert stored["n"] == len(table)
    ends: Any
    if len(table) < 5:
        assert (stored["low"], stored["high"], stored["kind"]) == (None, None, None) and stored["reason"]
    elif len(table) < 20:
        assert stored["kind"] == "t"
        assert (stored["low"], stored["high"]) == pytest.approx(jackknife_t(table, theta), rel=1e-9)
    else:
        assert stored["kind"] == "bca"
        *ends, tolerance = bca(table, theta, manifest["measure"]["bootstrap_samples"])
        assert [stored["low"], stored["high"]] == pytest.approx(ends, abs=tolerance, rel=0)


def test_all_records_are_looked_at() -> None:
    assert len(RECORDS) > 130


def equalised(folder: Path) -> float | None:
    """Speed-up over the tokens that both arms wrote, prompt by prompt: the longer text is timed up to there.

    None of a condensed run in which texts of one prompt differ in length: where in them a token was written is gone.
    """
    if not (folder / "samples.jsonl.gz").is_file():
        units = json.loads(gzip.decompress((folder / "pairs.json.gz").read_bytes()))["units"]
        if units["baseline_tokens"] != units["method_tokens"]:
            return None
        return float(sum(units["baseline_s"]) / sum(units["method_s"]))
    lines = gzip.decompress((folder / "samples.jsonl.gz").read_bytes()).splitlines()
    rows = [row for row in map(json.loads, lines) if row["phase"] == "measure"]
    texts: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        texts.setdefault(row["prompt_id"], {})[row["arm"]] = row
    spent = {"baseline": 0.0, "method": 0.0}
    for arms in texts.values():
        shorter = min(row["n_output_tokens"] for row in arms.values())
        for arm, row in arms.items():
            ends = np.cumsum(row["step_tokens"])
            spent[arm] += float(np.interp(shorter, [0, *ends], [0.0, *np.cumsum(row["step_ns"])]))
    return spent["baseline"] / spent["method"]


def test_no_order_depends_on_the_lengths_of_texts() -> None:
    """EXACT rows keep their order where both arms are timed over equal lengths, those without a rank too; rows whose
    intervals overlap have none.
    """
    read = collect.read(Path(__file__).parents[3] / "results" / "reference", "reference")
    compared = 0
    for group in leaderboard.groups(read):
        rows = [row for row in group.rows if row.guarantee == "EXACT" and row.summary["batch_size"] == 1]
        known = [(row, speed) for row in rows if (speed := equalised(row.record.path)) is not None]
        known.sort(key=lambda pair: -pair[0].headline["value"])
        for (above, faster), (row, slower) in itertools.pairwise(known):
            tie = above.headline["low"] <= row.headline["high"]
            assert tie or faster > slower, (group.heading, row.name)
            compared += 1
    assert compared > 100


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)
def test_the_verdict_follows_from_the_numbers(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    verdict, table = summary["verdict"], conversations(folder)
    assert verdict["inconclusive"] == audit.doubts(summary)
    share = table[:, 3].sum() / table[:, 1].sum()
    doubted = any(f"wrote {share:.1%} of the baseline's tokens" in why for why in verdict["inconclusive"])
    assert doubted == (summary["guarantee"] == "EXACT" and abs(share - 1) > 0.02)
