"""compare, collect, report and check-method."""

from __future__ import annotations

import json
import re
import shutil
import time
from contextlib import redirect_stdout
from html.parser import HTMLParser
from importlib.metadata import EntryPoint
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from bench import cli
from bench.config import compose, instantiate
from bench.contract import check_method
from bench.errors import UserError
from bench.measure import run
from bench.records import run_folder
from bench.records.run_folder import RunFolder, Sample
from bench.report import collect, compare, tables
from bench.utils import stats
from methods.autoregressive import Autoregressive
from methods.decoder import Decoder, Guarantee
from methods.drafting import Context, Draft, StatelessDrafter
from methods.engine.sampling import Sampling
from methods.speculative.loop import SpeculativeDecoder
from methods.speculative.verification import default_rule
from tests.helpers.sample_rows import both

ROOT = Path(__file__).resolve().parents[3]
EXACT_LINES = ["guarantee", "counters", "no leak", "batch", "prefix cache", "greedy text"]

# ------------------------------------------------------------------------------------------------------------ records


def rows(step_ms: float, prompts: int = 25, baseline_ms: float = 20, **changes: Any) -> list[Sample]:
    """Prompts of two categories; the method takes ``step_ms`` a step for two tokens, the baseline 20 ms for one."""
    made = []
    for i in range(1, prompts + 1):
        noise, shared = 1 + 0.02 * ((i * 7) % 5), {"category": ("qa", "maths")[i % 2], "prompt_ids": [i, i + 1]}
        slow = {"ms": [50] + [baseline_ms * noise] * 8, "peak_bytes": 2**28}
        fast = {"ms": [50] + [step_ms * (1 + 0.03 * (i % 4))] * 4, "tokens": [1] + [2] * 4, "peak_bytes": 2**28}
        made += both(f"{i}/1", slow, fast, **shared | changes)
    return made


def recorded(root: Path, method: str, samples: list[Sample], *overrides: str, **changes: Any) -> Path:
    """A finished run folder, from the configuration to the summary."""
    cfg = compose.compose([f"method={method}", "dataset=mtbench", "measure.bootstrap_samples=200", *overrides])
    manifest: dict[str, Any] = {
        "method": cfg.method, "model": {"name": "smollm2", "revision": "r1"}, "guarantee": "EXACT", "seed": 0,
        "dataset": {"name": "mtbench", "revision": {"content": "c1"}}, "dtype": "float32", "batch_size": 1,
        "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0}, "max_new_tokens": 128, "eos_ids": [0],
        "measure": {"name": "default", "repeats": 1, "bootstrap_samples": 200},
        "agreement": {"exact": 1.0, "near_tie": 0.0, "violation": 0.0},
        "hardware": {"cpu": "A CPU", "threads": 2, "logical_cores": 2, "gpu": None}, "versions": {"torch": "2.13"},
        "n_done": 25, "n_pairs": 25, "git": {"sha": "abc"},
    }  # fmt: skip
    config = yaml.safe_dump({key: value for key, value in cfg.to_dict().items() if key != "paths"})
    name = f"{method}-mtbench-{len([*root.glob('*')])}"
    with RunFolder.create(root, name, manifest | changes, config) as folder:
        folder.append(samples)
        folder.update(status="finished")
    with redirect_stdout(StringIO()):
        run.report(cfg, root / name)
    return root / name


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs; the second is 1.25 times as fast."""
    return (
        recorded(tmp_path, "prompt_lookup", rows(25)),
        recorded(tmp_path, "suffix", rows(18.76), versions={"torch": "2.14"}),
    )


def folder_with(root: Path, **changes: Any) -> Path:
    """The run of ``pair`` with other facts."""
    return recorded(root, "suffix", rows(19), **changes)


# ------------------------------------------------------------------------------------------------------------ compare


def test_two_runs_side_by_side(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = pair
    assert cli.main(["compare", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == f"A  {a}" and lines[1] == f"B  {b}"
    assert "method.name       prompt_lookup -> suffix" in out and "versions.torch    2.13 -> 2.14" in out
    assert "method.max_ngram  3 -> (has none)" in out and "seed" not in out
    assert next(line.split() for line in lines if line.startswith("  speed-up"))[1:] == ["1.40x", "1.69x"]
    assert re.search(r"B against A: 1\.2\dx \(95 % 1\.2\d-1\.2\d, 25 conversations\)", out)
    assert "RESULT: B is faster" in out and re.search(r"  maths +1\.2\dx", out)


def test_the_ratio_is_of_the_two_speed_ups(pair: tuple[Path, Path]) -> None:
    a, b = (compare.Run.read(path) for path in pair)
    found = compare.speedup_ratio(a, b)
    wanted = b.summary["speedup"]["total"]["value"] / a.summary["speedup"]["total"]["value"]
    assert found.value == pytest.approx(wanted) and found.kind == "bca" and found.n == 25
    back = compare.speedup_ratio(b, a)
    assert back.value == pytest.approx(1 / wanted)
    few = compare.speedup_ratio(a, b, category="maths")
    assert (few.n, few.kind) == (13, "t") and few.low < few.value < few.high  # type: ignore[operator]


def test_the_ratio_is_free_of_the_machines_speed(tmp_path: Path) -> None:
    slow = recorded(tmp_path, "suffix", [_slower(sample) for sample in rows(25)])
    a, b = compare.Run.read(recorded(tmp_path, "suffix", rows(25))), compare.Run.read(slow)
    found = compare.speedup_ratio(a, b)
    assert found.value == pytest.approx(1.0) and found.low == pytest.approx(1.0) == found.high
    text = compare.compare(a, b)
    assert "RESULT: no difference shown" in text and "the baseline wrote 42 tokens/s in A and 21 in B" in text
    assert "Both have the same settings." in text


def _slower(sample: Sample) -> Sample:
    sample.step_ns, sample.batch_ns = [2 * ns for ns in sample.step_ns], 2 * sample.batch_ns
    sample.prefill_ns *= 2
    return sample


def test_the_interval_covers_what_it_should() -> None:
    """95 % intervals of a known ratio over 400 draws; far off only if the method is wrong."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(400):
        size = rng.lognormal(0, 0.5, 12)
        columns = [size * rng.lognormal(0, 0.1, 12) * scale for scale in (2.0, 1.0, 1.5, 1.0)]
        found = stats.ratio_of_ratios(columns, n_resamples=200, seed=0)
        covered += found.low <= 2.0 / 1.5 <= found.high  # type: ignore[operator]
    assert 0.91 < covered / 400 < 0.98


