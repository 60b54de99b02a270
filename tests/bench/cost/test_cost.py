"""Costs: bytes and FLOPs by hand, the grid with a fake clock, predictions by hand, random weights without results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.analysis import metrics, peaks
from bench.analysis.cost_curve import CostCurve, CostSurface
from bench.config import compose
from bench.config.schema import PathsConfig, RunConfig
from bench.cost import command, records, roofline, what_if
from bench.cost import measure as cost_measure
from bench.cost.command import main, query, split
from bench.cost.records import CostFolder, curves, read_lines, read_summary, spread
from bench.cost.settings import Grid, WhatIfQuery
from bench.cost.what_if import Chain, Drafting, chain_forecast, chain_of, lockstep, replay
from bench.errors import UserError
from bench.measure import preconditions, probes, verify_cost
from bench.measure.run import run
from bench.models import architectures, loading, source
from bench.models.architectures import ARCHITECTURES, Architecture
from bench.models.random_weights import RandomModel
from bench.records.run_folder import Sample, read_manifest, read_samples
from bench.utils import memory
from methods.engine.cpu_kernels import library
from tests.helpers.sample_rows import MS, both, row

ROOT = Path(__file__).resolve().parents[3]
RUNS = sorted(path.parent for path in ROOT.glob("results/reference/*/samples.jsonl.gz"))[::6]
TINY = Architecture("llama", 300, 32, 48, 2, 4, 2, 8, 256, source="this test")
FP32 = {"device": "cpu", "dtype": "float32", "threads": 1, "linear": "plain"}


# --------------------------------------------------------------------------------------------------- architectures


PUBLISHED = {  # parameters, as the model cards or papers count them
    "smollm2": 134_515_008,
    "tinyllama_1b": 1_100_048_384,
    "llama32_1b": 1_235_814_400,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "qwen25_7b": 7_615_616_512,
    "qwen3_8b": 8_190_735_360,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
    "gpt_oss_20b": 20_914_757_184,
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_has_the_published_number_of_parameters(name: str) -> None:
    from transformers import AutoModelForCausalLM

    shape = ARCHITECTURES[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.transformers_config())
    model.tie_weights()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == PUBLISHED[name]
    assert 0 <= count - shape.stored_weights < 0.0005 * count, "all but norms and biases"
    assert replace(Architecture.of(model.config), source=shape.source) == shape
    assert shape.source


def test_an_unknown_architecture_is_named_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"'llama3_7b'\. Did you mean 'llama"):
        architectures.architecture("llama3_7b")


# -------------------------------------------------------------------------------------------------- bytes and FLOPs


def test_work_of_a_pass_by_hand() -> None:
    # One layer: queries 4 x 8, keys and values 2 x 2 x 8, output 4 x 8, all times 32; three matrices of 32 x 48.
    layer = 32 * 8 * (4 + 2 * 2 + 4) + 3 * 32 * 48
    assert TINY.layer_weights == layer == 7680
    matrices = 2 * layer + 300 * 32
    found = roofline.work(TINY, itemsize=2, batch=3, nodes=4, context=10)
    seen = 3 * (11 + 12 + 13 + 14)  # node i of a chain sees the context, those before it and itself
    assert found.flops == 2 * 12 * matrices + 2 * (2 + 2) * 4 * 8 * seen
    assert found.weight_bytes == 2 * matrices
    assert found.cache_bytes == 2 * (2 * 2 * 2 * 8) * (3 * 14 + 12)  # layers, keys and values, heads, width
    assert found.other_bytes == 2 * 12 * (32 + 300)
    assert found.to_dict()["bytes"] == found.bytes == 2 * matrices + 2 * 64 * 54 + 2 * 12 * 332


SPARSE = replace(  # two of three layers have experts, and one has a window
    TINY,
    family="qwen2_moe",
    layers=3,
    experts=6,
    active_experts=2,
    expert_size=24,
    shared_size=40,
    sparse_layers=2,
    window=5,
    window_layers=1,
)


def test_work_of_a_sparse_pass_by_hand() -> None:
    always = 3 * 32 * 8 * 12 + 3 * 32 * 48 + 2 * (6 + 3 * 40 + 1) * 32 + 300 * 32
    expert = 3 * 24 * 32
    assert SPARSE.stored_weights == always + 2 * 6 * expert + 300 * 32
    assert SPARSE.layer_weights == 32 * 8 * 12 + (6 + 3 * 40 + 1) * 32 + 6 * expert
    found = roofline.work(SPARSE, itemsize=2, batch=3, nodes=4, context=3)
    touched = 6 * (1 - (4 / 6) ** 12)  # of six experts, by 12 tokens
    assert found.weight_bytes == pytest.approx(2 * (always + 2 * touched * expert), abs=1)
    seen = 2 * (4 + 5 + 6 + 7) + (4 + 5 + 5 + 5)  # the last layer has a window of five
    assert found.flops == 2 * 12 * (always + 2 * 2 * expert) + 4 * 4 * 8 * 3 * seen
    assert found.cache_bytes == 2 * (2 * 2 * 8) * 3 * (3 * 7 + 3 * 4)  # reads and writes; 7 slots are within reach
    long = roofline.work(SPARSE, itemsize=2, batch=1, nodes=2, context=100)
    assert long.cache_bytes == 2 * (2 * 2 * 8) * (2 * 102 + 6 + 3 * 2)  # five before the last of two nodes, and itself
    assert SPARSE.with_layers(6) == replace(SPARSE, layers=6, sparse_layers=4, window_layers=2)


def test_a_sparse_model_is_counted_as_the_engine_counts_it() -> None:
    from tests.engine.test_causal_lm import CausalLM
    from tests.engine.test_causal_lm import tiny as model_of

    options = {"decoder_sparse_step": 2, "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 3}
    lm = CausalLM.from_hf(model_of("qwen2_moe", **options), linear="plain")
    shape = Architecture.of(lm.config)
    assert (shape.sparse_layers, shape.window, shape.window_layers, shape.shared_size) == (2, 5, 2, 40)
    for tokens in (1, 3, 50):
        wanted = lm.pass_bytes(tokens) - 4 * shape.head_weights  # the embedding is looked up
        assert roofline.work(shape, 4, 1, tokens, 1).weight_bytes == pytest.approx(wanted, abs=1)
    assert 4 * shape.stored_weights == lm.weight_bytes


def test_weight_bytes_are_those_the_engine_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded = load_tiny(monkeypatch, tmp_path)
    found = roofline.work(Architecture.of(loaded.lm.config), 4, 1, 1, 1)
    embedding = 4 * 300 * 32  # looked up, not multiplied with
    assert found.weight_bytes == loaded.lm.weight_bytes - embedding


def test_a_single_token_of_a_large_model_is_bound_by_memory_and_a_block_is_not() -> None:
    shape = ARCHITECTURES["llama3_8b"]
    single, block = (roofline.work(shape, 2, batch, nodes, 512) for batch, nodes in ((1, 1), (32, 64)))
    assert single.flops == pytest.approx(2 * 7.505e9, rel=0.02)
    assert single.weight_bytes == pytest.approx(15.0e9, rel=0.01)
    assert single.flops / single.bytes == pytest.approx(1, abs=0.1) and block.flops / block.bytes > 500


def test_peaks_are_the_best_repeat_and_the_median() -> None:
    timings = {"triad": [4, 2, 8], "sum": [5], "matmul": [10, 20]}
    found = peaks.peaks(timings, {"triad": 16, "sum": 50, "matmul": 100})
    assert found["triad"] == {"best": 8e9, "median": 4e9}
    assert peaks.peak_bandwidth(found) == 10e9 and peaks.peak_flops(found) == 10e9
    assert peaks.peak_bandwidth({}) is None and peaks.peak_flops({}) is None
    assert roofline.limits(found) == "10 GB/s, 0.01 TFLOP/s" and roofline.limits({}) is None
    assert roofline.limits({"sum": {"best": 4e12}, "matmul": {"best": 7.004e14}}) == "4,000 GB/s, 700 TFLOP/s"


def test_probes_do_what_they_are_counted_for() -> None:
    where = (torch.device("cpu"), torch.bfloat16)
    triad, total, matmul = [*probes.of_memory(*where, 4096), *probes.of_arithmetic(*where, "plain", 64)]
    assert (triad.amount, total.amount, matmul.amount) == (3 * 4096, 4096, 2 * 64**3)
    filled: Any = triad.call()
    assert filled.dtype == torch.bfloat16 and filled.numel() == 2048 and bool((filled == 1.5).all())
    product: Any = matmul.call()
    assert product.shape == (64, 64) and product.dtype == torch.bfloat16
    ticks = iter((1000, 1700))
    assert probes.time_probe(total, torch.device("cpu"), lambda: next(ticks)) == 700


# ----------------------------------------------------------------------------------------------------- the surface


ONE = CostCurve((1, 3), 1, (100,), ((1.0, 2.0),))
FOUR = CostCurve((1, 3), 4, (100,), ((4.0, 8.0),))


def test_a_surface_is_linear_between_batch_sizes() -> None:
    surface = CostSurface((ONE, FOUR))
    assert [surface.seconds(1, batch, 50) for batch in (1, 2, 3, 4)] == [1.0, 2.0, 3.0, 4.0]
    assert surface.seconds(2, 2, 100) == pytest.approx(1.5 + (6.0 - 1.5) / 3)
    assert CostSurface((FOUR,)).seconds(1, 2, 100) == 4.0, "a smaller batch than any measured is priced as that one"
    with pytest.raises(ValueError, match="4 rows and cannot price 5"):
        surface.seconds(1, 5, 100)
    assert CostSurface.from_dict(list(reversed(surface.to_dict()))) == surface


def test_a_run_records_the_curve_of_all_rows_and_beside_it_those_of_fewer() -> None:
    surface = CostSurface((ONE, FOUR))
    stored = json.loads(json.dumps(surface.to_manifest()))
    assert CostCurve.from_dict(stored) == FOUR, "readers of one curve find that of the batch"
    assert CostSurface.from_manifest(stored) == surface
    assert CostSurface.from_manifest(FOUR.to_dict()) == CostSurface((FOUR,)), "as older records have it"


# ---------------------------------------------------------------------------------------------------- the what-if


def price(nodes: int, batch: int, context: int) -> float:
    """8 ms, 1 ms per node of every row, 0.01 ms per token of context."""
    return (8 + nodes * batch + 0.01 * context) / 1000


RUN = both(
    "1/1",
    {"ms": [20, 10, 10, 10], "tokens": [1, 1, 1, 1]},
    {"ms": [20, 18], "tokens": [1, 3], "depth": [0, 4], "accepted": [0, 2], "step_draft_ns": [None, 2 * MS]},
)


def test_replay_by_hand() -> None:
    baseline, method = (9 + 1.01) + (9 + 1.02) + (9 + 1.03), (8 + 5 + 1.01) + 2
    assert replay(RUN, price, prefill=True) == pytest.approx((20 + baseline) / (20 + method))
    assert replay(RUN, price) == pytest.approx(baseline / method)
    assert replay(RUN, price, drafting=Drafting(0.005)) == pytest.approx(baseline / (method + 3))
    faster = replay(RUN, lambda nodes, batch, context: 0.001)  # passes cost the same for any number of nodes
    assert faster == pytest.approx(3 / 3)


def test_replay_prices_a_drafter_by_its_passes() -> None:
    modelled = [replace(s, step_draft_passes=[0, 4]) if s.arm == "method" else s for s in RUN]
    flat = replay(modelled, lambda nodes, batch, context: 0.010, drafting=Drafting(0.003, passes=2))
    assert flat == pytest.approx(30 / (10 + 6)), "4 passes of 1.5 ms"
    unknown = [replace(s, step_draft_ns=[None, None]) if s.arm == "method" else s for s in modelled]
    assert replay(unknown, price) is None


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_replay_is_the_prediction_of_a_run_from_its_own_curve(folder: Path) -> None:
    manifest, summary = read_manifest(folder) or {}, json.loads((folder / "summary.json").read_text())
    if manifest.get("cost_curve") is None or metrics.one_pass(manifest):
        pytest.skip("measured no curve, or has no rounds to price")
    curve = what_if.own_curve(folder, manifest)
    over = metrics.cost_over_layers(manifest)
    found = replay(read_samples(folder), curve.price.seconds, prefill=True, cost_over_layers=over)
    assert found == (None if summary["predicted_speedup"] is None else pytest.approx(summary["predicted_speedup"]))


def two_prompts() -> list[Sample]:
    """The baseline writes 4 and 2 tokens; the method needs rounds of 3 and 2 nodes, then one of 1 for the first row."""
    long = {"ms": [20, 12, 12], "tokens": [1, 2, 1], "depth": [0, 2, 0], "accepted": [0, 1, 0]}
    return [
        *both("1/1", {"ms": [20, 9, 9, 9]}, long | {"step_draft_ns": [None, 2 * MS, 1 * MS]}),
        *both(
            "2/1",
            {"ms": [20, 9], "tokens": [1, 1]},
            {"ms": [20, 11], "tokens": [1, 1], "depth": [0, 1], "accepted": [0, 0], "step_draft_ns": [None, 3 * MS]},
        ),
    ]


def test_regrouping_by_hand() -> None:
    made = {(s.arm, s.prompt_id): s for s in lockstep(two_prompts(), 2)}
    assert {s.batch for s in made.values()} == {0} and {s.batch_size for s in made.values()} == {2}
    assert made["method", "1/1"].step_nodes == [1, 3, 1] and made["method", "2/1"].step_nodes == [1, 3]
    assert made["method", "1/1"].step_draft_ns == [None, 5 * MS, 1 * MS], "row by row, on the host"
    assert made["baseline", "2/1"].step_nodes == [1, 1]
    assert made["baseline", "1/1"].step_rows == [2, 2, 1, 1], "the other row leaves when its text has ended"

    def flat(nodes: int, batch: int, context: int) -> float:
        return (10 + nodes * batch) / 1000

    # The longest row sees all rounds. Baseline: 12 and 2 x 11 ms; method: 16 + 5 and 11 + 1.
    assert replay(two_prompts(), flat, batch=2) == pytest.approx(34 / 33)
    assert replay(two_prompts(), flat, batch=2, drafting=Drafting(0.001)) == pytest.approx(34 / 29), "of a batch"


def test_drafts_of_a_model_are_made_for_all_rows_at_once() -> None:
    passes = {"1/1": [0, 1, 1], "2/1": [0, 1]}
    modelled = [s if s.arm == "baseline" else replace(s, step_draft_passes=passes[s.prompt_id]) for s in two_prompts()]
    made = {(s.arm, s.prompt_id): s for s in lockstep(modelled, 2)}
    assert made["method", "1/1"].step_draft_ns == [None, 3 * MS, 1 * MS]


def test_regrouping_keeps_turns_and_repeats_apart_and_leaves_a_smaller_last_batch() -> None:
    samples = [s for n in (1, 2, 3) for turn in (1, 2) for s in both(f"{n}/{turn}", {}, {})]
    samples += [replace(s, repeat=1) for s in samples]
    made = lockstep(samples, 2)
    groups = {(s.batch, s.repeat, s.arm): set() for s in made}
    for s in made:
        groups[s.batch, s.repeat, s.arm].add(s.prompt_id)
    found = {frozenset(group) for group in groups.values()}
    assert found == {frozenset(g) for g in (("1/1", "2/1"), ("3/1",), ("1/2", "2/2"), ("3/2",))}
    assert all(s.batch_size == len(groups[s.batch, s.repeat, s.arm]) for s in made)
    assert replay(samples, price, batch=2) == pytest.approx(1.0)


def test_larger_batches_cannot_be_taken_apart() -> None:
    samples = [replace(s, batch=0, batch_size=2) for s in two_prompts()]
    assert lockstep(samples, 2) == samples
    with pytest.raises(ValueError, match="batches of 2"):
        lockstep(samples, 1)


# ------------------------------------------------------------------------------------------------------- the chain


def steady(alpha: float, length: int, draft: Drafting | None) -> Chain:
    reach = tuple(alpha**place for place in range(1, length + 1))
    return Chain(reach, (1.0,) * length, alpha, draft, context=100.0, batch=1)


@pytest.mark.parametrize("gamma", [0, 1, 3, 5, 8])
def test_a_steady_chain_is_leviathans_theorem(gamma: int) -> None:
    # 3 recorded positions of 2 ms each, passes of 10 ms whatever they score: c = 0.2
    chain = steady(0.7, 3, Drafting(0.006, passes=3))
    found = chain_forecast(chain, gamma, lambda nodes, batch, context: 0.010)
    assert found.speedup == pytest.approx(sum(0.7**place for place in range(gamma + 1)) / (0.2 * gamma + 1))
    assert found.draft_s == pytest.approx(0.002 * gamma)


def test_a_chain_by_hand() -> None:
    # Six rounds: no draft, 0 of 2, 1 of 2, 2 of 2, 0 of 1, 1 of 1
    rounds = {"depth": [0, 0, 2, 2, 2, 1, 1], "accepted": [0, 0, 0, 1, 2, 0, 1], "tokens": [1, 1, 1, 2, 3, 1, 2]}
    samples = [row("baseline", ms=[9] * 11), row(ms=[9] * 7, step_draft_ns=[None, *[3 * MS] * 6], **rounds)]
    chain = chain_of(samples)
    assert chain.had == pytest.approx((5 / 6, 3 / 6)) and chain.reach == pytest.approx((3 / 6, 1 / 6))
    assert chain.alpha == pytest.approx(4 / 7)  # accepted 4; judged 1 + 2 + 2 + 1 + 1
    assert chain.drafting is not None and chain.drafting.passes == 0
    assert chain.drafting.seconds == pytest.approx(0.003)
    assert chain.context == pytest.approx(100 + (1 + 2 + 3 + 5 + 8 + 9) / 6)
    assert chain.tokens(2) == pytest.approx(10 / 6), "what was committed per round"
    assert chain.tokens(1) == pytest.approx(1.5) and chain.tokens(0) == 1.0
    assert chain.tokens(4) == pytest.approx(10 / 6 + (1 / 6) * (4 / 7) + (1 / 6) * (4 / 7) ** 2)
    assert chain.sizes(2, 1) == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    assert chain.sizes(2, 2) == pytest.approx([1 / 36, 1 / 4 - 1 / 36, 3 / 4]), "the longest of two rows"
    assert sum(chain.sizes(5, 3)) == pytest.approx(1.0)

    def linear(nodes: int, batch: int, context: int) -> float:
        return (8 + nodes * batch) / 1000

    found = chain_forecast(chain, 1, linear)
    assert found.speedup == pytest.approx(1.5 * 9 / (3 + (1 / 6) * 9 + (5 / 6) * 10))
    two = chain_forecast(chain, 1, linear, batch=2)
    assert two.draft_s == pytest.approx(0.006), "searched for in both rows"
    assert two.speedup == pytest.approx(1.5 * 10 / (6 + (1 / 36) * 10 + (35 / 36) * 12))
    assert chain_forecast(chain, 1, linear, drafting=Drafting(0.0)).speedup == pytest.approx(1.5 * 9 / (9 + 5 / 6))


def test_at_the_recorded_length_a_chain_forecast_is_the_replay_of_full_drafts() -> None:
    rounds = {"depth": [0, 2, 2, 2], "accepted": [0, 2, 0, 1], "tokens": [1, 3, 1, 2]}
    samples = [row("baseline", ms=[9] * 7), row(ms=[9] * 4, step_draft_ns=[None, *[2 * MS] * 3], **rounds)]

    def no_context(nodes: int, batch: int, context: int) -> float:
        return (5 + 2 * nodes) / 1000

    found = chain_forecast(chain_of(samples), 2, no_context)
    assert found.speedup == pytest.approx(replay(samples, no_context))


@pytest.mark.parametrize(
    "changes", [{"step_drafted": [0, 5, 5]}, {"step_target_passes": [1, 2, 1]}, {"step_layers": [1.0, 0.5, 1.0]}]
)
def test_only_chains_have_a_draft_length(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Leave gamma out"):
        chain_of(both("1/1", {}, {"tokens": [1, 2, 2]} | changes))


def test_a_drafter_that_was_not_timed_gives_no_forecast() -> None:
    assert chain_forecast(chain_of(both("1/1", {}, {"tokens": [1, 2, 2]})), 1, price).speedup is None


# ------------------------------------------------------------------------------------------------------ the records


def test_curves_are_whole_tables() -> None:
    found = {(1, c, n): [n * c * 1_000_000] * 3 for c in (10, 20) for n in (1, 2, 4)} | {(2, 10, 1): [5_000_000]}
    assert curves(found) == [
        CostCurve((1, 2, 4), 1, (10, 20), ((0.01, 0.02, 0.04), (0.02, 0.04, 0.08))),
        CostCurve((1,), 2, (10,), ((0.005,),)),
    ]
    without = {key: value for key, value in found.items() if key not in ((1, 20, 4), (2, 10, 1))}
    assert curves(without) == [CostCurve((1, 2), 1, (10, 20), ((0.01, 0.02), (0.02, 0.04)))]
    assert curves({(1, 10, 2): [1]}) == []


def test_spread_is_the_quartiles_over_the_median() -> None:
    assert spread([1, 2, 3, 4, 5]) == pytest.approx(2 / 3)
    assert spread([1, 2, 3]) is None


def test_a_torn_last_line_is_cut_off_and_a_broken_one_refused(tmp_path: Path) -> None:
    with CostFolder(tmp_path) as folder:
        folder.append({"kind": "pass", "n": 1})
    file = tmp_path / records.POINTS
    file.write_text(file.read_text() + '{"kind": "pa')
    with CostFolder(tmp_path) as folder:
        assert folder.lines == [{"kind": "pass", "n": 1}]
        folder.append({"kind": "pass", "n": 2})
        with pytest.raises(UserError, match="another process"):
            CostFolder(tmp_path)
    assert [line["n"] for line in read_lines(file)] == [1, 2]
    file.write_text("nonsense\n" + file.read_text())
    with pytest.raises(UserError, match="line 1 cannot be read"):
        CostFolder(tmp_path)


# --------------------------------------------------------------------------------------------------- random weights


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "tiny", TINY)


def load_tiny(monkeypatch: pytest.MonkeyPatch, cache: Path, **model: Any) -> source.Loaded:
    monkeypatch.setitem(ARCHITECTURES, "tiny", TINY)
    return loading.load({"name": "random", "like": "tiny"} | model, FP32, PathsConfig(cache=str(cache)))


def test_random_weights_have_the_shape_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded = load_tiny(monkeypatch, tmp_path)
    assert replace(Architecture.of(loaded.lm.config), source=TINY.source) == TINY
    assert (loaded.revision, loaded.lm.eos_ids) == ("seed 0, shape of tiny", ())
    assert load_tiny(monkeypatch, tmp_path, layers=1, seed=4).lm.n_layers == 1
    logits = loaded.lm.score(torch.arange(20))
    assert bool(torch.isfinite(logits).all()) and float(logits.std()) > 0.01
    again, other = load_tiny(monkeypatch, tmp_path), load_tiny(monkeypatch, tmp_path, seed=1)
    assert torch.equal(again.lm.score(torch.arange(20)), logits)
    assert not torch.equal(other.lm.score(torch.arange(20)), logits)
    assert loaded.tokenizer.decode(loaded.tokenizer("ab")["input_ids"] + [299]) == "ab", "ids beyond its 260 are silent"


MIXTURE = {"experts": 6, "active_experts": 2, "expert_size": 48, "sparse_layers": 2}


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_random_experts_are_read_by_the_engine(family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    windows = {"window": 128, "window_layers": 1} if family == "gpt_oss" else {}
    shape = replace(TINY, family=family, **MIXTURE, **windows)
    monkeypatch.setitem(ARCHITECTURES, "tiny", shape)
    loaded = loading.load({"name": "random", "like": "tiny"}, FP32, PathsConfig(cache=str(tmp_path)), keep_hf=True)
    assert replace(Architecture.of(loaded.lm.config), source=shape.source) == shape
    assert loaded.lm.hf is not None and loaded.lm.weight_bytes == 4 * shape.stored_weights
    ids = torch.arange(12) % 300
    wanted = loaded.lm.hf(ids[None]).logits[0]
    assert torch.allclose(loaded.lm.score(ids), wanted, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_has_memory_of_its_own_and_the_engine_reads_it(
    family: str, tied: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shape = replace(TINY, family=family, tied=tied)
    monkeypatch.setitem(ARCHITECTURES, "tiny", shape)
    model_group = {"name": "random", "like": "tiny"}
    loaded = loading.load(model_group, FP32, PathsConfig(cache=str(tmp_path)), keep_hf=True)
    assert loaded.lm.hf is not None
    parameters = list(loaded.lm.hf.parameters())
    assert len({p.data_ptr() for p in parameters}) == len(parameters)
    assert sum(p.numel() for p in parameters if p.dim() > 1) == shape.stored_weights
    layers: Any = loaded.lm.hf.model.layers
    assert not torch.equal(layers[0].mlp.up_proj.weight, layers[1].mlp.up_proj.weight)
    ids = torch.arange(12) % 300
    wanted = loaded.lm.hf(ids[None]).logits[0]
    assert torch.allclose(loaded.lm.score(ids), wanted, atol=1e-4)


WITH_LIKE = ["model=random", "model.like=llama3_8b"]


@pytest.mark.parametrize(
    "words",
    [
        ["method=prompt_lookup", "dataset=demo"],
        ["method=speculative_sampling", "dataset=mtbench"],
        ["method=hf_assisted", "dataset=demo"],
        ["method=autoregressive", "dataset=gsm8k"],
        ["method=autoregressive", "dataset=spec_bench"],
        ["method=hf_generate", "dataset=xsum"],
    ],
    ids=" ".join,
)
def test_what_reports_acceptance_or_quality_is_refused(words: list[str]) -> None:
    from bench.cli import main as bench

    (found,) = preconditions.check(compose.compose([*WITH_LIKE, *words]))
    assert found.startswith("model.like=llama3_8b has random weights") and "python -m bench cost" in found
    assert bench([*WITH_LIKE, *words]) == 2 == bench(["-m", *WITH_LIKE, *words, "seed=0,1"])


@pytest.mark.parametrize("method", ["autoregressive", "hf_generate", "oracle"])
@pytest.mark.parametrize("dataset", ["demo", "mtbench"])
def test_speed_alone_is_allowed(method: str, dataset: str) -> None:
    cfg = compose.compose([*WITH_LIKE, f"method={method}", f"dataset={dataset}"])
    assert cfg.model["like"] == "llama3_8b"
    assert preconditions.check(cfg) == []
    assert preconditions.check(compose.compose([*WITH_LIKE, "method=prompt_lookup"]), speed_only=True) == []


def test_nothing_is_prepared_for_random_weights(capsys: pytest.CaptureFixture[str]) -> None:
    from bench.train.command import main as train

    assert train(["method=medusa", *WITH_LIKE]) == 2
    assert "random weights" in capsys.readouterr().err


def test_random_weights_do_not_draft(tmp_path: Path) -> None:
    target = loading.load({"name": "random"}, FP32, PathsConfig(cache=str(tmp_path)))
    with pytest.raises(UserError, match=r"The draft model must have weights, got like="):
        loading.load_draft(WITH, ("random", target.tokenizer), FP32, PathsConfig(cache=str(tmp_path)))


WITH = {"name": "random", "like": "smollm2"}


def test_what_does_not_fit_is_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 8 * 2**30)
    monkeypatch.setattr("bench.models.random_weights._fill", lambda *_: pytest.fail("allocated"))
    group = {"name": "random", "like": "llama3_8b"}
    with pytest.raises(UserError, match=r"8,029,995,008 weights in float32 needs 32\.7 GiB, and 8\.0 GiB are free"):
        loading.load(group, FP32, PathsConfig(cache=str(tmp_path)))
    with pytest.raises(UserError, match=r"needs 59\.8 GiB"):
        loading.load(group, FP32, PathsConfig(cache=str(tmp_path)), keep_hf=True)


def test_what_no_gpu_here_holds_is_refused_with_those_that_would(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(memory, "free_bytes", lambda device: (70 if device == gpu else 500) * 2**30)
    source = RandomModel(like="llama3_70b")
    found = (
        r"needs 135\.0 GiB, and 70\.0 GiB are free on the GPU. It takes 2 GPUs of 80 GB or 2 of 141 GB. Set model.par"
    )
    with pytest.raises(UserError, match=found):
        loading._require_memory(source, gpu, torch.bfloat16, keep_hf=False)
    loading._require_memory(RandomModel(like="llama3_8b"), gpu, torch.bfloat16, keep_hf=False)
    loading._require_memory(source, gpu, torch.bfloat16, keep_hf=False, size=4)
    found = r"in bfloat16, on each of 2 GPUs, needs 7\d\.\d GiB, and 70\.0 GiB are free on the GPU"
    with pytest.raises(UserError, match=found):
        loading._require_memory(source, gpu, torch.bfloat16, keep_hf=False, size=2)


def test_gpus_are_counted_with_room_for_the_rest() -> None:
    assert memory.gpus(16_000_000_000) == "1 GPU of 80 GB"
    assert memory.gpus(72_000_000_000) == "1 GPU of 80 GB"
    assert memory.gpus(72_000_000_001) == "2 GPUs of 80 GB or 1 of 141 GB"


def test_free_memory_is_known_and_sizes_are_readable() -> None:
    assert 0 < memory.free_bytes(torch.device("cpu")) < 2**50
    assert (memory.gib(3 * 2**30), memory.gib(2**20)) == ("3.0 GiB", "1.0 MiB")


# ----------------------------------------------------------------------------------------------------- the command


class Ticks:
    """A clock on which every timed section of two readings takes 1 ms."""

    def __init__(self) -> None:
        self.now, self.calls = 0, 0

    def __call__(self) -> int:
        self.calls += 1
        self.now += MS if self.calls % 2 == 0 else 7
        return self.now


SMALL = Grid(nodes=(1, 3), batches=(1, 2), contexts=(8, 20), repeats=4, prompts=3, matrix=16)
POINTS = [(b, c, n) for b in (1, 2) for c in (8, 20) for n in (1, 3)]


@pytest.fixture
def cfg(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(probes, "ARRAY_BYTES", {"cpu": 1 << 16})
    words = [*WITH_LIKE[:1], "model.like=tiny", "hardware=cpu_fp32", "hardware.threads=1", "max_new_tokens=6"]
    more = ["method=prompt_lookup", "dataset=demo", "model.max_positions=2048"]
    composed = compose.compose([*words, *more])
    return replace(composed, paths=PathsConfig(results=str(tmp_path / "results"), cache=str(tmp_path / "cache")))


def measure(cfg: RunConfig, grid: Grid = SMALL, *, method: bool = False, fresh: bool = False) -> Path:
    return cost_measure.run(cfg, grid, method=method, fresh=fresh, clock=Ticks())


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder / records.POINTS) if line["kind"] == kind]


def test_every_point_is_measured_interleaved_and_recorded(cfg: RunConfig, tmp_path: Path) -> None:
    folder = measure(cfg)
    assert folder.parent == tmp_path / "results" / "costs" and folder.name.startswith("random_tiny-")
    passes = lines(folder, "pass")
    assert [line["repeat"] for line in passes] == [repeat for repeat in range(4) for _ in POINTS]
    orders = [[(p["batch"], p["context"], p["nodes"]) for p in passes[8 * r : 8 * r + 8]] for r in range(4)]
    assert all(sorted(order) == POINTS for order in orders) and len({tuple(order) for order in orders}) > 1
    assert len(lines(folder, "probe")) == 3 * 4
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == json.loads(json.dumps(read_summary(folder))), "derived from the records alone"
    assert [curve["batch"] for curve in summary["curves"]] == [1, 2] and summary["failed"] == []
    point = summary["points"][0]
    assert (point["seconds"], point["spread"], point["repeats"]) == (pytest.approx(0.001), 0.0, 4)
    needed = roofline.work(replace(TINY, max_positions=2048), 4, 1, 1, 8)
    assert point["bytes"] == needed.bytes and point["flops"] == needed.flops
    bandwidth = 3 * (1 << 16) / 0.001
    assert summary["peaks"]["triad"]["best"] == pytest.approx(bandwidth)
    assert point["bandwidth_utilisation"] == pytest.approx(needed.bytes / 0.001 / bandwidth)
    assert (folder / "roofline.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_manifest_has_the_facts_of_other_records_and_no_path(cfg: RunConfig, tmp_path: Path) -> None:
    folder = measure(cfg)
    manifest = read_manifest(folder) or {}
    assert manifest["status"] == "finished" and manifest["id"] == folder.name
    assert manifest["model"]["name"] == "random_tiny" and manifest["model"]["random_weights"] is True
    assert set(manifest["hardware"]) >= {"cpu", "threads", "memory_bytes", "gpu"}
    (session,) = manifest["sessions"]
    assert set(session) >= {"started_at", "argv", "git", "versions", "grid", "load_average", "seconds"}
    for file in ("manifest.json", "config.yaml", "summary.json", "points.jsonl"):
        text = (folder / file).read_text()
        assert str(tmp_path) not in text and str(Path.home()) + "/" not in text, file


def interrupted(monkeypatch: pytest.MonkeyPatch, after: int) -> Callable[[], None]:
    """Let the n-th timed round be the last one before the process is told to stop."""
    whole, count = cost_measure.verify_cost.time_round, [0]

    def limited(*arguments: Any) -> int:
        count[0] += 1
        if count[0] > after:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(cost_measure.verify_cost, "time_round", limited)
    return lambda: monkeypatch.setattr(cost_measure.verify_cost, "time_round", whole)


def test_an_interrupted_measurement_goes_on_where_it_stopped(cfg: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    again = interrupted(monkeypatch, after=21)
    with pytest.raises(KeyboardInterrupt):
        measure(cfg)
    (folder,) = (Path(cfg.paths.results) / "costs").iterdir()
    kept = lines(folder, "pass")
    assert len(kept) == 13, "8 points with an untimed round each, and 5 of the second repeat"
    assert (read_manifest(folder) or {})["status"] == "interrupted"
    again()
    assert measure(cfg) == folder
    passes = lines(folder, "pass")
    assert passes[:13] == kept and len(passes) == 32
    assert len({(p["repeat"], p["batch"], p["context"], p["nodes"]) for p in passes}) == 32
    assert {p["session"] for p in passes[13:]} == {1}
    manifest = read_manifest(folder) or {}
    assert manifest["status"] == "finished" and len(manifest["sessions"]) == 2


def test_a_finished_grid_is_extended_and_not_measured_again(cfg: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = measure(cfg)
    wider = replace(SMALL, nodes=(1, 2, 3))
    assert measure(cfg, wider) == folder
    passes = lines(folder, "pass")
    assert len(passes) == 48 and {p["nodes"] for p in passes[32:]} == {2}
    monkeypatch.setattr(cost_measure.verify_cost, "time_round", lambda *_: pytest.fail("measured again"))
    measure(cfg, wider)
    monkeypatch.undo()


def test_fresh_forgets_and_another_seed_or_thread_count_does_not_mix(cfg: RunConfig) -> None:
    folder = measure(cfg)
    measure(cfg, replace(SMALL, repeats=1), fresh=True)
    assert len(lines(folder, "pass")) == 8
    other = replace(cfg, model=cfg.model | {"seed": 5})
    assert measure(other, replace(SMALL, repeats=1)) != folder


def test_points_that_do_not_fit_are_named_and_the_others_measured(
    cfg: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs = cost_measure.point_bytes
    whole = memory.free_bytes(torch.device("cpu"))
    monkeypatch.setattr(cost_measure, "point_bytes", lambda bench, p: 2 * whole if p == (2, 20, 3) else needs(bench, p))
    folder = measure(cfg)
    summary = read_summary(folder)
    (failed,) = summary["failed"]
    assert (failed["batch"], failed["context"], failed["nodes"]) == (2, 20, 3) and "are free" in failed["error"]
    assert len(lines(folder, "pass")) == 28
    assert [curve["nodes"] for curve in summary["curves"]] == [[1, 3], [1]]
    assert "batch 2, context 20, nodes 3: needs" in command.render(summary, folder)


def test_out_of_memory_at_one_point_loses_nothing_else(cfg: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cost_measure.verify_cost.time_round

    def short(lm: Any, cache: Any, tokens: torch.Tensor, context: int, clock: Any) -> int:
        if tokens.shape == (2, 3) and context == 8:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")
        return whole(lm, cache, tokens, context, clock)

    monkeypatch.setattr(cost_measure.verify_cost, "time_round", short)
    summary = read_summary(measure(cfg))
    assert summary["failed"] == [{"batch": 2, "context": 8, "nodes": 3, "error": "out of memory"}]
    assert sum(point["repeats"] for point in summary["points"]) == 28


def test_memory_of_a_round_counts_cache_logits_and_mask(
    cfg: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded = load_tiny(monkeypatch, tmp_path)
    with CostFolder(tmp_path / "costs") as folder:
        bench = cost_measure.CostRun(cfg, SMALL, loaded, folder, 0, Ticks(), [])
    cache = loaded.lm.new_cache(2, 20 + 3 + 1)
    rest = 2 * 3 * (2 * 300 + 3 * 48 + 6 * 32) + 2 * 3 * 24 * 2
    assert cost_measure.point_bytes(bench, (2, 20, 3)) == cache.nbytes + 4 * rest


def test_drafts_are_timed_on_real_prompts(cfg: RunConfig) -> None:
    folder = measure(cfg, method=True)
    found = lines(folder, "draft")
    assert [(line["batch"], line["group"]) for line in found] == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    assert all(len(line["draft_ns"]) == len(line["passes"]) > 0 and min(line["draft_ns"]) > 0 for line in found)
    summary = read_summary(folder)
    assert [(d["method"]["name"], d["batch"], d["passes"]) for d in summary["drafts"]] == [
        ("prompt_lookup", 1, 0.0),
        ("prompt_lookup", 2, 0.0),
    ]
    times = [ns for line in found if line["batch"] == 1 for ns in line["draft_ns"]]
    assert summary["drafts"][0]["seconds"] == pytest.approx(sum(times) / len(times) / 1e9)
    assert "prompt_lookup" in command.render(summary, folder)
    measure(cfg, method=True)
    assert lines(folder, "draft") == found, "not timed again"
    other = replace(cfg, method=cfg.method | {"gamma": 3})
    measure(other, method=True)
    assert len(lines(folder, "draft")) == 10 and len(read_summary(folder)["drafts"]) == 4


def test_a_method_that_does_not_time_its_drafts_is_refused(cfg: RunConfig) -> None:
    peer = compose.compose(["method=hf_prompt_lookup"]).method
    with pytest.raises(UserError, match="does not time its drafts"):
        measure(replace(cfg, method=peer), method=True)


def test_the_command_measures_and_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probes, "ARRAY_BYTES", {"cpu": 1 << 16})
    machine = ["hardware=cpu_fp32", "hardware.threads=1", f"paths.results={tmp_path}", "max_new_tokens=4"]
    grid = ["nodes=1,2", "batches=1,2", "contexts=8", "repeats=1", "prompts=1", "matrix=16"]
    assert main(["model=random", "method=prompt_lookup", "dataset=demo", *machine, *grid]) == 0
    said = capsys.readouterr().out
    (folder,) = (tmp_path / "costs").iterdir()
    assert "round in ms at 8 tokens of context" in said and "proposals in ms" in said and f"{folder}/" in said
    assert "1.00" in said and max(map(len, said.splitlines()[:-1])) <= 100
    assert (read_manifest(folder) or {})["status"] == "finished"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model=smollm2", "nodes=[2,4]"], "nodes must contain 1, a round of autoregression, got [2, 4]"),
        (["batches=[0]"], "batches must be whole numbers of at least 1, got [0]"),
        (["contexts=abc"], "contexts must be a list of whole numbers, got 'abc' (text)"),
        (["repeats=0"], "repeats must be at least 1, got 0"),
        (["node=[1]"], "Unknown setting 'node'. Did you mean 'nodes'?"),
        (["batch_size=4"], "batches=[...] are measured"),
        (["method=autoregressive"], "method must be one that drafts, got autoregressive"),
        (["method=egle"], "Unknown method 'egle'"),
        (["whatif", "x"], "Did you mean 'what-if'?"),
        (["--frsh"], "Did you mean '--fresh'?"),
        (["model=random", "model.like=lama3_8b"], "got 'lama3_8b'. Did you mean 'llama3_8b'?"),
        (["model=random", "contexts=[4096]", "hardware=cpu_fp32"], "the model has 2048 positions"),
        (["what-if"], "got 0"),
        (["what-if", "a", "b"], "got 2"),
        (["what-if", "nowhere"], "nowhere"),
        (["what-if", "x", "gama=2"], "Did you mean 'gamma'?"),
        (["what-if", "x", "gamma=two"], "gamma must be a list of whole numbers or null, got 'two' (text)"),
        (["what-if", "x", "batch=0"], "batch must be whole numbers of at least 1, got [0]"),
        (["what-if", "x", "draft_ms=-1"], "draft_ms must be at least 0, got -1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_message_and_exit_code_2(
    words: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in (message := capsys.readouterr().err) and len(message.strip().splitlines()) == 1


def test_what_writes_in_one_go_has_no_rounds_to_price() -> None:
    folder = next(file.parent for file in ROOT.glob("results/reference/glat-*/manifest.json"))
    with pytest.raises(UserError, match="must be of a method that writes in rounds, got glat"):
        what_if.read_run(folder)


def test_words_become_a_grid_and_a_query() -> None:
    grid, rest, fresh = split(["nodes=1,2", "repeats=3", "model=smollm2", "--fresh", "+model.revision=x"])
    assert (grid.nodes, grid.repeats, fresh) == ((1, 2), 3, True) and rest == ["model=smollm2", "+model.revision=x"]
    asked = query(["results/x", "curve=c", "batch=4", "gamma=2,4", "draft_ms=1"])
    assert asked == WhatIfQuery(Path("results/x"), Path("c"), (4,), (2, 4), 1.0)


def test_help_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys; sys.modules['torch'] = None; from bench.cost.command import main; sys.exit(main(['--help']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "what-if" in done.stdout, done.stderr


# ---------------------------------------------------------------------------------------------- both ends together


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of a small random model, which has a curve of its own."""
    home = tmp_path_factory.mktemp("run")
    words = ["model=random", "hardware=cpu_fp32", "hardware.threads=1", "dataset.limit=3", "max_new_tokens=12"]
    more = ["method=prompt_lookup", "measure.warmup=1", "measure.bootstrap_samples=100"]
    composed = compose.compose([*words, *more])
    yield run(replace(composed, paths=PathsConfig(results=str(home), cache=str(home / "cache")))).path


