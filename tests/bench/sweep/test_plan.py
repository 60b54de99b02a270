"""Sweeps: the plan before the first job, what is skipped and why, resuming, and the named ones of conf/sweep."""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from bench import cli, tasks
from bench.config import compose
from bench.config.identity import job_id, run_id
from bench.config.schema import RunConfig, conf_dir
from bench.errors import RunFailed, UserError
from bench.measure import preconditions
from bench.records import lookup
from bench.records.run_folder import RunFolder
from bench.sweep import plan as sweep
from bench.sweep.history import Archive
from bench.utils import machine, redact, stats

NAMED = compose.every_group()["sweep"]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results"


@pytest.fixture
def words(results: Path) -> list[str]:
    """What every sweep below has in common: quick to compose, and records in a folder of its own."""
    return ["model=random", f"paths.results={results}", "hardware=cpu_fp32", "hardware.threads=1"]


NOISY = {"valid": False, "reasons": ["Other programs kept 1.0 of 2 cores busy."], "warnings": [], "noisy": True}
WRONG = {"valid": False, "reasons": ["3 tokens are wrong.", "So are 4."], "warnings": [], "noisy": False}


def record(cfg: RunConfig, status: str = "finished", verdict: dict[str, Any] | None = None, **manifest: Any) -> Path:
    """A run folder as a run of this configuration on this machine leaves it, without samples."""
    facts: dict[str, Any] = {
        "method": cfg.method, "hardware": machine.facts(torch.device("cpu")) | {"threads": 1},
        "dtype": "float32", "n_pairs": 10, "n_done": 10, "seconds": {"loop": 50.0, "warmup": 10.0, "timed": 49.0},
        "model": {"revision": "r"}, "dataset": {"revision": {"content": "c"}},
    }  # fmt: skip
    error = manifest.pop("error", None)
    facts |= manifest
    config = yaml.safe_dump(redact.tree({key: value for key, value in cfg.to_dict().items() if key != "paths"}))
    root, name = Path(cfg.paths.results), run_id(cfg, lookup.resolved(facts))
    with RunFolder.create(root, name, facts, config) as folder:
        folder.update(status=status, error=error)
        if verdict:
            folder.write_summary({"verdict": verdict})
    return root / name


def planned(words: list[str], **options: Any) -> sweep.Plan:
    return sweep.make(words, sweep.Options(**options))


def states(plan: sweep.Plan) -> dict[str, str]:
    return {job.label: job.state for job in plan.jobs}


# ------------------------------------------------------------------------------------------------------ the plan


def test_jobs_are_known_by_what_they_differ_in(words: list[str]) -> None:
    plan = planned([*words, "method=autoregressive,prompt_lookup", "seed=1,2"])
    assert states(plan) == dict.fromkeys(
        [f"method={m} seed={s}" for m in ("autoregressive", "prompt_lookup") for s in (1, 2)], "new"
    )
    assert [job.words for job in plan.to_run] == [job.words for job in plan.jobs]
    assert plan.text().splitlines()[0] == "Plan: 4 jobs: 4 new. To run: 4, no earlier record tells how long."


def test_every_state_is_found_in_the_records_and_told(words: list[str], results: Path) -> None:
    words = [*words, "seed=1,2,3,4", "method=prompt_lookup,hf_prompt_lookup", "batch_size=2"]
    jobs = {job.label: job.cfg for job in planned(words).jobs}
    record(jobs["seed=1 method=prompt_lookup"])
    record(jobs["seed=2 method=prompt_lookup"], "failed", error="Traceback\n  x\nValueError: odd\n", n_done=0)
    record(jobs["seed=3 method=prompt_lookup"], "interrupted", n_done=5)
    plan = planned(words)
    assert states(plan) == {
        "seed=1 method=prompt_lookup": "done",
        "seed=2 method=prompt_lookup": "failed",
        "seed=3 method=prompt_lookup": "cut",
        "seed=4 method=prompt_lookup": "new",
        **{f"seed={seed} method=hf_prompt_lookup": "incompatible" for seed in (1, 2, 3, 4)},
    }
    lines = plan.text().splitlines()
    assert lines[0] == (
        "Plan: 8 jobs: 1 new, 1 cut, 1 failed, 1 done, 4 incompatible. To run: 3, about 2 min by earlier records."
    )
    assert "  failed       seed=2 method=prompt_lookup  about 60 s  (ValueError: odd)" in lines
    assert "  cut          seed=3 method=prompt_lookup  about 30 s" in lines
    why = "  incompatible 4 jobs: batch_size must be at most 1 for method=hf_prompt_lookup, got 2."
    assert lines[lines.index(why) + 1].strip().startswith("seed=1 method=hf_prompt_lookup, seed=2 ")
    assert not any(line.startswith("  done") for line in lines)
    assert any(line.startswith("  done") for line in plan.text(every=True).splitlines())


