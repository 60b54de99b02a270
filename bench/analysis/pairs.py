"""What tables and comparisons need of each prompt of a run, kept where its samples are not.

``condense`` replaces the samples of a finished run by ``pairs.json.gz``, a tenth of their size: seconds and tokens of
both arms per conversation, and of each prompt a digest and the length of the baseline's text. Texts and steps are gone.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd

from bench.analysis import metrics
from bench.errors import UserError
from bench.records import digests, run_folder
from bench.records.run_folder import PAIRS, Sample
from bench.scoring.rouge import rouge_l
from bench.utils import files

_COLUMNS = ["baseline_s", "method_s", "category", "baseline_tokens", "method_tokens", "repeated"]
_NANOSECONDS = 9  # decimals of seconds
_SHARES = 4  # decimals


@dataclass(frozen=True)
class Pairs:
    """The measured prompts of a run.

    Attributes:
        units: seconds and tokens of both arms, category and repeated share per conversation, see
            ``bench.analysis.metrics.units``; NaN where an older record has none.
        prompts: by id of a prompt, a digest of its tokens; empty for later turns, which quote answers.
        baseline: tokens and digest of the baseline's text, by prompt and repeat.
        similarity: mean ROUGE-L between the ids of both arms (first repeat); None without a prompt.
        texts: what is known of the baseline's texts, by prompt and repeat: ``repeated``, see
            ``bench.analysis.metrics.repeated_share``.
    """

    units: pd.DataFrame
    prompts: dict[str, str]
    baseline: dict[str, tuple[int, str]]
    similarity: float | None
    texts: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Pairs:
        """Derived from the samples of a run."""
        rows = [sample for sample in samples if sample.phase == "measure"]
        prompts = {row.prompt_id: _digest(row.prompt_ids) if row.turn == 1 else "" for row in rows}
        written = [row for row in rows if row.arm == "baseline"]
        baseline = {f"{row.prompt_id} {row.repeat}": (len(row.output_ids), _digest(row.output_ids)) for row in written}
        table = metrics.paired(metrics.frame(samples))
        known = [row for row in written if row.prompt_ids]
        texts = {
            f"{row.prompt_id} {row.repeat}": {
                "repeated": round(metrics.repeated_share(row.prompt_ids, row.output_ids), _SHARES)
            }
            for row in known
        }
        return cls(metrics.units(table)[_COLUMNS], prompts, baseline, similarity(rows), texts)

    def packed(self) -> bytes:
        """The content of pairs.json.gz."""
        units = self.units.round(_NANOSECONDS).reset_index().astype(object)
        kept: dict[str, Any] = {
            "units": units.where(units.notna(), None).to_dict("list"),
            "prompts": self.prompts,
            "baseline": self.baseline,
            "similarity": self.similarity,
            "texts": self.texts,
        }
        return gzip.compress(json.dumps(kept, separators=(",", ":")).encode(), mtime=0)


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
        units = pd.DataFrame(found["units"]).set_index("unit").reindex(columns=_COLUMNS)
        return Pairs(units, found["prompts"], baseline, found["similarity"], found.get("texts", {}))
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
    manifest = {} if not folder.is_dir() else run_folder.read_manifest(folder) or {}
    if problems := [*run_folder.validate(folder), *digests.changed(folder, manifest)]:
        raise UserError(f"{folder} cannot be condensed: {problems[0]}. Name the folder of a finished run.")
    with run_folder.claimed(folder):
        files.atomic_write(folder / PAIRS, read(folder).packed())
        for name in (run_folder.SAMPLES, run_folder.PACKED):
            (folder / name).unlink(missing_ok=True)
        if run_folder.DIGEST in manifest:
            files.atomic_write(folder / run_folder.MANIFEST, digests.resealed(folder, manifest))
    return True


def _digest(ids: Sequence[int]) -> str:
    return sha256(json.dumps(list(ids)).encode()).hexdigest()[:6]


def similarity(rows: Sequence[Sample]) -> float | None:
    """Mean ROUGE-L between the ids of both arms, over measured rows (first repeat); None without a prompt."""
    first = [row for row in rows if row.repeat == 0 and row.error is None]
    texts = {arm: {row.prompt_id: row.output_ids for row in first if row.arm == arm} for arm in ("method", "baseline")}
    both = texts["method"].keys() & texts["baseline"].keys()
    return sum(rouge_l(texts["baseline"][name], texts["method"][name]) for name in both) / len(both) if both else None
