"""The speed-up of a run over equal lengths: each prompt is timed up to the end of the shorter of its two texts.

Rounding sends the texts of EXACT methods apart in 16 bit, and then one of them may end earlier. The headline corrects
that by counting seconds per token; here no token counts that only one arm wrote.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.records.run_folder import Sample


def speedup(samples: Sequence[Sample]) -> float | None:
    """Seconds of the baseline over those of the method, up to the end of the shorter text of every prompt and repeat.

    A round that passes that end counts by its share of tokens. None without a prompt that both arms decoded, and for
    rows of a batch, whose rounds are not their own.
    """
    measured = [sample for sample in samples if sample.phase == "measure" and sample.error is None]
    arms = {arm: {(s.prompt_id, s.repeat): s for s in measured if s.arm == arm} for arm in ("baseline", "method")}
    shared = arms["baseline"].keys() & arms["method"].keys()
    if not shared or any(sample.batch_size > 1 or sample.queue for sample in measured):
        return None
    spent = dict.fromkeys(arms, 0.0)
    for key in shared:
        tokens = min(found[key].n_output_tokens for found in arms.values())
        for arm, found in arms.items():
            spent[arm] += _seconds(found[key], tokens)
    return spent["baseline"] / spent["method"] if spent["method"] else None


def _seconds(sample: Sample, tokens: int) -> float:
    """Until so many tokens of a text were written."""
    written, ended_ns = np.cumsum([0, *sample.step_tokens]), np.cumsum([0, *sample.step_ns])
    return float(np.interp(tokens, written, ended_ns)) / 1e9
