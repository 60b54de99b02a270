"""The schemas fit every committed record and what a run writes today, and know no other key."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from bench import cli
from bench.config import compose
from bench.measure import run
from bench.records import digests, run_folder, schemas
from bench.records.run_folder import Sample
from bench.records.schemas import Kind
from tests.helpers.records import with_samples

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "results" / "reference"
RUN = with_samples("suffix-mtbench-*")
FILES: dict[Kind, str] = {"summary": "summary.json", "manifest": "manifest.json"}


@cache
def validator(kind: Kind) -> Draft202012Validator:
    return Draft202012Validator(schemas.load(kind))


def unknown(kind: Kind, content: Any, node: Any = None, path: str = "") -> Iterator[str]:
    """Keys of a file that the schema does not name, groups that are open by design aside."""
    schema = schemas.load(kind)
    found = schemas.resolved(schema, schema if node is None else node)
    if isinstance(content, list):
        for item in content:
            yield from unknown(kind, item, found.get("items") or {}, f"{path}[]")
    if not isinstance(content, dict) or "properties" not in found and "additionalProperties" not in found:
        return
    known, others = found.get("properties") or {}, found.get("additionalProperties")
    for name, value in content.items():
        if name in known or others:
            yield from unknown(kind, value, known.get(name, others), f"{path}.{name}")
        elif path not in OPEN[kind]:
            yield f"{path}.{name}"


# Settings and counters of a method are those of its class, other methods bring others.
OPEN: dict[Kind, set[str]] = {"summary": {".method_facts"}, "manifest": {".method", ".method_facts"}, "sample": set()}


def first_and_last(folder: Path) -> list[dict[str, Any]]:
    """Two lines of the samples of a run; none where these are not kept."""
    file = run_folder.samples_file(folder)
    if not file.is_file():
        return []
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    lines = raw.splitlines()
    return [json.loads(lines[0]), json.loads(lines[-1])]


@pytest.mark.parametrize("kind", schemas.KINDS)
def test_a_schema_is_one_and_says_what_every_key_means(kind: Kind) -> None:
    Draft202012Validator.check_schema(schemas.load(kind))
    for field in schemas.fields(kind):
        assert field.meaning.endswith("."), field.key
        assert bool(field.unit) == bool({"integer", "number"} & set(field.type.split(" or "))) or "array" in field.type


def test_what_two_schemas_share_is_the_same() -> None:
    summary, manifest = (schemas.load(kind)["$defs"] for kind in ("summary", "manifest"))
    shared = summary.keys() & manifest.keys()
    assert "agreement" in shared and {key: summary[key] for key in shared} == {key: manifest[key] for key in shared}


def test_the_committed_records_fit() -> None:
    folders = run_folder.folders(REFERENCE)
    assert len(folders) > 100
    for folder in folders:
        for kind, name in FILES.items():
            content = json.loads((folder / name).read_text(encoding="utf-8"))
            assert [error.message for error in validator(kind).iter_errors(content)] == [], folder
            assert schemas.problem(kind, content) == "", "both readers of schemas agree"
            assert list(unknown(kind, content)) == [], folder
        for line in first_and_last(folder):
            assert [error.message for error in validator("sample").iter_errors(line)] == [], folder
            assert schemas.problem("sample", line) == "" and list(unknown("sample", line)) == []


@pytest.mark.parametrize(
    "words", [["method=prompt_lookup"], ["method=autoregressive", "sampling=sample", "batch_size=2"]]
)
def test_a_run_of_today_fits(words: list[str], tmp_path: Path) -> None:
    common = ["model=random", "dataset=demo", "dataset.limit=2", "max_new_tokens=8", "measure=quick"]
    folder = run.run(compose.compose([*common, *words, f"paths.results={tmp_path}"]), quiet=True).path
    for kind, name in FILES.items():
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        assert [error.message for error in validator(kind).iter_errors(content)] == []
        assert list(unknown(kind, content)) == []
    for line in first_and_last(folder):
        assert schemas.problem("sample", line) == "" and list(unknown("sample", line)) == []


def test_the_schema_of_samples_has_the_fields_of_the_class() -> None:
    assert set(schemas.load("sample")["properties"]) == {field.name for field in fields(Sample)}


@pytest.mark.parametrize("kind", schemas.KINDS)
def test_no_key_is_unknown_to_the_code(kind: Kind) -> None:
    files = [*ROOT.glob("bench/**/*.py"), *ROOT.glob("methods/**/*.py")]
    words = set(re.findall(r"\w+", "\n".join(file.read_text(encoding="utf-8") for file in files)))
    derived = {  # made of another name: "layers_per_step" becomes "layers_per_token" (bench.analysis.summary)
        f"{name}_per_token" for name in ("layers", "heads", "fills", "maps", "looks", "layer_equivalents")
    }
    keys = {part for field in schemas.fields(kind) for part in re.split(r"\.|\[\]", field.key)} - {"*", ""}
    assert keys - words - derived == set()


def test_units_are_found_by_the_path_of_a_key() -> None:
    for path, unit in {
        "speedup.total.value": "ratio",
        "speedup.by_category.chat.low": "ratio",
        "baseline.quality.bleu": "%",
        "quality_change.bleu.value": "percentage points",
        "ttft_s.mean": "s",
        "acceptance_at": "share",
        "method": "",
        "nothing.of.this": "",
    }.items():
        assert schemas.unit("summary", path.split(".")) == unit


def test_show_prints_a_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", "schema/sample"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^step_ns +array +ns +Time of each step; step 0 is the prefill\.$", out, re.MULTILINE)
    assert cli.main(["show", "schema/samples"]) == 2
    assert "must be followed by one of summary, manifest, sample, got 'samples'" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ wrong types


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two runs, the first of which a test damages."""
    for name in ("bad", "good"):
        shutil.copytree(RUN, tmp_path / name)
        manifest = json.loads((RUN / "manifest.json").read_text(encoding="utf-8"))
        text = digests.resealed(tmp_path / name, manifest | {"run_id": name})
        (tmp_path / name / "manifest.json").write_text(text)
    return tmp_path


