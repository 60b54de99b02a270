"""Series of runs over a batch size, a temperature or a length of the prompt."""

from __future__ import annotations

import pytest

from bench.report import leaderboard, markdown, series, terminal
from tests.bench.report.test_leaderboard import DOUBTED, SUMMARY, run


def test_a_series_needs_two_sizes() -> None:
    rows = [
        run("suffix", batch_size=8),
        run("suffix", batch_size=1),
        run("calm"),
        run("suffix", batch_size=16, valid=False),
    ]
    ((heading, lines),) = series.of(leaderboard.groups(rows))
    assert list(lines) == ["suffix"] and [e.summary["batch_size"] for e in lines["suffix"]] == [1, 8]
    assert series.of(leaderboard.groups(rows[2:])) == [] and heading.startswith("multi30k, m (A CPU")
    rows += [run("suffix", 3.0, batch_size=size, verdict=DOUBTED) for size in (8, 32)]
    ((_, lines),) = series.of(leaderboard.groups(rows))
    shown = [(row.summary["batch_size"], row.valid) for row in lines["suffix"]]
    assert shown == [(1, True), (8, True), (32, False)], "a VALID run counts before an INCONCLUSIVE one"


def test_coverage_names_what_is_not_recorded() -> None:
    rows = [
        run("suffix", 1.2, batch_size=8),
        run("suffix", 1.6),
        run("calm", 2.0, batch_size=3),
        run("calm", valid=False),
    ]
    again = run("calm", 1.9, dataset_revision={"content": "another", "files": []})
    ((heading, cells),) = series.coverage(leaderboard.groups([*rows, again]), (1, 2, 8))
    assert heading == "multi30k, m (A CPU, float32, 2 threads), greedy, 64 new tokens at most"
    assert list(cells) == ["B = 1", "B = 2", "B = 3", "B = 8"]
    assert cells.loc["suffix"].tolist() == ["1.60x", "-", "-", "1.20x"]
    assert cells.loc["calm"].tolist() == ["1.90x", "-", "2.00x", "-"], "the valid one of two"
    assert series.coverage(leaderboard.groups(rows[3:]), (1,))[0][1].loc["calm"].tolist() == ["INVALID"]
    refilled = series.coverage(leaderboard.groups([*rows, run("suffix", batch_size=8, refill=True)]), (8,))
    assert len(refilled) == 2 and sum(", refilled" in name for name, _ in refilled) == 1


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ({1: 2.0, 4: 0.5}, "at 4 rows"),
        ({1: 1.5, 8: 1.2}, "beyond 8 rows"),
        ({1: 2.0, 2: 1.5, 32: 1.0}, "at 32 rows"),
        ({1: 1.5, 4: 1.05, 8: 1.2}, "at 4 rows"),  # 0.95 to 1.15
        ({1: 0.9, 8: 0.8}, "never faster"),
        ({1: 1.05, 8: 0.8}, "never shown faster"),
        ({1: 0.9, 8: 1.2}, "none at 1 row"),
    ],
)
def test_where_an_advantage_ends(speeds: dict[int, float], expected: str) -> None:
    found = leaderboard.groups([run("suffix", speed, batch_size=size) for size, speed in speeds.items()])
    ((_, lines),) = series.of(found)
    assert series.advantage_ends(lines["suffix"]) == expected
    rows = [run("autoregressive", batch_size=size, model="other") for size in (1, 8)]
    text = markdown.to_markdown([*found, *leaderboard.groups(rows)], [])
    assert "| autoregressive |" not in text.partition("## Where advantages end")[2]
    assert "## Where advantages end" in text and f"| {expected} |" in text


def test_an_inconclusive_run_ends_an_advantage_and_is_marked() -> None:
    runs = [run("suffix", 1.5), run("suffix", 1.2, batch_size=4), run("suffix", 0.97, batch_size=16, verdict=DOUBTED)]
    runs.append(run("suffix", 9.0, valid=False, batch_size=32))
    ((_, text),) = series.markdown(leaderboard.groups(runs))
    assert "| suffix | 1.50x | 1.20x | 0.97x? (0.87-1.07) | at 16 rows |" in text and "B = 32" not in text


def test_a_run_without_an_interval_ends_no_advantage() -> None:
    runs = [run("suffix", 1.5), run("suffix", 0.5, batch_size=32, verdict=DOUBTED)]
    assert runs[1].summary is not None
    runs[1].summary["speedup"]["headline"] |= {"low": None, "high": None}
    ((_, text),) = series.markdown(leaderboard.groups(runs))
    assert "| 1.50x | 0.50x? (no interval) | beyond 1 row |" in text
    ((_, lines),) = series.of(leaderboard.groups(runs))
    assert series.advantage_ends(lines["suffix"][1:]) == "not known"


def test_speed_ups_over_temperatures() -> None:
    def at(temperature: float, speed: float, **changes: object):
        return run("suffix", speed, sampling={"temperature": temperature, "top_k": 0, "top_p": 1.0}, **changes)

    cut = run("suffix", 9.0, sampling={"temperature": 0.5, "top_k": 40, "top_p": 1.0})
    runs = [at(1.0, 1.05), at(0.0, 1.5), at(0.7, 1.2), cut, at(0.7, 1.3, batch_size=8)]
    ((heading, table),) = series.markdown(leaderboard.groups(runs), series.TEMPERATURE)
    assert heading == "multi30k, m (A CPU, float32, 2 threads), batch 1, 64 new tokens at most"
    assert table.splitlines()[0] == "| method | T = 0 | T = 0.7 | T = 1 | advantage ends |"
    assert table.splitlines()[2] == "| suffix | 1.50x | 1.20x | 1.05x | at T = 1 |"


def test_speed_ups_over_the_length_of_the_prompt() -> None:
    def at(tokens: int, speed: float, dataset: str = "mtbench"):
        filled = {"content": f"{dataset} {tokens}", "files": []}
        return run("suffix", speed, dataset=f"{dataset}, synthetic fill to {tokens:,} tokens", dataset_revision=filled)

    runs = [at(8064, 1.05), at(256, 1.5), at(1024, 1.3, "xsum"), run("suffix", 2.0, dataset="mtbench")]
    ((heading, table),) = series.markdown(leaderboard.groups([*runs, at(1024, 1.2)]), series.CONTEXT)
    assert heading == "mtbench, m (A CPU, float32, 2 threads), greedy, batch 1, 64 new tokens at most"
    assert table.splitlines()[0] == "| method | 256 tokens | 1,024 tokens | 8,064 tokens | advantage ends |"
    alone = terminal.times(SUMMARY["speedup"]["decode"])
    assert (
        table.splitlines()[2] == f"| suffix | 1.50x / {alone} | 1.20x / {alone} | 1.05x / {alone} | at 8,064 tokens |"
    )