def test_a_runs_own_prediction_is_reproduced(measured: Path) -> None:
    manifest, summary = read_manifest(measured) or {}, json.loads((measured / "summary.json").read_text())
    curve = what_if.own_curve(measured, manifest)
    found = replay(read_samples(measured), curve.price.seconds, prefill=True)
    assert found == pytest.approx(summary["predicted_speedup"]) and found > 0


def test_what_if_answers_for_a_run_with_its_own_and_with_another_curve(
    measured: Path, cfg: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["what-if", str(measured)]) == 0
    own = capsys.readouterr().out
    assert "prompt_lookup on demo: measured" in own and "as recorded" in own
    elsewhere = measure(cfg, method=True)
    assert main(["what-if", str(measured), f"curve={elsewhere}", "batch=1,2", "gamma=1,4"]) == 0
    said = capsys.readouterr()
    assert "the acceptance is of random, the curve of random_tiny" in said.err
    table = [line.split() for line in said.out.splitlines() if line.startswith("  ") and line.endswith("x")]
    assert [(cells[0], cells[1]) for cells in table] == [("1", "1"), ("1", "4"), ("2", "1"), ("2", "4")]
    drafting = what_if.read_curve(elsewhere).drafting((read_manifest(measured) or {})["method"], 2)
    assert drafting is not None and table[2][3] == f"{drafting.seconds * 1e3:.3f}"
    assert main(["what-if", str(measured), f"curve={measured}", "draft_ms=0"]) == 0
    assert main(["what-if", str(measured), f"curve={elsewhere}", "batch=64"]) == 2
    assert "batch must be at most 2" in capsys.readouterr().err


