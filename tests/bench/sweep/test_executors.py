"""Where the jobs of a sweep run: processes, SLURM and Ray, what they tell, and what is left when one is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import cli
from bench.config import compose, instantiate
from bench.errors import UserError
from bench.records import run_folder
from bench.sweep import executors, slurm_executor
from bench.sweep import job as cluster_job
from bench.sweep import plan as sweep
from bench.sweep.executors import Local, Process, visible_gpus
from bench.sweep.job import Result, Task
from bench.sweep.ray_executor import Ray
from bench.sweep.slurm_executor import JOBS, Slurm, Work
from tests.helpers.sweeps import COMMON, outputs, pairs, writers

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # read when a test imports ray
CHOICES = compose.every_group()[compose.CLUSTER]


def built(*words: str) -> Any:
    return instantiate.build_cluster(compose.compose_cluster(words))


def task(name: str, **changes: Any) -> Task:
    return Task([f"seed={name}"], name, f"seed={name}", **changes)


def script(file: Path, body: str) -> Path:
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def valid(*_: Any, **__: Any) -> Any:
    return types.SimpleNamespace(verdict=types.SimpleNamespace(valid=True))


# ------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_is_described_and_builds_with_its_own_defaults(choice: str) -> None:
    text = compose.config_file(compose.CLUSTER, choice).read_text()
    assert text.startswith("# ") and f"\nname: {choice}\n" in text
    found = built(f"cluster={choice}")
    assert found == type(found)(), "the file and the class disagree on a default"


def test_without_a_word_jobs_run_in_this_process() -> None:
    assert built() == Local()
    assert "cluster" not in compose.groups(), "where a run runs is no part of it"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster=slrum"], "Unknown cluster 'slrum'. Did you mean 'slurm'? (python -m bench list cluster)"),
        (["cluster=local,process"], "Unknown cluster 'local,process'."),
        (["cluster=slurm", "cluster=ray"], "Unknown cluster 'slurm and ray'."),
        (
            ["cluster=slurm", "cluster.partitoin=x"],
            "Unknown setting 'cluster.partitoin'. Did you mean 'cluster.partition'?",
        ),
        (["cluster.jobs=2"], "Unknown setting 'cluster.jobs'."),
        (["cluster=process", "cluster.jobs=0"], "cluster.jobs must be at least 1, got 0. Set cluster.jobs=1."),
        (["cluster=slurm", "cluster.job_timeout=x"], "cluster.job_timeout must be a whole number, got 'x'"),
        (["cluster=local", "cluster.job_timeout=0"], "cluster.job_timeout must be at least 1, got 0."),
        (["cluster=ray", "cluster.gpus=-1"], "cluster.gpus must be at least 0, got -1."),
        (["hydra/launcher=basic"], "use resume, shuffle_seed and cluster=NAME"),
    ],
    ids=str,
)
def test_wrong_words_are_one_message_before_any_plan(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["-m", *words]) == 2
    out, err = capsys.readouterr()
    assert message in err and (out, len(err.splitlines())) == ("", 1)


def test_where_it_runs_is_no_part_of_a_job(tmp_path: Path) -> None:
    options, words = sweep.read_words(
        ["seed=1,2", "cluster=slurm", "+cluster.options.nice=5", f"paths.results={tmp_path}"]
    )
    assert options.cluster == ("cluster=slurm", "+cluster.options.nice=5")
    assert built(*options.cluster).options == {"nice": 5}
    plan = sweep.make(words, options, Local())
    assert not any("cluster" in word for job in plan.jobs for word in job.words)


def test_naming_a_cluster_makes_a_sweep_of_one_job(
    use_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_run(valid)
    assert cli.main(["cluster=local", *COMMON, f"paths.results={tmp_path}"]) == 0
    assert capsys.readouterr().out.startswith("Plan: 1 job: 1 new.")


def test_threads_are_what_a_job_gets_unless_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.utils.machine.default_threads", lambda: 9)
    assert [each.threads for each in (Local(), Process(), Process(2), Process(20))] == [None, None, 4, 1]
    words = ["model=random", "hardware=cpu_fp32", f"paths.results={tmp_path}"]
    for where, given, threads in (
        (Process(2), [], 4),
        (Process(2), ["hardware.threads=3"], 3),
        (Slurm(cpus_per_task=7), [], 7),
        (Process(1), [], None),
    ):
        (job,) = sweep.make([*words, *given], sweep.Options(), where).jobs
        assert job.cfg.hardware.threads == threads
        assert compose.compose(job.words) == job.cfg, "its command line is the run"


# ------------------------------------------------------------------------------------------------------ processes


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let a shell script be the job: ``$3`` is the task's file; its answer is expected beside it."""

    def use(body: str) -> None:
        monkeypatch.setattr(sys, "executable", str(script(tmp_path / "job", body)))

    return use


