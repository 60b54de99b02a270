"""What a run leaves behind: manifest.json, config.yaml, samples.jsonl and the summary derived from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 1

Arm = Literal["method", "baseline"]


@dataclass(slots=True)
class Sample:
    """One prompt decoded once by one arm: a line of samples.jsonl. Counters and raw times, no rates.

    The ``step_*`` lists cover every step, the first one included: step 0 is the prefill, its time is
    ``prefill_ns`` and it commits the first token(s). ``step_tokens`` counts what was kept after cutting at
    the end-of-sequence token and at the limit, so it sums to ``n_output_tokens``; a batched row that has
    finished has no further entries. ``step_drafted``, ``step_accepted``, ``step_depth``, ``step_layers`` and
    ``step_nodes`` are as the method reported them, before the cut.

    Attributes:
        prompt_id: example id and turn, ``"81/1"``.
        batch: index of the batch the prompt ran in; at batch size 1 the running number of the prompt.
        order: 0 if this arm ran first on this prompt, else 1.
        finish: ``"eos"`` or ``"length"``.
        batch_ns: request start to the moment the last row of the batch had finished.
        peak_bytes: peak memory while this sample ran; None where it was not measured.
        quality: scores of the text against the reference, by metric name.
    """

    prompt_id: str
    category: str
    turn: int
    repeat: int
    order: int
    arm: Arm
    phase: Literal["warmup", "measure"]
    seed: int
    batch: int
    batch_size: int
    n_prompt_tokens: int
    n_output_tokens: int
    finish: Literal["eos", "length"]
    prefill_ns: int
    batch_ns: int
    step_ns: list[int]
    step_tokens: list[int]
    step_drafted: list[int]
    step_accepted: list[int]
    step_depth: list[int]
    step_nodes: list[int]
    step_layers: list[float]
    step_draft_ns: list[int | None]
    step_target_passes: list[int]
    step_draft_passes: list[int]
    output_ids: list[int]
    text: str
    prompt_ids: list[int] = field(default_factory=list)
    peak_bytes: int | None = None
    energy_j: float | None = None
    cpu_ns: int | None = None
    quality: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    schema_version: int = SCHEMA_VERSION
    extra: dict[str, Any] = field(default_factory=dict)
