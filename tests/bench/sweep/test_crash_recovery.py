"""kill -9 at any moment: when the same command is run again, everything is there, and once.

DECODEBENCH_KILLS=20 has 20 moments of each sweep instead of a few.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import BaseFileLock

from bench import cli
from bench.records import run_folder
from bench.records.run_folder import RunFolder
from bench.sweep import slurm_executor
from tests.bench.records.test_run_folder import pair
from tests.helpers import heap
from tests.helpers.sweeps import COMMON, FILES, lock_of, outputs, run_folders, start

KILLS = int(os.environ.get("DECODEBENCH_KILLS", "0"))
_STARTING_S = 6.0  # of processor time: what a process needs to import everything
_PATIENCE = 120.0  # of wall time, for what takes a second or two where nothing else runs

# ---------------------------------------------------------------------------------------- before every write to a disk


def measure(root: Path, *, fresh: bool = False) -> None:
    """What a run does to its folder."""
    path = root / "run"
    if not fresh and (run_folder.read_manifest(path) or {}).get("status") == "finished":
        with run_folder.claimed(path):
            run_folder.write_summary(path, {})
        return
    with RunFolder.create(root, path.name, {}, "seed: 0\n", fresh=fresh) as folder:
        for batch, name in enumerate(("a/1", "b/1", "c/1")):
            if (name, 0) not in folder.done_keys():
                folder.append(pair(name, batch))
        folder.update(status="finished", eos_ids=[0])
        folder.write_summary({})


def anew(root: Path) -> None:
    measure(root, fresh=True)


def pack(root: Path) -> None:
    run_folder.pack(root / "run")


def tear(root: Path) -> None:
    """Half of the second pair is missing."""
    anew(root)
    file = root / "run" / run_folder.SAMPLES
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:3])[:-20])
    run_folder.RunFolder.create(root, "other", {}, "").close()
    (root / "run" / run_folder.MANIFEST).write_bytes((root / "other" / run_folder.MANIFEST).read_bytes())


def unpacked(root: Path) -> None:
    """Go on with a run that was packed."""
    with RunFolder.create(root, "run", {}, "seed: 0\n") as folder:
        folder.update(status="finished")


class Killed(BaseException):
    """Stands for SIGKILL: from then on no call reaches the system, so nothing that a clean-up would do is done."""


def killed(act: Callable[[], None], at: int) -> bool:
    """Act up to the n-th moment; returns whether it came that far.

    A moment is before each call to the system that may change a file, and within each write, when half is written.
    """
    real = {name: getattr(os, name) for name in ("open", "write", "fsync", "replace", "unlink", "ftruncate", "close")}
    moment, handles = itertools.count(), set[int]()

    def passes() -> bool:
        return next(moment) < at

    def mortal(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if not passes():
                raise Killed
            if name == "write" and not passes():
                real[name](arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                raise Killed
            result = real[name](*arguments, **options)
            handles.update([result] if name == "open" else [])
            handles.difference_update(arguments if name == "close" else [])
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in real:
            patch.setattr(os, name, mortal(name))
        patch.setattr(BaseFileLock, "__del__", lambda _: None)  # a killed process collects nothing
        try:
            act()
        except Killed:
            return True
        finally:
            gc.collect()
            for handle in handles:  # as the system does, which also lets go of the lock
                real["close"](handle)
    return False


@pytest.mark.parametrize(
    ("before", "act", "after"),
    [
        (None, measure, measure),
        (anew, anew, measure),
        (tear, measure, measure),
        (lambda root: (anew(root), pack(root)), unpacked, unpacked),
        (anew, pack, pack),
    ],
    ids=["first", "anew", "torn", "unpacked", "pack"],
)
def test_whatever_write_it_dies_at(
    before: Callable[[Path], Any] | None, act: Callable[[Path], None], after: Callable[[Path], None], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a killed process needs none
    heap.freeze()  # each kill collects
    for at in itertools.count():
        root = tmp_path / str(at)
        root.mkdir()
        if before:
            before(root)
        if not killed(lambda root=root: act(root), at):
            break
        folder = root / "run"
        manifest = run_folder.read_manifest(folder) or {} if folder.is_dir() else {}
        if manifest.get("status") == "finished" and not run_folder.left_open(folder):
            assert not run_folder.validate(folder), "it counts as done"
        after(root)
        assert not run_folder.validate(folder)
        found = [(row.prompt_id, row.arm) for row in run_folder.read_samples(folder)]
        assert found == [(f"{name}/1", arm) for name in "abc" for arm in ("baseline", "method")]
        samples = run_folder.samples_file(folder).name
        assert {file.name for file in folder.iterdir()} == FILES - {run_folder.SAMPLES} | {samples}, "left behind"
    assert at > 8, "the moments were not seen"


# ---------------------------------------------------------------------------------------- at random moments of a sweep


def moments(count: int) -> list[float]:
    """Shares of a time, one at random in each of as many equal parts, in random order."""
    rng = random.Random(count)
    found = [(part + rng.random()) / count for part in range(count)]
    rng.shuffle(found)
    return found


def kill_at(process: psutil.Process, seconds: float) -> float | None:
    """SIGKILL when it has calculated for so long; otherwise how long it did until it ended by itself."""
    spent = 0.0
    while is_alive(process):
        spent = max(spent, calculated(process))
        if spent >= seconds:
            with suppress(psutil.NoSuchProcess):
                process.kill()
            wait_for(lambda: not is_alive(process))
            return None
        time.sleep(0.005)
    return spent


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def calculated(process: psutil.Process) -> float:
    """Seconds of processor time, which is what a busy machine does not stretch."""
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def command(results: Path, *words: str) -> list[str]:
    short = ["measure.repeats=2", "max_new_tokens=12"]
    return ["-m", *COMMON, *short, "seed=1,2", f"paths.results={results}", *words]


def go_on(results: Path, *words: str) -> None:
    process = start(command(results, *words), results.with_suffix(".log"))
    process.join()
    assert process.exitcode in (0, 3), results.with_suffix(".log").read_text()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], float]:
    """What the sweep records when nothing disturbs it, and the processor time of that."""
    results = tmp_path_factory.mktemp("unbroken")
    process = start(command(results), results.with_suffix(".log"))
    spent = kill_at(psutil.Process(process.pid), math.inf)
    assert spent
    return outputs(results), spent


@pytest.mark.slow
@pytest.mark.parametrize("moment", moments(KILLS or 2), ids="{:.2f}".format)
def test_a_sweep_in_one_process(moment: float, unbroken: tuple[dict[str, Any], float], tmp_path: Path) -> None:
    results, after = tmp_path / "results", moment * unbroken[1]
    while kill_at(psutil.Process(start(command(results), tmp_path / "said").pid), after) is not None:
        after *= 0.9  # it was through before
        shutil.rmtree(results)
    go_on(results)
    assert outputs(results) == unbroken[0]


@pytest.mark.slow
@pytest.mark.parametrize("moment", moments(max(1, KILLS // 5)), ids="{:.2f}".format)
def test_a_sweep_in_several_processes(moment: float, unbroken: tuple[dict[str, Any], float], tmp_path: Path) -> None:
    """Its head is killed, and they end by themselves."""
    results, words = tmp_path / "results", ("cluster=process", "cluster.jobs=2")
    head = start(command(results, *words), tmp_path / "said")
    wait_for(lambda: any(map(lock_of, job_processes(results))))
    time.sleep(moment * unbroken[1] / 2)
    head.kill()
    wait_for(lambda: not job_processes(results))
    go_on(results, *words)
    assert outputs(results) == unbroken[0]


@pytest.mark.slow
@pytest.mark.slurm
def test_jobs_of_slurm(
    real_slurm: None,
    unbroken: tuple[dict[str, Any], float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attempt after attempt is killed, of both jobs side by side, until there were as many as there should be."""
    monkeypatch.setattr(slurm_executor, "_POLL", 0.2)
    monkeypatch.setattr(slurm_executor, "_GRACE", 1.0)
    results = tmp_path / "results"
    hunter = Hunter(results, KILLS or 2, unbroken[1] / 2)
    words = command(results, "cluster=slurm", "cluster.cpus_per_task=1")
    hunter.start()
    for _ in range(10 * (KILLS or 2)):
        if cli.main(words) == 1:
            continue  # the table of failures
        if not hunter.left:
            break
        shutil.rmtree(run_folders(results)[0])  # both were through before their moments came
    assert not hunter.left
    print("folders and rows at each kill:", hunter.killed)
    assert outputs(results) == unbroken[0]