ANSWER = """echo '{"code": 0}' > "${3%.json}.result" """


def test_a_job_that_dies_takes_no_other_with_it(
    stand_in: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(f'case "$3" in *kill.json) kill -9 $$;; *crash.json) kill -SEGV $$;; *mute.json) exit 7;; esac; {ANSWER}')
    tasks = [task(name) for name in ("kill", "fine", "crash", "mute")]
    found = dict(Process().run(tasks, tmp_path / "jobs"))
    assert [found[place].code for place in range(4)] == [1, 0, 1, 1]
    assert "Signal 9 (SIGKILL)" in found[0].message and "memory" in found[0].message
    assert "Signal 11 (SIGSEGV)" in found[2].message and "memory" not in found[2].message
    assert "exit code 7" in found[3].message
    assert "[2/4] seed=fine: done" in capsys.readouterr().out


def test_as_many_run_side_by_side_as_asked_for(stand_in: Callable[[str], None], tmp_path: Path) -> None:
    stand_in(f"echo + >> {tmp_path}/log; sleep 0.3; echo - >> {tmp_path}/log; {ANSWER}")
    answers = dict(Process(2).run([task(str(n)) for n in range(5)], tmp_path / "jobs"))
    assert set(answers) == set(range(5)) and {answer.code for answer in answers.values()} == {0}
    running = [0]
    for line in (tmp_path / "log").read_text().split():
        running.append(running[-1] + (1 if line == "+" else -1))
    assert max(running) == 2


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Not ignored, as it is in what a shell starts in the background: a shell script could not trap it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_stops_the_processes(stand_in: Callable[[str], None], tmp_path: Path) -> None:
    wait = f'trap "echo x > {tmp_path}/said; exit 130" INT; touch {tmp_path}/ready; while :; do sleep 0.05; done'
    stand_in(f'case "$3" in *0.json) {ANSWER};; *) {wait};; esac')
    answers = Process(2).run([task("0"), task("1")], tmp_path / "jobs")
    assert next(answers) == (0, Result(0))
    until = time.monotonic() + 30
    while not (tmp_path / "ready").exists() and time.monotonic() < until:
        time.sleep(0.02)
    answers.close()  # what an exception in the head does
    assert (tmp_path / "said").exists()


@pytest.mark.parametrize(
    ("given", "count", "seen"),
    [(None, 3, ["0", "1", "2"]), ("4,G-a,7", 3, ["4", "G-a", "7"]), ("1,-1,2", 1, ["1"]), ("", 0, []), (None, 0, [])],
)
def test_gpus_are_those_that_this_process_may_see(
    given: str | None, count: int, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert visible_gpus() == seen


@pytest.mark.parametrize(("jobs", "most"), [(1, 1), (2, 1), (3, 1), (5, 2)])
def test_jobs_side_by_side_have_a_gpu_each(
    jobs: int, most: int, stand_in: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.sweep.executors.visible_gpus", lambda: ["4", "6", "7"])
    said = f'echo "$1 $CUDA_VISIBLE_DEVICES" >> {tmp_path}/log'
    stand_in(f"say() {{ {said}; }}; sleep=0.$(expr $$ % 3 + 1); say +; sleep $sleep; say -; {ANSWER}")
    tasks = [task(str(number)) for number in range(9)]
    assert len(dict(Process(jobs).run(tasks, tmp_path / "jobs"))) == len(tasks)
    on, seen = Counter[str](), Counter[str]()
    for line in (tmp_path / "log").read_text().splitlines():
        sign, gpu = line.split()
        on[gpu] += 1 if sign == "+" else -1
        seen[gpu] = max(seen[gpu], on[gpu])
    assert set(seen) <= {"4", "6", "7"} and len(seen) == min(jobs, 3) and max(seen.values()) == most


def test_without_a_gpu_nothing_is_said_about_one(
    stand_in: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    stand_in(f"echo ${{CUDA_VISIBLE_DEVICES-none}} > {tmp_path}/log; {ANSWER}")
    assert dict(Process(2).run([task("0")], tmp_path / "jobs")) == {0: Result(0)}
    assert (tmp_path / "log").read_text() == "none\n"


def test_a_process_ends_with_the_sweep(tmp_path: Path) -> None:
    """The other end of its stdin is closed, as by the system when the head is killed."""
    code = "import sys, time; from bench.sweep import job as j; j.interrupt_at_end_of(0); print(1, flush=True)"
    command = [sys.executable, "-c", f"{code}; time.sleep(60)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin and process.stdout and process.stderr
        assert process.stdout.readline() == b"1\n" and process.poll() is None
        process.stdin.close()
        assert process.wait(30) and b"KeyboardInterrupt" in process.stderr.read()


def test_a_job_answers_by_a_file(use_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    use_run(valid)
    job = Task([*COMMON, "paths.results=here"], "a", "a", environment={"DECODEBENCH_TEST": "1"}, folder=str(tmp_path))
    cluster_job.write(file := tmp_path / "a.json", job)
    assert cluster_job.main([str(file)]) == 0 and os.environ.pop("DECODEBENCH_TEST") == "1"
    assert cluster_job.read_result(file) == Result(0)
    use_run(lambda *_, **__: (_ for _ in ()).throw(UserError("The input is wrong.")))
    assert cluster_job.main([str(file)]) == 2 and cluster_job.read_result(file) == Result(2, "The input is wrong.")


# ------------------------------------------------------------------------------------------- started a second time


def test_a_job_started_again_keeps_its_own_records_and_forgets_older_ones(tmp_path: Path) -> None:
    """What ``resume=force`` means for a job that the cluster puts back into its queue."""
    job = Task([*COMMON, "measure.repeats=1", f"paths.results={tmp_path}"], "run", "run")

    def began() -> list[str]:
        return [run_folder.read_manifest(path)["started_at"] for path in tmp_path.glob("*-*")]  # type: ignore[index]

    before = datetime.now(timezone.utc).replace(microsecond=0)
    assert cluster_job.attempt(job, before).code in (0, 3)
    (first,) = began()
    samples = next(tmp_path.glob("*/samples.jsonl")).read_bytes()
    assert cluster_job.attempt(job, before).code in (0, 3)
    assert began() == [first] and next(tmp_path.glob("*/samples.jsonl")).read_bytes() == samples
    later = datetime.fromisoformat(first) + timedelta(seconds=1)
    while datetime.now(timezone.utc) < later:
        time.sleep(0.05)
    assert cluster_job.attempt(job, later).code in (0, 3)
    assert began() != [first]


# ------------------------------------------------------------------------------- SLURM, without one on the machine


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Scripts in the place of SLURM's programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def use(**bodies: str) -> None:
        for name, body in bodies.items():
            script(folder / name, body)

    return use


def test_what_is_submitted(programs: Callable[..., None], tmp_path: Path) -> None:
    programs(sbatch=f'cp "$1" {tmp_path}/batch; echo Submitted batch job 7', srun="")
    where = Slurm(
        partition="gpu", job_timeout=5400, gpus_per_node=1, cpus_per_task=3, mem_gb=2.5, array_parallelism=8,
        setup=["module load cuda"], options={"constraint": "a100"}, wait=False,
    )  # fmt: skip
    assert list(where.run([task(str(n)) for n in range(20)], tmp_path / "jobs")) == []
    text = (tmp_path / "batch").read_text()
    for line in (
        "partition=gpu", "time=90", "gpus-per-node=1", "cpus-per-task=3", "mem=2560MB", "array=0-19%8",
        "constraint=a100", "requeue", "open-mode=append", "signal=USR2@90", "job-name=decodebench",
    ):  # fmt: skip
        assert f"#SBATCH --{line}\n" in text
    assert "\nmodule load cuda\n" in text and "--cpus-per-task=3" in text.split("srun")[1]
    assert json.loads((tmp_path / "jobs" / JOBS).read_text()) == {f"7_{n}": [str(n)] for n in range(20)}


def test_more_jobs_than_an_array_may_have(
    programs: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_executor, "MOST", 2)
    programs(sbatch=f"echo x >> {tmp_path}/n; echo Submitted batch job $(wc -l < {tmp_path}/n)", srun="")
    assert list(Slurm(wait=False).run([task(str(n)) for n in range(5)], tmp_path / "jobs")) == []
    submitted = json.loads((tmp_path / "jobs" / JOBS).read_text())
    assert submitted == {"1_0": ["0"], "1_1": ["1"], "2_0": ["2"], "2_1": ["3"], "3": ["4"]}


def test_what_was_submitted_is_not_submitted_again(
    programs: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    programs(sbatch="echo Submitted batch job 7", srun="", squeue="echo")
    command = [*COMMON, "seed=1,2,3", f"paths.results={tmp_path / 'results'}", "cluster=slurm", "cluster.wait=false"]
    assert cli.main(["-m", *command]) == 0
    assert "Submitted to SLURM: 7" in capsys.readouterr().out
    programs(squeue="echo '7_0 RUNNING None'; echo '7_2 PENDING Priority'; echo '99 RUNNING None'")
    assert cli.main(["-m", *command, "dry_run=true"]) == 0
    out = capsys.readouterr().out
    assert "Plan: 3 jobs: 1 new, 1 queued, 1 running. To run: 1" in out
    assert "running      seed=1  (SLURM job 7_0: RUNNING None)" in out
    assert "queued       seed=3  (SLURM job 7_2: PENDING Priority)" in out
    programs(squeue="exit 1")
    assert cli.main(["-m", *command, "dry_run=true"]) == 0
    assert "3 new" in capsys.readouterr().out


def test_a_job_that_leaves_the_queue_without_an_answer_has_failed(
    programs: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_executor, "_POLL", 0.01)
    monkeypatch.setattr(slurm_executor, "_GRACE", 0.1)
    programs(
        sbatch="echo Submitted batch job 7",
        srun="",
        squeue="echo '8 RUNNING None'",
        scontrol='echo "JobId=7 JobState=TIMEOUT Reason=x ExitCode=0:9"',
    )
    ((place, result),) = Slurm().run([task("a")], tmp_path / "jobs")
    assert (place, result.code) == (0, 1)
    assert result.message.startswith("SLURM ended job 7 (TIMEOUT, exit code:signal 0:9). Finished work is kept")


def sbatch_fails() -> dict[str, str]:
    return {
        "sbatch": "echo sbatch: error: Unable to contact slurm controller '(connect failure)' >&2; exit 1",
        "srun": "",
        "sinfo": "exit 1",
    }


@pytest.mark.parametrize(
    ("present", "message"),
    [
        ({}, "cluster=slurm needs sbatch on PATH"),
        (
            sbatch_fails(),
            "SLURM refused cluster=slurm cluster.qos=x: Unable to contact slurm controller (connect",
        ),
    ],
    ids=["no sbatch", "no controller"],
)
def test_a_slurm_that_is_not_there_is_one_message(
    present: dict[str, str],
    message: str,
    programs: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    programs(**present)
    if not present:
        monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main([*COMMON, f"paths.results={tmp_path}", "cluster=slurm", "cluster.qos=x"]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(("name", "package"), [("slurm", "submitit"), ("ray", "ray")])
def test_an_extra_that_is_missing_is_named(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main([*COMMON, f"paths.results={tmp_path}", f"cluster={name}"]) == 2
    assert capsys.readouterr().err == (
        f"cluster={name} needs {package}, which is not installed. Install it (pip install "
        f"'decodebench[{name}]'), or choose cluster=process.\n"
    )


def test_submitit_runs_a_job_and_starts_it_again(use_run: Any, tmp_path: Path) -> None:
    submitit = pytest.importorskip("submitit")
    use_run(valid)
    job = Task([*COMMON, f"paths.results={tmp_path}"], "a", "a", fresh=True)
    assert submitit.DebugExecutor(tmp_path).submit(Work(), job).result() == Result(0)
    again = Work().checkpoint(job)
    again.dump(tmp_path / "again.pkl")
    loaded = type(again).load(tmp_path / "again.pkl")
    assert loaded.args == (job,) and loaded.result() == Result(0)


# --------------------------------------------------------------------------------------------------- a real SLURM


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the jobs with the seeds 1 and 2 give when nothing disturbs them."""
    results = tmp_path_factory.mktemp("unbroken")
    assert cli.main(["-m", *COMMON, "seed=1,2", f"paths.results={results}"]) in (0, 3)
    return outputs(results)


def when_measured(results: Path, seed: int, then: Callable[[], Any]) -> None:
    """Do something, beside what follows, as soon as the run with this seed has recorded another of its eight pairs."""
    before = pairs(results, seed)

    def watch() -> None:
        while pairs(results, seed) <= before:
            time.sleep(0.03)
        then()

    threading.Thread(target=watch, daemon=True).start()


def kill_writer(results: Path, seed: int) -> None:
    (process,) = writers(results, seed)
    process.kill()


def test_a_process_that_is_killed_goes_on_when_run_again(
    unbroken: dict[str, list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["-m", *COMMON, "seed=1", f"paths.results={tmp_path}", "cluster=process"]
    when_measured(tmp_path, 1, lambda: kill_writer(tmp_path, 1))
    assert cli.main(command) == 1
    out, err = capsys.readouterr()
    assert "1 of 1 runs failed:" in err and "Signal 9 (SIGKILL) ended the process" in err
    assert cli.main(command) in (0, 3)
    assert "Plan: 1 job: 1 cut. To run: 1" in capsys.readouterr().out
    assert outputs(tmp_path).items() <= unbroken.items()


@pytest.mark.slurm
def test_jobs_of_slurm_that_are_stopped_killed_preempted_and_wrong(
    real_slurm: None,
    unbroken: dict[str, list[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Seed 1 is asked to stop, as when its time is up, and goes on by itself; seed 2 is killed, and preempted when it
    is run again. Afterwards everything is there, and once."""
    monkeypatch.setattr(slurm_executor, "_POLL", 0.2)
    monkeypatch.setattr(slurm_executor, "_GRACE", 1.0)
    place = [f"paths.results={tmp_path}", "cluster=slurm", "cluster.cpus_per_task=1", "cluster.gpus_per_node=1"]
    command = ["-m", *COMMON, "seed=1,2", *place]

    when_measured(tmp_path, 1, lambda: writers(tmp_path, 1)[0].send_signal(signal.SIGUSR2))
    when_measured(tmp_path, 2, lambda: kill_writer(tmp_path, 2))
    assert cli.main(command) == 1
    out, err = capsys.readouterr()
    assert "1 of 2 runs failed:" in err and "seed=2" in err.splitlines()[-1] and "SLURM ended job" in err
    (log,) = tmp_path.glob(".cluster/*/*_0_0_log.out")
    assert "Requeued job" in log.read_text() and log.read_text().count("Starting with JobEnvironment") == 2

    when_measured(tmp_path, 2, lambda: preempt(tmp_path, 2))
    assert cli.main([*command, "resume=unfinished"]) in (0, 3)
    # SLURM may not have noticed yet that the other one has ended; a noisy record counts as running as long
    assert re.search(r"Plan: 2 jobs: 1 cut, 1 (done|invalid|running)\. To run: 1", capsys.readouterr().out)
    (log,) = tmp_path.glob(".cluster/*/[0-9]_0_log.out")
    assert log.read_text().count("Starting with JobEnvironment") == 2, "it was not preempted"
    assert outputs(tmp_path) == unbroken


def preempt(results: Path, seed: int) -> None:
    """Both nodes for somebody more important; the run is held, or it might end before SLURM loses patience with it."""
    (writer,) = writers(results, seed)
    words = ["-p", "urgent", "-N", "2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1"]
    subprocess.run(["sbatch", *words], check=True)
    with suppress(psutil.NoSuchProcess):
        while True:
            writer.suspend()
            time.sleep(0.01)


@pytest.mark.slurm
def test_a_job_of_slurm_that_raises_is_in_the_table(
    real_slurm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slurm_executor, "_POLL", 0.2)
    place = [f"paths.results={tmp_path}", "cluster=slurm", "cluster.cpus_per_task=1"]
    words = ["model=random", "dataset=jsonl", f"dataset.path={tmp_path}/missing.jsonl", "hardware=cpu_fp32"]
    assert cli.main([*words, *place]) == 2
    out, err = capsys.readouterr()
    assert "1 of 1 runs failed:" in err and "missing.jsonl" in err.splitlines()[-1] and "Traceback" not in out + err


@pytest.mark.slurm
def test_a_partition_that_is_not_there(real_slurm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*COMMON, f"paths.results={tmp_path}", "cluster=slurm", "cluster.partition=nope"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and err.startswith("SLURM refused cluster=slurm cluster.partition=nope: ")
    assert "invalid partition" in err and "Partitions: debug*, urgent. Correct the setting it names" in err


@pytest.mark.slurm
def test_a_sweep_that_was_detached_stands_in_the_plan(
    real_slurm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["-m", *COMMON, "seed=1,2", f"paths.results={tmp_path}", "cluster=slurm", "cluster.wait=false"]
    assert cli.main([*command, "+cluster.options.hold=true"]) == 0
    assert "The same command shows their state" in capsys.readouterr().out
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert "Plan: 2 jobs: 2 queued. Nothing to run." in out and "PENDING JobHeldUser" in out


# ----------------------------------------------------------------------------------------------------- time limits


def test_a_job_that_hangs_is_ended_named_and_the_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hangs(cfg: Any, *_: Any, **__: Any) -> int:
        while cfg.seed == 1:
            time.sleep(0.01)
        return 0

    monkeypatch.setattr(cluster_job, "execute", hangs)
    words = ["-m", *COMMON, f"paths.results={tmp_path}", "seed=1,2", "cluster=local", "cluster.job_timeout=1"]
    before = signal.getsignal(signal.SIGALRM)
    assert cli.main(words) == 1
    out, err = capsys.readouterr()
    assert "Time limit of each job: 1 s (cluster.job_timeout, in seconds)." in out and "[2/2]" in out
    assert "1 of 2 runs failed:" in err and "Its time limit ended the job (cluster.job_timeout=1, in seconds)." in err
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0) and signal.getsignal(signal.SIGALRM) is before


def test_a_process_that_heeds_no_signal_is_killed_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(given: Task, *_: Any) -> subprocess.Popen[bytes]:
        deaf = "trap '' INT; while true; do sleep 0.1; done" if given.name == "1" else "exit 0"
        started.append(subprocess.Popen(["sh", "-c", deaf], start_new_session=True))
        assert given.timeout_s == 1
        return started[-1]

    monkeypatch.setattr(executors, "_start", start)
    monkeypatch.setattr(executors, "_PATIENCE", 0.3)
    found = dict(Process(job_timeout=1).run([task("1"), task("2")], tmp_path))
    assert "Its time limit ended the job" in found[0].message and found[0].code == 1
    assert "exit code 0" in found[1].message and started[0].returncode == -signal.SIGKILL


def test_slurm_gets_the_limit_in_whole_minutes() -> None:
    assert Slurm(job_timeout=61)._parameters()["time"] == 2


# ------------------------------------------------------------------------------------------------------------ Ray


def test_nobody_at_the_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        words = [*COMMON, f"paths.results={tmp_path}", "cluster=ray", f"cluster.address={address}"]
        assert cli.main(words) == 2
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1
        assert err.startswith(f"cluster=ray could not reach cluster.address={address}: ")
        assert "Start one (ray start --head)" in err


@pytest.mark.parametrize("address", ["auto", "10.0.0.7:6379", "ray://node7:10001", "0.0.0.0:6379"])
def test_a_shared_ray_without_tokens_is_refused(address: str) -> None:
    with pytest.raises(UserError, match=r"needs ray 2\.52 or newer, which asks for a token, got 2\.51\.1"):
        Ray(address)._check_tokens("2.51.1")
    for version in ("2.52.0", "2.60.0", "3.0.0rc1"):
        Ray(address)._check_tokens(version)


@pytest.mark.parametrize("address", ["127.0.0.1:6379", "localhost:6379", "ray://127.0.0.1:10001", "[::1]:6379"])
def test_an_older_ray_of_this_machine_alone_may_be_used(address: str) -> None:
    Ray(address)._check_tokens("2.40.0")


@pytest.mark.parametrize("place", ["127.0.0.1", "192.0.2.2"])
def test_a_ray_of_the_sweep_listens_on_loopback_alone(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    ended: list[bool] = []
    fake = types.SimpleNamespace(
        init=lambda *_, **__: None, nodes=lambda: [{"NodeManagerAddress": place}], shutdown=lambda: ended.append(True)
    )
    if place == "127.0.0.1":
        Ray()._connect(fake)
        assert capsys.readouterr().out == "Ray of this sweep: listens on 127.0.0.1 alone.\n" and not ended
    else:
        with pytest.raises(UserError, match=r"must listen on 127\.0\.0\.1 alone, got 192\.0\.2\.2"):
            Ray()._connect(fake)
        assert ended


@pytest.mark.slow
def test_no_daemon_of_ray_listens_to_other_machines(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    found = subprocess.run([sys.executable, "-c", LISTENING, tmp_path], capture_output=True, text=True, timeout=300)
    if "timed out during startup" in found.stderr:
        pytest.skip("this machine is too busy for Ray's daemons")
    assert found.returncode == 0, found.stderr
    places = set(json.loads(found.stdout.splitlines()[-1]))
    assert places and all(place.removeprefix("::ffff:") == "127.0.0.1" for place in places)


LISTENING = """
import json, sys, psutil
from pathlib import Path
from bench.sweep import ray_executor
from bench.sweep.job import Result, Task
here, places = psutil.Process(), set()
check_room = ray_executor.Ray._check_room
def look(self, ray):
    check_room(self, ray)
    own = {here.pid, *(child.pid for child in here.children(recursive=True))}
    found = psutil.net_connections("inet")
    places.update(each.laddr.ip for each in found if each.status == "LISTEN" and each.pid in own)
ray_executor.Ray._check_room = look
assert list(ray_executor.Ray().run([], Path(sys.argv[1]))) == []
print(json.dumps(sorted(places)))
"""


def test_records_and_obstacles_of_this_machine_do_not_count_elsewhere() -> None:
    assert [where.here for where in (Local(), Process(), Ray(), Ray("auto"), Slurm())] == [True] * 3 + [False] * 2


@pytest.mark.slow
def test_a_job_of_ray_that_is_killed_goes_on(
    unbroken: dict[str, list[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Seed 1 is killed and goes on by itself; a job that fits nowhere is refused before it waits."""
    pytest.importorskip("ray")
    place = [f"paths.results={tmp_path}", "cluster=ray"]
    if cli.main(["-m", *COMMON, "seed=1,2", *place, "cluster.gpus=99"]) == 2:
        err = capsys.readouterr().err
        if "timed out during startup" in err:
            pytest.skip("this machine is too busy for Ray's daemons")
        assert (
            re.match(r"cluster.gpus must be at most \d+ on this machine, got 99\.", err) and len(err.splitlines()) == 1
        )
    else:
        pytest.fail("99 GPUs were found")
    when_measured(tmp_path, 1, lambda: kill_writer(tmp_path, 1))
    assert cli.main(["-m", *COMMON, "seed=1,2", *place, "cluster.retries=1"]) in (0, 3)
    assert outputs(tmp_path) == unbroken
