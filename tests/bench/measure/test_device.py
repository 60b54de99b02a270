"""What a run sees of its device: traces, energy over blocks, clocks over time, limits, kernels of the attention."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.config import compose
from bench.config.schema import PathsConfig, RunConfig
from bench.contract import checks
from bench.measure import instruments, probes, profiling
from bench.measure.instruments import ClockLog, EnergyMeter
from bench.measure.run import run
from bench.records.run_folder import read_manifest, read_samples, validate
from methods.engine import causal_lm
from methods.engine.attention_kernels import attention_kernels
from methods.engine.causal_lm import CausalLM
from methods.engine.cuda_graphs import GraphedLM
from methods.engine.sampling import Sampling
from methods.speculative.prompt_lookup import PromptLookup


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(probes, "ARRAY_BYTES", {"cpu": 1 << 20})
    words = ["model=random", "dataset=demo", "dataset.limit=2", "hardware=cpu_fp32", "hardware.threads=1"]
    more = ["max_new_tokens=24", "measure.warmup=1", "measure.bootstrap_samples=100", "measure.cost_curve=false"]
    composed = compose.compose(["method=prompt_lookup", *words, *more, "measure.profile=true"])
    return replace(composed, paths=PathsConfig(results=str(tmp_path / "results"), cache=str(tmp_path / "cache")))


def operators_in_rounds(events: list[dict[str, Any]]) -> int:
    """Operators between the first round and the last that no other one of their thread calls."""
    rounds = [event for event in events if event["name"] == "round" and event.get("cat") == "user_annotation"]
    start, end = min(event["ts"] for event in rounds), max(event["ts"] + event["dur"] for event in rounds)
    spans = [(e["tid"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "cpu_op" and e["ph"] == "X"]

    def called(own: tuple[int, float, float]) -> bool:
        return any(own != span and own[0] == span[0] and span[1] <= own[1] and own[2] <= span[2] for span in spans)

    return sum(start <= span[1] < end and not called(span) for span in spans)


def test_a_run_records_its_rounds_its_limits_and_a_trace(
    cfg: RunConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal_lm, "_SHORT", 0)  # several rounds in one call have no operators of torch
    outcome = run(cfg)
    manifest, samples = read_manifest(outcome.path) or {}, read_samples(outcome.path)
    assert validate(outcome.path) == []
    for sample in samples:
        assert sample.step_pass_ns is not None and len(sample.step_pass_ns) == len(sample.step_ns)
        drafts = [ns or 0 for ns in sample.step_draft_ns]
        parts = zip(sample.step_ns, drafts, sample.step_pass_ns, strict=True)
        assert all(passed > 0 and draft + passed <= whole for whole, draft, passed in parts)
    found = outcome.summary["device_time"]
    for arm in ("baseline", "method"):
        assert 0 < found[arm]["pass_s"] < found[arm]["round_s"] and 0 < found[arm]["busy_share"] < 1
        assert found[arm]["pass_bytes_per_s"] > 0 and found[arm]["pass_share_of_peak"] > 0
        traced = manifest["profile"][arm]
        assert traced["rounds"] == profiling.ROUNDS and traced["busy_share"] is None and traced["launches"] is None
        assert traced["operations"] > 10 and sum(traced["longest"].values()) <= 1 + 1e-9
        events = json.loads(gzip.decompress((outcome.path / f"trace_{arm}.json.gz").read_bytes()))
        assert traced["operations"] * profiling.ROUNDS == pytest.approx(operators_in_rounds(events["traceEvents"]))
        assert sum(event["name"] == "round" for event in events["traceEvents"]) == profiling.ROUNDS
        assert "traceName" not in events, "a path of this machine"
    assert manifest["attention"]["prompt"] and manifest["memory"]["planned"] == manifest["memory_plan"]["total"]
    shown = capsys.readouterr().out
    assert "of the measured peak" in shown and "traced round" in shown and " planned " in shown.replace("\n", " ")


def test_rounds_of_one_call_have_their_own_times(cfg: RunConfig) -> None:
    outcome = run(replace(cfg, measure=replace(cfg.measure, profile=False)))
    samples = [sample for sample in read_samples(outcome.path) if sample.arm == "baseline"]
    assert samples
    for sample in samples:
        assert sample.step_pass_ns is not None
        assert all(0 < passed <= whole for whole, passed in zip(sample.step_ns, sample.step_pass_ns, strict=True))
        assert sum(sample.step_ns) == sample.batch_ns


def test_bytes_read_are_those_of_all_matrices_but_the_embedding(cfg: RunConfig) -> None:
    lm = checks.tiny_target()
    from bench.measure.manifest import bytes_read

    found = bytes_read(lm, [])
    matrices = lm.weight_bytes - lm.vocab_size * lm.hidden_size * lm.dtype.itemsize
    assert found == {"token": lm.token_bytes, "tokens": [1], "weights": [float(matrices)]}


class Counter:
    """Joules that rise by 3 with every reading."""

    def __init__(self) -> None:
        self.read = 0

    def __call__(self) -> float:
        self.read += 1
        return 3.0 * self.read


def test_energy_is_that_of_a_block_of_each_arm(cfg: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter()
    monkeypatch.setattr(EnergyMeter, "joules", lambda self: counter())
    outcome = run(replace(cfg, measure=replace(cfg.measure, profile=False, energy_block_s=0.2)))
    blocks = (read_manifest(outcome.path) or {})["energy"]
    for arm, shown in (("method", outcome.summary), ("baseline", outcome.summary["baseline"])):
        block = blocks[arm]
        assert block["seconds"] >= 0.2 and block["tokens"] >= 24 and block["tokens"] % 24 == 0
        assert block["joules"] % 3 == 0 and block["joules"] > 0
        assert shown["energy_j_per_token"] == block["joules"] / block["tokens"]
    none = run(replace(cfg, measure=replace(cfg.measure, profile=False, energy_block_s=0.0)))
    assert "energy" not in (read_manifest(none.path) or {}), "not asked for"


def test_clocks_are_read_at_most_once_a_second_and_thinned_in_long_runs() -> None:
    now, clock = [0.0], iter(range(10**6))
    log = ClockLog(lambda: (float(next(clock)), None, 70.0, None, None), clock=lambda: now[0])
    for _ in range(4):
        log.note()
        now[0] += 0.5
    assert [row[0] for row in log.readings] == [0.0, 1.0]
    assert log.to_manifest() == {"columns": ["s", "mhz", "power_w"], "readings": [[0.0, 0.0, 70.0], [1.0, 1.0, 70.0]]}
    for _ in range(ClockLog.MOST + 50):
        now[0] += 1.0
        log.note()
    assert len(log.readings) <= ClockLog.MOST
    gaps = {later[0] - earlier[0] for earlier, later in zip(log.readings[1:], log.readings[2:], strict=False)}  # type: ignore[operator]
    assert gaps == {2.0}
    still = ClockLog(lambda: (2596.1, None, None, None, None), clock=lambda: now[0])
    for _ in range(5):
        still.note()
        now[0] += 10.0
    assert [row[0] - still.readings[0][0] for row in still.readings] == [0.0, 10.0, 20.0, 30.0, 40.0]
    assert still.to_manifest()["readings"] == [[0.0, 2596.1], [40.0, 2596.1]]
    silent = ClockLog(lambda: None)
    silent.note()
    assert silent.readings == []
    here = instruments.clock_sensor(torch.device("cpu"))()
    assert here is None or (len(here) == len(ClockLog.COLUMNS) - 1 and (here[0] or 0) > 0)


def event(name: str, cat: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 1, "tid": tid}


def test_facts_of_a_trace_from_a_gpu() -> None:
    rounds = [event("round", "user_annotation", start, 90) for start in (100, 200)]
    kernels = [
        event("attention", "kernel", 110, 30, 7),
        event("attention", "kernel", 130, 20, 8),  # of another stream at the same time: 40 us in all
        event("copy", "gpu_memcpy", 210, 10, 7),
        event("before", "kernel", 50, 40, 7),
    ]
    host = [event(name, "cuda_runtime", ts, 1) for name, ts in (("cudaGraphLaunch", 105), ("cudaLaunchKernel", 205))]
    more = [event("cudaLaunchKernel", "cuda_runtime", 45, 1), event("aten::mm", "cpu_op", 104, 50)]
    found = profiling.facts([*rounds, *kernels, *host, *more, {"ph": "M", "name": "process_name"}])
    assert found["rounds"] == 2 and found["round_us"] == 95.0
    assert found["busy_share"] == pytest.approx((40 + 10) / 190)
    assert found["launches"] == 1.0 and found["operations"] == 1.5
    assert list(found["longest"]) == ["attention", "copy"] and found["longest"]["copy"] == pytest.approx(10 / 60)


def test_facts_of_a_trace_from_a_cpu_count_the_outermost_operators() -> None:
    rounds = [event("round", "user_annotation", 0, 100)]
    nested = [event("aten::linear", "cpu_op", 10, 40), event("aten::addmm", "cpu_op", 12, 30)]
    found = profiling.facts([*rounds, *nested, event("aten::add", "cpu_op", 60, 10)])
    assert found["operations"] == 2 and found["busy_share"] is None and found["launches"] is None
    assert found["longest"] == {"aten::linear": 0.8, "aten::add": 0.2}
    assert profiling.facts(nested) == {"rounds": 0}


def test_a_short_text_has_fewer_traced_rounds() -> None:
    decoder = PromptLookup(checks.tiny_target(), Sampling())
    found = profiling.trace(decoder, [torch.arange(4, 12)], 2, torch.Generator().manual_seed(0))
    assert found.facts()["rounds"] <= 2


def test_attention_kernels_are_named() -> None:
    target = checks.tiny_target()
    assert set(attention_kernels(target).values()) <= {"math", "flash"}
    assert set(attention_kernels(GraphedLM.of(target, capture=False))) == {"one token", "tree", "prompt"}
    fused = CausalLM.from_hf(checks.tiny_target().hf.float(), linear="panels")
    if fused.fused:
        assert set(attention_kernels(fused).values()) == {"cpp"}