def test_without_spread_there_is_no_interval() -> None:
    one = stats.ratio_of_ratios([np.array([value]) for value in (4.0, 2.0, 3.0, 3.0)], n_resamples=100, seed=0)
    assert (one.value, one.low, one.n) == (2.0, None, 1)
    assert stats.ratio_of_ratios([np.array([])] * 4, n_resamples=100, seed=0) == stats.Interval(
        None, reason="no conversation was finished in both runs"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"name": "other", "revision": "r1"}}, "model is smollm2 in A and other in B"),
        ({"model": {"name": "smollm2", "revision": "r2"}}, "model_revision is r1 in A and r2 in B"),
        ({"dataset": {"name": "mtbench", "revision": {"content": "c2"}}}, "dataset_revision is c1 in A and c2 in B"),
        ({"dtype": "bfloat16", "batch_size": 4}, "dtype is float32 in A and bfloat16 in B; batch_size is 1 in A"),
        ({"hardware": {"cpu": "B CPU", "threads": 1, "gpu": None}}, "hardware is A CPU in A and B CPU in B; threads"),
    ],
)
def test_runs_of_different_kinds_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    a, b = folder_with(tmp_path), folder_with(tmp_path, **changes)
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        compare.compare(compare.Run.read(a), compare.Run.read(b))
    assert "Repeat one of them" in str(refused.value)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (rows(25, prompts=24), "1 prompts were asked in one of them only, 25/1 for one"),
        (rows(25, prompt_ids=[9]), "25 prompts have other tokens"),
    ],
)
def test_other_prompts_are_refused(other: list[Sample], message: str, tmp_path: Path) -> None:
    runs = [compare.Run.read(recorded(tmp_path, "suffix", samples)) for samples in (rows(25), other)]
    with pytest.raises(UserError, match=message):
        compare.compare(*runs)


