"""Take a piece of a pack in on a bare machine, start the job, wait, archive the results.

    python3 build/gpu/a/start.py wait=60 out=FOLDER [words for ``python -m bench gpu run``]

The standard library is all it needs, since it runs before anything is installed; this file is copied into each piece.
Everything is kept in DECODEBENCH_GPU (``~/decodebench-gpu``), outside of the piece, so that later calls go on with it.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PIECES = "pieces.json"  # in each piece: every item with its slices, in all pieces
START = "start.py"
HOME = "DECODEBENCH_GPU"  # environment variable: where everything is kept on that machine
ARCHIVE = "results.tar.gz"
MOST_BYTES = 15 << 20  # of a file of the archive; a longer one is cut into ARCHIVE.00, ARCHIVE.01, ...
ARCHIVED = ("results", "log", "state", "trained")  # folders of the home
DONE = "done"  # in the state folder: the job has nothing left to do
LIBRARIES = (  # that do not travel
    "torch", "numpy", "pandas", "scipy", "matplotlib", "seaborn", "safetensors", "tokenizers",
    "huggingface_hub", "yaml", "pytest",
)  # fmt: skip
_BLOCK = 1 << 20
_PLACES = {"code": "repo", "wheels": "wheels", "data": "data", "model": "model"}  # other items go into the code
_POLL_S = 1.0
_LAST_LINES = 20  # of the log of a job that ended before its end


class Damaged(Exception):
    """A piece, or an archive, that does not hold what its digest says."""


# ----------------------------------------------------------------------------------------------------------- digests


def file_sha256(file: Path) -> str:
    """Hex digest of a file's bytes."""
    found = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


# ------------------------------------------------------------------------------------------------------------ taking in


def receive(piece: Path, home: Path) -> list[str]:
    """Take in one piece, and unpack the items that are complete with it.

    Args:
        piece: a folder that ``bench.gpu.pack`` wrote.
        home: where everything is kept.

    Returns:
        Names of the items that were unpacked now.

    Raises:
        Damaged: a slice or an item has another digest than the pack recorded. Nothing of it is kept.
    """
    content = json.loads((piece / PIECES).read_text(encoding="utf-8"))
    incoming, have = home / "incoming", home / "state" / "have"
    for folder in (incoming, have):
        folder.mkdir(parents=True, exist_ok=True)
    stored = home / PIECES
    if stored.is_file() and json.loads(stored.read_text(encoding="utf-8")) != content:
        raise Damaged(f"{piece} is of another pack than {home}. Remove {home}, or set {HOME} to another folder.")
    unpacked = []
    for item in content["items"]:
        if (have / item["name"]).is_file():
            continue
        for slice_ in item["slices"]:
            if slice_["piece"] == piece.name:
                _take(piece / slice_["file"], incoming / slice_["file"], slice_["sha256"])
        if all((incoming / slice_["file"]).is_file() for slice_ in item["slices"]):
            _unpack(item, incoming, home)
            (have / item["name"]).write_text(item["sha256"] + "\n")
            unpacked.append(item["name"])
    stored.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return unpacked


def _take(source: Path, target: Path, sha256: str) -> None:
    if file_sha256(source) != sha256:
        raise Damaged(f"{source} is damaged: its sha256 is not the one that was packed. Carry the piece again.")
    shutil.copyfile(source, target)


def _unpack(item: Mapping[str, Any], incoming: Path, home: Path) -> None:
    """Join the slices of an item and extract it to its place; slices are removed."""
    slices = [incoming / slice_["file"] for slice_ in item["slices"]]
    joined = incoming / f"{item['name']}.tar"
    with joined.open("wb") as out:
        for file in slices:
            with file.open("rb") as stream:
                shutil.copyfileobj(stream, out, _BLOCK)
    for file in slices:
        file.unlink()
    if file_sha256(joined) != item["sha256"]:
        joined.unlink()
        raise Damaged(f"The item {item['name']} is damaged: its joined sha256 is not the packed one. Pack again.")
    place = home / _PLACES.get(item["name"], "repo")
    place.mkdir(parents=True, exist_ok=True)
    with tarfile.open(joined) as archive:
        archive.extractall(place, filter="data") if hasattr(tarfile, "data_filter") else archive.extractall(place)
    joined.unlink()
    if item["name"] == "wheels":
        _install(place, home / "site")


def _install(wheels: Path, site: Path) -> None:
    files = sorted(map(str, wheels.glob("*.whl")))
    if files:
        offline = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade"]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *offline]
        subprocess.run([*command, "--target", str(site), *files], check=True)


# -------------------------------------------------------------------------------------------------------------- the job


