"""Measure the grid of ``python -m bench cost``, point by point.

Repeats are interleaved: each passes over the whole grid in its own order, drawn from the seed, so that drift of the
machine affects all points equally. Every timing is written before the next one starts, so the same command resumes.
A point that does not fit into memory is reported and skipped.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import torch
import yaml

from bench.analysis import summary as run_summary
from bench.config import instantiate
from bench.config.schema import RunConfig, parallel_of, sanitise
from bench.cost import invariance, roofline
from bench.cost.records import CONFIG, PLOT, SUMMARY, CostFolder, Point, summarise
from bench.cost.settings import Grid
from bench.errors import RunFailed, UserError, explain
from bench.measure import preconditions, probes, verify_cost
from bench.measure.instruments import Instruments
from bench.measure.interleave import derive_seed
from bench.measure.timing import timed_decode
from bench.models import artifacts, loading
from bench.models.architectures import Architecture
from bench.models.source import Loaded
from bench.records.run_folder import device_name
from bench.tasks import prompts
from bench.utils import machine, memory, redact
from bench.utils.files import json_sha256, write_entries
from bench.utils.progress import Progress
from methods.decoder import Decoder
from methods.engine.causal_lm import CausalLM
from methods.engine.cuda_graphs import GraphedLM
from methods.engine.kv_cache import Cache

Clock = Callable[[], int]
Result = TypeVar("Result")

_DEFAULTS = (("weights", "full"), ("parallel", 1))  # of every model; older records lack them


@dataclass(slots=True)
class CostRun:
    """One call of the command.

    Attributes:
        session: index of this call among those that wrote the folder.
        failed: points that could not be measured, with the reason.
    """

    cfg: RunConfig
    grid: Grid
    loaded: Loaded
    folder: CostFolder
    session: int
    clock: Clock
    failed: list[dict[str, Any]]

    @property
    def lm(self) -> CausalLM:
        return self.loaded.lm


def run(cfg: RunConfig, grid: Grid, *, method: bool, fresh: bool, clock: Clock = time.perf_counter_ns) -> Path:
    """Measure what is missing, derive summary and plot, and return the folder.

    Args:
        cfg: model, machine, method and prompts.
        grid: what to measure.
        method: also time the drafts of the method.
        fresh: discard earlier measurements.
        clock: nanoseconds.

    Raises:
        UserError: the request cannot be measured.
        RunFailed: the measurement failed; its timings are kept.
    """
    if method and instantiate.needs_hf(cfg.method):
        raise UserError(_no_drafts(cfg))
    if method:
        preconditions.require(preconditions.check(cfg, speed_only=True))
    machine.set_threads(cfg.hardware.threads)
    loading.settle_libraries(asdict(cfg.hardware))
    loaded = loading.load(cfg.model, asdict(cfg.hardware), cfg.paths)
    _check_model(loaded, grid)
    path = Path(cfg.paths.results) / "costs" / folder_id(cfg, loaded)
    with CostFolder(path, fresh=fresh) as folder, _recorded(cfg, grid, loaded, folder) as session:
        cost = CostRun(cfg, grid, loaded, folder, session, clock, [])
        try:
            measure_grid(cost)
            if cfg.hardware.batch_invariant:
                folder.update(invariance=invariance.measure(cfg, loaded, grid, clock))
            if method:
                measure_drafts(cost)
        finally:
            with suppress(RunFailed):  # a full disk has been reported
                folder.update(failed=cost.failed)
                _derive(folder)
    return path


def _derive(folder: CostFolder) -> None:
    summary = summarise(folder.lines, folder.manifest)
    write_entries(folder.path / SUMMARY, summary)
    if summary["points"]:
        title = f"{summary['model']['name']}, {summary['hardware']}, {summary['dtype']}, {summary['threads']} threads"
        roofline.plot(summary["points"], summary["peaks"], title, folder.path / PLOT)


def _check_model(loaded: Loaded, grid: Grid) -> None:
    if getattr(loaded.lm.config, "is_encoder_decoder", False):
        raise UserError(
            f"bench cost needs a decoder-only model, got '{loaded.name}', an encoder-decoder. Choose another model."
        )
    longest = max(grid.contexts) + max(grid.nodes) + 1
    if longest > loaded.lm.max_positions:
        most = loaded.lm.max_positions - max(grid.nodes) - 1
        raise UserError(
            f"contexts must be at most {most} with {max(grid.nodes)} nodes, got {max(grid.contexts)}: the model has "
            f"{loaded.lm.max_positions} positions. Set contexts=[...,{most}]."
        )


def folder_id(cfg: RunConfig, loaded: Loaded) -> str:
    """``<model>-<device>-<type>-<12 hex of sha256 over model, revision, machine and its settings>``."""
    facts = machine.facts(loaded.lm.device)
    name = device_name(facts)
    dtype = _dtype(loaded)
    defining = {
        "model": {key: value for key, value in cfg.model.items() if (key, value) not in _DEFAULTS},
        "revision": loaded.revision,
        "hardware": {k: v for k, v in cfg.to_dict()["hardware"].items() if k not in ("name", "threads")},
        "device": name,
        "threads": facts["threads"],
        "dtype": dtype,
    }
    digest = json_sha256(defining)
    return "-".join((sanitise(model_name(cfg)), sanitise(name), dtype, digest[:12]))


def model_name(cfg: RunConfig) -> str:
    """The model's name; for random weights with the model whose shape they have."""
    like = cfg.model.get("like")
    return run_summary.model_name(cfg.model | ({"name": f"{cfg.model['name']}_{like}"} if like else {}))


