"""A process of a target on several devices that is not the first: ``bench.models.parallel`` starts it.

Command: ``python -m bench.models.follower JSON``, of the groups of the configuration and the place where all meet.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from bench.config.schema import PathsConfig
from bench.errors import UserError
from bench.models import loading, parallel
from methods.engine.tensor_parallel import PartLM, follow


def _follow(given: Mapping[str, Any]) -> None:
    """The life of a process that is not the first."""
    if (threads := given["hardware"].get("threads")) is not None:
        torch.set_num_threads(threads)
    paths = PathsConfig(**given["paths"])
    device, _ = loading.resolve_hardware(given["hardware"])
    devices = parallel.meet(given["rank"], given["size"], Path(given["meeting"]), device)
    try:
        model = loading.read_part(given["model"], given["hardware"], paths, devices).model
    except (UserError, ValueError):  # the first process says so
        os._exit(0)
    lm = PartLM.of(model, devices, given["hardware"].get("linear", "auto"))
    with suppress(RuntimeError):  # the first process is gone
        follow(lm)
    os._exit(0)  # without waiting for the groups, whose other end may be gone


if __name__ == "__main__":
    _follow(json.loads(sys.argv[1]))