@pytest.mark.parametrize(
    ("resume", "runs", "fresh"),
    [
        ("auto", {"new", "cut", "failed", "noisy"}, False),
        ("unfinished", {"new", "cut", "failed"}, False),
        ("never", {"new", "cut", "failed", "noisy"}, True),
        ("force", {"new", "cut", "failed", "noisy", "invalid", "done"}, True),
        ("only_failed", {"cut", "failed", "noisy"}, False),
    ],
)
def test_the_words_of_resume(resume: Any, runs: set[str], fresh: bool, words: list[str]) -> None:
    words = [*words, "seed=1,2,3,4,5,6"]
    jobs = planned(words).jobs
    for job, status in zip(jobs, ("finished", "failed", "interrupted"), strict=False):
        record(job.cfg, status)
    record(jobs[3].cfg, verdict=NOISY)
    record(jobs[4].cfg, verdict=WRONG)
    assert {job.state for job in planned(words, resume=resume).to_run} == runs
    assert sweep.Options(resume=resume).fresh is fresh


def test_invalid_is_a_state_with_its_reason_and_its_exit_code(
    use_run: Any, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    noisy, wrong = (job.cfg for job in planned([*words, "seed=1,2"]).jobs)
    record(noisy, verdict=NOISY)
    record(wrong, verdict=WRONG)
    ran: list[int] = []
    use_run(lambda cfg, *, fresh, **_: ran.append(cfg.seed) or outcome(cfg))
    assert cli.main(["-m", *words, "seed=1,2", "resume=unfinished"]) == 3 and not ran
    text = capsys.readouterr().out
    assert "Plan: 2 jobs: 2 invalid. Nothing to run." in text
    assert "  invalid      seed=2  (3 tokens are wrong. And 1 more.)" in text
    assert cli.main(["-m", *words, "seed=1,2"]) == 3 and ran == [1], "noise is a reason to repeat, an error is not"


def test_plan_words_make_a_single_run_a_plan_of_one(
    use_run: Any, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[bool] = []
    use_run(lambda cfg, *, fresh, **_: seen.append(bool(fresh)) or outcome(cfg))
    assert cli.main([*words, "dry_run=true"]) == 0 and not seen
    assert capsys.readouterr().out.startswith("Plan: 1 job: 1 new. To run: 1")
    assert cli.main([*words, "resume=force"]) == 0 and seen == [True]


def test_methods_that_are_refused_for_one_reason_share_a_line(words: list[str]) -> None:
    lines = planned([*words, "method=nat,glat,bild,suffix"]).text().splitlines()
    assert lines[0].startswith("Plan: 4 jobs: 1 new, 3 incompatible.")
    assert "  incompatible 2 jobs: method=... needs an encoder-decoder model, and random is a causal model." in lines
    assert "method=nat, method=glat" in " ".join(lines)
    assert "method=bild needs a draft model with the vocabulary of random, got none." in " ".join(
        " ".join(lines).split()
    )


def test_a_killed_run_is_cut_and_one_being_written_is_left_alone(words: list[str]) -> None:
    words = [*words, "seed=1,2"]
    killed, alive = (record(job.cfg, "running", n_done=0) for job in planned(words).jobs)
    (killed / ".lock").touch()
    handle = os.open(alive / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        plan = planned(words, resume="force")
    finally:
        os.close(handle)
    assert states(plan) == {"seed=1": "cut", "seed=2": "running"}
    assert [job.label for job in plan.to_run] == ["seed=1"]
    assert "another process writes it" in plan.text()


def test_the_order_is_random_and_the_same_for_the_same_seed(words: list[str]) -> None:
    words = [*words, "seed=range(0,20)"]
    orders = [[job.label for job in planned(words, shuffle_seed=s).to_run] for s in (3, 3, 4, None)]
    assert orders[0] == orders[1] and sorted(orders[0]) == sorted(orders[3])
    assert len({tuple(order) for order in orders}) == 3
    wanted = orders[3].copy()
    random.Random(3).shuffle(wanted)
    assert orders[0] == wanted


def test_time_is_estimated_by_the_closest_records(words: list[str]) -> None:
    jobs = [job.cfg for job in planned([*words, "method=prompt_lookup,suffix", "seed=1,2"]).jobs]
    record(jobs[0], seconds={"loop": 100.0, "timed": 90.0, "scoring": 5.0, "agreement": 20.0})
    found = {job.label: job.seconds for job in planned([*words, "method=prompt_lookup,suffix", "seed=3"]).jobs}
    assert found == {"method=prompt_lookup": 120.0, "method=suffix": 120.0}
    record(jobs[2], seconds={"loop": 40.0})
    found = {job.label: job.seconds for job in planned([*words, "method=suffix,lookahead", "seed=3"]).jobs}
    assert found == {"method=suffix": 40.0, "method=lookahead": 80.0}
    assert planned([*words, "max_new_tokens=5"]).jobs[0].seconds is None


@pytest.mark.parametrize(
    "change",
    [{"dtype": "bfloat16"}, {"hardware": {"cpu": "another", "threads": 1, "gpu": None}}, {"part": {"sha256": "0"}}],
)
def test_records_of_another_machine_or_part_are_no_records_of_the_job(words: list[str], change: dict[str, Any]) -> None:
    (job,) = planned(words).jobs
    record(job.cfg, **change)
    assert planned(words).jobs[0].state == "new"
    record(job.cfg)
    assert planned(words).jobs[0].state == "done"


def test_records_of_a_processor_of_the_same_name_with_other_instructions_are_no_records_of_the_job(
    words: list[str],
) -> None:
    (job,) = planned(words).jobs
    here = machine.facts(torch.device("cpu"))
    other = "AVX2" if str(here["vectors"]).endswith("BF16") else "AVX512_BF16"
    record(job.cfg, hardware=here | {"vectors": other})
    assert planned(words).jobs[0].state == "new"
    record(job.cfg, hardware=here)
    assert planned(words).jobs[0].state == "done"


def test_the_machine_is_not_asked_where_the_jobs_run_elsewhere(words: list[str], tmp_path: Path) -> None:
    (job,) = planned(words).jobs
    record(job.cfg, hardware={"cpu": "another", "threads": 64, "gpu": None})
    assert Archive.read(Path(job.cfg.paths.results), here=False).state(job.cfg)[0] == "done"


def test_files_of_one_name_are_told_apart(words: list[str], tmp_path: Path) -> None:
    files = [tmp_path / folder / "prompts.jsonl" for folder in "ab"]
    for number, file in enumerate(files):
        file.parent.mkdir()
        file.write_text(json.dumps({"question_id": number, "category": "chat", "turns": ["Hello"]}) + "\n")
    first, second = planned([*words, "dataset=jsonl", f"dataset.path={files[0]},{files[1]}"]).jobs
    record(first.cfg, dataset={"revision": {"content": _content(files[0])}})
    again = planned([*words, "dataset=jsonl", f"dataset.path={files[0]},{files[1]}"])
    assert [job.state for job in again.jobs] == ["done", "new"]


def _content(file: Path) -> str:
    task = tasks.Jsonl(str(file))
    task.load()
    return str(task.revision["content"])


def test_a_record_that_cannot_be_read_is_passed_over(words: list[str], results: Path) -> None:
    (job,) = planned(words).jobs
    broken = record(job.cfg)
    (broken / "config.yaml").write_text("a: [")
    assert planned(words).jobs[0].state == "new"


def test_a_long_plan_is_shortened(words: list[str]) -> None:
    plan = planned([*words, "seed=range(0,60)"])
    lines = plan.text().splitlines()
    assert len(lines) == 42 and lines[-1] == "  ... and 20 more (dry_run=true names all)"
    assert len(plan.text(every=True).splitlines()) == 61


KINDS = [  # 2,000 jobs each, or as many as there are methods
    ["method=prompt_lookup,suffix", "seed=range(0,50)", "method.gamma=range(1,21)"],
    ["method=glob(*)", "seed=range(0,40)"],
    ["dataset=mtbench,gsm8k,demo,xsum", "sampling=greedy,sample", "measure=quick,full", "batch_size=1,2,4,8,16",
     "seed=range(0,25)"],
]  # fmt: skip


@pytest.mark.parametrize("swept", KINDS, ids=" ".join)
def test_2000_jobs_are_composed_from_few_files(
    words: list[str], swept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts what takes time, so that no other program can make this fail: compositions by Hydra, and parsed words."""
    composed, parsed, found = [], [], [compose._compose, compose._check_words]
    monkeypatch.setattr(compose, "_compose", lambda words: composed.append(words) or found[0](words))
    monkeypatch.setattr(compose, "_check_words", lambda words: parsed.extend(words) or found[1](words))
    jobs = compose.compose_jobs([*words, *swept])
    assert len(jobs) >= 1400
    different = {word for job, _ in jobs for word in job}
    files = {name.stem for name in (conf_dir() / "method").glob("*.yaml") if "\ndefaults:" in name.read_text()}
    inherited = len(files) if "method=glob(*)" in swept else 0
    limited = 4 if "measure=quick,full" in swept else 0  # the data sets of which measure=quick takes ten prompts
    assert len(composed) <= 2 + inherited + limited, "plain files are read, not composed"
    assert len(parsed) <= len(words) + len(swept) + len(different), "each word once"


def test_the_methods_of_a_folder_of_ones_own_can_be_swept(words: list[str], tmp_path: Path) -> None:
    own = tmp_path / "conf" / "method"
    own.mkdir(parents=True)
    text = (conf_dir() / "method" / "prompt_lookup.yaml").read_text().replace("name: prompt_lookup", "name: echo")
    (own / "echo.yaml").write_text(text)
    searched = f"hydra.searchpath=[file://{tmp_path / 'conf'}]"
    options, rest = sweep.read_words([*words, "method=echo,suffix", "seed=1,2", searched])
    plan = sweep.make(rest, options)
    assert [job.cfg.method["name"] for job in plan.jobs] == ["echo", "echo", "suffix", "suffix"]
    for job in plan.jobs:
        assert compose.compose(job.words) == job.cfg, "a job finds its method by its own words"


@pytest.mark.parametrize(
    "word, said",
    [
        ("hydra.searchpath=[/no/such/folder]", "hydra.searchpath must name folders that exist, got /no/such/folder."),
        ("method=glob(zzz*)", "No method matches 'method=glob(zzz*)'. (python -m bench list methods)"),
        ("hydra.sweeper.params=1", "is not supported: use resume, shuffle_seed and cluster=NAME"),
    ],
)
def test_words_of_hydra_that_lead_nowhere_are_refused(words: list[str], word: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        options, rest = sweep.read_words([*words, "seed=1,2", word])
        sweep.make(rest, options)
    assert said in str(refused.value)


@pytest.mark.parametrize("seconds, text", [(7.4, "7 s"), (89.0, "89 s"), (720.0, "12 min"), (12600.0, "3.5 h")])
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert sweep.duration(seconds) == text


# ------------------------------------------------------------------------------------- composing as Hydra would


@pytest.mark.parametrize(
    "swept",
    [
        ["method.gamma=1,2"],
        ["dataset.limit=null,3", "measure=quick"],
        ["measure=quick,full", "dataset.limit=5"],
        ["measure=quick", "dataset=demo,mtbench"],
        ["measure=quick,full", "dataset=demo,mtbench", "method=eagle,suffix"],
        ["hardware.device=cpu,auto", "sampling.temperature=0,1,0.5"],
        ["method=speculative_sampling", "method.skip_mlp=[1],[2,3],[]"],
        ["model=hf", "model.name=some/model,'other/model'"],
        ["dataset=jsonl", "dataset.path=a.jsonl,b.jsonl"],
        ["++method.gamma=1,2"],
        ["seed=1,${max_new_tokens}", "max_new_tokens=7"],
        ["tracker=none,wandb", "max_context=null,99"],
        ["method=glob(*)", "seed=3"],
        ["dataset=glob(m*)", "dataset.limit=2", "sampling=glob(*)"],
        ["hardware=glob(*)", "hardware.threads=1", "measure=glob(*)", "++measure.repeats=2"],
        ["model=random,smollm2", "model.weights=int4"],
    ],
    ids=" ".join,
)
def test_jobs_are_composed_as_hydra_composes_them_one_by_one(swept: list[str]) -> None:
    jobs = compose.compose_jobs(swept)
    assert len(jobs) > 1
    for words, cfg in jobs:
        assert cfg == compose.compose(words), words


def test_several_command_lines_are_composed_as_hydra_composes_each() -> None:
    lines = [
        ["method=suffix", "dataset=mtbench"],
        ["method=suffix", "dataset=mtbench", "measure=quick", "method.gamma=3"],
        ["method=eagle", "dataset=gsm8k", "measure=quick", "seed=1"],
    ]
    assert compose.compose_each(lines) == [compose.compose(words) for words in lines]
    assert compose.compose_each([]) == []


@pytest.mark.parametrize(
    ("swept", "message"),
    [
        (["seed=1,x"], "seed must be a whole number, got 'x' (text)"),
        (["method.gama=1,2"], "Unknown setting 'method.gama'. Did you mean 'method.gamma'?"),
        (["method=autoregressive,prompt_lookup", "method.gamma=1,2"], "Unknown setting 'method.gamma'"),
        (["dataset=jsonl", "seed=1,2"], "dataset.path must be set"),
    ],
    ids=str,
)
def test_a_mistake_in_any_job_stops_the_sweep(swept: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        compose.compose_jobs(swept)
    assert message in str(caught.value)


# ------------------------------------------------------------------------------------------------- incompatible


def obstacle(*words: str) -> str:
    return " ".join(preconditions.check(compose.compose(list(words))))


def test_what_runs_has_no_obstacle() -> None:
    assert not obstacle()
    assert not obstacle("method=hf_prompt_lookup")
    assert not obstacle("sampling=sample", "model=random", "dataset=mtbench")


@pytest.mark.parametrize("layers", ["4_4", "6_1_distilled", "4_4_distilled_calm"])
def test_the_translation_models_of_the_project_are_found(layers: str, tmp_path: Path) -> None:
    words = ["method=calm", "method.head=lens", "method.exits=[1]"] if layers.endswith("calm") else []
    assert not obstacle(f"model=multi30k_{layers}", "dataset=multi30k", f"paths.cache={tmp_path}", *words)


@pytest.mark.parametrize("layers", ["6_1", "12_1"])
def test_a_translation_model_that_is_not_shipped_names_its_command(layers: str, tmp_path: Path) -> None:
    found = obstacle(f"model=multi30k_{layers}", "dataset=multi30k", f"paths.cache={tmp_path}")
    assert found and "bench train method=teacher" in found


def test_a_model_without_its_difference_names_the_command(tmp_path: Path) -> None:
    words = ("model=smollm2_layerskip", "method=calm", "method.head=lens", "dataset=mtbench")
    found = obstacle(*words, f"paths.cache={tmp_path}")
    assert found and "python -m bench train method=exit_model model=smollm2 writes" in found
    assert "is not made yet" in obstacle(*words, f"model.folder={tmp_path}")
    found = obstacle("model=smollm2_layerskip", "dataset=multi30k", f"paths.cache={tmp_path}")
    assert "needs an encoder-decoder model, and smollm2_layerskip is a causal model" in found


def test_a_missing_part_is_told_with_the_command_that_makes_it(tmp_path: Path) -> None:
    found = obstacle("method=medusa", "model=random", f"paths.cache={tmp_path}")
    assert found.startswith("method=medusa has no checkpoint for model=random") and "bench train method=medusa" in found


@pytest.mark.parametrize("method", ["blockwise", "calm", "eagle", "hydra_heads", "rest", "self_speculative"])
def test_methods_with_parts_are_asked(method: str, tmp_path: Path) -> None:
    found = obstacle(f"method={method}", "model=random", f"paths.cache={tmp_path}")
    assert found and "bench train" in found


def test_a_method_that_does_without_its_part_by_its_settings_may_run(tmp_path: Path) -> None:
    place = ("model=random", f"paths.cache={tmp_path}")
    assert not obstacle("method=self_speculative", "method.layer_exit=2", *place)
    assert not obstacle("method=medusa", "method.checkpoint=some/heads", *place)


def test_kinds_must_fit() -> None:
    assert obstacle("dataset=multi30k").startswith(
        "dataset=multi30k needs an encoder-decoder model, and smollm2 is a causal model."
    )
    said = "method=nat needs an encoder-decoder model, and smollm2 is a causal model."
    assert obstacle("method=nat").startswith(said)
    assert not obstacle("dataset=multi30k", "model=hf", "model.name=nobody/unknown")  # its files will tell


def test_sampling_that_is_refused_is_found_without_the_model() -> None:
    found = obstacle("method=hf_beam", "sampling=sample", "model=random")
    assert found.startswith("method=hf_beam needs sampling=greedy, got sampling.temperature=")
    calibrated = obstacle("method=calm", "method.head=lens", "method.calibration.tolerance=0.1", "sampling=sample")
    assert calibrated.startswith("method=calm with a calibration needs sampling=greedy")
    assert not obstacle("method=calm", "method.head=lens", "sampling=sample")
    assert obstacle("method=flashspec", "sampling.top_k=5") == "sampling.top_k must be 0 for method=flashspec, got 5."


def test_hardware_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "finds no GPU" in str(obstacle("hardware=cuda_bf16"))
    monkeypatch.setattr("methods.external.transformers_generate.HFCompiled.needs_gpu", True)
    assert obstacle("method=hf_compiled").startswith("method=hf_compiled needs a GPU, got device cpu.")


# ------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    ("given", "options", "rest"),
    [
        (["seed=1"], sweep.Options(), ["seed=1"]),
        (["resume=force", "shuffle_seed=3", "dry_run=true"], sweep.Options("force", 3, True), []),
        (["shuffle_seed=null", "dry_run=false"], sweep.Options(), []),
    ],
)
def test_words_of_the_sweep_are_taken_out(given: list[str], options: sweep.Options, rest: list[str]) -> None:
    assert sweep.read_words(given) == (options, rest)


def test_fresh_forces() -> None:
    assert sweep.read_words([], fresh=True)[0].resume == "force"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "resume=atuo",
            "must be one of auto, unfinished, never, force, only_failed, got 'atuo' (text). Did you mean 'auto'?",
        ),
        ("shuffle_seed=x", "shuffle_seed must be a whole number or null, got 'x' (text)"),
        ("dry_run=yes", "dry_run must be true or false, got 'yes' (text)"),
        ("sweep=smok", "Unknown sweep 'smok'. Did you mean 'smoke'? (python -m bench list sweeps)"),
        ("+sweep=x", "Unknown sweep 'x'."),
        ("hydra/sweeper=optuna", "is not supported: use resume"),
    ],
)
def test_wrong_words_are_one_message(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-m", word]) == 2
    out, err = capsys.readouterr()
    assert message in err and (out, len(err.splitlines())) == ("", 1)


def outcome(cfg: RunConfig, valid: bool = True) -> Any:
    record(cfg)
    return types.SimpleNamespace(verdict=types.SimpleNamespace(valid=valid))


def test_a_dry_run_runs_nothing(use_run: Any, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    use_run(lambda cfg, *, fresh, **_: pytest.fail("was run"))
    assert cli.main(["-m", *words, "seed=1,2", "dry_run=true"]) == 0
    limit = "Time limit of each job: 24.0 h (cluster.job_timeout, in seconds)."
    assert capsys.readouterr().out.splitlines()[1:] == ["  new          seed=1", "  new          seed=2", limit]


def test_a_second_call_runs_what_is_left(use_run: Any, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[int] = []

    def run(cfg: RunConfig, *, fresh: bool, **_: Any) -> Any:
        ran.append(cfg.seed)
        if ran == [1, 2]:
            record(cfg, "failed", error="RunFailed: The disk is full.", n_done=0)
            raise RunFailed("The disk is full.")
        return outcome(cfg)

    use_run(run)
    command = ["-m", *words, "seed=1,2,3"]
    assert cli.main(command) == 1
    out, err = capsys.readouterr()
    assert "[3/3]" in out and "1 of 3 runs failed:" in err
    assert err.splitlines()[-1].endswith("seed=2: The disk is full.")
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert ran == [1, 2, 3, 2] and "Plan: 3 jobs: 1 failed, 2 done. To run: 1" in out
    assert cli.main(command) == 0 and ran == [1, 2, 3, 2]
    assert capsys.readouterr().out == "Plan: 3 jobs: 3 done. Nothing to run.\n"


def test_incompatible_jobs_are_never_run(use_run: Any, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    ran = []
    use_run(lambda cfg, *, fresh, **_: ran.append(cfg.method["name"]) or outcome(cfg))
    assert cli.main(["-m", *words, "method=prompt_lookup,hf_prompt_lookup", "batch_size=3"]) == 0
    assert ran == ["prompt_lookup"] and "batch_size must be at most 1" in capsys.readouterr().out
    assert cli.main(["-m", *words, "method=hf_prompt_lookup,hf_assisted", "batch_size=3"]) == 2
    assert ran == ["prompt_lookup"]


@pytest.mark.parametrize(("word", "fresh"), [("resume=auto", False), ("resume=never", True), ("--fresh", True)])
def test_earlier_records_are_kept_or_forgotten(use_run: Any, words: list[str], word: str, fresh: bool) -> None:
    seen = []
    use_run(lambda cfg, *, fresh, **_: seen.append(fresh) or outcome(cfg))
    assert cli.main(["-m", word, *words]) == 0
    assert seen == [fresh]


# ------------------------------------------------------------------------------------------------- named sweeps


def test_the_named_sweeps() -> None:
    early_exit = {"threshold", "frontier", "frontier_static", "frontier_exact"}
    early_exit |= {"early_exit_variants", "early_exit_free", "early_exit_verified", "early_exit_unverified"}
    assert (
        set(NAMED)
        == {
            "smoke",
            "all_methods",
            "draft_length",
            "batch",
            "batch_refilled",
            "pareto",
            "translation",
            "translation_table",
            "translation_controls",
            "translation_exits",
            "peers",
            "chat",
            "league",
            "noise",
        }
        | {"rivals", "rivals_openvino", "rivals_translation", "rivals_int4", "rivals_batch"}
        | {"translation_draft_model", "contexts", "full_chat", "full_spec_bench"}
        | {"temperatures", "temperatures_block", "temperatures_block_eagle"}
        | early_exit
    )
    assert "sweep" not in compose.groups(), "a sweep is no part of a run"


@pytest.mark.parametrize("name", NAMED)
def test_a_named_sweep_composes_and_names_methods_that_exist(name: str, results: Path) -> None:
    _, words = sweep.read_words([f"sweep={name}", f"paths.results={results}"])
    plan = planned(words)
    assert len(plan.jobs) > 1
    assert {job.cfg.method["name"] for job in plan.jobs} <= set(compose.groups()["method"])


def test_several_sweeps_are_one_plan_and_what_they_share_runs_once(results: Path) -> None:
    given = ["sweep=rivals,peers", "method.gamma=3", f"paths.results={results}", "hardware=cpu_fp32"]
    with pytest.raises(UserError, match="gamma"):
        planned(sweep.read_words(given)[1])
    words = sweep.read_words([word for word in given if "gamma" not in word])[1]
    alone = [planned(sweep.read_words([f"sweep={name}", *words[1:]])[1]) for name in ("rivals", "peers")]
    assert [job.cfg for job in planned(words).jobs] == [job.cfg for plan in alone for job in plan.jobs]
    assert len({job.label for job in planned(words).jobs}) == len(planned(words).jobs)
    twice = planned(sweep.read_words(["sweep=peers,smoke", "method=suffix", "dataset=mtbench", *words[1:]])[1])
    assert len(twice.jobs) == len({job_id(job.cfg) for job in twice.jobs})
    with pytest.raises(UserError, match="pears"):
        sweep.read_words(["sweep=rivals,pears"])


def test_batches_are_enough_for_an_interval_at_every_size(results: Path) -> None:
    words = sweep.read_words(["sweep=batch", "method=autoregressive", f"paths.results={results}"])[1]
    asked = {job.cfg.batch_size: job.cfg.dataset for job in planned(words).jobs}
    assert len(asked) > 1 and {dataset["name"] for dataset in asked.values()} == {"mtbench"}
    assert all(dataset["limit"] <= 80 for dataset in asked.values()), "MT-bench has no more conversations"
    assert all(dataset["limit"] // rows >= stats.FEWEST_PAIRS for rows, dataset in asked.items())


def test_arms_without_heads_of_their_own_are_measured_as_their_files_have_them(results: Path) -> None:
    words = ["sweep=chat", "dataset.limit=3", f"paths.results={results}", "hardware=cpu_fp32"]
    plan = planned(sweep.read_words(words)[1])
    drafts = [job.cfg.method["draft"] for job in plan.jobs if job.cfg.method["name"] == "llama_cpp"]
    assert drafts == ["none", "prompt_lookup"] and len({job.label for job in plan.jobs}) == len(plan.jobs)
    assert {job.cfg.dataset["limit"] for job in plan.jobs} == {3}
    several = sweep.read_words([*words, "model=smollm2,random"])[1]
    assert len(planned(several).jobs) == 2 * len(plan.jobs)


def test_lengths_of_the_contexts_leave_room_for_the_answer_and_longer_ones_are_refused(results: Path) -> None:
    words = ["sweep=contexts", "method=autoregressive", f"paths.results={results}", "hardware=cpu_fp32"]
    assert set(states(planned(sweep.read_words(words)[1])).values()) == {"new"}
    found = planned(sweep.read_words([*words, "dataset.fill_to=8064,8065"])[1])
    assert states(found) == {"dataset.fill_to=8064": "new", "dataset.fill_to=8065": "incompatible"}
    assert [job.cfg.dataset["limit"] for job in found.jobs] == [10, 10]


def test_a_model_without_a_module_is_left_out_with_the_method_that_needs_one(results: Path) -> None:
    plan = planned([*sweep.read_words(["sweep=all_methods", f"paths.results={results}"])[1]])
    (job,) = (job for job in plan.jobs if job.cfg.method["name"] == "mtp")
    assert job.state == "incompatible" and "ships a module for multi-token prediction, got smollm2" in plan.text()
    hub = planned(["method=mtp,suffix", "model=hf", "model.name=owner/model", f"paths.results={results}"])
    assert set(states(hub).values()) == {"new"}


def test_temperatures_leave_out_what_is_greedy_by_definition(results: Path) -> None:
    words = ["sweep=temperatures", "method=autoregressive,free,hf_beam", f"paths.results={results}"]
    found = states(planned(sweep.read_words([*words, "model=multi30k_4_4", "dataset=multi30k"])[1]))
    assert {found[f"method=hf_beam sampling.temperature={at}"] for at in ("0.7", "1.0")} == {"incompatible"}
    assert found["method=hf_beam sampling.temperature=0"] != "incompatible"


def test_blocks_are_judged_beside_tokens(results: Path) -> None:
    for name in ("temperatures_block", "temperatures_block_eagle"):
        plan = planned(sweep.read_words([f"sweep={name}", f"paths.results={results}", "hardware=cpu_fp32"])[1])
        assert [job.cfg.method["block"] for job in plan.jobs] == [False, False, True, True]
        assert {job.cfg.sampling.temperature for job in plan.jobs} == {0.7, 1.0}


@pytest.mark.parametrize("name", NAMED)
def test_a_named_sweep_is_a_file_that_hydra_reads_too(name: str) -> None:
    text = (conf_dir() / "sweep" / f"{name}.yaml").read_text()
    assert text.startswith("# @package _global_\n# ")
    assert list(yaml.safe_load(text)["hydra"]["sweeper"]) == ["params"]


def test_list_and_show_know_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "sweeps"]) == cli.main(["show", "sweep/smoke"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^smoke +Whether everything runs", out, re.MULTILINE) and "method: autoregressive," in out


@pytest.mark.parametrize("word", ["sweep=smoke", "+sweep=smoke"])
def test_a_named_sweep_needs_no_m_and_takes_further_settings(
    word: str, use_run: Any, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []
    use_run(lambda cfg, *, fresh, **_: ran.append(cfg) or outcome(cfg))
    assert cli.main([word, f"paths.results={results}", "method=suffix,prompt_lookup", "max_new_tokens=5"]) == 0
    assert [(cfg.method["name"], cfg.max_new_tokens, cfg.dataset["limit"]) for cfg in ran] == [
        ("suffix", 5, 3),
        ("prompt_lookup", 5, 3),
    ]


def test_a_real_sweep_runs_skips_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against the real program: what the plan takes for done is what the run takes for done."""
    command = ["sweep=smoke", "method=autoregressive,prompt_lookup", "hardware=cpu_fp32", "hardware.threads=1"]
    command += [f"paths.results={tmp_path}", "measure.cost_curve=false", "measure.bootstrap_samples=100"]
    assert cli.main(command) in (0, 3)
    folders = {path.name: json.loads((path / "manifest.json").read_text()) for path in tmp_path.glob("*-*")}
    assert sorted(name.split("-")[0] for name in folders) == ["autoregressive", "prompt_lookup"]
    assert {manifest["status"] for manifest in folders.values()} == {"finished"}
    capsys.readouterr()
    assert cli.main([*command, "resume=unfinished"]) in (0, 3)
    out = capsys.readouterr().out
    assert re.match(r"Plan: 2 jobs: (2 done|2 invalid|1 done, 1 invalid)\. Nothing to run\.\n", out)
    assert out.count("prompt_lookup") >= 1, "the table of the sweep is printed again"
