"""The league: arms of a sweep, their trainings, the plan that measures them, the table and the figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import cli
from bench.config import compose, instantiate, league
from bench.errors import UserError
from bench.report import collect
from bench.report import league as report
from bench.sweep import plan
from bench.train import command
from bench.train import league as trainings
from tests.bench.report.test_commands import recorded, rows

ARMS = {arm.name: arm for arm in league.arms()}


# -- arms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_can_be_trained_and_measured(name: str) -> None:
    arm = ARMS[name]
    cfg = compose.compose([*arm.run, "method.checkpoint=folder/x-7"])
    instantiate.check(cfg)
    assert arm.measures({**cfg.method, "checkpoint": f".../{arm.heads}-7"})
    assert not arm.measures({**cfg.method, "checkpoint": f".../other_{arm.heads}-7"})
    assert not arm.measures({**cfg.method, "checkpoint": None})
    if arm.train:
        words = trainings.training(arm, 0.5, trainings.LeagueConfig(tokens=9), Path("root"), ["seed=3"])
        settings, rest = command.split(words)
        _, train = compose.compose_training(rest, settings.method)
        trainable = instantiate.build_trainable(train)
        assert settings.out == f"root/{name}-0.5"
        assert (trainable.recipe.minutes, trainable.answers.tokens) == (0.5, 9)  # type: ignore[attr-defined]


def test_arms_with_one_method_and_checkpoint_differ_in_their_settings() -> None:
    for a in ARMS.values():
        for b in ARMS.values():
            if a is not b and a.heads == b.heads:
                method = compose.compose([*a.run]).method | {"checkpoint": f"{a.heads}-7"}
                assert a.measures(method) and not b.measures(method)
    named = {"medusa", "hydra", "eagle_1", "eagle_2", "eagle_3", "eagle_3_1", "hass", "p_eagle", "dflash", "dspark"}
    assert set(ARMS) == named


@pytest.mark.parametrize(
    "arms, message",
    [
        ({"a": {"train": ["method=medusa"]}}, "must have run"),
        ({"a": {"run": ["method=medusa"], "sort": 1}}, "must have run"),
        ({"a": {"run": ["method=medusa"], "heads": "b"}}, "heads of arm a .* got b"),
    ],
)
def test_arms_that_cannot_be_are_refused(
    arms: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "league.yaml"
    file.write_text(json.dumps({"arms": arms}))
    monkeypatch.setattr(compose, "config_file", lambda group, choice: file)
    with pytest.raises(UserError, match=message):
        league.arms()


# -- the plan ---------------------------------------------------------------------------------------------------------


def checkpoint(root: Path, name: str) -> Path:
    (root / name).mkdir(parents=True)
    (root / name / "card.json").write_text("{}")
    return root / name


def test_a_sweep_measures_every_checkpoint_of_every_arm(tmp_path: Path) -> None:
    words = ["sweep=league", f"paths.cache={tmp_path}", "model=smollm2", "dataset.limit=5"]
    root = league.folder(words)
    assert root == tmp_path / "trained" / "league" / "smollm2"
    more, less, other = (checkpoint(root, name) for name in ("medusa-30", "medusa-7", "eagle_1-7"))
    (root / "hydra-7").mkdir()  # not finished
    checkpoint(root, "medusa-last")
    options, rest = plan.read_words(words)
    found = plan._sweeps(rest)
    used = [next(w.partition("=")[2] for w in job if w.startswith("method.checkpoint=")) for job in found]
    assert [path for path in used if "medusa" in path] == [str(less), str(more)]
    assert used.count(str(other)) == 2, "EAGLE 1 and 2 share one"
    assert str(root / f"hydra-{league.MINUTES:g}") in used and len(found) == len(ARMS) + 1
    assert all("dataset=mtbench" in job and "dataset.limit=5" in job for job in found)
    with pytest.raises(UserError, match="for one model"):
        plan._sweeps(["sweep=league", "model=smollm2,random"])


def test_a_head_that_is_not_trained_is_named_in_the_plan(tmp_path: Path) -> None:
    words = ["sweep=league", f"paths.cache={tmp_path}", f"paths.results={tmp_path / 'results'}", "model=smollm2"]
    checkpoint(league.folder(words), "medusa-7")
    made = plan.make(plan.read_words(words)[1], plan.Options())
    states = {job.label: (job.state, job.reason) for job in made.jobs}
    (trained,) = (job for label, job in states.items() if "medusa" in label)
    others = [job for label, job in states.items() if "medusa" not in label]
    assert "league" not in trained[1] and len(others) == len(ARMS) - 1
    assert all(state == "incompatible" and "python -m bench train league only=" in reason for state, reason in others)


# -- trainings --------------------------------------------------------------------------------------------------------


def test_heads_are_trained_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done: list[list[str]] = []

    def train(words: list[str]) -> str:
        done.append(words)
        return f"made {words[0]}"

    words = ["minutes=2,0.5", "only=hass,medusa", "tokens=70", f"paths.cache={tmp_path}", "train.vocabulary=9"]
    assert trainings.main(words, train) == 0
    root = tmp_path / "trained" / "league" / "smollm2"
    outs = [next(w.partition("=")[2] for w in job if w.startswith("out=")) for job in done]
    assert outs == [str(root / name) for name in ("hass-2", "medusa-2", "hass-0.5", "medusa-0.5")]
    assert all({"train.answers.tokens=70", "train.vocabulary=9"} <= set(job) for job in done)
    assert {"train.unroll=3", "train.top_k=10", "train.decay=0.5", "train.recipe.minutes=2"} <= set(done[0])
    assert "made method=medusa" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["only=medus"], "Unknown head 'medus'. Did you mean 'medusa'"),
        (["minutes=soon"], "minutes must be numbers"),
        (["dataset=mtbench"], "'dataset=mtbench' has no effect"),
        (["only=eagle_2"], "Unknown head 'eagle_2'"),
    ],
)
def test_trainings_refuse(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert trainings.main(words, lambda _: "") == 2
    assert message in capsys.readouterr().err


def test_a_league_of_a_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trained by one command, which finds them the second time; the plan then has them."""
    corpus = tmp_path / "talk.jsonl"
    asked = [{"prompt": f"Say {'word ' * (1 + n % 3)}number {n}", "answer": "It is said."} for n in range(24)]
    corpus.write_text("".join(json.dumps(each) + "\n" for each in asked))
    common = ["model=random", f"paths.cache={tmp_path}"]
    words = ["train", "league", "only=p_eagle,medusa", "minutes=0.005", "tokens=200", f"corpus={corpus}", *common]
    words += ["hardware=cpu_fp32", "train.answers.limit=12", "train.vocabulary=64", "train.recipe.batch_size=4"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "p_eagle-0.005" in out and "medusa-0.005" in out
    root = tmp_path / "trained" / "league" / "random"
    facts = json.loads((root / "p_eagle-0.005" / "card.json").read_text())["facts"]
    assert facts["minutes"] >= 0.005 and facts["steps"] >= 1 and facts["curve"][-1]["minutes"] >= 0.004
    assert cli.main(words) == 0
    assert capsys.readouterr().out.count("is already there") == 2


# -- the report -------------------------------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two budgets of Medusa, one of EAGLE-2, a run that is none of the league's."""
    for name, minutes, step_ms in (("medusa-7", 7.0, 30.0), ("medusa-30", 30.0, 22.0), ("eagle_1-7", 7.0, 25.0)):
        method = ["medusa"] if name.startswith("medusa") else ["eagle", "method.version=2"]
        facts = {"minutes": minutes, "steps": 90, "answer_tokens": 452_337, "parameters": 5e6}
        facts["tokens_per_step_of_a_chain"] = 1.8
        words = [*method[1:], f"method.checkpoint=.../{name}"]
        recorded(tmp_path, method[0], rows(step_ms), *words, part={"card": {"facts": facts}})
    recorded(tmp_path, "suffix", rows(18))
    return tmp_path


def test_the_table_has_one_line_for_each_drafter_and_budget(results: Path) -> None:
    (found,) = report.standings(collect.read(results))
    assert [(entry.name, entry.minutes) for entry in found.entries] == [("medusa", 30), ("eagle_2", 7), ("medusa", 7)]
    first = dict(zip(report.HEADER, report.cells(found)[0], strict=True))
    assert (first["minutes"], first["answer tokens"], first["held out"]) == ("30.0", "452,337", "1.80")
    assert first["speed-up"].endswith("x") and float(first["speed-up"][:-1]) > 1.3
    assert "| eagle_2 | 7.0 |" in report.markdown([found]) and found.heading in report.text([found])
    assert "train league" in report.text([])


def test_the_budgets_stand_side_by_side(results: Path) -> None:
    (found,) = report.standings(collect.read(results))
    header, _, first, second = report.by_budget(found).splitlines()
    assert header.count("speed-up") == 2 and "updates in 7 min" in header and "updates in 30 min" in header
    fast, slow = report.cells(found)[0], report.cells(found)[2]
    speeds = [f"{line[6]} ({line[7]})" for line in (slow, fast)]
    assert [cell.strip() for cell in first.split("|")][1:-1] == [
        *("medusa", "90", speeds[0], slow[8]),
        *("90", speeds[1], fast[8]),
    ]
    assert [cell.strip() for cell in second.split("|")][5:-1] == ["-"] * 3, "EAGLE-2 has no second budget"


def test_the_figure_has_a_line_for_each_drafter(results: Path) -> None:
    from matplotlib import pyplot as plt

    (found,) = report.standings(collect.read(results))
    _, ax = plt.subplots()
    report.draw(ax, found)
    lines = {line.get_label(): line.get_xydata() for line in ax.lines if not line.get_label().startswith("_")}
    assert {name: points[:, 0].tolist() for name, points in lines.items()} == {"medusa": [7.0, 30.0], "eagle_2": [7.0]}
    assert lines["medusa"][1, 1] == pytest.approx(found.entries[0].speed)
    assert {text.get_text() for text in ax.texts} == {"medusa", "eagle_2"}
    for entry in found.entries:
        entry.summary["speedup"]["novel"] = {"value": None, "n": 0}  # type: ignore[index]
    _, empty = plt.subplots()
    report.draw(empty, found, novel=True)
    assert [text.get_text() for text in empty.texts] == ["too few texts for a speed-up"]
    plt.close("all")


def test_the_command_prints_and_writes(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = f"paths.results={results}"
    assert cli.main(["league", where]) == 0 and "eagle_2" in capsys.readouterr().out
    for name in ("league.md", "league.svg"):
        assert cli.main(["league", where, f"out={tmp_path / name}"]) == 0
        assert (tmp_path / name).stat().st_size > 200
    assert cli.main(["league", where, "out=league.txt"]) == 2
    assert "out must end in .md, .svg or .png" in capsys.readouterr().err


@pytest.mark.parametrize("value, text", [(0.754, ".75"), (1.0, "1"), (0.0, ".00"), (None, "-")])
def test_a_depth_at_which_no_node_was_judged_has_a_dash(value: float | None, text: str) -> None:
    assert report._share(value) == text
