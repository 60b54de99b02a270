"""The terminal table: what it says, how wide it is, and what it refuses to put side by side."""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.analysis import metrics
from bench.analysis.audit import audit
from bench.config import compose
from bench.errors import UserError
from bench.records.run_folder import Sample
from bench.report import terminal
from tests.helpers.sample_rows import both

NAMES: dict[str, Any] = {
    "schema_version": 1,
    "run_id": "eagle-mtbench-smollm2-3f9a1c22d0b4",
    "method": "eagle",
    "model": "smollm2",
    "dataset": "mtbench",
    "hardware": "Some(R) Processor(TM) 8481C CPU @ 2.70GHz",
    "dtype": "bfloat16",
    "threads": 2,
    "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0},
    "batch_size": 1,
    "max_new_tokens": 128,
}
AGREEMENT = {"exact": 0.963, "near_tie": 0.037, "violation": 0.0, "n_violations": 0, "reason": None}
PATH = "results/eagle-mtbench-smollm2-3f9a1c22d0b4"


@pytest.fixture(autouse=True)
def _energy_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "ENERGY_BLOCK_S", 0.0)


def samples() -> list[Sample]:
    method = {"tokens": [1, 3, 2, 4], "depth": [0, 4, 4, 4], "accepted": [0, 2, 1, 3], "peak_bytes": 480 * 2**20}
    return [
        sample
        for number, i in enumerate((1, 2, 3, 4) * 2)
        for sample in both(
            f"{number}/1",
            {"ms": [210] + [24] * 9, "peak_bytes": 437 * 2**20},
            {"ms": [210] + [25 + i] * 3, "quality": {"em": i / 4}, "energy_j": 5.0} | method,
        )
    ]


def summary(**changes: Any) -> dict[str, Any]:
    derived = metrics.summarise(
        samples(),
        guarantee="EXACT",
        agreement=AGREEMENT,
        cost_curve=lambda nodes, batch, context: 0.024 if nodes == 1 else 0.026,
        n_bootstrap=100,
    )
    return NAMES | derived | {"verdict": asdict(audit(samples(), derived))} | changes


def with_nulls(value: Any) -> Any:
    """The same structure with nothing measured."""
    if isinstance(value, dict):
        return {key: with_nulls(inner) for key, inner in value.items()}
    return [] if isinstance(value, list) else None


def test_the_table_of_a_run() -> None:
    # 210 + 9 x 24 = 426 ms against 210 + 3 x (26, 27, 28, 29) = 288 .. 297 ms: 4 x 426 / 1170 = 1.456
    # method 292.5 +- 3.59 ms: t(0.975, 7) x 3.59 / 292.5 / sqrt 8 = 1.03 % around it
    # predicted 426 / (210 + 3 x 26) = 1.479; 9 tokens in 3 rounds; 6 of 12 accepted, by position 3, 2, 1, 0 of 3
    expected = """\
smollm2 (Some(R) Processor(TM) 8481C CPU @ 2.70GHz, bfloat16, 2 threads)   mtbench: 8 prompts
greedy, batch 1
eagle vs autoregressive, interleaved

  speed-up        1.46x      95 % 1.44-1.47   per token, 8 pairs   predicted 1.48x
  conversations              worst 1.43x   0 % of the conversations slower
  tokens/step     3.00       acceptance 0.50   by position 1.00 0.67 0.33 0.00
  tokens/s        34.2       was 23.5   TTFT 0.21 s  TPOT 9.17 ms  p90 step 29 ms
  memory          480 MiB    +43 MiB against the baseline
  energy/token    0.5 J      was not measured
  agreement       96.3 %     identical to the target   3.7 % near-ties   0 violations
  quality         em 0.62 (was not measured)

RESULT: VALID     results/eagle-mtbench-smollm2-3f9a1c22d0b4/
Next:  python -m bench -m 'method=glob(*)' dataset=mtbench measure=quick            compare all methods
       python -m bench report                                                       all runs on one page
       python -m bench validate results/eagle-mtbench-smollm2-3f9a1c22d0b4/         check the records"""
    config = compose.compose(["method=eagle", "dataset=mtbench", "measure=quick"]).to_dict()
    got = terminal.render(summary(), PATH, config)
    assert [line.split() for line in got.splitlines()] == [line.split() for line in expected.splitlines()]


def test_columns_are_aligned_and_narrow() -> None:
    lines = terminal.render(summary(), PATH).splitlines()
    assert max(map(len, lines)) <= terminal.width()
    assert not any(line != line.rstrip() for line in lines)
    assert "\x1b" not in "".join(lines)
    values = [line for line in lines if line.startswith("  ") and line[2:3].isalpha()]
    assert all(line[17] == " " != line[18] for line in values) and len(values) == 8
    purposes = [line.index(word) for line in lines for word in ("all runs on", "check the") if word in line]
    assert len(purposes) == 2 and purposes[0] == purposes[1]


