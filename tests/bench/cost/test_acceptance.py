"""Accepted lengths as files: what is written and read back, files of other engines, and what contradicts itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import cli
from bench.cost import acceptance
from bench.cost.acceptance import Acceptance, ImportOptions, constant_rate, exported, histogram, recorded
from bench.cost.what_if import Drafting, chain_forecast, chain_of, read_curve
from bench.records.run_folder import read_manifest, read_samples

ROOT = Path(__file__).resolve().parents[3]
CONVENTIONS = ("with_bonus", "without_bonus")
FILES = ("accepted.json", "accepted.csv", "accepted.jsonl")


@pytest.fixture(scope="module")
def run() -> Path:
    """A recorded run that drafts chains and sometimes nothing."""
    found = sorted(ROOT.glob("results/reference/prompt_lookup-*-smollm2-*/samples.jsonl.gz"))
    if not found:
        pytest.skip("no recorded run of prompt_lookup has its samples")
    return found[0].parent


@pytest.fixture(scope="module")
def curve() -> Path:
    return sorted(ROOT.glob("results/reference/costs/smollm2-*"))[0]


def read(file: Path, convention: str = "with_bonus", **more: Any) -> Acceptance:
    return acceptance.read(ImportOptions(file, "any", convention, **more))


def written(tmp_path: Path, content: Any, name: str = "theirs.json") -> Path:
    file = tmp_path / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


# ------------------------------------------------------------------------------------------------------ both ways


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("name", FILES)
def test_what_is_exported_is_read_back(run, tmp_path, name, convention):
    file = tmp_path / name
    assert cli.main(["acceptance", "export", str(run), f"out={file}", f"convention={convention}"]) == 0
    chain = chain_of(read_samples(run))
    found = read(file, convention, context=round(chain.context))
    assert found.reach == pytest.approx(chain.reach) and found.had == pytest.approx(chain.had)
    assert found.alpha == pytest.approx(chain.alpha) and found.rounds == sum(
        histogram(recorded(read_samples(run))).values()
    )


@pytest.mark.parametrize("name", FILES)
def test_a_file_read_with_the_other_convention_is_refused(run, tmp_path, capsys, name):
    file = tmp_path / name
    assert cli.main(["acceptance", "export", str(run), f"out={file}", "convention=with_bonus"]) == 0
    assert cli.main(["acceptance", "import", str(file), "name=x", "convention=without_bonus", "context=100"]) == 2
    assert "counts with_bonus, got convention=without_bonus. Set convention=with_bonus" in capsys.readouterr().err


def test_an_import_is_priced_as_the_run_is(run, curve, tmp_path, capsys):
    results, more = tmp_path / "acceptance", ["convention=with_bonus", "context=256", f"paths.results={tmp_path}"]
    file = tmp_path / "accepted.json"
    assert cli.main(["acceptance", "export", str(run), f"out={file}", "convention=with_bonus"]) == 0
    assert cli.main(["acceptance", "import", str(file), "name=theirs", *more]) == 0
    assert (results / "theirs.json").is_file() and "bonus token counted" in capsys.readouterr().out
    words = ["cost", "what-if", str(results / "theirs.json"), f"curve={curve}", "gamma=2,4", "draft_ms=1.5", "batch=1"]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    chain, price = chain_of(read_samples(run)), read_curve(curve).price.seconds
    for gamma in (2, 4):
        own = chain_forecast(
            acceptance.Chain(chain.reach, chain.had, chain.alpha, None, 256.0, 1), gamma, price, 1, Drafting(1.5e-3)
        )
        line = next(line.split() for line in shown.splitlines() if line.split()[:2] == ["1", str(gamma)])
        assert line[2:] == [f"{own.tokens:.2f}", "1.500", f"{own.speedup:.2f}x"]


def test_an_import_without_a_curve_or_drafting_time_says_what_to_set(curve, tmp_path, capsys):
    results, more = tmp_path / "acceptance", ["convention=with_bonus", "context=128", f"paths.results={tmp_path}"]
    file = written(tmp_path, {"mean_acceptance_length": 2.0, "num_spec_tokens": 3})
    assert cli.main(["acceptance", "import", str(file), "name=m", *more]) == 0
    assert cli.main(["cost", "what-if", str(results / "m.json")]) == 2
    assert "Set curve=" in capsys.readouterr().err
    assert cli.main(["cost", "what-if", str(results / "m.json"), f"curve={curve}"]) == 0
    assert "set draft_ms" in capsys.readouterr().out
    assert cli.main(["cost", "what-if", str(file), f"curve={curve}"]) == 2
    assert "Import it" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------- by hand


ROUNDS = [(0, 0), (2, 0), (2, 1), (2, 2), (1, 1), (2, 2)]  # draft length, accepted


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_the_figures_of_an_export_by_hand(convention, tmp_path, run):
    asked = acceptance.ExportOptions(tmp_path, tmp_path / "x.json", convention)
    found = exported(acceptance.Counter(ROUNDS), read_manifest(run), 50, asked)
    add = int(convention == "with_bonus")
    counts = [found[f"num_{name}"] for name in ("rounds", "drafts", "draft_tokens", "accepted_tokens")]
    assert counts == [6, 5, 9, 6] and found["num_accepted_tokens_per_pos"] == [4, 2]
    assert found["acceptance_rate_per_pos"] == [0.8, 0.4] and found["accepted_length_mean"] == 1.2 + add
    assert found["accepted_length_histogram"] == {str(0 + add): 1, str(1 + add): 2, str(2 + add): 2}
    theirs, others = found["vllm"], found["sglang"]
    assert theirs["mean_acceptance_length"] == others["spec_accept_length"] == 2.2  # in both conventions
    assert theirs["acceptance_histogram"] == others["spec_correct_drafts_histogram"] == [1, 2, 2]
    assert theirs["acceptance_histogram_by_draft_length"] == {"1": [0, 1], "2": [1, 1, 2]}
    assert (others["spec_verify_ct"], others["spec_num_proposed_drafts"], others["spec_num_correct_drafts"]) == (
        5,
        9,
        6,
    )


def test_the_shares_of_an_acceptance_by_hand():
    found = Acceptance.of(acceptance.Counter(ROUNDS), 50, 1)
    assert found.reach == (4 / 6, 2 / 6) and found.had == (5 / 6, 4 / 6) and found.accepted == 1.0
    assert found.alpha == 6 / 8  # six accepted, two rejected


@pytest.mark.parametrize(("alpha", "length"), [(0.0, 3), (0.5, 4), (0.93, 7), (1.0, 2)])
def test_a_mean_gives_the_constant_rate(alpha, length):
    assert constant_rate(sum(alpha**i for i in range(1, length + 1)), length) == pytest.approx(alpha, abs=1e-9)


# ------------------------------------------------------------------------------------------------- other engines


VLLM = {
    "mean_acceptance_length": 1.2325581395348837,
    "acceptance_histogram": [39, 1, 0, 3],
    "acceptance_histogram_by_draft_length": {"3": [39, 1, 0, 3]},
    "num_spec_steps": 43,
    "num_accepted_draft_tokens": 10,
    "num_draft_tokens": 129,
    "num_spec_tokens": 3,
}
SGLANG = {
    "completion_tokens": 106,
    "spec_accept_length": 2.4651162790697674,
    "spec_num_correct_drafts": 63,
    "spec_num_proposed_drafts": 215,
    "spec_verify_ct": 43,
    "spec_correct_drafts_histogram": [11, 14, 11, 4, 0, 3],
}


@pytest.mark.parametrize(
    ("content", "name", "accepted", "rounds"),
    [
        (VLLM, "a.json", 10 / 43, 43),
        ({"choices": [], "metrics": {"speculative_decoding": VLLM}}, "a.json", 10 / 43, 43),
        ([{"metrics": {"speculative_decoding": VLLM}}] * 2, "a.json", 10 / 43, 86),
        ({"text": "", "meta_info": SGLANG}, "a.json", 63 / 43, 43),
        (f"{json.dumps(VLLM)}\n{json.dumps(VLLM)}\n", "a.jsonl", 10 / 43, 86),
        ({"per_step_drafted": [3, 3, 2], "per_step_accepted": [3, 0, 2]}, "a.json", 5 / 3, 3),
        ({"num_drafts": 5, "num_accepted_tokens_per_pos": [4, 2]}, "a.json", 1.2, 5),
        ("accepted_length,rounds\n1,3\n2,1\n", "a.csv", 0.25, 4),
    ],
)
def test_files_of_engines_with_counts(tmp_path, content, name, accepted, rounds):
    found = read(written(tmp_path, content, name), context=100)
    assert found.accepted == pytest.approx(accepted) and found.rounds == rounds


@pytest.mark.parametrize(
    "content",
    [
        {"num_drafts": 100, "num_draft_tokens": 300, "num_accepted_tokens": 120},
        {"accept_length": 2.2, "num_speculative_tokens": 3},
    ],
)
def test_means_alone_are_spread_by_a_constant_rate(tmp_path, content):
    found = read(written(tmp_path, content), context=100)
    assert found.accepted == pytest.approx(1.2) and len(found.reach) == 3 and found.rounds is None
    assert found.reach[1] / found.reach[0] == pytest.approx(found.alpha)


def test_golden_lengths_hold_for_every_draft_length(tmp_path):
    text = "_metadata: {draft-model: x}\nminimax-m3:\n  thinking_on:\n    1: 1.78\n    2: 2.38\n    3: 2.83\n"
    file = written(tmp_path, text, "golden.yaml")
    chain = read(file, context=1024, entry="minimax-m3.thinking_on").chain()
    assert [chain.tokens(gamma) for gamma in (1, 2, 3)] == pytest.approx([1.78, 2.38, 2.83])
    with pytest.raises(acceptance.UserError, match="instead of thinking_off there is thinking_on"):
        read(file, context=1024, entry="minimax-m3.thinking_off")
    with pytest.raises(acceptance.UserError, match="must have a mean length for each draft length"):
        read(file, context=1024)


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ([], "must be followed by export or import"),
        (["export", "convention=with_bonus"], "the folder of one run, got 0"),
        (["import", "a.json", "name=x"], "convention is needed"),
        (["export", "RUN", "out=a.json"], "convention is needed"),
        (["export", "RUN", "out=a.json", "convention=bonus"], "convention"),
        (["export", "RUN", "out=a.xlsx", "convention=with_bonus"], "out must end in .json, .csv, .jsonl"),
        (["export", "nowhere", "out=a.json", "convention=with_bonus"], "nowhere"),
        (["import", "nowhere.json", "name=x", "convention=with_bonus"], "cannot be read (FileNotFoundError)"),
        (["import", "a.json", "name=../x", "convention=with_bonus"], "name must be the name of a file"),
        (["import", "a.json", "nam=x", "convention=with_bonus"], "name"),
    ],
)
def test_bad_words_get_one_message(words, answer, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["acceptance", *[word.replace("RUN", str(run)) for word in words]]) == 2
    said = capsys.readouterr().err
    assert answer in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "name", "convention", "answer"),
    [
        ("{", "a.json", "with_bonus", "is damaged"),
        ("{}", "a.json", "with_bonus", "has none of num_drafts"),
        ("", "a.jsonl", "with_bonus", "is empty"),
        ("a,b\n1,2\n", "a.csv", "with_bonus", "no columns accepted_length and rounds"),
        ("accepted_length,rounds\n0,3\n", "a.csv", "with_bonus", "accepts -1 of"),
        ("draft_length,accepted_length,rounds\n2,3,1\n", "a.csv", "without_bonus", "accepts 3 of 2"),
        ({"mean_acceptance_length": 2.0}, "a.json", "with_bonus", "no draft length"),
        ({"accept_length": 4.0, "num_spec_tokens": 3}, "a.json", "without_bonus", "is it with_bonus?"),
        ({"accept_length": 0.5, "num_spec_tokens": 3}, "a.json", "with_bonus", "is it without_bonus?"),
        (VLLM, "a.json", "without_bonus", "which is not without_bonus"),
        ({"m": {1: 2.5}}, "a.yaml", "with_bonus", "must have a mean length"),
    ],
)
def test_files_that_contradict_themselves_are_refused(tmp_path, content, name, convention, answer):
    with pytest.raises(acceptance.UserError) as refused:
        read(written(tmp_path, content, name), convention, context=10)
    assert answer in str(refused.value)


def test_an_unknown_context_is_asked_for(tmp_path):
    with pytest.raises(acceptance.UserError, match="Set context=NUMBER"):
        read(written(tmp_path, VLLM))
