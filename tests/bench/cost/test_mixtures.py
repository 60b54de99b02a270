"""``cost what-if oracle=`` and ``route=``: the command over recorded runs, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bench.cost.command import main
from bench.records import digests

REFERENCE = Path(__file__).resolve().parents[3] / "results" / "reference"


def folder(start: str) -> str:
    return str(next(path for path in sorted(REFERENCE.glob(f"{start}*")) if (path / "samples.jsonl.gz").is_file()))


SUFFIX, RECYCLING = folder("suffix-spec_bench"), folder("token_recycling-spec_bench")
EAGLE = folder("eagle-mtbench")


def test_oracles_of_two_runs_are_printed_with_their_mark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", f"oracle={SUFFIX},{RECYCLING}"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("ORACLE: ") and "never ranked" in said
    for row in ("perfect drafter, free", "best draft length of every round  ", "suffix + token_recycling"):
        assert row in said
    assert "of the tokens before the texts of the runs part" in said


def test_one_run_is_enough_for_its_own_oracles_and_another_curve_prices_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["what-if", f"oracle={EAGLE}"]) == 0
    own = capsys.readouterr().out
    assert main(["what-if", f"oracle={EAGLE}", f"curve={SUFFIX}"]) == 0
    assert capsys.readouterr().out != own


def test_a_route_names_the_best_threshold_of_eight(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", f"route={SUFFIX},{RECYCLING}"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert [cells[0] for cells in lines[1:]] == [str(tokens) for tokens in range(1, 9)]
    speed = {cells[0]: float(cells[3].rstrip("x")) for cells in lines[1:]}
    (best,) = [cells[0] for cells in lines if cells[-1] == "best"]
    assert speed[best] == max(speed.values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([f"route={SUFFIX}"], "route must name the folders of two runs, got 1"),
        ([f"oracle={SUFFIX}", "gamma=2"], "gamma needs the folder of one run"),
        ([SUFFIX, f"oracle={SUFFIX}"], "what-if needs one of RUN, oracle=RUN,RUN and route=RUN,RUN"),
        ([f"oracle={SUFFIX},{SUFFIX}"], "A run can be named once only"),
        ([f"oracle={SUFFIX},{EAGLE}"], "All runs must have the same data set, got mtbench, spec_bench"),
        (["oracle=nowhere"], "nowhere"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_input_is_one_message(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["what-if", *words]) == 2
    message = capsys.readouterr().err
    assert said in message and len(message.strip().splitlines()) == 1


def test_a_relaxed_run_has_no_oracle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(shutil.copytree(SUFFIX, tmp_path / "run"))
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    text = digests.resealed(run, manifest | {"guarantee": "RELAXED"})
    (run / "manifest.json").write_text(text, encoding="utf-8")
    assert main(["what-if", f"oracle={run}"]) == 2
    message = capsys.readouterr().err
    assert "it must be EXACT, got RELAXED" in message and len(message.strip().splitlines()) == 1