def test_an_invalid_run_says_why() -> None:
    reasons = ["The machine was not quiet; it must be. " + "Close other programs. " * 8, "Second; thing. Do it."]
    verdict = {"valid": False, "reasons": reasons, "warnings": ["Mind this."]}
    text = terminal.render(summary(verdict=verdict), PATH)
    assert f"RESULT: INVALID - 2 reasons     {PATH}/" in text
    assert "  1. The machine was not quiet" in text and "  2. Second; thing. Do it." in text
    assert "  warning: Mind this." in text
    assert max(map(len, text.splitlines())) <= terminal.width()
    assert "INVALID - 1 reason  " in terminal.render(summary(verdict=verdict | {"reasons": reasons[:1]}), PATH)


def test_an_inconclusive_run_says_why() -> None:
    """Also one from before this outcome, by its numbers."""
    text = terminal.render(summary(verdict={"valid": True, "reasons": [], "inconclusive": ["Too few. Do more."]}), PATH)
    assert f"RESULT: INCONCLUSIVE - 1 reason     {PATH}/" in text and "  1. Too few. Do more." in text
    wide = summary(verdict={"valid": True, "reasons": []})
    wide["speedup"]["headline"] |= {"value": 1.4, "low": 0.56, "high": 3.53, "n": 20}
    wide["speedup"]["total"]["value"] = 1.4  # of as many tokens
    assert "RESULT: INCONCLUSIVE - 2 reasons" in terminal.render(wide, PATH)
    assert terminal.leaderboard([wide]).splitlines()[-1].split()[-1] == "INCONCLUSIVE"


def test_null_is_not_measured_and_never_a_zero() -> None:
    kept = {key: summary()[key] for key in ("n_prompts", "guarantee", "verdict")}
    text = terminal.render(NAMES | with_nulls(summary()) | NAMES | kept | {"n_repeats": 1, "quality": {}}, PATH)
    assert text.count(terminal.MISSING) >= 8
    assert "None" not in text and "nan" not in text and " 0.00" not in text


def test_a_run_without_pairs_can_be_shown() -> None:
    derived = metrics.summarise([], guarantee="EXACT")
    text = terminal.render(NAMES | derived | {"verdict": asdict(audit([], derived))}, PATH)
    assert "RESULT: INVALID - 1 reason" in text and "mtbench: 0 prompts" in text


def test_agreement_of_drawn_tokens_gives_the_reason() -> None:
    drawn = dict.fromkeys(AGREEMENT) | {"reason": "tokens were drawn"}
    assert f"agreement       {terminal.MISSING}   tokens were drawn" in terminal.render(summary(agreement=drawn), PATH)


def test_sampling_and_lengths_are_named() -> None:
    drawn = summary(sampling={"temperature": 0.7, "top_k": 50, "top_p": 0.9}, batch_size=8, n_repeats=3)
    drawn["speedup"]["total"]["value"] = 1.2
    text = terminal.render(drawn, PATH)
    assert "temperature 0.7, top-k 50, top-p 0.9, batch 8" in text
    assert "interleaved, 3 repeats" in text and "total time 1.20x" in text
    assert "total time" not in terminal.render(summary(), PATH)
    of_texts = summary()
    of_texts["speedup"]["headline"]["of"], of_texts["speedup"]["per_token"] = "total", 1.3
    text = terminal.render(of_texts, PATH)
    assert "total time, 8 pairs" in text and "per token 1.30x" in text


def test_a_method_that_drafts_nothing_and_skips_layers() -> None:
    early = [sample for i in (1, 2) for sample in both(f"{i}/1", {}, {"step_layers": [1.0, 0.5, 0.3]})]
    text = terminal.render(NAMES | metrics.summarise(early, guarantee="RELAXED"), PATH)
    assert "nothing was drafted" in text and "layers/token    0.60" in text and "RESULT: not judged" in text


def test_rounds_that_only_the_baseline_times_are_called_plain() -> None:
    parts = {"draft_s": 1e-4, "pass_s": 0.02, "host_s": 5e-4, "busy_share": 0.9, "pass_bytes_per_s": None}
    plain, own = parts | {"round_s": 0.0206}, parts | {"round_s": 0.03}
    assert "plain round     20.6 ms" in terminal.render(summary(device_time={"baseline": plain}), PATH)
    text = terminal.render(summary(device_time={"baseline": plain, "method": own}), PATH)
    assert "  round           30 ms" in text and "plain round" not in text


