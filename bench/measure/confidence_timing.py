"""``python -m bench.measure.confidence_timing method=calm ...``: the share of time spent on deciding whether to exit.

Decodes the first ``batch_size`` prompts of the given run once more, watched, and prints the figures as JSON. Nothing is
recorded; a calibrated threshold is not searched for (set ``method.threshold``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch

from bench.config import compose
from bench.errors import UserError
from bench.measure import run
from bench.tasks import prompts
from methods.early_exit.confidence_timing import ExitDecoder, confidence_share


def main(words: Sequence[str]) -> None:
    """Run the experiment for the settings of a run.

    Raises:
        UserError: the method has no exits, or the run is refused.
    """
    parts = run.prepare(compose.compose(words))
    method, shared = parts.method, parts.shared
    loaded, settings = shared.loaded, shared.settings
    if not isinstance(method, ExitDecoder):
        raise UserError(
            "method must be one with early exits (calm, free, static_depth, hash_ee, specee). Set method=calm."
        )
    asked = [shared.task.messages(example, 0, []) for example in shared.examples[: settings.batch_size]]
    rows = [torch.tensor(prompts.encode(loaded.tokenizer, each), device=loaded.lm.device) for each in asked]
    rng = torch.Generator(loaded.lm.device).manual_seed(settings.seed)
    print(json.dumps(confidence_share(method, rows, settings.limit, rng)))


if __name__ == "__main__":
    main(sys.argv[1:])
