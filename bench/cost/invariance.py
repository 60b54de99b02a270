"""What equal bits cost: rounds of a batch-invariant model beside those of the same weights in another form.

``hardware.batch_invariant=true`` holds the weights in panels, whose sums run in one order. The other form is oneDNN's
packed products, which are the fastest whose bits depend on the number of rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from bench.config.schema import RunConfig
from bench.cost.settings import Grid
from bench.measure import verify_cost
from bench.models import loading
from bench.models.source import Loaded

OTHER = "packed"


def measure(cfg: RunConfig, loaded: Loaded, grid: Grid, clock: Callable[[], int]) -> dict[str, Any] | None:
    """Medians of the rounds of both forms, one row, at the shortest context; the two take turns.

    Args:
        loaded: the model whose bits are equal.

    Returns:
        None where the weights have one form only, as in 4 bits.
    """
    if loaded.lm.weights != "full":
        return None
    hardware = asdict(cfg.hardware) | {"linear": OTHER, "batch_invariant": False}
    models = {"seconds": loaded.lm, "other_seconds": loading.load(cfg.model, hardware, cfg.paths).lm}
    context, nodes = min(grid.contexts), sorted(set(grid.nodes))
    caches = {name: verify_cost.filled_cache(lm, 1, context + nodes[-1] + 1) for name, lm in models.items()}
    tokens = verify_cost.random_tokens(loaded.lm, 1, nodes[-1], cfg.seed)
    taken: dict[str, list[list[int]]] = {name: [[] for _ in nodes] for name in models}
    for repeat in range(1 + grid.repeats):  # the first is not counted
        for place, count in enumerate(nodes):
            for name, lm in models.items():
                ns = verify_cost.time_round(lm, caches[name], tokens[:, :count], context, clock)
                taken[name][place] += [ns] * (repeat > 0)
    medians = {name: [statistics.median(ns) / 1e9 for ns in found] for name, found in taken.items()}
    return {"other": OTHER, "context": context, "nodes": nodes, **medians}


def render(found: Mapping[str, Any]) -> str:
    """The cost in one sentence."""
    pairs = zip(found["seconds"], found["other_seconds"], strict=True)
    ratios = ", ".join(f"{own / other:.2f}" for own, other in pairs)
    nodes = ", ".join(map(str, found["nodes"]))
    return (
        f"equal bits for any batch: rounds of {nodes} nodes take {ratios} of the time of {found['other']} products, "
        "whose bits depend on the batch"
    )
