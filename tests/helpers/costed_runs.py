"""A short run of a small model whose method sizes its drafts by what passes cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from bench.config import compose
from bench.config.schema import PathsConfig, RunConfig


def costed_run(folder: Path, prompts: int) -> RunConfig:
    """Of ``token_recycling``, with its prompts and results in a folder."""
    file = folder / "prompts.jsonl"
    rows = [{"question_id": i, "category": "any", "turns": [f"Say {i} {i} {i} again."]} for i in range(prompts)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["model=random", "dataset=jsonl", f"dataset.path={file}", "hardware=cpu_fp32", "hardware.threads=1"]
    more = ["max_new_tokens=12", "measure.bootstrap_samples=100", "measure.warmup=1"]
    composed = compose.compose(["method=token_recycling", "method.costs=auto", *words, *more])
    return replace(composed, paths=PathsConfig(results=str(folder / "results"), cache=str(folder / "cache")))