def test_paths_are_relative_to_where_the_user_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "RESULT: VALID     results/x/\n" in terminal.render(summary(), tmp_path / "results" / "x")
    assert "RESULT: VALID     /elsewhere/x/\n" in terminal.render(summary(), "/elsewhere/x/")


def test_an_oracle_is_marked_and_has_no_rank() -> None:
    oracle = copy.deepcopy(summary(method="oracle")) | {"method_facts": {"oracle": True}}
    assert "RESULT: VALID ORACLE     " in terminal.render(oracle, PATH)
    text = terminal.leaderboard([oracle, summary()])
    assert "Not ranked: oracle (ORACLE: it drafts the target's own text)" in text
    assert [line.split()[-1] for line in text.splitlines() if line.startswith(("eagle", "oracle"))] == [
        "VALID",
        "ORACLE",
    ]


def test_leaderboard_ranks_and_marks() -> None:
    slow, broken = copy.deepcopy(summary(method="lookup")), copy.deepcopy(summary(method="wrong"))
    slow["speedup"]["headline"] |= {"value": 1.1, "low": None, "high": None}
    broken["speedup"]["headline"]["value"] = 9.0
    broken["verdict"] = {"valid": False, "reasons": ["x"], "warnings": []}
    lines = terminal.leaderboard([broken, slow, summary()]).splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("method"))
    assert [line.split()[0] for line in lines[header + 1 :]] == ["eagle", "lookup", "wrong"]
    assert [line.split()[-1] for line in lines[header:]] == ["result", "VALID", "VALID", "INVALID"]
    assert "1.46x" in lines[header + 1] and " - " in lines[header + 2]
    assert max(map(len, lines)) <= terminal.width()


def test_a_leaderboard_says_why_a_valid_run_has_no_rank_and_fits() -> None:
    names = ("a_method_of_a_long_name_and_settings=4", "b", "c", "d")
    runs = [summary(method=name) for name in names]
    runs[1]["baseline_tokens_per_s"] = 99.0
    runs[2] |= {"guarantee": "RELAXED"}
    assert "novel" not in terminal.leaderboard(runs), "no text here is known to be novel"
    runs[0]["speedup"]["novel"] |= {"value": 1.1, "n": 9}
    text = terminal.leaderboard(runs)
    assert "Not ranked: b (baseline 99 tokens/s, the table's 23: not measured under the same conditions); c" in text
    assert "c (quality unknown)" in " ".join(text.split()) and max(map(len, text.splitlines())) <= terminal.width()
    header = next(line.split() for line in text.splitlines() if line.startswith("method"))
    assert "novel" in header and "memory" not in header and "memory" in terminal.COLUMNS
    assert "Not ranked" not in terminal.leaderboard(runs[:1])


def test_novel_text_and_repetition_are_shown() -> None:
    relaxed = summary(guarantee="RELAXED")
    relaxed["speedup"]["novel"] |= {"value": 1.07, "low": 1.01, "high": 1.12, "n": 9}
    arm = {"distinct_4": 0.53, "longest_loop": 38.7, "repeated_lines": 0.2}
    relaxed["degeneration"] = {"method": arm, "baseline": arm | {"longest_loop": None}}
    lines = [" ".join(line.split()) for line in terminal.render(relaxed, PATH).splitlines()]
    assert "novel text 1.07x 95 % 1.01-1.12 worst 1.43x 0 % of the conversations slower" in lines
    assert any(line.startswith("repetition distinct 4-grams 0.53 (was 0.53) loops of tokens 38.7") for line in lines)
    assert terminal.COLUMNS["novel"](relaxed) == "1.07x"


@pytest.mark.parametrize("key", terminal.JOIN_KEYS)
def test_runs_of_different_kinds_are_not_joined(key: str) -> None:
    with pytest.raises(UserError, match=rf"differ in {key}: .*other.*Make one"):
        terminal.leaderboard([summary(), summary(**{key: "other"})])


def test_no_runs_make_no_leaderboard() -> None:
    with pytest.raises(UserError, match="at least one run, got none"):
        terminal.leaderboard([])


def test_few_pairs_have_no_interval_and_no_change_of_memory_has_a_plus() -> None:
    found = summary()
    total = found["speedup"]["total"] | {"n": 2, "low": 0.03, "high": 89.75}
    found |= {"speedup": {"total": total}, "peak_memory_bytes": 437 * 2**20 - 9}
    text = terminal.render(found, PATH)
    assert "95 % not measured (2 pairs)   total time   predicted" in text
    assert "437 MiB    +0 MiB against the baseline" in text
    assert terminal.COLUMNS["95 %"](found) == terminal.MISSING