def lacking(libraries: Sequence[str] = LIBRARIES) -> list[str]:
    """Those that this Python does not have."""
    return [name for name in libraries if importlib.util.find_spec(name) is None]


def environment(home: Path) -> dict[str, str]:
    """Variables of the job: the code and the wheels that travelled, and no network."""
    content = json.loads((home / PIECES).read_text(encoding="utf-8"))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(home / "repo"), str(home / "site")]),
        "PYTHONUNBUFFERED": "1",
        "DECODEBENCH_HOME": str(home),
        "DECODEBENCH_CACHE": str(home / "cache"),
        "DECODEBENCH_DATA": str(home / "data"),
        "DECODEBENCH_COMMIT": content["commit"] or "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "offline",
    }


def start(home: Path, words: Sequence[str]) -> int | None:
    """Start the job in the background, unless it runs or is done; returns its process id."""
    if not all((home / "state" / "have" / name).is_file() for name in ("code", "wheels")):
        return None
    if running(home) or (home / "state" / DONE).is_file():
        return None
    log = home / "log"
    log.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "bench", "gpu", "run", f"home={home}", *words]
    with (log / "job.log").open("ab") as out:
        job = subprocess.Popen(
            command,
            cwd=home / "repo",
            env=environment(home),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    (home / "state" / "job.pid").write_text(f"{job.pid}\n")
    return job.pid


def running(home: Path) -> bool:
    """Whether the job that was started last is alive."""
    try:
        pid = int((home / "state" / "job.pid").read_text())
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError):
        return False
    return state not in "ZX"


def wait(home: Path, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
    """Wait until the job is done, has died, or the time is over."""
    end = clock() + seconds
    while clock() < end and running(home) and not (home / "state" / DONE).is_file():
        time.sleep(min(_POLL_S, max(0.0, end - clock())))


# ------------------------------------------------------------------------------------------------------- bringing back


def archive(home: Path, out: Path, most_bytes: int = MOST_BYTES) -> list[Path]:
    """Write all that was found so far into one archive, in files below a size; an earlier one is replaced.

    Args:
        home: where everything is kept.
        out: folder for the files.
        most_bytes: of each file.
    """
    out.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for folder in ARCHIVED:
            for file in sorted((home / folder).rglob("*")):
                _add(tar, file, file.relative_to(home).as_posix())
    content = buffer.getvalue()
    for old in out.glob(f"{ARCHIVE}*"):
        old.unlink()
    pieces = [content[at : at + most_bytes] for at in range(0, len(content), most_bytes)]
    names = [ARCHIVE] if len(pieces) == 1 else [f"{ARCHIVE}.{number:02}" for number in range(len(pieces))]
    for name, piece in zip(names, pieces, strict=True):
        scratch = out / f".{name}"
        scratch.write_bytes(piece)
        os.replace(scratch, out / name)
    return [out / name for name in names]


def _add(tar: tarfile.TarFile, file: Path, name: str) -> None:
    """A file as it is now; one that is being written, or is gone, does no harm."""
    if name.endswith((".lock", ".pid")) or not file.is_file() or file.is_symlink():
        return
    try:
        content = file.read_bytes()
    except OSError:
        return
    header = tarfile.TarInfo(name)
    header.size, header.mode = len(content), 0o644
    tar.addfile(header, io.BytesIO(content))


# ------------------------------------------------------------------------------------------------------ the command


def main(words: Sequence[str]) -> int:
    """Take in the piece that this file is part of, start or resume the job, wait, archive."""
    options = dict(word.split("=", 1) for word in words if word.partition("=")[0] in ("wait", "out"))
    rest = [word for word in words if word.partition("=")[0] not in ("wait", "out")]
    home = Path(os.environ.get(HOME, Path.home() / "decodebench-gpu")).absolute()
    try:
        unpacked = receive(Path(__file__).resolve().parent, home)
    except (Damaged, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"unpacked: {', '.join(unpacked) or 'nothing new'}", flush=True)
    if missing := lacking():
        print(f"{sys.executable} lacks {', '.join(missing)}: stages that need them will fail. Install them there.")
    pid = start(home, rest)
    if pid:
        print(f"job {pid} started in {home}", flush=True)
    wait(home, float(options.get("wait", "0")))
    for file in archive(home, Path(options.get("out", "gpu-results"))):
        print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB")
    stages = home / "log" / "stages.log"
    print(stages.read_text() if stages.is_file() else "no stage has ended yet\n", end="")
    state = "done" if (home / "state" / DONE).is_file() else "running" if running(home) else "not running"
    print(f"job: {state}")
    if state == "not running" and (log := home / "log" / "job.log").is_file():
        print("".join(log.read_text(errors="replace").splitlines(keepends=True)[-_LAST_LINES:]), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