class Hunter(threading.Thread):
    """Kills processes of jobs, each at a random moment: one in five before it has a folder, the others while they write
    one.

    Attributes:
        killed: by each kill, how many runs had a folder and how many rows had been recorded.
    """

    def __init__(self, results: Path, kills: int, writing_s: float) -> None:
        super().__init__(daemon=True)
        self.results, self.kills, self.writing_s = results, kills, writing_s
        self.killed: list[tuple[int, int]] = []
        self._moments = itertools.cycle(moments(kills))
        self._known: dict[int, threading.Thread] = {}

    @property
    def left(self) -> int:
        """How many it has still to kill."""
        return max(0, self.kills - len(self.killed))

    def run(self) -> None:
        """Until all are killed."""
        while self.left:
            for process in job_processes(self.results):
                if process.pid not in self._known:
                    place = len(self._known)
                    hunt = threading.Thread(target=self._hunt, args=(process, next(self._moments), place), daemon=True)
                    self._known[process.pid] = hunt
                    hunt.start()
            time.sleep(0.1)

    def _hunt(self, process: psutil.Process, moment: float, place: int) -> None:
        seconds = moment * _STARTING_S
        if place % 5:
            while is_alive(process) and not lock_of(process):
                time.sleep(0.02)
            seconds = calculated(process) + moment * self.writing_s
        if kill_at(process, seconds) is None:
            files = [path / run_folder.SAMPLES for path in run_folders(self.results)]
            rows = sum(file.read_bytes().count(b"\n") for file in files if file.exists())
            self.killed.append((len(files), rows))


def job_processes(results: Path) -> list[psutil.Process]:
    """Of SLURM or of ``cluster=process``, of sweeps into this folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        ours = any(word in ("bench.sweep.job", "submitit.core._submit") for word in words)
        if ours and "python" in Path(words[0]).name and str(results) in " ".join(words):
            found.append(process)
    return found


def wait_for(true: Callable[[], bool]) -> None:
    until = time.monotonic() + _PATIENCE
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)
