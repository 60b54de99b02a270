"""README.md and docs/ are true: their tables come from the committed records, their commands exist and compose."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench import cli, readme
from bench.config import compose, instantiate, league, options
from bench.cost import command as cost
from bench.lossless import command as lossless
from bench.promise import command as promise
from bench.promise.settings import PromiseConfig
from bench.sweep import plan
from bench.train import command as train
from bench.train import corpora
from bench.train.league import LeagueConfig
from tests.bench.rivals.files import vllm_serve

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*readme.pages(ROOT), ROOT / "CONTRIBUTING.md"]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
OWN = ("echo", "bigram", "boolq")  # the examples that test_extending.py installs and runs


def commands():
    """Command lines in code blocks and in running text."""
    for text in TEXTS.values():
        prose = readme.BLOCK.sub("", text)
        blocks = (line.strip().split("  #")[0].strip() for line in prose.splitlines() if line.startswith("    "))
        yield from (line for line in blocks if line.startswith(("python -m", "make ")))
        yield from re.findall(r"`((?:python -m bench|make)\b[^`]*)`", prose)


COMMANDS = [command for command in dict.fromkeys(commands()) if not any(word in command for word in OWN)]


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """The records that git tracks; others may be in the same folder."""
    reference = Path("results", "reference")
    listed = subprocess.run(["git", "ls-files", reference], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode or not listed.stdout:
        return ROOT / reference
    folder = tmp_path_factory.mktemp("committed") / reference
    folder.mkdir(parents=True)
    for name in {Path(file).parts[2] for file in listed.stdout.splitlines()}:
        (folder / name).symlink_to(ROOT / reference / name)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_come_from_the_records(page, committed):
    assert readme.written(TEXTS[page], committed) == TEXTS[page], "run: make readme"


def test_the_readme_has_its_tables_and_stays_short():
    assert [kind.split(":")[0] for kind in readme.BLOCK.findall(README)] == ["short", "leaderboard"]
    assert len(README.splitlines()) <= 120 and len(README.split()) <= 1500


def test_every_method_is_in_the_table():
    page = TEXTS[ROOT / "docs" / "methods.md"]
    (table,) = (found[0] for found in readme.BLOCK.finditer(page) if found[1] == "methods")
    assert set(re.findall(r"`(\w+)`", table)) == set(compose.every_group()["method"])


def test_results_come_from_the_records(committed):
    text = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
    assert readme.results_page(committed) == text, "run: make readme"
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / link).exists(), link
    anchors = {
        re.sub(r"[^\w\- ]", "", line[3:].lower()).replace(" ", "-") for line in text.splitlines() if line[:3] == "## "
    }
    assert anchors >= set(re.findall(r"\]\(#([^)]+)\)", text))


def test_the_figure_shows_the_records():
    text = (ROOT / readme.FIGURE).read_text(encoding="utf-8")
    words = readme.facts(readme.FIGURE, text)
    assert words == readme.facts(readme.FIGURE, readme.figure(ROOT / "results" / "reference")), "run: make readme"
    speed, low, high = re.search(r"\n    hybrid .* EXACT +([\d.]+)x +([\d.]+)-([\d.]+)", README).groups()
    assert f"{speed}× ({low}–{high})" in words, "of the table"
    assert f"]({readme.FIGURE})" in README and len(text) < 60_000


def test_all_commands_are_of_one_program():
    assert {tuple(command.split()[:3]) for command in COMMANDS if command.startswith("python")} == {
        ("python", "-m", "bench")
    }


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python")])
def test_commands(command, tmp_path, monkeypatch, capsys, request):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)[3:]
    parts = {"train": run_train, "cost": run_cost, "lossless": run_lossless, "promise": run_promise}
    assert "=" in words[0] or words[0].startswith("-") or cli.main([words[0], "--help"]) == 0
    if words[0] in parts:
        parts[words[0]](words[1:], tmp_path, request.getfixturevalue)
    else:
        run_bench(words, tmp_path, request.getfixturevalue)
    assert "Unknown" not in capsys.readouterr().err


def run_bench(words, folder, fixture):
    """Runs of the embedded model are shortened, sweeps end with their plan, runs elsewhere are only composed."""
    place = [f"paths.results={folder}"]
    if words[0] == "validate":  # the records are checked by tests/bench/test_validate.py
        assert cli.main(["validate", str(next((ROOT / words[1]).glob("**/*-mtbench-*")))]) == 0
    elif words[0] in ("list", "show", "doctor", "check-method", "--help"):
        assert cli.main(words) in (0, 1)
    elif words[0] in ("compare", "collect", "report", "league"):
        named = [word.replace("out=", f"out={folder}/") for word in words]
        assert cli.main([*named, *([f"out={folder}/x.html"] if words[0] == "report" else [])]) == 0
    elif words[0] == "gpu":  # tests/bench/gpu/test_bring_back.py runs it
        assert cli.main(words) == (0 if "--help" in words else 2)
    elif words[0] == "acceptance":
        (folder / "metrics.json").write_text('{"num_drafts": 4, "num_draft_tokens": 8, "num_accepted_tokens": 3}')
        run = str(next((ROOT / "results" / "reference").glob("eagle-mtbench-*/samples*")).parent)
        named = [word.replace("results/RUN", run).replace("out=", f"out={folder}/") for word in words]
        named = [word.replace("metrics.json", str(folder / "metrics.json")) for word in named]
        assert cli.main([*named, *(place if words[1] == "import" else [])]) == 0
    elif words[0] == "rivals":  # on files of its own
        named = [word.replace("eagle.json", f"{folder}/eagle.json") for word in words]
        named = [word.replace("plain.json", f"{folder}/plain.json") for word in named]
        for name, tpot_s in (("eagle.json", 0.01), ("plain.json", 0.02)):
            (folder / name).write_text(json.dumps(vllm_serve(tpot_s=tpot_s)))
        assert cli.main([*named, *place]) == 0
    elif words[0] == "sign":  # tests/bench/records/test_signatures.py does
        assert cli.main(words) == 2, "the key or the run is not there"
    elif words[0] == "track":
        assert cli.main([*words, "mode=offline", *place]) == 0
    elif words[0] == "dashboard":
        (folder / "wandb" / "run-20260101_120000-eagle-mtbench-smollm2-af3d73676629").mkdir(parents=True)
        assert cli.main([*words, f"out={folder}/x.json", *place]) == 0
    elif any(word.startswith("sweep=") for word in words):
        few = [] if "method." in str(swept(words)) else ["method=autoregressive"]  # test_plan.py plans all jobs of each
        plan_only = [] if "dry_run=true" in words else ["dry_run=true"]
        lacking = any(find_spec(package) is None for sweep, package in RIVALS.items() if f"sweep={sweep}" in words)
        heads = [f"paths.cache={folder}/cache"] if "sweep=league" in words else []  # they are trained first: none there
        assert cli.main([*words, *few, *place, *heads, *plan_only]) == (2 if lacking or heads else 0)
    elif "-m" in words or elsewhere(words):
        assert compose.compose_jobs([word for word in words if word not in ("-m", "dry_run=true")])
    else:
        fixture("smollm2_dir")
        fixture("monkeypatch").setenv("DECODEBENCH_DATA", str(fixture("data_root")))
        for name in ("prompts.jsonl", "prompts.txt"):
            (folder / name).write_text(f"{LINE}\n")
        named = [word.replace("=prompts.", f"={folder}/prompts.") for word in words]
        assert cli.main([*named, *SHORT, *place]) in (0, 3)


RIVALS = {"rivals": "llama_cpp", "rivals_openvino": "openvino_genai", "rivals_translation": "ctranslate2"}  # optional


def swept(words):
    """The settings of the named sweeps."""
    names = [name for word in words if word.startswith("sweep=") for name in word.removeprefix("sweep=").split(",")]
    return [[*plan.named(name), *(arm.run for arm in league.arms(name))] for name in names]


SHORT = [
    "dataset.limit=1", "max_new_tokens=4", "measure.repeats=1", "measure.cost_curve=false",
    "measure.bootstrap_samples=100", "hardware.threads=1",
]  # fmt: skip
LINE = re.search(r'`(\{"prompt".*?\})`', README)[1]


def elsewhere(words):
    """Needs a GPU, a model from the hub, a translation model, or a part that is trained first."""
    parts = ("model=hf", "model=vicuna_7b", "model=multi30k", "model=smollm2_layerskip", "method=cascade")
    return any(word.startswith(parts) or "=cuda" in word or word == "dataset=hub" for word in words)


def run_train(words, folder, fixture):
    if not words:
        assert cli.main(["train"]) == 0
        return
    if words[0] == "pack":  # tests/bench/train/test_corpora.py packs
        assert not options.parse(corpora.PackConfig, words[1:])[1][1:]
        return
    if words[0] == "league":  # tests/bench/test_league.py trains
        assert not options.parse(LeagueConfig, words[1:])[1]
        return
    settings, overrides = train.split(words)
    cfg, part = compose.compose_training(overrides, settings.method)
    assert instantiate.build_trainable(part) and cfg.model


def run_cost(words, folder, fixture):
    short = words
    if any("acceptance/" in word for word in words):  # tests/bench/cost/test_acceptance.py runs it
        assert words[0] == cost.WHAT_IF
        return
    if words[0] != cost.WHAT_IF:
        fixture("smollm2_dir")
        short = [*words, "nodes=[1,2]", "batches=[1]", "contexts=[16]", "repeats=1", "prompts=1", "matrix=64"]
        short += ["max_new_tokens=4", "hardware.threads=1", f"paths.results={folder}"]
        if "model=random" in words:
            short = [word for word in short if not word.startswith("model.like")]
            short.append("model.layers=8")  # EAGLE-3 reads three of them
    assert cost.main(short) == 0


def run_lossless(words, folder, fixture):
    if any(word.startswith("url=") for word in words):  # tests/bench/lossless/test_certificate.py runs it
        assert cli.main(["lossless", *words]) == 2
        return
    _, _, overrides = lossless.split(words)
    assert compose.compose(overrides)


def run_promise(words, folder, fixture):
    config, overrides = options.parse(PromiseConfig, words)  # tests/bench/promise decodes
    assert promise.compose_run(config, overrides).method["calibration"]["tolerance"] == config.tolerances[0]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make")])
def test_make_has_the_target_and_its_commands_compose(command):
    shown = subprocess.run(["make", "--dry-run", *shlex.split(command)[1:2]], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    for words in re.findall(r"^-?\S+/python -m bench (.*)$", shown.stdout, re.MULTILINE):
        first, *others = shlex.split(words)
        if first == "train":
            run_train(others, None, None)
        elif "=" in first or first == "-m":
            _, rest = plan.read_words([word for word in shlex.split(words) if word != "-m"])
            assert compose.compose_jobs(rest)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", TEXTS[page]):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link
