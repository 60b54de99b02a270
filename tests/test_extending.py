"""The examples of docs/extending.md are complete: they are installed, trained, held to the contract and run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

import bench.tasks
import methods.speculative
from bench import cli
from bench.config import compose
from bench.contract import checks
from bench.train import command as train
from methods.engine.sampling import Sampling
from tests import test_contract

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = {
    name: textwrap.dedent(body).strip() + "\n"
    for name, body in re.findall(r"`([\w./]+)`[^\n`]*:\n\n((?:(?: {4}[^\n]*)?\n)+)", TEXT)
}
COMMANDS = [line.split("python -m bench ")[1].split() for line in TEXT.splitlines() if re.match(r" {4}python -m", line)]
PACKAGE = ("echo_method.py", "pyproject.toml", "conf/method/echo.yaml")
SMALL = ["max_new_tokens=8", "hardware=cpu_fp32", "hardware.threads=1", "measure.bootstrap_samples=100"]
SMALL += ["measure.cost_curve=false"]


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(FILES[name], encoding="utf-8")


def test_the_page_keeps_what_its_table_promises() -> None:
    modules = [name for name in FILES if name.endswith(".py")]
    assert modules == [
        "bench/tasks/boolq.py",
        "echo_method.py",
        "methods/speculative/bigram.py",
        "tests/test_contract.py",
    ]
    assert len([name for name in FILES if "boolq" in name]) == 2
    assert len([name for name in FILES if "bigram" in FILES[name]]) == 4


# ------------------------------------------------------------------------------------------------- a separate package


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example as pip would install it: module, metadata with its entry point, and the YAML file."""
    site = tmp_path_factory.mktemp("site")
    write(site, *PACKAGE)
    (entry,) = re.findall(r'entry-points\."decodebench\.methods"\]\n(\w+ = )"([\w:]+)"', FILES["pyproject.toml"])
    info = site / "echo_method-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-method\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[decodebench.methods]\n{''.join(entry)}\n")
    return site


def run(package: Path, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(package), str(ROOT)])
    command = [sys.executable, "-m", "bench", *words]
    environment = os.environ | {"PYTHONPATH": path, "DECODEBENCH_HOME": str(cwd or package)}
    return subprocess.run(command, cwd=cwd or ROOT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] == "check-method"], ids=" ".join)
def test_a_method_of_another_package_keeps_the_contract(
    words: list[str], package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(package)
    assert cli.main(words) == 0, capsys.readouterr()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["ok"] * 9


def test_a_method_of_another_package_runs(package: Path, tmp_path: Path) -> None:
    (words,) = [words for words in COMMANDS if words[0] == "method=echo"]
    here = [word.replace("/ABSOLUTE/PATH", str(package)) for word in words]
    done = run(package, *here, "model=random", "dataset.limit=3", *SMALL, cwd=tmp_path)
    assert done.returncode in (0, 3), done.stdout + done.stderr  # 3: a loaded machine measures nothing valid
    assert "echo vs autoregressive" in done.stdout
    assert [folder.name.split("-")[0] for folder in (tmp_path / "results").iterdir()] == ["echo"]


# --------------------------------------------------------------------------------------------------- in this project


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project with the files of the page in it; conf/ is a copy made of links."""
    write(tmp_path, *(name for name in FILES if name not in PACKAGE))
    for folder in (ROOT / "conf").iterdir():
        if folder.is_file():
            (tmp_path / "conf" / folder.name).symlink_to(folder)
            continue
        (tmp_path / "conf" / folder.name).mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            (tmp_path / "conf" / folder.name / file.name).symlink_to(file)
    monkeypatch.setattr(compose, "conf_dir", lambda: tmp_path / "conf")
    for module, name in ((methods.speculative, "methods/speculative"), (bench.tasks, "bench/tasks")):
        monkeypatch.setattr(module, "__path__", [*module.__path__, str(tmp_path / name)])
    for name in ("methods.speculative.bigram", "bench.tasks.boolq"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_model_is_one_file(project: Path) -> None:
    written = yaml.safe_load(FILES["conf/model/qwen3_small.yaml"])
    assert compose.compose(["model=qwen3_small"]).model == written | {"weights": "full", "parallel": 1}


def test_a_data_set_is_two_files(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    rows = [{"question": f"is {number} even", "answer": number % 2 == 0, "passage": "Numbers."} for number in range(6)]
    data = project / "public" / "boolq" / "validation.jsonl"
    data.parent.mkdir(parents=True)
    data.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("DECODEBENCH_DATA", str(project / "public"))
    (words,) = [words for words in COMMANDS if words[0] == "dataset=boolq"]
    assert cli.main([*words, *SMALL, f"paths.results={project}/results"]) in (0, 3)
    assert "boolq: 2 prompts" in capsys.readouterr().out


def test_a_trained_method_is_four_files(project: Path, capsys: pytest.CaptureFixture) -> None:
    (project / "corpus.jsonl").write_text('{"prompt": "Count", "answer": "ababababab"}\n' * 4)
    paths = [f"paths.results={project}/results", f"paths.cache={project}/cache"]
    (words,) = [words for words in COMMANDS if words[:2] == ["train", "method=bigram"]]
    here = [word.replace("corpus=dolly", f"corpus={project}/corpus.jsonl") for word in words[1:]]
    assert train.main([*here, "hardware=cpu_fp32", *paths]) == 0
    (words,) = [words for words in COMMANDS if words[0] == "method=bigram"]
    assert cli.main([*words, "dataset.limit=2", *SMALL, *paths]) in (0, 3)
    assert "bigram vs autoregressive" in capsys.readouterr().out


def test_a_trained_method_keeps_the_contract(project: Path) -> None:
    names = vars(test_contract) | {"DECODERS": {}}
    exec(FILES["tests/test_contract.py"], names)
    (row,) = names["DECODERS"].values()
    target = checks.tiny_target(vocab_size=8, seed=3)
    checks.check_greedy_identity(row.make, target)
    checks.check_batch(row.make, target)
    checks.check_counters(row.make, target)
    checks.check_sampling(row.make, target, Sampling(1.0), rows=test_contract.DRAWS)