def test_other_baselines_are_refused_where_they_wrote_more(tmp_path: Path) -> None:
    longer = [
        *rows(25, prompts=24),
        *both("25/1", {"ms": [50] + [20] * 40}, {"ms": [50] + [25] * 4}, prompt_ids=[25, 26]),
    ]
    a, b = (compare.Run.read(recorded(tmp_path, "suffix", samples)) for samples in (rows(25), longer))
    with pytest.raises(UserError, match=r"the baselines wrote texts of other lengths \(32 tokens apart, of 225\)"):
        compare.compare(a, b)


def test_an_invalid_run_wins_nothing(tmp_path: Path) -> None:
    a, b = recorded(tmp_path, "prompt_lookup", rows(25)), recorded(tmp_path, "suffix", rows(19))
    summary = json.loads((b / "summary.json").read_text())
    run_folder.write_summary(b, summary | {"verdict": {"valid": False, "reasons": ["odd"], "warnings": []}})
    text = compare.compare(compare.Run.read(a), compare.Run.read(b))
    assert "RESULT: none, for B is INVALID" in text and text.splitlines()[1].endswith("INVALID")


def test_runs_are_found_by_folder_id_and_beginning(pair: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = pair
    assert compare.find(str(a), tmp_path / "no") == a
    assert compare.find(a.name, tmp_path) == a and compare.find("suff", tmp_path) == b
    recorded(tmp_path, "suffix", rows(25))
    with pytest.raises(UserError, match="'suff' must name one run, but 2 runs begin so: suffix-mtbench-1, suffix"):
        compare.find("suff", tmp_path)
    with pytest.raises(UserError, match="'nothing' must name one run, but there is none"):
        compare.find("nothing", tmp_path)


def test_compare_wants_two_finished_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path, "suffix", rows(25))
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"status": "failed"}))
    assert cli.main(["compare", str(path), str(path)]) == cli.main(["compare", str(path)]) == 2
    err = capsys.readouterr().err
    assert "must hold a finished run, got status 'failed'" in err and "compare needs two runs" in err


def test_the_committed_records_can_be_compared() -> None:
    reference = ROOT / "results" / "reference"
    kept = [min(reference.glob(f"{method}-spec_bench-*/samples*")) for method in ("prompt_lookup", "suffix")]
    names = [samples.parent.name for samples in kept]
    runs = [compare.Run.read(compare.find(name, reference)) for name in names]
    assert re.search(r"^RESULT: (B is faster|A is faster|no difference|none)", compare.compare(*runs), re.MULTILINE)


# ------------------------------------------------------------------------------------------------------------ collect


@pytest.fixture
def three(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    """Two finished runs and a failed one."""
    with RunFolder.create(tmp_path, "broken-mtbench-9", {"method": {"name": "broken"}}, "seed: 0\n") as folder:
        folder.update(status="failed", error="Traceback\n\nRuntimeError: <b>odd</b>\n")
    return tmp_path


def table_rows(results: Path, *filters: str) -> list[dict[str, Any]]:
    return collect.select([collect.row(record) for record in collect.read(results)], filters)


def test_a_row_is_the_summary_and_what_the_manifest_adds(three: Path) -> None:
    found = {row["method"]: row for row in table_rows(three)}
    assert list(found) == ["broken", "prompt_lookup", "suffix"]
    assert found["broken"]["status"] == "failed" and "speedup.total.value" not in found["broken"]
    summary = json.loads((three / "suffix-mtbench-1" / "summary.json").read_text())
    assert found["suffix"]["speedup.total.value"] == summary["speedup"]["total"]["value"]
    assert found["suffix"]["sampling.temperature"] == 0.0 and found["prompt_lookup"]["method.gamma"] == 10
    assert found["suffix"]["acceptance_at"] == summary["acceptance_at"]
    assert not any(isinstance(value, dict) for row in found.values() for value in row.values())


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ([], ["broken", "prompt_lookup", "suffix"]),
        (["method=suffix,broken"], ["broken", "suffix"]),
        (["method=*o*"], ["broken", "prompt_lookup"]),
        (["method!=suffix"], ["broken", "prompt_lookup"]),
        (["valid=null"], ["broken"]),
        (["status=finished", "method.gamma=10"], ["prompt_lookup"]),
    ],
)
def test_filters(filters: list[str], kept: list[str], three: Path) -> None:
    assert [row["method"] for row in table_rows(three, *filters)] == kept


