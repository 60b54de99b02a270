"""The README tells the truth: its tables come from the committed records, its commands exist and compose."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from bench import cli, readme
from bench.config import compose, instantiate
from bench.cost import command as cost
from bench.lossless import command as lossless
from bench.sweep import plan
from bench.train import command as train

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PROSE = re.sub(r"<!-- (?:table|leaderboard|lossless).*?<!-- end -->", "", TEXT, flags=re.DOTALL)
BLOCKS = [line.strip().split("  #")[0].strip() for line in PROSE.splitlines() if line.startswith("    ")]
IN_TEXT = re.findall(r"`((?:python -m bench|make) [^`]+)`", PROSE)
COMMANDS = [*dict.fromkeys([line for line in BLOCKS if line.startswith(("python ", "make "))] + IN_TEXT)]


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """The records that git knows: those of one's own runs lie beside them, and no table has to show them."""
    listed = subprocess.run(["git", "ls-files", "results"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode or not listed.stdout:
        return ROOT / "results"
    folder = tmp_path_factory.mktemp("committed") / "results"
    folder.mkdir()
    for name in {Path(file).parts[1] for file in listed.stdout.splitlines()}:
        (folder / name).symlink_to(ROOT / "results" / name)
    return folder


def test_tables_come_from_the_records(committed):
    assert readme.written(TEXT, committed) == TEXT, "run: python -m bench.readme"
    assert "no record yet" not in TEXT


def test_results_come_from_the_records(committed):
    text = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
    assert readme.results_page(committed) == text, "run: python -m bench.readme"
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / link).exists(), link
    anchors = {
        re.sub(r"[^\w\- ]", "", line[3:].lower()).replace(" ", "-") for line in text.splitlines() if line[:3] == "## "
    }
    assert anchors >= set(re.findall(r"\]\(#([^)]+)\)", text))


def test_every_command_is_run_below():
    assert not [command for command in COMMANDS if command.split()[0] not in ("python", "make")]
    assert {command.split()[2] for command in COMMANDS if command.startswith("python")} == set(RUN)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python")])
def test_commands(command, tmp_path, monkeypatch, capsys, request):
    monkeypatch.chdir(ROOT)
    _, _, module, *words = shlex.split(command)
    RUN[module](words, tmp_path, request.getfixturevalue)
    assert "Unknown" not in capsys.readouterr().err


def run_bench(words, folder, fixture):
    """Runs of the embedded model are made shorter, sweeps end with their plan, what is not here is composed."""
    place = [f"paths.results={folder}"]
    if words[0] in ("list", "show", "doctor", "validate", "--help"):
        assert cli.main(words) in (0, 1)
    elif words[0] in ("compare", "collect", "report", "dashboard"):
        out = {"report": "html", "dashboard": "json"}.get(words[0])
        assert cli.main([*words, *([f"out={folder}/x.{out}"] if out else [])]) == 0
    elif any(word.startswith("sweep=") for word in words):
        few = ["method=autoregressive"] if any(word.startswith("cluster=") for word in words) else []
        assert cli.main([*words, *few, *place, "dry_run=true"]) == 0
    elif elsewhere(words):
        assert compose.compose_sweep([word for word in words if word != "-m"])
    else:
        fixture("smollm2_dir")
        fixture("monkeypatch").setenv("DECODEBENCH_DATA", str(fixture("data_root")))
        (prompts := folder / "prompts.jsonl").write_text(f"{LINE}\n")
        named = [word.replace("=prompts.jsonl", f"={prompts}") for word in words]
        assert cli.main([*named, *SHORT, *place]) in (0, 3)


SHORT = [
    "dataset.limit=1", "max_new_tokens=4", "measure.repeats=1", "measure.cost_curve=false",
    "measure.bootstrap_samples=100", "hardware.threads=1",
]  # fmt: skip
LINE = re.search(r'^`(\{"question_id".*\})`', TEXT, re.MULTILINE)[1]


def elsewhere(words):
    """Needs a GPU, a model from the hub, or one that is trained first."""
    return {"model=hf", "model=vicuna_7b", "model=multi30k_4_4"} & set(words) or any("=cuda" in word for word in words)


def run_train(words, folder, fixture):
    if not words:
        assert train.main(words) == 0
        return
    settings, overrides = train.split(words)
    cfg, part = compose.compose_training(overrides, settings.method)
    assert instantiate.build_trainable(part) and cfg.model


def run_cost(words, folder, fixture):
    if words[0] == cost.WHAT_IF:
        assert "curve=results/costs/ID" in words, "a placeholder; every run has a curve of its own"
        short = [word for word in words if not word.startswith(("curve=", "batch="))]
    else:
        fixture("smollm2_dir")
        short = [*words, "nodes=[1,2]", "batches=[1]", "contexts=[16]", "repeats=1", "prompts=1", "matrix=64"]
        short += ["max_new_tokens=4", "hardware.threads=1", f"paths.results={folder}"]
    assert cost.main(short) == 0


def run_lossless(words, folder, fixture):
    _, _, overrides = lossless.split(words)
    assert compose.compose(overrides)


RUN = {
    "bench": run_bench,
    "bench.train": run_train,
    "bench.cost": run_cost,
    "bench.lossless": run_lossless,
}


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_make_has_the_target_and_its_commands_compose(command):
    shown = subprocess.run(["make", "--dry-run", *shlex.split(command)[1:2]], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    for words in re.findall(r"^-?\S+/python -m bench (.*)$", shown.stdout, re.MULTILINE):
        _, rest = plan.read_words([word for word in shlex.split(words) if word != "-m"])
        assert compose.compose_sweep(rest)
    for words in re.findall(r"^-?\S+/python -m bench\.train (.*)$", shown.stdout, re.MULTILINE):
        run_train(shlex.split(words), None, None)


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)]+)\)", TEXT):
        if not link.startswith("http"):
            assert (ROOT / link).exists(), link
