"""The job: time limits, failures, resume, an archive that grows; stages here are quick programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from bench.errors import UserError
from bench.gpu import start
from bench.gpu.plan import Stage
from bench.gpu.runner import Job

ROOT = Path(__file__).resolve().parents[3]


def stage(name: str, *programs: str, limit_s: float = 20.0, **fields: object) -> Stage:
    return Stage(name, tuple(("python", "-c", program) for program in programs), float(limit_s), **fields)  # type: ignore[arg-type]


def counting(file: Path, code: int = 0) -> str:
    """A program that adds a line to a file and ends with a code."""
    return f"open({str(file)!r}, 'a').write('x'); raise SystemExit({code})"


def lines(home: Path) -> list[str]:
    return (home / "log" / "stages.log").read_text().splitlines()


def test_stages_run_in_order_and_a_failure_stops_none_but_its_own(tmp_path: Path) -> None:
    after = tmp_path / "after"
    stages = [stage("first", "print('hello')"), stage("bad", "raise SystemExit(1)", counting(after)), stage("last", "")]
    outcomes = Job(stages, tmp_path).run()
    assert {name: outcome.state for name, outcome in outcomes.items()} == {
        "first": "done",
        "bad": "failed",
        "last": "done",
    }
    assert outcomes["bad"].codes == (1, 0)
    assert after.read_text() == "x"  # the other commands of a stage are run too
    assert [line.split()[2:4] for line in lines(tmp_path)] == [["done", "first"], ["failed", "bad"], ["done", "last"]]
    assert "exit code 1: python -c raise SystemExit(1)" in lines(tmp_path)[1]
    assert "hello" in (tmp_path / "log" / "first.log").read_text()
    assert (tmp_path / "state" / start.DONE).is_file()


def test_a_required_stage_that_fails_ends_the_job(tmp_path: Path) -> None:
    file = tmp_path / "file"
    outcomes = Job(
        [stage("smoke", "raise SystemExit(1)", required=True), stage("next", counting(file))], tmp_path
    ).run()
    assert list(outcomes) == ["smoke"]
    assert not file.exists()
    assert lines(tmp_path)[-1].endswith("stopped: smoke is required for all that follows")
    assert not (tmp_path / "state" / start.DONE).exists()


def test_a_run_that_is_invalid_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "file"
    stages = [stage("run", counting(file, 3))]
    assert Job(stages, tmp_path).run()["run"].state == "done"
    assert "INVALID: python -c" in lines(tmp_path)[0]
    assert Job(stages, tmp_path).run() == {}
    assert file.read_text() == "x"


def test_done_stages_are_not_repeated_unless_their_commands_change(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    stages = [stage("good", counting(good)), stage("bad", counting(bad, 1))]
    for _ in range(2):
        Job(stages, tmp_path).run()
    assert (good.read_text(), bad.read_text()) == ("x", "xx")
    Job([stage("good", counting(good), "pass")], tmp_path).run()
    assert good.read_text() == "xx"


SLOW = """
import time
print("began", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("kept", flush=True)
"""
DEAF = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_stage_out_of_time_is_interrupted_and_the_next_one_runs(tmp_path: Path) -> None:
    file = tmp_path / "file"
    begin = time.monotonic()
    outcomes = Job([stage("slow", SLOW, counting(file), limit_s=2), stage("next", "")], tmp_path).run()
    assert time.monotonic() - begin < 20
    assert (outcomes["slow"].state, outcomes["slow"].codes) == ("out of time", (None,))
    assert outcomes["next"].state == "done"
    assert "kept" in (tmp_path / "log" / "slow.log").read_text()
    assert not file.exists()
    assert "stopped: python -c" in lines(tmp_path)[0]


def test_what_ignores_the_interrupt_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    Job([stage("deaf", DEAF, limit_s=3)], tmp_path, grace_s=0.5).run()
    child = int((tmp_path / "log" / "deaf.log").read_text().splitlines()[-1])
    end = time.monotonic() + 10
    while alive(child) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive(child)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_limits_are_a_factor(tmp_path: Path) -> None:
    outcomes = Job([stage("slow", SLOW, limit_s=60)], tmp_path, limits=0.02).run()
    assert outcomes["slow"].state == "out of time"


def test_a_stage_waits_for_what_it_needs_and_is_tried_again_later(tmp_path: Path) -> None:
    stages = [stage("model", "", needs=("model",)), stage("other", "")]
    outcomes = Job(stages, tmp_path, patience_s=0.1, packed=True).run()
    assert outcomes["model"].state == "not started"
    assert "model has not arrived" in lines(tmp_path)[0]
    assert outcomes["other"].state == "done"
    assert not (tmp_path / "state" / start.DONE).exists()  # more may come
    (tmp_path / "state" / "have").mkdir()
    (tmp_path / "state" / "have" / "model").touch()
    assert Job(stages, tmp_path, packed=True).run()["model"].state == "done"
    assert (tmp_path / "state" / start.DONE).is_file()


def test_nothing_is_waited_for_where_nothing_was_packed(tmp_path: Path) -> None:
    assert Job([stage("model", "", needs=("model",))], tmp_path).run()["model"].state == "done"


def test_the_archive_grows_with_each_stage(tmp_path: Path) -> None:
    home, out = tmp_path / "home", tmp_path / "out"
    look = f"import tarfile; print('HAS', *tarfile.open({str(out / start.ARCHIVE)!r}).getnames())"
    record = home / "results" / "run"
    write = f"import pathlib; p = pathlib.Path({str(record)!r}); p.mkdir(parents=True); (p / 'a').write_text('1')"
    Job([stage("one", write), stage("two", look), stage("bad", "raise SystemExit(1)")], home, out).run()
    seen = (home / "log" / "two.log").read_text().splitlines()[-1].split()[1:]
    assert {"results/run/a", "state/one.json", "log/stages.log"} <= set(seen)
    assert "state/two.json" not in seen
    with tarfile.open(out / start.ARCHIVE) as archive:
        assert {"state/two.json", "state/bad.json", "log/bad.log", "results/run/a"} <= set(archive.getnames())


def test_a_killed_job_resumes_where_it_was(tmp_path: Path) -> None:
    once, twice, quick = tmp_path / "once", tmp_path / "twice", tmp_path / "quick"
    sleep = f"time.sleep(0 if os.path.exists({str(quick)!r}) else 50)"
    slow = f"import os, time; open({str(twice)!r}, 'a').write('x'); {sleep}"
    body = f"""
from pathlib import Path
from bench.gpu.plan import Stage
from bench.gpu.runner import Job
programs = {{"first": {counting(once)!r}, "second": {slow!r}}}
stages = [Stage(name, (("python", "-c", program),), 60) for name, program in programs.items()]
Job(stages, Path({str(tmp_path / "home")!r})).run()
"""
    job = subprocess.Popen([sys.executable, "-c", body], cwd=ROOT)
    end = time.monotonic() + 60
    while not twice.exists() and time.monotonic() < end:
        time.sleep(0.1)
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    quick.touch()
    subprocess.run([sys.executable, "-c", body], cwd=ROOT, timeout=60, check=True)
    assert (once.read_text(), twice.read_text()) == ("x", "xx")
    for name in ("first", "second"):
        assert json.loads((tmp_path / "home" / "state" / f"{name}.json").read_text())["state"] == "done"


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_no_command_outlives_its_job(tmp_path: Path, sign: signal.Signals) -> None:
    pid = tmp_path / "pid"
    sleep = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(60)"
    body = f"""
from pathlib import Path
from bench.gpu.plan import Stage
from bench.gpu.runner import Job
Job([Stage("slow", (("python", "-c", {sleep!r}),), 60)], Path({str(tmp_path / "home")!r}), grace_s=5).run()
"""
    job = subprocess.Popen([sys.executable, "-c", body], cwd=ROOT)
    end = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < end:
        time.sleep(0.1)
    os.kill(job.pid, sign)
    job.wait(30)
    while alive(int(pid.read_text())) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive(int(pid.read_text()))


def test_two_jobs_do_not_share_a_folder(tmp_path: Path) -> None:
    inner = f"""
from pathlib import Path
from bench.gpu.plan import Stage
from bench.gpu.runner import Job
Job([], Path({str(tmp_path)!r})).run()
"""
    assert Job([stage("second", inner)], tmp_path).run()["second"].state == "failed"
    assert "Another job runs" in (tmp_path / "log" / "second.log").read_text()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"limit_s": 0.0}, "limit_s of the stage a must be above 0"),
        ({"limit_s": 1.0, "commands": (("rm", "-r"),)}, "must begin with bench, pytest, python"),
        ({"limit_s": 1.0, "commands": ((),)}, "must begin with"),
    ],
)
def test_a_stage_that_cannot_be_run_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Stage(**{"name": "a", "commands": (), **fields})  # type: ignore[arg-type]