# ---------------------------------------------------------------------------------------------------- facts and status


@contextmanager
def _recorded(cfg: RunConfig, grid: Grid, loaded: Loaded, folder: CostFolder) -> Iterator[int]:
    """Record facts, status and session; yields the session's index."""
    sessions = list(folder.manifest.get("sessions", []))
    session = _session(grid)
    _warn_of_other_code(sessions, session)
    sessions.append(session)
    folder.update(**_facts(cfg, loaded, folder.path.name), sessions=sessions, status="running", error=None)
    (folder.path / CONFIG).write_text(_config_yaml(cfg), encoding="utf-8")
    begin, status, error = perf_counter(), "finished", None
    try:
        yield len(sessions) - 1
    except BaseException as caught:
        status = "interrupted" if isinstance(caught, KeyboardInterrupt) else "failed"
        error = redact.text(f"{type(caught).__name__}: {caught}")
        raise
    finally:
        session |= {"seconds": round(perf_counter() - begin, 1), "load_average_end": machine.load_average()}
        with suppress(RunFailed):  # a full disk has been reported
            folder.update(sessions=sessions, status=status, error=error)


def _session(grid: Grid) -> dict[str, Any]:
    session = {
        "started_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "argv": redact.argv(["bench", "cost", *sys.argv[1:]]),
        "environment": redact.environment(os.environ),
        "grid": asdict(grid),
        "versions": machine.versions(),
        "git": machine.git_state(),
        "load_average": machine.load_average(),
    }
    return dict(redact.tree(session))


def _warn_of_other_code(sessions: Sequence[dict[str, Any]], now: dict[str, Any]) -> None:
    keys = ("git", "versions")
    if any(earlier.get(key) != now[key] for earlier in sessions for key in keys):
        print(
            "warning: some points were measured with another version of the code or its packages; --fresh repeats all",
            file=sys.stderr,
        )


def _facts(cfg: RunConfig, loaded: Loaded, identity: str) -> dict[str, Any]:
    lm = loaded.lm
    facts = {
        "schema_version": 1,
        "id": identity,
        "model": {
            "name": model_name(cfg),
            "revision": loaded.revision,
            "sha256": loaded.sha256,
            "weight_bytes": lm.weight_bytes,
            **_held(cfg, lm),
            "random_weights": cfg.model.get("_target_") == "bench.models.random_weights.RandomModel",
        },
        "architecture": asdict(Architecture.of(lm.config)),
        "itemsize": lm.dtype.itemsize,
        "dtype": _dtype(loaded),
        "hardware": machine.facts(lm.device),
        "linear": cfg.hardware.linear,
        "seed": cfg.seed,
    }
    return dict(redact.tree(facts))


def _held(cfg: RunConfig, lm: CausalLM) -> dict[str, Any]:
    """Where a pass does not read weights of the type of the run, what it reads; and how many devices share them."""
    devices = parallel_of(cfg.model)
    read = {} if lm.weights == "full" else {"weights": lm.weights, "read_bytes": lm.pass_bytes(1) - lm.embedding_bytes}
    return read | ({"parallel": devices} if devices > 1 else {})


def _config_yaml(cfg: RunConfig) -> str:
    kept = {"model": cfg.model, "hardware": cfg.to_dict()["hardware"], "seed": cfg.seed}
    return str(yaml.safe_dump(redact.tree(kept), sort_keys=False, allow_unicode=True))