def damage(folder: Path, file: str, **changes: Any) -> None:
    if file == "samples.jsonl":
        samples = [asdict(sample) for sample in run_folder.read_samples(folder)]
        samples[-1] |= changes
        (folder / file).write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    else:
        content = json.loads((folder / file).read_text(encoding="utf-8"))
        (folder / file).write_text(json.dumps(content | changes))


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("samples.jsonl", {"step_ns": "abc"}, 'step_ns must be array, got "abc"'),
        ("samples.jsonl", {"step_ns": None}, "step_ns must be array, got null"),
        ("samples.jsonl", {"step_tokens": [1, "x"]}, "step_tokens[1] must be integer"),
        ("samples.jsonl", {"arm": "other"}, "arm must be one of"),
        ("manifest.json", {"hardware": "x"}, 'hardware must be object, got "x"'),
        ("manifest.json", {"method": []}, "method must be object, got []"),
        ("manifest.json", {"load_average": {"end": 3}}, "load_average.end must be array or null, got 3"),
        ("summary.json", {"speedup": {"total": {"value": "fast"}}}, "speedup.total must contain"),
        ("summary.json", {"quality": {"bleu": "x"}}, 'quality.bleu must be number or null, got "x"'),
        ("summary.json", {"verdict": None}, "verdict must be object, got null"),
    ],
)
def test_a_wrong_type_is_one_message_and_the_other_run_is_shown(
    file: str, changes: dict[str, Any], said: str, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(results / "bad", file, **changes)
    changed = said if file == "manifest.json" else f"{file} was changed after the run ended"
    if file != "manifest.json":  # how a run without digests is judged
        bad = results / "bad"
        content = json.loads((bad / "summary.json").read_text(encoding="utf-8"))
        assert said in (schemas.problem("summary", content) or "".join(run_folder.validate(bad)))
    assert cli.main(["validate", str(results)]) == 2
    *lines, last = capsys.readouterr().out.splitlines()
    assert all(line.startswith(f"{results / 'bad'}: ") for line in lines) and any(changed in line for line in lines)
    assert last == f"{results}: 2 runs: 1 bad"
    for command in ("collect", "frontier", "report"):  # the last one derives summaries again
        assert cli.main([command, f"paths.results={results}"]) == 0
        out, err = capsys.readouterr()
        named = file == "manifest.json" or (file == "summary.json" and command != "report")
        assert "Traceback" not in err and (said in err) is named
        assert command != "collect" or ("good" in out and "bad" in out)
    assert "suffix" in (results / "report.html").read_text()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_manifest_that_is_none_is_named_and_the_plan_leaves_it_out(
    content: bytes, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (results / "bad" / "manifest.json").write_bytes(content)
    words = ["-m", "method=prompt_lookup,suffix", "dataset=demo", "model=random", "dry_run=true"]
    for command in (["collect"], ["report"], words):
        assert cli.main([*command, f"paths.results={results}"]) == 0
        out, err = capsys.readouterr()
        assert f"{results / 'bad' / 'manifest.json'} " in err and "Traceback" not in err
        assert out


def test_a_damaged_summary_is_derived_again(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(results / "bad", "summary.json", speedup=5)
    assert cli.main(["report", f"paths.results={results}"]) == 0
    assert capsys.readouterr().err == ""
    assert cli.main(["collect", f"paths.results={results}"]) == 0
    assert capsys.readouterr().err == ""


def test_a_damaged_verdict_is_no_sign_of_noise(results: Path) -> None:
    damage(results / "bad", "summary.json", verdict={"valid": False, "reasons": ["load"], "noisy": True})
    assert run_folder.is_noisy(results / "bad") and not run_folder.is_noisy(results / "good")
    damage(results / "bad", "summary.json", verdict="x")
    assert not run_folder.is_noisy(results / "bad")