def test_wrong_filters_are_one_message(three: Path) -> None:
    with pytest.raises(UserError, match=r"No run has a column 'methd'\. Did you mean 'method'\?"):
        table_rows(three, "methd=x")
    with pytest.raises(UserError, match="A filter must be column=value"):
        table_rows(three, "suffix")
    with pytest.raises(UserError, match="which is not a folder"):
        collect.read(three / "nowhere")


@pytest.mark.parametrize(
    ("ending", "read"),
    [(".csv", pd.read_csv), (".parquet", pd.read_parquet), (".json", pd.read_json)],
)
def test_the_table_is_written_and_read_back(ending: str, read: Any, three: Path, tmp_path: Path) -> None:
    file = tmp_path / "out" / f"all{ending}"
    assert cli.main(["collect", f"paths.results={three}", f"out={file}"]) == 0
    frame = read(file).set_index("method")
    wanted = {row["method"]: row.get("speedup.total.value") for row in table_rows(three)}
    assert frame.loc["suffix", "speedup.total.value"] == pytest.approx(wanted["suffix"])
    assert frame["speedup.total.value"].isna().tolist() == [True, False, False]
    assert frame.loc["broken", "status"] == "failed"


def test_columns_of_several_kinds_are_text(tmp_path: Path) -> None:
    rows: list[collect.FlatRow] = [
        {"nodes": "auto", "ok": True},
        {"nodes": 4, "ok": None},
        {"nodes": None, "ok": False},
    ]
    collect.write(rows, tmp_path / "t.parquet")
    frame = pd.read_parquet(tmp_path / "t.parquet")
    assert frame["nodes"].tolist()[:2] == ["auto", "4"] and frame["nodes"].isna().tolist() == [False, False, True]
    assert frame["ok"].tolist()[::2] == [True, False]


def test_a_copied_folder_is_known_by_its_own_name(three: Path) -> None:
    shutil.copytree(three / "suffix-mtbench-1", three / "copy")
    assert [row["run_id"] for row in table_rows(three, "run_id=copy")] == ["copy"]
    assert cli.main(["report", f"paths.results={three}", "run_id=copy", f"out={three}/r.md"]) == 0
    assert "| 1 | speculative | suffix |" in (three / "r.md").read_text()


def test_200_runs_are_collected_and_rendered_quickly(three: Path) -> None:
    for i in range(200):
        shutil.copytree(three / "suffix-mtbench-1", three / f"copy-{i}")
    begin = time.process_time()  # another process may have the machine
    assert cli.main(["report", f"paths.results={three}"]) == 0
    assert cli.main(["collect", f"paths.results={three}", f"out={three}/all.parquet"]) == 0
    assert time.process_time() - begin < 10


