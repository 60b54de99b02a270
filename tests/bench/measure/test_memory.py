"""Memory of a run: its peak does not depend on what ran before it in the process, and its parts are named."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.config import compose
from bench.config.schema import PathsConfig, RunConfig
from bench.contract import checks
from bench.measure import instruments
from bench.measure.run import run
from bench.report import terminal
from bench.utils import machine
from methods.engine.sampling import Sampling
from methods.engine.seq2seq_lm import Seq2SeqLM
from methods.speculative.bild import Bild
from methods.speculative.speculative_sampling import SpeculativeSampling
from tests.engine import test_seq2seq_lm

MIB = 1 << 20
LARGE = [
    *("model=random", "model.hidden_size=512", "model.heads=8", "model.layers=6", "model.vocab_size=16000"),
    *("hardware=cpu_fp32", "hardware.threads=1"),
]
QUICK = ["measure.warmup=0", "measure.cost_curve=false", "measure.agreement=false", "measure.bootstrap_samples=100"]


@pytest.fixture
def cfg(tmp_path: Path) -> RunConfig:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "".join(json.dumps({"question_id": i, "category": "chat", "turns": [f"Say {i} {i}."]}) + "\n" for i in range(2))
    )
    words = [*LARGE, "dataset=jsonl", f"dataset.path={file}", "batch_size=2"]
    composed = compose.compose(["method=prompt_lookup", "method.costs=null", *words, *QUICK, "max_new_tokens=3"])
    return replace(composed, paths=PathsConfig(results=str(tmp_path / "results"), cache=str(tmp_path / "cache")))


needs_peaks = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists() or instruments.settled_bytes() is None, reason="Linux only"
)


@needs_peaks
def test_a_second_run_in_the_process_has_the_memory_of_the_first(cfg: RunConfig) -> None:
    outcomes = [run(replace(cfg, seed=seed)) for seed in range(3)]
    peaks = [outcome.summary["peak_memory_bytes"] for outcome in outcomes]
    if None in peaks:
        pytest.skip("this system does not let a process reset its peak")
    weights = outcomes[0].summary["memory"]["weights"]
    assert weights > 80 * MIB
    assert min(peaks) > weights, "what a run multiplies with is in its peak"
    assert max(peaks[1:]) - min(peaks[1:]) < weights / 5, peaks


@needs_peaks
def test_the_memory_of_code_does_not_count(tmp_path: Path) -> None:
    """In a process of its own, which loads all libraries during the run."""
    file, results = tmp_path / "prompts.jsonl", tmp_path / "results"
    prompt = {"question_id": 1, "category": "chat", "turns": ["Say so."], "reference": ["So."]}
    file.write_text(json.dumps(prompt) + "\n")
    words = [*LARGE, "dataset=jsonl", f"dataset.path={file}", "dataset.scorer=rouge", f"paths.results={results}"]
    method = ["method=prompt_lookup", "method.costs=null", "max_new_tokens=3"]
    command = [sys.executable, "-m", "bench", *method, *words, *QUICK]
    subprocess.run(command, capture_output=True, timeout=300)  # INVALID on a busy machine
    summary = json.loads(next(results.glob("*/summary.json")).read_text())
    if summary["peak_memory_bytes"] is None:
        pytest.skip("this system does not let a process reset its peak")
    assert summary["peak_memory_bytes"] < 1.2 * (summary["memory"]["weights"] + summary["memory"]["cache"])


@needs_peaks
def test_freed_memory_is_not_counted_as_there_before() -> None:
    first = instruments.settled_bytes()
    blocks = [torch.ones(25_000) for _ in range(400)]  # each too small to be mapped on its own, 38 MiB in all
    last = blocks.pop()  # on top of the others, which therefore are not given back as they are freed
    ring: list[object] = [torch.ones(64 * MIB // 4)]
    ring.append(ring)  # only the collector finds it
    del blocks, ring
    second = instruments.settled_bytes()
    assert first is not None and second is not None and second - first < 16 * MIB
    assert len(last) == 25_000


def test_the_parts_are_in_the_record_and_in_the_table(cfg: RunConfig) -> None:
    outcome = run(cfg)
    memory = json.loads((outcome.path / "manifest.json").read_text())["memory"]
    heads, dim, layers = 2, 64, 6
    longest = max(len(f"Say {i} {i}.") for i in range(2)) + 3
    per_token = layers * 2 * heads * dim * 4
    assert memory["cache"] % (2 * per_token) == 0 and memory["cache"] >= 2 * longest * per_token
    assert outcome.summary["memory"] == memory and memory["weights"] > 80 * MIB
    text = terminal.render(outcome.summary, outcome.path)
    assert f"weights {memory['weights'] / MIB:.0f} MiB" in text and f"cache {memory['cache'] / MIB:.0f} MiB" in text
    assert outcome.summary["energy_j_per_token"] is None and "energy" not in text, "no counter on a CPU"


def test_a_draft_model_is_a_part_of_its_own() -> None:
    target, draft = checks.tiny_target(), checks.tiny_target(layers=1, seed=5)
    weights = {"draft_model": draft.weight_bytes}
    assert SpeculativeSampling(target, Sampling(), draft_model=draft).memory() == weights
    assert Bild(target, Sampling(), draft_model=draft).memory() == weights
    assert SpeculativeSampling(target, Sampling(), skip_mlp=[1]).memory() == {}, "a view of the target"
    translator = Seq2SeqLM.from_hf(test_seq2seq_lm.tiny("bart"))
    assert SpeculativeSampling(translator, Sampling(), draft_model=translator).memory() == {
        "draft_model": translator.weight_bytes + translator.encoder_bytes
    }


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (
            "700.00, 1980, 1980, 2619, 41, 0x0000000000000004",
            (700.0, 1980.0, 1980.0, 2619.0, 41.0, "0x0000000000000004"),
        ),
        (
            "[N/A], 300, [Not Supported], 800, 50, 0x0000000000000000",
            (None, 300.0, None, 800.0, 50.0, "0x0000000000000000"),
        ),
        (None, (None,) * 6),
    ],
)
def test_the_state_of_a_gpu(answer: str | None, found: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_nvidia_smi", lambda question, device: answer)
    state = machine.gpu_state(torch.device("cuda"))
    assert state is not None and tuple(state.values()) == found
    assert list(state)[0] == "power_limit_w" and list(state)[-1] == "throttled_by"
    assert machine.gpu_state(torch.device("cpu")) is None
