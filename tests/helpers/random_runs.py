"""Runs of a random model over a few prompts: no download, and done in seconds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def random_run(folder: Path, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Words of a run, but for its method, over prompts that are written into a folder, as results are."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "model=random",
        "dataset=jsonl",
        f"dataset.path={file}",
        "hardware=cpu_fp32",
        "hardware.threads=1",
        "max_new_tokens=8",
        "measure.bootstrap_samples=100",
        "measure.warmup=1",
        f"paths.results={folder / 'results'}",
        f"paths.cache={folder / 'cache'}",
    ]