def test_collect_on_the_terminal(three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["collect", f"paths.results={three}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["method", "dataset"] and lines[1].split()[:2] == ["broken", "-"]
    assert lines[1].split()[-2:] == ["failed", "9"], "the end of the id where lines would be longer than 100"
    assert cli.main(["collect", f"paths.results={three}", f"out={tmp_path}/t.md"]) == 0
    assert (tmp_path / "t.md").read_text().splitlines()[1].startswith("| --- |")
    assert cli.main(["collect", f"paths.results={three}", "out=t.xls"]) == 2
    assert "must end in .csv, .parquet, .json, .md" in capsys.readouterr().err
    empty = tmp_path / "empty"
    empty.mkdir()
    assert cli.main(["collect", f"paths.results={empty}"]) == 0
    assert "No run." in capsys.readouterr().out


def test_cells_of_markdown_cannot_break_the_table() -> None:
    assert tables.markdown(["a"], [["x | y\nz"]]).splitlines()[2] == r"| x \| y z |"


# ------------------------------------------------------------------------------------------------------------- report


class Page(HTMLParser):
    """Tables of a page as captions and cells, and the tags it uses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.cells: list[list[str]] = []
        self.open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open = tag
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.open in ("td", "th", "code") and self.cells:
            self.cells[-1][-1] += data


def test_one_table_per_group_the_fastest_first_and_invalid_last(
    three: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(three, "lookahead", rows(25), dtype="bfloat16")
    fastest = recorded(three, "rest", rows(10))
    summary = json.loads((fastest / "summary.json").read_text())
    bad = {"valid": False, "reasons": ["<script>alert(1)</script> & co"], "warnings": []}
    run_folder.write_summary(fastest, summary | {"verdict": bad})
    assert cli.main(["report", f"paths.results={three}"]) == 0
    assert capsys.readouterr().out.strip() == f"4 runs in 2 tables: {three / 'report.html'}"
    text = (three / "report.html").read_text()
    page = Page(text)
    bodies = [[cells[1].strip(), cells[2]] for cells in page.cells if cells[1] != "method"]
    assert bodies == [["suffix", "1"], ["prompt_lookup", "2"], ["rest", "-"], ["lookahead", "1"]], "the largest first"
    assert page.tags.count("table") == page.tags.count("caption") == 2
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; co" in text and '<tr class="run invalid"' in text
    assert "<script>alert" not in text, "neither in a cell nor among the details"
    assert "broken-mtbench-9: failed, RuntimeError: &lt;b&gt;odd&lt;/b&gt;" in text
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r'src=|href="[^#]|https?://|@import|url\(', markup), "the page needs nothing beside itself"


def test_names_that_are_markup_stay_text(three: Path) -> None:
    odd = "\"><img src=x onerror=alert(1)>'&"
    folder = recorded(three, "rest", rows(10)).rename(three / odd)
    for name in (run_folder.MANIFEST, run_folder.SUMMARY):
        found = json.loads((folder / name).read_text())
        names = dict.fromkeys(("run_id", "model", "dataset", "hardware", "dtype", "method"), odd)
        found |= names if name == run_folder.SUMMARY else {"argv": ["bench", odd], "method": {"name": odd, "x": odd}}
        (folder / name).write_text(json.dumps(found))
    assert cli.main(["report", f"paths.results={three}"]) == 0
    text = (three / "report.html").read_text()
    assert "img" not in Page(text).tags and "<img" not in text and "&lt;img" in text


def test_the_report_in_markdown_with_filters(three: Path, tmp_path: Path) -> None:
    assert cli.main(["report", f"paths.results={three}", "method=suffix,broken", f"out={tmp_path}/r.md"]) == 0
    text = (tmp_path / "r.md").read_text()
    assert "| EXACT | 1 | speculative | suffix | 1.69x |" in text and "prompt_lookup" not in text
    assert "- broken-mtbench-9: failed, RuntimeError: &lt;b&gt;odd&lt;/b&gt;" in text
    assert text.startswith("# DecodeBench: results\n\n## mtbench, smollm2 (A CPU, float32, 2 threads), greedy, batch 1")


def test_summaries_are_made_again_from_the_records(pair: tuple[Path, Path], tmp_path: Path) -> None:
    file = pair[1] / "summary.json"
    before = file.read_text()
    file.unlink()
    assert cli.main(["report", f"paths.results={tmp_path}"]) == 0
    assert json.loads(file.read_text()) == json.loads(before)
    run_folder.write_summary(pair[1], json.loads(before) | {"tokens_per_s": -1})
    assert cli.main(["report", f"paths.results={tmp_path}"]) == 0
    assert json.loads(file.read_text())["tokens_per_s"] == -1, "what is there is left alone"
    assert cli.main(["report", f"paths.results={tmp_path}", "rebuild=true"]) == 0
    assert json.loads(file.read_text()) == json.loads(before)


def test_a_run_that_cannot_be_summed_up_is_named(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pair[0] / "summary.json").unlink()
    (pair[0] / "samples.jsonl").unlink()
    assert cli.main(["report", f"paths.results={tmp_path}"]) == 0
    out, err = capsys.readouterr()
    assert "prompt_lookup-mtbench-0 cannot be summed up: UserError" in err and "1 runs in 1 tables" in out
    assert "cannot be summed up" in (tmp_path / "report.html").read_text()


def test_an_empty_report_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", f"paths.results={tmp_path}"]) == 0
    assert "No finished run yet" in (tmp_path / "report.html").read_text()
    assert cli.main(["report", f"paths.results={tmp_path}", "out=r.pdf"]) == 2
    assert cli.main(["report", f"paths.results={tmp_path}", "rebuild=yes"]) == 2
    assert "must end in .html or .md" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- check-method


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes below as entry points of an installed package."""
    points = [
        EntryPoint(kind.__name__.lower(), f"{__name__}:{kind.__name__}", instantiate.ENTRY_POINTS) for kind in STRANGERS
    ]
    for module in (instantiate, check_method):
        monkeypatch.setattr(module, "entry_points", lambda group: points)


class Hot(Autoregressive):
    """Decodes at another temperature than asked for."""

    def __init__(self, target, sampling: Sampling) -> None:
        super().__init__(target, sampling if sampling.greedy else Sampling(1.4 * sampling.temperature))


class Forgetful(Decoder):
    """Remembers the first prompt for ever, and promises nothing else."""

    guarantee = Guarantee.RELAXED

    def __init__(self, target, sampling: Sampling) -> None:
        self.inner, self.first = Autoregressive(target, sampling), None

    def decode(self, prompts, limit, rng):
        self.first = self.first or prompts
        yield from self.inner.decode(self.first[:1] * len(prompts), limit, rng)


class Crashes(Autoregressive):
    """Takes one row, draws nothing, and breaks."""

    max_batch = 1

    def __init__(self, target, sampling: Sampling, gamma: int = 1) -> None:
        if not sampling.greedy or gamma < 1:
            raise ValueError("This one is greedy.")
        super().__init__(target, sampling)

    def decode(self, prompts, limit, rng):
        raise ZeroDivisionError("in the middle\nof it")


class Boundless(SpeculativeDecoder):
    """A sound loop around a drafter that drafts one id for ever: slow, and right."""

    def __init__(self, target, sampling: Sampling) -> None:
        super().__init__(target, sampling, OneId(), default_rule(sampling, "chain", drawn=False))


class OneId(StatelessDrafter):
    nodes = 2

    def propose(self, context: Context) -> Draft:
        return Draft.chains([[1, 1] for _ in context.tokens], context.root.device)


STRANGERS = (Hot, Forgetful, Crashes, Boundless)


def states(name: str, *words: str) -> dict[str, str]:
    return {check.what: check.state for check in check_method.check_method(name, words)}


def test_a_wrong_distribution_is_found(registered: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-method", "hot"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok"] * 6 + ["FAIL"] * 3
    assert "distribution at T=0.7 top-k 5" in lines[7]


def test_a_leak_is_found_where_nothing_else_is_promised(registered: None) -> None:
    found = states("forgetful")
    assert (found["counters"], found["no leak"], found["batch"]) == ("ok", "FAIL", "ok")
    assert (found["greedy text"], found["sampled distribution"]) == ("skip", "skip")


def test_a_decoder_that_breaks_fails_line_by_line(registered: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-method", "crashes"]) == 1
    out, err = capsys.readouterr()
    assert "FAIL  counters                        ZeroDivisionError: in the middle of it" in out.splitlines()
    assert "takes one row at a time" in out and "refuses to sample: This one is greedy." in out
    assert "Traceback" not in out + err


def test_a_sound_stranger_passes(registered: None) -> None:
    found = states("boundless")
    assert list(found)[:6] == EXACT_LINES and len(found) == 9 and set(found.values()) == {"ok"}


def test_what_cannot_be_checked_is_said(registered: None) -> None:
    for words, message in [
        (("egle",), r"Unknown method 'egle'\. Did you mean 'eagle'\?.*hot, forgetful, crashes, boundless"),
        (("prompt_lookup", "seed=1"), "takes settings of the method, method.key=value, got 'seed=1'"),
        (("prompt_lookup", "method.gama=1"), "Unknown setting 'method.gama'"),
        (("crashes", "method.gama=1"), r"Unknown setting 'method.gama'\. Did you mean 'gamma'"),
        (("crashes", "method.gamma=x"), "must be a whole number"),
        (("crashes", "method.gamma=0"), r"cannot be built on the target of the check.*This one is greedy\."),
        (("medusa",), r"cannot be built.*random model of 4 layers and 61 ids: medusa has no heads for this model"),
    ]:
        with pytest.raises(UserError, match=message):
            check_method.check_method(words[0], words[1:])


def test_settings_reach_the_decoder_and_a_draft_model_is_a_tiny_one() -> None:
    none = ("method.skip_attention=[]", "method.skip_mlp=[]")
    checks = check_method.check_method("speculative_sampling", ["method.draft_model=any", "method.gamma=2", *none])
    assert [next(checks).state for _ in EXACT_LINES] == ["ok"] * 6


def test_a_name_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-method"]) == 2
    assert "needs the name of a method" in capsys.readouterr().err
