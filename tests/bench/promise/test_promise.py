"""The promise of a calibrated threshold: its resamplings by hand, the command, its record, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from bench import cli, validate
from bench.errors import INVALID, OK, UserError
from bench.promise import command, records
from bench.promise.resampling import bounds, resample
from bench.promise.settings import PromiseConfig
from methods.early_exit.calibrator import RiskTarget, ThresholdCalibrator
from methods.early_exit.risk_control import calibrate, naive_threshold
from tests.early_exit.test_risk_control import at_most, more_than

GRID = (0.9, 0.6, 0.3)


def calibrator(tolerance: float = 0.1, **settings: Any) -> ThresholdCalibrator:
    return ThresholdCalibrator(RiskTarget(tolerance=tolerance, **settings), tolerance, GRID)


def beta_losses(prompts: int, means: tuple[float, ...], seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.beta(8 * mean, 8 * (1 - mean), prompts) for mean in means], axis=1).astype(np.float32)


# ----------------------------------------------------------------------------------------------------------- resampling


def test_resamplings_are_those_made_by_hand() -> None:
    losses, layers = beta_losses(400, (0.02, 0.07, 0.3)), [0.9, 0.7, 0.4]
    found = resample(losses, layers, calibrator(), calibration=250, draws=20, seed=3)
    rng, broken, naive, shares, tested = np.random.default_rng(3), 0, 0, [], []
    columns = dict(zip(GRID, losses.T, strict=True)) | {1.0: np.zeros(400)}
    for _ in range(20):
        order = rng.permutation(400)
        chosen = calibrate(losses[order[:250]], GRID, tolerance=0.1).threshold
        tests = order[250:]
        tested.append(columns[chosen][tests].mean())
        broken += tested[-1] > 0.1
        naive += columns[naive_threshold(losses[order[:250]], GRID, 0.1)][tests].mean() > 0.1
        shares.append({0.9: 0.9, 0.6: 0.7, 0.3: 0.4, 1.0: 1.0}[chosen])
    assert (found["broken"], found["naive"]) == (broken, naive / 20)
    assert found["layers"] == pytest.approx(np.mean(shares)) and found["test_loss"] == pytest.approx(np.mean(tested))
    assert sum(found["thresholds"].values()) == 20 and found["test_prompts"] == 150


def test_a_promise_is_kept_and_the_naive_choice_breaks_it() -> None:
    """The loss at the lowest threshold is a little above the tolerance: half of the samples' means are below it."""
    losses = beta_losses(600, (0.02, 0.05, 0.102))
    kept = resample(losses, [1.0, 0.8, 0.6], calibrator(), calibration=300, draws=200, seed=0)
    assert at_most(kept["broken"], 200, 0.05) and more_than(round(200 * kept["naive"]), 200, 0.05)
    assert kept["kept"] in (True, None) and kept["thresholds"].get("0.3", 0) < 20


def test_a_certificate_that_is_wrong_is_found_out() -> None:
    class Careless(ThresholdCalibrator):
        def choose(self, losses: np.ndarray) -> dict[str, Any]:
            return {"threshold": 0.3}

    careless = Careless(RiskTarget(tolerance=0.1), 0.1, GRID)
    found = resample(beta_losses(300, (0.01, 0.05, 0.2)), [1.0] * 3, careless, calibration=150, draws=50, seed=0)
    assert found["broken"] == found["beyond_chance"] == 50 and found["kept"] is False


@pytest.mark.parametrize(("broken", "draws"), [(0, 100), (1, 100), (7, 100), (100, 100)])
def test_bounds_are_the_shares_at_which_so_many_are_barely_credible(broken: int, draws: int) -> None:
    low, high = bounds(broken, draws)
    assert high == 1.0 if broken == draws else stats.binom.cdf(broken, draws, high) == pytest.approx(0.05)
    assert low == 0.0 if not broken else stats.binom.sf(broken - 1, draws, low) == pytest.approx(0.05)


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("promise")
    lines = [json.dumps({"prompt": f"Tell me of {i}", "answer": f"{i} is a number"}) + "\n" for i in range(60)]
    (folder / "corpus.jsonl").write_text("".join(lines))
    settings = ["model=random", "hardware=cpu_fp32", "hardware.threads=1", "max_new_tokens=6", "batch_size=20"]
    grid = ["method.head=lens", "method.calibration.thresholds=[0.9,0.5,0.1]", "tolerances=0.3", "resamplings=10"]
    where = [f"paths.results={folder}/results", f"method.calibration.corpus={folder}/corpus.jsonl"]
    return ["method=calm", *settings, *grid, *where]


@pytest.fixture(scope="module")
def record(words: list[str]) -> records.Record:
    assert cli.main(["promise", *words]) in (OK, INVALID)
    results = next(Path(word.partition("=")[2]) for word in words if word.startswith("paths.results="))
    (found,) = records.read(results)
    return found


