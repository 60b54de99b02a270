"""What tables and comparisons need of each prompt of a run, kept where its samples are not.

``condense`` replaces the samples of a finished run by ``pairs.json.gz``, a tenth of their size: seconds of both arms
per conversation, and of each prompt a digest and the length of the baseline's text. Texts and steps are gone.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd

from bench.analysis import metrics
from bench.errors import UserError
from bench.records import run_folder
from bench.records.run_folder import PAIRS, Sample
from bench.scoring.rouge import rouge_l
from bench.utils import files

_COLUMNS = ["baseline_s", "method_s", "category"]
_NANOSECONDS = 9  # decimals of seconds


@dataclass(frozen=True)
class Pairs:
    """The measured prompts of a run.

    Attributes:
        units: seconds of both arms and category per conversation, see ``bench.analysis.metrics.units``.
        prompts: by id of a prompt, a digest of its tokens; empty for later turns, which quote answers.
        baseline: tokens and digest of the baseline's text, by prompt and repeat.
        similarity: mean ROUGE-L between the ids of both arms (first repeat); None without a prompt.
    """

    units: pd.DataFrame
    prompts: dict[str, str]
    baseline: dict[str, tuple[int, str]]
    similarity: float | None

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Pairs:
        """Derived from the samples of a run."""
        rows = [sample for sample in samples if sample.phase == "measure"]
        prompts = {row.prompt_id: _digest(row.prompt_ids) if row.turn == 1 else "" for row in rows}
        written = [row for row in rows if row.arm == "baseline"]
        baseline = {f"{row.prompt_id} {row.repeat}": (len(row.output_ids), _digest(row.output_ids)) for row in written}
        table = metrics.paired(metrics.frame(samples))
        units = pd.DataFrame(columns=_COLUMNS) if table.empty else metrics.units(table)[_COLUMNS]
        return cls(units, prompts, baseline, similarity(rows))


def read(folder: Path) -> Pairs:
    """From the samples of a run, or from what ``condense`` kept of them.

    Raises:
        UserError: the folder has neither, or one that cannot be read.
    """
    if not (folder / PAIRS).is_file():
        return Pairs.of(run_folder.read_samples(folder))
    try:
        found = json.loads(gzip.decompress((folder / PAIRS).read_bytes()))
        baseline = {key: (int(tokens), str(digest)) for key, (tokens, digest) in found["baseline"].items()}
        return Pairs(pd.DataFrame(found["units"]).set_index("unit"), found["prompts"], baseline, found["similarity"])
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / PAIRS} is damaged ({error}). Restore it, or run again.") from error


def condense(folder: Path) -> bool:
    """Replace the samples of a finished run by ``pairs.json.gz``.

    Returns:
        False if that is done already.

    Raises:
        UserError: no finished run, records that are not sound, or another process writes them.
    """
    if (folder / PAIRS).is_file():
        return False
    if problems := run_folder.validate(folder):
        raise UserError(f"{folder} cannot be condensed: {problems[0]}. Name the folder of a finished run.")
    with run_folder.claimed(folder):
        pairs = read(folder)
        kept: dict[str, Any] = {
            "units": pairs.units.round(_NANOSECONDS).reset_index().to_dict("list"),
            "prompts": pairs.prompts,
            "baseline": pairs.baseline,
            "similarity": pairs.similarity,
        }
        files.atomic_write(folder / PAIRS, gzip.compress(json.dumps(kept, separators=(",", ":")).encode(), mtime=0))
        for name in (run_folder.SAMPLES, run_folder.PACKED):
            (folder / name).unlink(missing_ok=True)
    return True


def _digest(ids: Sequence[int]) -> str:
    return sha256(json.dumps(list(ids)).encode()).hexdigest()[:6]


def similarity(rows: Sequence[Sample]) -> float | None:
    """Mean ROUGE-L between the ids of both arms, over measured rows (first repeat); None without a prompt."""
    first = [row for row in rows if row.repeat == 0 and row.error is None]
    texts = {arm: {row.prompt_id: row.output_ids for row in first if row.arm == arm} for arm in ("method", "baseline")}
    both = texts["method"].keys() & texts["baseline"].keys()
    return sum(rouge_l(texts["baseline"][name], texts["method"][name]) for name in both) / len(both) if both else None
