"""``rivals import``: what is compared and what is not, what is stored, and what the report shows of it."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from bench import cli
from bench.errors import UserError
from bench.records import rivals
from bench.records.rivals import Against, Figures, Row, Spread
from bench.report import html, markdown
from bench.report import rivals as report
from bench.rivals import comparison, formats
from bench.rivals.formats import Entry, Given
from bench.utils import files as hashing
from bench.utils.stats import Interval
from tests.bench.rivals import files
from tests.bench.rivals.files import written


@pytest.fixture
def run(tmp_path, capsys):
    """Runs the command in a folder; returns exit code, output and messages."""

    def act(*words):
        code = cli.main(["rivals", *map(str, words), f"paths.results={tmp_path / 'results'}"])
        return code, *capsys.readouterr()

    return act


def pair(tmp_path, base, own):
    return written(tmp_path, "plain.json", base), written(tmp_path, "own.json", own)


def compared(tmp_path, base, own, **given):
    """The own entry of two contents against the other."""
    a, b = (formats.read(file, Given(**given)) for file in pair(tmp_path, base, own))
    return comparison.against(b[0], a, "plain.json")


def jittered(tpot_s, seed, **more):
    """A detailed file whose requests have gaps of their own."""
    lists = files.requests(30, tpot_s, seed=seed)
    return files.vllm_serve(30, tpot_s, **lists, **files.summary(lists), **more)


# --------------------------------------------------------------------------------------------------------- comparison


def test_per_token_is_the_ratio_of_mean_tpot_with_an_interval_over_requests(tmp_path):
    base, own = jittered(0.02, 1), jittered(0.01, 2)
    found = compared(tmp_path, base, own)
    assert found.reasons == () and found.of == "mean TPOT" and found.baseline == "plain.json"
    ratio = found.per_token
    assert ratio.value == pytest.approx(base["mean_tpot_ms"] / own["mean_tpot_ms"])
    assert ratio.low < ratio.value < ratio.high and ratio.n == 30 and ratio.kind == "bca"
    assert ratio.low > 1.8 and ratio.high < 2.2
    assert found.throughput == pytest.approx(own["output_throughput"] / base["output_throughput"])


def test_without_times_of_requests_there_is_no_interval(tmp_path):
    base, own = jittered(0.02, 1), files.vllm_serve(30, 0.01, detailed=False)
    ratio = compared(tmp_path, base, own).per_token
    assert ratio.value == pytest.approx(base["mean_tpot_ms"] / own["mean_tpot_ms"]) and ratio.low is None


def test_requests_are_paired_only_if_they_are_the_same(tmp_path):
    base, own = jittered(0.02, 1), jittered(0.01, 2)
    own["input_lens"] = own["input_lens"][::-1]
    ratio = compared(tmp_path, base, own).per_token
    assert ratio.kind == "percentile" and ratio.low < ratio.value < ratio.high
    assert ratio.value == pytest.approx(base["mean_tpot_ms"] / own["mean_tpot_ms"])


def test_a_slow_request_widens_the_paired_interval(tmp_path):
    base, own = jittered(0.02, 1), jittered(0.01, 2)
    before = compared(tmp_path, base, own).per_token
    own["itls"] = [[gap * (20 if place == 3 else 1) for gap in gaps] for place, gaps in enumerate(own["itls"])]
    after = compared(tmp_path, base, own | files.summary(own)).per_token
    assert after.value < before.value and after.high - after.low > 3 * (before.high - before.low)


def test_many_requests_are_summed_in_blocks(tmp_path):
    rng = np.random.default_rng(0)
    entry = Entry(Figures("a", formats.SERVE, "vLLM"), tuple(rng.uniform(1, 2, 3500)), tuple(range(3500)))
    other = replace(entry, times=(None, *rng.uniform(2, 3, 3499)))
    ratio = comparison._ratio(entry, other, 1.0)
    assert ratio.n == 3499 and ratio.value == pytest.approx(sum(other.times[1:]) / sum(entry.times[1:]))
    assert ratio.low < ratio.value < ratio.high


def test_one_engine_against_another(tmp_path):
    found = compared(tmp_path, files.vllm_serve(detailed=False), files.sglang_serve(tpot_s=0.01))
    assert found.reasons == () and found.per_token.value == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_id": "other"}, "other model, other instead of Qwen/Qwen3-8B"),
        ({"request_rate": 4.0}, "other request rate, 4.0 instead of inf"),
        ({"max_concurrency": None}, "other concurrency, none instead of 4"),
        ({"failed": 2}, "2 failed requests in own.json"),
        ({"total_input_tokens": 2000}, "other number of input tokens, 2000 instead of 1035"),
    ],
)
def test_what_differs_is_not_compared(tmp_path, changed, said):
    found = compared(tmp_path, files.vllm_serve(), files.vllm_serve(tpot_s=0.01) | changed)
    assert found.reasons == (said,) and found.per_token is None and found.throughput is None


def test_numbers_of_requests_and_lengths(tmp_path):
    assert compared(tmp_path, files.vllm_serve(), files.vllm_serve(40)).reasons == (
        "other number of requests, 40 instead of 30",
    )
    for length, reasons in ((336, 0), (337, 1), (324, 0), (323, 1)):  # 2 % of 330 are 6.6
        own = files.vllm_serve(detailed=False, total_output_tokens=length, output_throughput=length / 2)
        assert len(compared(tmp_path, files.vllm_serve(), own).reasons) == reasons


def test_another_benchmark_is_not_compared(tmp_path):
    found = compared(tmp_path, files.vllm_latency(), files.vllm_serve())
    assert found.reasons == ("another benchmark, vllm bench serve instead of vllm bench latency",)


def test_latency_needs_what_the_file_does_not_say(tmp_path):
    base, own = files.vllm_latency(), files.vllm_latency(0.5)
    assert compared(tmp_path, base, own).reasons == (
        "model unknown, set model=NAME",
        "batch size unknown, set batch_size=N",
        "output tokens unknown, set output_len=N",
    )
    found = compared(tmp_path, base, own, model="m", batch_size=8, output_len=128)
    assert found.of == "mean latency" and found.per_token.value == pytest.approx(2.0)
    assert found.per_token.low < 2 < found.per_token.high and found.throughput == pytest.approx(2.0)


def test_throughput_has_no_time_per_token(tmp_path):
    found = compared(tmp_path, files.vllm_throughput(), files.vllm_throughput(5.0), model="m")
    assert found.reasons == () and found.per_token is None and found.throughput == 2.0
    other = compared(tmp_path, files.vllm_throughput(), files.vllm_throughput(total_num_tokens=17_000), model="m")
    assert other.reasons == ("other number of tokens, 17000 instead of 16000",)


def test_each_batch_finds_its_own_in_the_baseline(tmp_path):
    base = formats.read(written(tmp_path, "a", files.one_batch(1, 1.0), files.one_batch(8, 1.32)), Given("m"))
    (own,) = formats.read(written(tmp_path, "b", files.one_batch(8, 0.68)), Given("m"))
    found = comparison.against(own, base, "a")
    assert found.baseline == "a:2" and found.per_token.value == pytest.approx(2.0) and found.per_token.low is None
    assert comparison.against(own, base[:1], "a").reasons[0] == "other batch size, 8 instead of 1"
    assert comparison.against(own, [*base, *base], "a").reasons == ("2 entries of a have these settings, leave one",)


# ------------------------------------------------------------------------------------------------------------ command


def test_import_prints_a_table_and_stores_the_figures(tmp_path, run):
    base, own = pair(tmp_path, jittered(0.02, 1), jittered(0.01, 2, **files.SPEC))
    other = written(tmp_path, "other.json", files.vllm_serve(40))
    code, out, err = run("import", own, other, f"baseline={base}")
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert code == 0 and not err
    assert lines["plain.json"].endswith("imported, baseline")
    assert "2.80 / 60 %" in lines["own.json"] and lines["own.json"].endswith("imported, against plain.json")
    assert lines["other.json"].endswith("imported, not comparable: other number of requests, 40 instead of 30")
    assert "ratio of mean TPOT" in out and "no rank" in out and "VALID" not in out
    stored = {json.loads(file.read_text())["file"]: file for file in (tmp_path / "results" / "rivals").iterdir()}
    content = json.loads(stored["own.json"].read_text())
    assert content["sha256"] == hashing.file_sha256(own) and content["status"] == "imported"
    assert stored["own.json"].name == f"own-{content['sha256'][:12]}.json"
    assert stored["own.json"].stat().st_size < 4_000 and "ttfts" not in stored["own.json"].read_text()
    rows, problems = rivals.read_all(tmp_path / "results")
    assert not problems and [row.figures.name for row in rows] == ["other.json", "own.json", "plain.json"]
    assert rows[1].against.per_token.value == pytest.approx(2.0, rel=0.05) and rows[2].is_baseline
    before = sorted(stored.values())
    assert run("import", own, f"baseline={base}")[0] == 0, "again: the same files"
    assert sorted((tmp_path / "results" / "rivals").iterdir()) == before
    assert "own.json" in run("show")[1]


def test_a_stored_row_is_read_as_it_was(tmp_path):
    figures = Figures("x", formats.SERVE, "vLLM", request_rate=2.5, ttft_s=Spread(1.0, 2.0, 3.0), acceptance_at=(0.5,))
    rows = [
        Row(figures, Against("y", (), "mean TPOT", Interval(1.5, 1.2, 1.8, 30, "bca"), 1.4)),
        Row(figures, is_baseline=True),
        Row(figures, Against("y", ("other model, a instead of b",))),
    ]
    rivals.write(tmp_path, tmp_path / "ä b/../c d.json", "0" * 64, rows)
    assert (tmp_path / "rivals" / "c_d-000000000000.json").is_file()
    assert rivals.read_all(tmp_path) == (rows, [])


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"format": "decodebench rivals", "stored": 1, "entries": [3]}'])
def test_damaged_stored_files_are_named_and_left_out(tmp_path, run, damage):
    own = written(tmp_path, "own.json", files.vllm_serve())
    assert run("import", own)[0] == 0
    (tmp_path / "results" / "rivals" / "damaged.json").write_text(damage)
    rows, (problem,) = rivals.read_all(tmp_path / "results")
    assert len(rows) == 1 and "damaged.json must be what rivals import wrote" in problem


def test_stored_figures_of_wrong_types_are_left_out(tmp_path, run):
    own = written(tmp_path, "own.json", files.vllm_serve())
    assert run("import", own)[0] == 0
    (stored,) = (tmp_path / "results" / "rivals").iterdir()
    for name, value in (("tokens_per_s", "fast"), ("model", 3), ("ttft_s", 2), ("request_rate", float("nan"))):
        content = json.loads(stored.read_text())
        content["entries"][0]["figures"][name] = value
        stored.with_name("changed.json").write_text(json.dumps(content))
        rows, problems = rivals.read_all(tmp_path / "results")
        assert (len(rows), len(problems)) == (1, 1), name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export"], "rivals must be followed by import or show, got 'export'"),
        (["import"], "rivals import needs a file of a benchmark"),
        (["import", "x.json", "basline=y.json"], "Unknown setting 'basline'. Did you mean 'baseline'?"),
        (["import", "none.json"], "none.json must be a file that a benchmark wrote, got no file of this name"),
        (["import", "none.json", "batch_size=0"], "batch_size must be at least 1, got 0"),
        (["import", "none.json", "output_len=x"], "output_len"),
        (["show", "x"], "Cannot read 'x'"),
    ],
)
def test_wrong_words(run, words, said):
    code, out, err = run(*words)
    assert code == 2 and said in err and not out


def test_one_wrong_file_stores_nothing(tmp_path, run):
    own, wrong = written(tmp_path, "own.json", files.vllm_serve()), written(tmp_path, "wrong.json", "{}")
    assert run("import", own, wrong)[0] == 2 and not (tmp_path / "results").exists()


# ------------------------------------------------------------------------------------------------------------- report


class Cells(HTMLParser):
    """The texts of the cells of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "td":
            self.found.append("")

    def handle_data(self, data):
        if self.tags[-1:] == ["td"] and self.found:
            self.found[-1] += data