def test_drafts_recorded_elsewhere_are_interpolated_between_batch_sizes() -> None:
    method = {"name": "m", "gamma": 2}
    found = [{"method": method, "batch": b, "seconds": s, "passes": 2.0} for b, s in ((1, 0.001), (3, 0.005))]
    others = [{"method": method | {"gamma": 9}, "batch": 1, "seconds": 9.0, "passes": 9.0}]
    curve = what_if.Recorded(FOUR, "here", "m", tuple(others + found))
    between = curve.drafting(method, 2)
    assert between is not None and between.seconds == pytest.approx(0.003) and between.passes == 2
    assert curve.drafting(method | {"gamma": 1}, 3) is not None, "other settings are better than nothing"
    assert curve.drafting({"name": "other"}, 1) is None


@pytest.mark.skipif(library() is None, reason="needs a compiler")
def test_equal_bits_have_a_price(cfg: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "tiny", replace(TINY, head_dim=16))
    rounds: list[tuple[str, int]] = []

    def time_round(lm: Any, cache: Any, tokens: Any, *_: Any) -> int:
        rounds.append((lm.linear_form, tokens.shape[1]))
        return (3 if lm.linear_form == "panels" else 2) * tokens.shape[1] * MS

    monkeypatch.setattr(verify_cost, "time_round", time_round)
    equal = replace(cfg, hardware=replace(cfg.hardware, linear="panels", batch_invariant=True))
    folder = measure(equal)
    found = read_summary(folder)["invariance"]
    assert (found["other"], found["nodes"], found["context"]) == ("packed", [1, 3], 8)
    assert found["seconds"] == pytest.approx([0.003, 0.009])
    assert found["other_seconds"] == pytest.approx([0.002, 0.006])
    assert rounds.count(("packed", 1)) == 1 + SMALL.repeats, "one is not counted"
    assert "rounds of 1, 3 nodes take 1.50, 1.50 of the time of packed" in command.render(read_summary(folder), folder)
    assert "invariance" not in read_summary(measure(cfg))