def test_the_record_has_all_that_the_promise_rests_on(record: records.Record) -> None:
    losses, result = records.read_losses(record.folder), record.result
    assert set(losses) == {"textual", "risk"} and losses["risk"].shape == (60, 3)
    assert records.digest(losses) == result["losses_sha256"] and result["thresholds"] == [0.9, 0.5, 0.1]
    assert result["layers"] == sorted(result["layers"], reverse=True) and len(result["promises"]) == 2
    for promise in result["promises"]:
        own = ThresholdCalibrator(RiskTarget(tolerance=0.3, thresholds=[0.9, 0.5, 0.1]), 0.3, (0.9, 0.5, 0.1))
        again = resample(losses[promise["against"]], result["layers"], own, calibration=30, draws=10, seed=0)
        assert json.loads(json.dumps(again)).items() <= promise.items()
    assert {promise["metric"] for promise in result["promises"]} == {None, "rougeL"}
    (check,) = validate.check(record.folder.parents[1])
    assert (check.kind, check.problems) == (validate.PROMISE, [])


def test_a_changed_record_is_noticed(record: records.Record, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "results" / records.FOLDER / record.folder.name
    shutil.copytree(record.folder, copy)
    losses = records.read_losses(copy)
    np.savez_compressed(copy / records.LOSSES, textual=losses["textual"] / 2, risk=losses["risk"])
    assert "losses" in validate.check_one(copy).problems[0]
    (copy / records.LOSSES).unlink()
    assert "missing" in validate.check_one(copy).problems[0]
    shutil.copy(record.folder / records.LOSSES, copy)
    result = json.loads((copy / records.RESULT).read_text())
    result["promises"][0]["broken"] += 1
    (copy / records.RESULT).write_text(json.dumps(result))
    assert "broken" in validate.check_one(copy).problems[0]


def test_losses_are_resampled_without_decoding(record: records.Record, tmp_path: Path, capsys: Any) -> None:
    def again(*words: str) -> records.Record:
        place = tmp_path / str(len(words))
        said = ["promise", f"record={record.folder}", f"paths.results={place}", "tolerances=0.3", *words]
        assert cli.main(said) in (OK, INVALID)
        (found,) = records.read(place)
        assert str(found.folder) in capsys.readouterr().out and next(validate.check(place)).problems == []
        return found

    same, more = again("resamplings=10"), again("resamplings=300", "losses=textual")
    assert same.result == record.result and same.manifest["model"] == record.manifest["model"]
    assert same.manifest["promise"]["record"] == record.folder.name and same.folder.name != record.folder.name
    (promise,) = more.result["promises"]
    losses, grid = records.read_losses(more.folder), (0.9, 0.5, 0.1)
    own = ThresholdCalibrator(RiskTarget(tolerance=0.3, thresholds=grid), 0.3, grid)
    found = resample(losses["textual"], more.result["layers"], own, calibration=30, draws=300, seed=0)
    assert json.loads(json.dumps(found)).items() <= promise.items() and set(losses) == {"textual"}
    with pytest.raises(UserError, match="has losses of textual, got losses=risk"):
        command.run_again(PromiseConfig(losses=("risk",), tolerances=(0.3,)), more.folder, tmp_path)


def test_what_does_not_fit_an_earlier_record_is_refused(record: records.Record, tmp_path: Path, capsys: Any) -> None:
    for words, message in (
        ([f"record={tmp_path}"], "record must be a folder of promise/ in a folder of results"),
        ([f"record={record.folder}", "method=calm"], "Unknown setting 'method'"),
        ([f"record={record.folder}", "prompts=40"], "prompts has no effect beside record"),
        ([f"record={record.folder}", "tolerances=0.05"], "A tolerance of 0.05 needs at least"),
    ):
        assert cli.main(["promise", *words]) == 2
        assert message in capsys.readouterr().err


def test_the_table_and_the_figure_say_the_same(record: records.Record) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = list(records.cells(record))
    assert [row[:3] for row in rows] == [["calm", "textual", "0.3"], ["calm", "risk", "0.3"]]
    figure, ax = pyplot.subplots()
    records.figure(ax, [record])
    legend = ax.get_legend()
    assert legend and [text.get_text() for text in legend.get_texts()] == ["calm textual", "calm risk"]
    pyplot.close(figure)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("method.calibration.tolerance=0.1", r"has no effect here. Set tolerances in its place"),
        ("method.calibration.whole_grid=true", "has no effect here. Leave it out"),
        ("dataset=mtbench", "prompts come from method.calibration.corpus"),
        ("method=eagle", "needs a method whose threshold can be calibrated, got eagle"),
    ],
)
def test_settings_without_effect_are_refused(changed: str, message: str, words: list[str]) -> None:
    with pytest.raises(UserError, match=message):
        command.compose_run(
            PromiseConfig(), [word for word in words if "=" in word and word[:4] != "tole"][:3] + [changed]
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tolerances": (0.0,)}, "tolerances must be between 0 and 1"),
        ({"losses": ()}, "losses must name textual, risk or both"),
        ({"resamplings": 0}, "resamplings must be at least 1, got 0"),
        ({"calibration_share": 1.0}, "calibration_share must be between 0 and 1, got 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PromiseConfig(**settings)


def test_too_few_prompts_are_refused_before_anything_is_decoded(words: list[str], capsys: Any) -> None:
    assert cli.main(["promise", *words, "tolerances=0.08"]) == 2
    assert "A tolerance of 0.08 needs at least" in capsys.readouterr().err