def test_the_report_shows_imported_figures_without_a_rank(tmp_path, run, capsys):
    base, own = pair(tmp_path, jittered(0.02, 1), jittered(0.01, 2))
    assert run("import", own, f"baseline={base}")[0] == 0
    for name in ("page.html", "page.md"):
        assert cli.main(["report", f"paths.results={tmp_path / 'results'}", f"out={tmp_path / name}"]) == 0
        text = (tmp_path / name).read_text()
        assert "Other engines, measured by themselves" in text and "imported, against plain.json" in text
    assert "0 runs in 0 tables" in capsys.readouterr().out, "no run, so no rank and no VALID"


def test_texts_of_files_are_no_markup(tmp_path):
    bad = "<script>alert(1)</script> | x"
    row = Row(Figures(bad, formats.SERVE, bad, model=bad, label=bad), Against("y", (bad,)))
    cells = Cells()
    cells.feed(report.html([row]))
    assert "script" not in cells.tags and cells.found[0] == bad
    assert "<script>" not in report.markdown([row]) and r"\|" in report.markdown([row])


def test_long_times_are_readable():
    times = Spread(12.3, 12.3456, None)
    assert "12,346 / -" in report.text([Row(Figures("x", formats.LATENCY, "vLLM", latency_s=times))])


def test_without_imports_the_report_has_no_such_section():
    assert report.TITLE not in html.render([], []) and report.TITLE not in markdown.to_markdown([], [])
    assert report.html([]) == ""


MAKERS = (files.vllm_serve, files.sglang_serve, files.vllm_latency, files.vllm_throughput, files.one_batch)
VALUES = (None, True, 0, -1, 1e-320, 1e308, float("nan"), float("inf"), "", "x", [], [None], [[]], {}, 10**400, [1, 2])


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_a_damaged_field_is_refused_in_one_line_or_read_and_stored(tmp_path, maker):
    base, read = formats.read(written(tmp_path, "base.json", maker()), Given(output_len=16)), 0
    for name in maker():
        for value in VALUES:
            file = written(tmp_path, "damaged.json", maker() | {name: value})
            try:
                (entry,) = formats.read(file, Given(output_len=16))
            except UserError as error:
                assert "\n" not in str(error) and str(tmp_path) in str(error)
                continue
            row, read = Row(entry.figures, comparison.against(entry, base, "base.json")), read + 1
            assert report.text([row]) and report.html([row])
            rivals.write(tmp_path, file, "0" * 64, [row])
            assert rivals.read_all(tmp_path) == ([row], []), (name, value)
    assert read