def _dtype(loaded: Loaded) -> str:
    return str(loaded.lm.dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------------------------ the grid


def measure_grid(cost: CostRun) -> None:
    """All repeats of all points and probes that the folder lacks."""
    done = {_key(line) for line in cost.folder.lines}
    plan = [(repeat, batch, points) for repeat in range(cost.grid.repeats) for batch, points in _order(cost, repeat)]
    todo = [(r, b, left) for r, b, points in plan if (left := [p for p in points if ("pass", r, *p) not in done])]
    _measure_probes(cost, done)
    total, left_over = (sum(len(points) for _, _, points in part) for part in (plan, todo))
    seen: set[Point] = set()
    with Progress("points", total, total - left_over) as progress:
        for repeat, batch, points in todo:
            _measure_batch(cost, repeat, batch, points, seen)
            progress.advance(len(points))


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
    """Identifies a timing, so that it is not repeated."""
    if line["kind"] == "pass":
        return "pass", line["repeat"], line["batch"], line["context"], line["nodes"]
    if line["kind"] == "probe":
        return "probe", line["repeat"], line["name"]
    return "draft", line["key"], line["batch"], line["group"]


def _order(cost: CostRun, repeat: int) -> list[tuple[int, list[Point]]]:
    """The points of one repeat by batch size, in an order that depends on seed and repeat only."""
    grid = cost.grid
    batches = sorted(set(grid.batches))
    random.Random(f"{cost.cfg.seed}/{repeat}").shuffle(batches)
    order = []
    for batch in batches:
        points = [
            (batch, context, nodes) for context in sorted(set(grid.contexts)) for nodes in sorted(set(grid.nodes))
        ]
        random.Random(f"{cost.cfg.seed}/{repeat}/{batch}").shuffle(points)
        order.append((batch, points))
    return order


def _measure_probes(cost: CostRun, done: set[tuple[Any, ...]]) -> None:
    device = cost.lm.device
    todo = [repeat for repeat in range(cost.grid.repeats) if ("probe", repeat, "matmul") not in done]
    if not todo:
        return
    dtype, linear = cost.lm.dtype, cost.cfg.hardware.linear
    found = [*probes.of_memory(device, dtype), *probes.of_arithmetic(device, dtype, linear, cost.grid.matrix)]
    for probe in found:
        probes.time_probe(probe, device, cost.clock)  # the first call is not timed
    for repeat in todo:
        for probe in found:
            ns = probes.time_probe(probe, device, cost.clock)
            line = {"kind": "probe", "name": probe.name, "amount": probe.amount, "unit": probe.unit}
            cost.folder.append(line | {"repeat": repeat, "ns": ns, "session": cost.session})


def _measure_batch(cost: CostRun, repeat: int, batch: int, points: Sequence[Point], seen: set[Point]) -> None:
    """One repeat of the points of one batch size. The first rounds of a point in a process are a warm-up."""
    fitting = [point for point in points if _fits(cost, point)]
    if not fitting:
        return
    most = max(nodes for _, _, nodes in fitting)
    capacity = max(context for _, context, _ in fitting) + most + 1
    cache = _or_none(cost, fitting, lambda: verify_cost.filled_cache(cost.lm, batch, capacity))
    if cache is None:
        return
    tokens = verify_cost.random_tokens(cost.lm, batch, most, cost.cfg.seed)
    untimed = 2 if isinstance(cost.lm, GraphedLM) else 1  # the second one captures a graph
    for point in fitting:
        ns = None
        for _ in range(1 if point in seen else 1 + untimed):
            ns = _or_none(cost, [point], partial(_round, cost, cache, tokens, point))
        seen.add(point)
        if ns is not None:
            line = {"kind": "pass", "repeat": repeat, "batch": batch, "context": point[1], "nodes": point[2]}
            cost.folder.append(line | {"ns": ns, "session": cost.session})


def _round(cost: CostRun, cache: Cache, tokens: torch.Tensor, point: Point) -> int:
    _, context, nodes = point
    return verify_cost.time_round(cost.lm, cache, tokens[:, :nodes], context, cost.clock)


def _or_none(cost: CostRun, points: Sequence[Point], call: Callable[[], Result]) -> Result | None:
    """The result of a call, or None if memory ran out; its points are noted as failed."""
    try:
        return call()
    except (RuntimeError, MemoryError) as error:
        if explain(error) is None:
            raise
    if cost.lm.device.type == "cuda":
        torch.cuda.empty_cache()
    for point in points:
        _note_failure(cost, dict(zip(("batch", "context", "nodes"), point, strict=True)), "out of memory")
    return None


def _fits(cost: CostRun, point: Point) -> bool:
    needed, free = point_bytes(cost, point), memory.free_bytes(cost.lm.device)
    if needed <= free:
        return True
    known = dict(zip(("batch", "context", "nodes"), point, strict=True))
    _note_failure(cost, known, f"needs {memory.gib(needed)}, {memory.gib(free)} are free")
    return False


def _note_failure(cost: CostRun, known: dict[str, Any], reason: str) -> None:
    if not any(known.items() <= earlier.items() for earlier in cost.failed):
        cost.failed.append(known | {"error": reason})


def point_bytes(cost: CostRun, point: Point) -> int:
    """Memory of a round without the weights: cache, logits (twice, for the argmax), widest activations, mask."""
    batch, context, nodes = point
    shape, capacity = Architecture.of(cost.lm.config), context + max(cost.grid.nodes) + 1
    cache = shape.layers * batch * capacity * 2 * shape.kv_heads * shape.head_dim
    chosen = shape.active_experts * (3 * shape.expert_size + 2 * shape.hidden_size) + 3 * shape.shared_size
    widths = 2 * shape.vocab_size + max(3 * shape.intermediate_size, chosen) + 6 * shape.hidden_size
    mask = batch * nodes * capacity * (shape.heads // shape.kv_heads) * (2 if shape.window_layers else 1)
    return int(cost.lm.dtype.itemsize * (cache + batch * nodes * widths + mask))


# ---------------------------------------------------------------------------------------------------------- the drafts


def measure_drafts(cost: CostRun) -> None:
    """Time the proposals of a method on real prompts, at the batch sizes that it supports.

    Raises:
        UserError: its proposals are not timed.
    """
    cfg, lm = cost.cfg, cost.lm
    part = artifacts.find(cfg.method, cost.loaded.name, cost.loaded.revision, cfg.paths)
    loader = loading.draft_loader(cfg, cost.loaded.tokenizer)
    decoder = instantiate.build_decoder(cfg.method, lm, cfg.sampling, loader, part.folder if part else None)
    task = instantiate.build_task(cfg.dataset, cfg.paths)
    rows = _rows(cost, task)
    facts = {
        "method": cfg.method,
        "dataset": {"name": cfg.dataset["name"], "content": task.revision["content"]},
        "prompts": len(rows),
        "max_new_tokens": cfg.max_new_tokens,
        "sampling": asdict(cfg.sampling),
        "seed": cfg.seed,
        "part": part.sha256 if part else None,
    }
    facts = redact.tree(facts)
    key = json_sha256(facts)[:12]
    cost.folder.update(drafts=cost.folder.manifest.get("drafts", {}) | {key: facts})
    done = {_key(line) for line in cost.folder.lines}
    plan = [(batch, group) for batch in _batches(cost) for group in range(-(-len(rows) // batch))]
    todo = [(batch, group) for batch, group in plan if ("draft", key, batch, group) not in done]
    with Progress("drafts", len(plan), len(plan) - len(todo)) as progress:
        for batch, group in todo:
            if line := _or_none(cost, [], partial(_drive, cost, decoder, rows, batch, group)):
                cost.folder.append(line | {"key": key, "session": cost.session})
            else:
                _note_failure(cost, {"method": cfg.method["name"], "batch": batch}, "out of memory")
            progress.advance()


def _batches(cost: CostRun) -> list[int]:
    most = instantiate.method_class(cost.cfg.method).most_rows(cost.cfg.method)
    return [batch for batch in sorted(set(cost.grid.batches)) if most is None or batch <= most]


def _rows(cost: CostRun, task: Any) -> list[list[int]]:
    """The first turns of the first prompts."""
    limit = cost.cfg.max_new_tokens
    examples = task.filled(task.load()[: cost.grid.prompts], cost.loaded.tokenizer)
    context = min(cost.lm.max_positions, cost.cfg.max_context or cost.lm.max_positions)
    rows = [prompts.encode(cost.loaded.tokenizer, task.messages(example, 0, [])) for example in examples]
    for example, row in zip(examples, rows, strict=True):
        prompts.fits(prompts.prompt_id(example, 0), len(row), limit, context)
    if not rows:
        raise UserError("The data set must contain a prompt to time drafts on. Choose another: dataset=NAME.")
    return rows


def _drive(cost: CostRun, decoder: Decoder, rows: Sequence[list[int]], batch: int, group: int) -> dict[str, Any]:
    """Decode one batch, repeating prompts until it is full, and return the time of every proposal."""
    lm, cfg = cost.lm, cost.cfg
    chosen = [rows[(group * batch + place) % len(rows)] for place in range(batch)]
    ids = [torch.tensor(row, dtype=torch.long, device=lm.device) for row in chosen]
    rng = torch.Generator(device=lm.device).manual_seed(derive_seed(cfg.seed, "draft", batch, group))
    instruments = Instruments(lm.device, clock=cost.clock)
    timed = timed_decode(decoder, ids, cfg.max_new_tokens, lm.eos_ids, rng, instruments)
    steps = [step for step in timed.steps[1:] if step.draft_ns is not None]
    if timed.steps[1:] and not steps:
        raise UserError(_no_drafts(cfg))
    return {
        "kind": "draft",
        "batch": batch,
        "group": group,
        "draft_ns": [step.draft_ns for step in steps],
        "passes": [step.draft_passes for step in steps],
    }


def _no_drafts(cfg: RunConfig) -> str:
    return (
        f"Method '{cfg.method['name']}' does not time its drafts; the project's own speculative methods do. "
        "Choose one of them (python -m bench list methods), or leave method=NAME out."
    )
