"""Boards: who stands beside whom, who is ranked, and what the figures are drawn from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

from bench.analysis import metrics
from bench.analysis.cost_curve import CostCurve
from bench.config import compose
from bench.report import leaderboard, plots, series, terminal
from bench.report.collect import Record
from bench.report.style import style_of
from bench.utils import stats
from tests.helpers.sample_rows import both

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.text import Text

PAIRS = [
    sample
    for i in range(1, 5)
    for sample in both(
        f"{i}/1", {"ms": [10] * 9}, {"ms": [10] + [5 * i] * 4, "tokens": [1] + [2] * 4}, category="ab"[i % 2]
    )
]
SUMMARY = metrics.summarise(PAIRS, guarantee="EXACT", n_bootstrap=100)
TARGETS = {
    "suffix": "methods.speculative.suffix_decoding.SuffixDecoding", "calm": "methods.early_exit.calm.Calm",
    "nat": "methods.non_autoregressive.nat.Nat", "hf_generate": "methods.external.transformers_generate.HFGenerate",
    "autoregressive": "methods.autoregressive.Autoregressive", "mine": "elsewhere.Mine",
}  # fmt: skip


def run(method: str, speed: float = 1.5, *, valid: bool = True, settings: Any = None, **changes: Any) -> Record:
    """A finished run of its own name; ``changes`` go into its summary."""
    changes = {"bleu": None, "rate": 10.0} | changes
    bleu, rate = changes.pop("bleu"), changes.pop("rate")
    name = f"{method}-{len(NAMES)}"
    NAMES.append(name)
    summary: dict[str, Any] = json.loads(json.dumps(SUMMARY)) | {
        "run_id": name, "method": method, "guarantee": GUARANTEES.get(method, "EXACT"), "schema_version": 1,
        "model": "m", "model_revision": "1", "dataset": "multi30k", "batch_size": 1, "max_new_tokens": 64,
        "dataset_revision": {"content": "c", "files": [name]}, "hardware": "A CPU", "dtype": "float32", "threads": 2,
        "sampling": {"temperature": 0.0},
        "verdict": {"valid": valid, "reasons": [], "warnings": [], "inconclusive": []},
        "agreement": {"exact": 1.0, "mean_logprob": -1.0, "baseline": {"mean_logprob": -1.0}},
        "degeneration": {"method": {}, "baseline": {"longest_loop": 3.0}}, "ranking": {"text_loss": 0.0},
        "prompts_per_s": rate, "quality": {} if bleu is None else {"bleu": bleu},
        "quality_prompts": {} if bleu is None else {"bleu": SUMMARY["n_prompts"]},
    }  # fmt: skip
    summary["speedup"]["headline"] |= {"value": speed, "low": speed - 0.1, "high": speed + 0.1, "n": 20}
    summary["baseline"] |= {"prompts_per_s": 8.0, "quality": {} if bleu is None else {"bleu": 33.0}}
    manifest = {"method": {"name": method, "_target_": TARGETS[method], **(settings or {})}, "status": "finished"}
    return Record(Path("results") / name, manifest, summary | changes)


NAMES: list[str] = []
DOUBTED: dict[str, Any] = {"valid": True, "reasons": [], "warnings": [], "inconclusive": ["x"]}
GUARANTEES = {"calm": "RELAXED", "nat": "INDEPENDENT_MODEL"}


def methods(rows: list[leaderboard.Row]) -> list[str]:
    return [row.method for row in rows]


def test_ranks_count_within_a_guarantee_and_invalid_runs_have_none() -> None:
    (group,) = leaderboard.groups(
        [run("suffix", 1.2), run("calm", 3.0), run("hf_generate", 9.0, valid=False), run("autoregressive", 1.5)]
    )
    assert [(e.method, e.guarantee, e.rank) for e in group.rows] == [
        ("autoregressive", "EXACT", 1), ("suffix", "EXACT", 2), ("calm", "RELAXED", 1), ("hf_generate", "EXACT", None),
    ]  # fmt: skip
    assert methods(group.valid) == ["autoregressive", "suffix", "calm"]
    frame = leaderboard.ranking(group)
    assert frame["rank"].tolist() == ["1", "2", "1", "-"] and frame["result"].tolist()[-1] == "INVALID"
    assert frame["speed-up"].tolist() == ["1.50x", "1.20x", "3.00x", "9.00x"]
    assert "not ranked" not in frame, "the result says it"


def test_lost_quality_and_another_state_of_the_machine_have_no_rank() -> None:
    rows = [
        run("suffix", 1.2), run("mine", 1.3), run("autoregressive", 1.0), run("nat", 9.0, bleu=20.0),
        run("calm", 2.0, ranking={"text_loss": None}), run("hf_generate", 8.0, baseline_tokens_per_s=900.0),
        run("calm", 3.0, valid=False),
    ]  # fmt: skip
    (group,) = leaderboard.groups(rows)
    assert methods(group.rows) == ["mine", "suffix", "autoregressive", "nat", "hf_generate", "calm", "calm"]
    assert methods(group.ranked) == methods(group.rows)[:3] and methods(group.valid) == methods(group.rows)[:6]
    frame = leaderboard.ranking(group)
    assert frame["rank"].tolist() == ["1", "2 tie", "3 tie", *"----"]
    assert frame["not ranked"].tolist() == [
        "", "", "", "quality lost: BLEU 20.00, was 33.00",
        "baseline 900 tokens/s, the table's 100: not measured under the same conditions", "quality unknown", "",
    ]  # fmt: skip
    (line,) = (each for each in leaderboard.winners([group]).to_dict("records") if each["family"] == "peer")
    assert (line["fastest"], line["ranked"], line["not ranked"]) == ("-", 0, 1)


@pytest.mark.parametrize("key", [key for key in terminal.JOIN_KEYS if key != "dataset_revision"])
def test_what_differs_in_anything_that_matters_stands_apart(key: str) -> None:
    numbers = ("threads", "batch_size", "max_new_tokens", "schema_version")
    other = 99 if key in numbers else {"temperature": 0.7} if key == "sampling" else "other"
    found = leaderboard.groups([run("suffix"), run("calm", **{key: other})])
    assert len(found) == 2 and len({group.heading for group in found}) == 2


def test_where_a_data_set_was_found_is_no_difference() -> None:
    first, second = run("suffix"), run("calm")
    assert len(leaderboard.groups([first, second])) == 1, "the lists of files differ, the content does not"
    other = run("nat", dataset_revision={"content": "other"})
    assert len(leaderboard.groups([first, second, other])) == 2


@pytest.mark.parametrize(("method", "family"), [
    ("suffix", "speculative"), ("calm", "early exit"), ("nat", "non-autoregressive"), ("hf_generate", "peer"),
    ("autoregressive", "baseline"), ("mine", "other"),
])  # fmt: skip
def test_families(method: str, family: str) -> None:
    assert leaderboard.family(run(method).manifest) == family


def test_every_method_of_the_suite_has_a_family() -> None:
    import yaml

    for name in compose.groups()["method"]:
        settings = yaml.safe_load(compose.config_file("method", name).read_text(encoding="utf-8"))
        assert leaderboard.family({"method": settings}) != leaderboard.OTHER, name


def test_labels_tell_runs_of_one_method_apart() -> None:
    (group,) = leaderboard.groups(
        [run("suffix", settings={"gamma": 4}), run("suffix", settings={"gamma": 8}), run("calm")]
    )
    assert sorted(row.label for row in group.rows) == ["calm", "suffix gamma=4", "suffix gamma=8"]
    (group,) = leaderboard.groups([run("suffix"), run("suffix")])
    assert len({row.label for row in group.rows}) == 2


def test_winners_are_valid_ones() -> None:
    rows = [run("suffix", 1.2), run("suffix", 9.0, valid=False), run("calm", 1.1, valid=False)]
    frame = leaderboard.winners(leaderboard.groups(rows)).set_index("family")
    assert frame.loc["speculative", ["speed-up", "ranked", "not ranked"]].tolist() == ["1.20x", 1, 1]
    assert frame.loc["early exit", ["fastest", "speed-up", "ranked"]].tolist() == ["-", "-", 0]


def test_categories_are_those_of_the_summary() -> None:
    (group,) = leaderboard.groups([run("suffix"), run("calm", valid=False)])
    values = leaderboard.categories(group)
    assert list(values.index) == ["suffix"] and sorted(values.columns) == ["a", "b"]
    # even prompts: 2 x 90 ms over 50 + 90 ms; odd ones over 30 + 70 ms
    assert values.loc["suffix", "a"] == pytest.approx(180 / 140) and values.loc["suffix", "b"] == pytest.approx(
        180 / 100
    )
    assert leaderboard.categories(group, least=2).shape == (1, 2) and leaderboard.categories(group, least=3).empty


def test_the_heat_map_has_a_row_for_a_run_of_yours_and_one_for_the_reference(ax: Any) -> None:
    (group,) = leaderboard.groups([run("suffix"), replace(run("suffix"), source="reference")])
    plots.heat_map(ax, group)
    assert sorted(text.get_text().endswith("(yours)") for text in ax.get_yticklabels()) == [False, True]


def test_a_market_joins_models_and_families_but_no_machines() -> None:
    rows = [
        run("suffix", bleu=33.0, rate=12.0), run("calm", bleu=32.0, rate=20.0), run("nat", bleu=30.0, rate=90.0),
        run("suffix", bleu=31.0, rate=15.0, model="deep_shallow"), run("calm", bleu=34.0, rate=99.0, valid=False),
        run("nat", bleu=40.0, rate=999.0, hardware="A GPU"), run("suffix", bleu=1.0, dataset="wmt14"), run("suffix"),
    ]  # fmt: skip
    ours, other = sorted(
        leaderboard.quality_speed_plots(leaderboard.groups(rows), "bleu", "multi30k"),
        key=lambda m: len(m.points),
        reverse=True,
    )
    assert len(ours.points) == 5 and len(other.points) == 1 and "models: deep_shallow, m" in ours.heading
    assert {name.split("-")[0] for name in ours.front} == {"suffix", "calm", "nat"} and len(ours.front) == 3
    assert rows[3].path.name not in ours.front, "slower and worse than the early exit"
    assert rows[4].path.name not in ours.front, "INVALID"
    assert ours.points[0].before == (8.0, 33.0)
    assert leaderboard.quality_speed_plots(leaderboard.groups(rows[-1:]), "bleu", "multi30k") == []


def test_the_pareto_front_keeps_ties() -> None:
    points = {"a": (1.0, 2.0), "twin": (1.0, 2.0), "other": (2.0, 1.0), "slower": (0.5, 2.0), "unknown": (9.0, None)}
    assert stats.pareto(points) == {"a", "twin", "other"}
    assert stats.pareto({"a": (1.0, 2.0), "b": (1.0, 2.5)}) == {"b"}


def test_slopes_are_of_the_measured_passes() -> None:
    record = run("suffix")
    curve = CostCurve((1, 4, 8), 1, (64, 128), ((0.01, 0.0125, 0.02), (0.02, 0.025, 0.04)))
    record.manifest["cost_curve"] = curve.to_dict()
    (group,) = leaderboard.groups([record, run("calm")])
    assert leaderboard.slopes(group) == pytest.approx({1: 1.0, 4: 0.8, 8: 0.5})


# ------------------------------------------------------------------------------------------------------------ figures


@pytest.fixture
def ax() -> Iterator[Any]:
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def test_looks_are_fixed_and_tell_methods_apart() -> None:
    names = compose.groups()["method"]
    assert len({(style_of(name).colour, style_of(name).mark) for name in names}) == len(names)
    assert style_of("of_a_stranger") == style_of("of_a_stranger")
    assert style_of("of_a_stranger", "peer").colour == style_of("hf_generate").colour
    assert style_of("eagle").colour == style_of("medusa").colour != style_of("calm").colour
    assert style_of("bild_6_1") == style_of("bild"), "a variant looks as its method"


def test_intervals_draw_value_and_ends(ax: Any) -> None:
    (group,) = leaderboard.groups([run("suffix", 2.0), run("calm", 1.5), run("nat", 7.0, valid=False)])
    plots.intervals(ax, group)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["suffix (yours)", "calm (yours)"]
    bars = [line.get_xdata() for line in ax.lines if len(line.get_xdata()) == 2][:2]
    assert np.allclose(bars, [[1.9, 2.1], [1.4, 1.6]]) and ax.get_xscale() == "log"
    marks = [line for line in ax.lines if line.get_marker() not in ("None", None)]
    assert [mark.get_markerfacecolor() == "white" for mark in marks] == [False, True], "hollow may change the text"
    assert [text.get_text() for text in ax.texts] == ["2.00× (1.90–2.10)", "1.50× (1.40–1.60)"]


def test_a_label_has_the_values_of_settings_and_whose_run_it_is() -> None:
    record = replace(run("nat", settings={"length_beam": 5, "rescore": True}), source="reference")
    other = run("nat", settings={"length_beam": 1, "rescore": False})
    (group,) = leaderboard.groups([record, other])
    assert sorted(map(plots.label, group.rows)) == ["nat 1 (yours)", "nat 5"]
    assert plots.short_name("calm", "threshold=0.5 tolerance=None #1f3a") == "calm 0.5 #1f3a"
    assert plots.title("T", group.rows) == "T; reference records and your runs"
    assert plots.title("T", [row for row in group.rows if row.name == record.path.name]) == "T; reference records"


def test_the_fastest_of_each_method() -> None:
    rows = [run("nat", 2.0, settings={"a": 1}), run("nat", 3.0, settings={"a": 2}), run("calm", 1.2)]
    rows.append(replace(run("nat", 2.5), source="reference"))
    (group,) = leaderboard.groups(rows)
    found = {(row.method, row.record.source): row.speed for row in leaderboard.fastest(group).rows}
    assert found == {("nat", "own"): 3.0, ("nat", "reference"): 2.5, ("calm", "own"): 1.2}


def test_the_spread_is_of_the_conversations(ax: Any, tmp_path: Path) -> None:
    record = run("suffix")
    folder = tmp_path / record.path.name
    folder.mkdir()
    (folder / "samples.jsonl").write_text("".join(json.dumps(asdict(sample)) + "\n" for sample in PAIRS))
    (folder / "manifest.json").write_text(json.dumps(record.manifest))
    (folder / "summary.json").write_text(json.dumps(record.summary))
    (group,) = leaderboard.groups([Record(folder, record.manifest, record.summary), run("calm")])
    # baseline 90 ms; method 10 + 4 x 5i ms
    assert plots.prompt_speedups(group.rows[0]) == pytest.approx(sorted(90 / (10 + 20 * i) for i in range(1, 5)))
    assert len(plots.prompt_speedups(group.rows[1])) == 0, "its samples are gone"
    plots.conversations(ax, group)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["suffix (yours)"]
    assert [text.get_text() for text in ax.texts] == ["0% of 4 slower"]


@pytest.mark.parametrize("draw", [plots.steps_and_speed, plots.heat_map, plots.intervals])
def test_figures_of_few_and_of_many(draw: Any, ax: Any) -> None:
    one = [run("suffix")]
    many = [run(list(TARGETS)[i % 6], 1 + i / 30, settings={"gamma": i}, predicted_speedup=None) for i in range(60)]
    for rows in (one, many):
        (group,) = leaderboard.groups(rows)
        draw(ax, group)
        ax.figure.canvas.draw()


def test_the_rates_of_a_market_are_free_of_drift_between_runs() -> None:
    def with_baseline(rate: float, record: Record) -> Record:
        record.summary["baseline"]["prompts_per_s"] = rate
        return record

    rows = [
        run("suffix", bleu=33.0, rate=12.0), run("nat", bleu=30.0, rate=40.0),
        with_baseline(4.0, run("calm", bleu=32.0, rate=9.0)),  # on a machine that was half as fast
        with_baseline(100.0, run("calm", bleu=32.5, rate=50.0, valid=False)),
    ]  # fmt: skip
    (plot,) = leaderboard.quality_speed_plots(leaderboard.groups(rows), "bleu", "multi30k")
    found = {point.row.name: (point.rate, point.before) for point in plot.points}
    expected = zip(rows, (12.0, 40.0, 18.0, 4.0), strict=True)
    assert found == {row.path.name: (rate, (8.0, 33.0)) for row, rate in expected}


def test_figures_across_boards(ax: Any) -> None:
    rows = [run("suffix", bleu=33.0), run("nat", bleu=30.0, rate=50.0, model="o"), run("suffix", batch_size=8)]
    found = leaderboard.groups(rows)
    (plot, *_) = leaderboard.quality_speed_plots(found, "bleu", "multi30k")
    plots.pareto(ax, plot)
    names = {"suffix (yours)", "nat (yours)", "autoregressive m", "autoregressive o"}
    assert {text.get_text() for text in ax.texts} == names
    (heading, lines) = series.of(found)[0]
    figure, axes = plt.subplots()
    plots.over_batches(axes, lines, lambda row: row.speed)
    assert heading and [text.get_text() for text in axes.texts] == ["suffix (yours)"]
    figure.canvas.draw()
    plt.close(figure)


def overlapping(texts: list[Any]) -> list[tuple[str, str]]:
    boxes = [(text.get_text(), Text.get_window_extent(text)) for text in texts]  # without lines to the dots
    return [(a, b) for i, (a, first) in enumerate(boxes) for b, second in boxes[i + 1 :] if first.overlaps(second)]


def test_names_of_near_dots_do_not_overlap(ax: Any) -> None:
    dots = [(1.0 + 0.01 * i, 1.0 + 0.01 * (i % 3), f"method {i}") for i in range(8)]
    ax.plot([x for x, _, _ in dots], [y for _, y, _ in dots], "o")
    ax.set(xlim=(0, 2), ylim=(0, 2))
    plots.name_dots(ax, dots)
    ax.figure.canvas.draw()
    assert len(ax.texts) == len(dots) and not overlapping(ax.texts)
    marks = [ax.transData.transform((x, y)) for x, y, _ in dots]
    assert not [text.get_text() for text in ax.texts for mark in marks if Text.get_window_extent(text).contains(*mark)]


def test_names_of_lines_that_end_together_do_not_overlap(ax: Any) -> None:
    rows = [
        run(method, 1.0 + i / 1000 + size / 10, batch_size=size) for i, method in enumerate(TARGETS) for size in (1, 8)
    ]
    ((_, lines),) = series.of(leaderboard.groups(rows))
    plots.over_batches(ax, lines, lambda row: row.speed)
    ax.figure.canvas.draw()
    assert len(ax.texts) == len(TARGETS) and not overlapping(ax.texts)


def test_inconclusive_points_of_a_line_are_crossed_and_have_their_interval(ax: Any) -> None:
    rows = [run("suffix", 1.5), run("suffix", 1.2, batch_size=8, verdict=DOUBTED)]
    ((_, lines),) = series.of(leaderboard.groups(rows))
    plots.over_batches(ax, lines, lambda row: row.speed)
    (cross,) = [line for line in ax.lines if line.get_marker() == "x"]
    assert (list(cross.get_xdata()), list(cross.get_ydata())) == ([8], [1.2])
    (interval,) = ax.collections
    assert interval.get_segments()[0].tolist() == [[8, pytest.approx(1.1)], [8, pytest.approx(1.3)]]
    plots.legend(ax.figure, lines["suffix"])
    (shown,) = ax.figure.legends
    assert "crossed: INCONCLUSIVE" in [text.get_text() for text in shown.get_texts()]
    other = plt.figure().subplots()
    plots.over_batches(other, lines, lambda row: 40.0)
    assert not other.collections, "the interval is one of the speed-up"
    plt.close(other.figure)


def test_a_picture_has_its_numbers_as_text_and_is_the_same_again() -> None:
    (group,) = leaderboard.groups([run("suffix", 2.0), run("calm", 1.5), run("nat", 7.0, valid=False)])
    picture = plots.speedup_svg(group)
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", picture)
    assert {"suffix (yours)", "2.00× (1.90–2.10)", "1.50× (1.40–1.60)"} <= set(texts) and "nat (yours)" not in texts
    assert picture == plots.speedup_svg(group) and "<dc:date>" not in picture
