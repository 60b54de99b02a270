"""Rows of samples.jsonl written by hand, for the tests of everything that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.records.run_folder import Sample

EOS = 0
MS = 1_000_000


def row(
    arm: str = "method",
    prompt: str = "1/1",
    *,
    ms: Sequence[float] = (10, 10, 10),
    tokens: Sequence[int] | None = None,
    accepted: Sequence[int] | None = None,
    depth: Sequence[int] | None = None,
    finish: str = "length",
    **changes: Any,
) -> Sample:
    """One sample, consistent unless told otherwise.

    A step takes ``ms[i]`` and keeps ``tokens[i]`` (default 1), the last draft token and the bonus included: by default
    ``tokens - 1`` drafted, all accepted, in a chain.
    """
    counts = list(tokens or [1] * len(ms))
    kept = list(accepted) if accepted is not None else [count - 1 for count in counts]
    drafted = list(depth) if depth is not None else kept
    total, turn = sum(counts), int(prompt.split("/")[1])
    ids = [5 + i for i in range(total)]
    if finish == "eos":
        ids[-1] = EOS
    step_ns = [round(value * MS) for value in ms]
    fields: dict[str, Any] = {
        "prompt_id": prompt,
        "category": "qa",
        "turn": turn,
        "repeat": 0,
        "order": 0,
        "arm": arm,
        "phase": "measure",
        "seed": 0,
        "batch": int(prompt.split("/")[0]) * 2 + turn - 3,
        "batch_size": 1,
        "n_prompt_tokens": 100,
        "n_output_tokens": total,
        "finish": finish,
        "prefill_ns": step_ns[0],
        "batch_ns": sum(step_ns),
        "step_ns": step_ns,
        "step_tokens": counts,
        "step_drafted": drafted,
        "step_accepted": kept,
        "step_depth": drafted,
        "step_nodes": [1 + count for count in drafted],
        "step_layers": [1.0] * len(ms),
        "step_draft_ns": [None] * len(ms),
        "step_target_passes": [1] * len(ms),
        "step_draft_passes": [0] * len(ms),
        "output_ids": ids,
        "text": " ".join(map(str, ids)),
    }
    return Sample(**fields | changes)


def both(prompt: str, baseline: dict[str, Any], method: dict[str, Any], **shared: Any) -> list[Sample]:
    """A prompt decoded by both arms."""
    return [row("baseline", prompt, **shared | baseline), row("method", prompt, **shared | method)]
